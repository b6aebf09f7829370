# SPDX-License-Identifier: Apache-2.0

"""Several processes count the same as one."""

import collections
import os
import random
import struct
import time

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies
import pytest

from glance_dedup.base import pacing
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import rebuild_worker
from glance_dedup.maintenance import records
from glance_dedup.maintenance import refcount_rebuild
from tests.support import maintenance
from tests.support.repositories import put
from tests.unit.repository import format_writer

pytest_plugins = ['tests.support.maintainer_fixtures']

GROUPS = block_addresses.GROUP_SLOTS
TWO = refcount_rebuild.local(2)


# -- adding up ----------------------------------------------------------------

def packed(runs):
    return block_addresses.pack(number for run in runs for number in run)


_RUNS = strategies.lists(strategies.tuples(
    strategies.integers(1, 5), strategies.integers(0, GROUPS - 1),
    strategies.integers(1, 3000)).filter(lambda r: r[1] + r[2] <= GROUPS),
    max_size=40)


@settings(deadline=None)
@given(strategies.lists(_RUNS, max_size=4), strategies.integers(1, 9))
def test_sums(pieces, most):
    """With little memory the runs are read several times."""
    expected = collections.Counter(
        (group, slot + i) for runs in pieces for group, slot, blocks in runs
        for i in range(blocks))
    found = collections.Counter()
    keys = []
    for (group, chunk), counts in rebuild_worker.summed(
            lambda: map(packed, pieces), most):
        keys.append((group, chunk))
        found.update({
            (group, chunk * records.CHUNK_SLOTS + slot): count
            for slot,
            count in enumerate(block_addresses.unpack(counts)) if count})
    assert found == expected
    assert keys == sorted(set(keys))


@pytest.mark.parametrize('groups, partitions', [
    (0, 1), (1, 1), (128, 1), (129, 2), (8192, 64), (1 << 24, 256)])
def test_partitions(groups, partitions):
    assert rebuild_worker.partitions_for(groups) == partitions
    found = {rebuild_worker.partition_of(group, partitions)
             for group in range(1, min(groups, 40000) + 1)}
    assert found <= set(range(partitions))


# -- a whole catalog ----------------------------------------------------------

@pytest.fixture
def small_partitions(monkeypatch):
    monkeypatch.setattr(rebuild_worker, '_GROUPS', 1)


def test_each_group_is_in_one_partition(small_partitions):
    runs = [(group, slot, 1) for slot in range(50) for group in (1, 2, 2, 6)]
    found = [b''] * 3

    def write(part, more):
        found[part] += more
    buffers = rebuild_worker.Buffers(3, write)
    for begin in range(0, len(runs), 9):
        buffers.add(packed(runs[begin:begin + 9]))
    buffers.flush()
    for part in range(3):
        assert list(block_addresses.runs_in(found[part])) == [
            run for run in runs if run[0] % 3 == part]


def fill(repo, images=12):
    rng = random.Random(1)
    for number in range(images):
        put(repo, f'image-{number:02}', maintenance.content(
            *(rng.randrange(20) for _ in range(8))))
    put(repo, 'empty', b'')


def contents(maintainer):
    """Return all records that a rebuild derives."""
    return {key: value for kind in (records.LEDGER, records.BEGUN,
                                    records.PART, records.GROUP,
                                    records.COUNTS)
            for key, value in maintainer.catalog._items(kind)}


def require_settled(maintainer):
    """Require that the counts are the recipes' after accounting."""
    maintenance.account(maintainer)
    maintenance.require_counted(maintainer)


@pytest.mark.parametrize('processes', [2, 3])
def test_the_same_catalog(repo, maintainer, processes, small_partitions):
    """The catalog is the same for any number of processes and partitions."""
    fill(repo)
    maintainer.rebuild()
    expected = contents(maintainer)
    assert len(expected) > 13 and len(maintainer.engine.groups()) > 3
    told = []
    maintainer.rebuild(lambda *step: told.append(step),
                       hosts=refcount_rebuild.local(processes))
    assert contents(maintainer) == expected and not maintainer.warnings
    assert maintainer.catalog.valid
    assert {what for _, _, what in told} == {
        'reading images', 'adding up counts'}
    assert all(done <= total for done, total, _ in told)
    # The ledger is complete, and accounting continues with it.
    maintainer.reconcile()
    repo.delete('image-03')
    require_settled(maintainer)


def test_chunks_of_one_group(maintainer):
    """All chunks of a group are added to the group's used blocks."""
    catalog = maintainer.catalog
    batch = catalog.batch()
    for chunk, slots in ((0, 3), (1, 5)):
        catalog.record_counts(batch, 7, chunk, block_addresses.pack(
            [2] * slots + [0] * (records.CHUNK_SLOTS - slots)))
    assert catalog.group(7, batch)['used'] == 8
    assert block_addresses.unpack(catalog.counts(7, 2048, batch)).count(2) == 8


def test_large_recipes(repo, maintainer, monkeypatch):
    """Large recipes are counted, and uncounted, in many batches."""
    monkeypatch.setattr('glance_dedup.maintenance.maintainer_role.BATCH_BYTES',
                        1 << 13)
    put(repo, 'large', maintenance.scattered(*range(4)))
    put(repo, 'other', maintenance.scattered(2, 5))
    maintainer.rebuild(hosts=TWO)
    assert not maintainer.warnings
    require_settled(maintainer)
    repo.delete('large')
    require_settled(maintainer)


@pytest.mark.parametrize('at', [100, 4196])
def test_unreadable_recipes(path, repo, maintainer, at):
    """Nothing of a recipe with a bad header or page is counted."""
    fill(repo)
    recipe = path / 'images' / 'image-05'
    content = bytearray(recipe.read_bytes())
    content[at] ^= 255
    recipe.write_bytes(content)
    maintainer.rebuild()
    expected = contents(maintainer), maintainer.unreadable.reasons()
    assert len(expected[1]) == 1
    maintainer.rebuild(hosts=TWO)
    assert (contents(maintainer), maintainer.unreadable.reasons()) == expected
    assert not maintainer.warnings


# -- errors -------------------------------------------------------------------

def test_images_that_go_meanwhile(repo, maintainer, monkeypatch):
    """Accounting corrects for images that are deleted during the count."""
    fill(repo)
    real = maintainer.recipes.images

    def images():
        found = real()
        repo.delete('image-04')
        repo.delete('image-05')
        put(repo, 'image-05', maintenance.content(99))
        return found
    monkeypatch.setattr(maintainer.recipes, 'images', images)
    maintainer.rebuild(hosts=TWO)
    monkeypatch.undo()
    require_settled(maintainer)


@pytest.mark.parametrize('killed', [(0,), (1, 0)])
@pytest.mark.parametrize('when', ['reading images', 'adding up counts'])
def test_a_worker_that_is_killed(repo, maintainer, monkeypatch, when, killed,
                                 small_partitions):
    """If a worker is killed, the maintainer counts alone."""
    fill(repo)
    maintainer.rebuild()
    expected = contents(maintainer)
    children = []
    real = refcount_rebuild.subprocess.Popen

    def popen(*args, **kwargs):
        children.append(real(*args, **kwargs))
        return children[-1]
    monkeypatch.setattr(refcount_rebuild.subprocess, 'Popen', popen)

    def progress(done, total, what):
        if what == when and not done:
            for number in killed:
                children[number].kill()
    maintainer.rebuild(progress, hosts=TWO)
    assert 'rebuilt by one process' in maintainer.warnings[-1]
    assert contents(maintainer) == expected and maintainer.catalog.valid
    assert all(child.returncode is not None for child in children)


def test_two_files_of_one_transaction(path, repo, maintainer):
    """A forged copy of a recipe is not counted twice."""
    fill(repo)
    forged = bytearray((path / 'images' / 'image-01').read_bytes())
    assert forged[144:152] == b'image-01'
    forged[144:152] = b'image-99'
    forged[4088:4096] = struct.pack('<Q',
                                    format_writer.xxh3(bytes(forged[:4088])))
    (path / 'images' / 'image-99').write_bytes(forged)
    maintainer.rebuild()
    expected = contents(maintainer), maintainer.unreadable.reasons()
    maintainer.rebuild(hosts=TWO)
    assert (contents(maintainer), maintainer.unreadable.reasons()) == expected
    assert 'is a copy of another recipe file' in maintainer.warnings[-1]


@pytest.mark.parametrize('directory', ['/nowhere', '/dev/full'])
def test_no_disk_for_the_partitions(repo, maintainer, monkeypatch, directory):
    fill(repo)
    monkeypatch.setenv('TMPDIR', directory)
    maintainer.rebuild(hosts=TWO)
    assert 'processes cannot count' in maintainer.warnings[-1]
    require_settled(maintainer)


def test_a_full_disk(repo, maintainer, monkeypatch):
    fill(repo)
    monkeypatch.setattr(
        refcount_rebuild.tempfile, 'TemporaryFile',
        lambda *args, **kwargs: open('/dev/full', 'ab', buffering=0))
    maintainer.rebuild(hosts=TWO)
    assert 'No space left on device' in maintainer.warnings[-1]
    require_settled(maintainer)


def test_it_can_be_stopped(repo, maintainer):
    """A stopped rebuild leaves no worker; the next task restarts it (N2.4)."""
    fill(repo)
    before = children()
    pace = pacing.Pace()
    pace.stop()
    with pytest.raises(pacing.Stopped):
        maintainer.rebuild(pace.step, hosts=TWO)
    assert not maintainer.catalog.valid
    assert children() <= before
    maintainer.guard(lambda: None)
    require_settled(maintainer)


def test_workers_end_with_the_maintainer(repo):
    """Workers end when their socket is closed."""
    before = children()
    workers = refcount_rebuild.Workers(repo, TWO, 1)
    for worker in workers._workers:
        worker.peer.close()
    pids = children() - before
    assert len(pids) == 2
    end = time.monotonic() + 60
    while any(map(_is_running, pids)):
        assert time.monotonic() < end
        time.sleep(0.01)
    workers.close()


def _fields(pid):
    try:
        with open(f'/proc/{pid}/stat') as f:
            return f.read().rsplit(') ', 1)[1].split()
    except OSError:
        return ['X', '0']


def children():
    """Return this process's children; other tests may have left some."""
    return {int(name) for name in os.listdir('/proc') if name.isdigit()
            and _fields(name)[1] == str(os.getpid())}


def _is_running(pid):
    return _fields(pid)[0] not in 'XZ'
