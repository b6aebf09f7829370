# SPDX-License-Identifier: Apache-2.0

"""podman with files, mounts and processes of its own."""

import os
import pathlib
import re
import subprocess

from tests.support import namespaces

_SECONDS = 300
#: Mounts that hide this machine's own content there.
_MOUNTS = """
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=0755 tmpfs /run
"""
#: Groups in which podman puts processes if it does not use systemd.
_GROUP = 'libpod_parent'
#: podman's message about the health check's timer without systemd.
_NO_TIMER = re.compile(r'^time=.*systemd connection.*\n', re.MULTILINE)


class Podman:
    """A podman that stores its data in a directory. The caller closes it."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._namespaces = namespaces.Namespaces(_MOUNTS)
        # crun, podman's own choice, refuses the cgroups of some machines.
        self._podman = (
            'podman', '--root', str(directory / 'storage'), '--runroot',
            '/run/podman', '--tmpdir', '/run/libpod', '--runtime', 'runc',
            '--cgroup-manager', 'cgroupfs', '--events-backend', 'file',
            '--storage-driver', 'overlay')

    def close(self) -> None:
        """End all processes there."""
        self._namespaces.close()
        subprocess.run(
            ['find', '/sys/fs/cgroup', '-depth', '-type', 'd', '-path',
             f'*/{_GROUP}*', '-exec', 'rmdir', '{}', '+'],
            stderr=subprocess.DEVNULL, timeout=_SECONDS)

    def attempt(self, *command: object, **environment: str
                ) -> subprocess.CompletedProcess:
        """Run a program; the name ``podman`` means this podman."""
        program, *arguments = map(str, command)
        result = subprocess.run(
            [*self._namespaces.enter,
             *(self._podman if program == 'podman' else (program,)),
             *arguments], capture_output=True, text=True, cwd='/',
            timeout=_SECONDS, env={**os.environ, **environment})
        result.stderr = _NO_TIMER.sub('', result.stderr)
        return result

    def run(self, *command: object, **environment: str) -> str:
        """Run a program that must succeed, and return its output."""
        result = self.attempt(*command, **environment)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def why_not(self, directory: pathlib.Path) -> str:
        """Return why no container of this host starts: '' if one does.

        :param directory: an empty one, for the container's root
        """
        for name in ('bin', 'lib', 'lib64'):
            (directory / name).symlink_to(f'usr/{name}')
        result = self.attempt(
            'podman', 'run', '--rm', '--network', 'none', '--volume',
            '/usr:/usr:ro', '--rootfs', directory, '/usr/bin/true')
        return result.stderr.strip() if result.returncode else ''
