# SPDX-License-Identifier: Apache-2.0

"""Hosts that try a directory together: each fault is found, and named.

The hosts are mounts of ``tests/sharedfs``, which can produce each fault.
"""

import collections
import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest

from glance_dedup.base import exceptions
from glance_dedup.base import trialrecord
from glance_dedup.fstest import host_mailbox
from glance_dedup.fstest import properties
from glance_dedup.fstest import property_findings
from glance_dedup.fstest import trial
from tests.functional import conftest
from tests.sharedfs import fuse_hosts
from tests.sharedfs import kinds
from tests.support import daemons
from tests.support import repositories

pytestmark = pytest.mark.slow

LIMIT = 100     # seconds
FINE_VERDICT = property_findings.FINE
TITLES = {title for title, _ in property_findings.PROPERTIES.values()}
LIMITED, UNFIT = property_findings.LIMITED, property_findings.UNFIT


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(host_mailbox, 'POLL', 0.01)
    monkeypatch.setattr(properties, 'WATCHED', 2)


def try_on(hosts, **options):
    """Return all hosts' findings: of each, by property, verdict and detail."""
    options = {'hosts': len(hosts), 'wait': LIMIT, 'limit': LIMIT / 2,
               **options}
    with concurrent.futures.ThreadPoolExecutor(len(hosts)) as pool:
        runs = [pool.submit(trial.Trial(
            host.root / 'repository', **options).run) for host in hosts]
        return [{f.key: f for f in run.result()} for run in runs]


def prepare(hosts):
    repositories.create(hosts[0].backing / 'repository')


def nothing_is_left(hosts):
    assert sorted(os.listdir(hosts[0].backing / 'repository' / 'locks')) == [
        'groups', 'images']


def verdicts(findings):
    return {key: f.verdict for key, f in findings.items()}


FINE = dict.fromkeys(property_findings.PROPERTIES, property_findings.FINE)


@pytest.mark.parametrize('count', [
    2, pytest.param(3, marks=pytest.mark.long)])
def test_file_system_that_is_fine(tmp_path, count):
    with fuse_hosts.hosts(tmp_path, count, names=5) as hosts:
        prepare(hosts)
        found = try_on(hosts)
        nothing_is_left(hosts)
    for findings in found:
        # Late names are a known limit, for which waits allow.
        assert verdicts(findings) == {**FINE, 'new-names': LIMITED}
        assert 1 < findings['new-names'].seconds < LIMIT / 2
        assert findings['names-asked'].seconds == 0


@pytest.mark.slow
@pytest.mark.parametrize('two_hosts', conftest.REAL_FILE_SYSTEMS,
                         indirect=True)
def test_real_file_systems(two_hosts):
    """Real file systems have all properties, but for a fault of Ceph 16."""
    repositories.create(two_hosts[0].root / 'repository')
    known = ({'locks-fall'}
             if kinds.kind_of(two_hosts[0]) == 'ceph' else set())
    for findings in try_on(two_hosts):
        unfit = {key for key, verdict in verdicts(findings).items()
                 if verdict == UNFIT}
        assert unfit == known, {
            key: f.detail for key, f in findings.items() if f.detail}


# Long: a host waits for names and bytes that a cache keeps from it.
@pytest.mark.parametrize('options, wanted', [
    ({'locks': 'local', 'unlinked': 'stale', 'punch': 'unsupported',
      'rename': 'gap'},
     {'locks': UNFIT, 'locks-fall': UNFIT,
      'unlinked': LIMITED, 'punch': LIMITED,
      'rename': LIMITED}),
    ({'locks': 'refused', 'link': 'replaces', 'names': 5},
     {'locks': UNFIT, 'locks-fall': UNFIT, 'link': UNFIT,
      'database': UNFIT, 'new-names': LIMITED}),
    ({'locks': 'ignored', 'fsync': 'nothing'},
     {'locks': UNFIT, 'locks-fall': UNFIT,
      'fsync': UNFIT, 'pages': LIMITED}),
    ({'open': 'trusts', 'names': 5},
     {'close-to-open': LIMITED, 'names-asked': UNFIT,
      'pages': LIMITED, 'new-names': LIMITED}),
    ({'pages': 'stay', 'maps': 'work'},
     {'close-to-open': LIMITED, 'pages': LIMITED}),
    ({'maps': 'refused'},
     {'maps': UNFIT, 'database': UNFIT}),
    ({'direct': 'refused'}, {'fsync': UNFIT})], ids=str)
def test_each_fault_is_found(tmp_path, options, wanted):
    with fuse_hosts.hosts(tmp_path, **{'names': 0, **options}) as hosts:
        prepare(hosts)
        found = try_on(hosts)
        nothing_is_left(hosts)
        require_kept(hosts, wanted)
    for findings in found:
        assert verdicts(findings) == {**FINE, **wanted}
        for key in wanted:
            assert findings[key].detail and findings[key].meaning


def require_kept(hosts, wanted):
    """The repository is refused exactly where the trial found a reason."""
    for host in hosts:
        path = host.root / 'repository'
        result = trialrecord.look(str(path))
        assert result.is_valid
        for verdict, titles in (LIMITED, result.limited), (
                UNFIT, result.unfit):
            assert set(titles) == {
                property_findings.PROPERTIES[key][0]
                for key, found in wanted.items() if found == verdict}
        if not result.unfit:
            continue
        with pytest.raises(exceptions.UnfitFileSystem):
            repositories.open_repository(path)


def test_a_daemon_says_whether_its_mount_was_tried(tmp_path):
    with fuse_hosts.hosts(tmp_path, names=0) as hosts:
        prepare(hosts)
        with daemons.Daemon(hosts[0].root / 'repository') as daemon:
            daemon.start().wait_for_catalog()
            assert "mount is not tried: run 'glance-dedup" in daemon.text()
            status = daemon.status()
            assert status['repository']['trial']['verdict'] == 'not tried'
            assert any('not tried' in problem['text']
                       for problem in status['problems'])
            assert b'\ndedupd_mount_tried 0.0\n' in daemon.request(
                'GET', '/metrics').body
            try_on(hosts)
            status = daemon.status()
            assert status['repository']['trial']['verdict'] == FINE_VERDICT
            assert not status['problems']
            assert b'\ndedupd_mount_tried 1.0\n' in daemon.request(
                'GET', '/metrics').body


def test_a_file_system_without_direct_reads_is_refused(tmp_path):
    """The error names the file system; one host alone detects it."""
    with fuse_hosts.hosts(tmp_path, 1, direct='refused') as hosts:
        prepare(hosts)
        path = hosts[0].root / 'repository'
        with pytest.raises(exceptions.UnfitFileSystem,
                           match=f'fuse.* on {hosts[0].root}, does not let '
                           'files be read beside the page cache'):
            repositories.open_repository(path)


def test_a_message_is_whole_when_it_is_listed(tmp_path):
    """A message's name appears when it is whole.

    Otherwise this host would see half of it until its cache ends.
    """
    with fuse_hosts.hosts(tmp_path, names=0, open='trusts') as hosts:
        prepare(hosts)
        os.mkdir(hosts[0].root / 'repository/locks/trial')
        here, there = (
            host_mailbox.Mailbox('', host.root / 'repository/locks/trial',
                                 LIMIT)
            for host in hosts)
        looking, seen = threading.Event(), threading.Event()
        fsync = os.fsync

        def slow(fd):
            looking.set()
            seen.wait(LIMIT)
            fsync(fd)

        with (concurrent.futures.ThreadPoolExecutor(1) as pool,
              mock.patch.object(os, 'fsync', slow)):
            said = pool.submit(here.send, 'word', 'long')
            looking.wait(LIMIT)
            early = [there._read(name) for name in there._list('word.')]
            seen.set()
            said.result(LIMIT)
        late = [there._read(name) for name in there._list('word.')]
    assert (early, late) == ([], ['long'])


def test_a_slow_look_finds_no_late_change(tmp_path):
    """A change that the first look shows counts as immediate, if slow."""
    here = host_mailbox.Mailbox('', tmp_path, LIMIT)

    def look(*shown):
        answers = iter(shown)

        def slow():
            time.sleep(0.05)
            return next(answers)
        return here.until(slow)

    assert look(True) == 0
    assert look(False, True) > 0


def test_few_links_to_one_file(tmp_path, monkeypatch):
    """Some file systems allow only about forty names of a file."""
    tried = collections.Counter()
    link = os.link

    def counted(source, *arguments, **options):
        tried[source] += 1
        return link(source, *arguments, **options)

    monkeypatch.setattr(os, 'link', counted)
    with fuse_hosts.hosts(tmp_path, names=0) as hosts:
        prepare(hosts)
        for findings in try_on(hosts):
            assert verdicts(findings) == FINE
    assert tried.total() >= 2 * properties.LINKS and max(tried.values()) <= 20


def command(host, *arguments):
    return subprocess.Popen(
        [sys.executable, '-m', 'glance_dedup.cli.entry', '--repository',
         str(host.root / 'repository'), 'repository', 'test-filesystem',
         *arguments], cwd=daemons.ROOT, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_command(tmp_path):
    with fuse_hosts.hosts(tmp_path, names=0, fsync='nothing') as hosts:
        prepare(hosts)
        running = [command(host, '--wait', f'{LIMIT}s', '-f', 'json')
                   for host in hosts]
        for process in running:
            shown, words = process.communicate(timeout=LIMIT)
            assert process.returncode == 1, words
            rows = {row['property']: row for row in json.loads(shown)}
            assert list(rows) == [
                title for title, _ in property_findings.PROPERTIES.values()]
            rows.pop('opening shows what was synced, while others read')
            bad = rows.pop('O_DIRECT shows what was synced, while others read')
            assert bad['verdict'] == 'not fine'
            assert 'images are lost' in bad['meaning']
            assert {row['verdict'] for row in rows.values()} == {'fine'}
        nothing_is_left(hosts)


def test_command_where_all_is_well(tmp_path):
    with fuse_hosts.hosts(tmp_path, names=0) as hosts:
        prepare(hosts)
        running = [command(host, '--wait', f'{LIMIT}s', '-f', 'json')
                   for host in hosts]
        for process in running:
            shown, words = process.communicate(timeout=LIMIT)
            assert process.returncode == 0, words
            assert {row['verdict'] for row in json.loads(shown)} == {'fine'}
        nothing_is_left(hosts)


def test_command_that_is_interrupted(tmp_path):
    """The interrupted command removes its files; the other names its host."""
    with fuse_hosts.hosts(tmp_path, names=0) as hosts:
        prepare(hosts)
        ended = threading.Event()

        def hold(done, total, what):
            # Both have acted in the first steps.
            if what in TITLES and done >= len(hosts):
                assert ended.wait(LIMIT)

        one = command(hosts[0], '--wait', f'{LIMIT}s')
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            other = pool.submit(trial.Trial(
                hosts[1].root / 'repository', wait=LIMIT, limit=8,
                progress=hold).run)
            room = hosts[0].backing / 'repository' / 'locks' / 'trial'
            repositories.eventually(lambda: room.exists() and any(
                name[0].isdigit() for name in os.listdir(room)), LIMIT)
            one.send_signal(signal.SIGINT)
            _, words = one.communicate(timeout=LIMIT)
            ended.set()
            assert one.returncode == 130, words
            with pytest.raises(exceptions.BusyError,
                               match='nothing was heard of .* for 8 seconds'):
                other.result()
        nothing_is_left(hosts)


def test_host_that_is_alone(tmp_path):
    with fuse_hosts.hosts(tmp_path, 1) as hosts:
        prepare(hosts)
        with pytest.raises(exceptions.BusyError,
                           match='1 of 2 hosts came within 1 seconds'):
            trial.Trial(hosts[0].root / 'repository', wait=1).run()
        nothing_is_left(hosts)


def test_trial_that_was_killed_is_not_met(tmp_path):
    """A later trial does not wait for one that was killed, and left files."""
    with fuse_hosts.hosts(tmp_path, names=0) as hosts:
        prepare(hosts)
        dead = command(hosts[0])
        room = hosts[0].backing / 'repository' / 'locks' / 'trial'
        repositories.eventually(
            lambda: room.exists() and os.listdir(room), LIMIT)
        dead.kill()
        dead.communicate(timeout=LIMIT)
        assert os.listdir(room)
        for findings in try_on(hosts):
            assert verdicts(findings) == FINE
        nothing_is_left(hosts)


def test_directory_that_is_no_repository(tmp_path):
    with pytest.raises(exceptions.ImageNotFound, match='repository create'):
        trial.Trial(tmp_path).run()
