# SPDX-License-Identifier: Apache-2.0

"""Stops processes completely, with all of their threads."""

import contextlib
import os
import pathlib
import signal
import time

_LIMIT = 60


def stop(*pids):
    """Stop processes with SIGSTOP, and wait until all their threads have.

    The signal alone does not do that: one thread takes it, and the others run
    until that one has run. A process that ends meanwhile counts as stopped.

    :raises AssertionError: if a thread still runs after a minute
    """
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    _wait(lambda: pids)


def stop_group(group):
    """Stop a process group with SIGSTOP, as `stop` does."""
    os.killpg(group, signal.SIGSTOP)
    _wait(lambda: _members(group))


def _wait(pids):
    deadline = time.monotonic() + _LIMIT
    while running := [pid for pid in pids() for state in _states(pid)
                      if state not in 'tTZX']:
        assert time.monotonic() < deadline, running
        time.sleep(0.001)


def _states(pid):
    """Return the state of each thread of a process: a letter, see proc(5)."""
    with contextlib.suppress(FileNotFoundError):
        for task in pathlib.Path(f'/proc/{pid}/task').iterdir():
            if fields := _fields(task):
                yield fields[0]


def _members(group):
    for path in pathlib.Path('/proc').glob('[0-9]*'):
        fields = _fields(path)
        if fields and int(fields[2]) == group:
            yield int(path.name)


def _fields(path):
    """Return the fields of `stat` behind the name; none if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        # The name may have parentheses and blanks.
        return (path / 'stat').read_text().rpartition(') ')[2].split()
    return []
