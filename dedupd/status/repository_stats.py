# SPDX-License-Identifier: Apache-2.0

"""Figures of the repository's content.

The catalog has the counted part. The rest comes from directories and recipes,
and so does everything if another process is the maintainer. Nothing here waits
for a running task.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import os
import shutil
import threading
import time
from typing import Any
from typing import TypeVar

from dedupd.status import forecast
from dedupd.status import suspects
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import imageids
from glance_dedup.maintenance import catalog_db
from glance_dedup.maintenance import recipes
from glance_dedup.repository import image_repository
from glance_dedup.repository import layout
from glance_dedup.repository import projects
from glance_dedup.repository import volumes

#: The most images between which sharing is computed.
SHARING_IMAGES = 24
#: The most pages of extents of all these images. Each takes some 600 bytes of
#: memory.
SHARING_PAGES = 65536

# Seconds for which the directories' figures are used again.
_FRESH = 5.0

Fields = dict[str, Any]
Catalog = Callable[[], catalog_db.Catalog | None]
_Found = TypeVar('_Found')


class Figures:
    """The repository's figures. Thread-safe.

    :param catalog: returns the catalog if this process is the maintainer
    """

    def __init__(self, repository: image_repository.Repository,
                 catalog: Catalog) -> None:
        self._repository = repository
        self._catalog = catalog
        self._mutex = threading.Lock()
        self._listing = threading.Lock()
        # Only for listings, which need no lock; one thread at a time uses it.
        self._engine = _engine.Maintenance(repository.handle())
        self._objects: dict[int, tuple[int, int, int]] = {}
        self._space: Fields = {}
        self._journals: dict[str, int] = {}
        self._measured = 0.0
        self._good = False      # nothing has changed since, as far as is known
        self._shared: tuple[Any, Fields] = None, {}
        self._damage: tuple[int | None, set[str]] = None, set()
        self._growth: forecast.Growth | None = None
        self.suspects = suspects.Suspects(repository)

    def space(self) -> Fields:
        """The repository's sums, at most a few seconds old.

        Sums that are not known are None.
        """
        with self._mutex:
            self._refresh()
            return dict(self._space)

    def journals(self) -> dict[str, int]:
        """The disk space of each volume's journals, by the volume's name.

        It is as old as the sums.
        """
        with self._mutex:
            self._refresh()
            return self._journals

    def _refresh(self) -> None:
        """Measure again if the figures are old. The caller has the mutex."""
        if (not self._good or time.monotonic() - self._measured > _FRESH
                or self._space.get('images') is None and self._counted()):
            # First: a `forget` during the measuring must not get lost.
            self._good, self._measured = True, 0.0
            self._journals = journals(self._repository.path)
            self._space = self._measure()
            self._measured = time.monotonic()

    def sample(self) -> Fields:
        """The current sample for the history."""
        self.forget()
        space = self.space()
        return {
            **{name: space[name] for name in (
                'images', 'logical_bytes', 'nonzero_bytes', 'unique_bytes',
                'disk_bytes')},
            forecast.USED: (space['filesystem_bytes']
                            - space['filesystem_free_bytes'])}

    def foresee(self) -> Fields:
        """Refresh the forecast of the file system's growth from the history.

        :returns: the sums, with a new forecast
        """
        now = time.time()
        samples = self._known(
            lambda catalog: catalog.history(now - forecast.WINDOW))
        if samples is not None:
            self._growth = forecast.growth(samples, now)
            self.forget()
        return self.space()

    def _counted(self) -> bool:
        """Return whether there is a valid catalog now."""
        catalog = self._catalog()
        return catalog is not None and catalog.valid

    def _known(self, ask: Callable[[catalog_db.Catalog], _Found]
               ) -> _Found | None:
        """Return a function's result on the catalog; None: none is valid."""
        catalog = self._catalog()
        if catalog is not None and catalog.valid:
            # If it is closed or found invalid just now: known again later.
            with contextlib.suppress(exceptions.RepositoryError):
                return ask(catalog)
        return None

    def forget(self) -> None:
        """Have the next call of `space` measure again."""
        self._good = False

    def _measure(self) -> Fields:
        path = self._repository.path
        groups = list(_sizes_on_disk(os.path.join(path, 'groups')))
        disk = {name: disk_bytes(os.path.join(path, name))
                for name in ('spares', 'images', 'catalog')}
        disk['groups'] = sum(groups)
        disk['journals'] = sum(self._journals.values())
        file_system = shutil.disk_usage(path)
        fields: Fields = dict.fromkeys((
            'images', 'backups', 'logical_bytes', 'zero_bytes',
            'nonzero_bytes', 'unique_blocks', 'unique_bytes', 'disks',
            'derived_bytes', 'uncounted'))
        sums = self._known(lambda catalog: catalog.statistics())
        if sums is not None:
            fields = {name: sums[name] for name in fields if name in sums}
            fields['uncounted'] = max(
                0, len(self._repository.images()) - sums['images']
                - sums['backups'])
            fields['unique_bytes'] = (
                sums['unique_blocks']
                * self._repository.parameters.average_block)
        total = sum(disk.values())
        objects = self._object_bytes()
        reserve = self._repository.room()[1]
        fields |= {
            'volumes': len(self._journals),
            'journal_bytes': disk['journals'],
            'disk_bytes': total,
            'object_bytes': objects,
            'metadata_bytes': (disk['images'] + disk['catalog']
                               + self._store_bytes(groups)),
            'filesystem_free_bytes': file_system.free,
            'filesystem_bytes': file_system.total,
            'reserve_bytes': reserve,
            'full_in_seconds': forecast.seconds_left(
                file_system.free - reserve, self._growth),
            'saved_percent': _saved(fields.get('nonzero_bytes'),
                                    total + objects),
            'saved_of_logical_percent': _saved(
                fields.get('logical_bytes'), total + objects)}
        return fields

    def _object_bytes(self) -> int:
        """The bytes of all cold groups' objects.

        A group's file is read once, and again when it has changed.
        """
        if not self._repository.has_cold:
            return 0
        known = {}
        start = self._data_start()
        path = os.path.join(self._repository.path, 'groups')
        with contextlib.suppress(FileNotFoundError), os.scandir(path) as found:
            for entry in found:
                with contextlib.suppress(OSError, ValueError,
                                         exceptions.RepositoryError):
                    status = entry.stat(follow_symlinks=False)
                    # Others have segments behind their fingerprint store.
                    if status.st_size == start:
                        number = int(entry.name, 16)
                        known[number] = self._object_of(number, status)
        self._objects = known
        return sum(size for *_, size in known.values())

    def _object_of(self, number: int, status: os.stat_result
                   ) -> tuple[int, int, int]:
        is_now = status.st_ino, status.st_mtime_ns
        known = self._objects.get(number)
        if known is not None and known[:2] == is_now:
            return known
        with self._listing:
            facts = self._engine.group_facts(number)
        return *is_now, facts['end'] if facts['is_cold'] else 0

    def _store_bytes(self, groups: list[int]) -> int:
        """Return the disk space of all groups' headers and stores.

        :param groups: the disk space of each; most of a group whose blocks
            were freed is a hole
        """
        start = self._data_start()
        return sum(min(start, size) for size in groups)

    def _data_start(self) -> int:
        return layout.data_start(self._repository.parameters.group_slots)

    def images(self) -> list[Fields]:
        """All images that exist, counted or not.

        ``damaged`` is None if it is not known.
        """
        counted = self._known(lambda catalog: catalog.images()) or {}
        blocks, damaged = self.damage()
        unhurt = None if blocks is None else False
        found = []
        for image_id in self._repository.images():
            facts = recipes.facts_of(self._repository.path, image_id, counted)
            if facts is None:
                facts = self._read_facts(image_id)
            if facts is not None:
                found.append(
                    {name: facts[name] for name in (
                        'image_id', 'project', 'size', 'zero_bytes',
                        'new_bytes', 'stored_bytes', 'blocks', 'fragments',
                        'created')}
                    | {'backup': imageids.of_backup(image_id) is not None,
                       'damaged': facts.get('damaged', False)
                       or image_id in damaged or unhurt})
        return found

    def _read_facts(self, image_id: str) -> Fields | None:
        """The facts in the recipe; None if the image is gone."""
        try:
            stat = self._repository.stat(image_id)
        except (exceptions.ImageNotFound, exceptions.InvalidParameter):
            return None
        except exceptions.RepositoryError:
            return dict.fromkeys((
                'project', 'size', 'zero_bytes', 'new_bytes', 'stored_bytes',
                'blocks', 'fragments', 'created')) | {
                    'image_id': image_id, 'damaged': True}
        average = self._repository.parameters.average_block
        return vars(stat) | {
            'blocks': -(-(stat.size - stat.zero_bytes) // average)}

    def damage(self) -> tuple[int | None, set[str]]:
        """Return the number of unhealed damaged blocks, and damaged images.

        These use the blocks, or a read of them failed. Without a catalog the
        number is the last known value. None: this process never knew any.
        """
        found = self._known(lambda catalog: (
            len(catalog.damaged()), catalog.damaged_images()))
        if found is not None:
            self._damage = found
        blocks, images = self._damage
        return blocks, images | self.suspects.images()

    def projects(self) -> list[Fields]:
        """All projects, the one that has stored most first.

        Any daemon knows them. It is empty as long as nothing was counted.
        """
        return of_projects(self._repository)

    def groups(self) -> list[Fields]:
        """All block groups; ``live`` is None if it is not known."""
        used = self._known(lambda catalog: {
            number: facts['used'] for number, facts in catalog.groups()})
        found = []
        with self._listing:
            for number in self._engine.groups():
                try:
                    facts = self._engine.group_facts(number)
                except exceptions.RepositoryError:
                    # Unlinked meanwhile, or damaged: scrub reports that.
                    continue
                found.append({
                    'number': number, 'slots': facts['slots'],
                    'published': facts['published'],
                    'live': None if used is None else used.get(number, 0),
                    'disk_bytes': facts['allocated']})
        return found

    def sharing(self) -> Fields:
        """The number of blocks that each two of the largest images both name.

        Backups are left out, and images whose extents would take too much
        memory.
        """
        largest = sorted(
            (i for i in self.images() if i['size'] and not i['damaged']
             and not i['backup']),
            key=lambda i: (-i['size'], i['image_id']))[:SHARING_IMAGES]
        key = [(i['image_id'], i['created'], i['size']) for i in largest]
        with self._listing:
            if self._shared[0] != key:
                self._shared = key, self._compare([k[0] for k in key])
            return self._shared[1]

    def _compare(self, image_ids: list[str]) -> Fields:
        runs = {}
        left = SHARING_PAGES
        for image_id in image_ids:
            with contextlib.suppress(exceptions.RepositoryError):
                with contextlib.closing(
                        self._engine.open_recipe(image_id)) as recipe:
                    if recipe.pages <= left:
                        runs[image_id] = recipe.runs()
                        left -= recipe.pages
        shared = [[0] * len(runs) for _ in runs]
        for i, a in enumerate(runs.values()):
            for j, b in enumerate(runs.values()):
                if j <= i:
                    shared[i][j] = shared[j][i] = (
                        _engine.shared_blocks(a, b))
        return {'images': list(runs), 'shared': shared}

    def close(self) -> None:
        """Close the engine's handle for listings; watch no more reads."""
        self.suspects.close()
        self._engine.close()


def described(repository: image_repository.Repository) -> Fields:
    """Return the repository's identity, for a status."""
    parameters, trial = repository.parameters, repository.trial
    return {'path': repository.path, 'id': parameters.repository_id,
            'block_size': parameters.block_size,
            'chunking': parameters.chunking,
            'group_slots': parameters.group_slots,
            'fingerprint': parameters.fingerprint,
            'verify': parameters.verify,
            'maintained': repository.is_maintained,
            'trial': None if trial is None else {
                **dataclasses.asdict(trial), 'valid': trial.is_valid}}


def of_filter(repository: image_repository.Repository, statistics: Fields
              ) -> Fields:
    """The figures of this host's filter, for a status.

    :param statistics: those of the repository
    """
    return {**{name: value for name, value in statistics.items()
               if name.startswith('filter_')},
            'index': repository.filter.index,
            'file': repository.filter.file,
            'filter_error': repository.filter.error}


def of_projects(repository: image_repository.Repository) -> list[Fields]:
    """All projects, the one that has stored most first.

    The figures of shared blocks are None for a project that came later.
    """
    average = repository.parameters.average_block
    rows = []
    for found in (projects.load(repository.path) or {}).values():
        sharing = found.sharing
        rows.append({
            'project': found.project,
            **{name: getattr(found, name) for name in projects.SUMS},
            'exclusive_bytes': sharing and sharing.exclusive_blocks * average,
            'shared_bytes': sharing and sharing.shared_blocks * average,
            'charged_bytes': sharing and sharing.charged_bytes,
            'counted': sharing and sharing.counted})
    return sorted(rows, key=lambda row: (-row['stored_bytes'],
                                         row['project']))


def _saved(data: int | None, stored: int) -> float | None:
    """The share of the data that took no space, in percent."""
    return round(100 * (1 - stored / data), 2) + 0.0 if data else None


def journals(path: str) -> dict[str, int]:
    """The disk space of each volume's journals, by the volume's name.

    :param path: the repository's
    """
    return {name: disk_bytes(os.path.join(path, layout.VOLUMES, name))
            for name in volumes.names(path)}


def disk_bytes(path: str) -> int:
    """The disk space of the files of a directory."""
    return sum(_sizes_on_disk(path))


def _sizes_on_disk(path: str) -> Iterator[int]:
    """Yield the bytes that each file of a directory takes on the disk."""
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                yield entry.stat(follow_symlinks=False).st_blocks * 512
