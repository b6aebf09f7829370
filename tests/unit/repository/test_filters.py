# SPDX-License-Identifier: Apache-2.0


import os
import shutil
import time

import pytest

from glance_dedup.repository import filters
from tests.support import repositories
from tests.support.repositories import noise
from tests.support.repositories import put

USERS_LOCK = 2


class Host:
    """Repositories whose filters are in one directory."""

    def __init__(self, tmp_path):
        self.top = tmp_path
        self.directory = tmp_path / 'filters'
        self.directory.mkdir(mode=0o700)

    def open(self, name, **options):
        path = self.top / name
        if not path.exists():
            repositories.create(path)
        return repositories.open_repository(
            path, filter_dir=str(self.directory), **options)

    def use(self, name):
        """Use a repository, and close it; return its filter."""
        before = self.filters()
        with self.open(name) as repo:
            put(repo, f'image-{len(repo.images())}', noise(8192))
        made, = self.filters() - before
        return made

    def filters(self):
        return set(self.directory.iterdir())

    def tidy(self):
        filters.remove_dead(str(self.directory))


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


def age(path, seconds):
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_filter_of_a_repository_that_is_gone(host):
    one, two, three = map(host.use, ('one', 'two', 'three'))
    host.tidy()
    assert host.filters() == {one, two, three}
    shutil.rmtree(host.top / 'one')
    # One repository is replaced by another, and one is moved away.
    shutil.rmtree(host.top / 'two')
    repositories.create(host.top / 'two')
    host.tidy()
    assert host.filters() == {three}
    (host.top / 'three').rename(host.top / 'four')
    host.tidy()
    assert host.filters() == set()
    # The filter is rebuilt from the repository.
    with host.open('four') as repo:
        assert put(repo, 'again', noise(8192)).new_bytes == 0
    assert host.filters() == {three}


def test_filter_that_is_in_use_stays(host):
    with host.open('one') as repo:
        put(repo, 'image', noise(8192))
        used = host.filters()
        shutil.rmtree(host.top / 'one')
        age(min(used), 10 * filters.UNUSED)
        host.tidy()
        assert host.filters() == used
    host.tidy()
    assert host.filters() == set()


def test_filter_stays_while_another_process_uses_it(host):
    path = host.use('one')
    shutil.rmtree(host.top / 'one')
    with repositories.holding(path, USERS_LOCK, shared=True):
        host.tidy()
        assert host.filters() == {path}
    host.tidy()
    assert host.filters() == set()


def test_filter_that_nobody_opens_for_long(host):
    old, new = host.use('old'), host.use('new')
    age(old, filters.UNUSED + 1000)
    age(new, filters.UNUSED - 1000)
    host.tidy()
    assert host.filters() == {new}
    # Opening the repository counts as a use.
    age(new, filters.UNUSED + 1000)
    with host.open('new') as repo:
        put(repo, 'image', noise(8192))
    host.tidy()
    assert host.filters() == {new}


def test_filter_of_an_older_program_goes_by_its_age(host):
    path = host.use('one')
    with open(path, 'r+b') as f:
        f.seek(1024)
        f.write(bytes(3072))
    shutil.rmtree(host.top / 'one')
    host.tidy()
    assert host.filters() == {path}
    age(path, filters.UNUSED + 1000)
    host.tidy()
    assert host.filters() == set()


def test_repository_that_cannot_be_looked_at_is_not_gone(
        host, monkeypatch):
    path = host.use('one')
    file = host.top / 'one' / 'repository.json'
    content = file.read_bytes()
    for damaged in (b'', b'[', b'[]', b'{}', b'[' * 50000):
        file.write_bytes(damaged)
        host.tidy()
        assert host.filters() == {path}
    file.write_bytes(content)

    def refuse(name, *arguments, **keywords):
        if os.fsencode(name).endswith(b'repository.json'):
            raise PermissionError(13, 'no')
        return real(name, *arguments, **keywords)
    real = os.open
    with monkeypatch.context() as patch:
        patch.setattr(filters.os, 'open', refuse)
        host.tidy()
    assert host.filters() == {path}


def test_what_is_none_of_ours_stays(host):
    precious = host.top / 'precious'
    precious.write_bytes(b'x')
    name = '0' * 32 + '.filter'
    (host.directory / name).symlink_to(precious)
    os.link(precious, host.directory / ('1' * 32 + '.filter'))
    (host.directory / 'file').write_bytes(b'x')
    (host.directory / ('2' * 32 + '.filter')).mkdir()
    age(precious, 10 * filters.UNUSED)
    age(host.directory / 'file', 10 * filters.UNUSED)
    before = host.filters()
    host.tidy()
    assert host.filters() == before
    filters.remove_dead(str(host.top / 'missing'))


def test_what_a_creator_left_that_died(host):
    left = host.directory / ('0' * 32 + '.filter.new')
    left.write_bytes(b'x')
    with repositories.holding(left, 1):
        host.tidy()
        assert host.filters() == {left}
    host.tidy()
    assert host.filters() == set()


def test_opening_another_repository_tidies_up(host):
    """Opening a repository removes filters of deleted ones."""
    gone = host.use('one')
    shutil.rmtree(host.top / 'one')
    with host.open('two') as repo:
        put(repo, 'image', noise(8192))
        repositories.eventually(lambda: not gone.exists())
    assert len(host.filters()) == 1


def test_path_that_is_too_long_is_not_noted(host):
    path = host.use('one')
    filters.note_use(path, '/' + 'x/' * 2000)
    shutil.rmtree(host.top / 'one')
    host.tidy()
    assert host.filters() == {path}


def test_opening_and_tidying_at_once(host):
    """An opened filter is the file that has the filter's name."""
    def use():
        for _ in range(40):
            with host.open('one') as repo:
                repo.open_image('image').close()
                put(repo, 'new', b'')
                repo.delete('new')
                name, = host.filters()
                with open('/proc/self/maps') as f:
                    assert not [line for line in f
                                if '.filter (deleted)' in line
                                and str(host.directory) in line]
                assert name.exists()

    path = host.use('one')
    with host.open('one') as repo:
        put(repo, 'image', noise(8192))
    child = repositories.fork_child(use)
    deadline = time.monotonic() + 60
    while not os.waitid(os.P_PID, child[0],
                        os.WEXITED | os.WNOHANG | os.WNOWAIT):
        assert time.monotonic() < deadline
        try:
            age(path, 10 * filters.UNUSED)
        except FileNotFoundError:
            pass
        host.tidy()
    repositories.wait_for_child(child, 30)


def test_the_tests_leave_no_filters(host, tmp_path):
    """The tests' fixture removes only the filters of their repositories."""
    used = host.use('one')
    repositories.remove_filters(tmp_path / 'tw', str(host.directory))
    repositories.remove_filters(tmp_path / 'on', str(host.directory))
    assert host.filters() == {used}
    repositories.remove_filters(tmp_path, str(host.directory))
    assert host.filters() == set()
