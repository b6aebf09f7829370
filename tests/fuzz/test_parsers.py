# SPDX-License-Identifier: Apache-2.0

"""Python's own parsers get random input.

They give the right result, or the documented error: ``repository.json`` and
``key``; the answers of another host's daemon; payloads of RPC; arguments of
the commands. tests/unit/driver/test_dedup_store_locations.py has locations.
Hypothesis prints the example that failed, and how to run it again.
"""

import contextlib
import json
import os
import pathlib

import hypothesis
from hypothesis import strategies
import pytest
import xxhash

from dedupd import rpc
from dedupd.serve import replica_receiver
from glance_dedup.base import exceptions
from glance_dedup.cli import entry
from glance_dedup.client import client_errors
from glance_dedup.client import daemon_client
from glance_dedup.client import wire
from glance_dedup.repository import image_repository
from glance_dedup.repository import repo_parameters
from tests.support import daemons
from tests.support import replicas
from tests.support import repositories

EXAMPLES = 150
LONG_EXAMPLES = 5_000
# Seconds, of each test, with --long.
pytestmark = pytest.mark.timeout(1800)

NUMBERS = (strategies.integers() | strategies.floats()
           | strategies.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 1e308]))
JSON = strategies.recursive(
    strategies.none() | strategies.booleans() | NUMBERS | strategies.text(),
    lambda inner: strategies.lists(inner, max_size=3)
    | strategies.dictionaries(strategies.text(max_size=5), inner, max_size=3),
    max_leaves=8)
# The place, as a part of the whole; the number of removed bytes; the new
# bytes.
CHANGES = strategies.lists(strategies.tuples(
    strategies.floats(0, 1), strategies.integers(0, 9),
    strategies.binary(max_size=9)), min_size=1, max_size=4)


def changed(content, changes):
    for where, cut, new in changes:
        at = int(where * len(content))
        content = content[:at] + new + content[at + cut:]
    return content


def examples(long):
    return hypothesis.settings(
        max_examples=LONG_EXAMPLES if long else EXAMPLES, deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck))


@pytest.fixture
def at_length(request):
    """Settings of a property: with --long it has many more examples."""
    return examples(request.config.getoption('--long'))


# -- repository.json and key --------------------------------------------------

@pytest.fixture(scope='module')
def fresh(tmp_path_factory):
    path = tmp_path_factory.mktemp('parsers') / 'repository'
    image_repository.Repository.create(path)
    return path


def parse(content):
    """Return the parameters, or None for a bad file."""
    try:
        return repo_parameters.Parameters.from_json(content, 'FILE')
    except (exceptions.DamagedError, exceptions.VersionError) as e:
        assert 'FILE' in str(e)
        return None


def test_any_bytes_as_a_description(at_length, fresh):
    good = (fresh / 'repository.json').read_bytes()

    @at_length
    @hypothesis.given(strategies.binary() | JSON.map(
        lambda value: json.dumps(value).encode()) | CHANGES.map(
        lambda changes: changed(good, changes)))
    def check(content):
        parameters = parse(content)
        assert parameters is None or parameters == parse(good)
    check()


def test_any_values_in_a_description(at_length, fresh):
    """A right checksum does not make wrong values acceptable."""
    good = json.loads((fresh / 'repository.json').read_bytes())
    del good['checksum']

    @at_length
    @hypothesis.given(strategies.dictionaries(
        strategies.sampled_from(sorted(good)) | strategies.text(max_size=9),
        JSON, min_size=1, max_size=3), strategies.booleans())
    def check(values, whole):
        fields = {**good, **values} if whole else values
        text = json.dumps(fields, sort_keys=True, separators=(',', ':'))
        fields['checksum'] = f'{xxhash.xxh3_64_intdigest(text.encode()):016x}'
        parameters = parse(json.dumps(fields).encode())
        if parameters is not None:
            parameters.validate()
            assert isinstance(parameters.block_size, int)
            assert parse(parameters.to_json()) == parameters
    check()


def test_any_bytes_as_a_key(at_length, fresh, tmp_path):
    good = (fresh / 'key').read_bytes()
    copy = tmp_path / 'copy'
    image_repository.Repository.create(copy)

    @at_length
    @hypothesis.given(strategies.binary(max_size=2000) | CHANGES.map(
        lambda changes: changed(good, changes)))
    def check(content):
        (copy / 'key').write_bytes(content)
        (copy / 'repository.json').write_bytes(
            (fresh / 'repository.json').read_bytes())
        try:
            with image_repository.Repository(copy):
                assert content == good
        except exceptions.DamagedError as e:
            assert 'key' in str(e)
    check()


# -- answers of another host's daemon -----------------------------------------

BLOCK = 512


@pytest.fixture(scope='module')
def answers(tmp_path_factory):
    """Return a daemon's answers about an image, and the image."""
    path = repositories.create(tmp_path_factory.mktemp('peer') / 'repository',
                               block_size=BLOCK, group_slots=64)
    content = repositories.mixture(20_000, seed=5, unit=BLOCK)
    with repositories.open_repository(path) as opened:
        repositories.put(opened, 'image', content)
    with daemons.running(path) as daemon:
        recipe = daemon.request('GET', '/v1/images/image/recipe')
        upload = recipe.headers['etag'].strip('"')
        blocks = daemon.request(
            'POST', f'/v1/images/image/blocks?upload={upload}',
            json.dumps({'ranges': [[0, len(content)]]}).encode())
    assert recipe.status == blocks.status == 200
    return content, upload, recipe, blocks


def answer(response, body, chunked):
    if chunked:
        return daemons.answer(
            b'%x\r\n%b\r\n0\r\n\r\n' % (len(body), body) if body
            else b'0\r\n\r\n', ETag=response.headers.get('etag'),
            Content_Length=None, Transfer_Encoding='chunked')
    return daemons.answer(body, ETag=response.headers.get('etag'))


def take_recipe(client):
    with client.recipe('image') as recipe:
        return [(e.offset, e.length, e.table) for e in recipe]


def take_blocks(client, content, upload):
    got = bytearray(len(content))
    for frame in client.blocks('image', upload, [(0, len(content))]):
        for offset, start, length in frame.places:
            got[offset:offset + length] = frame.plain[start:start + length]
    return bytes(got)


@pytest.mark.parametrize('what', ['recipe', 'blocks'])
def test_any_answer_of_a_peer(at_length, answers, what, tmp_path):
    # Each frame has a checksum: accepted bytes are those sent. The client can
    # only check the shape of a recipe.
    content, upload, recipe, blocks = answers
    response = recipe if what == 'recipe' else blocks
    sent = []
    path = tmp_path / 'socket'
    client = daemon_client.Client(f'unix:{path}', timeout=5)

    @at_length
    @hypothesis.given(CHANGES, strategies.booleans(), strategies.booleans())
    def check(changes, chunked, whole):
        body = response.body
        if whole:  # head and all
            sent[:] = [changed(answer(response, body, chunked), changes)]
        else:
            sent[:] = [answer(response, changed(body, changes), chunked)]
        try:
            if what == 'recipe':
                size = 0
                for offset, length, table in take_recipe(client):
                    assert offset == size and length > 0
                    assert len(table) % 36 == 0
                    size += length
            else:
                assert take_blocks(client, content, upload) == content
        except client_errors.ClientError as e:
            assert str(e)
        client.close()

    def behave(connection, request):
        # One answer a connection, which ends with it.
        connection.sendall(sent[0])

    with daemons.scripted(path, behave):
        check()


# -- bodies that another site sends -------------------------------------------

@pytest.fixture
def sites(tmp_path):
    """Repositories: the first one's images are sent to the second."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(repositories.open_repository(
            repositories.create(tmp_path / name, block_size=BLOCK,
                                group_slots=64)))
               for name in ('home', 'away')]


@pytest.mark.parametrize('what', ['header', 'lot', 'frames'])
def test_any_body_that_is_sent(at_length, sites, what):
    """A changed body is refused with a reason, or the image is complete."""
    home, away = sites
    content = repositories.mixture(20_000, seed=5, unit=BLOCK)
    repositories.put(home, 'image', content)

    def send(sending, changes):
        """Send with one body changed."""
        header = sending.header.pack()
        if what == 'header':
            header = changed(header, changes)
            if len(header) != wire.RECIPE_HEADER_BYTES:
                return
        sending.header = wire.RecipeHeader.unpack(
            header, replica_receiver.Bad)
        with sending.replica(away) as replica:
            for lot in sending.lots:
                extents = (changed(lot.extents, changes) if what == 'lot'
                           else lot.extents)
                ranges, _ = replica.offer(lot.offset, extents)
                for body in sending.frames(ranges):
                    replica.take(lot.offset, changed(body, changes)
                                 if what == 'frames' else body)
            replica.commit()
        # A description can only be trusted; its own blocks match their
        # fingerprints.
        if what == 'frames':
            assert repositories.read_all(away, 'image') == content
        away.delete('image')

    @at_length
    @hypothesis.given(CHANGES)
    def check(changes):
        with contextlib.closing(replicas.Sending(home, 'image')) as sending:
            try:
                send(sending, changes)
            except (replica_receiver.Bad, replica_receiver.Conflict,
                    replica_receiver.Outdated,
                    exceptions.InvalidParameter) as e:
                assert str(e)
        assert not away.images()

    check()


# -- payloads of RPC ----------------------------------------------------------

class Control:
    """Accepts every request with valid arguments."""

    def status(self):
        return {'repository': {'id': 'r'}}

    def history(self, since=0):
        assert 0 <= since < 1 << 53
        return {}

    def images(self):
        return {}

    groups = sharing = images

    def start_task(self, name, dry_run=False):
        assert isinstance(name, str) and isinstance(dry_run, bool)
        return {}

    def task(self, name, after=0, wait=0):
        assert isinstance(name, str) and after >= 0
        assert 0 <= wait <= rpc.MAX_WAIT
        return {}

    def mark_lost(self, image_id):
        assert isinstance(image_id, str) and len(image_id) <= 255
        return {}


def test_any_payload_of_rpc(at_length):
    endpoint = rpc._Endpoint(Control())
    methods = ['status', 'history', 'images', 'groups', 'sharing',
               'start_task', 'task', 'mark_lost']
    names = strategies.sampled_from(
        ['name', 'dry_run', 'after', 'wait', 'since', 'image_id',
         'repository_id', 'self', 'context', 'arguments', 'no such'])

    @at_length
    @hypothesis.given(strategies.sampled_from(methods),
                      strategies.dictionaries(names, JSON, max_size=4))
    def check(method, arguments):
        # The messaging library raises this in the daemon's place.
        with contextlib.suppress(rpc.oslo_messaging.ExpectedException):
            result = getattr(endpoint, method)({}, **arguments)
            assert result['repository_id'] == 'r'
    check()


# -- arguments of the commands ------------------------------------------------

def test_any_image_id_on_the_command_line(at_length, fresh, tmp_path, capfd):
    with repositories.open_repository(fresh) as opened:
        repositories.put(opened, 'image', b'some bytes')
    before = {name: sorted(os.listdir(fresh / name))
              for name in ('images', 'spool')}
    words = strategies.text(
        strategies.characters(blacklist_categories=['Cs'],
                              blacklist_characters='\0'), max_size=200)

    def run(image_id, command):
        extra = [str(tmp_path / 'out')] if command == 'get' else []
        try:
            return entry.main(['--repository', str(fresh), 'image', command,
                               '--', image_id, *extra])
        except SystemExit as e:  # of the parser's
            return e.code

    @examples(False)
    @hypothesis.given(words | strategies.sampled_from(
        ['../key', 'a/b', '..', '.', '', '-', '--', '-h', 'x' * 129, 'é']),
        strategies.sampled_from(['get', 'delete', 'show']))
    def check(image_id, command):
        hypothesis.assume(image_id != 'image')
        status = run(image_id, command)
        said = capfd.readouterr()
        assert status != 0 and 'Traceback' not in said.err, said.err
        assert not (tmp_path / 'out').exists()
    check()
    assert run('image', 'get') == 0
    assert (tmp_path / 'out').read_bytes() == b'some bytes'
    assert {name: sorted(os.listdir(fresh / name))
            for name in before} == before
    assert pathlib.Path(fresh / 'key').exists()
