# SPDX-License-Identifier: Apache-2.0

"""Recognises images that share no blocks, by their first bytes.

Two files that are compressed or encrypted as a whole have no block in common,
even if their contents are similar. A file's header is not trusted: every
number is checked before it is used, and a table that is missing only means
that nothing is known.
"""

import array
from collections.abc import Callable
import struct
import sys

#: The bytes at the beginning of a file by which its format is recognised.
HEAD = 512

_COMPRESSED = ((b'\x1f\x8b', 'gzip'), (b'\xfd7zXZ\0', 'xz'),
               (b'\x28\xb5\x2f\xfd', 'Zstandard'), (b'BZh', 'bzip2'),
               (b'\x04\x22\x4d\x18', 'lz4'), (b'7z\xbc\xaf\x27\x1c', '7-Zip'),
               (b'PK\x03\x04', 'zip'))
_UNPACK = 'unpack it, and store the image in it'
_CONVERT = ("'qemu-img convert -O raw' makes an image of it that shares "
            'blocks')
_ENCRYPTED = 'encrypted data shares no blocks, and nothing changes that'

_QCOW2 = struct.Struct('>4sIQIIQIIQ')
_MAX_L1 = 32 << 20         # bytes, as qemu has it
_MAX_TABLES = 512          # second-level tables that are looked at
_OFFSET = 0x00fffffffffffe00
_COMPRESSED_CLUSTER = 1 << 62
_EXTENDED = 1 << 4


#: Reads so many bytes from an offset; fewer if there are no more.
Reader = Callable[[int, int], bytes]


def shares_nothing(head: bytes | memoryview) -> bool:
    """Return whether an image with this beginning will share few blocks.

    :param head: so much of the beginning as is at hand. The table of a qcow2
        that shows compressed clusters is mostly in its first MiB.
    """
    return advice(
        lambda length, offset: bytes(head[offset:offset + length])) is not None


def advice(read: Reader) -> str | None:
    """Return why this image will share few blocks, and the remedy, or None.

    :param read: reads from the image
    """
    head = read(HEAD, 0)
    for magic, name in _COMPRESSED:
        if head.startswith(magic):
            return f'it is compressed by {name}: {_UNPACK}'
    if head.startswith(b'LUKS\xba\xbe'):
        return f'it is encrypted by LUKS: {_ENCRYPTED}'
    if head.startswith(b'KDMV') and len(head) >= 79 and (
            struct.unpack_from('<H', head, 77)[0] == 1):
        return f'it is a compressed VMDK: {_CONVERT}'
    if head.startswith(b'QFI\xfb'):
        return _qcow2(read, head)
    return None


def _qcow2(read: Reader, head: bytes) -> str | None:
    if len(head) < 80:
        return None
    (_magic, version, _backing, _length, cluster_bits, _size, crypt, l1_size,
     l1_offset) = _QCOW2.unpack_from(head)
    if crypt:
        return f'it is an encrypted qcow2: {_ENCRYPTED}'
    if version not in (2, 3) or not 9 <= cluster_bits <= 21:
        return None
    features = struct.unpack_from('>Q', head, 72)[0] if version == 3 else 0
    step = 2 if features & _EXTENDED else 1
    compressed, clusters = _count_clusters(
        read, 1 << cluster_bits, min(8 * l1_size, _MAX_L1), l1_offset, step)
    if not compressed:
        return None
    return (f'{100 * compressed / clusters:.0f} % of this qcow2 is '
            f'compressed: {_CONVERT}')


def _count_clusters(read: Reader, cluster: int, l1_bytes: int, l1_offset: int,
                    step: int) -> tuple[int, int]:
    """The number of compressed clusters, and of all, in a sample."""
    places = [entry & _OFFSET for entry in _table(read, l1_bytes, l1_offset)
              if entry & _OFFSET]
    compressed = clusters = 0
    for place in places[::-(-len(places) // _MAX_TABLES) or 1]:
        for entry in _table(read, cluster, place)[::step]:
            if entry:
                clusters += 1
                compressed += bool(entry & _COMPRESSED_CLUSTER)
    return compressed, clusters


def _table(read: Reader, length: int, offset: int) -> array.array:
    if offset >= 1 << 62:
        return array.array('Q')
    data = read(length, offset)
    table = array.array('Q', data[:len(data) // 8 * 8])
    if sys.byteorder == 'little':
        table.byteswap()
    return table
