# SPDX-License-Identifier: Apache-2.0

"""Have the files of a directory share equal blocks, by FIDEDUPERANGE.

A pass as thorough as one can be on a file system that shares ranges of blocks
(XFS, btrfs): each block of 4 KiB is shared with the first that equals it. For
``benchmarks/peers.py``::

    python benchmarks/dedupe_ranges.py DIR
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import struct

import images

FIDEDUPERANGE = 0xc0189436
#: Source: offset, length, number of targets; a target: descriptor, offset.
REQUEST = struct.Struct('=QQHHLqQQlL')
MAX_LENGTH = 16 << 20  #: bytes that a file system shares at once
BLOCK = images.BLOCK


class Sharer:
    def __init__(self):
        self.first = {}  #: by digest: descriptor and offset
        self.shared = 0

    def add(self, fd: int, path: str) -> None:
        """Share a file's blocks with those of earlier files, and its own."""
        run = None
        for offset, piece in images.pieces(path):
            for i in range(0, len(piece) - BLOCK + 1, BLOCK):
                block = piece[i:i + BLOCK]
                digest = hashlib.sha1(block, usedforsecurity=False).digest()
                found = self.first.setdefault(digest, (fd, offset + i))
                run = self.extended(run, found, fd, offset + i)
        self.share(run)

    def extended(self, run, found, fd, offset):
        """Return the run of blocks to be shared, a block later."""
        source, start = found
        if run is not None:
            a, b, c, length = run
            if (source, start, offset) == (a, b + length, c[1] + length) and (
                    length < MAX_LENGTH):
                return a, b, c, length + BLOCK
            self.share(run)
        if found == (fd, offset):
            return None
        return source, start, (fd, offset), BLOCK

    def share(self, run) -> None:
        if run is None:
            return
        source, start, (target, offset), length = run
        request = bytearray(REQUEST.pack(start, length, 1, 0, 0, target,
                                         offset, 0, 0, 0))
        with contextlib.suppress(OSError):  # of ranges that overlap
            fcntl.ioctl(source, FIDEDUPERANGE, request)
            self.shared += REQUEST.unpack(request)[7]


def main():
    parser = argparse.ArgumentParser(
        description='have files share equal blocks')
    parser.add_argument('directory', metavar='DIR')
    args = parser.parse_args()
    sharer = Sharer()
    with contextlib.ExitStack() as stack:
        for name in sorted(os.listdir(args.directory)):
            path = os.path.join(args.directory, name)
            f = stack.enter_context(open(path, 'r+b'))
            sharer.add(f.fileno(), path)
    print(f'{sharer.shared >> 20} MiB shared')


if __name__ == '__main__':
    main()
