# SPDX-License-Identifier: Apache-2.0

"""Makes the golden repositories: one for each feature and way of chunking.

::

    python -m tests.golden.make

This makes the missing ones of :data:`REPOSITORIES`. The last program before a
release makes them once, and none makes them again: they prove that a later
program reads what an earlier one wrote. If a test with them fails, the program
is at fault, not the files. A new feature gets repositories of its own beside
them.

Each is a packed repository, and a JSON file with the expected results:
``images`` (size, SHA-256, project and scope of each; null for a damaged one),
``volumes`` (the same, for each that is ready), ``disks`` (SHA-256 of the disk
of each image that has a proven one), ``features`` and ``check`` (the findings
of a check before any change).
"""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import typing

import xxhash

from dedupd.tasks import collector
from dedupd.tasks import merger
from dedupd.tasks import recompressor
from dedupd.tasks import scrubber
from glance_dedup.base import pacing
from glance_dedup.check import checker
from glance_dedup.repository import features
from glance_dedup.repository import openvolumes
from tests.support import coldgroups
from tests.support import field_tables
from tests.support import keptdisks
from tests.support import maintenance
from tests.support.maintenance import maintaining
from tests.support import repositories
from tests.support.repositories import noise
from tests.support.repositories import put

HERE = pathlib.Path(__file__).resolve().parent
VALUE = {'fingerprint': 'xxh3-128', 'verify': 'bytes'}
GEAR = {'chunking': 'content-defined 64 256'}
BLOCK = 512
MAX_SIZE = 300 << 10     # bytes of a packed one
PART = 64 << 10         # the smallest of a volume
DELETING = 3            # a volume's state


def text(lines, seed):
    return b''.join(b'line %d of text %d\n' % (i, seed) for i in range(lines))


class Maker:
    """A repository, and the results expected from it."""

    def __init__(self, path, **parameters):
        self.path = repositories.create(
            path, **{'block_size': BLOCK, 'group_slots': 64,
                     'segment_size': 4 * BLOCK, **parameters})
        self.images = {}
        self.disks = {}
        self.volumes = {}

    def open(self, codec):
        return repositories.open_repository(self.path, codec=codec, threads=0)

    def put(self, repo, image_id, data, project='', scope='global'):
        put(repo, image_id, data, project=project, scope=scope)
        self.expect(image_id, data, project, scope)

    def expect(self, image_id, data, project='', scope='global'):
        self.images[image_id] = {
            'size': len(data), 'sha256': hashlib.sha256(data).hexdigest(),
            'project': project, 'scope': scope}

    def delete(self, repo, image_id):
        repo.delete(image_id)
        del self.images[image_id]

    def put_at_once(self, repo, data, *image_ids):
        """Upload in parallel, so that the uploads find no common blocks."""
        with contextlib.ExitStack() as stack:
            transactions = [stack.enter_context(repo.begin(image_id))
                            for image_id in image_ids]
            for transaction in transactions:
                transaction.write(data)
                transaction.find(b'', b'')      # stores the written data
            for transaction in transactions:
                transaction.commit()
        for image_id in image_ids:
            self.expect(image_id, data)

    def make_volume(self, repo, name, image_id=None, **options):
        image = None if image_id is None else repo.open_image(image_id)
        with image or contextlib.nullcontext():
            openvolumes.create(repo, name, image=image, part_size=PART,
                               **options)

    def expect_volume(self, volume):
        data, found = volume.read(volume.size, 0), volume.info()
        self.volumes[volume.name] = {
            'size': len(data), 'sha256': hashlib.sha256(data).hexdigest(),
            'project': found.project, 'scope': found.scope}

    def damage(self, repo, image_id, number):
        """Flip a bit of a block, as a bad disk does."""
        group, slot = maintenance.blocks_of(repo, image_id)[number]
        file = repositories.Group(self.path, group)
        _, _, segment, place = file.entry(slot)
        at = segment + 32 + file.list_size(segment) + (place & 0xfffff)
        file.data[at] ^= 1
        file.save()


def make_contents(maker):
    """Make contents of every codec, zeros, odd lengths and projects."""
    with maker.open('none') as repo:
        maker.put(repo, 'empty', b'')
        maker.put(repo, 'three-bytes', b'abc')
        maker.put(repo, 'zeros', bytes(20 * BLOCK + 7))
        maker.put(repo, 'plain', noise(40 * BLOCK, 1))
        # The recipe of this image has two pages of extents.
        maker.put(repo, 'holes', b''.join(
            noise(BLOCK, 100 + i) + bytes(BLOCK) for i in range(55)))
        for project in ('one', 'two'):
            maker.put(repo, f'of-project-{project}', noise(6 * BLOCK, 2),
                      project=project, scope='project')
    with maker.open('lz4') as repo:
        maker.put(repo, 'lz4', text(900, 1), project='one')
        maker.put(repo, 'shared', noise(40 * BLOCK, 1)[:25 * BLOCK]
                  + text(300, 1) + b'end')
    with maker.open('zstd') as repo:
        maker.put(repo, 'zstd', text(900, 2), project='Projekt zwei: ä')


def put_mixed(maker):
    """Store segments that compress, and others that do not, by turns.

    Where similar blocks are placed together, these have lists.
    """
    with maker.open('lz4') as repo:
        for number in range(2):
            maker.put(repo, f'mixed-{number}', b''.join(
                text(200, 20 * number + i)[:4 * BLOCK]
                + noise(4 * BLOCK, 500 + 20 * number + i) for i in range(18)))


def put_copies(maker):
    """Store equal blocks that stay apart, and ordinary ones beside them."""
    data = noise(10 * BLOCK, 600) + text(300, 60)
    with maker.open('lz4') as repo:
        for image_id in 'copies', 'more-copies':
            put(repo, image_id, data * 2, dedup=False)
            maker.expect(image_id, data * 2)
        maker.put(repo, 'beside-copies', data * 2)


def recompress(maker):
    with maker.open('none') as repo, maintaining(repo) as maintainer:
        recompressor.run_once(maintainer, pacing.Pace(), 'zstd', 9,
                              similar=True)


def maintain(maker):
    """Leave freed, rewritten and damaged blocks, spares, merged recipes."""
    pace = pacing.Pace()
    with maker.open('none') as repo:
        for number in range(6):
            maker.put(repo, f'goes-{number}', noise(20 * BLOCK, 200 + number)
                      + noise(5 * BLOCK, 1))
        maker.put_at_once(repo, noise(12 * BLOCK, 300), 'twin-1', 'twin-2')
        maker.put(repo, 'damaged', noise(10 * BLOCK, 310))
        with maintaining(repo) as maintainer:
            merger.run_once(maintainer, pace)
            recompressor.run_once(
                maintainer, pace, 'zstd', 19,
                similar=features.LISTED_SEGMENTS in repo.features)
            for number in (0, 1, 2, 4, 5):
                maker.delete(repo, f'goes-{number}')
            maker.damage(repo, 'damaged', 4)
            scrubber.run_once(maintainer, pace, spare_threshold=3)
            collector.run_once(maintainer, pace)
            maintainer.catalog.sample(1_700_000_000, {'images': 1})
    maker.images['damaged'] = None


def leave_in_flight(maker):
    """Leave files in the spool, some as after a crash."""
    pace = pacing.Pace()
    spool = maker.path / 'spool'
    with maker.open('none') as repo:
        # These are counted, and merged by a process that died before the
        # accounting.
        maker.put_at_once(repo, noise(12 * BLOCK, 320), 'late-1', 'late-2')
        with maintaining(repo) as maintainer:
            maintenance.account(maintainer)
            merge_image = merger.merge_image

            def merge_and_die(*arguments):
                merge_image(*arguments)
                raise maintenance.Killed
            merger.merge_image = merge_and_die
            try:
                merger.run_once(maintainer, pace)
            except maintenance.Killed:
                pass
            finally:
                merger.merge_image = merge_image
        merged, = repositories.spool(maker.path, 'M')
        os.link(spool / merged, spool / f'X-{"1" * 32}')
        # Not counted; deleted, counted or not; uploads that died.
        maker.put(repo, 'not-counted', noise(9 * BLOCK, 330))
        maker.delete(repo, 'goes-3')
        maker.put(repo, 'goes-too', noise(9 * BLOCK, 331))
        maker.delete(repo, 'goes-too')
        (spool / f'T-{"2" * 32}').write_bytes(bytes(4096))
        (spool / f'T-{"3" * 32}').touch()
        (spool / f'G-{"4" * 32}').write_bytes(b'GDGROUP')
        # An unfinished delete.
        os.link(maker.path / 'images' / 'plain', spool / f'D-{"5" * 32}')
        for name in spool.iterdir():
            name.chmod(0o600)
        # A machine's crash lost the record that was not synced; behind these
        # entries a writer gave up a slot.
        before = {number: repositories.Group(maker.path, number).data
                  for number in maintenance.groups(maker.path)}
        maker.put(repo, 'not-published', noise(3 * BLOCK, 340))
        group, slot = maintenance.blocks_of(repo, 'not-published')[-1]
    file = repositories.Group(maker.path, group)
    file.write_entry(slot + 1, state=repositories.VOID)
    file.data[512:1536] = before[group][512:1536]
    file.save()
    for kind in 'TDMOXG':
        assert repositories.spool(maker.path, kind), kind
    # A sync failed there.
    poisoned = repositories.Group(maker.path, 1)
    record = poisoned.record()
    record[0] += 1
    record[3] |= repositories.POISONED
    poisoned.write_record(record)
    poisoned.save()


def make_volumes(maker):
    """Make new, cloned and written volumes, with checkpoints and snapshots."""
    with maker.open('zstd') as repo:
        for name, image_id, options in (
                ('new', None, {'size': 5 * PART + BLOCK}),
                ('clone', 'holes', {}),
                ('written', 'plain', {'size': 4 * PART, 'project': 'one'}),
                ('grown', None, {'size': PART, 'project': 'Projekt: ä',
                                 'scope': 'project'}),
                ('shrunk', 'shared', {'size': 3 * PART})):
            maker.make_volume(repo, name, image_id, **options)
            with openvolumes.open_volume(repo, name) as volume:
                if name in ('written', 'grown', 'shrunk'):
                    write_and_resize(volume)
                if name == 'written':
                    volume.snapshot('snapshot', project='one')
                    maker.expect('snapshot', volume.read(volume.size, 0),
                                 'one')
                maker.expect_volume(volume)


def write_and_resize(volume):
    volume.write(text(1500, 3), 3 * BLOCK + 5)
    volume.zero(10 * BLOCK, 8 * BLOCK)
    volume.checkpoint()
    if volume.name == 'grown':
        volume.resize(3 * PART)
    if volume.name == 'shrunk':
        volume.resize(PART + 7 * BLOCK)
    volume.write(noise(9 * BLOCK, 400), volume.size - 9 * BLOCK)
    volume.zero(BLOCK, volume.size - BLOCK)
    volume.checkpoint()


def leave_volumes(maker):
    """Leave volumes as after a kill of their owners."""
    with maker.open('none') as repo:
        maker.make_volume(repo, 'deleting', 'plain')
        delete(maker.path / 'volumes' / 'deleting')
        for name in ('not-stored', 'not-marked'):
            maker.make_volume(repo, name, 'plain', size=12 * PART)
            with openvolumes.open_volume(repo, name) as volume:
                for part in range(2, 12):
                    volume.write(noise(BLOCK, 410), part * PART)
                volume.checkpoint()
    for number, name in enumerate(('not-stored', 'not-marked')):
        # Killed before the first commit, or after some: each has links.
        before = len(os.listdir(maker.path / 'images'))
        subprocess.run(
            ['strace', '-f', '-o', os.devnull, '-e', 'trace=linkat', '-e',
             f'inject=linkat:signal=KILL:when={1 + 5 * number}',
             sys.executable, '-m', 'tests.golden.make', 'store', maker.path,
             name], check=False, timeout=60)
        # The recipes of the interrupted checkpoint.
        recipes = len(os.listdir(maker.path / 'images')) - before
        assert (recipes > 0) == number, recipes
        with tempfile.TemporaryDirectory() as directory:
            copy = pathlib.Path(directory) / 'copy'
            shutil.copytree(maker.path, copy)
            with repositories.open_repository(copy) as repo, (
                    openvolumes.open_volume(repo, name)) as volume:
                maker.expect_volume(volume)


def store(path, name):
    """Write to all parts, unaligned and partly twice; store the volume."""
    with repositories.open_repository(path, threads=0) as repo:
        volume = openvolumes.open_volume(repo, name)
        for part in range(12):
            volume.write(text(90, part), part * PART + 77)
        volume.write(text(3000, 5), BLOCK // 2)
        volume.zero(4 * BLOCK + 1, BLOCK)
        volume.flush()
        volume.checkpoint()


def delete(directory):
    """Do only the first step of a deletion."""
    newest = max(directory.glob('journal-*'))
    data = bytearray(newest.read_bytes())
    state = field_tables.span('volumehead.HEAD', 'state')
    data[state] = DELETING.to_bytes(4, 'little')
    struct.pack_into('<Q', data, 4088,
                     xxhash.xxh3_64_intdigest(bytes(data[:4088])))
    newest.write_bytes(data)


def require_everything(path):
    """Require that the repository has every state of the format."""
    states, codecs = set(), set()
    scopes = set()
    for number in maintenance.groups(path):
        file = repositories.Group(path, number)
        scopes.add(bytes(file.data[
            field_tables.span('grouphead.HEAD', 'scope.id')]))
        for slot in range(file.slots):
            if file.raw_entry(slot) != bytes(56):
                place = file.entry(slot)[3]
                states.add(place >> 61)
                if place >> 61 == repositories.LIVE:
                    codecs.add(place >> 58 & 3)
    assert states == {repositories.LIVE, repositories.VOID,
                      repositories.FREED, repositories.DAMAGED}, states
    assert codecs == {0, 1, 2}, codecs
    assert len(scopes) == 3
    assert len(maintenance.groups(path)) > 4
    for name in ('catalog', 'spares', 'quarantine', 'spool'):
        assert os.listdir(path / name), name
    assert (path / 'fence').exists()


def require_lists(path):
    """Require that some segments have lists of slots."""
    listed = set()
    for number in maintenance.groups(path):
        file = repositories.Group(path, number)
        version = int.from_bytes(file.data[
            field_tables.span('grouphead.HEAD', 'major')], 'little')
        for slot in range(file.slots):
            _, _, segment, place = file.entry(slot)
            if place >> 61 == repositories.LIVE:
                listed.add((version, file.list_size(segment) > 0))
    assert (2, True) in listed, listed


def convert(maker):
    """Keep images as their disks, with two encoders, and a lost stream."""
    small = keptdisks.make(keptdisks.texts(60 * BLOCK), 4 * BLOCK, lossy={3})
    # The table has two pages.
    large = keptdisks.make(keptdisks.texts(305 * BLOCK, 2), 2 * BLOCK)
    with maker.open('lz4') as repo:
        for image_id, made in (('disk', small), ('disk-large', large),
                               ('disk-unproven', small)):
            maker.put(repo, image_id, made.file)
            with maintaining(repo) as maintainer:
                keptdisks.convert(repo, maintainer, image_id, made,
                                  image_id != 'disk-unproven')
                maintenance.account(maintainer)
        with repo.open_image('disk') as image:
            repo.copy(image, 'disk-copy', 'a project', 'project')
            assert image.disk is not None
        maker.expect('disk-copy', small.file, 'a project', 'project')
        maker.disks = {
            image_id: hashlib.sha256(made.disk).hexdigest()
            for image_id, made in (('disk', small), ('disk-copy', small),
                                   ('disk-large', large))}


def cool(maker):
    """Move full groups' segments to objects, all of them cached."""
    coldgroups.attach(maker.path)
    with maker.open('none') as repo:
        assert len(coldgroups.cool_all(repo)) > 1
    require_cold(maker.path)


def require_cold(path):
    """Require that some groups are cold, and others are not."""
    majors = {repositories.Group(path, number).data[8]
              for number in maintenance.groups(path)}
    assert 3 in majors and majors & {1, 2}, majors


def report_of(path):
    """Return the results of a check that later checks must repeat."""
    report = checker.check(path)
    return {'ok': report.ok, 'damaged_images': list(report.damaged_images),
            'damage': sorted(f'{f.file}: {f.sentence}'
                             for f in report.findings
                             if f.severity == checker.DAMAGE)}


def pack(path, file):
    """Pack a repository; the same one gives the same archive."""
    def plain(member):
        member.uid = member.gid = 0
        member.uname = member.gname = ''
        member.mtime = 0
        return None if 'catalog-reserve' in member.name else member
    with tarfile.open(file, 'w:xz', preset=9) as archive:
        archive.add(path, 'repository', filter=plain)
    assert file.stat().st_size <= MAX_SIZE, file.stat().st_size


class Kind(typing.NamedTuple):
    """Contents of a golden repository."""

    parameters: dict = {}
    features: tuple = ()
    #: With files from maintenance and crashes, too.
    everything: bool = False


REPOSITORIES = {
    '1-hash': Kind(everything=True),
    '1-value': Kind(VALUE | {'block_size': 4096, 'segment_size': 16384}),
    '1-gear': Kind(GEAR),
    '1-volumes': Kind(features=(features.VOLUMES,)),
    '1-listed-segments': Kind(features=(features.LISTED_SEGMENTS,),
                              everything=True),
    '1-cold': Kind(features=(features.LISTED_SEGMENTS, features.COLD),
                   everything=True),
    '1-value-cold': Kind(VALUE, (features.LISTED_SEGMENTS, features.COLD)),
    '1-gear-all': Kind(GEAR, (features.VOLUMES, features.LISTED_SEGMENTS,
                              features.COLD)),
    '1-nodedup': Kind(features=(features.NODEDUP,), everything=True),
    '1-disks': Kind(features=(features.DISKS,))}


def make(name, kind, directory):
    maker = Maker(directory / name, **kind.parameters)
    make_contents(maker)
    if features.LISTED_SEGMENTS in kind.features:
        put_mixed(maker)
        recompress(maker)
    if features.NODEDUP in kind.features:
        put_copies(maker)
    if features.DISKS in kind.features:
        convert(maker)
    if kind.everything:
        maintain(maker)
        leave_in_flight(maker)
        require_everything(maker.path)
    if features.VOLUMES in kind.features:
        make_volumes(maker)
        leave_volumes(maker)
    if features.LISTED_SEGMENTS in kind.features:
        require_lists(maker.path)
    if features.COLD in kind.features:
        cool(maker)
    assert tuple(features.read(str(maker.path))) == kind.features
    expected = {'images': maker.images, 'features': kind.features,
                'check': report_of(maker.path)}
    if maker.volumes:
        expected['volumes'] = maker.volumes
    if maker.disks:
        expected['disks'] = maker.disks
    pack(maker.path, HERE / f'{name}.tar.xz')
    (HERE / f'{name}.json').write_text(
        json.dumps(expected, indent=2, sort_keys=True) + '\n')


def unpack(name, directory):
    """Unpack a repository that was made; return its path."""
    with tarfile.open(HERE / f'{name}.tar.xz') as archive:
        # The archives are trusted. Python 3.11.2 has no argument for this.
        archive.extraction_filter = lambda member, path: member
        archive.extractall(directory)
    return pathlib.Path(directory) / 'repository'


def main():
    for name, kind in REPOSITORIES.items():
        if not (HERE / f'{name}.json').exists():
            with tempfile.TemporaryDirectory() as directory:
                make(name, kind, pathlib.Path(directory))
            print(name)


if __name__ == '__main__':
    if sys.argv[1:2] == ['store']:
        store(*sys.argv[2:])
    else:
        main()
