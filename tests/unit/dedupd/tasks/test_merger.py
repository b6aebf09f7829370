# SPDX-License-Identifier: Apache-2.0
"""Merging (N10): every duplicate is found, and only the space changes.

Duplicates arise as they do in use: from uploads at the same time, which cannot
see one another's blocks; from a filter without a hint; and from fingerprint
tables that were skipped because there were too many.
"""

import array
import contextlib
import dataclasses
import os
import pathlib
import random
import signal
import subprocess
import sys

import pytest

from dedupd.tasks import collector
from dedupd.tasks import exactindex
from dedupd.tasks import merger
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from tests.support import maintenance
from tests.support.maintenance import account
from tests.support import repositories

pytest_plugins = ['tests.support.maintainer_fixtures']

TOP = pathlib.Path(__file__).resolve().parents[4]

MIB = 1 << 20
BLOCK = 4096

POLICIES = {
    'hash': {'fingerprint': 'sha256', 'verify': 'fingerprint'},
    'value': {'fingerprint': 'xxh3-128', 'verify': 'bytes'},
}


@pytest.fixture(params=sorted(POLICIES))
def path(request, tmp_path):
    return repositories.create(tmp_path / 'repo', block_size=BLOCK,
                               group_slots=1024, **POLICIES[request.param])


@pytest.fixture
def repo(path):
    with repositories.open_repository(path) as repo:
        yield repo


def put_at_once(repo, **images):
    """Make uploads that cannot find one another's blocks.

    A write of 1 MiB or more is looked up and stored at once. The commit
    publishes it.
    """
    with contextlib.ExitStack() as stack:
        transactions = {
            image_id: stack.enter_context(repo.begin(image_id))
            for image_id in images}
        for image_id, data in images.items():
            assert len(data) >= MIB
            transactions[image_id].write(data)
        for transaction in transactions.values():
            transaction.commit()


def merge(maintainer, **options):
    return merger.run_once(maintainer, pacing.Pace(), **options)


def collect(maintainer):
    return collector.run_once(maintainer, pacing.Pace())


def addresses(maintainer, image_id):
    """Return the addresses of an image's blocks, in the image's order."""
    with contextlib.closing(
            maintainer.engine.open_recipe(image_id)) as recipe:
        words = array.array('I', recipe.runs())
    return [group << 15 | slot + i
            for group, slot, blocks in zip(words[::3], words[1::3],
                                           words[2::3])
            for i in range(blocks)]


def shards(maintainer):
    """Return the files of the shards that count."""
    with contextlib.closing(_engine.Index(
            maintainer.handle, maintainer.catalog.id)) as index:
        found, complete = index.shards()
    assert complete
    return found


def records(maintainer):
    """Return the number of records in the exact index."""
    sizes = [os.stat(path).st_size for path in pathlib.Path(
        maintainer.repository.path, 'index').glob('shard-*')]
    return sum((size - 512) // 13 for size in sizes)


def blocks_of(data, size=BLOCK):
    blocks = {data[at:at + size] for at in range(0, len(data), size)}
    return {block for block in blocks if any(block)}


def require_exact(maintainer, images, size=BLOCK):
    """Require unchanged images and a single copy of each block."""
    named = set()
    wanted = set()
    for image_id, data in images.items():
        assert repositories.read_all(maintainer.repository, image_id) == data
        named.update(addresses(maintainer, image_id))
        wanted |= blocks_of(data, size)
    assert len(named) == len(wanted)
    # The counts agree.
    account(maintainer)
    assert maintainer.catalog.statistics()['unique_blocks'] == len(wanted)


def require_settled(maintainer):
    """Require an empty spool after merging, and correct counts."""
    account(maintainer)
    path = maintainer.repository.path
    assert [name for name in os.listdir(os.path.join(path, 'spool'))
            if name[0] in 'MOX'] == []
    maintainer.close()
    repositories.require_clean(path)


# -- duplicates that are found ------------------------------------------------

def test_uploads_at_the_same_time(repo, maintainer):
    data = repositories.noise(MIB)
    put_at_once(repo, a=data, b=data, c=data)
    account(maintainer)
    assert maintainer.catalog.statistics()['unique_blocks'] == 3 * 256
    upload = repo.stat('b').upload_id
    result = merge(maintainer)
    assert result == merger.Result(
        scanned=3 * 256, duplicates=2 * 256, merged_blocks=2 * 256,
        merged_bytes=2 * len(data), images=2, gave_up=0, busy=0, failed={})
    require_exact(maintainer, {'a': data, 'b': data, 'c': data})
    assert addresses(maintainer, 'a') == addresses(maintainer, 'c')
    assert repo.stat('b').upload_id == upload
    with pytest.raises(exceptions.ImageExists):
        repo.begin('b')
    # All duplicates are known, and there is no more work.
    assert merge(maintainer) == merger.Result(0, 0, 0, 0, 0, 0, 0, {})
    assert collect(maintainer).freed_blocks == 2 * 256
    assert merge(maintainer) == merger.Result(0, 0, 0, 0, 0, 0, 0, {})
    assert maintainer.catalog.groups_with_duplicates() == []
    require_settled(maintainer)


def test_images_that_have_only_parts_in_common(repo, maintainer):
    rng = random.Random(7)
    parts = [repositories.noise(BLOCK, seed) for seed in range(60)]
    parts += [bytes(BLOCK)] * 5
    images = {f'i{i}': b''.join(rng.choices(parts, k=300)) + b'end'
              for i in range(5)}
    put_at_once(repo, **images)
    merge(maintainer)
    require_exact(maintainer, images)
    collect(maintainer)
    require_exact(maintainer, images)
    require_settled(maintainer)


def test_nothing_to_do(repo, maintainer):
    assert merge(maintainer) == merger.Result(0, 0, 0, 0, 0, 0, 0, {})
    repositories.put(repo, 'a', repositories.mixture(MIB))
    scanned = merge(maintainer).scanned
    assert scanned == maintainer.catalog.statistics()['unique_blocks']
    assert merge(maintainer) == merger.Result(0, 0, 0, 0, 0, 0, 0, {})
    require_settled(maintainer)


def test_loads_that_were_capped(tmp_path):
    path = repositories.create(tmp_path / 'repo', block_size=512,
                               group_slots=64)
    data = repositories.noise(40 * 64 * 512)
    blocks = [data[at:at + 512] for at in range(0, len(data), 512)]
    random.Random(3).shuffle(blocks)
    images = {'a': data, 'b': b''.join(blocks)}
    for image_id, content in images.items():
        with repositories.open_repository(path) as repo:
            repositories.put(repo, image_id, content)
            capped = repo.statistics()['capped_loads']
    assert capped
    with repositories.open_repository(path) as repo:
        with maintainer_role.Maintainer(repo) as maintainer:
            assert merge(maintainer).merged_blocks > 1000
            require_exact(maintainer, images, 512)
            require_settled(maintainer)


def test_filter_that_is_too_small(tmp_path):
    path = repositories.create(tmp_path / 'repo', block_size=512,
                               group_slots=4096)
    rng = random.Random(5)
    data = repositories.noise(70 * MIB)
    # Single blocks lie between others, so neighbours do not help.
    second = bytearray(rng.randbytes(2 * MIB))
    for at in range(0, len(second), 1024):
        begin = rng.randrange(len(data) // 512) * 512
        second[at:at + 512] = data[begin:begin + 512]
    images = {'a': data, 'b': bytes(second)}
    with repositories.open_repository(path) as repo:
        for image_id, content in images.items():
            repositories.put(repo, image_id, content)
        assert repo.statistics()['filter_level']
        with maintainer_role.Maintainer(repo) as maintainer:
            assert merge(maintainer).merged_blocks
            require_exact(maintainer, images, 512)
            require_settled(maintainer)


def test_filter_that_was_rebuilt(path):
    data = repositories.noise(MIB)
    with repositories.open_repository(path) as repo:
        put_at_once(repo, a=data, b=data)
        repo.rebuild_filter()
        repositories.put(repo, 'c', data + data)
        with maintainer_role.Maintainer(repo) as maintainer:
            merge(maintainer)
            require_exact(maintainer, {'a': data, 'b': data, 'c': data + data})
            require_settled(maintainer)


@pytest.mark.parametrize('grows', [False, True])
def test_older_address_that_comes_late(repo, maintainer, monkeypatch, grows):
    """A block's lower address may be published after the higher ones.

    Then the known duplicates of the higher address belong to the lower one. A
    shard may be split at the same time.
    """
    if grows:
        monkeypatch.setattr(exactindex, 'SPLIT_RECORDS', 100)
    data = repositories.noise(MIB)
    with contextlib.ExitStack() as stack:
        first, second, third = (
            stack.enter_context(repo.begin(image_id)) for image_id in 'abc')
        for transaction in (first, second, third):
            transaction.write(data)
        second.commit()
        third.commit()
        merge(maintainer, exclude=lambda facts: True)
        known = maintainer.catalog.groups_with_duplicates()
        first.commit()
    assert len(shards(maintainer)) == 1
    assert addresses(maintainer, 'a')[0] >> 15 < min(known)
    images = {'a': data, 'b': data, 'c': data}
    merge(maintainer)
    assert len(shards(maintainer)) == 1 + grows
    require_exact(maintainer, images)
    require_settled(maintainer)


@pytest.mark.parametrize('seed', range(3))
def test_everything_at_random(repo, maintainer, seed):
    """Random uploads, deletions, merges and collections lose no data."""
    rng = random.Random(seed)
    parts = [repositories.noise(BLOCK, seed) for seed in range(400)]
    images = {}
    for turn in range(25):
        new = {f'i{turn}-{i}': b''.join(rng.choices(parts, k=256))
               for i in range(rng.randrange(3))}
        put_at_once(repo, **new)
        images.update(new)
        for image_id in rng.sample(sorted(images), len(images) // 4):
            repo.delete(image_id)
            del images[image_id]
        what = rng.randrange(4)
        if what == 0:
            collect(maintainer)
        elif what == 1:
            account(maintainer)
        else:
            merge(maintainer)
            require_exact(maintainer, images)
    merge(maintainer)
    collect(maintainer)
    merge(maintainer)
    require_exact(maintainer, images)
    require_settled(maintainer)


# -- records in the index -----------------------------------------------------

def test_record_of_a_block_that_was_freed(repo, maintainer):
    data = repositories.noise(MIB)
    repositories.put(repo, 'a', data)
    merge(maintainer)
    repo.delete('a')
    collect(maintainer)
    put_at_once(repo, b=data, c=data)
    merge(maintainer)
    require_exact(maintainer, {'b': data, 'c': data})
    # The index has these records, so it finds another duplicate.
    put_at_once(repo, d=data, e=data[::-1])
    merge(maintainer)
    require_exact(maintainer,
                  {'b': data, 'c': data, 'd': data, 'e': data[::-1]})
    require_settled(maintainer)


def test_known_block_that_is_freed(repo, maintainer):
    """The duplicates of a freed block replace it in the index."""
    data = repositories.noise(MIB)
    put_at_once(repo, a=data, b=data, c=data)
    repo.delete('a')
    everything = merge(maintainer, exclude=lambda facts: True)
    assert everything.images == 0
    collect(maintainer)
    merge(maintainer)
    require_exact(maintainer, {'b': data, 'c': data})
    put_at_once(repo, d=data, e=data[::-1])
    merge(maintainer)
    require_exact(maintainer,
                  {'b': data, 'c': data, 'd': data, 'e': data[::-1]})
    require_settled(maintainer)


def test_block_that_nobody_uses(repo, maintainer):
    """Nothing is merged to an unused block.

    An upload may still use it while it lives.
    """
    data = repositories.noise(MIB)
    put_at_once(repo, a=data, b=data)
    repo.delete('a')
    account(maintainer)
    assert merge(maintainer).duplicates == 0
    before = addresses(maintainer, 'b')
    repositories.put(repo, 'c', data)
    if addresses(maintainer, 'c') == before:
        pytest.skip('the upload found the copy that is in use')
    assert merge(maintainer).duplicates == 256
    require_exact(maintainer, {'b': data, 'c': data})
    require_settled(maintainer)


def test_index_grows(repo, maintainer, monkeypatch):
    monkeypatch.setattr(exactindex, 'SPLIT_RECORDS', 64)
    images = {}
    for i in range(4):
        data = repositories.noise(MIB, i)
        images.update({f'a{i}': data, f'b{i}': data})
        put_at_once(repo, **{f'a{i}': data, f'b{i}': data})
        merge(maintainer)
        require_exact(maintainer, images)
        assert len(shards(maintainer)) == 1 << i
    put_at_once(repo, c=images['a0'], d=images['a3'][::-1])
    images.update(c=images['a0'], d=images['a3'][::-1])
    merge(maintainer)
    require_exact(maintainer, images)
    with contextlib.closing(_engine.Index(
            repo.handle(), maintainer.catalog.id)) as index:
        for file in index.files():
            index.verify(file)
    require_settled(maintainer)


def test_index_that_is_worn(repo, maintainer):
    """The index does not grow with all data that was ever stored."""
    kept = repositories.noise(BLOCK * 20, 99)
    images = {'kept': kept}
    repositories.put(repo, 'kept', kept)
    most = 0
    for i in range(25):
        repositories.put(repo, 'a', repositories.noise(BLOCK * 200, i))
        merge(maintainer)
        most = max(most, records(maintainer))
        repo.delete('a')
        collect(maintainer)
    merge(maintainer)
    assert most < 2500
    repositories.put(repo, 'b', kept + repositories.noise(BLOCK * 9, 98))
    images['b'] = kept + repositories.noise(BLOCK * 9, 98)
    merge(maintainer)
    require_exact(maintainer, images)
    require_settled(maintainer)


def test_small_portions(repo, maintainer, monkeypatch):
    """Merging works with each limit at its minimum."""
    monkeypatch.setattr(exactindex, 'SORTED_RECORDS', 100)
    monkeypatch.setattr(exactindex, 'PAIRS_AT_ONCE', 3)
    monkeypatch.setattr(exactindex, 'SORTED_PAIRS', 5)
    monkeypatch.setattr(exactindex, 'STEP_RECORDS', 7)
    monkeypatch.setattr(merger, 'ROUND_BLOCKS', 50)
    monkeypatch.setattr(merger, 'ACCOUNT_EVERY', 1)
    monkeypatch.setattr(merger, '_CACHED_COUNTS', 1)
    data = repositories.noise(MIB)
    images = {'a': data, 'b': data[::-1], 'c': data + data[::-1],
              'd': data, 'e': data, 'f': data}
    # No image uses the copy that the index knows.
    put_at_once(repo, first=data, **images)
    repo.delete('first')
    merge(maintainer)
    require_exact(maintainer, images)
    require_settled(maintainer)


def test_catalog_made_anew(repo, maintainer):
    data = repositories.noise(MIB)
    put_at_once(repo, a=data, b=data)
    merge(maintainer, exclude=lambda facts: True)
    maintainer.rebuild()
    assert maintainer.catalog.groups_with_duplicates() == []
    merge(maintainer)
    require_exact(maintainer, {'a': data, 'b': data})
    require_settled(maintainer)


# -- collisions ---------------------------------------------------------------

def test_equal_fingerprints_of_different_blocks(tmp_path):
    path = repositories.create(tmp_path / 'repo', block_size=BLOCK,
                               group_slots=1024, fingerprint='weak-8',
                               verify='bytes')
    data = repositories.noise(MIB)
    images = {'a': data, 'b': data, 'c': repositories.noise(MIB, 2)}
    with repositories.open_repository(path, _allow_weak=True) as repo:
        put_at_once(repo, **images)
        with maintainer_role.Maintainer(repo) as maintainer:
            first = merge(maintainer)
            assert first.merged_blocks and not first.failed
            for image_id, content in images.items():
                assert repositories.read_all(repo, image_id) == content
            # Blocks with a collision are not tried again.
            assert merge(maintainer).duplicates == 0


# -- images that are not merged -----------------------------------------------

def test_images_that_are_excluded(repo, maintainer):
    data = repositories.noise(MIB)
    put_at_once(repo, a=data, b=data, c=data)
    inode = os.stat(os.path.join(repo.path, 'images', 'b')).st_ino
    result = merge(maintainer,
                   exclude=lambda facts: facts['image_id'] == 'b')
    assert result.images == 1
    assert result.merged_blocks == 256
    assert os.stat(os.path.join(repo.path, 'images', 'b')).st_ino == inode
    # The image is merged when this is allowed.
    assert merge(maintainer).images == 1
    require_exact(maintainer, {'a': data, 'b': data, 'c': data})
    require_settled(maintainer)


def test_plan(repo, maintainer):
    data = repositories.noise(MIB)
    put_at_once(repo, a=data, b=data, c=data[::-1])
    before = {image_id: addresses(maintainer, image_id) for image_id in 'abc'}
    wanted = merger.Plan(scanned=3 * 256, duplicates=256, bytes=MIB,
                         images=1)
    assert merger.plan(maintainer) == wanted
    assert merge(maintainer, dry_run=True) == dataclasses.replace(
        wanted, scanned=0)
    assert before == {image_id: addresses(maintainer, image_id)
                      for image_id in 'abc'}
    assert merge(maintainer).images == 1
    require_exact(maintainer, {'a': data, 'b': data, 'c': data[::-1]})
    require_settled(maintainer)


def test_group_in_which_the_collector_is(repo, maintainer):
    data = repositories.noise(MIB)
    put_at_once(repo, a=data, b=data)
    group = addresses(maintainer, 'a')[0] >> 15
    with repositories.collector_in(repo.path, group):
        result = merge(maintainer)
    assert (result.busy, result.images) == (1, 0)
    assert repositories.spool(repo.path, 'M') == []
    assert merge(maintainer).images == 1
    require_exact(maintainer, {'a': data, 'b': data})
    require_settled(maintainer)


def test_image_that_is_damaged(repo, maintainer):
    data = repositories.noise(MIB)
    put_at_once(repo, a=data, b=data, c=data)
    number = addresses(maintainer, 'b')[0] >> 15
    group = repositories.Group(repo.path, number)
    at = group.entry_offset(3)
    group.data[at:at + 32] = bytes(32)
    group.save()
    result = merge(maintainer)
    assert list(result.failed) == ['b']
    assert f'{number:08x}' in result.failed['b']
    assert result.images == 1
    assert repositories.read_all(repo, 'c') == data


def test_damaged_block_is_healed_by_a_later_upload(repo, maintainer):
    data = repositories.noise(MIB)
    repositories.put(repo, 'a', data)
    merge(maintainer)
    address = addresses(maintainer, 'a')[7]
    with contextlib.closing(
            maintainer.engine.enter_group(address >> 15)) as group:
        group.mark_damaged(array.array('I', [address & 32767]).tobytes())
    # A mark alone does not stop a client from reading intact bytes.
    assert repositories.read_all(repo, 'a') == data
    file = repositories.Group(repo.path, address >> 15)
    _, _, segment, place = file.entry(address & 32767)
    file.data[segment + 32 + (place & 0xfffff)] ^= 1
    file.save()
    with pytest.raises(exceptions.DamagedError):
        repositories.read_all(repo, 'a')
    repositories.put(repo, 'b', data)
    merge(maintainer)
    if repo.parameters.is_cryptographic:
        require_exact(maintainer, {'a': data, 'b': data})
        return
    # Another block can have the fingerprint of the lost one (I5).
    with pytest.raises(exceptions.DamagedError):
        repositories.read_all(repo, 'a')
    assert repositories.read_all(repo, 'b') == data


# -- concurrent work ----------------------------------------------------------

def test_counted_before_it_takes_the_name(repo, maintainer):
    """N10.3 before N10.6: an image is counted at all times."""
    data = repositories.noise(MIB)
    put_at_once(repo, a=data, b=data)
    seen = []
    settle = maintainer.settle

    def looking_settle(batch):
        for name in repositories.spool(repo.path, 'M'):
            with contextlib.closing(
                    maintainer.engine.open_entry(name)) as recipe:
                txid = recipe.header()['transaction_id']
                seen.append((recipe.live(), maintainer.catalog.counted(txid)))
        settle(batch)

    maintainer.settle = looking_settle
    merge(maintainer)
    assert (False, False) in seen
    assert (True, False) not in seen
    require_exact(maintainer, {'a': data, 'b': data})
    require_settled(maintainer)


def test_stopped_while_the_new_recipe_is_counted(repo, maintainer,
                                                 monkeypatch):
    """N10.3 in steps: the counts of a stopped merge are taken back exactly."""
    pieces = [repositories.noise(BLOCK, n) + bytes(BLOCK) for n in range(200)]
    data = b''.join(pieces)
    put_at_once(repo, a=data, b=data)
    account(maintainer)
    expected = maintenance.counts(maintainer.catalog)
    monkeypatch.setattr(maintainer_role, 'BATCH_BYTES', 0)
    old = addresses(maintainer, 'b')
    pairs = array.array('Q', [address for pair in sorted(
        zip(old, addresses(maintainer, 'a'))) for address in pair])
    pace = pacing.Pace()
    settle, steps = maintainer.settle, []

    def stop_at_the_second(batch):
        settle(batch)
        steps.append(batch.size)
        if len(steps) == 2:
            pace.stop()
    monkeypatch.setattr(maintainer, 'settle', stop_at_the_second)
    with pytest.raises(pacing.Stopped):
        merger.merge_image(maintainer, 'b', pairs.tobytes(), pace)
    (txid, image_id), = maintainer.catalog.all_begun()
    assert image_id == 'b' and maintainer.catalog.begun(txid) == 2
    assert addresses(maintainer, 'b') == old
    assert maintenance.counts(maintainer.catalog) != expected
    account(maintainer)
    assert maintenance.counts(maintainer.catalog) == expected
    assert list(maintainer.catalog.all_begun()) == []
    # A merge that is not stopped takes as many steps, all before the exchange.
    merged = merger.merge_image(maintainer, 'b', pairs.tobytes(),
                                pacing.Pace())
    assert merged == merger.Merged(200, True, b'')
    account(maintainer)
    require_settled(maintainer)
    assert repositories.read_all(repo, 'b') == data


def merge_in_steps(maintainer, image_id, other, between):
    """Merge with a call between the steps; None if N10.1 found no image."""
    old, new = addresses(maintainer, image_id), addresses(maintainer, other)
    mapping = array.array('Q', [
        address for pair in sorted(zip(old, new)) for address in pair])
    between('before N10.1')
    try:
        merged = _engine.Merge(maintainer.engine, image_id, mapping.tobytes())
    except exceptions.ImageNotFound:
        return None
    with contextlib.closing(merged):
        if not merged.replaced:
            return None
        between('before N10.3')
        merger.count(maintainer, pacing.Pace(),
                     merged.header()['transaction_id'])
        between('before N10.4')
        exchanged = merged.exchange()
        between('after N10.7')
    return exchanged


STEPS = ['before N10.1', 'before N10.3', 'before N10.4', 'after N10.7']


@pytest.mark.parametrize('step', STEPS)
@pytest.mark.parametrize('again', [False, True], ids=['gone', 'replaced'])
def test_deletion_meanwhile(repo, maintainer, step, again):
    """I11: a deleted image does not return, nor under a new upload."""
    data, other = repositories.noise(MIB), repositories.noise(MIB, 2)
    put_at_once(repo, a=data, b=data)
    account(maintainer)

    def between(now):
        if now == step:
            repo.delete('b')
            if again:
                repositories.put(repo, 'b', other)
            # If the recipe were un-counted by now, the collector could free
            # its blocks.
            account(maintainer)

    try:
        exchanged = merge_in_steps(maintainer, 'b', 'a', between)
    except exceptions.DamagedError:
        # The new upload has other content, which does not fit the mapping.
        assert step == 'before N10.1' and again
        exchanged = None
    if step != 'after N10.7':
        assert not exchanged
    assert os.path.exists(os.path.join(repo.path, 'images/b')) == again
    if again:
        assert repositories.read_all(repo, 'b') == other
    collect(maintainer)
    assert repositories.read_all(repo, 'a') == data
    require_settled(maintainer)


@pytest.mark.parametrize('step', STEPS)
def test_collection_meanwhile(repo, maintainer, step):
    """The blocks that M names are kept from N10.1 on."""
    data = repositories.noise(MIB)
    put_at_once(repo, a=data, b=data)
    account(maintainer)

    def between(now):
        if now == step and now != 'before N10.1':
            repo.delete('a')
            collect(maintainer)

    assert merge_in_steps(maintainer, 'b', 'a', between)
    collect(maintainer)
    assert repositories.read_all(repo, 'b') == data
    require_settled(maintainer)


def test_reader_of_the_old_recipe(repo, maintainer):
    data = repositories.noise(MIB)
    put_at_once(repo, a=data, b=data)
    with repo.open_image('b') as image:
        result = merge(maintainer)
        assert result.images == 1
        assert result.merged_blocks == 0    # while the reader is there
        collect(maintainer)
        assert image.read() == data
        assert len(repositories.spool(repo.path, 'O')) == 1
    require_exact(maintainer, {'a': data, 'b': data})
    assert collect(maintainer).freed_blocks == 256
    require_settled(maintainer)


# -- kills --------------------------------------------------------------------

def die():
    os.kill(os.getpid(), signal.SIGKILL)


def killed(path, function, *args):
    """Return True if a process that runs function(maintainer, ...) was killed.

    The process is new, since LevelDB does not survive a fork.
    """
    child = subprocess.run(
        [sys.executable, '-c', 'import sys\n'
         'from tests.unit.dedupd.tasks import test_merger\n'
         'test_merger.in_process(*sys.argv[1:])',
         str(path), function.__name__, *map(str, args)],
        cwd=TOP, timeout=100, capture_output=True, text=True)
    assert child.returncode in (0, -signal.SIGKILL), child.stderr
    return child.returncode != 0


def in_process(path, function, *args):
    with repositories.open_repository(path) as repo:
        with maintainer_role.Maintainer(repo) as maintainer:
            globals()[function](maintainer, *args)


def die_between_steps(maintainer, step):
    account(maintainer)
    merge_in_steps(maintainer, 'b', 'a', lambda now: now == step and die())


@pytest.mark.parametrize('step', STEPS)
def test_killed_between_the_steps(path, step):
    data = repositories.noise(MIB)
    with repositories.open_repository(path) as repo:
        put_at_once(repo, a=data, b=data)
        inode = os.stat(path / 'images' / 'b').st_ino
        assert killed(path, die_between_steps, step)
        assert repositories.read_all(repo, 'b') == data
        assert ((os.stat(path / 'images' / 'b').st_ino == inode)
                == (step != 'after N10.7'))
        with maintainer_role.Maintainer(repo) as maintainer:
            assert maintainer.warnings == []
            account(maintainer)
            collect(maintainer)
            merge(maintainer)
            require_exact(maintainer, {'a': data, 'b': data})
            require_settled(maintainer)


def die_in_exchange(maintainer):
    spool = os.path.join(maintainer.repository.path, 'spool')

    def between(now):
        if now == 'before N10.4':
            m, = repositories.spool(maintainer.repository.path, 'M')
            os.link(os.path.join(spool, '..', 'images', 'b'),
                    os.path.join(spool, 'O-' + 32 * '1'))
            os.link(os.path.join(spool, m),
                    os.path.join(spool, 'X-' + 32 * '2'))
            die()
    account(maintainer)
    merge_in_steps(maintainer, 'b', 'a', between)


def test_killed_in_the_exchange(path):
    """Accounting removes O and X after a kill between N10.5 and N10.6."""
    data = repositories.noise(MIB)
    with repositories.open_repository(path) as repo:
        put_at_once(repo, a=data, b=data)
        assert killed(path, die_in_exchange)
        with maintainer_role.Maintainer(repo) as maintainer:
            account(maintainer)
            assert repositories.spool(path, 'X') == []
            assert repositories.spool(path, 'O') == []
            assert repositories.read_all(repo, 'b') == data
            merge(maintainer)
            require_exact(maintainer, {'a': data, 'b': data})
            require_settled(maintainer)


def die_before_write(maintainer, number):
    """Merge in small steps, and die before the n-th write to the catalog."""
    exactindex.SORTED_RECORDS = 200
    exactindex.PAIRS_AT_ONCE = 50
    merger.ROUND_BLOCKS = 300
    maintainer_role.BATCH_BYTES = 500
    left = int(number)
    write = maintainer.catalog.write

    def dying_write(*args, **options):
        nonlocal left
        left -= 1
        if left == 0:
            die()
        write(*args, **options)

    maintainer.catalog.write = dying_write
    merge(maintainer)


def test_killed_in_one_run_after_the_other(path):
    data = repositories.noise(MIB)
    images = {'a': data, 'b': data, 'c': data[::-1], 'd': data[::-1]}
    with repositories.open_repository(path) as repo:
        put_at_once(repo, **images)
    number = 1
    while killed(path, die_before_write, number):
        number += 3
        assert number < 100
    assert number > 5
    with repositories.open_repository(path) as repo:
        with maintainer_role.Maintainer(repo) as maintainer:
            merge(maintainer)
            require_exact(maintainer, images)
            require_settled(maintainer)


@pytest.mark.parametrize('number', range(2, 13, 2))
def test_killed_once(path, number):
    """The run after a kill finds all duplicates."""
    data = repositories.noise(MIB)
    images = {'a': data, 'b': data, 'c': data}
    with repositories.open_repository(path) as repo:
        put_at_once(repo, **images)
        assert killed(path, die_before_write, number)
        with maintainer_role.Maintainer(repo) as maintainer:
            merge(maintainer)
            require_exact(maintainer, images)
            require_settled(maintainer)


def test_stopped(repo, maintainer):
    data = repositories.noise(MIB)
    put_at_once(repo, a=data, b=data, c=data)

    def stop(done, total, what):
        if what == 'merging images' and done == 1:
            pace.stop()
    pace = pacing.Pace(stop)
    with pytest.raises(pacing.Stopped):
        merger.run_once(maintainer, pace)
    merge(maintainer)
    require_exact(maintainer, {'a': data, 'b': data, 'c': data})
    require_settled(maintainer)


# -- the engine's part --------------------------------------------------------

def test_only_the_maintainer_merges(repo):
    with contextlib.closing(_engine.Maintenance(repo.handle())) as engine:
        for call in (lambda: _engine.Merge(engine, 'a', b''),
                     lambda: _engine.Relocation(engine, repo.handle())):
            with pytest.raises(exceptions.RepositoryError):
                call()


def test_arguments_that_cannot_be(repo, maintainer):
    for call in (lambda: _engine.Merge(maintainer.engine, 'a', b'123'),
                 lambda: _engine.index_sort(b'1'),
                 lambda: _engine.index_records(b'1', 1, 0),
                 lambda: _engine.index_records(bytes(48), 0, 0),
                 lambda: _engine.index_records(bytes(96), 1, 32767)):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(exceptions.ImageNotFound):
        _engine.Merge(maintainer.engine, 'a', b'')


def test_merge_after_the_maintainer_was_closed(repo, maintainer):
    data = repositories.noise(MIB)
    put_at_once(repo, a=data, b=data)
    merged = _engine.Merge(maintainer.engine, 'a', b'')
    assert (merged.replaced, merged.name, merged.collisions) == (0, '', b'')
    with pytest.raises(exceptions.InvalidParameter):
        merged.header()
    with pytest.raises(exceptions.InvalidParameter):
        merged.exchange()
    maintainer.close()
    for call in (merged.header, merged.exchange):
        with pytest.raises(exceptions.ClosedError):
            call()
    merged.close()


def test_relocation(repo, maintainer):
    data = repositories.noise(MIB)
    repositories.put(repo, 'a', data)
    old = addresses(maintainer, 'a')
    with contextlib.closing(_engine.Relocation(
            maintainer.engine, maintainer.handle)) as relocation:
        relocation.add(array.array('Q', old[::-1]).tobytes())
        pairs = array.array('Q', relocation.finish())
        assert list(pairs[::2]) == sorted(old)
        groups = {address >> 15 for address in old}
        assert not groups & {address >> 15 for address in pairs[1::2]}
        # The merge keeps the target copies until the blocks are merged (I6).
        for group in {address >> 15 for address in pairs[1::2]}:
            assert repositories.group_lock_held(
                repo.path, repositories.SHARE_BYTE + group) == 'shared'
        merged = merger.merge_image(maintainer, 'a', pairs.tobytes(),
                                    pacing.Pace())
        assert merged == merger.Merged(256, True, b'')
    assert addresses(maintainer, 'a') == list(pairs[1::2])
    assert collect(maintainer).freed_blocks == 256
    assert repositories.read_all(repo, 'a') == data
    require_settled(maintainer)


# -- damaged merge targets ----------------------------------------------------

def test_nothing_is_merged_to_a_block_that_went_bad(maintainer, repo, path):
    """A damaged block is no merge target; the last good copy would be lost."""
    data = repositories.noise(MIB)
    put_at_once(repo, one=data, other=data)
    account(maintainer)
    kept = addresses(maintainer, 'one')[7]
    group = repositories.Group(path, kept >> 15)
    _, _, segment, place = group.entry(kept & 0x7fff)
    group.data[segment + 32 + (place & 0xfffff)] ^= 1
    group.save()
    result = merge(maintainer)
    assert addresses(maintainer, 'other')[6] == addresses(
        maintainer, 'one')[6] or result.failed
    assert addresses(maintainer, 'other')[7] != kept
    collect(maintainer)
    assert repositories.read_all(repo, 'other') == data
