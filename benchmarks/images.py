# SPDX-License-Identifier: Apache-2.0

"""Build a set of real disk images from Debian packages, to measure with.

Run it as root; ``bindep -b benchmark`` lists the packages that it needs::

    python benchmarks/images.py [--small] [--jobs 2] DIR

25 images, 17 GB that are not zeros, in less than an hour on two processors
that are busy with other things, too; the seven of ``--small``, 4.9 GB, in a
quarter of one. They have several releases, roles and architectures, as an MBR
with one partition of ext4; servers that have lived for a while (packages
upgraded and added, logs grown and rotated, deleted bytes still in the free
blocks); the same server in a partition that starts at sector 63, on XFS, and
as qcow2, plain and compressed. A foreign architecture's packages are unpacked
only.

The packages come from the Debian mirror that apt uses on this machine. Images
that are there already are kept: a run that was ended continues where it
stopped. ``DIR/manifest.json`` lists them in their order: name, file, release,
role, architecture, virtual size, and bytes in blocks of 4 KiB that are not
zeros.
"""

import argparse
from collections.abc import Iterator
from concurrent import futures
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from typing import NamedTuple
import uuid

import common

TOOLS = os.path.join(common.TOP, 'tools')
KEYRING = '/usr/share/keyrings/debian-archive-keyring.gpg'
LIMIT = 1500  #: seconds for any command
BLOCK = 4096
SECTOR = 512
#: The place of the partition by tools/build_images, and that of the twin.
START = 2048
OLD_START = 63

NEEDED = ('mmdebstrap', 'mke2fs', 'debugfs', 'sfdisk', 'unshare', 'qemu-img',
          'mkfs.xfs')

#: By role: MiB of the disk, and packages beside a kernel and sshd.
ROLES = {
    'minimal': (1024, []),
    'web': (2048, ['certbot', 'nginx', 'php-fpm', 'php-mysql',
                   'redis-server']),
    'database': (2048, ['mariadb-server', 'postgresql']),
    'development': (3072, ['build-essential', 'cmake', 'gdb', 'git',
                           'python3-dev', 'python3-venv', 'valgrind']),
    'desktop': (3072, ['firefox-esr', 'xfce4', 'xserver-xorg']),
    'mail': (2048, ['dovecot-imapd', 'exim4-daemon-light', 'spamassassin']),
    'containers': (2048, ['docker.io', 'podman']),
}
#: Packages that a server of a role gets when it is older: once, and again.
LATER = {
    'web': (['git', 'htop', 'python3-requests'],
            ['default-jre-headless', 'strace']),
    'database': (['borgbackup', 'htop'], ['strace']),
}


class Image(NamedTuple):
    release: str
    role: str
    #: nothing for one that is installed, else the change of ``source``
    how: str = ''
    architecture: str = 'amd64'

    @property
    def name(self) -> str:
        parts = [self.release, self.role, self.how]
        if self.architecture != 'amd64':
            parts.insert(1, self.architecture)
        return '-'.join(filter(None, parts))

    @property
    def file(self) -> str:
        return self.name + ('.qcow2' if 'qcow2' in self.how else '.raw')

    @property
    def source(self) -> 'Image | None':
        if not self.how:
            return None
        return self._replace(how='aged' if self.how == 'older' else '')


SMALL = (
    Image('bookworm', 'minimal'),
    Image('bookworm', 'web'),
    Image('bookworm', 'web', 'aged'),
    Image('bookworm', 'database'),
    Image('bookworm', 'development'),
    Image('trixie', 'web'),
    Image('bullseye', 'web'),
)
ALL = SMALL + (
    Image('bookworm', 'web', 'twin'),
    Image('bookworm', 'web', 'xfs'),
    Image('bookworm', 'web', 'qcow2'),
    Image('bookworm', 'web', 'qcow2-compressed'),
    Image('bookworm', 'web', 'older'),
    Image('bookworm', 'database', 'aged'),
    Image('bookworm', 'desktop'),
    Image('bookworm', 'mail'),
    Image('bookworm', 'containers'),
    Image('bookworm', 'web', architecture='arm64'),
    Image('trixie', 'minimal'),
    Image('trixie', 'web', 'aged'),
    Image('trixie', 'database'),
    Image('trixie', 'development'),
    Image('bullseye', 'minimal'),
    Image('bullseye', 'database'),
    Image('sid', 'minimal'),
    Image('sid', 'web'),
)


# -- packages -----------------------------------------------------------------

def apt_sources() -> dict[str, str]:
    """Return the addresses of apt's sources, by a part of their names."""
    listed = subprocess.run(
        ['apt-get', 'indextargets', '--format', '$(REPO_URI) $(RELEASE)',
         'Identifier: Packages', 'Origin: Debian'],
        capture_output=True, text=True, timeout=60, check=True).stdout
    found = {}
    for line in listed.splitlines():
        address, release = line.split()
        found.setdefault(release.partition('-')[2], address)
    if '' not in found:
        raise SystemExit('apt has no source whose origin is Debian; '
                         'apt-get update may be missing')
    return found


def write_sources(found: dict[str, str], release: str, later: bool,
                  path: str) -> None:
    """Write the sources of a release, with or without later updates."""
    suites = [('', release)]
    if later and release != 'sid':
        suites += [(part, f'{release}-{part}')
                   for part in ('updates', 'security') if part in found]
    with open(path, 'w') as f:
        for part, suite in suites:
            f.write(f'deb [signed-by={KEYRING}] {found[part]} {suite} main\n')


# -- disks --------------------------------------------------------------------

def pieces(path: str) -> Iterator[tuple[int, bytes]]:
    """Yield a sparse file's parts that are not holes: offset and bytes."""
    with open(path, 'rb') as f:
        fd, end = f.fileno(), 0
        size = os.fstat(fd).st_size
        while end < size:
            try:
                start = os.lseek(fd, end, os.SEEK_DATA)
            except OSError:
                return
            end = os.lseek(fd, start, os.SEEK_HOLE)
            for offset in range(start, end, common.PIECE):
                yield offset, os.pread(
                    fd, min(common.PIECE, end - offset), offset)


def not_zeros(path: str) -> int:
    """Return the bytes in blocks that are not all zeros."""
    zeros = bytes(BLOCK)
    return sum(len(block) for _, piece in pieces(path)
               for block in (piece[i:i + BLOCK]
                             for i in range(0, len(piece), BLOCK))
               if block != zeros[:len(block)])


def move_partition(source: str, skip: int, target: str, start: int) -> None:
    """Write a disk whose partition starts at a sector.

    :param source: has the partition at an offset of ``skip``
    """
    size = os.path.getsize(source) - skip
    with open(target, 'wb') as f:
        f.truncate(start * SECTOR + size)
        subprocess.run(
            ['sfdisk', '--quiet', target], timeout=LIMIT, check=True,
            input=f'label: dos\nstart={start}, size={size // SECTOR}, type=83',
            text=True)
        for offset, piece in pieces(source):
            piece = piece[max(skip - offset, 0):]
            f.seek(max(offset - skip, 0) + start * SECTOR)
            f.write(piece)
    subprocess.run(['fallocate', '--dig-holes', target], timeout=LIMIT,
                   check=True)


class Builder:
    """Builds images in ``directory/work``, and then names them."""

    def __init__(self, directory: str, sources: dict[str, str]):
        self.directory, self.sources = directory, sources
        self.lock = threading.Lock()
        self.done = {}
        with open(os.path.join(directory, 'log'), 'a') as f:
            self.log = f.name

    def run(self, *command: str, **environ: str) -> None:
        with open(self.log, 'a') as log:
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log,
                           stderr=log, check=True, timeout=LIMIT,
                           env={**os.environ, **environ})

    def path(self, image: Image) -> str:
        return os.path.join(self.directory, image.file)

    def install(self, image: Image, work: str) -> str:
        mib, packages = ROLES[image.role]
        write_sources(self.sources, image.release, False,
                      os.path.join(work, 'sources.list'))
        identity = uuid.uuid5(uuid.NAMESPACE_DNS, image.name)
        self.run(os.path.join(TOOLS, 'build_images'), work, image.release,
                 f'{os.getuid()}:{os.getgid()}', 'disk', *packages,
                 MIB=str(mib), FS_UUID=str(identity),
                 ARCHITECTURE=image.architecture)
        return os.path.join(work, 'disk.raw')

    def age(self, image: Image, work: str, disk: str) -> None:
        again = image.how == 'older'
        sources = os.path.join(work, 'sources.list')
        write_sources(self.sources, image.release, True, sources)
        self.run('cp', '--sparse=always', self.path(image.source), disk)
        self.run(os.path.join(TOOLS, 'change_image'), 'age', disk, sources,
                 str(1 + again), *LATER[image.role][again])

    def derive(self, image: Image, work: str) -> str:
        disk, source = os.path.join(work, 'disk'), self.path(image.source)
        if image.how in ('aged', 'older'):
            self.age(image, work, disk)
        elif image.how == 'twin':
            move_partition(source, START * SECTOR, disk, OLD_START)
        elif image.how == 'xfs':
            partition = os.path.join(work, 'partition')
            self.run(os.path.join(TOOLS, 'change_image'), 'xfs', source,
                     partition)
            move_partition(partition, 0, disk, START)
        else:
            self.run('qemu-img', 'convert', '-O', 'qcow2',
                     *(['-c'] if 'compressed' in image.how else []), source,
                     disk)
        return disk

    def build(self, image: Image) -> None:
        """Make an image, unless it is there, and describe it."""
        path, start = self.path(image), time.monotonic()
        if not os.path.exists(path):
            with tempfile.TemporaryDirectory(
                    prefix='work.', dir=self.directory) as work:
                made = (self.derive if image.how else self.install)(
                    image, work)
                os.rename(made, path)
        described = {
            'name': image.name, 'file': image.file, 'release': image.release,
            'role': image.role, 'architecture': image.architecture,
            'virtual': virtual_size(path), 'not_zeros': not_zeros(path)}
        with self.lock:
            self.done[image] = described
            self.write_manifest()
        print(f'{image.name}: {described["not_zeros"] >> 20} MiB, '
              f'{time.monotonic() - start:.0f} s', file=sys.stderr)

    def write_manifest(self) -> None:
        path = os.path.join(self.directory, 'manifest.json')
        with open(path + '.new', 'w') as f:
            json.dump([self.done[image] for image in ALL if image in
                       self.done], f, indent=1)
            f.write('\n')
        os.rename(f.name, path)


def virtual_size(path: str) -> int:
    if not path.endswith('.qcow2'):
        return os.path.getsize(path)
    found = subprocess.run(['qemu-img', 'info', '--output=json', path],
                           capture_output=True, timeout=60, check=True)
    return json.loads(found.stdout)['virtual-size']


def build_all(builder: Builder, images: tuple[Image, ...], jobs: int) -> int:
    """Build images, a few at a time, each after its source.

    Returns the number of failed ones.
    """
    failed = 0
    waiting, running = list(images), {}
    with futures.ThreadPoolExecutor(jobs) as pool:
        while waiting or running:
            ready = [image for image in waiting if image.source is None or
                     image.source in builder.done]
            for image in ready[:jobs - len(running)]:  # in their order
                waiting.remove(image)
                running[pool.submit(builder.build, image)] = image
            if not running:
                break  # their source has failed
            for future in futures.wait(
                    running, return_when=futures.FIRST_COMPLETED).done:
                image = running.pop(future)
                if future.exception() is not None:
                    print(f'{image.name}: {future.exception()}; see '
                          f'{builder.log}', file=sys.stderr)
                    failed += 1
    return failed + len(waiting)


def main():
    parser = argparse.ArgumentParser(
        description='build a set of real disk images')
    parser.add_argument('directory', metavar='DIR', type=os.path.abspath)
    parser.add_argument('--small', action='store_true',
                        help=f'only the first {len(SMALL)} of {len(ALL)}')
    parser.add_argument('--only', metavar='NAME', action='append',
                        choices=[image.name for image in ALL],
                        help='only this one, and what it is made from')
    parser.add_argument('--jobs', type=int, default=2,
                        help='how many at once (default: %(default)s)')
    args = parser.parse_args()
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        parser.error('not installed: ' + ', '.join(missing) +
                     '; see the profile benchmark of bindep.txt')
    if os.geteuid() != 0:
        parser.error('only root may install packages into images')
    os.makedirs(args.directory, exist_ok=True)
    builder = Builder(args.directory, apt_sources())
    failed = build_all(builder, wanted(args), args.jobs)
    size = sum(found['not_zeros'] for found in builder.done.values())
    print(f'{len(builder.done)} images, {size / 1e9:.1f} GB not zeros, in '
          f'{args.directory}')
    sys.exit(failed > 0)


def wanted(args) -> tuple[Image, ...]:
    images = SMALL if args.small else ALL
    if args.only is None:
        return images
    chosen = {image for image in ALL if image.name in args.only}
    for _ in range(2):
        chosen |= {image.source for image in chosen if image.source}
    return tuple(image for image in ALL if image in chosen)


if __name__ == '__main__':
    main()
