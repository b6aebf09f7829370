#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""Four processes at once on one repository, against an oracle.

Each worker stores, reads, aborts and deletes at random, and logs the begin and
the end of each operation. Now and then one is killed and another takes its
place; the test meanwhile takes locks as the collector would. The content of an
image follows from its id and from a tag in its first bytes, so every byte that
anyone reads is verified. Deletes name the upload they mean, so that for each
upload it is known whether it must exist, must not, or may.
"""

import bisect
import collections
import contextlib
import itertools
import json
import os
import random
import signal
import time
import traceback

import pytest

from glance_dedup import exceptions
from tests import repositories
from tests.repositories import noise
from tests.repositories import open_repository

WORKERS = 4
IDS = [f'image-{seed}' for seed in range(12)]
BLOCK = 512
TAG = 24


def content(image_id, tag):
    """Much of it is in other images, too; some of it is its own."""
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


def need_right(image_id, data):
    """The tag of what was read, if it is right in every byte."""
    tag = data[:TAG].decode().rstrip()
    assert data == content(image_id, tag), f'{image_id} {tag} is wrong'
    return tag


class Worker:
    """One process's work."""

    def __init__(self, path, log, name, deadline):
        self.log = open(log, 'a')
        self.name = name
        self.deadline = deadline
        self.rng = random.Random(name)
        self.repo = open_repository(
            path, codec=self.rng.choice(['none', 'lz4', 'zstd']),
            threads=self.rng.choice([0, 1]))
        self.numbers = itertools.count()
        self.held = collections.deque()

    def tell(self, **fields):
        self.log.write(json.dumps({'time': time.monotonic(), **fields}) + '\n')
        self.log.flush()

    def work(self):
        steps = [self.put] * 9 + [self.read] * 8 + [self.delete] * 4 + [
            self.hold, self.read_held, self.abort]
        while time.monotonic() < self.deadline:
            image_id = self.rng.choice(IDS)
            number = f'{self.name}/{next(self.numbers)}'
            with contextlib.suppress(exceptions.ImageNotFound,
                                     exceptions.ImageExists):
                self.rng.choice(steps)(image_id, number)
        for image_id, image in self.held:
            need_right(image_id, image.read())
            image.close()
        self.repo.close()

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
            self.write(transaction, content(image_id, number))
            try:
                transaction.commit()
            except exceptions.ImageExists:
                self.tell(op='put', phase='refused', number=number)
                raise
            self.tell(op='put', phase='end', number=number)

    def abort(self, image_id, number):
        with self.repo.begin(image_id) as transaction:
            self.write(transaction, content(image_id, number))

    def read(self, image_id, number):
        self.tell(op='read', phase='begin', image=image_id, number=number)
        try:
            with self.repo.open_image(image_id) as image:
                upload = image.stat.upload_id
                data = image.read()
                need_right(image_id, data)
                for _ in range(3):
                    start = self.rng.randrange(len(data))
                    length = self.rng.randrange(3000)
                    assert (image.read(length, start)
                            == data[start:start + length])
        except exceptions.ImageNotFound:
            upload = None
        self.tell(op='read', phase='end', number=number, upload=upload)

    def hold(self, image_id, number):
        self.held.append((image_id, self.repo.open_image(image_id)))

    def read_held(self, image_id, number):
        if self.held:
            image_id, image = self.held.popleft()
            need_right(image_id, image.read())
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


def start_worker(path, log, name, deadline):
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)
        Worker(path, log, name, deadline).work()
        status = 0
    except BaseException:
        with open(log, 'a') as f:
            f.write(json.dumps({'failure': traceback.format_exc()}) + '\n')
    finally:
        os._exit(status)


def be_collector_for_a_moment(path, rng):
    """Lease and exclusive lock of a group, if they are free just now."""
    with open(path / 'locks' / 'groups', 'r+b') as f:
        group = rng.randrange(1, 20)
        for byte in rng.choice([
                (repositories.INTENT_BYTE + group,),
                (group, repositories.SHARE_BYTE + group)]):
            repositories.set_lock(f.fileno(), byte, 1)  # F_WRLCK
        time.sleep(rng.random() / 50)


def run_workers(path, seconds, kill_every):
    """Returns the logs' names and how many were killed."""
    rng = random.Random()
    deadline = time.monotonic() + seconds
    names = itertools.count()
    logs, running, killed = [], {}, 0

    def start():
        name = f'w{next(names)}'
        logs.append(path.parent / f'{name}.log')
        running[start_worker(path, logs[-1], name, deadline)] = name
    for _ in range(WORKERS):
        start()
    next_kill = time.monotonic() + kill_every
    try:
        while running:
            assert time.monotonic() < deadline + 60, 'they do not end'
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in running:
                name = running.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                if code == -signal.SIGKILL:
                    killed += 1
                    if time.monotonic() < deadline:
                        start()
                else:
                    assert code == 0, f'{name} ended with {code}:\n' + (
                        path.parent / f'{name}.log').read_text()[-3000:]
                continue
            now = time.monotonic()
            if next_kill < now < deadline:
                os.kill(rng.choice(list(running)), signal.SIGKILL)
                next_kill = now + kill_every * 2 * rng.random()
            be_collector_for_a_moment(path, rng)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return logs, killed


class Upload:
    """What is known about one store operation, and the delete of it."""

    def __init__(self, image_id):
        self.image_id = image_id
        self.begun = self.put = None     # times; put: acknowledged
        self.refused = False
        self.delete_begun = None         # the first attempt
        self.deleted = None              # acknowledged


def read_logs(logs):
    """Uploads by their id, and the reads."""
    uploads, reads, unfinished = {}, [], []
    for log in logs:
        begun = {}
        # One that was killed may not have come to make its log.
        lines = log.read_text().splitlines() if log.exists() else []
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # the last line of one that was killed
            assert 'failure' not in event, event['failure']
            if event['phase'] == 'begin':
                begun[event['number']] = event
                if event['op'] == 'put':
                    upload = Upload(event['image'])
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
    # Deletes may be in the log of another than the one who stored.
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
        # Of those stored by then only the last can be there still.
        several = stored[first['image']]
        after = bisect.bisect(several, start, key=lambda upload: upload.put)
        for upload in several[max(0, after - 1):after]:
            assert (upload.delete_begun is not None
                    and upload.delete_begun <= end), (
                'it was there and was not found', first, last)


def judge_end(repo, uploads):
    present = {}
    for image_id in repo.images():
        with repo.open_image(image_id) as image:
            need_right(image_id, image.read())
            present[image_id] = image.stat.upload_id
    for upload_id, upload in uploads.items():
        is_there = present.get(upload.image_id) == upload_id
        if upload.refused or upload.deleted is not None:
            assert not is_there, vars(upload)
        elif upload.put is not None and upload.delete_begun is None:
            assert is_there, vars(upload)
    assert set(present.values()) <= set(uploads)


def storm(path, seconds, kill_every):
    logs, killed = run_workers(path, seconds, kill_every)
    uploads, reads = read_logs(logs)
    judge_reads(uploads, reads)
    acknowledged = [u for u in uploads.values() if u.put is not None]
    died = [u for u in uploads.values() if u.put is None and not u.refused]
    assert len(acknowledged) > 10
    assert any(u.deleted for u in uploads.values())
    with open_repository(path) as repo:
        judge_end(repo, uploads)
        report = repositories.need_clean(path)
        assert report.figures['images'] == len(repo.images())
        # Nothing of those that were killed is in the way.
        for image_id in {u.image_id for u in died}:
            with contextlib.suppress(exceptions.ImageNotFound):
                repo.delete(image_id)
            repositories.put(repo, image_id, content(image_id, 'after'))
            assert need_right(image_id, repositories.read_all(
                repo, image_id)) == 'after'
        for group in range(1, len(os.listdir(path / 'groups')) + 1):
            for byte in (group, repositories.SHARE_BYTE + group):
                assert repositories.group_lock_held(path, byte) is None
    repositories.need_clean(path)
    return killed


@pytest.fixture
def path(tmp_path):
    return repositories.create(
        tmp_path / 'repository', block_size=BLOCK, group_slots=256,
        segment_size=4096)


def test_processes(path):
    storm(path, 5, kill_every=10 ** 6)


def test_processes_that_are_killed(path):
    assert storm(path, 6, kill_every=0.1) > 0


@pytest.mark.long
@pytest.mark.parametrize('kill_every', [0.03, 0.3, 10 ** 6])
def test_processes_for_long(path, kill_every):
    storm(path, 60, kill_every)
