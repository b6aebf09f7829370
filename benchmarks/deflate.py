# SPDX-License-Identifier: Apache-2.0

"""Measure the deflate encoder beside zlib.

Run it from a checkout; gcc, zlib and the engine's libraries are needed::

    python benchmarks/deflate.py [--levels 6,9] [--cluster-kib 64] IMAGE...

deflate.c cuts the IMAGEs into clusters and leaves out those of zeros. Both
encoders deflate each cluster in turns, as QEMU does (window 12, memory level
9), and must make the same bytes. A line for each level.
"""

import subprocess

import common
import synthetic

LIMIT = 24 * 3600


def main() -> None:
    args = common.arguments(
        __doc__, paths='+', levels=('6', 'of zlib'),
        cluster_kib=(64, 'of clusters')).parse_args()
    with common.place(args.dir) as directory:
        program = synthetic.build(directory, 'deflate')
        for level in args.levels.split(','):
            print(f'level {level}:', flush=True)
            subprocess.run(
                [program, level, '12', '9', str(args.cluster_kib),
                 *args.paths], check=True, timeout=LIMIT)


if __name__ == '__main__':
    main()
