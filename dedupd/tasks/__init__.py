# SPDX-License-Identifier: Apache-2.0

"""The tasks of the maintainer."""
