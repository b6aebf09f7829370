# SPDX-License-Identifier: Apache-2.0
"""Batch backups by real ranks on one host: every disk comes back, whatever
dies, and equal blocks of different ranks are stored once."""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import venv

import pytest

from dedupd.tasks import converter
from glance_dedup.backup import backup_job
from glance_dedup.backup import places
from glance_dedup.backup import rank_exchange
from glance_dedup.backup import reachable_hosts
from glance_dedup.base import exceptions
from glance_dedup.base import imageids
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import image_repository
from tests.support import batches
from tests.support import maintenance
from tests.support import qcow2files
from tests.support import repositories
from tests.support.repositories import noise
from tests.unit.dedupd.tasks import collecting

LIMIT = 300
# Weight with which each disk gets a round of its own.
ALONE = 1.0
STAGES = ['scan', 'answer', 'store', 'resolve', 'finish']


@pytest.fixture
def cloud(tmp_path):
    return batches.Cloud(tmp_path)


def test_equal_blocks_are_stored_once(cloud):
    results = cloud.run()
    assert cloud.backups() == cloud.disks.digests()
    # Each disk has four times 2 MiB and a rest of its own, and 4 MiB in
    # common.
    assert sum(result.stored for result in results.values()) == (
        2 * batches.SEGMENT + 4 * (batches.SEGMENT + 5000))
    assert not cloud.spooled()
    cloud.require_clean()


def test_second_night_reads_what_changed(cloud):
    cloud.run()
    first = cloud.disks.digests()
    path = cloud.disks.directory / 'disk1'
    with open(path, 'r+b') as disk:
        disk.seek(batches.SEGMENT + 70000)
        disk.write(repositories.noise(9000, 77))
    results = cloud.run(night=1)
    assert cloud.backups() == first
    assert cloud.backups(1) == cloud.disks.digests() != first
    # Blocks of 4096 bytes, of which the first and the last changed in part.
    assert results['disk1'].stored == 12288
    assert {name: result.read > 0 for name, result in results.items()} == {
        'disk0': False, 'disk1': True, 'disk2': False, 'disk3': False}
    cloud.require_clean()


def test_backup_with_a_disk_is_no_base(cloud):
    """The extents of a backup that is kept as its disk are not the file's."""
    disks = cloud.disks.directory
    content = (disks / 'disk0').read_bytes()
    streams = [qcow2files.deflated(noise(2000, seed).hex().encode().ljust(
        qcow2files.CLUSTER, b'.')) for seed in range(400)]
    file = qcow2files.file_of(streams)
    (disks / 'disk0').write_bytes(file + content)
    cloud.run()
    backup_id = imageids.backup_id('disk0', cloud.time(0))
    with (image_repository.Repository(cloud.path) as repo,
          maintenance.maintaining(repo) as maintainer):
        maintenance.account(maintainer)
        assert convert_in_any_case(maintainer, backup_id).images == 1
    with open(disks / 'disk0', 'r+b') as disk:
        disk.seek(len(file))
        disk.write(b'changed')
    cloud.run(1)
    assert cloud.backups(1) == cloud.disks.digests()
    cloud.require_clean()


def convert_in_any_case(maintainer, image_id):
    """Convert an image, a backup, too, as an older version would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(imageids, 'of_backup', lambda image_id: None)
        return converter.run_once(maintainer, pacing.Pace(), [image_id])


def test_backup_that_is_gone_is_no_base(cloud):
    """The next run reads a disk again if the backup before was deleted."""
    cloud.run()
    with image_repository.Repository(cloud.path) as repo:
        repo.delete(imageids.backup_id('disk0', cloud.time(0)))
    results = cloud.run(night=1)
    assert cloud.backups(1) == cloud.disks.digests()
    assert results['disk0'].read > 0 and results['disk1'].read == 0


DEATH = """
import os, signal
from glance_dedup.backup import stages
work = stages.Round.{stage}
def die(round_, *arguments):
    if round_._ranks.rank == 1 and not os.path.exists({mark!r}):
        open({mark!r}, 'w').close()
        os.kill(os.getpid(), signal.SIGKILL)
    work(round_, *arguments)
stages.Round.{stage} = die
"""


@pytest.mark.parametrize('stage', STAGES)
def test_rank_that_is_killed(cloud, stage, tmp_path, monkeypatch):
    """The round is run again, and no file of the first try is in the way."""
    mark = tmp_path / 'mark'
    batches.in_ranks(tmp_path / 'site', monkeypatch,
                     DEATH.format(stage=stage, mark=str(mark)))
    results = cloud.run()
    assert mark.exists()
    assert [result.note for result in results.values()] == [''] * 4
    assert cloud.backups() == cloud.disks.digests()
    # If all backups were complete, the next run on the host tidies up.
    cloud.run(night=1)
    assert not cloud.spooled()
    cloud.require_clean()


def test_server_ends_with_its_last_disk():
    """If a rank dies between two disks, the next attempt has the second."""
    results, left = {}, {'web': {}, 'mail': {}}
    watch = backup_job.Watch(results, {}, left, 1, lambda *progress: None)
    for name in 'web-vda', 'web-vdb':
        watch.note({'event': 'view', 'source': 'web', 'name': name,
                    'identity': 'x'})
    facts = {'backup_id': 'b', 'size': 1, 'read': 1, 'stored': 1, 'note': ''}
    watch.note({'event': 'backup', 'source': 'web', 'name': 'web-vda',
                **facts})
    assert set(left) == {'web', 'mail'}
    watch.note({'event': 'failed', 'source': 'web', 'name': 'web-vdb',
                'error': 'its disk is gone'})
    assert set(left) == {'mail'}
    watch.note({'event': 'failed', 'source': 'mail', 'name': 'mail',
                'error': 'it cannot be opened'})
    assert not left and len(results) == 3


def test_a_host_that_names_another_as_its_own(monkeypatch):
    """Neither an unknown host, nor one with a new name, ends the run."""
    job = backup_job.Job(
        None, backup_job.Settings(hosts=('one', 'two')), batches.NIGHT,
        lambda *progress: None)
    answers = iter([('one', 'two'), ('one', 'new')])

    def reach(names):
        return [reachable_hosts.Host(name, nodename, frozenset())
                for name, nodename in zip(names, next(answers))], {}

    def run_ranks(order, hosts, note):
        for name, host in (('a', 'none\x1b[2J'), ('b', 'two'), ('a', 'one')):
            note({'event': 'source', 'rank': 0, 'name': name, 'host': host,
                  'size': 1, 'written': 0})
    monkeypatch.setattr(reachable_hosts, 'reach', reach)
    monkeypatch.setattr(job, '_run_ranks', run_ranks)
    found = job._find([backup_job.Source(name, 'disk') for name in 'ab'])
    assert {name: source['host'] for name, source in found.items()} == {
        'a': 'one', 'b': 'two'}
    notice, = job.notices
    assert 'none' in notice and 'takes no part' in notice
    assert notice.isprintable()
    job._give_up_lost(found, job._reach())
    assert set(found) == {'a'}
    result, = job.missing()
    assert 'host two' in result.note and 'another hostname' in result.note


def test_servers_whose_views_do_not_fit_together():
    """Two servers too large for one round get one each; none is refused."""
    settings = backup_job.Settings(views=1 << 30, weight=0.0)
    job = backup_job.Job(None, settings, batches.NIGHT, lambda *progress: None)

    def rounds_at(written):
        return [[disk.name for disk in part] for part in job._plan({
            name: {'host': 'here', 'size': 100 << 30, 'written': written}
            for name in ('mail', 'web')}).rounds]
    assert rounds_at(0) == [['mail', 'web']]
    # Each takes 1,079 s, and both together twice as long.
    assert rounds_at(200_000) == [['mail', 'web']]
    assert rounds_at(300_000) == [['mail'], ['web']]
    assert rounds_at(1 << 60) == [['mail'], ['web']]


def test_round_that_breaks_each_time(cloud, monkeypatch):
    """The sources are given up with a reason; the next run succeeds."""
    # No rank gets leave to proceed, so each round breaks here.
    batches.hold(cloud.path.parent / 'site', monkeypatch, 'scan')

    def kill(process, event):
        if event['event'] == 'view':
            batches.kill_all(batches.ranks_of(process)[:1])
    results = cloud.run(watch=kill, monkeypatch=monkeypatch)
    assert all('broke 3 times' in result.note for result in results.values())
    assert cloud.backups() == {}
    assert all(not result.note for result in cloud.run().values())
    assert cloud.backups() == cloud.disks.digests()
    cloud.require_clean()


def test_disk_that_changes_meanwhile(cloud, monkeypatch):
    """The changed disk's backup is given up; the others complete (B2, B5)."""
    changed = []
    proceed = batches.hold(cloud.path.parent / 'site', monkeypatch, 'answer')

    def change(process, event):
        if event['event'] == 'stage' and not changed:
            changed.append(cloud.disks.directory / 'disk2')
            with open(changed[0], 'r+b') as disk:
                disk.write(b'new')
            proceed.touch()
    results = cloud.run(watch=change, monkeypatch=monkeypatch)
    assert 'changed' in results['disk2'].note
    digests = cloud.disks.digests()
    del digests['disk2']
    assert cloud.backups() == digests
    cloud.require_clean()


def test_source_that_is_nowhere(cloud):
    results = cloud.run(sources=[
        *cloud.disks.sources(),
        backup_job.Source('gone', 'disk', '/nonexistent/disk')])
    assert 'found on no host' in results['gone'].note
    assert cloud.backups() == cloud.disks.digests()


def test_two_backups_of_one_disk(cloud):
    """The second backup is refused, and says that another one runs."""
    with image_repository.Repository(cloud.path) as repo:
        repository_id = repo.repository_id
    with places.Place(str(cloud.state / repository_id), 'disk0',
                      repository_id):
        results = cloud.run()
    assert 'another backup of disk0' in results['disk0'].note
    digests = cloud.disks.digests()
    del digests['disk0']
    assert cloud.backups() == digests


def test_a_rank_fails_once_while_ranks_look(cloud, tmp_path, monkeypatch):
    """The command searches for the disks again, and reports it."""
    batches.in_ranks(tmp_path / 'site', monkeypatch, f"""
from glance_dedup.backup import rank_exchange
import os
agree = rank_exchange.Ranks.agree
def fails_once(self, value):
    try:
        os.mkdir({str(tmp_path / 'failed')!r})
    except FileExistsError:
        return agree(self, value)
    raise Exception('it failed')
rank_exchange.Ranks.agree = fails_once
""")
    results = cloud.run()
    assert not [result for result in results.values() if result.note]
    assert [notice for notice in cloud.notices if re.fullmatch(
        'looking for the disks broke, time 1 of 3: .*it failed', notice)]
    assert cloud.backups() == cloud.disks.digests()


def test_a_rank_refuses_to_work(cloud, tmp_path, monkeypatch):
    """The run ends at once, since the rank would refuse again."""
    batches.in_ranks(tmp_path / 'site', monkeypatch, """
from glance_dedup.backup import rank_exchange
from glance_dedup.base import exceptions
def refuses(self, value):
    raise exceptions.VersionError('another version')
rank_exchange.Ranks.agree = refuses
""")
    with pytest.raises(backup_job.Broken, match='another version'):
        cloud.run()
    assert not cloud.notices


def test_garbage_of_a_broken_run_is_collected(cloud, tmp_path, monkeypatch):
    """A collection frees blocks that ranks stored and did not commit (B6)."""
    batches.in_ranks(tmp_path / 'site', monkeypatch,
                     'import os, signal\n'
                     'from glance_dedup.backup import stages\n'
                     'stages.Round.resolve = lambda round_: os.kill('
                     'os.getpid(), signal.SIGKILL)\n')
    results = cloud.run()
    assert all('broke 3 times' in result.note for result in results.values())
    assert maintenance.live_slots(cloud.path), results

    def is_empty():
        with (image_repository.Repository(cloud.path) as repo,
              maintainer_role.Maintainer(repo) as maintainer):
            collecting.collect(maintainer)
            published = {
                number: maintainer.engine.group_facts(number)['published']
                for number in maintainer.engine.groups()}
        # The next writer recovers what was not published (N7.3).
        return not [slot for group, slot in maintenance.live_slots(cloud.path)
                    if slot < published.get(group, 0)]
    assert is_empty()
    cloud.require_clean()


@pytest.mark.parametrize('change', [
    lambda message: message[:-1], lambda message: message[:10],
    lambda message: b'', lambda message: message + b'x',
    lambda message: message[:40] + b'?' + message[41:]])
def test_broken_message(change):
    message = rank_exchange.pack(b'scan', bytes(range(200)))
    assert rank_exchange.unpack(message, 1) == (b'scan', bytes(range(200)))
    with pytest.raises(rank_exchange.BrokenMessage, match='rank 1'):
        rank_exchange.unpack(change(message), 1)


def test_several_hosts_without_mpi(cloud, monkeypatch):
    """The error says how to install it; one host needs none."""
    monkeypatch.setattr(
        reachable_hosts, 'reach', lambda names: ([reachable_hosts.Host(
            name, name, frozenset()) for name in names], {}))
    monkeypatch.setattr(reachable_hosts, 'mpiexec', lambda: None)
    assert not any(result.note for result in cloud.run().values())
    cloud.settings = dataclasses.replace(cloud.settings, hosts=('one', 'two'))
    with pytest.raises(exceptions.InvalidParameter,
                       match='apt install openmpi-bin python3-mpi4py'):
        cloud.run(night=1)


def make_environment(place, without):
    """Return the Python of an environment that lacks some packages."""
    venv.create(place, symlinks=True)
    site, = place.glob('lib/python3*/site-packages')
    for directory in map(pathlib.Path, sys.path):
        if directory.name in ('site-packages', 'dist-packages'):
            for path in directory.iterdir():
                target = site / path.name
                if not path.name.lower().startswith(without) and not (
                        target.exists()):
                    target.symlink_to(path)
    return str(place / 'bin' / 'python')


def test_without_mpi4py(cloud, tmp_path):
    """The command backs one host up where there is no MPI."""
    python = make_environment(tmp_path / 'venv', ('mpi4py', 'openmpi'))
    missing = subprocess.run([python, '-c', 'import mpi4py'],
                             capture_output=True, text=True, timeout=LIMIT)
    assert "No module named 'mpi4py'" in missing.stderr
    done = subprocess.run([python, *cloud.command()[1:]], cwd=tmp_path,
                          env={**os.environ, 'PATH': '/nonexistent'},
                          capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    with image_repository.Repository(cloud.path) as repo:
        assert len(repo.backups()) == 4
    cloud.require_nothing_left()


# -- rounds -------------------------------------------------------------------

@pytest.fixture
def twins(cloud):
    """Four equal disks, each of which gets a round of its own."""
    for path in cloud.disks.directory.iterdir():
        path.write_bytes(repositories.noise(2 * batches.SEGMENT + 5000, 5))
    cloud.settings = dataclasses.replace(cloud.settings, weight=ALONE)
    return cloud


def require_stored_once(twins, results):
    """Require that the copies took no space, whichever disk was the first."""
    assert not any(result.note for result in results.values())
    assert sorted(result.stored for result in results.values()) == [
        0, 0, 0, 2 * batches.SEGMENT + 5000]
    assert twins.backups() == twins.disks.digests()
    twins.require_nothing_left()


def test_copies_in_later_rounds(twins):
    """A new repository has no index, and the copies still take no space."""
    rounds_ = []
    job_run = backup_job.Job._run_round

    def noted(job, sources, number, count):
        rounds_.append((len(sources), number, count))
        job_run(job, sources, number, count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backup_job.Job, '_run_round', noted)
        results = twins.run()
    assert rounds_ == [(1, number, 4) for number in range(1, 5)]
    require_stored_once(twins, results)


DEATH_IN_ROUND = """
import os, signal
from glance_dedup.backup import earlier_rounds, stages
work = stages.Round.{stage}
def die(round_, *arguments):
    if (round_._earlier is not None and round_._ranks.rank == 0
            and round_._earlier._spool.names() and not os.path.exists(
                {mark!r})):
        open({mark!r}, 'w').close()
        os.kill(os.getpid(), signal.SIGKILL)
    work(round_, *arguments)
stages.Round.{stage} = die
"""


@pytest.mark.parametrize('stage', [*STAGES, 'retain_references'])
def test_copies_after_a_kill(twins, tmp_path, monkeypatch, stage):
    """A rank that dies in the second round keeps what the first one found."""
    mark = tmp_path / 'mark'
    batches.in_ranks(tmp_path / 'site', monkeypatch,
                     DEATH_IN_ROUND.format(stage=stage, mark=str(mark)))
    results = twins.run()
    assert mark.exists()
    # In the first round, a rank has references once all blocks are stored.
    assert any(f'round {1 if stage == "finish" else 2} of 4 broke' in text
               for text in twins.notices)
    require_stored_once(twins, results)


def test_a_round_between_is_given_up(twins, monkeypatch):
    """A round that breaks each time takes nothing from the later ones."""
    def kill(processes, event):
        if event['event'] == 'view' and event['name'] == 'disk1':
            batches.kill_all(batches.ranks_of(processes))
    results = twins.run(watch=kill, monkeypatch=monkeypatch)
    assert 'broke 3 times' in results.pop('disk1').note
    assert sorted(result.stored for result in results.values()) == [
        0, 0, 2 * batches.SEGMENT + 5000]
    twins.require_nothing_left()


def test_a_run_that_is_killed_between_rounds(twins, monkeypatch):
    """The next night's run removes what the killed one had found."""
    def interrupt(processes, event):
        if event['event'] == 'ended' and twins.backups():
            raise KeyboardInterrupt
    tidy = backup_job.Job._tidy
    monkeypatch.setattr(backup_job.Job, '_tidy', lambda *arguments: None)
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as p:
        twins.run(watch=interrupt, monkeypatch=p)
    left = list(twins.spool.rglob('run-*'))
    assert left
    for path in left:
        os.utime(path, (7, 7))
    monkeypatch.setattr(backup_job.Job, '_tidy', tidy)
    results = twins.run(night=1)
    assert any('run-' in text and 'was not completed' in text
               for text in twins.notices)
    assert not any(result.note for result in results.values())
    twins.require_nothing_left()
