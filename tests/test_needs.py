# SPDX-License-Identifier: Apache-2.0
"""Tests declare their needs, and cannot use anything else."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests import needs
from tests import scheduling

TOP = pathlib.Path(__file__).resolve().parent.parent
HEAD = 'import subprocess\nimport pytest\nfrom tests import needs\n'


@pytest.fixture
def run(tmp_path):
    """Run the text's tests with the hooks of all tests; return the output."""
    def run(text, *arguments, status=0):
        (tmp_path / 'test_one.py').write_text(HEAD + text)
        done = subprocess.run(
            [sys.executable, '-m', 'pytest', '-p', 'tests.conftest',
             '-p', 'no:cacheprovider', '-c', TOP / 'pyproject.toml',
             '--rootdir', TOP, *arguments, tmp_path], cwd=TOP,
            capture_output=True, text=True, timeout=120,
            env={**os.environ, 'PYTHONPATH': str(TOP)})
        output = done.stdout + done.stderr
        assert done.returncode == status, output
        return output
    return run


def test_an_unknown_need_ends_the_run_before_the_first_test(run):
    output = run(
        'def test_good(): open("ran", "w")\n'
        '@pytest.mark.needs("rabitmq")\n'
        'def test_wrong(): pass\n', status=4)
    assert "test_wrong: unknown need 'rabitmq'" in output
    assert not (TOP / 'ran').exists()


@pytest.mark.needs('shellcheck')
@pytest.mark.parametrize('name', ['shellcheck', '/usr/bin/shellcheck'])
def test_an_undeclared_program_is_refused(run, name):
    """The refusal counts if the test ignores it, and for a path, too."""
    output = run(
        'def test_hides_it():\n'
        '    try:\n'
        f'        subprocess.run(["{name}", "--version"])\n'
        '    except OSError:\n'
        '        pass\n'
        'def test_next(): pass\n', status=1)
    assert 'does not declare that it needs shellcheck' in output
    assert '2 passed, 1 error' in output
    assert '::test_hides_it' in output


@pytest.mark.needs('shellcheck')
def test_declared_programs_run(run):
    output = run(
        'COMMAND = ["shellcheck", "--version"]\n'
        '@pytest.mark.needs("shellcheck")\n'
        'def test_by_mark(): subprocess.run(COMMAND, check=True)\n'
        '@pytest.fixture\n'
        '@needs.of("shellcheck")\n'
        'def checker(): subprocess.run(COMMAND, check=True)\n'
        'def test_by_fixture(checker): pass\n')
    assert '2 passed' in output


@pytest.mark.needs('shellcheck')
def test_a_shared_fixture_is_torn_down_after_a_test_without_its_need(run):
    output = run(
        'COMMAND = ["shellcheck", "--version"]\n'
        '@pytest.fixture(scope="session")\n'
        '@needs.of("shellcheck")\n'
        'def checker():\n'
        '    yield\n'
        '    subprocess.run(COMMAND, check=True)\n'
        'def test_with(checker): pass\n'
        'def test_last(): pass\n')
    assert '2 passed' in output


@pytest.mark.needs('shellcheck')
def test_a_shared_fixture_is_torn_down_after_a_test_that_changed_path(run):
    output = run(
        'import os\n'
        '@pytest.fixture(scope="session")\n'
        '@needs.of("shellcheck")\n'
        'def checker():\n'
        '    yield\n'
        '    subprocess.run(["shellcheck", "--version"], check=True)\n'
        '@pytest.mark.needs("shellcheck")\n'
        'def test_with(checker): pass\n'
        'def test_last(monkeypatch):\n'
        '    monkeypatch.setenv("PATH", "/nowhere:" + os.environ["PATH"])\n')
    assert '2 passed' in output


@pytest.mark.needs('shellcheck')
@pytest.mark.parametrize('start', [
    'subprocess.run(["shellcheck"], env={"PATH": "/usr/bin"})',
    'subprocess.run(["shellcheck"], env={})',
    'subprocess.run(["usr/bin/shellcheck"], cwd="/")',
    'subprocess.run(["/usr/../usr/bin/shellcheck"])',
    'os.posix_spawn("/usr/bin/shellcheck", ["shellcheck"], os.environ)',
    'os.execv("/usr/bin/shellcheck", ["shellcheck"])'])
def test_an_undeclared_program_is_refused_however_it_is_started(run, start):
    output = run(
        'import os\n'
        'def test_it():\n'
        '    with pytest.raises(PermissionError):\n'
        f'        {start}\n', status=1)
    assert 'does not declare that it needs shellcheck' in output
    assert '1 passed, 1 error' in output


def test_a_refusal_between_two_tests_is_not_that_of_the_next(run):
    """A refusal after a test does not fail the next test."""
    output = run(
        '@pytest.fixture\n'
        'def late(request):\n'
        '    yield\n'
        '    (request.config.stash[guard()].log).write_text("shellcheck")\n'
        'def guard():\n'
        '    from tests import conftest\n'
        '    return conftest._GUARD\n'
        'def test_one(late): pass\n'
        'def test_next(): pass\n')
    assert '2 passed' in output


@pytest.mark.parametrize('arguments', ['["fio", "nbd"]', 'name="fio"', '5'])
def test_a_mark_takes_names_only(run, arguments):
    output = run(f'@pytest.mark.needs({arguments})\n'
                 'def test_wrong(): pass\n', status=4)
    assert 'test_wrong: the mark needs takes names only' in output


def test_a_declaration_that_would_have_no_effect():
    """A declaration above the fixture's decorator is an error."""
    with pytest.raises(TypeError, match='goes below pytest.fixture'):
        @needs.of('shellcheck')
        @pytest.fixture
        def checker():
            pass


def test_an_undeclared_service_is_refused(run):
    output = run(
        'def test_swift():\n'
        '    subprocess.run([needs.SERVICES / "swift/bin/python"])\n',
        status=1)
    assert 'does not declare that it needs swift' in output


def test_what_cannot_be_installed(run):
    """The other tests run; the end names the reason and the tests left out."""
    output = run(
        'def test_other(): pass\n'
        '@pytest.mark.needs("rabbitmq")\n'
        'def test_broker(): raise Exception("it ran")\n',
        '--without', 'rabbitmq=no mirror answers', status=1)
    assert '1 passed' in output
    assert 'rabbitmq: no mirror answers' in output
    assert '::test_broker' in output


def test_the_end_names_the_option_for_what_was_left_out(run):
    """A slow test that the command line names runs; a long one does not."""
    output = run(
        'def test_quick(): pass\n'
        '@pytest.mark.slow\n'
        'def test_slow(): pass\n'
        '@pytest.mark.slow\n'
        '@pytest.mark.long\n'
        'def test_long(): raise Exception("it ran")\n')
    assert '2 passed' in output
    assert 'tests marked long that were left out: 1; see --long' in output
    assert '--all' not in output


def test_only_a_run_records_its_times(run, tmp_path):
    """Collecting does not record times, nor does an interrupted run."""
    path = tmp_path / 'durations.json'
    run('def test_one(): pass\n', '--durations-file', path, '--collect-only')
    assert not path.exists()
    run('def test_one(): raise KeyboardInterrupt\n', '--durations-file', path,
        status=2)
    assert not path.exists()
    run('def test_one(): pass\n', '--durations-file', path)
    assert len(scheduling.read(path)) == 1


def test_groups_and_environments():
    assert needs.expand(['swift']) == {'swift', 'memcached'}
    assert 'nova' in needs.expand(['cloud'])
    for name in needs.GROUPS:
        needs.expand([name])
