# SPDX-License-Identifier: Apache-2.0

"""The workloads in which the maintainer changes something."""

import contextlib
import os
import shutil
from unittest import mock

from dedupd.compute.cache import cache_catalog
from dedupd.tasks import accounting
from dedupd.tasks import converter
from dedupd.tasks import exactindex
from dedupd.tasks import findings
from dedupd.tasks import scrubber
from dedupd.tasks import shareindex
from dedupd.tasks import sharescrub
from glance_dedup.base import pacing
from glance_dedup.maintenance import helper_daemon
from glance_dedup.maintenance import live_hosts
from glance_dedup.maintenance import maintainer_role
from tests.crash import deeds
from tests.crash import expected_state
from tests.crash.expected_state import make
from tests.crash import recorded_volume
from tests.crash import stages
from tests.support import bucket
from tests.support import maintenance
from tests.support import repositories

WORKLOADS = {}
workload = stages.entering(WORKLOADS)


@workload
def accounting_in_steps(stage):
    """Recipes are counted and uncounted in several steps, back and forth."""
    def scattered(*seeds):
        # Two pages of extents, and a half.
        return [(seed, 1) for n in range(128) for seed in (*seeds, 0)]
    stage.create()
    with stage.open() as repo, mock.patch.object(
            maintainer_role, 'BATCH_BYTES', 0):
        with deeds.maintaining(repo) as maintainer:
            stage.put(repo, 'a', *scattered(1, 2))
            stage.put(repo, 'b', *scattered(2, 3))
            deeds.account(maintainer)
            stage.delete(repo, 'a')
            _account_some(maintainer, 1)
            stage.put(repo, 'c', *scattered(1, 3))
            _account_some(maintainer, 3)
            stage.delete(repo, 'c')
            _account_some(maintainer, 1)
            stage.delete(repo, 'b')
            deeds.collect(maintainer, live_share=0, evacuate_share=0)


def _account_some(maintainer, steps):
    pace = pacing.Pace()
    pace.step = deeds.stopping_after(pace, steps)
    with contextlib.suppress(pacing.Stopped):
        accounting.run_once(maintainer, pace)


@workload
def deleter_killed(stage):
    """A deleter was killed before its last fsync; accounting finishes it."""
    stage.create()
    with stage.open() as repo:
        stage.put(repo, 'a', (1, 20), (2, 10))
        stage.put(repo, 'b', (1, 20), (3, 30))
        image = os.path.join(stage.path, 'images', 'a')
        spool = os.path.join(stage.path, 'spool')
        with deeds.maintaining(repo) as maintainer:
            deeds.account(maintainer)
            stage.mark(op='delete', phase='begin', image='a')
            os.link(image, os.path.join(spool, f'D-{"1" * 32}'))    # N9.3
            fd = os.open(spool, os.O_RDONLY)
            os.fsync(fd)                                            # N9.4
            os.close(fd)
            os.unlink(image)                                        # N9.5
            deeds.collect(maintainer, live_share=0, evacuate_share=0)
            stage.mark(op='seen', images=repo.images())
            stage.put(repo, 'c', (4, 5))


@workload
def collection(stage):
    """A collection frees, punches and unlinks; uploads go on meanwhile."""
    stage.create()
    with stage.open() as repo, stage.open() as other:
        for number in range(6):
            stage.put(repo, f'image-{number}', (number + 1, 20), (50, 5),
                      (0, 2))
        with deeds.maintaining(repo) as maintainer:
            deeds.collect(maintainer, live_share=0, evacuate_share=0)
            stage.delete(repo, 'image-1')
            stage.delete(repo, 'image-3')
            deeds.collect(maintainer, live_share=0, evacuate_share=0)
            stage.put(other, 'new', (2, 20), (60, 10))
            for number in (0, 2):
                stage.delete(repo, f'image-{number}')
            held = stage.begin(other, 'held', [(61, 10), (62, 10)])
            held.write(make([(61, 10)]))
            deeds.collect(maintainer, live_share=0, evacuate_share=0)
            held.write(make([(62, 10)]))
            stage.end(held, 'held')
            stage.delete(repo, 'new')
            deeds.collect(maintainer, live_share=0, evacuate_share=0)


@workload
def collection_of_all(stage):
    """Everything is deleted: the last group leaves only its number."""
    stage.create()
    with stage.open() as repo, stage.open() as other:
        with deeds.maintaining(repo) as maintainer:
            for number in range(2):
                stage.put(repo, f'one-{number}', (1, 70), (50, 5))
                stage.put(repo, f'two-{number}', (2, 20), (50, 5))
                deeds.collect(maintainer)
                stage.delete(repo, f'one-{number}')
                stage.delete(repo, f'two-{number}')
                with stage.held('renameat', 'groups/',
                                lambda: deeds.collect(maintainer)):
                    stage.put(other, f'new-{number}', (3, 20), (51, 5))
                stage.delete(other, f'new-{number}')
                deeds.collect(maintainer)
            deeds.collect(maintainer)
            stage.put(other, 'last', (1, 20), (52, 5))


@workload
def collection_meeting(stage):
    """Images come and go between the steps of accounting and collection."""
    stage.create()
    with stage.open() as repo, stage.open() as other:
        for number in range(7):
            stage.put(repo, f'image-{number}', (number + 1, 14), (50, 5))
        with deeds.maintaining(repo) as maintainer:
            deeds.collect(maintainer)
            for number, (call, path) in enumerate((
                    ('fsync', 'images'), ('fsync', 'fence'),
                    ('unlinkat', 'spool/D'), ('pwritev', 'groups/'),
                    ('fdatasync', 'groups/'), ('renameat', 'groups/'))):
                stage.delete(other, f'image-{number}')
                with stage.held(call, path, lambda: deeds.collect(
                        maintainer, live_share=95, evacuate_share=0)):
                    # The groups are just being collected, or next.
                    stage.put(other, f'new-{number}', (number + 1, 14),
                              (60 + number, 3))
                    if number:
                        stage.delete(other, f'new-{number - 1}')


@workload
def evicting(stage):
    """A cache evicts images, while others come; its list is written."""
    stage.create()
    # The list is only written at the explicit calls.
    with (stage.open() as repo, stage.open() as other,
          mock.patch.object(cache_catalog, 'SAVE_INTERVAL', 1e6)):
        held = deeds.Held(repo, stage)
        for number in range(6):
            stage.put(repo, f'image-{number}', (number + 1, 40), (50, 20))
            held.note(f'image-{number}', 512 * 60, None)
        held.used('image-0')
        held.save()
        with deeds.maintaining(repo) as maintainer:
            arriving = stage.begin(other, 'arriving', [(2, 40), (70, 40)])
            arriving.write(make([(2, 40)]))
            arriving.keep()
            with repo.open_image('image-2'):
                result = deeds.evict(maintainer, held, 20480,
                                     coming=lambda: 20480)
            assert result.evicted == ['image-1', 'image-3'], result
            arriving.write(make([(70, 40)]))
            stage.end(arriving, 'arriving')
            held.note('arriving', 512 * 80, None)
            held.save()
            result = deeds.evict(maintainer, held, 50000)
            assert result.evicted[0] == 'image-2', result
            stage.put(repo, 'image-1', (2, 40), (50, 20))
        held.close()


@workload
def rewriting(stage):
    """Groups with few live blocks are rewritten."""
    stage.create()
    with stage.open() as repo:
        for number in range(8):
            stage.put(repo, f'image-{number}', (number + 1, 12), (50, 5))
        with deeds.maintaining(repo) as maintainer:
            deeds.collect(maintainer)
            for number in (0, 2, 3, 5):
                stage.delete(repo, f'image-{number}')
            deeds.collect(maintainer, live_share=90, evacuate_share=0)
            stage.put(repo, 'new', (1, 12), (20, 3))
            stage.delete(repo, 'image-1')
            deeds.collect(maintainer, live_share=90, evacuate_share=0)


@workload
def recompressing(stage):
    """Sealed groups are recompressed while other operations go on.

    It is interrupted in the middle of a group, and leaves a group unchanged if
    it gains nothing.
    """
    stage.create()
    with stage.open() as repo, stage.open() as other:
        for number in range(6):
            stage.put(repo, f'image-{number}', (900 + number, 25), (50, 5))
        stage.put(repo, 'noise', (1, 100))
        with deeds.maintaining(repo) as maintainer:
            deeds.account(maintainer)
            deeds.recompress(maintainer, steps=1)
            stage.delete(repo, 'image-1')
            stage.put(other, 'while', (900, 25), (920, 5))
            deeds.collect(maintainer, live_share=0, evacuate_share=0)
            deeds.recompress(maintainer)
            stage.delete(repo, 'image-3')
            deeds.collect(maintainer, live_share=90, evacuate_share=0)
            for call, path in (('pwritev', 'spool/G'),
                               ('renameat', 'groups/'), ('fsync', 'groups')):
                with stage.held(call, path, lambda: deeds.recompress(
                        maintainer, level=19, worth=-1)):
                    stage.put(other, f'{call}-{path[0]}', (902, 25),
                              (904, 25))
                deeds.collect(maintainer, live_share=0, evacuate_share=0)
                deeds.recompress(maintainer, level=1, worth=-1)


@workload
def recompressing_partial(stage):
    """Partly filled groups are compressed again, between uploads to them."""
    stage.create()
    with stage.open() as repo, stage.open() as other:
        stage.put(repo, 'image-0', (900, 20))
        with deeds.maintaining(repo) as maintainer:
            deeds.recompress(maintainer, worth=-1)
            stage.put(other, 'image-1', (910, 10))
            deeds.recompress(maintainer, steps=1)
            for number, (call, path) in enumerate((
                    ('pwritev', 'spool/G'), ('renameat', 'groups/'),
                    ('fsync', 'groups'))):
                with stage.held(call, path, lambda: deeds.recompress(
                        maintainer, level=19, worth=-1)):
                    stage.put(other, f'{call}-{path[0]}', (920 + number, 10),
                              (900, 5))
                stage.put(repo, f'after-{number}', (940 + number, 4))
                deeds.recompress(maintainer, level=1, worth=-1)
            stage.delete(repo, 'image-0')
            deeds.collect(maintainer, live_share=90, evacuate_share=0)


@workload
def ordering(stage):
    """Similar blocks are placed together, in segments with lists.

    Blocks of these segments are freed, the groups rewritten, and packed again
    in another order and level. At last all is deleted, so that the last group
    with lists becomes a placeholder.
    """
    stage.create()
    with stage.open() as repo:
        stage.put(repo, 'before', (1, 10), (900, 20))
    with stage.open(codec='zstd') as repo, stage.open() as other:
        for number in range(4):
            # Blocks from 900 on compress, others do not.
            stage.put(repo, f'image-{number}', *(
                (start + 20 * number + i, 8) for i, start in enumerate(
                    (900, 100) * 3)))
        with deeds.maintaining(repo) as maintainer:
            deeds.account(maintainer)
            deeds.recompress(maintainer, worth=-1, similar=True)
            require_lists(stage.path)
            stage.delete(repo, 'image-1')
            stage.put(other, 'while', (900, 8), (920, 5))
            deeds.collect(maintainer, live_share=90, evacuate_share=0)
            for call, path in (('pwritev', 'spool/G'),
                               ('renameat', 'groups/'), ('fsync', 'groups')):
                with stage.held(call, path, lambda: deeds.recompress(
                        maintainer, level=19, worth=-1, similar=True)):
                    stage.put(other, f'{call}-{path[0]}', (100, 8), (904, 25))
                deeds.recompress(maintainer, level=1, worth=-1, similar=True)
            stage.delete(repo, 'image-2')
            deeds.collect(maintainer, live_share=90, evacuate_share=0)
            for image in repo.images():
                stage.delete(repo, image)
            deeds.collect(maintainer)
            require_placeholder(stage.path)
            stage.put(other, 'last', (900, 8), (100, 8))
            deeds.collect(maintainer)


def require_placeholder(path):
    """Require a single group, with no slot in use; it may have lists."""
    number, = maintenance.groups(path)
    file = repositories.Group(path, number)
    assert file.data[8] == 2 and file.record()[2] == 0, number


def require_lists(path):
    """Require that some segment has a list of slots."""
    for number in maintenance.groups(path):
        file = repositories.Group(path, number)
        for slot in range(file.slots):
            _, _, segment, place = file.entry(slot)
            if place >> 61 == repositories.LIVE and file.list_size(segment):
                return
    raise AssertionError('no segment has a list')


@workload
def helping(stage):
    """A helper recompresses and scrubs at the same time as the maintainer."""
    stage.create()
    with (stage.open() as repo, stage.open() as other,
          deeds.maintaining(repo) as maintainer,
          live_hosts.Hosts(stage.path) as hosts,
          helper_daemon.Helper(other, hosts) as helper):
        for number in range(6):
            stage.put(repo, f'image-{number}', (900 + number, 25), (50, 5))
        stage.put(repo, 'noise', (1, 100))
        deeds.account(maintainer)
        deeds.recompress(helper)
        sharescrub.run_once(helper, pacing.Pace(), lambda group: True)
        helper.save()
        findings.take(maintainer, pacing.Pace())
        stage.delete(repo, 'image-1')
        stage.put(repo, 'while', (900, 25), (920, 5))
        deeds.collect(maintainer, live_share=90, evacuate_share=0)
        deeds.recompress(helper, level=19, worth=-1)
        stage.delete(repo, 'image-3')
        deeds.collect(maintainer, live_share=90, evacuate_share=0)


@workload
def tiering(stage):
    """Groups become cold during uploads, lose blocks, and get new objects.

    At last all is deleted, so that the last cold group becomes a placeholder.
    """
    stage.create()
    with (bucket.beside(stage.path), stage.open() as repo,
          stage.open() as other):
        bucket.attach(repo)
        for number in range(5):
            stage.put(repo, f'image-{number}', (number + 1, 25), (50, 5))
        with deeds.maintaining(repo) as maintainer:
            deeds.account(maintainer)
            for steps in range(1, 5):
                deeds.tier(maintainer, steps=steps)
            for number, (call, path) in enumerate((
                    ('pwritev', 'spool/G'), ('fsync', 'spool/G'),
                    ('renameat', 'groups/'))):
                with stage.held(call, path, lambda: deeds.tier(maintainer)):
                    stage.put(other, f'while-{number}', (2, 25), (60, 25))
                stage.delete(other, f'while-{number}')
                stage.put(other, f'more-{number}', (200 + 70 * number, 70))
            require_cold(stage.path, 1)
            repositories.read_all(other, 'image-2')
            # Some blocks of a cold group are deleted.
            stage.delete(repo, 'image-1')
            stage.delete(repo, 'image-3')
            deeds.collect(maintainer, evacuate_share=0)
            deeds.tier(maintainer, live_share=95)
            bucket.forget_slices(repo)
            stage.put(other, 'while', (3, 25), (90, 20))
            stage.delete(repo, 'image-2')
            deeds.collect(maintainer, evacuate_share=70)
            last = max(maintenance.groups(stage.path))
            file = repositories.Group(stage.path, last)
            stage.put(other, 'fill', (500, file.slots - file.record()[2]))
            deeds.tier(maintainer)
            require_cold(stage.path, last)
            for image in repo.images():
                stage.delete(repo, image)
            deeds.collect(maintainer)
            require_placeholder(stage.path)
            stage.put(other, 'last', (1, 25), (100, 8))
            deeds.collect(maintainer)


def require_cold(path, number):
    """Require that the group is cold."""
    assert repositories.Group(path, number).data[8] == 3, number


@workload
def evacuation(stage):
    """Groups with few live blocks are evacuated, and then unlinked."""
    stage.create()
    with stage.open() as repo:
        for number in range(6):
            stage.put(repo, f'image-{number}', (number + 1, 28), (40, 2))
        with deeds.maintaining(repo) as maintainer:
            deeds.collect(maintainer)
            for number in (0, 2, 3):
                stage.delete(repo, f'image-{number}')
            deeds.collect(maintainer, live_share=0, evacuate_share=70)
            deeds.collect(maintainer, live_share=0, evacuate_share=70)
            stage.put(repo, 'new', (1, 28), (41, 10))
            deeds.collect(maintainer, live_share=0, evacuate_share=70)


@workload
def merging(stage):
    """Duplicates that the upload missed are merged.

    The last ones get lower addresses than those in the index.
    """
    def others(group):
        """Keep uploads from finding or appending to this group's blocks."""
        return repositories.holding(
            os.path.join(stage.path, 'locks', 'groups'),
            repositories.SHARE_BYTE + group)

    stage.create()
    shutil.rmtree(stage.filters, ignore_errors=True)
    with stage.open() as one:
        stage.put(one, 'a', (1, 20), (2, 10))
        with others(1):
            stage.put(one, 'b', (1, 20), (3, 10))
            stage.put(one, 'c', (2, 10), (1, 20), (3, 10))
            stage.put(one, 'd', (5, 10))
        with deeds.maintaining(one) as maintainer:
            deeds.account(maintainer)
            deeds.merge(maintainer)
            deeds.collect(maintainer, live_share=0, evacuate_share=0)
            stage.delete(one, 'b')
            with others(1):
                stage.put(one, 'b', (1, 20), (4, 10))
            with others(2):
                stage.put(one, 'e', (5, 10))
            deeds.merge(maintainer)
            stage.delete(one, 'a')
            deeds.account(maintainer)
            deeds.collect(maintainer, live_share=0, evacuate_share=0)


@workload
def merging_on_two_hosts(stage):
    """A helper writes runs, and merges and splits shards of the index.

    The maintainer takes the helper's results, and continues with the index.
    """
    stage.create()
    with (stage.open() as repo, stage.open(index='none') as other,
          deeds.maintaining(repo) as maintainer,
          live_hosts.Hosts(stage.path) as hosts,
          helper_daemon.Helper(other, hosts) as helper,
          mock.patch.multiple(exactindex, HELP_ENTRIES=1, HELP_PAUSE=0,
                              SORTED_RECORDS=25, SCAN_ENTRIES=10,
                              SPLIT_RECORDS=20)):
        stage.put(repo, 'a', (1, 20), (2, 10))
        deeds.account(maintainer)
        deeds.merge(maintainer)
        for image in 'bcd':
            stage.put(other, image, (1, 20), (3, 10))
            shareindex.run_once(helper, pacing.Pace())
        deeds.merge(maintainer)
        stage.delete(repo, 'a')
        deeds.collect(maintainer, live_share=0, evacuate_share=0)
        stage.put(other, 'e', (1, 20), (4, 10))
        shareindex.run_once(helper, pacing.Pace())
        deeds.merge(maintainer)


@workload
def nodedup(stage):
    """Copies that are meant as copies are merged, moved and freed (I14)."""
    stage.create()
    with stage.open() as repo:
        stage.put(repo, 'a', (1, 20), (2, 40), (1, 20), dedup=False)
        stage.put(repo, 'b', (1, 20), (3, 20), dedup=False)
        stage.put(repo, 'c', (1, 20), (2, 40))
        with deeds.maintaining(repo) as maintainer:
            deeds.account(maintainer)
            deeds.merge(maintainer)
            stage.delete(repo, 'a')
            assert deeds.collect(maintainer, live_share=0,
                                 evacuate_share=100).evacuated
            deeds.recompress(maintainer, worth=-1)
            stage.put(repo, 'd', (3, 20), (2, 40), dedup=False)
            deeds.merge(maintainer)


@workload
def nodedup_healed(stage):
    """A copy is healed by an ordinary block, and one by a copy (I14)."""
    stage.create()
    with stage.open() as repo:
        stage.put(repo, 'copy', (1, 20), (2, 10), dedup=False)
        stage.put(repo, 'shared', (1, 20), (3, 10))
        with deeds.maintaining(repo) as maintainer:
            deeds.account(maintainer)
            for image, number in ('copy', 5), ('shared', 15):
                stage.damage_block(repo, image, number, [image])
                assert deeds.scrub(maintainer).damaged == 1
                stage.mark(op='marked')
                assert deeds.scrub(maintainer).healed
                stage.mark(op='healed', images=[image])
                deeds.collect(maintainer, live_share=90)


@workload
def converting(stage):
    """An image is kept as its disk, merged, copied and deleted (F2)."""
    spec = (1, 20), (2, 10)
    stage.create()
    with stage.open() as repo:
        stage.put(repo, 'a', *spec)
        stage.put(repo, 'b', (3, 10), (1, 20), dedup=False)
        with deeds.maintaining(repo) as maintainer:
            deeds.account(maintainer)
            deeds.convert(repo, maintainer, 'a', make(spec))
            stage.copy(repo, 'a', 'c', *spec)
            deeds.merge(maintainer)
            stage.delete(repo, 'b')
            deeds.collect(maintainer, live_share=0, evacuate_share=100)
            stage.delete(repo, 'a')
            deeds.collect(maintainer, live_share=0, evacuate_share=0)


@workload
def converting_files(stage):
    """The task converts a compressed file, and back (F2, F4)."""
    spec = [(expected_state.QCOW2, 12)]
    stage.create()
    with stage.open() as repo:
        stage.put(repo, 'a', *spec)
        stage.put(repo, 'b', (1, 20))
        with deeds.maintaining(repo) as maintainer:
            for form in (converter.DISK, converter.FILE, converter.DISK):
                result = converter.run_once(maintainer, pacing.Pace(), ['a'],
                                            form)
                assert result.images == 1, result
            deeds.collect(maintainer, live_share=0, evacuate_share=0)
            stage.delete(repo, 'a')
            deeds.collect(maintainer, live_share=0, evacuate_share=0)


@workload
def scrubbing(stage):
    """A damaged block is set aside, marked, and healed by a later upload."""
    stage.create()
    with stage.open() as repo:
        stage.put(repo, 'a', (1, 20), (2, 10))
        stage.put(repo, 'b', (1, 20), (3, 10))
        stage.put(repo, 'c', (4, 10))
        with deeds.maintaining(repo) as maintainer:
            deeds.account(maintainer)
            stage.damage_block(repo, 'a', 5, ['a', 'b'])
            assert deeds.scrub(maintainer).damaged == 1
            stage.mark(op='marked')
            stage.put(repo, 'd', (1, 20), (5, 4))
            assert deeds.scrub(maintainer).healed
            stage.mark(op='healed', images=['a', 'b'])
            deeds.collect(maintainer, live_share=90)


@workload
def spares(stage):
    """Spare copies are made, and replace a damaged block."""
    stage.create()
    with stage.open() as repo:
        for image in 'abc':
            stage.put(repo, image, (1, 8), (ord(image), 6))
        with deeds.maintaining(repo) as maintainer:
            deeds.account(maintainer)
            deeds.scrub(maintainer, spare_threshold=3)
            stage.put(repo, 'd', (1, 8), (2, 5))
            stage.damage_block(repo, 'a', 3, [])
            deeds.scrub(maintainer, spare_threshold=3)
            deeds.collect(maintainer)
            stage.delete(repo, 'a')
            stage.delete(repo, 'b')
            deeds.collect(maintainer)
            deeds.scrub(maintainer, spare_threshold=3)


@workload
def catalog_rebuild(stage):
    """The catalog is lost, or older than the fence."""
    stage.create()
    with stage.open() as repo:
        for number in range(4):
            stage.put(repo, f'image-{number}', (number + 1, 12), (50, 5))
        catalog = os.path.join(stage.path, 'catalog')
        with deeds.maintaining(repo) as maintainer:
            deeds.collect(maintainer)
            deeds.merge(maintainer)
        older = stage.filters + '-catalog'
        shutil.copytree(catalog, older)
        stage.delete(repo, 'image-1')
        with deeds.maintaining(repo) as maintainer:
            deeds.collect(maintainer)
        _replace(catalog, older)
        stage.delete(repo, 'image-0')
        with deeds.maintaining(repo) as maintainer:
            deeds.collect(maintainer)
            stage.put(repo, 'image-0', (7, 12), (50, 5))
        _replace(catalog, None)
        with deeds.maintaining(repo) as maintainer:
            deeds.collect(maintainer)
            stage.delete(repo, 'image-2')
            maintainer.rebuild()
            deeds.collect(maintainer)


def _replace(catalog, other):
    """Replace the catalog by another one, or none; all of it is recorded."""
    for name in os.listdir(catalog):
        os.unlink(os.path.join(catalog, name))
    os.rmdir(catalog)
    if other is None:
        return
    os.mkdir(catalog)
    for name in sorted(os.listdir(other)):
        with open(os.path.join(other, name), 'rb') as f:
            content = f.read()
        if name.startswith('LOG'):
            continue
        # LevelDB makes CURRENT the same way: no crash leaves a part of it.
        made = os.path.join(catalog, '000000.dbtmp')
        with open(made, 'wb', buffering=0) as f:
            if content:
                f.write(content)
            os.fsync(f.fileno())
        os.rename(made, os.path.join(catalog, name))


@workload
def mark_lost(stage):
    """An image whose recipe is damaged is given up."""
    stage.create()
    with stage.open() as repo:
        stage.put(repo, 'a', (1, 20), (2, 10))
        stage.put(repo, 'b', (1, 20), (3, 10))
        with deeds.maintaining(repo) as maintainer:
            deeds.collect(maintainer)
            stage.damage_recipe('a')
            stage.delete(repo, 'b')
            stage.put(repo, 'c', (2, 10), (4, 10))
            deeds.collect(maintainer)
            stage.mark(op='delete', phase='begin', image='a')
            scrubber.mark_lost(maintainer, 'a')
            stage.mark(op='delete', phase='end', image='a')
            deeds.collect(maintainer)


# -- the first use of each feature (N15.1) ------------------------------------

@workload
def first_volume(stage):
    """A volume is made while the process that sets the feature waits."""
    stage.create()
    with stage.open() as repo, stage.open() as other:
        stage.put(repo, 'a', (1, 20), (2, 10))
        with stage.held('fsync', 'features', lambda: recorded_volume.create(
                stage, repo, 'first', 10)):
            recorded_volume.create(stage, other, 'second', 10)
            stage.put(other, 'b', (1, 20), (3, 10))
        with recorded_volume.opened(stage, repo, 'first') as volume:
            volume.write(0, 5)
            volume.flush()


@workload
def first_nodedup(stage):
    """Copies are stored while the process that sets the feature waits."""
    stage.create()
    with stage.open() as repo, stage.open() as other:
        stage.put(repo, 'a', (1, 20))
        with stage.held('fsync', 'features', lambda: stage.put(
                repo, 'b', (1, 20), (2, 10), dedup=False)):
            # It does not wait: the name is there, and it makes it durable.
            stage.put(other, 'c', (1, 20), (2, 10), dedup=False)


@workload
def first_lists(stage):
    """A helper makes lists while the maintainer, which sets it, waits."""
    stage.create()
    with (stage.open(codec='zstd') as repo, stage.open() as other,
          deeds.maintaining(repo) as maintainer,
          live_hosts.Hosts(stage.path) as hosts,
          helper_daemon.Helper(other, hosts) as helper):
        for number in range(6):     # they fill two groups
            stage.put(repo, f'image-{number}', *(
                (start + 20 * number + i, 5) for i, start in enumerate(
                    (900, 100) * 3)))
        deeds.account(maintainer)
        with stage.held('fsync', 'features', lambda: deeds.recompress(
                maintainer, worth=-1, similar=True)):
            deeds.recompress(helper, worth=-1, similar=True)
            require_lists(stage.path)
            stage.put(other, 'while', (900, 8), (920, 5))
        helper.save()


@workload
def first_cold_group(stage):
    """The first cold group sets both features that it needs."""
    stage.create()
    with bucket.beside(stage.path), stage.open() as repo:
        bucket.attach(repo)
        stage.put(repo, 'a', (1, 70))
        with deeds.maintaining(repo) as maintainer:
            deeds.tier(maintainer)
            require_cold(stage.path, 1)
            stage.put(repo, 'b', (2, 10))
