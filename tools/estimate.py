#!/usr/bin/env python3
# Licensed under the Apache License, Version 2.0 (the "License"); you may
# not use this file except in compliance with the License. You may obtain
# a copy of the License at
#
#      http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
# WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
# License for the specific language governing permissions and limitations
# under the License.
"""What exact deduplication makes of files: estimate.py FILE...

Counts the distinct blocks of 4 KiB that are not all zeros, over all files in
the order given, and what lz4 makes of them in segments of 64 KiB of new blocks
of one file. It is the bound that the store is measured against, so it shares
nothing with the engine.
"""

import hashlib
import sys

import lz4.block

BLOCK = 4096
SEGMENT = 65536
ZERO = bytes(BLOCK)


def blocks(path):
    with open(path, 'rb') as f:
        while block := f.read(BLOCK):
            if block != ZERO[:len(block)]:
                yield block


def compressed(segment):
    return min(len(segment),
               len(lz4.block.compress(segment, store_size=False)))


def main(paths):
    seen = set()
    nonzero = unique = stored = 0
    print(f'{"file":<24}{"non-zero":>10}{"new":>10}{"lz4":>10}   (MiB)')
    for path in paths:
        before = nonzero, unique, stored
        segment = bytearray()
        for block in blocks(path):
            nonzero += len(block)
            digest = hashlib.blake2b(block, digest_size=32).digest()
            if digest in seen:
                continue
            seen.add(digest)
            unique += len(block)
            segment += block
            if len(segment) >= SEGMENT:
                stored += compressed(bytes(segment))
                segment.clear()
        stored += compressed(bytes(segment))
        row = (now - then for now, then in
               zip((nonzero, unique, stored), before))
        print(f'{path.rpartition("/")[2]:<24}'
              + ''.join(f'{n / 2**20:>10.1f}' for n in row))
    if nonzero:
        print(f'of the non-zero bytes: {unique / nonzero:.1%} as they are, '
              f'{stored / nonzero:.1%} with lz4')


if __name__ == '__main__':
    if len(sys.argv) < 2:
        sys.exit(__doc__.splitlines()[0])
    main(sys.argv[1:])
