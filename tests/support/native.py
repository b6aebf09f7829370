# SPDX-License-Identifier: Apache-2.0
"""The engine and its tests in C, built by ``tests/native.mk``.

The objects stay in ``.build/`` of the checkout. All tests share them, and a
change compiles only the files that it touches.
"""

import fcntl
import functools
import os
import pathlib
import re
import subprocess

import pytest

TOP = pathlib.Path(__file__).resolve().parents[2]
VARIANTS = ('plain', 'asan', 'tsan')
ENVIRONMENT = {
    'ASAN_OPTIONS': 'detect_stack_use_after_return=1:strict_string_checks=1',
    'UBSAN_OPTIONS': 'print_stacktrace=1',
    'TSAN_OPTIONS': 'halt_on_error=1',
}
#: Seconds of each build. The build of all fuzzers takes over a minute of a
#: processor, of which parallel tests may leave it a tenth.
BUILD_TIMEOUT = 1000
RUN_TIMEOUT = 240    # and of one program


def execute(command, timeout):
    """Return the exit status and the output."""
    result = subprocess.run(
        [str(part) for part in command], cwd=TOP, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors='replace', timeout=timeout, env={**os.environ, **ENVIRONMENT})
    return result.returncode, result.stdout


def _make(variant, *targets):
    command = ['make', '-f', 'tests/native.mk', f'-j{os.cpu_count()}',
               f'VARIANT={variant}', *targets]
    status, output = execute(command, BUILD_TIMEOUT)
    assert status == 0, f'{" ".join(command)}\n{output}'


@functools.cache
def directory(variant, target='lib'):
    """Build a variant's parts that several tests use; return the directory."""
    place = TOP / '.build' / variant
    place.mkdir(parents=True, exist_ok=True)
    # One build at a time: all targets share the engine's objects.
    with open(place / 'lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _make(variant, target)
    return place


def program(variant, source):
    """Build one of ``tests/c/*/test_*.c``, and return its program."""
    target = source.relative_to(TOP).with_suffix('')
    place = directory(variant)
    _make(variant, str(target))
    return place / target


def processor_seconds():
    """Return the processor time of this process's ended children."""
    used = os.times()
    return used.children_user + used.children_system


def run(command, timeout=RUN_TIMEOUT):
    """Run a program; return the exit status and the output."""
    before = processor_seconds()
    try:
        status, output = execute([command], timeout)
        if status != 0 and 'unexpected memory mapping' in output:
            # This thread sanitizer needs an address space with less randomness
            # than this kernel's.
            status, output = execute(['setarch', '-R', command], timeout)
    except subprocess.TimeoutExpired as exc:
        # A busy machine may have given it only a few seconds.
        said = (exc.stdout or b'').decode(errors='replace')
        pytest.fail(f'{command} did not end in {timeout} s, of which it had a '
                    f'processor for {processor_seconds() - before:.1f} s.\n'
                    f'{said}')
    return status, output


def require_passes(variant, source):
    """Build and run the program of a file; all of its tests must pass."""
    status, output = run(program(variant, source))
    assert status == 0, f'{source.name} ({variant}): {status}\n{output}'
    assert re.search(r'^[1-9]\d* passed, 0 failed$', output, re.MULTILINE), (
        f'{source.name} ({variant}) printed no sum of its tests\n{output}')
