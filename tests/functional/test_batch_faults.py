# SPDX-License-Identifier: Apache-2.0

"""Batch backups when a host, a disk, the repository or an operator fails.

The ranks are real, and those of several hosts have names and mounts of their
own. The others' backups complete, the error says what to do, and no file of
the run is left.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from dedupd.tasks import merger
from glance_dedup import _engine
from glance_dedup.backup import backup_job
from glance_dedup.backup import images
from glance_dedup.backup import places
from glance_dedup.backup import stages
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import imageids
from glance_dedup.base import pacing
from glance_dedup.cli import entry
from glance_dedup.repository import image_repository
from tests.support import batches
from tests.support import maintenance
from tests.support import processes
from tests.support import repositories

pytestmark = pytest.mark.slow

SEGMENT = batches.SEGMENT
LIMIT = 120


@pytest.fixture
def cloud(tmp_path):
    return batches.Cloud(tmp_path)


class Rack(batches.Cloud):
    """Two hosts; each has two of the disks."""

    def __init__(self, tmp_path, monkeypatch):
        super().__init__(tmp_path)
        self.hosts = batches.Hosts(tmp_path / 'hosts', monkeypatch)
        self.settings = dataclasses.replace(
            self.settings, hosts=self.hosts.names)
        for name in self.hosts.names:
            (tmp_path / name).mkdir()
            self.hosts.mount(name, tmp_path / name, self.disks.directory)
        for number in range(4):
            (tmp_path / self.hosts.names[number // 2] / f'disk{number}'
             ).write_bytes((self.disks.directory / f'disk{number}'
                            ).read_bytes())

    def require_only(self, results, names, error):
        """These were backed up, and the others were not, for this reason."""
        digests = self.disks.digests()
        assert self.backups() == {name: digests[name] for name in names}
        for name in results.keys() - names:
            assert re.search(error, results[name].note), results[name].note
        assert not any(results[name].note for name in names)


@pytest.fixture
def rack(tmp_path, monkeypatch):
    return Rack(tmp_path, monkeypatch)


# -- hosts --------------------------------------------------------------------

STAGES = ('scan', 'answer', 'store', 'resolve', 'finish')
# Bytes of the spool's disk on the second host, and the stage it fails in.
ROOM = {4096: 'scan', 172032: 'scan', 245760: 'answer', 301056: 'store',
        331776: 'resolve'}


@pytest.mark.parametrize('size', ROOM)
def test_host_without_room_for_its_spool(rack, tmp_path, size):
    """The host gives up its own disks; the others' backups are complete."""
    reached = []
    with repositories.small_disk(tmp_path / 'small', size) as small:
        rack.spool.mkdir()
        rack.hosts.mount('two', small, rack.spool)
        with pytest.MonkeyPatch.context() as patch:
            results = rack.run(
                watch=lambda process, event: reached.append(event),
                monkeypatch=patch)
        assert not [path for path in small.rglob('*') if path.is_file()]
    rack.require_only(results, {'disk0', 'disk1'},
                      'on two the spool .* No space left on device. Make room '
                      r'there, or give another directory \(--spool\)')
    assert any('two: the spool' in text for text in rack.notices)
    assert not any('broke' in text for text in rack.notices)
    rack.require_nothing_left()
    mine = [event.get('stage', '') for event in reached
            if event['rank'] == 1 and event['event'] in ('stage', 'notice')]
    assert mine.index('') == STAGES.index(ROOM[size]), mine


def test_host_without_room_and_without_disks(rack, tmp_path):
    """A host that only compares gives up; equal blocks are stored twice."""
    with repositories.small_disk(tmp_path / 'small', 4096) as small:
        rack.spool.mkdir()
        rack.hosts.mount('two', small, rack.spool)
        results = rack.run(sources=rack.disks.sources()[:2])
    rack.require_only(results, {'disk0', 'disk1'}, 'unused')


def test_host_that_may_not_write_its_spool(rack, tmp_path):
    file = tmp_path / 'file'
    file.touch()
    rack.spool.mkdir()
    with open(rack.hosts.directory / 'two', 'a') as mounts:
        mounts.write(f'mount --bind -o ro {rack.spool} {rack.spool}\n')
    rack.require_only(rack.run(), {'disk0', 'disk1'}, 'Read-only file system')


def test_host_with_another_version(rack, tmp_path):
    """A real second installation: its package has another number."""
    mine, = pathlib.Path(sys.prefix).glob(
        'lib/python3*/site-packages/glance_dedup-*.dist-info')
    other = tmp_path / 'other'
    shutil.copytree(mine, other)
    text = (other / 'METADATA').read_text()
    (other / 'METADATA').write_text(
        re.sub('^Version: .*$', 'Version: 99.1', text, flags=re.MULTILINE))
    rack.hosts.mount('two', other, mine)
    rack.require_only(rack.run(), {'disk0', 'disk1'},
                      r'These hosts were left out: two')
    assert re.search(r"it has version '99\.1' .*install one version on all",
                     rack.lost['two'])
    rack.require_nothing_left()


def test_host_with_another_repository(rack, tmp_path):
    other = repositories.create(tmp_path / 'other')
    rack.hosts.mount('two', other, rack.path)
    with pytest.raises(Exception, match='on two, .* is another repository'):
        rack.run()
    assert rack.backups() == {}
    rack.require_nothing_left()


# -- ranks --------------------------------------------------------------------

class Once:
    """Does something in a stage, once for each of so many tries.

    The first stage has begun when a rank has opened a disk.
    """

    def __init__(self, stage, work, times=1):
        self.stage = stage
        self.work = work
        self.left = times

    def __call__(self, process, event):
        begun = 'scan' if event['event'] == 'view' else event.get('stage')
        if self.left and event['event'] in ('view', 'stage') and (
                begun == self.stage):
            self.left -= 1
            self.work(process)


def test_slow_rank(cloud, monkeypatch):
    """A rank that stops for some seconds delays the run, and no more."""
    def pause(process):
        rank = batches.ranks_of(process)[1]
        processes.stop(rank)
        proceed.touch()
        threading.Timer(3, os.kill, (rank, signal.SIGCONT)).start()
    proceed = batches.hold(cloud.path.parent / 'site', monkeypatch, 'answer')
    results = cloud.run(watch=Once('answer', pause), monkeypatch=monkeypatch)
    assert not any(result.note for result in results.values())
    assert not any('broke' in text for text in cloud.notices)
    assert cloud.backups() == cloud.disks.digests()
    cloud.require_nothing_left()


def limit_silence(cloud, monkeypatch):
    """Have a rank count as hung that shows no life for ten seconds."""
    cloud.settings = dataclasses.replace(cloud.settings, silence=10.0)
    # Starting Python may take longer on a busy machine.
    events = backup_job._events
    monkeypatch.setattr(backup_job, '_events',
                        lambda process, silence: events(process, LIMIT))


# Long: the ranks wait ten seconds for one that hangs.
def test_rank_that_hangs(cloud, monkeypatch):
    """The other ranks wait for the limit; then the round is run again."""
    limit_silence(cloud, monkeypatch)

    def stop(process):
        processes.stop(batches.ranks_of(process)[1])
        proceed.touch()
    proceed = batches.hold(cloud.path.parent / 'site', monkeypatch, 'answer')
    results = cloud.run(watch=Once('answer', stop), monkeypatch=monkeypatch)
    assert not any(result.note for result in results.values())
    assert any(re.search('broke, time 1 of 3: .*waited 10 s for others', text)
               for text in cloud.notices)
    assert cloud.backups() == cloud.disks.digests()
    cloud.require_nothing_left()


STORE_SLOWLY = """
from glance_dedup.backup import stages
import time
store = stages.Round.store
def store_slowly(self):
    if self._ranks.rank == 1:
        for _ in range(25):
            time.sleep(1)
            self._progress('store', 1)
    store(self)
stages.Round.store = store_slowly
"""


# Long: the other ranks wait 25 seconds for a rank that stores.
def test_rank_that_stores_long(cloud, tmp_path, monkeypatch):
    """A rank that makes progress without records does not count as hung."""
    limit_silence(cloud, monkeypatch)
    batches.in_ranks(tmp_path / 'site', monkeypatch, STORE_SLOWLY)
    results = cloud.run()
    assert not any('broke' in text for text in cloud.notices)
    assert not any(result.note for result in results.values())
    assert cloud.backups() == cloud.disks.digests()
    cloud.require_nothing_left()


DAMAGE = """
from glance_dedup.backup import rank_exchange
import os
pack = rank_exchange.pack
def damage(kind, payload):
    message = pack(kind, payload)
    if kind != b'scan' or os.path.exists({mark!r}):
        return message
    open({mark!r}, 'w').close()
    return {how}
rank_exchange.pack = damage
"""


@pytest.mark.parametrize('how', [
    'message[:-5]', 'message[:60] + bytes([message[60] ^ 1]) + message[61:]'])
def test_damaged_message(cloud, tmp_path, monkeypatch, how):
    """A message that is cut off, or has one wrong bit, does no harm (B7)."""
    mark = tmp_path / 'mark'
    batches.in_ranks(tmp_path / 'site', monkeypatch,
                     DAMAGE.format(mark=str(mark), how=how))
    results = cloud.run()
    assert mark.exists()
    assert any('do not agree with its head' in text for text in cloud.notices)
    assert not any(result.note for result in results.values())
    assert cloud.backups() == cloud.disks.digests()
    cloud.require_nothing_left()


# Long: ranks start twice for each of five backups.
@pytest.mark.timeout(3600)
@pytest.mark.parametrize('nights', [
    pytest.param(5, marks=pytest.mark.slow),
    pytest.param(100, marks=pytest.mark.long)])
def test_nights_with_a_dead_rank(cloud, monkeypatch, nights):
    """Acceptance: in each stage, 20 times, another rank dies each time."""
    for night, stage in zip(range(nights), itertools.cycle(STAGES)):
        path = cloud.disks.directory / f'disk{night % 4}'
        with open(path, 'r+b') as disk:
            disk.seek(night * 65536)
            disk.write(repositories.noise(70000, 1000 + night))
        kill = Once(stage, lambda process, night=night: batches.kill_all(
            batches.ranks_of(process)[night % 3:][:1]))
        results = cloud.run(night, watch=kill, monkeypatch=monkeypatch)
        assert not kill.left
        assert not [result for result in results.values() if result.note], (
            cloud.notices)
        assert cloud.backups(night) == cloud.disks.digests()
    cloud.run(nights)
    cloud.require_nothing_left()


# -- the repository -----------------------------------------------------------

def merge(path):
    """Do the daemon's work of a night: it makes and mends the index, too."""
    with (repositories.open_repository(path) as repo,
          maintenance.maintaining(repo, wait=10) as maintainer):
        maintenance.account(maintainer)
        result = merger.run_once(maintainer, pacing.Pace())
        assert not result.failed, result


# Long: ranks start for each of four backups.
def test_index_that_is_missing_or_damaged(cloud):
    """A notice reports the missing or damaged index, and how to repair it."""
    cloud.run()
    assert [text for text in cloud.notices if 'has no exact index' in text
            and 'glance-dedup task merge' in text]
    merge(cloud.path)
    (cloud.disks.directory / 'copy').write_bytes(
        (cloud.disks.directory / 'disk1').read_bytes())
    results = cloud.run(1)
    assert not cloud.notices and results['copy'].stored == 0
    shards = [path for path in (cloud.path / 'index').rglob('*')
              if path.is_file() and path.stat().st_size > 4096]
    assert shards
    for shard in shards:
        repositories.ruin(shard, shard.stat().st_size // 2)
    (cloud.disks.directory / 'copy2').write_bytes(
        (cloud.disks.directory / 'disk1').read_bytes())
    results = cloud.run(2)
    assert [text for text in cloud.notices if re.search(
        '[0-9]+ files of the exact index .* could not be read', text)]
    assert results['copy2'].stored > 0
    assert cloud.backups(2) == cloud.disks.digests()
    merge(cloud.path)
    cloud.run(3)
    assert not cloud.notices
    cloud.require_nothing_left()


def test_new_bytes_are_those_of_the_recipe(cloud, capfd):
    """`backup list` and `backup run` show the same number of new bytes."""
    results = cloud.run()
    with image_repository.Repository(cloud.path) as repo:
        stats = {name: repo.stat(result.backup_id)
                 for name, result in results.items()}
    for name, stat in stats.items():
        assert stat.new_bytes == results[name].stored > 0
        assert stat.stored_bytes >= stat.new_bytes      # noise
    assert entry.main(['--repository', str(cloud.path), 'backup', 'list',
                       '-f', 'value', '-c', 'new_bytes']) == 0
    assert capfd.readouterr().out.split() == [
        str(stats[name].new_bytes) for name in sorted(stats)]


def test_base_that_is_pruned_before_the_second_try(cloud, monkeypatch):
    """Without its base, a disk is read whole in the second try (B4)."""
    cloud.run()
    for path in cloud.disks.directory.iterdir():
        with open(path, 'r+b') as disk:
            disk.seek(2 * SEGMENT)
            disk.write(b'new')

    def kill(process):
        batches.kill_all(batches.ranks_of(process))
        time.sleep(1)           # they have the recipes open
        with image_repository.Repository(cloud.path) as repo:
            for backup in repo.backups():
                repo.delete(backup.image_id)
        cloud.collect()
        proceed.touch()
    proceed = batches.hold(cloud.path.parent / 'site', monkeypatch, 'store')
    results = cloud.run(1, Once('store', kill), monkeypatch=monkeypatch)
    assert any('broke, time 1' in text for text in cloud.notices)
    assert not any(result.note for result in results.values())
    assert cloud.backups(1) == cloud.disks.digests()
    cloud.require_nothing_left()


def test_image_that_is_deleted_before_it_is_referred_to(cloud, monkeypatch):
    """Blocks of an image that is deleted meanwhile are stored again (B1)."""
    with image_repository.Repository(cloud.path) as repo:
        for source in cloud.disks.sources():
            repositories.put(repo, f'of-{source.name}', pathlib.Path(
                source.path).read_bytes())
    merge(cloud.path)
    gone = []

    def delete(process):
        with image_repository.Repository(cloud.path) as repo:
            for image_id in list(repo.images()):
                repo.delete(image_id)
        before = len(maintenance.live_slots(cloud.path))
        cloud.collect()
        gone.append(before - len(maintenance.live_slots(cloud.path)))
        proceed.touch()

    proceed = batches.hold(cloud.path.parent / 'site', monkeypatch, 'store')
    results = cloud.run(watch=Once('store', delete), monkeypatch=monkeypatch)
    assert gone[0] > 1000
    assert not any(result.note for result in results.values())
    assert cloud.backups() == cloud.disks.digests()
    assert sum(result.stored for result in results.values()) > 0
    cloud.require_nothing_left()


def is_in_index(path, data):
    """Return true if the index has an address for each of the blocks."""
    with (image_repository.Repository(path) as repo,
          contextlib.closing(_engine.Index(repo.handle(), None)) as index):
        answers, waiting, _ = index.answer(_engine.index_sort(
            _engine.requests_of(repo.handle().scan(data), 0)))
    return not waiting and all(
        any(answers[at + 8:at + 13]) for at in range(0, len(answers), 13))


def test_index_that_is_stale(cloud):
    """The index has addresses of blocks that were freed long ago (B1)."""
    with image_repository.Repository(cloud.path) as repo:
        for source in cloud.disks.sources():
            repositories.put(repo, f'of-{source.name}', pathlib.Path(
                source.path).read_bytes())
    merge(cloud.path)
    with image_repository.Repository(cloud.path) as repo:
        for image_id in list(repo.images()):
            repo.delete(image_id)
    cloud.collect()
    assert not maintenance.live_slots(cloud.path)
    own = repositories.noise(SEGMENT, 1)        # a part of disk1
    assert is_in_index(cloud.path, own)
    results = cloud.run()
    assert not any(result.note for result in results.values())
    assert cloud.backups() == cloud.disks.digests()
    cloud.require_nothing_left()


def test_restoring_a_pruned_backup(cloud, tmp_path, capfd):
    cloud.run()
    cloud.run(1)
    with image_repository.Repository(cloud.path) as repo:
        repo.delete(imageids.backup_id('disk0', cloud.time(0)))
    place = ['--repository', str(cloud.path), 'backup', 'restore', 'disk0',
             str(tmp_path / 'restored')]
    assert entry.main([*place, '--at', '2026-11-20']) == 3
    told = capfd.readouterr().err
    assert 'disk0' in told and '2026-11-21' in told, told
    assert not (tmp_path / 'restored').exists()
    assert entry.main(place) == 0
    assert (tmp_path / 'restored').read_bytes() == (
        cloud.disks.directory / 'disk0').read_bytes()


# -- digests ------------------------------------------------------------------

def with_head(data, drop=(), **fields):
    """Return a file of digests with another head, otherwise intact."""
    head = json.loads(data[:4096])
    for name in ('kind', 'version', 'checksum', *drop):
        del head[name]
    return files.pack_json('segment digests', **{**head, **fields}).ljust(
        4096) + data[4096:]


def of_before_the_keys(data):
    """Return a file as when a digest was SHA-256, without a key of its own."""
    old = with_head(data, drop=('digest_key',))
    key = bytes.fromhex(json.loads(old[:4096])['key'])
    page = hashlib.sha256(b'segment').digest() * 127
    return old[:4096] + page + hashlib.sha256(key + bytes(8) + page).digest()


#: Damaged forms of a file of digests, made from it and another disk's.
DIGESTS = {
    'cut': lambda data, other: data[:-1],
    'without-pages': lambda data, other: data[:4096],
    'empty': lambda data, other: b'',
    'bit-of-a-digest': lambda data, other: (
        data[:4100] + bytes([data[4100] ^ 1]) + data[4101:]),
    'bit-of-the-head': lambda data, other: (
        data[:200] + bytes([data[200] ^ 1]) + data[201:]),
    'zeros': lambda data, other: data[:4096] + bytes(4096),
    'other-key': lambda data, other: with_head(data, digest_key='ab' * 32),
    'other-seal': lambda data, other: with_head(data, key='ab' * 16),
    'other-page': lambda data, other: data[:4096] + other[4096:],
    'old-layout': lambda data, other: of_before_the_keys(data),
}


def write_new(cloud, night):
    """Write new bytes into the third segment of each disk."""
    for number, source in enumerate(cloud.disks.sources()):
        with open(source.path, 'r+b') as disk:
            disk.seek(2 * SEGMENT)
            disk.write(repositories.noise(SEGMENT, 1000 * night + number))


def test_digests_that_are_damaged(cloud):
    """Disks with damaged digests are read again; no backup is wrong (B3)."""
    for name in ('whole', *DIGESTS):
        shutil.copy(cloud.disks.directory / 'disk0',
                    cloud.disks.directory / name)
    cloud.run()
    places_ = {path.stem: path for path in cloud.state.rglob('*.digests')}
    first = {name: path.read_bytes() for name, path in places_.items()}
    for name, damage in DIGESTS.items():
        places_[name].write_bytes(damage(first[name], first['whole']))
    write_new(cloud, 1)
    results = cloud.run(1)
    assert cloud.backups(1) == cloud.disks.digests()
    again = {name for name, result in results.items()
             if result.read > 3 * SEGMENT}
    assert again == set(DIGESTS)

    # Now the files are intact again. One file is that of the night before,
    # which is as good as its base; one is of another disk, and names that
    # disk's backup.
    places_['cut'].write_bytes(first['whole'])
    places_['whole'].write_bytes(first['whole'])
    write_new(cloud, 2)
    results = cloud.run(2)
    assert cloud.backups(2) == cloud.disks.digests()
    assert all(result.read < 3 * SEGMENT and not result.note
               for result in results.values())
    cloud.require_nothing_left()


# -- the command --------------------------------------------------------------

def ranks_in(session):
    """Return the ranks that a command has started."""
    found = []
    for path in pathlib.Path('/proc').glob('[0-9]*'):
        try:
            words = (path / 'cmdline').read_bytes().split(b'\0')
            if (words[1:3] == [b'-m', b'glance_dedup.backup.rank']
                    and os.getsid(int(path.name)) == session):
                found.append(int(path.name))
        except (OSError, ProcessLookupError):
            continue
    return found


@pytest.fixture
def large(tmp_path):
    """Disks large enough that a backup takes a while."""
    cloud = batches.Cloud(tmp_path, 2)
    for number in range(4):
        with open(cloud.disks.directory / f'disk{number}', 'ab') as disk:
            disk.write(repositories.noise(8 * SEGMENT, 200 + number))
    return cloud


# Long: the command and its ranks start twice.
@pytest.mark.parametrize('kind', [
    signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_command_that_is_killed(large, monkeypatch, kind):
    """A killed command's ranks end; the next run removes what they left.

    The next run also reports that it removed a file.
    """
    proceed = batches.hold(large.path.parent / 'site', monkeypatch, 'answer')
    command = large.start()
    repositories.eventually(
        lambda: list(large.spool.rglob('done-scan')), LIMIT)
    os.kill(command.pid, kind)
    if kind == signal.SIGKILL:
        command.wait(LIMIT)
        proceed.touch()
    _, told = command.communicate(timeout=LIMIT)
    repositories.eventually(lambda: not ranks_in(command.pid), LIMIT)
    if kind != signal.SIGKILL:
        assert command.returncode == entry.INTERRUPTED
        assert 'glance-dedup: interrupted' in told
        large.require_nothing_left()
    # If only the command is killed, its ranks may complete the round first.
    left = bool(large.spooled())
    proceed.touch()
    done = large.start()
    out, told = done.communicate(timeout=LIMIT)
    assert done.returncode == 0, told
    assert ('a round that was not completed left it' in told) == left
    with image_repository.Repository(large.path) as repo:
        found = {}
        for backup in repo.backups():       # the newest is the last
            with repo.open_image(backup.image_id) as image:
                found[backup.name] = batches.digest_of(image.pieces())
    assert found == large.disks.digests()
    large.require_nothing_left()


def test_two_commands_at_once(large, monkeypatch):
    """The second command is refused for each disk; the first completes."""
    with monkeypatch.context() as patch:
        proceed = batches.hold(large.path.parent / 'site', patch, 'answer')
        first = large.start()
    repositories.eventually(
        lambda: list(large.spool.rglob('done-scan')), LIMIT)
    second = subprocess.run(
        large.command(), stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=LIMIT)
    proceed.touch()
    out, told = first.communicate(timeout=LIMIT)
    assert (first.returncode, second.returncode) == (0, 3), told
    for name in large.disks.digests():
        assert f'another backup of {name} is running on this host' in (
            second.stderr)
    assert 'None' not in second.stdout
    with image_repository.Repository(large.path) as repo:
        assert len(repo.backups()) == 4
    large.require_nothing_left()


def test_recipe_without_its_base_is_refused(cloud):
    """A run never omits segments silently."""
    disk = cloud.disks.sources()[0]
    with (image_repository.Repository(cloud.path) as repo,
          places.Place(str(cloud.state), disk.name, 'x') as place,
          images.open_disk(place, disk.path, 'raw') as view,
          stages.Recipe(
              repo.begin('b_disk0_20261120T220000Z', '', bytes(16)),
              stages.Task(view, disk.name, '', None),
              memoryview(bytearray(SEGMENT))) as recipe):
        recipe.add_segment(0, None)
        with pytest.raises(exceptions.DamagedError, match='segments of disk0'):
            recipe.flush()
