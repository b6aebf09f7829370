# SPDX-License-Identifier: Apache-2.0

"""Wrong contents under valid checksums, and paths that are no files.

Reading gives the right bytes or an error, never anything else.
"""

import faulthandler
import os
import random
import re
import shutil
import struct
import sys

import pytest
import xxhash

from glance_dedup.base import exceptions
from tests.support import repositories
from tests.support.repositories import create
from tests.support.repositories import Group
from tests.support.repositories import mixture
from tests.support.repositories import noise
from tests.support.repositories import open_repository
from tests.support.repositories import put
from tests.support.repositories import read_all

pytestmark = pytest.mark.slow

BLOCK = 512
PAGE = 4096

# Errors that may come instead of the bytes.
ERRORS = (exceptions.DamagedError, exceptions.VersionError)

CONTENTS = {
    'plain': noise(40 * BLOCK, 1),
    'text': b''.join(b'line %d of it\n' % i for i in range(1500)),
    'mixed': mixture(60 * BLOCK, 2, unit=BLOCK) + noise(10 * BLOCK, 1),
    # The recipe of this image has two pages of extents.
    'holes': b''.join(noise(BLOCK, i) + bytes(BLOCK) for i in range(55)),
}


@pytest.fixture(scope='module', params=['none', 'lz4', 'zstd'])
def template(request, tmp_path_factory):
    """A small repository that tests must not change."""
    path = create(tmp_path_factory.mktemp('damage') / 'template',
                  block_size=BLOCK, group_slots=64, segment_size=2048)
    with open_repository(path, codec=request.param, threads=0) as repo:
        for image_id, data in CONTENTS.items():
            put(repo, image_id, data)
    assert len(os.listdir(path / 'groups')) >= 3
    return path


@pytest.fixture
def path(template, tmp_path):
    shutil.copytree(template, tmp_path / 'repository')
    return tmp_path / 'repository'


def files(path):
    return [f'{directory}/{name}' for directory in ('groups', 'images')
            for name in sorted(os.listdir(path / directory))]


def in_batches(function):
    """Run in a child, since the function could crash or hang it."""
    def child():
        faulthandler.enable(file=sys.__stderr__)
        faulthandler.dump_traceback_later(100, exit=True,
                                          file=sys.__stderr__)
        return function()
    return repositories.in_child(child, timeout=110)


def judge(path, damaged=None, contents=CONTENTS, stores=False):
    """Read everything; return the ids of the unreadable images.

    The first word about what is wrong must be the damaged file's name.
    """
    lost = []
    with open_repository(path, threads=0) as repo:
        if stores:
            with_new = noise(20 * BLOCK, 99)
            put(repo, 'new', with_new + contents['plain'][:5 * BLOCK])
            assert read_all(repo, 'new')[:20 * BLOCK] == with_new
            repo.delete('new')
        for image_id, data in contents.items():
            try:
                with repo.open_image(image_id) as image:
                    found = image.read()
                    assert image.size == len(data)
                assert found == data, f'{image_id} was read wrongly'
            except ERRORS as e:
                lost.append(image_id)
                if damaged is not None:
                    assert damaged in str(e), e
                else:
                    assert re.search('(groups|images)/[-a-z0-9]+', str(e)), e
    return lost


class Spoilt:
    """A file to be damaged repeatedly, and restored each time."""

    def __init__(self, path, name):
        self.file = path / name
        self.good = self.file.read_bytes()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.write(self.good)

    def write(self, data):
        with open(self.file, 'r+b') as f:
            f.write(data)
            f.truncate(len(data))


# -- something else in a place ------------------------------------------------

@pytest.mark.parametrize('kind', ['missing', 'directory', 'fifo', 'socket',
                                  'link', 'empty'])
def test_something_else_in_a_files_place(path, kind):
    def work():
        import socket
        for name in files(path):
            aside = path / 'aside'
            (path / name).rename(aside)
            if kind == 'directory':
                (path / name).mkdir()
            elif kind == 'fifo':
                os.mkfifo(path / name)
            elif kind == 'socket':
                with socket.socket(socket.AF_UNIX) as listener:
                    os.chdir(path / os.path.dirname(name))
                    listener.bind(os.path.basename(name))
            elif kind == 'link':
                (path / name).symlink_to(aside)
            elif kind == 'empty':
                (path / name).touch()
            lost = []
            with open_repository(path, threads=0) as repo:
                for image_id, data in CONTENTS.items():
                    try:
                        assert read_all(repo, image_id) == data
                    except exceptions.RepositoryError as e:
                        lost.append(image_id)
                        assert name in str(e) or (
                            kind == 'missing' and image_id in str(e)), e
                # Storing continues despite the damage.
                put(repo, 'new', noise(3000, 5))
                assert read_all(repo, 'new') == noise(3000, 5)
                repo.delete('new')
            assert lost
            if kind == 'directory':
                (path / name).rmdir()
            elif kind != 'missing':
                (path / name).unlink()
            aside.rename(path / name)
        return judge(path)
    assert in_batches(work) == []


@pytest.mark.parametrize('name', ['repository.json', 'key', 'locks/groups',
                                  'locks/images', 'groups', 'images', 'spool',
                                  'features'])
def test_fifo_in_the_place_of_one_of_the_repositorys_own(path, name):
    def work():
        (path / name).rename(path.parent / 'aside')
        os.mkfifo(path / name)
        try:
            with open_repository(path) as repo:
                put(repo, 'new', noise(3000, 5))
                repo.images()
                read_all(repo, 'plain')
                repo.delete('plain')
            # A FIFO carries locks as well as a file does.
            assert name.startswith('locks/')
        except exceptions.RepositoryError:
            with pytest.raises(exceptions.RepositoryError):
                with open_repository(path) as repo:
                    repo.delete('no-such-image')
        (path / name).unlink()
        (path.parent / 'aside').rename(path / name)
        return True
    assert in_batches(work)


# -- older copies -------------------------------------------------------------

def fill_last_group(repo):
    """Fill the group, so that the next image has a group of its own."""
    names = sorted(os.listdir(os.path.join(repo.path, 'groups')))
    room = 64 - Group(repo.path, int(names[-1], 16)).used()
    put(repo, 'filling', noise(room * BLOCK, 'filling'))


def test_group_replaced_by_its_older_copy(path):
    """Images stored after the older copy are lost; the others are whole."""
    with open_repository(path, threads=0) as repo:
        fill_last_group(repo)
        put(repo, 'before', noise(5 * BLOCK, '11'))
        group, = {e.group for e in repo.open_image('before').extents()}
    file = repositories.group_path(path, group)
    older = file.read_bytes()
    with open_repository(path, threads=0) as repo:
        put(repo, 'after', noise(5 * BLOCK, '12'))
        assert {e.group for e in repo.open_image('after').extents()
                } == {group}
    file.write_bytes(older)
    contents = {'before': noise(5 * BLOCK, '11'),
                'after': noise(5 * BLOCK, '12')}
    assert in_batches(
        lambda: judge(path, 'groups/', contents)) == ['after']
    # Another image uses the slots now: reading is still an error.
    with open_repository(path, threads=0) as repo:
        put(repo, 'usurper', noise(5 * BLOCK, '13'))
        extents = list(repo.open_image('usurper').extents())
        assert (extents[0].group, extents[0].slot) == (
            group, Group(path, group).used() - 5)
    contents['usurper'] = noise(5 * BLOCK, '13')
    assert in_batches(
        lambda: judge(path, 'groups/', contents)) == ['after']


def test_group_whose_older_copy_has_a_freed_blocks_successor(path):
    """An entry of another block, live at the same address, is an error."""
    with open_repository(path, threads=0) as repo:
        put(repo, 'image', noise(BLOCK, '21'))
        extent, = repo.open_image('image').extents()
    group = Group(path, extent.group)
    fingerprint, checksum, segment, place = group.entry(extent.slot)
    # A valid entry: that of the block stored in slot 0.
    group.write_entry(extent.slot, *group.entry(0))
    group.save()
    assert in_batches(lambda: judge(
        path, 'groups/', {'image': noise(BLOCK, '21')})) == ['image']


def test_recipe_replaced_by_its_older_copy(path):
    """An older recipe is intact, and only its upload's id shows the change."""
    with open_repository(path, threads=0) as repo:
        fill_last_group(repo)
        first = put(repo, 'image', noise(5 * BLOCK, '31'))
        older = (path / 'images' / 'image').read_bytes()
        repo.delete('image')
        second = put(repo, 'image', noise(5 * BLOCK, '32'))
        (path / 'images' / 'image').write_bytes(older)
        with pytest.raises(exceptions.ImageNotFound):
            repo.open_image('image', upload_id=second.upload_id)
        with pytest.raises(exceptions.ImageNotFound):
            repo.delete('image', upload_id=second.upload_id)
        with repo.open_image('image', upload_id=first.upload_id) as image:
            assert image.read() == noise(5 * BLOCK, '31')
    # Once its blocks are freed, reading detects that, too.
    with open_repository(path) as repo:
        extent, = repo.open_image('image').extents()
    group = Group(path, extent.group)
    for slot in range(extent.slot, extent.slot + extent.blocks):
        group.write_entry(slot, state=repositories.FREED)
    group.save()
    assert in_batches(lambda: judge(
        path, 'groups/', {'image': noise(5 * BLOCK, '31')})) == ['image']


def test_pages_of_a_recipe_exchanged(path):
    name = 'images/holes'
    with Spoilt(path, name) as spoilt:
        good = spoilt.good
        assert len(good) == 3 * PAGE
        header, one, two = good[:PAGE], good[PAGE:2 * PAGE], good[2 * PAGE:]
        for pages in ((header, two, one), (header, one, one),
                      (one, header, two), (header, two, two)):
            spoilt.write(b''.join(pages))
            assert judge(path, name) == ['holes']
        # A page of another upload of the same image is an error, too.
        with open_repository(path, threads=0) as repo:
            repo.delete('holes')
            put(repo, 'holes', CONTENTS['holes'])
        other = (path / name).read_bytes()
        (path / name).write_bytes(other[:PAGE] + one + other[2 * PAGE:])
        assert judge(path, name) == ['holes']


# -- valid checksums around nonsense ------------------------------------------

def test_hostile_entries(path):
    """Random fields under a right checksum give an error, or the block."""
    def work():
        rng = random.Random(6)
        numbers = [int(name, 16) for name in os.listdir(path / 'groups')]
        for _ in range(800):
            group = Group(path, rng.choice(numbers))
            good = bytes(group.data)
            slot = rng.randrange(group.used())
            fingerprint, checksum, segment, place = group.entry(slot)
            kind = rng.randrange(5)
            if kind == 0:
                segment = rng.choice([0, 1, 4095, 0xffffffff, len(good),
                                      len(good) - 1, rng.randrange(1 << 32)])
            elif kind == 1:
                place ^= 1 << rng.randrange(64)
            elif kind == 2:
                place = rng.randrange(1 << 64)
            elif kind == 3:
                place = place & ~(0x1fffff << 37) | rng.randrange(
                    1 << 21) << 37
            else:
                # Another block's place, with this one's fingerprint.
                _, checksum, segment, place = group.entry(
                    rng.randrange(group.used()))
            group.write_entry(slot, fingerprint, checksum, segment, place)
            group.save()
            with open_repository(path, threads=0) as repo:
                for image_id, data in CONTENTS.items():
                    try:
                        found = read_all(repo, image_id)
                    except ERRORS as e:
                        assert group.path.name in str(e)
                        continue
                    # With another block's checksum the bytes may be that
                    # block's.
                    assert found == data or kind == 4
                    assert len(found) == len(data)
            group.data = bytearray(good)
            group.save()
        return judge(path)
    assert in_batches(work) == []


def test_hostile_segments(path):
    def work():
        rng = random.Random(7)
        numbers = [int(name, 16) for name in os.listdir(path / 'groups')]
        for _ in range(800):
            group = Group(path, rng.choice(numbers))
            good = bytes(group.data)
            _, _, at, _ = group.entry(rng.randrange(group.used()))
            stored, = struct.unpack_from('<I', good, at + 16)
            for _ in range(rng.randrange(1, 4)):
                offset, size = rng.choice(
                    [(4, 1), (6, 2), (8, 4), (12, 4), (16, 4), (20, 4),
                     (32 + rng.randrange(stored), 1)])
                group.data[at + offset:at + offset + size] = rng.choice(
                    [bytes(size), b'\xff' * size, rng.randbytes(size),
                     b'\1' + bytes(size - 1)])
            stored, = struct.unpack_from('<I', group.data, at + 16)
            checked = group.data[at:at + 24] + group.data[
                at + 32:at + 32 + stored]
            struct.pack_into('<Q', group.data, at + 24,
                             xxhash.xxh3_64_intdigest(
                                 bytes(checked), seed=group.seed))
            group.save()
            judge(path, group.path.name)
            group.data = bytearray(good)
            group.save()
        return judge(path)
    assert in_batches(work) == []


def test_hostile_published_records(path):
    def work():
        rng = random.Random(8)
        for _ in range(50):
            shutil.copytree(path, path.parent / 'spoilt')
            for name in os.listdir(path.parent / 'spoilt' / 'groups'):
                group = Group(path.parent / 'spoilt', int(name, 16))
                record = group.record()
                record[0] += 1
                record[1] = rng.choice([0, record[1], (1 << 64) - 1])
                record[2] = rng.choice([0, 1, 64, 65, 0xffffffff, record[2]])
                record[3] = rng.choice([0, 1, 0xffffffff])
                record[4] = rng.choice([0, 1, (1 << 64) - 1, record[4]])
                if rng.randrange(3) == 0:
                    record[0] = rng.choice([(1 << 64) - 1, (1 << 64) - 2])
                group.write_record(record)
                group.save()
            # Stored images do not depend on the records.
            assert judge(path.parent / 'spoilt', stores=True) == []
            shutil.rmtree(path.parent / 'spoilt')
        return True
    assert in_batches(work)


def write_recipe(spoilt, header_changes, page_changes):
    """Change fields of the recipe and give it right checksums."""
    data = bytearray(spoilt.good)
    seed, = struct.unpack_from('<Q', data, 48)
    for offset, kind, value in header_changes:
        struct.pack_into(kind, data, offset, value)
    for offset, kind, value in page_changes:
        struct.pack_into(kind, data, offset, value)
    struct.pack_into('<Q', data, 4088, xxhash.xxh3_64_intdigest(
        bytes(data[:4088])))
    for page in range(1, len(data) // PAGE):
        at = page * PAGE
        struct.pack_into('<Q', data, at + 4088, xxhash.xxh3_64_intdigest(
            bytes(data[at:at + 4088]), seed=seed))
    spoilt.write(data)


def test_hostile_recipes(path):
    """Random fields of a recipe with right checksums give errors or data."""
    numbers = [0, 1, 63, 64, 65, 1024, 1025, 0xffff, 0x7fffffff, 0xffffffff]
    large = numbers + [1 << 40, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63,
                       (1 << 64) - 1]

    def read_somehow(repo, image_id):
        # Read only parts: the recipe may claim to have any size.
        with repo.open_image(image_id) as image:
            for offset in (0, 1, 5000, image.size // 2,
                           max(0, image.size - 100), 1 << 50):
                found = image.read(3000, offset)
                yield offset, found
            for number, _ in enumerate(image.extents()):
                assert number < 1000

    def work():
        rng = random.Random(9)
        for _ in range(2000):
            name = rng.choice(sorted(CONTENTS))
            with Spoilt(path, f'images/{name}') as spoilt:
                header, pages = [], []
                count, = struct.unpack_from('<Q', spoilt.good, 112)
                if rng.randrange(3) == 0:
                    header.append(rng.choice([
                        (80, '<Q', rng.choice(large)),
                        (88, '<Q', rng.choice(large)),
                        (112, '<Q', rng.choice(large)),
                        (136, '<H', rng.randrange(1 << 16)),
                        (138, '<H', rng.randrange(1 << 16)),
                        (12, '<I', 1), (10, '<H', 7)]))
                else:
                    number = rng.randrange(count)
                    at = PAGE * (1 + number // 102) + 8 + 40 * (number % 102)
                    pages.append(rng.choice([
                        (at, '<Q', rng.choice(large)),
                        (at + 8, '<Q', rng.choice(large)),
                        (at + 16, '<I', rng.choice(numbers)),
                        (at + 20, '<I', rng.choice(numbers)),
                        (at + 24, '<I', rng.choice(numbers)),
                        (at + 28, '<I', rng.choice(numbers)),
                        (at + 32, '<Q', rng.randrange(1 << 64)),
                        (PAGE + 4, '<I', rng.choice(numbers)),
                        (PAGE, '<I', rng.choice(numbers))]))
                write_recipe(spoilt, header, pages)
                with open_repository(path, threads=0) as repo:
                    try:
                        for offset, found in read_somehow(repo, name):
                            if not header and not pages[0][1:] == ('<I', 0):
                                expected = CONTENTS[name][
                                    offset:offset + 3000]
                                assert found == expected[:len(found)]
                    except ERRORS:
                        pass
        return judge(path)
    assert in_batches(work) == []
