# SPDX-License-Identifier: Apache-2.0

"""The cache of a compute host."""
