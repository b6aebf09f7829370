# SPDX-License-Identifier: Apache-2.0

"""Processes that take one volume over from each other, and their oracle.

A *session* is the time of one owner. It begins with what the owner read, and
then has the writes of this owner. The next owner must find what the one before
had written up to some moment, which is not before its last flush (V3 to V5).
If both are on the same host, which was not killed meanwhile, that moment is
not before its last write: all bytes are in the page cache.
"""

import contextlib
import dataclasses
import random
import time

from glance_dedup.base import exceptions
from glance_dedup.repository import openvolumes
from tests.functional import event_logs

NAME = 'disk'
#: Two parts.
SIZE = 400 << 20
SLOTS = 24
#: Of each write. A record is written as a whole.
LENGTH = 9000
STRIDE = SIZE // SLOTS
TAG = 64
#: How often an owner does each step.
STEPS = {'write': 12, 'check': 3, 'flush': 2, 'checkpoint': 1, 'renew': 1,
         'pause': 12}
MAX_STEPS = 100
#: What an owner does not report: another one has the volume.
EXPECTED = (exceptions.BusyError,)


def offset(slot):
    """Return the place of a slot: no whole block, nor a whole sector."""
    return slot * STRIDE + 13 * slot


def content(tag):
    """Return the bytes of a slot. Half of them are in many other slots."""
    half = LENGTH // 2
    mine = random.Random(tag).randbytes(half - TAG)
    common = random.Random(len(tag) % 3).randbytes(LENGTH - half)
    return tag.encode().ljust(TAG) + mine + common


def create(repo):
    openvolumes.create(repo, NAME, SIZE)


def read_slot(volume, slot):
    """Return the tag of a slot; '': it was never written."""
    data = volume.read(LENGTH, offset(slot))
    if not any(data):
        return ''
    tag = data[:TAG].decode().rstrip()
    assert data == content(tag), f'slot {slot}: {tag} is wrong'
    return tag


def read_state(volume):
    return [read_slot(volume, slot) for slot in range(SLOTS)]


class Owner:
    """The work of one session.

    :param host: names the host, since it has started
    :param name: no other session has it
    :param tell: notes an event
    """

    def __init__(self, volume, host, name, rng, tell):
        self._volume = volume
        self._name = name
        self._rng = rng
        self._tell = tell
        self._state = read_state(volume)
        self._writes = 0
        tell(session=name, phase='open', host=host, state=self._state)

    def work(self, deadline):
        steps = [getattr(self, name) for name, often in STEPS.items()
                 for _ in range(often)]
        for _ in range(self._rng.randrange(1, MAX_STEPS)):
            if time.monotonic() >= deadline:
                return
            self._rng.choice(steps)()

    def write(self):
        slot = self._rng.randrange(SLOTS)
        tag = f'{self._name}/{self._writes}'
        self._tell(session=self._name, phase='write', slot=slot, tag=tag)
        self._volume.write(content(tag), offset(slot))
        self._state[slot] = tag
        self._writes += 1
        self._tell(session=self._name, phase='written', count=self._writes)

    def check(self):
        slot = self._rng.randrange(SLOTS)
        assert read_slot(self._volume, slot) == self._state[slot]

    def flush(self):
        self._volume.flush()
        self._tell(session=self._name, phase='durable', count=self._writes)

    def checkpoint(self):
        self._volume.checkpoint()
        self._tell(session=self._name, phase='durable', count=self._writes)

    def renew(self):
        self._volume.renew()

    def pause(self):
        time.sleep(self._rng.random() / 50)


def own(repo, host, name, rng, tell, deadline):
    """Own the volume for a while, unless another process has it."""
    with contextlib.suppress(*EXPECTED):
        with openvolumes.open_volume(repo, NAME) as volume:
            Owner(volume, host, name, rng, tell).work(deadline)


# -- the oracle ---------------------------------------------------------------

@dataclasses.dataclass
class Session:
    """One owner's time."""

    host: str
    begun: float
    state: list[str]
    writes: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    written: int = 0
    """So many writes have returned,"""
    durable: int = 0
    """and so many were flushed."""

    def states(self, first):
        """Yield the states after `first` writes, and after each later one."""
        state = list(self.state)
        for number, (slot, tag) in enumerate(self.writes):
            if number >= first:
                yield list(state)
            state[slot] = tag
        yield state


def read_sessions(logs):
    """Return the sessions in the logs, in their order."""
    sessions = {}
    for log in logs:
        for event in event_logs.read(log):
            if event.get('op') != 'volume':
                continue
            if event['phase'] == 'open':
                sessions[event['session']] = Session(
                    event['host'], event['time'], event['state'])
                continue
            session = sessions[event['session']]
            if event['phase'] == 'write':
                session.writes.append((event['slot'], event['tag']))
            else:
                setattr(session, event['phase'], event['count'])
    return sorted(sessions.values(), key=lambda session: session.begun)


def judge(sessions):
    """Check what each owner found against what the one before had written."""
    for before, after in zip(sessions, sessions[1:], strict=False):
        least = (before.written if after.host == before.host
                 else before.durable)
        assert after.state in before.states(least), (
            f'{least} of {len(before.writes)} writes were to be found', before,
            after)
