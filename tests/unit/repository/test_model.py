# SPDX-License-Identifier: Apache-2.0

"""A repository against a model of it in memory, by a hypothesis machine."""

import os
import pathlib
import random
import shutil
import tempfile

import hypothesis
from hypothesis import stateful
from hypothesis import strategies
import pytest

from glance_dedup.base import exceptions
from glance_dedup.base import scopes
from tests.support import repositories
from tests.support.repositories import noise

pytestmark = pytest.mark.slow

BLOCK = 512
IDS = strategies.sampled_from(['a', 'b', 'c', 'd', 'e-5', 'F_6'])
# Projects and scopes of the images.
BELONGING = {'c': ('p', 'project'), 'd': ('p', 'project'),
             'e-5': ('q', 'project'), 'F_6': ('p', 'global')}
CODECS = strategies.sampled_from(['none', 'lz4', 'zstd'])

# A content is a list of runs and the length of a last, short block.
RUNS = strategies.lists(strategies.tuples(
    strategies.sampled_from(['noise', 'common', 'zeros', 'text', 'same']),
    strategies.integers(0, 5),     # which blocks
    strategies.integers(1, 25)),   # blocks
    max_size=6)
CONTENTS = strategies.tuples(RUNS, strategies.integers(0, BLOCK - 1))


def make(content):
    runs, tail = content
    data = bytearray()
    for kind, which, blocks in runs:
        if kind == 'noise':
            data += noise(blocks * BLOCK, f'{which} of {blocks}')
        elif kind == 'common':
            # The contents share their beginning, and differ in length.
            data += noise(25 * BLOCK, which)[:blocks * BLOCK]
        elif kind == 'zeros':
            data += bytes(blocks * BLOCK)
        elif kind == 'text':
            data += (b'text %d and ' % which * BLOCK)[:blocks * BLOCK]
        else:
            data += noise(BLOCK, which) * blocks
    return bytes(data + noise(tail, tail))


def cut(data, seed):
    """Return pieces of odd lengths."""
    rng = random.Random(seed)
    at = 0
    while at < len(data):
        length = rng.choice([1, 100, BLOCK, 3 * BLOCK + 1, 20000])
        yield data[at:at + length]
        at += length


class Machine(stateful.RuleBasedStateMachine):
    """Two handles on one repository; either may do the next step."""

    def __init__(self):
        super().__init__()
        self.top = pathlib.Path(tempfile.mkdtemp(prefix='glance-dedup-model-'))
        self.path = self.top / 'repository'
        self.model = {}         # id: content
        self.handles = []
        self.images = []        # (open image, content)
        self.transactions = []  # [id, open transaction, content so far]
        self.options = {}

    @stateful.initialize(
        segment=strategies.sampled_from([512, 4096, 65536]),
        chunking=strategies.sampled_from(['fixed', 'content-defined 64 256']),
        digest=strategies.sampled_from([
            ('sha256', 'fingerprint'), ('blake2s256', 'bytes'),
            ('xxh3-128', 'bytes'), ('weak-8', 'bytes')]))
    def create(self, segment, chunking, digest):
        self.digest = digest[0]
        repositories.create(
            self.path, block_size=BLOCK, group_slots=64, segment_size=segment,
            fingerprint=digest[0], verify=digest[1], chunking=chunking)
        self.handles = [self.open('lz4', 0), self.open('none', 2)]

    def open(self, codec, threads):
        return repositories.open_repository(
            self.path, codec=codec, threads=threads, _allow_weak=True)

    @property
    def repo(self):
        # The next call uses the other one.
        self.handles.reverse()
        return self.handles[0]

    def store(self, repo, image_id, data, seed, commit=True):
        with repo.begin(image_id,
                        *BELONGING.get(image_id, ())) as transaction:
            for piece in cut(data, seed):
                transaction.write(piece)
            if commit:
                stat = transaction.commit()
                assert stat.size == len(data)

    def expect_stored(self, image_id, data, seed):
        if image_id in self.model:
            with pytest.raises(exceptions.ImageExists):
                self.store(self.repo, image_id, data, seed)
        else:
            self.store(self.repo, image_id, data, seed)
            self.model[image_id] = data

    # -- steps --

    @stateful.rule(image_id=IDS, content=CONTENTS)
    def put(self, image_id, content):
        self.expect_stored(image_id, make(content), len(self.model))

    @stateful.precondition(lambda self: self.model)
    @stateful.rule(image_id=IDS, parts=strategies.lists(
        strategies.tuples(strategies.integers(0, 9),
                          strategies.integers(0, 60),
                          strategies.integers(1, 60),
                          strategies.sampled_from([0, 0, 0, 100])),
        min_size=1, max_size=4))
    def put_mix(self, image_id, parts):
        """Store pieces of existing images, mostly in whole blocks."""
        stored = [self.model[i] for i in sorted(self.model)]
        data = bytearray()
        for which, first, blocks, shift in parts:
            start = first * BLOCK + shift
            data += stored[which % len(stored)][start:start + blocks * BLOCK]
        self.expect_stored(image_id, bytes(data), len(parts))

    @stateful.rule(image_id=IDS, content=CONTENTS)
    def abort(self, image_id, content):
        if image_id not in self.model:
            self.store(self.repo, image_id, make(content), 7, commit=False)

    @stateful.rule(image_id=IDS)
    def delete(self, image_id):
        if image_id in self.model:
            self.repo.delete(image_id)
            del self.model[image_id]
        else:
            with pytest.raises(exceptions.ImageNotFound):
                self.repo.delete(image_id)

    @stateful.rule(image_id=IDS)
    def delete_by_upload(self, image_id):
        if image_id in self.model:
            upload_id = self.repo.stat(image_id).upload_id
            other = '0' * 32
            with pytest.raises(exceptions.ImageNotFound):
                self.repo.delete(image_id, upload_id=other)
            self.repo.delete(image_id, upload_id=upload_id)
            del self.model[image_id]

    @stateful.rule(codec=CODECS, threads=strategies.sampled_from([0, 2]))
    def reopen(self, codec, threads):
        self.repo.close()
        self.handles[0] = self.open(codec, threads)

    @stateful.rule(image_id=IDS, content=CONTENTS,
                   ends=strategies.booleans())
    def fork_and_store(self, image_id, content, ends):
        data = make(content)
        repo = self.repo

        def child():
            if image_id in self.model:
                repo.delete(image_id)
            self.store(repo, image_id, data, 3)
            for _, transaction, _ in self.transactions:
                with pytest.raises(exceptions.ClosedError):
                    transaction.write(b'x')
            for image, _ in self.images:
                with pytest.raises(exceptions.ClosedError):
                    image.read()
            # Another dies in the middle.
            dying = repo.begin(f'dying-{os.getpid()}')
            dying.write(data)
            if ends:
                for handle in self.handles:
                    handle.close()
            return repositories.read_all(self.handles[1], image_id) == data \
                if not ends else True
        assert repositories.in_child(child)
        self.model[image_id] = data

    @stateful.rule(image_id=IDS, start=strategies.floats(0, 1),
                   length=strategies.integers(0, 40 * BLOCK))
    def read_range(self, image_id, start, length):
        if image_id in self.model:
            data = self.model[image_id]
            start = int(start * len(data))
            with self.repo.open_image(image_id) as image:
                assert image.size == len(data)
                assert (image.read(length, start)
                        == data[start:start + length])

    @stateful.rule(image_id=IDS)
    def open_image(self, image_id):
        if image_id in self.model:
            self.images.append(
                (self.repo.open_image(image_id), self.model[image_id]))

    @stateful.precondition(lambda self: self.images)
    @stateful.rule(close=strategies.booleans())
    def read_open_image(self, close):
        image, data = self.images[0]
        assert image.read() == data
        if close:
            image.close()
            del self.images[0]

    @stateful.precondition(lambda self: len(self.transactions) < 3)
    @stateful.rule(image_id=IDS)
    def begin(self, image_id):
        if image_id not in self.model:
            self.transactions.append(
                [image_id, self.repo.begin(
                    image_id, *BELONGING.get(image_id, ())), b''])

    @stateful.precondition(lambda self: self.transactions)
    @stateful.rule(content=CONTENTS)
    def write(self, content):
        self.transactions.append(self.transactions.pop(0))
        data = make(content)
        self.transactions[0][1].write(data)
        self.transactions[0][2] += data

    @stateful.precondition(lambda self: self.transactions)
    @stateful.rule(commit=strategies.booleans())
    def end(self, commit):
        image_id, transaction, data = self.transactions.pop(0)
        if not commit:
            transaction.abort()
        elif image_id in self.model:
            with pytest.raises(exceptions.ImageExists):
                transaction.commit()
            transaction.abort()
        else:
            transaction.commit()
            self.model[image_id] = data

    @stateful.rule()
    def forget_filter(self):
        for file in self.top.glob('repository-filter/*'):
            file.unlink()

    @stateful.rule()
    def rebuild_filter(self):
        self.repo.rebuild_filter()

    # -- invariants -----------------------------------------------------------

    @stateful.invariant()
    def same_images(self):
        for handle in self.handles:
            assert handle.images() == sorted(self.model)

    def require_distinct(self):
        """Require that an image only names blocks of its own scope."""
        for image_id in self.model:
            with self.repo.open_image(image_id) as image:
                assert {repositories.Group(
                    self.path, extent.group).data[32:48].hex()
                    for extent in image.extents() if extent.group} <= {
                        image.stat.scope}
                project, scope = BELONGING.get(image_id, ('', 'global'))
                assert image.stat.project == project
                assert image.stat.scope == scopes.choose(scope, project).hex()

    def teardown(self):
        try:
            if not self.handles:
                return
            for image_id, data in self.model.items():
                assert repositories.read_all(self.repo, image_id) == data
            self.require_distinct()
            for _, transaction, _ in self.transactions:
                transaction.abort()
            for image, data in self.images:
                assert image.read() == data
                image.close()
            for handle in self.handles:
                handle.close()
            if self.digest != 'weak-8':
                repositories.require_clean(self.path)
            held = [byte for group in range(1, 200) for byte in (
                group, repositories.SHARE_BYTE + group)]
            assert not any(repositories.group_lock_held(self.path, byte)
                           for byte in held)
        finally:
            shutil.rmtree(self.top)


def run_machine(examples, steps):
    stateful.run_state_machine_as_test(Machine, settings=hypothesis.settings(
        max_examples=examples, stateful_step_count=steps, deadline=None,
        database=None, print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck)))


# Long: forty sequences of thirty steps are tried.
def test_model():
    run_machine(40, 30)


@pytest.mark.long
def test_model_at_length():
    run_machine(600, 60)
