# SPDX-License-Identifier: Apache-2.0

"""The tests: how to build and run them, and which lines each executes.

All runs in copies of the tree, and, where the kernel allows it, in a process
and mount namespace of its own, which ends with all files in /dev/shm and all
processes that a mutant leaves.
"""

import collections.abc
import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time

_HERE = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ('glance_dedup', 'dedupd')
C_TESTS = 'tests/c'
# Names left out of a copy of the tree.
_NOT_COPIED = shutil.ignore_patterns(
    '__pycache__', 'corpus', '*.tar.xz', '.*', '*.egg-info', 'cloud',
    'doc', 'releasenotes')
# Python tests that are tried on a mutant in C.
ENGINE_TESTS = ('tests/unit/base/test_leases.py',
                'tests/unit/binding/test_maintenance.py',
                'tests/unit/dedupd/tasks/test_merger.py',
                'tests/unit/repository/test_model.py',
                'tests/unit/repository/test_image_repository_filter.py',
                'tests/unit/repository/test_image_repository_fork.py',
                'tests/unit/repository/test_image_repository_groups.py',
                'tests/unit/repository/test_image_repository_images.py',
                'tests/unit/repository/test_image_repository_open.py',
                'tests/unit/repository/test_image_repository_transactions.py')

_COMPILE = ['gcc', '-std=c11', '-D_GNU_SOURCE', '-w', '-fPIC', '-pthread',
            '-DPy_LIMITED_API=0x030B0000']
_VARIANTS = {
    # The installed build. The sweeps of faults leave nothing out.
    'plain': ['-O2'],
    'coverage': ['-O0', '--coverage'],
    # The tests of the mutant's own name run with this, too.
    'asan': ['-O1', '-fsanitize=address,undefined',
             '-fno-sanitize-recover=all'],
}
_LIBRARIES = ['-lcrypto', '-lxxhash', '-llz4', '-lzstd', '-lz',
              '-lpthread']
_BUILD_LIMIT = 300      # seconds for one file
_BASELINE_LIMIT = 900   # and for the first run of one file of tests
_MANY = 150             # tests in Python for one mutant


class Interrupted(Exception):
    """The user has interrupted the run."""


class Runner:
    """Runs commands, and ends them all in :meth:`interrupt`."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen] = set()
        self._lock = threading.Lock()
        self._stopped = False
        self._isolation = self._try_isolation()

    @staticmethod
    def _try_isolation() -> list[str]:
        command = ['unshare', '--mount', '--pid', '--fork', '--kill-child',
                   '--mount-proc', 'sh', '-c',
                   'mount -t tmpfs tmpfs /dev/shm && exec "$@"', 'sh']
        if os.geteuid() != 0:
            command.insert(1, '--map-root-user')
        try:
            subprocess.run([*command, 'true'], check=True, timeout=30,
                           capture_output=True)
        except (OSError, subprocess.SubprocessError):
            return []
        return command

    def run(self, command: collections.abc.Sequence, tree: pathlib.Path,
            limit: float, isolated: bool = False, **environment: object
            ) -> tuple[int | None, str]:
        """Return the exit status, None after the limit, and the output."""
        command = [str(part) for part in command]
        temporary = tempfile.mkdtemp(dir=tree.parent)
        env = {**os.environ, 'TMPDIR': temporary,
               'PYTHONPATH': f'{tree}:{_HERE}',
               'PYTHONDONTWRITEBYTECODE': '1',
               **{key: str(value) for key, value in environment.items()}}
        try:
            with self._lock:
                if self._stopped:
                    raise Interrupted
                process = subprocess.Popen(
                    self._isolation * isolated + command, cwd=tree, env=env,
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT, start_new_session=True)
                self._running.add(process)
            try:
                output = process.communicate(timeout=limit)[0]
            except subprocess.TimeoutExpired:
                _kill(process)
                output = process.communicate(timeout=60)[0]
                return None, output.decode(errors='replace')
            finally:
                with self._lock:
                    self._running.remove(process)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        if self._stopped:
            raise Interrupted
        return process.returncode, output.decode(errors='replace')

    def interrupt(self) -> None:
        with self._lock:
            self._stopped = True
            for process in self._running:
                _kill(process)


def _kill(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


@dataclasses.dataclass
class Program:
    """One file of tests, and the lines that it executes."""

    name: str
    seconds: float
    lines: dict[str, list[int]]
    """Of each file in C."""
    tests: list[str]
    """Node ids of pytest, in the order of the next two."""
    test_seconds: list[float]
    of_lines: dict[str, dict[str, list[int]]]
    """Of each file in Python, each line's tests."""
    good: bool = True
    """All passed on the unchanged tree."""


def copy_tree(top: pathlib.Path, tree: pathlib.Path) -> None:
    shutil.copytree(top, tree, ignore=_NOT_COPIED, symlinks=True)


def _hash(*parts: object) -> str:
    result = hashlib.sha256()
    for part in parts:
        data = (part.read_bytes() if isinstance(part, pathlib.Path)
                else repr(part).encode())
        result.update(b'%d:' % len(data) + data)
    return result.hexdigest()[:16]


class Suite:
    """The tests of a tree.

    :param top: the checkout, which is only read
    :param cache: a directory for objects and for the lines that the tests
        execute
    """

    def __init__(self, top: pathlib.Path, cache: pathlib.Path,
                 runner: Runner) -> None:
        self.top = top
        self._cache = cache
        self._runner = runner
        cache.mkdir(parents=True, exist_ok=True)
        self._headers = self._found('*.h', *PACKAGES, C_TESTS)
        self._headers_hash = _hash(*(top / name for name in self._headers))

    def _found(self, pattern: str, *directories: str) -> list[str]:
        return sorted(str(path.relative_to(self.top))
                      for directory in directories
                      for path in (self.top / directory).rglob(pattern))

    @functools.cached_property
    def engine(self) -> list[str]:
        return self._found('*.c', 'glance_dedup/engine')

    @functools.cached_property
    def _binding(self) -> list[str]:
        return self._found('*.c', 'glance_dedup/binding')

    @functools.cached_property
    def _extension(self) -> str | None:
        return next(iter(self._found('_engine*.so', 'glance_dedup')), None)

    def _helpers(self) -> list[str]:
        return [name for name in self._found('*.c', C_TESTS)
                if not pathlib.Path(name).name.startswith('test_')]

    # -- building ----------------------------------------------------------

    def compile(self, variant: str, source: str, tree: pathlib.Path,
                result: pathlib.Path) -> str | None:
        """Return the compiler's messages; None if there are none."""
        status, output = self._runner.run(
            [*_COMPILE, *_VARIANTS[variant], '-Iglance_dedup', '-I.',
             f'-I{sysconfig.get_paths()["include"]}', '-c', source,
             '-o', result], tree, _BUILD_LIMIT)
        return None if status == 0 else output

    def object(self, variant: str, source: str) -> pathlib.Path:
        """Return an unchanged source's object; compile it at most once."""
        stem = f'{variant}-{source.replace("/", "-")}-'
        path = self._cache / (stem + _hash(
            self._headers_hash, self.top / source, _COMPILE,
            _VARIANTS[variant]) + '.o')
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=self._cache) as directory:
                # gcov's notes are beside the object, and have its name.
                made = pathlib.Path(directory) / path.name
                complaint = self.compile(variant, source, self.top, made)
                if complaint is not None:
                    raise RuntimeError(
                        f'{source} does not compile\n{complaint}')
                for old in self._cache.glob(stem + '*'):
                    if old.stem != path.stem:
                        old.unlink(missing_ok=True)
                for new in pathlib.Path(directory).iterdir():
                    new.rename(self._cache / new.name)
        return path

    def compile_all(self, jobs: int) -> None:
        """Compile the objects that mutants in C are linked with."""
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda one: self.object(*one), [
                *((variant, name) for variant in ('plain', 'asan')
                  for name in self.engine + self._helpers()),
                *(('plain', name) for name in
                  self._binding * bool(self._extension))]))

    def link(self, variant: str, result: pathlib.Path,
             changed: dict[str, pathlib.Path], program: str | None = None,
             extension: bool = False) -> None:
        """Link the engine as a shared object, an extension or a program.

        A program is linked with the engine in its directory.
        """
        sources = ([program, *self._helpers()] if program
                   else self.engine + self._binding * extension)
        status, output = self._runner.run(
            ['gcc', *_VARIANTS[variant],
             *([f'-L{result.parent}', f'-Wl,-rpath,{result.parent}']
               if program else ['-shared']),
             *(changed.get(name) or self.object(variant, name)
               for name in sources),
             *(['-lengine'] if program else []), *_LIBRARIES, '-o', result],
            self.top, _BUILD_LIMIT)
        if status != 0:
            raise RuntimeError(f'{result.name} cannot be linked\n{output}')

    def link_extension(self, variant: str, tree: pathlib.Path,
                       changed: dict[str, pathlib.Path]) -> None:
        if self._extension:
            self.link(variant, tree / self._extension, changed,
                      extension=True)

    def reset_extension(self, tree: pathlib.Path) -> None:
        if self._extension:
            shutil.copy(self.top / self._extension, tree / self._extension)

    # -- running -----------------------------------------------------------

    def run_c(self, program: str, variant: str, tree: pathlib.Path,
              limit: float) -> tuple[int | None, str]:
        """Run a program with the engine in the directory ``mutated``."""
        binary = tree / 'mutated' / variant / pathlib.Path(program).stem
        if not binary.exists():
            self.link(variant, binary, {}, program)
        return self._runner.run(
            [binary], tree, limit, isolated=True,
            ASAN_OPTIONS='hard_rss_limit_mb=3000:detect_leaks=1')

    def run_python(self, names: collections.abc.Iterable[str],
                   tree: pathlib.Path, limit: float, *options: str,
                   **environment: object) -> tuple[int | None, str]:
        return self._runner.run(
            [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider',
             '-p', 'no:xdist', *options, *names], tree, limit, isolated=True,
            **environment)

    # -- the lines that tests execute -----------------------------------------

    def programs(self, c: bool, modules: collections.abc.Iterable[str],
                 jobs: int, say: collections.abc.Callable[[str], None]
                 ) -> list[Program]:
        """Return the programs that can find mutants in C or these modules."""
        names = self._found('test_*.c', C_TESTS) if c else []
        stems = {pathlib.Path(module).stem for module in modules}
        for name in self._found('test_*.py', 'tests'):
            file = pathlib.Path(name).name
            if (c and name in ENGINE_TESTS) or any(
                    file.startswith(f'test_{stem}') for stem in stems):
                names.append(name)
        known = {name: self._known(name) for name in names}
        new = [name for name in names if known[name] is None]
        if new:
            say(f'looking at what {len(new)} files of tests execute ...')
            with tempfile.TemporaryDirectory(prefix='mutate-') as directory:
                tree = pathlib.Path(directory).resolve() / 'tree'
                self._make_counting(tree)
                with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
                    try:
                        for name, program in zip(new, pool.map(
                                lambda name: self._record(name, tree), new)):
                            known[name] = program
                            say(f'{program.seconds:5.1f} s  {name}')
                    except BaseException:
                        self._runner.interrupt()
                        raise
        for name, program in known.items():
            if not program.good:
                say(f'{name} fails without any mutant: left out')
        return [program for program in known.values() if program.good]

    def _key(self, name: str) -> str:
        is_c = name.endswith('.c')
        shared = self.engine + (self._helpers() if is_c else [
            *self._binding, *self._found('*.py', *PACKAGES),
            *(other for other in self._found('*.py', 'tests')
              if not pathlib.Path(other).name.startswith('test_')
              and 'mutation' not in other)])
        return _hash(self._headers_hash,
                     *(self.top / other for other in (name, *shared)))

    def _kept(self, name: str) -> pathlib.Path:
        return self._cache / f'lines-{name.replace("/", "-")}.json'

    def _known(self, name: str) -> Program | None:
        if self._kept(name).exists():
            known = json.loads(self._kept(name).read_text())
            if known.pop('key') == self._key(name):
                return Program(**known)
        return None

    def _make_counting(self, tree: pathlib.Path) -> None:
        copy_tree(self.top, tree)
        # Otherwise each program, which are built at the same time, compiles
        # them, and an object gets the notes of another.
        for name in self._helpers():
            self.object('coverage', name)
        self.link_extension('coverage', tree, {})
        (tree / 'mutated').mkdir()
        self.link('coverage', tree / 'mutated' / 'libengine.so', {})

    def _record(self, name: str, tree: pathlib.Path) -> Program:
        prefix = pathlib.Path(tempfile.mkdtemp(dir=tree.parent))
        start = time.monotonic()
        recorded = {'tests': [], 'seconds': [], 'lines': {}, 'failed': []}
        counters = {'GCOV_PREFIX': prefix, 'GCOV_PREFIX_STRIP': 99}
        if name.endswith('.c'):
            binary = tree / 'mutated' / pathlib.Path(name).stem
            self.link('coverage', binary, {}, name)
            status, _ = self._runner.run([binary], tree, _BASELINE_LIMIT,
                                         isolated=True, **counters)
        else:
            record = prefix / 'record.json'
            status, _ = self.run_python(
                [name], tree, _BASELINE_LIMIT, '-p',
                'tests.mutation.recorder', MUTATION_RECORD=record, **counters)
            if record.exists():
                recorded = json.loads(record.read_text())
        program = Program(
            name, time.monotonic() - start, self._gcov(prefix),
            recorded['tests'], recorded['seconds'], recorded['lines'],
            status == 0 or (status == 1 and bool(recorded['tests'])))
        shutil.rmtree(prefix)
        self._kept(name).write_text(json.dumps(
            {'key': self._key(name), **dataclasses.asdict(program)}))
        return program

    def _gcov(self, prefix: pathlib.Path) -> dict[str, list[int]]:
        result: dict[str, set[int]] = {}
        for counters in prefix.glob('*.gcda'):
            notes = self._cache / f'{counters.stem}.gcno'
            (prefix / notes.name).symlink_to(notes)
        found = sorted(prefix.glob('*.gcda'))
        if not found:
            return {}
        _, output = self._runner.run(
            ['gcov', '--json-format', '--stdout', *found], self.top,
            _BUILD_LIMIT)
        for line in output.splitlines():
            for file in json.loads(line)['files'] if line[:1] == '{' else ():
                result.setdefault(file['file'], set()).update(
                    one['line_number'] for one in file['lines']
                    if one['count'])
        return {name: sorted(lines) for name, lines in result.items()
                if name in self.engine}


def is_namesake(name: str, source: str) -> bool:
    """Return whether a file of tests has a source's name; several may."""
    stem = f'test_{pathlib.Path(source).stem}'
    return f'{pathlib.Path(name).stem}_'.startswith(f'{stem}_')


def tests_of(programs: list[Program], file: str, lines: tuple[int, int],
             budget: float) -> list[tuple[Program, list[str]]]:
    """Return the tests of the lines: the quickest first, within a budget.

    The files of tests that are named after the source come before all.
    """
    wanted = range(lines[0], lines[1] + 1)
    found: list[tuple[bool, bool, float, Program, list[str]]] = []
    for program in programs:
        # The source's own test files first, and C before Python.
        rank = (not is_namesake(program.name, file),
                program.name.endswith('.py'))
        if file.endswith('.c'):
            if not set(wanted).isdisjoint(program.lines.get(file, ())):
                found.append((*rank, program.seconds, program, []))
            continue
        of_lines = program.of_lines.get(file, {})
        numbers = {number for line in wanted
                   for number in of_lines.get(str(line), ())}
        ids = sorted(numbers, key=program.test_seconds.__getitem__)[:_MANY]
        left = budget
        chosen = []
        for number in ids:
            left -= program.test_seconds[number]
            if left < 0 and chosen:
                break
            chosen.append(program.tests[number])
        if chosen:
            found.append((*rank, budget - left, program, chosen))
    found.sort(key=lambda one: one[:3])
    result: list[tuple[Program, list[str]]] = []
    for *_, seconds, program, ids in found:
        if not result or seconds <= budget:
            result.append((program, ids))
            budget -= seconds
    return result
