# SPDX-License-Identifier: Apache-2.0
"""tools/lib.sh installs and builds the prerequisites of the tools."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

TOP = pathlib.Path(__file__).resolve().parents[2]
# Seconds. For a loaded machine.
LIMIT = 240


def make_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\n{text}\n')
    path.chmod(0o755)


@pytest.fixture
def engine(tmp_path):
    """Builds the engine of a checkout without other files."""
    (tmp_path / 'tools').mkdir()
    (tmp_path / 'glance_dedup').mkdir()
    shutil.copy(TOP / 'tools' / 'lib.sh', tmp_path / 'tools')
    for name in 'setup.cfg', 'setup.py', 'pyproject.toml', 'requirements.txt':
        (tmp_path / name).touch()

    def build(source, python):
        (tmp_path / 'glance_dedup' / 'engine.c').write_text(source)
        make_program(tmp_path / '.venv/bin/python', python)
        return subprocess.run(
            ['bash', '-c', '. tools/lib.sh; need_venv() { :; }; '
             'need_packages() { :; }; need_engine test'], cwd=tmp_path,
            capture_output=True, text=True, timeout=LIMIT)
    return build


def test_an_engine_of_a_build_that_failed_is_built_again(engine):
    """A failed build is repeated, even if the old sources are back."""
    link = ('cd glance_dedup; touch _engine.abi3.so glance-dedup-confined; '
            'cd ..')
    # pip runs in the caller's directory, which is the checkout, too.
    assert engine('one', link).returncode == 0
    assert 'build' not in engine('one', 'exit 1').stdout
    assert engine('two', f'{link}; exit 1').returncode == 2
    again = engine('one', link)
    assert again.returncode == 0 and 'build the engine: done' in again.stdout


@pytest.mark.skipif(sys.prefix != str(TOP / '.venv'),
                    reason='tools/test would make an environment of its own')
def test_what_cannot_be_installed_is_named_with_the_reason(tmp_path):
    """The output names each test that did not run, its need, and the error."""
    programs = tmp_path / 'programs'
    make_program(programs / 'sudo', 'exec "$@"')
    make_program(programs / 'dpkg-query', 'case $* in *shellcheck) exit 1;; '
                 'esac; echo installed')
    make_program(programs / 'apt-get',
                 f'echo "$1" >>{tmp_path}/called; echo "E: no mirror answers";'
                 ' exit 100')
    test = 'tests/test_style.py::test_shell_style'
    done = subprocess.run(
        [TOP / 'tools' / 'test', '-n', '0', '-q', '-p', 'no:cacheprovider',
         test], capture_output=True, text=True, timeout=LIMIT,
        env={**{name: value for name, value in os.environ.items()
                if not name.startswith('PYTEST_XDIST')},
             'PATH': f'{programs}:{os.environ["PATH"]}'})
    assert done.returncode != 0
    summary = done.stdout.partition('= not run =')[2]
    assert 'shellcheck:' in summary, done.stdout + done.stderr
    assert 'E: no mirror answers' in summary
    assert 'What to do: see that apt-get reaches a Debian mirror' in summary
    assert test in summary
    called = (tmp_path / 'called').read_text().split()
    assert called.count('update') == 1
