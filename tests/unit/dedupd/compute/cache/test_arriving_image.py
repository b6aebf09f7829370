# SPDX-License-Identifier: Apache-2.0

"""The beginning and the end of an arrival, for all clients of the image."""

import contextlib
import os

import pytest

from dedupd.compute.cache import arriving_image
from dedupd.serve import image_source
from tests.support import arriving_images
from tests.support import repositories

hosts = arriving_images.hosts
MIB = arriving_images.MIB


def descriptors():
    return len(os.listdir('/proc/self/fd'))


def test_no_thread_can_be_started(hosts, monkeypatch):
    """All waiting clients get the error, and the next attempt succeeds."""
    data = arriving_images.noise(MIB)
    expected = hosts.put(data)

    def submit(*args):
        raise RuntimeError("can't start new thread")

    def attempt():
        hosts.arrivals.open('one', expected, None)

    with monkeypatch.context() as patch:
        patch.setattr(hosts.arrivals._workers, 'submit', submit)
        with pytest.raises(RuntimeError):       # opens descriptors
            attempt()
        before = descriptors()
        for error in arriving_images.at_once(3, attempt):
            assert isinstance(error, RuntimeError)
    hosts.require_nothing_of('one')
    # Threads of the relay may close its connections later.
    repositories.eventually(lambda: descriptors() <= before)
    with contextlib.closing(
            hosts.arrivals.open('one', expected, None)) as reading:
        assert arriving_images.follow(reading) == data


def test_a_beginning_that_is_not_noted(hosts):
    """If the listener fails, no arrival remains, and others may begin."""
    expected = hosts.put(arriving_images.noise(MIB))

    def fail(image_id, size):
        raise ValueError('not noted')

    hosts.arrivals._on_begin = fail
    for _ in range(9):                      # more than the limit of arrivals
        with pytest.raises(ValueError, match='not noted'):
            hosts.arrivals.open('one', expected, None)
    hosts.require_nothing_of('one')
    assert hosts.arrivals.status()['failures'] == 9


def test_it_ended_before_it_is_opened(hosts, monkeypatch):
    """The image is read from the repository if the arrival has ended."""
    data = arriving_images.noise(MIB)
    expected = hosts.put(data)
    open_arrival = arriving_image.Arrival.open

    def late(*args):
        hosts.ended()
        return open_arrival(*args)

    monkeypatch.setattr(arriving_image.Arrival, 'open', late)
    reading = hosts.arrivals.open('one', expected, None)
    assert isinstance(reading, image_source.Present)
    assert arriving_images.follow(reading) == data
    reading.close()


def test_it_failed_before_it_is_opened(hosts, monkeypatch):
    hosts.put(arriving_images.noise(MIB))
    wrong = arriving_image.Expected(MIB, md5='0' * 32)
    open_arrival = arriving_image.Arrival.open

    def late(*args):
        hosts.ended()
        return open_arrival(*args)

    monkeypatch.setattr(arriving_image.Arrival, 'open', late)
    with pytest.raises(arriving_image.WrongImage, match="Glance's record"):
        hosts.arrivals.open('one', wrong, None)
    hosts.require_nothing_of('one')
