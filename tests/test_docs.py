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
"""The documents build without a warning, so no reference in them dangles."""

import pathlib
import subprocess
import sys

import pytest

TOP = pathlib.Path(__file__).resolve().parent.parent


def in_git():
    """Both builds ask git: reno for the notes, the theme for the version."""
    return subprocess.run(
        ['git', 'rev-parse', '--verify', '-q', 'HEAD'], cwd=TOP,
        capture_output=True).returncode == 0


@pytest.mark.skipif(not in_git(), reason='not a git checkout with a commit')
@pytest.mark.parametrize('source', ['doc/source', 'releasenotes/source'])
def test_build(source, tmp_path):
    result = subprocess.run(
        [sys.executable, '-m', 'sphinx', '-W', '--keep-going', '-q',
         '-b', 'html', '-d', tmp_path / 'doctrees', TOP / source,
         tmp_path / 'html'],
        cwd=TOP, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, f'\n{result.stdout}{result.stderr}'
    assert (tmp_path / 'html' / 'index.html').exists()
