# SPDX-License-Identifier: Apache-2.0

"""Forecasts when the file system is full: a line through the history.

*Room* is the free space above the reserve. When no room is left, storing is
refused. The growth is the median of the slopes between each two samples of the
last weeks (Theil and Sen). So it does not follow single uploads, or space that
a collection gives back. It is of all bytes in use on the file system:
a larger file system changes the room, not the growth.

Unknown is better than wrong. There is no growth without a day of history, nor
if the slopes leave open whether the use grows at all. There is no forecast
beyond some multiple of the time that was observed.
"""

from collections.abc import Iterable
import dataclasses
import itertools
import math
import statistics
import time
from typing import Any

from oslo_log import log

from glance_dedup.base import units

LOG = log.getLogger(__name__)

#: The severities of a trouble.
CRITICAL = 'critical'
WARNING = 'warning'

#: The severity of each trouble, by its code.
CODES = {'DISK_FULL': CRITICAL, 'DISK_FULL_SOON': WARNING,
         'DISK_NEARLY_FULL': WARNING}

#: Seconds of history that count.
WINDOW = 14 * 86400
#: Seconds of which only the last sample counts.
STEP = 2 * 3600
#: The minimum of history: seconds between the first sample and the last, and
#: samples between.
MIN_SPAN = 86400
FEWEST = 8
#: A forecast is at most so many times as far as the history goes back.
REACH = 10
#: Storing that ends sooner than this is worth a warning, seconds.
SOON = 7 * 86400
#: So is less room than this share of the file system.
LITTLE = 0.05
#: A warning is repeated after so many seconds without its cause.
QUIET = 86400

#: The key of a sample with the used bytes of the file system.
USED = 'filesystem_used_bytes'

#: The fields that :func:`trouble` needs.
NEEDED = ('filesystem_free_bytes', 'filesystem_bytes', 'reserve_bytes')

# One in twenty histories without any growth seems to have this much.
_DEVIATIONS = 1.645

Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Growth:
    """Growth of the use of the file system."""

    rate: float
    """Bytes a second; more than 0."""
    observed: float
    """Seconds from the first sample to the last."""


def growth(samples: Iterable[Fields], now: float) -> Growth | None:
    """Return the growth that the samples show; None: none, or not known.

    :param samples: of the history, in any order; some may have no `USED`
    :param now: seconds since 1970
    """
    last: dict[float, tuple[float, float]] = {}
    for sample in samples:
        moment, used = _number(sample, 'time'), _number(sample, USED)
        if used is not None and moment is not None and (
                now - WINDOW <= moment <= now):
            point = moment, used
            last[moment // STEP] = max(last.get(moment // STEP, point), point)
    points = sorted(last.values())
    if len(points) < FEWEST or points[-1][0] - points[0][0] < MIN_SPAN:
        return None
    slopes = sorted((later[1] - earlier[1]) / (later[0] - earlier[0])
                    for earlier, later in itertools.combinations(points, 2))
    # Kendall's test: were there no growth, the slopes above 0 would outnumber
    # those below it by less than this, mostly.
    count = len(points)
    excess = _DEVIATIONS * math.sqrt(count * (count - 1) * (2 * count + 5)
                                     / 18)
    if slopes[max(0, math.floor((len(slopes) - excess) / 2))] <= 0:
        return None
    return Growth(statistics.median(slopes), points[-1][0] - points[0][0])


def _number(sample: Fields, key: str) -> float | None:
    value = sample.get(key)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and (
            0 <= value < 1 << 63):
        return value
    return None


def seconds_left(room: int, growth: Growth | None) -> int | None:
    """Return the seconds until storing is refused; None: not known.

    :param room: the free bytes above the reserve; at most 0: it is refused
    """
    if room <= 0:
        return 0
    if growth is None or room / growth.rate > REACH * growth.observed:
        return None
    return round(room / growth.rate)


def trouble(space: Fields) -> tuple[str, str] | None:
    """Return a warning about the room for an operator, if there is one.

    :param space: the field of the status; it has at least `NEEDED`
    :returns: a code of `CODES`, and sentences; None: all is well
    """
    free, reserve = space['filesystem_free_bytes'], space['reserve_bytes']
    left = space.get('full_in_seconds')
    have = (f'{units.size(free)} are free on the file system, of which '
            f'{units.size(reserve)} are the reserve')
    what = ('Delete images and let the space be collected, or enlarge the '
            'file system.')
    if free <= reserve:
        return 'DISK_FULL', f'Storing is refused: {have}. {what}'
    if left is not None and left < SOON:
        return 'DISK_FULL_SOON', (
            f'Storing will be refused in about {units.duration(left)}: '
            f'{have}. {what}')
    if free - reserve < LITTLE * space['filesystem_bytes']:
        return 'DISK_NEARLY_FULL', (
            'Storing will be refused when the reserve is reached: '
            f'{have}. {what}')
    return None


class Watch:
    """Logs each kind of trouble once. For one thread.

    :param path: of the repository
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._met: dict[str, float] = {}    # the last time, by code

    def look(self, space: Fields) -> None:
        """Log a trouble, unless it was met within the last QUIET seconds."""
        found = trouble(space)
        if found is None:
            return
        code, text = found
        now = time.monotonic()
        if now - self._met.get(code, -math.inf) > QUIET:
            LOG.warning('%s: %s: %s', self._path, code, text)
        self._met[code] = now
