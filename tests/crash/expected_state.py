# SPDX-License-Identifier: Apache-2.0

"""The state required after a crash.

The marks in a journal record which operations began and which were
acknowledged before the crash; :class:`Expectation` has the possible contents
of each image then.
"""

import functools
import hashlib
import json

from tests.crash import volume_model
from tests.support import qcow2files
from tests.support import repositories

BLOCK = 512
#: The seed of a compressed qcow2 file, whose disk has so many clusters.
QCOW2 = 899
#: Seeds from this one on give content that compresses to half.
TEXTS = 900
#: Seeds from this one on do not: they are numbers of a volume's sectors.
SECTORS = 1000


@functools.lru_cache(maxsize=8192)
def _run(seed, blocks):
    if seed == QCOW2:
        return qcow2files.file_of([qcow2files.deflated(
            repositories.noise(qcow2files.CLUSTER // 2, cluster).hex().encode()
        ) for cluster in range(blocks)])
    if TEXTS <= seed < SECTORS:
        return repositories.noise(blocks * BLOCK // 2, seed).hex().encode()
    return (repositories.noise(blocks * BLOCK, seed) if seed
            else bytes(blocks * BLOCK))


def make(spec):
    """Return the content of a list of (seed, blocks); seed 0 means zeros."""
    return b''.join(_run(seed, blocks) for seed, blocks in spec)


@functools.lru_cache(maxsize=512)
def _digests(seed, blocks):
    run = _run(seed, blocks)
    return frozenset(hashlib.sha256(run[at:at + BLOCK]).hexdigest()
                     for at in range(0, len(run), BLOCK))


class Expectation:
    """Possible contents of the images.

    :ivar created: whether it must be a repository
    :ivar images: by its id, the contents that an image may have: specs, and
        None if it may be absent
    :ivar damaged: images that may have lost bytes, since something damaged
        them on purpose; they give the right bytes or an error
    :ivar harmed: whether something was ever damaged
    :ivar volumes: by its name, the :class:`volume_model.Model` of each
    :ivar copies: images whose blocks stay copies (I14)
    :ivar hidden: SHA-256 of the blocks that are damaged and not marked as
        such, so that uploads find them
    """

    def __init__(self):
        self.created = False
        self.images = {}
        self.volumes = {}
        self.damaged = set()
        self.harmed = False
        self.hidden = set()
        self.copies = set()

    def feed(self, record):
        """Apply a mark."""
        fields = json.loads(record.data)
        getattr(self, f'_{fields.pop("op")}')(**fields)

    def is_at_risk(self, spec):
        """Return whether an image stored now may name a damaged block.

        A hit is verified by its entry, not by its bytes (I5).
        """
        return any(not self.hidden.isdisjoint(_digests(*run))
                   for run in spec if self.hidden)

    def stored(self, image, spec):
        """An image was stored after the crash, and must have this content."""
        self.images[image] = [spec]
        if self.is_at_risk(spec):
            self.damaged.add(image)

    def _create(self, phase):
        self.created = phase == 'end'

    def _put(self, phase, image, spec=None, is_copy=False):
        if phase == 'begin':
            (self.copies.add if is_copy else self.copies.discard)(image)
            may = self.images.setdefault(image, [None])
            may.append(spec)
            if self.is_at_risk(spec):
                self.damaged.add(image)
        elif phase == 'end':
            self.images[image] = self.images[image][-1:]
        else:       # given up
            self.images[image] = self.images[image][:-1]

    def _delete(self, phase, image):
        if phase == 'begin':
            self.images[image] = [None, *self.images[image]]
        else:
            self.images[image] = [None]
            self.damaged.discard(image)

    def _damage(self, images, block=None):
        self.damaged.update(images)
        self.harmed = True
        if block is not None:
            self.hidden.add(block)

    def _marked(self):
        self.hidden.clear()

    def _healed(self, images):
        self.damaged.difference_update(images)

    def _seen(self, images):
        """Accounting has ended: these images existed, and no others."""
        for image, may in self.images.items():
            if image in images:
                self.images[image] = [s for s in may if s is not None]
            else:
                self.images[image] = [None]

    def _volume(self, phase, name, **fields):
        if phase == 'create':
            self.volumes[name] = volume_model.Model(fields['sectors'])
            return
        model = self.volumes[name]
        if phase == 'created':
            model.absent = False
        elif phase == 'delete':
            model.absent = True
        elif phase == 'deleted':
            model.there = False
        else:
            getattr(model, phase)(**fields)

    def interrupted(self, killed):
        """The process was killed, or else the machine crashed."""
        for model in self.volumes.values():
            (model.killed if killed else model.crashed)()

    def digest(self):
        """Return a digest of the expectation; equal ones are equal."""
        return json.dumps([self.created, self.images,
                           self._volumes_dumped(),
                           sorted(self.damaged), self.harmed,
                           sorted(self.hidden), sorted(self.copies)
                           ]).encode()

    def _volumes_dumped(self):
        return {name: model.dump() for name, model in self.volumes.items()}

    def dump(self):
        return {'created': self.created, 'images': self.images,
                'volumes': self._volumes_dumped(),
                'damaged': sorted(self.damaged), 'harmed': self.harmed,
                'hidden': sorted(self.hidden),
                'copies': sorted(self.copies)}

    @classmethod
    def load(cls, fields):
        made = cls()
        made.created = fields['created']
        made.images = fields['images']
        made.volumes = {name: volume_model.Model(**model)
                        for name, model in fields['volumes'].items()}
        made.damaged = set(fields['damaged'])
        made.harmed = fields['harmed']
        made.hidden = set(fields['hidden'])
        made.copies = set(fields['copies'])
        return made

    def copy(self):
        return self.load({**self.dump(), 'images': {
            image: list(may) for image, may in self.images.items()}})
