# SPDX-License-Identifier: Apache-2.0

"""Requests that are refused before any byte is received or uploaded."""

import asyncio
import json

import pytest

from dedupd.http import messages
from dedupd.serve import replica_uploads
from tests.support import repositories

IMAGE = '0a1b2c3d-0000-4000-8000-000000000000'
UPLOAD = 'u_' + '2f64116cfa706c0e' * 2


def refused(body, image_id=UPLOAD, upstream=object()):
    """Return the status of the answer and require that no claim is made."""
    handler = replica_uploads.Uploads(None, None, upstream)
    request = messages.Request('POST', {}, {}, messages.Peer(0), body)
    with pytest.raises(messages.HTTPError) as caught:
        asyncio.run(handler.upload(request, image_id))
    return caught.value.status


def body_of(image=IMAGE, headers=()):
    return json.dumps({'image': image, 'headers': headers}).encode()


@pytest.mark.parametrize('body', [
    b'', b'{', b'[]', b'{}', body_of(image=7), body_of(image='../v2'),
    body_of(image=IMAGE + '/x'), body_of(image=IMAGE[:-1] + 'g'),
    body_of(headers=None), body_of(headers={'a': 'b'}),
    body_of(headers=[['a']]), body_of(headers=[['a', 7]]),
    body_of(headers=[['a', 'b', 'c']]), body_of(headers=[['a', '\u20ac']])])
def test_bad_bodies(body):
    assert refused(body) == 400


@pytest.mark.parametrize('image_id', [
    IMAGE, 'image', 'u_', UPLOAD + '0', UPLOAD.upper(), 'v_' + UPLOAD[2:]])
def test_only_uploads(image_id):
    """Only an upload's id is accepted, so no image in use is deleted."""
    assert refused(body_of(), image_id) == 400


def test_no_glance():
    assert refused(body_of(), upstream=None) == 501


def test_headers_of_the_connection_stay_behind():
    names = ['Host', 'Content-Length', 'Transfer-Encoding', 'Expect',
             'Connection', 'X-Named', 'X-Auth-Token']
    image_id, headers = replica_uploads._parse({'image': IMAGE, 'headers': [
        [name, 'x-named' if name == 'Connection' else 'value']
        for name in names]})
    assert image_id == IMAGE
    assert headers == [(b'X-Auth-Token', b'value')]


def test_what_is_left_of_uploads(tmp_path):
    path = repositories.create(tmp_path / 'repository')
    with repositories.open_repository(path) as repo:
        for image_id in (UPLOAD, 'u_other', IMAGE):
            repositories.put(repo, image_id, b'data')
        with repo.open_image(UPLOAD) as image:
            replica_uploads.drop_leftovers(repo)
            assert repo.images() == [IMAGE, 'u_other']
            assert image.read(4, 0) == b'data'
