# SPDX-License-Identifier: Apache-2.0

"""Compressed qcow2 files whose streams any encoder has made."""

import struct
import zlib

CLUSTER = 4096
_COMPRESSED = 1 << 62
_L2_ENTRIES = CLUSTER // 8
_SECTOR = 512


def deflated(plain: bytes, level: int = 6) -> bytes:
    """Return a stream as QEMU has zlib make it."""
    encoder = zlib.compressobj(level, zlib.DEFLATED, -12, 9)
    return encoder.compress(plain) + encoder.flush()


def foreign(plain: bytes) -> bytes:
    """Return a stream that no single call of zlib makes."""
    encoder = zlib.compressobj(6, zlib.DEFLATED, -12, 9)
    return (encoder.compress(plain[:1000]) + encoder.flush(zlib.Z_FULL_FLUSH)
            + encoder.compress(plain[1000:]) + encoder.flush())


def file_of(streams: list[bytes], gap: bytes = b'') -> bytes:
    """Return a file, of a disk with a cluster for each stream.

    :param gap: is behind each stream
    """
    assert len(streams) <= _L2_ENTRIES
    header = struct.pack(
        '>4sIQIIQIIQQIIQ', b'QFI\xfb', 2, 0, 0, 12, len(streams) * CLUSTER, 0,
        1, CLUSTER, 3 * CLUSTER, 1, 0, 0)
    shift = 62 - (12 - 8)
    place = 4 * CLUSTER
    table, body = [], b''
    for stream in streams:
        sectors = (place % _SECTOR + len(stream) - 1) // _SECTOR
        table.append(_COMPRESSED | sectors << shift | place)
        body += stream + gap
        place += len(stream + gap)
    return b''.join(part.ljust(CLUSTER, b'\0') for part in (
        header, struct.pack('>Q', 2 * CLUSTER),
        struct.pack(f'>{len(table)}Q', *table), b'')) + body.ljust(
            -(-len(body) // _SECTOR) * _SECTOR, b'\0')
