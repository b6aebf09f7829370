# SPDX-License-Identifier: Apache-2.0

"""The benchmark of batch backups stores what uploads would."""

import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

BENCHMARK = (pathlib.Path(__file__).resolve().parents[2]
             / 'benchmarks' / 'batch.py')


def test_three_nights(tmp_path):
    done = subprocess.run(
        [sys.executable, BENCHMARK, '--mib', '12', '--disks', '3', '--ranks',
         '2', '--dir', tmp_path], capture_output=True, text=True, timeout=400)
    assert not done.returncode, done.stderr
    read = [float(share) for share in re.findall('read +([0-9.]+)',
                                                 done.stdout)]
    # The first night reads all but zeros twice, or once where it is known.
    assert len(read) == 3 and max(read[1:]) < 0.5 < read[0]
    assert 'have the bytes of their disks' in done.stdout
    # Acceptance: within 0.5 %.
    assert abs(float(done.stdout.split()[-1]) - 1) < 0.005
    assert not list(tmp_path.iterdir())
