# SPDX-License-Identifier: Apache-2.0

"""The workloads that write to volumes, or make and delete them."""

import os

from tests.crash import deeds
from tests.crash import recorded_volume
from tests.crash import stages
from tests.crash import volume_model
from tests.support import repositories

WORKLOADS = {}
workload = stages.entering(WORKLOADS)
PART = volume_model.PART


@workload
def volume(stage):
    """A volume is flushed, stored as recipes, and closed without either."""
    stage.create()
    with stage.open() as repo:
        recorded_volume.create(stage, repo, 'disk', 2 * PART + 5)
        with recorded_volume.opened(stage, repo, 'disk') as disk:
            disk.write(0, 5)
            disk.write(PART - 2, 4)
            disk.flush()
            disk.write(3, 4)
            disk.write(8, 3)
            disk.checkpoint()
            disk.write(3, 2)
            disk.write(8, 9, 0)
            disk.flush()
            disk.write(2 * PART, 4)
            disk.checkpoint()
            disk.write(0, 2)
            disk.flush()
            disk.write(1, 2)
        with recorded_volume.opened(stage, repo, 'disk') as disk:
            disk.write(2, 2)
        with recorded_volume.opened(stage, repo, 'disk') as disk:
            disk.write(3, 2)
            disk.flush()
            disk.write(PART, 1)
        with recorded_volume.opened(stage, repo, 'disk') as disk:
            disk.write(4, 2)
            disk.checkpoint()


@workload
def volume_recycled(stage):
    """Journals over earlier ones, whose records have the same places."""
    stage.create()
    with stage.open() as repo:
        recorded_volume.create(stage, repo, 'disk', PART)
        with recorded_volume.opened(stage, repo, 'disk') as disk:
            for turn in range(5):
                for number in range(6 - turn):
                    disk.write(3 * number, 3)
                    if number % 3 == turn % 3:
                        disk.flush()
                if turn < 4:
                    disk.checkpoint()
        with recorded_volume.opened(stage, repo, 'disk') as disk:
            disk.write(3, 3)
            disk.checkpoint()
            disk.write(0, 3)
            disk.checkpoint()
            disk.write(0, 3)


def _numbers(stage, count):
    """Return so many sectors of content, and the image that has it."""
    first = stage.fresh(count)
    sectors = list(range(first, first + count))
    return sectors, volume_model.runs(sectors)


@workload
def volume_cloned(stage):
    """A volume is cloned from an image, which is deleted, and to images."""
    stage.create()
    with stage.open() as repo, deeds.maintaining(repo) as maintainer:
        sectors, spec = _numbers(stage, PART + 20)
        stage.put(repo, 'image', *spec)
        recorded_volume.create(stage, repo, 'disk', 2 * PART, 'image', sectors)
        with recorded_volume.opened(stage, repo, 'disk') as disk:
            disk.write(2, 3)
            disk.snapshot('first')
            stage.delete(repo, 'image')
            deeds.collect(maintainer, live_share=0, evacuate_share=0)
            disk.write(PART + 15, 9)
            disk.write(4, 2, 0)
            disk.flush()
            disk.snapshot('second')
            disk.write(6, 2)
            stage.delete(repo, 'first')
            deeds.collect(maintainer, live_share=90, evacuate_share=0)
        with recorded_volume.opened(stage, repo, 'disk') as disk:
            disk.checkpoint()


@workload
def volume_resized(stage):
    """A volume grows and shrinks, within a part and by parts.

    It does so with a base, too.
    """
    stage.create(block_size=2048, segment_size=8192)
    with stage.open() as repo:
        sectors, spec = _numbers(stage, 2 * PART - 7)
        stage.put(repo, 'image', *spec)
        recorded_volume.create(stage, repo, 'disk', 2 * PART, 'image', sectors)
        with recorded_volume.opened(stage, repo, 'disk') as disk:
            disk.write(PART - 3, 5)
            disk.resize(3 * PART + 3)
            disk.write(3 * PART - 1, 3)
            disk.resize(PART + 9)
            disk.write(PART + 7, 2)
            disk.flush()
            disk.write(1, 1)
            disk.resize(PART - 5)
            disk.resize(2 * PART)
            disk.write(PART - 6, 3)
        with recorded_volume.opened(stage, repo, 'disk') as disk:
            disk.resize(PART)
            disk.checkpoint()


@workload
def volume_rolled_back(stage):
    """A volume returns to images and snapshots of other sizes, and goes on."""
    stage.create(block_size=2048, segment_size=8192)
    with stage.open() as repo, deeds.maintaining(repo) as maintainer:
        sectors, spec = _numbers(stage, 2 * PART - 7)
        stage.put(repo, 'image', *spec)
        recorded_volume.create(stage, repo, 'disk', 3 * PART + 5)
        with recorded_volume.opened(stage, repo, 'disk') as disk:
            disk.write(5, 9)
            disk.write(2 * PART, 3)
            disk.snapshot('moment')
            moment = disk.sectors
            disk.write(6, 2)
            disk.flush()
            disk.write(PART, 2)
        recorded_volume.roll_back(stage, repo, 'disk', 'image', sectors)
        with recorded_volume.opened(stage, repo, 'disk') as disk:
            disk.write(PART - 3, 5)
            disk.checkpoint()
            disk.write(3, 1)
        deeds.collect(maintainer, live_share=0, evacuate_share=0)
        recorded_volume.roll_back(stage, repo, 'disk', 'moment', moment)
        with recorded_volume.opened(stage, repo, 'disk') as disk:
            disk.write(1, 1)
            disk.flush()


@workload
def volume_without_room(stage):
    """A new owner has room for editions, not for copies of records (V4)."""
    stage.create()
    with stage.open(reserve_mib=1) as repo:
        recorded_volume.create(stage, repo, 'disk', 2 * PART)
        with recorded_volume.opened(stage, repo, 'disk') as disk:
            disk.write(0, 9)
            disk.checkpoint()
            for turn in range(6):   # a record has one part at most
                disk.write(turn % 2 * PART, PART)
            disk.flush()
        with (stage.recorder.room((1 << 20) + (256 << 10)),
              recorded_volume.opened(stage, repo, 'disk') as disk):
            assert disk.info().journal_records == 0     # no copies
            disk.write(3, 3)
            disk.flush()


@workload
def volume_deleted(stage):
    """Volumes are deleted; one of them is made again under its name."""
    stage.create()
    with stage.open() as repo, deeds.maintaining(repo) as maintainer:
        sectors, spec = _numbers(stage, 30)
        stage.put(repo, 'image', *spec)
        for image, size in ((None, PART + 1), ('image', PART)):
            recorded_volume.create(stage, repo, 'disk', size, image,
                                   sectors if image else ())
            with recorded_volume.opened(stage, repo, 'disk') as disk:
                disk.write(1, 6)
                disk.checkpoint()
                disk.write(PART - 2, 2)
                disk.flush()
                disk.checkpoint()
                disk.write(4, 2)
            recorded_volume.delete(stage, repo, 'disk')
            deeds.collect(maintainer, live_share=0, evacuate_share=0)
        recorded_volume.create(stage, repo, 'other', PART)
        recorded_volume.delete(stage, repo, 'other')


@workload
def volume_tasks(stage):
    """The maintainer merges, collects and recompresses during writes."""
    stage.create()
    with stage.open() as repo, stage.open() as other, \
            deeds.maintaining(repo) as maintainer:
        sectors, spec = _numbers(stage, 40)
        recorded_volume.create(stage, repo, 'disk', PART)
        with recorded_volume.opened(stage, repo, 'disk') as disk:
            with repositories.holding(
                    os.path.join(stage.path, 'locks', 'groups'),
                    repositories.SHARE_BYTE + 1):
                stage.put(other, 'image', *spec)
            disk.write(8, 40, sectors[0])
            disk.checkpoint()
            deeds.account(maintainer)
            deeds.merge(maintainer)
            disk.write(10, 9)
            disk.checkpoint()
            deeds.collect(maintainer, live_share=0, evacuate_share=0)
            disk.write(70, 50)
            disk.checkpoint()
            deeds.recompress(maintainer, worth=-1)
            disk.write(30, 9)
            disk.flush()
            stage.delete(other, 'image')
            deeds.collect(maintainer, live_share=90, evacuate_share=70)
            disk.checkpoint()
            deeds.merge(maintainer)


@workload
def volume_meeting(stage):
    """Writes come in the middle of a checkpoint."""
    stage.create()
    with stage.open() as repo:
        recorded_volume.create(stage, repo, 'disk', 2 * PART)
        with recorded_volume.opened(stage, repo, 'disk') as disk:
            for call, path in (('linkat', 'images/v_'),
                               ('fsync', 'images'),
                               ('unlinkat', 'images/v_')):
                disk.write(3, 9)
                disk.write(PART - 2, 5)
                with stage.held(call, path, disk.checkpoint):
                    disk.write(5, 4)
                    disk.write(PART + 1, 9)


@workload
def volume_unsynced(stage):
    """Journals are frozen without a sync, amid flushes and many writes."""
    stage.create()
    with stage.open() as repo:
        recorded_volume.create(stage, repo, 'disk', 2 * PART)
        with recorded_volume.opened(stage, repo, 'disk') as disk:
            disk.write(3, 9)
            disk.flush()
            disk.write(9, 3)
            disk.write(PART - 2, 5)
            with stage.held('linkat', 'images/v_', disk.checkpoint):
                disk.write(5, 4)
                disk.write(PART + 1, 9)
                disk.flush()
                disk.write(7, 4)
            disk.write(1, 3)
            with stage.held('linkat', 'images/v_', disk.checkpoint):
                # More than is synced for the marks. A record has one part.
                for turn in range(18):
                    disk.write(turn % 2 * PART, PART)
                disk.write(5, 4)
            disk.write(6, 2)
            disk.checkpoint()
            disk.write(8, 9)
            with stage.held('linkat', 'images/v_', disk.checkpoint):
                disk.write(10, 3)
        with recorded_volume.opened(stage, repo, 'disk') as disk:
            disk.write(2, 2)
