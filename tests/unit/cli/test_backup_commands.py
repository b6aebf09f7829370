# SPDX-License-Identifier: Apache-2.0

"""The commands on backups."""

import hashlib
import json
import os
import random
import subprocess
import time

import pytest

from glance_dedup.base import hashes
from glance_dedup.cli import backup_commands
from glance_dedup.repository import image_repository
from tests.support import disks
from tests.support import repositories
from tests.support.repositories import put

MIB = 1 << 20
MONDAY = 1795456800             # 2026-11-23 18:00:00 UTC
DAY = 86400


@pytest.fixture
def made(cli):
    """A repository that may have backups."""
    result = cli('repository', 'create')
    assert result.status == 0, result.err
    return cli


@pytest.fixture
def repo(made, tmp_path):
    with repositories.open_repository(
            made.path, filter_dir=str(tmp_path / 'filter')) as repo:
        yield repo


def content(seed):
    """A disk with holes, some between its blocks."""
    noise = random.Random(seed).randbytes(200001)
    return noise + bytes(MIB) + noise[:5000] + bytes(100000 - 5)


@pytest.fixture
def backups(repo):
    """Three backups of web, one of db, and an image."""
    found = {}
    for number, (name, when) in enumerate((
            ('web', '20261121T180000Z'), ('web', '20261122T180000Z'),
            ('web', '20261123T180000Z'), ('db', '20261123T190000Z'))):
        image_id = f'b_{name}_{when}'
        found[image_id] = content(number)
        put(repo, image_id, found[image_id])
    put(repo, 'image', b'image')
    return found


# -- list ---------------------------------------------------------------------

def test_list(made, backups):
    rows = made('backup', 'list', '-f', 'json').json()
    assert [(row['name'], row['time'], row['newest']) for row in rows] == [
        ('db', MONDAY + 3600, True), ('web', MONDAY - 2 * DAY, False),
        ('web', MONDAY - DAY, False), ('web', MONDAY, True)]
    shown = made('image', 'show', 'b_web_20261123T180000Z', '-f',
                 'json').json()
    for key in ('size', 'zero_bytes', 'new_bytes', 'stored_bytes', 'damaged',
                'image_id'):
        assert rows[3][key] == shown[key]
    newest = made('backup', 'list', '--newest', '-f', 'json').json()
    assert newest == [rows[0], rows[3]]
    assert made('backup', 'list', 'web', '-f', 'json').json() == rows[1:]
    table = made('backup', 'list', 'db').out
    assert '2026-11-23 19:00:00 UTC' in table and 'yes' in table
    made('backup', 'list', 'web', 'none').failed(
        'no backup of none: there are backups of db, web')
    assert made('backup', 'list', 'a.b').status == 2


def test_lists_go_on_after_damage(made, backups):
    recipe = made.path / 'images' / 'b_web_20261122T180000Z'
    recipe.write_bytes(bytes(4096) + recipe.read_bytes()[4096:])
    result = made('backup', 'list', '-f', 'json')
    assert result.status == 1 and recipe.name in result.err
    assert len(result.json()) == 3


def test_a_repository_without_backups(created):
    """A repository without backups has an empty list, and the rest fails."""
    assert created('backup', 'list', '-f', 'json').json() == []
    created('backup', 'restore', 'web', 'file').failed(
        'the repository has no backups')
    created('backup', 'prune', 'web', '--keep-last', '1').failed(
        'the repository has no backups')


# -- restore ------------------------------------------------------------------

def test_restore(made, backups, tmp_path):
    file = tmp_path / 'disk'
    result = made('backup', 'restore', 'web', file, '-f', 'json')
    assert result.json() == {
        'name': 'web', 'time': MONDAY, 'file': str(file),
        'image_id': 'b_web_20261123T180000Z', 'size': len(content(2))}
    assert 'restoring web of 2026-11-23 18:00:00 UTC' in result.err
    assert file.read_bytes() == content(2)
    assert file.stat().st_blocks * 512 < len(content(2)) - MIB // 2
    made('backup', 'restore', 'web', file).refused('--force would replace')
    result = made('backup', 'restore', 'web', file, '--force', '--at',
                  '2026-11-22', '-f', 'json')
    assert result.json()['time'] == MONDAY - DAY
    assert file.read_bytes() == content(1)


def test_restore_to_standard_output(made, backups, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = made.program('backup', 'restore', 'web', '-')
    assert (result.status, result.out) == (0, content(2))
    assert 'restoring web of 2026-11-23 18:00:00 UTC' in result.err
    assert not (tmp_path / '-').exists()


def test_a_backup_of_an_early_year(made, repo):
    put(repo, 'b_web_09870101T180000Z', b'old')
    assert '0987-01-01 18:00:00 UTC' in made('backup', 'list').out


def test_what_cannot_be_restored(made, repo, backups, tmp_path):
    file = tmp_path / 'disk'
    made('backup', 'restore', 'web', file, '--at', '2026-11-20').failed(
        'no backup of web', 'or before: the oldest is of 2026-11-21 18:00:00')
    made('backup', 'restore', 'we', file).failed('backups of db, web')
    for wrong in ('yesterday', '2026-13-01'):
        result = made('backup', 'restore', 'web', file, '--at', wrong)
        assert result.status == 2 and 'is no time such as' in result.err
    # A damaged backup leaves no partial file.
    repo.close()
    lost = content(3)[100 << 10:101 << 10]      # noise, so not compressed
    for group in (made.path / 'groups').iterdir():
        group.write_bytes(group.read_bytes().replace(lost, lost[::-1]))
    result = made('backup', 'restore', 'db', file)
    assert result.status == 1 and 'groups/' in result.err
    assert not file.exists() and not list(tmp_path.glob('.disk*'))


def test_one_that_is_pruned_meanwhile(made, backups, tmp_path, monkeypatch):
    really_open = image_repository.Repository.open_image

    def open_image(self, image_id):
        self.delete(image_id)
        return really_open(self, image_id)
    monkeypatch.setattr(image_repository.Repository, 'open_image',
                        open_image)
    result = made('backup', 'restore', 'web', tmp_path / 'disk')
    assert result.status == 3
    assert ('the backup of web of 2026-11-23 18:00:00 UTC was deleted '
            'meanwhile: the newest is of 2026-11-22 18:00:00 UTC'
            ) in result.err
    result = made('backup', 'restore', 'db', tmp_path / 'disk')
    assert 'no backup of db: there are backups of web' in result.err


@pytest.fixture
def device(tmp_path):
    """A function that makes a loop device of so many bytes of 0xff."""
    made = []

    def make(size):
        file = tmp_path / f'device-{len(made)}'
        file.write_bytes(b'\xff' * size)
        done = subprocess.run(
            ['losetup', '--find', '--show', file], capture_output=True,
            timeout=60)
        if done.returncode:
            pytest.skip(f'needs loop devices: {done.stderr.decode()}')
        made.append(done.stdout.decode().strip())
        return made[-1]
    yield make
    for path in made:
        subprocess.run(['losetup', '--detach', path], check=True, timeout=60)


def test_restore_to_a_device(made, backups, device):
    size = 2 * MIB
    data = content(2)
    path = device(size)
    made('backup', 'restore', 'web', path).refused(
        'is a block device; --force would overwrite it')
    result = made('backup', 'restore', 'web', path, '--force', '-f', 'json')
    assert result.json()['file'] == path
    with open(path, 'rb') as f:
        assert f.read() == data + b'\xff' * (size - len(data))


@pytest.mark.needs('disks')
def test_devices_that_cannot_be_restored_to(made, backups, device, tmp_path):
    small = device(MIB)
    result = made('backup', 'restore', 'web', small, '--force')
    assert result.status == 3
    assert (f'{small} has {MIB} bytes, and the backup has {len(content(2))}'
            ) in result.err
    with open(small, 'rb') as f:
        assert f.read() == b'\xff' * MIB
    (tmp_path / 'mounted').mkdir()
    with disks.mounted(tmp_path / 'mounted', 'ext4') as root:
        source = subprocess.run(
            ['findmnt', '--noheadings', '--output', 'SOURCE', root],
            capture_output=True, check=True, timeout=60).stdout
        used = source.decode().strip()
        result = made('backup', 'restore', 'web', used, '--force')
        assert result.status == 3 and f'{used}: Device or' in result.err


@pytest.mark.parametrize('begin, end', [
    (0, 0), (1, 2), (4095, 4097), (4096, 8192), (100, 20000), (0, 20480),
    (8191, 8192), (20479, 20480)])
def test_zeros_of_a_device(device, begin, end, monkeypatch):
    monkeypatch.setattr(backup_commands, '_ZEROS', 8192)
    path = device(20480)
    told = []

    class Progress:
        update = staticmethod(told.append)

    fd = os.open(path, os.O_RDWR)
    try:
        backup_commands.Device._zero(fd, begin, end, Progress)
        data = os.pread(fd, 20480, 0)
    finally:
        os.close(fd)
    assert data == (b'\xff' * begin + bytes(end - begin)
                    + b'\xff' * (20480 - end))
    assert told == sorted(told) and all(at <= end for at in told)


# -- prune --------------------------------------------------------------------

def test_prune(made, repo, backups):
    planned = made('backup', 'prune', '--keep-daily', '2', '--dry-run', '-f',
                   'json').json()
    assert [(row['name'], row['time'], row['kept'], row['reasons'],
             row['deleted'], row['error']) for row in planned] == [
        ('db', MONDAY + 3600, True, ['newest', 'daily 2026-11-23'], None,
         None),
        ('web', MONDAY, True, ['newest', 'daily 2026-11-23'], None, None),
        ('web', MONDAY - DAY, True, ['daily 2026-11-22'], None, None),
        ('web', MONDAY - 2 * DAY, False, [], None, None)]
    assert len(repo.backups()) == 4
    result = made('backup', 'prune', '--keep-daily', '2', '-f', 'json')
    assert result.json() == [*planned[:3], {**planned[3], 'deleted': True}]
    assert len(repo.backups()) == 3 and 'image' in repo.images()
    # These rules apply to one name.
    result = made('backup', 'prune', 'web', '--keep-monthly', '1')
    assert result.status == 0 and 'monthly 2026-11' in result.out
    assert [found.image_id for found in repo.backups()] == [
        'b_db_20261123T190000Z', 'b_web_20261123T180000Z']


def test_wrong_rules(made, repo, backups):
    made('backup', 'prune', '--dry-run').refused(
        'at least one of --keep-last, --keep-daily')
    for wrong in ('0', '-1', 'x', '1.5', '\u0663', '9' * 12):
        result = made('backup', 'prune', f'--keep-last={wrong}')
        assert result.status == 2 and 'no number above 0' in result.err
    # A wrong name keeps the command from deleting anything.
    made('backup', 'prune', 'web', 'wbe', '--keep-last', '1').failed(
        'no backup of wbe')
    assert len(repo.backups()) == 4


def test_the_others_are_pruned_after_an_error(made, repo, backups,
                                              monkeypatch):
    stuck = 'b_web_20261122T180000Z'
    put(repo, 'b_web_20261120T180000Z', b'x')
    # The newest backup stays.
    put(repo, 'b_web_20261123T200000Z', b'y')
    monkeypatch.setitem(image_repository.Repository.__init__.__kwdefaults__,
                        'lock_timeout', 0.1)
    with repositories.holding(made.path / 'locks' / 'images',
                              repositories.image_lock_byte(stuck)):
        result = made('backup', 'prune', 'web', '--keep-last', '1', '-f',
                      'json')
    assert result.status == 11 and stuck in result.err
    rows = json.loads(result.out)
    assert [row['deleted'] for row in rows] == [None, True, False, True, True]
    assert [bool(row['error']) for row in rows] == [
        False, False, True, False, False]
    assert [found.image_id for found in repo.backups()] == [
        'b_db_20261123T190000Z', stuck, 'b_web_20261123T200000Z']


def test_two_prune_at_once(made, repo, backups, monkeypatch):
    """A backup that another process has just deleted counts as deleted."""
    real = image_repository.Repository.delete

    def delete(self, image_id):
        real(self, image_id)
        real(self, image_id)
    monkeypatch.setattr(image_repository.Repository, 'delete', delete)
    rows = made('backup', 'prune', 'web', '--keep-last', '2', '-f',
                'json').json()
    assert [row['deleted'] for row in rows] == [None, None, True]
    assert len(repo.backups()) == 3


# -- clocks that were wrong ---------------------------------------------------

FUTURE = 'b_web_20990101T010000Z'


@pytest.fixture
def ahead(repo, backups):
    """A backup made by a clock that was 73 years ahead."""
    put(repo, FUTURE, b'future')
    return FUTURE


def test_backup_of_the_future_is_outside_of_rules(made, repo, ahead):
    """Prune keeps a backup of the future in addition to the newest one."""
    for night in ('20261124T180000Z', '20261125T180000Z'):
        put(repo, f'b_web_{night}', night.encode())
        result = made('backup', 'prune', 'web', '--keep-last', '1', '-f',
                      'json')
        assert f'{ahead}, a backup of web, is dated in the f' in result.err
        assert [row['reasons'] for row in result.json() if row['kept']] == [
            ['in the future'], ['newest', 'last 1']]
        assert [found.image_id for found in repo.backups()
                if found.name == 'web'] == [f'b_web_{night}', ahead]


def test_restore_does_not_choose_the_future(made, ahead, tmp_path):
    file = tmp_path / 'disk'
    result = made('backup', 'restore', 'web', file, '-f', 'json')
    assert result.json()['image_id'] == 'b_web_20261123T180000Z'
    assert file.read_bytes() == content(2)
    assert f'{ahead}, a backup of web, is dated in the future' in result.err
    made('backup', 'restore', 'web', file, '--force', '--at', '2099-01-01')
    assert file.read_bytes() == b'future'


def test_list_names_backups_of_the_future(made, ahead):
    result = made('backup', 'list', 'web', '-f', 'json')
    rows = [(row['image_id'], row['newest']) for row in result.json()]
    assert rows[-2:] == [('b_web_20261123T180000Z', True), (ahead, False)]
    assert f'{ahead}, a backup of web, is dated in the future' in result.err
    result = made('backup', 'list', 'web', '--newest', '-f', 'json')
    assert [row['image_id'] for row in result.json()] == [
        'b_web_20261123T180000Z']
    assert 'in the future' not in made('backup', 'list', 'db').err


def test_run_names_backups_of_the_future(made, repo, ahead):
    assert made('volume', 'create', 'web', '1M').status == 0
    result = made('backup', 'run', 'volume:web', '-f', 'json')
    assert result.json()[0]['backup_id'] and result.status == 0
    assert f'{ahead}, a backup of web, is dated in the future' in result.err


def test_backup_of_a_clock_that_was_behind_stays(made, repo, backups):
    """Prune keeps the backup stored last, even if its clock was behind."""
    behind = 'b_web_19700101T000105Z'
    newest = repo.stat('b_web_20261123T180000Z').created
    put(repo, behind, b'behind')
    # The times in recipes are whole seconds.
    deadline = time.monotonic() + 60
    while repo.stat(behind).created == newest:
        assert time.monotonic() < deadline
        repo.delete(behind)
        put(repo, behind, b'behind')
    result = made('backup', 'prune', 'web', '--keep-last', '1', '-f', 'json')
    assert [row['reasons'] for row in result.json() if row['kept']] == [
        ['newest', 'last 1'], ['stored last']]
    assert [found.image_id for found in repo.backups()
            if found.name == 'web'] == [behind, 'b_web_20261123T180000Z']


# -- verify -------------------------------------------------------------------

def test_verify(made, backups, tmp_path):
    """A drill restores the newest backup of each name, or some of them."""
    metrics = tmp_path / 'drill.prom'
    rows = made('backup', 'verify', '--metrics', str(metrics), '-f',
                'json').json()
    assert [(row['image_id'], row['size'], row['error']) for row in rows] == [
        (name, len(backups[name]), None) for name in (
            'b_db_20261123T190000Z', 'b_web_20261123T180000Z')]
    for row in rows:
        assert row['sha256'] == hashlib.sha256(
            backups[row['image_id']]).hexdigest()
    assert 'drill_disks 2\n' in metrics.read_text()
    row, = made('backup', 'verify', '--restore-sample', '1', '-f',
                'json').json()
    assert row['name'] in ('web', 'db')
    row, = made('backup', 'verify', 'db', '-f', 'json').json()
    assert row['name'] == 'db'


def test_verify_finds_a_fault(made, repo, backups, tmp_path):
    """The command goes on, exits with 1, and tells Prometheus."""
    name = 'b_db_20261123T190000Z'
    hashes.record(repo.path, repo.stat(name), hashes.Hash('sha256', '0' * 64))
    metrics = tmp_path / 'drill.prom'
    result = made('backup', 'verify', '--metrics', str(metrics), '-f', 'json')
    assert result.status == 1 and 'is recorded' in result.err
    assert [bool(row['error']) for row in result.json()] == [True, False]
    assert 'failed_disks 1\n' in metrics.read_text()
    assert 'success' not in metrics.read_text()


def test_verify_tells_where_metrics_cannot_go(made, backups, tmp_path,
                                              monkeypatch):
    monkeypatch.chdir(tmp_path)
    made('backup', 'verify', '--metrics', 'none/drill.prom').refused(
        str(tmp_path / 'none'))
    # The rows are not lost if the file cannot be written at the end.
    (tmp_path / 'drill.prom').mkdir()
    result = made('backup', 'verify', '--metrics', 'drill.prom', '-f', 'json')
    assert result.status == 3 and 'drill.prom' in result.err
    assert len(json.loads(result.out)) == 2
    (tmp_path / 'drill.prom').rmdir()
    assert made('backup', 'verify', '--metrics', 'drill.prom').status == 0
    assert 'failed_disks 0\n' in (tmp_path / 'drill.prom').read_text()


def test_verify_without_backups(made, tmp_path):
    metrics = tmp_path / 'drill.prom'
    assert made('backup', 'verify', '--metrics', str(metrics), '-f',
                'json').json() == []
    assert not metrics.exists()
    assert made('backup', 'verify', '--restore-sample', '0').status == 2
