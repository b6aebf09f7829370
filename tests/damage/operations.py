#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""Whatever reads a repository, or changes it.

An operation is a function of a :class:`World`. It may fail with any
:class:`exceptions.RepositoryError`; whatever else it raises is a failure of
the case.
"""

import contextlib
import io
import random

from glance_dedup import check
from glance_dedup import exceptions
from glance_dedup import maintainer as maintainer_module
from tests.damage import template
from tests import repositories

ERRORS = (exceptions.DamagedError, exceptions.VersionError,
          exceptions.ImageNotFound, exceptions.StorageError)


class World:
    """A repository that may be damaged, and the images that it is to have."""

    def __init__(self, path, codec):
        self.path = path
        self.codec = codec
        self.images = dict(template.IMAGES)
        self.wrong = {}
        """Images that could not be read at the last look, and why."""

    def open(self):
        return repositories.open_repository(
            self.path, **template.options(self.codec))

    def look(self):
        """Read all images; what is read is right, or raises AssertionError."""
        self.wrong = {}
        try:
            with self.open() as repo:
                for image_id, data in self.images.items():
                    self._read(repo, image_id, data)
        except exceptions.RepositoryError as e:
            self.wrong = dict.fromkeys(self.images, str(e))
        return self.wrong

    def _read(self, repo, image_id, data):
        try:
            with repo.open_image(image_id) as image:
                found = image.read()
        except ERRORS as e:
            self.wrong[image_id] = str(e)
            assert any(word in str(e) for word in (
                image_id, 'groups/', 'images/')), f'this names no file: {e}'
            return
        assert found == data, f'{image_id} was read wrongly'


# -- reading ------------------------------------------------------------------

def read(world):
    """Ranges, extents, and what a daemon would send."""
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


def need_check(world):
    """The second implementation ends, and says what it thinks."""
    check.check(world.path)


def command(*words):
    """A command of the program, in this process."""
    def run(world):
        from glance_dedup.cli import main
        with contextlib.redirect_stdout(io.StringIO()), (
                contextlib.redirect_stderr(io.StringIO())) as said:
            status = main.main(['--repository', str(world.path), *words])
        assert status in (0, 1), (status, said.getvalue())
        assert 'Traceback' not in said.getvalue(), said.getvalue()
        assert status == 0 or said.getvalue().strip()
    return run


# -- storing ------------------------------------------------------------------

def store(world):
    """New blocks, and what there was once more; then some of it goes."""
    with world.open() as repo:
        repositories.put(repo, 'new', template.NEW)
        world.images['new'] = template.NEW
        assert repositories.read_all(repo, 'new') == template.NEW
        for image_id, data in template.IMAGES.items():
            # It may be found to be a duplicate of what is damaged, and not
            # be read then; or else it is right.
            again = f'{image_id}-again'
            repositories.put(repo, again, data + template.NEW)
            world.images[again] = data + template.NEW
        repo.delete('new')
        del world.images['new']


def delete(world):
    """An image that is not damaged, and one that may be."""
    with world.open() as repo:
        for image_id in ('later', 'holes'):
            with contextlib.suppress(exceptions.ImageNotFound):
                repo.delete(image_id)
            world.images.pop(image_id)
    collect(world)


# -- the maintainer's ---------------------------------------------------------

def maintain(*names):
    def run(world):
        with world.open() as repo:
            with maintainer_module.Maintainer(repo) as maintainer:
                for name in names:
                    template.run(maintainer, name)
    return run


collect = maintain('collect')


def everything(world):
    """All tasks, twice, with uploads between them."""
    for _ in range(2):
        for name in ('account', 'collect', 'merge', 'scrub', 'collect'):
            with contextlib.suppress(exceptions.RepositoryError):
                maintain(name)(world)
        with contextlib.suppress(exceptions.RepositoryError):
            store(world)


def recover(world):
    """What comes after the damage was undone."""
    maintain('collect', 'merge', 'scrub', 'collect')(world)


def mark_lost(world):
    """What it takes to make collection possible again."""
    from dedupd import scrubber
    with world.open() as repo:
        with maintainer_module.Maintainer(repo) as maintainer:
            for name in list(maintainer.unreadable()):
                with contextlib.suppress(exceptions.RepositoryError):
                    scrubber.mark_lost(maintainer, name)
                    world.images.pop(name, None)
    collect(world)


OPERATIONS = {
    'read': read,
    'check': need_check,
    'store': store,
    'delete': delete,
    'account': maintain('account'),
    'collect': collect,
    'merge': maintain('merge', 'collect'),
    'scrub': maintain('scrub', 'collect'),
    'rebuild': maintain('rebuild-catalog', 'collect'),
    'everything': everything,
    'mark lost': mark_lost,
}
READING = ('read', 'check')
CHANGING = tuple(name for name in OPERATIONS if name not in READING)
