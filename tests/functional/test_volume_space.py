# SPDX-License-Identifier: Apache-2.0

"""The disk space of a volume that is overwritten again and again."""

import pathlib
import random

import pytest

from tests.support import daemons
from tests.support import repositories
from tests.support import volume_tools

MIB = 1 << 20


def used(repository):
    """Return the bytes that the repository's files take."""
    total = 0
    for path in pathlib.Path(repository).rglob('*'):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue            # the file was deleted meanwhile
    return total


# Long: six times a volume is written as a whole, and then collected.
@pytest.mark.needs('nbdkit')
@pytest.mark.slow
@pytest.mark.parametrize('size, times, waits', [
    (128 * MIB, 6, True), pytest.param(1024 * MIB, 50, False, marks=[
        pytest.mark.long, pytest.mark.timeout(7200)])])
def test_overwritten(tmp_path, size, times, waits):
    """With a maintaining daemon, a volume takes less than four times its size.

    :param waits: for collections after each turn, by a daemon that looks more
        often: a small volume is written several times in five seconds
    """
    repository = volume_tools.create_repository(tmp_path / 'repository')
    volume_tools.create(repository, 'disk', size, 64 * MIB)
    rng = random.Random(size)
    most = 0
    with (daemons.Daemon(
            repository, collect_interval=3600,
            collect_volumes_mib=size // MIB // 4) as daemon,
          volume_tools.Server(repository, tmp_path) as server):
        if waits:
            daemon.program = daemons.impatient(LOOK_INTERVAL=0.5)
        daemon.start().wait_for_catalog()
        with server.start().session() as session:
            for turn in range(times):
                for offset in range(0, size, MIB):
                    volume_tools.write(session, offset, rng.randbytes(MIB))
                    if offset % (32 * MIB) == 0:
                        most = max(most, used(repository))
                if waits:
                    # A collection that began in the middle of the turn has
                    # freed only a part.
                    repositories.eventually(
                        lambda: used(repository) < 5 * size // 2, 60)
        server.stop()
        assert daemon.stop() == 0, daemon.text()
    assert size < most < 4 * size
    repositories.require_clean(repository)
