# SPDX-License-Identifier: Apache-2.0

"""The daemon's status: figures, problems, history, page."""
