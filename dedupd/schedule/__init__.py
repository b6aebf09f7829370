# SPDX-License-Identifier: Apache-2.0

"""The maintainer's thread, its queue and its conditions."""
