# SPDX-License-Identifier: Apache-2.0

"""Choose the backup that a name means, and the backups to be kept.

The time of a backup is in its id, and comes from a clock that may have been
wrong. A backup that is dated in the future is outside all of this: no rule
counts it, nothing prunes it, and it is restored only if a time is given. The
backup of a name that was stored last stays, too, whatever its date.

A rule keeps some backups of each name. ``last`` keeps the newest N. The others
have periods: days, ISO weeks (from Monday to Sunday) and months, all in UTC.
Of each period, the newest backup counts. The newest N of these are kept, so
that periods without a backup use nothing up. What no rule keeps is pruned, but
never the newest backup of a name.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
import datetime

from glance_dedup.base import exceptions
from glance_dedup.base import imageids

# The format of a period of each rule; equal texts are of one period. strftime
# writes years before 1000 with fewer digits.
_PERIODS: dict[str, Callable[[datetime.datetime], str]] = {
    'daily': lambda time: time.isoformat()[:10],
    'weekly': lambda time: '{:04}-W{:02}'.format(*time.isocalendar()),
    'monthly': lambda time: time.isoformat()[:7]}
#: The rules, by their names.
RULES = ('last', *_PERIODS)

_MAX_NAMES = 10     # in a message
# Clocks of hosts differ. A backup is in the future if it is more than this
# ahead of the clock of the host that judges it.
_MAX_SKEW = datetime.timedelta(minutes=5)


def now() -> datetime.datetime:
    """Return the time in UTC, in whole seconds as in the ids of backups."""
    return datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)


def words(time: datetime.datetime) -> str:
    """A time as messages have it."""
    # strftime writes years before 1000 with fewer digits.
    return f'{time.year:04}{time:-%m-%d %H:%M:%S} UTC'


def parse_time(text: str) -> datetime.datetime:
    """The moment that a user means.

    :param text: in ISO 8601. A time without a zone is in UTC; a date means
        the end of that day in UTC
    :raises ValueError: it is none
    """
    try:
        day = datetime.date.fromisoformat(text)
    except ValueError:
        time = datetime.datetime.fromisoformat(text)
    else:
        time = datetime.datetime.combine(day, datetime.time.max)
    if time.tzinfo is None:
        return time.replace(tzinfo=datetime.timezone.utc)
    try:
        return time.astimezone(datetime.timezone.utc)
    except OverflowError as e:
        raise ValueError(f'{text} is out of range') from e


def of_name(backups: Iterable[imageids.Backup], name: str
            ) -> list[imageids.Backup]:
    """The backups of a name, in the same order.

    :raises ImageNotFound: there are none; the message lists the names that
        have backups
    """
    backups = list(backups)
    found = [backup for backup in backups if backup.name == name]
    if not found:
        names = sorted({backup.name for backup in backups})
        more = len(names) - _MAX_NAMES
        raise exceptions.ImageNotFound(
            f'there is no backup of {name}: ' + (
                f'there are backups of {", ".join(names[:_MAX_NAMES])}'
                + (f' and {more} more (backup list)' if more > 0 else '')
                if names else 'the repository has no backups'))
    return found


def is_future(backup: imageids.Backup, now: datetime.datetime) -> bool:
    """Return whether a backup is dated in the future."""
    # Not the backup's time less the skew: its id may have the year 1.
    return backup.time > now + _MAX_SKEW


def warnings(backups: Iterable[imageids.Backup], now: datetime.datetime
             ) -> list[str]:
    """Return a sentence for each name that has backups of the future."""
    found: dict[str, list[imageids.Backup]] = {}
    for backup in sorted(backups):
        if is_future(backup, now):
            found.setdefault(backup.name, []).append(backup)
    return [
        f'{future[0].image_id}, a backup of {name}, is dated in the future'
        + (f', and so are {len(future) - 1} more of {name}'
           if len(future) > 1 else '')
        + ': the clock of this host is wrong, or a clock was wrong when the '
        'backup was made. No rule counts such a backup, prune never deletes '
        'it, and restore takes it only with --at. Set the clock, or delete '
        'the backup (image delete) if you do not need it'
        for name, future in found.items()]


def chosen(backups: Iterable[imageids.Backup], name: str,
           now: datetime.datetime, at: datetime.datetime | None = None
           ) -> imageids.Backup:
    """Return the newest backup of a name that is not of the future.

    :param at: only backups of this time or before, also if they are of the
        future
    :raises ImageNotFound: there is none; the message lists the others
    """
    found = sorted(of_name(backups, name))
    allowed = [backup for backup in found if (
        not is_future(backup, now) if at is None else backup.time <= at)]
    if allowed:
        return allowed[-1]
    there_are = (f'the oldest is of {words(found[0].time)}, the newest of '
                 f'{words(found[-1].time)}')
    if at is None:
        raise exceptions.ImageNotFound(
            f'all backups of {name} are dated in the future: {there_are}, and '
            f'the clock of this host says {words(now)}. Set the clock, or '
            'choose a backup with --at')
    raise exceptions.ImageNotFound(
        f'there is no backup of {name} of {words(at)} or before: {there_are}')


def kept(backups: Iterable[imageids.Backup], rules: dict[str, int],
         now: datetime.datetime, stored: Mapping[imageids.Backup, int]
         ) -> dict[imageids.Backup, list[str]]:
    """Return the backups of one name, the newest first, and why each is kept.

    :param rules: how many each of RULES keeps; 0: the rule keeps none
    :param stored: when each was stored, in seconds since 1970, as far as that
        is known
    :returns: the reasons, such as ``daily 2026-11-23``; a backup without any
        is to be pruned
    """
    found = sorted(backups, reverse=True)
    reasons: dict[imageids.Backup, list[str]] = {
        backup: ['in the future'] if is_future(backup, now) else []
        for backup in found}
    counted = [backup for backup in found if not reasons[backup]]
    if counted:
        reasons[counted[0]].append('newest')
    _keep_stored_last(reasons, counted, stored)
    for number, backup in enumerate(counted[:rules.get('last', 0)], 1):
        reasons[backup].append(f'last {number}')
    for rule, period_of in _PERIODS.items():
        newest: dict[str, imageids.Backup] = {}
        for backup in counted:
            newest.setdefault(period_of(backup.time), backup)
        for period in list(newest)[:rules.get(rule, 0)]:
            reasons[newest[period]].append(f'{rule} {period}')
    return reasons


def _keep_stored_last(reasons: dict[imageids.Backup, list[str]],
                      counted: list[imageids.Backup],
                      stored: Mapping[imageids.Backup, int]) -> None:
    """Give a reason to the backup that was stored last.

    Its date is older than that of the newest if the clock was behind.
    """
    known = [backup for backup in counted if backup in stored]
    if known:
        last = max(known, key=lambda backup: (stored[backup], backup))
        if last != counted[0]:
            reasons[last].append('stored last')
