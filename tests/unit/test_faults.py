# SPDX-License-Identifier: Apache-2.0
"""All of the engine's tests under faults run, and leaks are detected.

``tests/c/support/fault_tasks.h`` describes the faults; ``test_c.py`` tries a
part of them.
"""

import os
import shutil
import subprocess
import sys

import pytest

from tests.support import native
from tests.unit import test_c

pytestmark = pytest.mark.needs('clang')

LONG = 1700         # seconds

LEAK = '''
#include <stdlib.h>
int main(void)
{
    void *volatile lost = malloc(100);
    lost = NULL;
    return lost != NULL;
}
'''


@pytest.mark.long
@pytest.mark.parametrize(
    'source', [pytest.param(path, id=path.stem)
               for path in test_c.sources(test_c.TESTS, 'test_faults')])
def test_every_fault(source, monkeypatch):
    monkeypatch.setenv('GLANCE_DEDUP_FAULTS', 'all')
    status, output = native.run(native.program('plain', source), LONG)
    assert status == 0, output


@pytest.mark.needs('clang')
def test_leaks_are_found(tmp_path):
    """The sanitizer detects leaks, so test_c.py's runs would fail."""
    source = tmp_path / 'leak.c'
    source.write_text(LEAK)
    subprocess.run(['clang', '-fsanitize=address', source, '-o',
                    tmp_path / 'leak'], check=True, timeout=60)
    status, output = native.execute([tmp_path / 'leak'], 60)
    assert status != 0
    assert 'LeakSanitizer: detected memory leaks' in output


@pytest.mark.long
@pytest.mark.skipif(shutil.which('valgrind') is None,
                    reason='valgrind is not installed')
def test_valgrind():
    """Valgrind also finds uninitialized memory; gcc's sanitizers do not."""
    program = native.program('plain', test_c.program_of('transaction'))
    status, output = native.execute(
        ['valgrind', '--quiet', '--error-exitcode=9', '--leak-check=full',
         '--show-leak-kinds=definite,indirect', program], LONG)
    assert status == 0, output


@pytest.mark.long
def test_extension_under_sanitizers(tmp_path):
    """The binding passes the tests under sanitizers, too."""
    top = tmp_path / 'tree'
    shutil.copytree(native.TOP, top, ignore=shutil.ignore_patterns(
        '.git', '.venv', 'build', '*.so', '__pycache__', '.hypothesis'))
    environment = {**os.environ, 'PYTHONPATH': str(top),
                   'GLANCE_DEDUP_SANITIZE': 'address,undefined'}
    subprocess.run(
        [sys.executable, 'setup.py', '-q', 'build_ext', '--inplace'], cwd=top,
        env=environment, check=True, timeout=LONG)
    runtimes = [
        subprocess.run(['gcc', f'-print-file-name={name}'], check=True,
                       capture_output=True, text=True).stdout.strip()
        for name in ('libasan.so', 'libubsan.so')]
    # Memory that the interpreter never frees would hide all other leaks.
    environment.update(
        LD_PRELOAD=':'.join(runtimes),
        ASAN_OPTIONS='detect_leaks=0:halt_on_error=1',
        UBSAN_OPTIONS='print_stacktrace=1:halt_on_error=1')
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider',
         *(f'tests/unit/repository/test_repository_{part}.py' for part in (
             'filter', 'fork', 'groups', 'images', 'open', 'transactions'))],
        cwd=top, env=environment, capture_output=True, text=True,
        errors='replace', timeout=LONG)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
