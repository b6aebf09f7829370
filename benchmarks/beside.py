# SPDX-License-Identifier: Apache-2.0

"""Measure how a backup slows the disk of the running server beside it.

Run it from a checkout in which the extension is built::

    python benchmarks/beside.py [--mib 2048] [--rate 200] [--rounds 3]
        [--dir DIR]

A server of libvirt has a qcow2 file of random bytes as its disk. fio in the
server reads and writes 4 KiB at random places of it, 7 reads for 3 writes,
past all caches of the server, RATE of them in a second, for SECONDS at a time.
In each round, for each set of options in turn, the whole disk is backed up
into a new repository while fio runs. Shown are the seconds of the backup, and
of fio's times that lie within it: the medians of their latencies. For
comparison fio runs alone three times before each backup.

Processors are emulated, so the server takes a whole one, and its latencies
are higher than with KVM. No figure passes or fails.
"""

import collections
from collections.abc import Iterator
import contextlib
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import common
from common import MIB

from glance_dedup.repository import image_repository
from tests.cloud import local_cloud
from tests.support import writing_guest

#: Seconds of each of fio's runs.
SECONDS = 4
#: Seconds of any wait.
LIMIT = 1800
NAME = 'beside'
#: Options of each backup.
WAYS: dict[str, tuple[str, ...]] = {
    'normal': ('--priority', 'normal'),
    'default': (),
    'idle': ('--priority', 'idle'),
    'read rate 50 MB/s': ('--read-rate', '50M'),
    'cpu share 25 %': ('--cpu-share', '25'),
}

_INIT = r"""#!/bin/sh
/bin/busybox --install -s /bin
export PATH=/bin:/sbin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
exec </dev/console >/dev/console 2>&1
for module in /modules/*; do
    insmod "$module" || echo "cannot load $module"
done
until [ -b /dev/vda ] && [ -c /dev/vport0p1 ]; do usleep 10000; done
# libvirt stands still for up to 30 s when a port opens amid a backup job.
exec 3>/dev/vport0p1
while fio --name=job --filename=/dev/vda --ioengine=libaio --direct=1 \
        --rw=randrw --rwmixread=70 --bs=4k --iodepth=4 \
        --rate_iops="$((rate * 7 / 10)),$((rate * 3 / 10))" \
        --rate_process=poisson --time_based --runtime="$seconds" \
        --output-format=json --output=/report >/log 2>&1; do
    { tr -d '\n' </report; echo; } >&3
done
echo FAILED >&3
cat /log
"""

_DOMAIN = """
<domain type='qemu'>
  <name>{name}</name>
  <memory unit='MiB'>512</memory>
  <cpu mode='maximum'/>
  <os>
    <type>hvm</type>
    <kernel>{kernel}</kernel>
    <initrd>{initramfs}</initrd>
    <cmdline>console=ttyS0 quiet panic=-1 no_timer_check mitigations=off
 random.trust_cpu=on rate={rate} seconds={seconds}</cmdline>
  </os>
  <features><acpi/></features>
  <devices>
    <disk type='file' device='disk'>
      <driver name='qemu' type='qcow2' cache='none' io='native'/>
      <source file='{disk}'/>
      <target dev='vda' bus='virtio'/>
    </disk>
    <channel type='file'>
      <source path='{told}'/><target type='virtio' name='told'/>
    </channel>
    <console type='pty'><log file='{console}' append='off'/></console>
  </devices>
</domain>
"""


class Server:
    """A running server with fio in it.

    :param place: of its files
    :param mib: of its disk
    :param rate: of fio's requests in a second
    """

    def __init__(self, libvirt: Any, place: pathlib.Path, mib: int,
                 rate: int) -> None:
        self.libvirt = libvirt
        self._told, self._console = place / 'told', place / 'console'
        raw, disk = place / 'raw', place / 'disk'
        with open(raw, 'wb') as f:
            for _ in range(mib):
                f.write(os.urandom(MIB))
        _run('qemu-img', 'convert', '-O', 'qcow2', raw, disk)
        raw.unlink()
        kernel, initramfs = writing_guest.build(place, _INIT)
        domain = place / 'domain.xml'
        domain.write_text(_DOMAIN.format(
            name=NAME, kernel=kernel, initramfs=initramfs, rate=rate,
            seconds=SECONDS, disk=disk, told=self._told,
            console=self._console))
        self._virsh('create', str(domain))

    def _virsh(self, *arguments: str) -> None:
        done = self.libvirt.virsh(*arguments)
        if done.returncode:
            raise SystemExit(done.stderr)

    def reports(self) -> list[dict[str, Any]]:
        """The reports of all of fio's runs that have ended."""
        with contextlib.suppress(FileNotFoundError):
            told = self._told.read_text()
            if 'FAILED' in told:
                raise SystemExit(self._console.read_text(errors='replace'))
            return [json.loads(line) for line in told.splitlines(True)
                    if line.endswith('\n')]
        return []

    def wait_for_more(self, count: int) -> None:
        """Wait for the end of so many further runs of fio."""
        wanted = len(self.reports()) + count
        deadline = time.monotonic() + LIMIT
        while len(self.reports()) < wanted:
            if time.monotonic() > deadline:
                raise SystemExit('the server does not report: '
                                 + self._console.read_text(errors='replace'))
            time.sleep(0.05)


def _run(*command: object) -> None:
    subprocess.run(list(map(str, command)), check=True, timeout=LIMIT,
                   stdout=subprocess.DEVNULL)


def latencies(report: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the latencies of one of fio's runs, in milliseconds."""
    job, = report['jobs']
    for kind in ('read', 'write'):
        found = job[kind]['clat_ns']['percentile']
        for name, key in (('p50', '50.000000'), ('p99', '99.000000')):
            yield f'{kind} {name}', found[key] / 1e6


def add(table: common.Table, way: str, reports: list[dict[str, Any]]) -> None:
    found = collections.defaultdict(list)
    for report in reports:
        for name, latency in latencies(report):
            found[name].append(latency)
    for name, all_ in found.items():
        table.figure(f'{way}: {name}', statistics.median(all_), 'ms',
                     of=None if way == 'alone' else f'alone: {name}')


def back_up(server: Server, place: pathlib.Path, options: tuple[str, ...]
            ) -> tuple[float, int]:
    """Back the whole disk up into a new repository.

    :returns: its seconds, and how many runs of fio began and ended within it
    """
    path, scratch = place / 'repository', place / 'scratch'
    scratch.mkdir(parents=True)
    image_repository.Repository.create(str(path))
    before = len(server.reports())
    began = time.monotonic()
    _run(sys.executable, '-m', 'glance_dedup.cli.entry', '--repository', path,
         'backup', 'run', '--libvirt', server.libvirt.uri,
         '--spool', place / 'spool', '--state', place / 'state',
         '--scratch', scratch, *options, NAME)
    took = time.monotonic() - began
    # The first that ended had begun before the backup.
    inside = len(server.reports()) - before - 1
    shutil.rmtree(place)
    return took, inside


def measure(server: Server, place: pathlib.Path, way: str,
            table: common.Table) -> None:
    """Measure one set of options, and the server alone before it."""
    server.wait_for_more(4)     # the first has begun beside the last backup
    add(table, 'alone', server.reports()[-3:])
    took, inside = back_up(server, place, WAYS[way])
    if inside < 1:
        raise SystemExit('the backup was too short: give more --mib')
    table.figure(f'{way}: backup', took, 's')
    add(table, way, server.reports()[-inside:])


def main() -> None:
    args = common.arguments(
        __doc__, mib=2048, rounds=3,
        rate=(200, 'requests of the server in a second')).parse_args()
    table = common.Table()
    with common.place(args.dir) as directory, \
            tempfile.TemporaryDirectory(prefix='cloud-') as short, \
            local_cloud.Cloud(pathlib.Path(short)) as cloud:
        cloud.up(['libvirt'])
        place = pathlib.Path(directory)
        server = Server(cloud.services['libvirt'], place, args.mib, args.rate)
        server.wait_for_more(1)
        for number in common.count_rounds(args.rounds):
            for way in list(WAYS)[::-1 if number % 2 else 1]:
                measure(server, place / 'backup', way, table)
    table.show()


if __name__ == '__main__':
    main()
