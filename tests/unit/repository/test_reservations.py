# SPDX-License-Identifier: Apache-2.0

"""What is reserved for uploads that are not committed."""

import contextlib
import os
import threading

import pytest

from glance_dedup.base import exceptions
from glance_dedup.check import checker
from glance_dedup.repository import reservations
from tests.support import repositories


@pytest.fixture
def root(tmp_path):
    return str(repositories.create(tmp_path / 'repository'))


def reserve(root, number, size, project='alice'):
    with reservations.locked(root):
        own = reservations.Reservation(root, project, f'{number:032x}')
        own.set(size)
        return own


def file_of(root, number):
    return os.path.join(root, reservations.DIRECTORY, f'{number:032x}')


def findings(root):
    return [(found.severity, found.file)
            for found in checker.check(root).findings]


def test_each_project_has_its_own(root):
    assert not reservations.exist(root)
    one, two = reserve(root, 1, 10), reserve(root, 2, 20)
    three = reserve(root, 3, 40, 'bob')
    with reservations.locked(root):
        assert (one.others(), two.others(), three.others()) == (20, 10, 0)
        one.set(5)
        assert two.others() == 5
        assert reservations.given_up(root) == set()
        assert findings(root) == []
        for own in one, two, three:
            own.end(0)
    assert not reservations.exist(root)


def test_what_is_given_up_stays(root):
    one, two = reserve(root, 1, 10), reserve(root, 2, 20)
    with reservations.locked(root):
        one.end(7)
        one.end(0)      # once is enough
        assert two.given_up() == two.others() == 7
        assert reservations.given_up(root) == {f'{1:032x}'}
        two.take_over(5)
        assert two.given_up() == 2
        two.take_over(5)
        assert two.given_up() == 0
        reservations.remove(root, f'{1:032x}')      # it is gone already
        two.end(0)
    assert not reservations.exist(root)


@pytest.mark.parametrize('content', [
    b'', b'{', b'[]', b'3', b'{"project": "alice"}', b'\0' * 5000,
    b'{"project": "alice", "bytes": -1}', b'{"project": 1, "bytes": 1}',
    b'{"project": "alice", "bytes": true}',
    b'{"project": "alice", "bytes": 9223372036854775808}'])
def test_invalid_files_count_nothing(root, content):
    own = reserve(root, 1, 10)
    with open(file_of(root, 2), 'wb') as f:
        os.fchmod(f.fileno(), 0o600)
        f.write(content)
    with reservations.locked(root):
        assert own.others() == own.given_up() == 0
        # The next collection removes it.
        assert reservations.given_up(root) == {f'{2:032x}'}
    assert findings(root) == ([] if not content else [
        (checker.NOTE, f'reservations/{2:032x}')])


def test_other_things_in_the_directory(root, tmp_path):
    own = reserve(root, 1, 10)
    os.mkdir(file_of(root, 2))
    os.mkfifo(file_of(root, 3))
    os.symlink('/dev/zero', file_of(root, 4))
    with open(os.path.join(root, reservations.DIRECTORY, 'x'), 'wb'):
        pass
    with reservations.locked(root):
        assert own.others() == own.given_up() == 0
        assert f'{4:032x}' not in reservations.given_up(root)


def test_the_lock_is_waited_for(root, monkeypatch):
    inside, go_on = threading.Event(), threading.Event()

    def hold():
        with reservations.locked(root):
            inside.set()
            assert go_on.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    with contextlib.ExitStack() as stack:
        stack.callback(thread.join, 60)
        stack.callback(go_on.set)
        assert inside.wait(60)
        monkeypatch.setattr(reservations, '_MAX_WAIT', 0.05)
        with pytest.raises(exceptions.BusyError, match='reservations/lock'):
            with reservations.locked(root):
                pass
    with reservations.locked(root):
        pass
