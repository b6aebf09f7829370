# SPDX-License-Identifier: Apache-2.0

"""The digests of a source belong to one backup and are never trusted."""

import json
import logging
import os
import random
import resource

from cryptography.hazmat.primitives.ciphers import aead
import pytest

from glance_dedup import _engine
from glance_dedup.backup import digests
from glance_dedup.backup import views
from glance_dedup.base import files
from tests.support import sources

COUNT = 600                     # segments; three pages
SIZE = COUNT * views.SEGMENT - 1000
DATA = [bytes([number % 7]) * 100 for number in range(COUNT)]
BASE = views.Base(sources.BACKUP, sources.UPLOAD)


def changes(directory, size=SIZE, **options):
    place = sources.place(directory, **options)
    return place, digests.DigestChanges(place, 'identity', size)


def scan(directory, data=None, base=BASE, **options):
    """Return which segments are unchanged; commit `base` if there is one."""
    place, found = changes(directory, **options)
    same = [found.is_same(number, piece)
            for number, piece in enumerate(data or DATA)]
    found.end_scan()
    if base:
        found.commit(base)
    found.close()
    place.close()
    return same


def resident():
    """Bytes of this process that are in memory."""
    with open('/proc/self/statm') as f:
        return int(f.read().split()[1]) * resource.getpagesize()


def base_of(directory, **options):
    place, found = changes(directory, **options)
    found.close()
    place.close()
    return found.base


@pytest.fixture
def state(tmp_path):
    assert not any(scan(tmp_path))
    return tmp_path


@pytest.mark.parametrize('length', [
    0, 1, 15, 16, 17, 4096, views.SEGMENT - 512, views.SEGMENT])
def test_the_digest_of_a_segment(length):
    """The digest is the GMAC that another program computes."""
    rng = random.Random(length)
    data, key = rng.randbytes(length), rng.randbytes(32)
    assert _engine.keyed_digest(key, data) == aead.AESGCM(key).encrypt(
        bytes(12), b'', data)


@pytest.mark.parametrize('length', [0, 16, 31, 33])
def test_keys_of_another_length(length):
    with pytest.raises(ValueError, match='32 bytes'):
        _engine.keyed_digest(bytes(length), b'data')


def test_each_source_has_a_key(state):
    """Each source has a key of its own, and keeps it between backups.

    Two sources with equal data have different digests.
    """
    def key(name):
        return json.loads((state / f'{name}.digests').read_bytes()[:4096])[
            'digest_key']
    first = key('disk')
    assert all(scan(state)) and key('disk') == first
    scan(state, name='other')
    assert key('other') != first
    pages = [(state / f'{name}.digests').read_bytes()[4096:4112]
             for name in ('disk', 'other')]
    assert pages[0] != pages[1]


def test_they_are_of_one_backup(state):
    assert base_of(state) == BASE
    assert all(scan(state, base=None))
    changed = [*DATA]
    changed[130] = b'new'
    assert [number for number, same in enumerate(
        scan(state, changed, base=None)) if not same] == [130]
    assert base_of(state, repository_id='ef' * 16) is None
    assert base_of(state, name='other') is None


def test_a_last_segment_of_another_length_is_not_the_same(tmp_path):
    """A last segment of zeros differs from zeros of another length."""
    def only(size):
        return scan(tmp_path, [None, None], size=size)

    assert only(views.SEGMENT + 512) == [False, False]
    assert only(views.SEGMENT + 512) == [True, True]
    assert only(views.SEGMENT + 1024) == [True, False]


@pytest.mark.parametrize('cut', [0, 1, 4095, 4096, 8191, 4096 * 3,
                                 4096 * 4 - 1])
def test_a_file_that_was_cut_says_nothing(state, cut):
    os.truncate(state / 'disk.digests', cut)
    assert base_of(state) is None and not any(scan(state))
    assert base_of(state) == BASE


def test_a_file_that_is_too_long_says_nothing(state):
    os.truncate(state / 'disk.digests', 4096 * 5)
    assert base_of(state) is None


def test_no_bit_may_be_wrong(state):
    """A changed bit hides its page's digests; it never adds a match."""
    path = state / 'disk.digests'
    whole = path.read_bytes()
    rng = random.Random(1)
    other = [b'other'] * COUNT
    for at in [0, 4096, *(rng.randrange(len(whole)) for _ in range(60))]:
        changed = bytearray(whole)
        changed[at] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        same = scan(state, base=None)
        if at >= 4096:
            page = (at - 4096) // 4096
            assert same == [number // 254 != page for number in range(COUNT)]
        assert not any(scan(state, other, base=None))


def test_pages_of_another_file_say_nothing(state):
    path = state / 'disk.digests'
    old = path.read_bytes()
    scan(state, [b'new'] * COUNT)
    new = path.read_bytes()
    path.write_bytes(old[:4096] + new[4096:])       # the file is torn
    assert not any(scan(state, [b'new'] * COUNT, base=None))
    assert not any(scan(state, base=None))


def test_pages_in_another_order_say_nothing(tmp_path):
    """Pages in a wrong order do not count, even if all segments are equal."""
    scan(tmp_path, [b'same'] * COUNT)
    path = tmp_path / 'disk.digests'
    old = path.read_bytes()
    path.write_bytes(old[:4096] + old[8192:12288] + old[4096:8192]
                     + old[12288:])
    assert scan(tmp_path, [b'same'] * COUNT, base=None) == [
        number >= 508 for number in range(COUNT)]


@pytest.mark.parametrize('fields', [
    {'size': 1 << 62}, {'size': -1}, {'size': True}, {'size': '1'},
    {'size': 1 << 200}, {'segment': 1}, {'key': 'x'}, {'key': ''},
    {'key': None}, {'digest_key': ''}, {'digest_key': 'ab' * 16},
    {'digest_key': 1}, {'backup_id': ''}, {'upload_id': ''},
    {'backup_id': [1]}, {'identity': 1}, {'repository_id': ''}])
def test_heads_that_are_whole_and_say_nonsense(state, fields):
    path = state / 'disk.digests'
    data = path.read_bytes()
    head = json.loads(data[:4096])
    del head['kind'], head['version'], head['checksum']
    forged = files.pack_json('segment digests', **{**head, **fields})
    path.write_bytes(forged.ljust(4096) + data[4096:])
    assert base_of(state) is None


@pytest.mark.parametrize('plant', [
    lambda path: path.mkdir(), lambda path: os.mkfifo(path),
    lambda path: path.symlink_to('/dev/zero'),
    lambda path: path.write_bytes(b'{"a":' * 2000)])
def test_what_is_no_file_of_digests(tmp_path, plant):
    plant(tmp_path / 'disk.digests')
    assert base_of(tmp_path) is None


def test_memory_does_not_grow_with_the_disk(tmp_path):
    """A scan of 1 TiB, with 8 MiB of digests, needs under 1 MiB more."""
    count = 1 << 19
    place, found = changes(tmp_path, count * views.SEGMENT)
    before = resident()
    for _ in range(2):
        same = sum(found.is_same(number, None) for number in range(count))
        found.end_scan()
        found.commit(BASE)
        found.close()
        found = digests.DigestChanges(place, 'id', count * views.SEGMENT)
    assert same == count
    assert resident() - before < 1 << 20
    found.close()
    place.close()


def test_a_backup_goes_on_if_they_cannot_be_kept(tmp_path, caplog):
    """A backup succeeds if its digests cannot be stored (B1)."""
    tmp_path.joinpath('disk.digests.new').mkdir()
    with caplog.at_level(logging.WARNING):
        assert not any(scan(tmp_path))
    assert 'digests of disk cannot be kept' in caplog.text
    assert base_of(tmp_path) is None


def test_a_full_disk_is_no_failure(state, caplog):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limit[1]))
    try:
        assert all(scan(state))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert 'disk.digests.new' in caplog.text
    assert base_of(state) == BASE
    assert not (state / 'disk.digests.new').exists()
