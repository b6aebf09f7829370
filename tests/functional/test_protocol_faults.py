# SPDX-License-Identifier: Apache-2.0

"""The protocol: every call fails, and dies, once."""

import pytest

from tests.functional import protocol
from tests.functional.protocol import BLOCK
from tests.functional.protocol import SIZE
from tests.support import repositories
from tests.support.repositories import noise
from tests.support.repositories import open_repository
from tests.support.repositories import put
from tests.support.repositories import read_all

pytestmark = pytest.mark.slow

witness = protocol.witness
path = protocol.path


STEPS = [['put', 'old', 1, SIZE], ['put', 'image', 2, 70 * BLOCK],
         ['delete', 'old'], ['put', 'again', 2, 30 * BLOCK],
         ['put', 'old', 3, SIZE], ['read', 'image']]


def possible_contents(run, died):
    """Return each id's possible contents: seed and size, or None."""
    known = {}
    for number, (step, image_id, *what) in enumerate(STEPS[:5]):
        before = known.get(image_id, {None})
        after = {tuple(what)} if step == 'put' else {None}
        if number >= len(run.outcomes):
            # It was not acknowledged; only one step was under way.
            if died and number == len(run.outcomes):
                known[image_id] = before | after
        elif run.outcomes[number]['error'] is None:
            known[image_id] = after
        elif run.outcomes[number]['error'] not in (
                'ImageExists', 'ImageNotFound'):
            known[image_id] = before | after
    return known


def judge(path, run, died):
    with open_repository(path) as repo:
        known = possible_contents(run, died)
        there = repo.images()
        assert set(there) <= set(known)
        for image_id, contents in known.items():
            if image_id not in there:
                assert None in contents, (image_id, run.outcomes)
                continue
            data = read_all(repo, image_id)
            assert any(data == noise(c[1], c[0])
                       for c in contents if c is not None), image_id
        for image_id in there:
            repo.delete(image_id)
        for image_id, seed in (('old', 1), ('image', 2), ('new', 4)):
            put(repo, image_id, noise(SIZE, seed))
        for image_id, seed in (('old', 1), ('image', 2), ('new', 4)):
            assert read_all(repo, image_id) == noise(SIZE, seed)
    repositories.require_clean(path)


@protocol.FAULTS
@pytest.mark.parametrize('every', [
    7, pytest.param(1, marks=pytest.mark.long, id='all')])
def test_every_call_fails_once(witness, path, tmp_path, fault, every):
    """I8: acknowledged is intact, unacknowledged is absent or whole."""
    protocol.sweep(witness, path, tmp_path, STEPS, fault, every,
                   lambda place, run: judge(place, run, fault == 'kill'))
