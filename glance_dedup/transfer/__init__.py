# SPDX-License-Identifier: Apache-2.0

"""Images on their way between repositories."""
