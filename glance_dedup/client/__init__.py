# SPDX-License-Identifier: Apache-2.0

"""Clients of other programs: dedupd, NBD servers, and Glance."""
