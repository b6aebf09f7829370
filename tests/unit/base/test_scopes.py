# SPDX-License-Identifier: Apache-2.0

"""Scopes: an upload does not depend on the images of other projects.

Each function that names, moves, copies or verifies blocks works within one
scope. The tests count an upload's hits, reads and writes. They never measure
the time that an upload takes.
"""

import contextlib
import hashlib
import itertools
import logging
import os
import re
import shutil
import struct

import pytest
import xxhash

from dedupd.tasks import collector
from dedupd.tasks import merger
from dedupd.tasks import scrubber
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.base import scopes
from glance_dedup.check import checker
from glance_dedup.check import files
from glance_dedup.cli import entry
from glance_dedup.repository import openvolumes
from glance_dedup.transfer import image_assembly
from glance_dedup.transfer import pull
from tests.support import daemons
from tests.support import maintenance
from tests.support.maintenance import BLOCK
from tests.support.maintenance import content
from tests.support import repositories
from tests.support.repositories import noise
from tests.support.repositories import put
from tests.support.repositories import read_all
from tests.unit.repository import format_writer

pytest_plugins = ['tests.support.maintainer_fixtures']

P = {'project': 'p', 'scope': 'project'}
Q = {'project': 'q', 'scope': 'project'}
ALL = {'project': 'p', 'scope': 'global'}


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(files, 'PAUSE', 0)


def groups_of(repo, image_id):
    return {group for group, _ in maintenance.blocks_of(repo, image_id)}


def scope_of_group(path, number):
    return bytes(repositories.Group(path, number).data[32:48])


def require_distinct(repo, path):
    """Require that all images are intact, in groups of their own scopes."""
    for image_id in repo.images():
        wanted = bytes.fromhex(repo.stat(image_id).scope)
        for group in groups_of(repo, image_id):
            assert scope_of_group(path, group) == wanted
    repositories.require_clean(path)


def scrub(maintainer, **options):
    return scrubber.run_once(maintainer, pacing.Pace(), full=True, **options)


def collect(maintainer, live_share=0, evacuate_share=0):
    return collector.run_once(maintainer, pacing.Pace(),
                              live_share=live_share,
                              evacuate_share=evacuate_share)


# -- ids and fingerprints -----------------------------------------------------

def test_ids():
    assert scopes.choose('global', 'p') == bytes(16)
    assert scopes.choose('project', 'p').hex() == hashlib.sha256(
        b'glance-dedup scope\0p').hexdigest()[:32]
    # The empty name is valid, and has a scope of its own.
    assert scopes.choose('project', '') not in (
        bytes(16), scopes.choose('project', 'p'))
    assert scopes.choose('project', '\u00e9').hex() == hashlib.sha256(
        b'glance-dedup scope\0\xc3\xa9').hexdigest()[:32]
    with pytest.raises(exceptions.InvalidParameter, match='tenant'):
        scopes.choose('tenant', 'p')
    for scope in (scopes.GLOBAL, scopes.of_project('p')):
        assert scopes.choose(scope, 'p') == scopes.choose(scope, '') == scope
    with pytest.raises(exceptions.InvalidParameter, match="project 'q'"):
        scopes.choose(scopes.of_project('p'), 'q')


def test_nothing_of_a_project_is_stored_in_the_scope_of_another(tmp_path):
    """A copy or a volume in another project's scope is refused."""
    path = repositories.create(tmp_path / 'repository')
    data = noise(40 * BLOCK)
    with repositories.open_repository(path) as repo:
        put(repo, 'one', data, project='p', scope='project')
        scope = scopes.of_project('p')
        with repo.open_image('one') as image:
            for store in (
                    lambda: repo.begin('two', 'q', scope),
                    lambda: repo.copy(image, 'two', 'q', scope),
                    lambda: openvolumes.create(
                        repo, 'disk', project='q', scope=scope, image=image)):
                with pytest.raises(exceptions.InvalidParameter, match="'q'"):
                    store()
            repo.copy(image, 'two', 'q', 'project')
            openvolumes.create(repo, 'disk', project='q', scope='project',
                               image=image)
        assert repo.images() == ['one', 'two']
        assert {repo.stat('two').scope, openvolumes.look(
            repo, 'disk').scope} == {scopes.of_project('q').hex()}
    repositories.require_clean(path)


@pytest.mark.parametrize('length', [0, 1, 16, 4096, 65536])
@pytest.mark.parametrize('name', [
    'sha256', 'sha512', 'sha1', 'blake2s256', 'xxh3-128'])
def test_fingerprints(name, length):
    """A fingerprint covers the scope's id and then the bytes.

    The global scope adds no id.
    """
    data, scope = noise(length), scopes.of_project('p')

    def expected(whole):
        if name == 'xxh3-128':
            return xxhash.xxh3_128_digest(whole).ljust(32, b'\0')
        return hashlib.new(name.replace('blake2s256', 'blake2s'),
                           whole).digest()[:32].ljust(32, b'\0')
    assert _engine.fingerprint(name, data) == expected(data)
    assert _engine.fingerprint(name, data, bytes(16)) == expected(data)
    assert _engine.fingerprint(name, data, scope) == expected(scope + data)


@pytest.mark.parametrize('bad', [b'', bytes(15), bytes(17)])
def test_ids_of_other_lengths(repo, bad):
    with pytest.raises(ValueError, match='scope'):
        _engine.fingerprint('sha256', b'', bad)
    with pytest.raises(ValueError, match='scope'):
        repo.handle().begin('one', '', bad)


def test_the_id_of_spares_is_no_scope(repo):
    with pytest.raises(exceptions.InvalidParameter, match='spare'):
        repo.handle().begin('one', '', b'\xff' * 16)
    assert os.listdir(os.path.join(repo.path, 'spool')) == []


# -- storing ------------------------------------------------------------------

def test_two_projects_share_nothing(path, repo):
    data = content(1, 2)
    first = put(repo, 'one', data, **P)
    second = put(repo, 'two', data, **Q)
    assert first.new_bytes == second.new_bytes == len(data)
    assert first.stored_bytes == second.stored_bytes
    assert not groups_of(repo, 'one') & groups_of(repo, 'two')
    statistics = repo.statistics()
    assert statistics['hits'] == statistics['candidates'] == 0
    assert statistics['cold_loads'] == 0
    assert statistics['misses'] == statistics['filter_hints'] == 40
    require_distinct(repo, path)


def test_a_project_shares_with_itself(path, repo, other):
    data = content(1, 2)
    put(repo, 'one', data, **P)
    assert put(other, 'two', data, **P).new_bytes == 0
    assert put(repo, 'three', data, **P).new_bytes == 0
    assert groups_of(repo, 'one') == groups_of(repo, 'two')
    require_distinct(repo, path)


def test_within_one_upload(path, repo):
    assert put(repo, 'one', content(1, 1), **P).new_bytes == 10 * BLOCK
    require_distinct(repo, path)


def test_global_and_project_side_by_side(path, repo, other):
    """The setting may change at any time, and applies to later uploads."""
    data = content(1, 2)
    new = [put(handle, image_id, data, **options).new_bytes // BLOCK
           for image_id, (handle, options) in zip('abcdefgh', [
               (repo, ALL), (repo, P), (other, ALL), (other, P), (repo, Q),
               (repo, {'project': 'q'}), (other, {'scope': 'project'}),
               (repo, {'scope': 'project'})])]
    assert new == [20, 20, 0, 0, 20, 0, 20, 0]
    assert [repo.stat(i).scope == '0' * 32 for i in 'abcdefgh'] == [
        True, False, True, False, False, True, False, False]
    for image_id in 'abcdefgh':
        assert read_all(other, image_id) == data
    require_distinct(repo, path)


def measured(tmp_path, name, scope, stored, sent):
    """Return the work of a project's upload after another project's upload."""
    directory = tmp_path / name
    directory.mkdir()
    path = maintenance.create(directory)
    with repositories.open_repository(path, codec='none') as repo:
        put(repo, 'one', stored, project='p', scope=scope)
    with repositories.open_repository(path, codec='none',
                                      threads=0) as repo:
        put(repo, 'first', content(999), project='q', scope=scope)
        before = repo.statistics(), Calls()
        stat = put(repo, 'two', sent, project='q', scope=scope)
        after = repo.statistics(), Calls()
        work = {key: after[0][key] - before[0][key] for key in before[0]
                if key not in ('filter_refresh_age_seconds', 'slice_cached')}
    return work, after[1] - before[1], stat.new_bytes, stat.stored_bytes


class Calls:
    """Bytes and calls that this process has read and written."""

    def __init__(self):
        with open('/proc/self/io') as file:
            text = file.read()
        self.numbers = [int(n) for n in re.findall('[0-9]+', text)[:4]]
        self.own = [len(text), 0, 0, 0]

    def __sub__(self, before):
        return [a - b - own for a, b, own in zip(
            self.numbers, before.numbers, before.own)]


def test_what_others_have_makes_no_difference(tmp_path):
    """An upload's work does not depend on the blocks of another project."""
    stored, new = content(*range(20)), content(*range(100, 120))
    known = measured(tmp_path, 'a', 'project', stored, stored)
    unknown = measured(tmp_path, 'b', 'project', stored, new)
    assert known == unknown
    assert known[0]['hits'] == known[0]['cold_loads'] == 0
    # The comparison does detect a difference in the global scope.
    assert measured(tmp_path, 'c', 'global', stored, stored) != (
        measured(tmp_path, 'd', 'global', stored, new))


# -- weak fingerprints --------------------------------------------------------

def test_equal_fingerprints_of_two_scopes(tmp_path, caplog):
    """Projects with equal fingerprints never use each other's blocks.

    All blocks have one of 256 fingerprints.
    """
    path = maintenance.create(tmp_path, fingerprint='weak-8', verify='bytes')
    data = content(*range(30))
    with repositories.open_repository(path, codec='none',
                                      _allow_weak=True) as repo:
        put(repo, 'one', data, **P)
        before = repo.statistics()
        assert put(repo, 'two', data, **Q).new_bytes == len(data)
        after = repo.statistics()
        # Enough hints existed.
        assert after['candidates'] - before['candidates'] > 100
        held = {g for g in maintenance.groups(path)
                if scope_of_group(path, g) == scopes.of_project('p')}
        assert not held & groups_of(repo, 'two')
        assert put(repo, 'three', data, **Q).new_bytes < len(data)
        with maintenance.maintaining(repo) as maintainer:
            with caplog.at_level(logging.WARNING):
                result = merger.run_once(maintainer, pacing.Pace())
            assert not result.failed
            assert 'different scopes' in caplog.text
            collect(maintainer)
            maintenance.require_collected(maintainer)
        for image_id in repo.images():
            assert read_all(repo, image_id) == data
            wanted = bytes.fromhex(repo.stat(image_id).scope)
            assert {scope_of_group(path, g)
                    for g in groups_of(repo, image_id)} == {wanted}


def test_healing_passes_over_other_scopes(tmp_path):
    """The scrubber heals from a spare copy of the same scope.

    It leaves the equal block of another scope alone.
    """
    path = maintenance.create(tmp_path)
    data = content(99, blocks=1)
    with repositories.open_repository(path, codec='none') as repo:
        for image_id in 'abc':
            put(repo, image_id, data, **P)
        put(repo, 'd', data, **Q)
        with maintenance.maintaining(repo) as maintainer:
            maintenance.account(maintainer)
            assert scrub(maintainer, spare_threshold=3).spares == 1
            damage(path, maintenance.blocks_of(repo, 'a')[0])
            result = scrub(maintainer, spare_threshold=3)
            assert (result.damaged, result.healed) == (1, 1)
        for image_id in 'abc':
            assert read_all(repo, image_id) == data
            assert {scope_of_group(path, g) for g in groups_of(
                repo, image_id)} == {scopes.of_project('p')}


def test_no_store_of_another_scope_is_loaded(tmp_path):
    path = maintenance.create(tmp_path, fingerprint='weak-8', verify='bytes')
    with repositories.open_repository(path, codec='none',
                                      _allow_weak=True) as repo:
        put(repo, 'one', content(*range(30)), **P)
    with repositories.open_repository(path, codec='none',
                                      _allow_weak=True) as repo:
        put(repo, 'two', content(1), **Q)
        statistics = repo.statistics()
        assert statistics['candidates'] > 0
        assert statistics['cold_loads'] == statistics['compares'] == 0
        # The upload does not try the group's lock either.
        with repositories.collector_in(path, *groups_of(repo, 'one')):
            put(repo, 'three', content(2), **Q)
        assert repo.statistics()['lock_refusals'] == 0


# -- the group for new blocks -------------------------------------------------

def make_group(path, number, scope):
    """Make a group as an upload leaves it."""
    group = repositories.Group(path, 1)
    data = group.data[:group.data_start()]
    data[512:] = bytes(len(data) - 512)
    struct.pack_into('<I', data, 12, number)
    data[32:48] = scope
    data[504:512] = struct.pack(
        '<Q', xxhash.xxh3_64_intdigest(bytes(data[:504])))
    repositories.group_path(path, number).write_bytes(data)


def test_a_group_is_found_behind_any_number_of_others(path, repo):
    """An upload searches 256 groups at a time and remembers foreign ones."""
    put(repo, 'first', noise(BLOCK), **P)
    for number in range(2, 500):
        make_group(path, number, scopes.of_project(str(number)))
    # A handle that has not seen the other groups takes a new one,
    with repositories.open_repository(path) as fresh:
        put(fresh, 'other', noise(BLOCK, 2), **P)
        assert groups_of(repo, 'other') == {500}
    # and every handle finds that one. One more search behind it finds the
    # first group.
    put(repo, 'second', noise(BLOCK, 3), **P)
    assert groups_of(repo, 'second') == {500}
    with repositories.holding(path / 'locks' / 'groups', 500):
        put(repo, 'third', noise(BLOCK, 4), **P)
    assert groups_of(repo, 'third') == {1}
    # The search reads only groups that it may use.
    before = Calls()
    put(repo, 'fourth', noise(BLOCK, 5), **P)
    assert (Calls() - before)[2] < 50


def test_writers_of_one_project_at_once(path, repo, other):
    with contextlib.ExitStack() as stack:
        transactions = [stack.enter_context(handle.begin(name, **options))
                        for name, (handle, options) in zip(
            'abcd', itertools.product((repo, other), (P, Q)))]
        for number, transaction in enumerate(transactions):
            transaction.write(content(number))
            transaction.keep()
        for transaction in transactions:
            transaction.commit()
    assert len(set().union(*(groups_of(repo, i) for i in 'abcd'))) == 4
    require_distinct(repo, path)


def test_an_aborted_upload(path, repo):
    """Only an upload of the same project finds an aborted upload's blocks."""
    data = content(1, 2)
    with repo.begin('one', **P) as transaction:
        transaction.write(data)
        transaction.keep()
    assert put(repo, 'two', data, **Q).new_bytes == len(data)
    assert put(repo, 'three', data, **P).new_bytes == 0
    require_distinct(repo, path)


@pytest.mark.parametrize('options', [P, ALL])
def test_a_dead_writers_tail(path, repo, options):
    """The next writer of the same scope verifies it; other writers skip it."""
    data = content(1, 2)
    put(repo, 'one', data, **options)
    repo.close()
    group = repositories.Group(path, 1)
    group.forget_newest_record()
    assert group.record()[2] == 0 and group.used() == 20
    group.save()
    before = group.path.read_bytes()
    with repositories.open_repository(path, codec='none') as repo:
        put(repo, 'two', content(3), **Q)
        assert groups_of(repo, 'two') == {2}
        assert group.path.read_bytes() == before
        put(repo, 'three', content(4), **options)
        assert groups_of(repo, 'three') == {1}
        assert read_all(repo, 'one') == data
        record = repositories.Group(path, 1).record()
        assert record[2] == 30
        assert maintenance.states(path, 1)[:30] == [repositories.LIVE] * 30
        require_distinct(repo, path)


# -- the maintainer -----------------------------------------------------------

def test_merging_finds_nothing(maintainer, path, repo, other):
    data = content(1, 2)
    for image_id, options in zip('abc', (P, Q, ALL)):
        put(other, image_id, data, **options)
    result = merger.run_once(maintainer, pacing.Pace())
    assert result.scanned == 60
    assert result.duplicates == result.images == 0
    require_distinct(repo, path)


def put_at_once(repo, other, first, second, data, **options):
    """Upload two images at once; neither upload finds the other's blocks."""
    with repo.begin(first, **options) as a, other.begin(
            second, **options) as b:
        for transaction in (a, b):
            transaction.write(data)
            transaction.add_zeros(0)        # the zeros cause the lookup
        for transaction in (a, b):
            assert transaction.commit().new_bytes == len(data)


def test_merging_within_each_scope(maintainer, path, repo, other):
    data = content(1, 2)
    for image_id, options in zip('abc', (P, Q, ALL)):
        put_at_once(repo, other, image_id, image_id + '2', data, **options)
    result = merger.run_once(maintainer, pacing.Pace())
    assert (result.duplicates, result.images) == (60, 3)
    collect(maintainer)
    maintenance.require_collected(maintainer)
    for image_id in 'abc':
        assert groups_of(repo, image_id) == groups_of(repo, image_id + '2')
        assert read_all(repo, image_id) == data
    require_distinct(repo, path)


def test_a_merge_to_another_scope_is_refused(maintainer, repo, path):
    data = content(1)
    put(repo, 'one', data, **P)
    put(repo, 'two', data, **Q)
    maintenance.account(maintainer)
    old, new = (maintenance.blocks_of(repo, i)[0] for i in ('one', 'two'))
    mapping = struct.pack('<QQ', old[0] << 15 | old[1], new[0] << 15 | new[1])
    with pytest.raises(exceptions.DamagedError,
                       match='images/one names groups/.*another scope'):
        _engine.Merge(maintainer.engine, 'one', mapping)
    maintenance.account(maintainer)
    require_distinct(repo, path)


@pytest.mark.parametrize('how', [{'live_share': 90}, {'evacuate_share': 10}])
def test_rewriting_and_evacuation(maintainer, path, repo, other, how):
    """Blocks stay in their scopes when they move."""
    images = {}
    for number in range(12):
        for project in 'pq':
            options = {'project': project, 'scope': 'project'}
            data = noise(32 * BLOCK, number)
            put(other, f'big-{project}{number}', data, **options)
            images[f'{project}{number}'] = data[:2 * BLOCK]
            put(other, f'{project}{number}', data[:2 * BLOCK], **options)
    for number in range(12):
        for project in 'pq':
            other.delete(f'big-{project}{number}')
    result = collect(maintainer, **how)
    assert result.rewritten + result.evacuated >= 8
    require_distinct(repo, path)
    collect(maintainer)
    maintenance.require_collected(maintainer)
    maintenance.require_contents(repo, images)
    # Both projects still have their own copies of the two blocks, in their own
    # groups.
    assert len(set(maintenance.blocks_of(repo, 'p3'))
               | set(maintenance.blocks_of(repo, 'q3'))) == 4
    require_distinct(repo, path)


def place_of(path, address):
    group, slot = address
    file = repositories.Group(path, group)
    _, _, segment, place = file.entry(slot)
    return file.path, segment + 32 + (place & 0xfffff)


def damage(path, address):
    file, at = place_of(path, address)
    with open(file, 'r+b') as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 0x40]))


@pytest.mark.parametrize('options', [P, ALL])
def test_spare_copies(maintainer, path, repo, other, options):
    """A spare copy is verified in its block's scope, and heals that block."""
    data = content(1)
    for image_id in 'abc':
        put(other, image_id, data, **options)
    put(other, 'd', data, **Q)          # stored once, so it gets no copy
    maintenance.account(maintainer)
    assert scrub(maintainer, spare_threshold=3).spares == 10
    assert checker.check(path).figures['spares'] == 10
    mine, theirs = (maintenance.blocks_of(repo, i)[4] for i in 'ad')
    damage(path, mine)
    assert read_all(repo, 'a') == data
    assert checker.check(path).damaged_images == []
    # A copy of an equal block of another scope does not count.
    damage(path, theirs)
    with pytest.raises(exceptions.DamagedError):
        read_all(repo, 'd')
    assert checker.check(path).damaged_images == ['d']
    result = scrub(maintainer, spare_threshold=3)
    assert (result.damaged, result.healed, result.images) == (2, 1, ['d'])
    collect(maintainer)
    for image_id in 'abc':
        assert read_all(repo, image_id) == data
        assert {scope_of_group(path, g) for g in groups_of(
            repo, image_id)} == {bytes.fromhex(repo.stat('a').scope)}
    # An upload of the same project heals the block; an upload of another
    # project does not.
    put(other, 'e', data, **options)
    scrub(maintainer)
    with pytest.raises(exceptions.DamagedError):
        read_all(repo, 'd')
    put(other, 'f', data, **Q)
    scrub(maintainer)
    assert read_all(repo, 'd') == data
    require_nothing_damaged(path)


def require_nothing_damaged(path):
    assert [str(f) for f in checker.check(path).findings
            if f.severity == checker.DAMAGE] == []


def test_spares_of_projects_that_are_gone(maintainer, path, repo, other):
    """The check counts no spare copy of a scope whose groups are gone."""
    put(other, 'last', content(7))
    for image_id in 'abc':
        put(other, image_id, content(1), **P)
    put(other, 'end', noise(70 * BLOCK, 3))
    maintenance.account(maintainer)
    scrub(maintainer, spare_threshold=3)
    for image_id in 'abc':
        other.delete(image_id)
    collect(maintainer)
    assert {scope_of_group(path, g)
            for g in maintenance.groups(path)} == {bytes(16)}
    report = checker.check(path)
    assert report.ok and report.figures['spares'] == 0
    assert 'spares/00000001' in {f.file for f in report.findings}


def test_scrub_verifies_by_the_scope(maintainer, path, other):
    put(other, 'one', content(1), **P)
    put(other, 'two', content(1), **Q)
    result = scrub(maintainer)
    assert (result.blocks, result.damaged) == (20, 0)


# -- recipes and spare copies that name another scope are damaged -------------

def set_scope(file, scope):
    """Change the scope in the header of a recipe."""
    data = bytearray(file.read_bytes())
    data[32:48] = scope
    data[4088:4096] = struct.pack(
        '<Q', xxhash.xxh3_64_intdigest(bytes(data[:4088])))
    file.write_bytes(data)


@pytest.mark.parametrize('options', [P, ALL])
@pytest.mark.parametrize('scope', [
    bytes(16), scopes.of_project('p'), scopes.of_project('q'), b'\xff' * 16])
def test_a_recipe_that_names_another_scope(path, repo, options, scope):
    data = content(1)
    put(repo, 'one', data, **options)
    file = path / 'images' / 'one'
    if scope == bytes.fromhex(repo.stat('one').scope):
        assert read_all(repo, 'one') == data
        return
    set_scope(file, scope)
    with repositories.open_repository(path) as repo:
        with pytest.raises(exceptions.DamagedError, match='images/one') as e:
            read_all(repo, 'one')
        if scope == b'\xff' * 16:
            with pytest.raises(exceptions.DamagedError, match='impossible'):
                repo.open_image('one')
        else:
            assert 'groups/00000001' in str(e.value)
            with repo.open_image('one') as image:
                with pytest.raises(exceptions.DamagedError, match='scope'):
                    image.describe(0)
                with pytest.raises(exceptions.DamagedError, match='scope'):
                    image.frames([(0, len(data))])
    report = checker.check(path)
    assert report.damaged_images == ['one']
    assert 'scope' in str(report.findings[0])


def test_spare_copies_are_no_group(maintainer, path, repo, other):
    for image_id in 'abc':
        put(other, image_id, content(1))
    maintenance.account(maintainer)
    scrub(maintainer, spare_threshold=3)
    shutil.copy(path / 'spares' / '00000001', path / 'groups' / '00000001')
    with repositories.open_repository(path) as fresh:
        with pytest.raises(exceptions.DamagedError,
                           match='groups/00000001.*spare'):
            read_all(fresh, 'a')
    assert checker.check(path).damaged_images == ['a', 'b', 'c']


# -- files written by the second implementation of the format -----------------

def written(tmp_path, *, scope=scopes.of_project('p'), owner=None,
            project='p', fingerprint='sha256', compute=None):
    """Write an image whose group and recipe name the given scopes."""
    repository = format_writer.Repository(
        tmp_path / 'written', fingerprint=fingerprint,
        verify='bytes' if fingerprint == 'xxh3-128' else 'fingerprint')
    group = format_writer.Group(
        repository, 1, scope=scope, compute=compute or (
            lambda block: hashlib.sha256(scope + block).digest()))
    group.append([noise(512, n) for n in range(9)])
    group.publish()
    group.save()
    repository.image('one', [(group, 0, 9)], project=project, header={
        'scope': scope if owner is None else owner})
    return repository


def damage_of(path):
    return [str(f) for f in checker.check(path).findings
            if f.severity == checker.DAMAGE]


def test_checked(tmp_path):
    repository = written(tmp_path)
    assert damage_of(repository.path) == []
    with repositories.open_repository(repository.path) as repo:
        assert read_all(repo, 'one') == b''.join(
            noise(512, n) for n in range(9))
        assert put(repo, 'two', noise(512, 4), **P).new_bytes == 0


def test_checked_with_another_digest(tmp_path):
    scope = scopes.of_project('p')
    repository = written(
        tmp_path, fingerprint='xxh3-128',
        compute=lambda block: xxhash.xxh3_128_digest(
            scope + block).ljust(32, b'\0'))
    assert damage_of(repository.path) == []


@pytest.mark.parametrize('arguments, words', [
    ({'compute': format_writer.sha256}, 'fingerprint'),
    ({'owner': bytes(16)}, 'another scope'),
    ({'scope': bytes(16), 'compute': format_writer.sha256,
      'owner': scopes.of_project('p')}, 'another scope'),
    ({'project': 'q', 'owner': scopes.of_project('q')}, 'another scope'),
    ({'owner': b'\xff' * 16}, 'the scope of spare copies'),
    ({'scope': b'\xff' * 16, 'owner': bytes(16)}, 'spare')])
def test_check_finds_what_is_of_another_scope(tmp_path, arguments, words):
    repository = written(tmp_path, **arguments)
    found = damage_of(repository.path)
    assert found and words in ' '.join(found)
    assert checker.check(repository.path).damaged_images == ['one']


def test_check_names_an_image_in_the_scope_of_another_project(tmp_path):
    """The check notes a foreign scope, and does not call the image damaged."""
    for name in ('site', 'cache'):
        (tmp_path / name).mkdir()
    report = checker.check(written(tmp_path / 'site', project='q').path)
    assert report.ok and report.damaged_images == []
    found, = report.findings
    assert (found.severity, found.file, found.images) == (
        checker.NOTE, 'images/one', ('one',))
    assert 'belongs to project q, but shares blocks in the' in found.sentence
    assert 'store it again with image copy, and delete it' in found.sentence
    path = tmp_path / 'site' / 'written'
    for words in ['copy', 'one', 'two', '--project', 'q'], ['delete', 'one']:
        assert entry.main(['--repository', str(path), '--socket', '',
                           '--filter-dir', str(tmp_path / 'filter'), 'image',
                           *words]) == 0
    assert checker.check(path).findings == []
    # A cache does not know the project of an image.
    assert checker.check(written(
        tmp_path / 'cache', project='').path).findings == []


def test_spares_are_checked_by_the_scopes_there_are(tmp_path):
    repository = written(tmp_path)
    spares = format_writer.Spares(
        repository, 1, compute=lambda block: hashlib.sha256(
            scopes.of_project('p') + block).digest())
    spares.append([noise(512, 4), noise(512, 5)])
    spares.publish()
    spares.save()
    report = checker.check(repository.path)
    assert report.ok and report.figures['spares'] == 2
    other = format_writer.Spares(repository, 2)
    other.append([noise(512, 4)])       # as in the global scope
    other.publish()
    other.save()
    assert checker.check(repository.path).figures['spares'] == 3
    # Only a spare copy of the same scope replaces a block.
    damage(repository.path, (1, 4))
    assert checker.check(repository.path).ok is False
    assert checker.check(repository.path).damaged_images == []
    os.unlink(spares.path)
    assert checker.check(repository.path).damaged_images == ['one']


# -- pulling ------------------------------------------------------------------

WHERE = {'global': ALL, 'p': P, 'q': Q}


@pytest.fixture(scope='module')
def sender(tmp_path_factory):
    """Run a daemon whose repository has an image once in each scope."""
    directory = tmp_path_factory.mktemp('sender')
    path = repositories.create(directory / 'there')
    data = noise(40 * 4096) + noise(4096) + noise(100, 5)
    with repositories.open_repository(path) as repo:
        for image_id, options in WHERE.items():
            put(repo, image_id, data, **options)
    with daemons.running(path) as daemon:
        yield daemon, data


CASES = [
    pytest.param(*case, marks=pytest.mark.long)
    if case[2] not in (case[1], None) or case[1] == 'q' else case
    for case in itertools.product(WHERE, WHERE, [*WHERE, None])]


@pytest.mark.parametrize('there, here, known', CASES)
def test_pulling(tmp_path, sender, there, here, known):
    """A pull looks blocks up only if both images have the same scope."""
    daemon, data = sender
    path = repositories.create(tmp_path / 'here')
    with repositories.open_repository(path) as repo:
        if known is not None:
            put(repo, 'known', data, **WHERE[known])
        with daemon.client() as client:
            result = pull.pull(repo, there, client, **WHERE[here])
        assert read_all(repo, there) == data
        same = there == here
        assert (result.whole is None) == same
        # The image has 42 blocks, and one of them occurs twice.
        if same and known == here:
            assert (result.found_blocks, result.asked_blocks) == (42, 0)
        else:
            assert (result.found_blocks, result.asked_blocks) == (1, 41)
        assert result.stat.new_bytes == (
            0 if known == here else len(data) - 4096)
        assert repo.stat(there).scope == result.stat.scope
        require_distinct(repo, path)


def test_what_comes_is_verified_by_the_senders_scope(
        tmp_path, sender, monkeypatch):
    daemon, data = sender
    path = repositories.create(tmp_path / 'here')
    seen = set()
    real = _engine.fingerprint

    class Module:
        @staticmethod
        def fingerprint(name, block, scope):
            seen.add(scope)
            return real(name, block, scope)
    with monkeypatch.context() as patch:
        patch.setattr(image_assembly, '_engine', Module)
        with repositories.open_repository(path) as repo:
            with daemon.client() as client:
                pull.pull(repo, 'p', client, **Q)
    assert seen == {scopes.of_project('p')}
