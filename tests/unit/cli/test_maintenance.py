# SPDX-License-Identifier: Apache-2.0

"""The maintainer's commands work with a daemon and without."""

import dataclasses
import json
import os
import re
import signal
import subprocess

import pytest

from dedupd.tasks import collector
from dedupd.tasks import merger
from dedupd.tasks import registry
from glance_dedup.base import pacing
from glance_dedup.cli import common
from glance_dedup.cli import host_settings
from glance_dedup.cli import maintenance
from glance_dedup.cli import progress_bar
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import image_repository
from tests.support import daemons
from tests.support.maintenance import blocks_of
from tests.support import repositories
from tests.unit.cli import conftest

# Length of each content.
LENGTH = 40 * 4096


@pytest.fixture
def filled(created, tmp_path):
    """Three images; the first two have half in common."""
    one, two, three = (repositories.noise(LENGTH, seed) for seed in range(3))
    for name, content in (('a', one + two), ('b', two + bytes(LENGTH)),
                          ('c', three)):
        (tmp_path / name).write_bytes(content)
        assert created('image', 'put', name, tmp_path / name).status == 0
    return created


@pytest.fixture
def daemon(filled):
    """A daemon of the repository, at the socket that the commands use."""
    with daemons.running(filled.path) as daemon:
        at = filled.options.index('--socket')
        filled.options[at + 1] = daemon.socket
        with daemon.client() as client:
            # The daemon caches its last status for some seconds.
            repositories.eventually(
                lambda: client.status()['space']['images'] is not None)
        yield daemon


@pytest.fixture(params=['here', 'daemon'])
def either(request, filled):
    """Both run the same commands: with a daemon, and without."""
    if request.param == 'daemon':
        request.getfixturevalue('daemon')
    return filled


@pytest.mark.parametrize('command', maintenance.TaskCommand.__subclasses__())
def test_a_command_asks_for_what_its_task_takes(command):
    parsed = vars(command(None, None).get_parser('x').parse_args([]))
    assert set(registry.TASKS[command.task].arguments) <= set(parsed)


def damage(filled, image_id='c'):
    """Spoil the last block that was stored, which is the image's own."""
    path = filled.path / 'groups' / '00000001'
    with open(path, 'r+b') as f:
        f.seek(-1, os.SEEK_END)
        last = f.read(1)
        f.seek(-1, os.SEEK_END)
        f.write(bytes([last[0] ^ 1]))


def spoil_recipe(filled, image_id):
    path = filled.path / 'images' / image_id
    content = bytearray(path.read_bytes())
    content[4096 + 100] ^= 1
    path.write_bytes(content)


def disk_bytes(filled):
    return sum(path.stat().st_blocks * 512
               for path in (filled.path / 'groups').iterdir())


# -- status -------------------------------------------------------------------

def test_status(either):
    result = either('status', '-f', 'json')
    found = result.json()
    assert found['repository']['path'] == str(either.path)
    assert found['repository']['block_size'] == 4096
    space = found['space']
    assert space['images'] == 3
    assert space['logical_bytes'] == 5 * LENGTH
    assert space['zero_bytes'] == LENGTH
    assert space['nonzero_bytes'] == 4 * LENGTH
    assert space['disk_bytes'] > 3 * LENGTH
    assert (found['daemon'] is None) == ('no daemon' in result.err)
    # A command that reads the catalog does not count as a maintainer.
    assert found['repository']['maintained'] == (found['daemon'] is not None)
    assert found['volumes']['in_use'] == found['volumes']['broken'] == 0
    text = either('status').out
    assert text.startswith(str(either.path))
    assert 'logical    800 KiB, of which 640 KiB are not zeros' in text


def test_status_of_the_daemon(filled, daemon):
    found = filled('status', '-f', 'json').json()
    with daemon.client() as client:
        status = client.status()
    assert found.keys() == status.keys()
    assert found['daemon'] == status['daemon']
    assert found['space']['unique_blocks'] == 120
    assert found['tasks'].keys() == status['tasks'].keys()
    # Each task has run once shortly after the start.
    repositories.eventually(
        lambda: re.search('account +done', filled('status').out))
    assert ', maintainer, up for ' in filled('status').out
    # The status also works without --repository.
    del filled.options[:2]
    assert filled('status', '-f', 'json').json()['daemon'] == found['daemon']


def test_status_with_a_catalog(filled):
    """The catalog is read unless a maintainer has it open."""
    filled('task', 'collect')
    found = filled('status', '-f', 'json').json()
    assert found['space']['unique_blocks'] == 120
    assert not found['repository']['maintained']
    assert found['damage'] == {'blocks': 0, 'images': [], 'volumes': []}
    with repositories.open_repository(filled.path) as repo:
        with maintainer_role.Maintainer(repo):
            found = filled('status', '-f', 'json').json()
            assert found['space']['unique_blocks'] is None
            assert found['space']['images'] == 3
            assert found['damage'] is None


# -- tasks --------------------------------------------------------------------

def test_collect(either):
    before = disk_bytes(either)
    assert either('task', 'collect', '-f', 'json').json()['freed_blocks'] == 0
    assert either('image', 'delete', 'c').status == 0
    plan = either('task', 'collect', '--dry-run', '-f', 'json').json()
    assert plan['blocks'] == 40
    assert plan['bytes'] == LENGTH
    assert plan['groups'][0]['free'] == 40
    assert disk_bytes(either) == before
    found = either('task', 'collect', '-f', 'json').json()
    assert found['freed_blocks'] == 40
    assert found['freed_bytes'] == LENGTH
    assert found['refused'] is None
    assert before - disk_bytes(either) >= LENGTH * 0.9
    assert either('image', 'get', 'a', '-').status == 0
    repositories.require_clean(either.path)


def test_merge(either):
    found = either('task', 'merge', '--dry-run', '-f', 'json').json()
    assert found['duplicates'] == 0
    assert either('task', 'merge', '-f', 'json').json()['merged_blocks'] == 0


def test_scrub(either):
    found = either('task', 'scrub', '-f', 'json')
    assert found.status == 0
    assert found.json()['blocks'] == 120
    assert found.json()['complete']
    damage(either)
    result = either('task', 'scrub', '--full', '-f', 'json')
    assert result.status == 1
    assert result.json()['damaged'] >= 1
    assert result.json()['images'] == ['c']
    # From then on the damage is known.
    rows = either('image', 'list', '-f', 'json').json()
    assert {row['image_id']: row['damaged'] for row in rows} == {
        'a': False, 'b': False, 'c': True}
    assert either('image', 'show', 'c', '-f', 'json').json()['damaged']
    assert not either('image', 'show', 'a', '-f', 'json').json()['damaged']
    table = either('image', 'list').out.splitlines()
    assert [line.split('|')[-2].strip() for line in table[3:-1]] == [
        'no', 'no', 'yes']
    found = either('status', '-f', 'json').json()
    assert found['damage']['images'] == ['c']
    # The damage counts in full when a scrub finds it again.
    for options in ((), ('--full',)):
        again = either('task', 'scrub', '-f', 'json', *options)
        assert again.status == 1
        assert again.json()['damaged'] == found['damage']['blocks']
        assert again.json()['found'] == 0


def test_scrub_counts_what_cannot_be_read(either):
    """A scrub counts no blocks of an unreadable recipe, and fails."""
    spoil_recipe(either, 'c')
    for options in ((), ('--full',)):
        result = either('task', 'scrub', '-f', 'json', *options)
        assert result.status == 1
        assert list(result.json()['unreadable']) == ['images/c']
        assert result.json()['damaged'] == 0


def test_recompress(either):
    found = either('task', 'recompress', '--dry-run', '-f', 'json').json()
    group, = found['groups']
    assert (group['action'], group['reason']) == ('recompress', '')
    assert found['bytes'] == group['bytes']
    for options in ((), ('--codec', 'zstd', '--level', '19')):
        assert either('task', 'recompress', '-f', 'json', *options).json() == {
            'groups': 0, 'disk_bytes': 0, 'kept': 1, 'busy': 0,
            'skipped_for_space': 0, 'failed': {}}
    for options in ('--codec', 'lz4'), ():
        either('task', 'recompress', *options, '--level', '3').refused(
            '--level is only for --codec zstd')
    assert either('task', 'recompress', '--codec', 'none').status == 2


def test_space(either):
    found = {row['part']: row for row in either('repository', 'space', '-f',
                                                'json').json()}
    assert found['all']['disk_bytes'] == sum(
        row['disk_bytes'] for name, row in found.items() if name != 'all')
    blocks = found['blocks, none']
    assert blocks['percent_of_unique'] == 100.0
    assert blocks['plain_bytes'] == blocks['disk_bytes'] == 4096 * 120
    assert 'blocks, none' in either('repository', 'space').out


def test_what_fails_is_told(filled, monkeypatch):
    """A failure is reported, and the rest of the result is still shown."""
    @dataclasses.dataclass
    class Result:
        images: int
        failed: dict

    monkeypatch.setattr(merger, 'run_once', lambda *args: Result(
        3, {'a': 'its recipe is damaged'}))
    result = filled('task', 'merge', '-f', 'json')
    assert result.status == 1
    assert result.json()['images'] == 3
    assert 'image a was left unchanged: its recipe is damaged' in result.err


def test_rebuild_catalog(either):
    for processes in ([], ['--local', '2']):
        result = either('repository', 'rebuild-catalog', '-f', 'json',
                        *processes)
        assert result.json() == {'rebuilt': True} and not result.err
    for wrong in ('0', '65', '-1'):
        result = either('repository', 'rebuild-catalog', f'--local={wrong}')
        assert result.status == 2 and 'not from 1 to 64' in result.err
    assert either('task', 'collect').status == 0
    repositories.require_clean(either.path)


def test_collect_by_partition(either):
    assert either('image', 'delete', 'c').status == 0
    for words, why in (
            (['--local', '2'], 'only for --by-partition'),
            (['--by-partition', '--dry-run'], 'compares nothing'),
            (['--by-partition', '--local', '65'], 'not from 1 to 64'),
            (['--by-partition', '--hosts', '/nowhere'], 'cannot read')):
        result = either('task', 'collect', *words)
        assert result.status == 2 and why in result.err, result.err
    result = either('task', 'collect', '--by-partition', '--local', '2', '-f',
                    'json')
    assert result.status == 0 and not result.err
    assert result.json()['freed_blocks'] > 0
    repositories.require_clean(either.path)


def test_a_daemon_reaches_no_other_hosts(filled, daemon, tmp_path):
    hosts = tmp_path / 'hosts'
    hosts.write_text('localhost\n')
    for words in (['task', 'collect', '--by-partition'],
                  ['repository', 'rebuild-catalog']):
        result = filled(*words, '--hosts', str(hosts))
        assert result.status == 2 and 'stop it, or use --local' in result.err


def test_what_is_not_known_of_damage(filled):
    """Without daemon and catalog the damage is unknown."""
    rows = filled('image', 'list', '-f', 'json').json()
    assert [row['damaged'] for row in rows] == [None] * 3
    assert filled('image', 'list').out.splitlines()[3].endswith(' -       |')
    assert not (filled.path / 'locks' / 'maintainer').exists()


def test_mark_lost(either):
    """Collections free nothing until the image is marked as lost.

    Each of them reports the reason.
    """
    assert either('image', 'delete', 'c').status == 0
    spoil_recipe(either, 'b')
    either('image', 'mark-lost', 'b').refused('--yes')
    assert (either.path / 'images' / 'b').exists()
    either('repository', 'rebuild-catalog')
    result = either('task', 'collect', '-f', 'json')
    assert result.status == 1
    assert result.json()['freed_blocks'] == 0
    assert 'b' in result.json()['refused']
    assert 'nothing was freed' in result.err
    assert either('image', 'mark-lost', 'b', '--yes', '-f', 'json').json() == {
        'image_id': 'b', 'lost': True}
    assert not (either.path / 'images' / 'b').exists()
    assert either('task', 'collect', '-f', 'json').json()['freed_blocks'] == 40
    either('image', 'mark-lost', 'a', '--yes').refused('a')
    either('image', 'mark-lost', 'nothing', '--yes').failed('nothing')


# -- which of them ------------------------------------------------------------

def test_the_daemon_is_asked(filled, daemon):
    """The daemon runs the task, since it holds the lock."""
    filled('image', 'delete', 'c')
    assert filled('task', 'collect', '-f', 'json').json()['freed_blocks'] == 40
    with daemon.client() as client:
        last = client.status()['tasks']['collect']['last']
    assert last['result']['freed_blocks'] == 40
    del filled.options[:2]
    assert filled('task', 'collect', '-f', 'json').json()['freed_blocks'] == 0
    assert filled('task', 'scrub').status == 0


def test_lists_come_from_the_daemon(filled, daemon, monkeypatch):
    """The lists come from the daemon, which has the catalog open."""
    expected = filled('--socket', '', 'image', 'list', '-f', 'json').json()
    with daemon.client() as client:
        client.wait('account', client.start('account'))
    opened: list[str] = []
    monkeypatch.setattr(image_repository.Repository, 'stat',
                        lambda self, image_id: opened.append(image_id))
    found = filled('image', 'list', '-f', 'json').json()
    assert opened == []
    assert found and found == [
        {**row, 'damaged': False} for row in expected]


def test_another_repositorys_daemon_is_not(filled, daemon, tmp_path):
    """A request for one repository does not go to another one's daemon."""
    other = tmp_path / 'other'
    filled.options[1] = str(other)
    assert filled('repository', 'create').status == 0
    found = filled('status', '-f', 'json').json()
    assert found['repository']['path'] == str(other)
    assert found['daemon'] is None
    assert filled('task', 'collect').status == 0
    assert (other / 'catalog').is_dir()
    with daemon.client() as client:
        assert client.status()['tasks']['collect']['last'] is None
    filled('image', 'mark-lost', 'a', '--yes').failed('a')


def test_another_maintainer(filled, daemon):
    """Commands fail if a maintainer runs whose socket they do not know."""
    filled.options[filled.options.index('--socket') + 1] = ''
    for command in ('task collect', 'task merge', 'task scrub',
                    'repository rebuild-catalog', 'image mark-lost a --yes'):
        filled(*command.split()).locked('another maintainer')
    found = filled('status', '-f', 'json').json()
    assert found['daemon'] is None


def test_neither(filled):
    del filled.options[:2]
    for command in ('status', 'task collect', 'task merge', 'task scrub',
                    'repository rebuild-catalog', 'image mark-lost a --yes'):
        filled(*command.split()).refused('--repository', '--socket')
    filled('--socket', 'a\0b', 'status').refused('--socket')


def test_socket_of_the_environment(filled, daemon, monkeypatch):
    monkeypatch.setenv('GLANCE_DEDUP_SOCKET', daemon.socket)
    filled.options.clear()
    assert filled('status', '-f', 'json').json()['daemon']


def test_a_server_that_is_no_daemon(filled, tmp_path):
    """A server that is no daemon gives an error; the task does not run."""
    path = tmp_path / 'socket'

    def behave(connection, request):
        connection.sendall(daemons.answer(b'[]'))

    with daemons.scripted(path, behave):
        filled('task', 'collect').failed('no object')
        # These commands need no daemon.
        assert len(filled('image', 'list', '-f', 'json').json()) == 3
        assert filled('image', 'show', 'a').status == 0


def test_the_daemons_error(filled, daemon):
    """The daemon's own sentence is reported, with the status of an error."""
    filled('image', 'mark-lost', 'a', '--yes').refused('a')
    daemon.kill()
    # No daemon runs now, so the command does the work itself.
    assert filled('task', 'collect').status == 0


def test_the_daemon_ends_in_the_middle(filled, tmp_path):
    def behave(connection, request):
        if b'/v1/status' in request:
            connection.sendall(daemons.answer(json.dumps({
                'repository': {'id': repository_id(filled),
                               'path': str(filled.path)}}).encode()))
            request = connection.recv(65536)
        if b'POST' in request:
            connection.sendall(daemons.answer(
                b'{"task": "collect", "number": 3}', 202))

    with daemons.scripted(tmp_path / 'socket', behave):
        filled('task', 'collect').failed(str(tmp_path / 'socket'))


def repository_id(filled):
    return filled('repository', 'show', '-f', 'json').json()['repository_id']


# -- options ------------------------------------------------------------------

def test_the_daemons_options_hold_here_too(filled, tmp_path, monkeypatch):
    """A command uses the options of /etc, if they are for this repository.

    Otherwise it uses the file given.
    """
    seen = []

    def run_once(maintainer, pace, **options):
        seen.append(options['live_share'])

    monkeypatch.setattr(collector, 'run_once', run_once)
    file = tmp_path / 'conf'
    monkeypatch.setattr(host_settings, 'CONFIG_FILE', str(file))
    result = filled('task', 'collect')
    assert result.status == 0, result.err
    file.write_text('[dedupd]\ncollect_live_share = 77\n'
                    f'datadir = {filled.path}\n')
    assert filled('task', 'collect').status == 0
    file.write_text('[dedupd]\ncollect_live_share = 77\ndatadir = /else\n')
    assert filled('task', 'collect').status == 0
    assert seen == [50, 77, 50]
    filled('--config-file', file, 'task', 'collect').refused('/else')
    file.write_text('[dedupd]\ncollect_live_share = x\n')
    filled('task', 'collect').refused(str(file))
    filled('task', 'collect', '--config-file',
           tmp_path / 'missing').refused('missing')
    assert seen == [50, 77, 50]


# -- interrupts ---------------------------------------------------------------

@pytest.mark.parametrize('number', [
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_stops_between_steps(filled, number):
    """An interrupted task keeps its results, and the next run goes on."""
    code = """if True:
        import os, signal, sys
        from dedupd.tasks import scrubber
        from glance_dedup.cli import entry
        def run_once(maintainer, pace, **options):
            pace.step(1, 3, 'the first')
            os.kill(os.getpid(), number)
            print('in the middle', flush=True)
            pace.step(2, 3, 'the second')
            print('not reached', flush=True)
        scrubber.run_once = run_once
        number = int(sys.argv.pop(1))
        sys.exit(entry.main())
        """
    found = subprocess.run(
        [conftest.sys.executable, '-c', code, str(int(number)),
         *filled.options, 'task', 'scrub'], env=filled.environment(),
        capture_output=True, timeout=60, text=True)
    assert found.returncode == 130, found.stderr
    assert found.stdout == 'in the middle\n'
    assert found.stderr == 'glance-dedup: interrupted\n'
    # The lock is free again.
    assert filled('task', 'scrub').status == 0


def test_a_second_interrupt_ends_it(filled):
    pace = pacing.Pace()
    before = signal.getsignal(signal.SIGINT)
    with maintenance.Interrupt(pace):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(pacing.Stopped):
            pace.check()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_progress(filled, daemon, monkeypatch):
    """The daemon's progress is shown like the command's own."""
    monkeypatch.setitem(progress_bar.Progress.INTERVAL, False, 0)
    statuses = iter([
        {'state': 'running', 'done': 3, 'total': 9, 'what': 'group 5',
         'finished': 0, 'last': None},
        {'state': 'idle', 'finished': 1, 'last': {
            'result': {'freed_blocks': 7}, 'error': None}}])
    monkeypatch.setattr('glance_dedup.client.daemon_client.Client.task',
                        lambda *args: next(statuses))
    result = filled('task', 'collect', '-f', 'json')
    assert result.json() == {'freed_blocks': 7}
    assert 'group 5: 33 %, 3 of 9 steps' in result.err


# -- image du -----------------------------------------------------------------

def test_image_du(either):
    found = either('image', 'du', 'a', 'b', 'c', 'a', '-f', 'json').json()
    assert [row['image_id'] for row in found] == ['a', 'b', 'c', '(together)']
    assert [row['freed_bytes'] for row in found] == [
        LENGTH, 0, LENGTH, 3 * LENGTH]
    assert [row['referenced_bytes'] for row in found] == [
        2 * LENGTH, LENGTH, LENGTH, 3 * LENGTH]
    assert found[0]['size'] == 2 * LENGTH
    assert found[0]['freed_blocks'] == LENGTH // 4096
    assert all(row['error'] == '' for row in found)
    # The recipe, and the segments with their headers.
    assert found[2]['freed_disk_bytes'] > LENGTH
    row, = either('image', 'du', 'a', '-f', 'json').json()
    assert row == found[0]
    assert '160 KiB' in either('image', 'du', 'a').out
    # What was announced comes true.
    either('image', 'delete', 'a')
    freed = either('task', 'collect', '-f', 'json').json()
    assert (freed['freed_bytes'], freed['freed_blocks']) == (
        row['freed_bytes'], row['freed_blocks'])


def test_image_du_of_images_that_there_are_not(either):
    result = either('image', 'du', 'a', 'x', '-f', 'json')
    assert result.status == common.FAILED
    assert result.err == (
        "glance-dedup: there is no image x; 'glance-dedup image list' shows "
        'those that exist\n')
    a, x, together = json.loads(result.out)
    assert x['error'] == "there is no image x; 'glance-dedup image list' " \
        'shows those that exist'
    assert x['size'] is x['freed_bytes'] is None
    assert a['freed_bytes'] == together['freed_bytes'] == LENGTH
    for wrong in ('a b', '', '../a'):
        assert either('image', 'du', 'a', wrong).status == common.USAGE


def test_image_du_with_damage(either):
    either('image', 'du', 'a')      # counts it
    spoil_recipe(either, 'b')
    result = either('image', 'du', 'b', 'c', '-f', 'json')
    assert result.status == common.DAMAGED
    assert 'image mark-lost --yes b' in result.err
    assert result.json()[1]['freed_bytes'] == LENGTH


def test_image_du_with_a_damaged_entry(either):
    with repositories.open_repository(either.path) as repo:
        group, slot = blocks_of(repo, 'a')[3]
    repositories.ruin(repositories.group_path(either.path, group),
                      repositories.Group.entry_offset(slot) + 54)
    result = either('image', 'du', 'a', 'c', '-f', 'json')
    assert result.status == common.DAMAGED
    assert 'a needs 3 blocks with damaged entries' in result.err
    assert result.json()[0]['referenced_bytes'] == 2 * LENGTH - 3 * 4096
    assert result.json()[1]['freed_bytes'] == LENGTH


def test_image_du_takes_many(filled):
    many = [f'i{number}' for number in range(513)]
    filled('image', 'du', *many).refused(
        'images: a run takes 1 to 512 of them, not 513')
