# SPDX-License-Identifier: Apache-2.0

"""The images that the mount shows, without a daemon."""

import concurrent.futures
import hashlib

import pytest

from dedupd.compute.cache import offered_images
from dedupd.compute.novabase import image_contents
from glance_dedup.client import client_errors
from tests.support import repositories

DATA = repositories.mixture(3_000_000, 3)


def offer(image_id='image', data=DATA):
    return offered_images.Offer(image_id, len(data), 'sha512',
                                hashlib.sha512(data).hexdigest(), None)


def put(repo, image_id='image', data=DATA, digest=None):
    with repo.begin(image_id) as transaction:
        transaction.write(data)
        if digest is not None:
            transaction.set_hash('sha512', digest)
        transaction.commit()


@pytest.fixture
def repo(tmp_path):
    with repositories.open_repository(
            repositories.create(tmp_path / 'repository')) as found:
        yield found


@pytest.fixture
def missing():
    """The set of images that the daemon reports as missing."""
    return set()


@pytest.fixture
def contents(repo, missing, tmp_path, monkeypatch):
    monkeypatch.setattr(image_contents, 'PAUSE', 0.05)
    found = image_contents.Contents(
        repo, str(tmp_path / 'nobody'), lambda image_id: image_id in missing)
    found.show({'image': offer()}, frozenset())
    yield found
    found.stopping.set()
    found.show({}, frozenset())


def open_image(contents):
    return contents.open(contents.facts('image'))


def test_an_image_that_is_here_is_read(contents, repo):
    put(repo, digest=hashlib.sha512(DATA).digest())
    assert contents.is_here(offer())
    content = open_image(contents)
    assert content.read(1000, 5) == DATA[5:1005]
    assert content.read(1000, len(DATA) - 3) == DATA[-3:]
    assert content.read(1000, len(DATA) + 3) == b''
    content.close()
    content.close()
    assert not contents.is_open('image')


@pytest.mark.parametrize('digest', [None, bytes(64)])
def test_an_image_of_another_hash_is_not_here(contents, repo, digest):
    put(repo, digest=digest)
    assert not contents.is_here(offer())


def test_an_image_of_another_size_is_not_here(contents, repo):
    put(repo, data=DATA[1:], digest=hashlib.sha512(DATA).digest())
    assert not contents.is_here(offer())


def test_what_is_known_comes_from_memory(contents):
    facts = contents.facts('image')
    assert (facts.size, facts.upload_id) == (len(DATA), offer().hash_value)
    assert contents.names() == ['image']
    with pytest.raises(LookupError):
        contents.facts('other')
    content = open_image(contents)      # neither exists yet
    assert contents.is_open('image')
    content.close()


def test_a_read_waits_for_the_image(contents, repo):
    content = open_image(contents)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        reads = [threads.submit(content.read, 100, n) for n in (0, 50)]
        assert not concurrent.futures.wait(reads, 0.3).done
        put(repo, digest=hashlib.sha512(DATA).digest())
        assert [read.result(60) for read in reads] == [
            DATA[:100], DATA[50:150]]
    content.close()


@pytest.mark.parametrize('end', ['gone', 'not shown', 'stopping'])
def test_a_read_does_not_wait_for_ever(contents, missing, end):
    content = open_image(contents)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        read = threads.submit(content.read, 100, 0)
        assert not concurrent.futures.wait([read], 0.3).done
        if end == 'stopping':
            contents.stopping.set()
        else:
            contents.show({'image': offer()} if end == 'gone' else {},
                          frozenset({'image'}) if end == 'gone' else
                          frozenset())
            # The storing host may keep the image for other readers.
            assert not concurrent.futures.wait([read], 0.3).done
            missing.add('image')
        with pytest.raises(client_errors.ClientError):
            read.result(60)
    content.close()


def test_an_image_that_glance_has_no_more_is_held(contents, repo):
    put(repo, digest=hashlib.sha512(DATA).digest())
    contents.show({'image': offer()}, frozenset({'image'}))
    repo.delete('image')
    assert contents.is_here(offer())
    contents.show({}, frozenset())
    assert not contents.is_here(offer())


def test_an_image_that_changed_is_another_file(contents):
    facts = contents.facts('image')
    contents.show({'image': offer(data=DATA[:-1])}, frozenset())
    with pytest.raises(LookupError):
        contents.open(facts)


def test_times_are_remembered_while_the_image_is_shown(contents):
    before = contents.times('image')
    assert before[0] == before[1] > 0
    contents.set_times('image', (1, 2))
    contents.show({'image': offer()}, frozenset())
    assert contents.times('image') == (1, 2)
    contents.show({}, frozenset())
    contents.show({'image': offer()}, frozenset())
    assert contents.times('image') == before
