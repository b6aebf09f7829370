# SPDX-License-Identifier: Apache-2.0

"""Benchmarks limit the memory of their commands, or say that they cannot."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.benchmarks import papers

pytestmark = pytest.mark.long

MIB = 1 << 20
LIMIT = 48 * MIB
#: Takes so many MiB, and prints them.
TAKE = 'import sys; n = int(sys.argv[1]) << 20; print(len(b"x" * n) >> 20)'
#: Says whether memory can be limited.
ASK = ('import memorylimit\n'
       'with memorylimit.limited(1 << 30): print("limited")')


memorylimit = papers.fixture('memorylimit')


def take(prefix, mib):
    return subprocess.run([*prefix, sys.executable, '-c', TAKE, str(mib)],
                          capture_output=True, text=True, timeout=60)


@pytest.fixture
def prefix(memorylimit):
    try:
        with memorylimit.limited(LIMIT) as found:
            yield found
    except SystemExit as e:
        pytest.skip(str(e))


def test_a_command_within_the_limit(prefix):
    assert take(prefix, 10).stdout == '10\n'


def test_a_command_that_takes_more_is_killed(prefix):
    assert take(prefix, 100).returncode == -signal.SIGKILL
    assert take([], 100).stdout == '100\n'


def test_the_page_cache_counts(prefix, tmp_path):
    """Of a file that is larger than the limit only a part stays cached."""
    path = tmp_path / 'file'
    path.write_bytes(bytes(2 * LIMIT))
    os.sync()
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    subprocess.run([*prefix, 'cat', path], stdout=subprocess.DEVNULL,
                   check=True, timeout=60)
    group = pathlib.Path(prefix[-1]).parent
    usage = next(path for path in (group / 'memory.usage_in_bytes',
                                   group / 'memory.current') if path.exists())
    assert 0 < int(usage.read_text()) <= LIMIT


def test_nothing_is_left(memorylimit):
    try:
        with memorylimit.limited(LIMIT) as prefix:
            group = pathlib.Path(prefix[-1]).parent
            assert group.exists()
    except SystemExit as e:
        pytest.skip(str(e))
    assert not group.exists()


def test_without_a_limit(memorylimit):
    with memorylimit.limited(0) as prefix:
        assert prefix == []


@pytest.mark.parametrize('prefix, words', [
    (['unshare', '--mount', 'sh', '-c',
      'umount --lazy --all --types cgroup,cgroup2 && exec "$@"', 'sh'],
     'no cgroup file system has the memory controller'),
    (['setpriv', '--reuid=65534', '--clear-groups'], 'Permission denied')])
def test_it_is_refused(prefix, words):
    if os.geteuid() != 0:
        pytest.skip('only root may change its user')
    done = subprocess.run([*prefix, sys.executable, '-c', ASK],
                          cwd=papers.FOLDER, capture_output=True, text=True,
                          timeout=60)
    if 'unshare' in done.stderr or 'umount' in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 1
    assert 'memory cannot be limited here: ' in done.stderr
    assert words in done.stderr
