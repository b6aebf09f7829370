# SPDX-License-Identifier: Apache-2.0

"""Scrubbing: spare copies, and fingerprints that are not cryptographic."""

import json
import os
import pathlib
import types

import pytest
import xxhash

from dedupd.tasks import merger
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.check import checker
from tests.support import maintenance
from tests.support.maintenance import account
from tests.support.maintenance import BLOCK
from tests.support.maintenance import content
from tests.support.maintenance import maintaining
from tests.support import repositories
from tests.support.repositories import put
from tests.support.repositories import read_all
from tests.unit.dedupd.tasks import scrubbing
from tests.unit.dedupd.tasks.scrubbing import damage
from tests.unit.dedupd.tasks.scrubbing import findings
from tests.unit.dedupd.tasks.scrubbing import flip
from tests.unit.dedupd.tasks.scrubbing import scrub
from tests.unit.repository import format_writer

pytest_plugins = ['tests.support.maintainer_fixtures']

no_pause = scrubbing.no_pause


# -- spare copies -------------------------------------------------------------

def test_spare_copies(maintainer, path, repo, other):
    for number in range(3):
        put(other, f'image-{number}', content(1, 10 + number))
    account(maintainer)
    result = scrub(maintainer, spare_threshold=3)
    assert result.spares == 10
    assert result.spare_bytes == sum(
        os.stat(path / 'spares' / name).st_size
        for name in os.listdir(path / 'spares'))
    assert checker.check(path).figures['spares'] == 10
    # A block is read from its copy,
    bad = maintenance.blocks_of(repo, 'image-0')[4]
    damage(path, bad)
    with repositories.open_repository(path) as third:
        assert read_all(third, 'image-1') == content(1, 11)
    assert checker.check(path).damaged_images == []
    # and healed from it.
    result = scrub(maintainer, spare_threshold=3)
    assert (result.damaged, result.images) == (1, [])
    assert result.healed == 1
    for number in range(3):
        assert read_all(other, f'image-{number}') == content(1, 10 + number)
        assert bad not in maintenance.blocks_of(repo, f'image-{number}')
    assert result.spares == 10
    # Fewer blocks are used so often, and then none have a copy.
    assert scrub(maintainer, spare_threshold=4).spares == 0
    assert os.listdir(path / 'spares') == []
    maintainer.close()
    assert findings(path) == []


def test_spares_are_of_the_most_used(maintainer, path, repo, other):
    put(other, 'all', content(1, 2, 3, 4, blocks=8))
    put(other, 'most', content(1, 2, blocks=8))
    put(other, 'least', content(3, blocks=8))
    put(other, 'again', content(2, blocks=8))
    account(maintainer)
    result = scrub(maintainer, spare_threshold=2, spare_max=16 * BLOCK)
    assert result.spares == 16
    # Block 2 is named three times; of the others, the lower addresses count.
    damage(path, maintenance.blocks_of(repo, 'all')[8])
    with repositories.open_repository(path) as third:
        assert read_all(third, 'again') == content(2, blocks=8)
    result = scrub(maintainer, spare_threshold=2)
    assert result.spares == 24
    assert result.images == []


def test_spares_in_several_files(maintainer, path, other):
    put(other, 'one', content(1, 2, blocks=70))
    put(other, 'two', content(1, 2, blocks=70))
    account(maintainer)
    result = scrub(maintainer, spare_threshold=2)
    assert result.spares == 140
    assert sorted(os.listdir(path / 'spares')) == [
        '00000001', '00000002', '00000003']
    other.delete('two')
    account(maintainer)
    assert scrub(maintainer, spare_threshold=2).spares == 0
    assert os.listdir(path / 'spares') == []


def test_spare_that_went_bad_is_renewed(maintainer, path, repo, other):
    put(other, 'one', content(1))
    put(other, 'two', content(1))
    account(maintainer)
    scrub(maintainer, spare_threshold=2)
    file = path / 'spares' / '00000001'
    flip(file, file.stat().st_size - 5)
    assert findings(path) != []
    scrub(maintainer, spare_threshold=2)
    assert findings(path) == []


def test_without_spares_nothing_is_made(maintainer, path, other):
    put(other, 'one', content(1))
    assert scrub(maintainer).spares == 0
    assert not (path / 'spares').exists() or not os.listdir(path / 'spares')


# -- fingerprints that are not cryptographic ----------------------------------

@pytest.fixture
def weak(tmp_path):
    return maintenance.create(tmp_path / 'weak', fingerprint='xxh3-128',
                              verify='bytes')


@pytest.fixture
def weak_repo(weak):
    with repositories.open_repository(weak, codec='none') as repo:
        yield repo


@pytest.fixture
def weak_maintainer(weak_repo):
    with maintaining(weak_repo) as maintainer:
        yield maintainer


def put_twins(repo):
    """Store two images with one different block of equal fingerprint."""
    mine, its = maintenance.twins(1)
    assert mine != its
    ends = content(1, blocks=3), content(2, blocks=3)
    images = {name: ends[0] + block + ends[1]
              for name, block in (('one', mine), ('two', its))}
    for name, data in images.items():
        put(repo, name, data)
        assert read_all(repo, name) == data
    first, second = (maintenance.blocks_of(repo, name)[3] for name in images)
    assert first != second
    entries = [repositories.Group(repo.path, group).entry(slot)
               for group, slot in (first, second)]
    assert entries[0][:2] == entries[1][:2]     # fingerprint, checksum
    return images


def require_no_other(path, images, bad):
    """Require correct data, and a report of the damaged image."""
    with repositories.open_repository(path, codec='none') as reader:
        for name, data in images.items():
            if name == bad:
                with pytest.raises(exceptions.DamagedError):
                    read_all(reader, name)
            else:
                assert read_all(reader, name) == data
    report = checker.check(path)
    assert report.damaged_images == [bad]
    assert not report.ok


def test_no_healing_by_a_block_that_has_its_fingerprint(
        weak, weak_repo, weak_maintainer, caplog):
    images = put_twins(weak_repo)
    account(weak_maintainer)
    damage(weak, maintenance.blocks_of(weak_repo, 'one')[3])
    for _ in range(3):
        result = scrub(weak_maintainer)
        assert (result.healed, result.images) == (0, ['one'])
        merger.run_once(weak_maintainer, pacing.Pace())
        require_no_other(weak, images, 'one')
    assert 'xxh3-128 is not cryptographic' in caplog.text
    # An equal block is stored again, since only its twin has been found so
    # far.
    put(weak_repo, 'again', images['one'])
    assert read_all(weak_repo, 'again') == images['one']


def test_what_is_damaged_hinders_no_merging(
        tmp_path, weak, weak_repo, weak_maintainer):
    """A damaged pair does not stop the merging of the other pairs."""
    images = put_twins(weak_repo)
    images.update(three=content(3), four=content(3))
    # The other host has its own filter, which does not know the first host's
    # blocks.
    (tmp_path / 'filter').mkdir()
    with repositories.open_repository(
            weak, codec='none', filter_dir=str(tmp_path / 'filter')) as away:
        with away.begin('four') as transaction:
            put(weak_repo, 'three', content(3))
            transaction.write(content(3))
            transaction.commit()
    account(weak_maintainer)
    assert merger.plan(weak_maintainer).duplicates == 11
    bad = max(maintenance.blocks_of(weak_repo, name)[5]
              for name in ('three', 'four'))
    hit, = (name for name in ('three', 'four')
            if bad in maintenance.blocks_of(weak_repo, name))
    damage(weak, bad)
    assert scrub(weak_maintainer).images == [hit]
    result = merger.run_once(weak_maintainer, pacing.Pace())
    assert result.failed == {}
    assert len(set(maintenance.blocks_of(weak_repo, 'three')).intersection(
        maintenance.blocks_of(weak_repo, 'four'))) == 9
    require_no_other(weak, images, hit)


def test_a_block_that_can_be_read_after_all_is_healed(
        weak, weak_repo, weak_maintainer):
    images = put_twins(weak_repo)
    account(weak_maintainer)
    bad = maintenance.blocks_of(weak_repo, 'one')[3]
    damage(weak, bad)
    assert scrub(weak_maintainer).images == ['one']
    damage(weak, bad)   # the second call restores the block
    result = scrub(weak_maintainer)
    assert (result.healed, result.images) == (1, [])
    assert bad not in maintenance.blocks_of(weak_repo, 'one')
    for name, data in images.items():
        assert read_all(weak_repo, name) == data


def test_no_spare_copies_of_weak_fingerprints(
        weak, weak_repo, weak_maintainer, caplog):
    images = put_twins(weak_repo)
    for number in range(3):
        images[f'more-{number}'] = images['two'] + content(10 + number)
        put(weak_repo, f'more-{number}', images[f'more-{number}'])
    account(weak_maintainer)
    result = scrub(weak_maintainer, spare_threshold=2)
    assert (result.spares, result.complete) == (0, True)
    assert not os.path.exists(weak / 'spares')
    assert 'No spare copies are written' in caplog.text
    damage(weak, maintenance.blocks_of(weak_repo, 'one')[3])
    require_no_other(weak, images, 'one')
    scrub(weak_maintainer, spare_threshold=2)
    require_no_other(weak, images, 'one')


def write_spares(repo, blocks):
    """Write spare copies as an earlier engine did, for any fingerprint."""
    with open(os.path.join(repo.path, 'repository.json'), 'rb') as f:
        parameters = json.load(f)
    like = types.SimpleNamespace(
        path=pathlib.Path(repo.path), block_size=BLOCK, group_slots=64,
        repository_id=bytes.fromhex(parameters['repository_id']),
        fingerprint=parameters['fingerprint'], write=None)
    spares = format_writer.Spares(like, 1, compute=lambda block: bytes(
        xxhash.xxh3_128_digest(block)) + bytes(16))
    spares.append(blocks)
    spares.publish()
    file = pathlib.Path(repo.path, 'spares', '00000001')
    file.write_bytes(spares.content())
    file.chmod(0o600)


@pytest.mark.parametrize('marked', [False, True])
def test_spare_copies_of_weak_fingerprints_are_not_read(
        weak, weak_repo, weak_maintainer, marked):
    """Spare copies that an earlier version wrote are not read."""
    images = put_twins(weak_repo)
    account(weak_maintainer)
    write_spares(weak_repo, [maintenance.twins(1)[1]])
    damage(weak, maintenance.blocks_of(weak_repo, 'one')[3])
    if marked:
        scrub(weak_maintainer, budget_bytes=1 << 30)
        write_spares(weak_repo, [maintenance.twins(1)[1]])
    require_no_other(weak, images, 'one')
    assert any('is never read' in note
               for note in findings(weak, checker.NOTE))
    # The next pass removes these copies.
    state = weak_maintainer.catalog.scrub_state()
    weak_maintainer.catalog.set_scrub_state(
        {**state, 'spares': {'files': 1, 'blocks': 1, 'bytes': 9}})
    assert scrub(weak_maintainer).images == ['one']
    assert os.listdir(weak / 'spares') == []
    require_no_other(weak, images, 'one')
