# SPDX-License-Identifier: Apache-2.0

import struct

import pytest

from glance_dedup.base import exceptions
from glance_dedup.maintenance import block_addresses
from tests.support.maintenance import BLOCK
from tests.support.maintenance import content
from tests.support.repositories import put

pytest_plugins = ['tests.support.maintainer_fixtures']


@pytest.mark.parametrize('group, slot, number', [
    (1, 0, 32768), (1, 32767, 65535), (2, 0, 65536), (3, 5, 98309),
    ((1 << 25) - 1, 32767, (1 << 40) - 1)])
def test_an_address_is_a_group_and_a_slot(group, slot, number):
    assert block_addresses.address(group, slot) == number
    assert block_addresses.group_of(number) == group
    assert block_addresses.slot_of(number) == slot
    assert block_addresses.is_address(number)


@pytest.mark.parametrize('number', [-1, 0, 1, 32767, 1 << 40])
def test_what_is_no_address(number):
    assert not block_addresses.is_address(number)


@pytest.mark.parametrize('code, form', [('I', '<3I'), ('Q', '<3Q')])
def test_numbers_are_packed_as_the_engine_takes_them(code, form):
    packed = block_addresses.pack(iter([1, 2, 1 << 31]), code)
    assert packed == struct.pack(form, 1, 2, 1 << 31)
    assert list(block_addresses.unpack(packed, code)) == [1, 2, 1 << 31]


def test_addresses_by_group():
    numbers = [65535, 131077, 65536, 131072, 32768]
    found = list(block_addresses.by_group(numbers))
    assert found == [(1, [0, 32767]), (2, [0]), (4, [0, 5])]
    assert [number for group, slots in found
            for number in block_addresses.of_slots(group,
                                                   slots)] == sorted(numbers)
    assert list(block_addresses.by_group([])) == []


@pytest.mark.parametrize('words', [1, 2, 4])
def test_packed_items_by_group(words):
    numbers = [65535, 65536, 65537, 131072]
    items = [block_addresses.pack([number] + [7] * (words - 1), 'Q')
             for number in numbers]
    assert list(block_addresses.cut_by_group(b''.join(items), 8 * words)) == [
        (1, items[0]), (2, items[1] + items[2]), (4, items[3])]
    assert list(block_addresses.cut_by_group(b'', 8 * words)) == []


def test_entries():
    listing = b''.join([
        struct.pack('<32sIIIBB2x', b'%032d' % n, n, 512 + n, 99, n, n % 2)
        for n in range(5)])
    assert len(listing) == 5 * block_addresses.ENTRY_BYTES
    found = block_addresses.entries(listing)
    assert found == [(b'%032d' % n, n, 512 + n, n, n % 2 == 1)
                     for n in range(5)]
    assert block_addresses.entry_at(listing, 3) == found[3]
    assert [tuple(column) for column in block_addresses.columns(listing)] == [
        tuple(column) for column in list(zip(*found))[1:4]]


def test_runs():
    runs = struct.pack('<9I', 1, 5, 2, 3, 0, 1, 1, 32766, 2)
    assert len(runs) == 3 * block_addresses.RUN_BYTES
    assert list(block_addresses.runs_in(runs)) == [
        (1, 5, 2), (3, 0, 1), (1, 32766, 2)]
    assert block_addresses.groups_in(runs) == {1, 3}
    assert block_addresses.slots_in(runs, 1) == {5, 6, 32766, 32767}
    assert block_addresses.slots_in(runs, 2) == set()


class _Recipe:
    """A recipe of runs of one block, one in each page."""

    complete = True

    def __init__(self, numbers, bad=None):
        self.pages = len(numbers)
        self.closed = False
        self.read = []
        self._numbers = numbers
        self._bad = bad

    def runs(self, first, count):
        self.read.append((first, count))
        if self._bad in range(first, first + count):
            raise exceptions.DamagedError('page')
        return b''.join([block_addresses.pack(
            [block_addresses.group_of(number), block_addresses.slot_of(number),
             1])
            for number in self._numbers[first:first + count]])

    def close(self):
        self.closed = True


class _Engine:
    def __init__(self, **recipes):
        self._recipes = recipes

    def open_recipe(self, image_id):
        if image_id not in self._recipes:
            raise exceptions.ImageNotFound(image_id)
        return self._recipes[image_id]


def test_pieces_are_bounded():
    recipe = _Recipe(range(32768, 32768 + 130))
    assert b''.join(block_addresses.pieces(recipe)) == recipe.runs(0, 130)
    assert recipe.read[:-1] == [(0, 64), (64, 64), (128, 2)]
    recipe.read.clear()
    list(block_addresses.pieces(recipe, 60, 125))
    assert recipe.read == [(60, 64), (124, 1)]


def test_images_that_name_addresses():
    """Images are found by addresses anywhere in a group."""
    ends = [65535, 65536, 98303, 98304]
    images = {'a': _Recipe([40000, 65536, 98303]), 'b': _Recipe([40000]),
              'bad': _Recipe([65536] * 65, bad=64), 'half': _Recipe([65536]),
              'c': _Recipe([65535] + [1 << 20] * 64 + [98304])}
    images['half'].complete = False
    found = list(block_addresses.which_named(
        _Engine(**images), [*images, 'gone'], reversed(ends)))
    assert found == [
        ('a', {65536, 98303}, 36), ('b', set(), 12), ('bad', None, 768),
        ('half', None, 0), ('c', {65535, 98304}, 66 * 12), ('gone', None, 0)]
    assert all(image.closed for image in images.values())


def test_a_look_may_end_early():
    recipe = _Recipe([40000] * 64 + [50000] * 64 + [40000] * 64)
    found = block_addresses.look_for(
        _Engine(one=recipe), ['one'], block_addresses.pack([50000], 'Q'),
        lambda seen, naming: seen is recipe and any(naming))
    assert list(found) == [('one', True, 2 * 64 * 12)]
    assert recipe.read == [(0, 64), (64, 64)]


def test_what_the_engine_lists_and_names(maintainer, repo):
    """The layouts of entries and runs are the engine's."""
    put(repo, 'one', content(1, 2, blocks=1))
    put(repo, 'two', content(2, 3, blocks=1))
    group, = maintainer.engine.groups()
    published = maintainer.engine.group_facts(group)['published']
    entries = block_addresses.entries(maintainer.engine.entries(group, 0,
                                                                published))
    assert {(entry.length, entry.state) for entry in entries} == {
        (BLOCK, block_addresses.LIVE)}
    assert len({entry.fingerprint for entry in entries}) == 3
    every = block_addresses.of_slots(group, range(block_addresses.GROUP_SLOTS))
    one, two = (image.found for image in block_addresses.which_named(
        maintainer.engine, ['one', 'two'], every))
    assert one | two == set(every[:3])
    assert len(one) == len(two) == 2
