# SPDX-License-Identifier: Apache-2.0

"""Backups are images, but neither Glance's nor a cache's."""

import asyncio
import contextlib
import datetime
import hashlib
import json

from glance_store import exceptions as glance_exceptions
import pytest

from dedupd.compute.cache import cache_catalog
from dedupd.http import messages
from dedupd.serve import image_handlers
from dedupd.status import repository_stats
from glance_dedup.base import exceptions
from glance_dedup.base import hashes
from glance_dedup.base import imageids
from glance_dedup.base import locations
from glance_dedup.base import thread_pool
from glance_dedup.check import checker
from glance_dedup.check import ondisk
from glance_dedup.cli import entry
from glance_dedup import fuse_operations
from glance_dedup.repository import openvolumes
from tests.support import maintenance
from tests.support import replicas
from tests.support import repositories
from tests.support.repositories import put
from tests.support.repositories import read_all
from tests.support import stores

pytest_plugins = ['tests.support.maintainer_fixtures']

configure = stores.configure

BACKUP = 'b_web_20261123T180000Z'
TIME = datetime.datetime(2026, 11, 23, 18, tzinfo=datetime.timezone.utc)
DATA = maintenance.content(2)
MAX_LENGTH = 'x' * 109


@pytest.fixture
def path(tmp_path):
    return maintenance.create(tmp_path)


@pytest.fixture
def backup(repo):
    """A backup, in a repository that also has an image."""
    put(repo, BACKUP, DATA)
    put(repo, 'image', maintenance.content(1))
    return BACKUP


@pytest.fixture
def command(path, tmp_path, capfd):
    def run(*arguments):
        capfd.readouterr()
        status = entry.main([
            '--repository', str(path), '--filter-dir',
            str(tmp_path / 'filter'), '--socket', str(tmp_path / 'none'),
            *arguments])
        out, err = capfd.readouterr()
        return status, out, err
    return run


# -- ids ----------------------------------------------------------------------

OF_BACKUPS = {
    BACKUP: ('web', TIME),
    'b_web_1_20261123T180000Z': ('web_1', TIME),
    'b____20261123T180000Z': ('__', TIME),
    'b_-_20261123T180000Z': ('-', TIME),
    f'b_{BACKUP}_20261123T180000Z': (BACKUP, TIME),
    'b_20250101T000000Z_20261123T180000Z': ('20250101T000000Z', TIME),
    f'b_{MAX_LENGTH}_20261123T180000Z': (MAX_LENGTH, TIME),
    'b_web_20240229T235959Z': ('web', datetime.datetime(
        2024, 2, 29, 23, 59, 59, tzinfo=datetime.timezone.utc)),
    'b_web_00010101T000000Z': ('web', datetime.datetime(
        1, 1, 1, tzinfo=datetime.timezone.utc))}
#: Names similar to those of backups; some are invalid ids.
OTHERS = (
    'b_web', 'b__20261123T180000Z', 'b_20261123T180000Z',
    f'b_{MAX_LENGTH}x_20261123T180000Z', 'B_web_20261123T180000Z',
    'ab_web_20261123T180000Z', 'b_web_20261123T180000z',
    'b_web_20261123T180000', 'b_web_20261123T180000Z_',
    'b_web_20261123T180000Z\n', 'b_web_20261123t180000Z',
    'b_web_20261123180000Z', 'b_web-20261123T180000Z',
    # Times that do not exist.
    'b_web_20260229T180000Z', 'b_web_20261301T180000Z',
    'b_web_20260001T180000Z', 'b_web_20260100T180000Z',
    'b_web_20261123T240000Z', 'b_web_20261123T186000Z',
    'b_web_20261123T180060Z', 'b_web_20261123T180061Z',
    'b_web_00000101T000000Z', 'b_web_2026112 T180000Z',
    'b_web_+0261123T180000Z', 'b_web_2026112\u0663T180000Z',
    'b_w.b_20261123T180000Z', 'b_w/b_20261123T180000Z',
    'b_w\u00e9b_20261123T180000Z', '')


@pytest.mark.parametrize('image_id', [*OF_BACKUPS, *OTHERS])
def test_ids(image_id):
    said = OF_BACKUPS.get(image_id)
    found = imageids.of_backup(image_id)
    assert found == said
    # The checker has this rule in its own code.
    assert ondisk.is_backup(image_id) == (said is not None)
    if found is not None:
        assert len(image_id) <= 128 and imageids.is_image(image_id)
        assert found.image_id == imageids.backup_id(*said) == image_id


@pytest.mark.parametrize('name', ['', f'{MAX_LENGTH}x', 'a.b', 'a/b', 'a b',
                                  'web\n', '\u00e9', '../web'])
def test_names_that_backups_cannot_have(name):
    assert not imageids.is_backup_name(name)
    with pytest.raises(ValueError, match='1 to 109 characters'):
        imageids.backup_id(name, TIME)


def test_the_time_is_in_utc_and_in_whole_seconds():
    east = datetime.timezone(datetime.timedelta(hours=3, minutes=30))
    assert imageids.backup_id('web', datetime.datetime(
        2026, 11, 23, 21, 30, 0, 999999, tzinfo=east)) == BACKUP
    with pytest.raises(ValueError, match='no time zone'):
        imageids.backup_id('web', datetime.datetime(2026, 11, 23))


def test_sorted_by_name_then_by_time(repo):
    """Backups are sorted by name and time; ids would sort differently."""
    ids = ['b_web_20261123T180000Z', 'b_web_20261122T180000Z',
           'b_web_1_20251123T180000Z', 'b_webA_20261123T180000Z']
    for image_id in (*ids, 'image'):
        put(repo, image_id, b'')
    assert [found.image_id for found in repo.backups()] == [
        ids[1], ids[0], ids[3], ids[2]]


# -- operations on an image accept backups, too -------------------------------

def test_they_are_read_and_deleted_as_images(repo, command, backup, tmp_path):
    assert repo.images() == [backup, 'image']
    file = tmp_path / 'file'
    assert command('image', 'get', backup, str(file))[0] == 0
    assert file.read_bytes() == DATA
    for words in (('image', 'show', backup),
                  ('image', 'verify', '--no-glance', backup),
                  ('image', 'copy', backup, 'copy'),
                  ('volume', 'clone', backup, 'disk')):
        assert command(*words)[0] == 0, words
    assert read_all(repo, 'copy') == DATA
    with openvolumes.open_volume(repo, 'disk') as volume:
        assert volume.read(len(DATA), 0) == DATA
    assert command('image', 'delete', backup)[0] == 0
    assert repo.backups() == []


def test_they_are_mounted(repo, backup):
    source = fuse_operations.FromRepository(repo)
    assert source.names() == [backup, 'image']
    with source.open(source.facts(backup)) as image:
        assert image.read(len(DATA), 0) == DATA


def test_out_and_in_again(repo, command, backup, tmp_path):
    directory = tmp_path / 'exported'
    directory.mkdir()
    assert command('glance', 'export', str(directory), backup)[0] == 0
    repo.delete(backup)
    file = str(directory / backup)
    status, _, err = command('image', 'put', backup, file)
    assert status == 2 and 'is the id of a backup' in err
    assert command('image', 'put', '--backup', backup, file)[0] == 0
    assert read_all(repo, backup) == DATA


@pytest.mark.parametrize('words', [
    ('image', 'put', BACKUP, '/dev/null'), ('image', 'copy', 'image', BACKUP),
    ('volume', 'snapshot', 'disk', BACKUP)])
def test_no_backup_is_made_by_accident(repo, command, words):
    """No command makes a backup by accident, which pruning would delete."""
    put(repo, 'image', DATA)
    openvolumes.create(repo, 'disk', 512)
    status, _, err = command(*words)
    assert status == 2 and f'{BACKUP} is the id of a backup' in err
    assert repo.backups() == []


# -- operations on all images -------------------------------------------------

def test_lists_and_counts(command, backup):
    assert [row['image_id'] for row in json.loads(
        command('image', 'list', '-f', 'json')[1])] == ['image']
    size = 2 * len(DATA)
    shown = json.loads(command('repository', 'show', '-f', 'json')[1])
    assert (shown['images'], shown['backups'], shown['logical_bytes']) == (
        1, 1, size)
    shown = json.loads(command('status', '-f', 'json')[1])['space']
    assert (shown['images'], shown['backups'], shown['logical_bytes']) == (
        1, 1, size)


def test_the_check_counts_them(path, backup):
    found = checker.check(path).figures
    assert (found['images'], found['backups']) == (1, 1)


def test_figures(repo, maintainer, backup):
    maintainer.rebuild()
    found = repository_stats.Figures(repo, lambda: maintainer.catalog)
    with contextlib.closing(found):
        space = found.space()
        assert (space['images'], space['backups']) == (1, 1)
        assert space['logical_bytes'] == 2 * len(DATA)
        assert {i['image_id']: i['backup'] for i in found.images()} == {
            backup: True, 'image': False}
        assert found.sharing()['images'] == ['image']
    project, = maintainer.catalog.statistics()['projects'].values()
    assert (project['images'], project['backups']) == (1, 1)


def test_all_images_are_none_of_them(repo, command, backup, tmp_path):
    directory = tmp_path / 'exported'
    directory.mkdir()
    status, _, err = command('glance', 'export', '--all', str(directory))
    assert status == 0 and 'leaves 1 backups out' in err
    assert [file.name for file in directory.iterdir()] == ['image']
    assert command('image', 'verify', '--all', '--no-glance')[0] == 0
    assert hashes.recorded(repo.path, repo.stat('image'))
    assert not hashes.recorded(repo.path, repo.stat(backup))
    # The hash of a backup that was named is not swept away.
    assert command('image', 'verify', '--no-glance', backup)[0] == 0
    assert command('image', 'verify', '--all', '--no-glance')[0] == 0
    assert hashes.recorded(repo.path, repo.stat(backup))


# -- other sites --------------------------------------------------------------

def test_one_that_is_named_is_sent_to_another_site(repo, backup, tmp_path):
    away = repositories.create(tmp_path / 'away',
                               block_size=maintenance.BLOCK)
    with repositories.open_repository(away) as there:
        replicas.receive(there, repo, backup)
        assert read_all(there, backup) == DATA


def test_all_that_is_sent_to_another_site(command, backup):
    def sent(*words):
        status, out, err = command(
            'image', 'replicate', *words, '--to', 'unix:/nowhere', '--dry-run',
            '-f', 'json')
        assert status == 0, err
        return [row['image_id'] for row in json.loads(out)], err

    found, err = sent('--all')
    assert found == ['image'] and 'leaves 1 backups out' in err
    assert sent(backup)[0] == [backup]


# -- a cache ------------------------------------------------------------------

def test_a_repository_of_backups_is_no_cache(repo):
    put(repo, BACKUP, DATA)
    with pytest.raises(exceptions.InvalidParameter, match='is no cache'):
        cache_catalog.Held(repo)


# -- Glance -------------------------------------------------------------------

def test_glance_stores_and_deletes_none(configure, path, repo, backup):
    """Glance cannot store or delete a backup, even by a signed location."""
    configure(one={'dedup_store_datadir': path})
    with pytest.raises(glance_exceptions.Invalid, match='of a backup'):
        stores.add(b'x', 'b_other_20261123T180000Z')
    url = locations.url(repo, backup, repo.stat(backup).upload_id)
    for call in (stores.get, stores.delete):
        with pytest.raises(glance_exceptions.NotFound):
            call(url)
    assert read_all(repo, backup) == DATA
    assert len(repo.images()) == 2


class Everything:
    """A Glance that has each image, with the expected hash."""

    asked = 0

    async def check(self, token, image_id):
        self.asked += 1
        return hashes.said('sha512', hashlib.sha512(DATA).hexdigest())


def test_a_user_s_token_opens_none(repo, command, backup):
    assert command('image', 'verify', '--no-glance', backup)[0] == 0
    put(repo, 'twin', DATA)
    assert command('image', 'verify', '--no-glance', 'twin')[0] == 0
    served = image_handlers.Reads(repo, thread_pool.Workers('read', 1),
                                  Everything())

    def ask(image_id, peer, **headers):
        request = messages.Request('GET', {}, headers, peer, b'')

        async def run():
            image = await served.open(request, image_id)
            with contextlib.closing(image):
                return image.stat.image_id
        return asyncio.run(run())

    user = messages.Peer(None)
    assert ask('twin', user, **{'x-auth-token': 't'}) == 'twin'
    with pytest.raises(messages.HTTPError) as caught:
        ask(backup, user, **{'x-auth-token': 't'})
    assert caught.value.status == 404 and served._tokens.asked == 1
    # An operator reads them as images.
    assert ask(backup, messages.Peer(0)) == backup
