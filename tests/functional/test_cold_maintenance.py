# SPDX-License-Identifier: Apache-2.0

"""Tasks and readers that need the bytes of cold blocks, with a real store.

If an object store does not answer, or answers that there is no object, the
tasks never take that for damage: they mark, heal, quarantine or free no block.
"""

import contextlib
import dataclasses
import errno
import os
import secrets

import glance_store
from glance_store import exceptions as store_exceptions
import pytest

from dedupd.tasks import collector
from dedupd.tasks import merger
from dedupd.tasks import objectscrub
from dedupd.tasks import recompressor
from dedupd.tasks import scrubber
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from glance_dedup.objects import backend_base
from glance_dedup.objects import slice_cache
from glance_dedup.repository import cold_settings
from tests.functional import test_tierer
from tests.support import daemons
from tests.support import faulty_proxy
from tests.support import nbd
from tests.support import objects
from tests.support import repositories
from tests.support import stores

pytestmark = pytest.mark.slow

pytest_plugins = ['tests.support.object_fixtures']

configure = stores.configure

SIZE = test_tierer.SIZE
ALL = test_tierer.ALL
SLICE = slice_cache.SLICE
#: Two slices, the size of this store's objects.
SAMPLE = 2 * SLICE
AWAY = pytest.mark.parametrize('fault', [503, 404])


class Store(test_tierer.Store):
    """A store whose objects tests may change."""

    @classmethod
    def of(cls, path):
        """Open an existing repository that is attached."""
        store = cls.__new__(cls)
        store.path, store.images = path, {}
        store.repo = repositories.open_repository(path)
        store.settings = cold_settings.require(path)
        store.maintainer = maintainer_role.Maintainer(store.repo)
        return store

    def scrub(self, **options):
        """A new pass, from its begin to its end."""
        return scrubber.run_once(self.maintainer, pacing.Pace(), full=True,
                                 **options)

    def collect(self, **options):
        return collector.run_once(self.maintainer, pacing.Pace(), **options)

    def merge(self):
        return merger.run_once(self.maintainer, pacing.Pace())

    def key_of(self, number):
        return slice_cache.key_of(self.settings.owner, number,
                                  self.facts()[number]['object'])

    @contextlib.contextmanager
    def changing(self, number, tmp_path):
        """Yield an object's bytes; changed bytes are written back."""
        key = self.key_of(number)
        with cold_settings.connect(self.settings) as store:
            data = bytearray(store.get(key, 0, store.size(key)))
            changed = [data]
            yield changed
            if changed[0] is None:
                store.delete(key)
                return
            path = tmp_path / 'object'
            path.write_bytes(changed[0])
            with open(path, 'rb') as file:
                store.put(key, file)

    def flip(self, number, tmp_path):
        """Change a byte in the middle of an object."""
        with self.changing(number, tmp_path) as object_:
            object_[0][len(object_[0]) // 2] ^= 1

    def unharmed(self):
        """No block is marked, in quarantine, or reported."""
        state = self.maintainer.catalog.scrub_state()
        assert self.maintainer.catalog.damaged() == {}
        assert not os.listdir(self.path / 'quarantine')
        assert not state.get('unreadable') and not state.get('waiting')
        assert not self.maintainer.catalog.damaged_images()


@pytest.fixture
def place(server, proxy, tmp_path):
    return (objects.object_location.parse(
        f's3://{server.container}/{secrets.token_hex(8)}', proxy.url),
        server.credentials(tmp_path / 'credentials'))


@pytest.fixture
def store(place, faults, tmp_path):
    with contextlib.closing(Store(tmp_path / 'r', *place)) as made:
        yield made


@pytest.fixture
def by_value(place, faults, tmp_path):
    with contextlib.closing(Store(tmp_path / 'r', *place,
                                  verify='bytes')) as made:
        yield made


def gets(faults):
    """Return the groups whose objects were read, in order."""
    return [path.split('/g/')[1][:8] for method, path in faults.seen
            if method == 'GET' and '/g/' in path]


def put_at_once(store, **images):
    """Store images at once, so that none finds the blocks of another."""
    with contextlib.ExitStack() as stack:
        transactions = [(stack.enter_context(store.repo.begin(name)), data)
                        for name, data in images.items()]
        for transaction, data in transactions:
            transaction.write(data)
        for transaction, _ in transactions:
            transaction.commit()
    store.images.update(images)


def cool_but(store, name):
    """Move all groups but those of an image."""
    return store.tier(dataclasses.replace(
        ALL, keep=lambda facts: facts['image_id'] == name))


# -- the scrub ----------------------------------------------------------------

def test_a_scrub_reads_no_objects_by_itself(store, faults):
    store.put('one', 2, 1)
    store.tier()
    faults.seen.clear()
    result = store.scrub()
    assert result.complete and not result.unavailable
    assert (result.blocks, result.cold_bytes) == (0, 0)
    assert gets(faults) == []
    store.unharmed()


def test_the_sample_goes_round(store, faults):
    store.put('one', 3, 1)
    store.tier()
    seen = []
    for _ in range(4):
        faults.seen.clear()
        result = store.scrub(cold_budget=SAMPLE)
        assert result.cold_bytes == SAMPLE
        assert len(gets(faults)) == 2
        seen += sorted(set(gets(faults)))
    assert seen == ['00000001', '00000002', '00000003', '00000001']
    faults.seen.clear()
    result = store.scrub(cold_budget=100 * SAMPLE)
    assert sorted(gets(faults)) == [
        f'{number:08x}' for number in (1, 2, 3) for _ in range(2)]
    store.unharmed()


def test_a_sample_leaves_the_slices_as_they_were(store):
    store.put('one', 1, 1)
    store.tier()
    store.scrub(cold_budget=SAMPLE)
    assert not any(files for _, _, files in os.walk(store.path / 'slices'))
    store.require_all()
    before = sorted(files for _, _, files in os.walk(store.path / 'slices'))
    store.scrub(cold_budget=SAMPLE)
    assert before == sorted(
        files for _, _, files in os.walk(store.path / 'slices'))


def test_a_stopped_sample_goes_on(store, faults):
    store.put('one', 2, 1)
    store.tier()
    pace = pacing.Pace(lambda done, total, what: (
        what.startswith('verifying') and pace.stop()))
    with pytest.raises(pacing.Stopped):
        scrubber.run_once(store.maintainer, pace, full=True,
                          cold_budget=2 * SAMPLE)
    faults.seen.clear()
    result = scrubber.run_once(store.maintainer, pacing.Pace(),
                               cold_budget=2 * SAMPLE)
    assert result.complete and result.cold_bytes == 2 * SAMPLE
    assert set(gets(faults)) == {'00000002'}


@pytest.mark.parametrize('similar', [False, True])
def test_a_sample_goes_on_within_an_object(place, faults, tmp_path,
                                           monkeypatch, similar):
    """Each block is judged once in a round, wherever its segment lies."""
    monkeypatch.setattr(objectscrub, 'STEP_BYTES', SLICE)
    monkeypatch.setattr(test_tierer, 'SLOTS', 1024)
    with contextlib.closing(Store(tmp_path / 'r', *place)) as store:
        store.put('one', 4, 1)
        if similar:
            recompressor.run_once(store.maintainer, pacing.Pace(), 'zstd', 1,
                                  similar=True)
        store.tier()
        assert store.facts()[1]['end'] > 4 * SLICE
        # The changed bytes are in the first slice, in the middle, and at the
        # end.
        with store.changing(1, tmp_path) as object_:
            for at in (SLICE - 9000, 2 * SLICE + 5, len(object_[0]) - 20):
                object_[0][at] ^= 1
        found = [store.scrub(cold_budget=2 * SLICE) for _ in range(6)]
        assert all(result.cold_bytes <= 2 * SLICE for result in found)
        assert sum(result.found for result in found) == 3
        assert sum(result.found > 0 for result in found) >= 2


def test_a_flipped_byte_is_found_and_named(store, tmp_path):
    store.put('one', 2, 1)
    store.tier()
    store.flip(1, tmp_path)
    assert store.scrub().found == 0         # no object is read
    result = store.scrub(cold_budget=2 * SAMPLE)
    assert (result.found, result.damaged, result.images) == (1, 1, ['one'])
    name, = result.quarantined
    with store.changing(1, tmp_path) as object_:
        assert (store.path / name).read_bytes() in object_[0]
    store.forget()
    with store.repo.open_image('one') as image, pytest.raises(
            exceptions.DamagedError, match='groups/00000001'):
        image.read()
    # The damage is known, and not found once more.
    result = store.scrub(cold_budget=2 * SAMPLE)
    assert (result.found, result.damaged) == (0, 1)
    # Nor is its group sent again.
    assert store.tier().renewed == 0


def test_a_flipped_byte_is_healed_by_a_duplicate(store, tmp_path):
    data = repositories.noise(SIZE, 1)
    put_at_once(store, one=data, two=data)
    cool_but(store, 'two')
    assert store.cold() == [1]
    store.flip(1, tmp_path)
    result = store.scrub(cold_budget=SAMPLE)
    assert (result.found, result.healed, result.images) == (1, 1, [])
    store.require_all()


def test_a_flipped_byte_is_healed_by_a_spare_copy(store, tmp_path):
    store.put('one', 1, 1)
    store.tier()
    assert store.scrub(spare_threshold=1).spares == 256
    store.flip(1, tmp_path)
    store.require_all()                        # before healing, too
    result = store.scrub(spare_threshold=1, cold_budget=SAMPLE)
    assert (result.found, result.healed, result.images) == (1, 1, [])
    store.require_all()


def test_a_damaged_entry_of_a_cold_group(store):
    store.put('one', 1, 1)
    store.tier()
    repositories.ruin(store.path / 'groups' / '00000001', 8192)
    result = store.scrub()
    assert result.found and result.images == ['one']


@AWAY
def test_a_scrub_without_the_store(store, faults, fault):
    store.put('one', 2, 1)
    store.tier()
    for _ in range(3):                      # also more than twice
        faults.always = fault
        result = store.scrub(cold_budget=2 * SAMPLE, spare_threshold=1)
        assert result.unavailable and not result.complete
        assert result.unchecked == 2 * SIZE // 4096
        assert (result.found, result.images, result.unreadable) == (0, [], {})
        store.unharmed()
        faults.always = None
    # The same pass continues, and now it ends.
    result = scrubber.run_once(store.maintainer, pacing.Pace(),
                               cold_budget=2 * SAMPLE)
    assert result.complete and not result.unavailable
    assert (result.unchecked, result.cold_bytes) == (0, 2 * SAMPLE)
    store.require_all()


def test_a_store_that_is_away_in_the_middle(store, faults):
    """Blocks that were read before the failure do not count as unchecked."""
    store.put('one', 2, 1)
    store.tier()
    pace = pacing.Pace(lambda done, total, what: (
        what.startswith('verifying') and faults.plan(*[503] * 100)))
    result = scrubber.run_once(store.maintainer, pace, full=True,
                               cold_budget=2 * SAMPLE)
    assert (result.complete, result.unchecked) == (False, SIZE // 4096)
    faults.reset()
    store.put('two', 1, 2)
    result = scrubber.run_once(store.maintainer, pacing.Pace(),
                               cold_budget=2 * SAMPLE)
    assert result.complete and not result.unavailable
    # The scrub also read the group that came meanwhile.
    assert result.blocks == SIZE // 4096


@AWAY
def test_a_store_that_only_lists(store, faults, fault):
    """An object that is listed is there, even if a GET of it fails."""
    store.put('one', 2, 1)
    store.tier()
    for _ in range(3):
        faults.plan(None, *[fault] * 100, methods=('GET', 'HEAD'))
        result = store.scrub(cold_budget=2 * SAMPLE)
        assert result.unavailable and not result.complete
        store.unharmed()
    faults.reset()
    store.require_all()


def test_an_object_is_lost_when_two_scrubs_miss_it(store, tmp_path, faults):
    store.put('one', 1, 1)
    store.put('two', 1, 2)
    store.tier()
    key = store.key_of(1)
    with store.changing(1, tmp_path) as object_:
        kept, object_[0] = bytes(object_[0]), None
    faults.seen.clear()
    result = store.scrub(cold_budget=2 * SAMPLE)
    assert result.complete and not result.unavailable
    assert set(gets(faults)) == {'00000002'}
    store.unharmed()
    result = store.scrub(cold_budget=2 * SAMPLE)
    assert list(result.unreadable) == [key] and result.images == ['one']
    assert 'no such object' in result.unreadable[key]
    assert store.maintainer.catalog.damaged() == {}
    # The object is there again.
    (tmp_path / 'kept').write_bytes(kept)
    with cold_settings.connect(store.settings) as connection, open(
            tmp_path / 'kept', 'rb') as file:
        connection.put(key, file)
    result = store.scrub(cold_budget=2 * SAMPLE)
    assert result.unreadable == {} and result.images == []
    store.unharmed()
    store.require_all()


def test_an_object_that_is_missed_now_and_then_is_not_lost(store, tmp_path):
    store.put('one', 1, 1)
    store.tier()
    key = store.key_of(1)
    for _ in range(2):
        with store.changing(1, tmp_path) as object_:
            kept, object_[0] = bytes(object_[0]), None
        store.scrub()
        store.unharmed()
        (tmp_path / 'kept').write_bytes(kept)
        with cold_settings.connect(store.settings) as connection, open(
                tmp_path / 'kept', 'rb') as file:
            connection.put(key, file)
        store.scrub()
        store.unharmed()


def test_an_interrupted_scrub_misses_an_object_once(store, tmp_path):
    store.put('one', 1, 1)
    store.tier()
    with store.changing(1, tmp_path) as object_:
        object_[0] = None
    pace = pacing.Pace(lambda done, total, what: (
        what.startswith('looking for objects') and pace.stop()))
    with pytest.raises(pacing.Stopped):
        scrubber.run_once(store.maintainer, pace, full=True)
    assert scrubber.run_once(store.maintainer, pacing.Pace()).unreadable == {}
    assert store.scrub().unreadable


def test_an_object_of_another_length(store, tmp_path):
    store.put('one', 1, 1)
    store.tier()
    with store.changing(1, tmp_path) as object_:
        del object_[0][-1000:]
    store.scrub()
    store.unharmed()
    (error,) = store.scrub().unreadable.values()
    assert 'bytes instead of' in error


def test_a_block_waits_until_it_can_be_read(store, tmp_path, faults):
    """A block that failed a check stays unmarked while the store fails."""
    store.put('one', 1, 1)
    store.tier()
    store.flip(1, tmp_path)
    state = store.maintainer.catalog.scrub_state()
    address = 1 << 15 | 5
    for _ in range(2):
        store.scrub()
        state = store.maintainer.catalog.scrub_state()
        store.maintainer.catalog.set_scrub_state(
            {**state, 'waiting': [address]})
        store.forget()
        faults.always = 503
        assert store.scrub().busy == 1
        assert store.maintainer.catalog.damaged() == {}
        assert not os.listdir(store.path / 'quarantine')
        faults.always = None
    # The block is good.
    assert store.scrub().busy == 0
    assert store.maintainer.catalog.damaged() == {}


@AWAY
def test_healing_without_the_store(store, tmp_path, faults, fault):
    """A copy that cannot be reached now heals later."""
    data = repositories.noise(SIZE, 1)
    put_at_once(store, one=data, two=data)
    store.put('three', 1, 3)
    cool_but(store, 'two')
    assert store.cold() == [1, 3]
    # The hot block is damaged; its copy is cold.
    repositories.ruin(store.path / 'groups' / '00000002', 900000)
    faults.always = fault
    result = store.scrub()
    assert result.found and not result.healed and result.images == ['two']
    assert len(store.maintainer.catalog.damaged()) == result.found
    faults.always = None
    result = store.scrub()
    assert (result.images, result.healed) == ([], result.damaged)
    store.require_all()


@AWAY
def test_spare_copies_without_the_store(store, faults, fault):
    store.put('one', 1, 1)
    store.put('two', 1, 2)
    cool_but(store, 'two')
    assert store.scrub(spare_threshold=1).spares == 512
    before = {path.name: path.read_bytes()
              for path in (store.path / 'spares').iterdir()}
    store.forget()
    faults.always = fault
    result = store.scrub(spare_threshold=1)
    assert result.spares == 512 and not result.complete
    assert store.settings.location.url in result.unavailable
    assert before.items() & {
        path.name: path.read_bytes()
        for path in (store.path / 'spares').iterdir()}.items()
    faults.always = None
    assert store.scrub(spare_threshold=1).spares == 512


# -- merging ------------------------------------------------------------------

@pytest.mark.parametrize('kept', ['one', 'two'])
def test_merging_by_fingerprints_reads_no_object(store, faults, kept):
    """Merging reads no object, whichever of both groups is cold."""
    data = repositories.noise(SIZE, 1)
    put_at_once(store, one=data, two=data)
    cool_but(store, kept)
    assert len(store.cold()) == 1
    faults.seen.clear()
    result = store.merge()
    assert (result.merged_blocks, result.failed) == (256, {})
    assert gets(faults) == []
    assert store.collect().freed_blocks == 256
    store.require_all()


@AWAY
@pytest.mark.parametrize('kept', ['one', 'two'])
def test_merging_by_bytes_needs_the_object(by_value, faults, fault, kept):
    store = by_value
    data = repositories.noise(SIZE, 1)
    put_at_once(store, one=data, two=data)
    other = repositories.noise(SIZE, 2)
    put_at_once(store, three=other, four=other)
    store.account()
    names = {'one', 'two'} - {kept} | {'three', 'four'}
    # Groups 3 and 4 stay hot: they can be merged.
    store.tier(dataclasses.replace(ALL, keep=lambda facts: (
        facts['image_id'] in names - ({'one', 'two'} - {kept}))
        or facts['image_id'] == kept))
    assert len(store.cold()) == 1
    faults.always = fault
    result = store.merge()
    assert result.merged_blocks == 256      # the blocks of the hot groups
    store.unharmed()
    faults.always = None
    result = store.merge()
    assert (result.merged_blocks, result.failed) == (256, {})
    store.require_all()


# -- hits ---------------------------------------------------------------------

def test_a_hit_by_bytes_needs_the_slices(by_value, faults):
    store = by_value
    store.put('one', 1, 1)
    store.tier()
    faults.seen.clear()
    store.put('two', 1, 1)
    assert len(gets(faults)) == 2
    assert store.repo.stat('two').new_bytes == 0
    store.require_all()


def test_a_hit_by_fingerprint_needs_none(store, faults):
    store.put('one', 1, 1)
    store.tier()
    faults.always = 503
    store.put('two', 1, 1)
    assert store.repo.stat('two').new_bytes == 0


@AWAY
def test_an_upload_without_the_store(by_value, faults, fault):
    store = by_value
    store.put('one', 4, 1)
    store.tier()
    faults.always = fault
    faults.seen.clear()
    store.put('two', 4, 1)
    assert store.repo.stat('two').new_bytes > 3.5 * SIZE
    # Each thread that compares sends one request, which is tried four times.
    assert len(gets(faults)) < 4 * 4 * (os.cpu_count() + 2)
    faults.always = None
    store.require_all()
    store.put('three', 4, 1)
    assert store.repo.stat('three').new_bytes == 0


def test_an_upload_does_not_wait_for_a_store_that_hangs(
        by_value, faults, monkeypatch):
    """An upload stores its blocks again rather than wait for the store."""
    monkeypatch.setattr(faulty_proxy, 'LIMIT', 120)
    monkeypatch.setattr(backend_base, 'ANSWER_TIMEOUT', 300)
    store = by_value
    store.put('one', 4, 1)
    store.tier()
    with faults.held():
        store.put('two', 4, 1)
    assert store.repo.stat('two').new_bytes > 3.5 * SIZE


# -- collection ---------------------------------------------------------------

@AWAY
def test_evacuating_without_the_store(store, faults, fault):
    for number in range(2):
        store.put(f'keep{number}', 0.05, 10 + number)
        store.put(f'go{number}', 0.95, 20 + number)
    store.put('last', 1, 30)
    cool_but(store, 'keep1')
    assert 1 in store.cold() and 2 not in store.cold()
    for number in range(2):
        store.repo.delete(f'go{number}')
        del store.images[f'go{number}']
    faults.always = fault
    result = store.collect()
    # The cold group does not hold up the hot one.
    assert result.evacuated == 1 and list(result.failed) == [1]
    assert 1 in store.cold()
    store.unharmed()
    faults.always = None
    result = store.collect()
    assert (result.evacuated, result.failed) == (1, {})
    assert 1 not in store.facts()
    store.require_all()


@AWAY
def test_a_worn_group_without_the_store(store, faults, fault):
    store.put('one', 0.25, 1)
    store.put('two', 0.75, 2)
    store.put('three', 1, 3)
    store.tier()
    store.repo.delete('two')
    del store.images['two']
    store.collect(evacuate_share=0)
    before = store.facts()
    store.forget()
    faults.plan(None, *[fault] * 100, methods=('GET', 'HEAD'))
    with contextlib.suppress(exceptions.UnavailableError):
        assert store.tier().renewed == 0
    faults.reset()
    assert store.facts() == before
    store.unharmed()
    assert store.tier().renewed == 1
    store.require_all()


def test_a_lost_object_is_not_in_the_way(store, tmp_path):
    store.put('one', 0.25, 1)
    store.put('two', 0.75, 2)
    store.tier()
    with store.changing(1, tmp_path) as object_:
        object_[0] = None
    store.repo.delete('two')
    del store.images['two']
    store.collect(evacuate_share=0)
    store.put('three', 1, 3)
    store.forget()
    result = store.tier()
    assert (result.groups, result.renewed, list(result.failed)) == (1, 0, [1])
    assert store.cold() == [1, 2]


def test_the_last_group_is_cold_and_empty(store):
    store.put('one', 1, 1)
    store.tier()
    store.repo.delete('one')
    del store.images['one']
    result = store.collect()
    assert (result.freed_blocks, result.unlinked, result.rewritten) == (
        256, 0, 1)
    facts, = store.facts().values()
    assert not facts['is_cold'] and not facts['published']
    store.put('two', 1.5, 2)
    assert store.tier().groups == 1
    store.require_all()


# -- readers ------------------------------------------------------------------

@AWAY
def test_glance_may_try_again(place, faults, tmp_path, configure, fault):
    """Glance gets a 503 error, and the image when the store is back."""
    path = tmp_path / 'r'
    with contextlib.closing(Store(path, *place)) as store:
        pass
    configure(one={'dedup_store_datadir': path})
    data = repositories.noise(SIZE, 1)
    url = stores.add(data)[0]
    with contextlib.closing(Store.of(path)) as store:
        assert store.tier().groups == 1
        store.forget()
    faults.always = fault
    with pytest.raises(store_exceptions.RemoteServiceUnavailable):
        stores.get(url)
    faults.always = None
    assert stores.get(url) == data
    glance_store.delete(url, 'one')


@AWAY
def test_clients_of_dedupd_may_try_again(store, faults, fault):
    store.put('one', 1, 1)
    store.tier()
    store.close()
    data = store.images['one']
    socket = store.path.parent / 'nbd'
    with daemons.running(store.path, nbd_socket=socket) as daemon:
        faults.always = fault
        answer = daemon.request('GET', '/v1/images/one')
        assert answer.status == 503, answer
        with nbd.Session(socket).go(b'one') as session:
            assert session.answer(nbd.READ, 0, 4096)[0] == errno.EIO
        faults.always = None
        answer = daemon.request('GET', '/v1/images/one')
        assert answer.status == 200 and answer.body == data
        with nbd.Session(socket).go(b'one') as session:
            assert session.read(0, 4096) == data[:4096]
