# SPDX-License-Identifier: Apache-2.0

"""A repository as Python sees it: images in, images out."""
