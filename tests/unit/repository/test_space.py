# SPDX-License-Identifier: Apache-2.0

"""The parts of a repository add up to all of its bytes."""

import subprocess

import pytest

from dedupd.tasks import collector
from dedupd.tasks import merger
from dedupd.tasks import recompressor
from dedupd.tasks import scrubber
from glance_dedup.base import pacing
from glance_dedup.repository import space
from tests.support import maintenance
from tests.support.maintenance import BLOCK
from tests.support.maintenance import SLOTS
from tests.support import repositories
from tests.support.repositories import noise
from tests.support.repositories import put
from tests.support import volume_writer

pytest_plugins = ['tests.support.maintainer_fixtures']

GROUP_START = 8192      # of 64 slots: the bytes before the segments


def du(path):
    found = subprocess.run(['du', '-s', '--block-size=1', path], check=True,
                           capture_output=True, text=True, timeout=60)
    return int(found.stdout.split()[0])


def parts_of(repo):
    return {part.name: part for part in space.parts(repo)}


def text(blocks, seed):
    return noise(blocks * BLOCK // 2, seed).hex().encode()


@pytest.fixture
def filled(path, repo, other):
    """A repository with all kinds of parts, and a recipe with two names."""
    with repositories.open_repository(path, codec='lz4') as lz4:
        put(lz4, 'text', text(SLOTS, 1) + b'the end')
    put(other, 'noise', noise(SLOTS * BLOCK, 2))
    with maintenance.maintaining(repo) as maintainer:
        recompressor.run_once(maintainer, pacing.Pace(), 'zstd', 1)
        merger.run_once(maintainer, pacing.Pace())
        scrubber.run_once(maintainer, pacing.Pace(), spare_threshold=1)
    put(other, 'deleted', noise(3 * BLOCK, 4))
    other.delete('deleted')
    put(other, 'not-counted', noise(2 * BLOCK, 5))
    volume = volume_writer.Volume(path, bytes.fromhex(repo.repository_id))
    volume.journal().data(0, noise(30000, 6)).save()
    return path


def test_the_store_of_a_placeholder_is_a_hole(path, repo, other):
    put(other, 'image', noise(3 * BLOCK, 1))
    other.delete('image')
    with maintenance.maintaining(repo) as maintainer:
        assert collector.run_once(maintainer, pacing.Pace()).rewritten == 1
    parts = space.parts(other)
    assert sum(part.bytes for part in parts) == du(path)
    assert all(part.bytes >= 0 for part in parts), parts
    assert parts_of(other)['fingerprint stores'].bytes <= 4096


def test_every_byte_is_of_some_part(filled, other):
    found = parts_of(other)
    assert sum(part.bytes for part in found.values()) == du(filled)
    assert all(part.bytes > 0 for part in found.values())
    assert set(found) >= {
        'blocks, none', 'blocks, zstd', 'segment headers',
        'fingerprint stores', 'recipes', 'recipes in flight', 'catalog',
        'journals of volumes', 'spare copies', 'reserve', 'others'}
    assert found['fingerprint stores'].bytes == GROUP_START * len(
        maintenance.groups(filled))


def test_blocks_by_their_codec(path, other):
    put(other, 'noise', noise(20 * BLOCK, 1))
    with repositories.open_repository(path, codec='zstd') as zstd:
        put(zstd, 'text', text(8, 2))
    found = parts_of(other)
    assert found['blocks, none'].bytes == 20 * BLOCK
    assert found['blocks, none'].plain_bytes == 20 * BLOCK
    assert found['blocks, zstd'].plain_bytes == 8 * BLOCK
    assert found['blocks, zstd'].bytes < 6 * BLOCK
    assert 'blocks, lz4' not in found
    # Segments of four blocks.
    assert found['segment headers'].bytes == 32 * 7


def test_dead_bytes(path, repo, other):
    put(other, 'whole', noise(16 * BLOCK, 1))
    put(other, 'some', b''.join(noise(16 * BLOCK, 1)[at:at + BLOCK]
                                for at in range(0, 16 * BLOCK, 4 * BLOCK)))
    other.delete('whole')
    with maintenance.maintaining(repo) as maintainer:
        collector.run_once(maintainer, pacing.Pace(), live_share=0,
                           evacuate_share=0)
    found = parts_of(other)
    # One block of each segment is in use; the segment's bytes all count.
    assert found['blocks, none'].bytes == 16 * BLOCK
    assert found['blocks, none'].plain_bytes == 4 * BLOCK
    assert sum(part.bytes for part in found.values()) == du(path)


def test_a_group_that_cannot_be_read(filled, other):
    errors = []
    repositories.group_path(filled, 1).write_bytes(b'x' * 5000)
    found = {part.name: part for part in space.parts(
        other, unreadable=errors.append)}
    assert 'groups/00000001' in str(errors[0])
    assert found['not known'].bytes == 8192
    assert sum(part.bytes for part in found.values()) == du(filled)
