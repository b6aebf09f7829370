# SPDX-License-Identifier: Apache-2.0

"""The daemon's process: start, end, signals, two of one repository, TLS."""

import contextlib
import hashlib
import http.server
import json
import os
import pathlib
import signal
import socket
import ssl
import threading
import time

import pytest

from tests.support import certificates
from tests.support import daemons
from tests.support.daemons import LIMIT
from tests.support.daemons import raw
from tests.support.daemons import read_response
from tests.support import ports
from tests.support import repositories

IMAGE = '/v1/images/image'


@pytest.fixture(scope='module')
def content():
    return repositories.noise(24_000_000, seed=5)


@pytest.fixture
def repository(tmp_path, content):
    path = repositories.create(tmp_path / 'repository', group_slots=8192)
    with repositories.open_repository(path, codec='none') as opened:
        with opened.begin('image') as transaction:
            transaction.write(content)
            transaction.set_hash('sha512', hashlib.sha512(content).digest())
            transaction.commit()
    return path


# -- start --------------------------------------------------------------------

def test_serves_before_the_catalog_is_there(tmp_path, content, repository):
    """The daemon serves reads before its catalog has been rebuilt."""
    with daemons.Daemon(repository) as daemon:
        # A process that opened the recipes one by one would hang on the FIFO;
        # the daemon only opens the image that it serves.
        daemon.start()
        assert daemon.request('GET', IMAGE).body == content
        daemon.wait_for_catalog()
        assert daemon.status()['space']['images'] == 1
    repositories.require_clean(repository)


def heaps_of_threads(pid):
    """Count glibc's heaps: 64 MiB reserved at multiples of that."""
    reserved, found, last = 64 << 20, 0, (0, 0)
    with open(f'/proc/{pid}/maps') as maps:
        for line in maps:
            area, mode, *_ = line.split()
            begin, end = (int(at, 16) for at in area.split('-'))
            found += (mode == '---p' and begin == last[1]
                      and last[0] % reserved == 0
                      and end == last[0] + reserved)
            last = begin, end
    return found


def test_threads_have_no_heaps_of_their_own(repository, content):
    """Threads have no heaps of their own, which would keep freed memory."""
    def read():
        for _ in range(5):
            assert daemon.request('GET', IMAGE).body == content

    with daemons.Daemon(repository) as daemon:
        daemon.start()
        daemon.wait_for_catalog()
        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert heaps_of_threads(daemon.process.pid) == 0


def test_start_takes_little_time(repository):
    """The start takes less than two seconds of the processor."""
    with daemons.Daemon(repository) as daemon:
        daemon.environment = {'GLANCE_DEDUP_TEST_EXEC': '1'}
        daemon.start()
        fields = pathlib.Path(
            f'/proc/{daemon.process.pid}/stat').read_text().split()
        taken = sum(map(int, fields[13:15])) / os.sysconf('SC_CLK_TCK')
        assert daemon.stop() == 0
    # Most of it is Python's: 0.6 s.
    assert taken < 2
    print(f'start to serving: {taken:.2f} s')


#: Once there is a file `upgraded`, none of our modules can be imported.
UPGRADED = """
import importlib.abc, os, sys
from dedupd import daemon
from dedupd.tasks import registry

class Upgrade(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if os.path.exists('{directory}/upgraded') and name.startswith((
                'dedupd.', 'glance_dedup.')):
            raise ImportError(f'{{name}} is of another version')

sys.meta_path.insert(0, Upgrade())
load = registry.load
registry.load = lambda: (load(), open('{directory}/loaded', 'w').close())
sys.exit(daemon.main())
"""


def test_an_upgrade_of_the_package_before_the_restart(repository, tmp_path):
    """A daemon that serves has all modules of its tasks."""
    with daemons.Daemon(repository) as daemon:
        daemon.program = ['-c', UPGRADED.format(directory=tmp_path)]
        daemon.start().wait_for_catalog().wait_for(
            (tmp_path / 'loaded').exists)
        (tmp_path / 'upgraded').touch()
        for task, arguments in {
                'account': {}, 'collect': {'by_partition': True}, 'merge': {},
                'scrub': {}, 'recompress': {'codec': 'zstd'}, 'projects': {},
                'usage': {'images': ['image']}}.items():
            status = daemon.run(task, **arguments)
            assert status['last']['error'] is None, (task, status)
        assert 'another version' not in daemon.text()
        assert daemon.stop() == 0


@pytest.mark.parametrize('options,words', [
    ({'datadir': '/nonexistent'}, 'no directory /nonexistent'),
    ({'socket': '/nonexistent/socket'},
     'cannot listen on /nonexistent/socket: No such file'),
    ({'listen': '127.0.0.1:1'}, 'listen needs tls_cert'),
    ({'listen': '127.0.0.1:1', 'tls_cert': '/nonexistent'},
     '/nonexistent: No such file'),
    ({'listen': '127.0.0.1:1', 'tls_cert': __file__, 'tls_key': __file__},
     f'{__file__}, {__file__}: '),
    ({'socket_users': 'no-such-user'}, "no user 'no-such-user'"),
    ({'status_listen': 'x'}, 'status_listen'),
    ({'read_threads': 0}, 'read_threads'),
    ({'merge_exclude': '../x'}, 'merge_exclude')])
def test_bad_options_end_it_with_a_sentence(repository, options, words):
    with daemons.Daemon(repository, **options) as daemon:
        daemon.start(wait=False)
        # 1: systemd starts it again, since that may help. Certificate files
        # may be just being replaced.
        passes = 'No such file' in words or 'no directory' in words or (
            'tls_key' in options)
        assert daemon.process.wait(LIMIT) == (1 if passes else 2)
        assert words in daemon.text()
        assert 'Traceback' not in daemon.text()


def test_socket_of_the_living_and_of_the_dead(repository):
    with daemons.Daemon(repository) as daemon:
        daemon.start()
        second = daemons.Daemon(repository, socket=daemon.socket)
        with second:
            second.start(wait=False)
            assert second.process.wait(LIMIT) == 1
            assert (f'cannot listen on {daemon.socket}: Address already in '
                    'use' in second.text())
            assert 'Traceback' not in second.text()
        assert daemon.request('GET', '/healthcheck').status == 200
        daemon.stop(signal.SIGKILL)
        assert os.path.exists(daemon.socket)
        daemon.start()
        assert daemon.stop() == 0
        assert not os.path.exists(daemon.socket)


@pytest.mark.parametrize('option', ['listen', 'status_listen'])
def test_an_address_that_is_taken(tmp_path, repository, option):
    certificate = certificates.Authority(tmp_path).issue('server')
    with socket.socket() as sock:
        sock.bind(('127.0.0.1', 0))
        sock.listen()
        taken = f'127.0.0.1:{sock.getsockname()[1]}'
        with daemons.Daemon(repository, tls_cert=certificate,
                            tls_key=certificate, **{option: taken}) as daemon:
            daemon.start(wait=False)
            assert daemon.process.wait(LIMIT) == 1
            assert (f'dedupd: cannot listen on {taken}: Address already in '
                    'use' in daemon.text())
            assert 'Traceback' not in daemon.text()
            assert not os.path.exists(daemon.socket)


# -- end ----------------------------------------------------------------------

def test_sigterm_lets_downloads_finish(repository, content):
    with daemons.Daemon(repository) as daemon:
        daemon.start()
        with daemon.connect() as sock, daemon.connect() as idle:
            sock.sendall(raw('GET', IMAGE))
            data = sock.recv(65536)
            daemon.process.terminate()
            assert idle.recv(1) == b''
            with pytest.raises(OSError):
                daemon.connect()
            while piece := sock.recv(1 << 20):
                data += piece
        assert data.partition(b'\r\n\r\n')[2] == content
        assert daemon.stop() == 0
        assert 'cut off' not in daemon.text()


@pytest.mark.slow
def test_sigterm_ends_in_time_whatever_hangs(repository):
    """The daemon ends in time despite clients that hang.

    They are a client that reads nothing, a half request, and a long poll.
    """
    with daemons.Daemon(repository, header_timeout=600,
                        write_timeout=600) as daemon:
        daemon.start()
        with contextlib.ExitStack() as stack:
            socks = [stack.enter_context(daemon.connect()) for _ in range(3)]
            socks[0].sendall(raw('GET', IMAGE))
            socks[1].sendall(b'GET /')
            socks[2].sendall(raw(
                'GET', '/v1/tasks/account?after=1000&wait=60'))
            daemon.wait_for(
                lambda: daemon.status()['reads']['connections'] == 4)
            since = time.monotonic()
            assert daemon.stop() == 0
            assert time.monotonic() - since > 7
            # The long poll got an answer, long before its minute was over.
            assert read_response(socks[2].makefile('rb')).status == 200
        assert '2 connections are cut off' in daemon.text()


def test_sigterm_while_a_task_runs(tmp_path):
    """The task stops after its step, and leaves a clean repository."""
    path = repositories.create(tmp_path / 'repository', group_slots=64,
                               segment_size=4096)
    with repositories.open_repository(path) as opened:
        repositories.put(opened, 'image', repositories.noise(8_000_000))
    # At this rate the task would run for minutes.
    with daemons.Daemon(path, scrub_rate_mib=0.01) as daemon:
        daemon.start().wait_for_catalog()
        daemon.request('POST', '/v1/tasks/scrub')
        daemon.wait_for(lambda: daemon.status()['tasks']['scrub'][
            'state'] == 'running')
        assert daemon.stop() == 0
        assert 'cut off' not in daemon.text()
    repositories.require_clean(path)


# -- all of it ----------------------------------------------------------------

def test_space_of_a_deleted_image_comes_back(tmp_path):
    """A deleted image's space comes back by request, and by schedule."""
    path = repositories.create(tmp_path / 'repository', group_slots=256)
    data = repositories.noise(4_000_000)
    with repositories.open_repository(path) as opened, (
            daemons.Daemon(path)) as daemon:
        daemon.start().wait_for_catalog()
        for image_id in ('keep', 'drop', 'later'):
            repositories.put(opened, image_id, data[:1_000_000]
                             + repositories.noise(3_000_000, image_id))
        daemon.run('account')
        full = sum(g['disk_bytes'] for g in daemon.request(
            'GET', '/v1/groups').json()['groups'])
        opened.delete('drop')
        plan = daemon.run('collect', dry_run=True)['last']['result']
        result = daemon.run('collect')['last']['result']
        assert plan['blocks'] == result['freed_blocks'] > 700
        less = sum(g['disk_bytes'] for g in daemon.request(
            'GET', '/v1/groups').json()['groups'])
        assert full - less > 2_500_000
        for name in ('merge', 'scrub'):
            last = daemon.run(name)['last']
            assert last['error'] is None, last
        assert daemon.status()['damage'] == {
            'blocks': 0, 'images': [], 'volumes': []}
        daemon.write_config(collect_interval=1)
        daemon.process.send_signal(signal.SIGHUP)
        opened.delete('later')
        daemon.wait_for(lambda: daemon.status()['space'][
            'unique_bytes'] < 4_100_000)
        assert daemon.request('GET', '/v1/images/keep').body[
            :1_000_000] == data[:1_000_000]
        assert daemon.stop() == 0
    repositories.require_clean(path)


# -- SIGHUP -------------------------------------------------------------------

def test_sighup(repository):
    with daemons.Daemon(repository, idle_timeout=60) as daemon:
        daemon.start().wait_for_catalog()
        daemon.write_config(idle_timeout=1, collect_interval=77,
                            socket_users='daemon')
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_for(lambda: daemon.status()['tasks']['collect'][
            'interval'] == 77)
        daemon.wait_for(lambda: daemon.status()['tasks']['collect']['next'])
        assert os.stat(daemon.socket).st_mode & 0o777 == 0o666
        with daemon.connect() as sock:
            assert sock.recv(1) == b''
        # Wrong options change nothing.
        refused = 0
        for name, value in (('socket_users', 'no-such-user'),
                            ('header_timeout', 'x'), ('cache_mib', '-1'),
                            ('merge_exclude', '../x')):
            daemon.write_config(**{name: value})
            daemon.process.send_signal(signal.SIGHUP)
            refused += 1
            daemon.wait_for(lambda: daemon.text().count(
                'Some options stay as they were') == refused)
            # A client that sends nothing for a second is disconnected.
            daemon.wait_for(lambda: daemon.request(
                'GET', '/healthcheck').status == 200)
            daemon.options.pop(name)
        assert daemon.stop() == 0


def test_sighup_changes_the_pace_of_the_task_that_runs(tmp_path):
    path = repositories.create(tmp_path / 'repository', group_slots=64,
                               segment_size=4096)
    with repositories.open_repository(path) as opened:
        repositories.put(opened, 'image', repositories.noise(8_000_000))
    with daemons.Daemon(path, scrub_rate_mib=0.01) as daemon:
        daemon.start().wait_for_catalog()
        number = daemon.request('POST', '/v1/tasks/scrub').json()['number']
        daemon.wait_for(lambda: daemon.status()['tasks']['scrub'][
            'state'] == 'running')
        # Other requests do not wait for it.
        assert daemon.run('account')['last']['error'] is None
        daemon.write_config(scrub_rate_mib=0)
        daemon.process.send_signal(signal.SIGHUP)
        status = daemon.request(
            'GET', f'/v1/tasks/scrub?after={number}&wait=60').json()
        assert status['finished'] == number
        assert status['last']['result']['complete']


# -- two ----------------------------------------------------------------------

def test_two_daemons(repository, content):
    """One daemon is the maintainer; the other serves reads, and takes over."""
    with daemons.Daemon(repository) as first, (
            daemons.Daemon(repository)) as second:
        first.start().wait_for_catalog()
        second.program = daemons.impatient(TRIAL_INTERVAL=0.3)
        second.start(wait=False)
        second.wait_for(lambda: 'Only reads are served' in second.text())
        assert second.request('GET', IMAGE).body == content
        status = second.status()
        assert status['daemon']['role'] == 'reader'
        assert status['space']['images'] is None
        assert len(second.request('GET', '/v1/images').json()['images']) == 1
        for path in ('/v1/tasks/collect', '/v1/images/image/mark-lost'):
            response = second.request('POST', path)
            assert response.status == 409
            assert 'maintain' in response.json()['error']['message']
        assert first.stop(signal.SIGKILL) == -signal.SIGKILL
        second.wait_for_catalog()
        assert second.run('account')['last']['error'] is None
        assert second.text().count('Only reads are served') == 1


# -- systemd ------------------------------------------------------------------

def test_systemd_is_told(repository):
    with daemons.Daemon(repository) as daemon, socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        path = str(daemon.directory / 'notify')
        sock.bind(path)
        sock.settimeout(LIMIT)
        daemon.environment = {'NOTIFY_SOCKET': path, 'WATCHDOG_USEC': '400000'}
        # The daemon waits while ten of its messages have not been read.
        daemon.start(wait=False)
        assert sock.recv(100) == b'READY=1'
        assert sock.recv(100) == b'WATCHDOG=1'
        daemon.process.send_signal(signal.SIGHUP)
        while (told := sock.recv(100)) == b'WATCHDOG=1':
            pass
        assert told.startswith(b'RELOADING=1\nMONOTONIC_USEC=')
        assert sock.recv(100) == b'READY=1'
        daemon.process.terminate()
        while (told := sock.recv(100)) == b'WATCHDOG=1':
            pass
        assert told == b'STOPPING=1'
        assert daemon.stop() == 0


def test_the_unit_is_valid():
    unit = daemons.ROOT / 'etc' / 'dedupd.service'
    text = unit.read_text()
    assert 'Type=notify' in text and 'ProtectSystem=strict' in text


# -- TLS and tokens -----------------------------------------------------------

class Glance:
    """The part of Glance that the daemon requests, on a real port."""

    def __init__(self, content):
        self.asked = []
        self.status = {}
        self.record = {'os_hash_algo': 'sha512',
                       'os_hash_value': hashlib.sha512(content).hexdigest()}
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                token = self.headers['X-Auth-Token']
                outer.asked.append((token, self.path, self.headers['Range']))
                status = outer.status.get((token, self.path.split('/')[3]),
                                          401)
                if status is None:
                    time.sleep(30)
                body = b'x'
                if not self.path.endswith('/file'):
                    status = 200 if status == 206 else status
                    body = json.dumps(outer.record).encode()
                self.send_response(status)
                self.send_header('Content-Length', str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(('127.0.0.1', 0),
                                                      Handler)
        self.url = f'http://127.0.0.1:{self.server.server_port}'
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def glance(content):
    with contextlib.closing(Glance(content)) as server:
        yield server


@pytest.fixture
def remote(tmp_path, repository, glance):
    """A daemon that serves others over TLS, with its certificates."""
    authority = certificates.Authority(tmp_path)
    operators = certificates.Authority(tmp_path, 'operators')
    port = ports.free_port()
    with daemons.Daemon(
            repository, listen=f'127.0.0.1:{port}',
            tls_cert=authority.issue('server'), tls_client_ca=operators.path,
            glance_url=glance.url) as daemon:
        daemon.start()
        daemon.authority, daemon.operators = authority, operators
        daemon.port = port
        yield daemon


def ask(daemon, data, certificate=None, authority=None):
    """Return a response over TLS; not to HEAD."""
    context = ssl.create_default_context(
        cafile=authority or daemon.authority.path)
    if certificate is not None:
        context.load_cert_chain(certificate)
    with socket.create_connection(('127.0.0.1', daemon.port), LIMIT) as sock:
        with context.wrap_socket(sock, server_hostname='localhost') as tls:
            tls.sendall(data)
            return read_response(tls.makefile('rb'))


def test_operators_read_everything_over_tls(remote, content):
    certificate = remote.operators.issue('operator')
    assert ask(remote, raw('GET', IMAGE), certificate).body == content
    response = ask(remote, raw('GET', IMAGE, Range='bytes=5-9'), certificate)
    assert (response.status, response.body) == (206, content[5:10])
    assert ask(remote, raw('GET', f'{IMAGE}/recipe'), certificate).status == (
        200)
    assert ask(remote, raw('POST', f'{IMAGE}/blocks', b'{"ranges": []}'),
               certificate).status == 200
    # Clients over TLS can only read.
    for method, path in (
            ('GET', '/v1/status'), ('GET', '/'), ('GET', '/metrics'),
            ('GET', '/v1/images'), ('POST', '/v1/tasks/collect'),
            ('POST', f'{IMAGE}/mark-lost'), ('GET', '/healthcheck')):
        assert ask(remote, raw(method, path), certificate).status == 404


def test_certificates_of_others_open_nothing(remote, tmp_path):
    strange = certificates.Authority(tmp_path, 'strange')
    for certificate in (strange.issue('stranger'),
                        remote.authority.issue('other-server')):
        with pytest.raises((ssl.SSLError, OSError)):
            response = ask(remote, raw('GET', IMAGE), certificate)
            assert response is not None and response.status == 200
    assert ask(remote, raw('GET', IMAGE)).status == 401
    remote.wait_for(lambda: remote.request('GET', '/healthcheck'))


def test_the_log_says_that_a_certificate_was_refused(remote, tmp_path):
    strange = certificates.Authority(tmp_path, 'strange')
    for refused in (strange.issue('stranger'),
                    remote.operators.issue('old', days=-0.5)):
        before = remote.log.stat().st_size
        with pytest.raises((ssl.SSLError, OSError)):
            ask(remote, raw('GET', IMAGE), refused)
        remote.wait_for(lambda: (
            'A certificate was refused on tls, of a client at 127.0.0.1: '
            in remote.log.read_bytes()[before:].decode()))
    assert 'certificate has expired' in remote.text()


def test_the_log_says_that_a_right_was_refused(remote):
    operator = remote.operators.issue('operator')
    answer = ask(remote, raw(
        'POST', f'/v1/replicas/u_{"ab" * 16}?upload={"ab" * 16}'
        f'&sender={"cd" * 16}', b'x'), operator)
    assert answer.status == 403
    remote.wait_for(lambda: (
        "WARNING dedupd.serve.upload_rights [-] The certificate of 'operator'"
        in remote.text()))
    assert ("may not upload: it lacks the right to upload. The option "
            'upload_from of this daemon gives it.') in remote.text()


def test_tokens(remote, glance, content):
    glance.status = {('good', 'image'): 206, ('good', 'none'): 404,
                     ('whole', 'image'): 200, ('poor', 'image'): 403,
                     ('odd', 'image'): 500, ('empty', 'image'): 204}
    for token, image_id, status in (
            ('good', 'image', 200), ('whole', 'image', 200),
            ('poor', 'image', 403), ('bad', 'image', 401),
            ('good', 'none', 404), ('odd', 'image', 503),
            ('empty', 'image', 503), ('good', 'image2', 401)):
        response = ask(remote, raw('GET', f'/v1/images/{image_id}',
                                   X_Auth_Token=token))
        assert response.status == status, token
        assert (response.body == content) == (status == 200)
    assert glance.asked[0] == ('good', '/v2/images/image/file', 'bytes=0-0')
    # A permission is remembered, per image; a refusal is not.
    before = len(glance.asked)
    glance.status[('good', 'image')] = 403
    assert ask(remote, raw('GET', f'{IMAGE}/recipe', X_Auth_Token='good')
               ).status == 200
    assert len(glance.asked) == before
    glance.status[('poor', 'image')] = 206
    assert ask(remote, raw('GET', IMAGE, X_Auth_Token='poor')).status == 200
    # The daemon sends Glance no id that is invalid, or dangerous in a URL.
    before = len(glance.asked)
    for image_id in ('..%2f..', 'a%3fb', 'a%0d%0ab'):
        assert ask(remote, raw('GET', f'/v1/images/{image_id}',
                               X_Auth_Token='good')).status == 404
    assert len(glance.asked) == before


@pytest.mark.parametrize('headers,status', [
    ({}, 401), ({'X_Auth_Token': 'bad'}, 401), ({'X_Auth_Token': 'poor'}, 403),
    ({'Expect': '100-continue'}, 401),
    ({'X_Auth_Token': 'good', 'Expect': '100-continue'}, 100)])
def test_only_those_are_heard_out_who_may(remote, glance, headers, status):
    """Others are refused before a byte of their body is received."""
    glance.status = {('poor', 'image'): 403, ('good', 'image'): 206}
    for framing in ({'Content_Length': 1 << 20},
                    {'Transfer_Encoding': 'chunked'}):
        head = raw('POST', f'{IMAGE}/blocks', **headers, **framing)
        assert ask(remote, head).status == status


def test_glance_that_is_away(remote, glance):
    glance.close()
    response = ask(remote, raw('GET', IMAGE, X_Auth_Token='good'))
    assert response.status == 503
    assert 'token' in response.json()['error']['message']


def test_new_certificates_on_sighup(remote, tmp_path):
    new = certificates.Authority(tmp_path, 'new')
    server = pathlib.Path(remote.options['tls_cert'])
    operator = remote.operators.issue('operator')
    server.write_text('nonsense')
    remote.process.send_signal(signal.SIGHUP)
    remote.wait_for(lambda: 'stay as they were' in remote.text())
    assert ask(remote, raw('GET', IMAGE), operator).status == 200
    server.write_bytes(new.issue('new-server').read_bytes())
    remote.process.send_signal(signal.SIGHUP)
    remote.wait_for(lambda: ask(remote, raw('GET', '/'), operator,
                                new.path).status == 404)


class TestRevocation:
    """A client with a revoked certificate is no operator."""

    @pytest.fixture
    def revoked(self, remote):
        return remote.operators.issue('revoked')

    @pytest.fixture
    def fine(self, remote):
        return remote.operators.issue('fine')

    @contextlib.contextmanager
    def connected(self, remote, certificate):
        """Yield a function that requests the image on one connection.

        The function returns the status, or None if the connection is over.
        """
        context = ssl.create_default_context(cafile=remote.authority.path)
        context.load_cert_chain(certificate)
        with socket.create_connection(
                ('127.0.0.1', remote.port), LIMIT) as sock:
            with context.wrap_socket(sock, server_hostname='localhost') as tls:
                stream = tls.makefile('rb')

                def get():
                    try:
                        tls.sendall(raw('GET', IMAGE, Range='bytes=5-9'))
                        response = read_response(stream)
                    except OSError:
                        return None
                    return None if response is None else response.status

                yield get

    def need(self, remote, certificate, status):
        with self.connected(remote, certificate) as get:
            assert get() == status

    def test_a_list_of_its_own(self, remote, revoked, fine):
        remote.write_config(
            tls_client_crl=remote.operators.revoke(revoked))
        remote.stop()
        remote.start()
        self.need(remote, revoked, None)
        self.need(remote, fine, 206)
        remote.wait_for(
            lambda: '127.0.0.1: certificate revoked' in remote.text())

    def test_a_list_in_the_file_of_authorities(self, remote, revoked, fine):
        self.need(remote, revoked, 206)
        crl = remote.operators.revoke(revoked).read_bytes()
        with open(remote.operators.path, 'ab') as file:
            file.write(crl)
        self.need(remote, revoked, None)
        self.need(remote, fine, 206)

    @pytest.mark.parametrize('at_once', [True, False])
    def test_connections_that_there_are(self, remote, revoked, fine, at_once):
        crl = remote.operators.revoke()
        remote.write_config(tls_client_crl=crl)
        remote.stop()
        remote.start()
        with self.connected(remote, revoked) as get, self.connected(
                remote, fine) as other:
            assert get() == get() == other() == 206
            assert remote.operators.revoke(revoked) == crl
            if not at_once:
                time.sleep(3)
            # Clients that keep the rights have to connect again, too.
            assert get() in (401, None) and other() in (401, None)
            assert get() is None and other() is None
        self.need(remote, revoked, None)
        self.need(remote, fine, 206)

    def test_another_authority(self, remote, fine, tmp_path):
        other = certificates.Authority(tmp_path, 'other')
        with self.connected(remote, fine) as get:
            assert get() == get() == 206
            other.path.rename(remote.operators.path)
            assert get() in (401, None)
        self.need(remote, fine, None)
        self.need(remote, other.issue('another'), 206)

    def test_tokens_need_no_list(self, remote, glance, revoked):
        glance.status = {('good', 'image'): 206}
        remote.write_config(
            tls_client_crl=remote.operators.revoke(revoked))
        remote.stop()
        remote.start()
        request = raw('GET', IMAGE, X_Auth_Token='good')
        assert ask(remote, request).status == 200

    def test_a_list_that_is_out_of_date(self, remote, fine):
        remote.write_config(
            tls_client_crl=remote.operators.revoke(days=-1))
        remote.stop()
        remote.start()
        self.need(remote, fine, None)
        remote.wait_for(
            lambda: '127.0.0.1: CRL has expired' in remote.text())
        remote.operators.revoke()
        self.need(remote, fine, 206)

    def test_a_list_that_is_none(self, remote, revoked, fine):
        crl = remote.operators.revoke(revoked)
        remote.write_config(tls_client_crl=crl)
        remote.stop()
        remote.start()
        # Another authority's file at this place revokes nothing, and is
        # refused.
        strange = certificates.Authority(remote.operators.directory, 'strange')
        for content in (b'nonsense', b'', strange.path.read_bytes()):
            crl.write_bytes(content)
            self.need(remote, revoked, None)
            self.need(remote, strange.issue('stranger'), None)
            self.need(remote, fine, 206)
        assert remote.text().count('certificates stay as they were') == 3
        crl.unlink()
        self.need(remote, revoked, None)
        self.need(remote, fine, 206)
        remote.stop()
        remote.start(wait=False)
        assert remote.process.wait(LIMIT) == 1

    def test_a_list_without_authorities(self, remote):
        remote.write_config(tls_client_crl=remote.operators.revoke(),
                            tls_client_ca=None)
        remote.stop()
        remote.start(wait=False)
        assert remote.process.wait(LIMIT) == 2
        assert 'tls_client_crl needs tls_client_ca' in remote.text()


def test_what_is_no_tls(remote):
    """Plain text, silence and noise are ended and harm no other client."""
    operator = remote.operators.issue('operator')
    remote.write_config(header_timeout=2)
    remote.stop()
    remote.start()
    with contextlib.ExitStack() as stack:
        socks = []
        for data in (raw('GET', IMAGE), b'', os.urandom(1000), b'\x16\x03'):
            sock = stack.enter_context(socket.create_connection(
                ('127.0.0.1', remote.port), LIMIT))
            sock.sendall(data)
            socks.append(sock)
        # Operators, too, are disconnected if their handshake is slow.
        remote.wait_for(lambda: ask(
            remote, raw('GET', IMAGE), operator).status == 200)
        for sock in socks:
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(4096):
                    pass
    assert 'Traceback' not in remote.text()


def test_status_listener_only_shows(repository):
    port = ports.free_port()
    with daemons.Daemon(
            repository, status_listen=f'127.0.0.1:{port}') as daemon:
        daemon.start()

        def get(method, path, host=f'127.0.0.1:{port}'):
            with socket.create_connection(('127.0.0.1', port), LIMIT) as sock:
                sock.sendall(raw(method, path).replace(
                    b'Host: x', f'Host: {host}'.encode()))
                return read_response(sock.makefile('rb'), method == 'HEAD')

        for path in ('/', '/metrics', '/healthcheck', '/healthcheck/ready',
                     '/v1/status', '/v1/images', '/v1/volumes', '/v1/groups',
                     '/v1/sharing',
                     '/v1/history'):
            assert get('GET', path).status == 200
        for method, path in (('GET', IMAGE), ('GET', f'{IMAGE}/recipe'),
                             ('POST', f'{IMAGE}/blocks'),
                             ('POST', '/v1/tasks/collect'),
                             ('GET', '/v1/tasks/collect'),
                             ('POST', f'{IMAGE}/mark-lost')):
            assert get(method, path).status == 404
        assert json.loads(get('GET', '/v1/status').body)['daemon']['ready']
        # Such a name leads here without being ours.
        for host, status in (('localhost', 200), (f'[::1]:{port}', 200),
                             ('', 200), (f'evil.example:{port}', 421),
                             ('localhost.evil.example', 421), ('[', 421)):
            assert get('GET', '/v1/images', host).status == status, host
        # A refusal also reaches a client that sends on without reading.
        with socket.socket() as sock:
            sock.settimeout(LIMIT)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
            sock.connect(('127.0.0.1', port))
            sock.sendall(raw('GET', '/v1/status', bytes(3 << 20)).replace(
                b'Host: x', b'Host: localhost'))
            assert read_response(sock.makefile('rb')).status == 413


def test_memory_of_an_idle_daemon(repository):
    with daemons.Daemon(repository) as daemon:
        daemon.start().wait_for_catalog()
        assert daemon.memory() < 100 << 20
