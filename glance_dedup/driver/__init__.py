# SPDX-License-Identifier: Apache-2.0

"""The glance_store driver."""
