# SPDX-License-Identifier: Apache-2.0
"""The first process of a root; see ``roots.py``.

``unshare`` starts it in namespaces of its own. It puts the root together from
layers, enters it, prints one line, and waits for the end of its input. Its end
ends all other processes of the root, and removes the root's network and file
systems.
"""

import fcntl
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


def mount(*arguments):
    subprocess.run(['mount', *map(str, arguments)], check=True, timeout=60)


def loopback_up():
    with socket.socket() as sock:
        request = struct.pack('16sH14x', b'lo', 0)
        flags = struct.unpack(
            '16sH14x', fcntl.ioctl(sock, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(sock, SIOCSIFFLAGS,
                    struct.pack('16sH14x', b'lo', flags | IFF_UP))


def show(path, root):
    """Let every user of the root see a directory of the host."""
    target = root / path.relative_to('/')
    target.mkdir(parents=True, exist_ok=True)
    # The overlay shows neither other file systems nor files in /tmp.
    if set(os.listdir(target)) != set(os.listdir(path)):
        mount('--bind', path, target)
        mount('-o', 'remount,bind,ro', target)
    # Other users must get there, too: /root is closed to them.
    for parent in target.parents:
        if parent == root:
            break
        mode = parent.stat().st_mode & 0o7777
        if not mode & 0o001:
            parent.chmod(mode | 0o001)


def build(layer, lower, shown):
    """Mount the root; return its path.

    :param layer: directory for the changes
    :param lower: directories of layers below, the uppermost first
    :param shown: directories of the host to be seen by every user
    """
    # No mount is visible outside.
    mount('--make-rprivate', '/')
    root = layer / 'root'
    for name in ('changes', 'work', 'root'):
        (layer / name).mkdir(exist_ok=True)
    below = ':'.join([*(f'{path}/changes' for path in lower), '/'])
    mount('-t', 'overlay', 'overlay', '-o',
          f'lowerdir={below},upperdir={layer}/changes,workdir={layer}/work',
          root)
    mount('--rbind', '/dev', root / 'dev')
    for place, mode in (('dev/shm', '1777'), ('run', '0755'),
                        ('tmp', '1777')):
        mount('-t', 'tmpfs', '-o', f'mode={mode}', 'tmpfs', root / place)
    mount('-t', 'proc', 'proc', root / 'proc')
    for path in shown:
        show(path, root)
    return root


def enter(root):
    """Make it this process' root, and unmount the host's file systems.

    A file system that the host unmounts meanwhile is gone only when no other
    namespace has it mounted.
    """
    os.chdir(root)
    # The old root is on top of the new one afterwards; see pivot_root(2).
    subprocess.run(['pivot_root', '.', '.'], check=True, timeout=60)
    subprocess.run(['umount', '--lazy', '.'], check=True, timeout=60)
    os.chdir('/')


def main(layer, lower, shown):
    root = build(pathlib.Path(layer),
                 [pathlib.Path(path) for path in lower.split(':') if path],
                 [pathlib.Path(path) for path in shown.split(':')])
    loopback_up()
    enter(root)
    # Orphans leave no zombie.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print('ready', flush=True)
    # Wait until the starting process closes the other end, or dies.
    sys.stdin.read()


if __name__ == '__main__':
    main(*sys.argv[1:])
