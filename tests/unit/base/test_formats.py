# SPDX-License-Identifier: Apache-2.0

"""Images that cannot share blocks are recognised; hostile ones do no harm."""

import bz2
import gzip
import lzma
import random
import struct
import subprocess

import lz4.frame
import pytest
import zstandard

from glance_dedup.base import formats
from tests.support.repositories import noise

pytestmark = pytest.mark.needs('qemu')

MIB = 1 << 20


def text(length, seed):
    return (noise(length // 2 + 1, seed).hex().encode())[:length]


def advice(path):
    content = path.read_bytes()
    found = formats.advice(
        lambda length, offset: content[offset:offset + length])
    assert formats.shares_nothing(memoryview(content)) == (found is not None)
    return found


def convert(source, target, *options):
    subprocess.run(['qemu-img', 'convert', '-f', 'raw', *options, source,
                    target], check=True, timeout=60)


def test_compressed_qcow2(tmp_path):
    (tmp_path / 'raw').write_bytes(text(2 * MIB, 1) + noise(2 * MIB, 2))
    convert(tmp_path / 'raw', tmp_path / 'plain', '-O', 'qcow2')
    convert(tmp_path / 'raw', tmp_path / 'packed', '-O', 'qcow2', '-c')
    convert(tmp_path / 'raw', tmp_path / 'extended', '-O', 'qcow2', '-c', '-o',
            'extended_l2=on,cluster_size=16384')
    assert advice(tmp_path / 'raw') is None
    assert advice(tmp_path / 'plain') is None
    # qemu-img leaves a cluster uncompressed if compression does not shrink it.
    for name in ('packed', 'extended'):
        assert '50 % of this qcow2 is compressed' in advice(tmp_path / name)
        assert 'qemu-img convert' in advice(tmp_path / name)


def test_encrypted(tmp_path):
    (tmp_path / 'raw').write_bytes(text(MIB, 1))
    convert(tmp_path / 'raw', tmp_path / 'qcow2', '-O', 'qcow2')
    # qemu-img takes time to derive a key that is hard to guess. So the test
    # sets the header's encryption method instead.
    data = bytearray((tmp_path / 'qcow2').read_bytes())
    assert advice(tmp_path / 'qcow2') is None
    data[35] = 2
    (tmp_path / 'qcow2').write_bytes(data)
    (tmp_path / 'luks').write_bytes(b'LUKS\xba\xbe\0\1' + noise(5000, 1))
    for kind in ('qcow2', 'luks'):
        assert 'encrypted' in advice(tmp_path / kind)


def test_compressed_files(tmp_path):
    for name, compress in (
            ('gzip', gzip.compress), ('xz', lzma.compress),
            ('bzip2', bz2.compress), ('lz4', lz4.frame.compress),
            ('Zstandard', zstandard.compress)):
        (tmp_path / name).write_bytes(compress(noise(5000, 1)))
        assert f'by {name}' in advice(tmp_path / name)
    convertible = tmp_path / 'raw'
    convertible.write_bytes(text(MIB, 1))
    convert(convertible, tmp_path / 'vmdk', '-O', 'vmdk', '-o',
            'subformat=streamOptimized')
    assert 'VMDK' in advice(tmp_path / 'vmdk')


@pytest.mark.parametrize('content', [
    b'', b'Q', b'QFI\xfb', b'QFI\xfb' + b'\xff' * 508, b'KDMV' * 19,
    struct.pack('>4sIQIIQIIQ', b'QFI\xfb', 3, 0, 0, 9, 1 << 40, 0,
                0xffffffff, 0xfffffffffffffe00) + bytes(100),
    struct.pack('>4sIQIIQIIQ', b'QFI\xfb', 2, 0, 0, 9, 1 << 40, 0,
                8, 0) + b'\xff' * 1000])
def test_hostile_headers(tmp_path, content):
    (tmp_path / 'a').write_bytes(content)
    advice(tmp_path / 'a')


def test_any_qcow2(tmp_path):
    """Damaged qcow2 tables cause no error."""
    rng = random.Random(1)
    (tmp_path / 'raw').write_bytes(text(MIB, 1))
    convert(tmp_path / 'raw', tmp_path / 'packed', '-O', 'qcow2', '-c')
    content = (tmp_path / 'packed').read_bytes()
    for _ in range(300):
        data = bytearray(content)
        for _ in range(rng.randrange(1, 5)):
            at = rng.randrange(len(data) if rng.random() < 0.3 else 104)
            data[at] = rng.randrange(256)
        (tmp_path / 'a').write_bytes(data)
        found = advice(tmp_path / 'a')
        assert found is None or 'qcow2' in found


def test_beginning_of_a_qcow2(tmp_path):
    """The first MiB of a qcow2 is enough, and a shorter piece is no error."""
    (tmp_path / 'raw').write_bytes(text(8 * MIB, 1))
    convert(tmp_path / 'raw', tmp_path / 'packed', '-O', 'qcow2', '-c')
    content = (tmp_path / 'packed').read_bytes()
    assert formats.shares_nothing(content[:MIB])
    assert not any(formats.shares_nothing(content[:length])
                   for length in (0, 1, 100, 511, 70000))
