# SPDX-License-Identifier: Apache-2.0

"""A host that is cut off, and returns after others have used its groups.

The server drops the locks of a host that has sent no message for some time.
The host's processes do not notice that, and continue later (hosts.rst, "A host
that lost its locks"). On the model of a shared file system the process is
stopped by a signal, and ``drop_locks`` plays the server. With ``lost='error'``
the open files that had locks can no longer be used, as on NFS, GlusterFS with
strict locks, and CephFS; with ``lost='silent'`` they can. The helper's part is
in ``test_helpers.py``.
"""

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys

import pytest

from dedupd.tasks import collector
from dedupd.tasks import merger
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.check import checker
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import openvolumes
from tests.functional import watched_process
from tests.sharedfs import fuse_hosts
from tests.support import daemons
from tests.support import maintenance
from tests.support import processes
from tests.support import repositories

pytestmark = pytest.mark.slow

LIMIT = 60
LOST = pytest.mark.parametrize('lost', ['error', 'silent'])
#: The beginning of each process of the cut-off host; prints its outcome.
BEGINNING = """
import contextlib, sys
from glance_dedup import _engine
from glance_dedup.base import exceptions
from tests.support import maintenance
from tests.support import repositories

def wait(word='now'):
    print(word, flush=True)
    sys.stdin.readline()

repo = repositories.open_repository(sys.argv[1], filter_dir=sys.argv[2],
                                    codec='none')
try:
    do()
except (OSError, exceptions.RepositoryError) as e:
    print(type(e).__name__, e, flush=True)
else:
    print('done', flush=True)
"""


class CutOff:
    """A process of a host, which is stopped at a line that it prints.

    :param arguments: of the program, from ``sys.argv[3]`` on
    """

    def __init__(self, host, program, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, '-c',
             BEGINNING.replace('def wait', program + '\ndef wait'),
             host.root / 'repository', host.filters, *arguments],
            cwd=daemons.ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.said() == 'now\n'
        processes.stop(self.process.pid)
        drop_locks(host)

    def said(self):
        assert select.select([self.process.stdout], [], [], LIMIT)[0]
        return self.process.stdout.readline()

    def go_on(self):
        """Let it do the rest; return the line that it prints then."""
        self.process.stdin.write('\n')
        self.process.stdin.flush()
        self.process.send_signal(signal.SIGCONT)
        said = self.said()
        self.process.stdin.close()
        self.process.wait(LIMIT)
        return said

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.process.kill()
        self.process.wait(LIMIT)
        self.process.stdout.close()


def drop_locks(host):
    """Have the server drop all locks of the host, and wait until it has."""
    path = host.backing / 'repository'
    host.drop_locks()
    # Each host has a feature byte, behind the locks of groups.
    repositories.eventually(
        lambda: not is_locked(path / 'locks/groups', repositories.FEATURE_BYTE)
        and not is_locked(path / 'locks/images', 0)
        and not is_locked(path / 'locks/maintainer', 0)
        and not any(is_locked(file, 0) for file in path.glob('volumes/*/lock'))
        and not any(is_locked(file, 2) for file in path.glob('images/*')),
        LIMIT)


def is_locked(file, length):
    """Return true if the first bytes have a lock; with 0: if any byte has."""
    wanted = struct.pack('@hhqqi4x', fcntl.F_WRLCK, os.SEEK_SET, 0, length, 0)
    try:
        with open(file, 'rb') as f:
            answer = fcntl.fcntl(f, fcntl.F_OFD_GETLK, wanted)
    except FileNotFoundError:
        return False
    return struct.unpack('@hhqqi4x', answer)[0] != fcntl.F_UNLCK


@contextlib.contextmanager
def two_hosts(tmp_path, **options):
    with fuse_hosts.hosts(tmp_path, names=600, attributes=600,
                          **options) as both:
        maintenance.create(both[0].root)
        yield both


def on(host):
    return repositories.open_repository(
        host.root / 'repository', filter_dir=str(host.filters), codec='none')


def collect(repo, **shares):
    with maintainer_role.Maintainer(repo) as maintainer:
        maintenance.account(maintainer)
        return collector.run_once(maintainer, pacing.Pace(), **{
            'live_share': 0, 'evacuate_share': 0, **shares})


def require_clean(both):
    repositories.require_clean(both[0].backing / 'repository')


# -- a writer -----------------------------------------------------------------

WRITER = """
def do():
    with repo.begin('half') as transaction:
        transaction.write(maintenance.content(2))
        transaction.keep()
        transaction.write(maintenance.content(3))
        wait()
        transaction.write(maintenance.content(4))
        transaction.commit()
"""


@LOST
def test_a_writer_whose_group_another_host_appended_to(tmp_path, lost):
    """I4 holds if lost locks are errors; otherwise damage is found (I7)."""
    data = maintenance.content(5, blocks=20)
    with two_hosts(tmp_path, lost=lost) as both, CutOff(
            both[0], WRITER) as writer:
        with on(both[1]) as there:
            repositories.put(there, 'there', data)
            groups = {g for g, _ in maintenance.blocks_of(there, 'there')}
            assert groups == {1}
        said = writer.go_on()
        with on(both[1]) as there:
            if lost == 'error':
                assert said.startswith('StorageError'), said
                maintenance.require_contents(there, {'there': data})
                assert collect(there).busy == 0
                maintenance.require_contents(there, {'there': data})
            else:
                # Otherwise the test would prove nothing.
                with pytest.raises(exceptions.DamagedError):
                    repositories.read_all(there, 'there')
        if lost == 'error':
            require_clean(both)
        else:
            assert not checker.check(both[0].backing / 'repository').ok


COMMITTER = """
def do():
    with repo.begin('half') as transaction:
        transaction.write(maintenance.content(2))
        transaction.keep()
        wait()
        transaction.commit()
"""


@LOST
@pytest.mark.parametrize('between', ['collected', 'nothing'])
def test_a_writer_about_to_commit(tmp_path, lost, between):
    """Once blocks that it found can go, its recipe's name is gone (N6.2)."""
    model = {'old': maintenance.content(2)}
    with two_hosts(tmp_path, lost=lost) as both, on(both[1]) as there:
        repositories.put(there, 'old', model['old'])
        with CutOff(both[0], COMMITTER) as writer:
            if between == 'collected':
                there.delete('old')
                del model['old']
                result = collect(there)
                assert result.freed_blocks == 10 and result.busy == 0
            said = writer.go_on()
        if between == 'collected':
            assert said != 'done\n'
        elif said == 'done\n':
            model['half'] = maintenance.content(2)
        else:
            assert lost == 'error', said
        maintenance.require_contents(there, model)
        collect(there)
        require_clean(both)


# -- a collector --------------------------------------------------------------

COLLECTOR = """
def do():
    from glance_dedup.maintenance import maintainer_role
    import struct
    with maintainer_role.Maintainer(repo) as found:
        group = found.engine.enter_group(1)
        wait()
        group.free(struct.pack('<10I', *range(10)))
        group.punch()
"""


@LOST
def test_a_collector_whose_group_others_name(tmp_path, lost):
    """A cut-off collector frees no block that is named again meanwhile.

    This holds if lost locks are errors.
    """
    data = maintenance.content(1)
    with two_hosts(tmp_path, lost=lost) as both:
        with on(both[0]) as here:
            repositories.put(here, 'one', data)
            here.delete('one')
        with CutOff(both[0], COLLECTOR) as stopped, on(both[1]) as there:
            again = repositories.put(there, 'again', data)
            assert again.new_bytes == 0
            said = stopped.go_on()
        with on(both[1]) as there:
            if lost == 'error':
                assert said.startswith('StorageError'), said
                maintenance.require_contents(there, {'again': data})
                collect(there)
                maintenance.require_contents(there, {'again': data})
                require_clean(both)
            else:
                # Otherwise the test would prove nothing.
                assert said == 'done\n'
                with pytest.raises(exceptions.DamagedError):
                    repositories.read_all(there, 'again')


REMOVER = """
def do():
    from glance_dedup.maintenance import maintainer_role
    import struct
    with maintainer_role.Maintainer(repo) as found:
        group = found.engine.enter_group(1)
        group.free(struct.pack('<10I', *range(10)))
        wait()
        print('removed' if group.unlink() else 'kept', flush=True)
"""


@LOST
def test_a_collector_that_removes_a_group(tmp_path, lost):
    """No writer appends to a group that a late collector removes.

    This holds if lost locks are errors.
    """
    with two_hosts(tmp_path, lost=lost) as both, on(both[1]) as there:
        with there.begin('one') as transaction:
            transaction.write(maintenance.content(1))
            transaction.keep()
            # Group 1 is then not the last one.
            repositories.put(there, 'full', maintenance.content(
                2, blocks=maintenance.SLOTS))
            transaction.commit()
        assert maintenance.groups(there.path) == [1, 2]
        there.delete('one')
        with CutOff(both[0], REMOVER) as stopped:
            data = maintenance.content(3)
            repositories.put(there, 'new', data)
            groups = {g for g, _ in maintenance.blocks_of(there, 'new')}
            assert groups == {1}
            said = stopped.go_on()
        if lost == 'error':
            assert said.startswith('StorageError'), said
            assert repositories.read_all(there, 'new') == data
            collect(there)
            assert repositories.read_all(there, 'new') == data
            require_clean(both)
        else:
            # Otherwise the test would prove nothing.
            assert said == 'removed\n'


MAINTAINER = """
def do():
    from dedupd.tasks import collector
    from glance_dedup.base import pacing
    from glance_dedup.maintenance import maintainer_role
    with maintainer_role.Maintainer(repo) as found:
        maintenance.account(found)
        enter = found.enter_group

        def stopped(number):
            wait()
            return enter(number)
        found.enter_group = stopped
        collector.run_once(found, pacing.Pace(), live_share=0,
                           evacuate_share=0)
"""


@LOST
@pytest.mark.parametrize('alive', [True, False])
def test_a_maintainer_that_has_a_successor(tmp_path, lost, alive):
    """A former maintainer that takes locks again frees no block."""
    data = maintenance.content(1)
    with two_hosts(tmp_path, lost=lost) as both, on(both[1]) as there:
        repositories.put(there, 'one', data)
        there.delete('one')
        with CutOff(both[0], MAINTAINER) as stopped:
            again = repositories.put(there, 'again', data)
            assert again.new_bytes == 0
            with contextlib.ExitStack() as stack:
                maintainer = stack.enter_context(
                    maintainer_role.Maintainer(there))
                maintenance.account(maintainer)
                if not alive:
                    stack.close()
                said = stopped.go_on()
                if alive:
                    maintenance.require_counted(maintainer)
        require_clean(both)
        collect(there)
        maintenance.require_contents(there, {'again': data})
        assert said.startswith('LostLocks'), said


# -- a reader -----------------------------------------------------------------

READER = """
def do():
    data = maintenance.content(1, blocks=250)
    with repo.open_image('one') as image:
        assert image.read(100) == data[:100]
        wait()
        if image.read() != data[100:]:
            print('wrong', flush=True)
"""


@LOST
def test_a_reader_whose_image_is_collected(tmp_path, lost):
    """The reader gets an error, never other bytes (I7)."""
    with two_hosts(tmp_path, lost=lost) as both:
        with on(both[1]) as there:
            repositories.put(there, 'one', maintenance.content(1, blocks=250))
            with CutOff(both[0], READER) as reader:
                there.delete('one')
                assert collect(there).freed_blocks == 250
                repositories.put(there, 'other',
                                 maintenance.content(2, blocks=250))
                said = reader.go_on()
                assert 'Error' in said, said
        require_clean(both)


# -- a deleter ----------------------------------------------------------------

@pytest.fixture(scope='module')
def witness(tmp_path_factory):
    found = watched_process.Witness(
        watched_process.build(tmp_path_factory.mktemp('witness')))
    yield found
    found.close()


def test_a_deleter_that_the_server_kept_waiting(tmp_path, witness):
    """A deleter whose spool file is gone deletes nothing (N4.6)."""
    kept = {'one': maintenance.content(1)}
    with two_hosts(tmp_path) as both, on(both[1]) as there:
        repositories.put(there, 'one', kept['one'])
        collect(there)

        def stop(call):
            if call.result is None and call.is_('fsync', 'spool'):
                drop_locks(both[0])
                collect(there)
            return 0
        run = witness.run(both[0].root / 'repository', [['delete', 'one']],
                          stop, filter_dir=str(both[0].filters))
        assert run.outcomes[0]['error'] == 'BusyError'
        maintenance.require_contents(there, kept)
        there.delete('one')
        assert collect(there).freed_blocks == 10
        require_clean(both)


@pytest.mark.parametrize('moment', ['linkat', 'unlinkat'])
def test_a_deleter_whose_entry_is_settled(tmp_path, witness, moment):
    """Only the deleted image is lost; a rebuild brings lost space back.

    Before the unlinking, the maintainer takes the delete for one that came to
    nothing (N4.6), and the image then goes without a spool file.
    """
    kept = {'kept': maintenance.content(2)}
    with two_hosts(tmp_path) as both, on(both[1]) as there:
        repositories.put(there, 'one', maintenance.content(1))
        repositories.put(there, 'kept', kept['kept'])
        collect(there)

        def stop(call):
            if call.result is None and call.is_(moment, 'images/one'):
                drop_locks(both[0])
                with maintainer_role.Maintainer(there) as maintainer:
                    maintenance.account(maintainer)
                    maintenance.require_counted(maintainer)
            return 0
        run = witness.run(both[0].root / 'repository', [['delete', 'one']],
                          stop, filter_dir=str(both[0].filters))
        assert run.outcomes[0]['error'] is None
        maintenance.require_contents(there, kept)
        with maintainer_role.Maintainer(there) as maintainer:
            maintenance.account(maintainer)
            result = collector.run_once(maintainer, pacing.Pace(),
                                        live_share=0, evacuate_share=0)
            if moment == 'linkat':
                assert result.freed_blocks == 10
            else:
                # Nothing is freed while a counted image is missing.
                assert result.freed_blocks == 0
                maintainer.rebuild()
                maintenance.account(maintainer)
                result = collector.run_once(maintainer, pacing.Pace(),
                                            live_share=0, evacuate_share=0)
                assert result.freed_blocks == 10
            maintenance.require_collected(maintainer)
        maintenance.require_contents(there, kept)
        require_clean(both)


# -- a volume's owner ---------------------------------------------------------

OWNER = """
def do():
    from glance_dedup.repository import openvolumes
    with openvolumes.open_volume(repo, 'disk') as volume:
        volume.write(b'a' * 4096, 0)
        volume.flush()
        wait()
        if sys.argv[3] == 'write':
            volume.write(b'b' * 4096, 0)
            volume.flush()
        else:
            volume.checkpoint()
"""


@LOST
@pytest.mark.parametrize('late', ['write', 'checkpoint'])
@pytest.mark.parametrize('stores', [0, 1, 2])
def test_an_owner_that_has_a_successor(tmp_path, lost, late, stores):
    """A former owner spoils no data of the next owner (V1)."""
    with contextlib.ExitStack() as stack:
        both = stack.enter_context(two_hosts(tmp_path, lost=lost))
        there = stack.enter_context(on(both[1]))
        openvolumes.create(there, 'disk', 1 << 20)
        with CutOff(both[0], OWNER, late) as owner:
            with openvolumes.open_volume(there, 'disk') as volume:
                assert volume.read(4096, 0) == b'a' * 4096
                for number in range(stores):
                    volume.write(bytes([number]) * 4096, 8192)
                    volume.checkpoint()
                volume.write(b'c' * 4096, 4096)
                volume.flush()
                said = owner.go_on()
                volume.write(b'd' * 4096, 12288)
                volume.flush()
        refused = lost == 'error' or late == 'checkpoint'
        assert (said != 'done\n') == refused, said
        for _ in range(2):
            with openvolumes.open_volume(there, 'disk') as volume:
                found = volume.read(16384, 0)
                volume.checkpoint()
            assert found[4096:8192] == b'c' * 4096
            assert found[8192:12288] == bytes([max(stores - 1, 0)]) * 4096
            assert found[12288:] == b'd' * 4096
            if refused or stores:
                assert found[:4096] == b'a' * 4096
        collect(there)
        require_clean(both)


# It can write no bytes at first; then less than its first journal needs, and
# enough for a group and an edition. It may find its successor's edition only
# when the first checkpoint has failed.
WAITING = """
def do():
    import resource
    from glance_dedup.repository import openvolumes
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
    with openvolumes.open_volume(repo, 'disk') as volume:
        assert volume.read(4096, 0) == maintenance.content(1)[:4096]
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, most))
        wait()
        with contextlib.suppress(exceptions.RepositoryError):
            volume.checkpoint()
        volume.checkpoint()
"""


@LOST
def test_an_owner_that_waits_for_space(tmp_path, lost):
    """It replaces no edition of its successor (V6)."""
    content = maintenance.content(*range(1, 17))
    assert len(content) > 64 << 10
    with two_hosts(tmp_path, lost=lost) as both, on(both[1]) as there:
        repositories.put(there, 'image', content)
        openvolumes.create(there, 'disk', 8 << 20)
        with openvolumes.open_volume(there, 'disk') as volume:
            volume.write(content, 0)
        with CutOff(both[0], WAITING) as owner:
            with openvolumes.open_volume(there, 'disk') as volume:
                volume.write(b'c' * 4096, 4096)
                volume.checkpoint()
                said = owner.go_on()
        assert said.startswith('BusyError'), said
        with openvolumes.open_volume(there, 'disk') as volume:
            assert volume.read(len(content), 0) == (
                content[:4096] + b'c' * 4096 + content[8192:])
        collect(there)
        require_clean(both)


# -- a follower ---------------------------------------------------------------

FOLLOWER = """
def do():
    while repo.follow():
        pass
    wait()
    while repo.follow():
        pass
    for seed in range(3, 9):
        with repo.begin(f'again-{seed}') as transaction:
            transaction.write(maintenance.content(seed))
            transaction.commit()
"""


@LOST
def test_a_follower(tmp_path, lost):
    """Hints may be of groups that are gone: they lead nowhere (I5)."""
    with two_hosts(tmp_path, lost=lost) as both:
        with on(both[1]) as there:
            repositories.put(there, 'old', maintenance.content(*range(20, 30)))
            with CutOff(both[0], FOLLOWER) as follower:
                there.delete('old')
                collect(there, live_share=100)
                for seed in range(3, 9):
                    repositories.put(there, f'new-{seed}',
                                     maintenance.content(seed))
                said = follower.go_on()
            # Its version byte was unlocked, too: its stores may be refused.
            assert said == 'done\n' or lost == 'error', said
            maintenance.require_contents(there, {
                **{f'new-{seed}': maintenance.content(seed)
                   for seed in range(3, 9)},
                **({f'again-{seed}': maintenance.content(seed)
                    for seed in range(3, 9)} if said == 'done\n' else {})})
            collect(there)
        require_clean(both)


# -- a merger of a shard ------------------------------------------------------

MERGER = """
def do():
    from dedupd.tasks import exactindex
    from glance_dedup.base import pacing
    catalog_id = bytes.fromhex(sys.argv[3])
    with contextlib.closing(_engine.Maintenance(repo.handle())) as engine:
        index = exactindex.Index(repo.handle(), engine, catalog_id,
                                 pacing.Pace())
        with contextlib.closing(index):
            index.scan()
            files = index._files
            assert files.begin_merge(0, 0, exactindex.SPLIT_NS,
                                     exactindex.SPLIT_RECORDS)
            while files.step(100)[0]:
                pass
            wait()
            files.finish_merge()
"""


@LOST
@pytest.mark.parametrize('merges', [1, 2])
def test_a_merger_of_a_shard(tmp_path, lost, merges):
    """Its generation exists, or is not the highest; no pair is lost."""
    model = {}

    def put(repo, *seeds):
        for seed in seeds:
            for name in (f'a-{seed}', f'b-{seed}'):
                model[name] = maintenance.content(seed)
                repositories.put_unaware(repo, name, model[name])
    with two_hosts(tmp_path, lost=lost) as both:
        with on(both[1]) as there:
            put(there, 1)
            with maintainer_role.Maintainer(there) as maintainer:
                maintenance.account(maintainer)
                merge(maintainer)
                catalog_id = maintainer.catalog.id.hex()
            put(there, 2, 3)
            with CutOff(both[0], MERGER, catalog_id) as stopped:
                with maintainer_role.Maintainer(there) as maintainer:
                    for number in range(merges):
                        merge(maintainer)
                        put(there, 4 + number)
                said = stopped.go_on()
            with maintainer_role.Maintainer(there) as maintainer:
                maintenance.account(maintainer)
                merge(maintainer)
                maintenance.account(maintainer)
                collector.run_once(maintainer, pacing.Pace(), live_share=0,
                                   evacuate_share=0)
                maintenance.require_collected(maintainer)
                # Each block of each pair of images is there once.
                assert len(maintenance.live_slots(
                    there.path)) == 10 * len(model) // 2, said
            maintenance.require_contents(there, model)
        require_clean(both)


def merge(maintainer):
    result = merger.run_once(maintainer, pacing.Pace())
    assert not result.failed and not result.gave_up, result
