# SPDX-License-Identifier: Apache-2.0

"""Old requests for a replica after its sender's connection broke."""

import asyncio
import contextlib
import dataclasses
import json
import threading

import pytest

from dedupd.http import messages
from dedupd.serve import replica_receiver
from dedupd.serve import upload_rights
from glance_dedup.base import scopes
from tests.support import replicas
from tests.support import repositories

BLOCK = 512
LIMIT = 60
SENDER = 'ab' * 16
#: Only the repository's owner has rights.
NOBODY = upload_rights.Rights({
    right.option: [] for right in upload_rights.RIGHTS})


@pytest.fixture
def sites(tmp_path):
    """Create the repositories that send and receive."""
    paths = [repositories.create(tmp_path / name, block_size=BLOCK)
             for name in ('home', 'away')]
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(repositories.open_repository(path))
               for path in paths]


def request(body=b'', **query):
    return messages.Request('POST', query, {}, messages.Peer(0), body)


async def offer(receiving, token, lot):
    return await receiving.offer(
        request(lot.extents, replica=token, offset=str(lot.offset)), 'image')


def test_an_old_request_during_a_new_beginning(sites, monkeypatch):
    """An old request is refused during a new beginning.

    The beginning reports the offset at which the sender continues. If the
    receiver accepted the old request, it would be ahead of that offset and
    would refuse the sender's next lot.
    """
    home, away = sites
    repositories.put(home, 'image', repositories.noise(100 * BLOCK))
    entered, leave = threading.Event(), threading.Event()

    async def run(sending):
        receiving = replica_receiver.Receiving(away, NOBODY)

        async def begin():
            answer = await receiving.begin(request(
                sending.header.pack(), upload=sending.upload_id,
                sender=SENDER), 'image')
            return json.loads(answer.body)

        first = await begin()
        really_open = receiving._open

        def slowly(*args):
            result = really_open(*args)
            entered.set()
            leave.wait(LIMIT)
            return result

        monkeypatch.setattr(receiving, '_open', slowly)
        beginning = asyncio.create_task(begin())
        await asyncio.to_thread(entered.wait, LIMIT)
        old = asyncio.create_task(
            offer(receiving, first['replica'], sending.lots[0]))
        await asyncio.sleep(0)          # the request is refused now, or waits
        leave.set()
        with pytest.raises(messages.HTTPError) as caught:
            await old
        assert caught.value.status == 404
        second = await beginning
        assert second['offset'] == 0
        await offer(receiving, second['replica'], sending.lots[0])
        await receiving.stop()

    with contextlib.closing(replicas.Sending(home, 'image')) as sending:
        asyncio.run(asyncio.wait_for(run(sending), LIMIT))


@pytest.mark.parametrize('project, scope', [
    ('p3', scopes.of_project('p1')), ('', scopes.of_project('p1')),
    ('p3', b'\x01' * 16)])
def test_image_in_the_scope_of_another_project(sites, project, scope):
    """An image in another project's scope is refused.

    Its blocks were compared with those of that project.
    """
    home, away = sites
    repositories.put(home, 'image', repositories.noise(10 * BLOCK))

    async def begin(sending, **query):
        receiving = replica_receiver.Receiving(away, NOBODY)
        try:
            await receiving.begin(request(
                dataclasses.replace(sending.header, scope=scope).pack(),
                upload=sending.upload_id, sender=SENDER, **query), 'image')
        finally:
            await receiving.stop()

    with contextlib.closing(replicas.Sending(home, 'image')) as sending:
        with pytest.raises(messages.HTTPError) as refused:
            asyncio.run(begin(sending, project=project))
        assert refused.value.status == 400
        assert 'in the scope of another one' in str(refused.value)
        if scope == scopes.of_project('p1'):
            asyncio.run(begin(sending, project='p1'))


@pytest.mark.parametrize('is_silent', [False, True])
def test_a_sender_whose_request_runs_keeps_its_place(sites, monkeypatch,
                                                     is_silent):
    """A long request keeps its place, though it began before all others.

    :param is_silent: whether the others are silent; then even their own peer
        gets a place
    """
    home, away = sites
    repositories.put(home, 'image', repositories.noise(10 * BLOCK))
    count = replica_receiver.MAX_COUNT
    names = [f'image-{number}' for number in range(count)]

    async def run(sending):
        receiving = replica_receiver.Receiving(away, NOBODY)

        async def begin(name, uid):
            answer = await receiving.begin(dataclasses.replace(
                request(sending.header.pack(), upload=sending.upload_id,
                        sender=SENDER), peer=messages.Peer(uid)), name)
            return json.loads(answer.body)['replica']

        busy, *_ = [await begin(name, 0) for name in names]
        monkeypatch.setattr(replica_receiver, 'SILENT_SECONDS',
                            0 if is_silent else 3600)
        async with receiving.admit(request(replica=busy), names[0]):
            await begin('other', 0 if is_silent else 1)
        assert [*receiving._entries] == [names[0], *names[2:], 'other']
        await receiving.stop()

    with contextlib.closing(replicas.Sending(home, 'image')) as sending:
        asyncio.run(asyncio.wait_for(run(sending), LIMIT))
