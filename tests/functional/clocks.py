# SPDX-License-Identifier: Apache-2.0
"""Clocks that a test sets while a process runs: ``clocks.c``."""

import mmap
import pathlib
import struct
import subprocess
import time

_SOURCE = pathlib.Path(__file__).with_suffix('.c')
_SECONDS = 60       # for the compiler


class Clock:
    """Builds the library, and the file that it reads.

    :param directory: where to put them
    :ivar environment: variables of a process that is to have this clock
    """

    def __init__(self, directory):
        library = directory / 'clock.so'
        subprocess.run(
            ['gcc', '-std=c11', '-D_GNU_SOURCE', '-Wall', '-Wextra', '-O1',
             '-shared', '-fPIC', str(_SOURCE), '-o', str(library)],
            check=True, timeout=_SECONDS)
        setting = directory / 'clock'
        setting.write_bytes(bytes(16))
        with open(setting, 'r+b') as file:
            self._map = mmap.mmap(file.fileno(), 16)
        self.environment = {'LD_PRELOAD': str(library),
                            'GLANCE_DEDUP_TEST_CLOCK': str(setting)}

    def set(self, seconds):
        """Set by how much the time of day is ahead; negative: behind."""
        self._map[:8] = struct.pack('<q', int(seconds))

    def stop_monotonic(self):
        """Have the monotonic clock stand still from now on."""
        self._map[8:] = struct.pack('<q', int(time.monotonic()))
