# SPDX-License-Identifier: Apache-2.0

"""The modules of a repository's maintainer: the catalog and its use."""
