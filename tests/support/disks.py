# SPDX-License-Identifier: Apache-2.0

"""Small file systems that are mounted for a test, and filled.

This needs root, and loop devices except for tmpfs: without them a test is
skipped, with the reason. A disk is unmounted whatever the test's result.
"""

import contextlib
import os
import subprocess

import pytest

LIMIT = 60   # seconds for any command

MIB = 1 << 20

#: The command, the minimum size and the mount options of each kind. The second
#: triple has few inodes.
KINDS = {
    'ext4': ((['mkfs.ext4', '-q', '-F', '-m', '0'], 48 * MIB, 'loop'),
             (['mkfs.ext4', '-q', '-F', '-m', '0', '-N', '256'], 48 * MIB,
              'loop')),
    # mkfs.xfs makes none that is smaller.
    'xfs': ((['mkfs.xfs', '-q', '-f'], 320 * MIB, 'loop'),
            (['mkfs.xfs', '-q', '-f', '-i', 'maxpct=1'], 320 * MIB, 'loop')),
    'tmpfs': ((None, 48 * MIB, 'size=48m'),
              (None, 48 * MIB, 'size=48m,nr_inodes=256')),
}


def _run(*command):
    try:
        done = subprocess.run(command, capture_output=True, text=True,
                              timeout=LIMIT)
    except FileNotFoundError as e:
        pytest.skip(f'{e.filename} is not installed')
    if done.returncode != 0:
        pytest.skip(f'{" ".join(map(str, command))}: {done.stderr.strip()}')


@contextlib.contextmanager
def mounted(directory, kind, few_inodes=False):
    """Mount a file system of one of KINDS; yield its root.

    :param directory: an empty one, for the image and the mount point
    """
    if os.geteuid() != 0:
        pytest.skip('mounting needs root')
    make, size, options = KINDS[kind][few_inodes]
    root = directory / 'disk'
    root.mkdir()
    if make is None:
        _run('mount', '-t', 'tmpfs', '-o', options, 'tmpfs', root)
    else:
        image = directory / 'image'
        with open(image, 'wb') as f:
            f.truncate(size)
        _run(*make, image)
        _run('mount', '-o', options, image, root)
    try:
        yield root
    finally:
        # Unmounting frees the loop device.
        subprocess.run(['umount', '--lazy', root], timeout=LIMIT, check=True)


def fill_bytes(root):
    """Fill every block; return the file to remove for space."""
    path = root / 'filling'
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        step = 16 * MIB
        size = 0
        while step >= 4096:
            try:
                os.posix_fallocate(fd, size, step)
                size += step
            except OSError:
                step //= 2
        for _ in range(2):
            # Delayed allocation frees some blocks late.
            os.fsync(fd)
            with contextlib.suppress(OSError):
                while True:
                    os.write(fd, bytes(4096))
    finally:
        os.close(fd)
    return [path]


def fill_inodes(root):
    """Fill every inode; return the files to remove for space."""
    paths = []
    with contextlib.suppress(OSError):
        while True:
            path = root / f'filling-{len(paths)}'
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            paths.append(path)
    return paths
