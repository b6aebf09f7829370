# SPDX-License-Identifier: Apache-2.0

"""The initial files of a repository: parameters, key, and empty directories.

``repository.json`` is written last. So a directory that has it is a whole
repository, and one without it may be the rest of a creation that died.
"""

from collections.abc import Iterator
import contextlib
import os
from typing import Any

from glance_dedup.base import access
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import signingkeys
from glance_dedup.repository import features
from glance_dedup.repository import repo_parameters

PARAMETERS_FILE = 'repository.json'
#: In a directory that is being restored: the future ``repository.json``.
RESTORING_FILE = 'repository.json.restoring'
#: Files of this name, and of names that begin with it, keep room on the disk.
CATALOG_RESERVE = 'catalog-reserve'
MIN_RESERVE = 4 << 20
MAX_RESERVE = 32 << 20
VOLUMES = 'volumes'
#: Directory of cached slices of cold groups.
SLICES = 'slices'
_DIRECTORIES = ('groups', 'images', 'spool', 'locks', 'quarantine', VOLUMES,
                SLICES, features.DIRECTORY)
# Made by the first maintainer.
_CATALOG = 'catalog'
MAINTAINER_LOCK = 'locks/maintainer'
IMAGE_LOCKS = 'locks/images'
_PAGE = 4096
_LOCK_FILES = ('locks/groups', IMAGE_LOCKS)


def reserve_bytes(catalog: int) -> int:
    """Return how much room is kept for a catalog of so many bytes.

    LevelDB may write a batch, a table of it, and a part of the catalog again,
    before it removes the old one. None of these is larger than the catalog.
    Doubling steps keep the file from growing all the time.
    """
    size = MIN_RESERVE
    while size < MAX_RESERVE and size < 4 * catalog:
        size *= 2
    return size


def create(path: str | os.PathLike, *, group_access: bool = False,
           **chosen: Any) -> None:
    """Make a repository in a directory that is missing or empty.

    If a call dies in the middle, the next call completes its work.

    :param group_access: all members of the directory's group may use the
        repository; otherwise it is this user's alone
    :param chosen: as for
        :meth:`~glance_dedup.repository.repo_parameters.Parameters.choose`
    :raises InvalidParameter: for a value out of bounds, or a directory that
        holds something else
    :raises ImageExists: the directory holds a repository already
    """
    path = os.path.abspath(os.fspath(path))
    parameters = repo_parameters.Parameters.choose(**chosen)
    with files.os_errors(f'cannot create the repository {path}'):
        if not files.is_directory(path):
            os.makedirs(path, mode=0o700, exist_ok=True)
        _require_fresh(path)
        access.settle(path, group_access)
        _furnish(path, signingkeys.make())
        # Last: with it the directory is a repository.
        try:
            files.create_file(os.path.join(path, PARAMETERS_FILE),
                              parameters.to_json(), access.file_mode(path))
        except FileExistsError:
            raise exceptions.ImageExists(f'{path} is a repository already')
        files.sync_directory(path)
        # The parent may be another user's, and closed to this user.
        with contextlib.suppress(PermissionError):
            files.sync_directory(os.path.dirname(path))


def _furnish(path: str, keys: signingkeys.Keys) -> None:
    """Create missing files in a repository's directory, but its parameters.

    :param keys: its keys, unless it has some
    """
    mode = access.file_mode(path)
    for name in _DIRECTORIES:
        access.make_directory(os.path.join(path, name),
                              access.directory_mode(path))
    for name in _LOCK_FILES:
        with contextlib.suppress(FileExistsError):
            os.close(access.make_file(os.path.join(path, name), mode))
    with contextlib.suppress(FileExistsError):
        files.create_file(os.path.join(path, signingkeys.FILE), keys.pack(),
                          mode)
    for name in ('locks', ''):
        files.sync_directory(os.path.join(path, name))


def begin_restoring(path: str, parameters: repo_parameters.Parameters,
                    keys: signingkeys.Keys, group_access: bool = False
                    ) -> None:
    """Make a repository that has lost its directory, without any image.

    It is no repository before :func:`end_restoring`. What a call that died
    had made is removed, except for ``groups/``.

    :param keys: with which it signs
    :raises ImageExists: the directory holds a repository
    :raises InvalidParameter: it holds something else
    """
    with files.os_errors(f'cannot make the directory {path}'):
        if not files.is_directory(path):
            os.makedirs(path, mode=0o700, exist_ok=True)
        if is_being_restored(path):
            for name in {*os.listdir(path)} - {
                    'groups', RESTORING_FILE, 'lost+found'}:
                files.remove(os.path.join(path, name))
        else:
            _require_fresh(path)
            for name in filter(files.TEMPORARY.fullmatch, os.listdir(path)):
                os.unlink(os.path.join(path, name))
        access.settle(path, group_access)
        # First: from here on, another call may remove the new files.
        file = os.path.join(path, RESTORING_FILE)
        files.replace_file(file, parameters.to_json(), access.file_mode(path),
                           files.temporary_of(file))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(path, signingkeys.FILE))
        _furnish(path, keys)


def is_being_restored(path: str) -> bool:
    """Return whether a directory is the work of an unfinished restoring."""
    return (files.exists(os.path.join(path, RESTORING_FILE))
            and not files.exists(os.path.join(path, PARAMETERS_FILE)))


def end_restoring(path: str) -> None:
    """Make a directory a repository, durably. Its files are synced already."""
    with files.os_errors(f'cannot complete {path}'):
        for name in ('groups', 'images', ''):
            files.sync_directory(os.path.join(path, name))
        # One step: with it the directory is a repository.
        os.rename(os.path.join(path, RESTORING_FILE),
                  os.path.join(path, PARAMETERS_FILE))
        files.sync_directory(path)
        with contextlib.suppress(PermissionError):
            files.sync_directory(os.path.dirname(path))


def _require_fresh(path: str) -> None:
    ours = {signingkeys.FILE, *_DIRECTORIES, 'lost+found'}
    names = set(os.listdir(path))
    if PARAMETERS_FILE in names:
        raise exceptions.ImageExists(f'{path} is a repository already')
    if is_being_restored(path):
        raise exceptions.InvalidParameter(_unfinished(path))
    # With a new id, existing files would count as damaged.
    used = [name for name in ('groups', 'images', VOLUMES, _CATALOG)
            if name in names and os.listdir(os.path.join(path, name))]
    if used:
        if files.exists(os.path.join(path, PARAMETERS_FILE)):
            # Another process was faster, and stores already.
            raise exceptions.ImageExists(f'{path} is a repository already')
        raise exceptions.InvalidParameter(
            f'{path} is a repository that has lost its {PARAMETERS_FILE}: '
            f'{used[0]}/ is not empty. Restore the file from a backup')
    strange = sorted(n for n in names - ours
                     if not files.TEMPORARY.fullmatch(n))
    if strange:
        raise exceptions.InvalidParameter(
            f'{path} is neither empty nor a repository: it holds '
            f'{strange[0]}')


def _unfinished(path: str) -> str:
    return (f"{path} is being restored: when 'repository restore' was "
            'interrupted, start it again')


def read_parameters(path: str, allow_weak: bool = False
                    ) -> repo_parameters.Parameters:
    """The parameters of the repository at a path.

    :param allow_weak: accept the digest that only tests may choose, too
    :raises RepositoryNotFound: there is no repository
    :raises AccessDenied: it is another user's, or cannot be read
    :raises DamagedError, VersionError, StorageError: as their names say
    """
    if not files.is_directory(path):
        raise exceptions.RepositoryNotFound(
            f'there is no directory {path}: mount its file system or name the '
            "repository's directory, or make a repository there with "
            "'glance-dedup repository create'")
    with files.os_errors(f'cannot look at {path}'):
        access.require_user(path)
    file = os.path.join(path, PARAMETERS_FILE)
    if not files.exists(file):
        if is_being_restored(path):
            raise exceptions.RepositoryNotFound(_unfinished(path))
        with files.os_errors(f'cannot read {path}'):
            lost = {*_DIRECTORIES} <= {*os.listdir(path)}
        raise exceptions.RepositoryNotFound(
            f'{path} has lost its {PARAMETERS_FILE}: restore the file from a '
            'backup' if lost else
            f'{path} is not a repository: it has no {PARAMETERS_FILE}')
    with files.os_errors(f'cannot read {file}'):
        content = files.read_file(file, 65536)
    try:
        return repo_parameters.Parameters.from_json(content, file,
                                                    allow_weak)
    except exceptions.DamagedError as e:
        raise exceptions.DamagedError(
            f'{e}. Restore this one file from a backup') from e


def data_start(slots: int) -> int:
    """Return where the segments of a group's file begin.

    Behind a page of header and records are the entries: nine in each sector of
    512 bytes, and whole pages of these.

    :param slots: of the group
    """
    return _PAGE + -(-512 * -(-slots // 9) // _PAGE) * _PAGE


@contextlib.contextmanager
def image_errors(path: str) -> Iterator[None]:
    """Turn ImageNotFound into StorageError if a directory is missing.

    Glance takes ImageNotFound for a delete that succeeded earlier.

    :param path: the repository's
    """
    try:
        yield
    except exceptions.ImageNotFound as e:
        for directory in (os.path.join(path, name)
                          for name in ('images', 'spool')):
            if not files.exists(directory):
                raise exceptions.StorageError(
                    f'the directory {directory} is missing. Mount the '
                    "repository's disk, or restore the directory from a "
                    'backup') from e
        raise
