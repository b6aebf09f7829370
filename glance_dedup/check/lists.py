# SPDX-License-Identifier: Apache-2.0

"""The lists of images and tasks that daemons keep in a repository.

No image is worse for it if a list is no good, so a bad one is a *note*.
"""

from glance_dedup.check import json_objects
from glance_dedup.check import ondisk
from glance_dedup.check import repo_directories


def check(directories: repo_directories.Directories) -> None:
    """Report the lists that cannot be read."""
    for name, (kind, what, longest) in ondisk.LISTS.items():
        with directories.reported(ondisk.NOTE, name):
            _parse(directories.read(name, longest + 1), kind, what, longest)


def _parse(text: bytes, kind: str, what: str, longest: int) -> None:
    if not text:
        return      # it was just made, or is to be begun
    if len(text) > longest:
        raise ondisk.Damage(f'is longer than {longest} bytes')
    found = json_objects.load(text, kind)
    if found.get('version') != 1:
        version = ondisk.printable(str(found.get('version')))
        raise ondisk.Damage(f'has version {version}; this program reads 1')
    json_objects.require_checksum(found)
    entries = found.get(what)
    if not isinstance(entries, list) or not all(
            isinstance(entry, dict) for entry in entries):
        raise ondisk.Damage(f'has no list of {what}')
