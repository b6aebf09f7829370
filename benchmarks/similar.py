# SPDX-License-Identifier: Apache-2.0

"""What it brings to compress similar blocks together.

Run it from a checkout; gcc and the engine's libraries are needed::

    python benchmarks/similar.py [--levels 3,9] [--segment-kib 256] IMAGE...

similar.c cuts the IMAGEs into blocks, and compresses groups of them in the
order in which they came, and in that of the engine. It needs no repository and
stores nothing. A line for each level and order.
"""

import argparse
import subprocess
import tempfile

import synthetic

LIMIT = 24 * 3600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('images', nargs='+', metavar='IMAGE')
    parser.add_argument('--levels', default='3,9', metavar='LIST',
                        help='of zstd')
    parser.add_argument('--segment-kib', type=int, default=256)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        program = synthetic.build(directory, 'similar')
        for level in args.levels.split(','):
            print(f'zstd-{level}:', flush=True)
            subprocess.run([program, level, str(args.segment_kib),
                            *args.images], check=True, timeout=LIMIT)


if __name__ == '__main__':
    main()
