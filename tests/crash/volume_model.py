# SPDX-License-Identifier: Apache-2.0

"""A model of the possible contents of a volume after a crash.

A volume is a list of sectors of 512 bytes, and a sector is a number: 0 stands
for zeros, any other for content of its own (:func:`content`). A deed is
``['write', sector, first, count]``, which gives that many sectors the numbers
from `first` on, or with `first` 0 zeros; or ``['resize', sectors]``; or
``['become', numbers]``, which replaces all.
"""

import functools
import itertools

from tests.support import repositories

SECTOR = 512
#: The smallest size of a part.
PART_SIZE = 65536
PART = PART_SIZE // SECTOR


@functools.lru_cache(maxsize=8192)
def _block(number):
    return repositories.noise(SECTOR, number) if number else bytes(SECTOR)


def content(sectors):
    """Return the bytes of sectors."""
    return b''.join(map(_block, sectors))


def runs(sectors):
    """Return the content as an image: see ``expectation.make``."""
    found = []
    for number in sectors:
        if found and number == found[-1][0] == 0:
            found[-1][1] += 1
        else:
            found.append([number, 1])
    return found


def apply(sectors, deed):
    """Return the sectors after a deed."""
    kind, *arguments = deed
    if kind == 'write':
        at, first, count = arguments
        new = range(first, first + count) if first else [0] * count
        return [*sectors[:at], *new, *sectors[at + count:]]
    if kind == 'become':
        return arguments[0]
    size, = arguments
    return sectors[:size] + [0] * (size - len(sectors))


def shrinking(before, size):
    """Yield the deeds of a volume that becomes smaller.

    The part of a cut part behind the new end becomes zeros first, so that it
    is never seen again.
    """
    end = min(-(-size // PART) * PART, before)
    if size < end:
        yield ['write', size, 0, end - size]
    yield ['resize', size]


class Model:
    """Possible contents of a volume.

    After a crash of the machine an owner's journal has all durable data
    (:ivar:`durable`), and of the deeds behind it the first ones, up to any.
    The next owner's journal is another file, so of its deeds any may be there,
    too, even if the first one lost some: the deeds of each owner are a list of
    their own, in :ivar:`owners`. A process that is killed loses no
    acknowledged deed.

    :ivar there: whether it may be there
    :ivar absent: whether it may not
    :ivar durable: the sectors
    :ivar acknowledged: of the last owner's deeds in the list, so many
    :ivar dropped: deeds of the last owner that are not in the list any more
    """

    def __init__(self, durable, owners=((),), acknowledged=0, dropped=0,
                 there=True, absent=True):
        self.durable = durable
        self.owners = [list(deeds) for deeds in owners]
        self.acknowledged = acknowledged
        self.dropped = dropped
        self.there = there
        self.absent = absent

    def dump(self):
        return {'durable': self.durable, 'owners': self.owners,
                'acknowledged': self.acknowledged, 'dropped': self.dropped,
                'there': self.there, 'absent': self.absent}

    def opened(self, counts=None):
        """A process has become its owner.

        :param counts: of each former owner, the number of surviving deeds;
            None: there was no crash, and all of them
        """
        if counts is not None:
            self.owners = [deeds[:count] for deeds, count
                           in zip(self.owners, counts)]
        if self.owners[-1]:
            self.owners.append([])
        self.acknowledged = self.dropped = 0

    def did(self, deed):
        """A deed has begun."""
        self.owners[-1].append(deed)

    def returned(self):
        """All deeds that had begun were acknowledged."""
        self.acknowledged = len(self.owners[-1])

    def kept(self, number):
        """Deeds of former owners, and the first of this one, are durable.

        :param number: of the last owner's deeds, dropped ones among them
        """
        last = self.owners[-1]
        count = max(0, number - self.dropped)
        for deed in itertools.chain(*self.owners[:-1], last[:count]):
            self.durable = apply(self.durable, deed)
        self.owners = [last[count:]]
        self.dropped += count
        self.acknowledged = max(0, self.acknowledged - count)

    def killed(self):
        """The process was killed: no acknowledged write is lost."""
        self.kept(self.dropped + self.acknowledged)

    def crashed(self):
        """The machine crashed: volatile data may be lost."""
        self.acknowledged = 0

    def number(self):
        """Return the number of this owner's deeds."""
        return self.dropped + len(self.owners[-1])

    def sectors(self):
        """Return the content as long as there is no crash."""
        return functools.reduce(
            apply, itertools.chain(*self.owners), self.durable)

    def find(self, data):
        """Return the number of surviving deeds of each owner.

        None: the volume may not hold these bytes.
        """
        found = None
        for counts in itertools.product(
                *(range(len(deeds) + 1) for deeds in self.owners)):
            sectors = self.durable
            for deeds, count in zip(self.owners, counts):
                sectors = functools.reduce(apply, deeds[:count], sectors)
            if content(sectors) == data:
                found = counts
        return found
