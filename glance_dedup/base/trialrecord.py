# SPDX-License-Identifier: Apache-2.0

"""The results of trials of a shared file system, by host: ``trial.json``.

``repository test-filesystem`` writes them (``glance_dedup/fstest``). A
repository on a mount that was found not fine is not opened, and the status of
a daemon says which mount was not tried. The file is valid JSON with a checksum
(``format-derived.rst``); an invalid one counts as none.
"""

from collections.abc import Iterable
import dataclasses
import os
import socket
import time
from typing import Any

from glance_dedup.base import access
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import filesystem
from glance_dedup.base import imagelist

NAME = 'trial.json'
KIND = 'glance-dedup trial'
MAX_BYTES = 1 << 20

# The most hosts that are kept, those that were tried last.
_MAX_HOSTS = 256
# Of a text, in characters.
_MAX_LENGTH = 4096

# Verdicts on a mount, beside those on its properties.
NOT_TRIED = 'not tried'
CHANGED = 'changed since its trial'

FINE = 'fine'
LIMITED = 'limited'
UNFIT = 'not fine'


@dataclasses.dataclass(frozen=True)
class Mount:
    """Mount of a repository on a host, for which a trial is valid.

    :ivar kind: of file system, as the kernel calls it
    :ivar kernel: its release
    """

    host: str
    place: str
    kind: str
    options: str
    kernel: str


def mount_of(root: str) -> Mount:
    """Return this host's mount of a repository.

    :raises OSError: the directory cannot be looked at
    """
    found = filesystem.mount_of(root)
    place, kind, options = ('', '', frozenset[str]()) if found is None else (
        found.place, found.kind, found.options)
    # The address of an NFS client may change at each mount.
    kept = sorted(option for option in options
                  if not option.startswith('clientaddr='))
    return Mount(socket.gethostname(), place, kind, ','.join(kept),
                 os.uname().release)


@dataclasses.dataclass(frozen=True)
class Trial:
    """The result of a host's last trial.

    :ivar version: of this program
    :ivar time: when it ended, in seconds since 1970
    :ivar limited: titles of the properties that are limited
    :ivar unfit: titles of the ones that are not fine
    """

    mount: Mount
    version: str
    time: float
    limited: tuple[str, ...]
    unfit: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """The worst verdict on a property."""
        return UNFIT if self.unfit else LIMITED if self.limited else FINE


@dataclasses.dataclass(frozen=True)
class Result:
    """Findings about a mount.

    :ivar time: when it was tried; None: it was not
    """

    verdict: str
    time: float | None = None
    limited: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()

    @property
    def is_valid(self) -> bool:
        """Return whether the mount was tried as it is now."""
        return self.verdict not in (NOT_TRIED, CHANGED)


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_LENGTH:
        raise TypeError('a text is none, or too long')
    return value


def _titles(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > _MAX_LENGTH:
        raise TypeError('titles are no list')
    return tuple(map(_text, value))


def _entry(version: Any, time: Any, limited: Any, unfit: Any, **mount: Any
           ) -> Trial:
    if type(time) not in (int, float) or not 0 <= time < 1 << 53:
        raise TypeError('the time is none')
    return Trial(Mount(**{name: _text(value)
                          for name, value in mount.items()}),
                 _text(version), time, _titles(limited), _titles(unfit))


def decode(content: bytes) -> list[Trial]:
    """Return the trials in a file's content.

    :raises ValueError: names its problem
    """
    return imagelist.decode(content, KIND, MAX_BYTES, _entry, of='hosts')


def encode(trials: Iterable[Trial]) -> bytes:
    """Return the content of a file with these trials."""
    return imagelist.encode(KIND, (
        {**dataclasses.asdict(trial.mount), 'version': trial.version,
         'time': trial.time, 'limited': trial.limited, 'unfit': trial.unfit}
        for trial in trials), of='hosts')


def read(root: str) -> list[Trial]:
    """Return the trials of a repository; none if the file is invalid."""
    try:
        return decode(files.read_file(os.path.join(root, NAME),
                                      MAX_BYTES + 1))
    except (OSError, ValueError, exceptions.RepositoryError):
        return []


def write(root: str, mounts: Iterable[Mount], version: str,
          limited: Iterable[str], unfit: Iterable[str]) -> None:
    """Keep the result of a trial, for each host that took part.

    One host does this for all. Results of other hosts stay.

    :raises StorageError: the file cannot be written
    """
    now, found = time.time(), (tuple(limited), tuple(unfit))
    new = [Trial(mount, version, now, *found) for mount in mounts]
    tried = {(trial.mount.host, trial.mount.place) for trial in new}
    old = [trial for trial in read(root)
           if (trial.mount.host, trial.mount.place) not in tried]
    path = os.path.join(root, NAME)
    with files.os_errors(f'cannot write {path}', exceptions.StorageError):
        files.replace_file(path, encode((new + old)[:_MAX_HOSTS]),
                           access.file_mode(root))


def look(root: str) -> Result:
    """Return the status of this host's mount of a repository.

    :raises OSError: the directory cannot be looked at
    """
    mount = mount_of(root)
    for trial in read(root):
        if trial.mount == mount:
            return Result(trial.verdict, trial.time, trial.limited,
                          trial.unfit)
        if (trial.mount.host, trial.mount.place) == (mount.host, mount.place):
            return Result(CHANGED, trial.time)
    return Result(NOT_TRIED)


def require_fit(root: str) -> None:
    """Refuse a repository on a mount that was found not fine.

    :raises UnfitFileSystem: names the missing property and a remedy
    """
    if not any(trial.unfit for trial in read(root)):
        return
    result = look(root)
    if result.unfit:
        mount = mount_of(root)
        raise exceptions.UnfitFileSystem(
            f'the file system of {root}, {mount.kind} on {mount.place}, was '
            f'tried together with other hosts, and does not have what they '
            f'need: {"; ".join(result.unfit)}. The repository was not opened. '
            "Mount it with other options, then run 'glance-dedup repository "
            "test-filesystem' on all hosts, which says what each property is "
            'for')
