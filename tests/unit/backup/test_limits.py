# SPDX-License-Identifier: Apache-2.0

"""A rank reads no faster, and takes no more of a processor, than it may."""

import math

import pytest

from glance_dedup.backup import limits

MB = 1_000_000


class Machine:
    """A clock, and a processor that works while the process does not sleep."""

    def __init__(self):
        self.now = 1000.0
        self.cpu = 7.0
        self.watched = []

    def limits(self, rate, share):
        return limits.Limits(
            rate, share, lambda: self.watched.append(self.now),
            clock=lambda: self.now, cpu=lambda: self.cpu, sleep=self.sleep)

    def sleep(self, seconds):
        assert 0 < seconds <= limits.MAX_WAIT
        self.now += seconds

    def work(self, seconds, cpu=0.0):
        self.now += seconds
        self.cpu += cpu


@pytest.fixture
def machine():
    return Machine()


def run(machine, made, steps=100, read=2 * MB, seconds=0.01, cpu=0.005):
    """Take steps; return how long they took in all."""
    began, done = machine.now, 0
    for _ in range(steps):
        machine.work(seconds, cpu)
        done += read
        made.wait(done)
    return machine.now - began


def test_no_limits(machine):
    made = machine.limits(0, math.inf)
    assert run(machine, made) == pytest.approx(1)
    assert made.held == {limits.READ_RATE: 0, limits.CPU_SHARE: 0}
    assert not machine.watched


@pytest.mark.parametrize('rate', [1 * MB, 10 * MB, 100 * MB])
def test_the_rate(machine, rate):
    made = machine.limits(rate, math.inf)
    took = run(machine, made)
    assert took == pytest.approx(200 * MB / rate)
    assert made.held[limits.READ_RATE] == pytest.approx(took - 1)
    assert not made.held[limits.CPU_SHARE]


@pytest.mark.parametrize('share', [0.05, 0.25])
def test_the_share_of_a_processor(machine, share):
    made = machine.limits(0, share)
    took = run(machine, made)
    assert took == pytest.approx(0.5 / share)
    assert made.held[limits.CPU_SHARE] == pytest.approx(took - 1)


def test_the_stricter_limit_holds(machine):
    made = machine.limits(10 * MB, 0.001)
    run(machine, made)
    assert made.held[limits.CPU_SHARE] and not made.held[limits.READ_RATE]


def test_limits_that_are_not_reached(machine):
    made = machine.limits(1000 * MB, 0.9)
    assert run(machine, made) == pytest.approx(1)
    assert not any(made.held.values())


def test_a_pause_is_made_up_for_by_one_second_only(machine):
    made = machine.limits(10 * MB, math.inf)
    machine.work(3600)
    assert run(machine, made) == pytest.approx(
        20 - limits.CATCH_UP, abs=0.02)


def test_a_long_wait_is_watched(machine):
    made = machine.limits(1 * MB, math.inf)
    made.wait(60 * MB)
    times = [1000.0, *machine.watched]
    assert times[-1] == pytest.approx(1060 - limits.CATCH_UP, abs=1.1)
    assert max(b - a for a, b in zip(times, times[1:], strict=False)) <= (
        limits.MAX_WAIT + 1e-9)
