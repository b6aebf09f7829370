# SPDX-License-Identifier: Apache-2.0

"""The second implementation of the format, which judges the first."""
