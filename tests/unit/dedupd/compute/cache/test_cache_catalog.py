# SPDX-License-Identifier: Apache-2.0

"""A cache's catalog of its images, and an invalid ``cache.json``.

Images stay in the cache if the file is lost or damaged. The cache forgets only
their order of eviction and the facts with which each image was compared.
"""

import json
import os
import threading
import time

import hypothesis
from hypothesis import strategies
import pytest

from dedupd.compute.cache import cache_catalog
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.maintenance import reserve
from tests.support import maintenance
from tests.support import repositories
from tests.support.repositories import put

pytest_plugins = ['tests.support.maintainer_fixtures']

MD5 = '0123456789abcdef' * 2
OTHER = 'f' * 32


class Cache:
    """A repository that is a cache; ``again`` simulates a daemon's start."""

    def __init__(self, repo, path):
        self.repo = repo
        self.file = path / cache_catalog.NAME
        self.aside = path / cache_catalog.SET_ASIDE
        self.held = cache_catalog.Held(repo)

    def add(self, *names):
        for name in names:
            put(self.repo, name, name.encode() * 100)
            self.held.note(name, 100 * len(name), MD5)

    def again(self):
        self.held.close()
        self.held = cache_catalog.Held(self.repo)
        return self.held

    def fits(self, name):
        return self.held.fits(name, 100 * len(name), MD5)


@pytest.fixture
def cache(repo, path):
    cache = Cache(repo, path)
    yield cache
    cache.held.close()


@pytest.fixture
def full(cache):
    """A cache with three images; the first one was used last."""
    cache.add('a', 'b', 'c')
    cache.held.used('a')
    cache.held.close()
    return cache


def with_checksum(**fields):
    fields = {'kind': 'glance-dedup cache', 'version': 1, 'images': [],
              **fields}
    return json.dumps({
        **fields, 'checksum': files.json_checksum(fields)}).encode()


def entry(**fields):
    return {'id': 'a', 'size': 100, 'md5': None, 'used': 1, **fields}


# -- cached images ------------------------------------------------------------

def test_what_fits(cache):
    assert not cache.held.fits('a', 100, MD5)
    cache.add('a')
    put(cache.repo, 'b', b'b')
    cache.held.note('b', 1, None)
    fits = cache.held.fits
    for _ in range(2):
        assert fits('a', 100, MD5) and fits('a', 100, None)
        assert not fits('a', 99, MD5) and not fits('a', 100, OTHER)
        # Glance named no MD5 then and may name one now, which is not verified.
        assert fits('b', 1, None) and not fits('b', 1, MD5)
        fits = cache.again().fits


def test_what_was_not_compared_fits_nothing(cache):
    """An image that was not compared fits no request, but counts as used."""
    cache.add('a', 'b')
    put(cache.repo, 'c', b'c' * 100)
    cache.held.note_uncompared('c')
    for held in (cache.held, cache.again()):
        for md5 in (None, MD5):
            assert not held.fits('c', 100, md5)
        assert held.candidates() == ['a', 'b', 'c']


def test_what_is_no_md5_fits_nothing(cache):
    """An invalid MD5 fits no request; it comes from a server's answer."""
    put(cache.repo, 'a', b'a')
    for odd in ('', 'x' * 32, MD5.upper(), MD5 + '\n', 'a' * 10 ** 6):
        cache.held.note('a', 1, odd)
        assert not cache.held.fits('a', 1, odd)
        assert cache.held.fits('a', 1, None)
    assert cache.again().fits('a', 1, None)


def test_the_order_is_that_of_use(cache):
    cache.add('a', 'b', 'c')
    assert cache.held.candidates() == ['a', 'b', 'c']
    cache.held.used('a')
    put(cache.repo, 'z', b'z')
    put(cache.repo, 'd', b'd')
    for _ in range(2):
        # The cache knows no use of these.
        assert cache.held.candidates() == ['d', 'z', 'b', 'c', 'a']
        cache.again()
    cache.held.used('nobody')
    cache.held.used('d')
    assert cache.held.candidates() == ['d', 'z', 'b', 'c', 'a']
    assert cache.held.last_used('d') is None


def test_no_clock_decides(cache, monkeypatch):
    for seconds, name in ((3000, 'a'), (2000, 'b'), (1000, 'c')):
        monkeypatch.setattr(cache_catalog.time, 'time', lambda: seconds)
        cache.add(name)
    for _ in range(2):
        assert cache.held.candidates() == ['a', 'b', 'c']
        assert cache.held.last_used('b') == 2000
        cache.again()


def test_what_goes_is_forgotten(cache):
    cache.add('a', 'b', 'c')
    cache.held.drop('b')
    assert cache.repo.images() == ['a', 'c'] and not cache.fits('b')
    cache.held.drop('b')
    # Another process deleted it.
    cache.repo.delete('a')
    cache.held.drop('a')
    cache.repo.delete('c')
    assert cache.held.candidates() == [] and not cache.fits('c')
    cache.add('b', 'c')
    cache.held.save()
    cache.repo.delete('c')
    # The same holds if no daemon ran at the deletion.
    cache.again()
    assert cache.fits('b') and not cache.fits('c')
    assert cache.held.status()['images'] == 1


def test_wrong_images_are_remembered(cache, caplog):
    """A wrong image is remembered until Glance changes it or it is deleted.

    The record survives a kill.
    """
    mark, other = 'a' * 64, 'b' * 64
    cache.add('a', 'held')
    for _ in range(2):
        cache.held.note_wrong('a', 100, mark, 'its hash')
    assert caplog.text.count('its hash') == 1
    # The record is on the disk: another process reads it before this one ends.
    cache.held = cache_catalog.Held(cache.repo)
    assert not cache.fits('a') and cache.fits('held')
    assert cache.held.is_wrong('a', mark)
    assert not cache.held.is_wrong('b', mark)
    assert cache.held.status()['wrong_images'] == 1
    assert cache.held.status()['images'] == 1
    assert 'a' in cache.held.candidates()       # the id may have an image
    assert not cache.held.is_wrong('a', other)
    assert not cache.again().is_wrong('a', mark)
    cache.held.note_wrong('a', 100, mark, 'its hash')
    cache.held.drop('a')
    assert not cache.again().is_wrong('a', mark)
    cache.held.note_wrong('a', 100, mark, 'its hash')
    cache.add('a')
    assert cache.fits('a') and not cache.held.is_wrong('a', mark)


def test_only_so_many_wrong_images_are_remembered(cache, monkeypatch):
    monkeypatch.setattr(cache_catalog, 'MAX_WRONG', 2)
    for name in 'abc':
        cache.held.note_wrong(name, 1, 'a' * 64, 'its hash')
    for _ in range(2):
        assert [cache.held.is_wrong(name, 'a' * 64) for name in 'abc'] == [
            False, True, True]
        cache.again()


def test_an_image_that_is_read_reads_on(cache):
    cache.add('a')
    with cache.repo.open_image('a') as image:
        cache.held.drop('a')
        assert image.read() == b'a' * 100


def test_only_so_much_is_remembered(cache, monkeypatch):
    monkeypatch.setattr(cache_catalog, 'MAX_COUNT', 2)
    cache.add('a', 'b', 'c')
    assert not cache.fits('a') and cache.fits('b') and cache.fits('c')
    assert cache.held.candidates() == ['a', 'b', 'c']


def test_the_largest_file_is_no_larger():
    last = (1 << 63) - 1
    images = {f'{n:0128}': cache_catalog.CachedImage(last, MD5, last)
              for n in range(cache_catalog.MAX_COUNT)}
    images |= {f'{n:0127}w': cache_catalog.CachedImage((1 << 63) - 1, None,
                                                       (1 << 63) - 1, 'f' * 64)
               for n in range(cache_catalog.MAX_WRONG)}
    content = cache_catalog.encode(images)
    assert len(content) <= cache_catalog.MAX_SIZE
    assert cache_catalog.decode(content) == images


def test_by_many_threads(cache, monkeypatch):
    monkeypatch.setattr(cache_catalog, 'SAVE_INTERVAL', 0.001)
    names = [f'image-{n}' for n in range(8)]
    cache.add(*names)
    failures = []

    def work(name):
        try:
            for _ in range(100):
                cache.held.used(name)
                assert cache.fits(name)
                assert set(cache.held.candidates()) >= {name}
                cache.held.status()
            cache.held.drop(name)
            assert not cache.fits(name)
        except BaseException as e:
            failures.append(e)
    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures
    assert cache.again().candidates() == cache.repo.images() == []


# -- the limit ----------------------------------------------------------------

def test_the_limit(repo):
    group = maintenance.BLOCK * maintenance.SLOTS
    least = group + reserve.RESERVE_BYTES
    limit = least
    held = cache_catalog.Held(repo, lambda: limit)
    assert held.worth(least) and not held.worth(least + 1)
    assert held.status()['limit_bytes'] == held.limit == least
    limit = 0       # the option may change
    assert held.worth(1 << 62)
    held.close()
    for limit in (least - 1, 1, -1):
        with pytest.raises(exceptions.InvalidParameter, match='limit_mib.*'
                           'Choose at least 33, or 0'):
            cache_catalog.Held(repo, lambda: limit)


# -- the check for a cache ----------------------------------------------------

def test_what_is_no_cache_is_left_alone(repo, path):
    """A repository that is no cache is left alone.

    A cache deletes its images; a store's images have no other copy.
    """
    put(repo, 'precious', b'precious')
    before = sorted(os.listdir(path))
    with pytest.raises(exceptions.InvalidParameter,
                       match='precious|is no cache.*cache.json'):
        cache_catalog.Held(repo)
    assert sorted(os.listdir(path)) == before
    # An operator may create the file to turn the repository into a cache.
    (path / cache_catalog.NAME).touch()
    held = cache_catalog.Held(repo)
    assert held.candidates() == ['precious']
    held.close()


def test_it_is_one_from_its_first_start_on(repo, path):
    held = cache_catalog.Held(repo)
    assert cache_catalog.decode((path / cache_catalog.NAME).read_bytes()) == {}
    put(repo, 'a', b'a')
    # The process is killed, so it writes nothing at its end.
    again = cache_catalog.Held(repo)
    assert again.candidates() == ['a']
    held.close()
    again.close()


# -- times of writing ---------------------------------------------------------

def test_it_is_written_now_and_then(cache, monkeypatch):
    cache.add('a', 'b')
    cache.held.close()
    monkeypatch.setattr(cache_catalog, 'SAVE_INTERVAL', 0.5)
    written = []
    replace = cache_catalog.files.replace_file
    monkeypatch.setattr(
        cache_catalog.files, 'replace_file',
        lambda *args: (written.append(args), replace(*args)))
    began = time.monotonic()
    held = cache.again()
    for _ in range(5000):
        held.used('a')
        held.used('b')
    repositories.eventually(lambda: written)
    assert len(written) <= (time.monotonic() - began) / 0.5
    repositories.eventually(lambda: list(cache_catalog.decode(
        cache.file.read_bytes())) == ['a', 'b'])
    held.close()
    count = len(written)
    held.close()
    held.save()
    assert len(written) == count


def test_what_a_kill_left_is_no_hindrance(full):
    leftover = full.file.with_name('cache.json.new')
    leftover.write_bytes(b'half of i')
    assert full.again().candidates() == ['b', 'c', 'a']
    full.held.used('b')
    full.held.close()
    assert not leftover.exists()
    assert full.again().candidates() == ['c', 'a', 'b']


def test_what_cannot_be_written_is_told_once(full, caplog, monkeypatch):
    monkeypatch.setattr(cache_catalog, 'SAVE_INTERVAL', 0.01)
    obstacle = full.file.with_name('cache.json.new')
    obstacle.mkdir()
    held = full.again()
    held.used('b')
    repositories.eventually(lambda: 'cannot be written' in caplog.text)
    held.used('c')
    held.save()
    held.save()
    assert caplog.text.count('cannot be written') == 1
    obstacle.rmdir()
    repositories.eventually(lambda: list(cache_catalog.decode(
        full.file.read_bytes())) == ['a', 'b', 'c'])


def test_whose_it_is(tmp_path):
    from glance_dedup.repository import image_repository
    for shared, mode in ((False, 0o600), (True, 0o660)):
        path = tmp_path / f'shared-{shared}'
        image_repository.Repository.create(path, group_access=shared)
        with repositories.open_repository(path) as repo:
            cache_catalog.Held(repo).close()
            cache_catalog.Held(repo).close()
        assert (path / cache_catalog.NAME).stat().st_mode & 0o777 == mode


# -- an invalid file ----------------------------------------------------------

def require_set_aside(full, caplog, content=None):
    """Require that the file is in quarantine, and the next start is good."""
    caplog.clear()
    held = full.again()
    assert held.candidates() == ['a', 'b', 'c']
    assert not any(map(full.fits, 'abc'))
    assert str(full.file) in caplog.text and len(caplog.text) < 2000
    assert os.path.lexists(full.aside)
    if content is not None:
        assert full.aside.read_bytes() == content
    caplog.clear()
    assert full.again().candidates() == ['a', 'b', 'c']
    assert not caplog.text
    held.close()


@pytest.mark.parametrize('content', [
    b'', b'{', b'null', b'[]', b'17', b'"kind"', b'\xff\xfe', b'\0' * 4096,
    b'[' * 100000, b'{"a":' * 100000, b'9' * 5000,
    b'{"kind": "glance-dedup cache", "version": 1}',
    with_checksum(kind='glance-dedup repository'),
    with_checksum(version=2),
    with_checksum(version='1'),
    with_checksum(images=None),
    with_checksum(images=[17]),
    with_checksum(images=['a']),
    with_checksum(images=[['a']]),
    with_checksum(images={'a': entry()}),
    with_checksum(images=[{}]),
    with_checksum(images=[entry(id=17)]),
    with_checksum(images=[entry(id='../a')]),
    with_checksum(images=[entry(id='a' * 129)]),
    with_checksum(images=[entry(size=-1)]),
    with_checksum(images=[entry(size=1 << 63)]),
    with_checksum(images=[entry(size=1.5)]),
    with_checksum(images=[entry(size=True)]),
    with_checksum(images=[entry(size='x' * 100000)]),
    with_checksum(images=[entry(md5='x')]),
    with_checksum(images=[entry(md5=MD5 + '\n')]),
    with_checksum(images=[entry(md5=17)]),
    with_checksum(images=[entry(used=None)]),
    with_checksum(images=[entry(used=float('nan'))]),
    with_checksum(images=[entry(more=1)]),
], ids=lambda content: content[:60].decode(errors='replace'))
def test_strange_content(full, caplog, content):
    full.file.write_bytes(content)
    require_set_aside(full, caplog, content)


def test_every_byte(full, caplog):
    """A flipped bit or a cut either changes nothing or is detected."""
    good = full.file.read_bytes()
    known = cache_catalog.decode(good)
    for at in range(len(good)):
        for bad in (good[:at] + bytes([good[at] ^ 1]) + good[at + 1:],
                    good[:at]):
            try:
                assert cache_catalog.decode(bad) == known, at
            except ValueError:
                pass
    full.file.write_bytes(good[:len(good) // 2])
    require_set_aside(full, caplog)


def test_an_older_copy(full):
    """An older copy works; the images that it lacks fit no request."""
    older = full.file.read_bytes()
    full.again()
    full.add('d')
    full.held.drop('b')
    full.held.close()
    full.file.write_bytes(older)
    assert full.again().candidates() == ['d', 'c', 'a']
    assert not full.fits('d') and not full.fits('b') and full.fits('a')


def test_huge(full, caplog):
    with open(full.file, 'r+b') as f:
        f.truncate(1 << 40)
    require_set_aside(full, caplog)
    os.unlink(full.aside)


def test_no_ordinary_file(full, caplog, tmp_path):
    for make in (lambda: os.mkfifo(full.file),
                 lambda: full.file.symlink_to(tmp_path / 'elsewhere'),
                 lambda: full.file.symlink_to(full.file),
                 full.file.mkdir,
                 lambda: (full.file.mkdir(),
                          (full.file / 'inside').write_bytes(b'x'))):
        full.file.unlink()
        make()
        require_set_aside(full, caplog)
    assert not (tmp_path / 'elsewhere').exists()


def test_where_a_link_leads_nothing_is_changed(full, caplog, tmp_path):
    target = tmp_path / 'target'
    full.file.rename(target)
    content = target.read_bytes()
    full.file.symlink_to(target)
    require_set_aside(full, caplog)
    assert target.read_bytes() == content
    assert not full.file.is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason='chown needs root')
def test_somebody_elses(full):
    """A file of another user is read and then replaced by an own file."""
    os.chown(full.file, 12345, 12345)
    held = full.again()
    assert held.candidates() == ['b', 'c', 'a']
    held.used('b')
    held.close()
    assert full.file.stat().st_uid == os.geteuid()


def test_no_room_to_set_it_aside(full, caplog):
    """The file is overwritten if it cannot be set aside."""
    full.file.write_bytes(b'no good')
    os.rmdir(full.file.parent / 'quarantine')
    held = full.again()
    assert held.candidates() == ['a', 'b', 'c']
    assert 'cannot be set aside' in caplog.text
    assert cache_catalog.decode(full.file.read_bytes()) == {}


@hypothesis.settings(deadline=None, max_examples=300)
@hypothesis.given(strategies.binary(max_size=200) | strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers()
    | strategies.floats() | strategies.text(max_size=5)
    | strategies.sampled_from(['id', 'size', 'md5', 'used', MD5]),
    lambda inner: strategies.lists(inner, max_size=4)
    | strategies.dictionaries(strategies.sampled_from(
        ['id', 'size', 'md5', 'used', 'images', 'kind']), inner),
    max_leaves=12))
def test_any_content(value):
    if isinstance(value, bytes):
        contents = [value]
    else:
        contents = [json.dumps(value).encode(), with_checksum(images=value),
                    with_checksum(images=[value])]
    for content in contents:
        try:
            images = cache_catalog.decode(content)
        except ValueError:
            continue
        assert cache_catalog.decode(cache_catalog.encode(images)) == images
