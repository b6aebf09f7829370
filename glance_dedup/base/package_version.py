# SPDX-License-Identifier: Apache-2.0

"""The version of the installed package."""

import functools
import glob
import os
import sys


@functools.cache
def version() -> str:
    """The package's version; '(not installed)' if there is no package."""
    for directory in sys.path:
        for path in glob.iglob('glance_dedup-*.dist-info/METADATA',
                               root_dir=directory or '.'):
            with open(os.path.join(directory, path),
                      encoding='utf-8') as file:
                for line in file:
                    if line.startswith('Version: '):
                        return line.removeprefix('Version: ').strip()
    return _look_up()


def _look_up() -> str:
    """The same of a package that was installed in another form."""
    # It takes 2.4 MB of memory, which ranks and counters do not have.
    import importlib.metadata
    try:
        return importlib.metadata.version('glance-dedup')
    except importlib.metadata.PackageNotFoundError:
        return '(not installed)'
