# SPDX-License-Identifier: Apache-2.0

"""Clients of a real Glance whose processes may die at any time, and an oracle.

It does by HTTP what ``storm.py`` does directly. A client knows only the
answers that it got: an upload that was answered 204 is there until its delete
was begun, and gone when that was answered 204. Of an upload without an answer
it is not known whether it became an image; but if it did, the image is whole.
Glance has no transaction over its database and its store: killed between the
two it may leave a record in ``saving`` for ever, an image in the store that no
record leads to, or a record whose data is gone. None of these is the store's
fault, and the oracle distinguishes them: they occur before the first answer,
or after the first attempt to delete.
"""

import contextlib
import http.client
import itertools
import json
import os
import pathlib
import random
import socket
import struct
import sys
import time
import traceback

from tests.functional import event_logs
from tests.functional import glance_server
from tests.functional import storm

#: Seconds for one send or receive; a process that was killed resets at once.
TIMEOUT = 60
#: There are about so many images of all clients together.
IMAGES = 30
STEPS = {'put': 8, 'abort': 3, 'read': 10, 'read_range': 5, 'delete': 4}

#: Exceptions that end a request early when the other side is killed.
BROKEN = (OSError, http.client.HTTPException)


class Worker:
    """One client process.

    :param deadline: when it is to end, by time.monotonic()
    :param urls: of the servers, which share a database and a repository
    :param ids: a directory with a file for each image
    """

    def __init__(self, log, name, deadline, urls, ids):
        self.log = open(log, 'a')
        self.name = name
        self.deadline = deadline
        self.clients = [glance_server.Client(url, TIMEOUT) for url in urls]
        self.ids = pathlib.Path(ids)
        self.rng = random.Random(name)
        self.numbers = itertools.count()

    def tell(self, **fields):
        self.log.write(json.dumps({'time': time.monotonic(), **fields}) + '\n')
        self.log.flush()

    def work(self):
        steps = [name for name, often in STEPS.items() for _ in range(often)]
        while time.monotonic() < self.deadline:
            there = sorted(os.listdir(self.ids))
            step = self.rng.choice(steps)
            if step == 'put':
                if len(there) < IMAGES:
                    self.put(f'{self.name}/{next(self.numbers)}')
                else:
                    time.sleep(0.02)
                continue
            if step == 'delete' and len(there) < IMAGES // 2:
                continue
            if there or step == 'abort':
                number = f'{self.name}/{next(self.numbers)}'
                try:
                    getattr(self, step)(there and self.rng.choice(there),
                                        number)
                except BROKEN:
                    # There may be no server just now.
                    time.sleep(self.rng.random() / 10)

    @property
    def client(self):
        return self.rng.choice(self.clients)

    # -- storing -----------------------------------------------------------

    def new(self):
        """A new record's id; None if it could not be made, or is unknown."""
        try:
            return self.client.create()['id']
        except (*BROKEN, glance_server.HTTPError, ValueError):
            time.sleep(self.rng.random() / 10)
            return None

    def slowly(self, data):
        """Pieces of data, some of them late, so that a kill may hit them."""
        at, pause = 0, self.rng.choice([0, 0, 0.02, 0.1])
        while at < len(data):
            length = self.rng.choice([1000, 20000, 100000])
            yield data[at:at + length]
            at += length
            time.sleep(pause * self.rng.random())

    def put(self, number):
        image_id = self.new()
        if image_id is None:
            return
        # Another upload may follow a failed one.
        for attempt in range(1 + self.rng.randrange(3)):
            tag = f'{number}.{attempt}'
            data = storm.content(image_id, tag)
            self.tell(op='put', phase='begin', image=image_id, number=tag)
            (self.ids / image_id).touch()
            size = self.rng.choice([None, len(data)])
            try:
                status = self.client.upload(image_id, self.slowly(data), size,
                                            expect=())
            except BROKEN:
                status = None
            self.tell(op='put', phase='end', number=tag, status=status,
                      bytes=len(data))
            if status == 204:
                return
            time.sleep(self.rng.random() / 5)

    def abort(self, _, number):
        """Upload with a client that goes away in the middle."""
        image_id = self.new()
        if image_id is None:
            return
        data = storm.content(image_id, number)
        sent = self.rng.randrange(len(data))
        self.tell(op='put', phase='begin', image=image_id, number=number,
                  aborted=True)
        host, _, port = self.client.address.partition(':')
        with socket.create_connection((host, int(port)), TIMEOUT) as sock:
            sock.sendall(
                f'PUT /v2/images/{image_id}/file HTTP/1.1\r\nHost: {host}\r\n'
                'Content-Type: application/octet-stream\r\n'
                f'Content-Length: {len(data)}\r\n\r\n'.encode())
            for piece in self.slowly(data[:sent]):
                sock.sendall(piece)
            if self.rng.random() < 0.5:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER,
                                struct.pack('ii', 1, 0))    # a reset
        if self.rng.random() < 0.3:
            (self.ids / image_id).touch()

    # -- reading and deleting ----------------------------------------------

    def get(self, image_id, first=None, last=None):
        """Status, whether all of it came, and the bytes that came."""
        received = bytearray()
        try:
            with self.client.open(image_id, first, last) as response:
                while piece := response.read(self.rng.choice([500, 60000])):
                    received += piece
                    if self.rng.random() < 0.1:
                        time.sleep(0.05 * self.rng.random())
                whole = response.status != 204 and not response.length
                return response.status, whole, bytes(received)
        except glance_server.HTTPError as e:
            return e.status, False, b''
        except http.client.IncompleteRead as e:
            return None, False, bytes(received) + e.partial
        except BROKEN:
            return None, False, bytes(received)

    def read(self, image_id, number):
        self.tell(op='read', phase='begin', image=image_id, number=number)
        status, whole, data = self.get(image_id)
        tag = None
        if whole:
            tag = storm.require_right(image_id, data)
        elif len(data) > storm.TAG:
            # The bytes that came before a process was killed are right, too.
            tag = data[:storm.TAG].decode().rstrip()
            assert storm.content(image_id, tag).startswith(data), (
                f'{image_id} {tag}: the first {len(data)} bytes are wrong')
        self.tell(op='read', phase='end', number=number, status=status,
                  tag=tag, bytes=len(data))

    def read_range(self, image_id, number):
        self.tell(op='read', phase='begin', image=image_id, number=number)
        status, whole, head = self.get(image_id, 0, storm.TAG - 1)
        tag, data = None, b''
        if whole:
            tag = head.decode().rstrip()
            content = storm.content(image_id, tag)
            first = self.rng.randrange(len(content))
            last = self.rng.randrange(first, len(content))
            status, whole, data = self.get(image_id, first, last)
            wanted = content[first:last + 1]
            assert data == wanted if whole else wanted.startswith(data), (
                f'{image_id} {tag}: bytes {first} to {last} are wrong')
        self.tell(op='read', phase='end', number=number, status=status,
                  tag=tag, bytes=len(data))

    def delete(self, image_id, number):
        self.tell(op='delete', phase='begin', image=image_id, number=number)
        try:
            status = self.client.delete(image_id, expect=())
        except BROKEN:
            status = None
        self.tell(op='delete', phase='end', number=number, status=status)
        if status == 204:
            with contextlib.suppress(FileNotFoundError):
                (self.ids / image_id).unlink()


def run_worker(log, **arguments):
    """Run a worker as a whole process; returns its exit status."""
    try:
        Worker(log=log, **arguments).work()
    except BaseException:
        with open(log, 'a') as f:
            f.write(json.dumps({'failure': traceback.format_exc()}) + '\n')
        return 1
    return 0


# -- the oracle ---------------------------------------------------------------

class Image:
    """The answers that the clients got about one image."""

    def __init__(self, image_id):
        self.image_id = image_id
        self.begun = {}             # attempts by their tags: times
        self.aborted = set()
        self.tag = self.put = None  # of the acknowledged one, and when
        self.delete_begun = None    # the first attempt
        self.deleted = None         # acknowledged

    @property
    def gone(self):
        """Time when a delete was answered, if Glance knew what to delete.

        Glance may have been killed when the store had the image and the record
        had not, or the upload may still have been going on.
        """
        return self.deleted if self.put is not None else None

    def may_be(self, tag):
        """Return true if this may be its content."""
        return (tag in self.begun and tag not in self.aborted
                and self.tag in (None, tag))


def read_logs(logs, images=None):
    """Return the images by their id, and the reads.

    :param images: what was known before
    """
    images = {} if images is None else images
    events, reads = {}, []
    for log in logs:
        for event in event_logs.read(log):
            assert 'failure' not in event, event['failure']
            pair = events.setdefault(event['number'], [None, None])
            pair[event['phase'] == 'end'] = event
    for number, (first, last) in events.items():
        image = images.setdefault(first['image'], Image(first['image']))
        status = None if last is None else last['status']
        if first['op'] == 'read':
            if last is not None:
                reads.append((first, last))
        elif first['op'] == 'put':
            image.begun[number] = first['time']
            if first.get('aborted'):
                image.aborted.add(number)
            if status == 204:
                assert image.tag is None, f'{vars(image)}: stored twice'
                image.tag, image.put = number, last['time']
        else:
            image.delete_begun = min(image.delete_begun or first['time'],
                                     first['time'])
            if status == 204:
                image.deleted = last['time']
    return images, reads


def judge_reads(images, reads):
    for first, last in reads:
        image = images[first['image']]
        if last['tag'] is not None:
            assert image.may_be(last['tag']), (first, last, vars(image))
            assert image.begun[last['tag']] < last['time'], (first, last)
            assert image.gone is None or image.gone > first['time'], (
                'it was read after it was deleted', first, last, vars(image))
        elif image.put is not None and image.put < first['time'] and (
                image.delete_begun is None
                or image.delete_begun > last['time']):
            # 500 is the database's: it takes one writer at a time.
            assert last['status'] in (None, 200, 206, 500), (
                'it was there and was not found', first, last, vars(image))


def judge_end(repo, client, images):
    """Check the repository while no client works; returns its contents.

    From here on the images that are there are known; images that only Glance
    or only the repository had are deleted from both.
    """
    contents = {}
    for image_id in [i for i in repo.images() if i in images]:
        with repo.open_image(image_id) as opened:
            contents[image_id] = opened.read()
        tag = storm.require_right(image_id, contents[image_id])
        assert images[image_id].may_be(tag), (tag, vars(images[image_id]))
        assert images[image_id].gone is None, vars(images[image_id])
    shown = {image['id']: image for image in patiently(client.list)}
    for image_id, image in list(images.items()):
        status = shown.get(image_id, {}).get('status')
        if image.deleted is not None:
            assert status is None, (status, vars(image))
        elif image.delete_begun is None:
            if image.put is not None:
                assert status == 'active', (status, vars(image))
            if status == 'active':
                assert image_id in contents, vars(image)
        if status == 'active' and image_id in contents:
            data = contents[image_id]
            assert patiently(client.download, image_id) == data, image_id
            assert shown[image_id]['size'] == len(data)
            image.tag = data[:storm.TAG].decode().rstrip()
            image.put = time.monotonic()
            image.delete_begun = None
            continue
        # In the middle of a delete Glance can be killed so that it shows
        # 'deleted' for ever.
        if status not in (None, 'deleted'):
            patiently(client.delete, image_id, expect=(204, 404))
        if image_id in repo.images():
            repo.delete(image_id)
        contents.pop(image_id, None)
        del images[image_id]
    return contents


def patiently(call, *arguments, **keywords):
    """Repeat a call that the database, or a process that died, refused."""
    for attempt in range(100):
        try:
            return call(*arguments, **keywords)
        except (*BROKEN, glance_server.HTTPError) as e:
            if attempt == 99 or getattr(e, 'status', 500) not in (400, 500):
                raise
            time.sleep(0.1)


if __name__ == '__main__':
    sys.exit(run_worker(**json.loads(sys.argv[1])))
