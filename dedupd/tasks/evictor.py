# SPDX-License-Identifier: Apache-2.0

"""Eviction: deletes images of a cache that takes too much of the disk.

The evictor first collects blocks that are dead already, which may be enough.
Then, round by round, it deletes images, the least recently used first, and
collects their blocks. How many images a round needs is a guess, because images
share blocks: the catalog has the number of blocks that no other image names.
Before each round the evictor measures the disk.

An image that any process reads stays: deleting it would free nothing until it
is closed (I12). Dead blocks that cannot be collected yet,
because a running pull holds their group (I6), count as given back. Otherwise
one pull would make the evictor delete all images.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import datetime
import os

from oslo_log import log

from dedupd.compute.cache import cache_catalog
from dedupd.tasks import accounting
from dedupd.tasks import collector
from dedupd.tasks import scrubber
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import pacing
from glance_dedup.maintenance import database
from glance_dedup.maintenance import maintainer_role
from glance_dedup.maintenance import recipes
from glance_dedup.repository import space

LOG = log.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Plan of an eviction."""

    images: list[str]
    """Image ids, in the order of deletion."""
    blocks: int
    """Blocks that no image would need any more."""
    over_bytes: int
    """Bytes to give back, beyond those of dead blocks."""
    in_use: int
    """Images that stay because they are being read."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of an eviction."""

    evicted: list[str]
    """Image ids, in the order of deletion."""
    disk_bytes: int
    """Bytes given back to the file system."""
    in_use: int
    """Images that stayed because they are being read."""
    refused: str | None
    """The reason why nothing was freed; None: freeing was allowed."""
    short: str | None
    """A sentence why the cache still takes too much; None: it does not."""
    failed: dict[str, str]
    """Images that could not be deleted, each with its error."""


def plan(maintainer: maintainer_role.Maintainer, pace: pacing.Pace,
         held: cache_catalog.Held, limit: int,
         coming: Callable[[], int] = lambda: 0,
         live_share: int = collector.LIVE_SHARE) -> Plan:
    """Plan an eviction; change nothing.

    The arguments are those of :func:`run_once`.
    """
    run = _Run(maintainer, pace, held, limit, coming, live_share)
    return maintainer.guard(run.plan, pace.step)


def run_once(maintainer: maintainer_role.Maintainer, pace: pacing.Pace,
             held: cache_catalog.Held, limit: int,
             coming: Callable[[], int] = lambda: 0,
             live_share: int = collector.LIVE_SHARE) -> Result:
    """Evict images while the cache takes more of the disk than it may.

    :param limit: bytes of disk that the whole cache may take; 0: the whole
        disk
    :param coming: returns the bytes that will be stored soon, and need room,
        too
    :param live_share: as for the collector
    :raises InvalidParameter: if the limit is too small to hold anything
    :raises pacing.Stopped: between two images; the evictions before it stand
    :raises NoSpaceError: if the disk has no room even to count
    """
    run = _Run(maintainer, pace, held, limit, coming, live_share)
    return maintainer.guard(run.run, pace.step)


class _Run:
    def __init__(self, maintainer: maintainer_role.Maintainer,
                 pace: pacing.Pace, held: cache_catalog.Held, limit: int,
                 coming: Callable[[], int], live_share: int) -> None:
        cache_catalog.require_limit(maintainer.repository, limit)
        self._maintainer = maintainer
        self._repository = maintainer.repository
        self._pace = pace
        self._held = held
        self._limit = limit
        self._coming = coming
        self._live_share = live_share
        self._evicted: list[str] = []
        self._failed: dict[str, str] = {}
        self._in_use: set[str] = set()
        self._left: set[str] = set()

    def plan(self) -> Plan:
        over = self._over()
        images: list[str] = []
        blocks = 0
        if over > 0:
            foreseen = self._foresee()
            dead, size = self._dead(foreseen)
            over -= dead * size
            self._look()
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
            self._look()
        while over > 0 and not refused:
            foreseen = self._foresee()
            dead, size = self._dead(foreseen)
            over = self._over() - dead * size
            self._step(most - over, most)
            chosen, _ = self._choose(over, size, foreseen)
            if not chosen:
                break   # that suffices, or no image is left
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

    # -- measuring ---------------------------------------------------------

    def _taken(self) -> int:
        path = self._repository.path
        with files.os_errors(f'cannot measure {path}'):
            self._held.taken = space.taken(path)
        return self._held.taken

    def _over(self) -> int:
        """Bytes to give back, to keep the limit or to make room on the disk.

        Room on the disk is a goal only if evicting can reach it. Where other
        files fill the disk, evicting would gain nothing.
        """
        over = 0
        if self._limit:
            # In this order, no byte counts as stored and as coming.
            over = self._taken() + self._coming() - self._limit
        missing = self._missing()
        return max(over, missing) if missing <= self._stored() else over

    def _missing(self) -> int:
        """Bytes that the disk lacks, counting the reserve as taken."""
        free, kept = self._repository.room()
        return kept + self._coming() - free

    def _stored(self) -> int:
        path = os.path.join(self._repository.path, 'groups')
        with files.os_errors(f'cannot measure {path}'):
            return space.below(path)

    def _foresee(self) -> accounting.Foreseen:
        """The catalog with all deleted and committed recipes accounted."""
        return accounting.Accountant(self._maintainer,
                                     self._pace).foresee()

    def _dead(self, foreseen: accounting.Foreseen) -> tuple[int, int]:
        """The number of dead, unfreed blocks; and a block's average bytes.

        The bytes are those that a block takes on the disk.
        """
        found = collector.plan(self._maintainer, self._pace,
                               live_share=self._live_share)
        dead = sum(group.free + group.pinned for group in found.groups)
        used = sum(foreseen.group(number)['used']
                   for number in self._maintainer.engine.groups())
        return dead, self._stored() // max(1, dead + used)

    # -- evicting ----------------------------------------------------------

    def _look(self) -> None:
        """Take the images that are here now as those that may be evicted.

        Images that come from now on are left to another run. Otherwise this
        one would not end where images come as fast as they go.
        """
        self._left = set(self._held.candidates())

    def _choose(self, over: int, size: int, foreseen: accounting.Foreseen
                ) -> tuple[list[str], int]:
        """The images to evict next, and the number of their own blocks."""
        batch = self._maintainer.catalog.batch()
        chosen: list[str] = []
        blocks = 0
        for image_id in self._held.candidates():
            if blocks * size >= over:
                break
            if batch.size > maintainer_role.BATCH_BYTES:
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

    def _blocks_of(self, image_id: str, batch: database.Batch,
                   foreseen: accounting.Foreseen) -> int:
        """The number of blocks that only this image names; 0: not known.

        If the batch has no room for the whole image, this counts only the
        blocks of its beginning.

        :param batch: un-counts the images chosen before, and this one after
            the call; never written
        """
        blocks = 0
        try:
            recipe = self._maintainer.engine.open_recipe(image_id)
        except (exceptions.ImageNotFound, *exceptions.UNREADABLE):
            return 0
        with (contextlib.closing(recipe),
              contextlib.suppress(recipes.RecipeError)):
            if recipe.complete and foreseen.counted(
                    recipe.header()['transaction_id']):
                extents = recipes.Extents(recipe)
                for page in range(extents.pages):
                    if batch.size > maintainer_role.BATCH_BYTES:
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
        """Collect once; return why nothing was freed, or None."""
        return collector.run_once(self._maintainer, self._pace,
                                  live_share=self._live_share).refused

    def _give_up_unreadable(self) -> bool:
        """Give up images with damaged recipes; return whether any went.

        Outside a cache only an operator does this (``image mark-lost``),
        because it loses the images. A cache pulls them again on the
        next request.
        """
        before = len(self._evicted)
        unreadable = self._maintainer.unreadable.reasons().keys()
        for image_id in sorted(unreadable & {*self._held.candidates()}):
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
        """Describe the data that take the room that could not be freed."""
        taken, coming = self._taken(), self._coming()
        if self._limit and taken + coming > self._limit:
            what = (f'{_mib(taken)} of disk are taken, and limit_mib allows '
                    f'{_mib(self._limit)}')
        else:
            free, kept = self._repository.room()
            what = (f'{_mib(free)} are free on the disk, and reserve_mib '
                    f'keeps {_mib(kept)}')
        if coming:
            what += f'; {_mib(coming)} are on their way'
        why = []
        if self._in_use:
            why.append(f'{len(self._in_use)} images are being read')
        if self._failed:
            why.append(f'{len(self._failed)} could not be deleted')
        return f'{what}; ' + (' and '.join(why) or (
            'the rest does not come from images'))


def _mib(size: int) -> str:
    return f'{size / (1 << 20):.1f} MiB'
