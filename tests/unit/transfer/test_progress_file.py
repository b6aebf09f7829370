# SPDX-License-Identifier: Apache-2.0
"""replication.json records the images on their way to another site."""

import json
import os
import stat
import subprocess
import sys

import hypothesis
from hypothesis import strategies
import pytest

from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.transfer import progress_file
from tests.support import repositories

SITE = 'http://glance.example:9292/v2'


@pytest.fixture
def repo(tmp_path):
    path = repositories.create(tmp_path / 'repository')
    with repositories.open_repository(path) as repo:
        yield repo


def path_of(repo):
    return os.path.join(repo.path, progress_file.NAME)


def write(repo, content):
    with open(path_of(repo), 'wb') as f:
        f.write(content)


def test_from_begin_to_end(repo):
    one = progress_file.Underway(repo, SITE)
    assert one.entries() == {} and not os.path.exists(path_of(repo))
    one.begin('a')
    one.begin('b')
    one.recorded('a')
    one.located('a', 'dedup://where')
    # A new beginning or record keeps the location.
    one.begin('a')
    one.recorded('a')
    assert one.entries() == {
        'a': progress_file.Entry('a', SITE, True, 'dedup://where'),
        'b': progress_file.Entry('b', SITE, False)}
    other = progress_file.Underway(repo, SITE + '/other')
    assert other.entries() == {}
    other.begin('a')
    other.end('a')
    one.end('a')
    one.end('a')
    assert list(one.entries()) == ['b']
    assert stat.S_IMODE(os.stat(path_of(repo)).st_mode) == 0o600
    assert not os.path.exists(path_of(repo) + '.new')


def test_many_processes(repo):
    """Several processes write their records without losing any."""
    code = (
        'import sys\n'
        'from glance_dedup.repository import image_repository\n'
        'from glance_dedup.transfer import progress_file\n'
        'repo = image_repository.Repository(sys.argv[1], '
        'filter_dir=sys.argv[2])\n'
        f'one = progress_file.Underway(repo, {SITE!r})\n'
        'for n in range(20):\n'
        '    name = f"{sys.argv[3]}-{n}"\n'
        '    one.begin(name); one.recorded(name)\n'
        '    if n % 2:\n'
        '        one.end(name)\n')
    processes = [subprocess.Popen(
        [sys.executable, '-c', code, repo.path, str(repo.path) + '.filter',
         f'process-{number}']) for number in range(4)]
    assert [process.wait(120) for process in processes] == [0] * 4
    found = progress_file.Underway(repo, SITE).entries()
    assert sorted(found) == sorted(
        f'process-{number}-{n}' for number in range(4)
        for n in range(0, 20, 2))
    assert all(entry.recorded for entry in found.values())


def test_replaced_before_it_is_locked(repo, monkeypatch):
    """A lock on a file that was replaced meanwhile is taken again."""
    one, other = progress_file.Underway(repo, SITE), progress_file.Underway(
        repo, SITE)
    one.begin('a')
    todo = [lambda: other.begin('b')]
    real = progress_file.filesystem.lock

    def lock(*args):
        if todo:
            todo.pop()()
        return real(*args)
    monkeypatch.setattr(progress_file.filesystem, 'lock', lock)
    one.begin('c')
    assert list(one.entries()) == ['a', 'b', 'c']


def test_another_one_holds_the_lock(repo, monkeypatch):
    monkeypatch.setattr(progress_file, '_LOCK_SECONDS', 0.2)
    one = progress_file.Underway(repo, SITE)
    one.begin('a')
    fd = one._open_locked()
    with pytest.raises(exceptions.BusyError, match='replication.json locked'):
        one.end('a')
    # Reading needs no lock.
    assert list(one.entries()) == ['a']
    os.close(fd)
    one.end('a')
    assert one.entries() == {}


def test_too_many(repo, monkeypatch):
    monkeypatch.setattr(progress_file, 'MAX_COUNT', 3)
    one = progress_file.Underway(repo, SITE)
    for name in 'abc':
        one.begin(name)
    one.begin('c')
    with pytest.raises(exceptions.BusyError, match='has 3 images that could'):
        one.begin('d')
    one.end('a')
    one.begin('d')


def test_the_file_of_the_most_images_can_be_read():
    entries = [progress_file.Entry('i' * 124 + f'{n:04}', 's' * 500, False,
                                   'l' * 512)
               for n in range(progress_file.MAX_COUNT)]
    content = progress_file.encode(entries)
    assert len(content) <= progress_file.MAX_SIZE
    assert progress_file.decode(content) == entries


def test_a_crash_while_it_is_written(repo):
    one = progress_file.Underway(repo, SITE)
    one.begin('a')
    with open(path_of(repo) + '.new', 'wb') as f:
        f.write(b'{"kind')
    assert list(one.entries()) == ['a']
    one.begin('b')
    assert list(one.entries()) == ['a', 'b']


def signed(**fields):
    fields = {'kind': 'glance-dedup replication', 'version': 1, **fields}
    fields['checksum'] = files.json_checksum(fields)
    return json.dumps(fields).encode()


def entry(**fields):
    return {'image_id': 'a', 'site': SITE, 'recorded': True, **fields}


@pytest.mark.parametrize('content, why', [
    (b'{', 'Expecting'), (b'[]', 'not a list of images'),
    (b'null', 'not a list'), (b'\xff', 'codec'),
    (b'[' * 100000, 'not a list of images'),
    (b' ' * (progress_file.MAX_SIZE + 1), 'larger than'),
    (signed(kind='other', images=[]), 'another kind'),
    (signed(version=2, images=[]), 'knows 1'),
    (signed(images=[]).replace(b'"version": 1', b'"version": 1.0'),
     'checksum'),
    (signed(images={}), 'not a list'), (signed(images=[1]), 'not a list'),
    (signed(images=[entry(image_id='../a')]), 'not an image id'),
    (signed(images=[entry(image_id=None)]), 'not an image id'),
    (signed(images=[entry(site='x' * 513)]), 'not a URL'),
    (signed(images=[entry(recorded=1)]), 'neither true'),
    (signed(images=[entry(location=1)]), 'not a location'),
    (signed(images=[entry(location='x' * 513)]), 'not a location'),
    (signed(images=[entry(more=1)]), 'not a list of images'),
])
def test_a_file_that_is_no_good(repo, content, why):
    write(repo, content)
    one = progress_file.Underway(repo, SITE)
    for act in (one.entries, lambda: one.begin('b'), lambda: one.end('b')):
        with pytest.raises(exceptions.DamagedError, match=why) as e:
            act()
        assert path_of(repo) in str(e.value) and 'move' in str(e.value)
    # The file stays unchanged: it may be the only record.
    with open(path_of(repo), 'rb') as f:
        assert f.read() == content


@hypothesis.given(strategies.data())
@hypothesis.settings(max_examples=200, deadline=None)
def test_every_damage_is_noticed(data):
    good = progress_file.encode([progress_file.Entry('a', SITE, True),
                                 progress_file.Entry('b', SITE, False)])
    at = data.draw(strategies.integers(0, len(good) - 1))
    bad = data.draw(strategies.one_of(
        strategies.just(good[:at]),
        strategies.integers(1, 255).map(
            lambda bits: good[:at] + bytes([good[at] ^ bits])
            + good[at + 1:])))
    try:
        found = progress_file.decode(bad)
    except ValueError:
        return
    # White space, and nothing at all, which is a new file.
    assert not bad or found == progress_file.decode(good)


@pytest.mark.parametrize('kind', ['link', 'directory', 'fifo'])
def test_what_is_no_file(repo, kind, tmp_path):
    path = path_of(repo)
    target = tmp_path / 'target'
    target.write_bytes(b'')
    {'link': lambda: os.symlink(target, path),
     'directory': lambda: os.mkdir(path),
     'fifo': lambda: os.mkfifo(path)}[kind]()
    one = progress_file.Underway(repo, SITE)
    for act in (one.entries, lambda: one.begin('b')):
        with pytest.raises(exceptions.RepositoryError,
                           match='replication.json'):
            act()
    assert target.read_bytes() == b''


def test_a_disk_that_fails(repo, monkeypatch):
    """An image is not begun if its record cannot be written."""
    one = progress_file.Underway(repo, SITE)
    one.begin('a')

    def fail(*args):
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(progress_file.files, 'replace_file', fail)
    with pytest.raises(exceptions.StorageError, match='written: No space'):
        one.begin('b')
    monkeypatch.undo()
    assert list(one.entries()) == ['a']
