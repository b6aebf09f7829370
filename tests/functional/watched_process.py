# SPDX-License-Identifier: Apache-2.0

"""A process whose system calls a test watches, holds up and fails.

``witness.c`` is preloaded into a server, a Python process with everything
imported. For each :meth:`Witness.run` the server forks a child, which does
some steps in a repository and reports every system call below it.
"""

import collections
import contextlib
import ctypes
import dataclasses
import hashlib
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
TIMEOUT = 60

#: The calls that change something.
MUTATING = frozenset((
    'pwritev', 'write', 'ftruncate', 'posix_fallocate', 'fallocate', 'linkat',
    'renameat', 'rename', 'unlinkat', 'unlink', 'fsync', 'fdatasync'))

KILL = object()  #: what a hook answers to kill the process


@dataclasses.dataclass
class Call:
    """A system call: before it was made (result is None), or after."""

    name: str
    arguments: tuple
    result: int | None
    step: int  #: the number of the step that it is part of

    @property
    def path(self):
        return self.arguments[0]

    def is_(self, name, path=None, *more):
        """Return true if the call is this one; a path may end with ``*``."""
        if name != self.name or more != self.arguments[1:1 + len(more)]:
            return False
        if path is None:
            return True
        if path.endswith('*'):
            return self.path.startswith(path[:-1])
        return self.path == path


class Run:
    """The result of a run: the calls, and the outcome of each step."""

    def __init__(self, calls, outcomes, status):
        self.calls = calls
        self.outcomes = outcomes
        self.status = status

    def made(self, step=None):
        """Return the calls that were made, without those that failed."""
        return [c for c in self.calls
                if c.result is not None and c.result >= 0
                and (step is None or c.step == step)]

    def find(self, name, path=None, *more, step=None, after=-1):
        """Return the number, among those made, of the first call like this."""
        for number, call in enumerate(self.made(step)):
            if number > after and call.is_(name, path, *more):
                return number
        raise AssertionError(f'there was no {name} {path} {more} after '
                             f'{after} in:\n{self.text(step)}')

    def text(self, step=None):
        return '\n'.join(
            f'{i} {c.name} {" ".join(c.arguments)} = {c.result}'
            for i, c in enumerate(self.made(step)))


def build(directory):
    """Build the library from its source."""
    library = directory / 'witness.so'
    subprocess.run(
        ['gcc', '-std=c11', '-D_GNU_SOURCE', '-Wall', '-Wextra', '-O1',
         f'-I{HERE.parent.parent}', '-shared', '-fPIC',
         str(HERE / 'witness.c'), str(HERE / 'journal.c'), '-o',
         str(library)],
        check=True, timeout=60)
    return library


def serve(library, module):
    """Start a module with a library preloaded; it takes jobs as lines."""
    return start(library, ['-m', module])


def start(library, arguments):
    """Start Python with a library preloaded, and pipes of text.

    The library comes first, but for a sanitizer's runtime, which must.
    """
    preloaded = [str(library)]
    if os.environ.get('LD_PRELOAD'):
        preloaded.insert(0, os.environ['LD_PRELOAD'])
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=HERE.parent.parent,
        env={**os.environ, 'LD_PRELOAD': ':'.join(preloaded),
             'PYTHONPATH': os.pathsep.join(p for p in sys.path if p)})


class Witness:
    """Runs steps in processes under watch.

    Steps are lists: ``['put', id, seed, size]``, ``['abort', ...]`` (the same,
    without commit), ``['delete', id]``, ``['read', id]``, ``['images']``,
    ``['hold', id, seed, size]`` (a transaction that stays open) and
    ``['end', 'commit' or 'abort']`` of the one held longest,
    ``['open', id]`` (an image that stays open), ``['statistics']``,
    ``['maintain', live_share, evacuate_share]``: accounting, merging and
    collection, with these shares; and for volumes ``['own', name]``,
    ``['write', offset, seed, size]``, ``['zero', offset, length]``,
    ``['resize', size]``, ``['flush']``, ``['checkpoint']`` and ``['disown']``.
    """

    def __init__(self, library):
        self._directory = tempfile.TemporaryDirectory()
        self._listener = socket.socket(socket.AF_UNIX)
        self._address = os.path.join(self._directory.name, 'socket')
        self._listener.bind(self._address)
        self._listener.listen()
        self._server = serve(library, 'tests.functional.watched_process')

    def close(self):
        self._server.stdin.close()
        try:
            self._server.wait(TIMEOUT)
        finally:
            self._server.kill()
            self._server.stdout.close()
            self._listener.close()
            self._directory.cleanup()

    @contextlib.contextmanager
    def process(self, path, steps, **options):
        """Start a process; its events come one by one."""
        job = {'path': str(path), 'steps': steps, 'options': options,
               'address': self._address}
        self._server.stdin.write(json.dumps(job) + '\n')
        self._server.stdin.flush()
        pid = int(self._read_line())
        ready, _, _ = select.select([self._listener], [], [], TIMEOUT)
        assert ready, 'the process did not call'
        connection, _ = self._listener.accept()
        connection.settimeout(TIMEOUT)
        process = _Process(pid, connection)
        try:
            yield process
        except BaseException:
            process.kill()
            raise
        finally:
            connection.close()
            process.result = json.loads(self._read_line())

    def _read_line(self):
        ready, _, _ = select.select([self._server.stdout], [], [], TIMEOUT)
        assert ready, 'the server says nothing'
        line = self._server.stdout.readline()
        assert line, 'the server has ended'
        return line

    def run(self, path, steps, hook=None, **options):
        """Do the steps; `hook(call)` may answer an errno value, or KILL.

        The hook is called before each call (its result is None then) and
        after it. The process waits meanwhile.
        """
        calls = []
        with self.process(path, steps, **options) as process:
            for call in process.calls():
                calls.append(call)
                answer = hook(call) if hook is not None else None
                if answer is KILL:
                    process.kill()
                    break
                process.answer(answer or 0)
        return Run(calls, [collections.defaultdict(lambda: None, o)
                           for o in process.result['outcomes']],
                   process.result['status'])


class _Process:
    def __init__(self, pid, connection):
        self.pid = pid
        self.result = None
        self._connection = connection

    def calls(self):
        step = 0
        with self._connection.makefile('r') as lines:
            for line in lines:
                phase, name, *arguments = line.rstrip('\n').split('\t')
                result = int(arguments.pop()) if phase == 'after' else None
                if name == 'unlinkat' and arguments[0].startswith('@'):
                    step = int(arguments[0][1:])
                    self.answer(0)
                    continue
                yield Call(name, tuple(arguments), result, step)

    def answer(self, errno):
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.sendall(b'%d\n' % errno)

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


# -- the other side -----------------------------------------------------------

class _Worker:
    def __init__(self, job):
        from tests.support import repositories
        self.path = job['path']
        self.tools = repositories
        options = {'codec': 'none', 'threads': 0, **job['options']}
        self.repo = repositories.open_repository(self.path, **options)
        self.held = []
        self.images = []

    def begin(self, image_id, seed, size):
        transaction = self.repo.begin(image_id)
        transaction.write(self.tools.noise(size, seed))
        return transaction

    def put(self, image_id, seed, size):
        with self.begin(image_id, seed, size) as transaction:
            return {'new': transaction.commit().new_bytes}

    def abort(self, image_id, seed, size):
        self.begin(image_id, seed, size).abort()

    def hold(self, image_id, seed, size):
        self.held.append(self.begin(image_id, seed, size))

    def end(self, how):
        getattr(self.held.pop(0), how)()

    def delete(self, image_id):
        self.repo.delete(image_id)

    def read(self, image_id):
        data = self.tools.read_all(self.repo, image_id)
        return {'sha256': hashlib.sha256(data).hexdigest()}

    def open(self, image_id):
        self.images.append(self.repo.open_image(image_id))

    def again(self):
        data = self.images[0].read()
        return {'sha256': hashlib.sha256(data).hexdigest()}

    def statistics(self):
        return self.repo.statistics()

    def own(self, name):
        from glance_dedup.repository import openvolumes
        self.volume = openvolumes.open_volume(self.repo, name)

    def write(self, offset, seed, size):
        self.volume.write(self.tools.noise(size, seed), offset)

    def zero(self, offset, length):
        self.volume.zero(length, offset)

    def resize(self, size):
        self.volume.resize(size)

    def flush(self):
        self.volume.flush()

    def checkpoint(self):
        self.volume.checkpoint()

    def disown(self):
        self.volume.close()

    def maintain(self, live_share, evacuate_share):
        from dedupd.tasks import accounting
        from dedupd.tasks import collector
        from dedupd.tasks import merger
        from glance_dedup.base import pacing
        from glance_dedup.maintenance import maintainer_role
        pace = pacing.Pace()
        with maintainer_role.Maintainer(self.repo) as maintainer:
            return {name: dataclasses.asdict(result) for name, result in (
                ('account', accounting.run_once(maintainer, pace)),
                ('merge', merger.run_once(maintainer, pace)),
                ('collect', collector.run_once(
                    maintainer, pace, live_share=live_share,
                    evacuate_share=evacuate_share)))}


def _work(job, outcomes):
    library = ctypes.CDLL(None)
    if library.witness_start(job['address'].encode(),
                             os.path.realpath(job['path']).encode()) != 0:
        os._exit(78)
    worker = None
    root = os.open(job['path'], os.O_RDONLY)
    for number, (step, *arguments) in enumerate(job['steps']):
        with contextlib.suppress(OSError):
            os.unlink(f'@{number}', dir_fd=root)
        try:
            if worker is None:
                worker = _Worker(job)
            outcome = getattr(worker, step)(*arguments) or {}
        except Exception as e:
            outcome = {'error': type(e).__name__, 'words': str(e),
                       'errno': getattr(e, 'errno', 0)}
        outcomes.write(json.dumps(outcome) + '\n')
        outcomes.flush()
    os._exit(0)


def _serve():
    from dedupd.tasks import collector
    from dedupd.tasks import merger
    from tests.support import repositories
    assert repositories and collector and merger    # imported once for all
    for line in sys.stdin:
        job = json.loads(line)
        with tempfile.TemporaryFile('w+') as outcomes:
            pid = os.fork()
            if pid == 0:
                try:
                    _work(job, outcomes)
                finally:
                    os._exit(79)
            print(pid, flush=True)
            deadline = time.monotonic() + TIMEOUT
            while True:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    break
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.002)
            outcomes.seek(0)
            print(json.dumps({
                'status': os.waitstatus_to_exitcode(status),
                'outcomes': [json.loads(line) for line in outcomes]}),
                flush=True)


if __name__ == '__main__':
    _serve()
