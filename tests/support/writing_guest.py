# SPDX-License-Identifier: Apache-2.0

"""A guest that writes files to a disk with fio, and checks them after a crash.

Its kernel and busybox are those of the boot image's packages. fio, e2fsck and
xfs_repair are this machine's, with their libraries.
"""

import lzma
import pathlib
import re
import shutil
import subprocess
import tempfile
import time

from glance_dedup.repository import openvolumes
from tests.cloud import disk_images
from tests.support import nbd
from tests.support import repositories

#: Seconds to start, and to check the disk. The processor is emulated.
LIMIT = 900
#: Commands that make each kind of file system.
MAKE = {'ext4': ('mkfs.ext4', '-q', '-F'), 'xfs': ('mkfs.xfs', '-q')}
#: Needs of its tests; see tests/needs.py.
NEEDS = ('bootimage', 'disks', 'fio', 'guest', 'nbdkit', 'qemu')
_PROGRAMS = ('fio', 'e2fsck', 'xfs_repair')
_MODULES = ('virtio_pci', 'virtio_blk', 'virtio_console', 'crc32c_generic',
            'ext4', 'xfs')

# Job N writes file N % 4, with a pattern that no other job has, so jobs N and
# N - 1 are on the disk when the guest reports job N. `kind`, `last` and `size`
# come from the kernel's command line.
_INIT = r"""#!/bin/sh
/bin/busybox --install -s /bin
export PATH=/bin:/sbin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
exec </dev/console >/dev/console 2>&1
# The console, an emulated UART, loses letters. A port of virtio does not, and
# the write returns when QEMU has the line.
say() { echo "guest: $*" >/dev/vport0p1; }
give_up() { say "FAILED $*"; tail -n 40 /log; poweroff -f; }
job() {
    number=$1
    shift
    fio --name=job --filename="/disk/file$((number % 4))" --size="$size" \
        --ioengine=libaio --direct=1 --bs=4k --iodepth=16 \
        --randseed="$number" \
        --verify=pattern --verify_fatal=1 --verify_state_save=0 \
        --verify_pattern="$(printf '0x5a%08x' "$number")%o" "$@" >/log 2>&1
}
attach() { mount -t "$kind" -o discard /dev/vda /disk || give_up mount; }

for module in /modules/*; do
    insmod "$module" || echo "cannot load $module"
done
until [ -b /dev/vda ] && [ -c /dev/vport0p1 ]; do usleep 10000; done

# The mount replays the file system's journal.
attach
for number in $((last - 1)) "$last"; do
    [ "$number" -lt 1 ] || job "$number" --rw=read || give_up "job $number"
done
[ ! -e /disk/tree ] || (cd /disk/tree && md5sum -cs sums) || give_up tree
umount /disk || give_up umount
if [ "$kind" = ext4 ]; then
    e2fsck -fn /dev/vda
else
    xfs_repair -n /dev/vda
fi >/log 2>&1 || give_up "fsck $?"
say checked

# Whoever makes the disk larger waits for this.
known=
while sleep 1; do
    sectors=$(cat /sys/block/vda/size)
    [ "$sectors" = "$known" ] || say "sectors $sectors"
    known=$sectors
done &

# Names and small files come and go beside fio's.
attach
while rm -rf /disk/new && cp -r /modules /disk/new &&
    (cd /disk/new && find . -name '*.ko' -exec md5sum {} + >sums) &&
    sync && rm -rf /disk/old &&
    { [ ! -e /disk/tree ] || mv /disk/tree /disk/old; } &&
    mv /disk/new /disk/tree; do
    sleep 0.3
done &
number=$last
while true; do
    number=$((number + 1))
    [ $((number % 5)) != 0 ] || rm -f "/disk/file$((number % 4))"
    job "$number" --rw=randwrite --fsync=32 --end_fsync=1 ||
        give_up "job $number"
    say "written $number"
done
"""


def _run(*command, **options):
    return subprocess.run([str(word) for word in command], check=True,
                          timeout=nbd.LIMIT, **options)


def _module(tree, name):
    """Return a module's content; None if the kernel has it built in."""
    for path in tree.rglob('*.ko*'):
        if path.name.partition('.')[0].replace('-', '_') == name:
            data = path.read_bytes()
            return lzma.decompress(data) if path.suffix == '.xz' else data
    return None


def _add_modules(tree, target):
    """Store the modules under numbers, each after those that it needs."""
    done = []

    def add(name):
        if name in done or (data := _module(tree, name)) is None:
            return
        needed = re.search(rb'\0depends=([^\0]*)\0', data)[1].decode()
        for other in filter(None, needed.split(',')):
            add(other.replace('-', '_'))
        (target / f'{len(done):02}-{name}.ko').write_bytes(data)
        done.append(name)

    for name in _MODULES:
        add(name)


def _add_program(name, root):
    nbd.need(name)
    program = shutil.which(name)
    shutil.copy(program, root / 'sbin' / name)
    libraries = _run('ldd', program, capture_output=True, text=True).stdout
    for library in re.findall(r'(/\S+) \(0x', libraries):
        target = root / library[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)


def build(place, init=_INIT):
    """Make the files of a kernel and an initramfs below a directory.

    :param init: the script that the guest runs
    """
    kernel, initramfs = place / 'vmlinuz', place / 'initramfs'
    nbd.need('cpio')
    packages = disk_images.images().raw.parent.glob('*.deb')
    with tempfile.TemporaryDirectory(dir=place) as directory:
        tree = pathlib.Path(directory, 'packages')
        root = pathlib.Path(directory, 'root')
        for name in ('bin', 'sbin', 'dev', 'proc', 'sys', 'disk', 'modules'):
            (root / name).mkdir(parents=True)
        for package in packages:
            _run('dpkg-deb', '-x', package, tree)
        found, = tree.glob('boot/vmlinuz-*')
        shutil.copy(found, kernel)
        busybox, = (path for path in tree.rglob('bin/busybox')
                    if path.is_file())
        shutil.copy(busybox, root / 'bin')
        (root / 'bin' / 'sh').symlink_to('busybox')
        _add_modules(tree, root / 'modules')
        for name in _PROGRAMS:
            _add_program(name, root)
        (root / 'init').write_text(init)
        (root / 'init').chmod(0o755)
        names = '\n'.join(str(path.relative_to(root))
                          for path in sorted(root.rglob('*')))
        with open(initramfs, 'wb') as output:
            _run('cpio', '--quiet', '--create', '--format=newc',
                 '--owner=0:0', cwd=root, input=names.encode(), stdout=output)
    return kernel, initramfs


def clone_formatted(repository, place, kind, size):
    """Make a volume, disk, from an image with an empty file system."""
    image = place / 'image'
    with open(image, 'wb') as f:
        f.truncate(size)
    nbd.need(MAKE[kind][0])
    _run(*MAKE[kind], image)
    with repositories.open_repository(repository) as repo:
        repo.put('image', image)
        with repo.open_image('image') as opened:
            openvolumes.create(repo, 'disk', image=opened)
        repo.delete('image')


class Guest:
    """A guest from its start until it is killed.

    :param system: the result of `build`
    :param place: a directory for its report, and for its kernel's output
    :param server: of its disk
    :param kind: of the disk's file system
    :param last: the last job that a guest before has reported
    :param size: of each job's file, as fio takes it
    :param options: more of QEMU's
    :param reconnects: requests wait for the disk's next server; otherwise
        QEMU stops the guest at an error
    """

    def __init__(self, system, place, server, kind, last, size, *options,
                 reconnects=True):
        nbd.need('qemu-system-x86_64')
        kernel, initramfs = system
        self._told, self._console = place / 'told', place / 'console'
        for path in self._told, self._console:
            path.write_bytes(b'')
        self.process = subprocess.Popen(
            ['qemu-system-x86_64', '-machine', 'pc,accel=tcg',
             '-cpu', 'max', '-m', '512', '-nodefaults', '-display', 'none',
             '-no-reboot', '-serial', f'file:{self._console}',
             '-chardev', f'file,id=told,path={self._told}',
             '-device', 'virtio-serial-pci',
             '-device', 'virtserialport,chardev=told',
             '-kernel', str(kernel), '-initrd', str(initramfs), '-append',
             'console=ttyS0 quiet panic=-1 no_timer_check mitigations=off '
             f'random.trust_cpu=on kind={kind} last={last} size={size}',
             '-blockdev', 'driver=nbd,node-name=disk,discard=unmap,'
             f'reconnect-delay={LIMIT if reconnects else 0},'
             f'export={server.name},'
             f'server.type=unix,server.path={server.socket}',
             '-device', 'virtio-blk-pci,drive=disk' + (
                 '' if reconnects else ',werror=stop,rerror=stop'), *options],
            stdin=subprocess.DEVNULL)

    def text(self):
        """Return what the guest has reported so far."""
        return self._told.read_text(errors='replace')

    def is_checked(self):
        """Return whether the guest found the disk right, and writes now."""
        return 'guest: checked\n' in self.text()

    def last(self):
        """Return the last job reported to be on the disk; or 0."""
        told = re.findall(r'guest: written (\d+)\n', self.text())
        return int(told[-1]) if told else 0

    def has_sectors(self, count):
        """Return whether the guest has reported this size of its disk."""
        return f'guest: sectors {count}\n' in self.text()

    def wait_for(self, condition):
        """Wait for a condition, while the guest runs without errors."""
        deadline = time.monotonic() + LIMIT
        while not condition():
            self.require_healthy()
            assert time.monotonic() < deadline, self._all_text()
            time.sleep(0.05)

    def require_healthy(self):
        """Fail if the guest has ended, or has found an error."""
        assert self.process.poll() is None and 'FAILED' not in self.text(), (
            self._all_text())

    def _all_text(self):
        return self.text() + self._console.read_text(errors='replace')

    def kill(self):
        """Kill the guest, as a power failure of its host does."""
        self.process.kill()
        self.process.wait(nbd.LIMIT)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.kill()
