# SPDX-License-Identifier: Apache-2.0

"""A process that goes on when another one is killed.

It had the repository open before, and has in memory what it read then:
fingerprint stores, segments, descriptors. The other process's operations until
it was killed are done again, record by record, to the files that it has open.
"""

import contextlib
import hashlib
import os

from tests.crash.expected_state import make
from tests.crash import filesystem
from tests.crash import record
from tests.support import repositories

Kind = record.Kind
BLOCK = 512


class Replay:
    """Applies a journal to a real tree.

    :param fs: the FileSystem of which the tree was made, with nothing lost
    """

    def __init__(self, fs, top):
        self._open = {}
        paths = {made: path for path, made in fs.paths()}
        for inode, made in fs.inodes.items():
            if made in paths:
                self._open[inode] = os.open(
                    os.path.join(top, paths[made]), os.O_RDONLY
                    if isinstance(made, filesystem.Directory) else os.O_RDWR)

    def close(self):
        for fd in set(self._open.values()):
            os.close(fd)

    def feed(self, made):
        kind = made.kind
        if kind in (Kind.MARK, Kind.SYNC):
            return
        dir_fd = self._open.get(made.dir)
        fd = self._open.get(made.inode)
        if kind is Kind.CREATE:
            self._open[made.inode] = os.open(
                made.name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600,
                dir_fd=dir_fd)
        elif kind is Kind.MKDIR:
            # The survivor itself makes directories for slices.
            with contextlib.suppress(FileExistsError):
                os.mkdir(made.name, 0o700, dir_fd=dir_fd)
            self._open[made.inode] = os.open(
                made.name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=dir_fd)
        elif kind is Kind.LINK:
            os.link(f'/proc/self/fd/{fd}', made.name, dst_dir_fd=dir_fd,
                    follow_symlinks=True)
        elif kind is Kind.RENAME:
            os.rename(made.name, made.other, src_dir_fd=dir_fd,
                      dst_dir_fd=self._open[made.other_dir])
        elif kind is Kind.UNLINK:
            try:
                os.unlink(made.name, dir_fd=dir_fd)
            except IsADirectoryError:
                os.rmdir(made.name, dir_fd=dir_fd)
        elif kind is Kind.WRITE:
            os.pwrite(fd, made.data, made.offset)
        elif kind is Kind.TRUNCATE:
            os.ftruncate(fd, made.length)
        elif kind is Kind.ALLOCATE:
            os.ftruncate(fd, max(made.length, os.fstat(fd).st_size))
        else:
            assert kind is Kind.PUNCH, made
            length = min(made.length,
                         max(0, os.fstat(fd).st_size - made.offset))
            os.pwrite(fd, bytes(length), made.offset)


def remember(repo, contents):
    """Have the survivor read all images, and all fingerprint stores."""
    for image in repo.images():
        with contextlib.suppress(Exception):
            repositories.read_all(repo, image)
    with repo.begin('remembering') as transaction:
        for data in contents:
            blocks = [data[at:at + BLOCK]
                      for at in range(0, len(data), BLOCK)]
            transaction.find(
                b''.join(hashlib.sha256(b).digest() for b in blocks),
                b''.join(len(b).to_bytes(4, 'little') for b in blocks))
        transaction.abort()


def go_on(repo, expectation, specs):
    """Store all earlier contents again, in the survivor."""
    for number, spec in enumerate(specs):
        image = f'survivor-{number}'
        repositories.put(repo, image, make(spec))
        expectation.stored(image, spec)
