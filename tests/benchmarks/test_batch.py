# SPDX-License-Identifier: Apache-2.0

"""The benchmarks of batch backups store the same as uploads, and report it."""

import os
import re
import subprocess
import sys

import pytest

from tests.benchmarks import papers

pytestmark = [pytest.mark.long, pytest.mark.needs('disks')]


def run(program, *words):
    done = subprocess.run([sys.executable, papers.FOLDER / program, *words],
                          capture_output=True, text=True, timeout=400)
    assert not done.returncode, done.stderr
    return done.stdout


def rows(text, pattern):
    """Return the numbers in each line that matches the pattern."""
    return [[float(word) for word in line.split()]
            for line in text.splitlines() if re.match(pattern, line)]


def test_three_nights(tmp_path):
    said = run('batch.py', 'nights', '--mib', '12', '--disks', '3', '--ranks',
               '2', '--dir', tmp_path)
    nights = rows(said, r' +[1-3] ')
    # The first night reads all but zeros twice, or once if it is known.
    read = [row[11] for row in nights]
    assert len(read) == 3 and max(read[1:]) < 0.5 < read[0]
    # A rank keeps 25 MB from the system: see the next test.
    assert all(0 < row[14] <= 25 for row in nights)
    # Each stage took some time, and all together at most the total.
    for row in nights:
        assert min(row[3:9]) >= 0 and 0 < sum(row[3:9]) <= row[2]
    assert 'have the bytes of their disks' in said
    # Acceptance: within 0.5 %.
    assert abs(float(said.split()[-1]) - 1) < 0.005
    assert not list(tmp_path.iterdir())


def test_a_rank_that_is_alone(tmp_path):
    """A rank keeps 28 MB from the system in a night of only new blocks.

    Measured are 23 to 26.

    In all it has up to 35 MB where other processes map the same libraries,
    which this test does not measure.
    """
    said = run('batch.py', 'nights', '--mib', '96', '--disks', '4', '--ranks',
               '1', '--dir', tmp_path)
    own = [row[14] for row in rows(said, r' +[1-3] ')]
    assert len(own) == 3 and 0 < max(own) <= 28


def test_dirty_bits(tmp_path):
    """The digests include unread segments: each night finds its base."""
    said = run('batch.py', 'nights', '--mib', '12', '--disks', '1', '--ranks',
               '1', '--dirty', '40', '--dirty-bits', '--dir', tmp_path)
    read = [row[11] for row in rows(said, r' +[1-3] ')]
    # 2 of 6 segments, and again from their first new block to the last.
    assert all(0.33 <= share <= 0.67 for share in read[1:])
    assert 'have the bytes of their disks' in said


def test_dirty_bits_of_other_disks(tmp_path):
    disk = tmp_path / 'disk'
    disk.touch()
    with pytest.raises(AssertionError, match='nobody knows'):
        run('batch.py', 'nights', '--dirty-bits', disk)


def test_memory(tmp_path):
    """No option stores a block twice, unless a partition is too large."""
    said = run('batch.py', 'memory', '--mib', '16', '--disks', '3', '--ranks',
               '2', '--partitions', '1', '3', '--dir', tmp_path)
    found = rows(said, r' +[12] +[13] ')
    assert [row[:2] for row in found] == [[2, 1], [1, 1], [2, 3], [1, 3]]
    assert all(row[-1] == 0 for row in found)
    pieces = next(line for line in said.splitlines() if 'pieces' in line)
    assert float(pieces.split()[-1]) > 0
    assert not list(tmp_path.iterdir())


def test_buffers(tmp_path):
    said = run('batch.py', 'buffers', '--mib', '6', '--disks', '2', '--ranks',
               '2', '--bytes', '1300', '65000', '--dir', tmp_path)
    found = rows(said, r' *(1300|65000) ')
    assert [row[0] for row in found] == [1300, 65000]
    assert all(row[-1] == 0 for row in found)


@pytest.mark.skipif(os.geteuid() != 0, reason='mounts file systems')
def test_levels(tmp_path):
    root = tmp_path / 'root'
    root.mkdir()
    (root / 'program').write_bytes(os.urandom(8 << 20))
    (root / 'DEBIAN').mkdir()
    (root / 'DEBIAN' / 'control').write_text(
        'Package: program\nVersion: 1\nArchitecture: all\n'
        'Maintainer: me <me@example.org>\nDescription: text\n')
    debs = tmp_path / 'debs'
    debs.mkdir()
    subprocess.run(['dpkg-deb', '-b', root, debs / 'program.deb'], check=True,
                   capture_output=True)
    said = run('levels.py', '--disks', '2', '--mib', '48', '--nights', '2',
               '--rows', '2000', '--debs', debs, '--dir', tmp_path, root)
    level1, level2, both = (
        float(word.rstrip('%')) for word in said.splitlines()[3].split()[2:5])
    assert level1 > 10 and level2 > 10
    # Both levels together find what level 1 finds, and level 2 in the rest.
    assert abs(100 - both - (100 - level1) * (100 - level2) / 100) < 0.2
    assert 'have the bytes of their disks' in said
    assert abs(float(said.split()[-1]) - 1) < 0.005
