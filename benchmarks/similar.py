# SPDX-License-Identifier: Apache-2.0

"""Measure the gain of compressing similar blocks together.

Run it from a checkout; gcc and the engine's libraries are needed::

    python benchmarks/similar.py [--levels 3,9] [--segment-kib 256] IMAGE...

similar.c cuts the IMAGEs into blocks, and compresses groups of them in the
order in which they came, and in that of the engine. It needs no repository and
stores nothing. A line for each level and order.
"""

import subprocess

import common
import synthetic

LIMIT = 24 * 3600


def main() -> None:
    args = common.arguments(
        __doc__, paths='+', levels=('3,9', 'of zstd'),
        segment_kib=(256, 'of segments')).parse_args()
    with common.place(args.dir) as directory:
        program = synthetic.build(directory, 'similar')
        for level in args.levels.split(','):
            print(f'zstd-{level}:', flush=True)
            subprocess.run([program, level, str(args.segment_kib),
                            *args.paths], check=True, timeout=LIMIT)


if __name__ == '__main__':
    main()
