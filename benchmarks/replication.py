# SPDX-License-Identifier: Apache-2.0

"""Measure the bytes sent when images are taken to another site.

Run it from a checkout in which the extension is built::

    python benchmarks/replication.py [--codec lz4] [--dir DIR] IMAGE...

It stores the images in one repository, and sends them, one after the other, to
the daemon of another, which is empty at first, as ``glance-dedup image
replicate`` does. It uses a Unix socket: the bytes counted are those of all
requests, without TLS. Of each image the table has

* its bytes, and those that are not zeros;
* its unique bytes, which an exact deduplication of it and the images before it
  would keep, before compression; and these as they are stored at home;
* the bytes sent, the share of those that are not zeros, and the seconds.

Then each image is sent once more: its description alone is enough to find its
blocks there. At the end the other repository's images are compared with the
files.
"""

import os
import sys

import common

from glance_dedup.client import daemon_client
from glance_dedup.repository import image_repository
from glance_dedup.transfer import image_sending


def row(name: str, size: float, nonzero: float, unique: float, stored: float,
        sent: float, wall: float) -> None:
    share = f'{sent / nonzero:.2%}' if nonzero else '-'
    print(f'{name[:34]:34}' + ''.join(
        f'{figure / common.MIB:9.1f}'
        for figure in (size, nonzero, unique, stored, sent))
        + f'{share:>9}{wall:8.1f}', flush=True)


def send_all(repo: image_repository.Repository, client: daemon_client.Client,
             images: list[str]) -> None:
    print(f'{"":34}{"MiB":>9}{"nonzero":>9}{"unique":>9}{"stored":>9}'
          f'{"sent":>9}{"":>9}{"seconds":>8}')
    sums = [0.0] * 6
    seen: set[bytes] = set()
    for number, path in enumerate(images):
        stat = repo.stat(f'image-{number}')
        spent = common.timed(image_sending.send, repo, stat.image_id, client)
        figures = (stat.size, stat.size - stat.zero_bytes,
                   common.exact_unique([path], seen)[0], stat.stored_bytes,
                   spent.result.sent_bytes, spent.wall)
        row(os.path.basename(path), *figures)
        sums = [a + b for a, b in zip(sums, figures)]
    row('all', *sums)
    print(f'sent: {sums[4] / sums[2]:.2%} of the unique bytes, '
          f'{sums[4] / sums[3]:.2%} of these as stored at home')


def main() -> None:
    args = common.arguments(
        __doc__, paths='+',
        codec=('lz4', 'of the repository at home')).parse_args()
    with common.place(args.dir) as directory:
        home, away = (os.path.join(directory, name)
                      for name in ('home', 'away'))
        for path in (home, away):
            image_repository.Repository.create(path)
        with image_repository.Repository(home, codec=args.codec,
                                         filter_dir=directory) as repo:
            for number, path in enumerate(args.paths):
                print(f'storing {path}', file=sys.stderr)
                repo.put(f'image-{number}', path)
            with common.daemon(directory, away) as (address, _), \
                    daemon_client.Client(address) as client:
                send_all(repo, client, args.paths)
                again = sum(
                    image_sending.send(repo, image_id, client).sent_bytes
                    for image_id in repo.images())
                print(f'all once more: {again / common.MIB:.1f} MiB sent')
        compare(away, directory, args.paths)


def compare(path: str, directory: str, images: list[str]) -> None:
    """Compare the received images with the sent ones."""
    with image_repository.Repository(path, filter_dir=directory) as repo:
        for number, name in enumerate(images):
            with repo.open_image(f'image-{number}') as image, \
                    open(name, 'rb') as f:
                for piece in image.pieces(piece=common.PIECE):
                    if f.read(len(piece)) != piece:
                        raise SystemExit(f'{name} came with other bytes')
    print(f'{len(images)} images came as they were sent')


if __name__ == '__main__':
    main()
