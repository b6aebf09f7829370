# SPDX-License-Identifier: Apache-2.0

"""Cold groups whose file, object or slices are wrong in some way.

Reading gives the right bytes or an error that names the file: no other bytes,
no crash, and no endless wait. Damage to this host's slices is no damage to the
repository.
"""

import contextlib
import os
import shutil
import struct

import pytest
import xxhash

from dedupd.tasks import collector
from dedupd.tasks import scrubber
from dedupd.tasks import tierer
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from tests.support import bucket
from tests.support import repositories

pytestmark = pytest.mark.slow

BLOCK, SLOTS = 512, 64
LIMIT = 60
CONTENTS = {'one': repositories.noise(SLOTS * BLOCK, 1),
            'two': repositories.noise(SLOTS * BLOCK, 2)}
DAMAGE = exceptions.DamagedError
AWAY = exceptions.UnavailableError


@pytest.fixture(scope='module')
def template(tmp_path_factory):
    """A repository with two groups, both cold."""
    top = tmp_path_factory.mktemp('cold')
    path = repositories.create(top / 'repository', block_size=BLOCK,
                               group_slots=SLOTS, segment_size=4096)
    with bucket.beside(path), repositories.open_repository(path) as repo:
        bucket.attach(repo)
        for name, data in CONTENTS.items():
            repositories.put(repo, name, data)
        with maintainer_role.Maintainer(repo) as maintainer:
            collector.run_once(maintainer, pacing.Pace())
            assert tierer.run_once(maintainer, pacing.Pace(), tierer.Policy(
                everything=True)).groups == 2
    return top


@pytest.fixture
def path(template, tmp_path):
    shutil.copytree(template, tmp_path / 'top')
    return tmp_path / 'top' / 'repository'


class Cold(repositories.Group):
    """The file of a cold group, which can be written with right checksums."""

    def header(self, offset, content):
        """Change the header, and with it the seed of all checksums."""
        self.data[offset:offset + len(content)] = content
        self.data[504:512] = struct.pack('<Q', xxhash.xxh3_64_intdigest(
            bytes(self.data[:504])))

    def change_records(self, change):
        """Change each valid record, by a function of its fields."""
        for record in self.records():
            self.write_record(change(*record))


def read_all(path):
    """Return the result of reading each image: None, or its error."""
    found = {}
    with bucket.beside(path), repositories.open_repository(path) as repo:
        for name, data in CONTENTS.items():
            try:
                assert repositories.read_all(repo, name) == data
                found[name] = None
            except exceptions.RepositoryError as e:
                found[name] = e
    return found


def maintain(path):
    """Run a maintainer's tasks, which must not do harm."""
    with (bucket.beside(path), repositories.open_repository(path) as repo,
          maintainer_role.Maintainer(repo) as maintainer):
        for _ in range(2):
            result = scrubber.run_once(maintainer, pacing.Pace(), full=True,
                                       cold_budget=100 << 20)
            for work in (
                    lambda: collector.run_once(maintainer, pacing.Pace()),
                    lambda: tierer.run_once(
                        maintainer, pacing.Pace(),
                        tierer.Policy(everything=True, live_share=100))):
                with contextlib.suppress(exceptions.UnavailableError,
                                         exceptions.InvalidParameter):
                    work()
        return (result.found, sorted(result.images),
                sorted(result.unreadable), maintainer.catalog.damaged())


def judge(path, kind):
    """Require this error of the first image; the other one is whole.

    Tasks do not change this.
    """
    found = repositories.in_child(lambda: read_all(path), LIMIT)
    assert found['two'] is None
    error = found['one']
    assert (error is None if kind is None else isinstance(error, kind)), error
    if kind is not None:
        assert any(name in str(error) for name in (
            'groups/00000001', '/g/00000001-', '/slices/')), error
    report = repositories.in_child(lambda: maintain(path), LIMIT)
    if kind is DAMAGE:
        assert report[0] or report[1] == ['one'], report
    else:
        assert report[0] == 0 and report[3] == {}, report
        assert not os.listdir(path / 'quarantine')
    again = repositories.in_child(lambda: read_all(path), LIMIT)
    assert again['two'] is None and (kind is not None or again['one'] is None)


# -- the group's file ---------------------------------------------------------

def test_nothing_is_wrong(path):
    judge(path, None)


def test_no_object(path):
    file = Cold(path, 1)
    file.header(88, bytes(16))
    file.save()
    judge(path, DAMAGE)


def test_another_object(path):
    """A header that names another object is damage."""
    file = Cold(path, 1)
    file.header(88, b'x' * 16)
    file.save()
    judge(path, DAMAGE)


@pytest.mark.parametrize('end', [
    0, 1, 4096, 1 << 32, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
def test_an_end_that_cannot_be(path, end):
    file = Cold(path, 1)
    file.change_records(lambda *record: (*record[:4], end))
    file.save()
    judge(path, (DAMAGE, AWAY) if end == 1 << 32 else DAMAGE)


@pytest.mark.parametrize('more', [-1000, -1, 1, 1000, 1 << 20, 1 << 30])
def test_an_end_that_is_wrong(path, more):
    """A record of a shorter object is damage; a longer one is unavailable."""
    file = Cold(path, 1)
    file.change_records(lambda *record: (*record[:4], record[4] + more))
    file.save()
    judge(path, DAMAGE if more < 0 else AWAY)


@pytest.mark.parametrize('count', [0, 1, SLOTS - 1])
def test_slots_that_are_not_published(path, count):
    file = Cold(path, 1)
    file.change_records(lambda *record: (*record[:2], count, *record[3:]))
    file.save()
    judge(path, DAMAGE)


def test_an_entry_behind_the_end(path):
    file = Cold(path, 1)
    fingerprint, checksum, _, place = file.entry(5)
    file.write_entry(5, fingerprint, checksum, 0xfffff000, place)
    file.save()
    judge(path, DAMAGE)


def test_a_file_that_is_longer(path):
    with open(path / 'groups' / '00000001', 'ab') as f:
        f.write(b'\xff' * 5000)
    judge(path, None)


@pytest.mark.parametrize('length', [0, 100, 512, 1024, 2048, 4096, -1])
def test_a_file_that_is_shorter(path, length):
    file = path / 'groups' / '00000001'
    os.truncate(file, length if length >= 0 else file.stat().st_size - 1)
    judge(path, None if length == -1 else DAMAGE)


# -- the object ---------------------------------------------------------------

def object_of(path, number):
    (found,) = (path.parent / 'bucket').glob(f'*+g+{number:08x}-*')
    return found


def test_an_object_of_another_group(path):
    shutil.copy(object_of(path, 2), object_of(path, 1))
    judge(path, DAMAGE)


def test_an_object_that_is_shorter(path):
    os.truncate(object_of(path, 1), 20000)
    judge(path, AWAY)


def test_an_object_that_is_longer(path):
    with open(object_of(path, 1), 'ab') as f:
        f.write(b'\xff' * 5000)
    found = repositories.in_child(lambda: read_all(path), LIMIT)
    assert found == {'one': None, 'two': None}


def test_an_object_that_is_gone(path):
    object_of(path, 1).unlink()
    judge(path, AWAY)


# -- slices -------------------------------------------------------------------

def slice_of(path):
    """Return the first slice of group 1, which exists."""
    assert repositories.in_child(lambda: read_all(path), LIMIT) == {
        'one': None, 'two': None}
    object_id = object_of(path, 1).name[-32:]
    return path / 'slices' / object_id / '00000000'


@pytest.mark.parametrize('content', [
    lambda data: b'', lambda data: data[:-1], lambda data: data + b'x',
    lambda data: bytes(len(data)), lambda data: data[::-1],
    lambda data: bytes(1 << 21)])
def test_a_slice_of_wrong_bytes(path, content):
    file = slice_of(path)
    file.write_bytes(content(file.read_bytes()))
    judge(path, None)


@pytest.mark.parametrize('make', [
    lambda file: os.mkfifo(file), lambda file: os.symlink('/dev/zero', file),
    lambda file: os.symlink('nothing', file),
    lambda file: os.symlink(file, file),
    lambda file: os.symlink(shutil.copy('/etc/passwd', f'{file}.x'), file)])
def test_a_slice_that_is_no_file(path, make):
    file = slice_of(path)
    file.unlink()
    make(file)
    judge(path, None)


def test_a_slice_that_is_a_directory(path):
    file = slice_of(path)
    file.unlink()
    (file / 'more').mkdir(parents=True)
    found = repositories.in_child(lambda: read_all(path), LIMIT)
    assert isinstance(found['one'], AWAY) and 'slices/' in str(found['one'])
    judge(path, AWAY)


@pytest.mark.parametrize('make', [
    lambda place: place.touch(), lambda place: os.mkfifo(place),
    lambda place: os.symlink(place, place),
    lambda place: os.symlink('nothing', place)])
def test_a_directory_of_slices_that_is_none(path, make):
    place = slice_of(path).parent
    shutil.rmtree(place)
    make(place)
    judge(path, AWAY)


def test_no_directory_for_slices(path):
    """The next program that opens the repository makes the cache again."""
    shutil.rmtree(path / 'slices')
    with bucket.beside(path), repositories.open_repository(path) as repo:
        assert repositories.read_all(repo, 'one')
