# SPDX-License-Identifier: Apache-2.0

"""A rank needs 35 MB, also in a night in which all blocks are new.

It runs in a cgroup that has no more. Where none can be made, only its resident
memory is limited, which has pages of libraries that the system can drop.
"""

import contextlib
import os
import pathlib

import pytest

from dedupd.tasks import merger
from glance_dedup.backup import rank_spool
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import image_repository
from tests.support import batches
from tests.support import repositories

PROMISED = 35_000_000
# Measured are 38.1 MB, of which 15 are pages of files.
MAX_RESIDENT = 40_000_000
CGROUPS = pathlib.Path('/sys/fs/cgroup')
# A rank enters its group, and notes the most that it had in memory.
ENTER = """
import atexit
def note():
    with open('/proc/self/status') as status:
        peak, = (line.split()[1] for line in status if 'VmHWM' in line)
    with open({peaks!r}, 'a') as peaks:
        peaks.write(peak + '\\n')
atexit.register(note)
for group in {groups!r}:
    with open(group, 'w') as procs:
        procs.write('0')
"""


# The files of a group's limits, of either version of cgroups: memory, swap.
LIMITS = ((CGROUPS / 'memory', 'memory.limit_in_bytes',
           'memory.memsw.limit_in_bytes', PROMISED),
          (CGROUPS, 'memory.max', 'memory.swap.max', 0))


def limit(group, memory, swap, most_swap):
    """Limit a new group; return whether that is possible."""
    try:
        (group / memory).write_text(str(PROMISED))
        if (group / swap).exists():     # the kernel counts swap
            (group / swap).write_text(str(most_swap))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def limited_group():
    """Yield a cgroup's file of processes; none where none can be made."""
    for parent, *limits in LIMITS:
        group = parent / f'glance-dedup-test-{os.getpid()}'
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if limit(group, *limits):
                yield [str(group / 'cgroup.procs')]
                return
        finally:
            group.rmdir()
    yield []


# Long: 410 MB are read and stored, for a full partition.
@pytest.mark.slow
def test_a_first_night(tmp_path, monkeypatch):
    cloud = batches.Cloud(tmp_path, 1)
    size = rank_spool.PIECE * 4096 // 4
    for number, path in enumerate(sorted(cloud.disks.directory.iterdir())):
        path.write_bytes(repositories.noise(size, number))
    with (image_repository.Repository(cloud.path) as repo,
          maintainer_role.Maintainer(repo) as maintainer):
        merger.run_once(maintainer, pacing.Pace())      # makes the index
    peaks = tmp_path / 'peaks'
    with limited_group() as groups:
        batches.in_ranks(tmp_path / 'site', monkeypatch, ENTER.format(
            peaks=str(peaks), groups=groups))
        results = cloud.run()
    assert not cloud.notices
    assert not any(result.note for result in results.values())
    assert sum(result.stored for result in results.values()) == 4 * size
    found = [int(line) << 10 for line in peaks.read_text().split()]
    assert len(found) == 2      # another one looks for the disks before
    assert max(found) < MAX_RESIDENT
