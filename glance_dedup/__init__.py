# SPDX-License-Identifier: Apache-2.0

"""An image store for OpenStack Glance that keeps every distinct block once."""
