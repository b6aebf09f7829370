# SPDX-License-Identifier: Apache-2.0

"""An operator's work on a volume while a guest of QEMU writes to it.

The guide's page on volumes in QEMU describes it ("While it runs").
"""

import contextlib
import time

import pytest

from tests import needs
from tests.support import nbd
from tests.support import qmp
from tests.support import repositories
from tests.support import volume_tools
from tests.support import writing_guest

MIB = 1 << 20
SIZE = 64 * MIB
#: The size of each job's file.
FILE = '2m'


@pytest.fixture(scope='module')
@needs.of(*writing_guest.NEEDS)
def system(tmp_path_factory):
    return writing_guest.build(tmp_path_factory.mktemp('system'))


@pytest.fixture
def server(tmp_path):
    repository = volume_tools.create_repository(tmp_path / 'repository')
    writing_guest.clone_formatted(repository, tmp_path, 'ext4', SIZE)
    with volume_tools.Server(repository, tmp_path) as found:
        yield found.start()


@contextlib.contextmanager
def running(system, server, place, last=0, *options, **more):
    """A guest, and the monitor of its QEMU."""
    place.mkdir()
    with writing_guest.Guest(
            system, place, server, 'ext4', last, FILE, *options,
            *qmp.option(place / 'qmp'), **more) as guest:
        with qmp.Monitor(place / 'qmp') as monitor:
            try:
                yield guest, monitor
            except AssertionError:
                print(f'{place}:\n{qmp.describe(monitor)}')
                raise


def wait_for_writes(guest):
    """Wait until a job that has not begun yet is on the disk."""
    last = guest.last()
    guest.wait_for(lambda: guest.last() > last + 1)


def require_found(system, server, place, last):
    """After a power failure of guest and server all synced data is there."""
    server.kill()
    server.start()
    with running(system, server, place, last) as (guest, _):
        guest.wait_for(guest.is_checked)
    server.stop()
    repositories.require_clean(server.repository)


# Long: guests boot, without KVM, and write until enough is on the disk.
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize('reconnects', [
    pytest.param(True, marks=pytest.mark.long), False])
def test_restart(system, server, tmp_path, reconnects):
    """The guest continues if QEMU waits, or pauses it at an error."""
    def goes_on():
        if monitor.ask('query-status')['status'] == 'io-error':
            time.sleep(1)       # for QEMU to connect
            monitor.ask('cont')
        return guest.last() > last

    with running(system, server, tmp_path / 'a', reconnects=reconnects) as (
            guest, monitor):
        for _ in range(2):
            wait_for_writes(guest)
            last = guest.last() + 1
            server.stop()
            server.start()
            guest.wait_for(goes_on)
        last = guest.last()
    require_found(system, server, tmp_path / 'b', last)


# Long: guests boot, without KVM, and write until enough is on the disk.
@pytest.mark.long
def test_grow(system, server, tmp_path):
    """QEMU takes the new size once it has reconnected, and got the command."""
    new = {'node-name': 'disk', 'size': 2 * SIZE}

    def is_grown():
        # QEMU connects again with the guest's next request.
        with contextlib.suppress(qmp.Refused):
            monitor.ask('block_resize', **new)
            return True
        return False

    with running(system, server, tmp_path / 'a') as (guest, monitor):
        guest.wait_for(lambda: guest.has_sectors(SIZE // 512))
        server.control.resize(2 * SIZE)
        with pytest.raises(qmp.Refused, match='Cannot grow NBD nodes'):
            monitor.ask('block_resize', **new)
        server.stop()
        server.start()
        guest.wait_for(is_grown)
        guest.wait_for(lambda: guest.has_sectors(2 * SIZE // 512))
        wait_for_writes(guest)
        last = guest.last()
    require_found(system, server, tmp_path / 'b', last)


@pytest.mark.needs('guest', 'nbdkit')
def test_grow_without_a_restart(tmp_path):
    """The server disconnects QEMU, which connects again with a request."""
    new = {'node-name': 'disk', 'size': 2 * SIZE}
    repository = volume_tools.create_repository(tmp_path / 'repository')
    volume_tools.create(repository, 'disk', SIZE)

    def io(command):
        # QEMU reports failed requests as text.
        return monitor.ask('human-monitor-command', **{
            'command-line': f'qemu-io disk "{command}"'})

    with volume_tools.Server(repository, tmp_path) as server:
        server.start()
        qemu = nbd.Machine([
            'qemu-system-x86_64', '-machine', 'none', '-nodefaults',
            '-display', 'none', '-blockdev', 'driver=nbd,node-name=disk,'
            f'server.type=unix,server.path={server.socket},export=disk,'
            'reconnect-delay=300', *qmp.option(tmp_path / 'qmp')],
            tmp_path / 'console')
        with qemu, qmp.Monitor(tmp_path / 'qmp') as monitor:
            assert 'failed' not in io('write -P 1 0 4k')
            server.control.resize(2 * SIZE)
            assert 'failed' not in io('read 0 4k')
            with pytest.raises(qmp.Refused, match='Cannot grow NBD nodes'):
                monitor.ask('block_resize', **new)
            assert server.control.disconnect() == 1
            assert 'failed' not in io('read -P 1 0 4k')
            monitor.ask('block_resize', **new)
            assert 'failed' not in io(f'write -P 2 {2 * SIZE - 4096} 4k')
        with server.session() as session:
            assert session.read(2 * SIZE - 4096, 4096) == b'\2' * 4096


# Long: guests boot, without KVM, and write until enough is on the disk.
@pytest.mark.slow
@pytest.mark.long
def test_migrate(system, server, tmp_path):
    """The guest continues in another QEMU, with the same server."""
    state = f'unix:{tmp_path}/state'
    with (running(system, server, tmp_path / 'a') as (guest, source),
          running(system, server, tmp_path / 'b', 0, '-incoming', 'defer') as (
              moved, target)):
        wait_for_writes(guest)
        target.ask('migrate-incoming', uri=state)
        source.ask('migrate', uri=state)
        repositories.eventually(lambda: source.ask(
            'query-migrate').get('status') in ('completed', 'failed'), 60)
        assert source.ask('query-migrate')['status'] == 'completed'
        before = guest.last()
        guest.kill()
        moved.wait_for(lambda: moved.last() > before + 1)
        last = moved.last()
    require_found(system, server, tmp_path / 'c', last)
