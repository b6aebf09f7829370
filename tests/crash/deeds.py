# SPDX-License-Identifier: Apache-2.0

"""The maintainer's actions in workloads."""

import contextlib
from unittest import mock

from dedupd.compute.cache import cache_catalog
from dedupd.tasks import accounting
from dedupd.tasks import collector
from dedupd.tasks import evictor
from dedupd.tasks import merger
from dedupd.tasks import recompressor
from dedupd.tasks import scrubber
from dedupd.tasks import tierer
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from glance_dedup.maintenance import reserve
from glance_dedup.repository import conversion
from glance_dedup.repository import disk_survey
from glance_dedup.repository import space


@contextlib.contextmanager
def maintaining(repo):
    # The catalog's reserve is smaller than usual, so that states are written
    # fast; other tests of this process have their own.
    with mock.patch.object(reserve, 'RESERVE_BYTES', 1 << 16), \
            maintainer_role.Maintainer(repo) as maintainer:
        yield maintainer


def account(maintainer):
    return accounting.run_once(maintainer, pacing.Pace())


def merge(maintainer):
    return merger.run_once(maintainer, pacing.Pace())


def convert(repo, maintainer, image_id, data):
    """Give an image a recipe of plain bytes and a table (F2, F10).

    The second half of the file is the disk, in whole sectors.
    """
    begin = len(data) // 1024 * 512
    disk, rest = data[begin:], data[:begin]
    align = disk_survey.REST_ALIGN
    with repo.begin_conversion(image_id) as new:
        new.write(disk)
        new.add_zeros(align - len(disk))
        new.write(rest)
        new.begin_table(conversion.Table(len(disk), 'qcow2', True))
        new.add_derived([conversion.Derived(begin, align),
                         conversion.Derived(len(disk), 0)])
        header = new.finish()
        merger.count(maintainer, pacing.Pace(), header['transaction_id'])
        assert new.exchange()


def collect(maintainer, live_share=50, evacuate_share=10):
    return collector.run_once(maintainer, pacing.Pace(),
                              live_share=live_share,
                              evacuate_share=evacuate_share)


class Held(cache_catalog.Held):
    """A cache's list that records evicted images in the journal."""

    def __init__(self, repo, stage):
        self._stage = stage
        super().__init__(repo)

    def drop(self, image_id):
        self._stage.mark(op='delete', phase='begin', image=image_id)
        super().drop(image_id)
        self._stage.mark(op='delete', phase='end', image=image_id)


def evict(maintainer, held, freed, coming=lambda: 0):
    """Evict images until so many bytes are free."""
    with mock.patch.object(reserve, 'RESERVE_BYTES', 0):
        return evictor.run_once(
            maintainer, pacing.Pace(), held,
            space.taken(maintainer.repository.path) - freed, coming)


def recompress(worker, level=1, steps=None, worth=32, similar=False):
    """Run to the end, or stop after so many steps.

    :param worker: a maintainer or a helper
    :param worth: -1: files are exchanged though nothing is gained
    :param similar: similar blocks come next to each other
    """
    pace = pacing.Pace()
    with (contextlib.suppress(pacing.Stopped),
          mock.patch.object(recompressor, '_WORTH', worth)):
        if steps is not None:
            pace.step = stopping_after(pace, steps)
        recompressor.run_once(worker, pace, 'zstd', level, similar=similar)


def tier(maintainer, steps=None, **policy):
    """Move all possible groups; or stop after so many steps."""
    pace = pacing.Pace()
    with contextlib.suppress(pacing.Stopped):
        if steps is not None:
            pace.step = stopping_after(pace, steps)
        account(maintainer)
        return tierer.run_once(maintainer, pace, tierer.Policy(
            **{'everything': True, **policy}))


def stopping_after(pace, steps):
    """Return a step function that stops after so many calls."""
    left = iter(range(steps))

    def step(*args, **kwargs):
        if next(left, None) is None:
            raise pacing.Stopped()
        return pacing.Pace.step(pace, *args, **kwargs)
    return step


def scrub(maintainer, spare_threshold=0):
    return scrubber.run_once(maintainer, pacing.Pace(), full=True,
                             spare_threshold=spare_threshold)
