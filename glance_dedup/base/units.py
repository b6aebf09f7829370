# SPDX-License-Identifier: Apache-2.0

"""Sizes and times as people read and write them, the same everywhere."""

import re

_SIZES = ('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB', 'EiB')
_TIMES = ((86400, 'days'), (3600, 'h'), (60, 'min'))
_SECONDS = {'s': 1, 'min': 60, 'h': 3600, 'd': 86400, 'days': 86400}


def size(number: float) -> str:
    """A number of bytes: 17 B, 1.5 KiB, 250 GiB."""
    sign = '-' if number < 0 else ''
    number = abs(number)
    for unit in _SIZES:
        if number < 1023.5 or unit == _SIZES[-1]:
            break
        number /= 1024
    if unit == 'B':
        return f'{sign}{number:.0f} B'
    return f'{sign}{number:.1f} {unit}' if number < 99.95 else (
        f'{sign}{number:.0f} {unit}')


def parse_size(text: str) -> int:
    """Return the number of bytes that a size means: 512, 64K, 10G, 10GiB.

    :raises ValueError: it is no size
    """
    match = re.fullmatch('([0-9]{1,19})(?:([KMGTP])(?:iB)?)?', text)
    if match is None:
        raise ValueError(f"'{text}' is no size: give bytes, or a number with "
                         'K, M, G, T or P, as in 10G, which is 10 GiB')
    return int(match[1]) << 10 * ' KMGTP'.index(match[2] or ' ')


def parse_duration(text: str) -> float:
    """Return the seconds that a duration means: 0.5s, 30s, 5min, 12h, 7d.

    :raises ValueError: it is no duration
    """
    match = re.fullmatch(
        '([0-9]{1,9}(?:[.][0-9]{1,3})?)(s|min|h|d|days)', text)
    if match is None:
        raise ValueError(f"'{text}' is no duration: give a number with s, "
                         'min, h or d, as in 30s')
    return float(match[1]) * _SECONDS[match[2]]


def duration(seconds: float) -> str:
    """A duration in its largest unit: 12 days, 5 h, 119 min, 40 s."""
    for length, unit in _TIMES:
        if seconds >= 2 * length:
            return f'{seconds / length:.0f} {unit}'
    return f'{seconds:.0f} s' if seconds >= 1 else 'less than 1 s'


def count(number: int, noun: str) -> str:
    """A number of things whose plural ends in s: 1 image, 2 images."""
    return f'{number} {noun}' if number == 1 else f'{number} {noun}s'
