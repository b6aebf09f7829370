# SPDX-License-Identifier: Apache-2.0

"""Figures of the repository's volumes.

The head of a volume's journal has its figures as of its last checkpoint, and
any process may read it. If the volume is served on this host, its server
reports the present figures, and whether the volume is broken.
"""

import bisect
from collections.abc import Callable
from collections.abc import Iterator
import threading
import time
from typing import Any

from glance_dedup.base import exceptions
from glance_dedup.client import volume_control
from glance_dedup.repository import image_repository
from glance_dedup.repository import openvolumes
from glance_dedup.repository import volumes

#: Seconds for which figures are used again.
FRESH = 5.0
#: Finding them takes at most this part of the time.
SHARE = 1 / 20
#: Seconds for the requests to all servers, each time.
ASKING = 2.0
#: Seconds to wait for one server.
PATIENCE = 0.5

Fields = dict[str, Any]

_HEAD = ('state', 'size', 'project', 'source', 'created')
_COUNTERS = [key for key, _ in volumes.COUNTERS.values()]


class VolumeFigures:
    """The figures of all volumes. Thread-safe.

    One thread at a time finds them; the others get those of before.

    :param journals: returns the volumes' names, and the disk space of the
        journals of each
    """

    def __init__(self, repository: image_repository.Repository,
                 journals: Callable[[], dict[str, int]]) -> None:
        self._repository = repository
        self._journals = journals
        self._mutex = threading.Lock()
        self._found: list[Fields] | None = None
        self._until = 0.0
        # The first request goes to this volume's server.
        self._first = ''

    def all(self) -> list[Fields]:
        """The volumes that are there, by name, at most some seconds old.

        If the head of a journal cannot be read, its figures are None,
        ``counters`` is empty, and ``broken`` has the reason. ``is_live``: the
        counters are as of now, not as of the last checkpoint. ``latency``
        has the times of requests, and is empty unless a volume is live.
        """
        if time.monotonic() >= self._until and self._mutex.acquire(
                blocking=self._found is None):
            try:
                began = time.monotonic()
                if began >= self._until:
                    self._found = self._look()
                    ended = time.monotonic()
                    self._until = ended + max(FRESH, (ended - began) / SHARE)
            finally:
                self._mutex.release()
        assert self._found is not None
        return self._found

    def sums(self) -> Fields:
        """The numbers of volumes by state, and sums over all of them."""
        found = self.all()
        counters = {key: sum(fields['counters'].get(key, 0)
                             for fields in found) for key in _COUNTERS}
        return {
            'in_use': sum(fields['in_use'] for fields in found),
            'unfinished': sum(fields['state'] in ('making', 'deleting')
                              for fields in found),
            'broken': sum(bool(fields['broken']) for fields in found),
            'size_bytes': sum(fields['size'] or 0 for fields in found),
            **counters, 'duplicate_percent': _duplicate_percent(counters)}

    def _look(self) -> list[Fields]:
        found = [fields for name, size in self._journals().items()
                 if (fields := self._read(name, size)) is not None]
        until = time.monotonic() + ASKING
        for fields in self._in_turn([f for f in found if f['in_use']]):
            if time.monotonic() >= until:
                self._first = fields['name']
                break
            self._ask(fields)
        for fields in found:
            fields['duplicate_percent'] = _duplicate_percent(
                fields['counters'])
        return found

    def _in_turn(self, found: list[Fields]) -> Iterator[Fields]:
        """Begin with the volume whose server got no request the last time."""
        begin = bisect.bisect_left(found, self._first,
                                   key=lambda fields: fields['name'])
        yield from found[begin:]
        yield from found[:begin]

    def _read(self, name: str, journal_bytes: int) -> Fields | None:
        """Read a volume's figures from the disk; None: it has no journal."""
        fields: Fields = {
            **dict.fromkeys(('volume_id', *_HEAD)), 'counters': {},
            'name': name, 'in_use': False, 'is_live': False, 'broken': '',
            'latency': {}, 'journal_bytes': journal_bytes}
        try:
            head = self._repository.handle().look_at_volume(name)
            fields['in_use'] = openvolumes.is_in_use(self._repository, name)
        except exceptions.ImageNotFound:
            return None     # it is being made or deleted, or that broke off
        except exceptions.RepositoryError as e:
            return {**fields, 'broken': str(e)}
        return {**fields, 'volume_id': head['volume_id'].hex(),
                **{key: head[key] for key in _HEAD},
                'counters': {shown: head['counters'][key] for key, (shown, _)
                             in volumes.COUNTERS.items()}}

    def _ask(self, fields: Fields) -> None:
        """Refresh the figures from a volume's server, if it answers."""
        try:
            status = volume_control.VolumeControl(
                self._repository.path, fields['name'], PATIENCE).status()
        except exceptions.RepositoryError:
            return      # it is on another host, or is hung
        if status.get('volume_id') != fields['volume_id']:
            return      # the name is another volume's now
        numbers, fields['broken'] = volume_control.figures(status)
        fields['latency'] = {
            operation: {'seconds': times.seconds, 'counts': [*times.counts],
                        'median': times.quantile(0.5),
                        'p99': times.quantile(0.99)}
            for operation, times in volume_control.latencies(status).items()}
        fields['is_live'] = True
        fields['size'] = numbers.get('size', fields['size'])
        fields['counters'].update(
            (shown, numbers[key])
            for key, (shown, _) in volumes.COUNTERS.items() if key in numbers)


def _duplicate_percent(counters: dict[str, int]) -> float | None:
    """The share of the non-zero bytes of checkpoints that was stored already.

    None: there were no such bytes.
    """
    duplicate = counters.get('duplicate_bytes', 0)
    stored = duplicate + counters.get('unique_bytes', 0)
    return round(100 * duplicate / stored, 2) if stored else None
