# SPDX-License-Identifier: Apache-2.0

"""Namespaces of mounts and of processes, for programs that need their own.

All of their processes end with the namespace of processes, and all mounts go
with that of mounts.
"""

import pathlib
import select
import subprocess

#: Runs the following command in such namespaces.
COMMAND = ('unshare', '--mount', '--propagation', 'private', '--pid',
           '--mount-proc', '--fork', '--kill-child')
_SECONDS = 60


class Namespaces:
    """Namespaces that exist until they are closed.

    :param mounts: a script that mounts file systems for the programs there
    :param arguments: its arguments: $1 and so on
    :ivar enter: runs the following command in there
    """

    def __init__(self, mounts: str, *arguments: object) -> None:
        self._holder = subprocess.Popen(
            [*COMMAND, 'sh', '-c', f'set -e\n{mounts}\necho ready\nexec cat',
             'sh', *map(str, arguments)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True)
        ready, _, _ = select.select([self._holder.stdout], [], [], _SECONDS)
        assert ready and self._holder.stdout.readline() == 'ready\n'
        pid = self._holder.pid
        child, = pathlib.Path(
            f'/proc/{pid}/task/{pid}/children').read_text().split()
        self.enter = ('nsenter', '--target', child, '--mount', '--pid', '--')

    def close(self) -> None:
        """End all processes there; the mounts go with them."""
        self._holder.stdin.close()
        self._holder.wait(_SECONDS)
        self._holder.stdout.close()
