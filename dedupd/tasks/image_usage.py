# SPDX-License-Identifier: Apache-2.0

"""Usage: what images and volumes take, and what deleting them would free.

The catalog says how many recipes name each block. A deletion frees the blocks
that no recipe names but those of the image or volume. If several are deleted
together, this includes blocks that only they share.

The task reads the recipes, the catalog's counts, and the entries of the groups
that the recipes name. It reads no block. It spreads the recipes' runs over
partitions (``run_partitions.py``), and then compares them with the counts, at
most 64 groups at a time. So it takes at most 32 MiB for the counts, however
large the images are. It counts new and deleted images first, and changes
nothing else.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import os
from typing import BinaryIO

from dedupd.tasks import accounting
from dedupd.tasks import run_partitions
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import imageids
from glance_dedup.base import pacing
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import database
from glance_dedup.maintenance import maintainer_role
from glance_dedup.maintenance import rebuild_worker
from glance_dedup.maintenance import records
from glance_dedup.maintenance import refcounts
from glance_dedup.repository import layout
from glance_dedup.repository import openvolumes
from glance_dedup.repository import space

#: The most images, and the most volumes, of one run.
MAX_NAMES = 512

# The most groups whose counts are in memory.
_GROUPS = 64
# No group has so high a number.
_NO_GROUP = 1 << 32
# A volume in use gets new recipes meanwhile. Then the task begins again, as
# often as this.
_ATTEMPTS = 3
# Of slots whose block keeps its segment.
_IN_USE = (block_addresses.LIVE, block_addresses.DAMAGED,
           block_addresses.INVALID)


@dataclasses.dataclass
class Usage:
    """Figures of an image or a volume, and of its deletion."""

    name: str = ''
    is_volume: bool = False
    size: int = 0
    """Bytes of the image, or of the volume as its clients see it."""
    referenced_bytes: int = 0
    """Size of the blocks that it names, each once, before compression."""
    invalid_blocks: int = 0
    """Blocks that it names whose entries do not verify. Their sizes are not
    known, and are in no figure."""
    freed_blocks: int = 0
    """Blocks that no recipe would name any more."""
    freed_bytes: int = 0
    """Size of these blocks before compression."""
    freed_stored_bytes: int = 0
    """Bytes of the disk that they have in segments without other blocks."""
    freed_object_bytes: int = 0
    """The same of cold groups, in the object store. A collection only notes
    that the blocks are free; the task tier writes the groups again."""
    recipe_bytes: int = 0
    """Bytes of the disk of its recipes."""
    journal_bytes: int = 0
    """Bytes of the disk of a volume's journals."""
    left_out: int = 0
    """Recipes that came or went meanwhile, of a volume in use. The figures are
    then too small, rather than too large."""
    error: str | None = None
    """The reason why it has no figures."""
    is_damaged: bool = False
    """True if the error is damage."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of a run."""

    usages: list[Usage]
    """Images, then volumes, in the order of the request."""
    together: Usage
    """All of them without an error, if they are deleted together."""
    in_use: int
    """Uploads that run, and deleted images that are still being read."""
    uncounted: dict[str, str]
    """Recipes that cannot be read, each with its error. It is not known which
    blocks they need, and nothing is freed while there are any."""
    unread_groups: dict[int, str]
    """Groups that cannot be read, each with its error. Their blocks are in no
    figure."""


def run_once(maintainer: maintainer_role.Maintainer, pace: pacing.Pace,
             images: Sequence[str] = (), volumes: Sequence[str] = ()
             ) -> Result:
    """Measure images and volumes; change nothing.

    :param images: ids; a backup's, too
    :param volumes: names
    :raises pacing.Stopped: between two steps
    :raises OSError: there is no room for the partitions
    :raises NoSpaceError: if the disk has no room even to count
    """
    return maintainer.guard(
        lambda: _Run(maintainer, pace, images, volumes).run(), pace.step)


class _Target:
    """An image or a volume that is measured."""

    def __init__(self, name: str, is_volume: bool = False) -> None:
        self.usage = Usage(name, is_volume)
        self.recipes: list[str] = []

    def fail(self, error: Exception | str) -> None:
        """Have no figures, because of an error."""
        self.usage = Usage(
            self.usage.name, self.usage.is_volume, error=str(error),
            is_damaged=isinstance(error, exceptions.DamagedError))


class _Run:
    def __init__(self, maintainer: maintainer_role.Maintainer,
                 pace: pacing.Pace, images: Sequence[str],
                 volumes: Sequence[str]) -> None:
        self._maintainer = maintainer
        self._pace = pace
        # A name that is given twice is deleted once.
        self._images = list(dict.fromkeys(images))
        self._volumes = list(dict.fromkeys(volumes))
        self._targets: list[_Target] = []
        self._unread: dict[int, str] = {}
        self._accountant = accounting.Accountant(maintainer, pace)

    def run(self) -> Result:
        maintainer = self._maintainer
        for attempt in range(_ATTEMPTS):
            maintainer.reconcile(self._pace.step)
            accounted = self._accountant.run()
            self._choose()
            with run_partitions.Partitions(
                    len(maintainer.engine.groups())) as partitions:
                self._spread(partitions)
                if attempt + 1 < _ATTEMPTS and any(
                        target.usage.left_out for target in self._targets):
                    continue
                together = self._measure(partitions)
            break
        return Result([target.usage for target in self._targets], together,
                      accounted.left, accounted.unreadable, self._unread)

    # -- recipes -----------------------------------------------------------

    def _choose(self) -> None:
        """Find the recipes of all images and volumes."""
        of_volumes: dict[str, list[str]] = {}
        if self._volumes:
            for recipe_id in self._maintainer.recipes.images():
                recipe = imageids.of_volume(recipe_id)
                if recipe is not None:
                    of_volumes.setdefault(recipe.volume_id, []).append(
                        recipe_id)
        self._targets = [self._image(name) for name in self._images]
        self._targets += [self._volume(name, of_volumes)
                          for name in self._volumes]

    def _image(self, image_id: str) -> _Target:
        target = _Target(image_id)
        try:
            self._maintainer.repository.require_image(image_id)
        except exceptions.InvalidParameter as e:
            target.fail(e)
        else:
            target.recipes = [image_id]
        return target

    def _volume(self, name: str, of_volumes: dict[str, list[str]]) -> _Target:
        target = _Target(name, True)
        repository = self._maintainer.repository
        try:
            found = openvolumes.look(repository, name)
        except exceptions.ImageNotFound:
            target.fail(f"there is no volume {name}; 'glance-dedup volume "
                        "list' shows those that exist")
        except exceptions.DamagedError as e:
            target.fail(exceptions.DamagedError(
                f'{e}. Restore the directory of volume {name} from a backup, '
                "or give the volume up with 'glance-dedup volume delete "
                f"--damaged {name}'"))
        except exceptions.RepositoryError as e:
            target.fail(e)
        else:
            target.recipes = of_volumes.get(found.volume_id, [])
            target.usage.size = found.size
            target.usage.journal_bytes = space.of_tree(os.path.join(
                repository.path, layout.VOLUMES, name))
        return target

    def _spread(self, partitions: run_partitions.Partitions) -> None:
        """Spread the runs of all recipes; the owner is the target's number.

        A target whose recipe cannot be read is left out by `_measure`.
        """
        total = sum(len(target.recipes) for target in self._targets)
        done = 0
        for number, target in enumerate(self._targets):
            partitions.begin(number)
            for recipe_id in target.recipes:
                if target.usage.error is None:
                    self._spread_recipe(target, recipe_id, partitions, done,
                                        total)
                done += 1
            self._pace.step(done, total, 'reading recipes')
        partitions.finish()

    def _spread_recipe(self, target: _Target, recipe_id: str,
                       partitions: run_partitions.Partitions, done: int,
                       total: int) -> None:
        engine, usage = self._maintainer.engine, target.usage
        try:
            with contextlib.closing(engine.open_recipe(recipe_id)) as recipe:
                if not recipe.complete:
                    raise exceptions.DamagedError(str(recipe.error))
                header = recipe.header()
                if not self._maintainer.catalog.counted(
                        header['transaction_id']):
                    usage.left_out += 1
                    return
                if recipe_id == usage.name:
                    usage.size = header['size']
                usage.recipe_bytes += space.of_tree(os.path.join(
                    self._maintainer.repository.path, 'images', recipe_id))
                for runs in block_addresses.pieces(recipe):
                    partitions.add(runs)
                    self._pace.step(done, total, 'reading recipes',
                                    cost=len(runs))
        except database.CatalogError:
            raise
        except exceptions.ImageNotFound:
            if recipe_id == usage.name:
                target.fail(f"there is no image {recipe_id}; 'glance-dedup "
                            "image list' shows those that exist")
            else:
                usage.left_out += 1
        except exceptions.UNREADABLE as e:
            target.fail(type(e)(
                f'what {usage.name} takes is not known, since a recipe '
                f'cannot be read: {e}. Put the file back from a backup, or '
                "give it up with 'glance-dedup image mark-lost --yes "
                f"{recipe_id}'"))

    # -- blocks ------------------------------------------------------------

    def _measure(self, partitions: run_partitions.Partitions) -> Usage:
        """Compare all runs with the counts; return the sum of all targets."""
        together = Usage()
        groups = sorted(self._maintainer.engine.groups())
        count = len(partitions.files)
        steps = [(file, numbers) for part, file in enumerate(partitions.files)
                 for numbers in _stretches(groups, part, count)]
        for done, (file, numbers) in enumerate(steps, 1):
            self._measure_groups(file, numbers, together)
            self._pace.step(done, len(steps), 'comparing blocks',
                            cost=file.tell())
        for target in self._targets:
            if target.usage.error is None:
                for name in ('size', 'recipe_bytes', 'journal_bytes',
                             'left_out'):
                    setattr(together, name, getattr(together, name)
                            + getattr(target.usage, name))
        return together

    def _measure_groups(self, file: BinaryIO, numbers: range,
                        together: Usage) -> None:
        """Measure the blocks of a partition's groups with these numbers."""
        all_named = _Named(self._maintainer)
        number, named = -1, all_named
        for owner, runs in run_partitions.sections(file):
            if self._targets[owner].usage.error is not None:
                continue
            if owner != number:
                if number >= 0:
                    self._add_groups(named, self._targets[number].usage)
                number, named = owner, _Named(self._maintainer)
            for key, some in refcounts.by_chunk(runs).items():
                if key[0] in numbers:
                    named.add(key, some)
                    all_named.add(key, some)
        if number >= 0:
            self._add_groups(named, self._targets[number].usage)
        self._add_groups(all_named, together)

    def _add_groups(self, named: '_Named', usage: Usage) -> None:
        for group in named.groups():
            self._pace.check()
            try:
                _add_group(self._maintainer, group, named, usage,
                           self._accountant.pins(group))
            except database.CatalogError:
                raise
            except (exceptions.ImageNotFound, *exceptions.UNREADABLE) as e:
                self._unread[group] = str(e)


def _stretches(groups: Sequence[int], part: int, partitions: int
               ) -> list[range]:
    """Numbers of groups that are measured together: at most 64 that exist.

    Each number is in one of the ranges, that of a lost group, too.

    :param groups: all that exist, sorted
    """
    own = [group for group in groups
           if rebuild_worker.partition_of(group, partitions) == part]
    starts = [0, *own[_GROUPS::_GROUPS]]
    return list(map(range, starts, [*starts[1:], _NO_GROUP]))


class _Named:
    """Counts of blocks by some recipes, and by all others."""

    def __init__(self, maintainer: maintainer_role.Maintainer) -> None:
        self._catalog = maintainer.catalog
        self._chunks: dict[tuple[int, int], tuple[bytearray, bytearray]] = {}

    def add(self, key: tuple[int, int], runs: bytes | bytearray) -> None:
        """Add runs that name blocks of a chunk: (group, chunk)."""
        if key not in self._chunks:
            self._chunks[key] = (bytearray(records.CHUNK_BYTES),
                                 bytearray(self._catalog.chunk(*key)))
        ours, others = self._chunks[key]
        try:
            _engine.add_runs(ours, *key, runs, 1)
            _engine.add_runs(others, *key, runs, -1)
        except ValueError as e:
            raise database.CatalogError(
                f'the catalog {self._catalog.path} counts too few recipes '
                f'for a block of group {key[0]}: {e}') from e

    def groups(self) -> list[int]:
        """The groups whose blocks the recipes name, sorted."""
        return sorted({group for group, _ in self._chunks})

    def counts(self, group: int, counts: bytes) -> tuple[bytes, bytes]:
        """Counts of a group's first slots by these recipes, and by others.

        :param counts: by all recipes
        """
        ours, others = bytearray(len(counts)), bytearray(counts)
        for chunk in range(-(-len(counts) // records.CHUNK_BYTES)):
            found = self._chunks.get((group, chunk))
            if found is not None:
                begin = chunk * records.CHUNK_BYTES
                size = min(records.CHUNK_BYTES, len(counts) - begin)
                ours[begin:begin + size] = found[0][:size]
                others[begin:begin + size] = found[1][:size]
        return bytes(ours), bytes(others)


def _add_group(maintainer: maintainer_role.Maintainer, group: int,
               named: _Named, usage: Usage, pins: Iterable[bytes]) -> None:
    """Add the blocks of one group to the figures.

    :param pins: runs that entries in use name, and that are not counted
    :raises DamagedError, StorageError, ImageNotFound: it cannot be read
    """
    facts = maintainer.engine.group_facts(group)
    slots, published = facts['slots'], facts['published']
    listing = maintainer.engine.entries(group, 0, slots)
    counts = maintainer.catalog.counts(group, slots)
    ours, others = named.counts(group, counts)
    for runs in pins:
        pinned = block_addresses.slots_in(runs, group)
        counts, others = (_with_pins(counts, pinned),
                          _with_pins(others, pinned))
    lost, _, _, before, dead_bytes = _engine.slots_judge(
        listing, counts, published)
    if lost is not None:
        raise exceptions.DamagedError(
            f'groups/{group:08x}: an image needs the block of slot {lost}, '
            'and its entry holds none. Nothing in it is freed')
    _, _, _, after, freed_bytes = _engine.slots_judge(
        listing, others, published)
    *_, all_bytes = _engine.slots_judge(listing, bytes(len(counts)), slots)
    *_, other_bytes = _engine.slots_judge(listing, ours, slots)
    usage.referenced_bytes += all_bytes - other_bytes
    usage.freed_bytes += freed_bytes - dead_bytes
    usage.freed_blocks += (len(after) - len(before)) // 4
    entries = block_addresses.columns(listing)
    usage.invalid_blocks += _count_invalid(entries, ours)
    if len(after) > len(before):
        stored = sum(_freed_segments(entries, listing, before, after))
        if facts['is_cold']:
            usage.freed_object_bytes += stored
        else:
            usage.freed_stored_bytes += stored


def _with_pins(counts: bytes, slots: Iterable[int]) -> bytes:
    """Return counts in which these slots have at least one."""
    numbers = block_addresses.unpack(counts)
    for slot in slots:
        numbers[slot] = numbers[slot] or 1
    return block_addresses.pack(numbers)


def _count_invalid(entries: block_addresses.Columns, counts: bytes) -> int:
    """The slots with a count whose entries do not verify."""
    if block_addresses.INVALID not in entries.states:
        return 0
    return sum(state == block_addresses.INVALID and count > 0
               for state, count in zip(
                   entries.states, block_addresses.unpack(counts)))


def _freed_segments(entries: block_addresses.Columns, listing: bytes,
                    before: bytes, after: bytes) -> Iterator[int]:
    """The bytes of each segment that loses its last block.

    An entry that does not verify may name any segment. So it frees none, and
    while it stays, the group gives no space back.

    :param before: slots that are not counted, with the images
    :param after: the same without them
    """
    segments, _, states = entries
    stored = block_addresses.stored_lengths(listing)
    unused = set(block_addresses.unpack(after))
    left = {slot for slot, state in enumerate(states)
            if state in _IN_USE and slot not in unused}
    if any(states[slot] == block_addresses.INVALID for slot in left):
        return
    kept = {segments[slot] for slot in left}
    freed = {segments[slot]: stored[slot] for slot in unused.difference(
        block_addresses.unpack(before))
        if states[slot] != block_addresses.INVALID}
    for segment, length in freed.items():
        if segment not in kept:
            yield space.SEGMENT_HEADER + length
