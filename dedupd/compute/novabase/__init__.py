# SPDX-License-Identifier: Apache-2.0

"""The links in Nova's image cache, and the mount to which they lead."""
