# SPDX-License-Identifier: Apache-2.0
"""Boots a Debian from a directory; ``booted.py`` starts this program.

``unshare --mount`` starts it, so that its mounts are private. systemd becomes
the first process of namespaces of its own, in a group of processes (cgroup)
below this program's. The program prints the id of that process on one line,
waits for the end of its input, and ends everything.
"""

import os
import pathlib
import subprocess
import sys
import time

SECONDS = 60
CGROUPS = pathlib.Path('/sys/fs/cgroup')
NAMESPACES = ('--mount', '--pid', '--net', '--ipc', '--uts', '--cgroup')
#: Joins the group $1 and starts the rest.
JOIN = 'echo $$ >"$1/cgroup.procs" && shift && exec "$@"'
#: Mounts file systems for systemd in the directory $1, the new root.
INIT = r"""
set -e
mount --bind "$1" "$1"
cd "$1"
mount -t proc proc proc
# Read only, so that nothing there can change the devices of this machine.
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=0755 tmpfs run
mount -t tmpfs -o mode=0755 tmpfs dev
for device in null:3 zero:5 full:7 random:8 urandom:9; do
    mknod -m 0666 "dev/${device%:*}" c 1 "${device#*:}"
done
mknod -m 0666 dev/tty c 5 0
ln -s /proc/self/fd dev/fd
for number in 0:stdin 1:stdout 2:stderr; do
    ln -s "/proc/self/fd/${number%:*}" "dev/${number#*:}"
done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620,gid=5 devpts dev/pts
ln -s pts/ptmx dev/ptmx
mount -t tmpfs -o mode=1777 tmpfs dev/shm
pivot_root . mnt
umount -l /mnt
ip link set lo up
hostname controller1
exec env -i container=chroot PATH=/usr/sbin:/usr/bin /lib/systemd/systemd
"""


def mine():
    """Return this program's own group."""
    line, = (line for line in pathlib.Path('/proc/self/cgroup').read_text()
             .splitlines() if line.startswith('0::'))
    return CGROUPS / line.removeprefix('0::').lstrip('/')


def remove(directory):
    """Remove a group, whose last processes may still be ending."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            os.rmdir(directory)
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def main():
    subprocess.run(['mount', '-t', 'cgroup2', 'cgroup2', CGROUPS], check=True,
                   timeout=SECONDS)
    group = mine() / f'glance-dedup-{os.getpid()}'
    group.mkdir()
    with open('/dev/null', 'r+') as nothing:
        outer = subprocess.Popen(
            ['sh', '-c', JOIN, 'sh', group, 'unshare', *NAMESPACES, '--fork',
             '--kill-child', 'sh', '-c', INIT, 'sh', sys.argv[1]],
            stdin=nothing, stdout=nothing)
    print(outer.pid, flush=True)
    sys.stdin.read()
    outer.kill()
    outer.wait(SECONDS)
    for directory, _, _ in os.walk(group, topdown=False):
        remove(directory)


if __name__ == '__main__':
    main()
