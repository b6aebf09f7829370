# SPDX-License-Identifier: Apache-2.0

"""The catalog's keys and values as bytes (``format-derived.rst``).

A key begins with a byte for its kind. In keys, integers are
big-endian, so that LevelDB sorts them; in values, they are little-endian.
"""

from collections.abc import Callable
import hashlib
import json
import re
import struct
from typing import Any
from typing import NamedTuple

from glance_dedup import _engine
from glance_dedup.base import hexids
from glance_dedup.maintenance import block_addresses

#: First bytes of keys. Behind these follows a transaction id, or an image's.
LEDGER, BEGUN, PART, SEEN = b'l', b'b', b'e', b'i'
#: Behind these follows a group's number.
GROUP, COUNTS, DUPLICATES = b'g', b'c', b'p'
#: Behind these follows a number of 64 bits: an address, or a time.
DAMAGED, HISTORY = b'd', b'h'
#: Whole keys.
SCRUB, META = b's', b'meta'

#: Slots whose counts have one key.
CHUNK_SLOTS = 1024
CHUNK_BYTES = 4 * CHUNK_SLOTS

_PAIR_BYTES = 16
_KEY_32 = struct.Struct('>cI')
_KEY_64 = struct.Struct('>cQ')
_COUNTS = struct.Struct('>cIB')
_PART = struct.Struct('>c16sI')
_END = struct.Struct('<Q')
_SEEN = struct.Struct('<QQ16s')
SEEN_BYTES = _SEEN.size
#: Offset of the transaction id in an image's file, packed.
SEEN_TXID = 16
_FORMS = {GROUP: _KEY_32, DUPLICATES: _KEY_32, DAMAGED: _KEY_64,
          HISTORY: _KEY_64}


# -- keys ---------------------------------------------------------------------

def numbered_key(kind: bytes, number: int) -> bytes:
    """A key with one number of 32 or 64 bits, as its kind has it."""
    return _FORMS[kind].pack(kind, number)


def number_of(key: bytes) -> int | None:
    """The number in such a key; None: the key has a wrong length."""
    form = _FORMS[key[:1]]
    return form.unpack(key)[1] if len(key) == form.size else None


def counts_key(group: int, chunk: int) -> bytes:
    """The key of the counts of :data:`CHUNK_SLOTS` slots of a group."""
    return _COUNTS.pack(COUNTS, group, chunk)


def part_key(txid: bytes, part: int) -> bytes:
    """The key of a part of a recipe; the first part has number 0."""
    return _PART.pack(PART, txid, part)


# -- packed values ------------------------------------------------------------

def pack_end(page: int) -> bytes:
    """The value of a part: the page behind it."""
    return _END.pack(page)


def unpack_end(value: bytes) -> int | None:
    """The page behind a part; None: the value has a wrong length."""
    return _END.unpack(value)[0] if len(value) == _END.size else None


def part_id(key: bytes, value: bytes) -> int:
    """The number with which a part enters the ledger's exclusive or."""
    return int.from_bytes(hashlib.sha256(key + value).digest()[:16], 'big')


def pack_seen(file: tuple[int, int, bytes]) -> bytes:
    """An image's file: its inode, its time of writing, its transaction id."""
    return _SEEN.pack(*file)


def unpack_seen(value: bytes) -> tuple[int, int, bytes]:
    """Unpack a value of :func:`pack_seen`, which has :data:`SEEN_BYTES`."""
    inode, modified, txid = _SEEN.unpack(value)
    return inode, modified, txid


def are_duplicates(pairs: bytes, group: int) -> bool:
    """Return whether these are sorted pairs of addresses, led by a group's."""
    return (len(pairs) % _PAIR_BYTES == 0
            and _engine.pairs_are_of_group(pairs, group))


# -- values in JSON -----------------------------------------------------------

class Form(NamedTuple):
    """Requirements on a JSON object; it may have other fields, too."""

    checks: dict[str, Callable[[Any], bool]] = {}
    """A check for each known field."""
    need: tuple[str, ...] = ()
    """The known fields that must be there."""


def to_json(fields: dict[str, Any]) -> bytes:
    """A JSON object; the same fields always give the same bytes."""
    return json.dumps(fields, sort_keys=True, separators=(',', ':')).encode()


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1 << 63


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_hex_id(value: Any) -> bool:
    return isinstance(value, str) and hexids.is_valid(value) is not None


def _is_fingerprint(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(
        '[0-9a-f]{64}', value) is not None


def _are_addresses(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(v) is int and block_addresses.is_address(v) for v in value)


def _are_hits(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(hit, dict) and _is_text(hit.get('error'))
        and _are_texts(hit.get('images')) for hit in value.values())


def _is_sample(value: Any) -> bool:
    """The scrub's facts on cold groups' objects."""
    return (isinstance(value, dict)
            and all(_is_count(value.get(name))
                    for name in ('group', 'offset', 'read'))
            and all(type(value.get(name)) is bool
                    for name in ('listed', 'sampled'))
            and isinstance(value.get('missed'), dict)
            and all(map(_is_text, value['missed'].values())))


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


META_FORM = Form({
    'format': lambda v: type(v) is int,
    'repository_id': _is_text,
    'catalog_id': _is_hex_id,
    'sequence': _is_count,
    'valid': lambda v: type(v) is bool,
    'ledger': _is_hex_id,
    'parts': _is_count,
})
LEDGER_FORM = Form({
    'image_id': _is_text, 'upload_id': _is_text, 'project': _is_text,
    'size': _is_count, 'zero_bytes': _is_count, 'new_bytes': _is_count,
    'stored_bytes': _is_count, 'blocks': _is_count, 'fragments': _is_count,
    'created': _is_number, 'parts': _is_count, 'derived_bytes': _is_count,
}, need=('image_id',))
BEGUN_FORM = Form({
    'image_id': _is_text, 'parts': lambda v: _is_count(v) and v > 0,
}, need=('image_id', 'parts'))
DAMAGED_FORM = Form({
    'found': _is_number, 'fingerprint': _is_fingerprint,
    'quarantine': _is_text, 'images': _are_texts,
}, need=('found', 'fingerprint', 'quarantine', 'images'))
SCRUB_FORM = Form({
    'started': _is_number, 'complete': lambda v: type(v) is bool,
    'image': lambda v: v is None or _is_text(v),
    'group': _is_count, 'slot': _is_count, 'blocks': _is_count,
    'bytes': _is_count, 'damaged': _is_count, 'worn': _is_count,
    'waiting': _are_addresses, 'unreadable': _are_hits,
    'cold': _is_sample,
    'spares': lambda v: (isinstance(v, dict)
                         and all(map(_is_count, v.values()))),
})
#: A group's facts, as they are before any is known.
GROUP_FACTS = {'judged': 0, 'dirty': False, 'used': 0, 'rewritten': 0}
