# SPDX-License-Identifier: Apache-2.0

"""The benchmarks run, from their commands, on a little data.

The tests only check that the figures are there: a test cannot know how fast
this machine is at the moment.
"""

import os
import pathlib
import random
import re
import subprocess
import sys

import pytest

from dedupd.tasks import merger
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import space
from tests.support import disks
from tests.support import repositories

# Long: the benchmarks are programs of their own, which measure for a while.
pytestmark = pytest.mark.slow

TOP = pathlib.Path(__file__).resolve().parents[2]

#: Arguments that make a run small, and text that its last table must have.
SMALL = {
    'accounts': (['--mib', '32'], 'evicting'),
    'ageing': (['--images', '3', '--mib', '2', '--rounds', '2', '--every', '1',
                '--exchanged', '1', '--group-slots', '256', '--arrange',
                'IMAGE'], 'those of one image alone'),
    'budget': (['--versions', '2', '--budget', '64', 'IMAGE'], '100.00%'),
    'checking': (['--extents', '4', '--images', '20'], 'images'),
    'chunking': (['--rounds', '1', '--chunking', '4096,1024/4096/16384',
                  'IMAGE'], '| 1024/4096/16384 |'),
    'cold': (['--mib', '8', '--group-slots', '256', '--gib-month', '0.02'],
             'sum, of what has a price'),
    'coldgroups': (['--mib', '8', '--rounds', '1', '--only', 'download'],
                   'download, warm'),
    'counting': (['--images', '10', '--runs', '100', '--rounds', '1'],
                 'by partitions, 2 counters'),
    'dede': (['--scale', 'tiny'], 'another host reads'),
    'disk': (['--versions', '2', '--codec', 'lz4', '--ranges', '2', 'IMAGE'],
             'lz4: reading, cached'),
    'dmdedup': (['--quick', '--scale', 'tiny'], 'trace homes: blocks of 512'),
    'duplicates': (['--mib', '8', '--rounds', '1'], 'by processor time'),
    'engine': (['--mib', '8', '--rounds', '1', 'IMAGE'],
               'exact deduplication keeps'),
    'equalblocks': (['IMAGE'], 'nothing shared'),
    'exactindex': (['--blocks', '20000'], 'bytes for each entry'),
    'following': (['--groups', '20', '--mib', '8'], 'by this host'),
    'hosts': (['--images', '8', '--mib', '4', '--interval', '0.2'],
              '4 hosts, at once'),
    'indexes': (['--blocks', '17000', '--rounds', '1', '--writes', '20',
                 '--indexes', 'filter,inram'], 'inram'),
    'kv': (['--keys', '2000', '--rounds', '1', '--backends', 'inram,dtb'],
           '2,000  dtb'),
    'livedfs': (['--mib', '8', '--rounds', '1', '--only', 'A1,A2,A3,B1,B2',
                 '--stores-elsewhere', '--single-loads', '--no-combining',
                 'IMAGE'], 'B2: upload through Glance'),
    'lookup': (['--blocks', '131072', '--rounds', '1'], '131,072'),
    'memory': (['--mib', '8', '--clients', '2'], 'dedupd, idle again'),
    'peers': (['--rounds', '1', '--only', 'plain', '--only', 'ours', 'IMAGE'],
              '| plain files | 5 | 125.1% | - |'),
    'phase': (['--mib', '4', '--rounds', '1', 'IMAGE'], 'compared by value'),
    'reading': (['--rounds', '1', '--codec', 'lz4', '--storm', '2', 'IMAGE'],
                'storm: lz4, dedupd: page cache'),
    'recompress': (['--rounds', '1', '--threads', '1', '--codecs', 'zstd-1',
                    '--group-slots', '256', 'IMAGE'],
                   'compressing anew, zstd-1, 1 threads'),
    'replication': (['IMAGE'], '1 images came as they were sent'),
    'rounds': (['--hosts', '3', '--disks', '5'], 'mean, weight 1.0'),
    'servers': (['--mib', '8', '--servers', '1', '--rounds', '1'],
                'volume: server up'),
    'traces': (['mail', '--writes', '3'], ' 8 W 8 0 '),
    'upload': (['--mib', '8', '--rounds', '1', '--clients', '2'],
               'image, 2 at once: duplicates, lz4-direct'),
    'volumes': (['--mib', '8', '--writes', '200', '--rounds', '1'],
                'an idle volume of 100 GiB'),
}
#: Programs and features that some benchmarks need.
NEEDS = {
    'reading': ['fincore'],
    'servers': ['bootimage', 'fio', 'guest', 'nbdkit', 'qemu'],
}
#: Benchmarks that take more than ten seconds.
LONG = {'chunking', 'dede', 'dmdedup', 'duplicates', 'equalblocks',
        'exactindex', 'hosts', 'indexes', 'kv', 'livedfs', 'lookup', 'memory',
        'servers'}


@pytest.fixture
def image(tmp_path):
    path = tmp_path / 'image'
    path.write_bytes(random.Random(1).randbytes(4 << 20) + bytes(1 << 20))
    return path


def run(name, arguments, directory):
    return subprocess.run(
        [sys.executable, next((TOP / 'benchmarks').rglob(f'{name}.py')),
         *arguments],
        cwd=directory, capture_output=True, text=True, timeout=200,
        env={**os.environ, 'PYTHONWARNINGS': 'ignore'})


@pytest.mark.parametrize('name', [
    pytest.param(name, marks=[
        pytest.mark.needs(*NEEDS.get(name, ())),
        *([pytest.mark.long] if name in LONG else [])])
    for name in sorted(SMALL)])
def test_it_shows_its_table(name, image, tmp_path):
    arguments, wanted = SMALL[name]
    directory = tmp_path / 'here'
    directory.mkdir()
    done = run(name, [str(image) if a == 'IMAGE' else a for a in arguments],
               directory)
    assert done.returncode == 0, done.stderr
    assert wanted in done.stdout
    assert not list(directory.iterdir())  # no file is left behind


def test_metadata_is_what_space_counts(image, tmp_path):
    path = repositories.create(tmp_path / 'repository')
    with repositories.open_repository(path) as repo:
        repositories.put(repo, 'image', image.read_bytes())
        with maintainer_role.Maintainer(repo) as maintainer:
            merger.run_once(maintainer, pacing.Pace())
            wanted = sum(part.bytes for part in space.parts(repo)
                         if part.plain_bytes is None)
    done = run('metadata', [str(path)], tmp_path)
    assert done.returncode == 0, done.stderr
    lines = {line[:36].strip(): line[36:].split()
             for line in done.stdout.splitlines()}
    # They are equal as far as the table rounds; the catalog's log is longer
    # while it is open.
    assert float(lines['all'][0]) * (1 << 20) == pytest.approx(
        wanted, abs=64 << 10)
    assert float(lines['shard files'][0]) > 0
    assert re.search(r'^[\d,]+ blocks, 4 MiB; \d+ extents$', done.stdout,
                     re.MULTILINE)


@pytest.mark.long
@pytest.mark.needs('disks')
def test_after_a_loss_of_power(tmp_path):
    with disks.mounted(tmp_path, 'ext4'):
        pass    # else it is skipped
    directory = tmp_path / 'here'
    directory.mkdir()
    done = run('livedfs', ['--mib', '8', '--rounds', '1', '--only', 'A4',
                           '--stores-elsewhere'], directory)
    assert done.returncode == 0, done.stderr
    assert 'after a loss of power' in done.stdout
    assert not list(directory.iterdir())


@pytest.mark.needs('disks')
def test_what_a_sync_costs_the_disk(tmp_path):
    """The benchmark reads the kernel's figures of one disk, a loop device."""
    with disks.mounted(tmp_path, 'ext4') as root:
        done = run('journal', ['--writes', '20', '--rounds', '1', '--dir',
                               root], tmp_path)
        assert done.returncode == 0, done.stderr
        *_, last = done.stdout.splitlines()
        assert re.fullmatch(r'a volume( +\d+\.\d){3} +\d+', last), last
        assert {path.name for path in root.iterdir()} <= {'lost+found'}


#: Shows the options of a benchmark. The import has tests.support.forkserver
#: fork it from a process that has imported what most benchmarks import.
HELP = """
import os, runpy, sys
from dedupd import daemon
path = sys.argv[1]
sys.argv[:] = path, '--help'
sys.path.insert(0, os.path.dirname(path))
runpy.run_path(path, run_name='__main__')
"""


def test_all_say_what_they_take():
    # These are no commands; MPI starts batchrank.py for batch.py.
    left_out = {'_path', 'common', 'plot', 'aio', 'batchrank',
                'memorylimit'}
    for path in (TOP / 'benchmarks').rglob('*.py'):
        if path.stem in left_out:
            continue
        done = subprocess.run(
            [sys.executable, '-c', HELP, path], cwd=TOP, capture_output=True,
            text=True, timeout=200)
        assert done.returncode == 0, (path, done.stderr)
        assert done.stdout.startswith(f'usage: {path.name} '), path
