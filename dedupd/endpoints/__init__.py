# SPDX-License-Identifier: Apache-2.0

"""The interfaces of the daemon: HTTP and messages."""
