# SPDX-License-Identifier: Apache-2.0
"""A Debian with systemd as its first process, on this machine.

Its files are a directory. It has processes, mounts and a network of its own,
and all of its processes end when it is closed.
"""

import os
import pathlib
import select
import shlex
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
NAMESPACES = ('--mount', '--pid', '--ipc', '--uts', '--cgroup')
START_SECONDS = 120
RUN_SECONDS = 1800
#: mmdebstrap shows the host's /dev/shm in the directory. It does so in a
#: namespace of its own, so that nothing is left there, however it ends.
MAKE = ('unshare', '--mount', '--propagation', 'private', '--pid',
        '--mount-proc', '--fork', '--kill-child', 'mmdebstrap', '--quiet',
        '--mode=root', '--variant=important', '--dpkgopt=force-unsafe-io',
        '--include=ca-certificates,dbus,systemd-sysv')


class Failed(AssertionError):
    """A command did not end with the status 0."""

    def __init__(self, command, done):
        self.status = done.returncode
        self.output = done.stdout
        super().__init__(f'{command}: status {self.status}\n{self.output}')


def make(directory, suite):
    """Make the files of a minimal Debian."""
    subprocess.run([*MAKE, suite, directory], check=True, timeout=RUN_SECONDS)


class Debian:
    """A Debian that was started from the files of a directory."""

    def __init__(self, directory):
        self.directory = pathlib.Path(directory)
        self._boot = subprocess.Popen(
            ['unshare', '--mount', '--propagation', 'private',
             sys.executable, HERE / 'boot.py', directory],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self._enter = self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self):
        """Wait for systemd's start of all units; return how to enter."""
        deadline = time.monotonic() + START_SECONDS
        ready, _, _ = select.select([self._boot.stdout], [], [],
                                    START_SECONDS)
        outer = ready and self._boot.stdout.readline().strip()
        assert outer, 'no namespaces; see above'
        children = pathlib.Path(f'/proc/{outer}/task/{outer}/children')
        while True:
            assert self._boot.poll() is None, 'it ended; see above'
            assert time.monotonic() < deadline, 'systemd did not start'
            init = children.read_text().strip()
            if init and pathlib.Path(f'/proc/{init}/comm'
                                     ).read_text() == 'systemd\n':
                break
            time.sleep(0.05)
        enter = ['nsenter', f'--target={init}', *NAMESPACES]
        state = ''
        while state not in ('running', 'degraded'):
            assert time.monotonic() < deadline, f'systemd is {state}'
            time.sleep(0.05)
            state = subprocess.run(
                [*enter, 'systemctl', 'is-system-running'],
                capture_output=True, text=True,
                timeout=START_SECONDS).stdout.strip()
        return enter

    def close(self):
        """End all processes there. Its files stay."""
        self._boot.stdin.close()
        self._boot.wait(START_SECONDS)
        self._boot.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def run(self, script, user='root', check=True, **environment):
        """Have a shell run a script; return its output, with that of errors.

        :raises Failed: it ended with another status than 0, and `check`
        """
        # apt gets packages as this machine does. Everything else has the
        # network of the Debian, which reaches nothing.
        network = [] if script.startswith('apt-get ') else ['--net']
        script = 'set -e\n' + ''.join(
            f'export {name}={shlex.quote(str(value))}\n'
            for name, value in environment.items()) + script
        done = subprocess.run(
            [*self._enter, *network, '--', 'env', '-i', 'LANG=C.UTF-8',
             'su', '-', user, '-c', script],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors='replace',
            timeout=RUN_SECONDS)
        if check and done.returncode:
            raise Failed(script, done)
        return done.stdout

    def path(self, name):
        """Return the path on this machine of a file of its disk."""
        return self.directory / os.fspath(name).lstrip('/')
