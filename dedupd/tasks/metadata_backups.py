# SPDX-License-Identifier: Apache-2.0

"""Metadata backups: sends the data for making the directory again (cold.rst).

A metadata backup names the cold groups with their objects, and the images with
the objects of their recipes. Recipes that the backup before does not have are
sent first, then the manifest, which is read back. A run that is killed leaves
recipes; the next run finds them, and does not send them again.

Uploads and deletions go on meanwhile. Nothing is freed, merged or rewritten,
because the maintainer takes the backup.
"""

import collections
from collections.abc import Iterator
from concurrent import futures
import contextlib
import dataclasses
import hashlib
import io
import os
import tempfile
import time
from typing import BinaryIO
from typing import cast

from glance_dedup.base import access
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import pacing
from glance_dedup.base import signingkeys
from glance_dedup.maintenance import maintainer_role
from glance_dedup.metadata_backup import backup_manifest
from glance_dedup.metadata_backup import fetching
from glance_dedup.metadata_backup import keys
from glance_dedup.objects import object_store
from glance_dedup.repository import cold_settings
from glance_dedup.repository import prefix_owners

#: Recipes that are sent at the same time.
_PARALLEL = 8
#: The most tries to read a recipe that changes meanwhile.
_TRIES = 8

#: Keys and sizes of all objects of an owner.
Listing = list[tuple[str, int]]
# A recipe's line, and the request that sends its object, if any.
_Begun = tuple[backup_manifest.Recipe, futures.Future[int] | None]


@dataclasses.dataclass
class Result:
    """Result of a run."""

    metadata_backup: int = 0
    """The number of the new metadata backup; 0: none was needed."""
    images: int = 0
    """Recipes that the new metadata backup names."""
    sent_recipes: int = 0
    """Of these, those that were sent."""
    key: str = ''
    """The key of its manifest."""


def take(maintainer: maintainer_role.Maintainer, pace: pacing.Pace,
         store: object_store.ObjectStore, settings: cold_settings.Settings,
         listed: Listing, always: bool = False) -> Result:
    """Take a metadata backup, if anything has changed, or `always`.

    To make sure that two backups name the same objects, one is also taken if
    the two newest ones do not, or if one of them is damaged. Without cold
    groups, and backups, there is nothing to restore, so none is taken.

    :param listed: all objects of this owner, listed before
    :raises pacing.Stopped: between two recipes
    :raises UnavailableError: the object store does not do its part
    :raises InvalidParameter: another directory has taken this one's place
    """
    # The names in the metadata backup stay so, even if the machine crashes.
    maintainer.engine.sync('images')
    maintainer.engine.sync('groups')
    maintainer.reconcile(pace.step)
    with contextlib.ExitStack() as stack:
        signing_keys = maintainer.repository.read_keys()
        found = newest_two(store, settings.owner, [key for key, _ in listed],
                           signing_keys)
        for manifest in found.manifests:
            stack.enter_context(manifest)
        pool = stack.enter_context(futures.ThreadPoolExecutor(
            _PARALLEL, 'metadata-backup'))
        stack.callback(pool.shutdown, cancel_futures=True)
        backup = _Backup(maintainer, pace, store, settings, listed, pool)
        return backup.take(found, signing_keys, always)


# -- the newest ones ----------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Newest:
    """The manifests that have one of the two highest numbers."""

    number: int
    """The highest number; 0: there is none."""
    manifests: list[backup_manifest.Manifest]
    """Whole manifests, newest first. The caller closes them."""
    are_two: bool
    """True if there are two numbers, and all of them are whole."""
    least: int
    """The lower one of the two numbers."""

    @property
    def are_same(self) -> bool:
        """Return whether there are two, and all name the same objects.

        Those made with a key that will be accepted no more do not count.
        """
        return (self.are_two
                and all(one.has_current_key for one in self.manifests)
                and len({one.foot.content for one in self.manifests}) == 1)


def newest_two(store: object_store.ObjectStore, owner: str,
               listed: list[str], signing_keys: signingkeys.Keys) -> Newest:
    """Read the two newest manifests of an owner back.

    :param listed: keys of the owner's objects, at least of all manifests
    :raises UnavailableError: the object store does not give them
    """
    all_of_them = backup_manifest.newest_first(owner, set(listed))
    numbers = sorted({key.number for key in all_of_them}, reverse=True)[:2]
    wanted = [key for key in all_of_them if key.number in numbers]
    manifests: list[backup_manifest.Manifest] = []
    try:
        for key in wanted:
            with contextlib.suppress(exceptions.DamagedError,
                                     object_store.ObjectNotFound):
                manifests.append(backup_manifest.Manifest(
                    store, key.key, signing_keys))
    except BaseException:
        for manifest in manifests:
            manifest.close()
        raise
    return Newest(max(numbers, default=0), manifests,
                  len(numbers) == 2 and len(manifests) == len(wanted),
                  min(numbers, default=0))


# -- a new one ----------------------------------------------------------------

class _Backup:
    def __init__(self, maintainer: maintainer_role.Maintainer,
                 pace: pacing.Pace, store: object_store.ObjectStore,
                 settings: cold_settings.Settings, listed: Listing,
                 pool: futures.ThreadPoolExecutor) -> None:
        self._maintainer = maintainer
        self._pace = pace
        self._store = store
        self._fetcher = fetching.Fetcher(
            store, maintainer.repository.path,
            maintainer.repository.parameters)
        self._settings = settings
        self._sent = {key for key, _ in listed
                      if key.startswith(f'{settings.owner}/r/')}
        self._pool = pool
        self._result = Result()

    def take(self, found: Newest, signing_keys: signingkeys.Keys,
             always: bool) -> Result:
        repo, result = self._maintainer.repository, self._result
        head = backup_manifest.Head(
            self._settings.owner, found.number + 1, time.time(),
            repo.parameters.to_json().decode(), tuple(repo.features))
        before = found.manifests[0] if found.manifests else None
        with tempfile.TemporaryFile() as unnamed:
            file = cast(BinaryIO, unnamed)
            writer = backup_manifest.Writer(file, head, signing_keys)
            cold_groups = 0
            for cold_groups, group in enumerate(self._groups(before), 1):
                writer.add(group)
            if not (cold_groups or found.number or always):
                return result       # nothing could be restored
            for recipe in self._recipes(before):
                writer.add(recipe)
            foot = writer.finish()
            file.flush()
            if not (always or _is_needed(found, foot)):
                return result
            self._maintainer.confirm()
            prefix_owners.require_claim(repo, self._settings, self._store)
            self._pace.step(self._pace.done, self._pace.total,
                            'sending the metadata backup',
                            os.fstat(file.fileno()).st_size)
            with backup_manifest.send_file(
                    self._store, head, file, foot,
                    signing_keys) as manifest:
                result.metadata_backup, result.key = head.number, manifest.key
        result.images = foot.recipes
        return result

    # -- groups --

    def _groups(self, before: backup_manifest.Manifest | None
                ) -> Iterator[backup_manifest.Group]:
        """The cold groups.

        Of one whose file cannot be read, or was lost, the line of the backup
        before stays: its object may be all that is left. One whose object is
        another one now is left out.
        """
        engine = self._maintainer.engine
        numbers = engine.groups()
        there = set(numbers)
        unread: set[int] = set()

        def now() -> Iterator[backup_manifest.Group]:
            for number in numbers:
                try:
                    facts = engine.group_facts(number)
                except (exceptions.ImageNotFound, *exceptions.UNREADABLE):
                    unread.add(number)
                    continue
                if facts['is_cold']:
                    yield backup_manifest.Group(
                        number, facts['object'].hex(), facts['end'],
                        self._settings.owner, '')

        for was, new in backup_manifest.merged(
                before.groups() if before else iter(()), now()):
            if new is None:
                assert was is not None
                if was.number in unread or (
                        was.number not in there and self._is_lost(was.number)):
                    yield was
            elif was is not None and was.object_id == new.object_id:
                yield was       # the file has the object's owner
            else:
                yield from self._verified(
                    new._replace(owner=self._owner_of(new)))

    def _verified(self, group: backup_manifest.Group
                  ) -> Iterator[backup_manifest.Group]:
        """The line of a new object, with its digest; none if it is not there.

        Another object in its place is as bad. Objects that files name stay, so
        nothing is deleted for this.
        """
        try:
            yield group._replace(digest=self._fetcher.digest(group))
        except (exceptions.DamagedError, object_store.ObjectNotFound) as e:
            self._warn(f'group {group.number:08x} is not in the metadata '
                       f'backup: {e}')

    def _is_lost(self, number: int) -> bool:
        """Return whether images need a group that has no file."""
        return any(self._maintainer.catalog.counts(number))

    def _owner_of(self, group: backup_manifest.Group) -> str:
        """The owner of a group's object."""
        settings = self._settings
        return (len(settings.owners) > 1 and prefix_owners.owner_of(
            self._store, settings.owners, group.number,
            bytes.fromhex(group.object_id))) or settings.owner

    # -- recipes --

    def _recipes(self, before: backup_manifest.Manifest | None
                 ) -> Iterator[backup_manifest.Recipe]:
        """The recipes, once their objects are there.

        Several are sent at the same time.
        """
        waiting: collections.deque[_Begun] = collections.deque()
        for line, sending in self._begin_recipes(before):
            waiting.append((line, sending))
            while waiting and (len(waiting) > 2 * _PARALLEL
                               or waiting[0][1] is None):
                yield self._ended(*waiting.popleft())
        while waiting:
            yield self._ended(*waiting.popleft())

    def _ended(self, line: backup_manifest.Recipe,
               sending: futures.Future[int] | None
               ) -> backup_manifest.Recipe:
        if sending is not None:
            sending.result()
            self._result.sent_recipes += 1
        return line

    def _begin_recipes(self, before: backup_manifest.Manifest | None
                       ) -> Iterator[_Begun]:
        maintainer = self._maintainer
        known = {image_id: txid.hex() for txid, image_id in
                 maintainer.recipes.txids(maintainer.catalog).items()}
        # Of one that cannot be read, or was lost, the line of the backup
        # before stays.
        doubtful = {*maintainer.unreadable.images(),
                    *maintainer.unreadable.lost.values()}
        names = sorted({*known, *doubtful})
        done = 0

        def now() -> Iterator[backup_manifest.Recipe]:
            for name in names:
                yield backup_manifest.Recipe(
                    name, known.get(name, ''), 0, self._settings.owner, '')

        for was, new in backup_manifest.merged(
                before.recipes() if before else iter(()), now()):
            if new is None:
                continue        # it was deleted
            done += 1
            if was is not None and (
                    new.transaction_id in ('', was.transaction_id)):
                yield was, None
                continue
            self._pace.step(done, len(names), 'sending recipes')
            if new.transaction_id:
                yield from self._begin(new, was)

    def _begin(self, new: backup_manifest.Recipe,
               was: backup_manifest.Recipe | None) -> Iterator[_Begun]:
        """Begin to send a recipe; nothing, if its image was deleted."""
        try:
            line, file = self._open(new)
        except exceptions.ImageNotFound:
            return
        except exceptions.UNREADABLE as e:
            self._warn(f'image {new.image_id} is not in the metadata backup: '
                       f'{e}')
            if was is not None:
                yield was, None
            return
        yield line, self._pool.submit(self._put, line, file)

    def _warn(self, text: str) -> None:
        if text not in self._maintainer.warnings:
            self._maintainer.warnings.append(text)

    def _open(self, recipe: backup_manifest.Recipe
              ) -> tuple[backup_manifest.Recipe, BinaryIO]:
        """The file of a whole recipe, and its line.

        :raises ImageNotFound: it was deleted
        """
        path = os.path.join(self._maintainer.repository.path, 'images',
                            recipe.image_id)
        for _ in range(_TRIES):
            with contextlib.closing(self._maintainer.engine.open_recipe(
                    recipe.image_id)) as found:
                if not found.complete:
                    raise exceptions.DamagedError(
                        found.error or f'{found.name} has no header')
                found.measure()
                header = found.header()
                try:
                    file = open(access.open_file(
                        path, os.O_RDONLY | os.O_NOFOLLOW), 'rb')
                except OSError as e:
                    if not isinstance(e, FileNotFoundError):
                        raise exceptions.StorageError(
                            f'cannot open {path}: {e.strerror}') from e
                    continue
                status = os.fstat(file.fileno())
                if status.st_ino == found.inode:
                    return recipe._replace(
                        transaction_id=header['transaction_id'].hex(),
                        length=status.st_size,
                        digest=_digest(file)), cast(BinaryIO, file)
                file.close()    # the image was stored again meanwhile
        raise exceptions.ImageNotFound(f'{path} comes and goes')

    def _put(self, line: backup_manifest.Recipe, file: BinaryIO) -> int:
        with file:
            if line.key in self._sent:
                # An interrupted run sent it, unless the listing lags.
                if object_store.find(self._store, line.key) == line.length:
                    return 0
            return self._store.put(line.key, file)


def _digest(file: BinaryIO) -> str:
    """Return the SHA-256 of a recipe's file, and go back to its beginning."""
    with files.os_errors(f'cannot read {file.name}'):
        found = hashlib.file_digest(
            cast(io.BufferedReader, file), 'sha256').hexdigest()
        file.seek(0)
    return found


def _is_needed(found: Newest, foot: backup_manifest.Foot) -> bool:
    return not found.are_same or found.manifests[0].foot.content != (
        foot.content)


def parsed(owner: str, listed: Listing
           ) -> Iterator[tuple[str, int, keys.Manifest | keys.Group
                               | keys.Recipe]]:
    """Yield the objects of an owner that programs of ours made.

    Each is its key, size, and the key's meaning.
    """
    for key, size in listed:
        meaning = keys.parse(owner, key)
        if meaning is not None:
            yield key, size, meaning
