# SPDX-License-Identifier: Apache-2.0

"""Spool entries and views that the tests of accounting use."""

import os

from tests.support import maintenance


def figures(result):
    return (result.counted, result.uncounted, result.removed, result.left)


def spool(path, kind=''):
    return sorted(name for name in os.listdir(path / 'spool')
                  if name.startswith(kind))


def make_entry(path, image_id, kind='D'):
    """Add the entry that an unfinished delete or merge leaves."""
    name = f'{kind}-{os.urandom(16).hex()}'
    os.link(path / 'images' / image_id, path / 'spool' / name)
    return name


def kill_it():
    raise maintenance.Killed
