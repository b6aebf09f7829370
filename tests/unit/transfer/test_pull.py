# SPDX-License-Identifier: Apache-2.0

"""Images are pulled between two repositories, from a real daemon."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from glance_dedup.base import exceptions
from glance_dedup.client import client_errors
from glance_dedup.client import daemon_client
from glance_dedup.client import daemon_connection
from glance_dedup.client import wire
from glance_dedup.transfer import image_assembly
from glance_dedup.transfer import pull
from tests.support import certificates
from tests.support import daemons
from tests.support import ports
from tests.support import repositories
from tests.unit.cli import conftest as cli_conftest

noise = repositories.noise
mixture = repositories.mixture
BLOCK = 4096


class Site:
    """A repository, opened."""

    def __init__(self, path, **parameters):
        self.path = repositories.create(path, **parameters)
        self.repo = repositories.open_repository(self.path)

    def put(self, image_id, data, **options):
        return repositories.put(self.repo, image_id, data, **options)

    def read(self, image_id):
        return repositories.read_all(self.repo, image_id)

    def require_nothing_of(self, image_id):
        """Require no image, and no upload in flight."""
        assert image_id not in self.repo.images()
        for name in repositories.spool(self.path):
            # A spool file of an image has another name in images/.
            assert (self.path / 'spool' / name).stat().st_nlink == 2


@pytest.fixture
def there(tmp_path):
    site = Site(tmp_path / 'there')
    yield site
    site.repo.close()
    shutil.rmtree(tmp_path / 'there-filter', ignore_errors=True)


@pytest.fixture
def here(tmp_path):
    site = Site(tmp_path / 'here')
    yield site
    site.repo.close()
    shutil.rmtree(tmp_path / 'here-filter', ignore_errors=True)


@pytest.fixture
def daemon(there):
    with daemons.running(there.path) as daemon:
        yield daemon


@pytest.fixture
def client(daemon):
    with daemon.client() as client:
        yield client


@pytest.fixture
def small_lots(monkeypatch):
    monkeypatch.setattr(image_assembly, 'LOT_BLOCKS', 16)


# -- results of a pull, and its size ------------------------------------------

@pytest.mark.parametrize('length', [
    0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK, 5000000])
@pytest.mark.parametrize('content', [mixture, noise, bytes])
def test_pull(there, here, client, length, content):
    data = content(length)
    there.put('one', data)
    seen = []
    result = pull.pull(here.repo, 'one', client, project='p', progress=(
        lambda done, size: seen.append((done, size))))
    assert here.read('one') == data
    assert result.stat == here.repo.stat('one')
    assert result.stat.project == 'p'
    assert result.stat.size == length
    assert result.stat.zero_bytes == there.repo.stat('one').zero_bytes
    assert result.whole is None
    if length:
        assert seen[-1] == (length, length)
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    repositories.require_clean(here.path)


def test_only_what_is_missing_comes(there, here, client):
    data = noise(400 * BLOCK)
    there.put('one', data)
    # This site has the middle in another image, at another offset.
    here.put('other', noise(77 * BLOCK, 2) + data[100 * BLOCK:350 * BLOCK])
    result = pull.pull(here.repo, 'one', client)
    assert result.found_blocks == 250
    assert result.asked_blocks == 150
    # Frames, the recipe with 36 bytes a block, and headers.
    least = 150 * BLOCK + 400 * 36
    assert least < result.received_bytes < least * 1.03
    assert result.stat.new_bytes == 150 * BLOCK
    assert here.read('one') == data
    # A second pull requests nothing.
    here.repo.delete('one')
    result = pull.pull(here.repo, 'one', client)
    assert result.asked_blocks == 0
    assert result.received_bytes < 400 * 36 + 1000
    assert here.read('one') == data


@pytest.mark.usefixtures('small_lots')
def test_a_block_is_asked_for_once(there, here, client):
    """Each block is requested once, however often the image names it."""
    some = [noise(BLOCK, seed) for seed in range(40)]
    order = [0] * 20 + list(range(40)) + [5, 39, 0, 7] * 30 + [0] * 20
    data = b''.join(some[number] for number in order) + some[3][:100]
    there.put('one', data)
    result = pull.pull(here.repo, 'one', client)
    assert here.read('one') == data
    assert result.asked_blocks == 41
    assert result.found_blocks == len(order) - 40


@pytest.mark.usefixtures('small_lots')
@pytest.mark.parametrize('seed', range(5))
def test_any_mixture(there, here, client, seed):
    there.put('one', mixture(2_000_000 + seed, seed))
    here.put('other', mixture(2_000_000, seed + 1))
    assert pull.pull(here.repo, 'one', client).whole is None
    assert here.read('one') == mixture(2_000_000 + seed, seed)
    repositories.require_clean(here.path)


@pytest.mark.usefixtures('small_lots')
def test_only_some_lots_are_in_memory(there, here, client, monkeypatch):
    there.put('one', noise(600 * BLOCK))
    most = [0]
    look_up = pull.Pull._look_up

    def count(self, lot):
        look_up(self, lot)
        most[0] = max(most[0], len(self.assembly._waiting))

    monkeypatch.setattr(pull.Pull, '_look_up', count)
    pull.pull(here.repo, 'one', client)
    assert 1 < most[0] <= pull.LOTS


@pytest.mark.parametrize('block_size', [512, 65536])
def test_other_sizes(tmp_path, block_size):
    data = mixture(3_000_001)
    there, here = (Site(tmp_path / name, block_size=block_size,
                        segment_size=max(block_size, 65536))
                   for name in ('there', 'here'))
    there.put('one', data)
    with daemons.running(there.path) as daemon:
        with daemon.client() as client:
            assert pull.pull(here.repo, 'one', client).whole is None
    assert here.read('one') == data
    for site in (there, here):
        site.repo.close()


@pytest.mark.parametrize('parameters, word', [
    ({'block_size': 8192}, '8192'),
    ({'fingerprint': 'blake2s256'}, 'blake2s256'),
    ({'verify': 'bytes'}, 'value')])
def test_all_of_it_comes(there, tmp_path, client, parameters, word):
    """The whole image is pulled if its fingerprints are of no use here."""
    data = mixture(5_000_001)
    there.put('one', data)
    here = Site(tmp_path / 'here', **parameters)
    result = pull.pull(here.repo, 'one', client)
    assert word in result.whole
    assert here.read('one') == data
    assert result.received_bytes > len(data)
    assert result.asked_blocks == result.found_blocks == 0
    repositories.require_clean(here.path)
    here.repo.close()


# -- errors -------------------------------------------------------------------

def test_it_is_here_already(there, here, client, monkeypatch):
    there.put('one', b'there')
    here.put('one', b'here')
    monkeypatch.setattr(client, 'request',
                        lambda *args, **kwargs: pytest.fail('it asked'))
    with pytest.raises(exceptions.ImageExists):
        pull.pull(here.repo, 'one', client)
    assert here.read('one') == b'here'


def test_it_is_not_there(here, client):
    with pytest.raises(client_errors.Refused) as caught:
        pull.pull(here.repo, 'one', client)
    assert caught.value.code == 404
    here.require_nothing_of('one')


def tampered(client, monkeypatch, change):
    """Pass the received blocks through `change(frames)`."""
    blocks = client.blocks
    monkeypatch.setattr(
        client, 'blocks', lambda *args: change(list(blocks(*args))))


def spoil(frame, at):
    plain = bytearray(frame.plain)
    plain[at] ^= 1
    return wire.Frame(bytes(plain), frame.places)


def wrong_byte(frames):
    return [*frames[:-1], spoil(frames[-1], len(frames[-1].plain) - 1)]


def left_out(frames):
    return frames[:-1]


def twice(frames):
    return [*frames, frames[-1]]


def shifted(frames):
    return [wire.Frame(frame.plain, [
        (offset + 1, start, length)
        for offset, start, length in frame.places]) for frame in frames]


def exchanged(frames):
    """Exchange two blocks of the image."""
    frame = frames[0]
    (offset, start, length), *others = frame.places
    plain = (frame.plain[BLOCK:2 * BLOCK] + frame.plain[:BLOCK]
             + frame.plain[2 * BLOCK:])
    return [wire.Frame(plain, frame.places), *frames[1:]]


def short(frames):
    """Send only a part of a block."""
    frame = frames[-1]
    *others, (offset, start, length) = frame.places
    return [*frames[:-1], wire.Frame(
        frame.plain, [*others, (offset, start, length - 1)])]


@pytest.mark.usefixtures('small_lots')
@pytest.mark.parametrize('change', [
    wrong_byte, left_out, twice, shifted, exchanged, short])
def test_a_peer_that_lies(there, here, client, monkeypatch, change):
    """A wrong block gives an error that names the peer; nothing is stored."""
    data = noise(100 * BLOCK)
    there.put('one', data)
    with monkeypatch.context() as patch:
        tampered(client, patch, change)
        with pytest.raises(client_errors.BadAnswer) as caught:
            pull.pull(here.repo, 'one', client)
    assert client.address in str(caught.value)
    assert 'image one, offset ' in str(caught.value)
    here.require_nothing_of('one')
    pull.pull(here.repo, 'one', client)
    assert here.read('one') == data
    repositories.require_clean(here.path)


class Hostile:
    """Answers each request for a recipe with a head and endless bytes.

    :ivar sent: bytes behind the header
    """

    def __init__(self, path, header, extents, pause=0.0):
        self.sent = 0
        self._body = header.pack(), extents, pause
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self.address = f'unix:{path}'
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        header, extents, pause = self._body
        with contextlib.suppress(OSError):
            while True:
                sock = self._listener.accept()[0]
                with sock, contextlib.suppress(OSError):
                    sock.recv(65536)
                    sock.sendall(
                        b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n'
                        b'ETag: "' + b'0' * 32 + b'"\r\n\r\n')
                    for number, piece in enumerate(
                            itertools.chain([header], extents())):
                        sock.sendall(b'%x\r\n%s\r\n' % (len(piece), piece))
                        self.sent += len(piece) if number else 0
                        time.sleep(pause)

    def close(self):
        self._listener.close()


def announced(size, zero_bytes, extents):
    return wire.RecipeHeader(4096, size, zero_bytes, extents, 'sha256',
                             bytes(16), 'fixed')


def zeros_without_end():
    for offset in itertools.count():
        yield wire.RecipeExtent(offset, 1, 0, b'').pack()


def crumbs():
    """Send blocks of one byte, of which the image has very many."""
    table = (bytes(32) + (1).to_bytes(4, 'little')) * 1024
    for number in itertools.count():
        yield wire.RecipeExtent(1024 * number, 1024, 1024, table).pack()


@pytest.mark.parametrize('header,extents,word', [
    # Each run of zeros would follow another one.
    (announced(1 << 61, 1 << 61, 1 << 61), zeros_without_end, 'zeros and'),
    (announced(1 << 61, 1 << 60, 1 << 60), zeros_without_end, 'half'),
    (announced(1 << 61, 0, 1), crumbs, 'of which half'),
    (announced(1 << 40, 0, 1 << 40), crumbs, 'of which half'),
    (announced(1 << 30, 0, 1 << 18), crumbs, 'more blocks')],
    ids=['zeros', 'half', 'size', 'extents', 'crumbs'])
def test_an_endless_recipe(here, tmp_path, header, extents, word):
    """An endless recipe is refused before it has filled the disk."""
    peer = Hostile(tmp_path / 'hostile', header, extents)
    with contextlib.closing(peer), contextlib.closing(
            daemon_client.Client(peer.address)) as client:
        with pytest.raises(client_errors.BadAnswer, match=word):
            pull.pull(here.repo, 'one', client)
        assert peer.sent < 64 << 20
    here.require_nothing_of('one')


def test_a_recipe_that_drips(here, tmp_path, monkeypatch):
    """A recipe that arrives too slowly is refused."""
    monkeypatch.setattr(daemon_connection, 'SLOWEST', 1 << 30)
    peer = Hostile(tmp_path / 'hostile', announced(1 << 20, 1 << 19, 1 << 12),
                   zeros_without_end, pause=0.1)
    with contextlib.closing(peer), contextlib.closing(
            daemon_client.Client(peer.address, timeout=2.0)) as client:
        with pytest.raises(client_errors.DaemonUnavailable, match='time'):
            pull.pull(here.repo, 'one', client)
    here.require_nothing_of('one')


@pytest.mark.usefixtures('small_lots')
def test_what_came_before_is_kept(there, here, client, monkeypatch):
    """A pull after a wrong block keeps the lots that came before it."""
    data = noise(400 * BLOCK)
    there.put('one', data)
    lots = []

    def change(frames):
        lots.append(1)
        return wrong_byte(frames) if len(lots) == 20 else frames

    with monkeypatch.context() as patch:
        tampered(client, patch, change)
        with pytest.raises(client_errors.BadAnswer):
            pull.pull(here.repo, 'one', client)
    result = pull.pull(here.repo, 'one', client)
    # Some of the lots that were under way are lost.
    assert result.found_blocks >= (20 - 1 - pull.LOTS) * 16
    assert result.asked_blocks == 400 - result.found_blocks
    assert here.read('one') == data


@pytest.mark.usefixtures('small_lots')
@pytest.mark.parametrize('whole', [False, True])
def test_the_peer_dies(there, tmp_path, daemon, client, whole):
    """After a kill of the peer the next pull requests only the rest."""
    here = Site(tmp_path / 'here', block_size=8192 if whole else 4096)
    data = noise(3000 * BLOCK)
    there.put('one', data)

    def progress(done, size):
        if done > size // 2 and daemon.process.poll() is None:
            daemon.kill()

    with pytest.raises(client_errors.DaemonUnavailable):
        pull.pull(here.repo, 'one', client, progress=progress)
    here.require_nothing_of('one')
    daemon.start()
    before = here.repo.statistics()['hits']
    result = pull.pull(here.repo, 'one', client)
    assert here.read('one') == data
    if whole:
        assert here.repo.statistics()['hits'] - before > 600
    else:
        assert result.found_blocks > 1400
        assert result.received_bytes < 0.6 * len(data)
    repositories.require_clean(here.path)
    here.repo.close()


KILLED = '''
    import os, sys
    from glance_dedup.client import daemon_client
    from glance_dedup.repository import image_repository
    from glance_dedup.transfer import image_assembly
    from glance_dedup.transfer import pull
    path, filters, address = sys.argv[1:]
    image_assembly.LOT_BLOCKS, pull.SYNC_BYTES = 16, 64 << 10
    pull.pull(
        image_repository.Repository(path, filter_dir=filters, filter_mib=1),
        'one', daemon_client.Client(address), progress=lambda done, size: (
            done > size // 2 and os.kill(os.getpid(), 9)))
'''


def test_it_is_killed(there, here, daemon, client):
    """After a kill of the pull the next one finds its synced blocks."""
    data = noise(400 * BLOCK)
    there.put('one', data)
    done = subprocess.run(
        [sys.executable, '-c', textwrap.dedent(KILLED), str(here.path),
         f'{here.path}-filter', daemon.address],
        timeout=60, cwd=daemons.ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    result = pull.pull(here.repo, 'one', client)
    assert result.found_blocks >= 180
    assert here.read('one') == data
    repositories.require_clean(here.path)


def test_it_was_stored_anew_there(there, here, client, monkeypatch):
    """A pull fails if the image was deleted and stored again meanwhile."""
    there.put('one', noise(100 * BLOCK))
    recipe = client.recipe

    def exchange(image_id):
        found = recipe(image_id)
        there.repo.delete('one')
        there.put('one', noise(100 * BLOCK, 2))
        return found

    monkeypatch.setattr(client, 'recipe', exchange)
    with pytest.raises(client_errors.Refused) as caught:
        pull.pull(here.repo, 'one', client)
    assert caught.value.code == 404
    here.require_nothing_of('one')


def test_another_upload_commits_first(there, here, client, monkeypatch):
    there.put('one', noise(100 * BLOCK))

    def progress(done, size):
        if 'one' not in here.repo.images():
            here.put('one', b'faster')

    with pytest.raises(exceptions.ImageExists):
        pull.pull(here.repo, 'one', client, progress=progress)
    assert here.read('one') == b'faster'


def test_an_interrupt(there, here, client):
    """An interrupt ends all threads, and closes the connections."""
    there.put('one', noise(1000 * BLOCK))

    def progress(done, size):
        raise KeyboardInterrupt()

    with pytest.raises(KeyboardInterrupt):
        pull.pull(here.repo, 'one', client, progress=progress)
    assert not client._busy
    here.require_nothing_of('one')


def test_the_disk_is_full(there, client, tmp_path):
    there.put('one', noise(3000 * BLOCK))
    with repositories.small_disk(tmp_path / 'disk', 8 << 20) as disk:
        here = Site(disk / 'here')
        with pytest.raises(exceptions.NoSpaceError):
            pull.pull(here.repo, 'one', client)
        here.require_nothing_of('one')
        here.repo.close()


def test_damage_there(there, here, client):
    """Damage at the peer is an error, and nothing is stored."""
    there.put('one', noise(100 * BLOCK))
    group = repositories.Group(there.path, 1)
    group.data[-100:] = bytes(100)
    group.save()
    with pytest.raises(client_errors.ClientError):
        pull.pull(here.repo, 'one', client)
    here.require_nothing_of('one')


# -- over TLS, by the command -------------------------------------------------

class TLS:
    """A daemon with a TLS listener, and certificates with different rights."""

    def __init__(self, directory, repository, **options):
        self.authority = certificates.Authority(directory)
        self.strange = certificates.Authority(directory, 'strange')
        server = self.authority.issue('server')
        self.operator = self.authority.issue('operator')
        self.port = ports.free_port()
        self.address = f'https://127.0.0.1:{self.port}'
        self.daemon = daemons.running(
            repository, listen=f'127.0.0.1:{self.port}',
            tls_cert=server, tls_key=server,
            tls_client_ca=self.authority.path, **options)


@pytest.fixture
def tls(there, tmp_path):
    found = TLS(tmp_path, there.path)
    with found.daemon:
        yield found


@pytest.fixture
def cli(here, tmp_path, capfd):
    cli = cli_conftest.Cli(tmp_path, capfd)
    cli.options = ['--repository', str(here.path), '--filter-dir',
                   str(tmp_path / 'here-filter'), '--socket', '']
    return cli


def test_the_command(there, here, tls, cli, monkeypatch):
    data = mixture(3_000_001)
    there.put('one', data)
    here.put('other', data[:1_000_000])
    good = ('image', 'pull', 'one', '--from', tls.address)
    operator = ('--cert', tls.operator, '--ca-file', tls.authority.path)
    # Both sides verify each other's certificate.
    cli(*good).failed('certificate')
    cli(*good, '--cert', tls.operator, '--ca-file',
        tls.strange.path).failed('certificate')
    cli(*good, '--ca-file', tls.authority.path).failed(tls.address)
    cli(*good, '--cert', '/nothing', '--ca-file',
        tls.authority.path).failed('/nothing')
    cli(*good, '--cert', __file__, '--ca-file',
        tls.authority.path).refused(__file__)
    cli(*good, '--ca-file', os.devnull).refused(os.devnull)
    cli(*good, '--cert', tls.authority.path, '--ca-file',
        tls.authority.path).refused(str(tls.authority.path), 'the key, too')
    cli(*good, '--key', tls.operator).refused('--cert')
    cli('image', 'pull', 'one', '--from', 'http://x').refused('http://x')
    monkeypatch.setenv('OS_TOKEN', 'a\nb')
    cli(*good).refused('token')
    here.require_nothing_of('one')
    found = cli(*good, *operator, '--project', 'p', '-f', 'json').json()
    assert here.read('one') == data
    assert found['project'] == 'p'
    assert found['size'] == len(data)
    assert found['whole'] is None
    assert found['found_blocks'] > 0
    assert 0 < found['asked_blocks'] * BLOCK < len(data)
    assert 0 < found['received_bytes'] < len(data)
    cli(*good, *operator).failed('one')
    cli('image', 'pull', 'two', '--from', tls.address,
        *operator).failed('two')


def test_the_command_says_why_all_came(there, tls, cli, tmp_path):
    there.put('one', b'data')
    cli.options[1] = str(tmp_path / 'other')
    assert cli('repository', 'create', '--verify', 'bytes').status == 0
    result = cli('image', 'pull', 'one', '--from', tls.address, '--cert',
                 tls.operator, '--ca-file', tls.authority.path, '-f', 'json')
    assert 'by value' in result.json()['whole']
    assert 'by value' in result.err


def test_the_command_says_that_all_came_of_another_scope(
        there, here, daemon, cli):
    there.put('one', noise(9 * BLOCK), project='p', scope='project')
    here.put('two', noise(9 * BLOCK), project='p', scope='project')
    result = cli('image', 'pull', 'one', '--from', daemon.address,
                 '--project', 'p', '-f', 'json')
    assert 'another scope' in result.json()['whole']
    assert 'another scope' in result.err
    assert result.json()['asked_blocks'] == 9
    assert cli('image', 'delete', 'one').status == 0
    result = cli('image', 'pull', 'one', '--from', daemon.address,
                 '--project', 'p', '--scope', 'project', '-f', 'json')
    assert result.json()['whole'] is None
    assert result.json()['found_blocks'] == 9


def test_over_a_socket(there, here, daemon, cli):
    there.put('one', b'data' * 5000)
    result = cli('image', 'pull', 'one', '--from', daemon.address)
    assert result.status == 0, result.err
    assert here.read('one') == b'data' * 5000


@pytest.mark.slow
def test_the_command_is_interrupted(there, here, tls, cli):
    """After an interrupt (^C) the same command resumes the pull."""
    data = noise(20 << 20)
    there.put('one', data)
    options = ('image', 'pull', 'one', '--from', tls.address, '--cert',
               tls.operator, '--ca-file', tls.authority.path, '-f', 'json')
    process = cli.start(*options, stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE)
    # Send the signal as soon as something is stored.
    repositories.eventually(
        lambda: process.poll() is not None
        or any(os.scandir(here.path / 'groups')))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.skip('it was faster')
    assert process.returncode == 130, err
    here.require_nothing_of('one')
    found = json.loads(cli(*options).out)
    assert here.read('one') == data
    assert found['found_blocks'] > 0
    repositories.require_clean(here.path)
