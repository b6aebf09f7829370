# SPDX-License-Identifier: Apache-2.0

"""Makes the first seeds of the fuzz targets, out of a real repository.

``python -m tests.fuzz.make_corpus DIRECTORY`` writes ``DIRECTORY/<target>/``.
Each target's own file says what its inputs look like. What a run finds beyond
them is kept after ``-merge=1``; see test_fuzz.py and corpus.py.
"""

import pathlib
import random
import struct
import subprocess
import sys
import tempfile
from unittest import mock

from dedupd.tasks import collector
from dedupd.tasks import recompressor
from glance_dedup.base import pacing
from glance_dedup.repository import image_repository
from tests.support import maintenance
from tests.support import repositories

HEADER, PAGE, SECTOR, STORE = 512, 4096, 512, 4096
ENTRY, PER_SECTOR, EXTENT, EXTENTS = 56, 9, 40, 102
BLOCK, SLOTS, SEGMENT = 512, 64, 2048
DATA = STORE + 8 * SECTOR
# The targets' own repository.
REPOSITORY_ID = bytes(range(1, 17))
RIGHT, WRITE, WHOLE, TABLE = 1, 2, 4, 8     # flags of some targets
COLD = 4    # a flag of the group target


def make_repository(path):
    image_repository.Repository.create(path, block_size=BLOCK,
                                       group_slots=SLOTS,
                                       segment_size=SEGMENT)
    for number, codec in enumerate(('none', 'lz4', 'zstd')):
        with image_repository.Repository(path, codec=codec,
                                         filter_dir=str(path)) as handle:
            # The first blocks have the mark nodedup.
            repositories.put(handle, f'copy-{number}',
                             repositories.noise(2 * BLOCK, number),
                             dedup=False)
            repositories.put(handle, f'image-{number}', repositories.mixture(
                40000, seed=number, unit=BLOCK))


def order_blocks(path):
    """Put similar blocks next to each other: segments with lists."""
    with (image_repository.Repository(path, filter_dir=str(path)) as handle,
          maintenance.maintaining(handle) as maintainer,
          mock.patch.object(recompressor, '_WORTH', -1)):
        recompressor.run_once(maintainer, pacing.Pace(), 'zstd', 1,
                              similar=True)


def entry_at(slot):
    return STORE + slot // PER_SECTOR * SECTOR + slot % PER_SECTOR * ENTRY


def entries_of(group, count):
    return [group[entry_at(slot):entry_at(slot) + ENTRY]
            for slot in range(count)]


def with_id(header):
    return header[:16] + REPOSITORY_ID + header[32:]


def group_seeds(groups):
    for group in groups:
        # The target's group has this number.
        header = group[:12] + struct.pack('<I', 1) + with_id(group)[16:72]
        # In a segment with a list, only all entries name the slots.
        for count, length in ((4, 600), (12, 2500), (SLOTS, 300)):
            yield (bytes([RIGHT]) + header
                   + group[512:544] + group[1024:1056] + bytes([count])
                   + b''.join(entries_of(group, count))
                   + group[DATA:DATA + length])
        yield cold_group_seed(header, group)


def cold_group_seed(header, group):
    """A group whose first segments are in an object."""
    header = (header[:8] + b'\3' + header[9:72] + group[72:88]
              + bytes(range(1, 17)))
    # All slots of a cold group are published.
    records = [group[at:at + 16] + struct.pack('<I', SLOTS)
               + group[at + 20:at + 32] for at in (512, 1024)]
    return (bytes([RIGHT | COLD]) + header + b''.join(records) + bytes([SLOTS])
            + b''.join(entries_of(group, SLOTS)) + group[DATA:DATA + 300])


def fpstore_seeds(groups):
    for group in groups:
        for count in (1, 3, 20):
            yield (struct.pack('<BHBQ', RIGHT, 0, 0, 77)
                   + b''.join(entries_of(group, count)))


def segment_seeds(groups):
    seen = set()
    for group in groups:
        for entry in entries_of(group, SLOTS):
            offset, place = struct.unpack('<IQ', entry[40:52])
            stored, codec = place >> 37 & 0x1fffff, place >> 58 & 3
            if stored == 0 or (codec, stored // 256) in seen:
                continue
            seen.add((codec, stored // 256))
            yield b'\0' + group[offset:offset + 32 + stored]
    for slots in ((3,), (3, 7, 400, 499), (3, 7, 7), (7, 3), (3, 500)):
        # These have lists, with right or wrong checksums.
        packed = b''.join(b'block of slot %3d' % slot for slot in slots)
        behind = struct.pack(f'<{len(slots)}H', *slots) + packed
        for flags in (2, 6):
            yield bytes([flags]) + b'GDSG' + struct.pack(
                '<BBHIIIIQ', 0, 1, len(slots), slots[0], len(packed),
                len(behind), 0, 0) + behind
    # A list that is as long as the segment, and one that is longer.
    for blocks, stored in ((4, 8), (4, 7), (0xffff, 200)):
        yield b'\2' + b'GDSG' + struct.pack(
            '<BBHIIIIQ', 0, 1, blocks, 1, 200, stored, 0, 0) + bytes(200)
    for codec in range(3):
        yield bytes([1, codec, 1]) + b'a line of a text\n' * 60
        yield bytes([1, codec, 3]) + random.Random(codec).randbytes(300)


def table_seed(recipe):
    """Return a recipe with a table: a copied extent, and a derived one."""
    align = 2 << 20
    header = bytearray(with_id(recipe)[:400])
    header[8] = 2
    struct.pack_into('<QQ', header, 80, 305, align)
    struct.pack_into('<Q', header, 112, 2)
    disk = struct.pack('<QQQQBBH', align + 5, 8192, 2, 300, 1, 1, 1)
    disk += bytes([1, 6, 12, 9])
    return (bytes([RIGHT | WHOLE | TABLE]) + header + disk.ljust(156, b'\0')
            + struct.pack('<QQIIIIQ', 0, align, 0, 0, 0, 0, 0)
            + struct.pack('<QQIIIIQ', align, 5, 1, 0, 1, 1, 7)
            + struct.pack('<QQQIBBHQ', 0, 5, align, 0, 2, 0, 0, 0)
            + struct.pack('<QQQIBBHQ', 5, 300, 4096, 4096, 2, 1, 0, 99))


def recipe_seeds(recipes):
    for recipe in recipes:
        extents = recipe[PAGE + 8:PAGE + 8 + EXTENTS * EXTENT].rstrip(b'\0')
        extents += bytes(-len(extents) % EXTENT)
        yield bytes([RIGHT | WHOLE]) + with_id(recipe)[:400] + extents
    yield table_seed(recipes[0])
    yield bytes([WRITE]) + bytes(range(1, 120))
    yield bytes([WRITE]) + bytes([3, 255, 255, 0, 1, 0, 2, 1, 5, 5, 9, 9]) * 5


def filter_seeds():
    buckets = (65536 - 16384) // 64
    header = struct.pack('<8sII16sQQ', b'GDFILTER', 2, 0, bytes([1, 2, 3]),
                         16384 + 64 * buckets, buckets)
    rng = random.Random(1)
    operations = b''.join(
        struct.pack('<BHB', rng.randrange(8), rng.randrange(65536),
                    rng.randrange(256)) for _ in range(60))
    yield bytes([RIGHT]) + header.ljust(200, b'\0') + operations
    yield bytes([WRITE]) + operations
    yield bytes([WRITE]) + struct.pack('<BHB', 5, 1, 255) * 90


def chunker_seeds():
    for block in (0, 3, 7, 128, 130):
        yield struct.pack('<BI', block, block) + bytes(700) + b'x' * 600
    rng = random.Random(3)
    for block in (8, 9, 11):  # by content
        yield (struct.pack('<BIHH', block, block, 0, 1) + rng.randbytes(900)
               + bytes(700) + rng.randbytes(900))


def fence_and_pairs_seeds():
    rng = random.Random(2)
    for what in range(8):
        yield bytes([what]) + rng.randbytes(300)
        yield bytes([what]) + bytes(rng.choices(range(3), k=200))


def programs(seed, count, length):
    rng = random.Random(seed)
    for _ in range(count):
        yield rng.randbytes(rng.randrange(8, length))


# Operations of fuzz_writer.c: the number of each, and how many bytes it takes.
PUT, BEGIN, WRITE, COMMIT, END, DELETE, OPEN, READ = 0, 2, 3, 4, 5, 6, 7, 8
MAINTAIN, COPY, FILTER, REOPEN, SPACE, FAULT = 9, 11, 12, 13, 14, 15


def writer_program(rng):
    """Return a random program of two processes with few contents."""
    contents = [bytes([20, rng.randrange(256), rng.randrange(10, 41), 0])
                for _ in range(3)]
    program = bytearray([rng.choice([0, 0, 8, 2, 7]), 4, 0, 0])
    for _ in range(rng.randrange(12, 40)):
        what = rng.choice([PUT, PUT, PUT, DELETE, DELETE, BEGIN, WRITE, COMMIT,
                           END, OPEN, READ, MAINTAIN, MAINTAIN, MAINTAIN, COPY,
                           FILTER, REOPEN, SPACE, FAULT])
        who, image = rng.choice([0, 128]), rng.randrange(3)
        if what == MAINTAIN:
            task = rng.choice([0, 0, 0, 1, 2, 3, 4])
            program += bytes([MAINTAIN + 16 * task, who + rng.randrange(16)])
            program += bytes([2 * (task == 0)]) if task in (0, 3) else b''
            continue
        program += bytes([what, who + image])
        if what == PUT:
            program += rng.choice(contents) + bytes([99, 9])
        elif what in (BEGIN, OPEN, FAULT):
            program += bytes([rng.randrange(3 if what != FAULT else 90)])
        elif what == WRITE:
            program += rng.choice(contents)
        elif what == READ:
            program += rng.randbytes(4)
        elif what == COPY:
            program += bytes([rng.randrange(4), rng.randrange(3)])
    return bytes(program)


def spool_seeds(recipes):
    for recipe in recipes:
        for flags, kind in ((RIGHT, 0), (RIGHT, 1), (RIGHT, 3),
                            (RIGHT | WRITE, 0), (RIGHT | WRITE, 3)):
            yield bytes([flags, 0, kind]) + with_id(recipe)[:400]
    yield from programs(3, 5, 200)


def volume_seeds():
    rng = random.Random(6)

    def journal(number, needed, before, records, synced=True):
        part, odd = (0, 0) if synced else (4, 4)
        yield struct.pack('<BBHHHBBBB', number, needed, before, 700, 1, part,
                          1, 0, len(records))
        for kind in records:
            yield struct.pack('<BBHH', kind, odd, rng.randrange(1000),
                              rng.randrange(1000))
        yield b'\0'

    one = journal(0, 0, 0, [1, 2, 1, 3, 4, 1])
    two = [*journal(0, 0, 0, [1, 1, 2]), *journal(1, 0, 0xffff, [1, 2, 1])]
    yield b'\0' + b''.join(one)
    yield b'\1' + b''.join(two)
    yield b'\1' + b''.join(two) + struct.pack('<BHB', 0, 4200, 1)
    # The first one is torn, at no place that is proven, and then whole.
    torn = b'\1' + b''.join([*journal(0, 0, 0, [1, 1, 1], synced=False),
                             *journal(1, 0, 40000, [1, 3, 1], synced=False)])
    yield torn + struct.pack('<BHB', 0, 4100, 1)
    yield torn
    yield from programs(7, 10, 120)


def index_seeds():
    """Files of the exact index, as fuzz_index.c takes them."""
    rng = random.Random(5)
    for seed in range(12):
        files = rng.randrange(1, 6)
        program = bytearray([files])
        for file in range(files):
            kind = (0, 1, 2, 1, 3)[file] if seed % 2 else rng.randrange(5)
            records = sorted({(rng.randrange(4), 32 + 2 * rng.randrange(3))
                              for _ in range(rng.randrange(12))})
            if kind == 0:   # a shard has each fingerprint once
                records = sorted(dict(records).items())
            bits = 0 if seed % 3 else rng.randrange(4)
            program += bytes([kind, bits, rng.randrange(8),
                              rng.randrange(1, 9),
                              128 * (seed % 2) + 16 * (seed // 2 % 2),
                              len(records)])
            for record in records:
                program += bytes(record)
            program.append(0)
        yield bytes(program)
    for strange in (0, 1, 2, 5, 6):
        # A shard of several frames, and a run with some of its records.
        many = bytes([0, 0, 0, 1, 16 + 32 + strange, 22, 3, 32])
        yield (b'\2' + many + bytes(42) + bytes([strange // 2, 8, 1, 0])
               + bytes([1, 0, 0, 2, 0, 2, 3, 32, 9, 32, 0]))


def packed_frame_seeds():
    def frame(key, count, widths, bits, flags=RIGHT):
        return bytes([flags]) + struct.pack(
            '<QIBBH', key, count, *widths, 0) + bits + bytes(8)
    rng = random.Random(8)
    for key_width, address_width in ((0, 1), (3, 16), (45, 23), (64, 40)):
        for count in (1, 2, 9, 60):
            bits = count * (key_width + address_width)
            yield frame(count << 50, count, (key_width, address_width),
                        rng.randbytes((bits + 7) // 8))
    yield frame(1, 4096, (2, 2), bytes(range(16)), RIGHT | 2)
    for count, widths in ((0, (3, 16)), (4097, (1, 1)), (9, (65, 16)),
                          (9, (3, 41)), (0xffffffff, (0, 0))):
        yield frame(7, count, widths, bytes(64), RIGHT | 2)


def similar_seeds():
    rng = random.Random(9)
    twin = rng.randbytes(250 * 16)
    yield b'\0' + b'\xfa'.join([b'', twin, twin[:-9] + b'y' * 9,
                               bytes(250 * 16), twin])
    yield b'\0' + bytes([1]) * 200
    for kinds in (1, 2, 3, 256):
        yield b'\1' + bytes(rng.choices(range(kinds), k=12 * 40))
        yield b'\2' + struct.pack('<H', 1999) + bytes(
            rng.choices(range(kinds), k=100))


def deflate_seeds():
    rng = random.Random(11)
    text = b' '.join(rng.choices([b'zero', b'cluster', b'of', b'the'], k=90))
    for number, plain in enumerate((
            b'', b'a', bytes(300), text, rng.randbytes(300),
            bytes(rng.choices(range(6), k=400)))):
        for level in range(9):
            yield bytes([level, level + number, 2 * level + number, number,
                         rng.randrange(256), rng.randrange(256)]) + plain


def disk_seed(content):
    """Pack the words of a file that are not zeros."""
    packed = struct.pack('<IB', len(content) // 512, len(content) % 512 // 2)
    at = 0
    while at < min(len(content), 4 << 20) and len(packed) < 3800:
        end = at
        while content[end:end + 8].strip(b'\0') and end - at < 240:
            end += 8
        if end > at:
            packed += struct.pack('<I', at // 4)[:3] + struct.pack(
                '<BB', end - at, 0) + content[at:end]
        at = max(end, at + 8)
    return packed


def disk_seeds():
    """Return small files that QEMU writes."""
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory)
        (path / 'raw').write_bytes(
            bytes(70_000) + b'disk' * 25 + bytes(3_000_000) + b'end' * 20
            + bytes(816))
        for number, options in enumerate((
                '-f qcow2', '-f qcow2 -o compat=0.10,cluster_size=512',
                '-f qcow2 -c', '-f qcow2 -o extended_l2=on',
                '-f qcow2 -c -o compression_type=zstd,cluster_size=4096',
                '-f vmdk', '-f vmdk -o zeroed_grain=on',
                '-f vmdk -o subformat=streamOptimized', '-f vdi', '-f vhdx',
                '-f vpc', '-f vpc -o subformat=fixed')):
            options = options.replace('-f ', '-O ').split()
            subprocess.run(['qemu-img', 'convert', *options, path / 'raw',
                            path / str(number)], check=True, timeout=60)
            yield disk_seed((path / str(number)).read_bytes())


def fslayout_seeds():
    def disk(sectors, *pieces):
        return sectors.to_bytes(6, 'little') + b''.join(
            struct.pack('<HBB', at // 512, at % 512 // 4, len(content))
            + content for at, content in pieces)

    def ext(at, features):
        node = struct.pack('<HHHHI', 0xf30a, 1, 1, 0, 0)
        return [
            (at + 1024, struct.pack('<9I', 0, 4096, 0, 0, 0, 0, 2, 0, 512)
             + struct.pack('<IIIIIHHIIIHHIII', 0, 64, 0, 0, 0, 0, 0xef53, 0, 0,
                           0, 0, 0, 0, 1, 0)),
            (at + 1024 + 0x58, struct.pack('<HHIII', 256, 0, 4, features, 0)),
            (at + 1024 + 0xfc, struct.pack('<BBH', 0, 1, 64)),
            (at + 1024 + 0x10c, node + struct.pack('<IIHH', 0, 20, 0, 0)),
            (at + 4096, bytes(8) + struct.pack('<I', 10)),
            (at + 4096 * 20, struct.pack('<HHHHI', 0xf30a, 1, 4, 0, 0)
             + struct.pack('<IHHI', 0, 9, 0, 30))]

    xfs = struct.pack('>4sIQ', b'XFSB', 4096, 500) + bytes(32) + struct.pack(
        '>Q', 263) + bytes(28) + struct.pack('>IIII', 200, 3, 0, 20)
    xfs += struct.pack('>HH', 0, 512) + bytes(20) + b'\x08'
    signature = (508, b'\0\0\x55\xaa')
    yield disk(8192, *ext(0, 0))
    yield disk(8192 << 20, *ext(0, 0x80))
    yield disk(8192, (0, xfs))
    yield disk(8192, signature, (448, b'\0\0\x83\0\0\0' + struct.pack(
        '<II', 2048, 4096)), *ext(1 << 20, 0x80))
    yield disk(8192, signature, (448, b'\0\0\xee\0'), (512, b'EFI PART'),
               (584, struct.pack('<QII', 2, 128, 128)),
               (1056, struct.pack('<QQ', 2048, 6000)), (1 << 20, xfs))


def leave_placeholder(path):
    """Delete and collect everything: the last group has only its number."""
    with (image_repository.Repository(path, filter_dir=str(path)) as handle,
          maintenance.maintaining(handle) as maintainer):
        for image in handle.images():
            handle.delete(image)
        collector.run_once(maintainer, pacing.Pace())


def read_groups(path):
    return [file.read_bytes()
            for file in sorted(pathlib.Path(path, 'groups').iterdir())]


def make(directory):
    with tempfile.TemporaryDirectory() as path:
        make_repository(path)
        groups = read_groups(path)
        order_blocks(path)
        groups += [group for group in read_groups(path) if group[8] == 2]
        recipes = [file.read_bytes() for file
                   in sorted(pathlib.Path(path, 'images').iterdir())]
        leave_placeholder(path)
        groups += read_groups(path)
    corpora = {
        'group': group_seeds(groups),
        'fpstore': fpstore_seeds(groups),
        'segment': segment_seeds(groups),
        'recipe': recipe_seeds(recipes),
        'filter': filter_seeds(),
        'fslayout': fslayout_seeds(),
        'chunker': chunker_seeds(),
        'deflate': deflate_seeds(),
        'disk': disk_seeds(),
        'catalog': fence_and_pairs_seeds(),
        'index': index_seeds(),
        'packedframe': packed_frame_seeds(),
        'similar': similar_seeds(),
        'spool': spool_seeds(recipes),
        'wire': programs(4, 20, 120),
        'reader': programs(5, 30, 120),
        'volume': volume_seeds(),
        'writer': (writer_program(random.Random(seed)) for seed in range(30)),
    }
    for target, seeds in corpora.items():
        corpus = pathlib.Path(directory, target)
        corpus.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(seeds):
            (corpus / f'seed-{number:02}').write_bytes(seed)


if __name__ == '__main__':
    make(sys.argv[1])
