# SPDX-License-Identifier: Apache-2.0

"""The directory of a file store of Glance: one file for each image.

Glance's file driver keeps an image in the directory itself, under its id. It
writes uploads there directly, so a file may be half an upload; only Glance
knows.
"""

import dataclasses
import os

from glance_dedup.base import imageids


@dataclasses.dataclass(frozen=True)
class Entry:
    """An image's file in the file store."""

    image_id: str
    path: str
    size: int


def listing(directory: str) -> tuple[list[Entry], list[tuple[str, str]]]:
    """The images of a file store, sorted by id, and everything else there.

    :returns: the images, and for each other path a pair: the path, and why it
        is no image
    :raises OSError: the directory cannot be read
    """
    entries, others = [], []
    with os.scandir(directory) as found:
        for item in sorted(found, key=lambda item: item.name):
            if not item.is_file(follow_symlinks=False):
                others.append((item.path, 'it is not an ordinary file'))
            elif not imageids.is_glances(item.name):
                others.append((item.path, "its name is not an image's id"))
            else:
                entries.append(Entry(
                    item.name, item.path,
                    item.stat(follow_symlinks=False).st_size))
    return entries, others
