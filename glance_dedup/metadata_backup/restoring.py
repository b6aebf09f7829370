# SPDX-License-Identifier: Apache-2.0

"""Restoring: makes a lost directory again, from a metadata backup (cold.rst).

The directory is no repository before the last step, so a restoring that was
killed leaves nothing that looks whole. Another one in the same directory
begins again, and fetches only those groups that are not there.

If the object store gives no object now, the restoring ends. If the store
lacks an object several times, it is lost: a group with all images that need
it, or a recipe with its image.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterator
from concurrent import futures
import contextlib
import dataclasses
import os
import secrets
import time
from typing import TypeVar

from glance_dedup import _engine
from glance_dedup.base import closing
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import imageids
from glance_dedup.base import scratch
from glance_dedup.base import signingkeys
from glance_dedup.maintenance import block_addresses
from glance_dedup.metadata_backup import backup_manifest
from glance_dedup.metadata_backup import fetching
from glance_dedup.objects import object_location
from glance_dedup.objects import object_store
from glance_dedup.repository import cold_settings
from glance_dedup.repository import features
from glance_dedup.repository import layout
from glance_dedup.repository import prefix_owners
from glance_dedup.repository import repo_parameters

#: Objects that are fetched at the same time.
_PARALLEL = 8

Progress = Callable[[int, int, str], None]
_Line = TypeVar('_Line', backup_manifest.Group, backup_manifest.Recipe)


@dataclasses.dataclass(frozen=True)
class Found:
    """Contents of a metadata backup, as far as they can be restored."""

    owner: str
    """Owner of the metadata backup."""
    live: tuple[str, ...]
    """All owners that are to be retired."""
    manifest: backup_manifest.Manifest
    """The newest one that is whole. The caller closes it."""


@dataclasses.dataclass
class Result:
    """Result of a restoring."""

    repository_id: str
    owner: str
    """The new one."""
    restored_from: str
    """The owner of the metadata backup."""
    metadata_backup: int
    """Its number."""
    taken: float
    """Time of the metadata backup, in seconds since 1970."""
    groups: int = 0
    images: int = 0
    """Recipes, with those of backups."""
    fetched_bytes: int = 0
    lost_groups: dict[int, str] = dataclasses.field(default_factory=dict)
    """Groups whose objects are gone or damaged, each with its problem."""
    lost_images: dict[str, str] = dataclasses.field(default_factory=dict)
    """Images and backups that were not restored, each with the reason."""
    lost_volumes: list[str] = dataclasses.field(default_factory=list)
    """Ids of volumes. Their journals are in no metadata backup."""


# -- metadata backups ---------------------------------------------------------

def look(store: object_store.ObjectStore,
         signing_keys: signingkeys.Keys | None, owner: str | None = None,
         number: int | None = None) -> Found:
    """Find the newest metadata backup; changes nothing.

    :param signing_keys: as for :class:`manifest.Manifest`
    :param owner: the owner; None: the one without a successor
    :param number: of the metadata backup that must be the one; None: the
        newest of all, whether it is whole or not
    :raises InvalidParameter: there is none, or several owners might be meant;
        or another metadata backup is the one that can be restored
    """
    successors = {one: _successor_of(store, one)
                  for one in prefix_owners.all_owners(store)}
    live = sorted(one for one, by in successors.items() if by is None)
    if owner is None:
        owner = _choose(store, successors)
    elif owner not in successors:
        raise exceptions.InvalidParameter(
            f'{store.location.url} has no owner {owner}; it has '
            f'{", ".join(sorted(successors)) or "none"}')
    # Listings may lag (cold.rst).
    listed = {key for _ in range(2) for key, _ in store.keys(f'{owner}/m/')}
    unusable: list[str] = []
    manifest = backup_manifest.newest_whole(store, owner, listed,
                                            signing_keys, unusable.append)
    if manifest is None:
        before = [one for one, by in successors.items() if by == owner]
        raise exceptions.InvalidParameter(
            f'{store.location.url}: owner {owner} has no metadata backup that '
            'is whole' + ''.join(f'. {text}' for text in unusable) + (
                f'. It took the place of {before[0]}: restore that one, with '
                f'--owner {before[0]}' if before else ''))
    try:
        _require_number(manifest, unusable, number)
    except BaseException:
        manifest.close()
        raise
    return Found(owner, tuple(live), manifest)


def _require_number(manifest: backup_manifest.Manifest, unusable: list[str],
                    number: int | None) -> None:
    """Refuse a metadata backup that the operator did not choose.

    Without a choice it must be the newest: a writer of the object
    store may have damaged newer ones, so that an old state comes back.
    """
    head = manifest.head
    if number is None and unusable:
        raise exceptions.InvalidParameter(
            f'{". ".join(unusable)}. The newest metadata backup that can be '
            f'restored is number {head.number}, of '
            f'{time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(head.taken))} '
            f'UTC: give --metadata-backup {head.number} if you want it')
    if number not in (None, head.number):
        raise exceptions.InvalidParameter(
            f'metadata backup {number} cannot be restored: the newest one '
            f'that can is number {head.number}, and objects of older ones are '
            'deleted')


def _successor_of(store: object_store.ObjectStore, owner: str) -> str | None:
    try:
        return prefix_owners.successor_of(store, owner)
    except exceptions.DamagedError:
        return ''       # it is retired all the same


def _choose(store: object_store.ObjectStore,
            successors: dict[str, str | None]) -> str:
    """The one owner whose place no other has taken."""
    # A restoring that died has retired one, and has not become the other.
    last = sorted(one for one, by in successors.items()
                  if by is None or by not in successors)
    if len(last) == 1:
        return last[0]
    if not successors:
        raise exceptions.InvalidParameter(
            f'nothing was ever stored at {store.location.url}, or the '
            'bucket or container was emptied')
    raise exceptions.InvalidParameter(
        f'{store.location.url} has several owners: {", ".join(last)}. Say '
        'with --owner whose metadata backup is to be restored')


# -- restoring ----------------------------------------------------------------

def restore(path: str, location: object_location.Location, credentials: str,
            signing_keys: signingkeys.Keys | None, *,
            owner: str | None = None, number: int | None = None,
            options: cold_settings.Options = cold_settings.Options(),
            group_access: bool = False,
            progress: Progress = lambda done, total, what: None) -> Result:
    """Make a repository out of the newest metadata backup.

    :param path: a directory that is missing or empty, or that an earlier call
        has begun
    :param credentials: the path of a file
    :param signing_keys: those of the repository. None: they are lost. It gets
        a new one, and nothing shows who made the metadata backup
    :param owner, number: as for :func:`look`
    :param group_access: as for :func:`layout.create`
    :raises InvalidParameter: as :func:`look`; or the directory is in use
    :raises ImageExists: the directory holds a repository
    :raises UnavailableError: the object store does not answer. Call it again
    :raises AccessDenied, NoSpaceError, StorageError, VersionError: as their
        names say
    """
    path = os.path.realpath(path)
    credentials = os.path.abspath(credentials)
    new = secrets.token_hex(16)
    keys = signing_keys or signingkeys.make()
    with (object_store.ObjectStore(location, credentials,
                                   options.allow_http) as store,
          _locked(path)):
        found = look(store, signing_keys, owner, number)
        with found.manifest as manifest:
            _begin(path, manifest, keys, group_access)
        for one in {*found.live, found.owner}:
            prefix_owners.retire(store, one, new)
        # The argument in cold.rst needs that this comes after it.
        with look(store, signing_keys, found.owner,
                  number).manifest as manifest:
            parameters = _begin(path, manifest, keys, group_access)
            restoring = _Restoring(store, path, manifest, parameters, new,
                                   progress)
            with contextlib.closing(restoring):
                restoring.run()
            settings = cold_settings.Settings(
                location, credentials, _owners(new, found.owner, manifest),
                os.stat(path).st_ino, options)
            with backup_manifest.send(
                    store, dataclasses.replace(
                        manifest.head, owner=new, number=1,
                        taken=time.time()), restoring.lines(), keys):
                pass
        # With its own backup, the new owner can be restored from now on.
        prefix_owners.claim(store, settings, parameters.repository_id)
        cold_settings.write(path, settings)
        layout.end_restoring(path)
    return restoring.result


def _begin(path: str, manifest: backup_manifest.Manifest,
           keys: signingkeys.Keys, group_access: bool
           ) -> repo_parameters.Parameters:
    parameters = manifest.head.read_parameters()
    layout.begin_restoring(path, parameters, keys, group_access)
    return parameters


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Keep other restorings out of a directory."""
    with files.os_errors(f'cannot make the directory {path}'):
        os.makedirs(path, mode=0o700, exist_ok=True)
        fd = scratch.lock_directory(path)
    if fd is None:
        raise exceptions.BusyError(
            f'another process restores a repository in {path}')
    with closing.descriptor(fd):
        yield


def _owners(new: str, old: str, manifest: backup_manifest.Manifest
            ) -> tuple[str, ...]:
    """All owners whose groups' objects are needed, the new one first."""
    found = dict.fromkeys((new, old))
    for group in manifest.groups():
        found[group.owner] = None
        if len(found) > cold_settings.MAX_OWNERS:
            raise exceptions.InvalidParameter(
                'the metadata backup names objects of more than '
                f'{cold_settings.MAX_OWNERS} owners')
    return tuple(found)


class _Restoring:
    """Restores groups and images; one thread uses it."""

    def __init__(self, store: object_store.ObjectStore, path: str,
                 manifest: backup_manifest.Manifest,
                 parameters: repo_parameters.Parameters, new: str,
                 progress: Progress) -> None:
        self._path = path
        self._manifest = manifest
        self._progress = progress
        self._groups: set[int] = set()
        self._fetcher = fetching.Fetcher(store, path, parameters)
        self._pool = futures.ThreadPoolExecutor(_PARALLEL, 'restore')
        self._handle = _engine.Repository(
            os.fsencode(path),
            repository_id=bytes.fromhex(parameters.repository_id),
            block_size=parameters.block_size,
            cut_minimum=parameters.cuts[0], cut_average=parameters.cuts[1],
            group_slots=parameters.group_slots,
            segment_size=parameters.segment_size,
            fingerprint=parameters.fingerprint,
            by_value=parameters.verify == 'bytes', codec='none',
            codec_level=0, threads=0, lock_timeout_ms=0)
        # Before the first group (N15.1).
        for feature in (features.LISTED_SEGMENTS, features.COLD):
            self._handle.use_feature(feature)
        for feature in (features.NODEDUP, features.DISKS):
            if feature in manifest.head.features:
                self._handle.use_feature(feature)
        self._engine = _engine.Maintenance(self._handle)
        head = manifest.head
        self.result = Result(parameters.repository_id, new, head.owner,
                             head.number, head.taken)

    def close(self) -> None:
        """Give up fetches under way, and close the directory's files."""
        self._pool.shutdown(cancel_futures=True)
        self._engine.close()
        self._handle.close()

    def run(self) -> None:
        """Restore all files that can be."""
        self._restore_groups()
        self._remove_others()
        self._restore_images()

    def lines(self) -> Iterator[backup_manifest.Group
                                | backup_manifest.Recipe]:
        """The lines of the metadata backup that are restored."""
        for group in self._manifest.groups():
            if group.number in self._groups:
                yield group
        for recipe in self._manifest.recipes():
            if recipe.image_id not in self.result.lost_images and (
                    imageids.of_volume(recipe.image_id) is None):
                yield recipe

    def _fetch_all(self, work: Callable[[_Line], int], lines: Iterator[_Line],
                   total: int, what: str) -> Iterator[tuple[_Line, str]]:
        """Fetch several at a time; yield each with its error, or ''."""
        waiting: collections.deque[tuple[_Line, futures.Future[int]]] = (
            collections.deque())
        done = 0
        more = True
        while more or waiting:
            line = next(lines, None)
            more = line is not None
            if line is not None:
                waiting.append((line, self._pool.submit(work, line)))
                if len(waiting) <= 2 * _PARALLEL:
                    continue
            if waiting:
                first, future = waiting.popleft()
                error = ''
                try:
                    self.result.fetched_bytes += future.result()
                except fetching.LostError as e:
                    error = str(e)
                done += 1
                self._progress(done, total, what)
                yield first, error

    # -- groups --

    def _restore_groups(self) -> None:
        again = []
        for group, error in self._fetch_all(
                self._fetcher.group, self._manifest.groups(),
                self._manifest.foot.groups, 'fetching groups'):
            if error:
                again.append(group)
            else:
                self._groups.add(group.number)
        # A lagging store may have it now.
        for group, error in self._fetch_all(
                self._fetcher.group, iter(again), len(again),
                'fetching groups once more'):
            if error:
                self.result.lost_groups[group.number] = error
            else:
                self._groups.add(group.number)
        self.result.groups = len(self._groups)

    def _remove_others(self) -> None:
        """Remove groups that an earlier call fetched for another backup."""
        directory = os.path.join(self._path, 'groups')
        wanted = {f'{number:08x}' for number in self._groups}
        with files.os_errors(f'cannot tidy {directory}'):
            for name in set(os.listdir(directory)) - wanted:
                os.unlink(os.path.join(directory, name))

    # -- images --

    def _restore_images(self) -> None:
        volumes = set()

        def images() -> Iterator[backup_manifest.Recipe]:
            for recipe in self._manifest.recipes():
                part = imageids.of_volume(recipe.image_id)
                if part is None:
                    yield recipe
                else:
                    volumes.add(part.volume_id)

        for recipe, error in self._fetch_all(
                self._fetcher.recipe, images(), self._manifest.foot.recipes,
                'fetching recipes'):
            error = error or self._missing(recipe)
            if error:
                self.result.lost_images[recipe.image_id] = error
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self._path, 'images',
                                           recipe.image_id))
            else:
                self.result.images += 1
        self.result.lost_volumes = sorted(volumes)

    def _missing(self, recipe: backup_manifest.Recipe) -> str:
        """Return what an image needs and is missing; or ''."""
        try:
            with contextlib.closing(self._engine.open_recipe(
                    recipe.image_id)) as found:
                if not found.complete:
                    return found.error or 'its recipe has no header'
                found.measure()
                header = found.header()
                if (header['image_id'], header['transaction_id'].hex()) != (
                        recipe.image_id, recipe.transaction_id):
                    return 'its recipe is that of another image'
                for runs in block_addresses.pieces(found):
                    for group in (block_addresses.groups_in(runs)
                                  - self._groups):
                        return self.result.lost_groups.get(
                            group, f'it needs group {group:08x}, which was '
                            'only on the disk when the metadata backup was '
                            'taken')
        except exceptions.UNREADABLE as e:
            return str(e)
        return ''
