# SPDX-License-Identifier: Apache-2.0

"""An unknown feature and a newer version are refused by name.

A newer minor version is read. The tests try this with each structure that has
a version of its own, and with each program that reads it. The fence and the
segments have no version: they follow ``repository.json``, or their group.
"""

import json
import os
import re
import struct

import glance_store
from glance_store import exceptions as store_exceptions
import pytest
import xxhash

from dedupd.tasks import collector
from dedupd.tasks import recompressor
from dedupd.tasks import scrubber
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.check import checker
from glance_dedup.maintenance import database
from glance_dedup.repository import features
from glance_dedup.repository import openvolumes
from tests.support import daemons
from tests.support import maintenance
from tests.support.maintenance import maintaining
from tests.support import repositories
from tests.support import stores
from tests.unit.cli import conftest

pytest_plugins = ['tests.support.maintainer_fixtures']
configure = stores.configure

DATA = maintenance.content(1, 2)
OTHER = maintenance.content(3, 1)
GROUP, IMAGE = 'groups/00000001', 'images/image'
#: The first major version of each that this program cannot read.
NEWER = {GROUP: 4, IMAGE: 3}
# Bytes under the checksum that follows them; a recipe's header is a page.
CHECKED = {GROUP: 504, IMAGE: 4088}


@pytest.fixture
def cli(tmp_path, path, capfd):
    return conftest.Cli(tmp_path, capfd)


@pytest.fixture
def filled(path):
    with repositories.open_repository(path, codec='none') as repo:
        repositories.put(repo, 'image', DATA)
        with maintaining(repo) as maintainer:
            maintenance.account(maintainer)
    return path


def set_version(path, name, version, offset=8, good=True):
    """Set the major version of a group or a recipe, or at 10 the minor one."""
    data = bytearray((path / name).read_bytes())
    struct.pack_into('<H', data, offset, version)
    end = CHECKED.get(name, 504)
    if good:
        data[end:end + 8] = struct.pack(
            '<Q', xxhash.xxh3_64_intdigest(bytes(data[:end])))
    # Write in place, since the file may have two names.
    with open(path / name, 'r+b') as f:
        f.write(data)


# -- repository.json ----------------------------------------------------------

def require_refused(path, cli, configure, sentence):
    """Require that all programs refuse the repository by this regex."""
    with pytest.raises(exceptions.VersionError, match=sentence):
        repositories.open_repository(path)
    for command in repositories.COMMANDS:
        if command != 'repository check':
            result = cli(*command.split())
            assert result.status == 3 and re.search(sentence, result.err)
    store = configure(one={'dedup_store_datadir': path})
    with pytest.raises(store_exceptions.BadStoreConfiguration,
                       match=sentence):
        store.configure_add()
    with pytest.raises(store_exceptions.StoreAddDisabled):
        stores.add(b'data')
    with pytest.raises(store_exceptions.RemoteServiceUnavailable):
        glance_store.get(stores.GOOD, 'one')
    with daemons.Daemon(path) as daemon:
        daemon.start(wait=False)
        assert daemon.process.wait(60) != 0
        assert re.search(sentence, daemon.text())
        assert 'Traceback' not in daemon.text()


def test_newer_repository(path, cli, configure):
    repositories.edit_parameters(path, format=2)
    require_refused(path, cli, configure,
                    'repository.json has format version 2; .* knows 1')
    sentence = 'repository.json has format 2; this program reads 1'
    with pytest.raises(exceptions.VersionError, match=sentence):
        checker.check(path)
    cli('repository', 'check').failed(sentence)


def test_newer_repository_with_another_checksum(path):
    """A newer format with another checksum is refused by its version."""
    fields = json.loads((path / 'repository.json').read_text())
    fields.update(format=7, checksum='another kind', more=[1])
    (path / 'repository.json').write_text(json.dumps(fields))
    for call in (repositories.open_repository, checker.check):
        with pytest.raises(exceptions.VersionError, match='7'):
            call(path)


def test_repository_with_a_feature_of_the_future(filled, cli, configure):
    """An unknown feature is refused by name, and nothing changes (N15.3)."""
    (filled / 'features' / 'of-the-future').touch(mode=0o600)
    before = contents(filled)
    require_refused(filled, cli, configure, "the feature 'of-the-future'")
    with pytest.raises(exceptions.VersionError, match='of-the-future'):
        checker.check(filled)
    cli('repository', 'check').failed('of-the-future')
    assert contents(filled) == before
    (filled / 'features' / 'of-the-future').unlink()
    with repositories.open_repository(filled) as repo:
        assert repositories.read_all(repo, 'image') == DATA


def contents(path):
    return {str(file): (file.stat().st_mtime_ns,
                        file.read_bytes() if file.is_file() else None)
            for file in path.rglob('*')}


def test_each_feature_is_set_when_it_is_needed(filled):
    """Those of cold groups are in tests/c/maintenance."""
    with repositories.open_repository(filled, codec='none') as repo:
        assert repo.features == []
        repositories.put(repo, 'copy', DATA, dedup=False)
        assert repo.features == [features.NODEDUP]
        openvolumes.create(repo, 'disk', size=1 << 20)
        assert {*repo.features} == {features.VOLUMES, features.NODEDUP}
        with maintaining(repo) as maintainer:
            maintenance.account(maintainer)
            recompressor.run_once(maintainer, pacing.Pace(), 'zstd', 3,
                                  similar=True)
        assert {*repo.features} == {features.VOLUMES, features.NODEDUP,
                                    features.LISTED_SEGMENTS}
    assert checker.check(filled).ok


def test_known_features(filled):
    """The engine accepts each known feature, and refuses an unknown one."""
    with repositories.open_repository(filled) as repo:
        assert repo.features == []
        for number, name in enumerate(features.KNOWN, 1):
            repo.handle().use_feature(name)
            assert repo.features == list(features.KNOWN[:number])
        with pytest.raises(exceptions.InvalidParameter, match="'other'"):
            repo.handle().use_feature('other')
    assert checker.check(filled).ok


def test_an_older_program_keeps_a_feature_from_being_set(filled):
    """A program that does not know the feature blocks setting it (N15.2)."""
    number = features.KNOWN.index(features.COLD)
    for known, refused in ((number, True), (number + 1, False)):
        with (repositories.holding(filled / 'locks' / 'groups',
                                   repositories.FEATURE_BYTE + known,
                                   shared=True),
              repositories.open_repository(filled, lock_timeout=0.1) as repo):
            if refused:
                with pytest.raises(exceptions.BusyError, match="'cold'"):
                    repo.handle().use_feature(features.COLD)
            else:
                repo.handle().use_feature(features.COLD)
            assert repo.features == ([] if refused else [features.COLD])


def test_features_are_missing(filled, cli):
    (filled / 'features').rmdir()
    for command in ('image', 'list'), ('task', 'merge'):
        result = cli(*command)
        assert result.status == 1
        assert 'features is missing: restore it from a backup' in result.err
    assert not checker.check(filled).ok


# -- groups and recipes -------------------------------------------------------

@pytest.mark.parametrize('good', [True, False], ids=['', 'other checksum'])
@pytest.mark.parametrize('name', [GROUP, IMAGE])
def test_newer_file(filled, cli, name, good):
    newer = NEWER[name]
    set_version(filled, name, newer, good=good)
    words = (f'{name} has format version {newer}; this program knows up to '
             f'{newer - 1}')
    with repositories.open_repository(filled) as repo:
        with pytest.raises(exceptions.VersionError, match=words):
            repositories.read_all(repo, 'image')
        # Others are stored and read.
        repositories.put(repo, 'other', OTHER)
        assert repositories.read_all(repo, 'other') == OTHER
    cli('image', 'get', 'image', filled / 'out').failed(words)
    report = checker.check(filled)
    assert not report.ok
    assert 'image' in report.damaged_images
    if good:
        words = f'has format {newer}.0; this program reads 1.x'
        assert any(f.file == name and words in f.sentence
                   for f in report.findings), report.findings


@pytest.mark.parametrize('name', [GROUP, IMAGE])
def test_newer_file_is_for_the_driver(configure, tmp_path, name):
    store = configure(one={})
    url = stores.add(DATA)[0]
    set_version(tmp_path / 'one', name, NEWER[name])
    store = configure(one={'dedup_store_codec': 'none'})
    with pytest.raises(store_exceptions.RemoteServiceUnavailable):
        stores.get(url)
    assert store.is_capable(glance_store.capabilities.BitMasks
                            .WRITE_ACCESS)


@pytest.mark.parametrize('name', [GROUP, IMAGE])
def test_newer_file_and_the_maintainer(filled, name):
    """The maintainer frees nothing that it cannot read."""
    set_version(filled, name, NEWER[name])
    words = f'version {NEWER[name]}'
    before = (filled / name).read_bytes()
    pace = pacing.Pace()
    with repositories.open_repository(filled, codec='none') as repo:
        repositories.put(repo, 'other', OTHER)
        repo.delete('other')
        with maintaining(repo) as maintainer:
            maintainer.rebuild()
            result = collector.run_once(maintainer, pace)
            scrubber.run_once(maintainer, pace)
            if name == IMAGE:
                assert words in result.refused
                assert words in maintainer.unreadable.reasons()['image']
            else:
                assert words in result.failed[1]
    assert (filled / name).read_bytes() == before
    set_version(filled, name, 1)
    with repositories.open_repository(filled, codec='none') as repo:
        assert repositories.read_all(repo, 'image') == DATA
        with maintaining(repo) as maintainer:
            assert collector.run_once(maintainer, pace).refused is None
            maintenance.require_collected(maintainer)
        assert repositories.read_all(repo, 'image') == DATA


def test_newer_minor_versions_of_files(filled):
    set_version(filled, IMAGE, 9, offset=10)
    with repositories.open_repository(filled) as repo:
        assert repositories.read_all(repo, 'image') == DATA
        with maintaining(repo) as maintainer:
            assert maintainer.warnings == []
            assert collector.run_once(
                maintainer, pacing.Pace()).refused is None
    assert checker.check(filled).ok


# -- structures that can be rebuilt -------------------------------------------

def test_newer_catalog(filled):
    """A newer catalog is set aside with a warning, and rebuilt."""
    with repositories.open_repository(filled) as repo:
        with maintaining(repo) as maintainer:
            catalog = maintainer.catalog
            catalog._meta = {'format': 3, 'sequence': catalog.sequence,
                             'of the future': True}
            catalog.write(catalog.batch(), sync=True,
                          sequence=catalog.sequence + 1)
        with maintaining(repo) as maintainer:
            words, = maintainer.warnings
            assert (f'{filled}/catalog has format 3; this program knows '
                    f'{database.FORMAT}') in words
            assert 'set aside' in words
            maintenance.require_counted(maintainer)
    assert any(name.startswith('catalog-')
               for name in os.listdir(filled / 'quarantine'))


def test_newer_filter(filled):
    """A newer filter is replaced, since it has only hints."""
    with repositories.open_repository(filled) as repo:
        repositories.put(repo, 'again', DATA)
    directory = filled.parent / f'{filled.name}-filter'
    file, = directory.iterdir()
    data = bytearray(file.read_bytes())
    struct.pack_into('<I', data, 8, 3)
    data[56:64] = struct.pack('<Q', xxhash.xxh3_64_intdigest(
        bytes(data[:56])))
    data[16384:] = b'\xff' * (len(data) - 16384)
    file.write_bytes(data)
    with repositories.open_repository(filled) as repo:
        assert repositories.put(repo, 'once-more', DATA).new_bytes == 0
        assert repositories.read_all(repo, 'once-more') == DATA
    assert struct.unpack_from('<I', file.read_bytes(), 8) == (2,)


def test_newer_spare_copies(filled):
    with repositories.open_repository(filled, codec='none') as repo:
        with maintaining(repo) as maintainer:
            scrubber.run_once(maintainer, pacing.Pace(), full=True,
                              spare_threshold=1)
    spare = 'spares/00000001'
    set_version(filled, spare, NEWER[GROUP])
    with repositories.open_repository(filled, codec='none') as repo:
        assert repositories.read_all(repo, 'image') == DATA
        report = checker.check(filled)
        assert not report.damaged_images
        words = f'has format {NEWER[GROUP]}.0'
        assert any(f.file == spare and words in f.sentence
                   for f in report.findings)
        with maintaining(repo) as maintainer:
            scrubber.run_once(maintainer, pacing.Pace(), full=True,
                              spare_threshold=1)
    assert checker.check(filled).ok
