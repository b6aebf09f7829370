# SPDX-License-Identifier: Apache-2.0
"""Starts Python programs without importing their modules again.

Tests start thousands of processes, and most of the time of a short command, or
of the start of a server, goes into imports. :func:`install` replaces
``subprocess.Popen``: these commands are forked from a server that has imported
their modules:

* ``[sys.executable, '-m', PROGRAM, ...]`` of one of :data:`PROGRAMS`, and
  ``[sys.executable, '-c', CODE, ...]`` with code that imports from dedupd or
  from the command line;
* ``[SCRIPT, ...]`` of one of :data:`SCRIPTS` in the environment's ``bin``:
  Glance under uWSGI, which is a Python module (pyuwsgi), and OpenStack's
  client.

All other commands, and those that need the start of a new interpreter
(:func:`find_family`), are executed as usual. Each family of programs has a
server of its own, which starts with the first of them.

The new process is a true child of the tests' process: it has a process id,
working directory, environment and descriptors of its own, and runs the module
as ``__main__``. The server forks it twice: the process in between ends, and
Linux gives the orphan to the nearest ancestor that is a subreaper. The tests'
process is a subreaper only while it starts a program.

It differs from an executed program in this: its umask, its limits and its
ignored signals are those of the server; ``/proc/PID/cmdline`` and ``environ``
end with many zeros; and unchanged pages are shared with the server, although
``VmRSS`` counts them. ``GLANCE_DEDUP_TEST_EXEC=1`` in the environment of a
command has it executed.
"""

import array
import ctypes
import gc
import importlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings

PROGRAMS = ('dedupd.daemon', 'glance_dedup.cli.entry',
            'tests.functional.storm')
#: Scripts of the environment, and modules that they import at some time.
SCRIPTS = {
    'uwsgi': (
        'pyuwsgi', 'glance.common.wsgi_app', 'glance.api.v2.router',
        'glance.api.versions', 'glance.api.middleware.cache',
        'glance.api.middleware.cache_manage', 'glance.api.middleware.context',
        'glance.api.middleware.gzip',
        'glance.api.middleware.version_negotiation',
        'glance.db.sqlalchemy.api', 'glance_store._drivers.filesystem',
        'glance_dedup.driver.dedup_store', 'keystonemiddleware.auth_token',
        'osprofiler.web', 'oslo_middleware.cors', 'paste.deploy',
        'paste.urlmap', 'sqlalchemy.dialects.sqlite.pysqlite',
        'tests.functional.token_filter'),
    'openstack': (
        'openstackclient.shell', 'openstackclient.image.v2.image',
        'openstackclient.compute.v2.server', 'openstack.connection',
        'keystoneauth1.loading'),
}
#: Modules that check at their import whether they run under uWSGI.
_ASKS_FOR_UWSGI = ('glance.common.wsgi_app',)
_BIN = os.path.join(sys.prefix, 'bin')
#: Variables that Python, the C library or the loader read when a program
#: starts.
_AT_START = ('PYTHON', 'LD_', 'LC_', 'LANG', 'MALLOC', 'GLIBC', 'ASAN_',
             'GLANCE_DEDUP_TEST_EXEC')
#: These do not affect a program that flushes output for its readers.
_IGNORED = ('PYTHONUNBUFFERED', 'PYTHONDONTWRITEBYTECODE')
#: Locales in which Python does the same as in that of the server.
_PLAIN = re.compile(r'(C|POSIX|.*\.UTF-8|)$')
_OURS = re.compile(r'^\s*(from|import) (dedupd|glance_dedup\.cli)\b',
                   re.MULTILINE)
_SET_CHILD_SUBREAPER = 36   # of <linux/prctl.h>
#: Maximum bytes of a program's arguments, or its environment, to be shown.
_ROOM = 1 << 14
#: In /proc/PID/stat after the name: the start of both.
_ARGUMENTS_START, _ENVIRONMENT_START = 45, 47
#: Bytes of a request, which is one message; a longer command is executed.
_MAX_LENGTH = 100_000
_TOP = os.path.dirname(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))))
_libc = ctypes.CDLL(None, use_errno=True)
_real = subprocess.Popen


def _at_start(environment):
    found = {name: value for name, value in environment.items()
             if name.startswith(_AT_START) and name not in _IGNORED
             and not (name.startswith(('LC_', 'LANG'))
                      and _PLAIN.match(value))}
    # The server has the checkout in its path in any case.
    if found.get('PYTHONPATH') == _TOP:
        del found['PYTHONPATH']
    return found


def find_family(arguments, environment, directory):
    """Return the family of a command; None if it must be executed."""
    program, option, what = map(os.fspath, [*arguments, '', '', ''][:3])
    if _at_start(environment) != _at_start(os.environ):
        return None
    place, name = os.path.split(program)
    if place == _BIN and name in SCRIPTS:
        return name
    if program != sys.executable or not (
            option == '-m' and what in PROGRAMS
            or option == '-c' and _OURS.search(what)):
        return None
    if environment.get('PYTHONPATH') == _TOP or (
            os.path.abspath(os.fspath(directory or '.')) == _TOP):
        return 'ours'
    return None


class Popen(_real):
    """A ``subprocess.Popen`` that forks those programs."""

    def _execute_child(self, *args):
        (arguments, executable, preexec_fn, close_fds, pass_fds, directory,
         environment, _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite,
         errread, errwrite, _, gid, gids, uid, umask, start_new_session,
         process_group) = args
        given = os.environ if environment is None else environment
        plain = (
            executable is None and preexec_fn is None and close_fds
            and not shell and isinstance(arguments, (list, tuple))
            and (gid, gids, uid, umask) == (None, None, None, -1))
        family = plain and find_family(arguments, given, directory)
        if not family:
            return super()._execute_child(*args)
        command = [os.fsdecode(word) for word in arguments]
        request = {
            'command': command,
            'directory': os.path.abspath(os.fspath(directory or '.')),
            'environment': {os.fsdecode(name): os.fsdecode(value)
                            for name, value in given.items()},
            'session': bool(start_new_session), 'group': process_group,
        }
        if len(json.dumps(request)) > _MAX_LENGTH:
            return super()._execute_child(*args)
        sys.audit('subprocess.Popen', command[0], command, directory,
                  environment)
        descriptors = {0: p2cread, 1: c2pwrite, 2: errwrite}
        descriptors = {number: number if fd == -1 else fd
                       for number, fd in descriptors.items()}
        descriptors |= {fd: fd for fd in pass_fds}
        self.pid = _server(family).start(request, descriptors)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread,
                             errwrite)
        return None


class _Server:
    """The server of a family in this process, from its parent's side."""

    def __init__(self, family):
        self.owner = os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX,
                                                 socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _real(
                [sys.executable, '-m', __name__, str(theirs.fileno()),
                 family, ' ' * _ROOM],
                env={**os.environ, 'GLANCE_DEDUP_TEST_ROOM': ' ' * _ROOM},
                cwd=_TOP, pass_fds=[theirs.fileno()], start_new_session=True,
                stdin=subprocess.DEVNULL)

    def runs(self):
        return self._process.poll() is None

    def start(self, request, descriptors):
        request['descriptors'] = list(descriptors)
        # One lock for all families: a start that ends would take the child of
        # another one away from this process.
        with _starting:
            _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                self._socket.sendmsg(
                    [json.dumps(request).encode()],
                    [(socket.SOL_SOCKET, socket.SCM_RIGHTS,
                      array.array('i', descriptors.values()))])
                answer = self._socket.recv(64)
            finally:
                _libc.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise RuntimeError('the fork server has ended')
        return int(answer)


_servers: dict[tuple[int, str], _Server] = {}
_servers_lock = threading.Lock()
_starting = threading.Lock()


def _server(family):
    # A forked test does not use its parent's server.
    key = os.getpid(), family
    with _servers_lock:
        if key not in _servers or not _servers[key].runs():
            _servers[key] = _Server(family)
        return _servers[key]


def install():
    """Have this process start the programs in this way."""
    subprocess.Popen = Popen


# -- the server's process -----------------------------------------------------

def _import_all(family):
    if family == 'ours':
        for name in PROGRAMS:
            importlib.import_module(name)
        from glance_dedup.cli import entry
        for value in entry.COMMANDS.values():
            importlib.import_module(value.partition(':')[0])
    else:
        for name in SCRIPTS[family]:
            importlib.import_module(name)
    for name in _ASKS_FOR_UWSGI:
        if sys.modules.pop(name, None):
            package, _, name = name.rpartition('.')
            delattr(sys.modules[package], name)
    # These objects are never collected, so their pages stay shared.
    gc.collect()
    gc.freeze()


def _serve(connection):
    """Fork a process for each request; return its data in that process."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 16)
        if not data:
            os._exit(0)
        reader, writer = os.pipe()
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            return json.loads(data), descriptors, writer
        os.close(writer)
        # When it has ended, its child is a child of the tests' process.
        os.waitpid(between, 0)
        connection.send(os.read(reader, 64))
        for fd in (reader, *descriptors):
            os.close(fd)


def _arrange(descriptors, numbers, writer):
    """Put descriptors where the program expects them, and close all others.

    :returns: `writer`, which may have another number now
    """
    above = max([*numbers, *descriptors, writer, 2]) + 1
    for place, fd in enumerate([*descriptors, writer]):
        os.dup2(fd, above + place)
    writer = above + len(descriptors)
    for place, number in enumerate(numbers):
        os.dup2(above + place, number)
    kept = sorted([*numbers, writer])
    for low, high in zip([-1, *kept], [*kept, 1 << 20]):
        if low + 1 < high:      # an empty range would be all
            os.closerange(low + 1, high)
    return writer


def _show(field, words):
    """Write data of ``/proc`` for this process over its server's.

    REQUIRES: nothing points there any more.
    """
    with open('/proc/self/stat') as stat:
        fields = stat.read().rpartition(')')[2].split()
    start, end = map(int, fields[field:field + 2])
    text = b''.join(os.fsencode(word) + b'\0' for word in words)
    size = end - start
    ctypes.memmove(start, text[:size - 1].ljust(size, b'\0'), size)


def _become(request, descriptors, writer):
    """Become the requested process, and report when it is visible."""
    writer = _arrange(descriptors, request['descriptors'], writer)
    if request['session']:
        os.setsid()
    elif request['group'] is not None and request['group'] >= 0:
        os.setpgid(0, request['group'])
    os.chdir(request['directory'])
    os.environ.clear()
    os.environ.update(request['environment'])
    time.tzset()
    _show(_ENVIRONMENT_START, (
        f'{name}={value}' for name, value in os.environ.items()))
    _show(_ARGUMENTS_START, request['command'])
    os.write(writer, str(os.getpid()).encode())
    os.close(writer)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, mode in enumerate('rww'):
        buffered = number != 2
        stream = open(number, mode, encoding='utf-8', closefd=False,
                      errors='surrogateescape' if buffered
                      else 'backslashreplace',
                      buffering=-1 if buffered else 1)
        name = ('stdin', 'stdout', 'stderr')[number]
        setattr(sys, name, stream)
        setattr(sys, f'__{name}__', stream)
    sys.path[0] = {'-m': request['directory'], '-c': '', 'script': _BIN}[
        request['option']]
    if 'PYTHONPATH' in request['environment']:
        sys.path.insert(1, _TOP)
    sys.argv = request['arguments']


def _find_code(request):
    """Return the program's code, and its module's attributes."""
    program = request['program']
    if request['option'] == 'script':
        sys.argv.insert(0, program)
        with open(program, 'rb') as script:
            return compile(script.read(), program, 'exec'), {
                '__spec__': None, '__package__': None, '__file__': program}
    if request['option'] == '-c':
        sys.argv.insert(0, '-c')
        return compile(program, '<string>', 'exec'), {
            '__spec__': None, '__package__': None, '__file__': None}
    with warnings.catch_warnings():
        # The module was imported under its own name, which is not used here.
        warnings.filterwarnings('ignore', '.*found in sys.modules')
        _, spec, code = runpy._get_module_details(program)
    sys.argv.insert(0, code.co_filename)
    return code, {'__spec__': spec, '__package__': spec.parent,
                  '__file__': code.co_filename}


def main():
    """Run the server; return in each process that it forks."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    family = sys.argv[2]
    # cliff reads the program's name when it is imported.
    sys.argv[:] = ['main.py' if family == 'ours' else family]
    _import_all(family)
    request, descriptors, writer = _serve(connection)
    request['option'], request['program'], *request['arguments'] = (
        request['command'][1:] if family == 'ours'
        else ['script', *request['command']])
    _become(request, descriptors, writer)
    return _find_code(request)


if __name__ == '__main__':
    # Run the code here, so that the program's end is the interpreter's end.
    _code, _facts = main()
    _main = sys.modules['__main__'].__dict__
    _main.update(_facts)
    exec(_code, _main)
