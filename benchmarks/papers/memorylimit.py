# SPDX-License-Identifier: Apache-2.0

"""A limit of memory for commands, page cache included: a cgroup.

Linux's memory controller is used in its first version or in its second,
whichever has it. Only root may.
"""

from collections.abc import Iterator
import contextlib
import os
import pathlib
import time

#: By file system: the option that must be there, the file of the limit, and
#: the file that prevents swapping if it has a 0.
_VERSIONS = {
    'cgroup': ('memory', 'memory.limit_in_bytes', 'memory.swappiness'),
    'cgroup2': ('', 'memory.max', 'memory.swap.max')}
LIMIT = 10  # seconds until no process is left


def _parents() -> Iterator[tuple[pathlib.Path, str, str]]:
    """Yield where cgroups can be made, and the names of the two files.

    That is at the top: elsewhere a group of version 2 that has processes may
    have none below it.
    """
    with open('/proc/mounts') as file:
        for _, mount, kind, options, *_ in map(str.split, file):
            option, limit, swap = _VERSIONS.get(kind, (None, '', ''))
            if option in ('', *options.split(',')):
                yield pathlib.Path(mount), limit, swap


def _make(size: int) -> pathlib.Path:
    """Make a cgroup with a limit.

    :raises SystemExit: there is no memory controller, or it may not be used
    """
    refused = 'no cgroup file system has the memory controller'
    for parent, limit, swap in _parents():
        group = parent / f'bench-{os.getpid()}'
        try:
            group.mkdir()
        except OSError as e:
            refused = str(e)
            continue
        try:
            # Without its controller a group of version 2 has no such file.
            (group / limit).write_text(f'{size}\n')
            if (group / swap).exists():     # not every kernel can swap
                (group / swap).write_text('0\n')
            return group
        except OSError as e:
            refused = str(e)
            group.rmdir()
    raise SystemExit(f'memory cannot be limited here: {refused}')


def _remove(group: pathlib.Path) -> None:
    deadline = time.monotonic() + LIMIT
    while True:
        try:
            return group.rmdir()
        except OSError:     # a process of it is ending
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@contextlib.contextmanager
def limited(size: int) -> Iterator[list[str]]:
    """Yield the beginning of commands that share so many bytes of memory.

    :param size: 0: there is no limit
    :raises SystemExit: no limit can be set; the message says why
    """
    if not size:
        yield []
        return
    group = _make(size)
    try:
        yield ['sh', '-c', 'echo $$ > "$0" && exec "$@"',
               str(group / 'cgroup.procs')]
    finally:
        _remove(group)
