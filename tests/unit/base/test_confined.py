# SPDX-License-Identifier: Apache-2.0

"""A parser that an image has taken over causes a refusal, and nothing else."""

import contextlib
import os

import pytest

from glance_dedup.base import confined
from glance_dedup.base import exceptions
from tests.support import lying_parser

SIZE = 100_000
#: Seconds after which a killed program has ended.
SOON = 300


@pytest.fixture
def lying(tmp_path, monkeypatch):
    """Return a function that makes the program lie so, and starts it."""
    def read(length, offset):
        return bytes(SIZE)[offset:offset + length]

    def start(when, lie):
        monkeypatch.setattr(confined, 'PROGRAM',
                            lying_parser.make(tmp_path, when, lie))
        return confined.Parser(read, SIZE)
    return start


@contextlib.contextmanager
def refused(parser, said):
    """Require that the image is refused, and the process killed."""
    if said == 'took too long':
        parser._patience = 1.0
    with pytest.raises(confined.RefusedError,
                       match=f'could not be parsed.*{said}'):
        yield
    parser._process.wait(SOON)


@pytest.mark.parametrize('lie, said', [
    ('ends at once', 'does not work .*status 0'),
    ('is not confined', 'cannot be confined'),
    ('another version', 'another version'),
    ('no version', 'another version'),
    ('half of a frame', 'does not work'),
    ('never begins', 'does not work .*too long')])
def test_it_never_begins(lying, monkeypatch, lie, said):
    """The image is not blamed for a program that is not confined."""
    if lie == 'never begins':
        monkeypatch.setattr(confined, '_PATIENCE', 0.01)
    with pytest.raises(exceptions.UnavailableError, match=said):
        lying('before', lie)


def test_no_program(tmp_path, monkeypatch):
    monkeypatch.setattr(confined, 'PROGRAM', str(tmp_path / 'none'))
    with pytest.raises(exceptions.UnavailableError, match='none.*install'):
        confined.Parser(lambda length, offset: b'', SIZE)


@pytest.mark.parametrize('lie', lying_parser.MAP)
def test_lies_about_the_map(lying, lie):
    with (lying('map', lie) as parser,
          refused(parser, lying_parser.MAP[lie][1])):
        for _ in parser.pieces():
            pass


@pytest.mark.parametrize('lie', lying_parser.STREAM)
def test_lies_about_a_stream(lying, lie):
    with lying('stream', lie) as parser:
        piece, = parser.pieces()
        with refused(parser, lying_parser.STREAM[lie][1]):
            parser.send(piece)
            parser.receive()


def test_a_stream_of_zstd(lying):
    with lying('stream', 'ends') as parser:
        piece, = parser.pieces()
        with pytest.raises(confined.RefusedError, match='zstd'):
            parser.send(piece._replace(kind=confined.ZSTD))


def test_a_reason_is_safe_to_show(lying):
    with lying('refuse', '\x1b[2J\u202e' + 'x' * 300) as parser:
        with pytest.raises(confined.RefusedError) as reason:
            list(parser.pieces())
    assert str(reason.value).startswith('\\x1b[2J\\u202ex')
    assert len(str(reason.value)) == 200


def test_a_file_that_shrinks(lying, monkeypatch):
    with lying('map', 'reads for ever') as parser:
        parser._read = lambda length, offset: b''
        with pytest.raises(confined.RefusedError, match='shorter'):
            list(parser.pieces())


def test_nothing_stays_open(lying):
    before = set(os.listdir('/proc/self/fd'))
    for _ in range(3):
        with lying('map', 'hangs') as parser:
            pass
        assert parser._process.returncode is not None
        with pytest.raises(exceptions.UnavailableError):
            lying('before', 'another version')
    assert set(os.listdir('/proc/self/fd')) == before
