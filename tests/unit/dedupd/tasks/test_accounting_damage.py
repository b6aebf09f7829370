# SPDX-License-Identifier: Apache-2.0

"""Accounting: damaged recipes, and catalogs with wrong sums."""

import os
import shutil
import struct

import pytest
import xxhash

from tests.support import maintenance
from tests.support.maintenance import account
from tests.support.maintenance import content
from tests.support.maintenance import maintaining
from tests.support.repositories import put
from tests.support.repositories import ruin
from tests.unit.dedupd.tasks.accounts import figures
from tests.unit.dedupd.tasks.accounts import kill_it
from tests.unit.dedupd.tasks.accounts import spool

pytest_plugins = ['tests.support.maintainer_fixtures']


# -- damaged recipes ----------------------------------------------------------

BODY, HEADER = 4096 + 16, 16


@pytest.mark.parametrize('at', [BODY, HEADER])
def test_live_uncounted_and_damaged_is_reported(maintainer, path, other, at):
    put(other, 'bad', content(1))
    put(other, 'good', content(2))
    ruin(path / 'images' / 'bad', at)
    result = account(maintainer)
    assert (result.counted, result.removed) == (1, 1)
    assert list(result.unreadable) == ['bad']
    assert 'images/bad' in result.unreadable['bad'] or (
        'spool/T' in result.unreadable['bad'])
    assert result.unreadable == maintainer.unreadable.reasons()
    assert len(spool(path, 'T')) == 1
    assert account(maintainer).unreadable == result.unreadable


@pytest.mark.parametrize('at', [BODY, HEADER])
def test_damage_that_goes_away(maintainer, path, other, at):
    put(other, 'bad', content(1))
    file = path / 'images' / 'bad'
    data = file.read_bytes()
    ruin(file, at)
    assert account(maintainer).unreadable
    with open(file, 'r+b') as f:
        f.write(data)
    assert figures(account(maintainer)) == (1, 0, 1, 0)
    assert maintainer.unreadable.reasons() == {}
    maintenance.require_counted(maintainer)


@pytest.mark.parametrize('at', [BODY, HEADER])
def test_live_counted_and_damaged_goes_on(maintainer, path, other, at):
    """The damaged recipe causes no warning, since it is counted already."""
    put(other, 'bad', content(1))
    with pytest.raises(maintenance.Killed):
        account(maintenance.watch(maintainer, maintenance.Once(
            '.unlink', kill_it)))
    maintenance.kill(maintainer)
    ruin(path / 'images' / 'bad', at)
    with maintaining(other) as maintainer:
        assert figures(account(maintainer)) == (0, 0, 1, 0)
        assert maintainer.unreadable.reasons() == {}
        assert maintainer.warnings == []
        assert len(maintenance.counts(maintainer.catalog)) == 10


def quarantined(path):
    return [name for name in os.listdir(path / 'quarantine')
            if not name.startswith('catalog')]


@pytest.mark.parametrize('at', [BODY, HEADER])
def test_deleted_counted_and_damaged(maintainer, path, other, at):
    """A damaged recipe that cannot be un-counted causes a rebuild."""
    put(other, 'bad', content(1, 2))
    put(other, 'good', content(2))
    account(maintainer)
    other.delete('bad')
    entry, = spool(path, 'D')
    ruin(path / 'spool' / entry, at)
    result = account(maintainer)
    assert result.unreadable == {} and spool(path) == []
    assert len(quarantined(path)) == 1
    assert maintainer.warnings == [
        f'spool/{entry} is damaged, so that it is not known what is to be '
        'un-counted; it was set aside, and the catalog was rebuilt']
    maintenance.require_counted(maintainer)
    assert account(maintainer).removed == 0
    assert len(maintainer.warnings) == 1


@pytest.mark.parametrize('at', [BODY, HEADER])
def test_deleted_uncounted_and_damaged(maintainer, path, other, at):
    put(other, 'good', content(2))
    account(maintainer)
    put(other, 'bad', content(1, 2))
    other.delete('bad')
    ruin(path / 'spool' / spool(path, 'T')[0], at)
    result = account(maintainer)
    assert result.unreadable == {} and spool(path) == []
    assert maintainer.warnings == [] or at == HEADER
    maintenance.require_counted(maintainer)


def test_zeroed_header_of_an_image_is_no_dead_upload(maintainer, path, other):
    """An image with a zeroed header does not count as a dead upload.

    Its entry looks like that of an upload that ended early.
    """
    put(other, 'bad', content(1))
    with open(path / 'images' / 'bad', 'r+b') as f:
        f.write(bytes(4096))
    result = account(maintainer)
    assert list(result.unreadable) == ['bad']
    assert len(spool(path, 'T')) == 1


def zero_header(file):
    with open(file, 'r+b') as f:
        f.write(bytes(4096))


def test_zeroed_header_of_what_was_deleted(maintainer, path, other):
    """A deleted image with a zeroed header is set aside and un-counted.

    The image had a header once.
    """
    put(other, 'bad', content(1, 2))
    put(other, 'good', content(2))
    account(maintainer)
    other.delete('bad')
    zero_header(path / 'spool' / spool(path, 'D')[0])
    assert account(maintainer).unreadable == {}
    assert len(quarantined(path)) == 1
    maintenance.require_counted(maintainer)


def test_zeroed_header_of_what_was_counted(maintainer, path, other):
    """A counted image with a zeroed header is un-counted after its deletion.

    Its entry was not removed in time.
    """
    put(other, 'bad', content(1, 2))
    with pytest.raises(maintenance.Killed):
        account(maintenance.watch(maintainer, maintenance.Once(
            '.unlink', kill_it)))
    maintenance.kill(maintainer)
    zero_header(path / 'images' / 'bad')
    with maintaining(other) as maintainer:
        other.delete('bad')
        os.unlink(path / 'spool' / spool(path, 'D')[0])
        assert account(maintainer).unreadable == {}
        maintenance.require_counted(maintainer)


def test_project_that_is_not_utf_8(maintainer, path, other):
    put(other, 'image', content(1))
    with open(path / 'images' / 'image', 'r+b') as f:
        page = bytearray(f.read(4088))
        struct.pack_into('<H', page, 138, 3)
        page[272:275] = b'a\xff\xfe'
        page += struct.pack('<Q', xxhash.xxh3_64_intdigest(bytes(page)))
        f.seek(0)
        f.write(page)
    assert figures(account(maintainer)) == (1, 0, 1, 0)
    (_, facts), = maintainer.catalog.ledger()
    assert facts['project'] == 'a\ufffd\ufffd'


@pytest.mark.parametrize('at', [BODY, HEADER])
def test_damaged_deleted_and_still_read(maintainer, path, other, at):
    """A damaged recipe that is read is reported once, and then removed.

    Its blocks are not known, so nothing may be freed.
    """
    put(other, 'bad', content(1))
    with other.open_image('bad'):
        other.delete('bad')
        os.unlink(path / 'spool' / spool(path, 'T')[0])
        entry, = spool(path, 'D')
        ruin(path / 'spool' / entry, at)
        assert list(account(maintainer).unreadable) == [f'spool/{entry}']
    assert account(maintainer).unreadable == {}
    assert spool(path) == []


def test_entry_that_cannot_be_opened(maintainer, path, other):
    """An entry that cannot be opened is reported and left alone."""
    name = f'T-{"1" * 32}'
    (path / 'spool' / name).symlink_to(path / 'key')
    result = account(maintainer)
    assert list(result.unreadable) == [f'spool/{name}']
    assert (path / 'key').exists()


# -- catalogs with wrong sums -------------------------------------------------

def test_count_below_zero_makes_the_catalog_anew(maintainer, path, other):
    put(other, 'one', content(1))
    put(other, 'two', content(1, 2))
    account(maintainer)
    batch = maintainer.catalog.batch()
    for key, value in maintainer.catalog._items(b'c'):
        batch.delete(key)
    maintainer.catalog.write(batch)
    other.delete('one')
    account(maintainer)
    assert len(maintainer.warnings) == 1
    assert 'too few' in maintainer.warnings[0]
    maintenance.require_counted(maintainer)


def test_two_entries_of_one_transaction(maintainer, path, other):
    """Copies of a recipe's entry do not distort the counts.

    Another program put the copies there.
    """
    put(other, 'image', content(1))
    entry, = spool(path, 'T')
    shutil.copy(path / 'spool' / entry, path / 'spool' / f'D-{"1" * 32}')
    shutil.copy(path / 'spool' / entry, path / 'spool' / f'O-{"2" * 32}')
    account(maintainer)
    account(maintainer)
    assert spool(path) == []
    assert sum(maintenance.counts(maintainer.catalog).values()) in (0, 10)
