# SPDX-License-Identifier: Apache-2.0

"""Work of helpers, and the maintainer's use of their findings."""

import contextlib
import os
import time

import pytest

from dedupd.tasks import collector
from dedupd.tasks import findings
from dedupd.tasks import recompressor
from dedupd.tasks import sharescrub
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.check import checker
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import helper_daemon
from glance_dedup.maintenance import host_notes
from glance_dedup.maintenance import live_hosts
from tests.support import maintenance
from tests.support.maintenance import BLOCK
from tests.support.maintenance import SLOTS
from tests.support import repositories
from tests.support.repositories import noise
from tests.support.repositories import put
from tests.unit.dedupd.tasks import scrubbing

pytest_plugins = ['tests.support.maintainer_fixtures']

ZSTD = 2


@pytest.fixture
def helper(path, other):
    with (live_hosts.Hosts(path) as hosts,
          helper_daemon.Helper(other, hosts) as helper):
        yield helper


@pytest.fixture
def model(other):
    """Store two full groups of text, one of noise, and a partial one."""
    text = [noise(SLOTS * BLOCK // 2, seed).hex().encode() for seed in (1, 2)]
    model = {'text': b''.join(text), 'noise': noise(SLOTS * BLOCK, 3),
             'rest': noise(5 * BLOCK, 4)}
    for image_id, data in model.items():
        put(other, image_id, data)
    return model


def everything(group):
    return True


def recompress(helper, pace=None, is_mine=everything):
    return recompressor.run_once(helper, pace or pacing.Pace(), 'zstd', 0,
                                 is_mine)


def scrub(helper, is_mine=everything):
    return sharescrub.run_once(helper, pacing.Pace(), is_mine)


def take(maintainer):
    maintenance.account(maintainer)
    findings.take(maintainer, pacing.Pace())


def mark_of(path, number):
    with (repositories.open_repository(path) as repo,
          contextlib.closing(_engine.Maintenance(repo.handle())) as engine):
        facts = engine.group_facts(number)
    return facts['codec'], facts['level']


def bytes_of(path):
    return {name: (path / 'groups' / name).read_bytes()
            for name in os.listdir(path / 'groups')}


# -- recompression ------------------------------------------------------------

def test_a_share_becomes_smaller_beside_a_maintainer(
        path, other, maintainer, helper, model):
    blocks = {name: maintenance.blocks_of(other, name) for name in model}
    result = recompress(helper, is_mine=lambda group: group != 2)
    assert (result.groups, result.kept) == (1, 1)
    assert [mark_of(path, n) for n in (1, 2, 3)] == [(ZSTD, 3)] + [(0, 0)] * 2
    result = recompress(helper)
    assert (result.groups, result.kept) == (1, 0)
    maintenance.require_contents(other, model)
    for name, addresses_ in blocks.items():
        assert maintenance.blocks_of(other, name) == addresses_
    maintenance.account(maintainer)
    maintenance.require_counted(maintainer)
    assert checker.check(path).ok


def test_a_helper_changes_no_file_in_place(path, helper, model):
    """A helper writes its result to its notes and changes no group (I4).

    Only the maintainer marks the group.
    """
    before = bytes_of(path)['00000003']
    assert recompress(helper).kept == 1
    assert bytes_of(path)['00000003'] == before
    assert helper.notes.kept == {3: (ZSTD, 3, False)}
    assert host_notes.load(path, 0).kept == {3: (ZSTD, 3, False)}
    # Neither this helper nor the next daemon with its number tries again.
    assert recompress(helper) == recompressor.Result()


def test_the_maintainer_notes_what_a_helper_kept(path, maintainer, helper,
                                                 model):
    recompress(helper)
    take(maintainer)
    assert mark_of(path, 3) == (ZSTD, 3)
    recompress(helper)
    assert helper.notes.kept == {}
    assert checker.check(path).ok


def test_groups_that_nobody_takes_any_more(helper, model):
    """A run takes over the groups of a member that leaves in the middle."""
    gone = []

    class Going(pacing.Pace):
        def step(self, *args, **kwargs):
            gone.append(1)
            super().step(*args, **kwargs)

    result = recompress(helper, Going(),
                        lambda group: group == 2 or bool(gone))
    assert (result.groups, result.kept) == (2, 1)


def test_damaged_groups_are_left_alone(path, maintainer, helper, model):
    """A helper recognises damage by the group's entries, without a catalog."""
    with contextlib.closing(maintainer.engine.enter_group(1)) as group:
        group.mark_damaged(block_addresses.pack([5]))
    result = recompress(helper)
    assert (result.groups, result.failed) == (1, {})
    assert mark_of(path, 1) == (0, 0)


def test_one_lease_at_a_time(path, maintainer, helper, model):
    """A run that makes way releases its group and the group's space."""

    class Stopping(pacing.Pace):
        def step(self, *args, **kwargs):
            if 'again:' in args[2]:
                self.stop()
            super().step(*args, **kwargs)

    # The traceback keeps all objects of the run.
    with pytest.raises(pacing.Stopped) as caught:
        recompress(helper, Stopping())
    assert caught.tb is not None and helper.rewriting is None
    maintainer.engine.enter_group(1).close()
    assert not list((path / 'spool').glob('G-*'))


# -- making way ---------------------------------------------------------------

def test_the_collectors_intent_is_answered_within_a_second(
        path, helper, model):
    """A helper makes way for the collector even during a long wait."""
    def maintain():
        with (repositories.open_repository(path) as mine,
              maintenance.maintaining(mine) as maintainer):
            assert maintainer.engine.announce(1)
            began = time.monotonic()
            while True:
                with contextlib.suppress(exceptions.BusyError):
                    maintainer.engine.enter_group(1).close()
                    return time.monotonic() - began
                time.sleep(0.01)

    children = []

    class Watching(pacing.Pace):
        def step(self, done, total, what, cost=0, watch=None):
            if 'group 00000001 again' in what and not children:
                children.append(repositories.fork_child(maintain))
            try:
                super().step(done, total, what, cost, watch)
            except exceptions.BusyError:
                self.rate = None    # the rest need not wait
                raise

    result = recompress(helper, Watching(rate=100.0),
                        is_mine=lambda group: group == 1)
    assert (result.groups, result.busy) == (0, 1)
    assert pacing.MAX_WAIT < 1.0
    # Without the intent, the helper would take longer.
    assert repositories.wait_for_child(children[0]) < 60


def test_a_full_disk_ends_the_work(path, maintainer, helper, model):
    """On a full disk, the space of the unfinished file is freed again.

    A collection works after that.
    """
    put(helper.repository, 'gone', noise(SLOTS * BLOCK, 9))
    helper.repository.delete('gone')
    before = maintenance.disk(path)
    sizes = []

    class Filling(pacing.Pace):
        def step(self, *args, **kwargs):
            if 'again:' in args[2]:
                sizes.append(maintenance.disk(path))
                raise exceptions.NoSpaceError('as rewriting.check says')
            super().step(*args, **kwargs)

    result = recompress(helper, Filling())
    assert result.skipped_for_space == 4 and sizes[0] > before
    assert maintenance.disk(path) <= before
    freed = collector.run_once(maintainer, pacing.Pace(), 0, 0)
    assert freed.busy == 0 and freed.freed_blocks == SLOTS


# -- scrub --------------------------------------------------------------------

@pytest.fixture
def damaged(path, other, model):
    """Damage a block of group 1 and a block of group 3."""
    found = [maintenance.blocks_of(other, 'text')[7],
             maintenance.blocks_of(other, 'noise')[9]]
    pairs = [tuple(address) for address in found]
    for pair in pairs:
        scrubbing.damage(path, pair)
    return pairs


def test_found_verified_marked_and_reported(path, maintainer, helper,
                                            damaged):
    before = bytes_of(path)
    result = scrub(helper)
    assert result.complete and result.found == 2 and result.blocks == 197
    assert bytes_of(path) == before
    assert scrubbing.state_of(path, damaged[0]) == block_addresses.LIVE
    assert host_notes.load(path, 0).found == {
        block_addresses.address(*pair) for pair in damaged}
    take(maintainer)
    for pair, image in zip(damaged, ('text', 'noise')):
        assert scrubbing.state_of(path, pair) == block_addresses.DAMAGED
        facts = maintainer.catalog.damaged()[block_addresses.address(*pair)]
        assert facts['images'] == [image]
        assert (path / facts['quarantine']).exists()
    assert maintainer.catalog.scrub_state()['waiting'] == []
    # The next pass finds them marked and reports them.
    assert scrub(helper).found == 0 and len(helper.notes.found) == 2


def test_healed_by_what_an_upload_stored_again(path, other, maintainer,
                                               helper, model, damaged):
    scrub(helper)
    take(maintainer)
    put(other, 'again', model['text'])
    with contextlib.closing(maintainer):
        maintenance.account(maintainer)
        found = scrubbing.scrub(maintainer, is_mine=lambda group: False)
        assert found.healed == 1 and found.images == ['noise']
    assert repositories.read_all(other, 'text') == model['text']


def test_a_host_with_bad_memory_gives_up_no_block(path, maintainer, helper,
                                                  model):
    helper.notes.found = {block_addresses.address(1, slot)
                          for slot in range(9)}
    helper.save()
    before = bytes_of(path)
    take(maintainer)
    assert maintainer.catalog.damaged() == {}
    assert maintainer.catalog.scrub_state()['waiting'] == []
    assert bytes_of(path) == before


def test_what_is_noted_of_no_block(path, maintainer, helper, model):
    helper.notes.found = {
        block_addresses.address(1, 9999), block_addresses.address(4, 60),
        block_addresses.address(77, 0),
        block_addresses.address((1 << 25) - 1, 32767)}
    helper.notes.unreadable = {1: 'lie', 77: 'lie'}
    helper.notes.kept = {1: (9, 9, False), 4: (ZSTD, 3, False),
                         77: (1, 0, True)}
    helper.save()
    take(maintainer)
    assert maintainer.catalog.damaged() == {}
    assert not maintainer.catalog.scrub_state().get('unreadable')
    assert checker.check(path).ok


def test_a_group_in_use_is_marked_later(path, maintainer, helper, damaged):
    scrub(helper)
    with repositories.collector_in(path, damaged[0][0]):
        take(maintainer)
        assert len(maintainer.catalog.scrub_state()['waiting']) == 1
        assert len(maintainer.catalog.damaged()) == 1
    take(maintainer)
    assert len(maintainer.catalog.damaged()) == 2


def test_notes_are_taken_once(path, maintainer, helper, damaged, monkeypatch):
    scrub(helper)
    take(maintainer)
    calls = []
    monkeypatch.setattr(findings, '_take', lambda *args: calls.append(args))
    take(maintainer)
    assert not calls
    helper.notes.found = set()
    helper.save()
    take(maintainer)
    assert len(calls) == 1


def test_a_share_is_verified(path, helper, damaged):
    result = scrub(helper, lambda group: group == 3)
    assert result.blocks == SLOTS and result.found == 1
    # The helper drops a finding in a group that belongs to another host.
    helper.notes.found.add(block_addresses.address(1, 0))
    scrub(helper, lambda group: group == 3)
    assert helper.notes.found == {block_addresses.address(*damaged[1])}


def test_the_maintainer_leaves_the_other_shares(path, maintainer, model):
    result = scrubbing.scrub(maintainer, is_mine=lambda group: group == 2)
    assert result.complete and result.blocks == SLOTS


def test_the_maintainer_reads_all_while_damage_is_known(
        path, maintainer, helper, damaged):
    """The maintainer reads every group for copies while damage is known."""
    scrub(helper)
    take(maintainer)
    result = scrubbing.scrub(maintainer, is_mine=lambda group: False)
    assert result.blocks == 197 - 2


def test_an_unreadable_group(path, maintainer, helper, model):
    scrubbing.flip(path / 'groups/00000002', 0)
    helper.repository.close()
    with repositories.open_repository(path) as again, live_hosts.Hosts(
            path) as hosts, helper_daemon.Helper(again, hosts) as fresh:
        result = scrub(fresh)
        assert list(result.unreadable) == ['groups/00000002']
        assert result.complete
        fresh.save()
    take(maintainer)
    assert maintainer.catalog.scrub_state()['unreadable'][
        'groups/00000002']['images'] == ['text']
    # The maintainer reads the group until it is readable, no matter which host
    # has it.
    scrubbing.flip(path / 'groups/00000002', 0)
    scrubbing.scrub(maintainer, is_mine=lambda group: False)
    assert maintainer.catalog.scrub_state()['unreadable'] == {}


def test_a_pass_goes_on(path, other, helper, model, monkeypatch):
    monkeypatch.setattr(sharescrub, 'STEP_SLOTS', 16)

    class Stopping(pacing.Pace):
        left = 6

        def step(self, *args, **kwargs):
            self.left -= 1
            if not self.left:
                self.stop()
            super().step(*args, **kwargs)

    with pytest.raises(pacing.Stopped):
        sharescrub.run_once(helper, Stopping(), everything)
    cursor = host_notes.load(path, 0).scrub
    assert (cursor['group'], cursor['slot']) == (2, 32)
    assert not cursor['complete']
    result = scrub(helper)
    assert result.complete and result.blocks == 197


def test_full_notes_wait_for_the_maintainer(path, maintainer, helper, damaged,
                                            monkeypatch):
    monkeypatch.setattr(host_notes, 'MAX_FOUND', SLOTS + 1)
    helper.notes.begin_scrub(0)
    helper.notes.scrub['group'] = 1
    helper.notes.found = {block_addresses.address(3, slot) for slot in (1, 2)}
    result = scrub(helper)
    assert not result.complete and helper.notes.scrub['group'] == 1


def test_nobody_else_may_help(path, other, monkeypatch):
    monkeypatch.setattr(os, 'geteuid', lambda: 12345)
    with live_hosts.Hosts(path) as hosts:
        with pytest.raises(exceptions.AccessDenied):
            helper_daemon.Helper(other, hosts)


def test_locks_of_a_dead_helper_fall(path, repo, maintainer, helper, model):
    """The locks of a dead helper are free, and its spool file is removed."""
    started = os.pipe()
    pid, pipe = repositories.fork_child(
        lambda: _rewrite_and_wait(path, started[1]))
    assert os.read(started[0], 1) == b'!'
    with pytest.raises(exceptions.BusyError):
        maintainer.engine.enter_group(1)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    for fd in (pipe, *started):
        os.close(fd)
    maintainer.engine.enter_group(1).close()
    assert list((path / 'spool').glob('G-*'))
    maintenance.account(maintainer)
    assert not list((path / 'spool').glob('G-*'))


def _rewrite_and_wait(path, started):
    repo = repositories.open_repository(path)
    engine = _engine.Maintenance(repo.handle())
    rewriting = engine.begin_rewriting(1, 'zstd', 1)
    rewriting.step()
    os.write(started, b'!')
    time.sleep(600)


def test_only_the_maintainer_may_change_groups(helper, model):
    for call in (lambda: helper.engine.enter_group(1),
                 lambda: helper.engine.note_codec(1, 'zstd', 1)):
        with pytest.raises(exceptions.InvalidParameter, match='maintainer'):
            call()
    with contextlib.closing(
            helper.engine.begin_rewriting(3, 'zstd', 1)) as rewriting:
        while not rewriting.step()[0]:
            pass
        with pytest.raises(exceptions.InvalidParameter, match='maintainer'):
            rewriting.keep_old()
