# SPDX-License-Identifier: Apache-2.0

"""Scrubbing: stopped and killed passes, and a repository in use."""

import contextlib
import os
import select
import signal
import time

import pytest

from dedupd.tasks import collector
from dedupd.tasks import scrubber
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.check import checker
from tests.support import maintenance
from tests.support.maintenance import account
from tests.support.maintenance import BLOCK
from tests.support.maintenance import content
from tests.support.maintenance import maintaining
from tests.support import repositories
from tests.support.repositories import DAMAGED
from tests.support.repositories import put
from tests.support.repositories import read_all
from tests.unit.dedupd.tasks import scrubbing
from tests.unit.dedupd.tasks.scrubbing import collect
from tests.unit.dedupd.tasks.scrubbing import damage
from tests.unit.dedupd.tasks.scrubbing import findings
from tests.unit.dedupd.tasks.scrubbing import scrub
from tests.unit.dedupd.tasks.scrubbing import state_of

pytest_plugins = ['tests.support.maintainer_fixtures']

no_pause = scrubbing.no_pause


def started(maintainer):
    """Return the begin of the current pass, or None."""
    state = maintainer.catalog.scrub_state()
    return None if state['complete'] else state['started']


# -- passes -------------------------------------------------------------------

def fill(other, images=6):
    for number in range(images):
        put(other, f'image-{number}', content(number, blocks=50))


def test_pass_goes_on_where_it_was_stopped(
        maintainer, path, repo, other, monkeypatch):
    monkeypatch.setattr(scrubber, 'STEP_SLOTS', 16)
    fill(other)
    account(maintainer)
    bad = maintenance.blocks_of(repo, 'image-3')[7]
    damage(path, bad)
    seen = []
    verify = scrubber._engine.verify_slots

    def verify_slots(handle, number, first, count, *more):
        if count > 1:
            seen.append((number, first))
        return verify(handle, number, first, count, *more)

    monkeypatch.setattr(scrubber._engine, 'verify_slots', verify_slots)
    begun = None
    for _ in range(100):
        steps = []

        def progress(*_):
            steps.append(1)
            if len(steps) == 3:
                pace.stop()

        pace = pacing.Pace(progress=progress)
        try:
            result = scrubber.run_once(maintainer, pace)
        except pacing.Stopped:
            begun = begun or started(maintainer)
            assert started(maintainer) == begun
        else:
            break
    assert result.complete
    assert started(maintainer) is None
    assert len(seen) == len(set(seen))
    assert len(seen) > 18
    assert result.blocks == 300
    assert result.damaged == 1
    assert result.images == ['image-3']
    # The next run begins a new pass.
    del seen[:]
    assert scrub(maintainer, full=False, budget_bytes=0).blocks == 0
    assert started(maintainer) > begun


def test_budget(maintainer, path, other, monkeypatch):
    monkeypatch.setattr(scrubber, 'STEP_SLOTS', 16)
    fill(other)
    read = []
    for _ in range(100):
        result = scrub(maintainer, full=False, budget_bytes=20000)
        read.append(result.bytes)
        if result.complete:
            break
    assert len(read) > 5
    assert result.blocks == 300
    steps = [b - a for a, b in zip(read, read[1:])]
    assert max(steps) < 20000 + 16 * (BLOCK + 32) + 48 * 16


def test_a_full_pass_starts_anew(maintainer, other, monkeypatch):
    monkeypatch.setattr(scrubber, 'STEP_SLOTS', 16)
    fill(other)
    scrub(maintainer, budget_bytes=40000)
    result = scrub(maintainer, full=True)
    assert (result.blocks, result.complete) == (300, True)


def test_pace(maintainer, other):
    fill(other)
    pace = pacing.Pace(rate=100 * 1024)
    begin = time.monotonic()
    with contextlib.suppress(pacing.Stopped):
        result = scrubber.run_once(maintainer, pace)
        took = time.monotonic() - begin
    assert result.bytes > 150 * 1024
    assert took >= result.bytes / pace.rate - 0.1


def test_no_segment_is_read_twice(maintainer, other):
    fill(other)
    once = scrub(maintainer).bytes
    recipes = sum(4096 + 40 * other.stat(i).extents for i in other.images())
    stored = sum(other.stat(i).stored_bytes for i in other.images())
    assert once == recipes + stored


def test_unfinished_tail_is_no_damage(maintainer, path, other):
    """A dead writer's tail is no damage; the next writer judges it (N7.3)."""
    put(other, 'one', content(1))
    group = maintenance.groups(path)[0]
    file = repositories.Group(path, group)
    file.write_entry(file.used(), b'\1' * 32, 1, file.data_start(),
                     512 << 20 | 512 << 37 | 1 << 61)
    file.save()
    result = scrub(maintainer)
    assert (result.damaged, result.blocks) == (0, 10)


def write(file, at, data):
    with open(file, 'r+b') as f:
        f.seek(at)
        f.write(data)


def crash(path, tear):
    """Leave a tail as a machine may that crashes before a sync point.

    :param tear: changes the tail; its argument is the group's file
    """
    with repositories.open_repository(path, codec='none') as repo:
        put(repo, 'gone', content(1))
        assert maintenance.blocks_of(repo, 'gone')[0] == (1, 0)
    os.unlink(path / 'images' / 'gone')
    for name in os.listdir(path / 'spool'):
        os.unlink(path / 'spool' / name)
    group = repositories.Group(path, 1)
    tear(group)
    write(group.path, 512, bytes(1024))     # the published records


def tear_block(group):
    """Clear a block, as if its sector was not written."""
    write(group.path, group.entry(1)[2] + 32 + BLOCK, bytes(BLOCK))


def tear_entry(group):
    """Clear a block and its entry, which is the first one in its sector."""
    write(group.path, group.entry(9)[2] + 32 + BLOCK, bytes(BLOCK))
    write(group.path, group.entry_offset(9), bytes(56))


def tear_checksum(group):
    """Clear the checksum of a segment's header.

    The checksum begins a sector that has zeros otherwise.
    """
    write(group.path, group.entry(1)[2] + 24, bytes(8))


def tear_reserved(group):
    write(group.path, group.entry(1)[2] + 20, b'garbage')


@pytest.mark.parametrize('tear', [
    tear_block, tear_entry, tear_checksum, tear_reserved])
def test_what_a_torn_tail_has_left_is_no_damage(path, tear):
    """The good blocks of a torn segment are used (N7.3)."""
    crash(path, tear)
    with repositories.open_repository(path, codec='none') as repo:
        with maintaining(repo) as maintainer:
            assert findings(path) == []
            put(repo, 'next', content(9))
            # The next writer has judged the tail, so only the torn blocks are
            # stored again.
            assert put(repo, 'one', content(1)).new_bytes < 4 * BLOCK
            assert read_all(repo, 'one') == content(1)
            assert findings(path) == []
            for _ in range(2):
                account(maintainer)
                collect(maintainer)
                assert findings(path) == []
                result = scrub(maintainer)
                assert (result.damaged, result.worn) == (0, 0)
            states = maintenance.states(path, 1)
            assert DAMAGED not in states
            assert read_all(repo, 'one') == content(1)
    # The checksum of every byte in the segment is valid.
    assert not [note for note in findings(path, checker.NOTE)
                if 'checksum' in note]


# -- killed -------------------------------------------------------------------

@pytest.mark.parametrize('calls', range(2, 60, 3))
def test_killed_anywhere(path, calls):
    """Damage is found after a kill at any call, and no false damage is."""
    with repositories.open_repository(path, codec='none') as repo:
        put(repo, 'one', content(1))
        put(repo, 'two', content(2))
        with maintaining(repo) as maintainer:
            account(maintainer)
        bad = maintenance.blocks_of(repo, 'one')[3]
        damage(path, bad)
        maintainer = scrubber.maintainer_role.Maintainer(repo)
        maintenance.watch(maintainer, maintenance.Kill(calls))
        with contextlib.suppress(maintenance.Killed):
            scrub(maintainer)
        maintenance.kill(maintainer)
        with maintaining(repo) as maintainer:
            result = scrub(maintainer, full=False)
            result = scrub(maintainer)
            assert result.images == ['one']
            [facts] = maintainer.catalog.damaged().values()
            assert facts['images'] == ['one']
            assert state_of(path, bad) == DAMAGED
            put(repo, 'three', content(1))
            scrub(maintainer)
            assert read_all(repo, 'one') == content(1)
            account(maintainer)
            collect(maintainer)
            maintenance.require_counted(maintainer)
        assert findings(path) == []


def test_cursor_survives_a_kill(path):
    with repositories.open_repository(path, codec='none') as repo:
        fill(repo)

    def child():
        scrubber.STEP_SLOTS = 16
        with repositories.open_repository(path, codec='none') as repo:
            with maintaining(repo) as maintainer:
                def progress(done, total, what):
                    if 'group' in what and done > 100:
                        os.kill(os.getpid(), signal.SIGKILL)
                scrubber.run_once(maintainer, pacing.Pace(progress))

    with pytest.raises(repositories.ChildFailed):
        repositories.in_child(child)
    with repositories.open_repository(path, codec='none') as repo:
        with maintaining(repo) as maintainer:
            assert started(maintainer) is not None
            before = maintainer.catalog.scrub_state()
            assert before['blocks'] >= 100
            result = scrub(maintainer, full=False)
            assert (result.blocks, result.complete) == (300, True)


# -- a repository in use ------------------------------------------------------

def test_no_false_damage(path):
    """Scrubbing finds no damage while others store, delete and collect.

    The test runs for six seconds and until each process has made two rounds.
    """
    def work(number):
        def run():
            deadline = time.monotonic() + 6
            rounds = 0
            with repositories.open_repository(path) as repo:
                while time.monotonic() < deadline or rounds < 2:
                    name = f'image-{number}-{rounds % 4}'
                    with contextlib.suppress(exceptions.ImageNotFound):
                        repo.delete(name)
                    put(repo, name, content(
                        number, rounds % 7, 10 + rounds, blocks=20))
                    rounds += 1
        return run

    children = [repositories.fork_child(work(n)) for n in (1, 2)]
    results = [reading for _, reading in children]
    try:
        with repositories.open_repository(path) as repo:
            with maintaining(repo) as maintainer:
                passes = 0
                while passes < 2 or len(select.select(
                        results, [], [], 0)[0]) < len(results):
                    result = scrub(maintainer, spare_threshold=3)
                    assert result.damaged == 0
                    assert result.unreadable == {}
                    assert result.worn == 0
                    account(maintainer)
                    collector.run_once(maintainer, pacing.Pace(),
                                       live_share=80, evacuate_share=10)
                    passes += 1
    finally:
        for child in children:
            repositories.wait_for_child(child)
    with repositories.open_repository(path) as repo:
        with maintaining(repo) as maintainer:
            account(maintainer)
            result = scrub(maintainer)
            assert (result.damaged, result.complete) == (0, True)
    assert os.listdir(path / 'quarantine') == []
    repositories.require_clean(path)


# -- repository.json ----------------------------------------------------------

def test_no_block_is_judged_by_another_digest(path):
    """If ``repository.json`` names another digest, no block is marked.

    New blocks go into a group of their own. Once the file is as it was, all
    old blocks are there.
    """
    with repositories.open_repository(path, codec='none') as repo:
        put(repo, 'one', content(1))
        with maintaining(repo) as maintainer:
            account(maintainer)
    group = repositories.group_path(path, 1)
    before = group.read_bytes()
    repositories.edit_parameters(path, fingerprint='sha512-256')
    with repositories.open_repository(path, codec='none') as repo:
        with pytest.raises(exceptions.DamagedError, match='another digest'):
            read_all(repo, 'one')
        assert put(repo, 'two', content(1)).new_bytes == len(content(1))
        assert read_all(repo, 'two') == content(1)
        with maintaining(repo) as maintainer:
            account(maintainer)
            result = scrub(maintainer)
        assert (result.blocks, result.damaged) == (10, 0)
    assert group.read_bytes() == before
    assert not list((path / 'quarantine').glob('*'))
    assert any('groups/00000001' in line and 'fingerprints by sha256' in line
               for line in findings(path))
    repositories.edit_parameters(path, fingerprint='sha256')
    with repositories.open_repository(path, codec='none') as repo:
        assert read_all(repo, 'one') == content(1)
