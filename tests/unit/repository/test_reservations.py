# SPDX-License-Identifier: Apache-2.0

"""Reservations hold space for uploads that are not committed."""

import contextlib
import hashlib
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


def file_of(root, number, size=7):
    project = hashlib.sha256(b'alice').hexdigest()[:32]
    return os.path.join(root, reservations.DIRECTORY,
                        f'{number:032x}.{project}.{size}')


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
        reservations.remove(root, {f'{1:032x}'})    # it is gone already
        two.end(0)
    assert not reservations.exist(root)


@pytest.mark.parametrize('size', [0, 10**18 - 1])
def test_extreme_sizes(root, size):
    own = reserve(root, 1, 10)
    with open(file_of(root, 2, size), 'wb') as f:
        os.fchmod(f.fileno(), 0o600)
    with reservations.locked(root):
        assert own.others() == own.given_up() == size
        assert reservations.given_up(root) == {f'{2:032x}'}
        reservations.remove(root, {f'{2:032x}'})
        assert own.others() == 0
    assert findings(root) == []


def test_n13_1_a_file_has_no_content(root):
    """The files' names hold all that hosts exchange about their uploads."""
    own = reserve(root, 1, 10)
    with reservations.locked(root):
        own.set(20)
        own.end(20)
    assert os.path.getsize(file_of(root, 1, 20)) == 0


def test_other_things_in_the_directory(root):
    own = reserve(root, 1, 10)
    os.mkdir(file_of(root, 2))
    os.mkfifo(file_of(root, 3))
    os.symlink('/dev/zero', file_of(root, 4))
    strange = ['x', f'{5:032x}', os.path.basename(file_of(root, 5, '-1')),
               os.path.basename(file_of(root, 5, '01')),
               os.path.basename(file_of(root, 5, 10**18)),
               os.path.basename(file_of(root, 5)) + '\n']
    for name in strange:
        with open(os.path.join(root, reservations.DIRECTORY, name), 'wb'):
            pass
    with reservations.locked(root):
        assert own.given_up() == 0
        assert f'{4:032x}' not in reservations.given_up(root)
        assert f'{5:032x}' not in reservations.given_up(root)
    found = findings(root)
    assert {severity for severity, _ in found} == {checker.NOTE}
    assert len(found) == len(strange), found


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
