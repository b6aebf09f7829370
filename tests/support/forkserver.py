# SPDX-License-Identifier: Apache-2.0
"""Starts dedupd and the command line without importing their modules again.

Tests start thousands of these processes. Most of a short command's time goes
into importing oslo, cliff and asyncio. :func:`install` replaces
``subprocess.Popen``: a command ``[sys.executable, '-m', PROGRAM, ...]`` of one
of :data:`PROGRAMS`, or ``[sys.executable, '-c', CODE, ...]`` with code that
imports from dedupd or from the command line, is forked from a server that has
imported the modules of all of them. Everything else, and whatever needs the
start of a new interpreter (:func:`can_be_forked`), is executed as usual.

The process is a true child of the one that runs the tests: it has a process
id, working directory, environment and descriptors of its own, and runs the
module as ``__main__``. To become the child of the process of the tests it is
forked twice: the process in between ends, and Linux hands its child to the
next ancestor that asked for orphans. The process of the tests asks for them
only while it starts one.

What differs from an executed program: ``/proc/PID/cmdline`` names this module,
and pages that nobody changed are shared with the server, which ``VmRSS``
counts all the same. ``GLANCE_DEDUP_TEST_EXEC=1`` in the environment of a
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
import warnings

PROGRAMS = ('dedupd.main', 'glance_dedup.cli.main')
#: Variables that Python, the C library or the loader read when a program
#: starts.
_AT_START = ('PYTHON', 'LD_', 'LC_', 'LANG', 'MALLOC', 'GLIBC', 'ASAN_',
             'GLANCE_DEDUP_TEST_EXEC')
_OURS = re.compile(r'^\s*(from|import) (dedupd|glance_dedup\.cli)\b',
                   re.MULTILINE)
_SET_CHILD_SUBREAPER = 36   # of <linux/prctl.h>
_TOP = os.path.dirname(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))))
_libc = ctypes.CDLL(None, use_errno=True)
_real = subprocess.Popen
#: Whether programs are forked: while quick tests run.
enabled = True


def _at_start(environment):
    found = {name: value for name, value in environment.items()
             if name.startswith(_AT_START)}
    # The server has the checkout in its path in any case.
    if found.get('PYTHONPATH') == _TOP:
        del found['PYTHONPATH']
    return found


def can_be_forked(arguments, environment, directory):
    """Tell whether a command runs a program that the server has imported."""
    program, option, what = map(os.fspath, [*arguments, '', '', ''][:3])
    if program != sys.executable or not (
            option == '-m' and what in PROGRAMS
            or option == '-c' and _OURS.search(what)):
        return False
    if _at_start(environment) != _at_start(os.environ):
        return False
    return environment.get('PYTHONPATH') == _TOP or (
        os.path.abspath(os.fspath(directory or '.')) == _TOP)


class Popen(_real):
    """As ``subprocess.Popen``, forking those programs."""

    def _execute_child(self, *args):
        (arguments, executable, preexec_fn, close_fds, pass_fds, directory,
         environment, _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite,
         errread, errwrite, _, gid, gids, uid, umask, start_new_session,
         process_group) = args
        given = os.environ if environment is None else environment
        plain = (
            enabled and executable is None and preexec_fn is None and close_fds
            and not shell and isinstance(arguments, (list, tuple))
            and (gid, gids, uid, umask) == (None, None, None, -1)
            and can_be_forked(arguments, given, directory))
        if not plain:
            return super()._execute_child(*args)
        words = [os.fsdecode(word) for word in arguments]
        sys.audit('subprocess.Popen', words[0], words, directory, environment)
        descriptors = {0: p2cread, 1: c2pwrite, 2: errwrite}
        descriptors = {number: number if fd == -1 else fd
                       for number, fd in descriptors.items()}
        descriptors |= {fd: fd for fd in pass_fds}
        self.pid = _server().start({
            'option': words[1], 'program': words[2], 'arguments': words[3:],
            'directory': os.path.abspath(os.fspath(directory or '.')),
            'environment': {os.fsdecode(name): os.fsdecode(value)
                            for name, value in given.items()},
            'session': bool(start_new_session), 'group': process_group,
        }, descriptors)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread,
                             errwrite)
        return None


class _Server:
    """The server of this process, as its parent sees it."""

    def __init__(self):
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX,
                                                 socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        with theirs:
            self._process = _real(
                [sys.executable, '-m', __name__, str(theirs.fileno())],
                cwd=_TOP, pass_fds=[theirs.fileno()], start_new_session=True,
                stdin=subprocess.DEVNULL)

    def start(self, request, descriptors):
        request['descriptors'] = list(descriptors)
        with self._lock:
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


_servers: dict[int, _Server] = {}
_servers_lock = threading.Lock()


def _server():
    # Not the parent's in a forked test.
    with _servers_lock:
        pid = os.getpid()
        if pid not in _servers:
            _servers[pid] = _Server()
        return _servers[pid]


def install():
    """Have this process start the programs in this way."""
    subprocess.Popen = Popen


# -- the server's process -----------------------------------------------------

def _import_all():
    for name in PROGRAMS:
        importlib.import_module(name)
    from glance_dedup.cli import main
    for value in main.COMMANDS.values():
        importlib.import_module(value.partition(':')[0])
    # What is in use now is never collected, so its pages stay shared.
    gc.collect()
    gc.freeze()


def _serve(connection):
    """Fork a process for each request; return its request in the process."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 16)
        if not data:
            os._exit(0)
        reader, writer = os.pipe()
        between = os.fork()
        if not between:
            child = os.fork()
            if not child:
                connection.close()
                return json.loads(data), descriptors
            os.write(writer, str(child).encode())
            os._exit(0)
        # When it has ended, its child is one of the process of the tests.
        os.waitpid(between, 0)
        connection.send(os.read(reader, 64))
        for fd in (reader, writer, *descriptors):
            os.close(fd)


def _arrange(descriptors, numbers):
    """Put descriptors where the program expects them, and close all others."""
    above = max([*numbers, *descriptors, 2]) + 1
    for place, fd in enumerate(descriptors):
        os.dup2(fd, above + place)
    for place, number in enumerate(numbers):
        os.dup2(above + place, number)
    kept = sorted(numbers)
    for low, high in zip([-1, *kept], [*kept, 1 << 20]):
        if low + 1 < high:      # an empty range would be all
            os.closerange(low + 1, high)


def _become(request, descriptors):
    _arrange(descriptors, request['descriptors'])
    if request['session']:
        os.setsid()
    elif request['group'] is not None and request['group'] >= 0:
        os.setpgid(0, request['group'])
    os.chdir(request['directory'])
    os.environ.clear()
    os.environ.update(request['environment'])
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
    sys.path[0] = request['directory'] if request['option'] == '-m' else ''
    if 'PYTHONPATH' in request['environment']:
        sys.path.insert(1, _TOP)
    sys.argv = request['arguments']


def _find_code(request):
    """The code of the program, and what its module knows of itself."""
    program = request['program']
    if request['option'] == '-c':
        sys.argv.insert(0, '-c')
        return compile(program, '<string>', 'exec'), {
            '__spec__': None, '__package__': None, '__file__': None}
    with warnings.catch_warnings():
        # It was imported, as a module of its own name, which nobody uses.
        warnings.filterwarnings('ignore', '.*found in sys.modules')
        _, spec, code = runpy._get_module_details(program)
    sys.argv.insert(0, code.co_filename)
    return code, {'__spec__': spec, '__package__': spec.parent,
                  '__file__': code.co_filename}


def main():
    """In the server; returns in each process that it forks."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    # cliff reads the program's name when it is imported; all are called so.
    sys.argv[:] = ['main.py']
    _import_all()
    request, descriptors = _serve(connection)
    _become(request, descriptors)
    return _find_code(request)


if __name__ == '__main__':
    # Out of here, so that what ends the program ends the interpreter.
    _code, _facts = main()
    _main = sys.modules['__main__'].__dict__
    _main.update(_facts)
    exec(_code, _main)
