# SPDX-License-Identifier: Apache-2.0

"""Running servers as sources of backups: a real libvirt with real QEMUs.

Most servers here never run an instruction: they are started paused, and their
"writes" go through their disk's own block device in QEMU, as a driver's
requests do. So a test knows every byte that was written.
"""

import contextlib
import datetime
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid

import pytest

from glance_dedup.backup import backup_job
from glance_dedup.backup import checkpoints
from glance_dedup.backup import servers
from glance_dedup.backup import views
from glance_dedup.base import imageids
from glance_dedup.cli import entry
from glance_dedup.client import nbd_reader
from glance_dedup.repository import image_repository
from tests.cloud import disk_images
from tests.cloud import local_cloud
from tests.cloud import test_libvirt
from tests.support import batches
from tests.support import nbd
from tests.support import repositories
from tests.support.repositories import read_all
from tests.support import sources

# Long: each backup starts processes that connect to libvirt, and ranks; each
# test starts QEMU, some of them several times.
pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(600),
    pytest.mark.needs('guest', 'libvirtd', 'qemu')]

MIB = 1 << 20
SEGMENT = views.SEGMENT
SIZE = 64 * MIB
UUID = '0b4ba7a6-6fbe-4cd5-a1c0-0d9e06bb4d53'
XML = """
<domain type='qemu'>
  <name>{name}</name>
  <uuid>{uuid}</uuid>
  <memory unit='MiB'>64</memory>
  <os><type>hvm</type></os>
  <devices>
    <disk type='file' device='disk'>
      <driver name='qemu' type='qcow2'/><source file='{place}/vda'/>
      <target dev='vda' bus='virtio'/>
    </disk>
    <disk type='file' device='disk'>
      <driver name='qemu' type='raw'/><source file='{place}/vdb'/>
      <target dev='vdb' bus='virtio'/>
    </disk>
    <disk type='file' device='cdrom'>
      <source file='{place}/cdrom'/><target dev='sda' bus='sata'/><readonly/>
    </disk>
  </devices>
</domain>
"""


def run(*command):
    return subprocess.run([str(word) for word in command], check=True,
                          capture_output=True, text=True, timeout=60).stdout


@pytest.fixture(scope='module')
def libvirt():
    """A libvirt of the tests' own."""
    nbd.need('libvirtd')
    # The path of a socket has to be short.
    place = pathlib.Path(tempfile.mkdtemp(prefix='cloud-'))
    with local_cloud.Cloud(place) as cloud:
        cloud.up(['libvirt'])
        yield cloud.services['libvirt']


class Server:
    """A server with a qcow2 disk, a raw one, and a CD."""

    name = 'web'

    def __init__(self, libvirt, place):
        self.libvirt = libvirt
        self.place = place
        for name in ('scratch', 'state'):
            (place / name).mkdir()
        run('qemu-img', 'create', '-f', 'qcow2', place / 'vda', SIZE)
        for name in ('vdb', 'cdrom'):
            run('qemu-img', 'create', '-f', 'raw', place / name, 8 * MIB)
        self.xml = place / 'web.xml'
        self.xml.write_text(XML.format(
            name=self.name, place=place, uuid=UUID))
        self.settings = self.with_settings()

    def with_settings(self, **options):
        return servers.Settings(
            str(self.place / 'state'), str(self.place / 'scratch'),
            sources.REPOSITORY, self.libvirt.uri,
            **{'free_bytes': 0, **options})

    def virsh(self, *arguments):
        done = self.libvirt.virsh(*map(str, arguments))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self):
        self.virsh('start', '--paused', self.name)
        return self

    def monitor(self, command):
        return self.virsh('qemu-monitor-command', self.name, '--hmp', command)

    def write(self, offset, length, pattern, disk='vda'):
        """Write through the server's own device."""
        number = int(disk == 'vdb')
        for command in (f'write -P {pattern} {offset} {length}', 'flush'):
            # The command's output goes to QEMU's log.
            told = self.monitor(
                f'qemu-io -d /machine/peripheral/virtio-disk{number}/'
                f'virtio-backend "{command}"')
            assert not told.strip(), told

    def bitmaps(self):
        """Return the named bitmaps in QEMU."""
        return set(re.findall(f'"name": ?"({checkpoints.PREFIX}[^"]*)"',
                              self.virsh('qemu-monitor-command', self.name,
                                         '{"execute": "query-named-block-'
                                         'nodes"}')))

    def has_job(self):
        return self.libvirt.virsh(
            'backup-dumpxml', self.name).returncode == 0

    def kill(self):
        """End QEMU as a crash does."""
        for process in self.libvirt.servers():
            os.kill(process.pid, signal.SIGKILL)
        repositories.eventually(
            lambda: self.name not in self.virsh('list', '--name').split())

    def open(self, **options):
        return servers.open_server(self.settings, self.name, **options)

    @contextlib.contextmanager
    def opened(self, **options):
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(view)
                   for view in self.open(**options)]

    def remove(self):
        self.libvirt.virsh('destroy', self.name)
        assert self.libvirt.virsh('undefine', self.name).returncode == 0


@pytest.fixture
def short_path():
    """A directory in which a socket can be named."""
    with tempfile.TemporaryDirectory(prefix='backup-') as directory:
        yield pathlib.Path(directory)


@pytest.fixture
def server(libvirt, short_path):
    one = Server(libvirt, short_path)
    one.virsh('define', one.xml)
    one.start()
    yield one
    # This fails while libvirt has a checkpoint of it.
    one.remove()


def night(server, number, before=None):
    """Back up all disks; return the findings and the bytes, by name.

    The bytes of clean segments are those of the night before.
    """
    found, data = {}, {}
    with server.opened() as opened:
        for view in opened:
            found[view.name] = sources.scan(view)
            data[view.name] = whole = bytearray(sources.read(view))
            for at, kind in enumerate(found[view.name]):
                if kind == 'c' and before:
                    place = slice(at * SEGMENT, at * SEGMENT
                                  + view.length(at))
                    assert whole[place] == before[1][view.name][place]
            view.check()
            view.commit(f'b_{view.name}_{number}', sources.UPLOAD)
    assert not server.has_job()
    assert len(server.bitmaps()) == 1
    assert not list((server.place / 'scratch').iterdir())
    return found, data


def test_three_nights(server):
    """A backup reads only the segments that were written, and all of those."""
    server.write(0, 16 * MIB, 1)
    server.write(0, 4 * MIB, 1, 'vdb')
    first = night(server, 1)
    assert first[0] == {'web-vda': 'd' * 8 + 'z' * 24, 'web-vdb': 'ddzz'}
    server.write(4 * MIB - 10, 20, 2)
    server.write(40 * MIB, 2 * MIB, 2)
    server.write(2 * MIB, 512, 2, 'vdb')
    second = night(server, 2, first)
    assert second[0] == {
        'web-vda': 'cddccccc' + 'z' * 12 + 'd' + 'z' * 11, 'web-vdb': 'cdcc'}
    third = night(server, 3, second)
    assert third[0] == {
        'web-vda': 'c' * 8 + 'z' * 12 + 'c' + 'z' * 11, 'web-vdb': 'cccc'}
    expected = bytearray(b'\1' * 16 * MIB + bytes(48 * MIB))
    expected[4 * MIB - 10:4 * MIB + 10] = b'\2' * 20
    expected[40 * MIB:42 * MIB] = b'\2' * 2 * MIB
    assert third[1]['web-vda'] == expected


def test_three_nights_by_ranks(server, tmp_path):
    """Acceptance: the passes read dirty bytes, and backups equal the disks."""
    path = repositories.create(tmp_path / 'repository')
    settings = backup_job.Settings(
        ranks=2, state=str(tmp_path / 'state'), spool=str(tmp_path / 'spool'),
        scratch=str(server.place / 'scratch'), libvirt=server.libvirt.uri)
    disks = {'vda': bytearray(SIZE), 'vdb': bytearray(8 * MIB)}
    nights = []
    for number in range(3):
        for disk, length in (('vda', 10 * MIB), ('vdb', MIB)):
            start = number * 2 * MIB
            server.write(start, length, number + 1, disk)
            disks[disk][start:start + length] = bytes([number + 1]) * length
        when = datetime.datetime(2026, 11, number + 1,
                                 tzinfo=datetime.timezone.utc)
        with image_repository.Repository(path) as repo:
            results = {result.name: result for result in backup_job.Job(
                repo, settings, when, lambda done, total, words: None).run(
                    [backup_job.Source('web', 'server')])}
            assert {name: result.note for name, result in results.items()} == {
                'web-vda': '', 'web-vdb': ''}
            # The second pass reads only blocks that are new.
            assert results['web-vda'].read <= 2 * 1.1 * 10 * MIB
            nights.append({disk: bytes(content)
                           for disk, content in disks.items()})
            for disk in disks:
                assert read_all(repo, results[f'web-{disk}'].backup_id) == (
                    nights[number][disk])
    with image_repository.Repository(path) as repo:
        for backup in repo.backups():
            night = nights[backup.time.day - 1]
            assert read_all(repo, backup.image_id) == (
                night[backup.name.removeprefix('web-')])
    repositories.require_clean(path)


def backed_up(server, place, path, number, work=None):
    """Return the results and notices of a backup by two ranks.

    :param path: the repository's
    :param work: called between the two reads of the server, with the process
        ids of the ranks
    """
    settings = backup_job.Settings(
        ranks=2, state=str(place / 'state'), spool=str(place / 'spool'),
        scratch=str(server.place / 'scratch'), libvirt=server.libvirt.uri)
    events, did = backup_job._events, []

    def watched(process, silence):
        for event in events(process, silence):
            if work and not did and event == {
                    **event, 'event': 'stage', 'stage': 'store'}:
                did.append(event)
                work(batches.ranks_of(process))
                proceed.touch()
            yield event

    with (image_repository.Repository(path) as repo,
          pytest.MonkeyPatch.context() as patch):
        patch.setattr(backup_job, '_events', watched)
        if work:
            proceed = batches.hold(place / f'site-{number}', patch, 'store')
        one = backup_job.Job(repo, settings, datetime.datetime(
            2026, 11, number, tzinfo=datetime.timezone.utc),
            lambda done, total, words: None)
        results = {result.name: result for result in one.run([
            backup_job.Source('web', 'server'),
            backup_job.Source('file', 'disk', str(place / 'file'), 'raw')])}
        assert not results['file'].note
        assert read_all(repo, results['file'].backup_id) == (
            place / 'file').read_bytes()
    assert bool(did) == bool(work)
    assert not server.has_job()
    assert not list((server.place / 'scratch').iterdir())
    assert not [path for path in (place / 'spool').rglob('*')
                if path.is_file()]
    return results, one.notices


@pytest.mark.long
def test_a_server_that_changes_by_ranks(server, tmp_path):
    """A server that ends, crashes or grows is backed up next time.

    The other backups complete.
    """
    path = repositories.create(tmp_path / 'repository')
    (tmp_path / 'file').write_bytes(repositories.noise(SEGMENT, 1))
    server.write(0, 10 * MIB, 1)
    results, _ = backed_up(server, tmp_path, path, 1)
    assert not results['web-vda'].note

    server.write(0, MIB, 2)
    results, _ = backed_up(server, tmp_path, path, 2, lambda ranks: (
        server.virsh('destroy', server.name)))
    assert 'view of web-vda has ended' in results['web-vda'].note
    assert 'Back it up again' in results['web-vda'].note
    server.start()
    results, _ = backed_up(server, tmp_path, path, 3)
    # The base is the last complete backup: only one segment is read, twice.
    assert not results['web-vda'].note
    assert 0 < results['web-vda'].read <= 2 * SEGMENT

    server.kill()               # the bitmap is inconsistent
    server.start()
    results, _ = backed_up(server, tmp_path, path, 4)
    assert not results['web-vda'].note
    assert results['web-vda'].read >= 10 * MIB

    server.virsh('blockresize', server.name, 'vda', f'{SIZE + MIB}B')
    results, _ = backed_up(server, tmp_path, path, 5)
    assert not results['web-vda'].note
    assert results['web-vda'].size == SIZE + MIB
    expected = b'\2' * MIB + b'\1' * 9 * MIB + bytes(SIZE - 9 * MIB)
    with image_repository.Repository(path) as repo:
        assert read_all(repo, results['web-vda'].backup_id) == expected
    repositories.require_clean(path)


def test_a_round_that_is_given_up_ends_its_jobs(server, tmp_path, monkeypatch):
    """Otherwise scratch files would grow unnoticed (B6)."""
    path = repositories.create(tmp_path / 'repository')
    (tmp_path / 'file').write_bytes(repositories.noise(SEGMENT, 1))
    monkeypatch.setattr(backup_job, 'ATTEMPTS', 1)
    server.write(0, 4 * MIB, 1)

    def kill(ranks):
        assert server.has_job()
        batches.kill_all(ranks)
    with pytest.raises(AssertionError, match='broke 1 times'):
        backed_up(server, tmp_path, path, 1, kill)
    assert not server.has_job()
    assert not list((server.place / 'scratch').iterdir())
    monkeypatch.undo()
    results, _ = backed_up(server, tmp_path, path, 2)
    assert not results['web-vda'].note
    repositories.require_clean(path)


def test_both_passes_read_what_was_written(server, monkeypatch):
    server.write(0, 60 * MIB, 1)
    night(server, 1)
    written = 0
    for offset, length in ((2 * MIB, 6 * MIB), (30 * MIB, 4 * MIB)):
        server.write(offset, length, 3)
        written += length
    counted = []
    readinto = nbd_reader.NbdReader.readinto

    def count(self, buffer, offset):
        counted.append(len(buffer))
        readinto(self, buffer, offset)

    monkeypatch.setattr(nbd_reader.NbdReader, 'readinto', count)
    with server.opened(targets=['vda']) as (view,):
        buffer = memoryview(bytearray(SEGMENT))
        for number in range(view.segments):
            if view.scan(number, buffer) == views.Found.DATA:
                view.readinto(buffer[:view.length(number)], number * SEGMENT)
    assert written <= sum(counted) / 2 <= 1.1 * written


def test_a_view_stays_as_it_was(server):
    server.write(0, 8 * MIB, 1)
    night(server, 1)
    with server.opened() as opened:
        server.write(2 * MIB, 2 * MIB, 5)
        server.write(0, MIB, 5, 'vdb')
        vda, vdb = opened
        assert sources.scan(vda) == 'cccc' + 'z' * 28
        data = sources.read(vda)
        assert data[:8 * MIB] == b'\1' * 8 * MIB
        assert sources.scan(vdb) == 'cccc' and not any(sources.read(vdb))
        for view in opened:
            view.commit(f'b_{view.name}_2', sources.UPLOAD)
    with server.opened() as opened:
        assert [view.base.backup_id for view in opened] == [
            'b_web-vda_2', 'b_web-vdb_2']
        assert sources.scan(opened[0]) == 'cdcc' + 'z' * 28
        assert sources.scan(opened[1]) == 'dccc'


def test_without_the_commit_the_old_checkpoint_stays(server):
    """Each disk's checkpoint is replaced only by its own commit (B3)."""
    server.write(0, 8 * MIB, 1)
    night(server, 1)
    old = server.bitmaps()
    server.write(0, MIB, 2)
    with server.opened() as opened:
        sources.scan(opened[0])
        assert len(server.bitmaps()) == 2
    assert server.bitmaps() == old
    with server.opened() as (vda, vdb):
        assert vda.base.backup_id == 'b_web-vda_1'
        assert sources.scan(vda) == 'dccc' + 'z' * 28
        sources.scan(vdb)
        vdb.commit('b_web-vdb_2', sources.UPLOAD)
    with server.opened() as (vda, vdb):
        assert vda.base.backup_id == 'b_web-vda_1'
        assert vdb.base.backup_id == 'b_web-vdb_2'


def in_a_process_that_dies(work):
    """Return `work`'s text from a process that dies and closes nothing."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            os.write(write_end, work().encode())
        os._exit(0)
    os.close(write_end)
    os.waitpid(pid, 0)
    with os.fdopen(read_end) as f:
        return f.read()


def test_a_job_outlives_its_process(server):
    """B5: the view is found again, with the same bytes."""
    server.write(0, 8 * MIB, 1)
    night(server, 1)
    server.write(0, MIB, 2)

    def scan():
        opened = server.open()
        for view in opened:
            sources.scan(view)
        return ' '.join(view.identity for view in opened)

    found = in_a_process_that_dies(scan).split()
    identities = dict(zip(('web-vda', 'web-vdb'), found, strict=True))
    assert server.has_job()
    server.write(0, MIB, 9)
    with server.opened(identities=identities) as opened:
        assert [view.identity for view in opened] == found
        # A scan would find the same.
        assert sources.scan(opened[0]) == 'dccc' + 'z' * 28
        assert sources.read(opened[0])[:MIB] == b'\2' * MIB
        for view in opened:
            view.commit(f'b_{view.name}_2', sources.UPLOAD)
    with pytest.raises(views.SourceError, match='has ended'):
        server.open(identities=identities)
    with server.opened() as (vda, vdb):
        assert (vda.base.backup_id, vdb.base.backup_id) == (
            'b_web-vda_2', 'b_web-vdb_2')
        assert sources.scan(vda) == 'dccc' + 'z' * 28
        assert sources.scan(vdb) == 'cccc'


def test_what_a_dead_process_left_is_removed(server):
    server.write(0, 8 * MIB, 1)
    night(server, 1)
    for _ in range(3):
        in_a_process_that_dies(lambda: server.open()[0].identity)
    assert server.has_job() and len(server.bitmaps()) == 2
    server.write(2 * MIB, MIB, 2)
    found, _ = night(server, 2, night(server, 1))
    assert found['web-vda'] == 'cccc' + 'z' * 28


def test_what_crashed_together_is_removed_with_the_server_shut_off(server):
    """The next backup removes QEMU's socket after both crashed."""
    in_a_process_that_dies(lambda: server.open()[0].identity)
    server.kill()
    assert list((server.place / 'scratch').iterdir())
    with server.opened():
        assert not list((server.place / 'scratch').iterdir())


def test_a_server_that_is_shut_off_while_its_job_ends(server, monkeypatch):
    """libvirt then refuses a job that is over; no file of it is left."""
    from glance_dedup.backup import libvirt_jobs     # which needs libvirt
    running_job = libvirt_jobs._running_job

    def shut_off(domain):
        server.kill()
        return running_job(domain)

    def ask(uri, name, do, **arguments):
        answer = libvirt_jobs.answer(
            {'uri': uri, 'server': name, 'do': do, **arguments})
        if 'error' in answer:
            raise servers._refusal(uri, name, answer['error'], answer['code'])
        return answer
    opened = server.open()
    monkeypatch.setattr(libvirt_jobs, '_running_job', shut_off)
    monkeypatch.setattr(servers, '_ask', ask)
    for view in opened:
        view.close()
    assert not list((server.place / 'scratch').iterdir())


def test_a_server_that_is_gone_leaves_nothing(server):
    """A transient server no longer exists once it is shut off."""
    server.virsh('undefine', server.name, '--checkpoints-metadata')
    opened = server.open()
    server.kill()
    for view in opened:
        view.close()
    assert not list((server.place / 'scratch').iterdir())
    server.virsh('define', server.xml)


def test_a_server_that_is_stopped_ends_its_view(server):
    server.write(0, 8 * MIB, 1)
    night(server, 1)
    server.write(0, MIB, 2)
    with server.opened() as opened:
        buffer = memoryview(bytearray(SEGMENT))
        opened[0].scan(0, buffer)
        server.virsh('destroy', server.name)
        with pytest.raises(views.SourceError, match='view of web-vda has end'):
            opened[0].readinto(buffer, 0)
        for view in opened:
            with pytest.raises(views.SourceError, match='Back it up again'):
                view.check()
    # The disk's file has its bitmaps, so only dirty segments are read.
    server.start()
    with server.opened() as (vda, _):
        assert sources.scan(vda) == 'dccc' + 'z' * 28
    assert len(server.bitmaps()) == 1


def test_a_server_that_is_shut_off_has_files(server):
    server.write(0, 8 * MIB, 1)
    night(server, 1)
    server.virsh('destroy', server.name)
    for number, wanted in enumerate(('dddd', 'cccc'), 2):
        with server.opened() as (vda, vdb):
            assert sources.scan(vda) == wanted + (
                'z' if number == 2 else 'c') * 28
            assert sources.scan(vdb) == 'cccc'
            for view in (vda, vdb):
                view.commit(f'b_{view.name}_{number}', sources.UPLOAD)
    server.start()
    server.write(0, MIB, 2)
    with server.opened() as (vda, vdb):
        # Each hint names its own backup.
        assert vda.base.backup_id == 'b_web-vda_1'
        assert vdb.base.backup_id == 'b_web-vdb_3'
        assert sources.scan(vda) == 'dccc' + 'z' * 28


def test_a_crash_of_qemu_makes_the_whole_disk_dirty(server):
    """Its bitmap was not written, and is inconsistent."""
    server.write(0, 8 * MIB, 1)
    before = night(server, 1)
    server.write(0, MIB, 2)
    server.kill()
    server.start()
    with server.opened() as (vda, _):
        assert vda.base is None
        assert sources.scan(vda) == 'dddd' + 'z' * 28
    second = night(server, 2, before)
    assert second[0]['web-vda'] == 'dddd' + 'z' * 28
    assert second[1] != before[1]
    assert night(server, 3, second)[0]['web-vda'] == 'cccc' + 'z' * 28


def test_a_crash_amid_a_backup(server):
    server.write(0, 8 * MIB, 1)
    night(server, 1)
    with server.opened() as opened:
        server.kill()
        with pytest.raises(views.SourceError):
            opened[0].check()
    server.start()
    night(server, 2)


def test_a_resized_disk_is_dirty(server):
    server.write(0, 8 * MIB, 1)
    first = night(server, 1)
    server.virsh('blockresize', server.name, 'vda', f'{SIZE + MIB}B')
    with server.opened(targets=['vda']) as (view,):
        assert view.size == SIZE + MIB and view.base is None
        assert sources.scan(view) == 'dddd' + 'z' * 29
    # The disk shrinks and grows back: no bitmap shows that.
    server.virsh('blockresize', server.name, 'vda', f'{4 * MIB}B')
    server.virsh('blockresize', server.name, 'vda', f'{SIZE}B')
    assert night(server, 2, first)[0]['web-vda'] == 'cc' + 'z' * 30


def test_a_bitmap_that_somebody_removed(server):
    server.write(0, 8 * MIB, 1)
    night(server, 1)
    server.virsh('destroy', server.name)
    name, = re.findall(f'{checkpoints.PREFIX}[0-9a-f]+',
                       run('qemu-img', 'info', server.place / 'vda'))
    run('qemu-img', 'bitmap', '--remove', server.place / 'vda', name)
    server.start()
    assert night(server, 2)[0]['web-vda'] == 'dddd' + 'z' * 28


def test_a_job_of_another_program_is_left_alone(server, tmp_path):
    (tmp_path / 'job.xml').write_text(
        "<domainbackup mode='pull'><server transport='unix' "
        f"socket='{tmp_path}/other'/></domainbackup>")
    server.virsh('backup-begin', server.name, tmp_path / 'job.xml')
    with pytest.raises(views.SourceError, match='of another program'):
        server.open()
    assert server.has_job()
    server.virsh('domjobabort', server.name)
    night(server, 1)


def test_two_backups_at_once(server):
    with server.opened():
        with pytest.raises(views.SourceError, match='of web-vda is running'):
            server.open()
        with pytest.raises(views.SourceError, match='of web-vdb is running'):
            server.open(targets=['vdb'])
    night(server, 1)


def test_a_view_ends_before_its_scratch_file_is_too_large(server):
    """The view ends at the limit, and the server keeps running."""
    server.settings = server.with_settings(scratch_bytes=4 * MIB)
    server.write(0, 16 * MIB, 1)
    with server.opened() as opened:
        server.write(0, 16 * MIB, 2)

        def ended():
            with contextlib.suppress(views.SourceError):
                opened[0].check()
                return False
            return True

        repositories.eventually(ended)
        with pytest.raises(views.SourceError, match='and may have 4'):
            opened[0].check()
        server.write(0, 16 * MIB, 3)
    assert not server.bitmaps()
    server.settings = server.with_settings(free_bytes=1 << 60)
    with pytest.raises(views.SourceError, match='MiB free, and'):
        server.open()


def test_a_plan_knows_how_fast_a_server_overwrites(server):
    """The plan uses the last backup's rate, and 0 for a server that is off."""
    server.write(0, 16 * MIB, 1)
    assert servers.find(server.settings, 'web') == servers.Found(72 * MIB, 0)
    with server.opened() as opened:
        server.write(0, 16 * MIB, 2)
        assert sources.read(opened[0])[:16 * MIB] == bytes([1]) * 16 * MIB
    found = servers.find(server.settings, 'web')
    assert MIB // 60 < found.written <= 18 * MIB
    with server.opened():
        pass
    assert servers.find(server.settings, 'web').written < found.written
    assert servers.find(server.settings, 'nobody') is None


def test_libvirt_knows_of_no_checkpoint(server):
    """With checkpoints libvirt would refuse to undefine it, as Nova does."""
    with server.opened() as opened:
        assert not server.virsh('checkpoint-list', '--name',
                                server.name).strip()
        for view in opened:
            sources.scan(view)
            view.commit(f'b_{view.name}_1', sources.UPLOAD)
    server.virsh('undefine', server.name)
    server.virsh('define', server.xml)
    assert night(server, 2, night(server, 1))[0]['web-vda'] == 'z' * 32


def test_wrong_names(server):
    with pytest.raises(views.SourceError, match='there is no server none at'):
        servers.open_server(server.settings, 'none')
    with pytest.raises(views.SourceError, match='has no disk vdz'):
        server.open(targets=['vda', 'vdz'])
    with pytest.raises(views.SourceError, match='Give another name'):
        server.open(name='web.example.com')
    with server.opened(name='other', targets=['vdb']) as (view,):
        assert view.name == 'other-vdb'
    settings = servers.Settings(
        str(server.place / 'state'), str(server.place / 'scratch'),
        sources.REPOSITORY, f'qemu+unix:///session?socket={server.place}/no')
    with pytest.raises(views.SourceError, match='cannot be backed up'):
        servers.open_server(settings, 'web')


def test_memory(server):
    """A rank needs at most 35 MB in all."""
    program = (
        'import sys, resource\n'
        'from glance_dedup.repository import image_repository\n'
        'def pss():\n'
        '    for line in open("/proc/self/smaps_rollup"):\n'
        '        if line.startswith("Pss:"):\n'
        '            return int(line.split()[1])\n'
        'before = pss()\n'
        'from glance_dedup.backup import servers\n'
        'from tests.support import sources\n'
        f'opened = servers.open_server(servers.{server.settings!r}, "web")\n'
        'found = [sources.scan(view) for view in opened]\n'
        'after = pss()\n'
        'assert not {"libvirt", "cliff", "oslo_config"} & {*sys.modules}\n'
        'print(after - before)\n')
    server.write(0, 40 * MIB, 1)
    told = run(sys.executable, '-c', program)
    # Two buffers of 2 MiB are the test's.
    assert int(told) < 4096 + 4096, told


class Guest(test_libvirt.Server):
    """A server that boots. It counts its boots on its disk."""

    def __init__(self, libvirt, place, number):
        self.libvirt = libvirt
        self.name = f'guest{number}'
        self.message = f'the disk of {self.name}'
        self.place = place / self.name
        self.place.mkdir()
        self.console = self.place / 'console.log'
        self._domain = self.place / 'domain.xml'
        raw, disk = self.place / 'raw', self.place / 'disk'
        disk_images.variant(disk_images.images().raw, raw, self.message, 8)
        run('qemu-img', 'convert', '-O', 'qcow2', raw, disk)
        self._domain.write_text(test_libvirt.DOMAIN.replace(
            '<name>instance-00000001<',
            f'<uuid>{uuid.UUID(int=number + 1)}</uuid>'
            f'<name>{self.name}<').format(
                disk=test_libvirt.DISK.format(format='qcow2', path=disk),
                console=self.console))

    def press_power_button(self):
        self.virsh('shutdown', self.name)
        self.wait_for(
            lambda: self.name not in self.virsh('list', '--name').split())


@pytest.mark.long
@pytest.mark.needs('bootimage')
@pytest.mark.timeout(1800)
def test_three_nights_of_three_guests(libvirt, short_path, capfd):
    """Three guests boot and are backed up; a restored one boots again."""
    if not shutil.which('qemu-system-x86_64'):
        pytest.skip('QEMU is not installed')
    guests = [Guest(libvirt, short_path, number) for number in range(3)]
    path = repositories.create(short_path / 'repository')
    for name in ('state', 'scratch'):
        (short_path / name).mkdir()
    with image_repository.Repository(path) as repo:
        settings = servers.Settings(
            str(short_path / 'state' / repo.repository_id),
            str(short_path / 'scratch'), repo.repository_id, libvirt.uri,
            free_bytes=0)

    def command(*words):
        capfd.readouterr()
        status = entry.main(['--repository', str(path), 'backup',
                             *map(str, words), '-f', 'json'])
        out, err = capfd.readouterr()
        assert status == 0, err
        return json.loads(out)

    nights = []
    for number in (1, 2, 3):
        for guest in guests:
            guest.start()
        for guest in guests:
            assert guest.shown() == (guest.message, number)
        dirty = {guest.name: _dirty_bytes(settings, guest.name)
                 for guest in guests}
        nights.append({row['name']: row for row in command(
            'run', '--local', 3, '--libvirt', libvirt.uri, '--spool',
            short_path / 'spool', '--state', short_path / 'state',
            '--scratch', short_path / 'scratch', *dirty)})
        assert set(nights[-1]) == {f'{name}-vda' for name in dirty}
        for name, length in dirty.items():
            row = nights[-1][f'{name}-vda']
            if number > 1:
                # Acceptance: each of the two passes reads at most 1.1 times
                # the bytes.
                assert 0 < row['read_bytes'] <= 2 * 1.1 * length
                assert length < row['size'] / 4
        for guest in guests:
            guest.press_power_button()
    restored = short_path / 'restored'
    restored.mkdir()
    backup = imageids.of_backup(nights[1]['guest1-vda']['backup_id'])
    command('restore', backup.name, restored / 'disk.raw', '--at',
            backup.time.isoformat())
    with nbd.Guest(restored, restored / 'disk.raw') as guest:
        assert guest.wait_until_up() == (guests[1].message, 3)
    repositories.require_clean(path)


def _dirty_bytes(settings, name):
    """Return the bytes of a disk's segments that were written to."""
    view, = servers.open_server(settings, name)
    with view:
        return sources.scan(view).count('d') * SEGMENT
