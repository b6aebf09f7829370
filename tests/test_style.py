# SPDX-License-Identifier: Apache-2.0
"""The style of the Python code, of the C code and of the shell scripts."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

TOP = pathlib.Path(__file__).resolve().parent.parent
LICENSE = 'SPDX-License-Identifier: Apache-2.0'


# Long: flake8 reads every file of Python.
@pytest.mark.timeout(1200)
def test_python_style():
    """flake8 with OpenStack's hacking checks, configured in tox.ini."""
    result = subprocess.run(
        [sys.executable, '-m', 'flake8'], cwd=TOP, capture_output=True,
        text=True, timeout=1100)
    assert result.returncode == 0, f'\n{result.stdout}{result.stderr}'


# Long: mypy reads every module, and those of the libraries.
@pytest.mark.timeout(1200)    # without a cache
def test_types():
    """mypy finds nothing."""
    result = subprocess.run(
        [sys.executable, '-m', 'mypy'], cwd=TOP, capture_output=True,
        text=True, timeout=1100)
    assert result.returncode == 0, f'\n{result.stdout}{result.stderr}'


def test_docstrings():
    """Public functions, classes and methods say what their names do not.

    A command's class says it to users, too: its docstring is the command's
    help, and its methods override cliff's.
    """
    result = subprocess.run(
        [sys.executable, '-m', 'tests.support.docstrings'], cwd=TOP,
        check=True, capture_output=True, text=True, timeout=100)
    assert not result.stdout, f'\n{result.stdout}'


def sources():
    """Every source file that is in the repository, or would be."""
    names = subprocess.run(
        ['git', 'ls-files', '-co', '--exclude-standard'], cwd=TOP, check=True,
        capture_output=True, text=True, timeout=60).stdout.splitlines()
    for path in map(TOP.joinpath, names):
        if path.is_file() and (
                path.suffix in {'.c', '.h', '.py', '.pyi', '.sh'}
                or path.read_bytes()[:2] == b'#!'):
            yield path


def test_license():
    """Every source file says at its begin under which licence it stands."""
    paths = list(sources())
    assert len(paths) > 500
    without = [str(path.relative_to(TOP)) for path in paths
               if path.stat().st_size
               and LICENSE not in path.read_text()[:200]]
    assert not without, f'no "{LICENSE}" in {without}'


@pytest.mark.needs('shellcheck')
@pytest.mark.parametrize(
    'path', sorted(
        path for directory in ('tools', '.ci')
        for path in (TOP / directory).iterdir()
        if path.is_file() and path.read_bytes().startswith(
            (b'#!/bin/bash', b'# shellcheck shell=bash'))),
    ids=lambda path: str(path.relative_to(TOP)))
def test_shell_style(path):
    shellcheck = shutil.which('shellcheck')
    if shellcheck is None:
        pytest.skip('shellcheck is not installed')
    result = subprocess.run(
        [shellcheck, '--external-sources', str(path)], cwd=TOP,
        capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, f'\n{result.stdout}{result.stderr}'


#: Where an error of the disk says no more than that nothing is there.
HIDES_ERRORS = {
    'adoption/estimate.py', 'backup/job_hosts.py', 'cli/command.py',
    'cli/volumeserve.py', 'driver/daemon_reads.py', 'objects/slicefiles.py',
    'fstest/properties.py'}


def test_a_failing_disk_is_not_taken_for_an_empty_one():
    """os.path.isdir and its like hide what the system said: base/files.py."""
    hides = re.compile(r'os\.path\.(isdir|isfile|islink|l?exists)\(')
    found = {str(path.relative_to(top))
             for top in (TOP / 'glance_dedup', TOP / 'dedupd')
             for path in top.rglob('*.py') if hides.search(path.read_text())}
    assert found == HIDES_ERRORS
