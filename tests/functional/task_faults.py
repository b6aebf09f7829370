# SPDX-License-Identifier: Apache-2.0

"""Runs whole tasks while the nth system call of a kind fails.

``faults.c`` is preloaded into a server, a Python process with everything
imported. For each :meth:`Faults.run` it forks a child, which does one task in
a repository under the fault, and then says what is wrong:

* an error that is none of the repository's classes (or glance_store's, for
  the driver), or the wrong one for a full disk, or that has no words;
* descriptors, or locks, that are left;
* images that were acknowledged and are not intact;
* the task fails again, without the fault, in the same process;
* after accounting, merging and collection, all without faults: counts that
  are not those of the recipes, blocks that no image needs, an entry of the
  spool, or anything that the independent check finds.

To add a task, write its function and put it into :data:`TASKS`.
"""

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import gc
import io
import json
import os
import pathlib
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from unittest import mock

from tests.functional import watched_process

HERE = pathlib.Path(__file__).resolve().parent
TIMEOUT = 100

#: In the order of faults.c.
KINDS = ('open', 'read', 'write', 'sync', 'room', 'name', 'lock', 'look',
         'map', 'any')
BLOCK = 512

#: The kinds of calls that fail if a disk, or a quota, is full.
FILLING = ('write', 'room')


@dataclasses.dataclass(frozen=True)
class Fault:
    """The nth call of a kind fails; with error 0 it is short."""

    kind: str = 'any'
    nth: int = 0
    error: int = errno.EIO
    forever: bool = False

    def __str__(self):
        error = errno.errorcode.get(self.error, 'short')
        often = 'ever' if self.forever else 'once'
        return f'{self.kind}:{self.nth}:{error}:{often}'


def build(directory):
    """Build the library from its source."""
    library = pathlib.Path(directory) / 'faults.so'
    subprocess.run(
        ['gcc', '-std=c11', '-D_GNU_SOURCE', '-Wall', '-Wextra', '-Werror',
         '-O1', '-shared', '-fPIC', str(HERE / 'faults.c'), '-o',
         str(library)],
        check=True, timeout=60)
    return library


class Faults:
    """The server process, with the library preloaded."""

    def __init__(self, library):
        self._server = watched_process.serve(library,
                                             'tests.functional.task_faults')

    def close(self):
        self._server.stdin.close()
        try:
            self._server.wait(TIMEOUT)
        finally:
            self._server.kill()
            self._server.stdout.close()

    def run(self, path, task, fault=None):
        """Run a task under a fault, and return its outcome.

        The result is a dict: ``calls`` of the kind that were made, ``struck``
        (how many were failed, with ``what``, the first of them), ``outcome``
        in words, and ``problems``, a list of sentences.
        """
        self._server.stdin.write(json.dumps({
            'path': str(path), 'task': task,
            'fault': dataclasses.asdict(fault or Fault())}) + '\n')
        self._server.stdin.flush()
        ready, _, _ = select.select([self._server.stdout], [], [],
                                    TIMEOUT + 10)
        assert ready, 'the server says nothing'
        line = self._server.stdout.readline()
        assert line, 'the server has ended'
        return json.loads(line)


# -- the repository -----------------------------------------------------------

#: The numbers of the ten blocks of each image of :func:`fill`.
CONTENTS = {
    'a': range(1, 9), 'b': (1, 17, 18), 'twin': range(1, 5),
    'sparse': (9, 25), 'new': range(30, 38), 'gone': range(9, 17),
    'late': range(40, 43), 'driven': range(43, 49), 'again': range(5, 9)}
THERE = ('a', 'b', 'twin', 'sparse', 'new')


def data_of(image_id):
    from tests.support import maintenance
    return maintenance.content(*CONTENTS[image_id])


def fill(path):
    """Make a repository in which every task has something to do."""
    from tests.support import maintenance
    from tests.support import repositories
    path = maintenance.create(path)
    with repositories.open_repository(path, codec='none') as repo:
        for image_id in ('a', 'gone', 'b', 'sparse'):
            repositories.put(repo, image_id, data_of(image_id))
    # A writer that has none of the hints stores duplicates.
    with repositories.open_repository(path, codec='none') as repo:
        with _without_hints(repo):
            repositories.put(repo, 'twin', data_of('twin'))
    with repositories.open_repository(path, codec='none') as repo:
        with maintenance.maintaining(repo) as maintainer:
            maintenance.account(maintainer)
        repo.delete('gone')
        repositories.put(repo, 'new', data_of('new'))
    return path


@contextlib.contextmanager
def _without_hints(repo):
    """Hold the groups' locks, so that writers cannot name their blocks."""
    from tests.support import repositories
    with contextlib.ExitStack() as stack:
        locks = os.path.join(repo.path, 'locks', 'groups')
        for group in range(1, 10):
            stack.enter_context(repositories.holding(
                locks, repositories.INTENT_BYTE + group))
        yield


# -- the tasks ----------------------------------------------------------------

def _maintain(path, work, **options):
    from glance_dedup.maintenance import maintainer_role
    from tests.support import repositories
    with repositories.open_repository(path, codec='none', **options) as repo:
        with maintainer_role.Maintainer(repo) as maintainer:
            return work(maintainer)


def _start(path, state):
    _maintain(path, lambda maintainer: None)


def _rebuild(path, state):
    _maintain(path, lambda maintainer: maintainer.rebuild(why='a test'))


def _account(path, state):
    from tests.support import maintenance
    _maintain(path, maintenance.account)


def _collect(path, state):
    from dedupd.tasks import collector
    from glance_dedup.base import pacing
    _maintain(path, lambda maintainer: collector.run_once(
        maintainer, pacing.Pace(), live_share=100, evacuate_share=60))


def _merge(path, state):
    from dedupd.tasks import merger
    from glance_dedup.base import pacing
    _maintain(path,
              lambda maintainer: merger.run_once(maintainer, pacing.Pace()))


def _scrub(path, state):
    from dedupd.tasks import scrubber
    from glance_dedup.base import pacing
    _maintain(path, lambda maintainer: scrubber.run_once(
        maintainer, pacing.Pace(), full=True, spare_threshold=2))


def _recompress(path, state, worth=-1):
    """Rewrite images; each file is replaced, whatever that gains."""
    from dedupd.tasks import recompressor
    from glance_dedup.base import pacing
    with mock.patch.object(recompressor, '_WORTH', worth):
        _maintain(path, lambda maintainer: recompressor.run_once(
            maintainer, pacing.Pace(), 'zstd', 1))


def _recompress_in_vain(path, state):
    """Rewrite images; no file is replaced."""
    _recompress(path, state, worth=1)


def _make_index(path, state):
    """Make an exact index that lacks an image, and has its blocks."""
    from tests.support import repositories
    _merge(path, state)
    with (repositories.open_repository(path, codec='none') as repo,
          _without_hints(repo)):
        repositories.put_unaware(repo, 'again', data_of('again'))
    state['again'] = 'there'


def _help(path, state):
    """Run all tasks of a daemon that is not the maintainer."""
    from dedupd.tasks import exactindex
    from dedupd.tasks import recompressor
    from dedupd.tasks import shareindex
    from dedupd.tasks import sharescrub
    from glance_dedup.base import pacing
    from glance_dedup.maintenance import helper_daemon
    from glance_dedup.maintenance import live_hosts
    from tests.support import repositories
    with (repositories.open_repository(path, codec='none') as repo,
          live_hosts.Hosts(repo.path) as hosts,
          helper_daemon.Helper(repo, hosts) as helper,
          mock.patch.multiple(exactindex, HELP_ENTRIES=1, HELP_PAUSE=0),
          mock.patch.object(recompressor, '_WORTH', -1)):
        recompressor.run_once(helper, pacing.Pace(), 'zstd', 1)
        sharescrub.run_once(helper, pacing.Pace(), lambda group: True)
        helper.save()
        shareindex.run_once(helper, pacing.Pace())


def _make_cache(path, state):
    """Make the repository a cache in which 'a' was used last."""
    from dedupd.compute.cache import cache_catalog
    from tests.support import repositories
    (path / cache_catalog.NAME).touch()
    with repositories.open_repository(path, codec='none') as repo:
        held = cache_catalog.Held(repo)
        for image_id in ('b', 'sparse', 'new', 'a'):
            held.note(image_id, len(data_of(image_id)), None)
        held.close()


def _evict(path, state):
    """Evict all images but one, which is read; or until little is left."""
    from dedupd.compute.cache import cache_catalog
    from dedupd.tasks import evictor
    from glance_dedup.base import pacing
    from glance_dedup.maintenance import reserve

    def evict(maintainer):
        repo = maintainer.repository
        with repo.open_image('twin'), contextlib.closing(
                cache_catalog.Held(repo)) as held:
            group = reserve.RESERVE_BYTES + (1 << 16)
            return evictor.run_once(maintainer, pacing.Pace(), held, group)
    for image_id in ('a', 'b', 'sparse', 'new'):
        if state.get(image_id) != 'gone':
            state[image_id] = 'maybe'
    # The evictor waits for the lock of each image, one after the other.
    result = _maintain(path, evict, lock_timeout=1)
    state.update(dict.fromkeys(result.evicted, 'gone'))


def _mark_lost(path, state):
    from dedupd.tasks import scrubber
    from glance_dedup.base import exceptions
    with contextlib.suppress(exceptions.ImageNotFound):
        _maintain(path, lambda m: scrubber.mark_lost(m, 'b'))


def _put(path, state):
    from glance_dedup.base import exceptions
    from tests.support import repositories
    state.setdefault('late', 'maybe')
    with repositories.open_repository(path, codec='none') as repo:
        with contextlib.suppress(exceptions.ImageExists):
            repositories.put(repo, 'late', data_of('late'))
            state['late'] = 'there'


def _away(path, state):
    """Make another repository, which has the image that is received."""
    from tests.support import repositories
    home = repositories.create(path.parent / 'home')
    with repositories.open_repository(home, codec='none') as repo:
        repositories.put(repo, 'late', data_of('late'))
    state['home'] = home


def _receive(path, state):
    from dedupd.serve import replica_receiver
    from tests.support import replicas
    from tests.support import repositories
    state.setdefault('late', 'maybe')
    with repositories.open_repository(state['home']) as home, \
            repositories.open_repository(path, codec='none') as repo, \
            mock.patch.object(replica_receiver, 'SYNC_BYTES', 1):
        replicas.receive(repo, home, 'late')
        state['late'] = 'there'


class _Told(Exception):
    """The failure of a command that printed an error."""


def _near(path, state):
    """Make another repository with blocks of the same size."""
    from tests.support import maintenance
    from tests.support import repositories
    state['home'] = maintenance.create(path.parent / 'home')
    with repositories.open_repository(state['home'], codec='none') as repo:
        repositories.put(repo, 'late', data_of('late'))


def _arrive(path, state):
    """Read an image that is still being received."""
    from dedupd.compute.cache import arrival_list
    from dedupd.serve import image_source
    from glance_dedup.transfer import pull
    from tests.support import fake_peer
    from tests.support import repositories
    state.setdefault('late', 'maybe')
    with repositories.open_repository(state['home']) as home, \
            repositories.open_repository(path, codec='none') as repo, \
            mock.patch.object(pull, 'SYNC_BYTES', 1):
        arrivals = arrival_list.Arrivals(
            repo, lambda token: fake_peer.Client(home))
        try:
            with contextlib.closing(
                    arrivals.open('late', None, None)) as reading:
                plain = bytearray(reading.size)
                reading.readinto(memoryview(plain), 0)
            if plain != data_of('late'):
                raise AssertionError('other bytes were read')
            state['late'] = 'there'
        except image_source.ArrivalFailed as e:
            raise _Told(str(e)) from e
        finally:
            repositories.eventually(lambda: not arrivals._arrivals)


def _cli(*arguments):
    def work(path, state):
        from glance_dedup.cli import entry
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = entry.main([
                '--repository', str(path), '--filter-dir', str(path.parent),
                '--socket', str(path.parent / 'socket'), *arguments])
        if status > 1:
            raise _Told(err.getvalue())
    return work


def _delete_b(path, state):
    if state.get('b') != 'gone':
        state['b'] = 'maybe'
    try:
        _cli('image', 'delete', 'b')(path, state)
    except _Told as e:
        if 'there is no image' not in str(e):
            raise
    state['b'] = 'gone'


def _spoil(path, state):
    with open(path / 'images' / 'b', 'r+b') as f:
        f.write(b'spoilt')
    state['b'] = 'lost'


def _configure(path, state):
    """Configure the driver, and store an image with it."""
    import glance_store
    from glance_store import multi_backend
    from oslo_config import cfg
    conf = cfg.CONF
    conf.register_opt(cfg.DictOpt('enabled_backends'))
    conf([], default_config_files=[])
    conf.set_override('enabled_backends', {'one': 'dedup'})
    glance_store.register_store_opts(conf)
    conf.set_override('default_backend', 'one', group='glance_store')
    for name, value in (('datadir', str(path)), ('filter_mib', 1),
                        ('filter_dir', str(path.parent))):
        conf.set_override(f'dedup_store_{name}', value, group='one')
    glance_store.create_multi_stores(conf)
    state['url'] = _add('driven')
    state['driven'] = 'there'
    state['store'] = multi_backend.get_store_from_store_identifier('one')


def _add(image_id):
    import glance_store
    from oslo_config import cfg
    data = data_of(image_id)
    return glance_store.add_with_multihash(
        cfg.CONF, image_id, io.BytesIO(data), len(data), 'one', 'sha256')[0]


def _driver_add(path, state):
    from glance_store import exceptions
    state.setdefault('late', 'maybe')
    with contextlib.suppress(exceptions.Duplicate):
        _add('late')
        state['late'] = 'there'


def _driver_get(path, state):
    import glance_store
    chunks, _ = glance_store.get(state['url'], 'one')
    assert b''.join(chunks) == data_of('driven')


def _driver_delete(path, state):
    import glance_store
    from glance_store import exceptions
    if state['driven'] == 'there':
        state['driven'] = 'maybe'
    with contextlib.suppress(exceptions.NotFound):
        glance_store.delete(state['url'], 'one')
        state['driven'] = 'gone'


def _make_volume(path, state):
    from glance_dedup.repository import openvolumes
    from tests.crash import volume_model
    from tests.support import repositories
    model = state['volume'] = volume_model.Model([0] * 2 * volume_model.PART)
    with repositories.open_repository(path, codec='none') as repo:
        openvolumes.create(repo, 'disk', len(model.durable) * BLOCK,
                           part_size=volume_model.PART_SIZE)
        with openvolumes.open_volume(repo, 'disk') as volume:
            for at in (0, volume_model.PART + 3):
                _write(volume, model, at, 1000 + at, 9)
                volume.checkpoint()
            _write(volume, model, 4, 2000, 9)


def _write(volume, model, at, first, count):
    from tests.crash import volume_model
    model.did(['write', at, first, count])
    if first:
        volume.write(volume_model.content(range(first, first + count)),
                     at * BLOCK)
    else:
        volume.zero(count * BLOCK, at * BLOCK)
    model.returned()


def _look_at_volume(volume, model):
    """The volume has all acknowledged writes; no process has crashed."""
    model.killed()
    counts = model.find(volume.read(volume.size, 0))
    if counts is None:
        raise AssertionError('the volume has other bytes')
    model.opened(counts)
    model.kept(0)


def _use_volume(path, state):
    from glance_dedup.base import exceptions
    from glance_dedup.repository import openvolumes
    from tests.crash import volume_model
    from tests.support import repositories
    model = state['volume']
    with repositories.open_repository(path, codec='none') as repo, \
            openvolumes.open_volume(repo, 'disk') as volume:
        _look_at_volume(volume, model)
        _write(volume, model, 0, 3000, 5)
        volume.flush()
        _write(volume, model, volume_model.PART - 3, 4000, 7)
        _write(volume, model, 2, 0, 9)
        volume.checkpoint()
        _write(volume, model, volume_model.PART, 5000, 2)
        with contextlib.suppress(exceptions.ImageExists):
            volume.snapshot('snapshot')
        for size in (3 * volume_model.PART, volume_model.PART + 5,
                     2 * volume_model.PART):
            before = len(model.sectors())
            for deed in ([['resize', size]] if size > before else
                         volume_model.shrinking(before, size)):
                model.did(deed)
            volume.resize(size * BLOCK)
            model.returned()


def _clone(path, state):
    """Make, read and delete a volume that is cloned from an image."""
    from glance_dedup.base import exceptions
    from glance_dedup.repository import openvolumes
    from tests.support import repositories
    with repositories.open_repository(path, codec='none') as repo:
        with contextlib.suppress(exceptions.ImageExists), (
                repo.open_image('a')) as image:
            openvolumes.create(repo, 'clone', image=image)
        with openvolumes.open_volume(repo, 'clone') as volume:
            if volume.read(volume.size, 0) != data_of('a'):
                raise AssertionError('the clone has other bytes')
        openvolumes.delete(repo, 'clone')


def _copy(path, state):
    from glance_dedup.base import exceptions
    from tests.support import repositories
    with repositories.open_repository(path, codec='none') as repo:
        for image_id, options in (('copy', {}), ('other', {
                'project': 'p', 'scope': 'project'})):
            with contextlib.suppress(exceptions.ImageExists), (
                    repo.open_image('a')) as image:
                repo.copy(image, image_id, **options)
            if repositories.read_all(repo, image_id) != data_of('a'):
                raise AssertionError(f'{image_id} has other bytes')


#: The functions that run before the fault (or None), and under it.
TASKS = {
    'start': (None, _start),
    'rebuild': (None, _rebuild),
    'account': (None, _account),
    'collect': (None, _collect),
    'merge': (None, _merge),
    'scrub': (None, _scrub),
    'recompress': (None, _recompress),
    'recompress-in-vain': (None, _recompress_in_vain),
    'help': (_make_index, _help),
    'evict': (_make_cache, _evict),
    'mark-lost': (_spoil, _mark_lost),
    'put': (None, _put),
    'receive': (_away, _receive),
    'arrive': (_near, _arrive),
    'copy': (None, _copy),
    'volume': (_make_volume, _use_volume),
    'clone': (None, _clone),
    'cli-list': (None, _cli('image', 'list')),
    'cli-collect': (None, _cli('task', 'collect')),
    'cli-check': (None, _cli('repository', 'check')),
    'cli-delete': (None, _delete_b),
    'driver-add': (_configure, _driver_add),
    'driver-get': (_configure, _driver_get),
    'driver-delete': (_configure, _driver_delete),
}


# -- the child ----------------------------------------------------------------

class _Child:
    def __init__(self, job):
        self.path = pathlib.Path(job['path'])
        self.prepare, self.work = TASKS[job['task']]
        self.fault = Fault(**job['fault'])
        self.state = {}         # of images, where it changed
        self.problems = []
        self.outcome = 'done'

    def run(self):
        if self.prepare is not None:
            self.prepare(self.path, self.state)
        before = _descriptors(self.path)
        calls, struck, what = self._under_fault()
        gc.collect()
        left = _descriptors(self.path) - before
        if left:
            self._problem(f'descriptors are left: {sorted(left)}')
        self._check_locks()
        self._guard('reading', self._check_images)
        self._guard('the task again', lambda: self.work(self.path, self.state))
        self._guard('what follows', self._finish)
        return {'calls': calls, 'struck': struck, 'what': what,
                'outcome': self.outcome, 'problems': self.problems}

    def _problem(self, text):
        self.problems.append(text)

    def _guard(self, what, work):
        try:
            work()
        except Exception:
            self._problem(f'{what}: {traceback.format_exc(limit=-6)}')

    def _under_fault(self):
        library = ctypes.CDLL(None)
        library.faults_disarm.restype = ctypes.c_uint64
        hits = ctypes.c_uint64()
        what = ctypes.create_string_buffer(8192)
        error = None
        library.faults_arm(
            os.fsencode(os.path.realpath(self.path)),
            KINDS.index(self.fault.kind), ctypes.c_uint64(self.fault.nth),
            self.fault.error, self.fault.forever)
        try:
            self.work(self.path, self.state)
        except Exception as e:
            error = e
        calls = library.faults_disarm(
            ctypes.byref(hits), what, ctypes.c_size_t(8192))
        if error is not None:
            self._judge(error, what.value.decode())
        return calls, hits.value, what.value.decode()

    def _judge(self, error, what):
        from glance_store import exceptions as glance_exceptions

        from glance_dedup.base import exceptions
        self.outcome = f'{type(error).__name__}: {error}'
        right = isinstance(error, (
            exceptions.RepositoryError, _Told,
            glance_exceptions.GlanceStoreException,
            glance_exceptions.BackendException)) or (
                isinstance(error, MemoryError)
                and self.fault.error == errno.ENOMEM)
        if (self.fault.error in (errno.ENOSPC, errno.EDQUOT)
                and self.fault.kind in FILLING):
            right = isinstance(error, (
                exceptions.NoSpaceError, glance_exceptions.StorageFull, _Told))
        if not right or len(str(error)) < 12:
            text = ''.join(traceback.format_exception(error, limit=-8))
            self._problem(f'not the right error ({what}): {text}')

    def _check_locks(self):
        from tests.support import repositories
        for directory in ('locks', 'images', 'spool', *(
                f'volumes/{path.name}'
                for path in self.path.glob('volumes/*'))):
            for name in os.listdir(self.path / directory):
                # An open handle shares a feature byte, the last ones there.
                length = (repositories.FEATURE_BYTE if name == 'groups'
                          else 0)
                with open(self.path / directory / name, 'r+b') as f:
                    found = fcntl.fcntl(f, 36, struct.pack(     # F_OFD_GETLK
                        '@hhqqi4x', fcntl.F_WRLCK, os.SEEK_SET, 0, length, 0))
                kind, _, byte, _, _ = struct.unpack('@hhqqi4x', found)
                if kind != fcntl.F_UNLCK:
                    self._problem(f'byte {byte} of {directory}/{name} is '
                                  'locked')

    def _model(self):
        """Return image ids and contents, as far as they are known."""
        states = {**dict.fromkeys(THERE, 'there'), **self.state}
        return {image_id: (data_of(image_id), states[image_id])
                for image_id in states if image_id in CONTENTS}

    def _check_images(self):
        from glance_dedup.base import exceptions
        from tests.support import repositories
        with repositories.open_repository(self.path, codec='none') as repo:
            for image_id, (data, state) in self._model().items():
                try:
                    if (repositories.read_all(repo, image_id) != data
                            and state != 'lost'):
                        self._problem(f'image {image_id} has other bytes')
                    there = True
                except exceptions.ImageNotFound:
                    there = False
                except exceptions.DamagedError as e:
                    if state != 'lost':
                        self._problem(f'image {image_id}: {e}')
                    continue
                if (state == 'there' and not there) or (
                        state == 'gone' and there):
                    self._problem(f'image {image_id} is not {state}')

    def _check_volume(self):
        from glance_dedup.repository import openvolumes
        from tests.support import repositories
        with repositories.open_repository(self.path, codec='none') as repo, \
                openvolumes.open_volume(repo, 'disk') as volume:
            _look_at_volume(volume, self.state['volume'])

    def _finish(self):
        from dedupd.tasks import collector
        from dedupd.tasks import merger
        from dedupd.tasks import scrubber
        from glance_dedup.base import exceptions
        from glance_dedup.base import pacing
        from glance_dedup.check import checker
        from tests.support import maintenance
        from tests.support import repositories
        pace = pacing.Pace()
        with repositories.open_repository(self.path, codec='none') as repo:
            with maintenance.maintaining(repo) as maintainer:
                if self.state.get('b') == 'lost':
                    with contextlib.suppress(exceptions.ImageNotFound):
                        scrubber.mark_lost(maintainer, 'b')
                merger.run_once(maintainer, pace)
                for _ in range(2):
                    collector.run_once(maintainer, pace)
                maintenance.require_collected(maintainer)
        self._check_images()
        if 'volume' in self.state:
            self._check_volume()
        for found in checker.check(self.path).findings:
            # A note is no fault, but a note on a file with an unknown name is.
            if found.severity != 'note' or 'name' in found.sentence:
                self._problem(f'check: {found}')


def _descriptors(path):
    result = set()
    for fd in os.listdir('/proc/self/fd'):
        with contextlib.suppress(OSError):
            name = os.readlink(f'/proc/self/fd/{fd}')
            if name.startswith(os.path.realpath(path)):
                result.add(f'{fd} {name}')
    return result


def _serve():
    from dedupd.tasks import collector
    from dedupd.tasks import merger
    from dedupd.tasks import scrubber
    from glance_dedup.check import checker
    from glance_dedup.cli import entry
    from glance_dedup.driver import dedup_store
    from tests.support import maintenance
    assert (collector and merger and scrubber and checker and entry
            and dedup_store
            and maintenance)    # imported once for all
    for line in sys.stdin:
        with tempfile.TemporaryFile('w+') as result:
            pid = os.fork()
            if pid == 0:
                signal.alarm(TIMEOUT)
                try:
                    json.dump(_Child(json.loads(line)).run(), result)
                    result.flush()
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(79)
            deadline = time.monotonic() + TIMEOUT
            while os.waitpid(pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.002)
            result.seek(0)
            text = result.read() or json.dumps({
                'calls': 0, 'struck': 0, 'what': '', 'outcome': 'died',
                'problems': ['the process ended, or took too long']})
            print(text, flush=True)


if __name__ == '__main__':
    _serve()
