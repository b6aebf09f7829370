# SPDX-License-Identifier: Apache-2.0
"""The plain C engine is built without Python, and its C tests run.

``tests/c`` has the engine's folders. Every ``test_*.c`` in them is a program
of its own, linked with ``tests/c/support`` and with the engine. It is built
and run plain, with the address and undefined-behaviour sanitizers, and, if it
uses threads, with the thread sanitizer. ``tests/c/whole`` has tests that
belong to no single folder, ``tests/c/nbdkit`` those of the plugin's files that
need neither nbdkit nor the engine. By hand, from the top::

    make -f tests/native.mk -j VARIANT=asan lib tests/c/files/test_filter
    .build/asan/tests/c/files/test_filter [NAME OF A TEST...]
"""

import pathlib
import re

import pytest

from tests.support import native

TOP = pathlib.Path(__file__).resolve().parent.parent.parent
ENGINE = TOP / 'glance_dedup' / 'engine'
TESTS = TOP / 'tests' / 'c'
SUPPORT = TESTS / 'support'


def sources(directory, prefix=''):
    """Return the C files below a directory."""
    return sorted(directory.rglob(f'{prefix}*.c'))


def program_of(concept):
    """Return the source of the tests of an engine's file, or of the whole."""
    path, = TESTS.glob(f'*/test_{concept}.c')
    return path


def is_threaded(program):
    return re.search(r'#include [<"].*\b(pthread|pool)\.h',
                     program.read_text())


#: A minute each: with sanitizers only a part of their cases is tried.
LONG_SWEEPS = {'test_volume_faults', 'test_array'}


def marks_of(program, variant):
    if program.stem == 'test_volume_faults' and variant != 'plain':
        return pytest.mark.long
    return pytest.mark.slow if program.stem in LONG_SWEEPS else ()


def programs(variant):
    """Return the parameters of the tests that run each program."""
    return pytest.mark.parametrize('source', [
        pytest.param(program, id=f'{program.stem}-{variant}',
                     marks=marks_of(program, variant))
        for program in sources(TESTS, 'test_')
        if variant != 'tsan' or is_threaded(program)])


def test_a_program_that_does_not_end(tmp_path):
    program = tmp_path / 'program'
    program.write_text('#!/bin/sh\necho this far\nexec sleep 60\n')
    program.chmod(0o700)
    with pytest.raises(pytest.fail.Exception) as caught:
        native.run(program, timeout=1)
    assert re.search(r'/program did not end in 1 s, of which it had a '
                     r'processor for 0\.\d s\.\nthis far\n',
                     str(caught.value))


def test_a_check_that_fails_in_support(tmp_path):
    """A failed check in a support file fails the test that called it."""
    (tmp_path / 'other.c').write_text(
        '#include "tests/c/support/check.h"\n'
        'void other(void);\n'
        'void other(void) { CHECK(1 == 2); }\n')
    (tmp_path / 'main.c').write_text(
        '#include "tests/c/support/check.h"\n'
        'void other(void);\n'
        'TEST(test_other) { other(); }\n')
    program = tmp_path / 'program'
    status, output = native.execute(
        ['gcc', '-std=c11', '-D_GNU_SOURCE', f'-I{TOP}', *tmp_path.glob('*.c'),
         *sources(SUPPORT, 'check'), '-o', program], native.BUILD_TIMEOUT)
    assert status == 0, output
    status, output = native.run(program)
    assert status == 1
    assert '1 == 2' in output and '0 passed, 1 failed' in output


# Each test may run in another process: see tests/scheduling.py. The first test
# in each class waits for the build of the library.

TIMEOUT = 2 * native.BUILD_TIMEOUT + native.RUN_TIMEOUT


# Long: each program is compiled for the sanitizer, and runs slowly under it.
@pytest.mark.slow
@pytest.mark.needs('clang')
@pytest.mark.timeout(TIMEOUT)
class TestAddresses:
    """Run with the sanitizers of addresses and of undefined behaviour."""

    @programs('asan')
    def test_c(self, source):
        native.require_passes('asan', source)


# Long: each program is compiled for the sanitizer, and runs slowly under it.
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT)
class TestThreads:
    """Run with the sanitizer of threads."""

    @programs('tsan')
    def test_c(self, source):
        native.require_passes('tsan', source)


@pytest.mark.timeout(TIMEOUT)
class TestPlain:
    """Run the installed build. Its sweeps try every case."""

    @programs('plain')
    def test_c(self, source):
        native.require_passes('plain', source)
