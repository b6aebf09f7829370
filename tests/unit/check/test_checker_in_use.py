# SPDX-License-Identifier: Apache-2.0

"""The checker checks a repository that other processes use meanwhile."""

import threading

import pytest

from glance_dedup.check import files
from glance_dedup.check import group_reader
from tests.unit.check import fixtures
from tests.unit.check.fixtures import block
from tests.unit.check.fixtures import look
from tests.unit.check.fixtures import noise
from tests.unit.check.fixtures import one_damage
from tests.unit.repository import format_writer

no_pause = fixtures.no_pause
repository = fixtures.repository
group = fixtures.group
image = fixtures.image


def hooked(monkeypatch, when, action):
    """Call `action` once, right before the `when`-th opening of a file."""
    opened = []
    original = files.File.__init__

    def init(self, directory, name, file):
        opened.append(file)
        if opened.count(when) and not done:
            done.append(1)
            action()
        original(self, directory, name, file)

    done: list[int] = []
    monkeypatch.setattr(files.File, '__init__', init)
    return done


def test_image_deleted_before_it_is_read(
        monkeypatch, repository, group, image):
    done = hooked(monkeypatch, 'images/one', image.unlink)
    assert look(repository)[1].findings == []
    assert done


def test_image_deleted_and_collected(monkeypatch, repository, group, image):
    """A collection that frees the blocks meanwhile causes no finding."""
    def act():
        image.unlink()
        for slot in range(12):
            group.entry(slot, state=format_writer.FREED)
        group.data = bytes(len(group.data))
        group.save()
    done = hooked(monkeypatch, 'groups/00000001', act)
    assert look(repository)[1].findings == []
    assert done


def test_image_deleted_and_its_group_removed(
        monkeypatch, repository, group, image):
    def act():
        image.unlink()
        group.path.unlink()
    done = hooked(monkeypatch, 'groups/00000001', act)
    assert look(repository)[1].findings == []
    assert done


def test_blocks_freed_under_a_live_image(
        monkeypatch, repository, group, image):
    def act():
        for slot in range(12):
            group.entry(slot, state=format_writer.FREED)
        group.save()
    hooked(monkeypatch, 'groups/00000001', act)
    one_damage(repository, 'images/one', 'one')


@pytest.mark.parametrize('intact', [True, False])
def test_image_replaced_by_merging(
        monkeypatch, repository, group, image, intact):
    def act():
        other = format_writer.Group(repository, 2)
        other.append([noise(50)])
        other.publish()
        if not intact:
            other.data = other.data[:-1] + b'!'
        other.save()
        image.rename(repository.path / 'spool' / ('O-' + '0' * 32))
        repository.image('one', [(other, 0, 1)])
        group.path.unlink()
    done = hooked(monkeypatch, 'groups/00000001', act)
    found, report = look(repository)
    assert done
    if intact:
        assert not found
    else:
        assert [(f.file, f.images) for f in found] == [
            ('groups/00000002', ('one',))]


def test_group_that_grows_while_it_is_read(
        monkeypatch, repository, group, image):
    """The record is read before the entries, and they are torn at first."""
    group.append([block(20)])
    group.publish()
    whole = group.content()
    group.entries[12] = group.entries[12][:-2] + b'??'
    group.data = group.data[:-3]
    group.save()
    repository.image('two', [(group, 12, 1)])
    looks = []
    original = group_reader.GroupReader.look

    def act(self, *args):
        looks.append(args)
        if len(looks) == 3:
            group.path.write_bytes(whole)
        return original(self, *args)

    monkeypatch.setattr(group_reader.GroupReader, 'look', act)
    assert look(repository)[1].findings == []
    assert len(looks) == 3


def test_busy_repository(tmp_path, repository):
    """Images come and go and groups grow; the checker finds no fault."""
    stop = threading.Event()
    failures = []

    def work(number):
        group = format_writer.Group(repository, number)
        try:
            for i in range(64):
                if stop.is_set():
                    break
                group.append([block(100 * number + i)])
                group.publish()
                temporary = tmp_path / f'group{number}'
                repository.write(temporary, group.content())
                temporary.rename(group.path)
                temporary = tmp_path / f'image{number}'
                repository.write(temporary, repository.recipe(
                    f'image{number}', [(group, i // 2, i // 2)] if i > 1
                    else []))
                temporary.rename(
                    repository.path / 'images' / f'image{number}')
                if i % 3 == 0:
                    (repository.path / 'images' / f'image{number}').unlink()
        except Exception as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=[n]) for n in (1, 2)]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads):
            assert look(repository)[1].ok
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures
