# SPDX-License-Identifier: Apache-2.0

"""``object-store attach``, its ``show`` and ``task tier`` on a real store."""

import contextlib
import json
import os
import secrets
import shutil

import pytest

from glance_dedup.repository import cold_settings
from tests.support import daemons
from tests.support import ports
from tests.support import repositories

pytest_plugins = ['tests.support.object_fixtures']

SLOTS = 64
SIZE = SLOTS * 4096


@pytest.fixture
def made(cli):
    """A repository of 4.0."""
    found = cli('repository', 'create', '--group-slots', SLOTS)
    assert found.status == 0, found.err
    return cli


@pytest.fixture
def credentials(server, tmp_path):
    return server.credentials(tmp_path / 'credentials')


@pytest.fixture
def prefix():
    """A prefix that no other test uses."""
    return secrets.token_hex(8)


@pytest.fixture
def url(server, prefix):
    return f's3://{server.container}/{prefix}'


@pytest.fixture
def place(url, proxy, faults, credentials):
    """Arguments that the command needs to reach the store."""
    return [url, '--endpoint', proxy.url, '--credentials', credentials]


@pytest.fixture
def attached(made, place):
    found = made('object-store', 'attach', *place)
    assert found.status == 0, found.err
    assert f'save a copy of {made.path / "key"}' in found.err
    return made


@pytest.fixture
def filled(attached, tmp_path):
    """A repository with two full groups, and one that is not full."""
    path = tmp_path / 'content'
    path.write_bytes(repositories.noise(2 * SIZE + 8192, 1))
    assert attached('image', 'put', 'one', path).status == 0
    return attached


@pytest.fixture
def ready(filled):
    """The repository with its groups recompressed, as tiering requires."""
    assert filled('task', 'recompress').status == 0
    return filled


@pytest.fixture(params=['here', 'daemon'])
def either(request, ready):
    """Both run the same commands: with a daemon, and without."""
    with contextlib.ExitStack() as stack:
        if request.param == 'daemon':
            daemon = stack.enter_context(daemons.running(ready.path))
            at = ready.options.index('--socket')
            ready.options[at + 1] = daemon.socket
        yield ready


def get(cli, tmp_path):
    for directory in (cli.path / 'slices').iterdir():
        for slice_ in directory.iterdir():
            slice_.unlink()
    found = cli('image', 'get', 'one', tmp_path / 'read')
    assert found.status == 0, found.err
    return (tmp_path / 'read').read_bytes()


# -- object-store attach ------------------------------------------------------

@pytest.mark.parametrize('endpoint, refused', [
    ('http://192.0.2.1:9000', True), ('http://store.example', True),
    ('http://[2001:db8::1]:80', True), ('https://127.0.0.1:9', False),
    ('http://127.0.0.1:9', False), ('http://[::1]:9', False),
    ('http://localhost:9', False)])
def test_without_encryption(made, tmp_path, endpoint, refused):
    """Plain HTTP is refused except for this host, for restoring, too."""
    key = tmp_path / 'key'
    key.write_text('[s3]\naccess_key = a\nsecret_key = b\n')
    key.chmod(0o600)
    options = ['--endpoint', endpoint, '--credentials', key]
    for command in (['object-store', 'attach', 's3://bucket/prefix', *options],
                    ['repository', 'restore', '--from', 's3://bucket/prefix',
                     '--new-key', *options]):
        found = made(*command)
        assert found.status == (2 if refused else 3)
        assert ('has no encryption' in found.err) == refused, found.err


def test_a_keystone_without_encryption(made, tmp_path):
    key = tmp_path / 'key'
    key.write_text('[swift]\nauth_type = password\n'
                   'auth_url = http://192.0.2.1:5000/v3\n')
    key.chmod(0o600)
    made('object-store', 'attach', 'swift://container/prefix', '--credentials',
         key
         ).refused('http://192.0.2.1:5000/v3 has no encryption')


@pytest.mark.parametrize('refused', [True, False])
def test_a_swift_without_encryption(made, tmp_path, refused):
    """Swift is refused without encryption, except on this host."""
    key = tmp_path / 'key'
    host = '192.0.2.1' if refused else '127.0.0.1'
    key.write_text('[swift]\nauth_type = admin_token\ntoken = t\n'
                   f'endpoint = http://{host}:9/v1/AUTH_a\n')
    key.chmod(0o600)
    for command in (['object-store', 'attach', 'swift://container/prefix'],
                    ['repository', 'restore', '--new-key', '--from',
                     'swift://container/prefix']):
        found = made(*command, '--credentials', key)
        assert found.status == (2 if refused else 3)
        assert (f'http://{host}:9/v1/AUTH_a has no encryption'
                in found.err) == refused, found.err


def test_a_keystone_in_another_section(made, tmp_path):
    key = tmp_path / 'key'
    key.write_text('[swift]\nauth_section = other\n'
                   '[other]\nauth_type = password\n'
                   'auth_url = http://192.0.2.1:5000/v3\n')
    key.chmod(0o600)
    made('object-store', 'attach', 'swift://container/prefix', '--credentials',
         key
         ).refused('http://192.0.2.1:5000/v3 has no encryption')


def test_attach(made, place, url, proxy, credentials):
    found = made('object-store', 'attach', *place, '-f', 'json').json()
    owner = found.pop('owner')
    assert found == {
        'url': url, 'endpoint': proxy.url, 'region': '', 'ca_file': '',
        'credentials': credentials, 'cache_bytes': 1 << 30, 'read_limit': 60,
        'restored_from': []}
    assert cold_settings.read(made.path).owner == owner
    repositories.require_clean(made.path)


def test_attach_again(attached, place):
    before = cold_settings.read(attached.path)
    found = attached('object-store', 'attach', *place, '--cache-size', '7M',
                     '--read-limit', '90', '-f', 'json').json()
    assert (found['cache_bytes'], found['read_limit'], found['owner']) == (
        7 << 20, 90, before.owner)
    options = cold_settings.read(attached.path).options
    assert (options.cache_mib, options.read_limit) == (7, 90)


def test_whether_http_is_allowed_is_kept(attached, place):
    """For the next catalogue of Keystone; the last attachment counts."""
    assert not cold_settings.read(attached.path).options.allow_http
    for options in (['--allow-http'], []):
        assert attached('object-store', 'attach', *place,
                        *options).status == 0
        read = cold_settings.read(attached.path)
        assert read.options.allow_http == bool(options)
        assert attached('repository', 'check').status == 0


@pytest.mark.parametrize('wrong, words', [
    ('bucket', ['is not s3://BUCKET/PREFIX']),
    ('s3://bucket', ['is not s3://BUCKET/PREFIX']),
    ('ftp://bucket/x', ['is not s3://BUCKET/PREFIX']),
    ('s3://bucket/', ['prefix']), ('s3://Bucket/x', ["'Bucket'"]),
    ('s3://bucket/../x', ['prefix']), ('swift://c/x', ["Swift's endpoint"])])
def test_attach_to_no_place(made, place, wrong, words):
    made('object-store', 'attach', wrong, *place[1:]).refused(*words)
    assert cold_settings.read(made.path) is None


@pytest.mark.parametrize('options, words', [
    (['--endpoint', 'host'], ["endpoint 'host'"]),
    (['--endpoint', 'http://user:secret@host'], ['credentials belong']),
    (['--cache-size', '0'], ['cache_mib', '1 to']),
    (['--cache-size', '2T'], ['cache_mib', '1 to']),
    (['--read-limit', '0'], ['read_limit', '1 to 3600']),
    (['--read-limit', '3601'], ['read_limit', '1 to 3600']),
    (['--region', 'a b'], ["'a b'"])])
def test_attach_with_wrong_options(made, place, options, words):
    made('object-store', 'attach', *place, *options).refused(*words)
    assert cold_settings.read(made.path) is None


def test_usage(made, url):
    for arguments in ([], [url], [url, '--credentials'],
                      [url, '--credentials', 'x', '--cache-size', '7']):
        assert made('object-store', 'attach', *arguments).status == 2


def test_attach_without_credentials(made, place, credentials):
    os.rename(credentials, credentials + '.away')
    made('object-store', 'attach', *place).failed(credentials, 'No such file')
    os.rename(credentials + '.away', credentials)
    os.chmod(credentials, 0o644)
    made('object-store', 'attach', *place).failed(credentials, 'chmod 0640')
    os.chmod(credentials, 0o600)
    with open(credentials, 'w') as f:
        f.write('[s3]\naccess_key = someone\n')
    made('object-store', 'attach', *place).failed(credentials, 'secret_key')
    assert cold_settings.read(made.path) is None


def test_attach_with_wrong_credentials(made, place, url, credentials):
    with open(credentials, 'w') as f:
        f.write('[s3]\naccess_key = someone\nsecret_key = precious\n')
    found = made('object-store', 'attach', *place)
    found.failed(url)
    assert 'precious' not in found.err
    assert cold_settings.read(made.path) is None


def test_attach_where_nobody_answers(made, place):
    found = made('object-store', 'attach', *place, '--endpoint',
                 f'http://127.0.0.1:{ports.free_port()}')
    found.failed('s3://')
    assert cold_settings.read(made.path) is None


def test_attach_to_no_bucket(made, place, prefix):
    made('object-store', 'attach', f's3://nobody-made-it/{prefix}',
         *place[1:]).failed('s3://nobody-made-it')
    assert cold_settings.read(made.path) is None


def test_the_feature_is_set_when_it_is_attached(created, place):
    """Attaching sets the feature; a failed attempt does not."""
    def used():
        return created('repository', 'show', '-f', 'json').json()['features']

    for command in ('object-store', 'show'), ('task', 'tier',):
        assert 'object-store attach' in created(*command).err
    created('object-store', 'attach', *place[:-1],
            '/nowhere').failed('/nowhere')
    assert used() == []
    assert created('object-store', 'attach', *place).status == 0
    assert used() == ['cold']


def test_another_repository_is_there(attached, place, tmp_path):
    at = attached.options.index('--repository')
    attached.options[at + 1] = str(tmp_path / 'other')
    assert attached('repository', 'create').status == 0
    attached('object-store', 'attach', *place).refused(
        'belongs to another repository', 'choose another prefix')


def test_attach_elsewhere(ready, place, url):
    assert ready('task', 'tier', '--all').status == 0
    ready('object-store', 'attach', f'{url}/elsewhere', *place[1:]).refused(
        'has cold groups at', url)


def test_attach_while_a_daemon_runs(made, place):
    with daemons.running(made.path):
        made('object-store', 'attach', *place).locked('stop dedupd first')


def test_no_repository(cli, place):
    cli('object-store', 'attach', *place).no_repository(str(cli.path))
    cli('object-store', 'show').no_repository(str(cli.path))
    cli('task', 'tier').no_repository(str(cli.path))


# -- object-store show --------------------------------------------------------

def test_show(attached, url, faults):
    faults.seen.clear()
    found = attached('object-store', 'show', '-f', 'json').json()
    assert found['url'] == url
    assert found['owner'] == cold_settings.read(attached.path).owner
    assert 'objects' not in found
    assert faults.seen == []        # no request was sent
    words = attached('object-store', 'show').out
    assert url in words and '1.0 GiB' in words


def test_show_what_is_there(ready):
    found = ready('object-store', 'show', '--list', '-f', 'json').json()
    assert (found['objects'], found['object_bytes']) == (0, 0)
    sent = ready('task', 'tier', '--all', '-f', 'json').json()['sent_bytes']
    found = ready('object-store', 'show', '--list', '-f', 'json').json()
    # A metadata backup may be in the store, too.
    assert found['objects'] >= 2 and found['object_bytes'] >= sent > 2 * SIZE


def test_show_while_the_store_is_away(filled, faults, url):
    faults.always = 503
    filled('object-store', 'show', '--list').failed(url, '503')
    assert filled('object-store', 'show').status == 0


def test_show_a_repository_that_is_not_attached(made):
    made('object-store', 'show').failed(
        'is attached to no object store', "'glance-dedup object-store attach'")


def test_show_a_damaged_file(attached):
    path = attached.path / 'cold.json'
    path.write_bytes(path.read_bytes()[:-9])
    found = attached('object-store', 'show')
    assert found.status == 1
    assert 'cold.json is damaged' in found.err
    assert 'from a backup' in found.err
    found = attached('repository', 'check', '-f', 'json')
    assert found.status == 1
    assert [finding['file'] for finding in found.json()['findings']] == [
        'cold.json']


def test_what_is_advised_for_a_damaged_file(attached, place, url):
    """No group is cold yet, so the repository is attached again."""
    path = attached.path / 'cold.json'
    path.write_bytes(path.read_bytes()[:-9])
    said = attached('object-store', 'show').err
    assert 'remove the file, and attach the repository again' in said
    assert 'with another prefix: glance-dedup object-store attach' in said
    path.unlink()
    # The object of the lost owner is still there.
    attached('object-store', 'attach', *place).refused(
        'another directory of this repository', 'choose another prefix')
    other = f'{url}-again'
    assert attached('object-store', 'attach', other, *place[1:]).status == 0
    assert attached('object-store', 'show', '-f', 'json').json()[
        'url'] == other
    assert attached('task', 'tier', '--all').status == 0
    assert attached('repository', 'check').status == 0


# -- tier ---------------------------------------------------------------------

def test_tier(either, tmp_path):
    plan = either('task', 'tier', '--all', '--dry-run', '-f', 'json').json()
    assert [(group['number'], group['action']) for group in plan['groups']
            ] == [(1, 'move'), (2, 'move'), (3, 'skip')]
    assert plan['groups'][2]['reason'] == 'it is not full'
    assert plan['bytes'] > 2 * SIZE
    # The table shows the groups that stay and the groups that move.
    assert '| 2 to move, 1 to skip' in either(
        'task', 'tier', '--all', '--dry-run').out
    before = either('repository', 'show', '-f', 'json').json()['group_bytes']
    result = either('task', 'tier', '--all', '-f', 'json').json()
    assert (result['groups'], result['failed']) == (2, {})
    assert result['sent_bytes'] > 2 * SIZE
    assert result['puts'] >= 2 and result['gets'] >= 2
    after = either('repository', 'show', '-f', 'json').json()['group_bytes']
    assert before - after == result['disk_bytes'] > SIZE
    assert either('task', 'tier', '--all', '-f', 'json').json()['groups'] == 0
    assert get(either, tmp_path) == (tmp_path / 'content').read_bytes()
    checked = either('repository', 'check', '-f', 'json').json()
    assert checked['result'] == 'fine'
    # The check does not read the catalog that the daemon uses.
    assert {finding['file'] for finding in checked['findings']} <= {'catalog'}
    assert checked['cold_groups'] == 2
    assert checked['cold_bytes'] == result['sent_bytes']
    assert checked['slice_bytes'] > 2 * SIZE


def test_tier_needs_that_groups_were_recompressed(filled):
    plan = filled('task', 'tier', '--all', '--dry-run', '-f', 'json').json()
    assert [group['reason'] for group in plan['groups']] == [
        'it is to be recompressed first'] * 2 + ['it is not full']


def test_tier_by_its_options(either):
    """A group that has just changed stays."""
    result = either('task', 'tier', '-f', 'json').json()
    assert result['groups'] == result['sent_bytes'] == 0
    plan = either('task', 'tier', '--dry-run', '-f', 'json').json()
    assert {group['action'] for group in plan['groups']} == {'skip'}
    assert plan['bytes'] == 0
    for number in (1, 2):
        os.utime(either.path / 'groups' / f'{number:08x}', (number, number))
    assert either('task', 'tier', '-f', 'json').json()['groups'] == 2


def test_tier_without_a_store(made):
    made('task', 'tier', '--all').failed('object-store attach')


def test_tier_without_a_store_by_a_daemon(made):
    with daemons.running(made.path) as daemon:
        made.options[made.options.index('--socket') + 1] = daemon.socket
        made('task', 'tier', '--all').failed('tier:', 'object-store attach')


def test_tier_while_the_store_is_away(ready, faults, url, tmp_path):
    faults.always = 503
    ready('task', 'tier', '--all').failed(url, '503')
    # The plan sends no requests.
    assert ready('task', 'tier', '--all', '--dry-run').status == 0
    faults.always = None
    assert ready('task', 'tier', '--all').status == 0
    faults.always = 503
    found = ready('image', 'get', 'one', tmp_path / 'read')
    assert found.status == 3 and '503' in found.err
    assert ready('repository', 'check').status == 0
    faults.always = None
    assert get(ready, tmp_path) == (tmp_path / 'content').read_bytes()


def test_scrub_while_the_store_is_away(ready, faults, url):
    """A scrub without the store is incomplete, and reports it."""
    assert ready('task', 'tier', '--all').status == 0
    faults.always = 503
    found = ready('task', 'scrub', '--full', '-f', 'json')
    assert found.status == 3
    result = json.loads(found.out)
    blocks = result['unchecked']
    assert blocks == 2 * SIZE // 4096 and not result['complete']
    for part in (f'{blocks} blocks in cold groups were not checked', url,
                 '503', "run 'glance-dedup task scrub'"):
        assert part in found.err
    faults.always = None
    found = ready('task', 'scrub', '-f', 'json')
    assert found.status == 0 and found.json()['complete']
    assert found.json()['unchecked'] == 0


def test_tier_of_a_damaged_group(ready):
    path = ready.path / 'groups' / '00000002'
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    found = ready('task', 'tier', '--all', '-f', 'json')
    assert found.status == 1
    assert 'group 2 was left unchanged' in found.err
    assert found.json()['groups'] == 1 and list(found.json()['failed']) == [
        '2']


def test_tier_of_a_copy(ready, url, tmp_path):
    os.rename(ready.path, tmp_path / 'moved')
    shutil.copytree(tmp_path / 'moved', ready.path)
    ready('task', 'tier', '--all').refused('is a copy of the directory', url)
