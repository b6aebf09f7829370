#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""The benchmarks run, from their commands, on a little data.

No figure is looked at but for being there: how fast this machine is, now, is
not what a test can know.
"""

import os
import pathlib
import random
import subprocess
import sys

import pytest

TOP = pathlib.Path(__file__).resolve().parents[2]

#: Arguments that make it small, and what its last table must have.
SMALL = {
    'budget': (['--versions', '2', '--budget', '64', 'IMAGE'], '100.00%'),
    'disk': (['--versions', '2', '--codec', 'lz4', '--ranges', '2', 'IMAGE'],
             'lz4: reading, cached'),
    'duplicates': (['--mib', '8', '--rounds', '1'], 'by processor time'),
    'engine': (['--mib', '8', '--rounds', '1', 'IMAGE'],
               'exact deduplication keeps'),
    'lookup': (['--blocks', '131072', '--rounds', '1'], '131,072'),
    'memory': (['--mib', '8', '--clients', '2'], 'dedupd, idle again'),
    'upload': (['--mib', '8', '--rounds', '1', '--clients', '2'],
               'image, 2 at once: duplicates, lz4-direct'),
}


@pytest.fixture
def image(tmp_path):
    path = tmp_path / 'image'
    path.write_bytes(random.Random(1).randbytes(4 << 20) + bytes(1 << 20))
    return path


def run(name, arguments, directory):
    return subprocess.run(
        [sys.executable, TOP / 'benchmarks' / f'{name}.py', *arguments],
        cwd=directory, capture_output=True, text=True, timeout=200,
        env={**os.environ, 'PYTHONWARNINGS': 'ignore'})


@pytest.mark.parametrize('name', sorted(SMALL))
def test_it_shows_its_table(name, image, tmp_path):
    arguments, wanted = SMALL[name]
    directory = tmp_path / 'here'
    directory.mkdir()
    done = run(name, [str(image) if a == 'IMAGE' else a for a in arguments],
               directory)
    assert done.returncode == 0, done.stderr
    assert wanted in done.stdout
    assert not list(directory.iterdir())  # it leaves nothing behind


def test_all_say_what_they_take(tmp_path):
    names = {path.stem for path in (TOP / 'benchmarks').glob('*.py')}
    for name in names - {'common'}:
        done = run(name, ['--help'], tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith('usage:')
