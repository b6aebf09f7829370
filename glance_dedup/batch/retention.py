# SPDX-License-Identifier: Apache-2.0

"""Which backups are meant, and which are kept.

A rule keeps some backups of each name. ``last`` keeps the newest N. The others
have periods: days, ISO weeks (from Monday to Sunday) and months, all in UTC.
Of each period, the newest backup counts. The newest N of these are kept, so
that periods without a backup use nothing up. What no rule keeps is pruned, but
never the newest backup of a name.
"""

from collections.abc import Iterable
import datetime

from glance_dedup.base import exceptions
from glance_dedup.base import imageids

# How a period of each rule is written; equal texts are of one period.
_PERIODS = {'daily': '%Y-%m-%d', 'weekly': '%G-W%V', 'monthly': '%Y-%m'}
#: The rules, by their names.
RULES = ('last', *_PERIODS)

_MOST_NAMES = 10    # in a message


def words(time: datetime.datetime) -> str:
    """A time as messages have it."""
    return f'{time:%Y-%m-%d %H:%M:%S} UTC'


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

    :raises ImageNotFound: there are none; the message says of which names
        there are
    """
    backups = list(backups)
    found = [backup for backup in backups if backup.name == name]
    if not found:
        names = sorted({backup.name for backup in backups})
        more = len(names) - _MOST_NAMES
        raise exceptions.ImageNotFound(
            f'there is no backup of {name}: ' + (
                f'there are backups of {", ".join(names[:_MOST_NAMES])}'
                + (f' and {more} more (backup list)' if more > 0 else '')
                if names else 'the repository has no backups'))
    return found


def chosen(backups: Iterable[imageids.Backup], name: str,
           at: datetime.datetime | None = None) -> imageids.Backup:
    """The newest backup of a name.

    :param at: only those of this time or before
    :raises ImageNotFound: there is none; the message says which there are
    """
    found = sorted(of_name(backups, name))
    if at is None:
        return found[-1]
    allowed = [backup for backup in found if backup.time <= at]
    if not allowed:
        raise exceptions.ImageNotFound(
            f'there is no backup of {name} of {words(at)} or before: the '
            f'oldest is of {words(found[0].time)}, the newest of '
            f'{words(found[-1].time)}')
    return allowed[-1]


def kept(backups: Iterable[imageids.Backup], rules: dict[str, int]
         ) -> dict[imageids.Backup, list[str]]:
    """The backups of one name, the newest first, and why each is kept.

    :param rules: how many each of RULES keeps; 0: the rule keeps none
    :returns: the reasons, such as ``daily 2026-11-23``; a backup without any
        is to be pruned
    """
    found = sorted(backups, reverse=True)
    reasons: dict[imageids.Backup, list[str]] = {
        backup: [] for backup in found}
    if found:
        reasons[found[0]].append('newest')
    for number, backup in enumerate(found[:rules.get('last', 0)], 1):
        reasons[backup].append(f'last {number}')
    for rule, form in _PERIODS.items():
        newest: dict[str, imageids.Backup] = {}
        for backup in found:
            newest.setdefault(backup.time.strftime(form), backup)
        for period in list(newest)[:rules.get(rule, 0)]:
            reasons[newest[period]].append(f'{rule} {period}')
    return reasons
