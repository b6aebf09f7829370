# SPDX-License-Identifier: Apache-2.0
"""Tests declare what they need besides the Python environment.

A test declares its needs by a mark, a fixture by a decorator, which counts for
every test that uses the fixture::

    @pytest.mark.needs('rabbitmq')
    def test_notifications(): ...

    @pytest.fixture(scope='module')
    @needs.of('swift')
    def bucket(): ...

A need is a profile of ``bindep.txt`` (Debian packages), a file of
``tests/cloud/requirements`` (a Python environment below ``.services``), or a
group of :data:`GROUPS`. An unknown need ends the run before its first test.

``tools/test`` calls this module to find the needs of the chosen tests::

    python -m tests.needs [pytest arguments]

It prints one line for each need: ``packages PROFILE`` or ``service NAME``.

While a test is set up and runs, the programs of every need that it does not
declare are refused: the first directory of ``PATH`` has a program of each such
name that refuses to run, and an audit hook refuses those that a test starts by
their paths. A refusal fails the test, even if the test would pass without the
program. A program that another program starts by its path, or with a ``PATH``
of its own, is not refused; the run on a fresh machine (``tools/fresh``) finds
it if no other test declares the need.
"""

import functools
import inspect
import os
import pathlib
import re
import shutil
import sys
import tempfile

import pytest

TOP = pathlib.Path(__file__).resolve().parent.parent
SERVICES = TOP / '.services'
#: Profiles that ``tools/test`` installs for every test.
BASE = ('compile', 'test')
#: Names for several needs.
GROUPS = {
    'cloud': ('cloud', 'keystone', 'placement', 'nova'),
    'swift': ('swift', 'memcached'),
}
_BINDEP = re.compile(r'([a-z0-9.+-]+) \[([^]]*)\]')
_DIRECTORIES = ('/usr/bin', '/usr/sbin', '/bin', '/sbin')
_DPKG = pathlib.Path('/var/lib/dpkg/info')
#: Audit events of Python that start a program: where its working directory and
#: its environment are among the arguments.
_STARTS = {'subprocess.Popen': (2, 3), 'os.exec': (None, 2),
           'os.posix_spawn': (None, 2)}
_REFUSE = """#!/bin/sh
name=${{0##*/}}
echo "$name" >>'{log}'
echo "$name: refused, since the running test does not declare that it needs \
this; see tests/needs.py" >&2
exit 97
"""


def of(*names):
    """Declare the needs of a fixture; goes between it and its function."""
    def decorate(function):
        if not inspect.isfunction(function):
            raise TypeError('needs.of goes below pytest.fixture, not above it')
        function.needs = names
        return function
    return decorate


@functools.cache
def profiles():
    """Return the Debian packages by profile of ``bindep.txt``."""
    found = {}
    for line in (TOP / 'bindep.txt').read_text().splitlines():
        match = _BINDEP.match(line)
        words = match[2].split() if match else ()
        if 'platform:dpkg' in words:
            for word in words:
                if not word.startswith('platform:'):
                    found.setdefault(word, set()).add(match[1])
    return found


@functools.cache
def environments():
    """Return the names of the services with environments of their own."""
    return {path.stem for path in
            (TOP / 'tests/cloud/requirements').glob('*.txt')}


def expand(names):
    """Return all needs that some names stand for.

    :raises pytest.UsageError: one is unknown
    """
    found = set()
    for name in names:
        members = GROUPS.get(name, (name,))
        for member in members:
            if member not in profiles() and member not in environments():
                raise pytest.UsageError(
                    f'unknown need {member!r}: it is neither a profile of '
                    'bindep.txt nor a file of tests/cloud/requirements')
        found.update(members)
    return frozenset(found)


def needs_of(item):
    """Return all needs that a test declares, by marks and by fixtures."""
    names = set()
    for mark in item.iter_markers('needs'):
        if mark.kwargs or not all(isinstance(arg, str) for arg in mark.args):
            raise pytest.UsageError(
                f'{item.nodeid}: the mark needs takes names only, as in '
                "needs('fio', 'nbd')")
        names.update(mark.args)
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        for definition in definitions:
            names.update(getattr(definition.func, 'needs', ()))
    try:
        return expand(names)
    except pytest.UsageError as exc:
        raise pytest.UsageError(f'{item.nodeid}: {exc}') from None


# -- refusing -----------------------------------------------------------------

@functools.cache
def _programs(package):
    """Return the names of an installed package's programs."""
    found = set()
    for listing in [*_DPKG.glob(f'{package}.list'),
                    *_DPKG.glob(f'{package}:*.list')]:
        for line in listing.read_text().splitlines():
            directory, _, name = line.rpartition('/')
            if directory in _DIRECTORIES:
                found.add(name)
    return found


@functools.cache
def undeclared(declared):
    """Return the programs that a test with these needs may not start."""
    packages = profiles()
    allowed = set().union(*(packages.get(name, ()) for name in BASE),
                          *(packages.get(name, ()) for name in declared))
    others = set().union(*packages.values()) - allowed
    return frozenset().union(*map(_programs, others))


def _find_program(program, directory, environment):
    """Return the path of a program that is to be started."""
    program = os.fsdecode(program)
    if '/' not in program:
        # The program's own environment may have a PATH without the guard.
        places = os.pathsep.join(os.get_exec_path(environment))
        program = shutil.which(program, path=places) or program
    return pathlib.Path(os.path.abspath(os.path.join(
        os.fsdecode(directory or ''), program)))


class Guard:
    """Refuses the programs of undeclared needs, in one process of tests."""

    def __init__(self):
        self.place = pathlib.Path(tempfile.mkdtemp(prefix='needs-'))
        self.refuse = self.place / 'refuse'
        self.log = self.place / 'refused'
        self.refuse.write_text(_REFUSE.format(log=self.log))
        self.refuse.chmod(0o755)
        self.place.chmod(0o755)
        self.path = os.environ['PATH']
        self.declared = None
        self._directories = {}
        sys.addaudithook(self._audit)

    def close(self):
        self.declared = None
        shutil.rmtree(self.place)

    def _directory(self, declared):
        """Return the directory of programs that refuse to run."""
        if declared not in self._directories:
            directory = self.place / str(len(self._directories))
            directory.mkdir(mode=0o755)
            for name in undeclared(declared):
                (directory / name).symlink_to(self.refuse)
            self._directories[declared] = directory
        return self._directories[declared]

    def begin(self, declared):
        # A service of an earlier test may have been refused since its end.
        self.log.write_text('')
        self.log.chmod(0o666)
        self.declared = declared
        os.environ['PATH'] = f'{self._directory(declared)}:{self.path}'

    def end(self):
        """Return the names of the programs refused since `begin`."""
        self.declared = None
        self.restore_path()
        return sorted(set(self.log.read_text().split()))

    def restore_path(self):
        os.environ['PATH'] = self.path

    def _audit(self, event, arguments):
        if event in _STARTS and self.declared is not None:
            directory, environment = (
                None if place is None else arguments[place]
                for place in _STARTS[event])
            name = self._refused(
                _find_program(arguments[0], directory, environment))
            if name:
                with open(self.log, 'a') as log:
                    log.write(f'{name}\n')
                raise PermissionError(
                    f'this test does not declare that it needs {name}; see '
                    'tests/needs.py')

    def _refused(self, path):
        """Return the name of a program, or service, that is not declared."""
        if path.is_relative_to(SERVICES):
            service = path.relative_to(SERVICES).parts[0]
            return None if service in self.declared else service
        if str(path.parent) in _DIRECTORIES and path.name in undeclared(
                self.declared):
            return path.name
        return None


# -- for tools/test -----------------------------------------------------------

class _Collector:
    def pytest_collection_finish(self, session):
        self.needs = frozenset().union(*map(needs_of, session.items))


def main(arguments):
    collector = _Collector()
    status = pytest.main(
        ['--collect-only', '-qq', *arguments, '-n', '0'],
        plugins=[collector])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return int(status)
    for name in sorted(getattr(collector, 'needs', ())):
        if name in profiles():
            print('packages', name)
        if name in environments():
            print('service', name)
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
