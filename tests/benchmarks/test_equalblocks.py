# SPDX-License-Identifier: Apache-2.0

"""Counting by sorting gives the same as counting one by one."""

import collections
import json
import pathlib
import random
import subprocess

import pytest

from tests.benchmarks import papers

pytestmark = pytest.mark.long

SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 1 << 20)
WINDOW = 1 << 20


equalblocks = papers.fixture('equalblocks')


@pytest.fixture(scope='module')
def program(equalblocks, tmp_path_factory):
    return equalblocks.synthetic.build(
        str(tmp_path_factory.mktemp('program')), 'equalblocks')


def an_image(rng, pieces, length):
    """Return an image of few different pieces, so that many are equal."""
    image = b''.join(rng.choice(pieces) for _ in range(-(-length // 512)))
    return image[:length]


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    rng = random.Random(7)
    directory = tmp_path_factory.mktemp('images')
    pieces = [bytes(512)] * 4 + [rng.randbytes(512) for _ in range(3)] + [
        rng.randbytes(4096 * rng.randint(1, 3)) for _ in range(12)]
    first = an_image(rng, pieces, 3 * WINDOW)
    almost = bytearray(first)
    almost[next(i for i in range(4095, len(first), 4096) if first[i])] ^= 1
    tail = rng.randbytes(100)
    paths = []
    for name, content in (
            ('one-base', first),
            # Equal at the same offset, except for a piece; then some more.
            ('one-clone', almost[:WINDOW] + rng.randbytes(70000)
             + almost[WINDOW + 70000:] + rng.randbytes(1000)),
            ('two-base', an_image(rng, pieces, 2 * WINDOW + 12345)),
            ('two-clone', bytes(4096) + first[:4096]),
            # The last piece, filled up with zeros, is at the start, too.
            ('tail', tail.ljust(WINDOW, b'\0') + rng.randbytes(WINDOW)
             + tail),
            # So many copies do not stay in memory.
            ('often', pieces[5] * 5000),
            ('zeros', bytes(WINDOW + 1))):
        path = directory / f'{name}.raw'
        path.write_bytes(content)
        paths.append(str(path))
    return paths


def blocks_of(path, size):
    """Return blocks by their offsets, the last one filled up with zeros."""
    content = pathlib.Path(path).read_bytes()
    return {at: content[at:at + size].ljust(size, b'\0')
            for at in range(0, len(content), size)}


def in_buckets(references):
    found = collections.Counter()
    for count in references:
        bucket = 0
        while 2 ** bucket < count:
            bucket += 1
        found[bucket, 'blocks'] += 1
        found[bucket, 'references'] += count
    return [[found[i, 'blocks'], found[i, 'references']]
            for i in range(1 + max((b for b, _ in found), default=-1))]


def counted(images, size):
    zeros, found = 0, collections.Counter()
    for path in images:
        for block in blocks_of(path, size).values():
            if any(block):
                found[block] += 1
            else:
                zeros += 1
    return {'zeros': zeros, 'counts': in_buckets(found.values())}


def run(program, spool, *arguments):
    done = subprocess.run([program, str(spool), *arguments], check=True,
                          capture_output=True, timeout=60)
    assert not list(spool.iterdir())
    return json.loads(done.stdout)


def test_blocks_of_all_sizes(program, images, tmp_path):
    found = run(program, tmp_path, *(a for i in images for a in (i, '-')))
    assert found['bytes'] == sum(pathlib.Path(i).stat().st_size
                                 for i in images)
    assert found['blocks'] == {str(size): counted(images, size)
                               for size in SIZES}


def test_the_same_offset(program, images, tmp_path):
    found = run(program, tmp_path, *(a for i in images for a in (i, '-')))
    places = collections.Counter(
        (at, block) for path in images
        for at, block in blocks_of(path, 4096).items() if any(block))
    assert found['places'] == {'counts': in_buckets(places.values())}


def test_which_base(equalblocks):
    names = ['/x/sid-web.raw', '/x/old-mail.raw', '/x/sid-mail.raw',
             '/x/sid-mail-aged.raw', '/x/sid-mail-aged-more.raw',
             '/x/sid-mailer.raw', '/x/old.raw']
    assert equalblocks.with_bases(names) == [
        (names[0], '-'), (names[2], names[0]), (names[3], names[2]),
        (names[4], names[3]), (names[5], names[0]), (names[1], '-'),
        (names[6], names[1])]


def test_bases(equalblocks, program, images, tmp_path):
    """The first image of each distribution is the base of the others."""
    found = equalblocks.analyse(images, str(tmp_path), program)
    base = equal = other = 0
    clone_of = (None, images[0], None, images[2], None, None, None)
    for path, of in zip(images, clone_of):
        bases = {} if of is None else blocks_of(of, 4096)
        for at, block in blocks_of(path, 4096).items():
            if any(block):
                base += of is None
                equal += bases.get(at) == block
                other += of is not None and bases.get(at) != block
    assert equal and other
    assert found.clones == base + other
    assert equalblocks.sharing(found) == {
        'each block once': found.blocks.kept,
        'clones, any image as base': found.places.kept,
        'clones, each of its base': found.clones,
        'nothing shared': base + equal + other}
    assert found.blocks.kept < found.places.kept < found.clones


def test_shares(equalblocks, capsys):
    def blocks(zeros, *counts):
        return {'zeros': zeros, 'counts': [list(c) for c in counts]}

    found = equalblocks.Analysis({
        'bytes': 20 * 4096, 'base': 6, 'equal': 1, 'other': 3,
        'blocks': {'4096': blocks(10, (1, 1), (1, 2), (2, 7)),
                   '8192': blocks(4, (6, 6))},
        'places': blocks(0, (8, 8), (1, 2))})
    assert found.used == 10 * 4096
    assert found.share(found.blocks.kept * 4096) == 0.4
    equalblocks.show_sizes(found)
    equalblocks.show_counts(found)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[3] == ['4', 'KiB', '50.0%', '0.0', '0.0', '40.0%', '40.6%']
    assert lines[4] == ['8', 'KiB', '40.0%', '0.0', '0.0', '120.0%', '120.8%']
    assert lines[7:] == [['1', '1', '25.00%', '10.00%'],
                         ['2', '1', '25.00%', '20.00%'],
                         ['3-4', '2', '50.00%', '70.00%']]


@pytest.mark.parametrize('bucket, words', list(enumerate(
    ['1', '2', '3-4', '5-8', '9-16', '17-32'])))
def test_how_often(equalblocks, bucket, words):
    assert equalblocks.times(bucket) == words
