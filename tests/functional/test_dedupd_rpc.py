# SPDX-License-Identifier: Apache-2.0

"""Control and notifications over a real RabbitMQ."""

import contextlib
import os
import queue
import socket
import time

from oslo_config import cfg
import oslo_messaging
import pytest

from dedupd import rpc
from tests.functional import dedupd_watched
from tests.functional import rabbitmq
from tests.support import repositories

pytestmark = pytest.mark.slow

# The limit in seconds for an event that must happen.
PATIENCE = 60

MESSAGING = """
[oslo_messaging_notifications]
driver = messagingv2
[oslo_messaging_rabbit]
rabbit_interval_max = 1
"""

IMAGE = repositories.mixture(1 << 20)


@pytest.fixture(scope='module')
def broker(tmp_path_factory):
    with rabbitmq.running(tmp_path_factory.mktemp('rpc') / 'broker') as it:
        yield it


@pytest.fixture
def repository(tmp_path):
    path = repositories.create(tmp_path / 'repository', group_slots=64)
    with contextlib.closing(repositories.open_repository(path)) as repo:
        repositories.put(repo, 'first', IMAGE, project='p')
        repositories.put(repo, 'second', IMAGE[:512 << 10])
    return path


@contextlib.contextmanager
def running(repository, broker, **options):
    with dedupd_watched.running(
            repository, default=f'transport_url = {broker.url}',
            sections=MESSAGING, **options) as it:
        yield it


def wait_for_text(daemon, text):
    daemon.wait_for(lambda: text in daemon.text(), PATIENCE)


@pytest.fixture
def daemon(repository, broker):
    with running(repository, broker, glance_notifications=True) as it:
        wait_for_text(it, 'Listening to')
        yield it
    repositories.require_clean(repository)


@pytest.fixture(scope='module', autouse=True)
def options():
    """Return oslo.messaging's global options, with their default values."""
    cfg.CONF([], default_config_files=[], default_config_dirs=[])
    yield
    cfg.CONF.reset()


@contextlib.contextmanager
def transport(broker, make):
    """A transport to the broker."""
    it = make(cfg.CONF, url=broker.url)
    try:
        yield it
    finally:
        it.cleanup()


@contextlib.contextmanager
def client(broker, **options):
    options.setdefault('timeout', 20)
    with transport(broker, lambda conf, url: oslo_messaging.get_rpc_transport(
            conf, url=url, allowed_remote_exmods=list(rpc.EXCEPTIONS))) as it:
        yield rpc.Client(it, **options)


def own(reply):
    """Return a reply without the fields that RPC adds, which must be right."""
    reply = dict(reply)
    assert reply.pop('host') == socket.gethostname()
    assert len(reply.pop('repository_id')) == 32
    return reply


# -- calls --------------------------------------------------------------------

# Long: this is the file's first test, and waits for RabbitMQ.
def test_answers_as_http_does(daemon, broker):
    daemon.perform('account')
    with client(broker) as remote:
        for method in ('images', 'projects', 'groups', 'sharing',
                       'history'):
            assert own(getattr(remote, method)()) == daemon.get(
                f'/v1/{method}'), method
        status = remote.status()
        local = daemon.get('/v1/status')
    assert status['repository_id'] == local['repository']['id']
    assert status.keys() - {'repository_id', 'host'} == local.keys()
    for part in ('repository', 'daemon', 'damage', 'filter', 'errors'):
        assert status[part] == local[part], part
    assert status['space']['images'] == 2
    assert status['space']['logical_bytes'] == len(IMAGE) + (512 << 10)


def test_tasks(daemon, broker):
    with client(broker, host=socket.gethostname()) as remote:
        begun = remote.start_task('collect')
        assert own(begun) == {'task': 'collect', 'number': begun['number']}
        task = remote.task('collect', after=begun['number'], wait=30)
        assert task['finished'] >= begun['number']
        assert task['last']['error'] is None
        assert task['last']['arguments'] == {}
        planned = remote.start_task('collect', dry_run=True)
        task = remote.task('collect', after=planned['number'], wait=30)
        assert task['last']['arguments'] == {'dry_run': True}
        since = time.time() + 3600
        assert own(remote.history(since=since)) == {'samples': []}


def test_every_argument_of_a_task(daemon, broker):
    with client(broker) as remote:
        for name, arguments in (
                ('recompress', {'codec': 'zstd', 'level': 3}),
                ('recompress', {'dry_run': True, 'codec': 'none'}),
                ('scrub', {'full': True})):
            number = remote.start_task(name, **arguments)['number']
            task = remote.task(name, after=number, wait=30)
            assert task['last']['arguments'] == arguments
            assert task['last']['error'] is None


def test_history_since(daemon, broker):
    daemon.perform('collect')
    with client(broker) as remote:
        assert remote.history(since=0)['samples']


class TestErrors:
    """The answers to calls that cannot be carried out."""

    @pytest.fixture(scope='class')
    @classmethod
    def daemon(cls, tmp_path_factory, broker):
        path = repositories.create(
            tmp_path_factory.mktemp('errors') / 'repository', group_slots=64)
        with contextlib.closing(repositories.open_repository(path)) as repo:
            repositories.put(repo, 'first', IMAGE)
        with running(path, broker) as it:
            wait_for_text(it, 'RPC is served')
            yield it

    @pytest.mark.parametrize('method, arguments, error', [
        ('status', {'surplus': 1}, rpc.InvalidArguments),
        ('status', {'context': 1}, rpc.InvalidArguments),
        ('history', {'since': 'yesterday'}, rpc.InvalidArguments),
        ('history', {'since': -1}, rpc.InvalidArguments),
        ('history', {'since': True}, rpc.InvalidArguments),
        ('history', {'since': float('nan')}, rpc.InvalidArguments),
        ('start_task', {}, rpc.InvalidArguments),
        ('start_task', {'name': ['collect']}, rpc.InvalidArguments),
        ('start_task', {'name': 'x' * 256}, rpc.InvalidArguments),
        ('start_task', {'name': 'collect', 'dry_run': 1},
         rpc.InvalidArguments),
        ('start_task', {'name': 'scrub', 'dry_run': True},
         rpc.InvalidArguments),
        ('start_task', {'name': 'mark-lost'}, rpc.NotFound),
        ('task', {'name': 'nothing'}, rpc.NotFound),
        ('task', {'name': 'collect', 'wait': 31}, rpc.InvalidArguments),
        ('task', {'name': 'collect', 'after': '1'}, rpc.InvalidArguments),
        ('mark_lost', {}, rpc.InvalidArguments),
        ('mark_lost', {'image_id': 7}, rpc.InvalidArguments),
        ('mark_lost', {'image_id': 'a\0b'}, rpc.InvalidArguments),
        ('start_task', {'name': 'a\0b'}, rpc.NotFound),
        ('task', {'name': 'a\0b'}, rpc.NotFound),
        ('start_task', {'name': 'recompress', 'codec': 7},
         rpc.InvalidArguments),
        ('start_task', {'name': 'recompress', 'codec': 'gzip'},
         rpc.InvalidArguments),
        ('start_task', {'name': 'recompress', 'codec': 'zstd', 'level': 99},
         rpc.InvalidArguments),
        ('start_task', {'name': 'recompress', 'level': 0.5},
         rpc.InvalidArguments),
        ('start_task', {'name': 'collect', 'codec': 'zstd'},
         rpc.InvalidArguments),
        ('start_task', {'name': 'evict', 'limit_mib': 5}, rpc.NotFound),
        ('mark_lost', {'image_id': '../key'}, rpc.InvalidArguments),
        ('mark_lost', {'image_id': 'no-such-image'}, rpc.NotFound),
        ('mark_lost', {'image_id': 'first'}, rpc.InvalidArguments),
        ('target', {}, oslo_messaging.rpc.NoSuchMethod),
        ('_call', {}, oslo_messaging.rpc.NoSuchMethod),
        ('nothing', {}, oslo_messaging.rpc.NoSuchMethod),
    ])
    def test_typed(self, daemon, broker, method, arguments, error):
        with client(broker) as remote:
            with pytest.raises(error) as caught:
                remote._call(method, **arguments)
            if issubclass(error, rpc.RPCError):
                # The error is a sentence, without a traceback or a path of the
                # program.
                assert caught.value.message
                assert 'Traceback' not in caught.value.message
            assert own(remote.images())
        if issubclass(error, rpc.RPCError):
            assert 'Exception during message' not in daemon.text()


def test_only_the_version_that_is_served(daemon, broker):
    with client(broker) as remote:
        for version in ('1.2', '2.0'):
            context = remote._client.prepare(version=version, timeout=20)
            with pytest.raises(oslo_messaging.UnsupportedVersion):
                context.call({}, 'status')


def test_another_repository_is_refused(daemon, broker):
    with client(broker, repository_id='0' * 32) as remote:
        with pytest.raises(rpc.WrongRepository, match='has the repository'):
            remote.start_task('collect')
    its = daemon.get('/v1/status')['repository']['id']
    with client(broker, repository_id=its) as remote:
        assert remote.start_task('collect')['repository_id'] == its


def test_a_reader_says_that_it_is_one(broker, repository):
    with dedupd_watched.running(repository), dedupd_watched.Daemon(
            repository, default=f'transport_url = {broker.url}',
            sections=MESSAGING) as reader:
        reader.start()
        reader.wait_for_catalog('reader')
        wait_for_text(reader, 'RPC is served')
        with client(broker) as remote:
            assert remote.status()['daemon']['role'] == 'reader'
            with pytest.raises(rpc.NotMaintainer):
                remote.start_task('collect')
            assert len(remote.images()['images']) == 2


# -- notifications ------------------------------------------------------------

@contextlib.contextmanager
def notifications(broker):
    """A queue of the notifications that are published from now on."""
    heard = queue.Queue()

    class Endpoint:
        def info(self, context, publisher_id, event_type, payload, metadata):
            heard.put(('info', publisher_id, event_type, payload))

        def error(self, context, publisher_id, event_type, payload, metadata):
            heard.put(('error', publisher_id, event_type, payload))

    with transport(broker, oslo_messaging.get_notification_transport) as it:
        listener = oslo_messaging.get_notification_listener(
            it, [oslo_messaging.Target(topic='notifications')], [Endpoint()],
            pool='test')
        listener.start(override_pool_size=1)
        try:
            yield heard
        finally:
            listener.stop()
            listener.wait()


def test_tasks_are_announced(daemon, broker, repository):
    with notifications(broker) as heard:
        result = daemon.perform('collect')
        publisher = f'dedupd.{socket.gethostname()}'
        its = daemon.status()['repository']['id']
        assert heard.get(timeout=PATIENCE) == (
            'info', publisher, 'dedup.collect.start',
            {'repository_id': its, 'arguments': {}})
        assert heard.get(timeout=PATIENCE) == (
            'info', publisher, 'dedup.collect.end',
            {'repository_id': its, 'result': result})

        os.rename(repository / 'spool', repository / 'hidden')
        try:
            failed = daemon.run('collect')['last']
        finally:
            os.rename(repository / 'hidden', repository / 'spool')
        assert failed['error']
        assert heard.get(timeout=PATIENCE)[2] == 'dedup.collect.start'
        assert heard.get(timeout=PATIENCE) == (
            'error', publisher, 'dedup.collect.error',
            {'repository_id': its, 'error': failed['error']})

        daemon.perform('account')
        daemon.perform('merge', dry_run=True)
        # Accounting has sent no notification in between.
        assert heard.get(timeout=PATIENCE)[2:] == (
            'dedup.merge.start',
            {'repository_id': its, 'arguments': {'dry_run': True}})
        assert heard.get(timeout=PATIENCE)[2] == 'dedup.merge.end'


def test_glance_is_listened_to(daemon, broker, repository, request):
    def requested(task):
        # Scheduled runs have no number.
        return daemon.get(f'/v1/tasks/{task}')['finished']

    with contextlib.closing(repositories.open_repository(repository)) as repo:
        repo.delete('first')
    # This is as Glance itself does.
    cfg.CONF.set_override('control_exchange', 'glance')
    request.addfinalizer(lambda: cfg.CONF.clear_override('control_exchange'))
    with transport(broker, oslo_messaging.get_notification_transport) as it:
        glance = oslo_messaging.Notifier(
            it, driver='messagingv2', topics=['notifications'],
            publisher_id='image.localhost')
        glance.info({}, 'image.update', {'id': 'second'})
        glance.info({}, 'image.delete', {'id': 'first'})
        daemon.wait_for(lambda: requested('collect'), PATIENCE)
        task = daemon.get('/v1/tasks/collect')
        assert task['runs'] == 1 and task['last']['error'] is None
        assert task['last']['result']['freed_blocks'] > 0
        assert not requested('account')
        glance.info({}, 'image.upload', {'id': 'third'})
        daemon.wait_for(lambda: requested('account'), PATIENCE)
    # Messages for others do not reach the daemon.
    assert ' ERROR ' not in daemon.text()


# -- the broker ---------------------------------------------------------------

def test_nothing_of_messaging_without_a_broker(repository, broker):
    """A process without a broker imports no messaging module."""
    for default, wanted in (('', False),
                            (f'transport_url = {broker.url}', True)):
        with dedupd_watched.Daemon(repository, default=default) as it:
            it.environment['PYTHONPROFILEIMPORTTIME'] = '1'
            it.start().wait_for_catalog()
            it.perform('collect')
            if wanted:
                wait_for_text(it, 'RPC is served')
            it.stop()
            imported = {line.rpartition('|')[2].strip()
                        for line in it.text().splitlines()
                        if line.startswith('import time:')}
        assert 'dedupd.schedule.task_scheduler' in imported
        for module in ('oslo_messaging', 'kombu', 'amqp'):
            assert (module in imported) is wanted, module
        # It is imported in neither case: this is a process of real threads.
        assert 'oslo_service.backend._eventlet' not in imported


def answers(broker):
    with contextlib.suppress(oslo_messaging.MessagingTimeout), client(
            broker, timeout=3) as remote:
        return bool(remote.images()['images'])


# Long: a RabbitMQ of its own starts.
def test_broker_away_at_start(tmp_path, repository):
    with contextlib.ExitStack() as stack:
        it = rabbitmq.RabbitMQ(tmp_path / 'broker')
        stack.callback(it.stop)
        daemon = stack.enter_context(
            running(repository, it, glance_notifications=True))
        daemon.perform('collect')
        wait_for_text(daemon, 'Connection refused')
        it.start()
        daemon.wait_for(lambda: answers(it), PATIENCE)
        with notifications(it) as heard:
            daemon.perform('collect', dry_run=True)
            # Notifications of the first run may come now, too.
            while (told := heard.get(timeout=PATIENCE))[3].get(
                    'arguments') != {'dry_run': True}:
                assert told[2] in ('dedup.collect.start', 'dedup.collect.end')
            assert told[2] == 'dedup.collect.start'
            assert heard.get(timeout=PATIENCE)[2] == 'dedup.collect.end'


# Long: a RabbitMQ of its own starts, twice.
def test_broker_goes_and_comes_back(tmp_path, repository):
    with rabbitmq.running(tmp_path / 'broker') as it, running(
            repository, it) as daemon:
        daemon.wait_for(lambda: answers(it), PATIENCE)
        it.stop()
        for _ in range(3):
            # Notifications wait for the broker; the tasks do not.
            daemon.perform('collect')
        assert len(daemon.get('/v1/images')['images']) == 2
        it.start()
        daemon.wait_for(lambda: answers(it), PATIENCE)
        it.stop()
        # With the broker away it ends as soon as ever.
        assert daemon.stop(limit=10) == 0
    repositories.require_clean(repository)


@pytest.mark.parametrize('url', [
    'nonsense://name:secret@localhost/',
    'rabbit://name:secret@localhost:nowhere/',
    'name:secret@localhost',
])
def test_wrong_address_is_told(repository, url):
    with dedupd_watched.running(
            repository, default=f'transport_url = {url}') as daemon:
        wait_for_text(daemon, 'Messaging cannot be used')
        daemon.perform('collect')
        assert 'secret' not in daemon.text()
