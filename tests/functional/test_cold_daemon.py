# SPDX-License-Identifier: Apache-2.0

"""Slices of cold groups that dedupd fetches for other programs."""

from concurrent import futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from glance_dedup.base import exceptions
from glance_dedup.client import slice_client
from glance_dedup.maintenance import maintainer_role
from glance_dedup.objects import slice_cache
from glance_dedup.repository import cold_settings
from tests.support import cold_repositories
from tests.support import daemons
from tests.support import processes
from tests.support import repositories

pytestmark = pytest.mark.slow

pytest_plugins = ['tests.support.object_fixtures']

GROUP = cold_repositories.GROUP
ask = cold_repositories.ask
gets = cold_repositories.gets
#: The daemon, with no waits between tries; requests may wait for an hour.
PROGRAM = ['-c', 'from dedupd import daemon; import sys; '
           'from dedupd.serve import slice_fetching; '
           'slice_fetching._NUMBERS["wait"] = (0, 3600); '
           'from glance_dedup.objects import object_store; '
           'object_store.FIRST_WAIT = 0.001; '
           'sys.exit(daemon.main())']


@pytest.fixture
def cold(server, proxy, faults, tmp_path):
    made = cold_repositories.ColdRepository(
        tmp_path / 'r', server, proxy.url)
    made.put('one', repositories.noise(2 * GROUP + 5000, 1))
    assert made.cool() == 2
    faults.seen.clear()
    return made


@pytest.fixture
def daemon(cold, monkeypatch):
    # On a busy machine the daemon may need longer than programs wait for it.
    monkeypatch.setattr(slice_client, 'ANSWER_SECONDS', daemons.LIMIT)
    with daemons.Daemon(cold.path) as daemon:
        daemon.program = PROGRAM
        yield daemon.start()
        assert 'Traceback' not in daemon.text()


def open_asking(cold, daemon):
    """Open the repository as a separate program does, as far as slices go."""
    return cold.open(ask_slices=slice_client.Asker(daemon.socket))


def read(repo):
    with repo.open_image('one') as image:
        return image.read()


# -- the endpoint -------------------------------------------------------------

def test_a_slice_is_fetched(cold, daemon, faults):
    answer = ask(daemon, cold.request())
    assert (answer.status, answer.json()) == (200, {'there': True})
    assert cold.slices() == {f'{cold.groups[1]["object"].hex()}/00000000'}
    assert len(gets(faults)) == 1
    assert ask(daemon, cold.request()).status == 200
    assert len(gets(faults)) == 1


def test_announcing_waits_for_nothing(cold, daemon, faults):
    with faults.held():
        assert ask(daemon, cold.request(count=4, wait=0)).status == 200
        assert not cold.slices()
    repositories.eventually(lambda: len(cold.slices()) == 4)
    assert len(gets(faults)) == 4


def test_waiting_ends(cold, daemon, faults):
    with faults.held():
        answer = ask(daemon, cold.request(wait=0.1))
        assert (answer.status, answer.json()) == (202, {'there': False})
        assert not cold.slices()
    assert ask(daemon, cold.request(wait=20)).status == 200
    assert len(gets(faults)) == 1


def test_one_get_serves_all_who_wait(cold, daemon, faults):
    faults.delay = 0.3
    statuses = []

    def wait():
        statuses.append(ask(daemon, cold.request()).status)

    threads = [threading.Thread(target=wait) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 6
    assert len(gets(faults)) == 1


@pytest.mark.parametrize('changes,status', [
    ({'group': 77}, 404), ({'object': '1' * 32}, 409),
    ({'repository': '2' * 32}, 409), ({'first': 9}, 400),
    ({'first': (1 << 32) - 1, 'count': 64}, 400), ({'count': 0}, 400),
    ({'count': 65}, 400), ({'wait': -1}, 400), ({'wait': 1e9}, 400),
    ({'first': -1}, 400), ({'first': True}, 400), ({'first': 1.0}, 400),
    ({'object': 'x'}, 400), ({'group': 1 << 32}, 400), ({'more': 1}, 400)])
def test_what_is_refused(cold, daemon, faults, changes, status):
    answer = ask(daemon, cold.request(**changes))
    assert answer.status == status, answer.body
    assert answer.json()['error']['message']
    assert not gets(faults) and not cold.slices()


def test_a_group_that_is_not_cold(cold, daemon, faults):
    body = json.loads(cold.request()) | {'group': 3, 'object': '0' * 32}
    assert ask(daemon, json.dumps(body).encode()).status == 409


def test_a_store_that_does_not_answer(cold, daemon, faults):
    faults.always = 503
    answer = ask(daemon, cold.request())
    assert answer.status == 503
    assert '503' in answer.json()['error']['message']
    faults.always = None
    assert ask(daemon, cold.request()).status == 200


def test_a_repository_without_cold_groups(tmp_path):
    path = repositories.create(tmp_path / 'hot')
    with repositories.open_repository(path) as repo:
        repositories.put(repo, 'image', repositories.noise(5000))
        body = {'repository': repo.repository_id, 'group': 1, 'first': 0,
                'object': '1' * 32, 'count': 1, 'wait': 0}
    with daemons.Daemon(path) as daemon:
        daemon.start()
        answer = ask(daemon, json.dumps(body).encode())
    assert answer.status == 409
    assert 'Group 00000001 is not in the object' in (
        answer.json()['error']['message'])


def test_the_daemon_ends_while_somebody_waits(cold, daemon, faults):
    """The waiting client gets an answer at once, and is not cut off."""
    found = []
    thread = threading.Thread(target=lambda: found.append(
        ask(daemon, cold.request(wait=3600)).status))
    with faults.held():
        thread.start()
        repositories.eventually(lambda: gets(faults))
        assert daemon.stop() == 0
        thread.join()
        assert found == [202]
        assert not cold.slices()


# -- programs that request slices ---------------------------------------------

def test_a_program_asks_the_daemon(cold, daemon, faults):
    with open_asking(cold, daemon) as repo:
        assert read(repo) == cold.images['one']
        figures = repo.slices.figures
        assert figures.gets == 0 and figures.asked
    assert len(gets(faults)) == 10


def test_several_programs(cold, daemon, faults):
    """Several processes read, and each slice is fetched once."""
    program = (
        'import hashlib, sys\n'
        'from glance_dedup.client import slice_client\n'
        f'slice_client.ANSWER_SECONDS = {daemons.LIMIT}\n'
        'from tests.support import repositories\n'
        'with repositories.open_repository(sys.argv[1],\n'
        '        ask_slices=slice_client.Asker(sys.argv[2])) as repo:\n'
        '    data = repositories.read_all(repo, "one")\n'
        '    assert repo.slices.figures.gets == 0\n'
        'sys.exit(data != repositories.noise(len(data), 1))\n')
    children = [subprocess.Popen(
        [sys.executable, '-c', program, cold.path, daemon.socket],
        cwd=daemons.ROOT) for _ in range(3)]
    assert [child.wait(120) for child in children] == [0] * 3
    assert len(gets(faults)) == len(cold.slices()) == 10


def test_no_daemon(cold, faults, tmp_path):
    asker = slice_client.Asker(str(tmp_path / 'nobody'))
    with cold.open(ask_slices=asker) as repo:
        assert read(repo) == cold.images['one']
        assert repo.slices.figures.gets == 10
        assert repo.slices.figures.asked == 0


def test_a_daemon_that_is_killed(cold, daemon, faults):
    """The program continues alone, and uses a new daemon later."""
    with open_asking(cold, daemon) as repo, repo.open_image('one') as image:
        assert image.read(5000, 0) == cold.images['one'][:5000]
        daemon.kill()
        assert image.read() == cold.images['one']
        own = repo.slices.figures.gets
        assert own > 0
        cold.forget()
        daemon.start()
        repo._ask_slices._retry_at = 0.0        # as some seconds later
        # One thread tries the daemon; others would meanwhile continue without
        # it.
        assert repo._ask_slices(repo.repository_id, 1,
                                cold.groups[1]['object'], 0, 1, daemons.LIMIT)
        assert image.read() == cold.images['one']
        assert repo.slices.figures.gets == own


def test_a_daemon_that_hangs(cold, daemon, faults, monkeypatch):
    monkeypatch.setattr(slice_client, 'ANSWER_SECONDS', 0.2)
    monkeypatch.setattr(slice_client, 'POLL', 0.2)
    processes.stop(daemon.process.pid)
    try:
        with open_asking(cold, daemon) as repo:
            assert read(repo) == cold.images['one']
            assert repo.slices.figures.gets == 10
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)


def test_the_daemon_of_another_repository(cold, tmp_path, faults):
    other = repositories.create(tmp_path / 'other')
    with daemons.Daemon(other) as daemon:
        daemon.start()
        with open_asking(cold, daemon) as repo:
            assert read(repo) == cold.images['one']
            assert repo.slices.figures.gets == 10


def test_unavailable_through_the_daemon(cold, daemon, faults):
    """A program does not repeat a request that failed in the daemon."""
    faults.always = 503
    with open_asking(cold, daemon) as repo:
        with pytest.raises(exceptions.UnavailableError, match='503'):
            read(repo)
        assert repo.slices.figures.gets == 0
        faults.always = None
        assert read(repo) == cold.images['one']


def test_a_scrub_without_the_store_is_no_success(cold, daemon, faults):
    daemon.wait_for_catalog()
    faults.always = 503
    status = daemon.run('scrub', full=True)
    assert status['last_success'] is None
    result = status['last']['result']
    assert (result['complete'], result['unchecked']) == (
        False, 2 * GROUP // 4096)
    assert any('blocks in cold groups were not checked' in error['text']
               for error in daemon.status()['errors'])
    faults.always = None
    assert daemon.run('scrub')['last_success'] is not None


def test_an_object_that_the_group_had_before(cold, daemon, faults):
    """A program that has the old file open fetches the old object itself."""
    with open_asking(cold, daemon) as repo:
        with pytest.raises(exceptions.UnavailableError):
            repo.slices.fetch(1, bytes(16), 5000, 0, 1)
        assert repo.slices.figures.gets == 1


def test_waiting_has_an_end(cold, daemon, faults):
    object_id, length = (cold.groups[1][name] for name in ('object', 'end'))
    with (open_asking(cold, daemon) as repo, cold.open() as alone,
          faults.held()):
        for slices in (repo.slices, alone.slices):
            with pytest.raises(
                    exceptions.UnavailableError,
                    match=f'{cold.settings.location.url}: .* within 0.2 s'):
                slices.fetch(1, object_id, length, 0, 1, 0.2)
        assert not cold.slices()


def test_who_waits_comes_first(cold, faults, monkeypatch):
    """Slices with a waiting reader come before announced ones.

    This also holds for a slice that was announced itself.
    """
    monkeypatch.setattr(slice_cache, 'PARALLEL', 1)
    came, begin, go_on = (threading.Event() for _ in range(3))
    take = faults.take

    def held(method, path):
        if method == 'GET':
            came.set()
            assert (begin if len(gets(faults)) < 3 else go_on).wait(60)
        return take(method, path)
    monkeypatch.setattr(faults, 'take', held)
    object_id, length = (cold.groups[1][name] for name in ('object', 'end'))
    other = cold.groups[2]
    with cold.open() as repo, futures.ThreadPoolExecutor(2) as pool:
        repo.slices.expect(1, object_id, length, 0, 5)
        assert came.wait(60)    # the first one is under way
        waiting = [
            pool.submit(repo.slices.fetch, 2, other['object'], other['end'],
                        3, 1),
            pool.submit(repo.slices.fetch, 1, object_id, length, 4, 1)]
        repositories.eventually(lambda: len(repo.slices._awaited) == 2)
        begin.set()
        for one in waiting:
            one.result(60)
        # They came after the slice that was under way already.
        assert len(cold.slices()) == 3
        go_on.set()
        repositories.eventually(lambda: len(cold.slices()) == 6)
    assert len(gets(faults)) == 6


def test_announcements_are_bounded(cold, faults):
    faults.delay = 0.2
    with cold.open() as repo:
        slices = repo.slices
        slices.announce(slice_cache.Wanted(1, bytes(16), 1 << 40, number)
                        for number in range(1000))
        assert len(slices._requests) <= slice_cache.ANNOUNCED
        faults.always = 404
        faults.delay = 0
        repositories.eventually(lambda: not slices._requests)
        assert slices.figures.unavailable


# -- programs -----------------------------------------------------------------

def test_commands_ask_the_daemon(cold, daemon, faults, tmp_path):
    program = ('import sys; from glance_dedup.cli import entry; '
               'from glance_dedup.client import slice_client; '
               f'slice_client.ANSWER_SECONDS = {daemons.LIMIT}; '
               'sys.exit(entry.main())')
    subprocess.run(
        [sys.executable, '-c', program, '--repository', cold.path,
         '--socket', daemon.socket, 'image', 'get', 'one', tmp_path / 'out'],
        cwd=daemons.ROOT, check=True, timeout=120,
        env={**os.environ, 'GLANCE_DEDUP_FILTER_DIR': str(tmp_path / 'f')})
    assert (tmp_path / 'out').read_bytes() == cold.images['one']
    assert len(gets(faults)) == 10
    figures = daemon.status()['cold']
    assert figures['gets'] == 10 and figures['misses'] == 0
    assert figures['received'] == sum(
        facts['end'] for facts in cold.groups.values())
    # Slices that several threads fetch at once may count twice.
    assert 0 <= figures['cached'] - figures['received'] < 8 << 20
    metrics = daemon.request('GET', '/metrics').body.decode()
    assert 'dedupd_slices_gets_total 10.0' in metrics


def test_what_a_command_fetched(cold, faults, tmp_path):
    """The command's result has the fetched slices; `space` has the objects."""
    def run(*arguments):
        return json.loads(subprocess.run(
            [sys.executable, '-m', 'glance_dedup.cli.entry', '--repository',
             cold.path, '--socket', '', *arguments, '-f', 'json'],
            cwd=daemons.ROOT, check=True, timeout=60, capture_output=True,
            env={**os.environ,
                 'GLANCE_DEDUP_FILTER_DIR': str(tmp_path / 'f')}).stdout)

    for count in (10, 0):
        found = run('image', 'get', 'one', tmp_path / f'out-{count}')
        assert found['slices_fetched'] == count
    parts = {row['part']: row for row in run('repository', 'space')}
    objects = sum(facts['end'] for facts in cold.groups.values())
    assert parts['cold groups, in objects']['disk_bytes'] == objects
    assert parts['cold groups, in objects']['plain_bytes'] == 2 * GROUP
    assert parts['cache of cold groups']['disk_bytes'] >= objects
    assert all(row['disk_bytes'] >= 0 for row in parts.values())
    du = subprocess.run(['du', '-s', '-B1', cold.path], check=True,
                        capture_output=True, text=True).stdout
    assert parts['all']['disk_bytes'] == int(du.split()[0])


def test_hits_and_misses(cold, faults):
    with cold.open(segment_cache_mib=0) as repo:
        read(repo)
        first = repo.statistics()
        assert first['slice_misses'] and first['slice_gets'] == 10
        assert first['slice_reads'] > first['slice_misses']
        read(repo)
        again = repo.statistics()
        assert again['slice_misses'] == first['slice_misses']
        assert again['slice_reads'] > first['slice_reads']
        faults.always = 503
        cold.forget()
        with pytest.raises(exceptions.UnavailableError):
            read(repo)
        assert repo.statistics()['slice_unavailable']


def test_downloads_through_the_daemon(cold, daemon, faults):
    """Images are downloaded through the daemon, as the driver does."""
    with daemon.client() as client, client.open_image('one') as stream:
        data = b''.join(iter(lambda: stream.read(1 << 20, 30), b''))
    assert data == cold.images['one']
    assert len(gets(faults)) == 10


# -- groups that get another object -------------------------------------------

def renew(cold, number):
    """Give a group another object, and delete its former one."""
    before = cold.groups[number]
    with cold.open() as repo, contextlib.closing(
            maintainer_role.Maintainer(repo)) as maintainer:
        with contextlib.closing(
                maintainer.engine.begin_cooling(number)) as rewriting:
            while not rewriting.step()[0]:
                pass
            object_id, length, name = rewriting.object()
            with cold_settings.connect(cold.settings) as store:
                key = slice_cache.key_of(cold.settings.owner, number,
                                         object_id)
                with open(cold.path / name, 'rb') as file:
                    store.put(key, file)
                rewriting.cut()
                rewriting.exchange()
                store.delete(slice_cache.key_of(
                    cold.settings.owner, number, before['object']))
        cold.groups[number] = maintainer.engine.group_facts(number)
        assert cold.groups[number]['object'] == object_id
    cold.forget()


@pytest.mark.parametrize('asks', [True, False])
def test_who_has_the_old_file_open_reads_the_new_object(
        cold, daemon, faults, asks):
    with contextlib.ExitStack() as stack:
        repo = stack.enter_context(
            open_asking(cold, daemon) if asks else cold.open())
        image = stack.enter_context(repo.open_image('one'))
        assert image.read(5000, 0) == cold.images['one'][:5000]
        daemon.stop()           # the daemon is the maintainer
        renew(cold, 1)
        daemon.start()
        assert image.read() == cold.images['one']
        daemon.stop()
        renew(cold, 1)
        daemon.start()
        with repo.open_image('one') as again:
            assert again.read() == cold.images['one']


def test_no_object_is_left(cold, faults):
    """A reader checks the file once more, finds no new object, and fails."""
    with cold_settings.connect(cold.settings) as store:
        store.delete(slice_cache.key_of(
            cold.settings.owner, 1, cold.groups[1]['object']))
    with cold.open() as repo:
        with pytest.raises(exceptions.UnavailableError):
            read(repo)
