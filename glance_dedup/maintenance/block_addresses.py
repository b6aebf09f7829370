# SPDX-License-Identifier: Apache-2.0

"""Addresses of blocks: their numbers, their entries, and the recipes on them.

An *address* is a number of 64 bits: the block's group, and in the low 15 bits
its slot there. The engine takes and gives addresses, slots, counts and runs as
packed numbers. A *run* is a sequence of blocks in consecutive slots: group,
first slot and number of blocks, of 32 bits each.
"""

import array
import bisect
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import itertools
import struct
import sys
from typing import Any
from typing import NamedTuple

from glance_dedup import _engine
from glance_dedup.base import exceptions

#: Bytes of an address, of a slot's entry, and of a run.
SIZE = 8
ENTRY_BYTES = 48
RUN_BYTES = 12
#: The most slots that a group has.
GROUP_SLOTS = 1 << 15

#: States of entries. An entry in use has a block, or had one that is damaged
#: or not valid now. Void, freed and empty slots have no block.
LIVE, FREED, DAMAGED, INVALID = 1, 3, 4, 7

_SLOT_BITS = 15
_ADDRESS_BITS = 40
_ENTRY = struct.Struct('<32sII4xB?2x')
_ENTRY_WORDS = ENTRY_BYTES // 4
_ENTRY_STATE = 44
_RUN = struct.Struct('<III')

# Pages of extents that are read at once from a whole recipe.
_PAGES = 64


# -- numbers ------------------------------------------------------------------

def pack(numbers: Iterable[int], code: str = 'I') -> bytes:
    """Pack numbers for the engine: little-endian.

    :param code: the type code of the module array
    """
    packed = array.array(code, numbers)
    if sys.byteorder == 'big':
        packed.byteswap()
    return packed.tobytes()


def unpack(data: bytes | bytearray, code: str = 'I') -> array.array:
    """Unpack numbers that the engine packed.

    :param code: the type code of the module array
    """
    numbers = array.array(code, data)
    if sys.byteorder == 'big':
        numbers.byteswap()
    return numbers


def address(group: int, slot: int) -> int:
    """The address of a group's slot; neither number is checked."""
    return group << _SLOT_BITS | slot


def group_of(number: int) -> int:
    """The group in an address."""
    return number >> _SLOT_BITS


def slot_of(number: int) -> int:
    """The slot in an address, from 0."""
    return number & GROUP_SLOTS - 1


def is_address(number: int) -> bool:
    """Return whether a number can be an address; groups begin at 1."""
    return GROUP_SLOTS <= number < 1 << _ADDRESS_BITS


def of_slots(group: int, slots: Iterable[int]) -> list[int]:
    """The addresses of these slots of a group."""
    return [address(group, slot) for slot in slots]


def by_group(numbers: Iterable[int]) -> Iterator[tuple[int, list[int]]]:
    """Groups with the slots of these addresses in them, sorted."""
    for group, some in itertools.groupby(sorted(numbers), group_of):
        yield group, [slot_of(number) for number in some]


def cut_by_group(data: bytes, size: int = SIZE
                 ) -> Iterator[tuple[int, bytes]]:
    """Cut sorted packed items that begin with an address by their groups.

    :param size: bytes of an item
    """
    firsts = unpack(data, 'Q')[::size // SIZE]
    begin = 0
    while begin < len(firsts):
        group = group_of(firsts[begin])
        end = bisect.bisect_left(firsts, address(group + 1, 0), begin)
        yield group, data[begin * size:end * size]
        begin = end


# -- entries ------------------------------------------------------------------

class Entry(NamedTuple):
    """A slot's entry in its group."""

    fingerprint: bytes
    segment: int
    """Offset of the block's segment in the group's file."""
    length: int
    """Bytes of the block before compression."""
    state: int
    nodedup: bool
    """The block stays a copy (I14). Without a meaning in an invalid entry."""


class Columns(NamedTuple):
    """Some fields of many slots' entries, faster than as :class:`Entry`."""

    segments: array.array
    lengths: array.array
    states: bytes


def entries(listing: bytes) -> list[Entry]:
    """All entries of a listing from the engine."""
    return list(map(Entry._make, _ENTRY.iter_unpack(listing)))


def entry_at(listing: bytes, index: int) -> Entry:
    """One entry of a listing from the engine; the first has index 0."""
    return Entry._make(_ENTRY.unpack_from(listing, ENTRY_BYTES * index))


def columns(listing: bytes) -> Columns:
    """All entries of a listing from the engine, as columns."""
    words = unpack(listing)
    return Columns(words[8::_ENTRY_WORDS], words[9::_ENTRY_WORDS],
                   listing[_ENTRY_STATE::ENTRY_BYTES])


def has_copies(listing: bytes) -> bool:
    """Return whether any entry of a listing has the mark nodedup (I14)."""
    return any(listing[_ENTRY_STATE + 1::ENTRY_BYTES])


def stored_lengths(listing: bytes) -> array.array:
    """For each entry of a listing, the stored length of its segment."""
    return unpack(listing)[10::_ENTRY_WORDS]


# -- addresses in recipes -----------------------------------------------------

def runs_in(runs: bytes) -> Iterator[tuple[int, int, int]]:
    """Group, first slot and number of blocks of each run."""
    return _RUN.iter_unpack(runs)


def groups_in(runs: bytes) -> set[int]:
    """The groups whose blocks these runs name."""
    return set(unpack(runs)[::3])


def slots_in(runs: bytes, group: int) -> set[int]:
    """The slots of a group that these runs name."""
    return {slot for number, first, blocks in runs_in(runs) if number == group
            for slot in range(first, first + blocks)}


def pieces(recipe: _engine.Recipe, first: int = 0, end: int | None = None
           ) -> Iterator[bytes]:
    """A recipe's runs, in pieces that need a bounded amount of memory.

    :param first: the first page of extents
    :param end: the page behind the last one; None: all pages
    """
    if end is None:
        end = recipe.pages
    for page in range(first, end, _PAGES):
        yield recipe.runs(page, min(_PAGES, end - page))


class Naming(NamedTuple):
    """Result of a search in one image."""

    image_id: str
    found: Any
    """The result; None: the image is gone, or cannot be read."""
    cost: int
    """Bytes of runs that the search read."""


def look_for(engine: _engine.Maintenance, image_ids: Iterable[str],
             addresses: bytes,
             look: Callable[[_engine.Recipe, Iterator[bytes]], Any]
             ) -> Iterator[Naming]:
    """Search images for these addresses, one image at a time.

    The scrub, not this function, reports images that cannot be read.

    :param addresses: sorted and packed
    :param look: called with a recipe and an iterator of the pieces that name
        any of the addresses. Pieces that it does not take are not read
    """
    for image_id in image_ids:
        cost = 0

        def naming(recipe: _engine.Recipe) -> Iterator[bytes]:
            nonlocal cost
            for runs in pieces(recipe):
                cost += len(runs)
                if _engine.names_any(runs, addresses):
                    yield runs
        found = None
        with (contextlib.suppress(exceptions.ImageNotFound,
                                  exceptions.InvalidParameter,
                                  *exceptions.UNREADABLE),
              contextlib.closing(engine.open_recipe(image_id)) as recipe):
            if recipe.complete:
                found = look(recipe, naming(recipe))
        yield Naming(image_id, found, cost)


def which_named(engine: _engine.Maintenance, image_ids: Iterable[str],
                addresses: Iterable[int]) -> Iterator[Naming]:
    """Find the set of these addresses that each image names."""
    wanted = set(addresses)

    def look(_: _engine.Recipe, naming: Iterator[bytes]) -> set[int]:
        named = set()
        for group, slot, blocks in itertools.chain.from_iterable(
                map(runs_in, naming)):
            first = address(group, slot)
            named.update(wanted.intersection(range(first, first + blocks)))
        return named
    return look_for(engine, image_ids, pack(sorted(wanted), 'Q'), look)
