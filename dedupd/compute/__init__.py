# SPDX-License-Identifier: Apache-2.0

"""The programs of compute hosts: cache, relay, mount."""
