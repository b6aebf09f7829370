# SPDX-License-Identifier: Apache-2.0

"""Make repositories with very many blocks, for measuring their costs.

Run it from a checkout; gcc and the engine's libraries are needed::

    python benchmarks/synthetic.py DIRECTORY BLOCKS [--images N] [--data]

The groups, their headers, records and fingerprint stores, and the recipes are
real ones. The blocks themselves are not there, unless ``--data`` is given: a
group's file has holes in their place. So 100 million blocks, 400 GB of images,
take 5.6 GB of the disk, and about a minute. Other programs may use
:func:`make`, and :func:`fingerprint` for the stored fingerprints.
"""

import argparse
from collections.abc import Callable
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from glance_dedup.repository import image_repository  # noqa: E402

ENGINE = HERE.parent / 'glance_dedup' / 'engine'
LIBRARIES = ('-lcrypto', '-lxxhash', '-llz4', '-lzstd', '-lz',
             '-lpthread')


def content(i: int, size: int = 4096) -> bytes:
    """The bytes of block i."""
    return (i + 1).to_bytes(8, 'little') * (size // 8)


def fingerprint(i: int, data: bool = False, size: int = 4096) -> bytes:
    """Return block i's fingerprint, in a repository whose digest is sha256."""
    return hashlib.sha256(content(i, size if data else 8)).digest()


def address(i: int, slots: int = 32768) -> tuple[int, int]:
    """The group and the slot of block i."""
    return i // slots + 1, i % slots


def image_id(number: int) -> str:
    """The id of an image, from 0."""
    return f'synthetic-{number}'


def build(directory: str, name: str = 'synthetic', *more: str) -> str:
    """Compile a program with the engine: the writer, or another.

    :param more: further files of it, without their ending
    :returns: its path
    """
    program = os.path.join(directory, name)
    subprocess.run(
        ['gcc', '-std=c11', '-D_GNU_SOURCE', '-O2', '-Wall', '-Wextra',
         '-Werror', f'-I{ENGINE.parent}', f'-I{HERE.parent}',
         *(next(HERE.rglob(f'{n}.c')) for n in (name, *more)),
         *sorted(ENGINE.glob('*/*.c')), '-o', program, *LIBRARIES],
        check=True, timeout=300)
    return program


def make(path: str | os.PathLike, blocks: int, *, images: int = 0,
         data: bool = False, program: str | None = None,
         progress: Callable[[int, int], None] | None = None,
         **parameters) -> None:
    """Make a repository with so many blocks, on the disk when it returns.

    :param images: so many have the blocks, each as many as the others, in
        order. With 0 no image names a block
    :param data: store the blocks, too. Without, nothing may read them
    :param program: what :func:`build` returned; None: it is built, and removed
    :param progress: called with the blocks written so far, and all
    :param parameters: as :meth:`Repository.create` takes them; the block size
        must divide 1 MiB, as the default does
    """
    if not 0 <= images <= blocks:
        raise ValueError(f'{images} images cannot have {blocks} blocks')
    image_repository.Repository.create(path, **parameters)
    with image_repository.Repository(path) as repo:
        is_ = repo.parameters
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.Popen(
            [program or build(directory), path, is_.repository_id,
             str(is_.block_size), str(is_.group_slots), str(is_.segment_size),
             is_.fingerprint, str(blocks), str(images), str(int(data))],
            stdout=subprocess.PIPE, text=True)
        with process:
            for line in process.stdout:
                if progress is not None:
                    progress(int(line), blocks)
    if process.returncode != 0:
        raise RuntimeError(f'{path} could not be filled')


def main() -> None:
    parser = argparse.ArgumentParser(
        description='Make a repository with very many blocks.')
    parser.add_argument('directory')
    parser.add_argument('blocks', type=int)
    parser.add_argument('--images', type=int, default=0,
                        help='how many images have them (default: none)')
    parser.add_argument('--data', action='store_true',
                        help='store the blocks, too')
    args = parser.parse_args()

    def progress(done: int, total: int) -> None:
        print(f'\r{done:,} of {total:,} blocks', end='', file=sys.stderr)

    make(args.directory, args.blocks, images=args.images, data=args.data,
         progress=progress)
    print(file=sys.stderr)


if __name__ == '__main__':
    main()
