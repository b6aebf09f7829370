# SPDX-License-Identifier: Apache-2.0

"""Backups of a repository's metadata, and restoring from them (cold.rst)."""
