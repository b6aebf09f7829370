# SPDX-License-Identifier: Apache-2.0

"""Answers of the mount for Nova to the kernel.

It is the mount of ``glance-dedup image mount``, with two differences. Nova
sets the times of a base image that it uses, and removes those of old times:
they can be set, and are remembered. A file takes no space of Nova's: it has
one block, since a file without any counts as a hole for archivers.
"""

import errno
import os

import pyfuse3

from dedupd.compute.novabase import image_contents
from glance_dedup import fuse_operations

_BLOCK = 512


class Operations(fuse_operations.Operations):
    """Those of :class:`fuse_operations.Operations`, with the differences."""

    _source: image_contents.Contents

    def _file(self, inode: int, facts: fuse_operations.Facts
              ) -> pyfuse3.EntryAttributes:
        entry = super()._file(inode, facts)
        entry.st_blocks = min(1, -(-facts.size // _BLOCK))
        entry.st_atime_ns, entry.st_mtime_ns = self._source.times(
            facts.image_id)
        entry.st_ctime_ns = entry.st_mtime_ns
        return entry

    async def setattr(self, inode, attr, fields, fh, ctx):
        if (inode == pyfuse3.ROOT_INODE or fields.update_mode
                or fields.update_uid or fields.update_gid
                or fields.update_size):
            # libvirt takes this for a file whose owner cannot be changed.
            raise pyfuse3.FUSEError(errno.EPERM)
        facts = self._inodes.facts(inode)
        read, changed = self._source.times(facts.image_id)
        if fields.update_atime:
            read = attr.st_atime_ns
        if fields.update_mtime:
            changed = attr.st_mtime_ns
        self._source.set_times(facts.image_id, (read, changed))
        return self._file(inode, facts)

    async def open(self, inode, flags, ctx):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_APPEND):
            raise pyfuse3.FUSEError(errno.EROFS)
        return await super().open(inode, flags, ctx)

    async def _refuse(self, *args):
        raise pyfuse3.FUSEError(errno.EROFS)

    create = link = mkdir = mknod = rename = rmdir = symlink = unlink = (
        _refuse)
