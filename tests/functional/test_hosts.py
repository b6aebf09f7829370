# SPDX-License-Identifier: Apache-2.0

"""Several hosts on one directory: each with its own kernel's caches and locks.

Each host is a mount of ``tests/sharedfs``, which trusts names for 30 seconds
and attributes for three, is close-to-open for the rest, and keeps written data
to itself until fsync or close. On each run a Glance, a dedupd and processes
that store, read and delete by themselves. All of them are killed at random,
and hosts as a whole: unsynced data is lost then, and the locks are released.
"""

import contextlib
import json
import mmap
import os
import pathlib
import random
import shutil
import subprocess
import sys
import threading
import time

import pytest
import xxhash

from dedupd.tasks import accounting
from dedupd.tasks import collector
from dedupd.tasks import merger
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import filesystem
from glance_dedup.base import pacing
from glance_dedup.check import checker
from glance_dedup.check import files
from tests.functional import soak_run
from tests.functional import storm
from tests.sharedfs import fuse_hosts
from tests.support import daemons
from tests.support import maintenance
from tests.support import processes
from tests.support import repositories

pytestmark = pytest.mark.slow

LIMIT = soak_run.LIMIT
ROUND = 8               # seconds
WATCH_PAUSE = 0.02      # seconds
SOAK_SECONDS = int(os.environ.get('GLANCE_DEDUP_SOAK_SECONDS', 900))
#: The kinds of processes on each host, by their work.
KINDS = [storm.UPLOADER, storm.DELETER, storm.READER]
#: The number of clients, each of any host's Glance.
CLIENTS = 2
#: Work that must have been done, and processes killed, before a test ends.
ENOUGH = {'uploads': 15, 'deletes': 3, 'reads': 30}
#: Options of file systems whose server forgets an open file that another host
#: unlinks: as JuiceFS, and as NFS with and without cached attributes.
FORGETFUL = [{'unlinked': 'missing', 'names': 0, 'attributes': 0},
             {'unlinked': 'stale', 'attributes': 0},
             {'unlinked': 'stale', 'attributes': 60}]
KILLED = ('worker', 'daemon', 'glance worker', 'host')


# -- a host's caches, and another host's changes ------------------------------

@pytest.fixture
def both(two_hosts):
    """Two hosts with a repository."""
    maintenance.create(two_hosts[0].root)
    return two_hosts


def require_remembered(host, *name):
    """The model's kernel believes its cached name, if used alone."""
    assert not host.remembers or os.path.exists(shared(host).joinpath(*name))


def require_remembered_missing(host, *name):
    assert (not host.remembers
            or not os.path.exists(shared(host).joinpath(*name)))


@contextlib.contextmanager
def opened(*hosts, **options):
    """Open the repository on each of the hosts."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(repositories.open_repository(
            host.root / 'repository', filter_dir=str(host.filters), **options))
            for host in hosts]


def shared(host):
    return host.root / 'repository'


def test_image_is_found_that_was_missing_before(both):
    with opened(*both) as (here, there):
        with pytest.raises(exceptions.ImageNotFound):
            there.open_image('one')
        data = maintenance.content(1)
        repositories.put(here, 'one', data)
        require_remembered_missing(both[1], 'images', 'one')
        assert repositories.read_all(there, 'one') == data
        there.delete('one')
        with pytest.raises(exceptions.ImageNotFound):
            here.open_image('one')


def test_image_that_another_host_deleted_is_gone(both):
    with opened(*both) as (here, there):
        repositories.put(here, 'one', maintenance.content(1))
        repositories.read_all(there, 'one')
        here.delete('one')
        require_remembered(both[1], 'images', 'one')
        with pytest.raises(exceptions.ImageNotFound):
            there.open_image('one')


def test_id_is_free_for_who_remembers_the_image(both):
    with opened(*both) as (here, there):
        repositories.put(here, 'one', maintenance.content(1))
        repositories.read_all(there, 'one')
        here.delete('one')
        require_remembered(both[1], 'images', 'one')
        repositories.put(there, 'one', maintenance.content(2))
        assert repositories.read_all(here, 'one') == maintenance.content(2)


def test_hosts_append_to_one_group_in_turn(both):
    """A lessee reads the group as it is now, not as it has cached it."""
    contents = {}
    with opened(*both) as repos:
        for i in range(8):
            contents[f'image-{i}'] = maintenance.content(i, blocks=5)
            repositories.put(repos[i % 2], f'image-{i}',
                             contents[f'image-{i}'])
        assert maintenance.groups(shared(both[0])) == [1]
        for repo in repos:
            maintenance.require_contents(repo, contents)
    repositories.require_clean(both[0].seen / 'repository')


@pytest.mark.parametrize('openings', [
    10, pytest.param(100, marks=pytest.mark.long)])
def test_the_catalog_survives_openings(both, openings):
    """No host rebuilds the catalog, and no file is set aside."""
    pace = pacing.Pace()
    with opened(*both) as repos:
        for i in range(openings):
            repo = repos[i // 2 % 2]
            repositories.put(repo, f'image-{i}', maintenance.content(i))
            with maintenance.maintaining(repo, wait=10) as maintainer:
                accounting.run_once(maintainer, pace)
                merger.run_once(maintainer, pace)
                assert i == 0 or not list(maintainer.warnings)
    assert not list((shared(both[0]) / 'quarantine').iterdir())
    repositories.require_clean(both[0].seen / 'repository')


def test_a_file_system_that_refuses_maps(tmp_path):
    """It is refused by name, and the catalog does not count as damaged."""
    with fuse_hosts.hosts(tmp_path, 1, maps='refused') as (host,):
        maintenance.create(host.root)
        with opened(host) as (repo,):
            repositories.put(repo, 'one', maintenance.content(1))
            for _ in range(2):
                with (pytest.raises(exceptions.StorageError,
                                    match='mapped as memory .*GlusterFS'),
                      maintenance.maintaining(repo, wait=10)):
                    pass
            assert repositories.read_all(repo, 'one') == (
                maintenance.content(1))
        assert not list((shared(host) / 'quarantine').iterdir())


# -- names that are missing while a file is replaced --------------------------

def test_n14_3_names_are_settled_before_a_host_maintains(both):
    """A host that cannot recover a name has not the maintainer's lock."""
    with opened(*both, lock_timeout=0.1) as (here, _):
        repositories.put(here, 'one', b'x')
        image = shared(both[0]) / 'images/one'
        second = image.with_name('one~')
        os.link(image, second)
        lock = shared(both[1]) / 'locks/maintainer'
        with contextlib.closing(
                _engine.Maintenance(here.handle())) as maintenance_:
            # The lock is held as by a slow delete.
            with repositories.holding(shared(both[1]) / 'locks/images',
                                      xxhash.xxh3_64_intdigest(b'one') >> 2):
                assert not maintenance_.lock()
                assert second.exists() and not filesystem.is_locked(str(lock))
            assert maintenance_.lock()
            assert not second.exists() and filesystem.is_locked(str(lock))


@pytest.mark.parametrize('is_replaced', [False, True])
def test_n14_a_host_dies_while_it_replaces_files(both, is_replaced):
    """A dead host's image and group stay readable, and stay.

    The file that has the second name is the old one, and the name is missing,
    or has the new one already.
    """
    contents = {name: maintenance.content(i, blocks=20)
                for i, name in enumerate(['one', 'two'])}
    with opened(*both) as (here, there):
        for name, data in contents.items():
            repositories.put(here, name, data)
        collect(here)
        root = shared(both[0])
        names = [root / 'images/one', *(root / 'groups').iterdir()]
        for name in names:
            os.link(name, f'{name}~')
            if not is_replaced:
                name.unlink()
        for repo in here, there:
            maintenance.require_contents(repo, contents)
            assert repo.images() == ['one', 'two']
        repositories.require_clean(shared(both[1]))
        # One host appends, and the other one maintains.
        contents['three'] = maintenance.content(3, blocks=20)
        repositories.put(there, 'three', contents['three'])
        there.delete('two')
        del contents['two']
        collect(there)
        for repo in here, there:
            maintenance.require_contents(repo, contents)
        there.delete('one')
        assert repo.images() == ['three']
        collect(there)
    repositories.require_clean(both[0].seen / 'repository')
    assert not [*shared(both[0]).glob('*/*~')]


# -- pages that stay while others read ----------------------------------------

class Watcher(threading.Thread):
    """Reads all files of a directory again and again, each by one open file.

    So if a client caches reads through an open file, it puts old bytes into
    the kernel's page cache of its host.
    """

    def __init__(self, directory):
        super().__init__(daemon=True)
        self.directory = directory
        self.files = {}
        self.ended = threading.Event()
        self.rounds = 0

    def _read_all(self):
        # Files and directories may be deleted meanwhile.
        with contextlib.suppress(OSError):
            for path in self.directory.rglob('*'):
                if path not in self.files and path.is_file():
                    self.files[path] = open(path, 'rb', buffering=0)
        for file in self.files.values():
            with contextlib.suppress(OSError):
                file.seek(0)
                while file.read(1 << 20):
                    pass

    def run(self):
        while not self.ended.wait(WATCH_PAUSE):
            self._read_all()
            self.rounds += 1

    def wait_for_round(self):
        """Wait until all present files have been read."""
        wanted = self.rounds + 2
        repositories.eventually(lambda: self.rounds >= wanted)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exc_info):
        self.ended.set()
        self.join(LIMIT)
        for file in self.files.values():
            file.close()


@pytest.fixture
def watched(both):
    """Two hosts, each with a process that reads all of the repository."""
    with contextlib.ExitStack() as stack:
        for host in both:
            host.watcher = stack.enter_context(Watcher(shared(host)))
        yield both


def test_n13_1_the_model_keeps_pages(tmp_path):
    """A read shows old pages; otherwise the test below would prove nothing."""
    def read(file):
        return os.pread(file, 4096, 0)[:1]

    with fuse_hosts.hosts(tmp_path, pages='stay') as (here, there), (
            contextlib.ExitStack()) as stack:
        def opened_there(flags=0):
            file = os.open(there.root / 'page', os.O_RDONLY | flags)
            stack.callback(os.close, file)
            return file

        (here.root / 'page').write_bytes(b'0' * (1 << 18))
        old = opened_there()
        assert read(old) == b'0'
        found = set()
        for new in (b'1', b'2', b'3', b'4'):
            with open(here.root / 'page', 'r+b') as file:
                file.write(new * 4096)
            shown = read(opened_there())
            assert shown in (b'0', new)
            found.add(shown == new)
        assert found == {True, False}
        buffer = mmap.mmap(-1, 4096)
        os.preadv(opened_there(os.O_DIRECT), [buffer], 0)
        assert buffer[:1] == b'4'


def test_n13_1_images_are_whole_though_pages_stay(watched):
    """Images are whole, whichever host stores, reads and collects (N13)."""
    contents = {}
    with opened(*watched) as repos:
        for i in range(12):
            for host in watched:
                host.watcher.wait_for_round()
            contents[f'image-{i}'] = maintenance.content(i, blocks=5)
            repositories.put(repos[i % 2], f'image-{i}',
                             contents[f'image-{i}'])
            for repo in repos:
                maintenance.require_contents(repo, contents)
            if i % 4 == 3:
                name = f'image-{i - 2}'
                repos[i // 4 % 2].delete(name)
                del contents[name]
                collect(repos[(i // 4 + 1) % 2])
            if i % 3 == 2:
                for host in watched:
                    repositories.require_clean(shared(host))
    repositories.require_clean(watched[0].seen / 'repository')


def test_n13_3_copies_are_whole_though_pages_stay(watched):
    """A host that has an old page of entries copies what another stored."""
    contents = {}
    with opened(*watched) as repos:
        for i in range(8):
            for host in watched:
                host.watcher.wait_for_round()
            here, there = repos[i % 2], repos[(i + 1) % 2]
            content = maintenance.content(i, blocks=3)
            repositories.put(here, f'image-{i}', content)
            with there.open_image(f'image-{i}') as source:
                there.copy(source, f'copy-{i}', 'p', scope='project')
            contents |= {f'image-{i}': content, f'copy-{i}': content}
            maintenance.require_contents(there, contents)
    repositories.require_clean(watched[0].seen / 'repository')


def collect(repo, live_share=100):
    pace = pacing.Pace()
    with maintenance.maintaining(repo, wait=10) as maintainer:
        accounting.run_once(maintainer, pace)
        return collector.run_once(maintainer, pace, evacuate_share=0,
                                  live_share=live_share)


def test_a_check_while_another_host_replaces_an_image(both, monkeypatch):
    """No image is damaged because this host remembers its old recipe."""
    judge = checker._Checker.check_groups
    freed = []
    with opened(*both) as (here, _):
        for i in range(2):
            repositories.put(here, f'image-{i}', maintenance.content(i))

        def replace_and_judge(*args):
            here.delete('image-1')
            repositories.put(here, 'image-1', maintenance.content(2))
            freed.append(collect(here).freed_blocks)
            judge(*args)

        monkeypatch.setattr(checker._Checker, 'check_groups',
                            replace_and_judge)
        repositories.require_clean(shared(both[1]))
    assert freed == [10]


@pytest.mark.parametrize('live_share', [0, 100])
def test_freed_blocks_are_not_found_by_another_host(both, live_share):
    """A host finds no freed blocks, in an old file or a new one (N7.2, I4)."""
    old, kept = maintenance.content(1), maintenance.content(2)
    with opened(*both) as (here, there):
        repositories.put(here, 'old', old)
        repositories.put(here, 'kept', kept)
        # From now on it has the table, the file and its pages cached; and, as
        # the group has changed between, also bytes that a client reads ahead.
        assert repositories.put(there, 'again', old).new_bytes == 0
        more = maintenance.content(2, 3)
        repositories.put(here, 'more', more)
        assert repositories.put(there, 'once-more', old).new_bytes == 0
        for image_id in ('old', 'again', 'once-more'):
            here.delete(image_id)
        result = collect(here, live_share)
        assert result.freed_blocks == 10
        assert result.rewritten == (live_share > 0)
        assert repositories.put(there, 'anew', old).new_bytes == len(old)
        contents = {'anew': old, 'kept': kept, 'more': more}
        for repo in (here, there):
            maintenance.require_contents(repo, contents)
    repositories.require_clean(both[0].seen / 'repository')


def test_rewritten_group_is_not_appended_to_where_it_was(both):
    """A host that caches the old file does not lease it (I4)."""
    old, kept, new = (maintenance.content(i) for i in range(3))
    with opened(*both) as (here, there):
        repositories.put(there, 'old', old)
        repositories.put(there, 'kept', kept)
        here.delete('old')
        result = collect(here)
        assert result.rewritten == 1, result
        repositories.put(there, 'new', new)
        for repo in (here, there):
            maintenance.require_contents(repo, {'kept': kept, 'new': new})
    repositories.require_clean(both[0].seen / 'repository')


def test_maintainer_counts_an_image_that_it_looked_for_too_early(both):
    """N4: an image counts if it is live now, even after an earlier look-up."""
    data = maintenance.content(1)
    with opened(*both) as (here, there):
        with maintenance.maintaining(there) as maintainer:
            with here.begin('one') as transaction:
                transaction.write(data)
                transaction.keep()
                maintenance.account(maintainer)
                os.path.exists(shared(both[1]) / 'images' / 'one')
                transaction.commit()
            require_remembered_missing(both[1], 'images', 'one')
            assert maintenance.account(maintainer).counted == 1
            maintenance.require_counted(maintainer)


def test_maintainer_reads_a_header_again_that_was_not_there(both):
    """N4.3: the maintainer reads the spool file's header again."""
    data = maintenance.scattered(1)
    with opened(*both) as (here, there):
        with maintenance.maintaining(there) as maintainer:
            with here.begin('one') as transaction:
                transaction.write(data)
                transaction.keep()
                hook = maintenance.Once('.try_lock', transaction.commit)
                result = maintenance.account(
                    maintenance.watch(maintainer, hook))
            assert hook.happened and result.counted == 1, result
            maintenance.require_counted(maintainer)


def test_maintainer_uncounts_an_image_that_another_host_deleted(both):
    """N4.6: the delete of another host does not count as unfinished."""
    with opened(*both) as (here, there):
        repositories.put(here, 'one', maintenance.content(1))
        with maintenance.maintaining(there) as maintainer:
            maintenance.account(maintainer)
            maintenance.require_counted(maintainer)
            os.path.exists(shared(both[1]) / 'images' / 'one')
            here.delete('one')
            require_remembered(both[1], 'images', 'one')
            assert maintenance.account(maintainer).uncounted == 1
            maintenance.require_counted(maintainer)


@pytest.mark.parametrize('unlinked', ['kept', 'stale'])
def test_reader_of_a_group_that_another_host_rewrites(tmp_path, unlinked):
    """The group is opened again if the server forgets an open file."""
    old, kept = maintenance.content(1), maintenance.content(2, blocks=50)
    with fuse_hosts.hosts(tmp_path, unlinked=unlinked) as both:
        maintenance.create(both[0].root)
        with opened(*both) as (here, there):
            repositories.put(here, 'old', old)
            repositories.put(here, 'kept', kept)
            with there.open_image('kept') as image:
                assert image.read(1000) == kept[:1000]
                here.delete('old')
                assert collect(here).rewritten == 1
                assert image.read() == kept


@pytest.mark.parametrize('options', FORGETFUL, ids=str)
def test_n13_4_image_that_another_host_replaces_is_found(tmp_path, options):
    """If the server forgets the file just opened, the host opens again."""
    data = maintenance.content(1, blocks=3)
    ended = threading.Event()
    with fuse_hosts.hosts(tmp_path, **options) as both:
        maintenance.create(both[0].root)
        with opened(*both) as (here, there):
            repositories.put(here, 'one', data)
            path = shared(both[0]) / 'images/one'
            recipe = path.read_bytes()

            def replace():
                new = path.with_name('two')
                while not ended.wait(0.005):
                    new.write_bytes(recipe)
                    os.replace(new, path)

            thread = threading.Thread(target=replace)
            thread.start()
            try:
                for _ in range(300):
                    with contextlib.suppress(exceptions.BusyError):
                        there.open_image('one').close()
            finally:
                ended.set()
                thread.join(LIMIT)


@pytest.mark.parametrize('options', FORGETFUL, ids=str)
@pytest.mark.parametrize('is_replaced', [False, True])
def test_n13_4_check_of_files_that_another_host_replaces(
        tmp_path, monkeypatch, is_replaced, options):
    """The server forgets each file right after the check has opened it.

    A host with cached attributes notices that only when it reads.
    """
    contents = {f'image-{i}': maintenance.content(i) for i in range(3)}
    with fuse_hosts.hosts(tmp_path, **options) as both:
        maintenance.create(both[0].root)
        with opened(both[0]) as (here,):
            for image_id, data in contents.items():
                repositories.put(here, image_id, data)
            collect(here)
            open_file, changed = files._open, set()

            def change(name, directory):
                file = open_file(name, directory)
                place = pathlib.Path(os.readlink(f'/proc/self/fd/{file[0]}'))
                path = shared(both[0]) / place.relative_to(shared(both[1]))
                if path not in changed and 'locks' not in path.parts:
                    changed.add(path)
                    if is_replaced:
                        shutil.copy2(path, tmp_path / 'copy')
                        shutil.move(tmp_path / 'copy', f'{path}.new')
                        os.replace(f'{path}.new', path)
                    elif 'images' in path.parts:
                        here.delete(name)
                return file

            monkeypatch.setattr(files, '_open', change)
            repositories.require_clean(shared(both[1]))
            monkeypatch.undo()
            assert {'images', 'groups'} <= {
                path.parent.name for path in changed}
            assert here.images() == (sorted(contents) if is_replaced else [])


def test_download_of_an_image_that_another_host_deletes(both):
    """The lock on its recipe keeps the blocks, whichever host has it (I12)."""
    data = maintenance.content(1, blocks=50)
    with opened(*both) as (here, there):
        repositories.put(here, 'one', data)
        with there.open_image('one') as image:
            assert image.read(1000) == data[:1000]
            here.delete('one')
            assert collect(here).freed_blocks == 0
            assert image.read() == data
        assert repositories.eventually(
            lambda: collect(here).freed_blocks == 50, LIMIT) is None


# -- a host's death -----------------------------------------------------------

HOLDER = """
import sys, time
from tests.support import maintenance
from tests.support import repositories
with repositories.open_repository(sys.argv[1], filter_dir=sys.argv[2]) as repo:
    repositories.put(repo, 'done', maintenance.content(1))
    with repo.begin('half') as transaction:
        transaction.write(maintenance.content(2, blocks=40))
        transaction.keep()
        transaction.write(maintenance.content(3, blocks=200))
        print('now', flush=True)
        time.sleep(600)
"""


def test_death_of_a_host(both):
    """Acknowledged images stay; locks are released; the rest is collected."""
    with subprocess.Popen(
            [sys.executable, '-c', HOLDER, shared(both[0]), both[0].filters],
            stdout=subprocess.PIPE, cwd=daemons.ROOT) as process:
        assert process.stdout.readline() == b'now\n'
        processes.stop(process.pid)
        both[0].die()
        process.kill()
        process.wait(LIMIT)
    with opened(both[1]) as (there,):
        maintenance.require_contents(there, {'done': maintenance.content(1)})
        # The groups that it leased can be used, and its leftovers are
        # recovered.
        data = maintenance.content(2, 4, blocks=40)
        repositories.put(there, 'next', data)
        # The server may wait a while before it drops the locks.
        repositories.eventually(lambda: collect(there).busy == 0, LIMIT)
        maintenance.require_contents(
            there, {'done': maintenance.content(1), 'next': data})
    repositories.require_clean(both[0].seen / 'repository')


def test_another_hosts_daemon_takes_over(both):
    """One daemon maintains, the other only reads, until the first one dies."""
    path = [shared(host) for host in both]
    with contextlib.ExitStack() as stack:
        one, other = (stack.enter_context(daemons.Daemon(p)) for p in path)
        for daemon in (one, other):
            daemon.program = daemons.impatient(TRIAL_INTERVAL=0.3)
        one.start().wait_for_catalog()
        other.start().wait_for_catalog('reader')
        with opened(*both) as (here, there):
            repositories.put(here, 'one', maintenance.content(1))
            with other.client() as client:
                with client.open_image('one') as stream:
                    assert stream.read(stream.size) == maintenance.content(1)
            processes.stop(one.process.pid)
        both[0].die()
        one.kill()
        # CephFS drops a dead host's locks after a minute.
        other.wait_for_catalog('maintainer', LIMIT)
        assert other.run('collect')['last']['error'] is None


# -- refused ------------------------------------------------------------------

@pytest.mark.parametrize('locks, words', [
    ('refused', 'refuses locks of open files (F_OFD_SETLK: No locks'),
    ('ignored', 'grants two open files the same lock')])
def test_directory_without_locks_is_refused(tmp_path, locks, words):
    with fuse_hosts.hosts(tmp_path, 1, locks=locks) as (host,):
        maintenance.create(host.backing)
        path = shared(host)
        with pytest.raises(exceptions.UnfitFileSystem) as caught:
            repositories.open_repository(path)
        assert words in str(caught.value)
        assert f'fuse on {host.root}' in str(caught.value)
        left = sorted(os.listdir(path))
        shown = subprocess.run(
            [sys.executable, '-m', 'glance_dedup.cli.entry', '--repository',
             path, 'image', 'list'], capture_output=True, text=True,
            cwd=daemons.ROOT, stdin=subprocess.DEVNULL, timeout=LIMIT)
        assert shown.returncode == 3 and words in shown.stderr
        with daemons.Daemon(path) as daemon:
            daemon.start(wait=False)
            assert daemon.process.wait(LIMIT) == 1
            assert words in daemon.text()
        assert sorted(os.listdir(path)) == left


# -- everything at once -------------------------------------------------------

class Cluster(soak_run.Soak):
    """Two hosts, with all their processes.

    :param hosts: that share a directory; `repository` is in it
    """

    def __init__(self, directory, hosts, seed):
        self.hosts = hosts
        self.places = {}                # of workers: the host's number
        self.lives = [0, 0]             # how often each host was killed
        maintenance.create(hosts[0].root)
        path = directory / 'repository'
        path.symlink_to(hosts[0].root / 'repository')
        super().__init__(path, seed)

    def path_on(self, number):
        return self.hosts[number].root / 'repository'

    def life_of(self, number):
        return f'{number}.{self.lives[number]}'

    # -- processes ---------------------------------------------------------

    def make_daemon(self):
        number = int(hasattr(self, 'daemon'))
        daemon = daemons.Daemon(
            self.path_on(number), filter_dir=self.hosts[number].filters,
            **soak_run.INTERVALS)
        daemon.program = daemons.impatient(
            account=1, TRIAL_INTERVAL=0.3, RETRY_INTERVAL=1.0)
        return daemon

    def daemon_of(self, number):
        return (self.daemon, self.other)[number]

    def start_glance(self):
        for number, host in enumerate(self.hosts):
            store = {
                'type': 'dedup', 'dedup_store_datadir': self.path_on(number),
                'dedup_store_filter_dir': host.filters,
                'dedup_store_filter_mib': 1,
                'dedup_store_dedupd_socket': self.daemon_of(number).socket}
            self.servers.append(soak_run.Glance(
                host.directory / 'glance', {'dedup': store}, processes=2,
                database=self.servers[0].database if number else None))
        # The database is in the first server's directory, which makes it.
        self.servers[0].start()
        self.servers[1].start()

    def start_worker(self, steps):
        if steps is None:
            super().start_worker(None)
            return
        self.start_worker_on(self.rng.randrange(2), steps)

    def start_worker_on(self, number, steps):
        name = f'{self.seed % 1000}.{next(self.names)}'
        log = self.path.parent / f'{name}.log'
        job = {'log': str(log), 'name': name, 'deadline': self.deadline,
               'path': str(self.path_on(number)), 'steps': steps,
               'ids': soak_run.IMAGES,
               'socket': self.daemon_of(number).socket,
               'host': self.life_of(number),
               'filter_dir': str(self.hosts[number].filters)}
        self.logs['storm'].append(log)
        process = subprocess.Popen(
            [sys.executable, '-m', 'tests.functional.storm', json.dumps(job)],
            cwd=daemons.ROOT, stdin=subprocess.DEVNULL)
        self.running[process] = (steps, log)
        self.places[process] = number

    def kill_daemon(self):
        daemon = self.rng.choice([self.daemon, self.other])
        self.note(f'kill the daemon {daemon.directory}')
        daemon.kill()
        self.kills['daemon'] += 1
        daemon.start(wait=False)

    def kill_host(self):
        """Kill all of a host's processes at once, and start them again."""
        if any(thread.is_alive() for thread in self.starting):
            return
        number = self.rng.randrange(2)
        self.note(f'kill host {number}')
        host, daemon = self.hosts[number], self.daemon_of(number)
        servers = self.servers[number:number + 1]
        workers = [process for process in self.running
                   if self.places.get(process) == number]
        # No process may notice that the file system ends first.
        for server in servers:
            processes.stop_group(server.pid)
        processes.stop(daemon.process.pid,
                       *(process.pid for process in workers))
        host.process.kill()
        for server in servers:
            server.kill()
        daemon.kill()
        steps = []
        for process in workers:
            steps.append(self.running.pop(process)[0])
            process.kill()
            process.wait(LIMIT)
        self.restart_host(number)
        self.kills['host'] += 1
        daemon.start(wait=False)
        for kind in steps:
            self.start_worker_on(number, kind)
        self.starting = [threading.Thread(target=server.start)
                         for server in servers]
        for thread in self.starting:
            thread.start()

    def restart_host(self, number):
        self.hosts[number].restart()
        self.lives[number] += 1

    # -- rounds ------------------------------------------------------------

    def round(self, seconds):
        number = next(self.rounds)
        self.deadline = time.monotonic() + seconds
        self.note(f'round {number}')
        for host in range(2):
            for steps in KINDS:
                self.start_worker_on(host, steps)
        for _ in range(CLIENTS):
            self.start_worker(None)
        self.kill_at_random({self.kill_daemon: 3, self.kill_worker: 6,
                             self.kill_glance_worker: 3, self.kill_host: 2})

    def look_at_processes(self):
        """Both hosts have the same images; one daemon maintains them."""
        paths = [self.path_on(number) for number in range(2)]
        images = []
        for path in paths:
            with repositories.open_repository(path) as repo:
                images.append({
                    image_id: repositories.read_all(repo, image_id)
                    for image_id in repo.images()})
        assert images[0] == images[1]
        roles = sorted(daemon.status()['daemon']['role']
                       for daemon in (self.daemon, self.other))
        assert roles == ['maintainer', 'reader'], roles

    def end(self, contents):
        for server in self.servers:
            server.kill()
        for daemon in (self.daemon, self.other):
            assert daemon.stop(limit=LIMIT) == 0, daemon.text()[-3000:]
        for host in self.hosts:
            host.kill()
        path = self.hosts[0].backing / 'repository'
        soak_run.require_no_locks(path)
        repositories.require_clean(path)
        with repositories.open_repository(path) as repo:
            print(*soak_run.settle(repo))
        soak_run.require_exact(path, contents)


def soak(tmp_path, seconds, **options):
    seed = int(os.environ.get('GLANCE_DEDUP_SOAK_SEED',
                              random.randrange(10 ** 9)))
    print(f'GLANCE_DEDUP_SOAK_SEED={seed}', flush=True)
    with fuse_hosts.hosts(tmp_path, pages='stay', rename='gap',
                          **options) as both:
        with contextlib.closing(Cluster(tmp_path, both, seed)) as it:
            try:
                for daemon in (it.daemon, it.other):
                    daemon.start(wait=False)
                it.start_glance()
                end = time.monotonic() + seconds
                while True:
                    it.round(ROUND)
                    contents = it.judge()
                    it.report()
                    # However slow the machine is, enough work must have been
                    # done.
                    if (time.monotonic() > end and all(
                            it.done[what] >= n for what, n in ENOUGH.items())
                            and all(it.kills[who] for who in KILLED)):
                        break
                it.end(contents)
            except BaseException:
                it.last_words()
                raise


# Long: processes on two hosts work, and are killed, until all were.
@pytest.mark.timeout(400)
def test_two_hosts(tmp_path):
    soak(tmp_path, 1)


@pytest.mark.long
@pytest.mark.timeout(2 * SOAK_SECONDS + 600)
def test_two_hosts_for_long(tmp_path):
    soak(tmp_path, SOAK_SECONDS)
