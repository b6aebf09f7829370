# SPDX-License-Identifier: Apache-2.0

"""Runs the commands: in this process, or as a program."""

import ctypes
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from glance_dedup.cli import common
from glance_dedup.cli import entry

LIBC = ctypes.CDLL(None)
TOP = pathlib.Path(__file__).resolve().parents[3]


def become_ordinary():
    """Give up root's privilege to ignore modes, at the next exec.

    The user id stays root's, because other users may not be able to read the
    interpreter; so the files of a test have to belong to another user.
    """
    drop = 24                   # PR_CAPBSET_DROP
    for capability in range(64):
        LIBC.prctl(drop, capability, 0, 0, 0)


class Result:
    def __init__(self, status, out, err):
        self.status = status
        self.out = out
        self.err = err

    def json(self):
        assert self.status in (0, 1), self.err
        return json.loads(self.out)

    def refused(self, *words, status=common.USAGE):
        """Require this status and one line on stderr that has these words."""
        assert self.status == status, (self.status, self.out, self.err)
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith('glance-dedup: ')
        assert 'Traceback' not in self.err
        for word in words:
            assert word in lines[0], lines[0]

    def failed(self, *words):
        """Require exit status 3 and an error, as `refused` does."""
        self.refused(*words, status=common.FAILED)

    def no_repository(self, *words):
        """Require exit status 10 and an error, as `refused` does."""
        self.refused(*words, status=common.NO_REPOSITORY)

    def locked(self, *words):
        """Require exit status 11 and an error, as `refused` does."""
        self.refused(*words, status=common.LOCKED)


class Cli:
    """The commands on one repository."""

    def __init__(self, directory, capfd):
        self.path = directory / 'repository'
        self.options = ['--repository', str(self.path),
                        '--filter-dir', str(directory / 'filter'),
                        '--socket', str(directory / 'socket')]
        self.capfd = capfd

    def __call__(self, *arguments) -> Result:
        self.capfd.readouterr()
        status = entry.main([*self.options, *map(str, arguments)])
        out, err = self.capfd.readouterr()
        return Result(status, out, err)

    def command(self, *arguments) -> list[str]:
        return [sys.executable, '-m', 'glance_dedup.cli.entry',
                *self.options, *map(str, arguments)]

    def environment(self) -> dict[str, str]:
        return {**os.environ, 'PYTHONPATH': str(TOP)}

    def start(self, *arguments, **options) -> subprocess.Popen:
        return subprocess.Popen(
            self.command(*arguments), env=self.environment(), **options)

    def program(self, *arguments, **options) -> Result:
        found = subprocess.run(
            self.command(*arguments), env=self.environment(),
            capture_output=True, timeout=60, **options)
        return Result(found.returncode, found.stdout, found.stderr.decode())


@pytest.fixture
def cli(tmp_path, capfd):
    cli = Cli(tmp_path, capfd)
    yield cli
    # pytest keeps the directories of its last runs; filters are large.
    shutil.rmtree(tmp_path / 'filter', ignore_errors=True)


@pytest.fixture
def created(cli):
    result = cli('repository', 'create')
    assert result.status == 0, result.err
    return cli
