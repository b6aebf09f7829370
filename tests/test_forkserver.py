# SPDX-License-Identifier: Apache-2.0
"""Forked programs are the same as executed ones."""

import concurrent.futures
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.support import forkserver

TOP = pathlib.Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, '-m', 'glance_dedup.cli.entry']


def run(*arguments, **options):
    """Yield the same command, forked and executed."""
    results = []
    for environment in ({}, {'GLANCE_DEDUP_TEST_EXEC': '1'}):
        environment |= {**os.environ, 'PYTHONPATH': str(TOP)}
        assert (forkserver.find_family(COMMAND, environment, '/') is None) == (
            'GLANCE_DEDUP_TEST_EXEC' in environment)
        results.append(subprocess.run(
            [*COMMAND, *arguments], env=environment, capture_output=True,
            timeout=60, **options))
    return results


@pytest.mark.parametrize('arguments', [
    ('--version',), ('--help',), ('image', '--help'), ('no such command',),
    ('--repository', '/nowhere', 'image', 'list')])
def test_same_status_and_output(arguments, tmp_path):
    forked, executed = run(*arguments, cwd=tmp_path)
    assert forked.returncode == executed.returncode
    assert forked.stdout == executed.stdout
    assert forked.stderr == executed.stderr
    assert forked.stdout or forked.stderr


def test_descriptors_and_directory(tmp_path):
    """A forked program reads its input, and has only its own files open."""
    path = tmp_path / 'repository'
    run('--repository', path, 'repository', 'create')
    other = tmp_path / 'other'      # the program has no reason to open it
    other.mkdir()
    kept = os.open(other, os.O_RDONLY)
    os.set_inheritable(kept, True)
    process = subprocess.Popen(
        [*COMMAND, '--repository', 'repository', 'image', 'put', 'one', '-'],
        cwd=tmp_path, env={**os.environ, 'PYTHONPATH': str(TOP)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        process.stdin.write(b'x' * 4096)
        process.stdin.flush()
        assert os.readlink(f'/proc/{process.pid}/cwd') == str(tmp_path)
        opened = {os.readlink(f'/proc/{process.pid}/fd/{fd}')
                  for fd in os.listdir(f'/proc/{process.pid}/fd')}
        assert str(other) not in opened
        assert not [name for name in opened if name.startswith('socket:')]
    finally:
        out, err = process.communicate(timeout=60)
        os.close(kept)
    assert process.returncode == 0, (out, err)


def test_it_is_a_child_that_can_be_killed(tmp_path):
    process = subprocess.Popen(
        [*COMMAND, '--repository', tmp_path / 'r', 'image', 'put', 'one', '-'],
        env={**os.environ, 'PYTHONPATH': str(TOP)}, stdin=subprocess.PIPE,
        start_new_session=True)
    status = pathlib.Path(f'/proc/{process.pid}/status').read_text()
    assert f'PPid:\t{os.getpid()}\n' in status
    assert os.getsid(process.pid) == process.pid
    proc = pathlib.Path(f'/proc/{process.pid}')
    assert (proc / 'cmdline').read_bytes().split(b'\0')[:3] == [
        word.encode() for word in COMMAND]
    assert (f'PYTHONPATH={TOP}'.encode()
            in (proc / 'environ').read_bytes().split(b'\0'))
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    process.stdin.close()


def test_starts_of_two_families_at_once():
    """Each process stays a child of this one, which gets its exit status."""
    openstack = [os.path.join(os.path.dirname(sys.executable), 'openstack')]

    def statuses(command):
        return {subprocess.run(
            [*command, '--no-such-option'], env={
                **os.environ, 'PYTHONPATH': str(TOP)}, timeout=60,
            capture_output=True).returncode for _ in range(12)}

    assert forkserver.find_family(openstack, os.environ, '/') == 'openstack'
    expected = [statuses(command) for command in (COMMAND, openstack)]
    assert expected == [{2}, {2}]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            assert list(pool.map(statuses, (COMMAND, openstack))) == expected


def program(code, *arguments, **environment):
    """Run a program, forked unless it is too long; return its output."""
    command = [sys.executable, '-c', f'from dedupd import daemon\n{code}',
               *arguments]
    environment = {**os.environ, 'PYTHONPATH': str(TOP), **environment}
    assert forkserver.find_family(command, environment, '/')
    return subprocess.run(command, env=environment, capture_output=True,
                          text=True, timeout=60, check=True).stdout


def test_time_zone():
    assert program('import time; print(time.tzname[0])', TZ='ABC-3') == 'ABC\n'


def test_a_long_command():
    """A command longer than a message to the server is executed."""
    words = ['x' * 90] * 15_000
    assert program('import sys; print(len(sys.argv))', *words) == '15001\n'
    assert program('print("next")') == 'next\n'


def test_a_server_that_was_killed():
    """At most the start that finds the server dead fails."""
    assert program('print(1)') == '1\n'
    server = forkserver._servers[os.getpid(), 'ours']._process
    server.kill()
    server.wait(60)
    assert program('print(2)') == '2\n'


def test_what_a_start_reads_is_executed():
    environment = {**os.environ, 'PYTHONPATH': str(TOP)}
    assert forkserver.find_family(COMMAND, environment, '/')
    for change in ({'LD_PRELOAD': 'faults.so'}, {'PYTHONHASHSEED': '1'},
                   {'PYTHONPATH': '/elsewhere'},
                   {'LC_ALL': 'de_DE.ISO-8859-1'}):
        assert not forkserver.find_family(
            COMMAND, {**environment, **change}, '/'), change
    assert not forkserver.find_family(
        [sys.executable, '-m', 'tests.model.checker'], environment, TOP)
    assert not forkserver.find_family(
        ['python3', *COMMAND[1:]], environment, TOP)


def test_code(tmp_path):
    code = ('import os, sys\nfrom dedupd import daemon\n'
            'print(sys.argv, __name__, os.getcwd(), daemon.__name__)\n'
            'sys.exit(3)')
    command = [sys.executable, '-c', code, 'one', '-two']
    environment = {**os.environ, 'PYTHONPATH': str(TOP)}
    assert forkserver.find_family(command, environment, tmp_path)
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True,
                          stdout=subprocess.PIPE, timeout=60)
    assert done.returncode == 3
    assert done.stdout == (
        f"['-c', 'one', '-two'] __main__ {tmp_path} dedupd.daemon\n")
