# SPDX-License-Identifier: Apache-2.0

"""The version of the installed package."""

import functools
import importlib.metadata


@functools.cache
def version() -> str:
    """The package's version; '(not installed)' if there is no package."""
    try:
        return importlib.metadata.version('glance-dedup')
    except importlib.metadata.PackageNotFoundError:
        return '(not installed)'
