# SPDX-License-Identifier: Apache-2.0

"""Builds and runs the fuzz targets, ``fuzz_*.c``.

They run under libFuzzer with the address and undefined-behaviour sanitizers,
each for 3 seconds, and with ``--long`` for 10 minutes.
``GLANCE_DEDUP_FUZZ_SECONDS`` sets another number of seconds. Each starts from
the inputs of its corpus (``corpus.py``), all of which are run first. An input
that ends a target is kept in ``.log/fuzz/``; the failure says how to run it
again. Once the bug is mended, the input goes into the corpus under a name that
says what it showed.

To add a target: write ``fuzz_<name>.c``, which is found by its name; put what
it shares with others into a file that is called otherwise; give it seeds in
make_corpus.py, and a length in `LENGTHS`, if 4096 bytes are not right for it.
To keep what a long run has found, run the target by hand on a directory of its
own, and add what ``-merge=1`` chooses of that to the corpus.
"""

import concurrent.futures
import contextlib
import os
import pathlib
import random
import re

import pytest

from tests.fuzz import corpus
from tests.support import native

pytestmark = [pytest.mark.slow, pytest.mark.needs('clang')]

TOP = pathlib.Path(__file__).resolve().parent.parent.parent
HERE = TOP / 'tests' / 'fuzz'
ARTIFACTS = TOP / '.log' / 'fuzz'

TARGETS = sorted(path.stem.removeprefix('fuzz_')
                 for path in HERE.glob('fuzz_*.c'))
# The longest inputs, in bytes. Where each byte costs time, short ones do more.
LENGTHS = {'catalog': 1500, 'index': 400, 'reader': 600, 'spool': 1500,
           'volume': 400, 'wire': 300, 'writer': 600}
CORPUS_MAX = 500_000  # bytes, of all targets

LIMITS = ['-len_control=0', '-timeout=10', '-rss_limit_mb=2048',
          '-malloc_limit_mb=256']

AT_ONCE = 2
# Seconds in all, for a build with everything busy, and the last of the runs.
TIMEOUT = native.BUILD_TIMEOUT + 600
LONG_TIMEOUT = 6000


def seconds(config):
    usual = 600 if config.getoption('--long') else 3
    return int(os.environ.get('GLANCE_DEDUP_FUZZ_SECONDS', usual))


def how_to_reproduce(target, artifacts):
    inputs = ' '.join(str(path) for path in sorted(artifacts.iterdir())
                      if not path.name.startswith('.'))
    return ('To run it again:\n'
            'make -f tests/native.mk -j VARIANT=asan fuzzers && '
            f'.build/asan/fuzz_{target} {inputs or "(no input was kept)"}')


def run(target, program, directory, limit):
    """Fuzz for `limit` seconds; raises AssertionError with all details."""
    found = directory / f'found-{target}'
    artifacts = ARTIFACTS / target
    found.mkdir()
    artifacts.mkdir(parents=True, exist_ok=True)
    kept = directory / f'corpus-{target}'
    corpus.extract(target, kept)
    seed = random.randrange(1, 1 << 31)
    status, output = native.execute(
        [program, f'-seed={seed}', f'-max_total_time={limit}',
         f'-max_len={LENGTHS.get(target, 4096)}', *LIMITS,
         '-print_final_stats=1', f'-artifact_prefix={artifacts}/',
         found, kept], limit + 300)
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
    """Fuzz the chosen targets, some at once; yields the results to come."""
    directory = tmp_path_factory.mktemp('fuzz')
    programs = native.directory('asan', 'fuzzers')
    limit = seconds(request.config)
    chosen = [item.callspec.params['target'] for item in request.session.items
              if 'runs' in item.fixturenames]
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        yield {target: pool.submit(run, target, programs / f'fuzz_{target}',
                                   directory, limit)
               for target in chosen}


def pytest_generate_tests(metafunc):
    # The first that runs waits for the build of all.
    limit = (LONG_TIMEOUT if metafunc.config.getoption('--long')
             else TIMEOUT)
    if 'target' in metafunc.fixturenames:
        metafunc.parametrize(
            'target', [pytest.param(target, marks=pytest.mark.timeout(limit))
                       for target in TARGETS])


# Long: the first test waits until all targets are compiled and have run.
@pytest.mark.needs('clang')
def test_fuzz(target, runs):
    executed, coverage = runs[target].result()
    print(f'fuzz_{target}: {executed} executions, {coverage} edges')


def test_every_target_has_a_corpus():
    assert TARGETS == corpus.targets()
    corpora = [corpus.read(target) for target in TARGETS]
    assert all(corpora)
    assert sum(len(content) for inputs in corpora
               for content in inputs.values()) < CORPUS_MAX


def test_damaged_archives_are_not_read(tmp_path, monkeypatch):
    """A damaged archive is an error, and not a smaller corpus."""
    monkeypatch.setattr(corpus, 'CORPUS', tmp_path)
    corpus.write('one', {f'seed-{i}': bytes([i]) * 999 for i in range(20)})
    archive = tmp_path / 'one.tar.xz'
    good = archive.read_bytes()
    assert len(corpus.read('one')) == 20
    flipped = (good[:place] + bytes([good[place] ^ 1]) + good[place + 1:]
               for place in range(len(good)))
    for damaged in (*flipped, *(good[:end] for end in range(len(good)))):
        archive.write_bytes(damaged)
        with pytest.raises(ValueError, match='one.tar.xz is damaged'):
            corpus.read('one')
