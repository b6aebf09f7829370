# SPDX-License-Identifier: Apache-2.0

"""Objects of an object store, for cold groups."""
