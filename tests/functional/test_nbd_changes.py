# SPDX-License-Identifier: Apache-2.0

"""Clients of the NBD server read the ranges that changed between images."""

import json

import pytest

from glance_dedup.client import client_errors
from glance_dedup.client import nbd_reader
from tests.functional import test_nbd
from tests.support import nbd
from tests.support import repositories

BLOCK = test_nbd.BLOCK
MIB = 1 << 20

content = test_nbd.content
own = test_nbd.own


@pytest.fixture
def two(own, tmp_path):
    """Images of one size, of which some blocks differ; and their contents."""
    before = test_nbd.images()['image']
    after = bytearray(before)
    after[5 * BLOCK:6 * BLOCK] = repositories.noise(BLOCK, 99)
    after[MIB:2 * MIB] = bytes(MIB)
    with repositories.open_repository(tmp_path / 'own') as opened:
        repositories.put(opened, 'later', after)
    return before, bytes(after)


@pytest.mark.needs('nbd')
def test_nbdinfo_shows_changes(own, two):
    """A program that knows QEMU's bitmaps knows these."""
    old, new = two
    found = json.loads(test_nbd.run(
        'nbdinfo', '--map=qemu:dirty-bitmap:image', '--json',
        own.uri('later')))
    assert {extent['description'] for extent in found} == {'clean', 'dirty'}
    at = 0
    for extent in found:
        assert extent['offset'] == at
        end = at + extent['length']
        if extent['type'] == 0:
            assert old[at:end] == new[at:end]
        else:
            assert end - at <= MIB + BLOCK
        at = end
    assert at == len(new)
    listed = json.loads(test_nbd.run('nbdinfo', '--json', own.uri('later')))
    assert listed['exports'][0]['contexts'] == ['base:allocation']


@pytest.mark.needs('qemu')
def test_qemu_reads_changes(own, two):
    """It takes the context in place of base:allocation."""
    where = json.dumps({
        'driver': 'raw', 'file': {
            'driver': 'nbd', 'export': 'later',
            'server': {'type': 'unix', 'path': str(own.nbd)},
            'x-dirty-bitmap': 'qemu:dirty-bitmap:image'}})
    found = json.loads(test_nbd.run(
        'qemu-img', 'map', '--output=json', f'json:{where}'))
    # Changed ranges count as holes there.
    changed = [(e['start'], e['length']) for e in found if not e['data']]
    assert (5 * BLOCK, BLOCK) in changed
    assert sum(length for _, length in changed) <= MIB + 3 * BLOCK


def test_both_contexts(own, two):
    old, new = two
    with nbd_reader.NbdReader(str(own.nbd), 'later', [
            'base:allocation', 'qemu:dirty-bitmap:image']) as reader:
        found = reader.extents(0, len(new))
        assert set(found) == {'base:allocation', 'qemu:dirty-bitmap:image'}
        for extents in found.values():
            assert sum(length for length, _ in extents) == len(new)
    with nbd_reader.NbdReader(
            str(own.nbd), 'later', ['qemu:dirty-bitmap:later']) as reader:
        assert reader.extents(0, len(new)) == {
            'qemu:dirty-bitmap:later': [(len(new), 0)]}


@pytest.mark.parametrize('before', ['other', 'nothing', '../x', ''])
def test_images_without_a_comparison(own, two, before):
    """The log has the reason, since the protocol has no error for it."""
    with pytest.raises(client_errors.BadAnswer):
        nbd_reader.NbdReader(str(own.nbd), 'later',
                             [f'qemu:dirty-bitmap:{before}'])
    test_nbd.require_alive(own)
    if before == 'other':
        assert 'only images of one size can be compared' in own.text()


def test_an_image_that_is_replaced_after_its_comparison(own, two, tmp_path):
    """The ranges are of another upload than the data, so there are none."""
    with own.session() as session:
        session.haggle().option(nbd.STRUCTURED)
        session.structured = True
        session.option(nbd.SET_CONTEXTS, nbd.contexts(
            b'later', b'qemu:dirty-bitmap:image'))
        with repositories.open_repository(tmp_path / 'own') as opened:
            opened.delete('later')
            repositories.put(opened, 'later', two[0])
        session.option(nbd.GO, nbd.name_and(b'later'))
        assert session.answer(nbd.STATUS, 0, 512)[0] == nbd.EINVAL
    test_nbd.require_alive(own)


def test_images_of_a_comparison_are_closed(own, two, tmp_path):
    """Their blocks can be collected when no client compares them."""
    with own.session() as session:
        session.haggle().option(nbd.STRUCTURED)
        session.option(nbd.SET_CONTEXTS, nbd.contexts(
            b'later', b'qemu:dirty-bitmap:image'))
        with repositories.open_repository(tmp_path / 'own') as opened:
            for image_id in 'image', 'later', 'other':
                opened.delete(image_id)
        assert own.run('collect')['last']['result']['freed_blocks'] < 1500
    own.wait_for(lambda: own.run('collect')['last']['result'][
        'freed_blocks'])
    test_nbd.require_alive(own)
