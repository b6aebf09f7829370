# SPDX-License-Identifier: Apache-2.0

"""Hosts that share a directory: one FUSE process, and one mount, for each.

``sharedfs.h`` describes the behaviour of the file system. A host here is its
mount, and a private directory; the test starts the programs that work on it.
Killing its file system is the death of the host: unsynced writes are lost, its
locks fall, and the programs on it get errors.

This needs root and ``/dev/fuse``, and the packages that ``bindep.txt`` names.
"""

import contextlib
import functools
import os
import pathlib
import signal
import subprocess
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
#: Maximum seconds for any operation.
LIMIT = 60
COMPILE = ['gcc', '-std=c11', '-D_GNU_SOURCE', '-O2', '-Wall', '-Wextra',
           '-Werror', '-Wshadow', '-pthread', f'-I{HERE.parent.parent}']


def _output(*command):
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=LIMIT)
    except FileNotFoundError as e:
        raise AssertionError(
            f"{e.filename} is not installed; see the profile 'test' of "
            'bindep.txt')
    assert done.returncode == 0, f'{command}: {done.stderr}{done.stdout}'
    return done.stdout


@functools.cache
def program():
    """Return the file system's program, built for this process's tests."""
    directory = tempfile.TemporaryDirectory(prefix='sharedfs-')
    path = pathlib.Path(directory.name, 'sharedfs')
    _output(*COMPILE, '-o', str(path), *map(str, sorted(HERE.glob('*.c'))),
            *_output('pkg-config', '--cflags', '--libs', 'fuse3').split())
    # The directory goes with the process.
    return path, directory


class Host:
    """One host's mount of a directory that others have, too.

    :param directory: for this host's own files
    :param backing: the directory that all share
    :param options: of sharedfs, as ``locks='local'``
    """

    #: Whether it caches known names until their time is over.
    remembers = True

    def __init__(self, directory, backing, **options):
        self.directory = pathlib.Path(directory)
        self.backing = pathlib.Path(backing)
        self.options = options
        self.root = self.directory / 'shared'
        self.filters = self.directory / 'filters'
        self.log = self.directory / 'sharedfs.log'
        self.process = None

    @property
    def seen(self):
        """Return the path of the shared files, even if this host is dead."""
        return self.backing

    def start(self):
        assert os.geteuid() == 0, 'mounting needs root'
        assert os.path.exists('/dev/fuse'), 'the kernel has no FUSE'
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.log, 'ab') as log:
            self.process = subprocess.Popen(
                [program()[0], self.backing, self.root,
                 self.backing.with_name(f'{self.backing.name}.versions'),
                 *(f'{name}={value}'
                   for name, value in self.options.items())],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + LIMIT
        while not os.path.ismount(self.root):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, 'sharedfs does not mount'
            time.sleep(0.01)
        return self

    def die(self):
        """Kill the host: its unsynced data is lost."""
        self.process.kill()
        self.process.wait(LIMIT)

    def kill(self):
        """Kill the host, and remove its mount."""
        if self.process is not None:
            self.die()
            self.process = None
            subprocess.run(['umount', '--lazy', self.root], timeout=LIMIT,
                           check=True)

    def drop_locks(self):
        """Drop its locks without notice, as a server does for a lost host."""
        self.process.send_signal(signal.SIGUSR1)

    def restart(self, **options):
        """Restart the host, with empty caches."""
        self.kill()
        self.options.update(options)
        return self.start()


@contextlib.contextmanager
def hosts(directory, count=2, backing=None, **options):
    """Return hosts, and the directory that they share, made on demand."""
    directory = pathlib.Path(directory)
    backing = backing or directory / 'backing'
    backing.mkdir(exist_ok=True)
    made = [Host(directory / f'host-{i}', backing, **options)
            for i in range(count)]
    try:
        for host in made:
            host.start()
        yield made
    finally:
        for host in made:
            host.kill()
