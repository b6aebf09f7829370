# SPDX-License-Identifier: Apache-2.0

"""Damage of every kind hits every structure, under every task.

A failure prints the case, which ``Cases.need`` takes unchanged.
"""

import fnmatch
import json
import random

import pytest

from tests.damage import damages
from tests.damage import operations
from tests.damage import oracle
from tests.damage import server
from tests.damage import template
from tests.support import repositories

pytestmark = pytest.mark.slow

CODECS = ('none', 'zstd')
SECTOR = damages.SECTOR
PAGE = damages.PAGE
ALL = oracle.END

#: Whole directories, which are damaged like files.
DIRECTORIES = ('groups', 'images', 'spool', 'catalog', 'spares', 'quarantine',
               'index', 'helpers', 'features')

#: Read in place, damage to these costs only the hit images; damage to the
#: others shows its effect only after a task.
READ = ('group', 'recipe', 'parameters', 'key')


class Cases:
    """A template, its files, and the server that runs cases on it."""

    def __init__(self, asked, top):
        self.server = asked
        self.top = top
        self.now = top / 'now'
        self.oracle = oracle.Oracle(self.now)

    def files(self, structure):
        pattern = template.STRUCTURES[structure]
        return sorted(
            name for name in (str(p.relative_to(self.now))
                              for p in self.now.rglob('*') if p.is_file())
            if fnmatch.fnmatch(name, pattern))

    def size(self, name):
        return (self.now / name).stat().st_size

    def hit(self, name, damage, arguments):
        span = (0, ALL)
        if damage == 'flip':
            span = arguments[0], arguments[0] + 1
        elif damage in ('overwrite', 'older_sectors'):
            span = arguments[0], arguments[0] + arguments[1]
        elif damage == 'copy_sector':
            span = arguments[0] * SECTOR, (arguments[0] + 1) * SECTOR
        elif damage == 'record':
            return []
        elif damage == 'truncate':
            span = arguments[0], ALL
        elif damage == 'lengthen' and name.startswith('groups/'):
            return []       # garbage at its end is legal
        elif damage == 'swapped' and name.partition('/')[0] in (
                'images', 'groups', 'spool'):
            # The other one is hit as well.
            return sorted([*template.IMAGES, template.VOLUME])
        return self.oracle.hit(name, *span)

    def given_up(self, name, damage, operation):
        """Return the images that no undoing restores, by design.

        A name that is lost before its image was counted cannot be told from
        that of an upload which was never committed; and rebuilding the catalog
        gives up the lost images. Data cut off the group that is being filled
        is overwritten by the next upload, if its published record is lost too.
        """
        if name == max(self.files('group')) and damage == 'truncate':
            return self.oracle.hit(name)
        if not name.startswith('images') or damage not in (
                'missing', 'older_copy', 'older_content'):
            return []
        found = set(template.UNCOUNTED)
        if operation == 'rebuild':
            found.update(template.IMAGES)
        return sorted(found.intersection(self.oracle.hit(name)))

    def need(self, name, damage, arguments, operation):
        """Run a case of its own."""
        case = {'name': name, 'damage': damage, 'arguments': arguments,
                'operation': operation}
        answer = self.server.ask({
            **case, 'top': str(self.top),
            'hit': self.hit(name, damage, arguments),
            'given_up': self.given_up(name, damage, operation)})
        assert 'error' not in answer, f'{json.dumps(case)}\n{answer["error"]}'

    def require_read(self, cases):
        """Read after each of many damages; return how many had an effect."""
        hits = 0
        for at in range(0, len(cases), 2000):
            answer = self.server.ask({'top': str(self.top), 'read': [
                (*case, self.hit(*case)) for case in cases[at:at + 2000]]})
            assert 'error' not in answer, answer['error']
            hits += answer['result']
        return hits


@pytest.fixture(scope='module')
def asked(tmp_path_factory):
    with server.Server(tmp_path_factory.mktemp('scratch')) as asked:
        yield asked


@pytest.fixture(scope='module', params=CODECS)
def cases(request, asked, tmp_path_factory):
    top = tmp_path_factory.mktemp('template')
    answer = asked.ask({'build': str(top), 'codec': request.param})
    assert 'error' not in answer, answer['error']
    cases = Cases(asked, top)
    # There is one of each.
    assert all(map(cases.files, template.STRUCTURES))
    return cases


# -- the forms of damage ------------------------------------------------------

def flips(rng, size, most):
    """Yield every byte of a small file, or most of a large one's first."""
    places = range(size) if size <= most else sorted(
        rng.sample(range(size), most))
    return [('flip', [at, rng.choice([1, 2, 4, 8, 16, 32, 64, 128, 255])])
            for at in places]


def truncations(rng, size, most):
    places = set(range(size)) if size <= most else {
        at for at in (0, 1, 8, 511, 512, 1024, 1535, 4095, 4096, 4097, 8192,
                      size - 1) if at < size} | set(
                          rng.sample(range(size), most // 2))
    return [('truncate', [at]) for at in sorted(places)]


def overwritten(rng, size, most):
    found = [('overwrite', [at, length, filling])
             for length in (SECTOR, PAGE) for filling in (0, 255, None)
             for at in range(0, size, length)]
    found += [('older_sectors', [at, length]) for length in (SECTOR, PAGE)
              for at in range(0, size, length)]
    found += [('overwrite', [0, size, filling]) for filling in (0, 255, None)]
    found += [('lengthen', [more, byte]) for more in (1, 512, 4096)
              for byte in (0, 255)]
    sectors = size // SECTOR
    if sectors > 1:
        found += [('copy_sector', rng.sample(range(sectors), 2))
                  for _ in range(min(most, 60))]
    return found if len(found) <= most else rng.sample(found, most)


def wholes(rng, size, most):
    return [(name, [0] if name == 'swapped' else [])
            for name in damages.WHOLE]


FORMS = (flips, truncations, overwritten, wholes)


def needs_file(damage):
    return damage not in ('missing', 'older_copy', 'same_copy', 'swapped',
                          'of_another_repository')


def is_end(name, damage, arguments):
    """Return whether the volume seems to be one that was being deleted.

    Its directory has no journal then, and the next collection removes it (V9).
    """
    return fnmatch.fnmatch(name, template.STRUCTURES['journal']) and (
        damage in ('missing', 'older_copy'))


# -- reading ------------------------------------------------------------------

def reading(cases, rng, most):
    found = []
    for structure in READ:
        for name in cases.files(structure):
            size = cases.size(name)
            for form in FORMS:
                found += [(name, *case) for case in form(rng, size, most)]
    return found


def test_reading(cases):
    found = reading(cases, random.Random(1), 25)
    assert cases.require_read(found) > len(found) // 3


def lists_of(cases):
    """Return (group's file, start of the segment, bytes of its list)."""
    found = set()
    for name in cases.files('group'):
        group = repositories.Group(cases.now, int(name[-8:], 16))
        for slot in range(group.slots):
            _, _, segment, place = group.entry(slot)
            if place >> 61 == repositories.LIVE and group.list_size(segment):
                found.add((name, segment, group.list_size(segment)))
    return sorted(found)


def test_each_byte_of_lists(cases):
    """Each damaged byte of a segment's header or list is noticed.

    A reader need not verify the checksum over all of the segment.
    """
    found = lists_of(cases)
    assert found
    rng = random.Random(3)
    unread = [(name, 'flip', [at, rng.choice([1, 2, 16, 128, 255])])
              for name, segment, size in found
              for at in (*range(segment, segment + 24),
                         *range(segment + 32, segment + 32 + size))]
    assert cases.require_read(unread) == len(unread)
    cases.require_read([(name, 'flip', [at, 1]) for name, segment, _ in found
                        for at in range(segment + 24, segment + 32)])


@pytest.mark.long
@pytest.mark.parametrize('seed', range(3))
def test_reading_everywhere(cases, seed):
    """Reads are right or fail with each byte of small files damaged.

    Of large files 20,000 bytes are damaged. The test runs three times.
    """
    found = reading(cases, random.Random(seed), 20000)
    random.Random(seed).shuffle(found)
    assert cases.require_read(found[:40000]) > 10000


# -- tasks --------------------------------------------------------------------

def working(cases, rng, most, chosen=operations.CHANGING):
    """Return a few cases for each structure and form, with an operation."""
    found = []
    for structure in template.STRUCTURES:
        names = cases.files(structure)
        for form in FORMS:
            some = []
            for name in names:
                some += [(name, *case) for case in form(
                    rng, cases.size(name), most * 4)]
            some = [case for case in some if not is_end(*case)]
            for case in rng.sample(some, min(most, len(some))):
                found.append((*case, rng.choice(chosen)))
    for name in DIRECTORIES:
        for damage in damages.WHOLE:
            if not needs_file(damage) and damage != 'swapped':
                found.append((name, damage, [],
                              rng.choice(chosen)))
    return found


def test_working(cases):
    """Damage costs only the damaged images, under any operation."""
    rng = random.Random(2)
    found = working(cases, rng, 2)
    for case in rng.sample(found, 12):
        cases.need(*case)


@pytest.mark.long
@pytest.mark.parametrize('seed', range(2))
def test_working_everywhere(cases, seed):
    for case in working(cases, random.Random(seed), 30):
        cases.need(*case)


def test_readers(cases):
    """Each reading operation runs once by itself."""
    rng = random.Random(6)
    for name in (*operations.READING, 'filter'):
        cases.need(*rng.choice(working(cases, rng, 1, [name])))


@pytest.mark.long
@pytest.mark.parametrize('name', (*operations.READING, 'filter'))
def test_readers_everywhere(cases, name):
    rng = random.Random(7)
    found = working(cases, rng, 5, [name])
    for case in rng.sample(found, min(200, len(found))):
        cases.need(*case)


def test_healing_copies(cases):
    """A copy is healed by an ordinary block, and keeps its mark (I14)."""
    number, slot = sorted(cases.oracle.blocks_of('copies'))[3]
    group = repositories.Group(cases.now, number)
    name = f'groups/{number:08x}'
    for at in (group.entry_offset(slot) + 34, group.entry(slot)[2] + 100):
        cases.need(name, 'flip', [at], 'scrub')


# -- the catalog's contents ---------------------------------------------------

def records(rng, number):
    """Return cases with each form of wrong record, this many times."""
    return [('catalog', 'record', [rng.randrange(1000), form],
             rng.choice(operations.CHANGING))
            for _ in range(number) for form in damages.RECORDS]


def test_records_of_the_catalog(cases):
    rng = random.Random(3)
    for case in rng.sample(records(rng, 3), 8):
        cases.need(*case)


@pytest.mark.long
def test_all_records_of_the_catalog(cases):
    for case in records(random.Random(4), 60):
        cases.need(*case)
