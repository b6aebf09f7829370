# SPDX-License-Identifier: Apache-2.0

"""``glance estimate``, ``import`` and ``export`` work without a Glance."""

import hashlib
import json
import os
import random
import subprocess
import time
import uuid

import pytest

from glance_dedup.base import confined
from glance_dedup.base import hashes
from glance_dedup.base import inputs
from glance_dedup.cli import command
from glance_dedup.cli import glance_access
from glance_dedup.client import glance_api
from tests.support import disks
from tests.support import qcow2files
from tests.support import repositories
from tests.support.repositories import mixture
from tests.support.repositories import noise

MIB = 1 << 20
KILLS = 4


@pytest.fixture(autouse=True)
def no_cloud(monkeypatch):
    for name in ('OS_CLOUD', 'OS_AUTH_URL', 'OS_AUTH_TYPE'):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def files(tmp_path):
    """A file store: three images, one of them empty."""
    directory = tmp_path / 'files'
    directory.mkdir()
    contents = [mixture(3 * MIB, 1), mixture(3 * MIB, 1) + noise(12345, 2),
                b'']
    for number, content in enumerate(contents):
        (directory / name_of(number)).write_bytes(content)
    return directory


def name_of(number):
    return str(uuid.UUID(int=number + 1))


def state(directory):
    """State of a directory: all that a change of its files could affect."""
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns,
                        path.stat().st_mode, path.stat().st_ino)
            for path in directory.iterdir() if path.is_file()}


def run(cli, *arguments):
    """Return the rows of a command, by image id."""
    result = cli(*arguments, '-f', 'json')
    return {row['image_id']: row for row in result.json()}, result


def require_same(created, files):
    with repositories.open_repository(created.path) as repo:
        assert repo.images() == sorted(os.listdir(files))
        for image_id in repo.images():
            assert repositories.read_all(repo, image_id) == (
                files / image_id).read_bytes()
    repositories.require_clean(created.path)


def kill_at_work(cli, directory, seed, *arguments):
    """Kill a command soon after it made something new in a directory."""
    before = set(os.listdir(directory))
    process = cli.start(*arguments, '-q', stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while set(os.listdir(directory)) <= before and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(random.Random(seed).random() * 0.1)
    finally:
        process.kill()
        process.wait(60)


# -- estimate -----------------------------------------------------------------

def test_estimate(created, files):
    result = created('glance', 'estimate', files, '-f', 'json')
    rows = {row['name']: row for row in result.json()}
    run(created, 'glance', 'import', '--from-file-store', files)
    stored = {row['image_id']: row for row in created(
        'image', 'list', '-f', 'json').json()}
    for image_id, row in stored.items():
        found = rows[str(files / image_id)]
        assert found['size'] == row['size']
        assert found['new_bytes'] == row['new_bytes']
        assert found['stored_bytes'] == pytest.approx(
            row['stored_bytes'], rel=0.01, abs=64)
    assert rows['all blocks']['new_bytes'] == sum(
        row['new_bytes'] for row in stored.values())
    assert rows['on the disk']['stored_bytes'] > (
        rows['on the disk, recompressed']['stored_bytes'])
    # The table is for people, so its sizes have units.
    assert 'MiB' in created('glance', 'estimate', files).out


def test_estimate_needs_no_repository(cli, files):
    assert cli('glance', 'estimate', files).status == 0
    assert not cli.path.exists()


def test_estimate_of_what_cannot_be_read(cli, files):
    result = cli('glance', 'estimate', files, '/nonexistent', '-f', 'json')
    assert result.status == 3
    assert '/nonexistent: No such file or directory' in result.err
    assert not [row for row in json.loads(result.out)
                if row['name'] == '/nonexistent']
    cli('glance', 'estimate', files, '--block-size',
        '1000').refused('block_size')
    cli('glance', 'estimate', files, '--codec', 'zstd', '--level',
        '20').refused('19')


def test_estimate_of_nothing(cli, tmp_path):
    """An estimate without images fails: zeros would look like a result."""
    (tmp_path / 'empty').mkdir()
    for path in '/nonexistent', tmp_path / 'empty':
        result = cli('glance', 'estimate', path)
        assert (result.status, result.out) == (3, '')
        assert f'{path} has no image that can be read' in result.err


def test_estimate_says_what_to_do(cli, files, monkeypatch):
    (files / 'image.gz').write_bytes(b'\x1f\x8b' + noise(5000))
    (files / 'link').symlink_to(name_of(0))
    result = cli('glance', 'estimate', files, '--exact')
    assert 'image.gz: it is compressed by gzip: unpack it' in result.err
    assert 'link: left out' in result.err
    assert 'of memory' in result.err
    from glance_dedup.adoption import estimate
    monkeypatch.setattr(estimate, 'TABLE', 1)
    (files / 'large').write_bytes(noise(16 * MIB))
    assert 'one block in 2 was counted' in cli('glance', 'estimate', files).err


def test_estimate_of_disks(cli, files, monkeypatch):
    plain = noise(100_000).hex().encode()[:40 * 4096]
    (files / 'image.qcow2').write_bytes(qcow2files.file_of([
        qcow2files.deflated(plain[at:at + 4096])
        for at in range(0, len(plain), 4096)]))
    (files / 'image.raw').write_bytes(plain)
    result = cli('glance', 'estimate', files, '-f', 'json')
    rows = {(row['kind'], row['name']): row for row in json.loads(result.out)}
    assert rows['disk', str(files / 'image.qcow2')]['size'] == len(plain)
    assert ('disk', str(files / 'image.raw')) not in rows
    assert (rows['sum', 'with disks']['stored_bytes']
            < rows['sum', 'on the disk']['stored_bytes'])
    assert 'image.qcow2: the disk in this qcow2 would be kept' in result.err
    monkeypatch.setattr(confined, 'PROGRAM', '/nonexistent')
    result = cli('glance', 'estimate', files, '-f', 'json')
    assert result.status == 0 and 'no disk was counted' in result.err
    assert 'with disks' not in result.out


# -- import -------------------------------------------------------------------

def test_import(created, files):
    before = state(files)
    rows, result = run(created, 'glance', 'import', '--from-file-store', files)
    assert result.status == 0
    assert 'Glance is not asked' in result.err and 'no project' in result.err
    assert {row['result'] for row in rows.values()} == {'imported'}
    assert rows[name_of(1)]['stored_bytes'] < 20000
    require_same(created, files)
    # The second run compares all images, and stores none.
    rows, result = run(created, 'glance', 'import', '--from-file-store', files)
    assert {(row['result'], row['verified_by'], row['stored_bytes'])
            for row in rows.values()} == {('present', 'bytes', None)}
    assert result.status == 0 and state(files) == before


def test_import_of_a_project(created, files):
    run(created, 'glance', 'import', '--from-file-store', files, '--project',
        'p', '--scope', 'project', '--images', name_of(1))
    rows = created('image', 'show', name_of(1), '-f', 'json').json()
    assert (rows['project'], rows['scope']) == ('p', 'project')
    assert created('image', 'show', name_of(0)).status == 3


def test_dry_run(created, files):
    rows, result = run(created, 'glance', 'import', '--from-file-store', files,
                       '--dry-run')
    assert {row['result'] for row in rows.values()} == {'to be imported'}
    assert created('image', 'list', '-f', 'json').json() == []


def test_what_is_no_image(created, files):
    for name in (f'{name_of(0)}.part', 'x', name_of(7).upper() + 'A'):
        (files / name).write_bytes(b'x')
    (files / name_of(5)).mkdir()
    (files / name_of(6)).symlink_to(name_of(0))
    rows, result = run(created, 'glance', 'import', '--from-file-store', files)
    assert sorted(rows) == [name_of(number) for number in range(3)]
    assert result.err.count('left out') == 5 and result.status == 0


@pytest.mark.parametrize('content', [b'x', noise(3 * MIB, 9)])
def test_another_image_of_the_same_name(created, files, content):
    created('image', 'put', name_of(0), files / name_of(1))
    (files / name_of(1)).write_bytes(
        (files / name_of(1)).read_bytes()[:-1] + content[:1])
    created('image', 'put', name_of(1), files / name_of(0))
    (files / name_of(0)).write_bytes(content)
    before = state(files)
    rows, result = run(created, 'glance', 'import', '--from-file-store', files)
    assert result.status == 1
    for number in (0, 1):
        assert rows[name_of(number)]['result'] == 'failed'
        assert 'neither was changed' in rows[name_of(number)]['error']
        assert name_of(number) in result.err
    # The failure does not stop the others.
    assert rows[name_of(2)]['result'] == 'imported'
    assert state(files) == before


def test_equal_size_and_other_bytes(created, files):
    created('glance', 'import', '--from-file-store', files)
    data = bytearray((files / name_of(0)).read_bytes())
    data[2 * MIB] ^= 1
    (files / name_of(0)).write_bytes(data)
    rows, result = run(created, 'glance', 'import', '--from-file-store', files)
    assert result.status == 1
    assert 'other bytes' in rows[name_of(0)]['error']


def test_wrong_usage_of_import(created, files, tmp_path):
    other = tmp_path / 'other'
    other.mkdir()
    (other / name_of(0)).write_bytes(b'x')
    created('glance', 'import', '--from-file-store', files,
            other).failed('which')
    created('glance', 'import', '--from-file-store', files, '--images',
            name_of(9)).failed(name_of(9))
    created('glance', 'import', '--from-file-store',
            tmp_path / 'none').failed('none')
    created('glance', 'import', '--from-file-store', files,
            '--update-locations', 'dedup1').refused('needs a Glance')
    created('glance', 'orphans').refused('--os-cloud')
    created('glance', 'missing', '--store', 'dedup1').refused('--os-cloud')
    assert created('image', 'list', '-f', 'json').json() == []


def test_a_file_that_changes(files):
    with inputs.InputFile(files / name_of(0)) as source:
        source.require_unchanged()
        with open(files / name_of(0), 'ab') as f:
            f.write(b'x')
        with pytest.raises(inputs.Changed, match='while it was read'):
            source.require_unchanged()


def test_a_file_that_changes_is_not_imported(created, files, monkeypatch):
    whole = inputs.InputFile.require_unchanged

    def late(self):
        os.utime(self.path, (1, 1))
        whole(self)
    monkeypatch.setattr(inputs.InputFile, 'require_unchanged', late)
    result = created('glance', 'import', '--from-file-store', files)
    assert result.status == 3 and result.err.count('while it was read') == 3
    assert created('image', 'list', '-f', 'json').json() == []


def test_killed_imports(created, files):
    """An import that is killed repeatedly goes on, and stores all images."""
    for number in range(3, 9):
        (files / name_of(number)).write_bytes(mixture(4 * MIB, number))
    before = state(files)
    for seed in range(KILLS):
        kill_at_work(created, created.path / 'spool', seed, 'glance', 'import',
                     '--from-file-store', files)
        # Each image that exists is whole, at any time.
        with repositories.open_repository(created.path) as repo:
            for image_id in repo.images():
                assert repo.stat(image_id).size == (
                    files / image_id).stat().st_size
    rows, result = run(created, 'glance', 'import', '--from-file-store', files)
    assert result.status == 0
    require_same(created, files)
    assert state(files) == before


# -- export -------------------------------------------------------------------

@pytest.fixture
def imported(created, files):
    assert created('glance', 'import', '--from-file-store', files).status == 0
    return created


@pytest.fixture
def out(tmp_path):
    directory = tmp_path / 'out'
    directory.mkdir()
    return directory


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_export(imported, files, out):
    with open(files / name_of(7), 'wb') as f:
        f.write(b'x')
        f.truncate(64 * MIB)
    imported('glance', 'import', '--from-file-store', files)
    rows, result = run(imported, 'glance', 'export', out, '--all')
    assert {row['result'] for row in rows.values()} == {'exported'}
    assert contents(out) == contents(files)
    assert (out / name_of(7)).stat().st_blocks * 512 < MIB
    assert (out / name_of(0)).stat().st_mode & 0o777 == 0o600
    before = state(out)
    rows, result = run(imported, 'glance', 'export', out, '--all')
    assert {row['result'] for row in rows.values()} == {'present'}
    assert result.status == 0 and state(out) == before


def test_export_of_some(imported, out):
    assert imported('glance', 'export', out, name_of(1)).status == 0
    assert os.listdir(out) == [name_of(1)]
    imported('glance', 'export', out).refused('--all')
    imported('glance', 'export', out, name_of(1), '--all').refused('--all')
    imported('glance', 'export', out / 'none',
             '--all').refused('not a directory')
    imported('glance', 'export', out, name_of(9)).failed(name_of(9))


@pytest.mark.parametrize('content', [b'', None])
def test_export_replaces_nothing(imported, files, out, content):
    data = bytearray((files / name_of(0)).read_bytes())
    data[-1] ^= 1
    (out / name_of(0)).write_bytes(data if content is None else content)
    before = state(out)
    rows, result = run(imported, 'glance', 'export', out, '--all')
    assert result.status == 1
    assert 'left alone' in rows[name_of(0)]['error']
    assert rows[name_of(1)]['result'] == 'exported'
    assert state(out)[name_of(0)] == before[name_of(0)]


def test_export_of_a_damaged_image(imported, files, out):
    group = repositories.Group(imported.path, 1)
    group.data[-5000] ^= 1
    group.save()
    rows, result = run(imported, 'glance', 'export', out, '--all')
    assert result.status == 1
    failed = [image_id for image_id, row in rows.items()
              if row['result'] == 'failed']
    assert failed
    assert sorted(os.listdir(out)) == sorted(set(rows) - set(failed))


def test_export_without_room(created, files, tmp_path):
    (files / name_of(0)).write_bytes(noise(50 * MIB, 1))
    created('glance', 'import', '--from-file-store', files)
    with disks.mounted(tmp_path, 'tmpfs') as root:
        created('glance', 'export', root, '--all').failed('the images need')
        assert os.listdir(root) == []


def test_killed_exports(imported, files, out):
    for number in range(3, 9):
        (files / name_of(number)).write_bytes(noise(4 * MIB, number))
    imported('glance', 'import', '--from-file-store', files)
    for seed in range(KILLS):
        kill_at_work(imported, out, seed, 'glance', 'export', out, '--all')
        for path in out.iterdir():
            if not path.name.startswith('.'):
                assert path.read_bytes() == (
                    files / path.name).read_bytes()
    assert imported('glance', 'export', out, '--all').status == 0
    assert contents(out) == contents(files)


def test_leftovers_of_other_images_stay(imported, out):
    ours = out / f'.{name_of(0)}.0123456789abcdef.new'
    others = out / f'.{name_of(9)}.0123456789abcdef.new'
    for path in (ours, others):
        path.write_bytes(b'x')
    imported('glance', 'export', out, '--all')
    assert not ours.exists() and others.exists()


# -- ages ---------------------------------------------------------------------

# -- image verify -------------------------------------------------------------

def test_verify(created, files):
    run(created, 'glance', 'import', '--from-file-store', files)
    by_hand = {name: (files / name).read_bytes() for name in os.listdir(files)}
    rows, result = run(created, 'image', 'verify', name_of(0))
    assert rows[name_of(0)] == {
        'image_id': name_of(0), 'size': 3 * MIB, 'result': 'recorded',
        'hash_name': 'sha512', 'error': '',
        'hash_value': hashlib.sha512(by_hand[name_of(0)]).hexdigest()}
    assert 'Glance is not asked' in result.err
    rows, _ = run(created, 'image', 'verify', '--all')
    assert {name: row['result'] for name, row in rows.items()} == {
        name_of(0): 'known', name_of(1): 'recorded', name_of(2): 'recorded'}
    rows, _ = run(created, 'image', 'verify', '--all', '--algorithm', 'SHA256')
    for name, row in rows.items():
        assert row['result'] == 'recorded' and row['hash_name'] == 'sha256'
        assert row['hash_value'] == hashlib.sha256(by_hand[name]).hexdigest()
    # An image is verified again if it is named.
    rows, _ = run(created, 'image', 'verify', name_of(1))
    assert rows[name_of(1)]['result'] == 'recorded'
    repositories.require_clean(created.path)


def test_verify_goes_on_behind_what_fails(created, files):
    run(created, 'glance', 'import', '--from-file-store', files)
    with repositories.open_repository(created.path) as repo:
        hashes.record(repo.path, repo.stat(name_of(0)),
                      hashes.Hash('sha512', 'ab' * 64))
    rows, result = run(created, 'image', 'verify', name_of(0), 'nobody',
                       name_of(1))
    assert result.status == 1
    assert rows[name_of(1)]['result'] == 'recorded'
    assert rows['nobody']['result'] == 'failed'
    assert 'is recorded' in rows[name_of(0)]['error']
    assert created('image', 'verify', name_of(0)).status == 1


def test_verify_asks_glance(created, files, monkeypatch):
    """An image whose hash differs from Glance's is reported as failed."""
    run(created, 'glance', 'import', '--from-file-store', files)
    right = hashlib.sha256((files / name_of(0)).read_bytes()).hexdigest()

    def image(number, value):
        return glance_api.Image(name_of(number), 'active', '', 1, frozenset(),
                                frozenset(), 'sha256', value, None)

    monkeypatch.setenv('OS_CLOUD', 'a')
    monkeypatch.setattr(glance_access, 'connect', lambda cloud, url: None)
    monkeypatch.setattr(
        command.RepositoryCommand, 'images_of', lambda self, glance: {
            name_of(0): image(0, right), name_of(1): image(1, 'ab' * 32)})
    for result in ('recorded', 'known'):
        rows, done = run(created, 'image', 'verify', '--all')
        assert done.status == 1
        assert rows[name_of(0)]['hash_value'] == right
        assert rows[name_of(0)]['result'] == result
        assert rows[name_of(1)]['result'] == 'failed'
        assert 'is not the one that Glance means' in rows[name_of(1)]['error']
        # Glance does not know this image.
        assert rows[name_of(2)]['hash_name'] == 'sha512'


@pytest.mark.parametrize('arguments', [
    (), ('--all', 'a'), ('--all', '--algorithm', 'none'),
    ('--all', '--algorithm', 'shake_128')])
def test_verify_what(created, arguments):
    created('image', 'verify', *arguments).refused()
