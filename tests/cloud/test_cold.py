# SPDX-License-Identifier: Apache-2.0
"""Groups of Glance's images are in Swift, which uses Keystone's users."""

import contextlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import pytest
from requests import exceptions

from glance_dedup.objects import object_location
from glance_dedup.objects import object_store
from glance_dedup.repository import cold_settings
from glance_dedup.repository import image_repository
from glance_dedup.repository import prefix_owners
from tests.cloud import boot
from tests.cloud import disk_images
from tests.cloud import local_cloud
from tests.support import documents
from tests.support import repositories

# Long: the first test starts a cloud with Swift; commands log in at
# Keystone, and requests are repeated while Swift is down.
pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.needs('swift')]

#: Seconds. For a loaded machine.
LIMIT = 600
MIB = 1 << 20
#: Seconds for which Keystone's tokens are good. The client library requests
#: another one half a minute before that.
TOKEN_LIFE = 35


@pytest.fixture(scope='module')
def cloud():
    """A cloud whose repository is attached to Swift; without Nova at first."""
    with tempfile.TemporaryDirectory(prefix='cloud-') as parent:
        one = local_cloud.Cloud(pathlib.Path(parent) / 'one', swift=True)
        with one:
            one.up(['glance'])
            yield one


def tier(cloud):
    """Return the output of the command that moves groups."""
    result = subprocess.run(
        [sys.executable, '-m', 'glance_dedup.cli.entry', '--socket',
         cloud.services['dedupd'].socket, 'task', 'tier', '--all'],
        cwd=disk_images.TOP, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=LIMIT)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def forget(cloud):
    """Empty the cache; return the number of its directories."""
    there = list(pathlib.Path(cloud.repository, 'slices').iterdir())
    for directory in there:
        for one in directory.iterdir():
            one.unlink()
    return len(there)


def objects(cloud):
    settings = cold_settings.require(cloud.repository)
    with cold_settings.connect(settings) as store:
        return store.keys(f'{settings.owner}/g/')


def download(connection, image):
    """Return the status, and the body if it is whole."""
    answer = connection.image.get(f'/images/{image}/file', stream=True)
    found = b''.join(answer.iter_content(MIB))
    assert len(found) == int(answer.headers['content-length'])
    return answer.status_code, found


def test_an_image_comes_out_of_swift(cloud, tmp_path):
    content = repositories.noise(21 * MIB, 1)
    path = tmp_path / 'image'
    path.write_bytes(content)
    with contextlib.closing(cloud.connect('demo')) as demo:
        image = boot.upload(demo, path, 'cold', store='dedup')
        before = len(objects(cloud))
        said = tier(cloud)
        moved = len(objects(cloud)) - before
        # Groups of 4 MiB; the rest of the last one stays.
        assert moved >= 5, said
        forget(cloud)
        assert download(demo, image) == (200, content)
        assert forget(cloud) >= moved
        cloud.services['swift'].stop()
        try:
            # Cached data may come, but no wrong data.
            with contextlib.suppress(exceptions.ChunkedEncodingError):
                found = download(demo, image)
                assert found[0] == 503 or found == (200, content)
        finally:
            cloud.services['swift'].start()
        assert download(demo, image) == (200, content)
        demo.image.delete_image(image)


def test_the_guide_makes_a_user_for_swift(cloud, tmp_path):
    """The page's commands and file make a user in the cloud's Keystone."""
    page = documents.SOURCE / 'admin' / 'object-storage.rst'
    found = [block for block in documents.blocks(page)
             if block.section == 'Credentials for Swift']
    lines = [line.text for block in found if block.language == 'console'
             for line in documents.commands(block)]
    assert len(lines) == 4
    for line in lines:
        result = subprocess.run(
            ['bash', '-c', f'. "$0" && {line}', cloud.directory / 'openrc'],
            env={**os.environ, 'PATH': f'{pathlib.Path(sys.prefix) / "bin"}:'
                 + os.environ['PATH']}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=LIMIT)
        assert result.returncode == 0, f'{line}: {result.stderr}'
    text, = (block.text for block in found if block.language == 'ini')
    file = tmp_path / 'cold.conf'
    file.write_text(text.replace('https://keystone.example.org',
                                 cloud.url('keystone')))
    file.chmod(0o600)
    path = repositories.create(tmp_path / 'repository')
    with repositories.open_repository(path) as repo:
        settings = prefix_owners.attach(
            repo, object_location.parse('swift://images/glance'), str(file),
            cold_settings.Options(allow_http=True))
    with cold_settings.connect(settings) as store:
        assert store.keys('owners/')


@pytest.fixture
def short_tokens(cloud):
    """Have Keystone give tokens that last TOKEN_LIFE seconds."""
    keystone = cloud.services['keystone']
    before = keystone.token_life

    def restart(seconds):
        keystone.stop()
        keystone.token_life = seconds
        keystone.start()

    restart(TOKEN_LIFE)
    yield
    restart(before)


# Long: it waits until a token of TOKEN_LIFE seconds has expired.
@pytest.mark.long
def test_a_token_ends_in_the_middle_of_an_image(cloud, short_tokens):
    """Keystone and Swift refuse the token, and a new one is requested."""
    content = repositories.noise(13 * MIB, 2)
    with image_repository.Repository(cloud.repository) as repo:
        repositories.put(repo, 'middle', content)
        tier(cloud)
        forget(cloud)
        found = bytearray()
        with repo.open_image('middle') as image:
            begun = time.monotonic()
            while len(found) < len(content):
                found += image.read(3 * MIB, len(found))
                if len(found) == 3 * MIB:
                    time.sleep(TOKEN_LIFE + 2)
        assert time.monotonic() - begun > TOKEN_LIFE
        assert found == content
        repo.delete('middle')


@pytest.mark.long
def test_a_password_changes_in_the_middle_of_an_image(cloud):
    """The image is unavailable until the file has the new password.

    No process restarts.
    """
    content = repositories.noise(13 * MIB, 3)
    file = pathlib.Path(cloud.services['swift'].credentials)
    before = file.read_text()

    def change(password):
        with contextlib.closing(cloud.connect()) as admin:
            admin.identity.update_user(
                admin.identity.find_user('glance-dedup'), password=password)

    with image_repository.Repository(cloud.repository) as repo:
        repositories.put(repo, 'password', content)
        tier(cloud)
        forget(cloud)
        with repo.open_image('password') as image:
            found = bytearray(image.read(3 * MIB, 0))
            change('another')
            try:
                forget(cloud)
                # Swift remembers for some seconds that a token was good.
                time.sleep(12)
                with pytest.raises(object_store.exceptions.UnavailableError,
                                   match='refuses the credentials|40[13]'):
                    image.read(9 * MIB, 3 * MIB)
                file.write_text(re.sub('password = .*', 'password = another',
                                       before))
                found += image.read(len(content), len(found))
            finally:
                change(cloud.password)
                file.write_text(before)
        assert found == content
        repo.delete('password')


@pytest.mark.long
def test_a_server_boots_out_of_swift(cloud, tmp_path):
    cloud.up()
    text = 'an image that is in Swift'
    path = tmp_path / 'image'
    disk_images.variant(disk_images.images().raw, path, text, 24)
    with contextlib.closing(cloud.connect('demo')) as demo:
        image = boot.upload(demo, path, 'cold', store='dedup')
        before = len(objects(cloud))
        tier(cloud)
        assert len(objects(cloud)) - before >= 5
        forget(cloud)
        server = boot.create(demo, image, 'server')
        try:
            assert boot.wait_until_up(demo, server) == (text, 1)
            assert forget(cloud)
        finally:
            boot.delete(demo, server)
            demo.image.delete_image(image)
