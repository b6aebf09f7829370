# SPDX-License-Identifier: Apache-2.0

"""The encoder's functions find zlib's parameters, and compare streams."""

import zlib

import pytest

from glance_dedup import _engine
from glance_dedup.base import exceptions
from tests.support.repositories import noise

QEMU = 6, 12, 9, 0, False
PLAIN = [noise(2000, seed).hex().encode() for seed in range(8)]


def sample(plain, level=6, bits=-12, memory=9, strategy=0):
    encoder = zlib.compressobj(level, zlib.DEFLATED, bits, memory, strategy)
    return plain, encoder.compress(plain) + encoder.flush()


def test_parameters_are_found():
    samples = [sample(plain) for plain in PLAIN]
    assert _engine.find_deflate(samples, False) == QEMU
    assert all(_engine.deflates_to(QEMU, one) for one in samples)
    found = _engine.find_deflate([sample(PLAIN[0], 9, 15, 8)], True)
    assert found[1:] == (15, 8, 0, True)
    assert _engine.deflates_to(found, sample(PLAIN[1], 9, 15, 8))


def test_streams_of_others():
    plain, stream = sample(PLAIN[0])
    longer = plain, stream + b'\0'
    other = plain, stream[:50] + bytes([stream[50] ^ 1]) + stream[51:]
    for one in longer, other, (plain, b''), (plain[:-1], stream):
        assert _engine.deflates_to(QEMU, one) is None
    assert _engine.find_deflate([(plain[:300], b'no stream')], False) is None


def test_arguments_are_checked():
    one = sample(PLAIN[0])
    for samples in [], [one] * 9:
        with pytest.raises(ValueError, match='1 to 8'):
            _engine.find_deflate(samples, False)
    large = bytes((2 << 20) + 1), b''
    for call in (lambda: _engine.find_deflate([one, large], False),
                 lambda: _engine.deflates_to(QEMU, large)):
        with pytest.raises(ValueError, match='2 MiB'):
            call()
    with pytest.raises(TypeError):
        _engine.find_deflate([one, (1, 2)], False)
    with pytest.raises(exceptions.InvalidParameter):
        _engine.deflates_to((10, 12, 9, 0, False), one)


def test_the_encoder_makes_known_bytes():
    """Golden vectors are compared before anything relies on them (F3)."""
    _engine.require_golden()
