# SPDX-License-Identifier: Apache-2.0

"""Owner of a prefix of an object store: the directory that may write there.

A repository's directory that is attached to an object store is an *owner*
there. Below the prefix there are

* ``owners/<owner>.json``, which names the repository of an owner. So two
  repositories under one prefix notice each other;
* ``retired/<owner>``, if another directory has taken the owner's place; it
  names that one. The owner then writes and deletes nothing any more.

A copy of the directory would be a second directory with the same owner, and
each would delete the other's objects. So ``cold.json`` has the directory's
inode number, which a copy does not have.
"""

import contextlib
import dataclasses
import os
import secrets
import time
from typing import Any

from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import hexids
from glance_dedup.objects import object_location
from glance_dedup.objects import object_store
from glance_dedup.objects import slice_cache
from glance_dedup.repository import cold_settings
from glance_dedup.repository import features
from glance_dedup.repository import image_repository

_KIND = 'glance-dedup owner of objects'
_RETIRED = 'glance-dedup retired owner'
_MAX_SIZE = 1 << 16


def attach(repo: image_repository.Repository,
           location: object_location.Location, credentials: str,
           options: cold_settings.Options = cold_settings.Options()
           ) -> cold_settings.Settings:
    """Have a repository's groups move to a place of an object store.

    If it is attached to this place already, only the credentials and the
    options change.

    :param credentials: the path of a file
    :raises InvalidParameter: another owner writes there; or cold groups'
        objects are at another place
    :raises BusyError: another process maintains the repository
    :raises UnavailableError, AccessDenied: as their names say
    """
    before = cold_settings.read(repo.path)
    settings = cold_settings.Settings(
        location, os.path.abspath(credentials), (secrets.token_hex(16),),
        os.stat(repo.path).st_ino, options)
    if before is None or before.inode != settings.inode or (
            before.location.url != location.url):
        _attach_anew(repo, before, settings)
    else:
        settings = dataclasses.replace(settings, owners=before.owners)
        with cold_settings.connect(settings) as store:
            require_claim(repo, settings, store)
        cold_settings.write(repo.path, settings)
    return settings


def _attach_anew(repo: image_repository.Repository,
                 before: cold_settings.Settings | None,
                 settings: cold_settings.Settings
                 ) -> None:
    with contextlib.closing(
            _engine.Maintenance(repo.handle())) as maintenance:
        if not maintenance.lock():
            raise exceptions.BusyError(
                f'{repo.path} has a maintainer at work: stop dedupd first')
        if before is not None and _has_cold(maintenance):
            raise exceptions.InvalidParameter(
                f'{repo.path} has cold groups at {before.location.url}, '
                'written by this directory or by one of which it is a copy. '
                'If it was moved here, and the other one is gone, use --moved')
        with cold_settings.connect(settings) as store:
            claim(store, settings, repo.repository_id)
        repo.handle().use_feature(features.COLD)
        cold_settings.write(repo.path, settings)


def move(repo: image_repository.Repository,
         location: object_location.Location, credentials: str,
         options: cold_settings.Options = cold_settings.Options()
         ) -> cold_settings.Settings:
    """Attach a directory that was moved to another disk.

    It becomes a new owner, and the old one is retired, so that a copy that
    was forgotten deletes nothing. The objects of its cold groups stay where
    they are.

    :raises InvalidParameter: it was not moved, or is not attached to this
        place; or an object is gone, so it is an old copy
    :raises BusyError, UnavailableError, AccessDenied: as :func:`attach`
    """
    before = cold_settings.require(repo.path)
    if before.location.url != location.url:
        raise exceptions.InvalidParameter(
            f'{repo.path} is attached to {before.location.url}: give this URL')
    inode = os.stat(repo.path).st_ino
    if before.inode == inode:
        raise exceptions.InvalidParameter(
            f'{repo.path} is the directory that was attached: it needs no '
            '--moved')
    # A call that died has chosen the new owner already.
    known = (before.owners if before.inode == -inode
             else (secrets.token_hex(16), *before.owners))
    settings = cold_settings.Settings(
        location, os.path.abspath(credentials),
        known[:cold_settings.MAX_OWNERS], inode, options)
    with contextlib.closing(
            _engine.Maintenance(repo.handle())) as maintenance:
        if not maintenance.lock():
            raise exceptions.BusyError(
                f'{repo.path} has a maintainer at work: stop dedupd first')
        with cold_settings.connect(settings) as store:
            _move(repo, maintenance, settings, store)
    return settings


def _move(repo: image_repository.Repository,
          maintenance: _engine.Maintenance, settings: cold_settings.Settings,
          store: object_store.ObjectStore) -> None:
    new, old = settings.owners[:2]
    if successor_of(store, old) not in (None, new):
        raise exceptions.InvalidParameter(
            f'another directory has taken the place of {repo.path} at '
            f'{settings.location.url}: use that one')
    _require_objects(repo, maintenance, settings, store)
    # This inode is no directory's: no process may write objects yet.
    cold_settings.write(repo.path, dataclasses.replace(
        settings, inode=-settings.inode))
    retire(store, old, new)
    # All deletions until now are seen here.
    _require_objects(repo, maintenance, settings, store)
    claim(store, settings, repo.repository_id)
    cold_settings.write(repo.path, settings)


def _require_objects(repo: image_repository.Repository,
                     maintenance: _engine.Maintenance,
                     settings: cold_settings.Settings,
                     store: object_store.ObjectStore) -> None:
    """Make sure that the objects of all cold groups are there."""
    there = {key.removeprefix(f'{owner}/') for owner in settings.owners
             for key, _ in store.keys(f'{owner}/g/')}
    for number in maintenance.groups():
        facts = maintenance.group_facts(number)
        if facts['is_cold']:
            key = slice_cache.key_of('', number, facts['object'])
            if key.removeprefix('/') not in there:
                raise exceptions.InvalidParameter(
                    f'the object of group {number:08x} of {repo.path} is not '
                    f'at {settings.location.url} any more: the directory is '
                    'an old copy. Restore another one, with '
                    "'glance-dedup repository restore'")


def _has_cold(maintenance: _engine.Maintenance) -> bool:
    for number in maintenance.groups():
        try:
            if maintenance.group_facts(number)['is_cold']:
                return True
        except exceptions.ImageNotFound:
            pass
    return False


# -- objects ------------------------------------------------------------------

def owner_key(owner: str) -> str:
    """Return the key of the object that names the repository of an owner."""
    return f'owners/{owner}.json'


def retired_key(owner: str) -> str:
    """The key of the object that marks an owner as replaced."""
    return f'retired/{owner}'


def retire(store: object_store.ObjectStore, owner: str, successor: str
           ) -> None:
    """Have an owner write and delete nothing any more.

    What it has begun when this returns, it ends: it may delete objects that
    neither its files nor its two newest metadata backups name.

    :param successor: the owner that takes its place
    """
    put_bytes(store, retired_key(owner), files.pack_json(
        _RETIRED, owner=owner, successor=successor))
    if not is_retired(store, owner):
        raise exceptions.UnavailableError(
            f'{store.location.url}: {retired_key(owner)} was stored, and '
            'cannot be seen')


def successor_of(store: object_store.ObjectStore, owner: str) -> str | None:
    """The owner that was to take an owner's place; None: it is not retired.

    :raises DamagedError: the object is none that :func:`retire` writes
    """
    key = retired_key(owner)
    try:
        size = min(store.size(key), _MAX_SIZE)
        content = store.get(key, 0, size) if size else b''
    except object_store.ObjectNotFound:
        return None
    try:
        found = files.unpack_json(content, _RETIRED, _MAX_SIZE)['successor']
        if not hexids.is_valid(found):
            raise ValueError('it names no owner')
        return found
    except (ValueError, KeyError, TypeError, AttributeError,
            RecursionError) as e:
        raise exceptions.DamagedError(
            f'{store.location.url}: {key} is damaged: {e}') from e


def put_bytes(store: object_store.ObjectStore, key: str, content: bytes
              ) -> None:
    """Store a small object."""
    # The client libraries get the length of files by fstat.
    fd = os.memfd_create('object', os.MFD_CLOEXEC)
    with os.fdopen(fd, 'w+b') as file:
        file.write(content)
        file.flush()
        store.put(key, file)


def claim(store: object_store.ObjectStore, settings: cold_settings.Settings,
          repository_id: str) -> None:
    """Become an owner under the prefix.

    :param settings: their first owner is new; the others may be there
    :raises InvalidParameter: others write there
    """
    _require_alone(store, settings, repository_id)
    content = files.pack_json(
        _KIND, repository_id=repository_id, owner=settings.owner,
        claimed=time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime()))
    put_bytes(store, owner_key(settings.owner), content)
    try:
        # Two that claim at the same time both see both.
        _require_alone(store, settings, repository_id)
    except exceptions.InvalidParameter:
        store.delete(owner_key(settings.owner))
        raise
    _read_owner(store, settings.owner)


def all_owners(store: object_store.ObjectStore) -> list[str]:
    """The owners that are under the prefix."""
    found = []
    for key, _ in store.keys('owners/'):
        owner = key.removeprefix('owners/').removesuffix('.json')
        if hexids.is_valid(owner) and key == owner_key(owner):
            found.append(owner)
    return found


def repository_of(store: object_store.ObjectStore, owner: str) -> str:
    """The id of the repository that an owner is of.

    :raises DamagedError: the object is none that an owner writes
    """
    return _read_owner(store, owner)['repository_id']


def _read_owner(store: object_store.ObjectStore, owner: str
                ) -> dict[str, Any]:
    key = owner_key(owner)
    content = store.get(key, 0, min(store.size(key), _MAX_SIZE))
    try:
        fields = files.unpack_json(content, _KIND, _MAX_SIZE)
        if fields['owner'] != owner or not hexids.is_valid(
                fields['repository_id']):
            raise ValueError('it is of another owner')
        return fields
    except (ValueError, KeyError, TypeError, AttributeError,
            RecursionError) as e:
        raise exceptions.DamagedError(
            f'{store.location.url}: {key} is damaged: {e}') from e


def _require_alone(store: object_store.ObjectStore,
                   settings: cold_settings.Settings,
                   repository_id: str) -> None:
    for owner in all_owners(store):
        if owner in settings.owners:
            continue
        try:
            other = repository_of(store, owner)
        except object_store.ObjectNotFound:
            continue        # it gave up
        except exceptions.DamagedError:
            if is_retired(store, owner):
                continue
            raise
        if other != repository_id:
            raise exceptions.InvalidParameter(
                f'{store.location.url} belongs to another repository, '
                f'{other}: choose another prefix')
        if not is_retired(store, owner):
            raise exceptions.InvalidParameter(
                f'another directory of this repository wrote to '
                f'{store.location.url}, as owner {owner}: choose another '
                'prefix, or restore that directory with '
                "'glance-dedup repository restore'")


def is_retired(store: object_store.ObjectStore, owner: str) -> bool:
    """Return whether another directory has taken an owner's place."""
    return object_store.find(store, retired_key(owner)) is not None


def owner_of(store: object_store.ObjectStore, among: tuple[str, ...],
             number: int, object_id: bytes) -> str | None:
    """Return the owner of a cold group's object; None: it cannot be seen.

    :param among: the owners whose keys are tried, in turn
    """
    for owner in among:
        key = slice_cache.key_of(owner, number, object_id)
        if object_store.find(store, key) is not None:
            return owner
    return None


def require_claim(repo: image_repository.Repository,
                  settings: cold_settings.Settings,
                  store: object_store.ObjectStore) -> None:
    """Make sure that this directory may write as its owner.

    :raises InvalidParameter: it may not; with the reason
    """
    if os.stat(repo.path).st_ino != settings.inode:
        raise exceptions.InvalidParameter(
            f'{repo.path} is a copy of the directory that was attached to '
            f'{settings.location.url}: if it was moved here, and the other '
            "one is gone, use 'glance-dedup object-store attach --moved'; "
            'else delete this copy')
    try:
        found = repository_of(store, settings.owner)
    except object_store.ObjectNotFound as e:
        raise exceptions.UnavailableError(
            f'{settings.location.url} has no {owner_key(settings.owner)}: '
            'the bucket or container was emptied, or is another one') from e
    if found != repo.repository_id:
        raise exceptions.InvalidParameter(
            f'{settings.location.url}: owner {settings.owner} is of another '
            f'repository, {found}')
    if is_retired(store, settings.owner):
        raise exceptions.InvalidParameter(
            f'{repo.path} was restored to another directory, which has taken '
            f'its place at {settings.location.url}. Nothing more is sent or '
            'deleted here: use the other directory')
