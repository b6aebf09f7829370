# SPDX-License-Identifier: Apache-2.0

"""tools/mutate works on a tree of two tiny files, and on a sample.

The sample is of the real tree.
"""

import json
import os
import pathlib
import subprocess
import sys
import textwrap
import time

import pytest

from tests.mutation import __main__ as main
from tests.mutation import operators
from tests.mutation import suite

pytestmark = pytest.mark.slow

TOP = pathlib.Path(__file__).resolve().parents[2]

# The test executes both functions and checks only the first.
TINY_C = '''\
    int tiny_bigger(int a, int b);
    int tiny_unseen(int a);
    int tiny_unused(int a);
    int tiny_loop(int a);

    int tiny_bigger(int a, int b)
    {
        return a > b;
    }

    int tiny_unseen(int a)
    {
        return a - 1;
    }

    int tiny_unused(int a)
    {
        return a * 2;
    }

    int tiny_loop(int a)
    {
        while (a > 0) {
            a--;
        }
        return a;
    }
'''
TINY_C_TEST = '''\
    #include <stdlib.h>

    int tiny_bigger(int a, int b);
    int tiny_unseen(int a);
    int tiny_loop(int a);

    int main(void)
    {
        tiny_unseen(3);
        tiny_loop(3);
        if (getenv("TMPDIR") == NULL) {
            return 2;
        }
        return tiny_bigger(2, 1) && !tiny_bigger(1, 1) ? 0 : 1;
    }
'''
TINY_PYTHON = '''\
    import threading

    lock = threading.Lock()


    def bigger(a, b):
        """True or False."""
        with lock:
            return a > b


    def unused():
        return 2
'''
TINY_PYTHON_TEST = '''\
    from glance_dedup import tiny


    def test_bigger():
        assert tiny.bigger(2, 1)
        assert not tiny.bigger(1, 1)
'''


@pytest.fixture
def tree(tmp_path):
    top = tmp_path / 'top'
    for name, text in (
            ('glance_dedup/__init__.py', ''),
            ('glance_dedup/tiny.py', TINY_PYTHON),
            ('glance_dedup/engine/deep/tiny.c', TINY_C),
            ('tests/c/deep/test_tiny.c', TINY_C_TEST),
            ('tests/unit/test_tiny.py', TINY_PYTHON_TEST)):
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    (top / 'dedupd').mkdir()
    return top


def start(top, *arguments, env=()):
    return subprocess.Popen(
        [sys.executable, '-P', '-m', 'tests.mutation', '--top', str(top),
         *arguments], env={**os.environ, 'PYTHONPATH': str(TOP), **dict(env)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def mutate(top, *arguments, timeout=250):
    with start(top, *arguments) as process:
        try:
            output = process.communicate(timeout=timeout)[0]
        finally:
            process.kill()
    report = top / '.log/mutate/report.json'
    found = {} if not report.exists() else {
        one['mutant']['id'].partition(':')[2]: one['status']
        for one in json.loads(report.read_text())['results']}
    return process.returncode, output, found


def texts(file, source):
    """Return the changed texts of each operator."""
    result = {}
    data = textwrap.dedent(source).encode()
    for mutant in operators.mutants(file, data):
        result.setdefault(mutant.operator, []).append(
            mutant.apply(data).decode())
    return result


def ids(file, *rest):
    return [f'{file}:{one}' for one in rest]


# Long: one mutant never ends, and is given up after twenty seconds.
def test_c(tree):
    file = 'glance_dedup/engine/deep/tiny.c'
    status, output, found = mutate(tree, *ids(
        file, '8:14:relation.1', '13:14:arithmetic.1', '18:14:arithmetic.1',
        '24:10:arithmetic.1'), '--timeout', '20')
    assert status == 1, output
    assert found == {'8:14:relation.1': 'killed',
                     '13:14:arithmetic.1': 'survived',
                     '24:10:arithmetic.1': 'timed out'}
    assert '+    return a + 1;\n' in output
    assert 'tiny.c: 18\n' in output    # executed by no test
    # The tree is unchanged.
    assert (tree / file).read_text() == textwrap.dedent(TINY_C)
    # A second run has a cache of the lines that the tests execute.
    status, output, found = mutate(tree, *ids(file, '8:14:relation.1'))
    assert (status, found) == (0, {'8:14:relation.1': 'killed'}), output
    assert 'looking' not in output


def test_python(tree):
    status, output, found = mutate(tree, *ids(
        'glance_dedup/tiny.py', '9:18:relation.1', '8:5:unsync.1',
        '13:12:constant.1'))
    assert status == 1, output
    assert found == {'9:18:relation.1': 'killed', '8:5:unsync.1': 'survived'}
    assert 'tiny.py: 13\n' in output


def test_sample_is_repeatable():
    found = operators.mutants('a.c', textwrap.dedent(TINY_C).encode())
    samples = [main.choose(found, 4, seed) for seed in (1, 1, 2, 3, 4, 5)]
    assert samples[0] == samples[1] and samples.count(samples[0]) < 6
    assert len({mutant.operator for mutant in samples[0]}) == 4
    assert len(main.choose(found, 0, 1)) == len(found)


def test_tests_of_a_source():
    """One concept may have several files of tests, of longer names."""
    for source, test, expected in (
            ('engine/files/spool.c', 'tests/c/files/test_spool.c', True),
            ('engine/files/spool.c', 'tests/c/files/test_spoolfile.c', False),
            ('engine/write/transaction.c',
             'tests/c/write/test_transaction_fingerprints.c', True),
            ('dedupd/tasks/collector.py',
             'tests/unit/dedupd/tasks/test_collector.py', True)):
        assert suite.is_namesake(test, source) == expected, test


def test_engine_tests_exist():
    assert [name for name in suite.ENGINE_TESTS
            if not (TOP / name).exists()] == []


def test_sources_of_engine_and_binding(tmp_path):
    """The tests in C are linked with the sources that do not use Python."""
    found = suite.Suite(TOP, tmp_path, suite.Runner())
    assert 'glance_dedup/engine/files/spool.c' in found.engine
    assert not [name for name in found.engine if 'binding' in name]


def test_nothing_is_compiled_twice(tree, tmp_path):
    """An object is compiled once: two compilers would mix up gcov's notes."""
    (tree / 'tests/c/help.c').write_text('int help;\n')
    test = tree / 'tests/c/deep/test_tiny.c'
    (test.parent / 'test_tiny_too.c').write_bytes(test.read_bytes())
    tests = suite.Suite(tree, tmp_path / 'cache', suite.Runner())
    compiled = []
    compile_ = tests.compile

    def compile_slowly(variant, source, *rest):
        compiled.append((variant, source))
        time.sleep(0.3)
        return compile_(variant, source, *rest)
    tests.compile = compile_slowly
    programs = tests.programs(True, [], 2, lambda words: None)
    assert len(programs) == 2 and all(one.good for one in programs)
    assert len(compiled) == len(set(compiled)) == 4


def test_list(tree):
    """Listing runs no test."""
    _, output, found = mutate(tree, '--files', '*.c', '--list')
    assert len(output.splitlines()) > 6 and found == {}
    assert not list(tree.glob('.log/mutate/*'))


def test_interrupted(tree):
    """An interrupted run reports its results, and leaves nothing behind."""
    temporary = tree.with_name('temporary')
    temporary.mkdir()
    process = start(tree, '--jobs', '1', *ids(
        'glance_dedup/engine/deep/tiny.c', '8:14:relation.1',
        '24:10:arithmetic.1'), env={'TMPDIR': str(temporary)})
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith('[1/'):
            process.terminate()
    assert process.wait(60) == 130, lines
    assert any(line.startswith('interrupted') for line in lines)
    assert any(line.startswith('report:') for line in lines)
    assert not list(temporary.iterdir())


def test_unknown(tree):
    status, output, _ = mutate(tree, 'glance_dedup/tiny.py:1:1:nothing.1')
    assert status == 2 and 'there is no mutant' in output
    status, output, _ = mutate(tree, '--files', 'nothing.c')
    assert status != 0 and 'no source is named nothing.c' in output


def test_operators_c():
    found = texts('a.c', '''\
        gd_status f(gd_env *env, int fd)
        {
            enum { SIZE = 4 };
            gd_status s = gd_read(fd);
            if (s == GD_OK) {
                env->fsync(env, fd);
                env->close(env, fd);
            }
            env->release(env, NULL);
            return gd_fail(NULL, GD_IO, "%d", fd + 1);
        }
        ''')
    assert any('gd_status s = 0;' in text for text in found['skip-call'])
    assert any('s = (gd_read(fd), 0);' in text
               for text in found['ignore-status'])
    assert any('        ;\n        env->close' in text
               for text in found['unsync'])
    assert any(text.find('env->close') < text.find('env->fsync')
               for text in found['swap'])
    assert len(found['swap']) == 1 and len(found['delete-call']) == 2
    # Messages are not changed, nor code outside of statements.
    assert 'arithmetic' not in found and 'constant' not in found


def test_operators_python():
    found = texts('a.py', '''\
        LIMIT = 3


        def f(a: int | None = 4) -> None:
            """Text."""
            assert a != 1
            LOG.info('%d', a + 1)
            if a is None:
                raise ValueError(f'{a} and 2')
            a.count += 1
            os.fsync(a)
            os.rename(a, a)
        ''')
    assert any('if a is not None:' in text for text in found['relation'])
    assert any('\n        pass\n' in text for text in found['delete-jump'])
    assert any('a.count -= 1' in text for text in found['arithmetic'])
    assert any('"""\n    return None\n' in text
               for text in found['early-return'])
    assert any(text.find('os.rename') < text.find('os.fsync')
               for text in found['swap'])
    # Numbers in the message, the assertion and the default are left alone.
    assert len(found['constant']) == 2      # 1: to 2 and to 0
    assert len(found['relation']) == len(found['arithmetic']) == 1


@pytest.mark.long
def test_sample():
    """Print the surviving mutants of a few; see the section of testing.rst."""
    start_ = time.monotonic()
    status, output, found = mutate(
        TOP, '--files', 'fence.c', '--files', 'spool.c', '--files',
        'locks.c', '--files', 'spoolfile.c', '--sample', '30', '--seed',
        '7', '--budget', '20', timeout=1700)
    print(output)
    print(f'{time.monotonic() - start_:.0f} s')
    assert status in (0, 1), output
    assert len(found) == 30
    caught = sum(found[key] in ('killed', 'timed out') for key in found)
    assert caught >= 24, output
