# SPDX-License-Identifier: Apache-2.0

"""Builds and runs the fuzz targets, ``fuzz_*.c``.

They run under libFuzzer with the address and undefined-behaviour sanitizers,
each for 3 seconds, with ``--all`` for 20, and with ``--long`` for 10 minutes.
``GLANCE_DEDUP_FUZZ_SECONDS`` sets another number of seconds. Each starts from
the inputs of ``corpus/<target>/``, all of which are run first. An input that
ends a target is kept in ``.log/fuzz/``, and the failure says how to run it
again. Once the bug is mended, the input goes into the corpus under a name that
says what it showed.

Where there is no clang with libFuzzer the corpus alone is run, built with gcc.

To add a target: write ``fuzz_<name>.c``, which is found by its name; put what
it shares with others into a file that is called otherwise; give it seeds in
make_corpus.py, and a length in `LENGTHS`, if 4096 bytes are not right for it.
To keep what a long run has found, run the target by hand on a directory of its
own, and merge that into the corpus (``-merge=1``).
"""

import concurrent.futures
import contextlib
import functools
import os
import pathlib
import random
import re
import shlex
import shutil
import subprocess

import pytest

TOP = pathlib.Path(__file__).resolve().parent.parent.parent
ENGINE = TOP / 'glance_dedup' / 'engine'
HERE = TOP / 'tests' / 'fuzz'
MAINTAINER = TOP / 'tests' / 'c' / 'support' / 'simple_maintainer.c'
CORPUS = HERE / 'corpus'
ARTIFACTS = TOP / '.log' / 'fuzz'

TARGETS = sorted(path.stem.removeprefix('fuzz_')
                 for path in HERE.glob('fuzz_*.c'))
# The longest inputs, in bytes. Where each byte costs time, short ones do more.
LENGTHS = {'catalog': 1500, 'index': 400, 'reader': 600, 'spool': 1500,
           'volume': 400, 'wire': 300, 'writer': 600}
CORPUS_MAX = 500_000  # bytes, of all targets

COMPILE = ['-std=c11', '-D_GNU_SOURCE', '-O1', '-g', '-Wall', '-Wextra',
           '-Werror', '-fno-omit-frame-pointer', '-fno-sanitize-recover=all',
           f'-I{ENGINE.parent}', f'-I{TOP}']
LIBRARIES = ['-lcrypto', '-lxxhash', '-llz4', '-lzstd', '-lpthread']
FUZZER = ['clang', '-fsanitize=fuzzer-no-link,address,undefined']
LINK_FUZZER = ['clang', '-fsanitize=fuzzer,address,undefined']
REPLAY = ['gcc', '-fsanitize=address,undefined']
LIMITS = ['-len_control=0', '-timeout=10', '-rss_limit_mb=2048',
          '-malloc_limit_mb=256']

AT_ONCE = 2
BUILD_TIMEOUT = 280  # seconds for one file
# Seconds in all, for a build with everything busy, and the last of the runs.
TIMEOUT = 600
LONG_TIMEOUT = 6000


def seconds(config):
    usual = (600 if config.getoption('--long') else
             20 if config.getoption('--all') else 3)
    return int(os.environ.get('GLANCE_DEDUP_FUZZ_SECONDS', usual))


def execute(command, timeout):
    """The exit status, and all that was printed."""
    result = subprocess.run(
        [str(part) for part in command], stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors='replace', timeout=timeout,
        env={**os.environ, 'UBSAN_OPTIONS': 'print_stacktrace=1'})
    return result.returncode, result.stdout


def build(command):
    status, output = execute(command, BUILD_TIMEOUT)
    assert status == 0, f'{shlex.join(map(str, command))}\n{output}'


@functools.cache
def has_fuzzer():
    """Whether there is a clang that can link libFuzzer to something."""
    if shutil.which('clang') is None:
        return False
    program = 'int LLVMFuzzerTestOneInput(void) { return 0; }'
    return subprocess.run(
        [*LINK_FUZZER, '-x', 'c', '-', '-o', '/dev/null'],
        input=program.encode(), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, timeout=60).returncode == 0


def shared_sources(replay):
    """What all targets are linked with."""
    own = [path for path in sorted(HERE.glob('*.c'))
           if not path.name.startswith('fuzz_')]
    return sorted(ENGINE.glob('*/*.c')) + [MAINTAINER] + [
        path for path in own if replay or path.name != 'replay.c']


def build_all(directory, compiler, linker, replay):
    """A program for each target, by its name."""
    sources = shared_sources(replay) + [
        HERE / f'fuzz_{target}.c' for target in TARGETS]
    objects = {source: directory / '-'.join(
        source.relative_to(TOP).with_suffix('.o').parts)
        for source in sources}
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(
            lambda source: build([*compiler, *COMPILE, '-c', source,
                                  '-o', objects[source]]),
            sources))
    shared = [objects[source] for source in shared_sources(replay)]
    programs = {target: directory / target for target in TARGETS}
    for target, program in programs.items():
        build([*linker, objects[HERE / f'fuzz_{target}.c'], *shared,
               '-o', program, *LIBRARIES])
    return programs


def how_to_reproduce(target, artifacts):
    sources = [HERE / f'fuzz_{target}.c', *shared_sources(False)]
    command = [*LINK_FUZZER, *COMPILE, *sources, '-o', f'/tmp/fuzz_{target}',
               *LIBRARIES]
    inputs = ' '.join(str(path) for path in sorted(artifacts.iterdir())
                      if not path.name.startswith('.'))
    return (f'To run it again:\n{shlex.join(map(str, command))}\n'
            f'/tmp/fuzz_{target} {inputs or "(no input was kept)"}')


def run(target, program, directory, limit):
    """Fuzzes for `limit` seconds; raises AssertionError with all to know."""
    found = directory / f'found-{target}'
    artifacts = ARTIFACTS / target
    found.mkdir()
    artifacts.mkdir(parents=True, exist_ok=True)
    seed = random.randrange(1, 1 << 31)
    status, output = execute(
        [program, f'-seed={seed}', f'-max_total_time={limit}',
         f'-max_len={LENGTHS.get(target, 4096)}', *LIMITS,
         '-print_final_stats=1', f'-artifact_prefix={artifacts}/',
         found, CORPUS / target], limit + 300)
    last = '\n'.join(output.splitlines()[-60:])
    assert status == 0, (
        f'fuzz_{target}, -seed={seed}: exit status {status}\n{last}\n'
        + how_to_reproduce(target, artifacts))
    executed = re.search(r'stat::number_of_executed_units: *(\d+)', output)
    assert executed and int(executed[1]) > 0, (
        f'fuzz_{target}, -seed={seed}, executed nothing\n{last}')
    with contextlib.suppress(OSError):
        artifacts.rmdir()  # unless it holds an earlier run's
    coverage = re.findall(r'cov: (\d+)', output)
    return int(executed[1]), coverage[-1] if coverage else '?'


@pytest.fixture(scope='module')
def runs(request, tmp_path_factory):
    """The results to come of all targets, of which some run at once."""
    if not has_fuzzer():
        pytest.skip('no clang with libFuzzer here (packages clang and '
                    'libclang-rt-dev): only the kept inputs are run')
    directory = tmp_path_factory.mktemp('fuzz')
    programs = build_all(directory, FUZZER, LINK_FUZZER, False)
    limit = seconds(request.config)
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        yield {target: pool.submit(run, target, program, directory, limit)
               for target, program in programs.items()}


@pytest.fixture(scope='module')
def replays(tmp_path_factory):
    if has_fuzzer():
        pytest.skip('the fuzzers run the kept inputs themselves')
    return build_all(tmp_path_factory.mktemp('replay'), REPLAY, REPLAY, True)


def pytest_generate_tests(metafunc):
    # The first that runs waits for the build of all.
    limit = (LONG_TIMEOUT if metafunc.config.getoption('--long')
             else TIMEOUT)
    if 'target' in metafunc.fixturenames:
        metafunc.parametrize(
            'target', [pytest.param(target, marks=pytest.mark.timeout(limit))
                       for target in TARGETS])


def test_fuzz(target, runs):
    executed, coverage = runs[target].result()
    print(f'fuzz_{target}: {executed} executions, {coverage} edges')


def test_kept_inputs(target, replays):
    status, output = execute([replays[target], CORPUS / target], TIMEOUT)
    assert status == 0, f'fuzz_{target}: {status}\n{output[-5000:]}'


def test_every_target_has_a_corpus():
    assert TARGETS == sorted(path.name for path in CORPUS.iterdir())
    sizes = [path.stat().st_size for path in CORPUS.glob('*/*')]
    assert sum(sizes) < CORPUS_MAX
