# SPDX-License-Identifier: Apache-2.0

"""The place of the objects of a repository's cold groups: ``cold.json``.

A repository that is *attached* to an object store has an *owner*: an id under
which its directory writes objects
(:mod:`glance_dedup.repository.prefix_owners`).
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import os
from typing import Any

from glance_dedup.base import access
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import hexids
from glance_dedup.objects import object_location
from glance_dedup.objects import object_store
from glance_dedup.objects import slice_cache
from glance_dedup.repository import layout
from glance_dedup.repository import repo_parameters

#: MiB of slices in the cache, unless the operator sets another limit.
CACHE_MIB = 1024
#: The most of them.
MAX_CACHE_MIB = 1 << 20
#: Seconds that a read waits at most, unless the operator sets another limit,
#: and the most of them.
READ_LIMIT, MAX_READ_LIMIT = 60, 3600
#: The most owners that one directory reads objects of.
MAX_OWNERS = 64

_FILE = 'cold.json'
_KIND = 'glance-dedup object store'
_MAX_SIZE = 1 << 16


@dataclasses.dataclass(frozen=True)
class Options:
    """The operator's choices for an attached repository.

    :raises InvalidParameter: a number is out of range
    """

    cache_mib: int = CACHE_MIB
    """MiB of slices that each host keeps."""
    allow_http: bool = False
    """True if Keystone's catalogue may name an ``http`` URL of Swift."""
    read_limit: int = READ_LIMIT
    """Seconds that a read waits for the object store at most."""

    def __post_init__(self) -> None:
        repo_parameters.require_range('cache_mib', self.cache_mib, 1,
                                      MAX_CACHE_MIB)
        repo_parameters.require_range('read_limit', self.read_limit, 1,
                                      MAX_READ_LIMIT)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The object store to which a repository is attached."""

    location: object_location.Location
    credentials: str
    """The absolute path of the file with the credentials, on every host."""
    owners: tuple[str, ...]
    """The first one is this directory's own. Objects of the others are only
    read: the directory was restored from them."""
    inode: int
    """Inode number of the directory when it was attached."""
    options: Options = Options()

    @property
    def owner(self) -> str:
        """Under which this directory writes."""
        return self.owners[0]


def read(path: str) -> Settings | None:
    """Return the settings of ``cold.json``; None: there is none.

    :param path: the repository's directory
    :raises DamagedError, StorageError, AccessDenied: as their names say
    """
    file = os.path.join(path, _FILE)
    if not files.exists(file):
        return None
    try:
        with files.os_errors(f'cannot read {file}'):
            content = files.read_file(file, _MAX_SIZE + 1)
        return _parse(files.unpack_json(content, _KIND, _MAX_SIZE))
    except (ValueError, KeyError, TypeError, AttributeError,
            RecursionError) as e:
        raise exceptions.DamagedError(
            f'{file} is damaged ({e}). Restore it from a backup. Only if no '
            'group is cold: remove the file, and attach the repository again, '
            'with another prefix: glance-dedup object-store attach') from e


def _parse(fields: dict[str, Any]) -> Settings:
    owners = tuple(fields['owners'])
    location = object_location.from_fields(fields['location'])
    credentials, inode = fields['credentials'], fields['inode']
    allow_http = fields.get('allow_http', False)
    if not 1 <= len(owners) <= MAX_OWNERS or not all(
            map(hexids.is_valid, owners)):
        raise ValueError('its owners are none')
    if not isinstance(credentials, str) or not os.path.isabs(credentials) or (
            type(inode) is not int or type(allow_http) is not bool):
        raise ValueError('its fields are not of their types')
    return Settings(location, credentials, owners, inode, Options(
        fields['cache_mib'], allow_http,
        fields.get('read_limit', READ_LIMIT)))


def write(path: str, settings: Settings) -> None:
    """Write ``cold.json``, durably."""
    file = os.path.join(path, _FILE)
    fields = dataclasses.asdict(settings)
    fields |= fields.pop('options')
    with files.os_errors(f'cannot write {file}'):
        files.replace_file(file, files.pack_json(_KIND, **fields),
                           access.file_mode(path), files.temporary_of(file))


def require(path: str) -> Settings:
    """Read as :func:`read`, but raise if the repository is not attached.

    :raises UnavailableError: the repository is not attached
    """
    settings = read(path)
    if settings is None:
        raise exceptions.UnavailableError(
            f'{path} is attached to no object store: use '
            "'glance-dedup object-store attach'")
    return settings


def wanted_room(free_bytes: int, kept: int,
                parameters: repo_parameters.Parameters) -> int:
    """Return how much is to be free on the disk; if less is, groups move.

    :param free_bytes: the free space to keep; 0: nothing moves for this
    :param kept: the space that storing leaves free. A group that moves needs
        as much as it has, so one is to move before storing is refused
    """
    if not free_bytes:
        return 0
    return max(free_bytes,
               kept + parameters.group_slots * parameters.block_size)


def connect(settings: Settings) -> object_store.ObjectStore:
    """Return the object store; it gets no request yet.

    :raises AccessDenied: the credentials cannot be used
    """
    return object_store.ObjectStore(settings.location, settings.credentials,
                                    settings.options.allow_http)


@contextlib.contextmanager
def _unavailable() -> Iterator[None]:
    """Raise UnavailableError for a fault of the file or the credentials.

    Such a fault says nothing of the blocks that are to be read.
    """
    try:
        yield
    except (exceptions.DamagedError, exceptions.StorageError,
            exceptions.AccessDenied) as e:
        raise exceptions.UnavailableError(str(e)) from e


def open_slices(path: str, ask: slice_cache.Ask | None,
                memory: str | None = None) -> slice_cache.Slices:
    """Return the cache of slices of a repository's cold groups.

    ``cold.json`` is read when the first one is needed.

    :param path: the repository's directory
    :param ask: requests slices of dedupd; None: dedupd gets no request
    :param memory: as for :class:`slices.Slices`
    :raises AccessDenied, StorageError: the directory of slices
        is missing, and cannot be made
    """
    def source() -> slice_cache.Source:
        with _unavailable():
            settings = require(path)
        return slice_cache.Source(
            settings.location.url,
            _unavailable()(functools.partial(connect, settings)),
            settings.owners, settings.options.cache_mib << 20,
            settings.options.read_limit)

    # The engine follows no symbolic link, and `path` may be one.
    directory = os.path.join(os.path.realpath(path), layout.SLICES)
    if not files.is_directory(directory):
        # A cache, which may be removed; other processes may make it now. On a
        # full disk it is made when there is room for a slice.
        with (contextlib.suppress(exceptions.NoSpaceError),
              files.os_errors(f'cannot make {directory}')):
            access.make_directory(directory, access.directory_mode(path))
    with files.os_errors(f'cannot look at {path}'):
        mode = access.file_mode(path)
    return slice_cache.Slices(directory, source, mode, ask, memory)
