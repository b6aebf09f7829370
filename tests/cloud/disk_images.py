# SPDX-License-Identifier: Apache-2.0
"""Disk images that boot, from tools/boot_image, and variants of them."""

import pathlib
import random
import subprocess
import tempfile
from typing import NamedTuple

TOP = pathlib.Path(__file__).resolve().parents[2]

# Seconds. The packages may have to be fetched.
BUILD_TIMEOUT = 900
COMMAND_TIMEOUT = 120

MIB = 1 << 20
#: mtools' name for the file system of an image.
PARTITION = '{}@@1M'


class DiskError(Exception):
    """There is no image; the message has the reason."""


class Images(NamedTuple):
    """The same disk in two formats."""

    raw: pathlib.Path
    qcow2: pathlib.Path


def _run(*command, timeout=COMMAND_TIMEOUT):
    result = subprocess.run(
        [str(word) for word in command], stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=timeout)
    if result.returncode:
        raise DiskError(f'{command[0]} failed with status '
                        f'{result.returncode}:\n{result.stdout}'
                        f'{result.stderr}')
    return result.stdout


def images():
    """Return the images; build them if they are missing."""
    lines = _run(TOP / 'tools' / 'boot_image',
                 timeout=BUILD_TIMEOUT).splitlines()
    return Images(*map(pathlib.Path, lines[-2:]))


def own(message, mib):
    """Return random bytes that no other message's variant has."""
    return random.Random(message).randbytes(mib * MIB)


def variant(source, target, message, own_mib=0):
    """Make a copy of a raw image that has another message.

    :param own_mib: how much of it is its `own`; there is room for 80
    """
    _run('cp', '--sparse=always', source, target)
    with tempfile.TemporaryDirectory() as directory:
        files = {'message.txt': message.encode() + b'\n'}
        if own_mib:
            files['own'] = own(message, own_mib)
        for name, content in files.items():
            path = pathlib.Path(directory) / name
            path.write_bytes(content)
            _run('mcopy', '-o', '-i', PARTITION.format(target), path,
                 f'::{name}')
