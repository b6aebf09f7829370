# SPDX-License-Identifier: Apache-2.0

"""Volumes: every system call of an owner fails, and dies, once (V1 to V8)."""

import pytest

from glance_dedup.repository import openvolumes
from tests.functional import protocol
from tests.support import repositories
from tests.support.repositories import noise

witness = protocol.witness

PART = 64 << 10
SIZE = 3 * PART
LONG = 5 * PART + 512

# A write of at most 64 KiB is one record: it is there, or it is not.
STEPS = [['own', 'disk'], ['write', 100, 1, 9000], ['flush'],
         ['write', PART - 700, 2, 3000], ['zero', 512, 4096], ['checkpoint'],
         ['write', 200, 3, 5000], ['resize', LONG],
         ['write', LONG - 3000, 4, 3000], ['flush'], ['disown'],
         ['own', 'disk'], ['zero', PART - 600, 700], ['checkpoint'],
         ['write', 3, 5, 100], ['disown']]


@pytest.fixture
def path(tmp_path):
    path = repositories.create(
        tmp_path / 'repository', block_size=512, group_slots=64,
        segment_size=2048)
    with repositories.open_repository(path) as repo:
        openvolumes.create(repo, 'disk', SIZE, part_size=PART)
    return path


def after(data, step, *what):
    """Return the volume's content after a step."""
    if step == 'resize':
        return data.ljust(what[0], b'\0')
    if step == 'write':
        offset, seed, size = what
        new = noise(size, seed)
    elif step == 'zero':
        offset, length = what
        new = bytes(length)
    else:
        return data
    return data[:offset] + new + data[offset + len(new):]


def possible(run):
    """Return all contents that the volume may have.

    A killed process loses no acknowledged step. A failed step, or one under
    way, is there as a whole or not at all.
    """
    found = {bytes(SIZE)}
    for number, step in enumerate(STEPS[:len(run.outcomes) + 1]):
        done = {after(data, *step) for data in found
                # A write behind the end changes no byte.
                if step[0] != 'write' or step[1] < len(data)}
        if number < len(run.outcomes) and (
                run.outcomes[number]['error'] is None):
            found = done
        else:
            found |= done
    return found


def judge(path, run):
    with repositories.open_repository(path) as repo:
        with openvolumes.open_volume(repo, 'disk') as volume:
            data = volume.read(volume.size, 0)
            assert data in possible(run), run.outcomes
            volume.write(noise(2000, 9), 1000)
            volume.checkpoint()
        with openvolumes.open_volume(repo, 'disk') as volume:
            assert volume.read(volume.size, 0) == after(
                data, 'write', 1000, 9, 2000)
        openvolumes.delete(repo, 'disk')
        assert not repo.recipes()
    repositories.require_clean(path)


# Long: all steps are repeated, and judged, for each of many failing calls.
@protocol.FAULTS
@pytest.mark.parametrize('every', [
    pytest.param(17, marks=pytest.mark.slow),
    pytest.param(1, marks=pytest.mark.long, id='all')])
def test_every_call_fails_once(witness, path, tmp_path, fault, every):
    protocol.sweep(witness, path, tmp_path, STEPS, fault, every, judge)
