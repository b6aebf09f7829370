# SPDX-License-Identifier: Apache-2.0

"""Shared helpers for tests of the maintainer and of its tasks.

A repository with many small groups; a model of the counts, computed from the
recipes; and a maintainer whose steps a test watches, so that it can act as
another process between any two of them.
"""

import array
import collections
import contextlib
import os
import pathlib
import random
import signal
import time

from dedupd.tasks import accounting
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import openimages
from tests.support import repositories
from tests.support.repositories import noise

BLOCK = 512
SLOTS = 64
LIVE = repositories.LIVE


def create(tmp_path, **parameters):
    parameters = {'block_size': BLOCK, 'group_slots': SLOTS,
                  'segment_size': 4 * BLOCK, **parameters}
    return repositories.create(tmp_path / 'repository', **parameters)


def content(*seeds, blocks=10):
    """Return some blocks for each seed; the same seed, the same blocks."""
    return b''.join(noise(blocks * BLOCK, seed) for seed in seeds)


def twins(seed):
    """Two blocks with one fingerprint by ``xxh3-128``, and one checksum.

    Of each 8 bytes, after they were combined with a constant, XXH3 adds the
    product of the lower and the higher half to one sum, and the bytes as they
    are to another, which others share. So where the lower half becomes 0 the
    higher one is free, as long as the sum with its like stays the same.
    """
    first = bytearray(noise(BLOCK, seed))
    # The lower halves of the constants for these two places.
    first[0:4] = bytes.fromhex('b8fe6c39')
    first[64:68] = bytes.fromhex('7c01812c')
    second = bytearray(first)
    for at, more in (4, 1), (68, -1):
        number = int.from_bytes(first[at:at + 4], 'little') + more
        second[at:at + 4] = (number % 2**32).to_bytes(4, 'little')
    return bytes(first), bytes(second)


def scattered(*seeds, pages=4):
    """Return content whose recipe has this many pages of extents per seed."""
    return b''.join(noise(BLOCK, 1000 * seed + n) + bytes(BLOCK)
                    for seed in seeds for n in range(51 * pages))


def blocks_of(repo, image_id):
    """Return the addresses that a recipe names, with repetition."""
    with openimages.Image(
            repo.handle().open_image(image_id, None), repo) as image:
        return [(extent.group, extent.slot + i)
                for _, extents in image.pages() for extent in extents
                for i in range(extent.blocks)]


def expected_counts(repo):
    """Return the counts that the recipes imply."""
    counts = collections.Counter()
    for recipe in repo.recipes():
        counts.update(blocks_of(repo, recipe))
    return counts


def counts(catalog, groups=range(1, 100)):
    return collections.Counter({
        (group, slot): n for group in groups
        for slot, n in enumerate(array.array('I', catalog.counts(group)))
        if n})


def states(path, group):
    """Return the states of a group's slots."""
    file = repositories.Group(path, group)
    return [file.state(slot) for slot in range(file.slots)]


def live_slots(path):
    """Return the addresses of all live blocks."""
    return {(group, slot) for group in groups(path)
            for slot, state in enumerate(states(path, group))
            if state == LIVE}


def groups(path):
    """Return the numbers of all groups, by either name (N14.2).

    On a shared file system a killed process leaves a second name, until the
    group is leased again (N14.3).
    """
    return sorted({int(name.removesuffix('~'), 16)
                   for name in os.listdir(pathlib.Path(path) / 'groups')})


def require_counted(maintainer):
    """Require that the catalog matches the recipes; no upload is in flight."""
    repo = maintainer.repository
    assert os.listdir(os.path.join(repo.path, 'spool')) == []
    assert counts(maintainer.catalog) == expected_counts(repo)
    assert sorted(f['image_id'] for _, f in maintainer.catalog.ledger()) == (
        repo.recipes())
    used = collections.Counter(group for group, _ in expected_counts(repo))
    for number, facts in maintainer.catalog.groups():
        assert facts['used'] == used[number]


def require_collected(maintainer):
    """Require, too, that each published block is in use by an image.

    The tail that a killed writer left stays until the next one judges it
    (N7.3).
    """
    require_counted(maintainer)
    path = maintainer.repository.path
    published = {number: repositories.Group(path, number).record()[2]
                 for number in groups(path)}
    assert {(group, slot) for group, slot in live_slots(path)
            if slot < published[group]} == set(
                expected_counts(maintainer.repository))


def require_contents(repo, model):
    """Require that each image exists with its content."""
    assert repo.images() == sorted(model)
    for image_id, data in model.items():
        assert repositories.read_all(repo, image_id) == data


def disk(path):
    """Return the bytes that groups and recipes take of the disk."""
    return sum(entry.stat().st_blocks * 512
               for name in ('groups', 'images', 'spool')
               for entry in os.scandir(os.path.join(path, name)))


def account(maintainer):
    return accounting.run_once(maintainer, pacing.Pace())


# -- watching -----------------------------------------------------------------

_WRAPPED = (_engine.Recipe, _engine.Group, _engine.Rewriting)


class Watched:
    """Wraps an object of the engine, or the catalog.

    `hook(name, arguments, before)` is called before and after each call.
    """

    def __init__(self, target, name, hook):
        self._target = target
        self._name = name
        self._hook = hook

    def __getattr__(self, attribute):
        value = getattr(self._target, attribute)
        if not callable(value):
            return value

        def call(*arguments, **keywords):
            name = f'{self._name}.{attribute}'
            self._hook(name, arguments, True)
            result = value(*arguments, **keywords)
            self._hook(name, arguments, False)
            if isinstance(result, _WRAPPED):
                kind = type(result).__name__.lower()
                what = (result.name.rpartition('/')[2] if kind == 'recipe'
                        else result.number)
                result = Watched(result, f'{kind} {what}', self._hook)
            return result
        return call


def _real(part):
    return part._target if isinstance(part, Watched) else part


def set_engine(maintainer, engine):
    """Replace the engine of a maintainer, and of its parts."""
    for part in (maintainer._fence, maintainer.recipes, maintainer.unreadable):
        part._engine = engine
    maintainer.engine = engine


def watch(maintainer, hook):
    """Have a hook called at each action of a maintainer."""
    set_engine(maintainer, Watched(_real(maintainer.engine), 'engine', hook))
    maintainer._catalog = Watched(_real(maintainer._catalog), 'catalog', hook)
    return maintainer


def unwatch(maintainer):
    set_engine(maintainer, _real(maintainer.engine))
    maintainer._catalog = _real(maintainer._catalog)


class Log:
    """A hook that records the names of the calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, name, arguments, before):
        if not before:
            self.calls.append(f'{name} {arguments[0]}'
                              if name == 'engine.sync' else name)

    def where(self, *ends):
        """Return the indexes of the calls whose names end like this."""
        return [i for i, name in enumerate(self.calls) if name.endswith(ends)]


class Once:
    """A hook that does something at the first call of a name."""

    def __init__(self, end, action, before=True):
        self.end = end
        self.action = action
        self.before = before
        self.happened = 0

    def __call__(self, name, arguments, before):
        if (not self.happened and before == self.before
                and name.endswith(self.end)):
            self.happened += 1
            self.action()


class Killed(BaseException):
    """Simulates the end of the process."""


class Kill:
    """A hook that ends a maintainer at its n-th call."""

    def __init__(self, calls):
        self.left = calls

    def __call__(self, name, arguments, before):
        self.left -= 1
        if self.left == 0:
            raise Killed


def kill(maintainer):
    """Release a maintainer's locks, as the kernel does at its death."""
    for part in (maintainer._catalog, maintainer.engine):
        if part is not None:
            _real(part).close()


def _maintainer(repo, deadline):
    while True:
        try:
            return maintainer_role.Maintainer(repo)
        except exceptions.BusyError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


@contextlib.contextmanager
def maintaining(repo, hook=None, wait=0):
    """Run a maintainer of the repository.

    :param wait: seconds; the locks of the last one on another host may fall a
        moment after it closed them
    """
    with _maintainer(repo, time.monotonic() + wait) as maintainer:
        yield maintainer if hook is None else watch(maintainer, hook)


def kill_at_random(path, other, work, seed):
    """Kill maintainers in their work, while images come and go.

    :param other: stores and deletes the images
    :param work: is called with a maintainer again and again
    :returns: the images that are left, with their bytes
    """
    rng = random.Random(seed)
    model = {}

    def maintain():
        with (repositories.open_repository(path, codec='none') as repo,
              maintaining(repo) as maintainer):
            while True:
                work(maintainer)

    for round_ in range(5):
        pid, pipe = repositories.fork_child(maintain)
        try:
            for step in range(rng.randrange(5, 25)):
                if len(model) > 3 and rng.random() < 0.5:
                    image_id = rng.choice(sorted(model))
                    other.delete(image_id)
                    del model[image_id]
                else:
                    image_id = f'image-{round_}-{step}'
                    model[image_id] = content(
                        *(rng.randrange(30) for _ in range(3)))
                    repositories.put(other, image_id, model[image_id])
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(pipe)
        require_contents(other, model)
    return model
