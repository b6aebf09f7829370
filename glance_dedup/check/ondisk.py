# SPDX-License-Identifier: Apache-2.0

"""The constants of the format on the disk, its checksums and its digests.

Written from ``doc/source/contributor/format.rst`` alone; see ``checker.py``.

No length read from a file is trusted: each is bounded by the limits here, or
by the size of the file, before it is used.
"""

import contextlib
import datetime
import hashlib
import re
import struct
import typing

import xxhash

DAMAGE = 'damage'
NOTE = 'note'

KIND = 'glance-dedup repository'
# Lists that daemons keep: kind, the key of the entries, and bytes at most.
LISTS = {'cache.json': ('glance-dedup cache', 'images', 8 << 20),
         'replication.json': ('glance-dedup replication', 'images', 2 << 20),
         'tasks.json': ('glance-dedup tasks', 'tasks', 1 << 20),
         'trial.json': ('glance-dedup trial', 'hosts', 1 << 20),
         'projects.json': ('glance-dedup projects', 'projects', 64 << 20)}
MAX_NOTES = 1 << 20         # bytes of a file in helpers/
MAJOR = 1                       # of recipes and new block groups
MINOR = 0
WITH_LISTS = 2                  # of groups whose segments have lists
COLD = 3                        # of groups with segments elsewhere
WITH_DISK = 2                   # of recipes with a table
FORMAT = 1                      # of repository.json
# Features of the format, in order; the names of files in features/.
VOLUMES, LISTED_SEGMENTS, COLD_GROUPS = 'volumes', 'listed-segments', 'cold'
NODEDUP, DISKS = 'nodedup', 'disks'
FEATURES = (VOLUMES, LISTED_SEGMENTS, COLD_GROUPS, NODEDUP, DISKS)
# Major versions of block groups, and the feature that each needs.
GROUP_MAJORS = {MAJOR: None, WITH_LISTS: LISTED_SEGMENTS, COLD: COLD_GROUPS}
MAX_KEY = 147
# Digests by which two different blocks can have equal fingerprints; some
# have more names than these.
WEAK = ('xxh3-128', 'sha1', 'md5-sha1')
MAX_JSON = 65536
MIN_BLOCK, MAX_BLOCK = 512, 65536
MIN_SLOTS, MAX_SLOTS = 64, 32768
MAX_SEGMENT = 1 << 20
MAX_GROUP = 1 << 25
MAX_WINDOW = 8 << 20            # of a Zstandard frame; all are far smaller
MAX_SLICE = 1 << 20

PAGE = 4096
SECTOR = 512
ENTRY = 56
ENTRIES_PER_SECTOR = 9
EXTENT = 40
EXTENTS_PER_PAGE = 102
MAX_EXTENT_BLOCKS = 1024
MAX_DISK = 1 << 62
REST_ALIGN = 2 << 20            # where the rest of a file may begin
MAX_ENCODERS = 15
MAX_DERIVED_PLAIN, MAX_DERIVED = 2 << 20, 4 << 20
SEGMENT_HEADER = 32
LISTED = 1                      # a layout of segments; 0: consecutive slots

FENCE = struct.Struct('<8s16sQ')
GROUP_HEADER = struct.Struct('<8sHHI16s16sII16s16s16s')
RECORD = struct.Struct('<QQIIQBB')
ENTRY_FIELDS = struct.Struct('<32sQIQI')
SEGMENT_FIELDS = struct.Struct('<4sBBHIIIIQ')
RECIPE_HEADER = struct.Struct('<8sHHI16s16s16s16sQQQQQQQHHI128s128s')
PAGE_HEADER = struct.Struct('<II')
EXTENT_FIELDS = struct.Struct('<QQIIIB3sQ')
# In the header of a recipe of version 2, and its encoders behind it.
DISK_FIELDS = struct.Struct('<500xQQQQBBH')
ENCODER_FIELDS = struct.Struct('<BBBBBBH')
DERIVED_FIELDS = struct.Struct('<QQQIBBHQ')
CHECKSUM = struct.Struct('<Q')

LIVE, VOID, FREED, DAMAGED = 1, 2, 3, 4
# States of a slot as it was read, besides VOID, FREED and DAMAGED.
EMPTY, GOOD, BAD = 0, 1, 5
STATE_NAMES = {EMPTY: 'empty', VOID: 'void', FREED: 'freed',
               DAMAGED: 'marked as damaged'}
GLOBAL_SCOPE = bytes(16)
SPARE_SCOPE = b'\xff' * 16      # of the files in spares/
CODEC_NONE, CODEC_LZ4, CODEC_ZSTD = 0, 1, 2
MAX_LEVEL = {CODEC_NONE: 0, CODEC_LZ4: 0, CODEC_ZSTD: 19}
POISONED, UNSETTLED = 1, 2
SIMILAR = 0x80                  # with the level of a recompression

# Behind the name of a file in these directories while another replaces it.
SECOND = '~'
HAVE_SECOND = ('groups', 'images')
GROUP_NAME = re.compile(r'[0-9a-f]{8}\Z')
# A killed program leaves files of the second pattern.
SLICE_NAME = re.compile(r'[0-9a-f]{8}(\.[0-9a-f]{16})?\Z')
IMAGE_NAME = re.compile(r'[A-Za-z0-9_-]{1,128}\Z')
VOLUME_RECIPE = re.compile(r'v_([0-9a-f]{32})_[A-Za-z0-9_-]{0,93}\Z')
_BACKUP = re.compile(r'b_[A-Za-z0-9_-]{1,109}_(\d{4})(\d\d)(\d\d)'
                     r'T(\d\d)(\d\d)(\d\d)Z\Z', re.ASCII)
SPOOL_NAME = re.compile(r'[TDGMOX]-[0-9a-f]{32}\Z')
HEX_ID = re.compile(r'[0-9a-f]{32}\Z')

ENTRY_ZEROS = bytes(ENTRY)
PAGE_ZEROS = bytes(PAGE)


class Damage(Exception):
    """Something does not verify.

    :ivar sentence: the problem, as the finding words it
    :ivar offset: where in the file, in bytes; None if it is about the file
    """

    def __init__(self, sentence: str, offset: int | None = None):
        super().__init__(sentence)
        self.sentence = sentence
        self.offset = offset


def xxh3(data, seed: int = 0) -> int:
    """The 64 bits that every checksum of the format is made of."""
    return xxhash.xxh3_64_intdigest(data, seed)


def stored_checksum(data, offset: int) -> int:
    """The checksum that `data` holds at an offset."""
    return CHECKSUM.unpack_from(data, offset)[0]


def printable(name: str) -> str:
    """Escape every character of a name that a terminal might not show."""
    return ''.join(
        c if c.isprintable() else
        c.encode('unicode_escape').decode('ascii') for c in name)


def is_backup(image_id: str) -> bool:
    """Return whether an image is a backup, by its id."""
    match = _BACKUP.match(image_id)
    if match is None:
        return False
    year, month, day, hour, minute, second = map(int, match.groups())
    try:
        datetime.datetime(year, month, day, hour, minute, second)
    except ValueError:
        return False
    return True


def scope_of(project: bytes) -> bytes:
    """The scope id of a project, which is the start of a SHA-256."""
    return hashlib.sha256(b'glance-dedup scope\0' + project).digest()[:16]


def _xxh3_128(scope, data):
    hasher = xxhash.xxh3_128(b'' if scope == GLOBAL_SCOPE else scope)
    hasher.update(data)
    return hasher.digest() + bytes(16)


def digest_of(name: str) -> typing.Callable[[bytes, bytes], bytes] | None:
    """The function from a scope id and a block to the fingerprint.

    :returns: None for an unknown digest
    """
    if name == 'xxh3-128':
        return _xxh3_128
    try:
        size = hashlib.new(name, usedforsecurity=False).digest_size
    except (ValueError, TypeError):
        return None
    if size < 20:
        return None
    # The constructors of the module are quicker than hashlib.new.
    make = getattr(hashlib, name) if (
        name in hashlib.algorithms_guaranteed) else None
    padding = bytes(max(0, 32 - size))

    def compute(scope, data):
        first = data if scope == GLOBAL_SCOPE else scope
        if make is not None:
            hasher = make(first, usedforsecurity=False)
        else:
            hasher = hashlib.new(name, first, usedforsecurity=False)
        if first is scope:
            hasher.update(data)
        return hasher.digest()[:32] + padding
    return compute


def is_cryptographic(name: str) -> bool:
    """Return whether a fingerprint by this digest identifies its block."""
    name = name.lower()
    with contextlib.suppress(ValueError, TypeError):
        name = hashlib.new(name, usedforsecurity=False).name
    return name not in WEAK
