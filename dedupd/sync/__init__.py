# SPDX-License-Identifier: Apache-2.0

"""Follows other hosts, another site, and names in Glance."""
