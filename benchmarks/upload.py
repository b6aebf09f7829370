# SPDX-License-Identifier: Apache-2.0

"""Measure an upload through the driver, beside Glance's file driver.

Run it from a checkout in which the extension is built::

    python benchmarks/upload.py [--mib 384] [--rounds 3] [--clients 4]
                                [--dir DIR] [IMAGE..]

Both drivers are real ones of glance_store, in one process, and get the same
data from an equal source: a file in the page cache, read as a WSGI server
reads a request, up to 64 KiB at a time.  One client uploads all of the data;
then several do at once, each its part of it.  The data are incompressible, or,
if images are named, the distinct blocks of these that are not zeros; otherwise
bytes of which half can be compressed away.

In each round, one behind the other, for one client and for several:

* md5 and sha512 alone, each on a thread of its own, over the same bytes;
* the file driver; and it again with an fsync of its file, since an image in
  this store is on the disk when the upload is answered;
* this store, empty, with each codec: with new data, and then with the same
  again (``-cached`` is written through the page cache, ``-direct`` beside it,
  the others as the store chooses, which has to find out first; ``lz4-yields``
  gives way when processors are short).

Ratios are to the file driver of the round and to the two hashes.  The time
that the kernel's threads need for writing back is that of the whole machine.
No figure passes or fails.
"""

import hashlib
import os
import random
import shutil
from typing import Any
import uuid

import common
from common import MIB
import glance_store
from glance_store._drivers import filesystem
from oslo_config import cfg

from glance_dedup.driver import dedup_store

#: The number of bytes that a WSGI server reads at once.
READ = 65536

#: Kinds of this store, and their options.
CODECS = {codec + suffix: {'codec': codec, 'direct_io': direct_io}
          for suffix, direct_io in (('-cached', 'off'), ('-direct', 'on'),
                                    ('', 'auto'))
          for codec in ('none', 'lz4')}
CODECS['lz4-yields'] = {'codec': 'lz4', 'adaptive_compression': True}


class Source:
    """The body of a request: so many bytes of a file, from an offset."""

    def __init__(self, path: str, offset: int, size: int):
        self._file = open(path, 'rb')
        self._file.seek(offset)
        self._left = size

    def read(self, length: int) -> bytes:
        data = self._file.read(min(length, READ, self._left))
        self._left -= len(data)
        return data


# -- data ---------------------------------------------------------------------

def half_random(size: int) -> bytes:
    rng = random.Random(1)
    return b''.join(rng.randbytes(2048) * 2 for _ in range(size // 4096))


def write_out(path: str, data: bytes) -> int:
    with open(path, 'wb') as f:
        f.write(data)
        os.fsync(f.fileno())
    return len(data)


# -- uploading ----------------------------------------------------------------

def configuration() -> cfg.ConfigOpts:
    conf = cfg.ConfigOpts()
    conf.register_opt(cfg.DictOpt('enabled_backends'))
    conf([])
    conf.set_override('enabled_backends',
                      {'file': 'file', **dict.fromkeys(CODECS, 'dedup')})
    glance_store.register_store_opts(conf)
    for name, options in CODECS.items():
        for option, value in options.items():
            conf.set_override(f'dedup_store_{option}', value, group=name)
    return conf


class Bench:
    """Stores in a directory, and their measurements."""

    def __init__(self, directory: str):
        self.table = common.Table()
        self.directory = directory
        self.conf = configuration()

    def open(self, name: str, path: str, filter_mib: int = 8) -> Any:
        """Return a store of a kind, in an empty directory."""
        if name == 'file':
            self.conf.set_override('filesystem_store_datadir', path,
                                   group=name)
            store = filesystem.Store(self.conf, backend=name)
        else:
            for option, value in (('datadir', path),
                                  ('filter_dir', self.directory),
                                  ('filter_mib', filter_mib)):
                self.conf.set_override(f'dedup_store_{option}', value,
                                       group=name)
            store = dedup_store.Store(self.conf, backend=name)
        store.configure()
        return store

    def parts(self, path: str, clients: int) -> list[tuple[str, int, int]]:
        part = os.path.getsize(path) // clients
        return [(path, i * part, part) for i in range(clients)]

    def upload(self, store: Any, parts: list, sync: bool = False) -> list[str]:
        """Upload parts of files at once; returns the locations."""
        urls = []

        def one(path, offset, size):
            image_id = str(uuid.uuid4())
            urls.append(store.add(image_id, Source(path, offset, size), size,
                                  'sha512')[0])
            if sync:
                with open(os.path.join(store.datadir, image_id), 'rb') as f:
                    os.fsync(f.fileno())

        common.all_at_once(one, parts)
        return urls

    def _hashes(self, parts: list) -> None:
        def one(name, path, offset, size):
            digest = hashlib.new(name, usedforsecurity=False)
            buffer = bytearray(MIB)
            with open(path, 'rb', buffering=0) as f:
                f.seek(offset)
                while size > 0:
                    n = f.readinto(memoryview(buffer)[:size])
                    digest.update(memoryview(buffer)[:n])
                    size -= n

        common.all_at_once(one, [(name, *part) for name in ('md5', 'sha512')
                                 for part in parts])

    def _measure(self, title: str, name: str, parts: list,
                 uploads: dict[str, bool]) -> None:
        """Upload into a new store of a kind, under each of the names."""
        size = sum(part[2] for part in parts)
        path = os.path.join(self.directory, 'store')
        os.mkdir(path, 0o700)
        store = self.open(name, path)
        os.sync()
        common.warm_pages(size + size // 8, self.directory)
        for upload, sync in uploads.items():
            row = f'{title}: {upload}'
            self.table.add(row, size,
                           common.timed(self.upload, store, parts, sync))
            if upload != 'file driver':
                self.table.compare(row, f'{title}: file driver')
            self.table.compare(row, f'{title}: the hashes')
        del store
        shutil.rmtree(path)

    def round(self, title: str, source: str, clients: int) -> None:
        title = f'{title}, {clients} at once' if clients > 1 else title
        parts = self.parts(source, clients)
        self.table.add(f'{title}: the hashes', sum(p[2] for p in parts),
                       common.timed(self._hashes, parts))
        self._measure(title, 'file', parts, {'file driver': False})
        self._measure(title, 'file', parts, {'file driver, fsync': True})
        for name in CODECS:
            self._measure(title, name, parts, {
                f'new, {name}': False, f'duplicates, {name}': False})


def main() -> None:
    args = common.arguments(__doc__, mib=384, rounds=3, paths='*',
                            clients=(4, 'how many at once')).parse_args()
    size = args.mib * MIB
    with common.place(args.dir) as d:
        d = os.path.abspath(d)
        sources = {title: os.path.join(d, f'source-{title}')
                   for title in ('random', 'image')}
        write_out(sources['random'], os.urandom(size))
        write_out(sources['image'],
                  common.distinct_blocks(args.paths, size) if args.paths
                  else half_random(size))
        bench = Bench(d)
        for _ in common.count_rounds(args.rounds):
            for clients in sorted({1, args.clients}):
                for title, source in sources.items():
                    bench.round(title, source, clients)
    bench.table.show()


if __name__ == '__main__':
    main()
