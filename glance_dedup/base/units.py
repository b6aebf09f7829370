# SPDX-License-Identifier: Apache-2.0

"""Sizes and times as people read them, the same in all output."""

_SIZES = ('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB', 'EiB')
_TIMES = ((86400, 'days'), (3600, 'h'), (60, 'min'))


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


def clock(seconds: float) -> str:
    """A duration to the second: H:MM:SS."""
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f'{hours}:{minutes:02}:{seconds:02}'


def duration(seconds: float) -> str:
    """A duration in its largest unit: 12 days, 5 h, 119 min, 40 s."""
    for length, unit in _TIMES:
        if seconds >= 2 * length:
            return f'{seconds / length:.0f} {unit}'
    return f'{seconds:.0f} s' if seconds >= 1 else 'less than 1 s'


def count(number: int, noun: str) -> str:
    """A number of things whose plural ends in s: 1 image, 2 images."""
    return f'{number} {noun}' if number == 1 else f'{number} {noun}s'
