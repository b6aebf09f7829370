# SPDX-License-Identifier: Apache-2.0

"""Fetch Linux sources as tar files, and count their equal blocks.

Run it from a checkout, on Debian; it needs dpkg-deb and xz::

    python benchmarks/papers/kernels.py DIR PACKAGE=VERSION...

apt downloads each package into DIR, and the tar file in it stays there, not
compressed: 1.4 GB for each of, say, ``linux-source-6.1=6.1.170-3``.
``apt-cache policy linux-source-6.1`` lists the versions that a mirror has. A
tar file that is there already is not fetched again. Then the table says how
many blocks of 4 KiB there are for each different one.

After Mandal, "Design and Implementation of an Open-Source Deduplication
Platform for Research", 2015, section 4.2: with Linux 2.6.0 to 2.6.39 it was
1.18 if tar aligns files to 512 bytes, as it does, and 1.88 if a changed tar
aligns them to 4096. Here :func:`blocks` does that: each header, and the bytes
of each file, are filled up to 4096 bytes with zeros.
"""

import argparse
from collections.abc import Iterator
import hashlib
import os
import subprocess
import sys
from typing import BinaryIO, NamedTuple

import _path  # noqa: F401  finds the modules beside it
from common import MIB

BLOCK = 4096
SECTOR = 512    # of tar
#: To what files are aligned; and the blocks for each different one, of
#: Dmdedup's authors.
ALIGNMENTS = {SECTOR: 1.18, BLOCK: 1.88}
LIMIT = 900     # seconds for any command


def tar_size(header: bytes) -> int:
    """Return the bytes that follow a header.

    :raises ValueError: it is no header of tar
    """
    field = header[124:136]
    if header[257:262] != b'ustar':
        raise ValueError('it is not a tar file')
    if field[0] & 0x80:
        return int.from_bytes(field[1:], 'big')
    return int(field.strip(b' \0') or b'0', 8)


def _members(tar: BinaryIO) -> Iterator[bytes]:
    """Yield headers, and pieces of files, without the zeros behind them."""
    while (header := tar.read(SECTOR)).strip(b'\0'):
        left = tar_size(header)
        fill = -left % SECTOR
        yield header
        while left:
            piece = tar.read(min(left, MIB))
            if not piece:
                raise ValueError('the tar file is too short')
            left -= len(piece)
            yield piece
        tar.read(fill)


def blocks(tar: BinaryIO, alignment: int) -> Iterator[bytes]:
    """Yield a tar file's blocks of 4 KiB.

    :param alignment: of its files
    :raises ValueError: it is no tar file
    """
    pieces = (_members(tar) if alignment == BLOCK
              else iter(lambda: tar.read(MIB), b''))
    for piece in pieces:
        for at in range(0, len(piece), BLOCK):
            yield piece[at:at + BLOCK].ljust(BLOCK, b'\0')


def ids(path: str, alignment: int) -> Iterator[bytes]:
    """Yield the MD5 of each block of a tar file; zeros for a block of zeros.

    :raises SystemExit: it is no tar file
    """
    zeros = bytes(BLOCK)
    with open(path, 'rb') as tar:
        try:
            for block in blocks(tar, alignment):
                yield (bytes(16) if block == zeros else
                       hashlib.md5(block, usedforsecurity=False).digest())
        except ValueError as e:
            raise SystemExit(f'{path}: {e}') from None


class Count(NamedTuple):
    """Blocks of tar files."""

    written: int
    different: int


def count(paths: list[str], alignment: int) -> Count:
    """Count the blocks of tar files."""
    found: set[bytes] = set()
    written = 0
    for number, path in enumerate(paths):
        print(f'counting tar file {number + 1} of {len(paths)}, files at '
              f'multiples of {alignment}', file=sys.stderr)
        for block in ids(path, alignment):
            written += 1
            found.add(block)
    return Count(written, len(found))


def show(paths: list[str]) -> None:
    """Print the number of blocks for each different one."""
    print(f'\n{len(paths)} tar files, blocks of {BLOCK}\n'
          f'{"files aligned to":>16}{"MiB":>10}{"kept, MiB":>12}'
          f'{"blocks for each different one":>31}{"Linux 2.6.0-39":>16}')
    for alignment, theirs in ALIGNMENTS.items():
        found = count(paths, alignment)
        mib = [n * BLOCK / MIB for n in found]
        print(f'{alignment:>16}{mib[0]:10,.0f}{mib[1]:12,.0f}'
              f'{found.written / max(1, found.different):31.2f}'
              f'{theirs:16.2f}', flush=True)


# -- packages -----------------------------------------------------------------

def _run(*command: str, cwd: str) -> None:
    done = subprocess.run(command, cwd=cwd, timeout=LIMIT,
                          stdin=subprocess.DEVNULL, stdout=sys.stderr)
    if done.returncode:
        raise SystemExit(f'{command[0]} failed')


def fetch(directory: str, package: str) -> str:
    """Have the tar file of a package in a directory; return its path.

    :param package: name=version
    """
    name, _, version = package.partition('=')
    target = os.path.join(directory, f'{name}-{version}.tar')
    if not os.path.exists(target):
        print(f'fetching {package}', file=sys.stderr)
        _run('apt-get', '-q', 'download', package, cwd=directory)
        deb = next(entry.path for entry in os.scandir(directory)
                   if entry.name.startswith(f'{name}_{version}_'))
        _run('sh', '-c', 'dpkg-deb --fsys-tarfile "$1" | tar -xO --wildcards '
             '"./usr/src/*.tar.xz" | xz -dc > "$2.new" && mv "$2.new" "$2"',
             'sh', deb, target, cwd=directory)
        os.unlink(deb)
    return target


def main() -> None:
    """Fetch, and count."""
    parser = argparse.ArgumentParser(
        description='Fetch Linux sources as tar files, and count their equal '
                    'blocks.')
    parser.add_argument('directory', metavar='DIR', type=os.path.abspath)
    parser.add_argument('packages', metavar='PACKAGE=VERSION', nargs='+')
    args = parser.parse_args()
    if not all('=' in package for package in args.packages):
        parser.error('name each package with its version')
    show([fetch(args.directory, package) for package in args.packages])


if __name__ == '__main__':
    main()
