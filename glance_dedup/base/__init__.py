# SPDX-License-Identifier: Apache-2.0

"""The modules that every part of the project uses; they use no other part."""
