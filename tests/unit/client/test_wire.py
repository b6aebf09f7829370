# SPDX-License-Identifier: Apache-2.0

"""The wire format and the messages that a peer must not send."""

import dataclasses
import random

import pytest

from glance_dedup.client import wire

HEADER = wire.RecipeHeader(4096, 10000, 0, 1, 'sha256', bytes(16), 'fixed')


class Bad(Exception):
    """The exception that unpacking raises in these tests."""


def test_header_there_and_back():
    assert wire.RecipeHeader.unpack(HEADER.pack(), Bad) == HEADER


@pytest.mark.parametrize('name', ['', 'sha\0256', 'sha 256', '\x7f'])
def test_header_without_a_fingerprint(name):
    header = dataclasses.replace(HEADER, fingerprint=name)
    with pytest.raises(Bad, match='names no fingerprint'):
        wire.RecipeHeader.unpack(header.pack(), Bad)


def test_plain_frames_there_and_back():
    rng = random.Random(1)
    blocks = [(offset, rng.randbytes(length))
              for offset, length in ((0, 1), (7, 4096), (1 << 40, 65536))]
    frame = wire.plain_frame(blocks)
    ranges = [(offset, len(data)) for offset, data in blocks]
    found, = wire.Frames(wire.Buffer(frame + wire.END_FRAME, Bad), ranges, 0)
    assert list(found.blocks()) == blocks
    for at in (0, 4, 8, 12, 16, 24, 40, len(frame) - 1):
        wrong = frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1:]
        with pytest.raises(Bad):
            list(wire.Frames(wire.Buffer(wrong + wire.END_FRAME, Bad), ranges,
                             0))


@pytest.mark.parametrize('name', ['weak-8', 'WEAK-8'])
def test_header_with_the_fingerprint_of_tests(name):
    """A header with the test fingerprint is refused.

    With that fingerprint, all blocks with the same first byte would be equal.
    """
    data = dataclasses.replace(HEADER, fingerprint=name).pack()
    with pytest.raises(Bad, match='weak-8, which is for tests only'):
        wire.RecipeHeader.unpack(data, Bad)
