# SPDX-License-Identifier: Apache-2.0

"""The log, systemd, and reports of a process's activity."""
