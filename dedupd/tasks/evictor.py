# SPDX-License-Identifier: Apache-2.0

"""Evicting: a cache that takes more of the disk than it may lets images go.

First what is dead already is collected, which may be enough. Then, round by
round, images are deleted, that which was last used the longest ago first, and
collected. How many of them in a round is a guess, since images share blocks:
the catalog tells how many blocks no other image names. What is counted is what
the disk says, before each round.

An image that somebody reads, in whatever process, stays: deleting it would
free nothing until it is closed (I12). What cannot be collected yet, since a
pull that goes on holds the group (I6), counts as given back: else all images
would go for the sake of one.
"""

import contextlib
import dataclasses
import datetime
import os

from oslo_log import log

from dedupd.cache import index as index_module
from dedupd.tasks import accounting
from dedupd.tasks import collector
from dedupd.tasks import scrubber
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import task
from glance_dedup.maintenance import catalog as catalog_module
from glance_dedup.maintenance import maintainer as maintainer_module
from glance_dedup.repository import space

LOG = log.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What would be evicted now."""

    images: list[str]
    """In this order."""
    blocks: int
    """That no image would need any more."""
    over_bytes: int
    """What is to be given back, as far as it is not dead already."""
    in_use: int
    """Images that stay, since somebody reads them."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What was evicted."""

    evicted: list[str]
    """Image ids, in this order."""
    disk_bytes: int
    """Given back to the file system."""
    in_use: int
    """Images that stayed, since somebody reads them."""
    refused: str | None
    """Why nothing was freed."""
    short: str | None
    """Why more is taken than may be, in a sentence."""
    failed: dict[str, str]
    """Images that could not be deleted, and why."""


def plan(maintainer: maintainer_module.Maintainer, pace: task.Pace,
         held: index_module.Held, limit: int, coming: int = 0,
         live_share: int = collector.LIVE_SHARE,
         evacuate_share: int = collector.EVACUATE_SHARE) -> Plan:
    """What would be evicted; changes nothing. Arguments as for run_once."""
    run = _Run(maintainer, pace, held, limit, coming, live_share,
               evacuate_share)
    return maintainer.guard(run.plan, pace.step)


def run_once(maintainer: maintainer_module.Maintainer, pace: task.Pace,
             held: index_module.Held, limit: int, coming: int = 0,
             live_share: int = collector.LIVE_SHARE,
             evacuate_share: int = collector.EVACUATE_SHARE) -> Result:
    """Evict as long as more is taken than may be.

    :param limit: bytes of disk that all of it may take; 0: as many as there
        are
    :param coming: bytes that will be stored soon, and need room, too
    :param live_share: as for the collector
    :param evacuate_share: as for the collector
    :raises InvalidParameter: the limit is too small to hold anything
    :raises task.Stopped: between two images; what was done stands
    :raises NoSpaceError: if there is no room even to count
    """
    run = _Run(maintainer, pace, held, limit, coming, live_share,
               evacuate_share)
    return maintainer.guard(run.run, pace.step)


class _Run:
    def __init__(self, maintainer: maintainer_module.Maintainer,
                 pace: task.Pace, held: index_module.Held, limit: int,
                 coming: int, live_share: int, evacuate_share: int) -> None:
        index_module.check_limit(maintainer.repository, limit)
        self._maintainer = maintainer
        self._repository = maintainer.repository
        self._pace = pace
        self._held = held
        self._limit = limit
        self._coming = coming
        self._shares = {'live_share': live_share,
                        'evacuate_share': evacuate_share}
        self._evicted: list[str] = []
        self._failed: dict[str, str] = {}
        self._in_use: set[str] = set()
        self._left: set[str] | None = None

    def plan(self) -> Plan:
        over = self._over()
        images: list[str] = []
        blocks = 0
        if over > 0:
            foreseen = self._foresee()
            dead, size = self._dead(foreseen)
            over -= dead * size
            images, blocks = self._choose(over, size, foreseen)
        return Plan(images, blocks, max(0, over), len(self._in_use))

    def run(self) -> Result:
        before = self._taken()
        refused = short = None
        over = most = self._over()
        if over > 0:
            refused = self._collect()   # which may be enough
            if refused and self._give_up_unreadable():
                refused = self._collect()
        while over > 0 and not refused:
            foreseen = self._foresee()
            dead, size = self._dead(foreseen)
            over = self._over() - dead * size
            self._step(most - over, most)
            chosen, _ = self._choose(over, size, foreseen)
            if not chosen:
                break   # that suffices, or there is none
            for image_id in chosen:
                self._evict(image_id)
                self._step(most - over, most)
            refused = self._collect()
        if over > 0 or self._missing() > 0:
            short = self._words()
        return Result(self._evicted, max(0, before - self._taken()),
                      len(self._in_use), refused, short, self._failed)

    def _step(self, done: int, total: int) -> None:
        self._pace.step(min(max(0, done), total), total,
                        'evicting images')

    # -- how much there is -------------------------------------------------

    def _taken(self) -> int:
        path = self._repository.path
        with files.os_errors(f'cannot measure {path}'):
            self._held.taken = space.taken(path)
        return self._held.taken

    def _over(self) -> int:
        """Bytes to be given back: of the limit, or of the disk itself.

        Of the disk only as many as there are: where it is others that fill
        it, nothing would be won.
        """
        over = 0
        if self._limit:
            over = self._taken() + self._coming - self._limit
        missing = self._missing()
        return max(over, missing) if missing <= self._stored() else over

    def _missing(self) -> int:
        """Bytes that the disk lacks, beside what is kept free."""
        free, kept = self._repository.room()
        return kept + self._coming - free

    def _stored(self) -> int:
        path = os.path.join(self._repository.path, 'groups')
        with files.os_errors(f'cannot measure {path}'):
            return space.below(path)

    def _foresee(self) -> accounting.Foreseen:
        """What is deleted or committed and not counted yet."""
        return accounting.Accountant(self._maintainer,
                                     self._pace).foresee()

    def _dead(self, foreseen: accounting.Foreseen) -> tuple[int, int]:
        """Blocks that are not freed yet, and can be; and a block's bytes.

        The bytes are those of the disk, on average.
        """
        found = collector.plan(self._maintainer, self._pace,
                               **self._shares)
        dead = sum(group.free + group.pinned for group in found.groups)
        used = sum(foreseen.group(number)['used']
                   for number in self._maintainer.engine.groups())
        return dead, self._stored() // max(1, dead + used)

    # -- what goes ---------------------------------------------------------

    def _choose(self, over: int, size: int, foreseen: accounting.Foreseen
                ) -> tuple[list[str], int]:
        """The images to go next, and how many blocks only they name."""
        batch = self._maintainer.catalog.batch()
        chosen: list[str] = []
        blocks = 0
        candidates = self._held.candidates()
        if self._left is None:
            # What comes from now on is for another run, or where images come
            # as quickly as they go this one would not end.
            self._left = set(candidates)
        for image_id in candidates:
            if blocks * size >= over:
                break
            if batch.size > maintainer_module.BATCH_BYTES:
                break   # the guess takes memory; the rest in the next round
            if image_id not in self._left:
                continue
            if self._maintainer.engine.is_read(image_id):
                self._in_use.add(image_id)
                continue
            self._in_use.discard(image_id)
            chosen.append(image_id)
            blocks += self._blocks_of(image_id, batch, foreseen)
            self._pace.check()
        return chosen, blocks

    def _blocks_of(self, image_id: str, batch: catalog_module.Batch,
                   foreseen: accounting.Foreseen) -> int:
        """How many blocks nobody names without this image; 0: not known.

        Those of its beginning, if the batch has no room for all.

        :param batch: never written; has those before it un-counted, and then
            this one, too
        """
        blocks = 0
        try:
            recipe = self._maintainer.engine.open_recipe(image_id)
        except (exceptions.ImageNotFound, *exceptions.UNREADABLE):
            return 0
        with (contextlib.closing(recipe),
              contextlib.suppress(maintainer_module.RecipeError)):
            if recipe.complete and foreseen.counted(
                    recipe.header()['transaction_id']):
                extents = maintainer_module.Extents(recipe)
                for page in range(extents.pages):
                    if batch.size > maintainer_module.BATCH_BYTES:
                        break
                    runs = extents.runs(page)
                    foreseen.preset(batch, runs)
                    blocks += self._maintainer.catalog.discount(batch, runs)
        return blocks

    def _evict(self, image_id: str) -> None:
        self._left.discard(image_id)
        used = self._held.last_used(image_id)
        try:
            self._held.drop(image_id)
        except exceptions.RepositoryError as e:
            LOG.warning('Image %s cannot be evicted: %s', image_id, e)
            self._failed[image_id] = str(e)
            return
        LOG.info('Evicted image %s, last used %s', image_id,
                 'at a time that is not known' if used is None else
                 datetime.datetime.fromtimestamp(
                     used, datetime.timezone.utc).isoformat(' '))
        self._held.evictions += 1
        self._evicted.append(image_id)

    def _collect(self) -> str | None:
        """Free what can be; why nothing was freed, if so."""
        return collector.run_once(self._maintainer, self._pace,
                                  **self._shares).refused

    def _give_up_unreadable(self) -> bool:
        """Give up images with damaged recipes; whether there were any.

        Elsewhere that is for an operator to say, since they are lost by it
        (``image mark-lost``). Here they come again when they are wanted.
        """
        before = len(self._evicted)
        for image_id in sorted({*self._maintainer.unreadable()}.intersection(
                self._repository.images())):
            try:
                scrubber.mark_lost(self._maintainer, image_id,
                                   self._pace.step)
                self._held.drop(image_id)   # which forgets it
            except exceptions.RepositoryError as e:
                LOG.warning('Image %s cannot be given up: %s', image_id, e)
                self._failed[image_id] = str(e)
                continue
            self._held.evictions += 1
            self._evicted.append(image_id)
        return len(self._evicted) > before

    def _words(self) -> str:
        """What takes the room that is not to be had."""
        taken = self._taken()
        if self._limit and taken + self._coming > self._limit:
            what = (f'{_mib(taken)} of disk are taken, and limit_mib allows '
                    f'{_mib(self._limit)}')
        else:
            free, kept = self._repository.room()
            what = (f'{_mib(free)} are free on the disk, and reserve_mib '
                    f'keeps {_mib(kept)}')
        if self._coming:
            what += f'; {_mib(self._coming)} are on their way'
        why = []
        if self._in_use:
            why.append(f'{len(self._in_use)} images are being read')
        if self._failed:
            why.append(f'{len(self._failed)} could not be deleted')
        return f'{what}; ' + (' and '.join(why) or (
            'what else is there is not of images'))


def _mib(size: int) -> str:
    return f'{size / (1 << 20):.1f} MiB'
