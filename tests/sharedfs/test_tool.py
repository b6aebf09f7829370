# SPDX-License-Identifier: Apache-2.0

"""tools/shared starts, repairs and ends real shared file systems."""

import os
import pathlib
import re
import subprocess
import tempfile

import pytest

from tests.cloud import live_process
from tests.sharedfs import shared_fs
from tests.support import repositories

TOP = pathlib.Path(__file__).resolve().parents[2]
TOOL = TOP / 'tools' / 'shared'
# Seconds. For a loaded machine, and for installations.
LIMIT = 600

pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(2 * LIMIT),
    pytest.mark.needs('juicefs')]


@pytest.fixture
def place():
    """A directory for a file system; the test leaves nothing of it."""
    with tempfile.TemporaryDirectory(prefix='shared-') as parent:
        directory = pathlib.Path(parent, 'fs')
        yield directory
        for process in live_process.marked(directory):
            process.kill()
        for path in shared_fs.mounts():
            if pathlib.Path(path).is_relative_to(directory):
                subprocess.run(['umount', '--lazy', path], timeout=60,
                               check=True)


def tool(*words, status=0):
    """Run tools/shared; return its output."""
    result = subprocess.run(
        [TOOL, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=LIMIT)
    assert result.returncode == status, result.stdout
    return result.stdout


def nothing_is_left(directory):
    return (not directory.exists() and not live_process.marked(directory)
            and not any(pathlib.Path(path).is_relative_to(directory)
                        for path in shared_fs.mounts()))


@pytest.mark.parametrize('kind', [
    'juicefs',
    pytest.param('gluster', marks=[
        pytest.mark.long, pytest.mark.needs('gluster', 'network')]),
    pytest.param('ceph', marks=[
        pytest.mark.long, pytest.mark.needs('ceph', 'network')])])
def test_life(place, kind):
    """A file system starts, works, loses a host, is repaired, and ends."""
    said = tool('up', kind, '--directory', place)
    one, two = re.findall(r'^  (/.*)$', said, re.M)
    pathlib.Path(one, 'word').write_text('from one')
    assert pathlib.Path(two, 'word').read_text() == 'from one'
    assert os.stat(one).st_dev != os.stat(two).st_dev
    assert 'runs already' in tool('up', kind, '--directory', place)
    shown = tool('status', '--directory', place)
    assert set(re.findall(r'^(?!service)\S+ +(\S+)', shown, re.M)) == {'up'}

    pid = int(re.search(r'^two +up +(\d+)', shown, re.M)[1])
    for process in live_process.marked(place):
        if process.session() == pid:
            process.kill()
    # The mount is broken.
    repositories.eventually(lambda: not os.path.exists(f'{two}/word'), 60)
    assert re.search(r'^two +down', tool(
        'status', '--directory', place, status=1), re.M)
    tool('up', kind, '--directory', place)
    assert pathlib.Path(two, 'word').read_text() == 'from one'

    tool('down', '--directory', place)
    assert nothing_is_left(place)
    assert 'there is no shared file system' in tool(
        'status', '--directory', place, status=1)


@pytest.mark.long
def test_life_of_nfs(place):
    """An NFS file system starts, with its mounts in the guest, and ends."""
    said = tool('up', 'nfs', '--directory', place)
    one, two = re.findall(r'^  (/.*)$', said, re.M)
    run = ['run', '--directory', place, 'sh', '-c']
    tool(*run, f'echo from one >{one}/word')
    assert tool(*run, f'cat {two}/word') == 'from one\n'
    # Frames of this machine with several segments arrive.
    tool(*run, f'head -c 64M /dev/urandom >{one}/large; '
         f'timeout 30 cmp {one}/large {two}/large')
    assert len(set(tool(*run, f'stat -c %d {one} {two}').split())) == 2
    tool(*run, 'exit 3', status=3)
    assert 'runs already' in tool('up', 'nfs', '--directory', place)
    pid = int(re.search(r'^guest +up +(\d+)', tool(
        'status', '--directory', place), re.M)[1])
    for process in live_process.marked(place):
        if process.session() == pid:
            process.kill()
    assert re.search(r'^guest +down', tool(
        'status', '--directory', place, status=1), re.M)
    tool('up', 'nfs', '--directory', place)
    assert tool(*run, f'cat {two}/word') == 'from one\n'
    tool('down', '--directory', place)
    assert nothing_is_left(place)


def test_killed_up(place):
    """Down cleans up after an `up` that was killed in the middle."""
    with subprocess.Popen(
            [TOP / '.venv/bin/python', '-m', 'tests.sharedfs', 'up',
             'juicefs', '--directory', place], cwd=TOP,
            stdout=subprocess.PIPE, text=True) as up:
        for line in up.stdout:
            if 'mount of host two' in line:
                up.kill()
    tool('down', '--directory', place)
    assert nothing_is_left(place)


#: Interrupts itself at the first check of a mount.
INTERRUPTED = """
import os, signal
from tests.sharedfs import __main__ as tool
from tests.sharedfs import shared_fs

def answers(self):
    os.kill(os.getpid(), signal.SIGINT)

shared_fs.Mount.answers = answers
raise SystemExit(tool.main())
"""


def test_interrupted_up(place):
    """Ctrl-C prints the command that cleans up."""
    up = subprocess.run(
        [TOP / '.venv/bin/python', '-c', INTERRUPTED, 'up', 'juicefs',
         '--directory', place], cwd=TOP, stdout=subprocess.PIPE, text=True,
        timeout=LIMIT)
    assert 'tools/shared down ends and removes all' in up.stdout
    assert up.returncode == 130
    tool('down', '--directory', place)
    assert nothing_is_left(place)


def test_in_use(place):
    """Nothing is removed through a mount that stays."""
    said = tool('up', 'juicefs', '--directory', place)
    one = re.search(r'^  (/.*)$', said, re.M)[1]
    inner = pathlib.Path(one, 'inner')
    inner.mkdir()
    subprocess.run(['mount', '-t', 'tmpfs', 'tmpfs', inner], check=True,
                   timeout=60)
    (inner / 'precious').touch()
    try:
        assert 'still mounted' in tool('down', '--directory', place, status=2)
        assert (inner / 'precious').exists()
    finally:
        subprocess.run(['umount', '--lazy', inner], check=False, timeout=60)
    tool('down', '--directory', place)
    assert nothing_is_left(place)


def test_foreign_directory(place):
    """A directory that is no shared file system's is left alone."""
    place.mkdir()
    (place / 'precious').touch()
    assert 'no shared file system' in tool(
        'up', 'juicefs', '--directory', place, status=2)
    tool('down', '--directory', place)
    assert (place / 'precious').exists()


def test_words():
    """The tool prints its help, and errors for wrong commands."""
    assert 'tools/shared up' in tool('--help')
    assert 'see tools/shared --help' in tool('fly', status=2)
    assert "unknown file system 'cloth'" in tool('up', 'cloth', status=2)
