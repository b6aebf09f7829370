# SPDX-License-Identifier: Apache-2.0
"""tools/cloud starts, changes and ends clouds.

A few services are enough: the whole cloud is up in the other tests.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest

from glance_dedup.repository import cold_settings
from tests.cloud import cloud_service
from tests.cloud import cloud_state
from tests.cloud import glance_settings
from tests.cloud import live_process
from tests.cloud import local_cloud
from tests.support import repositories

TOP = pathlib.Path(__file__).resolve().parents[2]
TOOL = TOP / 'tools' / 'cloud'
# Seconds. For a loaded machine.
LIMIT = 600

# Long: each test starts and ends services of a cloud of its own.
pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(2 * LIMIT),
    pytest.mark.needs('cloud', 'swift')]


@pytest.fixture
def place():
    """A directory for a cloud; the test leaves nothing of it."""
    with tempfile.TemporaryDirectory(prefix='cloud-') as parent:
        directory = pathlib.Path(parent) / 'one'
        yield directory
        for one in (directory, directory.with_name('other')):
            for process in live_process.marked(one):
                process.kill()


def tool(*words, status=0):
    """Run tools/cloud; return its output."""
    result = subprocess.run(
        [TOOL, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=LIMIT)
    assert result.returncode == status, result.stdout
    return result.stdout


def table(directory, status):
    """Return state and process of each service, as `status` prints them."""
    lines = tool('status', '--dir', directory, status=status).splitlines()
    assert lines[0].split() == ['service', 'state', 'process', 'address',
                                'log']
    rows, _, _ = '\n'.join(lines[1:]).partition('\n\n')
    matches = [re.match(r'(\S+)\s+(.+?)\s+(\d+|-)\s', line)
               for line in rows.splitlines()]
    return {match[1]: (match[2], match[3]) for match in matches}


def listens(one):
    with contextlib.suppress(OSError):
        socket.create_connection(('127.0.0.1', one.port), 5).close()
        return True
    return False


def test_life(place):
    """A cloud starts, reports, starts again, is repaired, and ends."""
    said = tool('up', '--dir', place, 'placement', 'dedupd')
    assert 'start Placement ...' in said and 'the cloud is up' in said
    before = table(place, 0)
    # The named services and their needs.
    assert list(before) == ['mariadb', 'rabbitmq', 'dedupd', 'placement']
    assert {state for state, _ in before.values()} == {'up'}
    placement = local_cloud.Cloud(place).services['placement']
    assert listens(placement)
    # Only the owner can read the password.
    assert place.stat().st_mode & 0o077 == 0

    said = tool('up', '--dir', place, 'placement')
    assert 'Placement runs already' in said and 'start ' not in said
    assert table(place, 0) == before

    os.kill(int(before['placement'][1]), signal.SIGKILL)
    after = table(place, 1)
    assert after.pop('placement')[0] == 'down'
    assert {state for state, _ in after.values()} == {'up'}
    assert 'start Placement:' in tool('up', '--dir', place, 'placement')
    mended = table(place, 0)
    assert mended['placement'] != before['placement']
    assert {name: one for name, one in mended.items()
            if name != 'placement'} == after

    assert live_process.marked(place)
    tool('down', '--dir', place)
    assert not place.exists()
    assert live_process.marked(place) == []
    assert not listens(placement)
    assert 'there is no cloud' in tool('status', '--dir', place, status=1)
    assert 'there is no cloud' in tool('down', '--dir', place)


@pytest.mark.long
def test_kept(place):
    """Down with --keep leaves the stored data, and ends everything."""
    tool('up', '--dir', place, 'placement')
    ports = json.loads((place / 'state.json').read_text())['ports']
    tool('down', '--dir', place, '--keep')
    assert live_process.marked(place) == []
    assert set(table(place, 1).values()) == {('not started', '-')}
    tool('up', '--dir', place, 'placement')
    assert json.loads((place / 'state.json').read_text())['ports'] == ports
    # Prepared once, started twice.
    logs = {name: (place / 'log' / f'{name}.log').read_text()
            for name in ('mariadb', 'placement')}
    assert logs['mariadb'].count('--- mariadb-install-db ') == 1
    assert len(re.findall(
        '^--- /', logs['placement'].partition('/uwsgi --ini')[2], re.M)) == 1
    tool('down', '--dir', place)


#: Invalid settings, and the message about each.
WRONG = {
    'dedup_store_codec=zip': 'Valid values are',
    'dedup_store_codek=zstd': 'write dedup_store_codec',
    'dedup.debug=true': 'The section [dedup] of Glance has no option debug',
    'nosuch.debug=true': 'Glance has no section [nosuch]',
    'dedup_store_filter_mib=0': 'greater than or equal to 1',
    'debug': 'sets nothing',
}


@pytest.mark.parametrize('word', WRONG)
def test_wrong_setting(word):
    """The error comes before anything starts, with the remedy."""
    stores = {'dedup': {'type': 'dedup'}, 'file': {'type': 'file'}}
    with pytest.raises(cloud_service.CloudError,
                       match='What to do:') as caught:
        glance_settings.parse([word], stores)
    assert WRONG[word] in str(caught.value)


def test_settings():
    """A section that is left out is found; stores come first."""
    stores = {'fast': {'type': 'dedup'}, 'file': {'type': 'file'}}
    found = glance_settings.parse(
        ['dedup_store_codec=zstd', 'DEFAULT.debug=true',
         'filesystem_store_chunk_size=1'], stores)
    assert found == {'fast': {'dedup_store_codec': 'zstd'},
                     'DEFAULT': {'debug': 'true'},
                     'file': {'filesystem_store_chunk_size': '1'}}
    with pytest.raises(cloud_service.CloudError, match='Several sections'):
        glance_settings.parse(['dedup_store_codec=zstd'],
                              {**stores, 'slow': {'type': 'dedup'}})


@pytest.mark.long
def test_options(place):
    """A second `up` adds to the cloud, and restarts the changed services."""
    tool('up', '--dir', place, '--glance', 'dedup_store_codec=zstd',
         '--glance', 'dedup_store_filter_mib=8', 'glance', 'keystone')
    config = place / 'etc' / 'glance' / 'glance-api.conf'
    assert 'dedup_store_codec = zstd\n' in config.read_text()
    before = table(place, 0)

    said = tool('up', '--dir', place, '--glance', 'dedup_store_codec=lz4',
                '--site', '--tempest', 'glance', 'other/glance')
    assert 'start Glance again, with other settings' in said
    assert 'glance-dedup image replicate' in said and 'tempest run' in said
    assert 'dedup_store_codec = lz4\n' in config.read_text()
    after = table(place, 0)
    assert after['other/glance'][0] == after['other/dedupd'][0] == 'up'
    assert {name for name in before if before[name] != after[name]} == {
        'glance'}
    noted = tool('status', '--dir', place)
    assert 'Glance has dedup.dedup_store_codec=lz4' in noted
    assert 'Glance has dedup.dedup_store_filter_mib=8' in noted
    assert (place / 'tempest' / 'etc' / 'tempest.conf').exists()

    # An impossible addition changes nothing.
    assert 'without compute hosts' in tool(
        'up', '--dir', place, '--host', 'c1', status=2)
    assert table(place, 0) == after
    tool('down', '--dir', place)
    assert live_process.marked(place) == []


@pytest.mark.long
def test_swift(place):
    """The repository is attached, and stays so; an old one is not changed."""
    said = tool('up', '--dir', place, '--swift', 'dedupd')
    assert 'start Swift:' in said and 'tier --all' in said
    up = table(place, 0)
    assert list(up) == ['mariadb', 'rabbitmq', 'keystone', 'swift', 'dedupd']
    settings = cold_settings.require(str(place / 'stores' / 'dedup'))
    assert settings.location.url == 'swift://glance-dedup/cold'
    with repositories.open_repository(place / 'stores' / 'dedup') as repo:
        assert repo.parameters.has_cold
        assert repo.parameters.group_slots == local_cloud.GROUP_SLOTS
    assert pathlib.Path(settings.credentials).stat().st_mode & 0o077 == 0
    assert 'tier_free_mib = ' in (
        place / 'etc' / 'dedupd' / 'dedupd.conf').read_text()

    os.kill(int(up['swift'][1]), signal.SIGKILL)
    os.kill(int(up['dedupd'][1]), signal.SIGKILL)
    said = tool('up', '--dir', place, 'dedupd')
    assert 'start Swift:' in said and 'start dedupd:' in said
    assert cold_settings.require(str(place / 'stores' / 'dedup')) == settings
    tool('down', '--dir', place)

    other = place.with_name('other')
    tool('up', '--dir', other, 'neutron')
    assert 'was started without Swift' in tool(
        'up', '--dir', other, '--swift', 'neutron', status=2)
    tool('down', '--dir', other)
    assert live_process.marked(place) == []


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0,
                    reason='only root can make a network')
def test_hosts_and_mounts(place):
    """Another host joins; `down` leaves no link, no namespace, no mount."""
    said = tool('up', '--dir', place, '--cached-host', 'c1', 'neutron')
    assert '# on the compute host c1' in said
    tool('up', '--dir', place, '--host', 'p1', 'neutron')
    up = table(place, 0)
    assert up['c1'][0] == up['p1'][0] == 'up'
    for words, why in ((['--host', 'c1'], 'already, with a cache'),
                       (['--host', 'nova'], 'is no name of a compute host'),
                       (['--host', 'c2', '--cached-host', 'c2'],
                        'both with and without')):
        assert why in tool('up', '--dir', place, *words, status=2)
    links = [host.link for host in local_cloud.Cloud(place).hosts.values()]
    mounted = place / 'var' / 'a mount'
    mounted.mkdir()
    subprocess.run(['mount', '-t', 'tmpfs', 'none', mounted], check=True,
                   timeout=LIMIT)
    tool('down', '--dir', place)
    assert not place.exists() and live_process.marked(place) == []
    assert live_process.mounts_below(place.resolve()) == []
    assert not any(pathlib.Path('/sys/class/net', link).exists()
                   for link in links)


@pytest.mark.long
def test_cannot_start(place):
    """A service that does not start is named, with its log; others go on."""
    cloud = local_cloud.Cloud(place)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(('127.0.0.1', cloud.services['neutron'].port))
        taken.listen()
        said = tool('up', '--dir', place, 'neutron', status=2)
    assert 'FAILED: Neutron (stub) did not start: it ended while' in said
    assert 'Address already in use' in said
    assert f'Whole log: {place}/log/neutron.log' in said
    assert 'What to do:' in said
    assert table(place, 1) == {'neutron': ('not started', '-')}
    tool('up', '--dir', place, 'neutron')
    assert table(place, 0)['neutron'][0] == 'up'
    tool('down', '--dir', place)


def test_killed_up(place):
    """Down cleans up after an `up` that was killed in the middle.

    Another cloud on the machine is left alone.
    """
    other = place.with_name('other')
    tool('up', '--dir', other, 'neutron')
    with subprocess.Popen(
            [sys.executable, '-m', 'tests.cloud', 'up', '--dir', place,
             'placement'], cwd=TOP, stdout=subprocess.PIPE,
            text=True) as up:
        deadline = time.monotonic() + LIMIT
        while not live_process.marked(place):
            assert up.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        # The signal keeps it in the middle as long as the test needs.
        up.send_signal(signal.SIGSTOP)
        busy = tool('down', '--dir', place, status=2)
        assert 'Another tools/cloud is at work' in busy
        up.kill()
    tool('down', '--dir', place)
    assert live_process.marked(place) == []
    assert not place.exists()
    assert table(other, 0)['neutron'][0] == 'up'
    tool('down', '--dir', other)


#: Interrupts itself at the first check of MariaDB.
INTERRUPTED = """
import signal, threading
from tests.cloud import __main__ as tool
from tests.cloud import mariadb

def answers(self):
    mariadb.MariaDB.answers = lambda self: False
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

mariadb.MariaDB.answers = answers
raise SystemExit(tool.main())
"""


@pytest.mark.long
def test_interrupted_up(place):
    """Ctrl-C ends the services that were still starting."""
    up = subprocess.run(
        [sys.executable, '-c', INTERRUPTED, 'up', '--dir', place, 'placement',
         'neutron'], cwd=TOP, stdout=subprocess.PIPE, timeout=LIMIT)
    assert up.returncode == 130
    assert {name for name, one in table(place, 1).items()
            if one[0] == 'up'} <= {'neutron'}
    tool('down', '--dir', place)
    assert live_process.marked(place) == []


def test_reused_process_id(place):
    """A process that has a recorded number by chance is left alone."""
    cloud = local_cloud.Cloud(place)
    stranger = subprocess.Popen(['sleep', str(LIMIT)])
    try:
        real = live_process.Process.of(stranger.pid)
        cloud.state.add_process('neutron', live_process.Process(
            real.pid, real.started - 1))
        assert not cloud.services['neutron'].running()
        cloud.down()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait(LIMIT)


def test_foreign_directory(place):
    """A directory that is no cloud's is neither used nor removed."""
    place.mkdir()
    (place / 'precious').touch()
    assert 'no cloud' in tool('up', '--dir', place, 'neutron', status=2)
    tool('down', '--dir', place)
    assert (place / 'precious').exists()
    too_long = place / ('x' * 60)
    assert 'too long' in tool('up', '--dir', too_long, status=2)
    assert not too_long.exists()
    assert 'no service foo' in tool(
        'up', '--dir', place.with_name('other'), 'foo', status=2)


def test_words():
    """The tool prints its help, and an error for a wrong command."""
    assert 'tools/cloud up' in tool('--help')
    assert 'see tools/cloud --help' in tool('fly', status=2)


def test_left_children(place):
    """Children of a killed process end with its service."""
    cloud = local_cloud.Cloud(place)
    neutron = cloud.services['neutron']
    leader = neutron.spawn(
        ['sh', '-c', f'sleep {LIMIT} & exec sleep {LIMIT}'], cwd=place)
    # While a program starts, the kernel does not show its environment.
    repositories.eventually(lambda: [
        pathlib.Path(f'/proc/{process.pid}/cmdline').read_bytes()[:6]
        for process in live_process.marked(place)] == 2 * [b'sleep\0'])
    leader.kill()
    leader.wait(LIMIT)
    assert not neutron.running()
    assert len(live_process.marked(place)) == 1
    neutron.kill()
    assert live_process.marked(place) == []
    cloud.down()


def test_a_thread_that_still_ends(place):
    """A process whose threads still end counts as running.

    It holds its files and ports as long.
    """
    program = ('import ctypes, threading, time\n'
               'threading.Thread(target=time.sleep, args=(600,)).start()\n'
               'ctypes.CDLL(None).syscall(60, 0)\n')
    process = live_process.Process.spawn(
        [sys.executable, '-c', program], place.parent, env={})
    status = pathlib.Path(f'/proc/{process.pid}/status')
    deadline = time.monotonic() + LIMIT
    while 'State:\tZ' not in status.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.poll() is None
    process.kill()
    process.wait(LIMIT)


def test_unrecorded_process(place):
    """A process that was started, but not recorded, is ended, too."""
    cloud = local_cloud.Cloud(place)
    live_process.Process.spawn(['sleep', str(LIMIT)], place, env={})
    # For a moment the kernel does not show a new program's environment.
    repositories.eventually(lambda: len(live_process.marked(place)) == 1)
    cloud.down()
    assert live_process.marked(place) == []


def test_state_survives(tmp_path):
    """One process reads the state that another recorded."""
    path = tmp_path / 'state.json'
    one = cloud_state.State(path)
    port = one.port('x')
    one.add_process('x', live_process.Process.of(os.getpid()))
    one.set_prepared('x')
    two = cloud_state.State(path)
    assert (two.port('x'), two.password) == (port, one.password)
    assert two.prepared('x') and not two.prepared('y')
    assert two.processes('x')[0].poll() is None
    assert path.stat().st_mode & 0o077 == 0
