# SPDX-License-Identifier: Apache-2.0

"""Tar files are counted as they are, and with files aligned to blocks."""

import io
import random
import tarfile

import pytest

from tests.benchmarks import papers

pytestmark = pytest.mark.long

BLOCK = 4096
FILE = random.Random(1).randbytes(5000)


kernels = papers.fixture('kernels')


@pytest.fixture
def paths(tmp_path):
    """Two tar files with the same file behind ones of different lengths."""
    found = []
    for number, before in enumerate((100, 700)):
        path = tmp_path / f'{number}.tar'
        with tarfile.open(path, 'w', format=tarfile.GNU_FORMAT) as tar:
            for name, data in (('a' * 150, bytes([number]) * before),
                               ('same', FILE), ('empty', b'')):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        found.append(str(path))
    return found


def test_the_blocks_of_a_tar_file(kernels, paths):
    with open(paths[0], 'rb') as tar:
        found = list(kernels.blocks(tar, 512))
    with open(paths[0], 'rb') as tar:
        assert b''.join(found) == tar.read().ljust(BLOCK * len(found), b'\0')
    assert {len(block) for block in found} == {BLOCK}


def test_aligned_files(kernels, paths):
    """A long name is a header and a file of its own."""
    with open(paths[0], 'rb') as tar:
        found = list(kernels.blocks(tar, BLOCK))
    assert {len(block) for block in found} == {BLOCK}
    assert [block.rstrip(b'\0')[:4] for block in found] == [
        b'././', b'aaaa', b'aaaa', b'', b'same', FILE[:4],
        FILE[BLOCK:BLOCK + 4], b'empt']
    assert found[5] + found[6] == FILE.ljust(2 * BLOCK, b'\0')


def test_aligned_files_are_found_again(kernels, paths):
    # Of the second file, both headers of the first name, the name itself, and
    # the whole of "same" and "empty" are there already, but its own header and
    # bytes of the first file are not.
    assert kernels.count(paths, BLOCK) == (16, 10)
    assert kernels.count(paths[:1] * 2, BLOCK) == (16, 8)
    assert kernels.count(paths, 512) == (6, 6)


@pytest.mark.parametrize('damage', ['short', 'other'])
def test_no_tar_file(kernels, paths, damage):
    with open(paths[0], 'r+b') as tar:
        if damage == 'short':
            tar.truncate(3000)
        else:
            tar.write(bytes(range(256)) * 2)
    with pytest.raises(SystemExit, match='tar file'):
        kernels.count(paths, BLOCK)


def test_sizes(kernels):
    header = bytearray(512)
    header[257:262] = b'ustar'
    header[124:136] = b'00000001750\0'
    assert kernels.tar_size(header) == 1000
    header[124:136] = b'\x80' + (9 << 30).to_bytes(11, 'big')
    assert kernels.tar_size(header) == 9 << 30
