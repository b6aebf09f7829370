# SPDX-License-Identifier: Apache-2.0

"""The process ``dedupd-relay``, which gets Nova's requests for the cache."""
