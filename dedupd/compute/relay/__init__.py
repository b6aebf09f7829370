# SPDX-License-Identifier: Apache-2.0

"""The process ``dedupd-relay``, which Nova asks in place of the cache."""
