# SPDX-License-Identifier: Apache-2.0

"""The store: valid and invalid locations."""

import hashlib
import pathlib

import glance_store
from glance_store import exceptions
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies
from oslo_config import cfg
import pytest

from glance_dedup.base import locations
from glance_dedup.base import signingkeys
from glance_dedup.driver import dedup_store
from tests.support import stores
from tests.support.stores import add
from tests.support.stores import ADMIN
from tests.support.stores import ALICE
from tests.support.stores import delete
from tests.support.stores import get
from tests.support.stores import GOOD
from tests.support.stores import refused
from tests.support.stores import repo

CONF = cfg.CONF

configure = stores.configure
store = stores.store


def test_a_location_cannot_be_forged(store):
    url = add(b'secret', '11111111-2222-3333-4444-555555555555')[0]
    head, mac = url.rsplit('/', 1)
    for forged in ('0' * 64, mac[::-1], mac[:-1], mac[:-2], mac + '0', '',
                   mac.upper() + 'x', hashlib.sha256(b'').hexdigest()):
        if forged != mac:
            refused(f'{head}/{forged}')
    for place in range(0, 64, 9):
        digit = '0' if mac[place] != '0' else '1'
        refused(f'{head}/{mac[:place]}{digit}{mac[place + 1:]}')
    refused(head)
    refused(head + '/')
    assert get(url) == b'secret'


def test_a_true_location_spelt_otherwise(store):
    """The store accepts only the exact text of a location."""
    url = add(b'secret', 'image-A')[0]
    head, mac = url.rsplit('/', 1)
    for other in (f'{head}/{mac.upper()}', url.upper(), url.lower(),
                  url.replace('dedup', 'Dedup'), f'{url}?', f'{url}?x=1',
                  f'{url}&x', f'{url}#', f'{url};x', f'{url}/', f'{url}/..',
                  f'{url} ', f'{url}\n', f' {url}', f'{url}\0',
                  url.replace('//', '///'), url.replace('//', '//u@'),
                  url.replace('image-A', 'image%2DA'),
                  url.replace('image-A', './image-A'),
                  url.replace('image-A', 'image-a'),
                  url.replace('/image-A', '//image-A')):
        if other != url:
            # Glance itself refuses an unknown scheme.
            with pytest.raises(exceptions.GlanceStoreException):
                get(other)
            with pytest.raises(exceptions.GlanceStoreException):
                delete(other, context=ADMIN)
    assert get(url) == b'secret'


def test_a_mac_is_good_for_its_own_image_only(store):
    one, two = add(b'one', 'a')[0].split('/'), add(b'two', 'b')[0].split('/')
    for place in (3, 4, 5):  # image id, upload id, mac
        mixed = list(one)
        mixed[place] = two[place]
        refused('/'.join(mixed))
    # 'ab' + 'c' must not sign as 'a' + 'bc'.
    key = repo(store).read_keys().current
    assert (locations.sign(key, 'r', 'ab', 'c')
            != locations.sign(key, 'r', 'a', 'bc'))
    assert get('/'.join(one)) == b'one'


def test_a_change_of_the_key(store):
    """A location is valid as long as its key; the store stays open."""
    path = repo(store).path
    old = add(b'old', 'a')[0]
    signingkeys.begin_change(path)
    new = add(b'new', 'b')[0]
    signed_again = locations.url(repo(store), 'a', old.split('/')[4])
    assert signed_again.rsplit('/', 1)[0] == old.rsplit('/', 1)[0]
    assert get(old) == get(signed_again) == b'old' and get(new) == b'new'
    signingkeys.finish_change(path)
    refused(old)
    # Glance's removal of the old location deletes nothing.
    with pytest.raises(exceptions.NotFound):
        delete(old, context=ADMIN)
    assert get(signed_again) == b'old' and get(new) == b'new'
    delete(signed_again, context=ADMIN)
    refused(signed_again)


@pytest.mark.parametrize('how', ['gone', 'damaged', 'directory'])
def test_a_key_that_cannot_be_read(store, how):
    """An unreadable key causes an error; no image is deleted or missing."""
    url = add(b'data', 'a')[0]
    key = pathlib.Path(repo(store).path) / 'key'
    content = key.read_bytes()
    key.unlink()
    if how == 'damaged':
        key.write_bytes(content[:-1])
    elif how == 'directory':
        key.mkdir()
    with pytest.raises(exceptions.RemoteServiceUnavailable):
        get(url)
    with pytest.raises(exceptions.RemoteServiceUnavailable):
        stores.get_size(url)
    with pytest.raises(exceptions.BackendException, match='key'):
        delete(url, context=ADMIN)
    if how == 'directory':
        key.rmdir()
    key.write_bytes(content)
    assert get(url) == b'data'


def test_a_location_of_another_repository(configure):
    one, two = configure(one={}, two={})
    url = add(b'one', backend='one')[0]
    refused(url, 'two')
    # Store two refuses it even with its own id in it, since store one's key
    # signed it.
    refused(url.replace(repo(one).repository_id, repo(two).repository_id),
            'two')
    assert get(url, 'one') == b'one'


def test_a_location_of_an_earlier_upload(store):
    old = add(b'old')[0]
    delete(old)
    new = add(b'new')[0]
    assert new != old
    refused(old)
    with pytest.raises(exceptions.NotFound):
        delete(old, context=ALICE)
    assert get(new) == b'new'


def test_locations_do_not_get_into_messages(store, caplog):
    url = add(b'secret')[0]
    mac = url.rsplit('/', 1)[1]
    wrong = url[:-1] + ('0' if url[-1] != '0' else '1')
    for bad in (wrong, url + '/', url.upper()):
        with pytest.raises(Exception) as caught:
            glance_store.get(bad, 'one')
        assert mac[:-1] not in str(caught.value)
    assert mac[:-1] not in caplog.text


def parse(uri):
    place = dedup_store.StoreLocation({}, CONF)
    place.parse_uri(uri)
    return place


HEX = strategies.text('0123456789abcdef', min_size=32, max_size=32)
IDS = strategies.from_regex(r'[A-Za-z0-9_-]{1,128}', fullmatch=True)


@given(HEX, IDS, HEX, HEX, HEX)
def test_any_well_formed_location_parses(repository_id, image_id, upload_id,
                                         mac, rest):
    uri = f'dedup://{repository_id}/{image_id}/{upload_id}/{mac}{rest}'
    place = parse(uri)
    assert place.get_uri() == uri
    assert place.image_id == image_id


@settings(max_examples=500)
@given(strategies.text() | strategies.builds(
    lambda place, cut, new: GOOD[:place] + new + GOOD[place + cut:],
    strategies.integers(0, len(GOOD)), strategies.integers(0, 5),
    strategies.text(max_size=5)))
def test_anything_else_is_a_bad_uri(uri):
    try:
        place = parse(uri)
    except exceptions.BadStoreUri as exc:
        assert len(uri) < 30 or uri not in str(exc)
    else:
        assert place.get_uri() == uri
        assert len(uri.split('/')) == 6
        assert uri.isascii() and uri.isprintable()


@pytest.mark.parametrize('uri', [
    '', 'dedup', 'dedup:', 'dedup://', 'dedup:///', 'file:///etc/passwd',
    'DEDUP' + GOOD[5:], GOOD + '\n', '\n' + GOOD, ' ' + GOOD, GOOD + '?x=1',
    GOOD + '#x', GOOD + '/', GOOD.replace('//', '/'), 'dedup://u:p@h/a/b/c',
    GOOD.replace('image', '../..'), GOOD.replace('image', ''),
    GOOD.replace('image', 'a\0b'), GOOD.replace('image', 'x' * 129),
    GOOD.replace('1', '\u0661'), GOOD[:-1], 'x' * 1000000])
def test_malformed_locations(uri):
    with pytest.raises(exceptions.BadStoreUri):
        parse(uri)
