# SPDX-License-Identifier: Apache-2.0

"""Files that contain a disk, and recipes that keep the disk.

A made-up format: a header, then a stream of zlib for each cluster, with
padding behind it. No parser is needed for it, since the maker knows where the
clusters are.
"""

import dataclasses
import zlib

import xxhash

from dedupd.tasks import merger
from glance_dedup.base import pacing
from glance_dedup.repository import conversion
from glance_dedup.repository import disk_survey
from tests.support import repositories

ALIGN = disk_survey.REST_ALIGN
#: As QEMU compresses clusters of qcow2; and as zlib does by default.
QEMU = conversion.Encoder(6, 12, 9)
PLAIN = conversion.Encoder(6, 15, 8, has_header=True)


def deflate(data, encoder):
    stream = zlib.compressobj(
        encoder.level, zlib.DEFLATED,
        encoder.window_bits * (1 if encoder.has_header else -1),
        encoder.memory_level, encoder.strategy)
    return stream.compress(data) + stream.flush()


@dataclasses.dataclass
class File:
    """A file, its plain bytes, and the table by which they make the file."""

    file: bytes
    plain: bytes
    disk: bytes
    extents: list[conversion.Derived]
    encoders: tuple[conversion.Encoder, ...]

    def table(self, is_proven=True):
        return conversion.Table(len(self.disk), 'qcow2', is_proven,
                                self.encoders)


def make(disk, cluster=4096, encoders=(QEMU, PLAIN), lossy=()):
    """Make a file of a disk.

    :param lossy: numbers of clusters whose streams are in the rest, as those
        of an unknown encoder are
    """
    file, rest, extents = b'', b'', []
    begin = -(-len(disk) // ALIGN) * ALIGN

    def copy(data):
        nonlocal file, rest
        extents.append(conversion.Derived(len(data), begin + len(rest)))
        file, rest = file + data, rest + data

    copy(b'a header of some bytes'.ljust(700, b'.'))
    for number, at in enumerate(range(0, len(disk), cluster)):
        plain = disk[at:at + cluster]
        which = number % len(encoders)
        stream = deflate(plain, encoders[which])
        if number in lossy:
            copy(stream)
        else:
            extents.append(conversion.Derived(
                len(stream), at, len(plain), which + 1,
                xxhash.xxh3_64_intdigest(stream)))
            file += stream
        if number % 3 == 0:
            copy(b'padding %d' % number)
    plain = disk.ljust(begin, b'\0') + rest
    return File(file, plain, disk, extents, encoders)


def texts(length, seed=1):
    """Return bytes that deflate, mixed with some that do not."""
    lines = b''.join(b'line %d of text %d, which is compressible\n' % (i, seed)
                     for i in range(length // 60))
    data = lines + repositories.noise(length // 3, seed)
    return (data + bytes(length))[:length]


def convert(repo, maintainer, image_id, made, is_proven=True):
    """Give an image, whose bytes are made.file, its recipe of version 2."""
    with repo.begin_conversion(image_id) as new:
        new.write(made.plain)
        new.begin_table(made.table(is_proven))
        new.add_derived(made.extents)
        header = new.finish()
        merger.count(maintainer, pacing.Pace(), header['transaction_id'])
        assert new.exchange()
    return header


def put(repo, maintainer, image_id, made, is_proven=True, **options):
    """Store the file of a disk, and convert the image."""
    repositories.put(repo, image_id, made.file, **options)
    return convert(repo, maintainer, image_id, made, is_proven)


def table_of(path):
    """Return the extents of a recipe's table, as bytes."""
    data = path.read_bytes()
    extents = int.from_bytes(data[112:120], 'little')
    derived = int.from_bytes(data[516:524], 'little')
    first = 1 + -(-extents // 102)
    table = b''.join(data[4096 * page + 8:4096 * page + 4088]
                     for page in range(first, len(data) // 4096))
    return table[:40 * derived]
