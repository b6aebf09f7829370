# SPDX-License-Identifier: Apache-2.0

"""The forecast of the time at which the disk will be full."""

import contextlib
import logging
import random
import statistics

import pytest

from dedupd.status import forecast
from dedupd.status import repository_stats
from tests.support import maintenance
from tests.support import repositories

NOW = 1.75e9
DAY = 86400
GIB = 1 << 30


def history(used, days=14.0, every=3600, until=NOW):
    """Samples of a function of the days since the first."""
    first = until - days * DAY
    moments = [first + number * every
               for number in range(int(days * DAY / every) + 1)]
    return [{'time': int(moment), 'images': 1,
             forecast.USED: int(used((moment - first) / DAY))}
            for moment in moments]


def days_left(samples, room):
    left = forecast.seconds_left(room, forecast.growth(samples, NOW))
    return None if left is None else left / DAY


def noisy(used, seed, deviation):
    rng = random.Random(seed)
    return lambda day: used(day) + rng.gauss(0, deviation)


@pytest.mark.parametrize('days', (1, 2, 14))
def test_a_straight_line_is_continued(days):
    samples = history(lambda day: 50 * GIB + 10 * GIB * day, days)
    assert days_left(samples, 80 * GIB) == pytest.approx(8, rel=0.01)
    random.Random(1).shuffle(samples)
    assert days_left(samples, 80 * GIB) == pytest.approx(8, rel=0.01)


def test_samples_of_a_real_history_weigh_the_same():
    """The many samples of the last day have no more weight than older ones."""
    samples = history(lambda day: 10 * GIB * day, 14)
    samples += history(lambda day: 130 * GIB + 10 * GIB * day, 1, every=300)
    assert days_left(samples, 80 * GIB) == pytest.approx(8, rel=0.05)


def test_it_does_not_follow_what_comes_and_goes():
    """Short-lived uploads and collections do not change the forecast."""
    samples = history(
        lambda day: 100 * GIB + GIB * day + 5 * GIB * (3 * day % 1))
    assert days_left(samples, 30 * GIB) == pytest.approx(30, rel=0.2)
    # One large upload an hour ago does not predict another one.
    samples = history(lambda day: 10 * GIB * day
                      + (500 * GIB if day > 13.95 else 0))
    assert days_left(samples, 80 * GIB) == pytest.approx(8, rel=0.1)


def test_only_the_last_weeks_count():
    samples = (history(lambda day: 1000 * GIB * day, 60, until=NOW - 14 * DAY)
               + history(lambda day: 10 * GIB * day, 14))
    assert days_left(samples, 80 * GIB) == pytest.approx(8, rel=0.05)


@pytest.mark.parametrize('samples', (
    [],
    history(lambda day: 10 * GIB * day, 0.9),       # too short
    history(lambda day: 10 * GIB * day, 14)[:1] * 500,
    history(lambda day: 10 * GIB * day, 14, every=4 * DAY),     # too few
    history(lambda day: 50 * GIB),                  # nothing grows
    history(lambda day: 500 * GIB - GIB * day),     # it shrinks
    history(lambda day: 50 * GIB + GIB * (day % 1)),    # each day the same
    # The clock was set back or forward.
    history(lambda day: 10 * GIB * day, 14, until=NOW + 15 * DAY),
    history(lambda day: 10 * GIB * day, 14, until=NOW - 15 * DAY),
    # Samples of older versions, and damaged samples.
    [{'time': 1, 'disk_bytes': 7}, {'time': 'x', forecast.USED: 5}, {},
     {'time': None, forecast.USED: 5}, {'time': True, forecast.USED: 5}] * 50,
    [{**sample, forecast.USED: value} for sample, value in zip(
        history(lambda day: day), [float('nan'), float('inf'), -5, 10 ** 400,
                                   None, [], True, '7'] * 50)],
))
def test_unknown_is_none(samples):
    assert forecast.growth(samples, NOW) is None
    assert days_left(samples, 80 * GIB) is None


def test_noise_seldom_seems_to_be_growth():
    """Noise rarely looks like growth, and does not hide real growth."""
    claims = [days_left(history(noisy(lambda day: 900 * GIB, seed, GIB)),
                        80 * GIB) for seed in range(100)]
    assert sum(claim is not None for claim in claims) <= 12
    # If noise does look like growth, the predicted date is far away.
    assert all(claim > 60 for claim in claims if claim is not None)
    claims = [days_left(history(noisy(lambda day: 10 * GIB * day, seed,
                                      5 * GIB)), 80 * GIB)
              for seed in range(100)]
    assert None not in claims
    assert statistics.median(claims) == pytest.approx(8, rel=0.05)


def test_there_is_no_forecast_of_the_far_future():
    growth = forecast.growth(history(lambda day: GIB * day, 2), NOW)
    assert forecast.seconds_left(19 * GIB, growth) == pytest.approx(
        19 * DAY, rel=0.01)
    assert forecast.seconds_left(21 * GIB, growth) is None


def test_without_room_it_is_full():
    """A disk without room counts as full, whatever the history shows."""
    assert forecast.seconds_left(0, None) == 0
    assert forecast.seconds_left(-5, forecast.Growth(1.0, 1.0)) == 0
    assert forecast.seconds_left(5, None) is None


def space(free, left=None, reserve=10, size=1000):
    return {'filesystem_free_bytes': free * GIB, 'full_in_seconds': left,
            'reserve_bytes': reserve * GIB, 'filesystem_bytes': size * GIB}


@pytest.mark.parametrize('facts, code', (
    (space(500), None), (space(500, 8 * DAY), None), (space(60), None),
    (space(59), 'DISK_NEARLY_FULL'), (space(59, 20 * DAY), 'DISK_NEARLY_FULL'),
    (space(500, 6 * DAY), 'DISK_FULL_SOON'),
    (space(20, 90), 'DISK_FULL_SOON'), (space(10, 0), 'DISK_FULL'),
    (space(9, 0), 'DISK_FULL')))
def test_trouble(facts, code):
    found = forecast.trouble(facts)
    assert (found and found[0]) == code


def test_trouble_in_words():
    assert forecast.trouble(space(500, 6 * DAY))[1] == (
        'Storing will be refused in about 6 days: 500 GiB are free on the '
        'file system, of which 10.0 GiB are the reserve. Delete images and '
        'let the space be collected, or enlarge the file system.')
    for seconds, words in ((90, '90 s'), (DAY, '24 h')):
        assert f'about {words}:' in forecast.trouble(space(500, seconds))[1]


def test_the_log_has_each_trouble_once(caplog, monkeypatch):
    """The log has each problem once, even if the forecast varies."""
    clock = [1000.0]
    monkeypatch.setattr(forecast.time, 'monotonic', lambda: clock[0])
    watch = forecast.Watch('/the/repository')

    def said(facts, later=300):
        clock[0] += later
        caplog.clear()
        watch.look(facts)
        assert all(r.levelno == logging.WARNING for r in caplog.records)
        return [r.getMessage() for r in caplog.records]

    assert said(space(500)) == []
    text, = said(space(500, 6 * DAY))
    assert text.startswith(
        '/the/repository: DISK_FULL_SOON: Storing will be refused in ')
    for _ in range(5):
        assert said(space(500, 6 * DAY)) == said(space(500, 8 * DAY)) == []
    # The problem becomes worse.
    assert 'when the reserve is reached' in said(space(40))[0]
    assert 'Storing is refused: 9.0 GiB' in said(space(9, 0))[0]
    assert said(space(9, 0), 3 * DAY) != []     # after a long pause
    assert said(space(9, 0)) == []
    # The problem was absent for a day and is back.
    assert said(space(500), 2 * DAY) == []
    assert said(space(9, 0)) != []


def test_the_figures_have_it(tmp_path):
    """The forecast comes from the catalog's history and survives a restart."""
    path = maintenance.create(tmp_path)
    with repositories.open_repository(path) as repo, maintenance.maintaining(
            repo) as maintainer:
        catalogs = [maintainer.catalog]
        found = repository_stats.Figures(repo, lambda: catalogs[0])
        with contextlib.closing(found):
            before = found.foresee()
            assert before['full_in_seconds'] is None
            room = before['filesystem_free_bytes'] - before['reserve_bytes']
            now = int(repository_stats.time.time())
            for sample in history(lambda day: room / 10 * day, 2,
                                  until=now - 1):
                maintainer.catalog.sample(sample.pop('time'), sample)
            assert found.space()['full_in_seconds'] is None
            left = found.foresee()['full_in_seconds']
            assert left == pytest.approx(10 * DAY, rel=0.1)
            # The forecast stays if the catalog is gone.
            catalogs[0] = None
            assert found.foresee()['full_in_seconds'] == pytest.approx(
                left, rel=0.1)
        with contextlib.closing(repository_stats.Figures(
                repo, lambda: maintainer.catalog)) as other:
            assert other.foresee()['full_in_seconds'] == pytest.approx(
                left, rel=0.1)
