# SPDX-License-Identifier: Apache-2.0

"""The inputs that are kept of each fuzz target: ``corpus/TARGET.tar.xz``.

::

    python -m tests.fuzz.corpus add TARGET FILE...
    python -m tests.fuzz.corpus extract TARGET DIRECTORY

An input that showed a bug has a name that says which; the others have that of
their hash. Equal inputs make equal archives: they are sorted, and have no
times and no owners.
"""

import io
import lzma
import pathlib
import sys
import tarfile

CORPUS = pathlib.Path(__file__).resolve().parent / 'corpus'
_ENDING = '.tar.xz'


def targets():
    return sorted(path.name.removesuffix(_ENDING)
                  for path in CORPUS.glob(f'*{_ENDING}'))


def read(target):
    """Return the inputs of a target, by name."""
    path = CORPUS / (target + _ENDING)
    try:
        # Decompress as a whole, or the checksum at the end is not verified.
        content = lzma.decompress(path.read_bytes())
    except lzma.LZMAError as exc:
        raise ValueError(f'{path} is damaged ({exc}); restore it with git '
                         'checkout') from None
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return {member.name: archive.extractfile(member).read()
                for member in archive}


def write(target, inputs):
    with tarfile.open(CORPUS / (target + _ENDING), 'w:xz') as archive:
        for name, content in sorted(inputs.items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def add(target, *files):
    inputs = read(target) if target in targets() else {}
    write(target, inputs | {path.name: path.read_bytes()
                            for path in map(pathlib.Path, files)})


def extract(target, directory):
    """Write each input into a file of a new directory."""
    directory = pathlib.Path(directory)
    directory.mkdir()
    for name, content in read(target).items():
        (directory / name).write_bytes(content)


if __name__ == '__main__':
    if len(sys.argv) < 4 or sys.argv[1] not in ('add', 'extract'):
        sys.exit(__doc__)
    {'add': add, 'extract': extract}[sys.argv[1]](*sys.argv[2:])
