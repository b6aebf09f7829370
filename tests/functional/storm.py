# SPDX-License-Identifier: Apache-2.0

"""Processes that use one repository at random, and an oracle of them.

Each stores, reads, aborts and deletes, and logs the begin and the end of each
operation; any of them may be killed at any moment. The content of an image
follows from its id and from a tag in its first bytes, so every byte that a
process reads is verified. Deletes name the upload they mean, so that for each
upload it is known whether it must exist, must not, or may.
"""

import bisect
import collections
import contextlib
import functools
import itertools
import json
import math
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
import traceback

from glance_dedup.base import exceptions
from glance_dedup.client import client_errors
from glance_dedup.client import daemon_client
from tests.functional import event_logs
from tests.functional import volume_storm
from tests.support.repositories import noise
from tests.support.repositories import open_repository

ROOT = pathlib.Path(__file__).resolve().parents[2]
BLOCK = 512
TAG = 24
#: The ids of all images here begin with it; others may be in the repository.
PREFIX = 'image-'


def content(image_id, tag):
    """Return content; much of it is in other images, too, and some is not."""
    rng = random.Random(f'{image_id} {tag}')
    data = bytearray(tag.encode().ljust(TAG))
    data += noise(BLOCK - TAG, rng.random())
    for _ in range(rng.randrange(12)):
        kind = rng.randrange(4)
        blocks = rng.randrange(1, 20)
        if kind == 0:
            data += noise(blocks * BLOCK, rng.random())
        elif kind == 1:
            data += bytes(blocks * BLOCK)
        elif kind == 2:
            data += (b'text of %d ' % rng.randrange(5) * BLOCK
                     )[:blocks * BLOCK]
        else:
            data += noise(20 * BLOCK, f'common {rng.randrange(6)}'
                          )[:blocks * BLOCK]
    return bytes(data + noise(rng.randrange(BLOCK), 1))


def require_right(image_id, data):
    """Return the tag of data that was read; every byte of it must be right."""
    tag = data[:TAG].decode().rstrip()
    assert data == content(image_id, tag), f'{image_id} {tag} is wrong'
    return tag


#: The steps of each kind of worker, and how often it does each.
MIXED = {'put': 9, 'read': 8, 'delete': 4, 'hold': 1, 'read_held': 1,
         'abort': 1}
UPLOADER = {'put': 9, 'abort': 1, 'pause': 6}
DELETER = {'delete': 1, 'pause': 2}
READER = {'read': 40, 'read_served': 40, 'read_by_command': 1, 'hold': 10,
          'read_held': 10, 'pause': 20}
OWNER = {'own': 1, 'pause': 3}


class Worker:
    """The work of one process.

    :param deadline: when it is to end, by time.monotonic()
    :param steps: what it does
    :param ids: how many image ids there are
    :param socket: the daemon's, for `read_served`
    :param host: the host's name, for `own`
    :param options: of the repository
    """

    def __init__(self, path, log, name, deadline, steps=MIXED, ids=12,
                 socket=None, host='', **options):
        self.log = open(log, 'a')
        self.path = path
        self.name = name
        self.deadline = deadline
        self.steps = steps
        self.ids = ids
        self.host = host
        self.client = (None if socket is None
                       else daemon_client.Client(f'unix:{socket}'))
        self.rng = random.Random(name)
        self.repo = open_repository(
            path, codec=self.rng.choice(['none', 'lz4', 'zstd']),
            threads=self.rng.choice([0, 1]), **options)
        self.numbers = itertools.count()
        self.held = collections.deque()

    def tell(self, **fields):
        self.log.write(json.dumps({'time': time.monotonic(), **fields}) + '\n')
        self.log.flush()

    def work(self):
        steps = [getattr(self, name) for name, often in self.steps.items()
                 for _ in range(often)]
        while time.monotonic() < self.deadline:
            image_id = f'{PREFIX}{self.rng.randrange(self.ids)}'
            number = f'{self.name}/{next(self.numbers)}'
            with contextlib.suppress(exceptions.ImageNotFound,
                                     exceptions.ImageExists):
                self.rng.choice(steps)(image_id, number)
        for image_id, image in self.held:
            require_right(image_id, image.read())
            image.close()
        self.repo.close()

    def pause(self, image_id, number):
        time.sleep(self.rng.random() / 50)

    def write(self, transaction, data):
        at = 0
        while at < len(data):
            length = self.rng.choice([100, BLOCK, 5000, len(data)])
            transaction.write(data[at:at + length])
            at += length

    def put(self, image_id, number):
        with self.repo.begin(image_id) as transaction:
            self.tell(op='put', phase='begin', image=image_id, number=number,
                      upload=transaction.upload_id)
            data = content(image_id, number)
            self.write(transaction, data)
            try:
                transaction.commit()
            except exceptions.ImageExists:
                self.tell(op='put', phase='refused', number=number)
                raise
            self.tell(op='put', phase='end', number=number,
                      bytes=len(data))

    def abort(self, image_id, number):
        with self.repo.begin(image_id) as transaction:
            self.write(transaction, content(image_id, number))

    def read(self, image_id, number):
        self.tell(op='read', phase='begin', image=image_id, number=number)
        data = b''
        try:
            with self.repo.open_image(image_id) as image:
                upload = image.stat.upload_id
                data = image.read()
                require_right(image_id, data)
                for _ in range(3):
                    start = self.rng.randrange(len(data))
                    length = self.rng.randrange(3000)
                    assert (image.read(length, start)
                            == data[start:start + length])
        except exceptions.ImageNotFound:
            upload = None
        self.tell(op='read', phase='end', number=number, upload=upload,
                  bytes=len(data))

    def read_served(self, image_id, number):
        """Read through the daemon, if there is one just now."""
        self.tell(op='read', phase='begin', image=image_id, number=number)
        tag, data = None, b''
        try:
            with self.client.open_image(image_id) as stream:
                data = stream.read(stream.size)
            assert len(data) == stream.size
            tag = require_right(image_id, data)
        except client_errors.DaemonUnavailable:
            return
        except client_errors.Refused as e:
            if e.code != 404:
                raise
        self.tell(op='read', phase='end', number=number, tag=tag,
                  bytes=len(data))

    def read_by_command(self, image_id, number):
        """Read by an operator's command, without the daemon."""
        self.tell(op='read', phase='begin', image=image_id, number=number)
        done = subprocess.run(
            [sys.executable, '-m', 'glance_dedup.cli.entry', '--repository',
             str(self.path), '--socket', '', 'image', 'get', image_id, '-'],
            cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=60)
        assert done.returncode == 0 or b'no image' in done.stderr, done.stderr
        tag = None if done.returncode else require_right(image_id, done.stdout)
        self.tell(op='read', phase='end', number=number, tag=tag,
                  bytes=len(done.stdout))

    def hold(self, image_id, number):
        self.held.append((image_id, self.repo.open_image(image_id)))

    def own(self, image_id, number):
        volume_storm.own(self.repo, self.host, number, self.rng,
                         functools.partial(self.tell, op='volume'),
                         self.deadline)

    def read_held(self, image_id, number):
        if self.held:
            image_id, image = self.held.popleft()
            require_right(image_id, image.read())
            image.close()

    def delete(self, image_id, number):
        upload = self.repo.stat(image_id).upload_id
        self.tell(op='delete', phase='begin', image=image_id, number=number,
                  upload=upload)
        try:
            self.repo.delete(image_id, upload_id=upload)
        except exceptions.ImageNotFound:
            self.tell(op='delete', phase='refused', number=number)
            raise
        self.tell(op='delete', phase='end', number=number)


def run_worker(log, **arguments):
    """Run a worker as a whole process; returns its exit status."""
    try:
        Worker(log=log, **arguments).work()
    except BaseException:
        with open(log, 'a') as f:
            f.write(json.dumps({'failure': traceback.format_exc()}) + '\n')
        return 1
    return 0


def start_worker(path, log, name, deadline, **options):
    """Fork a worker."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)
        status = run_worker(path=path, log=log, name=name, deadline=deadline,
                            **options)
    finally:
        os._exit(status)


# -- the oracle ---------------------------------------------------------------

class Upload:
    """The oracle's knowledge about one store operation, and its delete."""

    def __init__(self, image_id, tag):
        self.image_id = image_id
        self.tag = tag
        self.begun = self.put = None     # times; put: acknowledged
        self.refused = False
        self.delete_begun = None         # the first attempt
        self.deleted = None              # acknowledged


def read_logs(logs, uploads=None, may_fail=(), until=math.inf):
    """Return the uploads by their id, and the reads.

    :param uploads: what was known before
    :param may_fail: names of exceptions that a worker may have ended with
    :param until: a time; what was answered later was not
    """
    uploads = {} if uploads is None else dict(uploads)
    reads, unfinished = [], []
    for log in logs:
        begun = {}
        for event in event_logs.read(log):
            if 'failure' in event:
                words = event['failure'].splitlines()[-1]
                assert words.partition(':')[0].rpartition('.')[2] in (
                    may_fail), event['failure']
                continue
            if event['op'] == 'volume':
                continue                # volume_storm judges it
            if event['phase'] != 'begin' and event['time'] >= until:
                continue
            if event['phase'] == 'begin':
                begun[event['number']] = event
                if event['op'] == 'put':
                    upload = Upload(event['image'], event['number'])
                    upload.begun = event['time']
                    uploads[event['upload']] = upload
                continue
            first = begun.pop(event['number'])
            if event['op'] == 'read':
                reads.append((first, event))
                continue
            upload = first['upload'], event['phase'], first, event
            unfinished.append(upload)
        unfinished.extend((event['upload'], 'killed', event, None)
                          for event in begun.values()
                          if event['op'] != 'read')
    # A delete may be in another log than that of the process that stored.
    for upload_id, phase, first, last in unfinished:
        upload = uploads[upload_id]
        if first['op'] == 'put':
            upload.refused |= phase == 'refused'
            if phase == 'end':
                upload.put = last['time']
        elif phase != 'refused':
            upload.delete_begun = min(upload.delete_begun or first['time'],
                                      first['time'])
            if phase == 'end':
                assert upload.deleted is None, 'it was deleted twice'
                upload.deleted = last['time']
    tags = {upload.tag: upload_id for upload_id, upload in uploads.items()}
    for _, event in reads:
        if 'tag' in event:
            event['upload'] = tags.get(event['tag'])
            assert event['tag'] is None or event['upload'], event
    return uploads, reads


def judge_reads(uploads, reads):
    stored = collections.defaultdict(list)
    for upload in uploads.values():
        if upload.put is not None:
            stored[upload.image_id].append(upload)
    for several in stored.values():
        several.sort(key=lambda upload: upload.put)
    for first, last in reads:
        start, end = first['time'], last['time']
        if last['upload'] is not None:
            upload = uploads[last['upload']]
            assert upload.image_id == first['image']
            assert not upload.refused
            assert upload.begun < end
            assert upload.deleted is None or upload.deleted > start, (
                'it was read after it was deleted', first, last)
            continue
        # Of the uploads stored by then only the last can be there still.
        several = stored[first['image']]
        after = bisect.bisect(several, start, key=lambda upload: upload.put)
        for upload in several[max(0, after - 1):after]:
            assert (upload.delete_begun is not None
                    and upload.delete_begun <= end), (
                'it was there and was not found', first, last)


def images_of(repo):
    return [name for name in repo.images() if name.startswith(PREFIX)]


def judge_end(repo, uploads):
    """Return the content of the images that are there, by their ids."""
    contents, present = {}, {}
    for image_id in images_of(repo):
        with repo.open_image(image_id) as image:
            contents[image_id] = image.read()
            tag = require_right(image_id, contents[image_id])
            present[image_id] = image.stat.upload_id
            assert uploads[image.stat.upload_id].tag == tag
    for upload_id, upload in uploads.items():
        is_there = present.get(upload.image_id) == upload_id
        if upload.refused or upload.deleted is not None:
            assert not is_there, vars(upload)
        elif upload.put is not None and upload.delete_begun is None:
            assert is_there, vars(upload)
    return contents


def survivors(uploads, repo):
    """Return the uploads that are there, now that no process works on any.

    Their unfinished operations will never be finished, so from now on each
    upload has to be there until a process deletes it again.
    """
    now = time.monotonic()
    found = {}
    for image_id in images_of(repo):
        upload_id = repo.stat(image_id).upload_id
        upload = found[upload_id] = uploads[upload_id]
        upload.put = upload.put or now
        upload.delete_begun = None
    return found


if __name__ == '__main__':
    sys.exit(run_worker(**json.loads(sys.argv[1])))
