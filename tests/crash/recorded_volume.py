# SPDX-License-Identifier: Apache-2.0

"""A volume whose calls are marked in the journal.

Numbers of sectors are those of ``volume_model.py``.
"""

import contextlib

from glance_dedup.base import exceptions
from glance_dedup.repository import openvolumes
from tests.crash import volume_model

SECTOR = volume_model.SECTOR


def create(stage, repo, name, size, image=None, sectors=()):
    """Make a volume, or a clone of an image with these sectors."""
    sectors = [*sectors, *[0] * (size - len(sectors))]
    stage.mark(op='volume', phase='create', name=name, sectors=sectors)
    with contextlib.ExitStack() as stack:
        openvolumes.create(
            repo, name, size * SECTOR, part_size=volume_model.PART_SIZE,
            image=None if image is None
            else stack.enter_context(repo.open_image(image)))
    stage.mark(op='volume', phase='created', name=name)
    stage.volumes[name] = volume_model.Model(sectors)


def roll_back(stage, repo, name, image, sectors):
    """Give a volume without an owner the sectors of an image."""
    deed = ['become', list(sectors)]
    model = stage.volumes[name]
    for phase, fields, note in (
            ('opened', {}, model.opened),
            ('did', {'deed': deed}, lambda: model.did(deed))):
        stage.mark(op='volume', phase=phase, name=name, **fields)
        note()
    with repo.open_image(image) as opened_image:
        openvolumes.roll_back(repo, name, opened_image)
    stage.mark(op='volume', phase='returned', name=name)
    model.returned()
    number = model.number()
    stage.mark(op='volume', phase='kept', name=name, number=number)
    model.kept(number)


def delete(stage, repo, name):
    stage.mark(op='volume', phase='delete', name=name)
    openvolumes.delete(repo, name)
    stage.mark(op='volume', phase='deleted', name=name)


@contextlib.contextmanager
def opened(stage, repo, name):
    """Own a volume whose last owner closed it, perhaps without a flush."""
    with openvolumes.open_volume(repo, name) as volume:
        stage.mark(op='volume', phase='opened', name=name)
        yield RecordedVolume(stage, name, volume)


@contextlib.contextmanager
def recovered(stage, repo, name, model):
    """Own a volume after a crash; None if it does not exist."""
    try:
        volume = openvolumes.open_volume(repo, name)
    except exceptions.ImageNotFound:
        yield None
        return
    with volume:
        counts = model.find(volume.read(volume.size, 0))
        stage.mark(op='volume', phase='opened', name=name, counts=counts)
        model.opened(counts)
        stage.volumes[name] = model
        yield RecordedVolume(stage, name, volume)


class RecordedVolume:
    """A volume that a workload owns.

    :ivar sectors: its current content
    """

    def __init__(self, stage, name, volume):
        self._mark = lambda **fields: stage.mark(
            op='volume', name=name, **fields)
        self._stage = stage
        self._model = stage.volumes[name]
        self._model.opened()
        self._volume = volume
        self.info = volume.info
        self.name = name

    @property
    def sectors(self):
        return self._model.sectors()

    def write(self, at, count, first=None):
        """Write sectors.

        :param first: the number of the first; None: numbers that no sector has
            had; 0: zeros
        """
        if first is None:
            first = self._stage.fresh(count)
        self._begin(['write', at, first, count])
        if first:
            self._volume.write(volume_model.content(
                range(first, first + count)), at * SECTOR)
        else:
            self._volume.zero(count * SECTOR, at * SECTOR)
        self._returned()

    def flush(self):
        self._keep(self._volume.flush)

    def checkpoint(self):
        self._keep(self._volume.checkpoint)

    def snapshot(self, image):
        number = self._model.number()
        self._stage.mark(op='put', phase='begin', image=image,
                         spec=volume_model.runs(self.sectors))
        self._volume.snapshot(image)
        self._stage.mark(op='put', phase='end', image=image)
        self._kept(number)

    def resize(self, size):
        before = len(self.sectors)
        deeds = [['resize', size]] if size >= before else list(
            volume_model.shrinking(before, size))
        for deed in deeds:
            self._begin(deed)
        self._volume.resize(size * SECTOR)
        self._returned()
        self._kept(self._model.number())

    # -- marks ------------------------------------------------------------

    def _begin(self, deed):
        self._mark(phase='did', deed=deed)
        self._model.did(deed)

    def _returned(self):
        self._mark(phase='returned')
        self._model.returned()

    def _keep(self, work):
        """Make all earlier writes durable."""
        number = self._model.number()
        work()
        self._kept(number)

    def _kept(self, number):
        self._mark(phase='kept', number=number)
        self._model.kept(number)
