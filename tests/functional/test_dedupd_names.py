# SPDX-License-Identifier: Apache-2.0
"""Names of images, from a real Glance: in HTTP, on the page, in commands."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from dedupd.sync import image_names
from glance_dedup.base import printable
from tests.functional import dedupd_watched
from tests.functional import glance_server
from tests.functional import test_dedupd_page
from tests.support import clouds
from tests.support import daemons
from tests.support import repositories

pytestmark = [pytest.mark.slow, pytest.mark.needs('browser')]

LIMIT = 120
HOSTILE = test_dedupd_page.HOSTILE
#: Names that users may choose, and their form in the output.
NAMES = {'Debian 12': 'Debian 12', 'Café ☕ 日本': 'Café ☕ 日本',
         HOSTILE: printable.printable(HOSTILE),
         '\x1b[2J\x07\nred': r'\x1b[2J\x07\nred', 'x' * 255: 'x' * 255,
         '\u202e' * 255: (r'\u202e' * 255)[:255]}
PROGRAM = ['-c', """
from dedupd import daemon
from dedupd.sync import image_names
import sys

image_names.LOOK_INTERVAL = image_names.LIST_INTERVAL = 0.2
sys.exit(daemon.main())
"""]

browser = test_dedupd_page.browser


@pytest.fixture(scope='module')
def server(tmp_path_factory):
    """A Glance with three stores: ours, one that a test damages, and files."""
    place = tmp_path_factory.mktemp('glance')
    stores = {
        name: {'type': 'dedup', 'dedup_store_datadir': repositories.create(
            place / name), 'dedup_store_filter_dir': place / 'filter',
            'dedup_store_filter_mib': 4} for name in ('dedup', 'broken')}
    stores['plain'] = {'type': 'file',
                       'filesystem_store_datadir': place / 'plain'}
    with glance_server.GlanceServer(place / 'server', stores) as running:
        running.repository = place / 'dedup'
        yield running


@pytest.fixture
def glance(server):
    """A client of Glance; no image is left for the next test."""
    client = glance_server.Client(server.url)
    yield client
    for image in client.list():
        client.delete(image['id'])


@pytest.fixture
def daemon(request, server, tmp_path):
    path = server.stores[getattr(request, 'param', 'dedup')][
        'dedup_store_datadir']
    with dedupd_watched.Daemon(path, glance_cloud=clouds.NAME) as running:
        running.environment = {
            'OS_CLIENT_CONFIG_FILE': clouds.write(tmp_path, server.url)}
        running.program = PROGRAM
        running.start()
        yield running.wait_for_catalog()
        assert running.stop() == 0, running.text()


def upload(glance, name, **options):
    image_id = glance.create(name=name)['id']
    glance.upload(image_id, repositories.noise(1 << 16), **options)
    return image_id


def shown(daemon):
    """Return the names by the ids of images."""
    return {image['image_id']: image['name']
            for image in daemon.get('/v1/images')['images']}


def test_names_are_shown_and_are_only_text(browser, daemon, glance, tmp_path):
    ids = {upload(glance, name): there for name, there in NAMES.items()}
    daemon.wait_for(lambda: shown(daemon) == ids)
    for width in ('desktop', 'phone'):
        browser.show(daemon.url, width)
        rows = {}
        for row in browser.all('#images > li'):
            name, image_id = row.find_elements(test_dedupd_page.CSS, 'bdi')
            rows[image_id.text] = name.text
        assert rows == ids
        listed = [item.text for item in browser.all('#sharing-names bdi')]
        assert dict(zip(listed[1::2], listed[::2])) == ids
        assert browser.script('return window.hacked') is None
        assert browser.all('img') == []
        assert browser.script('return document.documentElement.scrollWidth'
                              ) <= test_dedupd_page.WIDTHS[width]
        contrast, text = browser.script(test_dedupd_page.CONTRAST)
        assert contrast >= 4.5, text
        browser.keep(tmp_path, f'page-names-{width}')
    browser.require_silence()


def test_names_follow_glance(daemon, glance):
    image_id = upload(glance, 'old')
    daemon.wait_for(lambda: shown(daemon) == {image_id: 'old'})
    glance.request('PATCH', f'/v2/images/{image_id}', json.dumps([
        {'op': 'replace', 'path': '/name', 'value': 'new'}]).encode(), {
            'Content-Type': 'application/openstack-images-v2.1-json-patch'})
    daemon.wait_for(lambda: shown(daemon) == {image_id: 'new'})
    other = upload(glance, None)
    daemon.wait_for(lambda: shown(daemon) == {image_id: 'new', other: None})
    glance.delete(image_id)
    daemon.wait_for(lambda: shown(daemon) == {other: None})


def test_glance_is_away(daemon, server, glance):
    """Names stay, no problem is shown, and one line is logged."""
    image_id = upload(glance, 'kept')
    daemon.wait_for(lambda: shown(daemon) == {image_id: 'kept'})
    server.stop()
    try:
        daemon.wait_for(lambda: 'are not requested' in daemon.text())
        with repositories.open_repository(server.repository) as repo:
            repositories.put(repo, 'unknown', b'new')
        assert shown(daemon) == {image_id: 'kept', 'unknown': None}
        assert daemon.status()['problems'] == []
    finally:
        server.start()
    with repositories.open_repository(server.repository) as repo:
        repo.delete('unknown')
    daemon.wait_for(lambda: 'sends the names of images again' in daemon.text())
    second = upload(glance, 'second')
    daemon.wait_for(lambda: shown(daemon).get(second) == 'second')
    assert daemon.text().count('are not requested') == 1


@pytest.mark.parametrize('daemon', ['broken'], indirect=True)
def test_a_damaged_image_is_named(browser, daemon, glance):
    """The page and the command show a damaged image's name, escaped."""
    repository = daemon.options['datadir']
    image_id = upload(glance, '\x1b[31mDebian', store='broken')
    other = upload(glance, 'torn', store='broken')
    daemon.wait_for(lambda: None not in shown(daemon).values())
    recipe = repository / 'images' / other
    content = recipe.read_bytes()
    recipe.write_bytes(b'torn' + content[4:])
    group = repositories.Group(repository, 1)
    group.data[group.data_start() + 8000] ^= 1
    group.save()
    daemon.perform('scrub', full=True)
    daemon.wait_for(lambda: daemon.status()['names'] == {
        image_id: r'\x1b[31mDebian', other: 'torn'})
    done = subprocess.run(
        [pathlib.Path(sys.executable).parent / 'glance-dedup', '--repository',
         repository, '--socket', daemon.socket, 'status'],
        capture_output=True, text=True, timeout=LIMIT,
        env={**os.environ, 'PYTHONPATH': str(daemons.ROOT)})
    assert f'{image_id} \\x1b[31mDebian\n' in done.stdout, done
    assert '\x1b' not in done.stdout
    assert f'image {other} (torn) cannot be read' in done.stdout
    browser.show(daemon.url)
    damaged = [item.text for item in browser.all('#damaged li')]
    assert f'\\x1b[31mDebian {image_id}' in damaged
    browser.require_silence()
    recipe.write_bytes(content)     # so that it can be deleted


# -- bounds -------------------------------------------------------------------

@pytest.fixture
def names(server, tmp_path, monkeypatch):
    """The class alone, with the same Glance."""
    monkeypatch.setenv('OS_CLIENT_CONFIG_FILE',
                       clouds.write(tmp_path, server.url))
    with repositories.open_repository(server.repository) as repo:
        yield image_names.Names(repo, clouds.NAME)


def test_only_names_of_the_repository_are_kept(names, glance):
    here = upload(glance, 'here')
    there = upload(glance, 'there', store='plain')
    names.run_once()
    assert names.get(here) == 'here'
    assert names.get(there) is None


def test_memory_is_bounded(names, glance, monkeypatch):
    ids = [upload(glance, 'x' * 100) for _ in range(5)]
    monkeypatch.setattr(image_names, 'MAX_CHARACTERS', 250)
    names.run_once()
    assert sum(names.get(image_id) is not None for image_id in ids) == 2


def test_a_few_new_images_need_no_list_of_all(names, glance, monkeypatch):
    first = upload(glance, 'first')
    names.run_once()
    monkeypatch.setattr(image_names, 'MAX_RECORDS', 0)
    second = upload(glance, 'second')
    names.run_once()
    assert (names.get(first), names.get(second)) == ('first', 'second')
    # The first run on many images would request a list.
    monkeypatch.setattr(image_names, 'FEW', 0)
    third = upload(glance, 'third')
    names.run_once()
    assert names.get(third) is None
