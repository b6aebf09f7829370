# SPDX-License-Identifier: Apache-2.0

"""Counts of shared blocks per project, compared with a full count."""

import collections
import fractions
import os
import random

import pytest

from dedupd.tasks import collector
from dedupd.tasks import merger
from dedupd.tasks import project_usage
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import rebuild_worker
from glance_dedup.repository import projects
from tests.support import maintenance
from tests.support.maintenance import account
from tests.support.maintenance import content
from tests.support.maintenance import maintaining
from tests.support import repositories
from tests.support.repositories import put

pytest_plugins = ['tests.support.maintainer_fixtures']


def count(maintainer, pace=None):
    return project_usage.run_once(maintainer, pace or pacing.Pace())


def scratch(repo):
    """Return the expected content of the file, from the recipes alone."""
    sums = collections.defaultdict(lambda: dict.fromkeys(projects.SUMS, 0))
    named = collections.defaultdict(set)
    for image_id in repo.images():
        stat = repo.stat(image_id)
        blocks = maintenance.blocks_of(repo, image_id)
        found = sums[stat.project]
        found['images'] += 1
        found['logical_bytes'] += stat.size
        found['zero_bytes'] += stat.zero_bytes
        found['new_bytes'] += stat.new_bytes
        found['stored_bytes'] += stat.stored_bytes
        found['blocks'] += len(blocks)
        named[stat.project].update(blocks)
    sharers = collections.Counter(
        block for blocks in named.values() for block in blocks)
    used = collections.Counter(group for group, _ in sharers)
    files = os.path.join(repo.path, 'groups')
    disk = {group: 512 * os.stat(f'{files}/{group:08x}').st_blocks
            for group in used}
    return {project: {
        **found,
        'exclusive_blocks': sum(sharers[b] == 1 for b in named[project]),
        'shared_blocks': sum(sharers[b] > 1 for b in named[project]),
        'charged_bytes': sum(
            fractions.Fraction(disk[group[0]], used[group[0]]
                               * sharers[group])
            for group in named[project])}
            for project, found in sums.items()}, sum(disk.values())


def require_right(repo):
    """Require that the file agrees with the recipes."""
    known = projects.load(repo.path)
    expected, disk = scratch(repo)
    assert sorted(known) == sorted(expected)
    for name, facts in expected.items():
        found = known[name]
        charged = facts.pop('charged_bytes')
        exclusive = facts.pop('exclusive_blocks')
        shared = facts.pop('shared_blocks')
        assert {key: getattr(found, key) for key in facts} == facts
        assert found.sharing.exclusive_blocks == exclusive
        assert found.sharing.shared_blocks == shared
        assert abs(found.sharing.charged_bytes - charged) < 1
    # Each byte is charged exactly once.
    assert abs(disk - sum(found.sharing.charged_bytes
                          for found in known.values())) <= len(known)


@pytest.mark.parametrize('seed', range(6))
def test_against_a_count_from_scratch(path, repo, seed, monkeypatch):
    """The counts are right after random uploads, deletions and merges."""
    rng = random.Random(seed)
    if seed % 2:
        # There are several partitions, though there are few groups.
        monkeypatch.setattr(rebuild_worker, '_GROUPS', 2)
    with maintaining(repo) as maintainer:
        for turn in range(4):
            for _ in range(8):
                image_id = f'image-{rng.randrange(20)}'
                if image_id in repo.images():
                    repo.delete(image_id)
                else:
                    put(repo, image_id, content(
                        *(rng.randrange(12) for _ in range(4)),
                        blocks=rng.randrange(1, 40)),
                        project=f'project-{rng.randrange(6)}',
                        scope=rng.choice(['global', 'global', 'project']),
                        dedup=rng.random() < 0.8)
            if turn % 2:
                merger.run_once(maintainer, pacing.Pace())
            collector.run_once(maintainer, pacing.Pace())
            result = count(maintainer)
            assert result.images == len(repo.images())
            assert result.left_out == 0
            assert result.projects == len({
                repo.stat(image_id).project for image_id in repo.images()})
            require_right(repo)
    repositories.require_clean(path)


def test_sums_are_written_by_accounting(path, repo):
    with maintaining(repo) as maintainer:
        account(maintainer)
        assert projects.load(path) == {}
        put(repo, 'a', content(1), project='one')
        account(maintainer)
        found = projects.load(path)['one']
        assert found.images == 1 and found.sharing is None
        assert found.stored_bytes == repo.stat('a').stored_bytes > 0
        # The file is written only after a change.
        before = os.stat(path / projects.NAME).st_ino
        account(maintainer)
        assert os.stat(path / projects.NAME).st_ino == before
        count(maintainer)
        # The counts stay in the file, with the project's next sums.
        sharing = projects.load(path)['one'].sharing
        assert sharing.exclusive_blocks == 10
        put(repo, 'b', content(2), project='one')
        put(repo, 'c', content(1), project='two')
        account(maintainer)
        found = projects.load(path)
        assert found['one'].images == 2 and found['one'].sharing == sharing
        assert found['two'].stored_bytes == 0
        assert found['two'].sharing is None
        repo.delete('c')
        account(maintainer)
        assert sorted(projects.load(path)) == ['one']
    assert os.stat(path / projects.NAME).st_mode & 0o777 == 0o600


def test_the_next_maintainer_writes_a_file_that_is_lost(path, repo):
    put(repo, 'a', content(1), project='one')
    with maintaining(repo) as maintainer:
        account(maintainer)
    (path / projects.NAME).write_bytes(b'{}')
    assert projects.load(path) is None
    with maintaining(repo) as maintainer:
        account(maintainer)
        assert projects.load(path)['one'].images == 1
        maintainer.rebuild()
        (path / projects.NAME).unlink()
        account(maintainer)
        assert projects.load(path)['one'].images == 1


def test_accounting_goes_on_if_the_file_cannot_be_written(
        path, repo, caplog):
    put(repo, 'a', content(1), project='one')
    (path / f'{projects.NAME}.new').mkdir()
    with maintaining(repo) as maintainer:
        assert account(maintainer).counted + len(
            list(maintainer.catalog.ledger())) >= 1
        assert 'projects.json cannot be written' in caplog.text
        assert projects.load(path) is None
        (path / f'{projects.NAME}.new').rmdir()
        account(maintainer)
        assert projects.load(path)['one'].images == 1


def test_images_that_go_meanwhile_are_left_out(path, repo):
    for image_id in 'abc':
        put(repo, image_id, content(1, 2), project=image_id)

    def progress(done, total, what):
        if what == 'reading images' and done == 1:
            repo.delete('b')
            (path / 'images' / 'c').write_bytes(b'damaged')
    with maintaining(repo) as maintainer:
        account(maintainer)
        result = count(maintainer, pacing.Pace(progress))
    assert (result.images, result.left_out) == (1, 2)
    assert projects.load(path)['a'].sharing.exclusive_blocks == 20


def test_a_run_that_is_stopped_changes_nothing(path, repo):
    put(repo, 'a', content(1), project='one')
    with maintaining(repo) as maintainer:
        account(maintainer)
        pace = pacing.Pace(lambda *args: pace.stop())
        with pytest.raises(pacing.Stopped):
            count(maintainer, pace)
        assert projects.load(path)['one'].sharing is None
        assert count(maintainer).projects == 1


def test_nothing_stays_on_the_disk(path, repo, tmp_path, monkeypatch):
    scratch = tmp_path / 'scratch'
    scratch.mkdir()
    monkeypatch.setenv('TMPDIR', str(scratch))
    put(repo, 'a', content(1), project='one')
    seen = []
    with maintaining(repo) as maintainer:
        count(maintainer, pacing.Pace(lambda *args: seen.append(
            any(os.readlink(f'/proc/self/fd/{name}').startswith(str(scratch))
                for name in os.listdir('/proc/self/fd')
                if os.path.islink(f'/proc/self/fd/{name}')))))
    assert seen and all(seen)
    assert os.listdir(scratch) == []


def test_a_run_that_no_group_has():
    with pytest.raises(exceptions.DamagedError, match='no 2 slots'):
        project_usage._bits([bytes.fromhex('01000000ff7f000002000000')])


@pytest.mark.parametrize('most', [1, 2, 7, 100])
def test_planes_count(most):
    """The bit planes give the same counts as a counter for each block."""
    rng = random.Random(most)
    planes, counts = [], collections.Counter()
    for _ in range(most):
        bits = rng.getrandbits(200)
        project_usage._increase(planes, bits)
        counts.update(slot for slot in range(200) if bits >> slot & 1)
    some = rng.getrandbits(200) & sum(1 << slot for slot in counts)
    assert dict(project_usage._by_sharers(some, planes)) == (
        collections.Counter(counts[slot] for slot in range(200)
                            if some >> slot & 1))
