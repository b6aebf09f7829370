# SPDX-License-Identifier: Apache-2.0

"""The images that a damaged byte may cost, by the format alone."""

import os
import pathlib

from glance_dedup.base import imageids
from tests.damage import template
from tests.support import maintenance
from tests.support import repositories

PAGE = repositories.PAGE
END = 1 << 40


class Oracle:
    """The oracle of a repository that is intact."""

    def __init__(self, path):
        self._path = pathlib.Path(path)
        self._images = {image_id: self.blocks_of(image_id)
                        for image_id in sorted(os.listdir(path / 'images'))}
        self._inodes = {os.stat(path / 'images' / i).st_ino: i
                        for i in self._images}
        self._groups = {f'groups/{number:08x}': self._parts(number)
                        for number in maintenance.groups(path)}

    def blocks_of(self, image_id):
        """Return all addresses that a recipe names."""
        data = (self._path / 'images' / image_id).read_bytes()
        blocks = set()
        for at in range(PAGE, len(data), PAGE):
            count = int.from_bytes(data[at + 4:at + 8], 'little')
            for extent in range(at + 8, at + 8 + 40 * count, 40):
                group, slot, n = (int.from_bytes(
                    data[extent + i:extent + i + 4], 'little')
                    for i in (16, 20, 24))
                blocks.update((group, slot + i) for i in range(n))
        return blocks

    def _parts(self, number):
        """Yield (start, end, shortest, images) of all parts that images need.

        Nothing of a segment that is cut short can be read: `shortest` is the
        minimum length of the file.
        """
        group = repositories.Group(self._path, number)
        users = {}
        for image_id, blocks in self._images.items():
            for named, slot in blocks:
                if named == number:
                    users.setdefault(slot, set()).add(image_id)
        everyone = set().union(*users.values()) if users else set()
        parts = [(0, 512, 512, everyone)]
        for slot, images in users.items():
            at = group.entry_offset(slot)
            parts.append((at, at + 56, at + 56, images))
            _, _, segment, place = group.entry(slot)
            last = segment + 32 + (place >> 37 & 0x1fffff)
            packed = segment + 32 + group.list_size(segment)
            parts.append((segment, packed, last, images))
            if place >> 58 & 3 == 0:
                offset, length = place & 0xfffff, place >> 20 & 0x1ffff
                at = packed + offset
                parts.append((at, at + length, last, images))
            else:
                parts.append((packed, last, last, images))
        return parts

    def hit(self, name, start=0, end=END):
        """Return the images that need bytes of a file to be readable.

        The volume is one of them.

        :param end: END: the file has no more than `start` bytes
        """
        return sorted({
            template.VOLUME if imageids.of_volume(image_id) else image_id
            for image_id in self._hit(name, start, end)})

    def _hit(self, name, start, end):
        if name.startswith('volumes'):
            return [template.VOLUME]
        if name in self._groups:
            return sorted(set().union(
                *(images for first, last, shortest, images
                  in self._groups[name]
                  if first < end and start < (
                      shortest if end == END else last))))
        if name.startswith(('images/', 'spool/')):
            inode = os.stat(self._path / name).st_ino
            return [self._inodes[inode]] if inode in self._inodes else []
        if name in ('repository.json', 'key', 'images', 'groups', 'spool',
                    'locks', 'locks/groups', 'locks/images', 'features'):
            return [*sorted(self._images), template.VOLUME]
        return []
