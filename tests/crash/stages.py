# SPDX-License-Identifier: Apache-2.0

"""The repository of a workload, and the operations of users."""

import contextlib
import os

from dedupd.compute.cache import arrival_list
from tests.crash.expected_state import make
from tests.crash.expected_state import SECTORS
from tests.support import fake_peer
from tests.support import maintenance
from tests.support import replicas
from tests.support import repositories


def entering(table):
    """Return a decorator that enters a workload, by name, into a table."""
    def enter(function):
        table[function.__name__.replace('_', '-')] = function
        return function
    return enter


class Stage:
    """The repository in which a workload works.

    :param world: the directory that is recorded; the repository is in it
    :param side: a directory for files outside of it, such as the filter
    """

    def __init__(self, world, side, recorder):
        self.path = os.path.join(world, 'repository')
        self.filters = os.path.join(side, 'filter')
        self.mark = recorder.mark
        self.recorder = recorder
        self.volumes = {}       #: by name: volume_model.Model
        self._fresh = SECTORS

    def fresh(self, count):
        """Return the first of so many unused numbers of sectors."""
        self._fresh += count
        return self._fresh - count

    # -- operations of users --------------------------------------------------

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
        self.mark(op='put', phase='begin', image=image, spec=spec,
                  is_copy=not options.get('dedup', True))
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
        """Receive all lots of another repository; or only some."""
        self.mark(op='put', phase='begin', image=image, spec=spec)
        with contextlib.closing(replicas.Sending(home, image)) as sending:
            with sending.replica(repo) as replica:
                sending.deliver(replica, lots)
                if lots is None:
                    self.end(replica, image)
        if lots is not None:
            self.mark(op='put', phase='aborted', image=image)

    def arrive(self, repo, home, image, *spec, most=None):
        """Read an image while it arrives from another repository."""
        client = fake_peer.Client(home, most)
        arrivals = arrival_list.Arrivals(repo, lambda token: client)
        data = make(spec)
        self.mark(op='put', phase='begin', image=image, spec=spec)
        with contextlib.closing(arrivals.open(
                image, None, None, held_back=False)) as reading:
            view = memoryview(bytearray(len(data)))
            if most is None:
                # The end comes first, which is fetched out of order.
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

        :param hit: the images that lose the block; none, if it has a spare
            copy
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
