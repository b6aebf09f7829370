# SPDX-License-Identifier: Apache-2.0

"""Files on which another program has a lease, as Samba and knfsd take.

If a process opens such a file, the kernel notifies the lease holder and blocks
the opener until the holder gives the lease back. In these tests, another
process holds the leases.
"""

import contextlib
import os
import subprocess
import sys
import threading

import pytest

from glance_dedup.adoption import estimate
from glance_dedup.base import access
from glance_dedup.base import files
from glance_dedup.base import inputs
from glance_dedup.check import checker
from glance_dedup.repository import image_repository
from tests.support import repositories

_HOLDER = '''
import fcntl, os, signal, sys, time
fd = os.open(sys.argv[1], os.O_RDWR)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])
try:
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
except OSError as e:
    print(e, flush=True)
    sys.exit()
print('leased', flush=True)
if signal.sigtimedwait([signal.SIGIO], 60):
    time.sleep(0.2)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    print('asked', flush=True)
'''


@contextlib.contextmanager
def leased(path):
    """Hold a lease in another process, which gives it back on request."""
    with subprocess.Popen([sys.executable, '-c', _HOLDER, path],
                          stdout=subprocess.PIPE, text=True) as holder:
        try:
            answer = holder.stdout.readline().strip()
            if answer != 'leased':
                pytest.skip(f'no leases on this file system: {answer}')
            yield
            assert holder.stdout.readline().strip() == 'asked'
        finally:
            holder.kill()


@pytest.fixture
def store(tmp_path):
    """A repository with one image, which no process has open."""
    path = str(tmp_path / 'repository')
    image_repository.Repository.create(path)
    data = os.urandom(100000)
    with image_repository.Repository(path) as opened:
        repositories.put(opened, 'image', data)
    return path, data


@pytest.mark.parametrize('name', ['groups/00000001', 'images/image',
                                  'locks/groups'])
def test_reading_an_image(store, name):
    path, data = store
    with leased(f'{path}/{name}'):
        with image_repository.Repository(path) as opened:
            assert repositories.read_all(opened, 'image') == data


def test_storing_an_image(store):
    path, data = store
    with leased(f'{path}/groups/00000001'):
        with image_repository.Repository(path) as opened:
            repositories.put(opened, 'other', data)
            assert opened.statistics()['hits']


@pytest.mark.parametrize('name', ['groups/00000001', 'images/image',
                                  'repository.json', 'key'])
def test_check(store, name):
    path, _ = store
    with leased(f'{path}/{name}'):
        assert not checker.check(path).findings


def estimated(path):
    assert not estimate.estimate([path], estimate.Options()).unreadable


@pytest.mark.parametrize('read', [
    lambda path: files.read_file(path, 100),
    lambda path: os.close(access.open_file(path, os.O_RDWR)),
    lambda path: inputs.InputFile(path).close(),
    estimated,
], ids=['small', 'any', 'image', 'estimated'])
def test_other_files(tmp_path, read):
    path = str(tmp_path / 'file')
    with open(path, 'wb') as f:
        f.write(bytes(5000))
    with leased(path):
        read(path)


def test_a_fifo_is_not_waited_for(tmp_path):
    path = str(tmp_path / 'fifo')
    os.mkfifo(path)
    done = threading.Event()

    def open_it():
        os.close(access.open_file(path, os.O_RDONLY))
        done.set()
    threading.Thread(target=open_it, daemon=True).start()
    assert done.wait(30)
