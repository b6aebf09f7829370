# SPDX-License-Identifier: Apache-2.0

"""Golden repositories can be read, checked, and used further."""

import hashlib
import json
import os

import pytest

from dedupd.tasks import collector
from dedupd.tasks import merger
from dedupd.tasks import recompressor
from dedupd.tasks import scrubber
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import pacing
from glance_dedup.base import scopes
from glance_dedup.check import checker
from glance_dedup.repository import features
from glance_dedup.repository import openvolumes
from tests.golden import make
from tests.support import coldgroups
from tests.support import maintenance
from tests.support.maintenance import maintaining
from tests.support import repositories

#: In one a crash took some blocks' entries; another was cut as a volume is,
#: which differs from an upload where cuts depend on content. Two have short
#: runs of texts and noise by turns; where cuts depend on content, the upload
#: stores some of them again. A disk's blocks are not those of its file.
FOUND_IN_PART = {'not-published', 'snapshot', 'mixed-0', 'mixed-1', 'disk',
                 'disk-copy', 'disk-large', 'disk-unproven'}
NAMES = sorted(path.stem for path in make.HERE.glob('*.json'))


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def expected(name):
    return json.loads((make.HERE / f'{name}.json').read_text())


@pytest.fixture
def path(name, tmp_path):
    return make.unpack(name, tmp_path)


def require_images(repo, expected):
    assert repo.images() == sorted(expected['images'])
    for image_id, facts in expected['images'].items():
        if facts is None:
            with pytest.raises(exceptions.DamagedError):
                repositories.read_all(repo, image_id)
            continue
        data = repositories.read_all(repo, image_id)
        assert hashlib.sha256(data).hexdigest() == facts['sha256'], image_id
        found = repo.stat(image_id)
        assert found.size == len(data) == facts['size']
        assert found.project == facts['project']
        assert found.scope == scopes.choose(
            facts['scope'], facts['project']).hex()


def require_volumes(repo, expected):
    for name, facts in expected.get('volumes', {}).items():
        with openvolumes.open_volume(repo, name) as volume:
            data, found = volume.read(volume.size, 0), volume.info()
        assert hashlib.sha256(data).hexdigest() == facts['sha256'], name
        assert len(data) == facts['size']
        assert (found.project, found.scope) == (
            facts['project'], facts['scope'])


def require_disks(repo, expected):
    for image_id, digest in expected.get('disks', {}).items():
        with repo.open_image(image_id) as image:
            disk = image.read_disk(image.disk.size)
        assert hashlib.sha256(disk).hexdigest() == digest, image_id


def test_there_is_one_of_each_kind():
    assert NAMES == sorted(make.REPOSITORIES)
    kinds = make.REPOSITORIES.values()
    assert {name for kind in kinds for name in kind.features} == {
        *features.KNOWN}


def test_they_are_read(path, expected):
    """The repositories are readable before anything in them changes."""
    with repositories.open_repository(path) as repo:
        assert repo.features == expected['features']
        require_images(repo, expected)
        require_disks(repo, expected)
        require_volumes(repo, expected)


def test_they_are_checked(path, expected):
    assert make.report_of(path) == expected['check']


def test_they_go_on(path, expected):
    """The maintainer's tasks and uploads work on a golden repository."""
    pace = pacing.Pace()
    again = {image_id: f'{image_id}-again'
             for image_id, facts in expected['images'].items() if facts}
    with repositories.open_repository(path) as repo:
        with maintaining(repo) as maintainer:
            assert maintainer.warnings == []
            maintenance.account(maintainer)
            maintenance.require_counted(maintainer)
            result = collector.run_once(maintainer, pace)
            assert result.refused is None and not result.failed
            require_images(repo, expected)
            # All stored blocks are found again.
            for image_id, other in again.items():
                facts = expected['images'][image_id]
                stat = repositories.put(
                    repo, other, repositories.read_all(repo, image_id),
                    project=facts['project'], scope=facts['scope'])
                assert stat.new_bytes == 0 or image_id in FOUND_IN_PART
            repositories.put(repo, 'new', repositories.noise(50000, 900))
            merger.run_once(maintainer, pace)
            scrubber.run_once(maintainer, pace, full=True,
                              spare_threshold=3)
            for other in again.values():
                repo.delete(other)
            collector.run_once(maintainer, pace)
            maintenance.require_counted(maintainer)
        assert repositories.read_all(repo, 'new') == (
            repositories.noise(50000, 900))
        repo.delete('new')
        require_images(repo, expected)
        require_disks(repo, expected)
    found = make.report_of(path)
    assert found['damaged_images'] == expected['check']['damaged_images']
    assert found['ok'] == (not found['damaged_images'])


def test_the_catalog_is_rebuilt(path, expected):
    with repositories.open_repository(path) as repo:
        with maintaining(repo) as maintainer:
            history = maintainer.catalog.history()
            maintainer.rebuild()
            maintenance.account(maintainer)
            maintenance.require_counted(maintainer)
            assert maintainer.catalog.history() == history
        require_images(repo, expected)


def test_volumes_go_on(path, expected):
    """Volumes can be used further; a begun deletion is finished."""
    volumes = expected.get('volumes', {})
    if not volumes:
        return
    pace = pacing.Pace()
    with repositories.open_repository(path) as repo:
        assert set(openvolumes.names(repo)) == {*volumes, 'deleting'}
        with maintaining(repo) as maintainer:
            maintenance.account(maintainer)
            collector.run_once(maintainer, pace)
            assert openvolumes.names(repo) == sorted(volumes)
            require_volumes(repo, expected)
            written = repositories.noise(70000, 910)
            for name in volumes:
                with openvolumes.open_volume(repo, name) as volume:
                    data = bytearray(volume.read(volume.size, 0))
                    length = min(len(written), len(data) - 300)
                    data[300:300 + length] = written[:length]
                    volume.write(written[:length], 300)
                    volume.checkpoint()
                volumes[name]['sha256'] = hashlib.sha256(data).hexdigest()
            collector.run_once(maintainer, pace)
            maintenance.require_counted(maintainer)
            require_volumes(repo, expected)
            for name in volumes:
                openvolumes.delete(repo, name)
            collector.run_once(maintainer, pace)
            maintenance.require_counted(maintainer)
        require_images(repo, expected)
    assert make.report_of(path) == expected['check']


@pytest.mark.parametrize('similar', [False, True], ids=['', 'similar'])
def test_they_are_recompressed(path, expected, similar):
    """Recompression sets the feature of lists only if it makes lists."""
    with repositories.open_repository(path) as repo:
        with maintaining(repo) as maintainer:
            maintenance.account(maintainer)
            recompressor.run_once(maintainer, pacing.Pace(), 'zstd', 5,
                                  similar=similar)
            facts = [maintainer.engine.group_facts(number)
                     for number in maintainer.engine.groups()]
            assert any(fact['similar'] and fact['level'] == 5
                       for fact in facts) == similar
            if any(fact['has_lists'] for fact in facts):
                assert features.LISTED_SEGMENTS in repo.features
            else:
                assert repo.features == expected['features']
        require_images(repo, expected)
        require_volumes(repo, expected)
    assert make.report_of(path) == expected['check']


def test_they_get_volumes(path, expected):
    data = repositories.noise(70000, 920)
    with repositories.open_repository(path) as repo:
        openvolumes.create(repo, 'another', 1 << 20)
        assert {*repo.features} == {*expected['features'], features.VOLUMES}
        with openvolumes.open_volume(repo, 'another') as volume:
            volume.write(data, 300)
            volume.checkpoint()
    with repositories.open_repository(path) as repo:
        with openvolumes.open_volume(repo, 'another') as volume:
            assert volume.read(len(data), 300) == data
        require_images(repo, expected)
        require_volumes(repo, expected)
    assert make.report_of(path) == expected['check']


def test_their_groups_become_cold(path, expected):
    coldgroups.attach(path)
    with repositories.open_repository(path) as repo:
        cooled = coldgroups.cool_all(repo)
        assert {*repo.features} == {*expected['features']} | (
            {features.LISTED_SEGMENTS, features.COLD} if cooled else set())
    with repositories.open_repository(path) as repo:
        require_images(repo, expected)
        require_volumes(repo, expected)
    assert make.report_of(path) == expected['check']


def test_formats_before_the_first_release_are_refused(tmp_path):
    path = repositories.create(tmp_path / 'repository')
    file = path / 'repository.json'
    fields = json.loads(file.read_text())
    del fields['format'], fields['checksum']
    fields.update(major=4, minor=0)
    fields['checksum'] = files.json_checksum(fields)
    file.write_text(json.dumps(fields, indent=2, sort_keys=True))
    before = file.read_bytes()
    with pytest.raises(exceptions.VersionError) as caught:
        repositories.open_repository(path)
    assert str(caught.value) == (
        f'{file} has format version 4.0 of the time before the first '
        'release. Such repositories were never released: make a new one, and '
        'store the images in it')
    with pytest.raises(exceptions.VersionError, match=(
            'repository.json has format version 4 .* never released')):
        checker.check(path)
    assert file.read_bytes() == before


@pytest.mark.parametrize('old, new', [('cutting', 'chunking'),
                                      ('compare', 'verify')])
def test_parameters_of_older_names_are_refused(tmp_path, old, new):
    """Repositories with parameter names before the release are refused."""
    path = repositories.create(tmp_path / 'repository')
    file = path / 'repository.json'
    fields = json.loads(file.read_text())
    fields[old] = fields.pop(new)
    del fields['checksum']
    fields['checksum'] = files.json_checksum(fields)
    file.write_text(json.dumps(fields, indent=2, sort_keys=True))
    with pytest.raises(exceptions.DamagedError, match=old):
        repositories.open_repository(path)
    assert not checker.check(path).ok


def test_files_are_as_they_were_packed(path):
    """Two names of a recipe are one file, and other users have no access."""
    spool = path / 'spool'
    inodes = {os.stat(path / 'images' / image).st_ino
              for image in os.listdir(path / 'images')}
    if os.listdir(spool):
        assert inodes & {os.stat(spool / name).st_ino
                         for name in os.listdir(spool)}
    assert path.stat().st_mode & 0o777 == 0o700
