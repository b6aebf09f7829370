# SPDX-License-Identifier: Apache-2.0
"""Builds the plain C engine, without Python, and runs its tests in C.

``tests/c`` has the engine's folders. Every ``test_*.c`` in them is a program
of its own, linked with ``tests/c/support`` and with all of the engine. It is
built and run plain, with the address and undefined-behaviour sanitizers, and,
if it uses threads, with the thread sanitizer. ``tests/c/whole`` tests what no
single folder answers for. By hand, from the top::

    gcc -std=c11 -D_GNU_SOURCE -g -fsanitize=address,undefined \\
        -Iglance_dedup -I. tests/c/files/test_filter.c \\
        tests/c/support/*.c glance_dedup/engine/*/*.c -o /tmp/test_filter \\
        -lcrypto -lxxhash -llz4 -lzstd -lpthread
    /tmp/test_filter [NAME OF A TEST...]
"""

import concurrent.futures
import functools
import os
import pathlib
import re
import resource
import subprocess

import pytest

TOP = pathlib.Path(__file__).resolve().parent.parent.parent
ENGINE = TOP / 'glance_dedup' / 'engine'
TESTS = TOP / 'tests' / 'c'
SUPPORT = TESTS / 'support'

COMPILE = ['gcc', '-std=c11', '-D_GNU_SOURCE', '-Wall', '-Wextra', '-Werror',
           f'-I{ENGINE.parent}', f'-I{TOP}']
LIBRARIES = ['-lcrypto', '-lxxhash', '-llz4', '-lzstd', '-lpthread']
VARIANTS = {
    'plain': ['-O2'],
    'asan': ['-O1', '-g', '-fsanitize=address,undefined',
             '-fno-sanitize-recover=all', '-fno-omit-frame-pointer'],
    'tsan': ['-O1', '-g', '-fsanitize=thread'],
}
ENVIRONMENT = {
    'ASAN_OPTIONS': 'detect_stack_use_after_return=1:strict_string_checks=1',
    'UBSAN_OPTIONS': 'print_stacktrace=1',
    'TSAN_OPTIONS': 'halt_on_error=1',
}
BUILD_TIMEOUT = 280  # seconds for one file
RUN_TIMEOUT = 240    # and for one program


def sources(directory, prefix=''):
    """The C files of a directory, and of those in it."""
    return sorted(directory.rglob(f'{prefix}*.c'))


def program_of(concept):
    """The source of the tests of a file of the engine, or of the whole."""
    path, = TESTS.glob(f'*/test_{concept}.c')
    return path


def object_name(path):
    """No two files' objects have the same."""
    return '-'.join(path.relative_to(TOP).with_suffix('.o').parts)


def is_threaded(program):
    return re.search(r'#include [<"].*\b(pthread|pool)\.h',
                     program.read_text())


def programs(variant):
    """The parameters of the tests that run each program."""
    return pytest.mark.parametrize('source', [
        pytest.param(program, id=f'{program.stem}-{variant}')
        for program in sources(TESTS, 'test_')
        if variant != 'tsan' or is_threaded(program)])


def execute(command, timeout):
    """The exit status, and all that was printed."""
    result = subprocess.run(
        [str(part) for part in command], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors='replace',
        timeout=timeout, env={**os.environ, **ENVIRONMENT})
    return result.returncode, result.stdout


def build(command):
    status, output = execute(command, BUILD_TIMEOUT)
    assert status == 0, f'{" ".join(map(str, command))}\n{output}'


@pytest.fixture(scope='session')
def objects(tmp_path_factory):
    """A function from a variant to the objects that all programs share."""
    @functools.cache
    def compile_variant(variant):
        directory = tmp_path_factory.mktemp(f'c-{variant}')
        shared = sources(ENGINE) + sources(SUPPORT)
        results = [directory / object_name(path) for path in shared]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(
                lambda path, result: build(
                    [*COMPILE, *VARIANTS[variant], '-c', path, '-o', result]),
                shared, results))
        return results
    return compile_variant


def processor_seconds():
    """Of all processes that this one started, and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(program, timeout=RUN_TIMEOUT):
    before = processor_seconds()
    try:
        status, output = execute([program], timeout)
        if status != 0 and 'unexpected memory mapping' in output:
            # This thread sanitizer knows only address spaces that are not as
            # random as this kernel's.
            status, output = execute(['setarch', '-R', program], timeout)
    except subprocess.TimeoutExpired as exc:
        # A few seconds may be all that a busy machine had for it.
        said = (exc.stdout or b'').decode(errors='replace')
        pytest.fail(f'{program} did not end in {timeout} s, of which it had a '
                    f'processor for {processor_seconds() - before:.1f} s.\n'
                    f'{said}')
    return status, output


def test_a_program_that_does_not_end(tmp_path):
    program = tmp_path / 'program'
    program.write_text('#!/bin/sh\necho this far\nexec sleep 60\n')
    program.chmod(0o700)
    with pytest.raises(pytest.fail.Exception) as caught:
        run(program, timeout=1)
    assert re.search(r'/program did not end in 1 s, of which it had a '
                     r'processor for 0\.\d s\.\nthis far\n',
                     str(caught.value))


def test_a_check_that_fails_in_support(tmp_path):
    """It counts against the test that called it."""
    (tmp_path / 'other.c').write_text(
        '#include "tests/c/support/check.h"\n'
        'void other(void);\n'
        'void other(void) { CHECK(1 == 2); }\n')
    (tmp_path / 'main.c').write_text(
        '#include "tests/c/support/check.h"\n'
        'void other(void);\n'
        'static void test_other(void) { other(); }\n'
        'int main(int argc, char **argv)\n'
        '{ BEGIN(argc, argv); RUN(test_other); return REPORT(); }\n')
    program = tmp_path / 'program'
    build([*COMPILE, *tmp_path.glob('*.c'), *sources(SUPPORT, 'check'), '-o',
           program])
    status, output = run(program)
    assert status == 1
    assert '1 == 2' in output and '0 passed, 1 failed' in output


def need_passes(variant, source, objects, directory):
    program = directory / source.stem
    build([*COMPILE, *VARIANTS[variant], source, *objects(variant),
           '-o', program, *LIBRARIES])
    status, output = run(program)
    assert status == 0, f'{source.name} ({variant}): {status}\n{output}'
    assert re.search(r'^[1-9]\d* passed, 0 failed$', output, re.MULTILINE), (
        f'{source.name} ({variant}) did not say how it went\n{output}')


# Classes, since all tests of a class have one process: these take the longest.

@pytest.mark.timeout(BUILD_TIMEOUT + RUN_TIMEOUT)
class TestAddresses:
    """With the sanitizers of addresses and of undefined behaviour."""

    @programs('asan')
    def test_c(self, source, objects, tmp_path):
        need_passes('asan', source, objects, tmp_path)


@pytest.mark.timeout(BUILD_TIMEOUT + RUN_TIMEOUT)
class TestThreads:
    """With the sanitizer of threads."""

    @programs('tsan')
    def test_c(self, source, objects, tmp_path):
        need_passes('tsan', source, objects, tmp_path)


@pytest.mark.slow      # of the three it finds the least
@pytest.mark.timeout(BUILD_TIMEOUT + RUN_TIMEOUT)
class TestPlain:
    """As it is installed."""

    @programs('plain')
    def test_c(self, source, objects, tmp_path):
        need_passes('plain', source, objects, tmp_path)
