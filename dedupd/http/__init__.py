# SPDX-License-Identifier: Apache-2.0

"""The HTTP server, and what it asks of Keystone and Glance."""
