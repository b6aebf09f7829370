# SPDX-License-Identifier: Apache-2.0

"""Measure how many compressed clusters come out equal when deflated again.

Run it from a checkout; gcc, zlib and the engine's libraries are needed::

    python benchmarks/clusters.py FILE...

clusters.c maps the disk in each qcow2 or VMDK file, inflates its compressed
clusters, finds the parameters with which zlib made the first ones, and
deflates all again with the installed zlib and with the engine's encoder. If a
cluster differs, it searches once more on that one, three times for a file at
most. A file whose clusters come out equal could be kept as the blocks of its
disk.
"""

import subprocess

import common
import synthetic

LIMIT = 24 * 3600


def main() -> None:
    args = common.arguments(__doc__, paths='+').parse_args()
    with common.place(args.dir) as directory:
        program = synthetic.build(directory, 'clusters')
        subprocess.run([program, *args.paths], check=True, timeout=LIMIT)


if __name__ == '__main__':
    main()
