# SPDX-License-Identifier: Apache-2.0

"""The checker checks the maintainer's files: catalog, fence, spare copies."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import struct

import plyvel
import pytest
import xxhash

from dedupd.tasks import accounting
from dedupd.tasks import collector
from dedupd.tasks import merger
from dedupd.tasks import scrubber
from glance_dedup.base import pacing
from glance_dedup.check import catalog_copy
from glance_dedup.check import checker
from glance_dedup.check import group_check
from tests.support import maintenance
from tests.support import repositories
from tests.support.repositories import put
from tests.unit.check import fixtures
from tests.unit.repository import format_writer

no_pause = fixtures.no_pause
repository = fixtures.repository

DAMAGE, NOTE = checker.DAMAGE, checker.NOTE
PIECES = [(0, 5), ('zeros', 1000), (3, 9)]


def noise(number, size=512):
    return random.Random(number).randbytes(size)


@pytest.fixture
def group(repository):
    group = format_writer.Group(repository, 1)
    for first in (0, 4, 8):
        group.append([noise(first + i) for i in range(4)])
        group.publish()
    group.save()
    return group


@pytest.fixture
def pieces(group):
    return [(group, 0, 5), ('zeros', 1000), (group, 3, 9)]


@pytest.fixture
def image(repository, pieces):
    return repository.image('one', pieces)


@pytest.fixture
def catalog(repository, image, group, pieces):
    """A catalog that has counted the image, and is not saved yet."""
    catalog = format_writer.Catalog(repository)
    catalog.count('one', pieces)
    catalog.index(group)
    catalog.groups[1] = {'judged': 12}
    return catalog


def findings(repository, severity=DAMAGE):
    return [f for f in checker.check(repository.path).findings
            if f.severity == severity]


def no_findings(repository):
    assert checker.check(repository.path).findings == []


def one(repository, severity, *words, file='catalog'):
    """Require and return a single finding."""
    report = checker.check(repository.path)
    assert report.ok == (severity == NOTE)
    [found] = report.findings
    assert (found.severity, found.file) == (severity, file), found
    for word in words:
        assert word in found.sentence
    return found


# -- sound catalogs -----------------------------------------------------------

@pytest.mark.parametrize('bits', [0, 1, 5])
def test_clean(repository, catalog, bits):
    catalog.bits = bits
    catalog.cursors[1] = 12
    catalog.save_index()
    catalog.more = {
        b's': b'{"group": 1}', b'h' + bytes(8): b'{}',
        struct.pack('>cQ', b'd', 1 << 15 | 9):
            b'{"found": 1, "fingerprint": "00", "quarantine": "", '
            b'"images": []}'}
    path = catalog.save()
    before = {f.name: f.read_bytes() for f in path.iterdir()}
    report = checker.check(repository.path)
    assert report.findings == []
    assert report.figures['index_records'] == 12
    assert report.figures['index_stale'] == 0
    # The checker does not change the catalog's files.
    assert before == {f.name: f.read_bytes() for f in path.iterdir()}


def test_absent(repository, image):
    no_findings(repository)


def test_fence_without_a_catalog(repository, catalog):
    catalog.save_fence(1, 2)
    one(repository, NOTE, 'is missing')


def test_in_use(repository, catalog):
    catalog.more = {b'meta': b'nonsense'}
    catalog.save()
    lock = repository.path / 'locks/maintainer'
    repository.write(lock, b'')
    one(repository, DAMAGE)
    with repositories.holding(lock, 0):
        one(repository, NOTE, 'in use')


def opened(repository):
    """Have LevelDB open the catalog."""
    with contextlib.closing(plyvel.DB(str(repository.path / 'catalog'))):
        pass


def test_maintainer_comes_and_goes(repository, catalog, monkeypatch):
    """The checker reports no damage if the catalog may have changed since."""
    catalog.groups[1]['used'] = 3
    catalog.save()
    original = group_check.Groups.check_all

    def check_all(self, numbers):
        original(self, numbers)
        change()

    def opening():
        opened(repository)

    def fence():
        catalog.save_fence(catalog.sequence, catalog.sequence + 1)

    monkeypatch.setattr(group_check.Groups, 'check_all', check_all)
    for change in (opening, fence):
        one(repository, NOTE, 'in use')
    change = int
    catalog.save_fence(catalog.sequence)
    one(repository, DAMAGE, 'in use, and counts')


def test_time_of_a_file_changes(repository, catalog, monkeypatch):
    """A shared file system may change a file's times after a write."""
    catalog.groups[1]['used'] = 3
    catalog.save()
    original = group_check.Groups.check_all

    def check_all(self, numbers):
        original(self, numbers)
        for file in (repository.path / 'catalog').iterdir():
            os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))

    monkeypatch.setattr(group_check.Groups, 'check_all', check_all)
    one(repository, DAMAGE, 'in use, and counts')


def test_catalog_is_changed_while_it_is_copied(
        repository, catalog, monkeypatch):
    catalog.save()
    original = catalog_copy.Copy.copy_files

    def copy_files(self):
        original(self)
        opened(repository)

    monkeypatch.setattr(catalog_copy.Copy, 'copy_files', copy_files)
    one(repository, NOTE, 'in use')


# -- the fence ----------------------------------------------------------------

def test_behind_the_fence(repository, catalog):
    catalog.save()
    catalog.save_fence(7, 8)
    one(repository, NOTE, 'lost accounting steps', 'rebuilds it')
    catalog.save_fence(5, 6)
    no_findings(repository)
    catalog.save_fence(7)
    no_findings(repository)


def test_no_fence(repository, catalog):
    catalog.save()
    os.unlink(repository.path / 'fence')
    one(repository, NOTE, 'no fence')


def test_fence_of_another_catalog(repository, catalog):
    """A catalog's creation was killed right before its fence was written."""
    catalog.save()
    format_writer.Catalog(repository, 'another').save_fence(99)
    one(repository, NOTE, 'no fence')


def test_any_byte_of_the_fence(repository, catalog):
    catalog.save()
    path = repository.path / 'fence'
    content = path.read_bytes()
    for at in range(0, len(content), 7):
        changed = bytearray(content)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        found = one(repository, NOTE, 'does not verify', file='fence')
        assert found.offset == at // 512 * 512
    path.write_bytes(content + b'x')
    one(repository, NOTE, 'two records', file='fence')
    path.write_bytes(content[512:] + content[:512])
    assert len(findings(repository)) == 2
    for size in (0, 1, 511, 512, 1000):
        path.write_bytes(content[:size])
        assert findings(repository) == []
    os.unlink(path)
    path.symlink_to('key')
    assert 'symbolic' in findings(repository)[0].sentence


# -- counts -------------------------------------------------------------------

def test_counts_too_low(repository, catalog):
    catalog.counts[1][4] -= 1
    catalog.save()
    one(repository, DAMAGE, 'too low', 'slot 4', '1 instead of 2')


def test_counts_too_high(repository, catalog):
    catalog.counts[1][4] += 1
    catalog.save()
    one(repository, NOTE, 'err high', 'slot 4', '3 instead of 2')


def test_counts_of_what_nobody_names(repository, catalog):
    catalog.counts[1][20] = catalog.counts.setdefault(
        9, [0] * 32768)[31000] = 1
    catalog.save()
    found = findings(repository, NOTE)
    assert len(found) == 2
    assert all('err high' in f.sentence for f in found)
    assert '00000009' in found[1].sentence


def test_counter_at_its_maximum(repository, catalog):
    catalog.counts[1][4] = (1 << 32) - 1
    catalog.save()
    no_findings(repository)


def test_missing_chunk(repository, catalog):
    catalog.more[struct.pack('>cIB', b'c', 1, 0)] = None
    catalog.groups[1]['used'] = 0
    catalog.save()
    one(repository, DAMAGE, 'counts 12 blocks', 'too low')


def test_group_is_gone_and_so_are_the_counts(repository, catalog, group):
    catalog.save()
    group.path.unlink()
    assert [f.file for f in findings(repository)] == ['groups/00000001']


@pytest.mark.parametrize('facts', [
    {'used': 11}, {'judged': 65}, {'rewritten': 65},
    {'used': -1}, {'dirty': 1}, {'used': '12'}, {'more': 1}], ids=str)
def test_facts_of_a_group(repository, catalog, facts):
    catalog.groups[1].update(facts)
    catalog.save()
    one(repository, DAMAGE)


def test_damaged_recipe_makes_counts_unknown(repository, catalog, image):
    catalog.save()
    content = bytearray(image.read_bytes())
    content[5000] ^= 1
    image.write_bytes(content)
    assert [f.file for f in checker.check(repository.path).findings] == [
        'images/one']
    content[10] ^= 1
    image.write_bytes(content)
    assert [f.file for f in checker.check(repository.path).findings] == [
        'images/one']


def test_blocks_that_no_collection_will_look_for(
        repository, catalog, image):
    """Unused blocks that no collection would visit give a note."""
    image.unlink()
    catalog.ledger.clear()
    catalog.counts.clear()
    catalog.save()
    one(repository, NOTE, 'no collection', '12 blocks')
    shutil.rmtree(repository.path / 'catalog')
    catalog.groups[1]['dirty'] = True
    catalog.save()
    no_findings(repository)


# -- the ledger, and operations in flight -------------------------------------

def spool(repository, kind, name, pieces, **arguments):
    data = repository.recipe(name, pieces, **arguments)
    digits = data[48:64].hex() if kind in 'TM' else os.urandom(16).hex()
    path = repository.path / 'spool' / f'{kind}-{digits}'
    repository.write(path, data)
    return path


def test_image_that_was_not_counted(repository, catalog, group):
    image = repository.image('two', [(group, 0, 1)])
    catalog.save()
    one(repository, DAMAGE, 'not counted', file='images/two')
    os.link(image, repository.path / 'spool' / (
        'T-' + format_writer.some_id('upload of two').hex()))
    no_findings(repository)


def test_batches_lost_in_the_middle(repository, catalog, group):
    """Lost accounting steps are the only finding if the fence is current.

    The checker reports neither uncounted images nor low counts beside them.
    """
    catalog.count('two', [(group, 2, 3)])
    repository.image('two', [(group, 2, 3)])
    catalog.meta = {'ledger': f'{format_writer.together(catalog.ledger):032x}'}
    catalog.save()
    no_findings(repository)
    shutil.rmtree(repository.path / 'catalog')
    del catalog.ledger[format_writer.some_id('upload of one')]
    catalog.counts.clear()
    catalog.save()
    one(repository, NOTE, 'lost accounting steps', 'rebuilds it')


@pytest.mark.parametrize('kind', ['D', 'O'])
def test_image_that_is_not_uncounted_yet(repository, catalog, group, kind):
    pieces = [(group, 2, 3)]
    catalog.count('two', pieces)
    path = spool(repository, kind, 'two', pieces)
    catalog.save()
    no_findings(repository)
    # The image is uncounted now, and its spool file stays for a while.
    path.unlink()
    one_left = findings(repository, NOTE)
    assert {word for f in one_left for word in ('recipes that are gone',
            'err high') if word in f.sentence} == {
                'recipes that are gone', 'err high'}
    assert checker.check(repository.path).ok


def test_merged_recipe_in_flight(repository, catalog, group, pieces):
    """A merged recipe is counted before it takes the image's name."""
    catalog.count('two', [(group, 1, 2)])
    path = spool(repository, 'M', 'two', [(group, 1, 2)])
    catalog.save()
    one(repository, NOTE, 'no image uses', file=f'spool/{path.name}')
    # The checker counts its blocks: without them it would miss low counts.
    shutil.rmtree(repository.path / 'catalog')
    catalog.counts[1][1] -= 1
    catalog.save()
    assert 'too low' in findings(repository)[0].sentence


def test_damaged_merged_recipe(repository, catalog, group):
    """A damaged merged recipe is a finding only if it is counted."""
    catalog.save()
    path = spool(repository, 'M', 'two', [(group, 1, 2)])
    content = bytearray(path.read_bytes())
    content[4200] ^= 1
    path.write_bytes(content)
    assert findings(repository) == []
    catalog.count('two', [(group, 1, 2)])
    shutil.rmtree(repository.path / 'catalog')
    catalog.save()
    one(repository, DAMAGE, file=f'spool/{path.name}')
    content[100] ^= 1
    path.write_bytes(content)
    one(repository, DAMAGE, file=f'spool/{path.name}')


def test_left_over_exchange(repository, image):
    name = 'X-' + '0' * 32
    os.link(image, repository.path / 'spool' / name)
    one(repository, NOTE, 'exchange', file=f'spool/{name}')


@pytest.mark.parametrize('facts', [
    {'size': 1}, {'blocks': 13}, {'project': 'x'}, {'created': 1},
    {'upload_id': '0' * 32}, {'more': 1}], ids=str)
def test_other_figures_than_the_recipe(repository, catalog, facts):
    transaction = format_writer.some_id('upload of one')
    catalog.ledger[transaction].update(facts)
    catalog.save()
    one(repository, DAMAGE, 'figures', 'images/one')


def test_transaction_id_used_twice(repository, catalog, group, image):
    path = repository.image('two', [(group, 0, 5), (group, 3, 9)],
                            transaction=format_writer.some_id('upload of one'))
    catalog.save()
    assert 'transaction id' in [
        f.sentence for f in findings(repository) if f.file == 'images/two'
    ][0]
    path.unlink()
    no_findings(repository)


# -- hostile catalogs ---------------------------------------------------------

@pytest.mark.parametrize('meta', [
    {'format': 2}, {'repository_id': '0' * 32}, {'catalog_id': 'x' * 32},
    {'sequence': -1}, {'sequence': True}, {'valid': 1}, {'parts': -1},
    {'ledger': ''}, {'more': 1}], ids=str)
def test_meta(repository, catalog, meta):
    catalog.meta = meta
    catalog.save()
    one(repository, DAMAGE)


def test_meta_has_another_ledger(repository, catalog):
    """The ledger in the metadata differs if accounting steps were lost."""
    catalog.meta = {'ledger': '0' * 32}
    catalog.save()
    one(repository, NOTE, 'lost accounting steps')


def test_not_finished(repository, catalog):
    catalog.counts[1][4] = 0
    catalog.meta = {'valid': False}
    catalog.save()
    one(repository, NOTE, 'not finished')


@pytest.mark.parametrize('inode, modified, upload, wrong', [
    (0, 0, 'upload of one', False), (0, 0, 'other', True),
    (1, 0, 'other', False), (0, 1, 'other', False)])
def test_file_of_an_image(repository, catalog, inode, modified, upload,
                          wrong):
    """A record of an image's file must not name another transaction."""
    file = os.stat(repository.path / 'images' / 'one')
    catalog.more[b'ione'] = struct.pack(
        '<QQ16s', file.st_ino + inode, file.st_mtime_ns + modified,
        format_writer.some_id(upload))
    catalog.save()
    if wrong:
        one(repository, DAMAGE, 'another transaction id')
    else:
        no_findings(repository)


@pytest.mark.parametrize('key, value', [
    (b'x', b''), (b'c', b''), (b'l12', b'{}'), (b'g12345', b'{}'),
    (b'f1', b'x'), (b'd1', b'{}'), (b'h1', b'{}'), (b'', b''),
    (b'sx', b'{}'), (b's', b'x'), (b's', b'[]'), (b'h' + bytes(8), b'1'),
    (b'd' + bytes(8), b'{}'), (b'd' + b'\xff' * 8, b'{}'), (b'p', b''),
    (b'p\0\0\0\1', b''), (b'p\0\0\0\1', bytes(16)),
    (b'c\0\0\0\1\0', b'x'), (b'g\0\0\0\1', b'['), (b'g\0\0\0\1', b'9' * 5000),
    (b'i', bytes(32)), (b'i/', bytes(32)), (b'ione', bytes(31)),
    (b'l' + format_writer.some_id('upload of one'), b'[' * 5000)], ids=str)
def test_strange_keys(repository, catalog, key, value):
    catalog.more[key] = value
    catalog.save()
    assert findings(repository)
    assert {f.file for f in checker.check(repository.path).findings} == {
        'catalog'}


def test_files_of_leveldb(repository, catalog):
    path = catalog.save()
    contents = {f.name: f.read_bytes() for f in path.iterdir()}
    for name, content in contents.items():
        file = path / name
        if name in ('LOCK', 'LOG'):
            continue
        file.unlink()
        file.symlink_to('/etc/passwd')
        assert 'symbolic' in findings(repository)[0].sentence
        file.unlink()
        os.mkfifo(file)
        assert 'regular' in findings(repository)[0].sentence
        file.unlink()
        file.write_bytes(content)
    no_findings(repository)
    (path / 'CURRENT').write_bytes(b'../../../etc/passwd\n')
    one(repository, DAMAGE, 'CURRENT')
    (path / 'CURRENT').write_bytes(contents['CURRENT'])
    (path / 'strange').write_bytes(b'')
    one(repository, NOTE, 'unknown', file='catalog/strange')


# -- catalogs that LevelDB cannot read ----------------------------------------

@pytest.fixture
def tables(repository, catalog, group):
    """A catalog that has a table for its recipes, another one, and a log.

    Besides, an image has lost a block.
    """
    catalog.more |= {b'h' + struct.pack('>Q', n): b'{"more": "%064x"}' % (
        random.Random(n).getrandbits(256)) for n in range(300)}
    path = catalog.save()
    for name in (b's', b'h' + bytes(8)):
        with plyvel.DB(str(path)) as db:    # makes a table of the log
            db.put(name, b'{}')
    assert len(list(path.glob('*.ldb'))) == 2
    no_findings(repository)
    damage_block(group, 0)
    assert [f.file for f in findings(repository)] == ['groups/00000001']
    return path


def judge_with_damaged_catalog(repository):
    """Return the findings on the catalog; the rest is checked as usual."""
    report = checker.check(repository.path)
    assert report.damaged_images == ['one']
    assert report.figures['images'] == report.figures['groups'] == 1
    assert report.figures['blocks_verified'] == 11
    assert 'groups/00000001' in [f.file for f in report.findings]
    for finding in report.findings:
        assert "b'" not in finding.sentence and '/tmp' not in finding.sentence
    # The damaged block has a record in the index.
    return [f for f in report.findings if f.file != 'groups/00000001'
            and 'blocks that are no more' not in f.sentence]


@pytest.mark.slow
def test_any_byte_of_a_table(repository, tables):
    """A damaged byte gives one finding on its file, if LevelDB reads it."""
    rng = random.Random(1)
    for table in tables.glob('*.ldb'):
        content = table.read_bytes()
        places = [*range(max(0, len(content) - 120), len(content)),
                  *(rng.randrange(len(content)) for _ in range(120))]
        unnoticed = 0
        for at in places:
            changed = bytearray(content)
            changed[at] ^= 1 << rng.randrange(8)
            table.write_bytes(changed)
            found = judge_with_damaged_catalog(repository)
            if not found:
                unnoticed += 1
                continue
            assert [(f.severity, f.file) for f in found] == [
                (DAMAGE, f'catalog/{table.name}')], (at, found)
            assert 'rebuild-catalog' in found[0].sentence
        # LevelDB does not read most bytes of a footer.
        assert unnoticed < len(places) / 2, unnoticed
        for length in (0, 47, len(content) // 2, len(content) - 1):
            table.write_bytes(content[:length])
            found, = judge_with_damaged_catalog(repository)
            assert (found.severity, found.file) == (
                DAMAGE, f'catalog/{table.name}')
        table.write_bytes(content)


def test_any_byte_of_what_a_crash_may_leave_torn(repository, tables):
    """Torn logs and manifests, or old ones, give notes and no damage."""
    rng = random.Random(2)
    files = [file for file in tables.iterdir()
             if file.name.startswith('MANIFEST') or file.suffix == '.log']
    assert len(files) == 2
    for file in files:
        content = file.read_bytes()
        noticed = 0
        for at in rng.sample(range(len(content)), min(60, len(content))):
            changed = bytearray(content)
            changed[at] ^= 1 << rng.randrange(8)
            file.write_bytes(changed)
            # With a damaged length a record may appear to be the log's end.
            for found in judge_with_damaged_catalog(repository):
                assert (found.severity, found.file) == (
                    NOTE, f'catalog/{file.name}'), (at, found)
                assert 'rebuilds it' in found.sentence
                noticed += 1
        assert noticed > 20
        for length in range(0, len(content), 7):
            file.write_bytes(content[:length])
            for found in judge_with_damaged_catalog(repository):
                assert found.severity == NOTE, (length, found)
        file.write_bytes(content)


def test_missing_files_of_leveldb(repository, tables):
    for file in sorted(tables.iterdir()):
        content = file.read_bytes()
        file.unlink()
        found = judge_with_damaged_catalog(repository)
        assert all(f.severity == NOTE for f in found), found
        if file.suffix == '.ldb' or file.name.startswith('MANIFEST'):
            assert [f.file for f in found] == [f'catalog/{file.name}']
        if file.name == 'CURRENT':
            assert 'not a database' in found[0].sentence
        file.write_bytes(content)


def test_no_room_for_leveldb_is_no_damage(
        repository, tables, monkeypatch):
    """LevelDB's lack of space for the copy is no damage."""
    def full(name, **options):
        raise plyvel.IOError(b'IO error: %s/000009.log: No space left on '
                             b'device' % name.encode())

    monkeypatch.setattr(catalog_copy.plyvel, 'DB', full)
    found, = judge_with_damaged_catalog(repository)
    assert (found.severity, found.file) == (NOTE, 'catalog')
    assert 'No space left' in found.sentence


def test_catalog_is_no_directory(repository, catalog):
    (repository.path / 'catalog').write_bytes(b'')
    assert findings(repository)[0].file == 'catalog'
    os.unlink(repository.path / 'catalog')
    (repository.path / 'catalog').mkdir(mode=0o700)
    one(repository, NOTE, 'not a database', 'rebuilds it')


# -- spare copies -------------------------------------------------------------

@pytest.fixture
def spares(repository, group):
    spares = format_writer.Spares(repository, 1)
    spares.append([group.blocks[i] for i in (4, 7)])
    spares.publish()
    spares.save()
    return spares


def test_spares(repository, image, spares):
    report = checker.check(repository.path)
    assert report.findings == []
    assert report.figures['spares'] == 2
    assert report.figures['spare_bytes'] == len(spares.content())
    assert report.figures['blocks_verified'] == 12
    assert report.figures['groups'] == 1
    assert report.figures['duplicate_blocks'] == 0


def test_any_byte_of_spares(repository, spares):
    content = spares.path.read_bytes()
    changed = [*range(4096 + 112), *range(spares.data_start, len(content))]
    for at in changed[::5]:
        data = bytearray(content)
        data[at] ^= 1 << at % 8
        spares.path.write_bytes(data)
        report = checker.check(repository.path)
        assert not report.ok, at
        assert {f.file for f in report.findings} == {'spares/00000001'}
        assert report.damaged_images == []


def test_a_damaged_spare_is_of_no_use(repository, image, group, spares):
    """A damaged spare copy costs no image while the block itself is whole."""
    damage_block(spares, 0)
    found, = findings(repository)
    assert (found.severity, found.file, found.images) == (
        DAMAGE, 'spares/00000001', ())
    assert 'slot 0' in found.sentence
    assert checker.check(repository.path).figures['spares'] == 1
    damage_block(group, 4)
    assert checker.check(repository.path).damaged_images == ['one']


def test_a_spare_of_another_block(repository, image, group):
    """A spare copy is useless if its content lacks its fingerprint."""
    spares = format_writer.Spares(repository, 1)
    spares.append([group.blocks[5], group.blocks[7]], fingerprints=[
        group.fingerprint(4), group.fingerprint(7)])
    spares.publish()
    spares.save()
    report = checker.check(repository.path)
    assert 'spares/00000001' in {f.file for f in report.findings}
    assert report.figures['spares'] == 1
    assert report.damaged_images == []
    damage_block(group, 4)
    assert checker.check(repository.path).damaged_images == ['one']


def test_spares_and_groups_are_not_the_same(repository, group, spares):
    first, second = group.path.read_bytes(), spares.path.read_bytes()
    group.path.write_bytes(second)
    spares.path.write_bytes(first)
    assert {(f.file, f.offset) for f in findings(repository)} == {
        ('groups/00000001', 32), ('spares/00000001', 32)}


def damage_block(group, slot):
    content = bytearray(group.path.read_bytes())
    at = content.index(group.blocks[slot])
    content[at + 9] ^= 1
    group.path.write_bytes(content)


def test_damaged_block_with_a_spare(repository, image, group, spares):
    damage_block(group, 4)
    report = checker.check(repository.path)
    assert not report.ok        # a scrub can repair it
    assert {(f.file, f.images) for f in report.findings} == {
        ('groups/00000001', ('one',))}
    assert report.damaged_images == []
    content = group.path.read_bytes()
    damage_block(group, 5)
    assert checker.check(repository.path).damaged_images == ['one']
    group.path.write_bytes(content)
    os.unlink(spares.path)
    assert checker.check(repository.path).damaged_images == ['one']


def mark(group, slot):
    fields = bytearray(group.entries[slot][:52])
    fields[51] = fields[51] & 0x1f | format_writer.DAMAGED << 5
    group.entry(slot, bytes(fields), state=format_writer.DAMAGED)


def test_marked_block_with_a_spare(repository, image, group, spares):
    mark(group, 4)
    group.save()
    damage_block(group, 4)
    report = checker.check(repository.path)
    assert report.ok
    assert report.damaged_images == []
    assert {(f.file, f.images) for f in report.findings} == {
        ('images/one', ('one',)), ('groups/00000001', ())}
    assert report.figures['damaged_blocks'] == 1
    mark(group, 5)
    group.save()
    report = checker.check(repository.path)
    assert not report.ok
    assert report.damaged_images == ['one']


@pytest.mark.parametrize('name', ['xxh3-128', 'sha1', 'SSL3-SHA1'])
@pytest.mark.parametrize('marked', [False, True])
def test_a_spare_of_a_weak_fingerprint(tmp_path, name, marked):
    """A weak fingerprint may match another block, so its spare is not read."""
    def compute(data):
        if name == 'xxh3-128':
            return xxhash.xxh3_128_digest(data) + bytes(16)
        return hashlib.sha1(data).digest() + bytes(12)

    repository = format_writer.Repository(
        tmp_path / 'weak', fingerprint=name, verify='bytes')
    group = format_writer.Group(repository, 1, compute=compute)
    group.append([b'%d' % i * 512 for i in range(4)])
    spares = format_writer.Spares(repository, 1, compute=compute)
    spares.append([group.blocks[2]])
    for written in (group, spares):
        written.publish()
        written.save()
    repository.image('one', [(group, 0, 4)])
    report = checker.check(repository.path)
    assert report.ok
    note, = report.findings
    assert note.file == 'spares/00000001'
    assert 'is never read' in note.sentence
    if marked:
        mark(group, 2)
        group.save()
    else:
        damage_block(group, 2)
    report = checker.check(repository.path)
    assert not report.ok
    assert report.damaged_images == ['one']


def test_spares_of_some_blocks_of_an_extent(
        repository, image, group, spares):
    """The spare copy of one block does not hide damage of another block."""
    damage_block(group, 4)
    assert checker.check(repository.path).damaged_images == []
    content = group.path.read_bytes()
    mark(group, 5)
    group.save()
    damage_block(group, 4)
    assert checker.check(repository.path).damaged_images == ['one']
    group.path.write_bytes(content)
    # The spare copy does not hide an extent with other blocks, either.
    two = repository.image('two', [(group, 3, 2)])
    data = bytearray(two.read_bytes())
    data[4096 + 8 + 32] ^= 1
    data[8184:8192] = struct.pack('<Q', format_writer.xxh3(
        bytes(data[4096:8184]),
        int.from_bytes(format_writer.some_id('upload of two')[:8], 'little')))
    two.write_bytes(data)
    assert checker.check(repository.path).damaged_images == ['two']


def test_marked_block_of_other_content(repository, group, spares):
    """A spare copy with other content than the image's block does not help."""
    group.append([group.blocks[7]])
    repository.image('two', [(group, 11, 2)])
    fields = bytearray(group.entries[11][:52])
    fields[:32] = group.fingerprint(7)
    group.entry(11, bytes(fields))
    mark(group, 11)
    group.publish()
    group.save()
    assert checker.check(repository.path).damaged_images == ['two']


def test_catalog_does_not_know_a_damaged_block(
        repository, catalog, group, spares):
    mark(group, 4)
    group.save()
    catalog.records = [r for r in catalog.records if r[1] & 0x7fff != 4]
    catalog.save()
    found = findings(repository, NOTE)
    assert any('does not know of 1 damaged' in f.sentence for f in found)


# -- catalogs that the maintainer writes --------------------------------------

def test_the_maintainer_and_the_checker_agree(tmp_path):
    """The checker finds nothing wrong after any tasks, interrupted or not."""
    path = maintenance.create(tmp_path)
    rnd = random.Random(3)
    tasks = [accounting.run_once, collector.run_once, merger.run_once,
             scrubber.run_once]
    with repositories.open_repository(path) as repo:
        for step in range(60):
            name = f'image-{rnd.randrange(6)}'
            if name in repo.images():
                repo.delete(name)
            else:
                put(repo, name, maintenance.content(
                    *rnd.sample(range(12), 3), blocks=rnd.randrange(1, 30)))
            if step % 3:
                continue
            maintainer = scrubber.maintainer_role.Maintainer(repo)
            maintainer._catalog = maintenance.Watched(
                maintainer._catalog, 'catalog',
                maintenance.Kill(rnd.randrange(2, 300)))
            with contextlib.suppress(maintenance.Killed):
                for work in rnd.sample(tasks, 4):
                    work(maintainer, pacing.Pace())
            maintenance.kill(maintainer)
            report = checker.check(path)
            assert report.ok, report.findings
            assert not any('err high' in f.sentence or 'gone' in f.sentence
                           or 'no collection' in f.sentence
                           for f in report.findings), report.findings
        with maintenance.maintaining(repo) as maintainer:
            accounting.run_once(maintainer, pacing.Pace())
            collector.run_once(maintainer, pacing.Pace())
    report = checker.check(path)
    assert report.ok
    assert report.figures['garbage_blocks'] == 0


# -- recipes that are counted in parts ----------------------------------------

#: Three pages of extents: 102, 102 and 96.
SCATTERED = 300


@pytest.fixture
def scattered(repository, group):
    pieces = [(group, n % 12, 1) for n in range(SCATTERED)]
    repository.image('scattered', pieces)
    return pieces


def in_parts(repository, group, pieces, ends, extents):
    """Return a catalog that has counted so many extents, in these parts.

    :param extents: None: all
    """
    catalog = format_writer.Catalog(repository)
    catalog.index(group)
    catalog.groups[1] = {'judged': 12}
    catalog.count('scattered', pieces)
    (transaction, facts), = catalog.ledger.items()
    together = int.from_bytes(transaction)
    if extents is not None:
        catalog.ledger.clear()
        together = 0
        catalog.more[b'b' + transaction] = json.dumps(
            {'image_id': 'scattered', 'parts': len(ends)}).encode()
        counts = [0] * 32768
        for _, slot, _ in pieces[:extents]:
            counts[slot] += 1
        catalog.counts[1] = counts
    else:
        facts['parts'] = len(ends)
    for part, end in enumerate(ends):
        key = struct.pack('>c16sI', b'e', transaction, part)
        value = struct.pack('<Q', end)
        catalog.more[key] = value
        together ^= int.from_bytes(
            hashlib.sha256(key + value).digest()[:16])
    catalog.meta = {'parts': len(ends), 'ledger': f'{together:032x}'}
    # The operation that stored the image is not accounted yet.
    upload = transaction.hex()
    os.link(repository.path / 'images/scattered',
            repository.path / f'spool/T-{upload}')
    return catalog


@pytest.mark.parametrize('ends, extents', [
    ([1], 102), ([2], 204), ([1, 2], 204), ([1, 2, 3], 300), ([3], 300),
    ([1], None), ([2], None), ([1, 2], None)])
def test_parts(repository, group, scattered, ends, extents):
    """A crash between two steps leaves a recipe that is counted in part."""
    in_parts(repository, group, scattered, ends, extents).save()
    no_findings(repository)


@pytest.mark.parametrize('extents', [0, 101, 205, 300])
def test_counts_of_parts(repository, group, scattered, extents):
    """Counts below the two recorded pages are damage; others are a note."""
    catalog = in_parts(repository, group, scattered, [1, 2], extents)
    catalog.save()
    low = extents < 204
    found, = findings(repository, DAMAGE if low else NOTE)
    assert ('too low' if low else 'err high') in found.sentence


@pytest.mark.parametrize('ends, extents', [
    ([0], 0), ([2, 1], 102), ([1, 1], 102), ([4], 300), ([3], None),
    ([1 << 63], 300)])
def test_impossible_parts(repository, group, scattered, ends, extents):
    in_parts(repository, group, scattered, ends, extents).save()
    assert any('impossible parts' in f.sentence for f in findings(repository))


@pytest.mark.parametrize(('meta', 'severity', 'words'), [
    ({'format': 2}, DAMAGE, 'format'), ({'parts': 'x'}, DAMAGE, 'nonsense'),
    ({'parts': 0}, NOTE, 'ledger'), ({'parts': 2}, NOTE, 'ledger'),
    ({'ledger': '0' * 32}, NOTE, 'ledger')])
def test_what_it_says_of_parts(repository, group, scattered, meta, severity,
                               words):
    catalog = in_parts(repository, group, scattered, [1, 2, 3][:3], 300)
    catalog.meta.update(meta)
    catalog.save()
    one(repository, severity, words)


def test_counted_in_part_and_gone(repository, group, scattered):
    catalog = in_parts(repository, group, scattered, [1], 102)
    catalog.save()
    os.unlink(repository.path / 'images/scattered')
    os.unlink(*(repository.path / 'spool').iterdir())
    assert any('recipes that are gone' in f.sentence
               for f in findings(repository, NOTE))
