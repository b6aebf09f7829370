# SPDX-License-Identifier: Apache-2.0

"""The hosts' file records the live daemons, which share the groups."""

import collections
import contextlib
import fcntl
import os
import subprocess
import sys

import pytest

from glance_dedup.base import exceptions
from glance_dedup.base import filesystem
from glance_dedup.maintenance import live_hosts
from tests.support import daemons
from tests.support import maintenance
from tests.support import processes

LIMIT = 30
TASK = 2


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(live_hosts, 'MAX_MEMORY', -1)
    return maintenance.create(tmp_path)


@pytest.fixture
def join(path):
    """A function that starts one more daemon, until the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(live_hosts.Hosts(path))


def test_each_has_a_number_as_long_as_it_lives(join):
    first, second, third = join(), join(), join()
    assert [h.number for h in (first, second, third)] == [0, 1, 2]
    assert first.members() == second.members() == [0, 1, 2]
    second.close()
    second.close()
    assert second.members() == []
    assert first.members() == third.members() == [0, 2]
    assert join().number == 1


def test_a_killed_daemon_lives_no_more(path, join):
    mine = join()
    with subprocess.Popen(
            [sys.executable, '-c', 'import sys, time\n'
             'from glance_dedup.maintenance import live_hosts\n'
             'found = live_hosts.Hosts(sys.argv[1])\n'
             'found.take_part({2})\n'
             'print(found.number, flush=True)\n'
             'time.sleep(600)', path], stdout=subprocess.PIPE,
            cwd=daemons.ROOT) as process:
        assert process.stdout.readline() == b'1\n'
        assert mine.members() == [0, 1] and mine.members(TASK) == [1]
        processes.stop(process.pid)
        # The process is stopped, not dead: it stays a member.
        assert mine.members() == [0, 1]
        process.kill()
        process.wait(LIMIT)
    assert mine.members() == [0] and mine.members(TASK) == []


def test_members_of_a_task(join):
    first, second = join(), join()
    assert first.members(TASK) == second.members(TASK) == []
    first.take_part({TASK, 7})
    second.take_part({TASK})
    assert first.members(TASK) == second.members(TASK) == [0, 1]
    assert second.members(7) == [0]
    first.take_part({7})
    assert first.members(TASK) == second.members(TASK) == [1]
    # Tasks do not affect each other, nor do daemons.
    assert second.members(7) == [0] and second.members(TASK + 1) == []


def test_everything_belongs_to_one_member(join):
    members = [join() for _ in range(4)]
    for member in members[:3]:
        member.take_part({TASK})
    groups = range(1, 300)
    owners = {group: [m.number for m in members[:3]
                      if m.is_mine(TASK, group)] for group in groups}
    assert all(len(found) == 1 for found in owners.values())
    sizes = collections.Counter(found[0] for found in owners.values())
    assert all(60 <= sizes[number] <= 140 for number in range(3)), sizes
    # A host that takes no part gets every group when it is queried.
    assert all(members[3].is_mine(TASK, group) for group in groups)
    # Only the groups of the closed member go to other members.
    members[1].close()
    for group in groups:
        before = owners[group][0]
        now = [m.number for m in (members[0], members[2])
               if m.is_mine(TASK, group)]
        assert len(now) == 1 and (before == 1 or now == [before])


def test_a_lost_lock_is_noticed(join):
    """A host whose locks the server dropped gets another number."""
    first = join()
    first.take_part({TASK})
    filesystem.lock(first._fd, fcntl.F_UNLCK, 0)
    filesystem.lock(first._fd, fcntl.F_UNLCK, 256 * TASK)
    second = join()
    second.take_part({TASK})
    assert second.number == 0 and second.members(TASK) == [0]
    first.renew()
    assert first.number == 1
    assert first.members() == second.members() == [0, 1]
    assert second.members(TASK) == first.members(TASK) == [0, 1]


def test_a_file_that_was_replaced(path, join):
    """A member that has the old file open joins the new one (I4)."""
    first = join()
    os.unlink(path / 'locks/hosts')
    second = join()
    assert (first.number, second.number) == (0, 0)
    first.renew()
    assert first.number == 1 and second.members() == [0, 1]


def test_no_number_is_left(path, join, monkeypatch):
    monkeypatch.setattr(live_hosts, 'MAX_COUNT', 2)
    join(), join()
    with pytest.raises(exceptions.BusyError, match='2 daemons'):
        live_hosts.Hosts(path)


def test_a_repository_that_cannot_be_looked_at(path):
    """An unreachable repository is an error."""
    with pytest.raises(exceptions.StorageError, match='locks/hosts'):
        live_hosts.Hosts(path / 'gone')


@pytest.mark.parametrize('spoil', [
    lambda file: file.symlink_to('/etc/passwd'), lambda file: file.mkdir()])
def test_a_hostile_file(path, spoil):
    spoil(path / 'locks/hosts')
    with pytest.raises(exceptions.RepositoryError, match='locks/hosts'):
        live_hosts.Hosts(path)
