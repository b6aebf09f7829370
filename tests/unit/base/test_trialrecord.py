# SPDX-License-Identifier: Apache-2.0

"""A repository's record of trials, and its consequences."""

import os
import socket

import pytest

from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import trialrecord
from glance_dedup.check import checker
from tests.support import repositories

FILE = trialrecord.NAME


@pytest.fixture
def root(tmp_path):
    return str(repositories.create(tmp_path / 'repository'))


def other(number):
    return trialrecord.Mount(f'host-{number}', '/srv', 'nfs4', 'rw,vers=4.2',
                             '6.1.0')


def write(root, mounts, limited=(), unfit=()):
    trialrecord.write(root, mounts, '1.0', limited, unfit)


def test_results_are_kept_by_host(root):
    assert trialrecord.look(root) == trialrecord.Result('not tried')
    mine = trialrecord.mount_of(root)
    assert mine.host == socket.gethostname() and mine.kind and mine.options
    write(root, [mine, other(1)], limited=['holes'])
    found = trialrecord.look(root)
    assert (found.verdict, found.limited) == ('limited', ('holes',))
    assert found.is_valid and found.time > 1e9
    write(root, [other(1), other(2)], unfit=['locks'])
    assert trialrecord.look(root) == found
    assert {(trial.mount.host, trial.verdict)
            for trial in trialrecord.read(root)} == {
        (mine.host, 'limited'), ('host-1', 'not fine'),
        ('host-2', 'not fine')}
    assert os.stat(os.path.join(root, FILE)).st_mode & 0o777 == 0o600
    assert not checker.check(root).findings


@pytest.mark.parametrize('field', ['kind', 'options', 'kernel'])
def test_another_mount_was_not_tried(root, field):
    mine = vars(trialrecord.mount_of(root))
    write(root, [trialrecord.Mount(**{**mine, field: 'other'})],
          unfit=['locks'])
    found = trialrecord.look(root)
    assert found.verdict == 'changed since its trial' and not found.is_valid
    repositories.open_repository(root).close()


def test_a_mount_that_is_not_fine_is_refused(root):
    write(root, [other(1), trialrecord.mount_of(root)], limited=['holes'],
          unfit=['locks exclude other hosts', 'rename'])
    with pytest.raises(exceptions.UnfitFileSystem) as raised:
        repositories.open_repository(root)
    for words in (root, 'locks exclude other hosts; rename',
                  'test-filesystem'):
        assert words in str(raised.value)
    assert 'holes' not in str(raised.value)
    write(root, [trialrecord.mount_of(root)])
    repositories.open_repository(root).close()


def test_only_the_last_hosts_are_kept(root):
    write(root, [trialrecord.mount_of(root)])
    for first in 0, 200:
        write(root, [other(first + i) for i in range(200)])
    assert {trial.mount.host for trial in trialrecord.read(root)} >= {
        f'host-{number}' for number in range(200, 400)}
    assert len(trialrecord.read(root)) == 256


def test_clientaddr_is_no_option(root, monkeypatch):
    """The clientaddr option is ignored, since it may change at each mount."""
    found = trialrecord.filesystem.mount_of(root)
    options = frozenset({'rw', 'clientaddr=192.0.2.1'})
    monkeypatch.setattr(
        trialrecord.filesystem, 'mount_of',
        lambda path: trialrecord.filesystem.Mount(found.kind, found.place,
                                                  options))
    assert trialrecord.mount_of(root).options == 'rw'


GOOD = dict(host='a', place='/', kind='ext4', options='rw', kernel='6.1',
            version='1', time=1.5, limited=['x'], unfit=[])


@pytest.mark.parametrize('changed', [
    {'host': 1}, {'place': None}, {'options': ['rw']}, {'kernel': 'x' * 5000},
    {'time': '1'}, {'time': -1}, {'time': True}, {'time': 1e300},
    {'limited': 'x'}, {'limited': [1]}, {'unfit': None}, {'other': 1}],
    ids=str)
def test_hostile_entries(root, changed):
    trialrecord.decode(files.pack_json(trialrecord.KIND, hosts=[GOOD]))
    content = files.pack_json(trialrecord.KIND, hosts=[{**GOOD, **changed}])
    with pytest.raises(ValueError):
        trialrecord.decode(content)


@pytest.mark.parametrize('content', [
    b'', b'{', b'[]', b'[' * 100000, b'\xff', bytes(2 << 20)],
    ids=lambda content: str(content[:9]))
def test_an_invalid_file_counts_as_none(root, content):
    with open(os.path.join(root, FILE), 'wb') as f:
        f.write(content)
    assert trialrecord.look(root).verdict == 'not tried'
    repositories.open_repository(root).close()
    write(root, [trialrecord.mount_of(root)])
    assert trialrecord.look(root).verdict == 'fine'


def test_a_fifo_in_its_place(root):
    os.mkfifo(os.path.join(root, FILE))
    assert trialrecord.look(root).verdict == 'not tried'
