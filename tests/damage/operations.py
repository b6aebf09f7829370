# SPDX-License-Identifier: Apache-2.0

"""Operations that read a repository, or change it.

An operation is a function of a :class:`World`. It may fail with any
:class:`exceptions.RepositoryError`; any other exception is a failure of the
case.
"""

import array
import contextlib
import io
import random
import shutil
from unittest import mock
import warnings

from dedupd.compute.cache import cache_catalog
from dedupd.tasks import evictor
from dedupd.tasks import exactindex
from dedupd.tasks import shareindex
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.check import checker
from glance_dedup.cli import entry
from glance_dedup.client import client_errors
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import maintainer_role
from glance_dedup.maintenance import reserve
from glance_dedup.repository import openvolumes
from glance_dedup.repository import space
from glance_dedup.transfer import pull
from tests.crash import volume_model
from tests.damage import damages
from tests.damage import template
from tests.support import daemons
from tests.support import maintenance
from tests.support import replicas
from tests.support import repositories

ERRORS = (exceptions.DamagedError, exceptions.VersionError,
          exceptions.ImageNotFound, exceptions.StorageError)


class World:
    """A repository that may be damaged, and its expected images."""

    def __init__(self, path, codec):
        self.path = path
        self.codec = codec
        self.images = dict(template.IMAGES)
        self.volume = template.volume()
        self.wrong = {}
        """Images that could not be read at the last look, and why."""

    def open(self):
        return repositories.open_repository(
            self.path, **template.options(self.codec))

    def look(self):
        """Read all images; an image that is read must be right."""
        self.wrong = {}
        try:
            with self.open() as repo:
                for image_id, data in self.images.items():
                    self._read(repo, image_id, data)
        except exceptions.RepositoryError as e:
            self.wrong = dict.fromkeys(self.images, str(e))
        return self.wrong

    def look_at_all(self):
        """Read as :meth:`look` does, and the volume, too.

        A process that opens a volume owns it, and changes its journals. So
        this is done in a copy.
        """
        self.look()
        copy = self.path.parent / 'copy'
        template.copy(self.path, copy)
        try:
            with repositories.open_repository(
                    copy, **template.options(self.codec)) as repo, \
                    openvolumes.open_volume(repo, 'disk') as volume:
                self._compare(volume.read(volume.size, 0))
        except exceptions.RepositoryError as e:
            self.wrong[template.VOLUME] = str(e)
        finally:
            shutil.rmtree(copy)
        return self.wrong

    def _compare(self, data):
        counts = self.volume.find(data)
        assert counts is not None, 'the volume was read wrongly'
        if counts != tuple(map(len, self.volume.owners)):
            # A journal that was cut looks like one whose last records were
            # never written.
            self.wrong[template.VOLUME] = 'its last writes are lost'

    def _read(self, repo, image_id, data):
        try:
            with repo.open_image(image_id) as image:
                found = image.read()
        except ERRORS as e:
            self.wrong[image_id] = str(e)
            assert any(word in str(e) for word in (
                image_id, 'groups', 'images')), f'this names no file: {e}'
            return
        assert found == data, f'{image_id} was read wrongly'
        if image_id == 'copies':
            self._require_marks(repo)

    def _require_marks(self, repo):
        """Require I14 of the blocks whose entries are intact."""
        with contextlib.closing(_engine.Maintenance(repo.handle())) as engine:
            for group, slot in maintenance.blocks_of(repo, 'copies'):
                entry = block_addresses.entry_at(
                    engine.entries(group, slot, 1), 0)
                assert entry.nodedup or (
                    entry.state == block_addresses.INVALID), (
                        f'slot {slot} of group {group} lost its mark')


# -- reading ------------------------------------------------------------------

def read(world):
    """Read ranges, extents, and the frames that a daemon would send."""
    rng = random.Random(1)
    with world.open() as repo:
        for image_id, data in world.images.items():
            with contextlib.suppress(ERRORS), repo.open_image(
                    image_id) as image:
                for _ in range(6):
                    offset = rng.randrange(len(data))
                    length = rng.randrange(1, 9000)
                    with contextlib.suppress(ERRORS):
                        assert image.read(length, offset) == (
                            data[offset:offset + length])
                with contextlib.suppress(ERRORS):
                    list(image.extents())
        repo.images()


def require_check_ends(world):
    """Require that the checker, the second implementation, ends."""
    checker.check(world.path)


def command(world, *words):
    """Run a command of the program, in this process; return its status."""
    with contextlib.redirect_stdout(io.StringIO()), (
            contextlib.redirect_stderr(io.StringIO())) as said:
        status = entry.main(['--repository', str(world.path), '--socket', '',
                             '--filter-dir', str(world.path.parent / 'filter'),
                             *words])
    assert status in (0, 1, 2), (words, status, said.getvalue())
    assert 'Traceback' not in said.getvalue(), said.getvalue()
    assert status == 0 or said.getvalue().strip(), words
    return status


def commands(world):
    """Run all commands that only read; `image get` is right or fails."""
    command(world, 'status')
    command(world, 'image', 'list')
    for image_id, data in world.images.items():
        command(world, 'image', 'show', image_id)
        file = world.path.parent / f'got-{image_id}'
        status = command(world, '-q', 'image', 'get', image_id, str(file))
        assert file.exists() == (status == 0), image_id
        assert status or file.read_bytes() == data, image_id


def pull_all(world):
    """Pull into a new repository: right bytes, or an error that names it."""
    with daemons.Daemon(world.path) as daemon:
        try:
            daemon.start()
        except AssertionError:
            # The daemon may refuse to serve the damage; it reports the reason.
            assert daemon.process.poll() is not None, daemon.text()
            assert 'Traceback' not in daemon.text(), daemon.text()
            return
        fresh = repositories.create(world.path.parent / 'fresh',
                                    block_size=template.BLOCK)
        with repositories.open_repository(fresh) as here, (
                daemon.client()) as client:
            for image_id, data in world.images.items():
                try:
                    pull.pull(here, image_id, client)
                except (client_errors.ClientError, *ERRORS) as e:
                    assert str(e), image_id
                    assert image_id not in here.images()
                else:
                    assert repositories.read_all(here, image_id) == data
        repositories.require_clean(fresh)
        assert daemon.process.poll() is None, daemon.text()


def send_all(world):
    """Send to another site: right bytes, or an error that names the file."""
    fresh = repositories.create(world.path.parent / 'site',
                                block_size=template.BLOCK)
    with world.open() as repo, repositories.open_repository(fresh) as there:
        for image_id, data in world.images.items():
            try:
                replicas.receive(there, repo, image_id)
            except ERRORS as e:
                assert str(e), image_id
                assert image_id not in there.images()
            else:
                assert repositories.read_all(there, image_id) == data
    repositories.require_clean(fresh)


# -- storing ------------------------------------------------------------------

def store(world):
    """Store new and known blocks; then delete some of them."""
    with world.open() as repo:
        repositories.put(repo, 'new', template.NEW)
        world.images['new'] = template.NEW
        assert repositories.read_all(repo, 'new') == template.NEW
        for image_id, data in template.IMAGES.items():
            # The content may be found to duplicate damaged blocks, and not be
            # read then; otherwise it is right.
            again = f'{image_id}-again'
            repositories.put(repo, again, data + template.NEW)
            world.images[again] = data + template.NEW
        repo.delete('new')
        del world.images['new']


def receive(world):
    """Receive images of another site, of which some blocks seem known."""
    images = {f'{image_id}-sent': data + template.NEW
              for image_id, data in template.IMAGES.items()}
    site = repositories.create(world.path.parent / 'site',
                               block_size=template.BLOCK)
    with world.open() as repo, repositories.open_repository(site) as home:
        for image_id, data in images.items():
            repositories.put(home, image_id, data)
            replicas.receive(repo, home, image_id)
            world.images[image_id] = data


def misled(file):
    """Have all hints of a filter name another block."""
    data = bytearray(file.read_bytes())
    hints = array.array('Q', data[damages.PAGE:])
    used = [i for i, hint in enumerate(hints) if hint]
    low = (1 << 40) - 1         # group and slot
    addresses = [hints[i] & low for i in used]
    for i, address in zip(used, addresses[1:] + addresses[:1]):
        hints[i] = hints[i] & ~low | address
    data[damages.PAGE:] = hints.tobytes()
    file.write_bytes(data)
    return used


def use_filters(world):
    """A filter with false hints costs only space."""
    with world.open() as repo:
        repositories.put(repo, 'first', template.NEW)
    world.images['first'] = template.NEW
    directory = world.path.parent / f'{world.path.name}-filter'
    file, = directory.iterdir()
    target = damages.Target(directory, file.name, directory, directory)
    rest = file.stat().st_size - damages.PAGE
    misled(file)
    for number, (name, arguments) in enumerate([
            ('flip', [damages.PAGE + 8]), ('overwrite', [damages.PAGE, rest]),
            ('overwrite', [damages.PAGE, rest, 255]),
            ('overwrite', [damages.PAGE, rest, None]),
            ('flip', [3]), ('overwrite', [0, damages.PAGE, None]),
            ('truncate', [damages.PAGE + 3]), ('empty', []),
            ('lengthen', [damages.SECTOR, 255]), ('directory', [])]):
        undo = damages.DAMAGES[name](target, *arguments)
        image_id = f'filtered-{number}'
        data = template.IMAGES['plain'] + template.IMAGES['mixed']
        with warnings.catch_warnings():
            warnings.simplefilter('ignore', RuntimeWarning)
            with world.open() as repo:
                repositories.put(repo, image_id, data)
        world.images[image_id] = data
        assert not {'first', image_id}.intersection(world.look()), name
        undo()


def delete(world):
    """Delete an image that is not damaged, and one that may be."""
    with world.open() as repo:
        for image_id in ('later', 'holes'):
            with contextlib.suppress(exceptions.ImageNotFound):
                repo.delete(image_id)
            world.images.pop(image_id)
    collect(world)


def use_volume(world):
    """Own the volume: store its journal as recipes, and write more."""
    with world.open() as repo, openvolumes.open_volume(repo, 'disk') as volume:
        counts = world.volume.find(volume.read(volume.size, 0))
        assert counts is not None, 'the volume was read wrongly'
        world.volume.opened(counts)
        deed = ['write', 7, 2000, 4]
        world.volume.did(deed)
        volume.write(volume_model.content(range(2000, 2004)),
                     7 * volume_model.SECTOR)
        volume.checkpoint()
        world.volume.kept(1)


# -- the maintainer's ---------------------------------------------------------

def maintain(*names):
    def run(world):
        with world.open() as repo:
            with maintainer_role.Maintainer(repo) as maintainer:
                for name in names:
                    template.run(maintainer, name)
    return run


class Held(cache_catalog.Held):
    """A cache's list that drops evicted images from the world."""

    def __init__(self, repo, world):
        self._world = world
        super().__init__(repo)

    def drop(self, image_id):
        self._world.images.pop(image_id, None)
        super().drop(image_id)


def evict(world):
    """Evict some images of a cache; the others must stay unchanged."""
    with world.open() as repo, maintainer_role.Maintainer(
            repo) as maintainer, contextlib.closing(
                Held(repo, world)) as held:
        for image_id in list(world.images)[:2]:
            held.used(image_id)
        with mock.patch.object(reserve, 'RESERVE_BYTES', 0):
            evictor.run_once(maintainer, pacing.Pace(), held,
                             space.below(world.path) - 98304, lambda: 1000)


def help_maintaining(world):
    """Run a helper with every group; then the maintainer uses its notes."""
    with world.open() as repo:
        with template.helping(repo) as helper:
            for name in 'scrub', 'recompress':
                template.run(helper, name, is_mine=lambda group: True)
            with mock.patch.multiple(exactindex, HELP_ENTRIES=1,
                                     HELP_PAUSE=0):
                shareindex.run_once(helper, pacing.Pace())
        with maintainer_role.Maintainer(repo) as maintainer:
            template.run(maintainer, 'account')
            template.run(maintainer, 'merge')


collect = maintain('collect')


def everything(world):
    """Run all tasks, twice, with uploads between them."""
    for _ in range(2):
        for name in ('account', 'collect', 'merge', 'recompress', 'scrub',
                     'collect'):
            with contextlib.suppress(exceptions.RepositoryError):
                maintain(name)(world)
        with contextlib.suppress(exceptions.RepositoryError):
            store(world)


def recover(world):
    """Run all tasks after the damage was undone."""
    maintain('collect', 'merge', 'scrub', 'recompress', 'collect')(world)


def mark_lost(world):
    """Mark images as lost, so that a collection is possible again."""
    from dedupd.tasks import scrubber
    with world.open() as repo:
        with maintainer_role.Maintainer(repo) as maintainer:
            for name in list(maintainer.unreadable.reasons()):
                with contextlib.suppress(exceptions.RepositoryError):
                    scrubber.mark_lost(maintainer, name)
                    world.images.pop(name, None)
    collect(world)


OPERATIONS = {
    'read': read,
    'check': require_check_ends,
    'commands': commands,
    'pull': pull_all,
    'send': send_all,
    'store': store,
    'receive': receive,
    'filter': use_filters,
    'delete': delete,
    'volume': use_volume,
    'account': maintain('account'),
    'collect': collect,
    'merge': maintain('merge', 'collect'),
    'scrub': maintain('scrub', 'collect'),
    'recompress': maintain('recompress', 'collect'),
    'help': help_maintaining,
    'rebuild': maintain('rebuild-catalog', 'collect'),
    'evict': evict,
    'everything': everything,
    'mark lost': mark_lost,
}
READING = ('read', 'check', 'commands', 'pull', 'send')
#: These run on undamaged repositories: all images must be readable.
SOUND = ('filter',)
CHANGING = tuple(name for name in OPERATIONS if name not in READING + SOUND)
