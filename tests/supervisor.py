# SPDX-License-Identifier: Apache-2.0
"""Runs the tests, and ends the processes that they leave running.

::

    python -m tests.supervisor COMMAND...

Tests start services, each in a session of its own. A process of the tests that
is killed can no longer end its services; Linux gives the orphans to the
nearest ancestor that is a subreaper, which is this process.

To end a run early, send this process SIGINT, SIGTERM or SIGHUP, or press
Ctrl-C. The tests are interrupted, and tear down what they have set up. The
second signal kills all at once.
"""

import contextlib
import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import time

# From <linux/prctl.h>
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Seconds that killed processes may take to disappear.
_LIMIT = 30
_POLL = 0.01
# Seconds that a program may take to start before it is named anyway.
_STARTING = 1

# Signals that a run waits for: a child has ended, or an end is requested.
_HEARD = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP}

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option, value):
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), 'prctl')


def _children():
    pid = os.getpid()
    return [int(child) for child in pathlib.Path(
        f'/proc/{pid}/task/{pid}/children').read_text().split()]


def _name(pid):
    """Return a program's name; None for a zombie."""
    proc = pathlib.Path(f'/proc/{pid}')
    deadline = time.monotonic() + _STARTING
    with contextlib.suppress(OSError):
        # A zombie has no memory. A program that is just starting has memory,
        # but no arguments yet, and its parent's name.
        while (proc / 'statm').read_text().split()[0] != '0':
            if (proc / 'cmdline').read_bytes() or time.monotonic() > deadline:
                return (proc / 'comm').read_text().strip()
            time.sleep(_POLL)
    return None


def _end_all():
    """Kill all children, and their orphans; return the names of all."""
    names = {}
    deadline = time.monotonic() + _LIMIT
    while (children := _children()) and time.monotonic() < deadline:
        for pid in children:
            names.setdefault(pid, _name(pid))
            # A process of another user, which a test started with sudo, cannot
            # be killed.
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_POLL)
    return sorted(set(filter(None, names.values())))


def _begin():
    """Prepare the command's process, before it runs."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
    # A shell has background commands ignore it. Tests that interrupt their own
    # processes would wait for ever.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _reap(wanted):
    """Reap ended processes, orphans, too; return the wanted one's status."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == wanted:
                found = ended[1]
    return found


def run(command):
    """Run a command; return its exit status."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # A Python handler would not run during a system call that begins just
    # after the signal. So the supervisor waits for signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    # The caller may ignore the signal. Then Linux would not report an end.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    number, status = signal.SIGINT, None
    try:
        # The process group is its own: a terminal's Ctrl-C would come twice.
        process = subprocess.Popen(
            command, process_group=0, preexec_fn=_begin)
        while status is None:
            if signal.sigwait(_HEARD) == signal.SIGCHLD:
                status = _reap(process.pid)
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            number = signal.SIGKILL
        process.returncode = os.waitstatus_to_exitcode(status)
    finally:
        left = _end_all()
    if left:
        print('tests.supervisor: ended what the tests had left running: '
              + ', '.join(left), file=sys.stderr, flush=True)
    return process.returncode


if __name__ == '__main__':
    code = run(sys.argv[1:])
    # A shell returns the same status.
    sys.exit(code if code >= 0 else 128 - code)
