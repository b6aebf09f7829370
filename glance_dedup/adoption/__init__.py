# SPDX-License-Identifier: Apache-2.0

"""Taking images over from Glance's file store, and giving them back."""
