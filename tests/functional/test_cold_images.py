# SPDX-License-Identifier: Apache-2.0

"""Twenty images whose groups are all cold, on real object stores that fail.

Whatever the object store does, an image's bytes are the right ones, or there
is an error that names what happened; and when it works again, all images are
there.
"""

import contextlib
import dataclasses
import datetime
import pathlib
import random
import secrets
import time

from botocore import auth
import pytest

from dedupd.tasks import tierer
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from glance_dedup.objects import object_store
from glance_dedup.repository import cold_settings
from glance_dedup.repository import features
from glance_dedup.repository import prefix_owners
from tests.support import cold_repositories
from tests.support import maintenance
from tests.support import objects
from tests.support import repositories

pytest_plugins = ['tests.support.object_fixtures']
pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.needs('swift')]

MIB = 1 << 20
SLOTS = 1024
EVERYTHING = tierer.Policy(everything=True)


def family(number):
    """Return images of a distribution, which have many blocks in common."""
    base = repositories.mixture(6 * MIB, number // 5)
    return base + repositories.noise(5 * MIB, 100 + number)


class Images:
    """A repository with images, attached to a location in an object store."""

    def __init__(self, directory, place, credentials, count):
        self.path = repositories.create(directory / 'repository',
                                        group_slots=SLOTS)
        self.wanted = {f'image-{number}': family(number)
                       for number in range(count)}
        with self.open() as repo:
            self.settings = prefix_owners.attach(repo, place, credentials)
            for name, data in self.wanted.items():
                repositories.put(repo, name, data)

    def open(self):
        return repositories.open_repository(self.path)

    def tier(self):
        with self.open() as repo, (
                maintainer_role.Maintainer(repo)) as maintainer:
            maintenance.account(maintainer)
            result = tierer.run_once(maintainer, pacing.Pace(), EVERYTHING)
            self.groups = {
                number: maintainer.engine.group_facts(number)
                for number in maintainer.engine.groups()}
            return result

    def hot_bytes(self):
        return sum(facts['allocated'] for facts in self.groups.values()
                   if not facts['is_cold'])

    def forget(self):
        cold_repositories.forget(self.path)

    def read(self, name):
        with self.open() as repo:
            return repositories.read_all(repo, name)

    def require_all(self):
        self.forget()
        with self.open() as repo:
            for name, data in self.wanted.items():
                assert repositories.read_all(repo, name) == data, name
            return repo.slices.figures

    def connect(self):
        return cold_settings.connect(self.settings)

    def keys(self, store):
        return [key for key, _ in store.keys(f'{self.settings.owner}/g/')]


def put(store, key, content, directory):
    path = directory / 'object'
    path.write_bytes(content)
    with open(path, 'rb') as file:
        store.put(key, file)


def whole(store, key):
    return store.get(key, 0, store.size(key))


def taken(path, *without):
    """Return the bytes of the disk that a directory takes."""
    return sum(file.lstat().st_blocks * 512 for file in path.rglob('*')
               if file.is_file() and not any(
                   name in str(file.relative_to(path)) for name in without))


# -- twenty images ------------------------------------------------------------

# Long: an object store starts, and takes and gives 220 MiB.
@pytest.mark.parametrize('kind', [
    objects.JuiceGateway, objects.Swift,
    pytest.param(objects.SwiftAsS3, marks=pytest.mark.long)])
def test_twenty_images(kind, tmp_path):
    with kind(tmp_path / 'server') as server:
        images = Images(tmp_path, server.location('cold'),
                        server.credentials(tmp_path / 'credentials'), 20)
        result = images.tier()
        assert not result.failed and not result.busy
        hot = [number for number, facts in images.groups.items()
               if not facts['is_cold']]
        assert all(facts['published'] < facts['slots']
                   for number, facts in images.groups.items()
                   if number in hot), 'a full group stayed'
        figures = images.require_all()
        assert figures.gets >= figures.received // MIB
        images.forget()
        # The reserve for a full disk has the same size in any repository.
        local = taken(images.path, 'catalog-reserve') - images.hot_bytes()
        share = 100 * local / result.sent_bytes
        print(f'{server.kind}: {result.sent_bytes / MIB:.0f} MiB are cold, '
              f'{local / MIB:.1f} MiB stay, {share:.2f} %; open groups have '
              f'{images.hot_bytes() / MIB:.1f} MiB')
        assert local <= 0.03 * result.sent_bytes


# -- faults -------------------------------------------------------------------

@pytest.fixture
def place(server, proxy, faults, tmp_path):
    return (objects.object_location.parse(
        f's3://{server.container}/{secrets.token_hex(8)}', proxy.url),
        server.credentials(tmp_path / 'credentials'))


@pytest.fixture
def images(place, tmp_path):
    """A repository with three images, all cold."""
    made = Images(tmp_path, *place, 3)
    assert made.tier().groups > 3
    return made


#: The faults of requests, each a while after the one before.
TROUBLE = [503, 500, 'truncate', 'shorten', 'flip', 'forget', 'lengthen',
           'whole', 429, 'repeat']


@pytest.mark.parametrize('seed', range(3))
def test_requests_that_fail_now_and_then(place, faults, tmp_path, seed):
    """Uploads and reads succeed between faults, and no byte is wrong."""
    rng = random.Random(seed)
    images = Images(tmp_path, *place, 3)
    plan = [fault for _ in range(40)
            for fault in (rng.choice(TROUBLE), None, None)]
    faults.plan(*plan)
    for _ in range(20):
        with contextlib.suppress(exceptions.RepositoryError):
            if not images.tier().groups:
                break
    faults.plan(*plan, methods=('GET',))
    images.require_all()
    faults.reset()
    images.require_all()
    assert all(facts['is_cold'] for facts in images.groups.values()
               if facts['published'] == facts['slots'])


def test_each_object_is_put_twice(place, faults, tmp_path):
    images = Images(tmp_path, *place, 3)
    faults.plan(*['repeat'] * 1000, methods=('PUT',))
    moved = images.tier().groups
    faults.reset()
    with images.connect() as store:
        assert len(images.keys(store)) == moved > 3
    images.require_all()


def test_an_object_that_cannot_be_seen_for_a_while(images, faults):
    faults.plan(*[404] * 3, methods=('GET',))
    images.forget()
    with contextlib.suppress(exceptions.UnavailableError):
        assert images.read('image-0') == images.wanted['image-0']
    faults.reset()
    images.require_all()


def test_a_server_that_is_very_slow(images, faults, monkeypatch):
    monkeypatch.setattr(object_store, 'MIN_TIMEOUT', 0.2)
    monkeypatch.setattr(object_store, 'SLOWEST', 1 << 30)
    monkeypatch.setattr(object_store, 'TRIES', 1)
    faults.always = 'trickle'
    images.forget()
    begun = time.monotonic()
    with pytest.raises(exceptions.UnavailableError, match='too long'):
        images.read('image-0')
    assert time.monotonic() - begun < 120
    faults.always = None
    monkeypatch.undo()
    images.require_all()


def test_two_objects_that_are_exchanged(images, tmp_path):
    """No image has the other object's blocks."""
    with images.connect() as store:
        one, two = images.keys(store)[:2]
        contents = {key: whole(store, key) for key in (one, two)}
        put(store, one, contents[two], tmp_path)
        put(store, two, contents[one], tmp_path)
        images.forget()
        with pytest.raises(exceptions.DamagedError, match='groups/0000'):
            for name, data in images.wanted.items():
                assert images.read(name) == data
        for key, content in contents.items():
            put(store, key, content, tmp_path)
    images.require_all()


def test_a_byte_that_is_another(images, tmp_path):
    with images.connect() as store:
        key = images.keys(store)[0]
        content = whole(store, key)
        wrong = bytearray(content)
        wrong[len(wrong) // 2] ^= 1
        put(store, key, bytes(wrong), tmp_path)
        images.forget()
        failed = 0
        for name, data in images.wanted.items():
            try:
                assert images.read(name) == data
            except exceptions.DamagedError as e:
                assert f'groups/{key.rpartition("/")[2][:8]}' in str(e)
                failed += 1
        assert failed
        put(store, key, content, tmp_path)
    images.require_all()


def test_a_bucket_that_is_deleted(images, server, tmp_path):
    """Images of an emptied bucket are unavailable, and return with it."""
    with images.connect() as store:
        kept = {key: whole(store, key) for key, _ in store.keys('')}
        for key in kept:
            store.delete(key)
        images.forget()
        with pytest.raises(exceptions.UnavailableError):
            images.read('image-0')
        with pytest.raises(exceptions.UnavailableError, match='emptied'):
            images.tier()
        for key, content in kept.items():
            put(store, key, content, tmp_path)
    images.require_all()


def test_a_bucket_that_is_not_there(images):
    other = dict(images.settings.location.fields(), container='missing')
    settings = cold_settings.read(images.path)
    cold_settings.write(images.path, dataclasses.replace(
        settings, location=objects.object_location.from_fields(other)))
    images.forget()
    with pytest.raises(exceptions.UnavailableError):
        images.read('image-0')
    with pytest.raises(exceptions.UnavailableError):
        images.tier()
    cold_settings.write(images.path, settings)
    images.require_all()


def test_wrong_credentials(images, server):
    right = pathlib.Path(images.settings.credentials).read_text()
    objects.write_s3(images.settings.credentials, server.key, 'wrong')
    images.forget()
    with pytest.raises(exceptions.UnavailableError, match='Signature'):
        images.read('image-0')
    with pytest.raises(exceptions.UnavailableError, match='Signature'):
        images.tier()
    objects._write(images.settings.credentials, right)
    images.require_all()


def test_a_clock_that_is_wrong_by_an_hour(images, monkeypatch):
    """The message says that the clock is wrong."""
    now = auth.get_current_datetime

    def late(*args, **options):
        return now(*args, **options) + datetime.timedelta(hours=1)

    images.forget()
    monkeypatch.setattr(auth, 'get_current_datetime', late)
    with pytest.raises(exceptions.UnavailableError,
                       match='RequestTimeTooSkewed'):
        images.read('image-0')
    with pytest.raises(exceptions.UnavailableError,
                       match='RequestTimeTooSkewed'):
        images.tier()
    monkeypatch.undo()
    images.require_all()


# Long: Swift starts.
def test_tokens_that_end_in_the_middle_of_an_image(tmp_path):
    with objects.Swift(tmp_path / 'server') as server:
        images = Images(tmp_path, server.location('cold'),
                        server.credentials(tmp_path / 'credentials'), 3)
        assert images.tier().groups > 3
        images.forget()
        with images.open() as repo, repo.open_image('image-0') as image:
            wanted = images.wanted['image-0']
            found = bytearray()
            while len(found) < len(wanted):
                # A request may meet the end of one token, and not of two.
                repositories.eventually(lambda: not repo.slices._requests)
                server.end_tokens()
                found += image.read(2 * MIB, len(found))
        assert found == wanted


def test_s3_credentials_that_end_in_the_middle_of_an_image(place, faults,
                                                           tmp_path):
    """A reader uses the new credentials as soon as they are there."""
    images = Images(tmp_path, *place, 1)
    file = pathlib.Path(images.settings.credentials)
    images.tier()
    images.forget()
    wanted = images.wanted['image-0']
    with images.open() as repo, repo.open_image('image-0') as image:
        assert image.read(MIB) == wanted[:MIB]
        faults.always = 'expire'
        with pytest.raises(exceptions.UnavailableError, match='image-0.*'
                           'ExpiredToken: The provided token has expired'):
            image.read(-1, MIB)
        file.write_text(f'# These are new.\n{file.read_text()}')
        faults.always = None
        faults.plan('expire', methods=('GET',))
        assert image.read(-1, MIB) == wanted[MIB:]


def test_an_older_program_refuses(images, monkeypatch):
    monkeypatch.setattr(features, 'KNOWN', features.KNOWN[:2])
    with pytest.raises(exceptions.VersionError, match="the feature 'cold'"):
        images.open()


def test_a_handle_from_before_the_repository_was_attached(place, tmp_path):
    """An old handle reads new cold groups, and uses the new reserve."""
    path = repositories.create(tmp_path / 'repository', group_slots=SLOTS)
    with repositories.open_repository(path) as early:
        content = repositories.noise(SLOTS * 4096)
        repositories.put(early, 'image', content)
        kept = early.room()[1]
        with repositories.open_repository(path) as other:
            prefix_owners.attach(other, *place)
            with maintenance.maintaining(other) as maintainer:
                maintenance.account(maintainer)
                assert tierer.run_once(
                    maintainer, pacing.Pace(), EVERYTHING).groups == 1
        assert repositories.read_all(early, 'image') == content
        assert early.slices.figures.gets
        assert early.room()[1] > kept
