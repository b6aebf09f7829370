# SPDX-License-Identifier: Apache-2.0

"""Images are assembled, and their stored parts are read back."""

import array
import hashlib
import random
import threading

import pytest

from glance_dedup.base import exceptions
from glance_dedup.client import wire
from glance_dedup.transfer import image_assembly
from tests.support import repositories

noise = repositories.noise
BLOCK = 4096
GLOBAL = bytes(16)


@pytest.fixture
def path(tmp_path):
    # Groups so small that one write goes through several.
    return repositories.create(tmp_path / 'repo', group_slots=64)


@pytest.fixture
def repo(path):
    with repositories.open_repository(path) as repo:
        yield repo


def blocks_of(data, size=BLOCK):
    return [data[at:at + size] for at in range(0, len(data), size)]


def name_of(block):
    return hashlib.sha256(block).digest()


def describe(*parts):
    """Return a description of numbers of zeros, and lists of blocks."""
    offset = 0
    for part in parts:
        if isinstance(part, int):
            extent = wire.RecipeExtent(offset, part, 0, b'')
        else:
            extent = wire.RecipeExtent(
                offset, sum(map(len, part)), len(part), b''.join([
                    name_of(block) + len(block).to_bytes(4, 'little')
                    for block in part]))
        yield extent
        offset = extent.end


def cut(parts, block_size):
    return list(map(image_assembly.lot_of, image_assembly.cut(
        describe(*parts), image_assembly.most_blocks(block_size))))


def packed(blocks):
    """Return packed fingerprints and lengths."""
    return (b''.join(map(name_of, blocks)),
            array.array('I', map(len, blocks)).tobytes())


# -- lots ---------------------------------------------------------------------

@pytest.mark.parametrize('most', [1, 7, 16, 4096])
def test_lots_make_up_the_image(monkeypatch, most):
    monkeypatch.setattr(image_assembly, 'LOT_BLOCKS', most)
    rng = random.Random(most)
    parts = []
    for seed in range(30):
        if rng.random() < 0.4:
            parts.append(rng.randrange(1, 1 << 40))
        else:
            parts.append(blocks_of(noise(rng.randrange(1, 40 * 512), seed),
                                   512))
    found, end = [], 0
    for lot in cut(parts, 512):
        count = 0
        assert lot.begin == end
        for part in lot.parts:
            if isinstance(part, int):
                found.append(part)
                end += part
            else:
                assert part.offset == end
                end += sum(part.lengths)
                count += len(part.names)
                found += list(zip(part.names, part.lengths))
        assert 0 < len(lot.parts) <= most and count <= most
        assert lot.end == end
    wanted = []
    for part in parts:
        wanted += [part] if isinstance(part, int) else [
            (name_of(block), len(block)) for block in part]
    assert found == wanted


def test_a_lot_is_bounded_in_bytes():
    blocks = [bytes([n]) * 65536 for n in range(200)]
    lots = cut([blocks], 65536)
    assert len(lots) == 2
    assert lots[0].end == image_assembly.LOT_BYTES


def test_ranges():
    assert image_assembly.ranges({}) == []
    assert image_assembly.ranges({
        9: (b'', 1), 0: (b'', 4), 4: (b'', 2), 10: (b'', 5)}) == [
            (0, 6), (9, 6)]


# -- putting together ---------------------------------------------------------

def lots_of(*parts):
    return cut(parts, BLOCK)


def take_all(put_together, lot, data):
    for offset, length in image_assembly.ranges(lot.wanted):
        put_together.take(lot, offset, data[offset:offset + length])


@pytest.mark.parametrize('most', [5, 4096])
def test_an_image(path, repo, monkeypatch, most):
    """Lots are looked up ahead, taken in any order, and store all blocks."""
    monkeypatch.setattr(image_assembly, 'LOT_BLOCKS', most)
    blocks = blocks_of(noise(150 * BLOCK))
    repositories.put(repo, 'other', b''.join(blocks[20:60]))
    blocks += [bytes(BLOCK), *blocks[::7], noise(100, 9)]
    parts = [blocks[:70], 3 * BLOCK, blocks[70:]]
    data = b''.join(blocks[:70]) + bytes(3 * BLOCK) + b''.join(blocks[70:])
    with repo.begin('one') as transaction:
        together = image_assembly.Assembly(transaction, 'sha256', GLOBAL)
        lots = lots_of(*parts)
        for lot in lots:
            together.look_up(lot)
        for lot in reversed(lots):
            take_all(together, lot, data)
            assert not lot.wanted
        assert [together.store(lot) for lot in lots] == [
            lot.end for lot in lots]
        assert together.asked == 150 - 40 + 1 + 1
        assert together.found == len(blocks) - together.asked
        transaction.keep()
        reader = repo.block_reader()
        for part in [part for lot in lots for part in lot.parts
                     if isinstance(part, image_assembly.Blocks)]:
            for name, length, address in zip(part.names, part.lengths,
                                             part.addresses):
                if not address:
                    assert name == name_of(bytes(BLOCK))
                    continue
                plain = reader.read(name, array.array('I', [length]).tobytes(),
                                    array.array('Q', [address]).tobytes())
                assert name_of(plain) == name
        reader.close()
        transaction.commit()
    assert repositories.read_all(repo, 'one') == data
    repositories.require_clean(path)


def test_what_is_not_the_block(repo):
    blocks = blocks_of(noise(6 * BLOCK))
    with repo.begin('one') as transaction:
        together = image_assembly.Assembly(transaction, 'sha256', GLOBAL)
        lot, = lots_of(blocks)
        together.look_up(lot)
        for offset, plain in ((0, blocks[1]), (1, blocks[0]),
                              (0, blocks[0][:-1]), (6 * BLOCK, b'x'),
                              (5 * BLOCK, blocks[5] + b'x')):
            with pytest.raises(image_assembly.BadBlock) as caught:
                together.take(lot, offset, plain)
            assert str(caught.value.offset) in str(caught.value)
        # The good block before the bad byte has arrived, and is not taken
        # twice.
        with pytest.raises(image_assembly.BadBlock):
            together.take(lot, 5 * BLOCK, blocks[5])
        with pytest.raises(image_assembly.BadBlock,
                           match='5 blocks did not come'):
            together.store(lot)
        together.take(lot, 0, b''.join(blocks[:5]))
        together.store(lot)
        transaction.commit()
    assert repositories.read_all(repo, 'one') == b''.join(blocks)


def test_blocks_of_another_scope(repo):
    """Blocks of another scope are not found, though their names are known."""
    blocks = blocks_of(noise(6 * BLOCK))
    repositories.put(repo, 'other', b''.join(blocks))
    with repo.begin('one') as transaction:
        together = image_assembly.Assembly(transaction, 'sha256', GLOBAL,
                                           find=False)
        lot, = lots_of(blocks)
        together.look_up(lot)
        assert len(lot.wanted) == 6
        take_all(together, lot, b''.join(blocks))
        together.store(lot)
        assert transaction.commit().new_bytes == 0


def test_begin_in_a_scope_by_its_id(repo):
    for number, scope in enumerate([bytes(range(16)), GLOBAL]):
        with repo.begin(str(number), scope=scope) as transaction:
            transaction.write(noise(BLOCK))
            assert transaction.commit().scope == scope.hex()
    for scope in (bytes(15), bytes(17), b'', b'\xff' * 16):
        with pytest.raises(exceptions.InvalidParameter):
            repo.begin('one', scope=scope)


# -- reading back -------------------------------------------------------------

class Stored:
    """Blocks in a transaction that has not ended."""

    def __init__(self, repo, blocks):
        self.transaction = repo.begin('one')
        self.blocks = blocks
        self.names, self.lengths = packed(blocks)
        self.addresses = self.transaction.write_blocks(
            b''.join(blocks), self.lengths)

    def read(self, reader, numbers):
        return reader.read(*(
            b''.join([column[width * n:width * (n + 1)] for n in numbers])
            for column, width in ((self.names, 32), (self.lengths, 4),
                                  (self.addresses, 8))))


@pytest.fixture
def stored(repo):
    found = Stored(repo, [*blocks_of(noise(300 * BLOCK)), noise(77, 2)])
    yield found
    found.transaction.abort()


@pytest.fixture
def reader(repo):
    with_reader = repo.block_reader()
    yield with_reader
    with_reader.close()


def test_read_back(stored, reader):
    stored.transaction.keep()
    rng = random.Random(1)
    order = list(range(301))
    for _ in range(3):
        rng.shuffle(order)
        assert stored.read(reader, order) == b''.join(
            [stored.blocks[number] for number in order])
    assert reader.read(b'', b'', b'') == b''


def test_zeros_have_no_address(repo):
    with repo.begin('one') as transaction:
        blocks = [bytes(BLOCK), noise(BLOCK), bytes(7), noise(BLOCK), bytes(1)]
        addresses = array.array('Q', transaction.write_blocks(
            b''.join(blocks), packed(blocks)[1]))
        assert addresses[1] == addresses[3] != 0
        assert addresses[0] == addresses[2] == addresses[4] == 0


def test_write_goes_on_after_keep(path, repo, reader):
    """Writing continues after each keep(), which makes its data readable."""
    blocks = blocks_of(noise(200 * BLOCK))
    with repo.begin('one') as transaction:
        for at in range(0, 200, 20):
            some = blocks[at:at + 20]
            names, lengths = packed(some)
            addresses = transaction.write_blocks(b''.join(some), lengths)
            transaction.keep()
            assert reader.read(names, lengths, addresses) == b''.join(some)
        transaction.commit()
    assert repositories.read_all(repo, 'one') == b''.join(blocks)
    repositories.require_clean(path)


def test_what_is_not_synced_is_not_read(stored, reader):
    """Blocks of a group without a published record are not read (I1)."""
    with pytest.raises(exceptions.DamagedError, match='no live block'):
        stored.read(reader, [300])
    stored.transaction.keep()
    assert stored.read(reader, [300]) == stored.blocks[300]


def test_the_block_must_be_the_one_meant(stored, reader):
    stored.transaction.keep()
    address = stored.addresses[:8]
    for name, length in ((stored.names[32:64], BLOCK),
                         (stored.names[:32], BLOCK - 1)):
        with pytest.raises(exceptions.DamagedError,
                           match='00000001: slot 0 .* is not the block'):
            reader.read(name, array.array('I', [length]).tobytes(), address)


def test_damage_is_named(path, stored, reader):
    stored.transaction.keep()
    group = repositories.Group(path, 2)
    group.data[group.data_start() + 100] ^= 1
    group.save()
    with pytest.raises(exceptions.DamagedError, match='groups/00000002'):
        stored.read(reader, range(300))
    assert stored.read(reader, range(64)) == b''.join(stored.blocks[:64])
    repositories.group_path(path, 1).unlink()
    with pytest.raises(exceptions.RepositoryError, match='groups/00000001'):
        stored.read(reader, range(64))


@pytest.mark.parametrize('address', [0, 1, 1 << 15, (1 << 64) - 1])
def test_addresses_that_cannot_be(stored, reader, address):
    stored.transaction.keep()
    with pytest.raises(exceptions.RepositoryError):
        reader.read(noise(32), array.array('I', [BLOCK]).tobytes(),
                    array.array('Q', [address + 1]).tobytes()
                    if address + 1 < 1 << 64 else b'\xff' * 8)


@pytest.mark.parametrize('arguments', [
    (b'x' * 31, bytes(4), bytes(8)), (b'x' * 32, bytes(3), bytes(8)),
    (b'x' * 32, bytes(4), bytes(7)), (b'x' * 32, b'\xff' * 4, bytes(8)),
    (b'x' * 64, bytes(4), bytes(8))])
def test_arguments_that_do_not_fit(reader, arguments):
    with pytest.raises(ValueError):
        reader.read(*arguments)


def test_a_reader_that_is_closed(path, repo, reader):
    reader.close()
    reader.close()
    with pytest.raises(exceptions.ClosedError):
        reader.read(b'', b'', b'')
    # A reader outlives its handle until it is closed, too.
    with repositories.open_repository(path) as other:
        late = other.block_reader()
    assert late.read(b'', b'', b'') == b''
    late.close()
    with pytest.raises(exceptions.ClosedError):
        other.block_reader()


def test_in_a_forked_child(stored, reader):
    stored.transaction.keep()

    def child():
        with pytest.raises(exceptions.ClosedError):
            stored.read(reader, [0])
        reader.close()

    repositories.in_child(child)
    assert stored.read(reader, [0]) == stored.blocks[0]


def test_by_several_threads(stored, reader):
    stored.transaction.keep()
    wrong = []

    def read(seed):
        rng = random.Random(seed)
        for _ in range(50):
            numbers = rng.sample(range(301), 20)
            if stored.read(reader, numbers) != b''.join(
                    [stored.blocks[n] for n in numbers]):
                wrong.append(numbers)

    threads = [threading.Thread(target=read, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong


# -- the commit ---------------------------------------------------------------

def test_commit_open(path, repo):
    with repo.begin('one') as transaction:
        transaction.write(noise(BLOCK))
        image = transaction.commit_open()
    repo.delete('one')
    assert image.read() == noise(BLOCK)
    assert image.stat.upload_id == transaction.upload_id
    image.close()


def test_commit_open_has_the_image_locked(path, repo):
    with repo.begin('one') as transaction:
        transaction.write(noise(BLOCK))
        image = transaction.commit_open()
    # Byte 1: users.
    assert repositories.lock_held(path / 'images' / 'one', 1) == 'shared'
    image.close()
    assert not repositories.lock_held(path / 'images' / 'one', 1)


def test_commit_open_that_comes_too_late(repo):
    with repo.begin('one') as transaction:
        transaction.write(noise(BLOCK))
        repositories.put(repo, 'one', b'faster')
        with pytest.raises(exceptions.ImageExists):
            transaction.commit_open()
    assert repositories.read_all(repo, 'one') == b'faster'
