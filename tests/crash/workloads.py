# SPDX-License-Identifier: Apache-2.0

"""The workloads whose crash states are explored.

A workload is a function of a :class:`Stage`, named in :data:`WORKLOADS` by the
decorator: that is the one place to which a later task that changes something
is added. It is run under record from the creation of the repository on, in
a process of its own. It does its deeds through the stage, which marks in the
journal what begins and what is acknowledged. Those that use volumes are in
``volume_workloads.py``.
"""

import contextlib
import os
import random
import shutil
import struct
from unittest import mock

from dedupd.cache import arrivals as arrivals_module
from dedupd.cache import index as index_module
from dedupd.serve import incoming_replicas
from dedupd.tasks import accounting
from dedupd.tasks import collector
from dedupd.tasks import evictor
from dedupd.tasks import exactindex
from dedupd.tasks import findings
from dedupd.tasks import merger
from dedupd.tasks import recompressor
from dedupd.tasks import scrubber
from dedupd.tasks import shareindex
from dedupd.tasks import sharescrub
from glance_dedup.base import files
from glance_dedup.base import task
from glance_dedup.maintenance import helper as helper_module
from glance_dedup.maintenance import hosts as hosts_module
from glance_dedup.maintenance import maintainer as maintainer_module
from glance_dedup.maintenance import reserve
from glance_dedup.repository import layout
from glance_dedup.repository import space
from glance_dedup.repository import upgrade
from glance_dedup.transfer import assembler
from glance_dedup.transfer import pull
from tests.crash.expectation import make
from tests.crash.expectation import SECTORS
from tests.support import fake_peer
from tests.support import maintenance
from tests.support import replicas
from tests.support import repositories

WORKLOADS = {}


def entering(table):
    """A decorator that enters a workload, under its name, into a table."""
    def enter(function):
        table[function.__name__.replace('_', '-')] = function
        return function
    return enter


workload = entering(WORKLOADS)


class Stage:
    """The repository in which a workload works.

    :param world: the directory that is recorded; the repository is in it
    :param side: a directory for what is not part of it, as the filter
    """

    def __init__(self, world, side, recorder):
        self.path = os.path.join(world, 'repository')
        self.filters = os.path.join(side, 'filter')
        self.mark = recorder.mark
        self.recorder = recorder
        self.volumes = {}       #: by name: volume_model.Model
        self._fresh = SECTORS

    def fresh(self, count):
        """The first of so many numbers of sectors that nobody has had."""
        self._fresh += count
        return self._fresh - count

    # -- what users do ----------------------------------------------------

    def create(self, **parameters):
        self.mark(op='create', phase='begin')
        repositories.create(self.path, **{
            'block_size': 512, 'group_slots': 64, 'segment_size': 4096,
            **parameters})
        self.mark(op='create', phase='end')

    def open(self, **options):
        return repositories.open_repository(self.path, **{
            'filter_dir': self.filters, 'codec': 'none', 'threads': 0,
            **options})

    def begin(self, repo, image, spec, **options):
        self.mark(op='put', phase='begin', image=image, spec=spec)
        return repo.begin(image, **options)

    def end(self, transaction, image):
        transaction.commit()
        self.mark(op='put', phase='end', image=image)

    def put(self, repo, image, *spec, **options):
        with self.begin(repo, image, spec, **options) as transaction:
            transaction.write(make(spec))
            self.end(transaction, image)

    def abort(self, repo, image, *spec):
        with self.begin(repo, image, spec) as transaction:
            transaction.write(make(spec))
            transaction.abort()
        self.mark(op='put', phase='aborted', image=image)

    def receive(self, repo, home, image, *spec, lots=None):
        """All that another repository sends; or some lots, and no more."""
        self.mark(op='put', phase='begin', image=image, spec=spec)
        with contextlib.closing(replicas.Sending(home, image)) as sending:
            with sending.replica(repo) as replica:
                sending.deliver(replica, lots)
                if lots is None:
                    self.end(replica, image)
        if lots is not None:
            self.mark(op='put', phase='aborted', image=image)

    def arrive(self, repo, home, image, *spec, most=None):
        """What comes from another repository, read while it comes."""
        client = fake_peer.Client(home, most)
        arrivals = arrivals_module.Arrivals(repo, lambda token: client)
        data = make(spec)
        self.mark(op='put', phase='begin', image=image, spec=spec)
        with contextlib.closing(arrivals.open(
                image, None, None, held_back=False)) as reading:
            view = memoryview(bytearray(len(data)))
            if most is None:
                # The end first, which is fetched apart from the order.
                reading.readinto(view[-512:], len(data) - 512)
                reading.readinto(view, 0)
                assert view == data
            repositories.eventually(lambda: not arrivals._arrivals)
            self.mark(op='put', image=image,
                      phase='end' if most is None else 'aborted')

    def copy(self, repo, source, image, *spec, **options):
        """Store an image's bytes as another image."""
        self.mark(op='put', phase='begin', image=image, spec=spec)
        with repo.open_image(source) as opened:
            repo.copy(opened, image, **options)
        self.mark(op='put', phase='end', image=image)

    def delete(self, repo, image):
        self.mark(op='delete', phase='begin', image=image)
        repo.delete(image)
        self.mark(op='delete', phase='end', image=image)

    def held(self, call, path, work):
        """Do something while `work`, in a thread, waits within."""
        return self.recorder.held(call, f'repository/{path}', work)

    # -- damage -----------------------------------------------------------

    def damage_block(self, repo, image, number, hit):
        """Change a byte of a block, as a failing disk would: it is durable.

        :param hit: the images that lose it; none if a spare copy stands in
        """
        group, slot = maintenance.blocks_of(repo, image)[number]
        file = repositories.Group(self.path, group)
        fingerprint, _, segment, place = file.entry(slot)
        self.mark(op='damage', images=hit,
                  block=fingerprint.hex() if hit else None)
        _overwrite(file.path, segment + 32 + (place & 0xfffff) + 5)

    def damage_recipe(self, image):
        self.mark(op='damage', images=[image])
        _overwrite(os.path.join(self.path, 'images', image), 4096 + 20)


def _overwrite(path, offset):
    fd = os.open(path, os.O_RDWR)
    byte = os.pread(fd, 1, offset)[0] ^ 255
    os.pwrite(fd, bytes([byte]), offset)
    os.fsync(fd)
    os.close(fd)


# -- what the maintainer does -------------------------------------------------

@contextlib.contextmanager
def maintaining(repo):
    # Less room for the catalog than otherwise, so that states are written
    # fast; and other tests of this process have theirs.
    with mock.patch.object(reserve, 'RESERVE_BYTES', 1 << 16), \
            maintainer_module.Maintainer(repo) as maintainer:
        yield maintainer


def account(maintainer):
    return accounting.run_once(maintainer, task.Pace())


def merge(maintainer):
    return merger.run_once(maintainer, task.Pace())


def collect(maintainer, live_share=50, evacuate_share=10):
    return collector.run_once(maintainer, task.Pace(),
                              live_share=live_share,
                              evacuate_share=evacuate_share)


class Held(index_module.Held):
    """Tells the journal which images it deletes."""

    def __init__(self, repo, stage):
        self._stage = stage
        super().__init__(repo)

    def drop(self, image_id):
        self._stage.mark(op='delete', phase='begin', image=image_id)
        super().drop(image_id)
        self._stage.mark(op='delete', phase='end', image=image_id)


def evict(maintainer, held, freed, coming=0):
    """As much as it takes to give so many bytes back."""
    with mock.patch.object(reserve, 'RESERVE_BYTES', 0):
        return evictor.run_once(
            maintainer, task.Pace(), held,
            space.taken(maintainer.repository.path) - freed, coming)


def recompress(worker, level=1, steps=None, worth=32):
    """All that is to be done; or so many steps, then it makes way.

    Similar blocks come next to each other where the format knows that.

    :param worker: a maintainer or a helper
    :param worth: -1: files are exchanged though nothing is gained
    """
    pace = task.Pace()
    with (contextlib.suppress(task.Stopped),
          mock.patch.object(recompressor, '_WORTH', worth)):
        if steps is not None:
            pace.step = _stopping_after(pace, steps)
        recompressor.run_once(worker, pace, 'zstd', level, similar=True)


def _stopping_after(pace, steps):
    left = iter(range(steps))

    def step(*args, **kwargs):
        if next(left, None) is None:
            raise task.Stopped()
        return task.Pace.step(pace, *args, **kwargs)
    return step


def scrub(maintainer, spare_threshold=0):
    return scrubber.run_once(maintainer, task.Pace(), full=True,
                             spare_threshold=spare_threshold)


# -- the workloads ------------------------------------------------------------

@workload
def create(stage):
    """The repository's own creation, and the first upload."""
    stage.create()
    with stage.open() as repo:
        stage.put(repo, 'first', (1, 5))


@workload
def store(stage):
    """Uploads that share blocks; two handles; groups fill."""
    stage.create()
    with stage.open() as one, stage.open() as two:
        stage.put(one, 'a', (1, 20), (0, 3), (2, 10))
        stage.put(two, 'b', (1, 20), (3, 30), (4, 12))
        first = stage.begin(one, 'c', [(5, 40), (6, 40)])
        second = stage.begin(two, 'd', [(5, 40), (2, 10), (7, 9)])
        first.write(make([(5, 40)]))
        second.write(make([(5, 40), (2, 10)]))
        first.write(make([(6, 40)]))
        second.write(make([(7, 9)]))
        stage.end(second, 'd')
        stage.end(first, 'c')
        stage.put(one, 'e', (6, 40), (7, 9))


@workload
def store_kept(stage):
    """A sync point within a transaction that others build upon."""
    stage.create()
    with stage.open() as one, stage.open() as two:
        first = stage.begin(one, 'a', [(1, 30), (2, 10)])
        first.write(make([(1, 30)]))
        first.keep()
        stage.put(two, 'b', (1, 30), (3, 5))
        first.write(make([(2, 10)]))
        first.abort()
        stage.mark(op='put', phase='aborted', image='a')
        stage.put(one, 'c', (1, 30), (2, 10), (4, 40))
        stage.abort(two, 'd', (5, 50), (1, 30))
        stage.put(two, 'd', (5, 50))


@workload
def receive(stage):
    """Images that another site sends: kept in the middle, and compared."""
    stage.create()
    side = os.path.dirname(stage.filters)
    with _sites(side, 512, 1024) as (home, other), stage.open() as repo, \
            mock.patch.object(incoming_replicas, 'SYNC_BYTES', 20 * 512):
        for image, spec in (('a', [(1, 40), (0, 8), (2, 30)]),
                            ('b', [(1, 40), (3, 30), (4, 10)])):
            repositories.put(home, image, make(spec))
        stage.receive(repo, home, 'a', (1, 40), (0, 8), (2, 30))
        stage.receive(repo, home, 'b', (1, 40), (3, 30), (4, 10), lots=3)
        stage.receive(repo, home, 'b', (1, 40), (3, 30), (4, 10))
        # It is there, and that is found.
        replicas.receive(repo, home, 'a')
        # From where blocks are of another size: cut anew.
        repositories.put(other, 'c', make([(2, 30), (0, 9), (5, 20)]))
        stage.receive(repo, other, 'c', (2, 30), (0, 9), (5, 20))


@workload
def arrive(stage):
    """Images that come while they are read: sync points, and a second try."""
    stage.create()
    side = os.path.dirname(stage.filters)
    with _sites(side, 512) as (home,), stage.open() as repo, \
            mock.patch.object(assembler, 'READ_LOT_BYTES', 16 * 512), \
            mock.patch.object(pull, 'SYNC_BYTES', 20 * 512):
        for image, spec in (('a', [(1, 40), (0, 8), (2, 30)]),
                            ('b', [(1, 40), (3, 70), (4, 10)])):
            repositories.put(home, image, make(spec))
        stage.arrive(repo, home, 'a', (1, 40), (0, 8), (2, 30))
        stage.arrive(repo, home, 'b', (1, 40), (3, 70), (4, 10), most=3)
        stage.put(repo, 'c', (3, 20), (5, 9))
        stage.arrive(repo, home, 'b', (1, 40), (3, 70), (4, 10))


@contextlib.contextmanager
def _sites(directory, *block_sizes):
    """Repositories that are not recorded."""
    with contextlib.ExitStack() as stack:
        found = []
        for size in block_sizes:
            path = os.path.join(directory, f'site-{size}')
            shutil.rmtree(path, ignore_errors=True)
            repositories.create(path, block_size=size, segment_size=4096)
            found.append(stack.enter_context(
                repositories.open_repository(path)))
        yield found


@workload
def store_threads(stage):
    """With a pool of threads, and compression."""
    stage.create()
    with stage.open(threads=2, codec='zstd') as repo:
        stage.put(repo, 'a', (1, 40), (0, 8), (2, 30))
        stage.put(repo, 'b', (2, 30), (3, 50))


@workload
def store_phases(stage):
    """Twins that begin at other sectors: what is under way is cut anew."""
    stage.create(block_size=2048, segment_size=8192)
    with stage.open() as one, stage.open() as two:
        stage.put(one, 'a', (1, 100), (0, 12), (2, 100))
        first = stage.begin(two, 'b', [(3, 1), (1, 100), (0, 12), (2, 100)])
        first.write(make([(3, 1), (1, 100)]))
        stage.put(one, 'c', (4, 3), (1, 100), (5, 70))
        first.write(make([(0, 12), (2, 100)]))
        stage.end(first, 'b')
        stage.abort(one, 'd', (6, 2), (5, 70), (7, 40))
        stage.put(one, 'd', (6, 2), (5, 70), (7, 40))
        assert one.statistics()['phase_changes'] > 1


@workload
def store_cut(stage):
    """Blocks cut by their content: stored, pulled, merged and collected."""
    stage.create(cutting='gear 64 256')
    with stage.open() as one, stage.open() as two:
        stage.put(one, 'a', (1, 20), (0, 3), (2, 15))
        spec = [(3, 1), (1, 20), (0, 3), (2, 15)]
        first = stage.begin(two, 'b', spec)
        first.write(make(spec)[:9999])
        stage.put(one, 'c', (4, 9), (1, 20))
        first.write(make(spec)[9999:])
        stage.end(first, 'b')
        first = stage.begin(two, 'd', [(5, 6), (0, 2)])
        first.write_blocks(make([(5, 6)]), struct.pack('<7I', 1, 511, 512, 512,
                                                       512, 512, 512))
        first.add_zeros(1024)
        stage.end(first, 'd')
        with repositories.collector_in(stage.path, 1, 2):
            stage.put(two, 'e', (6, 2), (2, 15))
        with maintaining(one) as maintainer:
            merge(maintainer)
            stage.delete(one, 'a')
            collect(maintainer)
            stage.delete(one, 'c')
            collect(maintainer, live_share=0, evacuate_share=0)


@workload
def store_direct(stage):
    """Beside the page cache: a page is written again behind what counts."""
    stage.create()
    with (stage.open(direct_io='on') as one,
          stage.open(direct_io='on') as two, stage.open() as usual):
        stage.put(one, 'a', (1, 11), (2, 2))
        stage.put(two, 'b', (1, 11), (3, 9))
        stage.abort(one, 'c', (4, 7), (5, 3))
        stage.put(usual, 'd', (4, 3), (2, 2))
        first = stage.begin(one, 'e', [(6, 10), (7, 5)])
        first.write(make([(6, 10)]))
        first.keep()
        stage.put(two, 'f', (6, 10), (8, 20))
        first.write(make([(7, 5)]))
        stage.end(first, 'e')


@workload
def store_meeting(stage):
    """Uploads that meet others in the middle of their syncs and commits."""
    stage.create()
    with stage.open() as one, stage.open() as two:
        stage.put(two, 'first', (9, 4))
        for number, (call, path) in enumerate((
                ('fdatasync', 'groups/'), ('pwritev', 'groups/'),
                ('fsync', 'spool'), ('linkat', 'images/'),
                ('fsync', 'images'))):
            seed = 10 * number
            with stage.held(call, path, lambda: stage.put(
                    one, f'one-{number}', (seed + 1, 30), (seed + 2, 10))):
                stage.put(two, f'two-{number}', (seed + 1, 30), (seed + 3, 5))


@workload
def delete(stage):
    """Deletes: of what is counted, of what is not, and the id used again."""
    stage.create()
    with stage.open() as repo:
        stage.put(repo, 'a', (1, 20), (2, 10))
        stage.put(repo, 'b', (1, 20), (3, 30))
        with maintaining(repo) as maintainer:
            account(maintainer)
            stage.put(repo, 'c', (3, 30), (4, 5))
            stage.delete(repo, 'a')
            stage.delete(repo, 'c')
            stage.put(repo, 'a', (5, 7), (3, 30))
            account(maintainer)
            stage.delete(repo, 'a')
            stage.put(repo, 'a', (4, 5), (2, 10))
            stage.delete(repo, 'b')
            account(maintainer)


@workload
def accounting_in_steps(stage):
    """Recipes that take several steps: counted, un-counted, taken back."""
    def scattered(*seeds):
        # Two pages of extents, and a half.
        return [(seed, 1) for n in range(128) for seed in (*seeds, 0)]
    stage.create()
    with stage.open() as repo, mock.patch.object(
            maintainer_module, 'BATCH_BYTES', 0):
        with maintaining(repo) as maintainer:
            stage.put(repo, 'a', *scattered(1, 2))
            stage.put(repo, 'b', *scattered(2, 3))
            account(maintainer)
            stage.delete(repo, 'a')
            _account_some(maintainer, 1)
            stage.put(repo, 'c', *scattered(1, 3))
            _account_some(maintainer, 3)
            stage.delete(repo, 'c')
            _account_some(maintainer, 1)
            stage.delete(repo, 'b')
            collect(maintainer, live_share=0, evacuate_share=0)


def _account_some(maintainer, steps):
    pace = task.Pace()
    pace.step = _stopping_after(pace, steps)
    with contextlib.suppress(task.Stopped):
        accounting.run_once(maintainer, pace)


@workload
def deleter_killed(stage):
    """A deleter was killed before its last fsync; what it did is settled."""
    stage.create()
    with stage.open() as repo:
        stage.put(repo, 'a', (1, 20), (2, 10))
        stage.put(repo, 'b', (1, 20), (3, 30))
        image = os.path.join(stage.path, 'images', 'a')
        spool = os.path.join(stage.path, 'spool')
        with maintaining(repo) as maintainer:
            account(maintainer)
            stage.mark(op='delete', phase='begin', image='a')
            os.link(image, os.path.join(spool, f'D-{"1" * 32}'))    # N9.3
            fd = os.open(spool, os.O_RDONLY)
            os.fsync(fd)                                            # N9.4
            os.close(fd)
            os.unlink(image)                                        # N9.5
            collect(maintainer, live_share=0, evacuate_share=0)
            stage.mark(op='seen', images=repo.images())
            stage.put(repo, 'c', (4, 5))


@workload
def collection(stage):
    """Freeing, punching, a group unlinked; uploads go on meanwhile."""
    stage.create()
    with stage.open() as repo, stage.open() as other:
        for number in range(6):
            stage.put(repo, f'image-{number}', (number + 1, 20), (50, 5),
                      (0, 2))
        with maintaining(repo) as maintainer:
            collect(maintainer, live_share=0, evacuate_share=0)
            stage.delete(repo, 'image-1')
            stage.delete(repo, 'image-3')
            collect(maintainer, live_share=0, evacuate_share=0)
            stage.put(other, 'new', (2, 20), (60, 10))
            for number in (0, 2):
                stage.delete(repo, f'image-{number}')
            held = stage.begin(other, 'held', [(61, 10), (62, 10)])
            held.write(make([(61, 10)]))
            collect(maintainer, live_share=0, evacuate_share=0)
            held.write(make([(62, 10)]))
            stage.end(held, 'held')
            stage.delete(repo, 'new')
            collect(maintainer, live_share=0, evacuate_share=0)


@workload
def collection_of_all(stage):
    """Everything is deleted: the last group leaves only its number."""
    stage.create()
    with stage.open() as repo, stage.open() as other:
        with maintaining(repo) as maintainer:
            for number in range(2):
                stage.put(repo, f'one-{number}', (1, 70), (50, 5))
                stage.put(repo, f'two-{number}', (2, 20), (50, 5))
                collect(maintainer)
                stage.delete(repo, f'one-{number}')
                stage.delete(repo, f'two-{number}')
                with stage.held('renameat', 'groups/',
                                lambda: collect(maintainer)):
                    stage.put(other, f'new-{number}', (3, 20), (51, 5))
                stage.delete(other, f'new-{number}')
                collect(maintainer)
            collect(maintainer)
            stage.put(other, 'last', (1, 20), (52, 5))


@workload
def collection_meeting(stage):
    """Uploads and deletes between the steps of accounting and collection."""
    stage.create()
    with stage.open() as repo, stage.open() as other:
        for number in range(7):
            stage.put(repo, f'image-{number}', (number + 1, 14), (50, 5))
        with maintaining(repo) as maintainer:
            collect(maintainer)
            for number, (call, path) in enumerate((
                    ('fsync', 'images'), ('fsync', 'fence'),
                    ('unlinkat', 'spool/D'), ('pwritev', 'groups/'),
                    ('fdatasync', 'groups/'), ('renameat', 'groups/'))):
                stage.delete(other, f'image-{number}')
                with stage.held(call, path, lambda: collect(
                        maintainer, live_share=95, evacuate_share=0)):
                    # What is just being collected, or about to be.
                    stage.put(other, f'new-{number}', (number + 1, 14),
                              (60 + number, 3))
                    if number:
                        stage.delete(other, f'new-{number - 1}')


@workload
def evicting(stage):
    """A cache lets images go, while others come; its list is written."""
    stage.create()
    # By nothing but what is said here.
    with (stage.open() as repo, stage.open() as other,
          mock.patch.object(index_module, 'SAVE_INTERVAL', 1e6)):
        held = Held(repo, stage)
        for number in range(6):
            stage.put(repo, f'image-{number}', (number + 1, 40), (50, 20))
            held.note(f'image-{number}', 512 * 60, None)
        held.used('image-0')
        held.save()
        with maintaining(repo) as maintainer:
            arriving = stage.begin(other, 'arriving', [(2, 40), (70, 40)])
            arriving.write(make([(2, 40)]))
            arriving.keep()
            with repo.open_image('image-2'):
                result = evict(maintainer, held, 20480, coming=20480)
            assert result.evicted == ['image-1', 'image-3'], result
            arriving.write(make([(70, 40)]))
            stage.end(arriving, 'arriving')
            held.note('arriving', 512 * 80, None)
            held.save()
            result = evict(maintainer, held, 50000)
            assert result.evicted[0] == 'image-2', result
            stage.put(repo, 'image-1', (2, 40), (50, 20))
        held.close()


@workload
def rewriting(stage):
    """Groups of which little lives are rewritten."""
    stage.create()
    with stage.open() as repo:
        for number in range(8):
            stage.put(repo, f'image-{number}', (number + 1, 12), (50, 5))
        with maintaining(repo) as maintainer:
            collect(maintainer)
            for number in (0, 2, 3, 5):
                stage.delete(repo, f'image-{number}')
            collect(maintainer, live_share=90, evacuate_share=0)
            stage.put(repo, 'new', (1, 12), (20, 3))
            stage.delete(repo, 'image-1')
            collect(maintainer, live_share=90, evacuate_share=0)


@workload
def recompressing(stage):
    """Sealed groups are compressed anew, with all others going on.

    It makes way in the middle of one, and keeps those where it is in vain.
    """
    stage.create()
    with stage.open() as repo, stage.open() as other:
        for number in range(6):
            stage.put(repo, f'image-{number}', (900 + number, 25), (50, 5))
        stage.put(repo, 'noise', (1, 100))
        with maintaining(repo) as maintainer:
            account(maintainer)
            recompress(maintainer, steps=1)
            stage.delete(repo, 'image-1')
            stage.put(other, 'while', (900, 25), (920, 5))
            collect(maintainer, live_share=0, evacuate_share=0)
            recompress(maintainer)
            stage.delete(repo, 'image-3')
            collect(maintainer, live_share=90, evacuate_share=0)
            for call, path in (('pwritev', 'spool/G'),
                               ('renameat', 'groups/'), ('fsync', 'groups')):
                with stage.held(call, path, lambda: recompress(
                        maintainer, level=19, worth=-1)):
                    stage.put(other, f'{call}-{path[0]}', (902, 25),
                              (904, 25))
                collect(maintainer, live_share=0, evacuate_share=0)
                recompress(maintainer, level=1, worth=-1)


@workload
def recompressing_partial(stage):
    """Partly filled groups are compressed anew, between uploads to them."""
    stage.create()
    with stage.open() as repo, stage.open() as other:
        stage.put(repo, 'image-0', (900, 20))
        with maintaining(repo) as maintainer:
            recompress(maintainer, worth=-1)
            stage.put(other, 'image-1', (910, 10))
            recompress(maintainer, steps=1)
            for number, (call, path) in enumerate((
                    ('pwritev', 'spool/G'), ('renameat', 'groups/'),
                    ('fsync', 'groups'))):
                with stage.held(call, path, lambda: recompress(
                        maintainer, level=19, worth=-1)):
                    stage.put(other, f'{call}-{path[0]}', (920 + number, 10),
                              (900, 5))
                stage.put(repo, f'after-{number}', (940 + number, 4))
                recompress(maintainer, level=1, worth=-1)
            stage.delete(repo, 'image-0')
            collect(maintainer, live_share=90, evacuate_share=0)


def ordering(stage):
    """Similar blocks come next to each other, in segments with lists.

    The repository is upgraded first. Blocks of these segments are freed, the
    groups rewritten, and packed again in another order and level.
    """
    stage.create()
    with stage.open() as repo:
        stage.put(repo, 'before', (1, 10), (900, 20))
        upgrade.upgrade(repo, lambda *arguments: None, similar=True)
    with stage.open(codec='zstd') as repo, stage.open() as other:
        for number in range(4):
            # Those from 900 on compress, others do not.
            stage.put(repo, f'image-{number}', *(
                (start + 20 * number + i, 8) for i, start in enumerate(
                    (900, 100) * 3)))
        with maintaining(repo) as maintainer:
            account(maintainer)
            recompress(maintainer, worth=-1)
            need_lists(stage.path)
            stage.delete(repo, 'image-1')
            stage.put(other, 'while', (900, 8), (920, 5))
            collect(maintainer, live_share=90, evacuate_share=0)
            for call, path in (('pwritev', 'spool/G'),
                               ('renameat', 'groups/'), ('fsync', 'groups')):
                with stage.held(call, path, lambda: recompress(
                        maintainer, level=19, worth=-1)):
                    stage.put(other, f'{call}-{path[0]}', (100, 8), (904, 25))
                recompress(maintainer, level=1, worth=-1)
            stage.delete(repo, 'image-2')
            collect(maintainer, live_share=90, evacuate_share=0)


def need_lists(path):
    """Some segment has a list of slots."""
    for number in maintenance.groups(path):
        file = repositories.Group(path, number)
        for slot in range(file.slots):
            _, _, segment, place = file.entry(slot)
            if place >> 61 == repositories.LIVE and file.list_size(segment):
                return
    raise AssertionError('no segment has a list')


@workload
def helping(stage):
    """A helper recompresses and scrubs, beside the maintainer."""
    stage.create()
    with (stage.open() as repo, stage.open() as other,
          maintaining(repo) as maintainer,
          hosts_module.Hosts(stage.path) as hosts,
          helper_module.Helper(other, hosts) as helper):
        for number in range(6):
            stage.put(repo, f'image-{number}', (900 + number, 25), (50, 5))
        stage.put(repo, 'noise', (1, 100))
        account(maintainer)
        recompress(helper)
        sharescrub.run_once(helper, task.Pace(), lambda group: True)
        helper.save()
        findings.take(maintainer, task.Pace())
        stage.delete(repo, 'image-1')
        stage.put(repo, 'while', (900, 25), (920, 5))
        collect(maintainer, live_share=90, evacuate_share=0)
        recompress(helper, level=19, worth=-1)
        stage.delete(repo, 'image-3')
        collect(maintainer, live_share=90, evacuate_share=0)


@workload
def evacuation(stage):
    """Groups with few live blocks are evacuated, and then unlinked."""
    stage.create()
    with stage.open() as repo:
        for number in range(6):
            stage.put(repo, f'image-{number}', (number + 1, 28), (40, 2))
        with maintaining(repo) as maintainer:
            collect(maintainer)
            for number in (0, 2, 3):
                stage.delete(repo, f'image-{number}')
            collect(maintainer, live_share=0, evacuate_share=70)
            collect(maintainer, live_share=0, evacuate_share=70)
            stage.put(repo, 'new', (1, 28), (41, 10))
            collect(maintainer, live_share=0, evacuate_share=70)


@workload
def merging(stage):
    """Duplicates that the upload missed are merged.

    The last ones come to lower addresses than those that the index has.
    """
    def others(group):
        """No upload finds this group's blocks, or appends to it."""
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
        with maintaining(one) as maintainer:
            account(maintainer)
            merge(maintainer)
            collect(maintainer, live_share=0, evacuate_share=0)
            stage.delete(one, 'b')
            with others(1):
                stage.put(one, 'b', (1, 20), (4, 10))
            with others(2):
                stage.put(one, 'e', (5, 10))
            merge(maintainer)
            stage.delete(one, 'a')
            account(maintainer)
            collect(maintainer, live_share=0, evacuate_share=0)


@workload
def merging_on_two_hosts(stage):
    """A helper writes runs, and merges and splits shards of the index.

    The maintainer takes in what the helper found, and goes on with the index.
    """
    stage.create()
    with (stage.open() as repo, stage.open() as other,
          maintaining(repo) as maintainer,
          hosts_module.Hosts(stage.path) as hosts,
          helper_module.Helper(other, hosts) as helper,
          mock.patch.multiple(exactindex, HELP_ENTRIES=1, HELP_PAUSE=0,
                              SORTED_RECORDS=25, SCAN_ENTRIES=10,
                              SPLIT_RECORDS=20)):
        stage.put(repo, 'a', (1, 20), (2, 10))
        account(maintainer)
        merge(maintainer)
        for image in 'bcd':
            stage.put(other, image, (1, 20), (3, 10), dedup=False)
            shareindex.run_once(helper, task.Pace())
        merge(maintainer)
        stage.delete(repo, 'a')
        collect(maintainer, live_share=0, evacuate_share=0)
        stage.put(other, 'e', (1, 20), (4, 10), dedup=False)
        shareindex.run_once(helper, task.Pace())
        merge(maintainer)


@workload
def scrubbing(stage):
    """A damaged block is set aside, marked, and healed by a later upload."""
    stage.create()
    with stage.open() as repo:
        stage.put(repo, 'a', (1, 20), (2, 10))
        stage.put(repo, 'b', (1, 20), (3, 10))
        stage.put(repo, 'c', (4, 10))
        with maintaining(repo) as maintainer:
            account(maintainer)
            stage.damage_block(repo, 'a', 5, ['a', 'b'])
            assert scrub(maintainer).damaged == 1
            stage.mark(op='marked')
            stage.put(repo, 'd', (1, 20), (5, 4))
            assert scrub(maintainer).healed
            stage.mark(op='healed', images=['a', 'b'])
            collect(maintainer, live_share=90)


@workload
def spares(stage):
    """Spare copies are made, and stand in for a damaged block."""
    stage.create()
    with stage.open() as repo:
        for image in 'abc':
            stage.put(repo, image, (1, 8), (ord(image), 6))
        with maintaining(repo) as maintainer:
            account(maintainer)
            scrub(maintainer, spare_threshold=3)
            stage.put(repo, 'd', (1, 8), (2, 5))
            stage.damage_block(repo, 'a', 3, [])
            scrub(maintainer, spare_threshold=3)
            collect(maintainer)
            stage.delete(repo, 'a')
            stage.delete(repo, 'b')
            collect(maintainer)
            scrub(maintainer, spare_threshold=3)


@workload
def catalog_rebuild(stage):
    """The catalog is lost, or older than the fence."""
    stage.create()
    with stage.open() as repo:
        for number in range(4):
            stage.put(repo, f'image-{number}', (number + 1, 12), (50, 5))
        catalog = os.path.join(stage.path, 'catalog')
        with maintaining(repo) as maintainer:
            collect(maintainer)
            merge(maintainer)
        older = stage.filters + '-catalog'
        shutil.copytree(catalog, older)
        stage.delete(repo, 'image-1')
        with maintaining(repo) as maintainer:
            collect(maintainer)
        _replace(catalog, older)
        stage.delete(repo, 'image-0')
        with maintaining(repo) as maintainer:
            collect(maintainer)
            stage.put(repo, 'image-0', (7, 12), (50, 5))
        _replace(catalog, None)
        with maintaining(repo) as maintainer:
            collect(maintainer)
            stage.delete(repo, 'image-2')
            maintainer.rebuild()
            collect(maintainer)


def _replace(catalog, other):
    """Put another catalog in its place, or none; all of it is recorded."""
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
        # As LevelDB makes CURRENT: no crash leaves a part of it.
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
        with maintaining(repo) as maintainer:
            collect(maintainer)
            stage.damage_recipe('a')
            stage.delete(repo, 'b')
            stage.put(repo, 'c', (2, 10), (4, 10))
            collect(maintainer)
            stage.mark(op='delete', phase='begin', image='a')
            scrubber.mark_lost(maintainer, 'a')
            stage.mark(op='delete', phase='end', image='a')
            collect(maintainer)


@workload
def upgrading(stage):
    """The format's version is raised, by steps that only this knows."""
    def step(minor):
        def run(repo, progress):
            path = os.path.join(repo.path, 'quarantine', f'step-{minor}')
            with open(path, 'wb', buffering=0) as f:
                f.write(b'done')
                os.fsync(f.fileno())
        return upgrade.Step((1, minor - 1), (1, minor), '', run)
    upgrade.STEPS = [step(1), step(2)]
    stage.create()
    with stage.open() as repo:
        stage.put(repo, 'a', (1, 20), (2, 10))
        upgrade.upgrade(repo, lambda *arguments: None)
        stage.put(repo, 'b', (1, 20), (3, 10))


@workload
def first_volume(stage):
    """An upgrade to the version with volumes dies as its last name is synced.

    Another program makes a volume then. The check tells of a volume in a
    repository whose version has none.
    """
    class Killed(BaseException):
        pass

    def die_at_the_end(path):
        with open(os.path.join(path, layout.PARAMETERS_FILE)) as f:
            if '"major": 2' in f.read():
                raise Killed
        sync(path)
    sync = files.sync_directory
    stage.create()
    with stage.open() as repo:
        stage.put(repo, 'a', (1, 20), (2, 10))
        with mock.patch.object(files, 'sync_directory', die_at_the_end):
            with contextlib.suppress(Killed):
                upgrade.upgrade(repo, lambda *arguments: None, volumes=True)
    with stage.open() as repo:
        repo.need_volumes()
        os.mkdir(os.path.join(stage.path, layout.VOLUMES, 'disk'), 0o700)
        files.sync_directory(os.path.join(stage.path, layout.VOLUMES))
        stage.put(repo, 'b', (1, 20), (3, 10))


@workload
def copying(stage):
    """Images copied by address, and into another scope; some are collected."""
    stage.create()
    with stage.open() as repo, maintaining(repo) as maintainer:
        spec = [(1, 40), (0, 8), (2, 30)]
        stage.put(repo, 'a', *spec)
        stage.copy(repo, 'a', 'b', *spec)
        account(maintainer)
        stage.delete(repo, 'a')
        stage.copy(repo, 'b', 'c', *spec)
        stage.copy(repo, 'b', 'd', *spec, project='p', scope='project')
        collect(maintainer, live_share=0, evacuate_share=0)
        stage.delete(repo, 'b')
        stage.delete(repo, 'c')
        collect(maintainer, live_share=90, evacuate_share=0)
        stage.copy(repo, 'd', 'a', *spec)


@workload
def everything(stage):
    """All of it, in the order of a day; by chance, but the same each time."""
    stage.create()
    rng = random.Random(7)
    there = []
    with stage.open() as repo, stage.open(codec='lz4') as other:
        with maintaining(repo) as maintainer:
            for step in range(24):
                kind = rng.randrange(7)
                if kind < 3 or not there:
                    spec = [(rng.randrange(1, 9), rng.randrange(1, 12))
                            for _ in range(rng.randrange(1, 5))]
                    image = f'image-{step}'
                    stage.put(rng.choice([repo, other]), image, *spec)
                    there.append(image)
                elif kind < 5:
                    stage.delete(repo, there.pop(rng.randrange(len(there))))
                elif kind == 5:
                    collect(maintainer, live_share=80, evacuate_share=40)
                else:
                    merge(maintainer)
