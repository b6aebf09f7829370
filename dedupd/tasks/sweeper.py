# SPDX-License-Identifier: Apache-2.0

"""Sweeping: deletes objects that are not needed any more (cold.rst).

An object goes if no file names it, and the two newest metadata backups, which
are read back for that, do not name it either. No clock decides. So it also
deletes objects that killed runs left.
"""

from concurrent import futures
import contextlib
import dataclasses
import os

from dedupd.tasks import metadata_backups
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import pacing
from glance_dedup.base import signingkeys
from glance_dedup.maintenance import maintainer_role
from glance_dedup.metadata_backup import fetching
from glance_dedup.metadata_backup import keys
from glance_dedup.objects import object_store
from glance_dedup.objects import slice_cache
from glance_dedup.repository import cold_settings
from glance_dedup.repository import prefix_owners

#: Objects that are deleted at the same time.
_PARALLEL = 8


@dataclasses.dataclass(frozen=True)
class Plan:
    """Plan of a run."""

    objects: list[tuple[str, int]]
    """Keys and sizes; manifests first."""
    kept: str | None
    """The reason why nothing may be deleted; None: it may."""

    @property
    def bytes(self) -> int:
        """Bytes of all these objects."""
        return sum(size for _, size in self.objects)


class _Kept(Exception):
    """Nothing may be deleted now."""


def plan(maintainer: maintainer_role.Maintainer, pace: pacing.Pace,
         store: object_store.ObjectStore, settings: cold_settings.Settings,
         listed: metadata_backups.Listing) -> Plan:
    """Find the objects that are not needed; change nothing.

    :param listed: all objects of this owner, listed before, and the manifests
        that were sent since
    :raises UnavailableError: the object store does not give the metadata
        backups
    """
    # The names that are read below stay so, even if the machine crashes.
    maintainer.engine.sync('images')
    maintainer.engine.sync('groups')
    maintainer.reconcile(pace.step)
    try:
        needed, least = _in_backups(
            store, settings.owner, listed, maintainer.repository.read_keys())
        needed |= _in_images(maintainer, settings.owner)
        needed |= _in_groups(maintainer, settings.owner)
        ids = _in_spool(maintainer)
    except _Kept as e:
        return Plan([], str(e))
    old, others = [], []
    for key, size, meaning in metadata_backups.parsed(settings.owner, listed):
        if isinstance(meaning, keys.Manifest):
            if meaning.number < least:
                old.append((key, size))
        elif key not in needed and (not isinstance(meaning, keys.Group)
                                    or meaning.object_id not in ids):
            others.append((key, size))
    return Plan(old + others, None)


def run(maintainer: maintainer_role.Maintainer, pace: pacing.Pace,
        store: object_store.ObjectStore, settings: cold_settings.Settings,
        listed: metadata_backups.Listing) -> Plan:
    """Delete the objects that :func:`plan` finds; return the plan.

    :raises pacing.Stopped: between two objects
    :raises UnavailableError: the object store does not do its part
    :raises InvalidParameter: another directory has taken this one's place
    """
    found = plan(maintainer, pace, store, settings, listed)
    if not found.objects:
        return found
    # The two metadata backups were read back before. So a later restore finds
    # them, and needs only the objects that they name.
    prefix_owners.require_claim(maintainer.repository, settings, store)
    maintainer.confirm()
    with futures.ThreadPoolExecutor(_PARALLEL, 'sweep') as pool:
        total = len(found.objects)
        for first in range(0, total, _PARALLEL):
            pace.step(first, total, 'deleting objects')
            # Old manifests go before the objects that they name.
            list(pool.map(store.delete, [
                key for key, _ in found.objects[first:first + _PARALLEL]]))
    pace.step(total, total, 'deleting objects')
    return found


def _in_backups(store: object_store.ObjectStore, owner: str,
                listed: metadata_backups.Listing,
                signing_keys: signingkeys.Keys) -> tuple[set[str], int]:
    """Keys that the two newest metadata backups name, and the lower number."""
    found = metadata_backups.newest_two(
        store, owner, [key for key, _ in listed], signing_keys)
    needed: set[str] = set()
    with contextlib.ExitStack() as stack:
        for manifest in found.manifests:
            stack.enter_context(manifest)
        if not found.are_two:
            raise _Kept('there are no two whole metadata backups yet')
        for manifest in found.manifests:
            for lines in manifest.groups(), manifest.recipes():
                needed.update(line.key for line in lines
                              if line.owner == owner)
    return needed, found.least


def _in_images(maintainer: maintainer_role.Maintainer, owner: str
               ) -> set[str]:
    """Keys of the recipes of all images."""
    txids = maintainer.recipes.txids(maintainer.catalog)
    reasons = maintainer.unreadable.reasons()
    if reasons:
        name, error = min(reasons.items())
        raise _Kept(f'{name} cannot be read, and its object may be needed: '
                    f'{error}')
    return {keys.of_recipe(owner, image_id, txid.hex())
            for txid, image_id in txids.items()}


def _in_groups(maintainer: maintainer_role.Maintainer, owner: str
               ) -> set[str]:
    """Keys of the objects of all cold groups."""
    found = set()
    for number in maintainer.engine.groups():
        try:
            facts = maintainer.engine.group_facts(number)
        except exceptions.ImageNotFound:
            continue
        except exceptions.UNREADABLE as e:
            raise _Kept(f'the object of a group may be needed: {e}') from e
        if facts['is_cold']:
            found.add(slice_cache.key_of(owner, number, facts['object']))
    return found


def _in_spool(maintainer: maintainer_role.Maintainer) -> set[str]:
    """The ids of objects that files in the spool name."""
    found = set()
    for name in maintainer.engine.spool():
        if not name.startswith('G-'):
            continue
        path = os.path.join(maintainer.repository.path, 'spool', name)
        try:
            with files.os_errors(f'cannot read {path}'):
                named = fetching.object_named(
                    files.read_file(path, fetching.HEADER_BYTES))
        except exceptions.ImageNotFound:
            continue
        except exceptions.UNREADABLE as e:
            raise _Kept(f'an object may be needed: {e}') from e
        if named is not None:
            found.add(named)
    return found
