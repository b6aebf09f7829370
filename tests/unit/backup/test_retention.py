# SPDX-License-Identifier: Apache-2.0

"""The selection of one backup by time, and of the backups to keep."""

import collections
import datetime

from hypothesis import given
from hypothesis import strategies
import pytest

from glance_dedup.backup import retention
from glance_dedup.base import exceptions
from glance_dedup.base.imageids import Backup

UTC = datetime.timezone.utc


def moment(text):
    return datetime.datetime.fromisoformat(text).replace(tzinfo=UTC)


def backups(*times, name='web'):
    return [Backup(name, moment(time)) for time in times]


NOW = moment('2030-01-01T00:00')


def why(found, now=NOW, stored=None, **rules):
    """Return the reasons by the times as text, of backups that are kept."""
    return {backup.time.isoformat()[:13]: reasons for backup, reasons
            in retention.kept(found, rules, now, stored or {}).items()
            if reasons}


# -- times --------------------------------------------------------------------

@pytest.mark.parametrize('text, time', [
    ('2026-11-23T18:00:00Z', '2026-11-23T18:00:00'),
    ('20261123T180000Z', '2026-11-23T18:00:00'),
    ('2026-11-23T18:00:00', '2026-11-23T18:00:00'),
    ('2026-11-23 18:00', '2026-11-23T18:00:00'),
    ('2026-11-23T18:00:00+03:30', '2026-11-23T14:30:00'),
    ('2026-11-23', '2026-11-23T23:59:59.999999'),
    ('20261123', '2026-11-23T23:59:59.999999')])
def test_times(text, time):
    assert retention.parse_time(text) == moment(time)


@pytest.mark.parametrize('text', [
    '', 'now', '2026', '2026-13-01', '2026-11-23T25:00', '18:00', '1e9',
    '0001-01-01T00:00+14:00', '9999-12-31T23:00-14:00', '2026-11-23T18:00X'])
def test_texts_that_are_no_times(text):
    with pytest.raises(ValueError):
        retention.parse_time(text)


# -- the selection of one backup ----------------------------------------------

FOUND = [*backups('2026-11-23T18:00', '2026-11-21T18:00', '2026-11-22T18:00'),
         *backups('2026-11-24T18:00', name='db')]


@pytest.mark.parametrize('at, time', [
    (None, '2026-11-23T18:00'), ('2026-11-23', '2026-11-23T18:00'),
    ('2026-11-23T18:00:00Z', '2026-11-23T18:00'),
    ('2026-11-23T17:59:59Z', '2026-11-22T18:00'),
    ('2026-11-21T20:00+02:00', '2026-11-21T18:00'),
    ('9999-12-31', '2026-11-23T18:00')])
def test_which_is_meant(at, time):
    at = at and retention.parse_time(at)
    assert retention.chosen(FOUND, 'web', NOW, at) == Backup(
        'web', moment(time))


AHEAD = '2030-01-01T00:05:01'


def test_backup_of_the_future_is_not_meant():
    """A backup of the future is chosen only if its time is given."""
    found = [*FOUND, *backups(AHEAD)]
    assert retention.chosen(found, 'web', NOW).time == moment(
        '2026-11-23T18:00')
    assert retention.chosen(found, 'web', NOW, moment(AHEAD)) == found[-1]
    # A small difference is no future, since the clocks of hosts differ.
    found[-1] = Backup('web', moment('2030-01-01T00:05:00'))
    assert retention.chosen(found, 'web', NOW) == found[-1]


def test_all_backups_are_of_the_future():
    with pytest.raises(exceptions.ImageNotFound, match=(
            'all backups of web are dated in the future: .* clock of this '
            'host says 1970-01-01 00:00:00 UTC. .* with --at')):
        retention.chosen(FOUND, 'web', moment('1970-01-01'))


def test_warnings_name_backups_of_the_future():
    found = [*FOUND, *backups('2099-01-01', AHEAD), *backups(
        '2031-01-01', name='db')]
    assert [warning.partition(':')[0]
            for warning in retention.warnings(found, NOW)] == [
        'b_db_20310101T000000Z, a backup of db, is dated in the future',
        'b_web_20300101T000501Z, a backup of web, is dated in the future, '
        'and so are 1 more of web']
    assert retention.warnings(FOUND, NOW) == []


def test_backup_of_the_first_year():
    """A backup of the year 1 is treated like every other.

    A sender may choose such a date.
    """
    first, = backups('0001-01-01')
    assert retention.warnings([first, *FOUND], NOW) == []
    assert retention.chosen([first], 'web', NOW) == first
    assert list(why([first], daily=1).values()) == [
        ['newest', 'daily 0001-01-01']]
    with pytest.raises(exceptions.ImageNotFound,
                       match='the oldest is of 0001-01-02 00:00:00 UTC'):
        retention.chosen(backups('0001-01-02'), 'web', NOW, first.time)


def test_there_is_none():
    with pytest.raises(exceptions.ImageNotFound, match=(
            'no backup of web of 2026-11-20 23:59:59 UTC or before: the '
            'oldest is of 2026-11-21 18:00:00 UTC, the newest of '
            '2026-11-23 18:00:00 UTC')):
        retention.chosen(FOUND, 'web', NOW,
                         retention.parse_time('2026-11-20'))
    with pytest.raises(exceptions.ImageNotFound, match=(
            'no backup of we: there are backups of db, web$')):
        retention.chosen(FOUND, 'we', NOW)
    with pytest.raises(exceptions.ImageNotFound,
                       match='the repository has no backups'):
        retention.chosen([], 'web', NOW)
    many = [Backup(f'n{n:02}', moment('2026-11-23')) for n in range(12)]
    with pytest.raises(exceptions.ImageNotFound, match=(
            r'n00, .*, n09 and 2 more \(backup list\)$')):
        retention.chosen(many, 'web', NOW)


# -- the backups to keep ------------------------------------------------------

def test_the_newest_of_each_period():
    """Each rule keeps the newest backup of its days, ISO weeks or months."""
    found = backups('2026-11-23T18:00', '2026-11-23T02:00',  # a Monday
                    '2026-11-22T18:00', '2026-11-16T18:00',
                    '2026-11-15T18:00', '2026-10-31T18:00')
    assert why(found, daily=2) == {
        '2026-11-23T18': ['newest', 'daily 2026-11-23'],
        '2026-11-22T18': ['daily 2026-11-22']}
    assert why(found, weekly=3) == {
        '2026-11-23T18': ['newest', 'weekly 2026-W48'],
        '2026-11-22T18': ['weekly 2026-W47'],
        '2026-11-15T18': ['weekly 2026-W46']}
    assert why(found, monthly=9) == {
        '2026-11-23T18': ['newest', 'monthly 2026-11'],
        '2026-10-31T18': ['monthly 2026-10']}
    assert why(found, last=2) == {
        '2026-11-23T18': ['newest', 'last 1'], '2026-11-23T02': ['last 2']}
    assert why(found, last=1, daily=1, monthly=1) == {
        '2026-11-23T18': ['newest', 'last 1', 'daily 2026-11-23',
                          'monthly 2026-11']}


def test_periods_without_a_backup_use_nothing_up():
    found = backups('2026-11-23T18:00', '2026-08-01T18:00', '2024-02-29T18:00')
    assert len(why(found, daily=3)) == len(why(found, monthly=3)) == 3


def test_the_week_of_another_year():
    """January 1st of 2027 is in the last week of 2026."""
    found = backups('2027-01-01T18:00', '2026-12-31T18:00')
    assert why(found, weekly=2) == {
        '2027-01-01T18': ['newest', 'weekly 2026-W53']}
    assert len(why(found, monthly=2)) == 2


def test_periods_of_early_years():
    assert why(backups('0987-01-01T18:00'), daily=1, weekly=1, monthly=1) == {
        '0987-01-01T18': ['newest', 'daily 0987-01-01', 'weekly 0987-W01',
                          'monthly 0987-01']}


def test_the_newest_stays():
    found = backups('2026-11-23T18:00', '2026-11-22T18:00')
    assert list(why(found)) == ['2026-11-23T18']
    assert retention.kept([], {'last': 1}, NOW, {}) == {}


def test_no_rule_counts_backups_of_the_future():
    """A backup of the future takes no other backup's place in a rule."""
    found = backups('2099-01-01T01:00', '2026-11-23T18:00',
                    '2026-11-22T18:00', '2026-11-21T18:00')
    assert why(found, last=2, daily=1, weekly=1, monthly=1) == {
        '2099-01-01T01': ['in the future'],
        '2026-11-23T18': ['newest', 'last 1', 'daily 2026-11-23',
                          'weekly 2026-W48', 'monthly 2026-11'],
        '2026-11-22T18': ['last 2']}
    # The clock of the pruning host is behind.
    assert why(found, moment('1970-01-01'), last=1) == {
        f'{backup.time:%Y-%m-%dT%H}': ['in the future'] for backup in found}


def test_backup_that_was_stored_last_stays():
    """The backup that was stored last stays, even if its date is 1970."""
    found = backups('2099-01-01T01:00', '2026-11-23T18:00',
                    '2026-11-22T18:00', '1970-01-01T00:01')
    stored = dict(zip(found, (4e9, 100, 90, 200)))
    expected = {'2099-01-01T01': ['in the future'],
                '2026-11-23T18': ['newest', 'last 1'],
                '1970-01-01T00': ['stored last']}
    assert why(found, stored=stored, last=1) == expected
    # The recipe of the newest is damaged.
    del stored[found[1]]
    assert why(found, stored=stored, last=1) == expected
    # Two backups were stored in the same second, so the date decides.
    assert list(why(found, stored=dict.fromkeys(found, 5), last=1)) == [
        '2099-01-01T01', '2026-11-23T18']


_TIMES = strategies.datetimes(
    datetime.datetime(2026, 1, 1), datetime.datetime(2028, 1, 1),
    timezones=strategies.just(UTC)).map(lambda t: t.replace(microsecond=0))


@given(strategies.sets(_TIMES, min_size=1, max_size=40),
       strategies.fixed_dictionaries({rule: strategies.integers(0, 9)
                                      for rule in retention.RULES}),
       strategies.randoms(use_true_random=False))
def test_every_rule_keeps_what_it_promises(times, rules, rng):
    times = list(times)
    rng.shuffle(times)
    kept = {backup.time for backup, reasons in retention.kept(
        [Backup('web', time) for time in times], rules, NOW, {}
    ).items() if reasons}
    expected = {max(times), *sorted(times)[len(times) - rules['last']:]} if (
        rules['last'] <= len(times)) else set(times)
    for rule, period in (
            ('daily', lambda t: t.date()),
            ('weekly', lambda t: t.isocalendar()[:2]),
            ('monthly', lambda t: (t.year, t.month))):
        periods = collections.defaultdict(list)
        for time in times:
            periods[period(time)].append(time)
        expected |= {max(periods[key]) for key in sorted(
            periods, reverse=True)[:rules[rule]]}
    assert kept == expected


@given(strategies.sets(_TIMES, min_size=1, max_size=40),
       strategies.fixed_dictionaries({rule: strategies.integers(0, 9)
                                      for rule in retention.RULES}))
def test_pruning_again_prunes_nothing(times, rules):
    left = [backup for backup, reasons in retention.kept(
        [Backup('web', time) for time in times], rules, NOW, {}
    ).items() if reasons]
    assert all(retention.kept(left, rules, NOW, {}).values())
