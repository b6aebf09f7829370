# SPDX-License-Identifier: Apache-2.0

"""The rest of an image's bytes, from a Glance that the test simulates."""

import asyncio
import hashlib

import pytest

from dedupd.http import image_parts
from dedupd.http import messages
from dedupd.http import upstream_client

ID = '3f0b2a4c-5d1e-4c7a-9b60-0d4a8f1c2e33'
TARGET = f'/v2/images/{ID}/file'
DATA = bytes(range(200)) * 5
MD5 = hashlib.md5(DATA).hexdigest()
FACTS = image_parts.Facts(len(DATA), MD5)


class Answer:
    """A response of Glance, in pieces of seven bytes."""

    def __init__(self, status, body=b'', **headers):
        self.status, self.body = status, body
        self.headers = [(name.replace('_', '-').encode(), str(value).encode())
                        for name, value in headers.items()]
        self.closed = False

    async def read(self):
        piece, self.body = self.body[:7], self.body[7:]
        return piece

    def close(self):
        self.closed = True


class Glance:
    """A Glance with an image; `change` may change each of its responses."""

    def __init__(self, data=DATA, change=lambda answer: None):
        self.data, self.change, self.asked = data, change, []

    async def ask(self, method, target, headers, body=None):
        assert (method, target, body) == ('GET', TARGET, None)
        part = upstream_client.text(headers, b'range')
        self.asked.append(part)
        begin, _, last = part.removeprefix('bytes=').partition('-')
        self.answer = Answer(
            206, self.data[int(begin):int(last) + 1], Content_MD5=MD5,
            Content_Range=f'bytes {begin}-{last}/{len(self.data)}')
        self.change(self.answer)
        return self.answer


def rest(glance, begin, handed, end, digest, facts=FACTS):
    """Return the bytes that follow a client's first part, and the error."""
    request = image_parts.Asked(ID, TARGET, [(b'X-Auth-Token', b't')], None)
    found = bytearray()

    async def collect():
        async for piece in image_parts.rest(
                glance, request, facts,
                image_parts.Sent(begin, handed, end, digest)):
            found.extend(piece)

    try:
        asyncio.run(collect())
    except (image_parts.OtherImage, upstream_client.UpstreamError) as e:
        return bytes(found), e
    return bytes(found), None


def sha(data):
    return hashlib.sha256(data).digest()


@pytest.mark.parametrize('begin,handed,end', [
    (0, 0, 1000), (0, 1, 1000), (0, 999, 1000), (0, 500, 1000),
    (13, 13, 700), (13, 14, 700), (13, 699, 700), (7, 21, 28), (3, 5, 6)])
def test_the_rest_of_the_same_image(begin, handed, end):
    glance = Glance()
    assert rest(glance, begin, handed, end, sha(DATA[begin:handed])) == (
        DATA[handed:end], None)
    # A single request means that all bytes are of one image.
    assert glance.asked == [f'bytes={begin}-{end - 1}']
    assert glance.answer.closed


def test_what_is_known_is_not_sent_again():
    glance = Glance()
    assert rest(glance, 0, 400, 1000, None) == (DATA[400:], None)
    assert glance.asked == ['bytes=400-999']


@pytest.mark.parametrize('at', [0, 199, 399])
def test_other_bytes_before(at):
    """No byte follows those of another image."""
    other = bytearray(DATA)
    other[at] ^= 1
    found, error = rest(Glance(), 0, 400, 1000, sha(other[:400]))
    assert found == b'' and isinstance(error, image_parts.OtherImage)
    assert 'from 0 to 400' in str(error)


def drop(name):
    def change(answer):
        answer.headers = upstream_client.without(answer.headers, name)
    return change


def put(name, value):
    def change(answer):
        drop(name)(answer)
        answer.headers.append((name, value))
    return change


def state(status):
    def change(answer):
        answer.status = status
    return change


@pytest.mark.parametrize('change', [
    put(b'content-range', b'bytes 0-999/1001'),
    put(b'content-range', b'bytes 1-999/1000'),
    put(b'content-range', b'bytes 0-998/1000'), drop(b'content-range'),
    put(b'content-md5', b'0' * 32), state(401), state(403), state(404),
    state(200), state(204), state(500)])
def test_an_answer_that_is_not_of_this_image(change):
    glance = Glance(change=change)
    found, error = rest(glance, 0, 400, 1000, sha(DATA[:400]))
    assert found == b'' and isinstance(error, upstream_client.UpstreamError)
    assert glance.answer.closed


@pytest.mark.parametrize('md5', [None, MD5])
def test_an_image_without_an_md5(md5):
    """The bytes are compared if the image has no MD5."""
    glance = Glance(change=drop(b'content-md5'))
    facts = image_parts.Facts(len(DATA), md5)
    assert rest(glance, 0, 9, 1000, sha(DATA[:9]), facts) == (DATA[9:], None)
    assert isinstance(rest(glance, 0, 9, 1000, sha(b'x'), facts)[1],
                      image_parts.OtherImage)


def test_a_glance_that_knows_no_ranges():
    def change(answer):
        answer.status, answer.body = 200, DATA
        answer.headers = [(b'Content-Length', b'1000')]

    assert rest(Glance(change=change), 100, 300, 900, sha(DATA[100:300])) == (
        DATA[300:900], None)


@pytest.mark.parametrize('length', [0, 300, 400, 800])
def test_glance_ends_too_early(length):
    def change(answer):
        answer.body = answer.body[:length]

    found, error = rest(Glance(change=change), 0, 400, 1000, sha(DATA[:400]))
    assert isinstance(error, upstream_client.UpstreamError)
    assert found == DATA[400:max(length, 400)]


# -- requests and answers -----------------------------------------------------

def asked(method='GET', target=TARGET, body=None, **headers):
    message = messages.Message(method, target, [], messages.Peer(), body)
    return image_parts.asked(message, [
        (name.replace('_', '-').encode(), value.encode())
        for name, value in headers.items()])


@pytest.mark.parametrize('part', [
    None, 'bytes=0-0', 'bytes=5-', 'bytes=-5', 'bytes=0-1,3-4', 'x'])
def test_requests_for_bytes(part):
    headers = {} if part is None else {'rAnge': part}
    found = asked(X_Auth_Token='t', **headers)
    assert found == image_parts.Asked(ID, TARGET, [(b'X-Auth-Token', b't')],
                                      part)


@pytest.mark.parametrize('arguments', [
    {'method': 'HEAD'}, {'method': 'PUT'}, {'body': object()},
    {'target': f'/v2/images/{ID}'}, {'target': f'{TARGET}?x=y'},
    {'target': '/v2/images//file'},
    {'Range': 'bytes=0-1', 'range': 'bytes=0-1'},
    {'If_Range': 'x'}, {'If_None_Match': 'x'}])
def test_other_requests(arguments):
    assert asked(**arguments) is None


@pytest.mark.parametrize('answer,expected', [
    (Answer(200, Content_Length=5), (0, 5, image_parts.Facts(5, None))),
    (Answer(200, Content_Length=0), (0, 0, image_parts.Facts(0, None))),
    (Answer(200, Content_Length=5, Content_MD5=MD5),
     (0, 5, image_parts.Facts(5, MD5))),
    (Answer(200, Content_Length=5, Content_MD5='nonsense'),
     (0, 5, image_parts.Facts(5, None))),
    (Answer(206, Content_Length=5, Content_Range='bytes 3-7/9'),
     (3, 8, image_parts.Facts(9, None))),
    (Answer(200), None), (Answer(404, Content_Length=5), None),
    (Answer(206, Content_Length=5), None),
    (Answer(206, Content_Length=4, Content_Range='bytes 3-7/9'), None),
    (Answer(206, Content_Length=5, Content_Range='bytes 3-7/7'), None),
    (Answer(206, Content_Length=5, Content_Range='bytes 3-7/*'), None),
    (Answer(200, Content_Length='x'), None),
    (Answer(200, Content_Length=5, Content_Encoding='gzip'), None)])
def test_what_an_answer_announces(answer, expected):
    assert image_parts.span(answer) == expected
