# SPDX-License-Identifier: Apache-2.0

"""The rights of a certificate, or of a user of the socket.

A real Glance, and a real daemon where certificates have rights: one for a
site, some for compute hosts, and one without rights. Each attack is that of a
host with a stolen key.
"""

import contextlib
import hashlib
import http.client
import json
import os
import random
import signal
import ssl
import uuid

import pytest
import yaml

from glance_dedup.base import imageids
from glance_dedup.base import scopes
from glance_dedup.client import client_errors
from glance_dedup.client import daemon_client
from glance_dedup.transfer import image_sending
from tests.support import cache_harness
from tests.support import daemons
from tests.support import replicas
from tests.support import repositories
from tests.unit.transfer import test_image_sending

MIB = 1 << 20
SENDER = 'cd' * 16
#: Users of the socket, with the right to replicate and without any.
NAMED, PLAIN = 54321, 54322
noise = repositories.noise


@pytest.fixture(scope='module')
def storing(tmp_path_factory):
    host = cache_harness.Storing(
        tmp_path_factory.mktemp('rights'), scope='global',
        socket_users=f'{NAMED}, {PLAIN}',
        replicate_from=f'site, user:{NAMED}',
        upload_from='*.compute.example',
        backup_from='one.compute.example:web-*, one.compute.example:mail')
    host.certificates = {name: host.authority.issue(name, *addresses)
                         for name, *addresses in (
        ('site',), ('one', 'one.compute.example'), ('two.compute.example',),
        ('reader', 'a.b.compute.example', 'compute.example', 'site.example'))}
    with host:
        yield host
        text = host.daemon.text()
        assert 'Traceback' not in text, text[text.find('Traceback'):][:3000]


@pytest.fixture(scope='module')
def alice(storing):
    return storing.glance.client('alice')


@pytest.fixture(scope='module')
def home(tmp_path_factory):
    """The repository of the host that sends."""
    path = repositories.create(tmp_path_factory.mktemp('home') / 'repository')
    with repositories.open_repository(path) as repo:
        yield repo


def client(storing, name, **options):
    """A client of the daemon with a certificate, or None."""
    if name in storing.certificates:
        options['cert'] = str(storing.certificates[name])
    return daemon_client.Client(
        f'https://{storing.listen}', ca_file=str(storing.authority.path),
        **options)


@contextlib.contextmanager
def stored(home, image_id, data, **options):
    """An image at home, for as long as the block runs."""
    repositories.put(home, image_id, data, **options)
    try:
        yield
    finally:
        home.delete(image_id)


def held(storing):
    return held_in(storing.repository)


def held_in(path):
    with repositories.open_repository(path) as repo:
        return set(repo.images())


def refusal(connected, image_id, header, project='', code=403):
    """Return the refusal of an image; None if the image may be begun."""
    with connected:
        try:
            connected.begin_replica(image_id, 'ab' * 16, header, SENDER,
                                    project).give_up()
        except client_errors.Refused as e:
            assert e.code == code, e
            return str(e)


def as_user(uid, function, *arguments):
    """Return the result of a function in a process of that user."""
    return repositories.in_child(repositories.as_user(
        uid, lambda: function(*arguments)))


def attempt(storing, who, image_id, header, *more):
    """Have somebody begin to send an image; as `refusal`."""
    if who == 'token':
        return refusal(client(storing, who, token='alice'), image_id, header,
                       *more)
    if isinstance(who, int):
        return as_user(who, refusal, storing.daemon.client(), image_id,
                       header, *more)
    return refusal(client(storing, who), image_id, header, *more)


#: An id of each kind, by the right that it requires.
IDS = {'replicate': str(uuid.UUID(int=7)), 'upload': 'u_' + 'ab' * 16,
       'back up': 'b_web-vda_20261123T180000Z',
       'back up another': 'b_database_20991123T180000Z'}


@pytest.mark.parametrize('who, rights', [
    ('site', {'replicate'}),
    ('one', {'upload', 'back up'}), ('two.compute.example', {'upload'}),
    ('reader', set()), ('nobody', set()), ('token', set()),
    (0, {*IDS}), (NAMED, {'replicate'}), (PLAIN, set())])
def test_each_stores_what_its_rights_say(storing, home, who, rights):
    with stored(home, 'any', noise(MIB)), contextlib.closing(
            replicas.Sending(home, 'any')) as sending:
        found = {right: attempt(storing, who, image_id, sending.header)
                 for right, image_id in IDS.items()}
    assert {right for right, why in found.items() if why is None} == rights
    for right, why in found.items():
        if why is None:
            continue
        if who in ('nobody', 'token'):
            assert 'certificate of tls_client_ca' in why
            continue
        # The error names the user, the right, and the option.
        assert (f'the id {who} ' if isinstance(who, int)
                else repr(who)) in why
        right = {'back up': 'back up web-vda',
                 'back up another': 'back up database'}.get(right, right)
        assert f'the right to {right}.' in why
        assert {'replicate': 'replicate_from', 'upload': 'upload_from'}.get(
            right, 'backup_from') in why
    assert not held(storing) & {*IDS.values()}


@pytest.mark.parametrize('who', ['site', 'one', 'reader'])
def test_every_certificate_reads(storing, who):
    """Each certificate reads images by their ids, even if Glance has none."""
    data = noise(MIB, 11)
    with repositories.open_repository(storing.repository) as repo:
        repositories.put(repo, 'unknown', data)
    try:
        with client(storing, who) as far:
            with far.open_image('unknown') as stream:
                assert stream.read(len(data)) == data
            with contextlib.closing(far.recipe('unknown')) as recipe:
                assert recipe.header.size == len(data)
            with pytest.raises(client_errors.Refused) as caught:
                far.open_image('another')
            assert caught.value.code == 404
    finally:
        with repositories.open_repository(storing.repository) as repo:
            repo.delete('unknown')


def requested(storing, who, method, path):
    """Return the status of a request over TLS."""
    context = ssl.create_default_context(cafile=str(storing.authority.path))
    if who in storing.certificates:
        context.load_cert_chain(str(storing.certificates[who]))
    host, _, port = storing.listen.rpartition(':')
    headers = {'X-Auth-Token': 'alice'} if who == 'token' else {}
    with contextlib.closing(http.client.HTTPSConnection(
            host, int(port), context=context, timeout=60)) as connection:
        connection.request(method, path, headers=headers)
        with connection.getresponse() as response:
            return response.status


@pytest.mark.parametrize('who', ['site', 'one', 'reader', 'token', 'nobody'])
def test_nothing_at_listen_starts_or_deletes(storing, who):
    """Listing, starting and deleting are refused over TLS for any client."""
    document = yaml.safe_load(
        (daemons.ROOT / 'doc/source/reference/openapi.yaml').read_text())
    asked = [
        (method.upper(), path.format(image_id='image', name='collect'))
        for path, item in document['paths'].items()
        for method, operation in item.items()
        if method in ('get', 'post') and operation['tags'] not in (
            ['read'], ['receive'])]
    asked += [(method, '/v1/images/image')
              for method in ('DELETE', 'PUT', 'PATCH')]
    assert ('POST', '/v1/tasks/collect') in asked and len(asked) > 12
    found = {request: requested(storing, who, *request) for request in asked}
    assert set(found.values()) <= {401, 404, 405}, found


def as_member(far):
    """Do what a user in socket_users may do, in a process of that user."""
    with far:
        with far.open_image('held') as stream:
            size = len(stream.read(stream.size))
        far.start('collect', dry_run=True)
        try:
            far.mark_lost('held')
        except client_errors.Refused as e:
            refused = e.code
        far.mark_lost('unreadable')
        return size, refused, [image['image_id'] for image in far.images()]


def test_users_of_the_socket(tmp_path):
    """Such users read all, start tasks, and remove only unreadable images."""
    path = repositories.create(tmp_path / 'repository')
    with repositories.open_repository(path) as repo:
        repositories.put(repo, 'held', noise(MIB, 12))
        repositories.put(repo, 'unreadable', noise(MIB, 13))
    os.truncate(path / 'images' / 'unreadable', 1000)
    with daemons.Daemon(path, socket_users=str(NAMED)) as daemon:
        daemon.start().wait_for_catalog()
        assert as_user(NAMED, as_member, daemon.client()) == (
            MIB, 400, ['held'])
        with pytest.raises(repositories.ChildFailed):
            as_user(PLAIN, as_member, daemon.client())
    with repositories.open_repository(path) as repo:
        assert list(repo.images()) == ['held']


@contextlib.contextmanager
def replicating(storing, header, *who):
    """Give only these certificates the right to replicate meanwhile.

    :param who: the last one has not got it otherwise
    """
    def give(holders, is_given):
        storing.daemon.write_config(replicate_from=holders)
        storing.daemon.process.send_signal(signal.SIGHUP)
        storing.daemon.wait_for(lambda: is_given == (attempt(
            storing, who[-1], 'given', header) is None))

    before = storing.daemon.options['replicate_from']
    give(', '.join(who), True)
    try:
        yield
    finally:
        give(before, False)


def test_rights_are_read_again(storing, home):
    with stored(home, 'any', noise(MIB)), contextlib.closing(
            replicas.Sending(home, 'any')) as sending:
        with replicating(storing, sending.header, 'reader'):
            assert attempt(storing, 'site', 'given', sending.header)
        assert not attempt(storing, 'site', 'given', sending.header)


def test_an_upload_does_not_become_an_image(storing, home):
    image_id = imageids.upload_id()
    with stored(home, image_id, noise(MIB, 1)), client(
            storing, 'one') as one:
        with pytest.raises(client_errors.Refused,
                           match='Request upload') as caught:
            image_sending.send(home, image_id, one)
    assert caught.value.code == 400
    assert image_id not in held(storing)


@contextlib.contextmanager
def upload_of(storing, home, name, data):
    """All bytes of an upload, sent with a certificate; to be uploaded."""
    image_id = imageids.upload_id()
    with (stored(home, image_id, data),
          contextlib.closing(replicas.Sending(home, image_id)) as sending,
          client(storing, name) as host):
        replica = host.begin_replica(image_id, sending.upload_id,
                                     sending.header, SENDER)
        for lot in sending.lots:
            ranges, _ = replica.offer(lot.offset, lot.end, lot.extents)
            for body in sending.frames(ranges):
                replica.send(lot.offset, body)
        yield replica
    assert image_id not in held(storing)


TOKEN = [('X-Auth-Token', 'alice'),
         ('Content-Type', 'application/octet-stream')]


@pytest.mark.parametrize('header, status', [
    (('X-A', 'b\r\nX-Roles: admin'), None), (('X-A', 'b\nX-B: c'), None),
    (('X-A: b\r\nX-B', 'c'), None), (('', 'c'), None),
    # What frames the request is the daemon's own.
    (('Content-Length', '7'), 204), (('Transfer-Encoding', 'chunked'), 204),
    (('Host', 'elsewhere'), 204), (('Connection', 'X-Auth-Token'), 401)])
def test_an_upload_cannot_write_its_own_request(storing, home, alice, header,
                                                status):
    """Glance gets one request, for this image, with the user's token."""
    data = noise(MIB, 6)
    image_id = alice.create(name='image')['id']
    try:
        with upload_of(storing, home, 'one', data) as replica:
            if status is None:
                with pytest.raises(client_errors.Refused) as caught:
                    replica.upload(image_id, [*TOKEN, header], 60)
                assert caught.value.code == 502
            else:
                found = replica.upload(image_id, [*TOKEN, header], 60)
                assert found['status'] == status
        if status == 204:
            assert alice.download(image_id) == data
        else:
            assert alice.show(image_id)['status'] == 'queued'
    finally:
        alice.delete(image_id)


@pytest.mark.parametrize('token, status', [
    ('bob', 404), ('nobody', 401), (None, 401)])
def test_glance_judges_whose_upload_it_is(storing, home, alice, token,
                                          status):
    """A certificate alone uploads to no image, nor another member's token."""
    image_id = alice.create(name='image')['id']
    try:
        with upload_of(storing, home, 'one', noise(MIB, 6)) as replica:
            found = replica.upload(image_id, [
                ('Content-Type', 'application/octet-stream'),
                *([('X-Auth-Token', token)] if token else [])], 60)
            assert found['status'] == status
        assert alice.show(image_id)['status'] == 'queued'
    finally:
        alice.delete(image_id)


def test_an_upload_goes_to_no_other_place(storing, home):
    for image_id in ('../../v2/images/x', 'b_web_20261123T180000Z', '', 'x'):
        with upload_of(storing, home, 'one', noise(MIB, 6)) as replica:
            with pytest.raises(client_errors.Refused) as caught:
                replica.upload(image_id, TOKEN, 60)
            assert caught.value.code == 400
            replica.give_up()


def elsewhere(alice, data):
    """Store an image in another of Glance's stores; return its id."""
    image_id = alice.create(name='image')['id']
    alice.upload(image_id, data, store='plain')
    return image_id


@pytest.mark.parametrize('names_true_hash', [False, True])
def test_planted_bytes_are_not_those_that_glance_means(
        storing, home, alice, names_true_hash):
    """A token does not open other bytes of an image, even if a site's."""
    data, other = noise(2 * MIB, 2), noise(2 * MIB, 3)
    image_id = elsewhere(alice, data)
    with stored(home, image_id, other):
        with contextlib.closing(
                replicas.Sending(home, image_id)) as sending, client(
                    storing, 'site') as site:
            claimed = ('sha512', hashlib.sha512(data).hexdigest()) if (
                names_true_hash) else ()
            sender = image_sending._Sender(
                sending.image, sending.header, site,
                image_sending.pacing.Pace(), known=claimed)
            if names_true_hash:
                with pytest.raises(client_errors.Refused) as caught:
                    sender.run(lambda location: None)
                assert caught.value.code == 409
                assert hashlib.sha512(other).hexdigest() in str(caught.value)
                assert image_id not in held(storing)
                return
            sender.run(lambda location: None)
    # Its hash is that of the received bytes. A token does not open it.
    with client(storing, 'nobody', token='alice') as user:
        with pytest.raises(client_errors.Refused) as caught:
            user.open_image(image_id)
    assert caught.value.code == 404
    with client(storing, 'reader') as reader, contextlib.closing(
            reader.recipe(image_id)) as recipe:
        assert recipe.hashes == {'sha512': hashlib.sha512(other).hexdigest()}


def test_who_sends_what_is_there_gets_no_location(storing, home, alice):
    data = noise(2 * MIB, 4)
    image_id = alice.create(name='image')['id']
    alice.upload(image_id, data)
    with stored(home, image_id, data), client(storing, 'site') as site:
        sent = image_sending.send(home, image_id, site)
        assert sent.exists and sent.location is None
        with contextlib.closing(replicas.Sending(home, image_id)) as sending:
            replica = site.begin_replica(image_id, sending.upload_id,
                                         sending.header, SENDER)
            assert replica.exists and replica.location is None
            for lot in sending.lots:
                replica.offer(lot.offset, lot.end, lot.extents)
            assert 'dedup://' not in json.dumps(replica.commit())


def test_no_other_certificate_goes_on_with_a_replica(storing, home):
    """Another certificate cannot continue a replica, or get its location."""
    with stored(home, 'taken', noise(MIB, 5)), contextlib.closing(
            replicas.Sending(home, 'taken')) as sending:
        arguments = 'taken', sending.upload_id, sending.header, SENDER
        with replicating(storing, sending.header, 'site', 'one'), client(
                storing, 'site') as site, client(storing, 'one') as one:
            replica = site.begin_replica(*arguments)
            with pytest.raises(client_errors.Refused) as caught:
                one.begin_replica(*arguments)
            assert caught.value.code == 503
            # The same certificate can continue, even over another connection.
            with client(storing, 'site') as again:
                again_replica = again.begin_replica(*arguments)
                assert again_replica.location == replica.location
                again_replica.give_up()


def begun(connected, image_id, header):
    """Begin to send an image, and leave; the status of a refusal, or None."""
    with connected:
        try:
            connected.begin_replica(image_id, 'ab' * 16, header, SENDER)
        except client_errors.Refused as e:
            return e.code


def test_nobody_takes_all_places_of_senders(tmp_path, home):
    """A sender of several images makes room for others, and only once."""
    path = repositories.create(tmp_path / 'repository')
    with stored(home, 'any', noise(MIB, 7)), contextlib.closing(
            replicas.Sending(home, 'any')) as sending:
        header = sending.header
    with daemons.Daemon(
            path, socket_users=f'{NAMED}, {PLAIN}', scope='global',
            replicate_from=f'user:{NAMED}, user:{PLAIN}') as daemon:
        # None is taken for silent, however slow all is.
        daemon.program = test_image_sending.program(SILENT_SECONDS=3600,
                                                    IDLE_SECONDS=3600)
        daemon.start()

        def begin(who, *numbers):
            return [as_user(who, begun, daemon.client(), f'image-{number}',
                            header) for number in numbers]

        assert begin(NAMED, *range(6)) == [None] * 4 + [503] * 2
        assert begin(PLAIN, *range(10, 14)) == [None] * 2 + [503] * 2
        assert begin(NAMED, 20) == [503]
        assert begin(0, 30, 31) == [None, 503]
        text = daemon.text()
        assert 'another sender, which sends fewer images, has its' in text
        assert daemon.stop() == 0 and 'Traceback' not in text
    assert not held_in(path)


@pytest.mark.parametrize('project, scope', [
    ('alice', 'project'), ('', 'project'), ('bob', b'\1' * 16),
    ('bob', scopes.of_project('alice'))])
def test_only_the_scope_of_the_storing_host(storing, home, project, scope):
    image_id = f'image-{random.Random(str(scope) + project).getrandbits(64)}'
    with stored(home, image_id, noise(MIB), scope=scope
                if isinstance(scope, str) else 'global', project=project):
        with contextlib.closing(replicas.Sending(home, image_id)) as sending:
            header = sending.header
            if isinstance(scope, bytes):
                header = image_sending.dataclasses.replace(header, scope=scope)
            with client(storing, 'site') as site:
                with pytest.raises(client_errors.Refused) as caught:
                    site.begin_replica(image_id, sending.upload_id, header,
                                       SENDER, project)
    assert caught.value.code == 400
    assert 'image copy' in str(caught.value)


@pytest.mark.parametrize('project, scope', [
    ('alice', 'project'), ('', 'project'),
    ('bob', scopes.of_project('alice'))], ids=['own', 'none', 'foreign'])
@pytest.mark.parametrize('who, right', [
    ('one', 'upload'), ('one', 'back up'), ('two.compute.example', 'upload'),
    (NAMED, 'replicate'), *((0, right) for right in IDS)])
def test_only_this_scope_whoever_sends(storing, home, who, right, project,
                                       scope):
    """A compute host, and root on the socket, too."""
    with stored(home, 'any', noise(MIB), project=project,
                scope=scope if isinstance(scope, str) else 'global'):
        with contextlib.closing(replicas.Sending(home, 'any')) as sending:
            header = sending.header
    if isinstance(scope, bytes):
        header = image_sending.dataclasses.replace(header, scope=scope)
    found = attempt(storing, who, IDS[right], header, project, 400)
    assert 'image copy' in found
    assert IDS[right] not in held(storing)


@pytest.mark.parametrize('options, words', [
    ({'replicate_from': 'site'}, 'replicate_from needs scope'),
    ({'upload_from': 'one'}, 'upload_from needs scope'),
    ({'backup_from': 'one:web'}, 'backup_from needs scope'),
    ({'backup_from': 'one', 'scope': 'global'}, 'backup_from'),
    ({'backup_from': 'one:we*b', 'scope': 'global'}, 'backup_from'),
    ({'backup_from': 'one:' + 'w' * 110, 'scope': 'global'}, 'backup_from'),
    ({'upload_from': '*', 'scope': 'global'}, 'upload_from'),
    ({'upload_from': 'host*.example', 'scope': 'global'}, 'upload_from'),
    ({'replicate_from': 'user:no-such-user', 'scope': 'global'},
     "there is no user 'no-such-user'")])
def test_options_that_the_daemon_refuses(tmp_path, options, words):
    path = repositories.create(tmp_path / 'repository')
    with daemons.Daemon(path, tmp_path / 'daemon', **options) as daemon:
        daemon.start(wait=False)
        assert daemon.process.wait(daemons.LIMIT)
        assert words in daemon.text()
