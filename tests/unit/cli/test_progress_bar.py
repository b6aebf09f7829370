# SPDX-License-Identifier: Apache-2.0

import io

import pytest

from glance_dedup.cli import progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_plain_lines(clock):
    stream = io.StringIO()
    with progress_bar.Progress('storing', 10 << 20, stream=stream,
                               clock=clock) as p:
        for second in range(1, 11):
            clock.now += 1
            p.update(second << 20)
    assert stream.getvalue() == (
        'storing: 50 %, 5.0 MiB of 10.0 MiB, 1.0 MiB/s, 5 s left\n'
        'storing: 100 %, 10.0 MiB of 10.0 MiB, 1.0 MiB/s, 10 s\n'
        'storing: 100 %, 10.0 MiB of 10.0 MiB, 1.0 MiB/s, 10 s\n')


def test_short_work_is_silent(clock):
    stream = io.StringIO()
    with progress_bar.Progress('storing', 10, stream=stream, clock=clock) as p:
        clock.now += 4
        p.update(10)
    assert stream.getvalue() == ''


def test_bar_on_a_terminal(clock):
    stream = Terminal()
    with progress_bar.Progress('storing', 1000, stream=stream,
                               clock=clock) as p:
        for i in range(1, 1001):
            clock.now += 0.01
            p.update(i)
    text = stream.getvalue()
    lines = text.split('\r')
    assert 50 < len(lines) < 110
    assert all(len(line.rstrip('\n')) < 80 for line in lines)
    assert '[##########..........] 5' in text
    assert lines[-1].startswith('storing: [####################] 100 %')
    assert text.endswith('\n')


def test_unknown_total_and_other_units(clock):
    stream = io.StringIO()
    with progress_bar.Progress('storing', stream=stream, clock=clock) as p:
        clock.now += 10
        p.update(1 << 20)
    assert stream.getvalue().startswith('storing: 1.0 MiB, 102 KiB/s, 10 s')
    stream = io.StringIO()
    with progress_bar.Progress('rebuilding', unit='groups', stream=stream,
                               clock=clock) as p:
        clock.now += 10
        p.update(5, 20)
    assert stream.getvalue().startswith(
        'rebuilding: 25 %, 5 of 20 groups, 0/s, 30 s left\n')


def test_quiet(clock):
    stream = Terminal()
    with progress_bar.Progress('x', 1, stream=stream, quiet=True,
                               clock=clock) as p:
        clock.now += 100
        p.update(1)
    assert stream.getvalue() == ''


def test_stream_that_breaks(clock):
    """The work goes on if the progress bar's stream breaks."""
    class Broken(io.StringIO):
        def write(self, text):
            raise BrokenPipeError()

    with progress_bar.Progress('x', 1, stream=Broken(), clock=clock) as p:
        clock.now += 100
        p.update(1)
        clock.now += 100
        p.update(1)
