# SPDX-License-Identifier: Apache-2.0

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
