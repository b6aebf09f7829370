# SPDX-License-Identifier: Apache-2.0

"""Files that keep an upload until it has arrived."""

import asyncio
import contextlib
import errno
import shutil
import types

import pytest

from dedupd.compute.cache import cached_uploads
from dedupd.http import glance
from dedupd.http import messages
from glance_dedup.base import exceptions
from glance_dedup.transfer import image_sending
from tests.support import repositories

MIB = 1 << 20


@pytest.fixture
def repo(tmp_path):
    path = repositories.create(tmp_path / 'repository')
    with repositories.open_repository(path) as opened:
        yield opened
    repositories.require_clean(path)


@pytest.fixture
def kept(repo):
    found = cached_uploads.Kept(repo, 'global', 'alice')
    yield found
    found.close()


def content(kept):
    data = b''
    while len(data) < kept.size:
        data += kept.read(len(data))
    return data


def write(kept, data):
    for at in range(0, len(data), MIB):
        kept.write(data[at:at + MIB])


def test_file_and_image(repo, kept):
    data = repositories.mixture(3 * MIB + 777)
    write(kept, data)
    assert content(kept) == data
    with kept.image() as image:
        # The image has no name any more, but its content is still available.
        assert repo.images() == []
        assert image.read(len(data), 0) == data
        assert image.stat.project == 'alice'
    kept.close()
    kept.close()


@pytest.mark.parametrize('when', ['begin', 'write', 'commit'])
def test_a_transaction_that_fails(repo, monkeypatch, when):
    """The file keeps all bytes if the transaction fails."""
    real = {'begin': repo.begin}

    def fail(*args, **kwargs):
        raise exceptions.StorageError('the disk fails')

    def begin(*args, **kwargs):
        transaction = real['begin'](*args, **kwargs)
        monkeypatch.setattr(transaction, when, fail)
        return transaction
    monkeypatch.setattr(repo, 'begin', fail if when == 'begin' else begin)
    kept = cached_uploads.Kept(repo, 'global', '')
    try:
        data = repositories.noise(2 * MIB + 5)
        write(kept, data)
        assert content(kept) == data
        assert kept.image() is None
        assert content(kept) == data
    finally:
        kept.close()
    assert repo.images() == []


def test_no_room(repo, kept, monkeypatch):
    """A twentieth of the disk stays free, and received bytes stay."""
    kept.write(b'first')
    real = shutil.disk_usage(repo.path)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: real._replace(
        free=int(cached_uploads.FREE_SHARE * real.total)))
    with pytest.raises(OSError) as caught:
        kept.write(b'second')
    assert caught.value.errno == errno.ENOSPC
    assert content(kept) == b'first'


@pytest.mark.parametrize('status', [409, 410])
@pytest.mark.parametrize('became', ['active', 'queued'])
def test_the_storing_hosts_request_comes_late(repo, monkeypatch, became,
                                              status):
    """The answer is 204 if Glance took the storing host's late request."""
    data = repositories.noise(2 * MIB)
    image_id = '0' * 8 + '-0000' * 3 + '-' + '0' * 12
    states = iter(['queued', 'queued', 'saving', became])
    tried = []

    async def ask_record(*args):
        return 200, {'id': image_id, 'status': next(states),
                     'size': len(data)}

    def upload(*args):
        raise image_sending.Unsure('the link broke')

    async def body():
        yield data

    async def relay(pieces):
        tried.append(b''.join([piece async for piece in pieces]))
        return messages.Response(status)

    async def no_sleep(seconds):
        pass

    monkeypatch.setattr(glance, 'ask_record', ask_record)
    monkeypatch.setattr(cached_uploads.asyncio, 'sleep', no_sleep)
    found = cached_uploads.Uploads(repo, None, lambda: contextlib.nullcontext(
        types.SimpleNamespace(replica_scope=lambda: 'global')))
    monkeypatch.setattr(found, '_upload', upload)
    response = asyncio.run(found.put(
        messages.Message('PUT', f'/v2/images/{image_id}/file', [],
                         messages.Peer('tcp', None), body()),
        image_id, [], relay))
    assert tried == [data]
    assert response.status == (204 if became == 'active' else status)
    assert not list(states)
