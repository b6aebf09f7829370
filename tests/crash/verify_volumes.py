# SPDX-License-Identifier: Apache-2.0

"""Verifies the volumes that a crash left."""

import os

from glance_dedup.base import exceptions
from glance_dedup.base import imageids
from glance_dedup.repository import openvolumes
from glance_dedup.repository import volumes
from tests.crash import volume_model


class Wrong(Exception):
    """A sentence about something that is wrong."""


class Volumes:
    """The volumes of a repository, and the possible contents of each.

    :param expected: by its name, the :class:`volume_model.Model` of each
    """

    def __init__(self, repo, expected):
        self._repo = repo
        self.expected = expected

    def _open(self, name):
        return openvolumes.open_volume(self._repo, name)

    def read(self, when):
        """Require that each volume has a possible content, and remember it."""
        for name, model in self.expected.items():
            try:
                with self._open(name) as volume:
                    counts = model.find(volume.read(volume.size, 0))
            except exceptions.ImageNotFound:
                if not model.absent:
                    raise Wrong(f'{when} the volume {name} is gone')
                model.there = False
                continue
            except exceptions.RepositoryError as e:
                raise Wrong(f'{when} the volume {name} cannot be read: {e}')
            if not model.there:
                raise Wrong(f'{when} the volume {name} is there, which was '
                            'deleted')
            if counts is None:
                raise Wrong(f'{when} the volume {name} has bytes that are not '
                            'its own')
            model.opened(counts)
            model.kept(0)
            model.absent = False

    def require_only_these(self):
        """Require that nothing is left of deleted volumes."""
        there = sorted(name for name, model in self.expected.items()
                       if model.there)
        found = volumes.names(self._repo.path)
        if found != there:
            raise Wrong(f'after a collection there are the volumes {found} '
                        f'instead of {there}')
        ids = {openvolumes.look(self._repo, name).volume_id for name in there}
        for recipe in self._repo.recipes():
            of_volume = imageids.of_volume(recipe)
            if of_volume is not None and of_volume.volume_id not in ids:
                raise Wrong(f'after a collection there is {recipe}, of no '
                            'volume')

    def use(self):
        """Require that each volume takes writes, and keeps them."""
        fresh = 10 ** 9
        for name, model in self.expected.items():
            if not model.there:
                continue
            for work in ('flush', 'checkpoint'):
                with self._open(name) as volume:
                    for at in (0, len(model.durable) - 3):
                        model.did(['write', at, fresh, 3])
                        volume.write(volume_model.content(
                            range(fresh, fresh + 3)),
                            at * volume_model.SECTOR)
                        fresh += 3
                    getattr(volume, work)()
                    model.kept(model.number())
                self.read(f'after a {work}')

    def delete(self):
        """Delete all volumes; require that nothing is left."""
        for name, model in self.expected.items():
            if model.there:
                openvolumes.delete(self._repo, name)
                model.there, model.absent = False, True
        self.require_only_these()
        left = os.listdir(os.path.join(self._repo.path, 'volumes'))
        if left:
            raise Wrong(f'all volumes were deleted, and there is {left[0]}')
