# SPDX-License-Identifier: Apache-2.0

"""What only a repository's maintainer keeps: the catalog and its use."""
