# SPDX-License-Identifier: Apache-2.0

"""Copies that are meant as copies stay copies (I14), whatever tasks run.

The blocks of an image that is stored without deduplication are neither joined
with one another, nor found by other uploads, nor replaced by merging.
"""

import contextlib
import struct

import pytest

from dedupd.tasks import collector
from dedupd.tasks import merger
from dedupd.tasks import recompressor
from dedupd.tasks import tierer
from glance_dedup.base import pacing
from glance_dedup.check import checker
from glance_dedup.maintenance import block_addresses
from glance_dedup.repository import features
from glance_dedup.repository import openvolumes
from tests.support import bucket
from tests.support import maintenance
from tests.support.maintenance import maintaining
from tests.support import repositories
from tests.unit.dedupd.tasks import scrubbing

no_pause = scrubbing.no_pause

BLOCK = 512
DATA = maintenance.content(1, blocks=40)
MODEL = {'copies': DATA * 2, 'again': DATA, 'shared': DATA,
         'duplicate': DATA, 'goes': maintenance.content(2, blocks=100)}
POLICIES = {
    'hash': {'fingerprint': 'sha256', 'verify': 'fingerprint'},
    'value': {'fingerprint': 'xxh3-128', 'verify': 'bytes'},
}


@pytest.fixture(params=sorted(POLICIES))
def repo(request, tmp_path):
    path = repositories.create(tmp_path / 'repo', block_size=BLOCK,
                               group_slots=64, **POLICIES[request.param])
    with repositories.open_repository(path, codec='none') as repo:
        for name in 'copies', 'again':
            repositories.put(repo, name, MODEL[name], dedup=False)
        repositories.put(repo, 'goes', MODEL['goes'], dedup=False)
        repositories.put(repo, 'shared', MODEL['shared'])
        repositories.put_unaware(repo, 'duplicate', MODEL['duplicate'])
        yield repo


def require_apart(repo, merged):
    """Require that the marked blocks are apart, and others as they were."""
    model = {name: data for name, data in MODEL.items()
             if name in repo.images()}
    for name, data in model.items():
        assert repositories.read_all(repo, name) == data
    blocks = {name: maintenance.blocks_of(repo, name) for name in model}
    apart = blocks['copies'] + blocks['again']
    assert len(set(apart)) == 3 * 40
    assert not set(apart) & {*blocks['shared'], *blocks['duplicate']}
    assert len({*blocks['shared'], *blocks['duplicate']}) == (
        40 if merged else 80)
    for number in maintenance.groups(repo.path):
        assert repositories.Group(repo.path, number).copies_together() == []


def merge(repo):
    with maintaining(repo) as maintainer:
        maintenance.account(maintainer)
        result = merger.run_once(maintainer, pacing.Pace())
        assert not result.failed
        return result.images


def test_merging(repo):
    assert repo.features == [features.NODEDUP]
    require_apart(repo, merged=False)
    assert merge(repo) == 1
    require_apart(repo, merged=True)
    assert merge(repo) == 0
    report = checker.check(repo.path)
    assert report.ok
    # The duplicates are 40 that are not collected yet.
    assert (report.figures['copy_blocks'],
            report.figures['duplicate_blocks']) == (220, 40)


def test_moves(repo):
    """The mark moves with its block, also into another group."""
    with maintaining(repo) as maintainer:
        maintenance.account(maintainer)
        repo.delete('goes')
        before = maintenance.blocks_of(repo, 'again')
        for _ in range(2):
            collector.run_once(maintainer, pacing.Pace(), live_share=100,
                               evacuate_share=100)
        recompressor.run_once(maintainer, pacing.Pace(), 'zstd', 3,
                              similar=True)
    assert maintenance.blocks_of(repo, 'again') != before
    merge(repo)
    require_apart(repo, merged=True)
    repositories.put(repo, 'later', DATA)
    assert not {*maintenance.blocks_of(repo, 'later')} & {
        *maintenance.blocks_of(repo, 'copies')}
    assert checker.check(repo.path).ok


def marks(repo, name):
    """Return which marks the blocks of an image have."""
    return {repositories.Group(repo.path, group).is_nodedup(slot)
            for group, slot in maintenance.blocks_of(repo, name)}


def test_cold_groups(repo):
    """Marks stay in groups that move, and in those that get new objects."""
    policy = tierer.Policy(everything=True, live_share=100)
    with contextlib.ExitStack() as stack:
        stack.enter_context(bucket.beside(repo.path))
        bucket.attach(repo)
        maintainer = stack.enter_context(maintaining(repo))
        maintenance.account(maintainer)
        assert tierer.run_once(maintainer, pacing.Pace(), policy).groups > 3
        merger.run_once(maintainer, pacing.Pace())
        require_apart(repo, merged=True)
        repo.delete('goes')
        collector.run_once(maintainer, pacing.Pace(), evacuate_share=0)
        assert tierer.run_once(maintainer, pacing.Pace(), policy).renewed
        bucket.forget_slices(repo)
        require_apart(repo, merged=True)
        repositories.put(repo, 'later', DATA)
        assert {*maintenance.blocks_of(repo, 'later')} <= {
            *maintenance.blocks_of(repo, 'shared'),
            *maintenance.blocks_of(repo, 'duplicate')}
        assert marks(repo, 'copies') == marks(repo, 'again') == {True}
        assert marks(repo, 'shared') == {False}
    assert checker.check(repo.path).ok


@pytest.mark.parametrize('similar', [False, True])
def test_equal_blocks_of_one_upload(tmp_path, monkeypatch, similar):
    """Each is in a segment of its own, before and after recompression."""
    path = repositories.create(tmp_path / 'repo', block_size=BLOCK)
    data = DATA[:BLOCK] * 15
    monkeypatch.setattr(recompressor, '_WORTH', -1)
    with repositories.open_repository(path, codec='lz4') as repo:
        repositories.put(repo, 'ordinary', data)
        for name in 'one', 'two':
            repositories.put(repo, name, data, dedup=False)
        with maintaining(repo) as maintainer:
            maintenance.account(maintainer)
            before = repositories.Group(path, 1)
            assert before.copies_together() == []
            assert len({before.entry(slot)[2] for slot in range(31)}) == 31
            recompressor.run_once(maintainer, pacing.Pace(), 'zstd', 9,
                                  similar=similar)
            after = repositories.Group(path, 1)
            assert after.record()[1] != before.record()[1]
            assert after.copies_together() == []
        for name in 'ordinary', 'one', 'two':
            assert repositories.read_all(repo, name) == data


def test_shared_by_address(repo):
    """Clones and snapshots of marked blocks need no copies of them."""
    with repo.open_image('copies') as image:
        openvolumes.create(repo, 'disk', image=image)
    with openvolumes.open_volume(repo, 'disk') as volume:
        volume.snapshot('snapshot')
    merge(repo)
    require_apart(repo, merged=True)
    assert maintenance.blocks_of(repo, 'snapshot') == (
        maintenance.blocks_of(repo, 'copies'))


def test_copies_in_another_scope(repo):
    """The blocks of a copied image have their marks again."""
    with repo.open_image('copies') as image:
        repo.copy(image, 'moved', project='p', scope='project')
    moved = maintenance.blocks_of(repo, 'moved')
    assert len({*moved}) == 80
    assert all(repositories.Group(repo.path, group).is_nodedup(slot)
               for group, slot in moved)
    repositories.put(repo, 'later', DATA, project='p', scope='project')
    assert not {*moved} & {*maintenance.blocks_of(repo, 'later')}
    with repo.open_image('shared') as image:
        repo.copy(image, 'ordinary', project='p', scope='project')
    assert maintenance.blocks_of(repo, 'ordinary') == (
        maintenance.blocks_of(repo, 'later'))
    assert checker.check(repo.path).ok


def test_equal_content_at_an_address(repo):
    """A backup offers its server's previous addresses for equal content."""
    with repo.begin('backup') as transaction:
        for name, is_found in ('copies', False), ('shared', True):
            (group, slot), *_ = maintenance.blocks_of(repo, name)
            place = struct.pack('<Q', block_addresses.address(group, slot))
            fingerprint = repositories.Group(repo.path, group).entry(slot)[0]
            assert transaction.find_at(
                fingerprint, struct.pack('<I', BLOCK), place) == (
                    place if is_found and repo.parameters.is_cryptographic
                    else bytes(8))


# -- healing ------------------------------------------------------------------

@pytest.fixture
def damaged(request, tmp_path):
    """Return a repository in which one block of an image went bad.

    The test's parameters are whether the image, and the other one with the
    same content, are stored without deduplication.
    """
    path = repositories.create(tmp_path / 'repo', block_size=BLOCK,
                               group_slots=64)
    with repositories.open_repository(path, codec='none') as repo:
        repositories.put(repo, 'bad', DATA, dedup=not request.param[0])
        with maintaining(repo) as maintainer:
            maintenance.account(maintainer)
            scrubbing.damage(path, maintenance.blocks_of(repo, 'bad')[7])
            assert scrubbing.scrub(maintainer).images == ['bad']
        repositories.put(repo, 'good', DATA, dedup=not request.param[1])
        yield repo


@pytest.mark.parametrize('damaged', [(True, True), (True, False),
                                     (False, True)], indirect=True)
def test_healing(request, damaged):
    """A healed block has its mark again, and is none of the other image's."""
    bad, good = request.node.callspec.params['damaged']
    before = maintenance.blocks_of(damaged, 'good')
    with maintaining(damaged) as maintainer:
        merger.run_once(maintainer, pacing.Pace())      # it makes the index
        assert scrubbing.scrub(maintainer).healed == 1
        merger.run_once(maintainer, pacing.Pace())
        maintenance.require_counted(maintainer)
    assert repositories.read_all(damaged, 'bad') == DATA
    assert maintenance.blocks_of(damaged, 'good') == before
    healed = maintenance.blocks_of(damaged, 'bad')
    assert not set(healed) & set(before)
    assert marks(damaged, 'bad') == {bad}
    assert marks(damaged, 'good') == {good}
    assert checker.check(damaged.path).ok


def test_healing_by_an_ordinary_block(tmp_path):
    """Of two good copies, the one that can be shared is."""
    path = repositories.create(tmp_path / 'repo', block_size=BLOCK,
                               group_slots=64)
    with repositories.open_repository(path, codec='none') as repo:
        repositories.put(repo, 'bad', DATA)
        bad = maintenance.blocks_of(repo, 'bad')[7]
        with maintaining(repo) as maintainer:
            maintenance.account(maintainer)
            scrubbing.damage(path, bad)
            scrubbing.scrub(maintainer)
            repositories.put(repo, 'copy', DATA, dedup=False)
            repositories.put(repo, 'ordinary', DATA)
            repositories.put(repo, 'more', DATA, dedup=False)
            assert scrubbing.scrub(maintainer).healed == 1
        assert maintenance.blocks_of(repo, 'bad') == (
            maintenance.blocks_of(repo, 'ordinary'))
