# SPDX-License-Identifier: Apache-2.0

"""The file with a repository's keys, and its change."""

import contextlib
import hashlib
import hmac
import os
import re
import signal
import threading

import pytest

from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import signingkeys
from glance_dedup.check import checker
from tests.support import repositories


@pytest.fixture
def path(tmp_path):
    return repositories.create(tmp_path / 'r')


def read(path):
    return signingkeys.read(str(path / 'key'))


def test_a_new_repository_has_one_key(path, tmp_path):
    keys = read(path)
    assert len(keys.current) == 32 and keys.previous is None
    assert keys.accepted == (keys.current,)
    other = repositories.create(tmp_path / 'other')
    assert read(other) != keys


def test_a_change(path):
    old = read(path).current
    with repositories.open_repository(path) as repo:
        begun = signingkeys.begin_change(str(path))
        assert begun.previous == old != begun.current
        # A process that has the repository open reads the new keys.
        assert read(path) == repo.read_keys() == begun
        assert checker.check(path).ok
        with pytest.raises(exceptions.InvalidParameter, match='--finish'):
            signingkeys.begin_change(str(path))
        finished = signingkeys.finish_change(str(path))
        assert finished == read(path) == repo.read_keys()
        assert finished.accepted == (begun.current,)
        assert old.hex().encode() not in (path / 'key').read_bytes()
        assert checker.check(path).ok
        with pytest.raises(exceptions.InvalidParameter, match='no change'):
            signingkeys.finish_change(str(path))


def test_the_file_keeps_its_mode_and_leaves_no_other(path):
    before = os.stat(path / 'key').st_mode, sorted(os.listdir(path))
    signingkeys.begin_change(str(path))
    signingkeys.finish_change(str(path))
    assert (os.stat(path / 'key').st_mode, sorted(os.listdir(path))) == before


@pytest.mark.parametrize('change', [False, True])
def test_every_damage_is_noticed(path, change):
    if change:
        signingkeys.begin_change(str(path))
    content = (path / 'key').read_bytes()
    damaged = [content[:length] for length in range(len(content))]
    damaged += [content + b'\n', content * 2, content.upper(), b'x' * 5000]
    damaged += [content[:at] + bytes([content[at] ^ 1]) + content[at + 1:]
                for at in range(len(content))]
    for one in damaged:
        (path / 'key').write_bytes(one)
        with pytest.raises(exceptions.DamagedError, match='key is damaged'):
            read(path)


def test_a_file_that_is_gone(path):
    (path / 'key').unlink()
    for work in signingkeys.begin_change, signingkeys.finish_change:
        with pytest.raises(exceptions.StorageError, match=re.escape(
                f'there is no file {path}/key: restore this one file')):
            work(str(path))
    with pytest.raises(exceptions.StorageError, match='restore this one file'):
        read(path)


@pytest.mark.parametrize('how', ['gone', 'directory', 'link', 'fifo'])
def test_what_is_no_file(path, how):
    """A key that is no regular file never counts as an absent image (I13)."""
    (path / 'key').unlink()
    if how == 'directory':
        (path / 'key').mkdir()
    elif how == 'link':
        (path / 'key').symlink_to('repository.json')
    elif how == 'fifo':
        os.mkfifo(path / 'key')
    with pytest.raises((exceptions.DamagedError, exceptions.StorageError)):
        read(path)
    for work in signingkeys.begin_change, signingkeys.finish_change:
        with pytest.raises((exceptions.DamagedError,
                            exceptions.StorageError)):
            work(str(path))


def test_two_changes_at_the_same_time(path):
    with signingkeys.locked(str(path)) as keys:
        for work in signingkeys.begin_change, signingkeys.finish_change:
            with pytest.raises(exceptions.BusyError, match='try again'):
                work(str(path))
        assert read(path) == keys
    begun = []
    barrier = threading.Barrier(8)

    def change():
        barrier.wait(60)
        with contextlib.suppress(exceptions.BusyError,
                                 exceptions.InvalidParameter):
            begun.append(signingkeys.begin_change(str(path)))

    threads = [threading.Thread(target=change) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert begun == [read(path)] and begun[0].previous == keys.current


@pytest.mark.parametrize('after', [False, True])
@pytest.mark.parametrize('step', [
    (signingkeys.access, 'make_file'), (files, '_fill'), (os, 'rename'),
    (files, 'sync_directory')], ids=lambda step: step[1])
@pytest.mark.parametrize('work', [
    signingkeys.begin_change, signingkeys.finish_change])
def test_kill_9_at_every_step(path, work, step, after):
    """After a kill, the old keys or the new ones are there (I13).

    The next run completes the change.
    """
    if work is signingkeys.finish_change:
        signingkeys.begin_change(str(path))
    before = read(path)
    child = os.fork()
    if not child:
        module, name = step
        real = getattr(module, name)

        def killed(*arguments):
            if after:
                real(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(module, name, killed)
        with contextlib.suppress(BaseException):
            work(str(path))
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    found = read(path)
    renamed = step[1] == 'sync_directory' or (step[1], after) == (
        'rename', True)
    assert (found == before) != renamed
    if work is signingkeys.begin_change:
        assert before.current in found.accepted
    else:
        assert found.current == before.current
    if not renamed:
        found = work(str(path))
    assert (found.previous is None) == (work is signingkeys.finish_change)
    assert checker.check(path).ok


def test_the_key_of_manifests_follows_rfc_5869():
    """The key equals HKDF-Expand's result and differs from a plain HMAC."""
    key = bytes(range(32))
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf import hkdf

    assert signingkeys.manifest_key(key) == hkdf.HKDFExpand(
        hashes.SHA256(), 32, b'glance-dedup manifest 2').derive(key)
    assert signingkeys.manifest_key(key) != hmac.new(
        key, b'glance-dedup manifest 2', hashlib.sha256).digest()
