# SPDX-License-Identifier: Apache-2.0

"""Measure the cost for a host whose filter follows other hosts.

Run it from a checkout::

    python benchmarks/papers/following.py [--groups N,...] [--mib N]
        [--dir DIR]

Two tables:

* one scan of a repository with so many groups: the first one, which fills the
  filter; one that finds nothing; one that lists the groups, as the first one
  in a minute does; and one that finds nothing while 1,000 groups may grow. The
  groups have headers, records and entries, and no blocks;
* a scan after so much new data was stored by another host, and by this host.

Bytes are those that the process read by system calls. In the first table they
leave out the list of names, for which the system does not count them.
"""

import os
import struct
import time
import uuid

import _path  # noqa: F401  finds the modules beside it
import common

from glance_dedup.check import ondisk
from glance_dedup.repository import image_repository

#: The minimum of a group: the second table has the cost of full ones.
SLOTS = 64
OPEN = 1000


def group_file(repository_id: str, number: int, published: int) -> bytes:
    """Return the first page of a group with this record (format.rst)."""
    digest = b'sha256'.ljust(16, b'\0')
    header = ondisk.GROUP_HEADER.pack(
        b'GDGROUP\0', 1, 1, number, bytes.fromhex(repository_id), bytes(16),
        SLOTS, 4096, digest, os.urandom(16), bytes(16))
    header = header.ljust(504, b'\0')
    seed = ondisk.xxh3(header)
    record = ondisk.RECORD.pack(2, number, published, 0, 0, 0, 0)
    record = record.ljust(504, b'\0')
    return (header + struct.pack('<Q', seed)
            + record + struct.pack('<Q', ondisk.xxh3(record, seed)))


def make_groups(path: str, repository_id: str, numbers: range,
                published: int) -> None:
    """Make groups with so many published entries, which are all invalid.

    A scan would read empty entries again each time.
    """
    size = 4096 + 512 * -(-SLOTS // 9)
    entries = bytes([255]) * (size - 1024)
    for number in numbers:
        with open(os.path.join(path, 'groups', f'{number:08x}'), 'wb') as f:
            f.write(group_file(repository_id, number, published))
            f.write(entries if published else b'')
            f.truncate(size)


def read_bytes() -> int:
    """Return the bytes that this process has read."""
    with open('/proc/self/io') as f:
        return int(f.readline().split()[1])


def look(repo: image_repository.Repository) -> tuple[float, float, int]:
    """Follow until the end; return seconds, of processor too, and bytes."""
    wall, cpu = time.perf_counter(), time.process_time()
    before = read_bytes()
    while repo.follow():
        pass
    return (time.perf_counter() - wall, time.process_time() - cpu,
            read_bytes() - before)


def show(what: str, taken: tuple[float, float, int]) -> None:
    """Print a line of a table."""
    wall, cpu, read = taken
    print(f'{what:44}{wall * 1000:10.2f}{cpu * 1000:10.2f}'
          f'{read / 1024:14,.1f}', flush=True)


def head(what: str) -> None:
    """Print the heading of a table."""
    print(f'\n{what:44}{"ms":>10}{"cpu ms":>10}{"KiB read":>14}')


def of_groups(place: str, count: int) -> None:
    """Print the first table's lines for so many groups."""
    with common.place(place) as top:
        path = os.path.join(top, 'repository')
        image_repository.Repository.create(path)
        with image_repository.Repository(
                path, filter_dir=os.path.join(top, 'filter')) as repo:
            made = repo.repository_id
            make_groups(path, made, range(1, count + 1), SLOTS)
            repo.filter.attach(repo.handle())
            show(f'{count:,} groups: the first look', look(repo))
            show('    that finds nothing', look(repo))
            make_groups(path, made, range(count + 1, count + 2), SLOTS)
            show('    that lists the groups', look(repo))
            make_groups(path, made, range(count + 2, count + 2 + OPEN), 0)
            look(repo)
            show(f'    that finds nothing, {OPEN:,} may grow', look(repo))


def of_data(place: str, mib: int) -> dict[str, tuple[float, float, int]]:
    """Return the cost of a scan after a host stored so many MiB, by host."""
    def put(repo: image_repository.Repository) -> None:
        common.store(repo, str(uuid.uuid4()), (
            os.urandom(common.MIB) for _ in range(mib)))

    with common.place(place) as top:
        path = os.path.join(top, 'repository')
        image_repository.Repository.create(path)

        def opened(name: str) -> image_repository.Repository:
            return image_repository.Repository(
                path, codec='none', filter_dir=os.path.join(top, name))

        taken = {}
        with opened('here') as here, opened('there') as there:
            here.filter.complete(here.handle())
            look(here)
            for what, storing in ('by another host', there), (
                    'by this host', here):
                put(storing)
                taken[what] = look(here)
        return taken


def main() -> None:
    options = common.arguments(
        __doc__, mib=1024,
        groups=('1000,100000', 'how many there are')).parse_args()
    head('a look at a repository of')
    for count in options.groups.split(','):
        of_groups(options.dir, int(count))
    head(f'a look after {options.mib:,} MiB were stored')
    for what, taken in of_data(options.dir, options.mib).items():
        show(what, taken)


if __name__ == '__main__':
    main()
