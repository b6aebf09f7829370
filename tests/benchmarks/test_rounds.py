# SPDX-License-Identifier: Apache-2.0

"""The simulator of rounds computes plans, and compares them with the best."""

import re
import subprocess
import sys

from tests.benchmarks import papers


def test_rounds():
    done = subprocess.run(
        [sys.executable, papers.FOLDER / 'rounds.py', '--hosts', '3',
         '--disks', '4'],
        capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
    assert len(re.findall('(all alike|hosts differ) ', done.stdout)) == 22
    factors = [float(factor) for factor in re.findall(
        r'weight [0-9.]+: ([0-9.]+) at most', done.stdout)]
    # Acceptance: all weights, and no plan is better than the best.
    assert len(factors) == 11
    assert all(1 <= factor <= 2 for factor in factors)
