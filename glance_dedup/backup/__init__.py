# SPDX-License-Identifier: Apache-2.0

"""Backups of many servers' disks at once, by many hosts."""
