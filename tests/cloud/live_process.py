# SPDX-License-Identifier: Apache-2.0
"""Processes that outlive their parent.

A cloud is started by one process and ended by another, so each process is
recorded with the time at which it started: a number that the system has given
to another process meanwhile is never signalled. Each leads a session and has
the cloud's directory in its environment, which identifies its children once it
is gone.
"""

import contextlib
import errno
import os
import pathlib
import re
import secrets
import signal
import socket
import subprocess
import time

MARK = 'GLANCE_DEDUP_CLOUD'
POLL = 0.05
# Seconds.
UNMOUNT_TIMEOUT = 60


def free_address():
    """Return an address that no link of this machine has, for measurements."""
    while True:
        address = (f'198.{18 + secrets.randbelow(2)}.{secrets.randbelow(256)}'
                   f'.{1 + secrets.randbelow(254)}')
        with socket.socket() as listener:
            try:
                listener.bind((address, 0))
            except OSError as exc:
                if exc.errno != errno.EADDRNOTAVAIL:
                    raise
                return address


def _stat(pid):
    """Return life, session and start of a process; None if it is gone."""
    try:
        text = pathlib.Path(f'/proc/{pid}/stat').read_text()
    except OSError:
        return None
    # The program's name before the parenthesis may contain anything.
    fields = text.rpartition(')')[2].split()
    # A zombie holds nothing any more once it is alone: its other threads may
    # take a while to end.
    lives = fields[0] not in 'ZX' or int(fields[17]) > 1
    return lives, int(fields[3]), int(fields[19])


def marked(directory):
    """Return the processes with `directory`'s mark in their environment."""
    mark = f'{MARK}={directory}'.encode()
    found = []
    for path in pathlib.Path('/proc').glob('[0-9]*'):
        with contextlib.suppress(OSError):
            if mark in (path / 'environ').read_bytes().split(b'\0'):
                process = Process.of(int(path.name))
                if process.poll() is None and process.pid != os.getpid():
                    found.append(process)
    return found


def mounts_below(directory):
    """Return the mount points in a directory, the latest first."""
    lines = pathlib.Path('/proc/self/mountinfo').read_text().splitlines()
    # Blanks, and some other bytes, are written as octal numbers.
    places = [pathlib.Path(re.sub(
        r'\\([0-7]{3})', lambda match: chr(int(match[1], 8)),
        line.split()[4])) for line in lines]
    return [place for place in reversed(places) if directory in place.parents]


def unmount_below(directory):
    """Unmount everything below a directory, even if a process uses it."""
    command = (['umount', '--lazy'] if os.geteuid() == 0
               else ['fusermount3', '-u', '-z'])
    for place in mounts_below(directory):
        subprocess.run([*command, place], stdin=subprocess.DEVNULL,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                       timeout=UNMOUNT_TIMEOUT)
    left = mounts_below(directory)
    if left:
        raise OSError(
            f'Something is still mounted on {left[0]}.\n'
            'What to do: unmount it, and run this again.')


class Process:
    """A process by its number and start, with Popen's methods.

    :param pid: its number
    :param started: when it started, in ticks of the system's clock since boot
    """

    def __init__(self, pid, started):
        self.pid = pid
        self.started = started

    @classmethod
    def of(cls, pid):
        """Return the process that has this number now."""
        stat = _stat(pid)
        return cls(pid, stat[2] if stat else -1)

    @classmethod
    def spawn(cls, command, directory, **options):
        """Start a command, with a session of its own and the mark."""
        environment = {**options.pop('env'), MARK: str(directory)}
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True,
            env=environment, **options)
        # poll() reaps it, or its next parent does when this process ends.
        child.returncode = 0
        return cls.of(child.pid)

    def poll(self):
        """Return None while it runs; then 0, or our child's status."""
        status = 0
        with contextlib.suppress(ChildProcessError):
            pid, waited = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                status = os.waitstatus_to_exitcode(waited)
        stat = _stat(self.pid)
        if stat and stat[2] == self.started and stat[0]:
            return None
        return status

    def wait(self, timeout):
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(POLL)
        return status

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def session(self):
        """Return the session of the process; None if it is gone."""
        stat = _stat(self.pid)
        return stat and stat[1]

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)
