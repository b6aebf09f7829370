#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0

"""Writes vectors.inc: the bytes that zlib makes of known inputs, as digests.

The vectors are golden: stored images depend on these bytes, so a difference is
an error of the encoder, or a zlib with other bytes. Run it only to add
vectors::

    python3 tests/c/deflate/make_vectors.py > tests/c/deflate/vectors.inc
"""

import functools
import hashlib
import itertools
import zlib

KINDS = ('text', 'zeros', 'noise', 'records')
LENGTHS = (0, 1, 5, 300, 4096, 65536, 150000)


@functools.cache
def plain_bytes(kind: int, length: int) -> bytes:
    """Return what fill_plain of test_deflate.c returns."""
    state, plain = 12345 + kind, bytearray()
    while len(plain) < length:
        state = (state * 1103515245 + 12345) & 0x7fffffff
        value = state >> 8
        name = KINDS[kind]
        if name == 'zeros':
            plain.append(0 if value % 50 else value & 255)
        elif name == 'noise':
            plain.append(value & 255)
        elif name == 'text' and value % 4 == 0 and len(plain) > 300:
            start = len(plain) - 1 - value // 4 % 290
            for i in range(3 + value // 2048 % 40):
                plain.append(plain[start + i])
        elif name == 'text':
            plain.append(97 + value % 20)
        else:
            plain.append(len(plain) % 48 if value % 9 else value & 255)
    return bytes(plain[:length])


def parameters():
    """Yield level, window, memory level, strategy and wrapper."""
    yield from ((6, 12, 9, 0, 0), (6, 15, 8, 0, 1))
    yield from itertools.product(range(1, 10), (9, 12, 15), (1, 9), (0,), (0,))
    yield from itertools.product((2, 6), (9, 15), (4, 8), range(1, 5), (0, 1))


def main() -> None:
    """Print the header."""
    print('/* SPDX-License-Identifier: Apache-2.0 */')
    print('/* Made by make_vectors.py: parameters, kind and length of the '
          'plain bytes,\n * length and digest of the stream. */')
    for level, window, memory, strategy, wrapped in parameters():
        for kind, length in itertools.product(range(len(KINDS)), LENGTHS):
            # Every pair of values is there, though not every combination.
            if (level, window, memory) != (6, 12, 9) and (
                    (level + window + memory + strategy + kind + length) % 5):
                continue
            coder = zlib.compressobj(
                level, zlib.DEFLATED, window if wrapped else -window, memory,
                strategy)
            stream = (coder.compress(plain_bytes(kind, length))
                      + coder.flush())
            digest = hashlib.sha256(stream).hexdigest()[:16]
            print(f'{{{{{level}, {window}, {memory}, {strategy}, {wrapped}}}, '
                  f'{kind}, {length}, {len(stream)}, 0x{digest}}},')


if __name__ == '__main__':
    main()
