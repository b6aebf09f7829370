# Licensed under the Apache License, Version 2.0 (the "License"); you may
# not use this file except in compliance with the License. You may obtain
# a copy of the License at
#
#      http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
# WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
# License for the specific language governing permissions and limitations
# under the License.
"""The style of the Python code, of the C code and of the shell scripts."""

import pathlib
import shutil
import subprocess
import sys

import pytest

TOP = pathlib.Path(__file__).resolve().parent.parent
C_LICENSE = '/* SPDX-License-Identifier: Apache-2.0 */\n'


def test_python_style():
    """flake8 with OpenStack's hacking checks, configured in tox.ini."""
    result = subprocess.run(
        [sys.executable, '-m', 'flake8'], cwd=TOP, capture_output=True,
        text=True, timeout=280)
    assert result.returncode == 0, f'\n{result.stdout}{result.stderr}'


def test_c_license():
    """Every C file says in its first line under which licence it stands."""
    paths = [path for directory in ('glance_dedup', 'tests', 'benchmarks')
             for path in (TOP / directory).rglob('*.[ch]')]
    assert paths
    without = sorted(str(path.relative_to(TOP)) for path in paths
                     if not path.read_text().startswith(C_LICENSE))
    assert not without, f'the first line must be {C_LICENSE}in {without}'


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
