# SPDX-License-Identifier: Apache-2.0

"""The HTTP server, and its requests to Glance."""
