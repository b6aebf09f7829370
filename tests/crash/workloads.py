# SPDX-License-Identifier: Apache-2.0

"""The workloads of users, whose crash states are explored.

A workload is a function of a :class:`~tests.crash.stages.Stage`, named in
:data:`WORKLOADS` by the decorator: a later task that changes something is
added there only. It is run under record from the creation of the repository
on, in a process of its own. It works through the stage, which marks in the
journal the beginning and the acknowledgement of each operation. The
maintainer's workloads are in ``maintenance_workloads.py``, and those that use
volumes in ``volume_workloads.py``.
"""

import contextlib
import os
import random
import shutil
import struct
from unittest import mock

from dedupd.serve import replica_receiver
from glance_dedup.transfer import image_assembly
from glance_dedup.transfer import pull
from tests.crash import deeds
from tests.crash.expected_state import make
from tests.crash import stages
from tests.support import replicas
from tests.support import repositories

WORKLOADS = {}
workload = stages.entering(WORKLOADS)


@workload
def create(stage):
    """The repository is created, and gets its first upload."""
    stage.create()
    with stage.open() as repo:
        stage.put(repo, 'first', (1, 5))


@workload
def store(stage):
    """Uploads share blocks; two handles store; groups fill."""
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
    """Other uploads use blocks of a transaction after its sync point."""
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
    """Images arrive from another site, which keeps some, and compares them."""
    stage.create()
    side = os.path.dirname(stage.filters)
    with _sites(side, 512, 1024) as (home, other), stage.open() as repo, \
            mock.patch.object(replica_receiver, 'SYNC_BYTES', 20 * 512):
        for image, spec in (('a', [(1, 40), (0, 8), (2, 30)]),
                            ('b', [(1, 40), (3, 30), (4, 10)])):
            repositories.put(home, image, make(spec))
        stage.receive(repo, home, 'a', (1, 40), (0, 8), (2, 30))
        stage.receive(repo, home, 'b', (1, 40), (3, 30), (4, 10), lots=3)
        stage.receive(repo, home, 'b', (1, 40), (3, 30), (4, 10))
        # The image exists, and the receiver finds it.
        replicas.receive(repo, home, 'a')
        # The sender's blocks are of another size: they are cut again.
        repositories.put(other, 'c', make([(2, 30), (0, 9), (5, 20)]))
        stage.receive(repo, other, 'c', (2, 30), (0, 9), (5, 20))


@workload
def arrive(stage):
    """Images arrive while they are read: sync points, and a second try."""
    stage.create()
    side = os.path.dirname(stage.filters)
    with _sites(side, 512) as (home,), stage.open() as repo, \
            mock.patch.object(image_assembly, 'READ_LOT_BYTES', 16 * 512), \
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
    """Images are stored with a pool of threads, and compression."""
    stage.create()
    with stage.open(threads=2, codec='zstd') as repo:
        stage.put(repo, 'a', (1, 40), (0, 8), (2, 30))
        stage.put(repo, 'b', (2, 30), (3, 50))


@workload
def store_phases(stage):
    """Twins begin at other sectors: an upload under way is cut again."""
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
    """Blocks cut by content are stored, pulled, merged and collected."""
    stage.create(chunking='content-defined 64 256')
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
        with deeds.maintaining(one) as maintainer:
            deeds.merge(maintainer)
            stage.delete(one, 'a')
            deeds.collect(maintainer)
            stage.delete(one, 'c')
            deeds.collect(maintainer, live_share=0, evacuate_share=0)


@workload
def store_direct(stage):
    """Images are stored with direct I/O, which rewrites partly used pages."""
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
    """Uploads meet others in the middle of their syncs and commits."""
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
    """Images are deleted before and after they are counted; ids are reused."""
    stage.create()
    with stage.open() as repo:
        stage.put(repo, 'a', (1, 20), (2, 10))
        stage.put(repo, 'b', (1, 20), (3, 30))
        with deeds.maintaining(repo) as maintainer:
            deeds.account(maintainer)
            stage.put(repo, 'c', (3, 30), (4, 5))
            stage.delete(repo, 'a')
            stage.delete(repo, 'c')
            stage.put(repo, 'a', (5, 7), (3, 30))
            deeds.account(maintainer)
            stage.delete(repo, 'a')
            stage.put(repo, 'a', (4, 5), (2, 10))
            stage.delete(repo, 'b')
            deeds.account(maintainer)


@workload
def copying(stage):
    """Images are copied by address, and into another scope; some go."""
    stage.create()
    with stage.open() as repo, deeds.maintaining(repo) as maintainer:
        spec = [(1, 40), (0, 8), (2, 30)]
        stage.put(repo, 'a', *spec)
        stage.copy(repo, 'a', 'b', *spec)
        deeds.account(maintainer)
        stage.delete(repo, 'a')
        stage.copy(repo, 'b', 'c', *spec)
        stage.copy(repo, 'b', 'd', *spec, project='p', scope='project')
        deeds.collect(maintainer, live_share=0, evacuate_share=0)
        stage.delete(repo, 'b')
        stage.delete(repo, 'c')
        deeds.collect(maintainer, live_share=90, evacuate_share=0)
        stage.copy(repo, 'd', 'a', *spec)


@workload
def everything(stage):
    """All operations run in the order of a day; by chance, but repeatably."""
    stage.create()
    rng = random.Random(7)
    there = []
    with stage.open() as repo, stage.open(codec='lz4') as other:
        with deeds.maintaining(repo) as maintainer:
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
                    deeds.collect(maintainer, live_share=80, evacuate_share=40)
                else:
                    deeds.merge(maintainer)
