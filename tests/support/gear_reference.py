# SPDX-License-Identifier: Apache-2.0

"""Content-defined chunking, written a second time, from the format's text."""

from collections.abc import Iterator

_MASK = (1 << 64) - 1


def _constant(byte: int) -> int:
    """Return the number of SplitMix64 with seed 0 after `byte` steps."""
    z = byte * 0x9e3779b97f4a7c15 & _MASK
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9 & _MASK
    z = (z ^ z >> 27) * 0x94d049bb133111eb & _MASK
    return z ^ z >> 31


CONSTANTS = [_constant(byte) for byte in range(256)]


def _zeros(data: bytes, start: int) -> int:
    """Return the number of zeros from `start` on."""
    end = start
    while end < len(data) and not data[end]:
        end += 1
    return end - start


def lengths(data: bytes, minimum: int, average: int,
            maximum: int) -> Iterator[int]:
    """Return the lengths of the blocks of an image."""
    start = 0
    while start < len(data):
        most = min(maximum, len(data) - start)
        length = min(most, _zeros(data, start))
        if length < minimum:
            length = _cut(data[start:start + most], minimum, average)
        yield length
        start += length


def _cut(data: bytes, minimum: int, average: int) -> int:
    value = 0
    for length, byte in enumerate(data, 1):
        value = (2 * value + CONSTANTS[byte]) & _MASK
        need = (1 << 64) // average
        need = need // 4 if length <= average else need * 4
        if length >= minimum and value < need:
            return length
    return len(data)
