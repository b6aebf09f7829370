# SPDX-License-Identifier: Apache-2.0
"""The choice, the times and the rate of replication to another site."""

import threading
import types

from oslo_config import cfg
import pytest

from dedupd import daemon
from dedupd import opts
from dedupd.status import task_errors
from dedupd.status import task_history
from dedupd.sync import replicator
from glance_dedup.base import exceptions
from glance_dedup.transfer import site_replication
from tests.support import repositories

LIMIT = 60      # seconds


# -- policy -------------------------------------------------------------------

def record(**fields):
    return {'id': 'a', 'status': 'active', 'owner': 'p', **fields}


@pytest.mark.parametrize('projects, properties, wanted', [
    ((), (), ['none', 'p', 'yes', 'both']),
    (('p',), (), ['p', 'both']),
    (('p', 'q'), (), ['p', 'yes', 'both']),
    ((), ('replicate=yes',), ['yes', 'both']),
    (('p',), ('replicate=yes',), ['both']),
    ((), ('replicate=yes', 'tier=a=b'), ['both']),
    ((), ('replicate=',), []),
    (('r',), (), [])])
def test_policy(projects, properties, wanted):
    records = {
        'none': record(owner=None), 'p': record(),
        'yes': record(owner='q', replicate='yes'),
        'both': record(replicate='yes', tier='a=b')}
    policy = replicator.Policy.of(cfg_of(
        projects=','.join(projects), properties=','.join(properties)))
    assert [name for name, found in records.items()
            if policy.wants(found)] == wanted
    for status in ('queued', 'saving', 'importing', 'deactivated'):
        assert not policy.wants(record(status=status, replicate='yes'))


def cfg_of(**options):
    conf = cfg.ConfigOpts()
    conf.register_opts(opts.replication_opts, group='replication')
    conf([], default_config_files=[], default_config_dirs=[])
    for name, value in options.items():
        conf.set_override(name, value.split(',') if value else [],
                          group='replication')
    return conf.replication


# -- options ------------------------------------------------------------------

GOOD = {'target_url': 'https://other:9393', 'cert': '/c', 'from_cloud': 'here',
        'to_cloud': 'there'}


def read(tmp_path, options):
    path = tmp_path / 'conf'
    path.write_text('[replication]\n' + ''.join(
        f'{name} = {value}\n' for name, value in options.items()))
    return daemon.read_options(['--config-file', str(path)])


def test_all_that_it_needs(tmp_path):
    assert read(tmp_path, GOOD).replication.interval == 300
    assert read(tmp_path, {}).replication.target_url is None
    for name in ('cert', 'from_cloud', 'to_cloud'):
        with pytest.raises(ValueError, match=f'target_url needs {name}'):
            read(tmp_path, {key: value for key, value in GOOD.items()
                            if key != name})


@pytest.mark.parametrize('name, bad', [
    ('target_url', 'http://other:9393'), ('target_url', 'other'),
    ('properties', 'replicate'), ('properties', '=yes'), ('rate_mib', '-1'),
    ('interval', '-1'), ('interval', 'often')])
def test_bounds(tmp_path, name, bad):
    with pytest.raises((ValueError, cfg.Error)):
        read(tmp_path, {**GOOD, name: bad})


@pytest.mark.parametrize('opt', opts.replication_opts,
                         ids=lambda opt: opt.name)
def test_every_option(opt):
    assert opt.help.startswith('\n') and len(opt.help.split()) > 7
    assert max(map(len, opt.help.splitlines())) < 75
    assert opt.mutable == (opt.name in (
        'projects', 'properties', 'rate_mib', 'interval'))


# -- memory of failures -------------------------------------------------------

def test_waits_grow():
    now = 0.0
    memory = replicator.Memory(lambda: now)
    waits = []
    for _ in range(30):
        assert memory.choose(['a', 'b']) == ['a', 'b']
        waits.append(memory.fail('a', 'no'))
        assert memory.choose(['a', 'b']) == ['b']
        now += waits[-1] - 0.1
        assert memory.choose(['a', 'b']) == ['b']
        assert memory.pending == 2
        now += 0.2
    assert waits[:4] == [60, 120, 240, 480] and waits[-1] == 6 * 3600
    assert memory.failed()['a']['times'] == 30
    memory.settle('a')
    assert memory.failed() == {} and memory.choose(['a', 'b']) == ['b']
    # An unwanted image is forgotten, and chosen again once it is wanted.
    assert memory.choose([]) == [] and memory.choose(['a']) == ['a']
    memory.fail('a', 'no')
    assert memory.choose([]) == [] and memory.failed() == {}


def test_few_failures_are_shown():
    memory = replicator.Memory()
    for number in range(1000):
        memory.fail(str(number), 'no')
    assert len(memory.failed()) == replicator.SHOWN


# -- pace ---------------------------------------------------------------------

def test_pace():
    """The pace sends as many bytes a second as the rate allows."""
    now = 0.0

    class Stop:
        def is_set(self):
            return False

        def wait(self, seconds):
            nonlocal now
            now += seconds

    pace = site_replication.Pace(rate=1000, clock=lambda: now)
    pace._stop = Stop()
    for number in range(100):
        pace.step(number, 100, '', 500)
    assert pace.sent == 50000 and now == pytest.approx(50)
    pace.rate = 500
    pace.step(0, 0, '', 1000)
    assert now == pytest.approx(52)


# -- the thread ---------------------------------------------------------------

@pytest.fixture
def conf(tmp_path):
    return read(tmp_path, {**GOOD, 'interval': 0})


@pytest.fixture
def thread(conf, tmp_path):
    path = repositories.create(tmp_path / 'repository')
    with repositories.open_repository(path) as repo:
        found = replicator.Replicator(
            repo, conf, lambda: found.is_maintainer,
            task_errors.Errors(), [], task_history.Past(path))
        found.is_maintainer = True
        yield found
        found.stop()
        if found._thread.ident:
            found._thread.join(LIMIT)
            assert not found._thread.is_alive()


def wait(thread, number):
    status = thread.wait(number, LIMIT)
    assert status['finished'] >= number, status
    return status


def test_a_run_that_fails_is_told_and_repeated(thread, monkeypatch):
    outcomes = [OSError(5, 'no disk'), KeyError('odd'),
                replicator.Result(2, sent_bytes=7)]

    def replicate(pace):
        pace.step(0, 0, '', 7)
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(thread, '_replicate', replicate)
    thread.start()
    first = wait(thread, 0)
    while not first['runs']:
        first = thread.task()
    assert 'no disk' in first['last']['error'] and first['failures'] == 1
    assert 'odd' in wait(thread, thread.request())['last']['error']
    last = wait(thread, thread.request())
    assert last['last']['error'] is None and last['last_success']
    assert last['last']['result']['replicated'] == 2
    assert thread.status() == {
        'target_url': 'https://other:9393', 'pending': 0, 'replicated': 2,
        'sent_bytes': 21, 'failed': {}}
    assert [found['task'] for found in thread._errors] == ['replicate'] * 2


def test_a_repeated_error_is_in_the_status_once(thread, monkeypatch):
    """A repeated error appears in the status once.

    Otherwise it would push out the errors of the other tasks.
    """
    def replicate(pace):
        raise OSError(113, 'no route to the other site')

    monkeypatch.setattr(thread, '_replicate', replicate)
    thread.start()
    for _ in range(3):
        wait(thread, thread.request())
    found, = thread._errors
    assert found['task'] == 'replicate' and 'no route' in found['text']


def test_progress_counts_each_image_once(thread, monkeypatch):
    """Progress counts the sent bytes of each image once."""
    sizes = {'a': 100, 'b': 50, 'c': 20}
    records = [record(id=name, size=size) for name, size in sizes.items()]
    seen = []

    class Replication:
        def need(self):
            pass

        def listed(self, home, away):
            pass

        def left(self, chosen):
            return []

        def take(self, image_id, pace):
            task = thread.task()
            seen.append((task['done'], task['total']))
            if image_id == 'a':
                pace.step(sizes[image_id], sizes[image_id], '')
            return site_replication.Outcome(
                image_id, result=site_replication.PRESENT)

    site = types.SimpleNamespace(records=lambda: records, images=list)
    monkeypatch.setattr(thread, '_replicate', lambda pace: replicator.run_once(
        types.SimpleNamespace(images=lambda: sizes), Replication(), site, site,
        replicator.Policy(frozenset(), ()), replicator.Memory(), pace))
    thread.start()
    assert wait(thread, thread.request())['last']['error'] is None
    assert seen[:3] == [(0, 170), (100, 170), (150, 170)]


def test_only_the_maintainer(thread, monkeypatch):
    ran = threading.Event()
    monkeypatch.setattr(replicator, 'TRIAL_INTERVAL', 0.01)
    monkeypatch.setattr(thread, '_replicate',
                        lambda pace: ran.set() or replicator.Result())
    thread.is_maintainer = False
    thread.start()
    with pytest.raises(exceptions.BusyError, match='does not maintain'):
        thread.request()
    assert not ran.wait(0.3)
    thread.is_maintainer = True
    assert ran.wait(LIMIT)


def test_stopped_in_the_middle(thread, monkeypatch):
    begun = threading.Event()

    def replicate(pace):
        begun.set()
        while True:
            pace.pause(0.01)

    monkeypatch.setattr(thread, '_replicate', replicate)
    thread.start()
    assert begun.wait(LIMIT)
    assert thread.task()['state'] == 'running'
    thread.stop()
    thread._thread.join(LIMIT)
    assert 'daemon ended' in thread.task()['last']['error']


def test_reload(thread, conf, monkeypatch):
    begun, end = threading.Event(), threading.Event()

    def replicate(pace):
        begun.set()
        assert end.wait(LIMIT)
        return replicator.Result()

    monkeypatch.setattr(thread, '_replicate', replicate)
    thread.start()
    assert begun.wait(LIMIT) and thread._pace.rate is None
    conf.set_override('rate_mib', 2, group='replication')
    conf.set_override('interval', 1000, group='replication')
    thread.reload()
    assert thread._pace.rate == 2 << 20
    assert thread.task()['next'] is None
    end.set()
    wait(thread, thread.request())
    assert thread.task()['interval'] == 1000 and thread.task()['next']
