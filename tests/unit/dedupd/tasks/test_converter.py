# SPDX-License-Identifier: Apache-2.0

"""Conversion keeps the disk of an image, and gives back the same file."""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import random
import signal
import subprocess
import tempfile
import time
import types

import pytest
import xxhash

from dedupd.schedule import task_scheduler
from dedupd.tasks import collector
from dedupd.tasks import converter
from dedupd.tasks import disk_conversion
from dedupd.tasks import merger
from dedupd.tasks import scrubber
from glance_dedup import _engine
from glance_dedup.base import confined
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import pacing
from glance_dedup.base import package_version
from glance_dedup.base import sorting
from glance_dedup.check import checker
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import database
from glance_dedup.repository import conversion
from glance_dedup.repository import disk_survey
from glance_dedup.repository import features
from glance_dedup.repository import format_verdicts
from glance_dedup.repository import openimages
from tests.support import coldgroups
from tests.support import lying_parser
from tests.support import maintenance
from tests.support.maintenance import maintaining
from tests.support import qcow2files
from tests.support import repositories
from tests.support.repositories import noise

MIB = 1 << 20
CLUSTER = qcow2files.CLUSTER


def words(length, seed):
    """Return bytes of which zlib makes a half or so."""
    return noise(length // 2, seed).hex().encode()[:length]


def clusters(count, seed=0):
    return [words(CLUSTER, seed + i) for i in range(count)]


DISK = clusters(60)
FILE = qcow2files.file_of([qcow2files.deflated(one) for one in DISK])


@pytest.fixture
def path(tmp_path):
    return repositories.create(tmp_path / 'repository', block_size=4096,
                               group_slots=1024)


@pytest.fixture
def repo(path):
    with repositories.open_repository(path) as repo:
        yield repo


@pytest.fixture
def maintainer(repo):
    with maintaining(repo) as maintainer:
        yield maintainer


def convert(maintainer, *images, form=converter.DISK, pace=None):
    return converter.run_once(maintainer, pace or pacing.Pace(), images, form)


def require_file(repo, image_id, file):
    assert repositories.read_all(repo, image_id) == file


def require_disk(repo, image_id, file, disk):
    """The image has both: the file as it came, and the disk in it."""
    require_file(repo, image_id, file)
    with repo.open_image(image_id) as image:
        assert image.disk is not None and image.disk.is_proven
        assert image.disk.size == len(disk)
        assert image.read_disk(len(disk)) == disk


def require_as_it_came(repo, image_id, file, reason=None):
    require_file(repo, image_id, file)
    with repo.open_image(image_id) as image:
        assert image.disk is None
        found = format_verdicts.read(repo.path, image_id,
                                     image.stat.upload_id)
    if reason is None:
        assert found is None
    else:
        assert reason in found.reason


def test_a_compressed_file(repo, maintainer, path):
    """Its disk is stored as the raw image would be (F1, F5)."""
    repositories.put(repo, 'image', FILE)
    result = convert(maintainer)
    assert (result.images, result.unsuitable, result.failed) == (1, 0, {})
    assert result.derived_bytes > 0.8 * (len(FILE) - 5 * CLUSTER)
    require_disk(repo, 'image', FILE, b''.join(DISK))
    repositories.put(repo, 'raw', b''.join(DISK))
    assert repo.stat('raw').new_bytes == 0
    collector.run_once(maintainer, pacing.Pace())
    maintenance.require_counted(maintainer)
    assert checker.check(path).ok
    require_disk(repo, 'image', FILE, b''.join(DISK))
    # It is left alone from now on.
    assert convert(maintainer).images == 0
    assert repo.features == [features.DISKS]


FORMATS = [
    ('qcow2', ('-O', 'qcow2', '-c')),
    ('qcow2', ('-O', 'qcow2', '-c', '-o', 'cluster_size=4k')),
    ('qcow2', ('-O', 'qcow2', '-c', '-o', 'cluster_size=2M')),
    ('qcow2', ('-O', 'qcow2', '-o', 'compat=0.10')),
    ('qcow2', ('-O', 'qcow2', '-o', 'extended_l2=on')),
    ('vmdk', ('-O', 'vmdk', '-o', 'subformat=streamOptimized')),
    ('vmdk', ('-O', 'vmdk')), ('vdi', ('-O', 'vdi')),
    ('vhd', ('-O', 'vpc', '-o', 'force_size=on')),
    ('vhd', ('-O', 'vpc', '-o', 'force_size=on,subformat=fixed')),
    ('vhdx', ('-O', 'vhdx'))]


@pytest.mark.needs('qemu')
@pytest.mark.parametrize('name, options', FORMATS, ids=lambda one: ''.join(
    part.strip('-') for part in one[1:]) if isinstance(one, tuple) else one)
def test_files_of_qemu(repo, maintainer, path, tmp_path, name, options):
    raw = (repositories.mixture(3 * MIB + 512, 1) + bytes(2 * MIB)
           + words(MIB, 2))
    (tmp_path / 'raw').write_bytes(raw)
    subprocess.run(['qemu-img', 'convert', *options, tmp_path / 'raw',
                    tmp_path / 'file'], check=True, timeout=120)
    file = (tmp_path / 'file').read_bytes()
    repositories.put(repo, 'image', file)
    result = convert(maintainer)
    assert (result.images, result.failed) == (1, {}), (
        format_verdicts.read(repo.path, 'image',
                             repo.stat('image').upload_id))
    require_disk(repo, 'image', file, raw)
    collector.run_once(maintainer, pacing.Pace())
    maintenance.require_counted(maintainer)
    assert checker.check(path).ok


# -- what is stored -----------------------------------------------------------

@pytest.mark.needs('qemu')
def test_a_plain_file_keeps_its_figures(repo, maintainer, tmp_path):
    """Its blocks are the disk's, so its project does not pay again."""
    (tmp_path / 'raw').write_bytes(noise(2 * MIB, 1))
    subprocess.run(['qemu-img', 'convert', '-O', 'qcow2', tmp_path / 'raw',
                    tmp_path / 'file'], check=True, timeout=120)
    repositories.put(repo, 'image', (tmp_path / 'file').read_bytes())
    before = repo.stat('image')
    assert convert(maintainer).images == 1
    assert repo.stat('image').new_bytes == pytest.approx(
        before.new_bytes, rel=0.2)


def test_streams_without_an_encoder(repo, maintainer, path):
    """They are in the rest, if an operator wants the disk."""
    file = qcow2files.file_of([qcow2files.foreign(one) for one in DISK])
    repositories.put(repo, 'image', file)
    assert convert(maintainer).unsuitable == 1
    require_as_it_came(repo, 'image', file, 'zlib makes only 0 %')
    result = convert(maintainer, 'image')
    assert (result.images, result.derived_bytes) == (1, 0)
    require_disk(repo, 'image', file, b''.join(DISK))
    assert format_verdicts.read(repo.path, 'image',
                                repo.stat('image').upload_id) is None
    assert checker.check(path).ok


def test_streams_of_two_programs(repo, maintainer, monkeypatch):
    """Each has an encoder of its own, found while the disk is stored, too."""
    monkeypatch.setattr(disk_conversion, '_BATCH', 7)
    file = qcow2files.file_of(
        [qcow2files.deflated(one) for one in DISK[:30]]
        + [qcow2files.deflated(one, 1) for one in DISK[30:]])
    repositories.put(repo, 'image', file)
    assert convert(maintainer).derived_bytes > 0.8 * len(file)
    require_disk(repo, 'image', file, b''.join(DISK))


def test_short_streams(repo, maintainer):
    """Deriving them would cost much, and save little (F8)."""
    disk = [b'\1' * CLUSTER] * 31 + DISK[:1]
    file = qcow2files.file_of([qcow2files.deflated(one) for one in disk])
    repositories.put(repo, 'image', file)
    result = convert(maintainer)
    assert (result.images, result.derived_bytes) == (
        1, len(qcow2files.deflated(DISK[0])))
    require_disk(repo, 'image', file, b''.join(disk))


def with_entries(entries, file=FILE):
    """Return the file with other entries of its table."""
    table = bytearray(file[2 * CLUSTER:3 * CLUSTER])
    for number, entry in entries.items():
        table[8 * number:8 * number + 8] = entry.to_bytes(8, 'big')
    return file[:2 * CLUSTER] + bytes(table) + file[3 * CLUSTER:]


def entry(number, file=FILE):
    at = 2 * CLUSTER + 8 * number
    return int.from_bytes(file[at:at + 8], 'big')


def test_clusters_with_one_stream(repo, maintainer):
    """The stream is derived once, of the first of them."""
    disk = [*DISK]
    disk[7] = disk[20] = disk[3]
    file = with_entries({7: entry(3), 20: entry(3)})
    repositories.put(repo, 'image', file)
    assert convert(maintainer).images == 1
    require_disk(repo, 'image', file, b''.join(disk))


def test_clusters_that_are_the_tables(repo, maintainer):
    """A disk of the file's own header, and of its tables, twice."""
    file = with_entries({5: 0, 6: CLUSTER, 7: 2 * CLUSTER, 8: CLUSTER,
                         9: 4 * CLUSTER, 10: 5 * CLUSTER})
    disk = [*DISK]
    disk[5] = bytes(CLUSTER)
    for number, place in (6, 1), (7, 2), (8, 1), (9, 4), (10, 5):
        disk[number] = file[place * CLUSTER:(place + 1) * CLUSTER]
    repositories.put(repo, 'image', file)
    assert convert(maintainer).images == 1
    require_disk(repo, 'image', file, b''.join(disk))


@pytest.mark.parametrize('tail', [b'', b'.'])
def test_the_disk_ends_within_a_cluster(repo, maintainer, tail):
    """The last stream is derived if it has zeros behind the disk."""
    size = len(DISK) * CLUSTER - 512
    last = (DISK[-1][:-512] + tail).ljust(CLUSTER, b'\0')
    streams = [qcow2files.deflated(one) for one in [*DISK[:-1], last]]
    file = patched(24, size.to_bytes(8, 'big'), qcow2files.file_of(streams))
    repositories.put(repo, 'image', file)
    result = convert(maintainer)
    assert (result.images, result.derived_bytes) == (
        1, sum(map(len, streams[:-1] if tail else streams)))
    require_disk(repo, 'image', file, (b''.join(DISK[:-1]) + last)[:size])


def test_a_table_that_is_not_worth_it(repo, maintainer):
    """Gaps between streams are extents, too (F8)."""
    streams = [qcow2files.deflated(words(700, seed).ljust(CLUSTER, b'\0'))
               for seed in range(200)]
    file = qcow2files.file_of(streams, b'gap')
    assert 80 * 200 > len(file) / 8 > 40 * 210
    repositories.put(repo, 'image', file)
    result = convert(maintainer)
    # It is no trouble of the daemon's.
    assert (result.unsuitable, result.failed) == (1, {})
    assert not [*task_scheduler._troubles(dataclasses.asdict(result))]
    require_as_it_came(repo, 'image', file, 'more pieces')
    maintenance.require_counted(maintainer)


def test_a_converted_image_is_healed(repo, maintainer, path):
    """A later upload of the raw disk has the damaged block."""
    repositories.put(repo, 'image', FILE)
    assert convert(maintainer).images == 1
    block = maintenance.blocks_of(repo, 'image')[40]
    segment = repositories.Group(path, block[0]).entry(block[1])[2]
    repositories.ruin(repositories.group_path(path, block[0]), segment + 2000)
    assert scrubber.run_once(maintainer, pacing.Pace(), full=True).damaged
    with pytest.raises(exceptions.DamagedError):
        repositories.read_all(repo, 'image')
    repositories.put(repo, 'raw', b''.join(DISK))
    assert scrubber.run_once(maintainer, pacing.Pace(), full=True).healed
    require_disk(repo, 'image', FILE, b''.join(DISK))


def test_bytes_behind_everything(repo, maintainer):
    file = FILE + noise(3 * CLUSTER + 77, 5)
    repositories.put(repo, 'image', file)
    assert convert(maintainer).images == 1
    require_disk(repo, 'image', file, b''.join(DISK))


def test_ranges_cover_the_file():
    """Of ranges that overlap the first counts, and gaps are the rest."""
    for seed in range(200):
        rng = random.Random(seed)
        size = rng.randrange(1, 3000)
        records = sorting.Sorted(disk_conversion._RECORD.size)
        found = []
        for _ in range(rng.randrange(12)):
            place = rng.randrange(size)
            length = rng.randrange(1, size - place + 1)
            found.append((place, length, rng.randrange(9) * 10000, *rng.choice(
                [(0, 0, 0), (4096, 1, 77)])))
            records.add(disk_conversion._RECORD.pack(*found[-1]))
        work = disk_conversion.Work.__new__(disk_conversion.Work)
        work._size = size
        disk = types.SimpleNamespace(size=512)
        at, rest = 0, disk_survey.REST_ALIGN
        for place, extent, is_rest in work._ranges(disk, records):
            assert place == at and extent.length > 0
            at += extent.length
            # Of a stream there is no part.
            assert not extent.encoder or (
                place, extent.length, extent.plain, 4096, 1, 77) in found
            assert is_rest or any(
                begin <= place and extent.plain - plain == place - begin
                for begin, _, plain, *_ in found)
            if is_rest:
                assert extent.plain == rest
                rest += extent.length
        assert at == size


# -- interruptions ------------------------------------------------------------

@pytest.fixture
def small_steps(monkeypatch):
    monkeypatch.setattr(disk_conversion, '_PIECE', 16 << 10)


class Interrupted(pacing.Pace):
    """A pace that acts at a certain step of a conversion."""

    def __init__(self, at, action):
        super().__init__()
        self.steps = 0
        self._at, self._action = at, action

    def step(self, done, total, what, cost=0, watch=None):
        super().step(done, total, what, cost, watch)
        if ' of image' in what or 'mapping' in what:
            self.steps += 1
            if self.steps == self._at:
                self._action()


def stopping():
    raise pacing.Stopped


def test_it_makes_way_at_each_step(repo, maintainer, path, small_steps):
    """It goes on where it was, and other tasks do their work meanwhile."""
    repositories.put(repo, 'image', FILE)
    repositories.put(repo, 'other', noise(100_000, 5))
    stops = 0
    while True:
        try:
            result = convert(maintainer, pace=Interrupted(1, stopping))
            break
        except pacing.Stopped:
            stops += 1
        work = maintainer.converting
        require_file(repo, 'image', FILE)
        if stops == 5:
            repo.delete('other')
        maintenance.account(maintainer)
        collector.run_once(maintainer, pacing.Pace())
        assert maintainer.converting is work
    assert stops > 15 and result.images == 1
    assert maintainer.converting is None
    require_disk(repo, 'image', FILE, b''.join(DISK))
    maintenance.require_counted(maintainer)
    collector.run_once(maintainer, pacing.Pace())
    maintenance.require_collected(maintainer)
    assert checker.check(path).ok


def test_a_request_makes_way(repo, maintainer, small_steps):
    """It ends with the result that it would have had at once."""
    repositories.put(repo, 'image', FILE)
    with pytest.raises(pacing.Stopped):
        convert(maintainer, 'image', pace=Interrupted(5, stopping))
    result = convert(maintainer, 'image')
    assert (result.images, result.unchanged, result.reasons) == (1, 0, {})


def test_it_is_counted_before_the_exchange(repo, maintainer, monkeypatch):
    """N10.3: otherwise a crash could free its blocks."""
    repositories.put(repo, 'image', FILE)
    real, found = disk_conversion.Work.exchange, []

    def exchange(work):
        found.append(maintainer.catalog.counted(
            work.header['transaction_id']))
        return real(work)
    monkeypatch.setattr(disk_conversion.Work, 'exchange', exchange)
    assert convert(maintainer).images == 1
    assert found == [True]


@pytest.mark.parametrize('where', ['_step', 'exchange'])
def test_an_error_of_the_program(repo, maintainer, small_steps, monkeypatch,
                                 where):
    """Nothing of the conversion is left to go on with."""
    repositories.put(repo, 'image', FILE)

    def fail(*args):
        raise ValueError('a bug')
    with monkeypatch.context() as patch:
        patch.setattr(disk_conversion.Work, where, fail)
        with pytest.raises(ValueError):
            convert(maintainer)
    require_as_it_came(repo, 'image', FILE)
    assert convert(maintainer).images == 1
    require_disk(repo, 'image', FILE, b''.join(DISK))


def test_a_catalog_that_is_bad_meanwhile(repo, maintainer, monkeypatch):
    """It is rebuilt, and the conversion begins again."""
    repositories.put(repo, 'image', FILE)
    count, works = merger.count, []

    def fail_once(*args):
        works.append(maintainer.converting)
        if len(works) == 1:
            raise database.CatalogError('a bug')
        count(*args)
    monkeypatch.setattr(merger, 'count', fail_once)
    assert convert(maintainer).images == 1
    assert len(works) == 2 and works[0] is not works[1]
    require_disk(repo, 'image', FILE, b''.join(DISK))
    collector.run_once(maintainer, pacing.Pace())
    maintenance.require_counted(maintainer)


def test_a_request_for_another_image(repo, maintainer, small_steps):
    """The conversion that made way is begun again later."""
    for image_id in ('image-1', 'image-2'):
        repositories.put(repo, image_id, FILE + image_id.encode())
    with pytest.raises(pacing.Stopped):
        convert(maintainer, pace=Interrupted(5, stopping))
    assert maintainer.converting.image_id == 'image-1'
    assert convert(maintainer, 'image-2').images == 1
    assert convert(maintainer).images == 1
    for image_id in ('image-1', 'image-2'):
        require_disk(repo, image_id, FILE + image_id.encode(), b''.join(DISK))


@pytest.mark.parametrize('how', ['full', 'program'])
def test_an_error_before_it_goes_on(repo, maintainer, small_steps,
                                    monkeypatch, how):
    """A conversion that made way does not keep its locks then."""
    repositories.put(repo, 'image', FILE)
    with pytest.raises(pacing.Stopped):
        convert(maintainer, pace=Interrupted(5, stopping))
    work = maintainer.converting

    def full(*args):
        raise exceptions.NoSpaceError('no room for the catalog')
    with monkeypatch.context() as patch:
        if how == 'full':
            patch.setattr(converter.accounting, 'run_once', full)
        else:
            patch.setattr(confined, 'PROGRAM', '/nonexistent/program')
        with pytest.raises(exceptions.RepositoryError):
            convert(maintainer)
    assert maintainer.converting is None
    assert next(work.steps, None) is None
    assert convert(maintainer).images == 1


def test_waits_do_not_count(repo, maintainer, small_steps, monkeypatch):
    """Other tasks and the rate are no reason to refuse an image."""
    repositories.put(repo, 'image', FILE)
    waited = []
    clock = time.monotonic
    monkeypatch.setattr(disk_conversion, 'time', types.SimpleNamespace(
        monotonic=lambda: clock() + 1000 * len(waited)))
    assert convert(maintainer, pace=Every(
        lambda: waited.append(1))).images == 1
    assert len(waited) > 15


class Every(pacing.Pace):
    """A pace that acts at each step."""

    def __init__(self, action):
        super().__init__()
        self._action = action

    def step(self, *args, **kwargs):
        super().step(*args, **kwargs)
        self._action()


def test_it_waits_too_long(repo, maintainer, small_steps, monkeypatch):
    """The next task closes it, and it begins again, without a verdict (F8)."""
    repositories.put(repo, 'image', FILE)
    with pytest.raises(pacing.Stopped):
        convert(maintainer, pace=Interrupted(8, stopping))
    collector.run_once(maintainer, pacing.Pace())
    assert maintainer.converting is not None
    monkeypatch.setattr(disk_conversion, 'MAX_WAIT', -1.0)
    collector.run_once(maintainer, pacing.Pace())
    assert maintainer.converting is None
    require_as_it_came(repo, 'image', FILE)
    assert convert(maintainer).images == 1


def test_the_maintainer_ends_meanwhile(repo, path, small_steps):
    repositories.put(repo, 'image', FILE)
    for at in (1, 4, 12):
        with maintaining(repo) as maintainer:
            with pytest.raises(pacing.Stopped):
                convert(maintainer, pace=Interrupted(at, stopping))
    with maintaining(repo) as maintainer:
        maintenance.account(maintainer)
        maintenance.require_counted(maintainer)
    require_as_it_came(repo, 'image', FILE)
    assert checker.check(path).ok


def kill(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def convert_and_die(path, at):
    """Convert in a child that is killed at a step; False: it was not."""
    def run():
        with (repositories.open_repository(path) as repo,
              maintaining(repo) as maintainer):
            if isinstance(at, int):
                convert(maintainer, pace=Interrupted(at, kill))
            else:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(*at)
                    convert(maintainer)
    try:
        repositories.in_child(run)
    except repositories.ChildFailed:
        return True
    return False


def exchange_and_die(self):
    assert self._new.exchange()
    kill()


@pytest.mark.parametrize('at', [
    *range(1, 25, 2), (merger, 'count', kill),
    (disk_conversion.Work, 'exchange', kill),
    (disk_conversion.Work, 'exchange', exchange_and_die)],
    ids=lambda at: str(at if isinstance(at, int) else at[2].__name__ + at[1]))
def test_killed_at_each_step(path, small_steps, at):
    """The image has its old recipe or its new one, and the file (F2)."""
    with repositories.open_repository(path) as repo:
        repositories.put(repo, 'image', FILE)
    assert convert_and_die(path, at)
    with (repositories.open_repository(path) as repo,
          maintaining(repo) as maintainer):
        require_file(repo, 'image', FILE)
        collector.run_once(maintainer, pacing.Pace())
        maintenance.require_collected(maintainer)
        convert(maintainer)
        require_disk(repo, 'image', FILE, b''.join(DISK))
        collector.run_once(maintainer, pacing.Pace())
        maintenance.require_collected(maintainer)
    assert checker.check(path).ok


def test_killed_at_random_while_images_come_and_go(path, small_steps):
    """Files with a disk come and go, too."""
    with repositories.open_repository(path) as other:
        files = [f'disk-{n}' for n in range(6)]
        for image_id in files:
            repositories.put(other, image_id, FILE + image_id.encode())
        for seed in range(2):
            rng = random.Random(seed)
            for child in range(3):
                pid, pipe = repositories.fork_child(
                    lambda: convert_for_ever(path))
                try:
                    for _ in range(rng.randrange(200)):
                        image_id = rng.choice(files)
                        require_file(other, image_id,
                                     FILE + image_id.encode())
                    other.delete(files.pop())
                finally:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    os.close(pipe)
                for image_id in files:
                    require_file(other, image_id, FILE + image_id.encode())
                if len(files) < 3:
                    files.append(f'disk-{seed}-{child}')
                    repositories.put(other, files[-1],
                                     FILE + files[-1].encode())
        with maintaining(other) as maintainer:
            convert(maintainer, *files)
            collector.run_once(maintainer, pacing.Pace())
            maintenance.require_collected(maintainer)
        for image_id in files:
            require_disk(other, image_id, FILE + image_id.encode(),
                         b''.join(DISK))
    assert checker.check(path).ok


def convert_for_ever(path):
    with (repositories.open_repository(path) as repo,
          maintaining(repo) as maintainer):
        while True:
            convert(maintainer)
            for image_id in repo.images():
                convert(maintainer, image_id, form=converter.FILE)
                convert(maintainer, image_id)


# -- others meanwhile ---------------------------------------------------------

@pytest.mark.parametrize('at', [1, 5, 12])
def test_deleted_meanwhile(repo, maintainer, path, small_steps, at):
    repositories.put(repo, 'image', FILE)
    pace = Interrupted(at, lambda: repo.delete('image'))
    result = convert(maintainer, pace=pace)
    assert (result.images, result.gave_up) == (0, 1)
    # The next step finds it out.
    assert pace.steps == at
    assert repo.images() == []
    collector.run_once(maintainer, pacing.Pace())
    maintenance.require_collected(maintainer)
    assert checker.check(path).ok


def test_deleted_before_the_exchange(repo, maintainer, path, monkeypatch):
    """N10.4 finds it out."""
    repositories.put(repo, 'image', FILE)
    real = merger.count
    monkeypatch.setattr(merger, 'count', lambda *args: (
        real(*args), repo.delete('image')))
    assert convert(maintainer).gave_up == 1
    assert repo.images() == []
    collector.run_once(maintainer, pacing.Pace())
    maintenance.require_collected(maintainer)


def test_another_process_is_the_maintainer(repo, maintainer, monkeypatch):
    """It has another catalog, so there is no exchange (N10.3)."""
    repositories.put(repo, 'image', FILE)
    real = merger.count

    def count(*args):
        real(*args)
        maintainer.lost = 'another process maintains it'
    monkeypatch.setattr(merger, 'count', count)
    with pytest.raises(exceptions.LostLocks):
        convert(maintainer)
    assert maintainer.converting is None
    require_as_it_came(repo, 'image', FILE)


@pytest.mark.parametrize('form', [converter.DISK, converter.FILE])
def test_a_busy_lock_at_the_exchange(repo, maintainer, path, monkeypatch,
                                     form):
    """The image keeps its recipe, and a request is told."""
    repositories.put(repo, 'image', FILE)
    if form == converter.FILE:
        assert convert(maintainer).images == 1
    before = (path / 'images' / 'image').read_bytes()
    count = merger.count
    with contextlib.ExitStack() as stack:
        monkeypatch.setattr(merger, 'count', lambda *args: (
            count(*args), stack.enter_context(repositories.holding(
                path / 'locks' / 'images',
                xxhash.xxh3_64_intdigest(b'image') >> 2))))
        result = convert(maintainer, 'image', form=form)
    assert (result.images, result.gave_up) == (0, 1)
    assert 'busy' in result.reasons['image']
    assert (path / 'images' / 'image').read_bytes() == before
    assert format_verdicts.read(path, 'image',
                                repo.stat('image').upload_id) is None
    require_file(repo, 'image', FILE)


def test_uploaded_again_while_it_begins(repo, maintainer, monkeypatch):
    """The image that has the name now is not the one that was read (F1)."""
    repositories.put(repo, 'image', FILE)
    other = patched(3000, b'other bytes')
    find, calls = disk_conversion.Work._find_inode, []

    def find_inode(work):
        if not calls:
            repo.delete('image')
            repositories.put(repo, 'image', other)
        calls.append(work)
        return find(work)
    monkeypatch.setattr(disk_conversion.Work, '_find_inode', find_inode)
    result = convert(maintainer)
    assert (result.images, result.gave_up) == (0, 1)
    require_as_it_came(repo, 'image', other)
    assert convert(maintainer).images == 1
    require_disk(repo, 'image', other, b''.join(DISK))


def test_a_verdict_is_of_the_upload_that_was_read(repo, maintainer,
                                                  monkeypatch):
    repositories.put(repo, 'image', BAD['encrypted'][0])

    def survey(disk):
        repo.delete('image')
        repositories.put(repo, 'image', FILE)
        raise confined.RefusedError('it is encrypted')
        yield
    with monkeypatch.context() as patch:
        patch.setattr(disk_survey.Disk, 'survey', survey)
        assert convert(maintainer).unsuitable == 1
    require_as_it_came(repo, 'image', FILE)
    assert convert(maintainer).images == 1


def test_uploaded_again_meanwhile(repo, maintainer, small_steps):
    repositories.put(repo, 'image', FILE)

    def replace():
        repo.delete('image')
        repositories.put(repo, 'image', b'another image')
    assert convert(maintainer, pace=Interrupted(8, replace)).gave_up == 1
    require_as_it_came(repo, 'image', b'another image')


def test_merged_meanwhile(repo, maintainer, path, small_steps):
    """The next run converts it."""
    repositories.put(repo, 'image', FILE)

    def merge():
        with contextlib.closing(maintainer.relocation()) as relocation:
            relocation.add(block_addresses.pack(sorted({
                block_addresses.address(*block) for block
                in maintenance.blocks_of(repo, 'image')}), 'Q'))
            mapping = relocation.finish()
        assert merger.merge_image(maintainer, 'image', mapping,
                                  pacing.Pace()).exchanged
    assert convert(maintainer, pace=Interrupted(8, merge)).gave_up == 1
    require_as_it_came(repo, 'image', FILE)
    assert convert(maintainer).images == 1
    require_disk(repo, 'image', FILE, b''.join(DISK))
    collector.run_once(maintainer, pacing.Pace())
    maintenance.require_collected(maintainer)
    assert checker.check(path).ok


def test_read_meanwhile(repo, maintainer):
    """A reader of the old recipe reads on (I12)."""
    repositories.put(repo, 'image', FILE)
    with repo.open_image('image') as before:
        assert convert(maintainer).images == 1
        collector.run_once(maintainer, pacing.Pace())
        assert before.read() == FILE and before.disk is None
    collector.run_once(maintainer, pacing.Pace())
    maintenance.require_collected(maintainer)
    require_disk(repo, 'image', FILE, b''.join(DISK))


def test_cold_images_are_left_out(tmp_path):
    path = repositories.create(tmp_path / 'cold', block_size=4096,
                               group_slots=64)
    coldgroups.attach(path)
    with (repositories.open_repository(path) as repo,
          maintaining(repo) as maintainer):
        file = FILE + noise(64 * 4096, 3)
        repositories.put(repo, 'image', file)
        maintainer.close()
        assert coldgroups.cool_all(repo)
        with maintaining(repo) as again:
            result = convert(again, 'image')
            # It is looked at again, since it may become warm.
            assert not again.judged
        assert result.images == 0
        assert 'object store' in result.reasons['image']
        require_as_it_came(repo, 'image', file)


def test_converted_images_become_cold(tmp_path):
    """A download then takes slices of the plain bytes."""
    path = repositories.create(tmp_path / 'cold', block_size=4096,
                               group_slots=64)
    coldgroups.attach(path)
    with repositories.open_repository(path) as repo:
        with maintaining(repo) as maintainer:
            repositories.put(repo, 'image', FILE + noise(64 * 4096, 3))
            assert convert(maintainer).images == 1
            collector.run_once(maintainer, pacing.Pace())
        assert coldgroups.cool_all(repo)
        require_disk(repo, 'image', FILE + noise(64 * 4096, 3),
                     b''.join(DISK))
        with maintaining(repo) as maintainer:
            result = convert(maintainer, 'image', form=converter.FILE)
            assert result.images == 1
        require_as_it_came(repo, 'image', FILE + noise(64 * 4096, 3),
                           'an operator')


def test_a_full_disk(repo, maintainer, path, monkeypatch):
    repositories.put(repo, 'image', FILE)

    def full(*args):
        raise exceptions.NoSpaceError('it is full')
    with monkeypatch.context() as patch:
        patch.setattr(conversion.Conversion, 'write', full)
        result = convert(maintainer)
    assert (result.images, result.skipped_for_space) == (0, 1)
    require_as_it_came(repo, 'image', FILE)
    assert convert(maintainer).images == 1
    collector.run_once(maintainer, pacing.Pace())
    maintenance.require_collected(maintainer)


@pytest.mark.parametrize('form', [converter.DISK, converter.FILE])
def test_no_room_for_the_other_form(repo, maintainer, path, monkeypatch,
                                    form):
    """It does not fill the disk down to the reserve in vain."""
    repositories.put(repo, 'image', FILE)
    size = len(b''.join(DISK))
    if form == converter.FILE:
        size = convert(maintainer).derived_bytes
    before = (path / 'images' / 'image').read_bytes()
    checked = []

    def require_room(repo, size):
        checked.append(size)
        if size:
            raise exceptions.NoSpaceError('no room')

    def write(*args):
        raise AssertionError('it is stored')
    with monkeypatch.context() as patch:
        patch.setattr(type(repo), 'require_room', require_room)
        patch.setattr(conversion.Conversion, 'write', write)
        for _ in range(2):
            result = convert(maintainer, 'image', form=form)
            assert result.skipped_for_space == 1
            assert 'no room' in result.reasons['image']
    # Before a disk is looked for, the reserve has to be free.
    assert checked == 2 * ([0, size] if form == converter.DISK else [size])
    assert (path / 'images' / 'image').read_bytes() == before
    require_file(repo, 'image', FILE)
    assert convert(maintainer, 'image', form=form).images == 1


def test_beside_an_older_program(path):
    """Nothing is stored in vain, and only one image is looked at (F10)."""
    with (repositories.open_repository(path, lock_timeout=0.1) as repo,
          maintaining(repo) as maintainer):
        for image_id in 'another', 'image':
            repositories.put(repo, image_id, FILE)
        with (repositories.holding(
                path / 'locks' / 'groups', repositories.FEATURE_BYTE
                + features.KNOWN.index(features.DISKS), shared=True),
                pytest.MonkeyPatch.context() as patch):
            patch.setattr(conversion.Conversion, 'write', None)
            assert convert(maintainer).busy == 1
        assert not repo.features
        require_as_it_came(repo, 'image', FILE)
        assert convert(maintainer).images == 2


def test_a_failed_image_does_not_stop_others(repo, maintainer, monkeypatch):
    """It is left out of later runs, which would store it in vain again."""
    for image_id in ('image-1', 'image-2', 'image-3'):
        repositories.put(repo, image_id, FILE + image_id.encode())
    calls = []

    def temporary():
        calls.append(1)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, 'no space in /tmp')
        return real_file()
    real_file = tempfile.TemporaryFile
    look, looks = os.stat, []

    def stat(path, **options):
        looks.append(path)
        if str(path).endswith('image-2') and looks.count(path) == 5:
            raise OSError(errno.ESTALE, 'stale')
        return look(path, **options)
    monkeypatch.setattr(sorting.Sorted, 'RUN', 10)
    monkeypatch.setattr(tempfile, 'TemporaryFile', temporary)
    monkeypatch.setattr(disk_conversion.os, 'stat', stat)
    result = convert(maintainer)
    assert sorted(result.failed) == ['image-1', 'image-2']
    assert result.images == 1 and maintainer.converting is None
    assert convert(maintainer) == converter.Result()
    assert convert(maintainer, 'image-1', 'image-2').images == 2


# -- proofs -------------------------------------------------------------------

def test_another_encoder(repo, maintainer, monkeypatch):
    """A build with other bytes converts nothing, and reads (F3)."""
    repositories.put(repo, 'first', FILE)
    repositories.put(repo, 'second', FILE + b'.')
    convert(maintainer, 'first')

    def other():
        raise exceptions.VersionError('other bytes')
    monkeypatch.setattr(disk_conversion._engine, 'require_golden', other)
    for run in converter.run_once, converter.plan:
        with pytest.raises(exceptions.VersionError):
            run(maintainer, pacing.Pace())
    require_disk(repo, 'first', FILE, b''.join(DISK))
    require_as_it_came(repo, 'second', FILE + b'.')


def test_no_program_to_confine(repo, maintainer, monkeypatch):
    repositories.put(repo, 'image', FILE)
    monkeypatch.setattr(confined, 'PROGRAM', '/nonexistent/program')
    with pytest.raises(exceptions.UnavailableError, match='install'):
        convert(maintainer)
    require_as_it_came(repo, 'image', FILE)


@pytest.mark.parametrize('place', [100, len(FILE) - 10, len(FILE) // 2])
def test_bytes_that_come_out_otherwise(repo, maintainer, place, monkeypatch):
    """Any difference is found before the exchange (F4)."""
    repositories.put(repo, 'image', FILE)
    real = openimages.Image.read

    def read(image, length=-1, offset=0):
        found = bytearray(real(image, length, offset))
        if image.disk is not None and offset <= place < offset + len(found):
            found[place - offset] ^= 1
        return bytes(found)
    with monkeypatch.context() as patch:
        patch.setattr(openimages.Image, 'read', read)
        assert 'came out otherwise' in convert(maintainer).failed['image']
    require_as_it_came(repo, 'image', FILE)
    maintenance.require_counted(maintainer)


def test_a_wrong_checksum(repo, maintainer, monkeypatch):
    """Reading back finds it (F1, F4)."""
    repositories.put(repo, 'image', FILE)
    real = _engine.deflates_to

    def other(params, sample):
        found = real(params, sample)
        return None if found is None else found ^ 1
    with monkeypatch.context() as patch:
        patch.setattr(disk_survey._engine, 'deflates_to', other)
        result = convert(maintainer)
    assert 'encoder' in result.failed['image']
    require_as_it_came(repo, 'image', FILE)


@pytest.mark.parametrize('name, digest, good', [
    ('sha256', hashlib.sha256(FILE).digest(), True),
    ('sha256', hashlib.sha256(b'').digest(), False),
    ('nonesuch', b'\1', True), ('shake_128', b'\1', True),
    ('md5', b'\1', True)])
def test_the_hash_of_the_upload(repo, maintainer, monkeypatch, name, digest,
                                good):
    """It is computed over the bytes that come out (F4), if it can be."""
    new_hash = hashlib.new

    def new_or_not(name):
        if name == 'md5':
            raise ValueError('[digital envelope routines] unsupported')
        return new_hash(name)
    monkeypatch.setattr(hashlib, 'new', new_or_not)
    with repo.begin('image') as new:
        new.write(FILE)
        new.set_hash(name, digest)
        new.commit()
    result = convert(maintainer)
    assert (result.images == 1) is good
    assert ('hash' in result.failed.get('image', '')) is not good
    require_file(repo, 'image', FILE)


def test_copies_stay_apart(repo, maintainer):
    """A block with the mark nodedup keeps the image as it came (F9)."""
    repositories.put(repo, 'image', FILE, dedup=False)
    assert convert(maintainer).unsuitable == 1
    require_as_it_came(repo, 'image', FILE, 'shares no blocks')


def test_scopes_stay_apart(repo, maintainer):
    """The disk is stored in the scope of the image (F9)."""
    repositories.put(repo, 'raw', b''.join(DISK))
    repositories.put(repo, 'image', FILE, project='one', scope='project')
    assert convert(maintainer).images == 1
    assert repo.stat('image').new_bytes >= len(DISK) * CLUSTER
    require_disk(repo, 'image', FILE, b''.join(DISK))


# -- refusals -----------------------------------------------------------------

def patched(at, content, file=FILE):
    return file[:at] + content + file[at + len(content):]


BAD = {
    'encrypted': (patched(32, b'\0\0\0\2'), 'encrypted'),
    'a backing file': (patched(8, b'\0' * 7 + b'\x70\0\0\0\4'), 'backing'),
    'another version': (patched(4, b'\0\0\0\4'), 'version'),
    'a table outside': (patched(40, b'\0\1' + bytes(6)), ''),
    'an empty disk': (patched(24, bytes(8)), ''),
    'a disk of 2^63': (patched(24, b'\x80'), ''),
    'a stream outside': (with_entries({3: entry(3) | (1 << 40)}), ''),
    'a damaged stream': (patched(4 * CLUSTER + 3000, b'\xff' * 500),
                         'damaged'),
    'cut off': (FILE[:len(FILE) // 2], ''),
    'a header only': (FILE[:200], ''),
    'a long stream': (with_entries(
        {}, qcow2files.file_of([qcow2files.deflated(one * 2)
                                for one in DISK])), 'damaged'),
    'a short stream': (qcow2files.file_of(
        [qcow2files.deflated(one[:-1]) for one in DISK]), 'damaged'),
}


@pytest.mark.parametrize('bad', BAD)
def test_hostile_files(repo, maintainer, path, bad):
    """They stay exactly as they came, with the reason (F7, F11)."""
    file, reason = BAD[bad]
    repositories.put(repo, 'image', file)
    repositories.put(repo, 'other', FILE)
    result = convert(maintainer)
    assert (result.images, result.unsuitable, result.failed) == (1, 1, {})
    require_as_it_came(repo, 'image', file, reason)
    require_disk(repo, 'other', FILE, b''.join(DISK))
    # An operator's wish cannot change that.
    assert convert(maintainer, 'image').unsuitable == 1
    require_as_it_came(repo, 'image', file, reason)
    collector.run_once(maintainer, pacing.Pace())
    maintenance.require_collected(maintainer)
    assert checker.check(path).ok


@pytest.mark.parametrize('when, lie', [
    *(('map', lie) for lie in lying_parser.MAP if lie not in (
        'hangs', 'drips', 'asks and does not read')),
    *(('stream', lie) for lie in lying_parser.STREAM if lie != 'hangs')])
def test_a_parser_that_lies(repo, maintainer, tmp_path, monkeypatch, when,
                            lie):
    """It keeps its image as it came (F6)."""
    file = FILE[:100_000].ljust(100_000, b'.')
    repositories.put(repo, 'image', file)
    monkeypatch.setattr(confined, 'require_program', lambda: None)
    monkeypatch.setattr(confined, 'PROGRAM',
                        lying_parser.make(tmp_path, when, lie))
    result = convert(maintainer)
    assert (result.images, result.unsuitable) == (0, 1)
    require_as_it_came(repo, 'image', file, 'it could not be parsed')
    maintenance.require_counted(maintainer)


def test_two_disks(repo, maintainer, monkeypatch):
    """A second map that is not the first (F6)."""
    repositories.put(repo, 'image', FILE)
    real, calls = confined.Parser.pieces, []

    def pieces(parser):
        calls.append(parser)
        yield from real(parser)
        if len(calls) == 2:
            parser.disk_size += 512
    monkeypatch.setattr(confined.Parser, 'pieces', pieces)
    assert convert(maintainer).unsuitable == 1
    require_as_it_came(repo, 'image', FILE, 'two disks')


def test_it_takes_too_long(repo, maintainer, monkeypatch):
    """F8: the groups' locks are not held for ever."""
    repositories.put(repo, 'image', FILE)
    monkeypatch.setattr(disk_conversion, 'MAX_SECONDS', -1.0)
    assert convert(maintainer).unsuitable == 1
    require_as_it_came(repo, 'image', FILE, 'takes more than')


def test_it_has_its_locks_for_too_long(repo, maintainer, monkeypatch):
    """F8: waits for the rate or for other tasks have an end, too."""
    repositories.put(repo, 'image', FILE)
    monkeypatch.setattr(disk_conversion, 'MAX_LOCKED', -1.0)
    assert convert(maintainer).unsuitable == 1
    require_as_it_came(repo, 'image', FILE, 'was not done after')


def test_other_images(repo, maintainer, monkeypatch):
    """Images without a format are looked at once."""
    repositories.put(repo, 'raw', noise(50_000, 1))
    repositories.put(repo, 'empty', b'')
    assert convert(maintainer) == converter.Result()
    monkeypatch.setattr(type(repo), 'open_image', None)
    assert convert(maintainer) == converter.Result()
    assert not os.path.exists(os.path.join(repo.path, 'formats'))


def test_backups_are_left_alone(repo, maintainer):
    """Their bytes are those of a disk, whatever this begins with."""
    backup_id = 'b_server_20261130T120000Z'
    repositories.put(repo, backup_id, FILE)
    assert convert(maintainer) == converter.Result()
    result = convert(maintainer, backup_id)
    assert result.images == 0 and 'a backup' in result.reasons[backup_id]
    require_as_it_came(repo, backup_id, FILE)


# -- verdicts -----------------------------------------------------------------

@pytest.fixture
def refused(repo, maintainer):
    """An image with a verdict, and the path of its file."""
    repositories.put(repo, 'image', BAD['encrypted'][0])
    assert convert(maintainer).unsuitable == 1
    return os.path.join(repo.path, 'formats', 'image')


@pytest.fixture
def maintained_again(repo, maintainer, refused):
    maintainer.close()
    with maintaining(repo) as again:
        yield again


def test_a_verdict_stays(maintained_again):
    """The next maintainer does not try the image again."""
    assert convert(maintained_again) == converter.Result()
    assert convert(maintained_again) == converter.Result()


def test_a_lost_verdict(repo, refused, maintained_again):
    os.unlink(refused)
    assert convert(maintained_again).unsuitable == 1
    require_as_it_came(repo, 'image', BAD['encrypted'][0], 'encrypted')


def test_a_verdict_of_another_version(maintained_again, monkeypatch):
    monkeypatch.setattr(package_version, 'version', lambda: '99.0')
    assert convert(maintained_again).unsuitable == 1


def test_a_verdict_on_another_upload(repo, maintained_again):
    repo.delete('image')
    repositories.put(repo, 'image', FILE)
    assert convert(maintained_again).images == 1
    require_disk(repo, 'image', FILE, b''.join(DISK))


def test_a_verdict_on_a_deleted_image(repo, refused, maintained_again):
    """The next run removes it (F11)."""
    repo.delete('image')
    open(os.path.join(repo.path, 'formats', '.0123456789abcdef.new'),
         'w').close()
    convert(maintained_again)
    assert os.listdir(os.path.dirname(refused)) == []


# -- images that are read often -----------------------------------------------

DAY = 86400


def convert_idle(maintainer, days=3):
    return converter.run_once(maintainer, pacing.Pace(), idle_days=days)


def age(repo, image_id, days):
    """Set the time of an image's verdict to some days ago."""
    then = time.time() - days * DAY
    os.utime(os.path.join(repo.path, 'formats', image_id), (then, then))


def test_images_that_are_read_wait(repo, maintainer):
    repositories.put(repo, 'image', FILE)
    repositories.put(repo, 'raw', noise(5000, 1))
    for _ in range(2):
        assert convert_idle(maintainer) == converter.Result(waiting=1)
        require_as_it_came(repo, 'image', FILE, 'less than 3 days ago')
    age(repo, 'image', 2.9)
    assert convert_idle(maintainer).waiting == 1
    age(repo, 'image', 4)
    format_verdicts.note_read(repo.path, 'image')
    assert convert_idle(maintainer).waiting == 1
    age(repo, 'image', 4)
    assert convert_idle(maintainer, 5).waiting == 1
    assert convert_idle(maintainer).images == 1
    require_disk(repo, 'image', FILE, b''.join(DISK))
    assert os.listdir(os.path.join(repo.path, 'formats')) == []


@pytest.mark.parametrize('how', ['by name', 'without the option',
                                 'after an upgrade', 'to come'])
def test_images_that_need_not_wait(repo, maintainer, monkeypatch, how):
    repositories.put(repo, 'image', FILE)
    assert convert_idle(maintainer).waiting == 1
    age(repo, 'image', -9 if how == 'to come' else 4)
    if how == 'after an upgrade':
        monkeypatch.setattr(package_version, 'version', lambda: '99.0')
    if how == 'by name':
        assert convert(maintainer, 'image').images == 1
    elif how == 'without the option':
        assert convert(maintainer).images == 1
    else:
        assert convert_idle(maintainer).images == 1
    require_disk(repo, 'image', FILE, b''.join(DISK))


def test_a_new_upload_waits_anew(repo, maintainer):
    repositories.put(repo, 'image', FILE)
    assert convert_idle(maintainer).waiting == 1
    repo.delete('image')
    repositories.put(repo, 'image', FILE + b'.')
    age(repo, 'image', 4)
    assert convert_idle(maintainer).waiting == 1


def test_a_read_is_noted_once_a_day(repo, maintainer, refused):
    for days, noted in (0.5, False), (1.5, True), (-1, True):
        age(repo, 'image', days)
        before = os.stat(refused).st_mtime
        format_verdicts.note_read(repo.path, 'image')
        assert (os.stat(refused).st_mtime != before) is noted
    format_verdicts.note_read(repo.path, 'none')
    format_verdicts.note_read('/nonexistent', 'image')


HOSTILE = {
    'empty': lambda path: path.write_bytes(b''),
    'no JSON': lambda path: path.write_bytes(b'\xff' * 5000),
    'deep': lambda path: path.write_bytes(b'[' * 4000),
    'a list': lambda path: path.write_bytes(b'[]'),
    'another kind': lambda path: path.write_bytes(
        path.read_bytes().replace(b'verdict', b'Verdict')),
    'a flipped byte': lambda path: path.write_bytes(
        path.read_bytes().replace(b'encrypted', b'encryptee')),
    'a link': lambda path: (path.unlink(), path.symlink_to('/etc/passwd')),
    'a directory': lambda path: (path.unlink(), path.mkdir()),
    'a pipe': lambda path: (path.unlink(), os.mkfifo(path)),
    'no reason': lambda path: path.write_bytes(changed(path, reason=7)),
    'no wish': lambda path: path.write_bytes(changed(path, is_wish='x')),
    'no waiting': lambda path: path.write_bytes(changed(path, waits=None)),
    'no upload': lambda path: path.write_bytes(changed(path, upload_id=[])),
}


def changed(path, **fields):
    found = json.loads(path.read_bytes())
    found = {name: value for name, value in {**found, **fields}.items()
             if name not in ('checksum', 'kind', 'version')}
    return files.pack_json('glance-dedup format verdict', **found)


@pytest.mark.parametrize('what', HOSTILE)
def test_files_that_are_no_verdicts(repo, maintained_again, refused, what):
    """They count as none, and the image is judged again (F11)."""
    HOSTILE[what](pathlib.Path(refused))
    upload_id = repo.stat('image').upload_id
    assert format_verdicts.read(repo.path, 'image', upload_id) is None
    format_verdicts.note_read(repo.path, 'image')
    if what != 'a directory':
        assert convert(maintained_again).unsuitable == 1
        assert format_verdicts.read(repo.path, 'image', upload_id)


def test_a_reason_is_safe_to_show(repo, refused):
    path = pathlib.Path(refused)
    path.write_bytes(changed(path, reason='\x1b[2J' + 'x' * 1000))
    found = format_verdicts.read(repo.path, 'image',
                                 repo.stat('image').upload_id)
    assert '\x1b' not in found.reason and len(found.reason) <= 300


def test_another_directory_is_left_alone(repo, maintainer, tmp_path):
    """A link out of the repository is not followed."""
    (tmp_path / 'elsewhere').mkdir()
    os.symlink(tmp_path / 'elsewhere', os.path.join(repo.path, 'formats'))
    repositories.put(repo, 'image', BAD['encrypted'][0])
    with pytest.raises(exceptions.StorageError, match='formats'):
        convert(maintainer)
    assert os.listdir(tmp_path / 'elsewhere') == []
    require_as_it_came(repo, 'image', BAD['encrypted'][0])


# -- back ---------------------------------------------------------------------

def test_back_to_the_file(repo, maintainer, path):
    """An image that was converted back stays so, until it is named."""
    repositories.put(repo, 'image', FILE)
    assert convert(maintainer).images == 1
    result = convert(maintainer, 'image', form=converter.FILE)
    assert (result.images, result.derived_bytes) == (1, 0)
    require_as_it_came(repo, 'image', FILE, 'an operator wants its file')
    assert (path / 'images' / 'image').read_bytes()[8] == 1
    result = convert(maintainer, 'image', form=converter.FILE)
    assert (result.images, result.unchanged) == (0, 1)
    maintainer.judged.clear()       # as another maintainer would begin
    with monkeypatched_version():
        assert convert(maintainer) == converter.Result()
    assert convert(maintainer, 'image').images == 1
    require_disk(repo, 'image', FILE, b''.join(DISK))
    collector.run_once(maintainer, pacing.Pace())
    maintenance.require_collected(maintainer)
    assert checker.check(path).ok


def test_a_wish_for_the_file_of_an_image_that_is_one(repo, maintainer):
    """It holds after a restart, too."""
    repositories.put(repo, 'image', FILE)
    converter.plan(maintainer, pacing.Pace(), ['image'], converter.FILE)
    require_as_it_came(repo, 'image', FILE)
    assert convert(maintainer, 'image', form=converter.FILE).unchanged == 1
    maintainer.judged.clear()       # as another maintainer would begin
    assert convert(maintainer) == converter.Result()
    require_as_it_came(repo, 'image', FILE, 'an operator wants its file')


def monkeypatched_version():
    patch = pytest.MonkeyPatch()
    patch.setattr(package_version, 'version', lambda: '99.0')
    stack = contextlib.ExitStack()
    stack.callback(patch.undo)
    return stack


# -- plans --------------------------------------------------------------------

def test_a_plan_changes_nothing(repo, maintainer, path):
    repositories.put(repo, 'good', FILE)
    repositories.put(repo, 'bad', BAD['encrypted'][0])
    repositories.put(repo, 'raw', noise(5000, 1))
    convert(maintainer, 'raw')
    before = {file: file.read_bytes() for file in path.glob('images/*')}
    found = converter.plan(maintainer, pacing.Pace())
    assert [(image.image_id, image.action) for image in found.images] == [
        ('good', 'convert')]
    assert 'qcow2' in found.images[0].reason
    found = converter.plan(maintainer, pacing.Pace(), ['bad', 'raw', 'none'])
    assert [(image.image_id, image.action) for image in found.images] == [
        ('bad', 'skip'), ('raw', 'skip'), ('none', 'skip')]
    assert 'no image' in found.images[2].reason
    assert 'encrypted' in found.images[0].reason
    assert before == {file: file.read_bytes()
                      for file in path.glob('images/*')}
    assert not (path / 'formats').exists() and not repo.features
