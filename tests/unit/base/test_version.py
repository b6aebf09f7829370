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

"""Everything that tells a version tells the same."""

import importlib.metadata
import pathlib
import re

import pytest

from dedupd import main as daemon
from glance_dedup.cli import main as cli
from tests.support import daemons
from tests.support import repositories

TOP = pathlib.Path(__file__).resolve().parents[3]
VERSION = importlib.metadata.version('glance-dedup')


@pytest.mark.parametrize('run', (cli.main, daemon.main))
def test_programs(run, capsys):
    try:
        run(['--version'])
    except SystemExit as e:
        assert not e.code
    assert capsys.readouterr().out.split()[-1] == VERSION


def test_daemon(tmp_path):
    path = repositories.create(tmp_path / 'repository')
    with daemons.running(path) as daemon, daemon.client() as client:
        assert client.status()['daemon']['version'] == VERSION


def test_nothing_else_names_one():
    """Documents and files of packages take it from there, or leave it out."""
    found = re.compile(r'(glance.dedup\S*[-=]|version = ")'
                       r'[0-9]+\.[0-9]+\.[0-9]')
    for file in (*TOP.glob('doc/source/**/*.rst'), TOP / 'README.rst',
                 TOP / 'tests' / 'tempest' / 'pyproject.toml'):
        assert not found.search(file.read_text()), file
