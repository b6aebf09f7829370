# SPDX-License-Identifier: Apache-2.0

"""Every program and document reports the same version."""

import importlib.metadata
import pathlib
import re
import subprocess
import sys

import pytest

from dedupd import daemon
from glance_dedup.base import package_version
from glance_dedup.cli import entry
from tests.support import daemons
from tests.support import repositories

TOP = pathlib.Path(__file__).resolve().parents[3]
VERSION = importlib.metadata.version('glance-dedup')


@pytest.mark.parametrize('run', (entry.main, daemon.main))
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


def test_it_takes_no_memory():
    """The lookup avoids importlib.metadata, which takes 2.4 MB.

    A rank has 35 MB in all.
    """
    program = ('import sys\n'
               'from glance_dedup.base import package_version\n'
               'print(package_version.version())\n'
               'assert "importlib.metadata" not in sys.modules\n')
    # This process is new; a fork would have imported much (tests/support).
    done = subprocess.run([sys.executable, '-c', program], check=True,
                          capture_output=True, text=True, timeout=60)
    assert done.stdout == f'{VERSION}\n'


def test_packages_of_other_forms(tmp_path, monkeypatch):
    """The version comes from an egg-info or a dist-info, if there is one."""
    monkeypatch.setattr(sys, 'path', [str(tmp_path), '/nowhere'])
    assert package_version.version.__wrapped__() == '(not installed)'
    (tmp_path / 'glance_dedup.egg-info').mkdir()
    (tmp_path / 'glance_dedup.egg-info' / 'PKG-INFO').write_text(
        'Metadata-Version: 2.1\nName: glance-dedup\nVersion: 9.8.7\n')
    assert package_version.version.__wrapped__() == '9.8.7'
    (tmp_path / 'glance_dedup-7.8.9.dist-info').mkdir()
    (tmp_path / 'glance_dedup-7.8.9.dist-info' / 'METADATA').write_text(
        'Metadata-Version: 2.1\nName: glance-dedup\nVersion: 7.8.9\n'
        'Description: text\n\nVersion: none\n')
    assert package_version.version.__wrapped__() == '7.8.9'


def test_nothing_else_names_one():
    """Documents and package files contain no version of their own."""
    found = re.compile(r'(glance.dedup\S*[-=]|version = ")'
                       r'[0-9]+\.[0-9]+\.[0-9]')
    for file in (*TOP.glob('doc/source/**/*.rst'), TOP / 'README.rst',
                 TOP / 'tests' / 'tempest' / 'pyproject.toml'):
        assert not found.search(file.read_text()), file
