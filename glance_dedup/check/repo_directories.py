# SPDX-License-Identifier: Apache-2.0

"""The directories of a repository: their names, listings and modes."""

from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import os
import re
import stat

from glance_dedup.base import closing
from glance_dedup.base import exceptions
from glance_dedup.base import hashes
from glance_dedup.check import check_report
from glance_dedup.check import files
from glance_dedup.check import ondisk

VOLUMES = 'volumes'
SLICES = 'slices'
FEATURES = 'features'
DIRECTORIES = ('groups', 'images', 'spool', 'locks', 'quarantine', VOLUMES,
               FEATURES)
# The maintainer's, one for hashes, the helpers', and that of uploads with a
# limit: each is made when it is needed.
OPTIONAL = ('catalog', 'index', 'spares', hashes.DIRECTORY, 'helpers',
            'reservations', 'formats', SLICES)
# The last is the file system's own, if it has its root here.
FILES = ('repository.json', 'key', 'fence', 'catalog-reserve',
         *(f'catalog-reserve-{i}' for i in range(1, 9)), *ondisk.LISTS,
         *(f'{name}.new' for name in ondisk.LISTS), 'cold.json', 'lost+found')
# Files that a killed creation may leave beside them.
NEW_FILE = re.compile(r'\.[0-9a-f]{16}\.new\Z')
_OPENING = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Directories:
    """The repository's directory, and those in it, open for reading.

    Before :meth:`open_all`, only the repository's own directory is open.

    :param path: the repository
    :param findings: gets the problems
    :raises RepositoryNotFound: if there is no such directory
    :raises AccessDenied: if the system refuses to let it be read
    :raises StorageError: if it cannot be opened
    """

    def __init__(self, path: str | os.PathLike[str],
                 findings: check_report.Findings) -> None:
        self.path = os.fspath(path)
        self.findings = findings
        self._find = findings.find
        self._opened: dict[str, int] = {}
        try:
            self._root = os.open(self.path, _OPENING)
        except FileNotFoundError:
            raise exceptions.RepositoryNotFound(
                f'{self.path} does not exist') from None
        except NotADirectoryError:
            raise exceptions.RepositoryNotFound(
                f'{self.path} is not a repository: it is not a directory'
            ) from None
        except OSError as e:
            files.refused_by_system(e, self.path)
            raise exceptions.StorageError(
                f'{self.path} cannot be opened: {e.strerror}') from e
        self._status = os.fstat(self._root)

    def __contains__(self, name: str) -> bool:
        return name in self._opened

    def __getitem__(self, name: str) -> int:
        return self._opened[name]

    def close(self) -> None:
        """Close all directories."""
        for fd in self._opened.values():
            os.close(fd)
        os.close(self._root)

    # The repository's own directory

    def own_names(self) -> list[str]:
        """Return the names in the repository's own directory, sorted.

        :raises AccessDenied: if the system refuses to let it be read
        :raises StorageError: if it cannot be read
        """
        try:
            return sorted(os.listdir(self._root))
        except OSError as e:
            files.refused_by_system(e, self.path)
            raise exceptions.StorageError(
                f'{self.path} cannot be read: {e.strerror}') from e

    def is_unfinished(self, names: Iterable[str]) -> bool:
        """Return whether a killed creation of a repository leaves these.

        :param names: the names in the repository's own directory
        """
        directories = {*DIRECTORIES, SLICES}
        made = {'key', *directories}
        if not made.intersection(names) or any(
                name not in made and name != 'lost+found'
                and not NEW_FILE.match(name) for name in names):
            return False
        return all(self._is_empty(name) for name in
                   directories.intersection(names) - {'locks'})

    def has_volumes(self, names: Iterable[str]) -> bool:
        """Return whether the directory of volumes has an entry.

        :param names: the names in the repository's own directory
        """
        return VOLUMES in names and not self._is_empty(VOLUMES)

    def _is_empty(self, name: str) -> bool:
        """Return whether a directory, not open yet, can be read; open it."""
        with (contextlib.suppress(OSError),
              closing.descriptor(self._open(name)) as fd):
            return not os.listdir(fd)
        return False

    def check_own_names(self, names: Iterable[str]) -> None:
        """Report those in the repository's own directory that are unknown."""
        for name in names:
            if name not in DIRECTORIES + OPTIONAL + FILES:
                self._find(ondisk.NOTE, name, None, 'has an unknown name')

    def open_all(self) -> None:
        """Open the directories in it; report those that cannot be opened."""
        for name in DIRECTORIES + OPTIONAL:
            try:
                fd = self._open(name)
            except FileNotFoundError:
                if name not in OPTIONAL:
                    vital = name not in ('locks', 'quarantine')
                    self._find(ondisk.DAMAGE if vital else ondisk.NOTE, name,
                               None, 'the directory is missing')
            except OSError as e:
                files.refused_by_system(e, os.path.join(self.path, name))
                self._find(ondisk.DAMAGE, name, None, 'cannot be opened as a '
                           f'directory: {e.strerror}')
            else:
                self._opened[name] = fd
                self.check_mode(os.fstat(fd), name, 0o700)

    def _open(self, name: str) -> int:
        return os.open(name, _OPENING | os.O_NOFOLLOW, dir_fd=self._root)

    # The names in them

    def read(self, file: str, longest: int) -> bytes:
        """The first bytes of a file; a wrong mode or owner is reported.

        :param file: its name inside the repository
        :raises Gone: if there is no such file
        :raises Damage: if it cannot be read
        """
        directory, _, name = file.rpartition('/')
        for _ in files.looks():
            with (contextlib.suppress(files.Forgotten),
                  files.File(self[directory] if directory else self._root,
                             name, file) as f):
                self.check_mode(f.status(), file, 0o600)
                return f.read(0, longest)
        raise files.Gone()

    def names(self, directory: str) -> list[str]:
        """Return the names in a directory, sorted; nothing if it is not open.

        A file that is being replaced may have its second name alone. It is
        among them by its name.
        """
        if directory not in self:
            return []
        try:
            names = os.listdir(self[directory])
            if directory in ondisk.HAVE_SECOND:
                return sorted({n.removesuffix(ondisk.SECOND) for n in names})
            return sorted(names)
        except OSError as e:
            files.refused_by_system(e, os.path.join(self.path, directory))
            self._find(ondisk.DAMAGE, directory, None,
                       f'cannot be listed: {e.strerror}')
            return []

    def known_names(self, directory: str, names: Iterable[str],
                    pattern: re.Pattern[str]) -> list[str]:
        """The names that match; others, and wrong modes, are reported."""
        known = []
        for name in names:
            file = f'{directory}/{name}'
            if not pattern.match(name):
                self._find(ondisk.NOTE, file, None, 'has an unknown name')
                continue
            known.append(name)
            status = self.status_of(directory, name)
            if status is not None and stat.S_ISREG(status.st_mode):
                self.check_mode(status, file, 0o600)
        return known

    def group_numbers(self, directory: str, names: Iterable[str]
                      ) -> list[int]:
        """The numbers of files of groups; other names are reported."""
        numbers = []
        for name in self.known_names(directory, names, ondisk.GROUP_NAME):
            if 1 <= int(name, 16) < ondisk.MAX_GROUP:
                numbers.append(int(name, 16))
            else:
                self._find(ondisk.NOTE, f'{directory}/{name}', None,
                           'has an unknown name')
        return numbers

    @contextlib.contextmanager
    def reported(self, severity: str, file: str, missing: str | None = None
                 ) -> Iterator[None]:
        """Report the damage with which the block ends, and go on behind it.

        :param missing: the report on a missing file; None: nothing
        """
        try:
            yield
        except files.Gone:
            if missing is not None:
                self._find(severity, file, None, missing)
        except ondisk.Damage as e:
            self._find(severity, file, e.offset, e.sentence)

    def sum_of_sizes(self, directory: str, names: Iterable[str]) -> int:
        """The bytes of all regular files among these."""
        total = 0
        for name in names:
            status = self.status_of(directory, name)
            if status is not None and stat.S_ISREG(status.st_mode):
                total += status.st_size
        return total

    def status_of(self, directory: str, name: str) -> os.stat_result | None:
        """Return the status of a file; None if the system does not give it."""
        for found in files.names_of(name, directory):
            with contextlib.suppress(OSError):
                return os.stat(found, dir_fd=self[directory],
                               follow_symlinks=False)
        return None

    def status_now(self, directory: str, name: str) -> os.stat_result | None:
        """Return the status of the file that has this name on all hosts."""
        with contextlib.suppress(OSError):
            files.renew_names(self[directory])
        return self.status_of(directory, name)

    def check_mode(self, status: os.stat_result, file: str, mode: int
                   ) -> None:
        """Report a wrong mode or owner.

        :param mode: in a repository that is one user's own
        """
        if self._status.st_mode & stat.S_IWGRP:
            mode = 0o2770 if mode == 0o700 else 0o660
        elif status.st_uid != self._status.st_uid:
            self._find(
                ondisk.NOTE, file, None, f'belongs to uid {status.st_uid} '
                f'instead of uid {self._status.st_uid}')
        if stat.S_IMODE(status.st_mode) != mode:
            self._find(
                ondisk.NOTE, file, None,
                f'has mode {stat.S_IMODE(status.st_mode):04o} instead '
                f'of {mode:04o}')

    def check_own_mode(self) -> None:
        """Report a wrong mode of the repository's own directory."""
        self.check_mode(self._status, '.', 0o700)
