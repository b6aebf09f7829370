# SPDX-License-Identifier: Apache-2.0

"""The bytes that projects have stored until now.

They are in the ledger (``projects.json``) and in the spool's announcements:
images that were committed since, and that the maintainer has not counted yet.
A repository that never had a maintainer has all its images in the spool. So
this needs no daemon, and every process on every host sees the commits of the
others.
"""

import contextlib
import logging
import os

from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.repository import image_repository
from glance_dedup.repository import projects

LOG = logging.getLogger(__name__)

_Version = tuple[int, int] | None
_Projects = dict[str, projects.Project] | None

# How often to read again if the maintainer keeps on writing the file.
_LOOKS = 5


class Usage:
    """One process's figures on all projects of one repository. Thread-safe.

    It has no lock, since a fork could leave that locked.
    """

    def __init__(self) -> None:
        # By the name of a committed entry: its project, and its bytes.
        self._committed: dict[str, tuple[str, int]] = {}
        # The file of projects that was read last, and its contents.
        self._read: tuple[_Version, _Projects] = None, None
        self._known = True

    def stored(self, repository: image_repository.Repository, project: str
               ) -> int | None:
        """Return how many bytes of the disk a project has stored.

        Deleted images count until the maintainer has un-counted them.

        :returns: None: it is not known; the log notes so once
        :raises RepositoryError: the spool cannot be listed
        """
        for _ in range(_LOOKS):
            version, known = self._load(repository.path)
            waiting = self._waiting(repository, project)
            if version == _version(repository.path):
                break       # else the maintainer may have counted some of them
        self._tell(repository.path, known is not None)
        if known is None:
            return None
        found = known.get(project)
        return waiting + (0 if found is None else found.stored_bytes)

    def _tell(self, root: str, known: bool) -> None:
        if known != self._known:
            self._known = known
            if known:
                LOG.info('What projects have stored in %s is known again',
                         root)
            else:
                LOG.warning(
                    'What projects have stored in %s is not known, so no '
                    'upload is refused for it. The maintainer, dedupd, '
                    'writes it into %s', root, projects.NAME)

    def _load(self, root: str) -> tuple[_Version, _Projects]:
        """Return the version of the file of projects, and its contents."""
        version = _version(root)
        if version is None and not files.exists(
                os.path.join(root, 'fence')):
            return None, {}     # there never was a maintainer
        if version is None or version != self._read[0]:
            self._read = version, projects.load(root)
        return self._read

    def _waiting(self, repository: image_repository.Repository,
                 project: str) -> int:
        """The bytes of images that were committed and not counted yet."""
        committed = {}
        with contextlib.closing(
                _engine.Maintenance(repository.handle())) as engine:
            for name in engine.spool():
                found = self._committed.get(name)
                if found is None and name.startswith('T-'):
                    found = _look_at(engine, name)
                if found is not None:
                    committed[name] = found
        self._committed = committed
        return sum(stored for who, stored in committed.values()
                   if who == project)


def _version(root: str) -> _Version:
    """Return the difference between the file of projects and the next one."""
    try:
        found = os.stat(os.path.join(root, projects.NAME))
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _look_at(engine: _engine.Maintenance, name: str
             ) -> tuple[str, int] | None:
    """The project and the bytes of an entry; None: it is no image."""
    with contextlib.suppress(exceptions.ImageNotFound,
                             *exceptions.UNREADABLE):
        with contextlib.closing(engine.open_entry(name)) as entry:
            if entry.complete and entry.live():
                header = entry.header()
                return header['project'], header['stored_bytes']
    return None
