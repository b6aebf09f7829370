# SPDX-License-Identifier: Apache-2.0
"""The supervisor runs the tests, and ends the processes that they leave."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests import supervisor

TOP = pathlib.Path(__file__).resolve().parents[1]
# Seconds. For a loaded machine.
LIMIT = 120

#: A service as tests start them: it leads a session, and has none of the
#: caller's environment. Its number is in the file that is named.
SERVICE = f"""
import pathlib, signal, subprocess, sys, time
service = subprocess.Popen(
    ['sleep', '{10 * LIMIT}'], start_new_session=True, env={{}})
pathlib.Path(sys.argv[1]).write_text(str(service.pid))

def wait():
    while True:
        # A handler waits for the end of a sleep that begins just after the
        # signal came.
        time.sleep(0.1)
"""


def start(*words, **options):
    return subprocess.Popen(
        [sys.executable, '-m', 'tests.supervisor', sys.executable, *words],
        cwd=TOP, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
        **options)


def number(path):
    """Return the number in a file, once it exists."""
    deadline = time.monotonic() + LIMIT
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f'{path} has not come'
        time.sleep(0.01)
    return int(path.read_text())


def runs(pid):
    return pathlib.Path(f'/proc/{pid}').exists()


@pytest.fixture
def note(tmp_path):
    """A file for the number of a service, which does not outlive the test."""
    path = tmp_path / 'service'
    yield path
    if path.exists() and runs(path.read_text()):
        os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.mark.parametrize('ending, status', [
    ('', 0), ('sys.exit(5)', 5), ('signal.raise_signal(signal.SIGKILL)', 137)])
def test_what_a_command_leaves(note, ending, status):
    """Remaining processes are ended and named; the status is unchanged."""
    with start('-c', SERVICE + ending, note) as run:
        said, _ = run.communicate(timeout=LIMIT)
    assert run.returncode == status
    assert 'ended what the tests had left running: sleep' in said
    assert not runs(number(note))


def test_names():
    """A program has its name from the start, and none after its end."""
    for _ in range(20):
        with subprocess.Popen(['sleep', f'{10 * LIMIT}']) as service:
            try:
                assert supervisor._name(service.pid) == 'sleep'
            finally:
                service.kill()
            os.waitid(os.P_PID, service.pid, os.WEXITED | os.WNOWAIT)
            assert supervisor._name(service.pid) is None


def test_orphans_of_orphans(note):
    """All processes of a run are ended, in whatever session they are."""
    program = (f'import subprocess, sys; subprocess.run([sys.executable, "-c",'
               f' {SERVICE!r}, sys.argv[1]], start_new_session=True)')
    with start('-c', program, note) as run:
        assert run.wait(LIMIT) == 0
    assert not runs(number(note))


def test_nothing_left():
    with start('-c', 'print("done")') as run:
        assert run.communicate(timeout=LIMIT)[0] == 'done\n'
    assert run.returncode == 0


def test_the_command_hears_interrupts():
    """The command receives interrupts even if the run ignores them."""
    def ignore():
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    program = ('import signal; print(signal.getsignal(signal.SIGINT)'
               ' is signal.default_int_handler)')
    with start('-c', program, preexec_fn=ignore) as run:
        assert run.communicate(timeout=LIMIT)[0] == 'True\n'


def test_ends_of_children_that_the_caller_ignores():
    """The supervisor waits for its command even if SIGCHLD is ignored."""
    def ignore():
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    with start('-c', 'import sys; sys.exit(3)', preexec_fn=ignore) as run:
        try:
            assert run.wait(LIMIT) == 3
        finally:
            run.kill()


@pytest.mark.parametrize('sent', [signal.SIGINT, signal.SIGTERM,
                                  signal.SIGHUP])
def test_interrupt(note, sent):
    """Any request to end interrupts the command, and waits for it."""
    program = SERVICE + textwrap.dedent("""
        try:
            wait()
        except KeyboardInterrupt:
            time.sleep(1)
            print('torn down', flush=True)
            sys.exit(3)
        """)
    with start('-c', program, note) as run:
        service = number(note)
        run.send_signal(sent)
        said, _ = run.communicate(timeout=LIMIT)
    assert 'torn down' in said and run.returncode == 3
    assert not runs(service)


def test_second_interrupt(note):
    """A second interrupt kills the processes that still run."""
    program = SERVICE + textwrap.dedent("""
        import os       # the signal may come while print has not returned
        signal.signal(signal.SIGINT, lambda *args: os.write(1, b'heard\\n'))
        print('ready', flush=True)
        wait()
        """)
    with start('-c', program, note) as run:
        assert run.stdout.readline() == 'ready\n'
        run.send_signal(signal.SIGINT)
        assert run.stdout.readline() == 'heard\n'
        run.send_signal(signal.SIGINT)
        assert run.wait(LIMIT) == 137
    assert not runs(number(note))


def test_supervisor_that_is_killed(note):
    """The command is interrupted if its supervisor is killed."""
    program = SERVICE + textwrap.dedent("""
        try:
            wait()
        except KeyboardInterrupt:
            service.kill()
            service.wait()
            print('torn down', flush=True)
        """)
    with start('-c', program, note) as run:
        service = number(note)
        run.kill()
        assert run.communicate(timeout=LIMIT)[0] == 'torn down\n'
    assert not runs(service)


def environment():
    """Return our environment without xdist's, since the run is separate."""
    return {**{name: value for name, value in os.environ.items()
               if not name.startswith('PYTEST_XDIST')},
            'PYTHONPATH': str(TOP)}


@pytest.mark.slow
@pytest.mark.parametrize('processes, seconds', [
    ('0', 0), pytest.param('1', 17, marks=pytest.mark.long)])
def test_slow_fixtures(tmp_path, processes, seconds):
    """An interrupted run tears its fixtures down, however long that takes.

    xdist alone would give its processes 15 seconds.
    """
    (tmp_path / 'conftest.py').write_text(
        'from tests.conftest import *  # noqa: F401,F403\n')
    (tmp_path / 'test_it.py').write_text(textwrap.dedent(f"""
        import pathlib, time
        import pytest

        @pytest.fixture(scope='session')
        def service():
            yield
            time.sleep({seconds})
            pathlib.Path('down').touch()

        def test_it(service):
            pathlib.Path('up').write_text('1')
            while True:
                time.sleep(0.1)
        """))
    with subprocess.Popen(
            [sys.executable, '-m', 'tests.supervisor', sys.executable, '-m',
             'pytest', '-q', '-n', processes, '--rootdir', tmp_path],
            cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
            env=environment()) as run:
        number(tmp_path / 'up')
        run.terminate()
        said, _ = run.communicate(timeout=LIMIT)
    assert (tmp_path / 'down').exists(), said
    assert run.returncode == 2, said
