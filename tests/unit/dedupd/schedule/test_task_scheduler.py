# SPDX-License-Identifier: Apache-2.0

"""The scheduler: order, making way, failures, the end.

The repository and the maintainer are real; the test defines the work of the
tasks.
"""

import contextlib
import dataclasses
import os
import pathlib
import threading
import time
import types
from unittest import mock

from oslo_config import cfg
import pytest

from dedupd.endpoints import operations
from dedupd import opts
from dedupd.schedule import maintainer_takeover
from dedupd.schedule import task_records
from dedupd.schedule import task_scheduler
from dedupd.tasks import registry
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import catalog_db
from glance_dedup.maintenance import database
from glance_dedup.maintenance import maintainer_role
from tests.support import repositories
from tests.support.schedulers import LIMIT
from tests.support.schedulers import running
from tests.support.schedulers import wait_for


@dataclasses.dataclass(frozen=True)
class Result:
    blocks: int = 0
    complete: bool = True


@pytest.fixture
def repository(tmp_path):
    path = repositories.create(tmp_path / 'repository')
    with repositories.open_repository(path) as opened:
        repositories.put(opened, 'image', repositories.noise(50_000))
        yield opened


@pytest.fixture
def conf():
    found = cfg.ConfigOpts()
    found.register_opts(opts.dedupd_opts, group='dedupd')
    found([], default_config_files=[])
    for name in ('collect', 'merge', 'scrub'):
        found.set_override(f'{name}_interval', 0, 'dedupd')
    return found


class Tasks:
    """The work of each task as the test defines it; by default none."""

    def __init__(self):
        self.log = []
        self.work = {}

    def run(self, name, maintainer, pace, options, is_mine=None, **arguments):
        self.log.append(name)
        return self.work.get(name, lambda *a, **k: Result())(
            maintainer, pace, **arguments)


@pytest.fixture
def done(monkeypatch):
    found = Tasks()
    monkeypatch.setattr(registry, 'run', found.run)
    monkeypatch.setitem(registry.TASKS, 'account', dataclasses.replace(
        registry.TASKS['account'], interval=3600))
    return found


def forever(maintainer, pace, **arguments):
    for number in range(10**9):
        pace.step(number, 10**9, 'working')
        time.sleep(0.002)


def test_account_comes_first_and_before_others(repository, conf, done):
    with running(repository, conf) as scheduler:
        assert done.log == ['account']
        for name in ('collect', 'scrub', 'merge'):
            number = scheduler.request(name)
        status = scheduler.wait('merge', number, LIMIT)
        assert status['finished'] == number and status['runs'] == 1
        assert done.log == ['account', 'account', 'collect', 'scrub',
                            'account', 'merge']
        assert [event[:2] for event in scheduler.events][-2:] == [
            ('start', 'merge'), ('end', 'merge')]


def test_a_scrub_has_suspects_verified(repository, conf, done):
    """A scrub verifies the suspects, so a repaired image is good at once."""
    path = pathlib.Path(repository.path, 'images', 'image')
    content = path.read_bytes()
    with running(repository, conf) as scheduler:
        path.write_bytes(content[:4096] + b'\xff' * 4096)
        with pytest.raises(exceptions.DamagedError):
            with repository.open_image('image') as image:
                image.read()
        suspects = scheduler.figures.suspects
        wait_for(lambda: 0 < suspects._found['image'] < float('inf'))
        path.write_bytes(content)
        assert suspects.images() == {'image'}
        scheduler.wait('scrub', scheduler.request('scrub'), LIMIT)
        wait_for(lambda: not suspects.images())


def test_requests_are_joined_while_they_wait(repository, conf, done):
    release = threading.Event()
    done.work['collect'] = lambda *a, **k: release.wait(LIMIT) and Result()
    with running(repository, conf) as scheduler:
        first = scheduler.request('collect')
        wait_for(lambda: 'collect' in done.log)
        numbers = {scheduler.request('collect') for _ in range(5)}
        assert len(numbers) == 1 and first not in numbers
        assert scheduler.request('collect', dry_run=True) not in numbers
        assert scheduler.task('collect')['state'] == 'running'
        assert scheduler.task('merge')['state'] == 'idle'
        release.set()
        scheduler.wait('collect', max(numbers), LIMIT)


def test_a_request_joins_a_job_that_is_about_to_begin(
        repository, conf, done, monkeypatch):
    """A request joins a job that has left the queue but has not begun."""
    conf.set_override('scrub_interval', 3600, 'dedupd')
    taken, requested = threading.Event(), threading.Event()
    begin = task_scheduler.Scheduler._begin

    def wait(self, job):
        if job.name == 'scrub':
            taken.set()
            requested.wait(LIMIT)
        begin(self, job)

    monkeypatch.setattr(task_scheduler.Scheduler, '_begin', wait)
    with running(repository, conf) as scheduler:
        assert taken.wait(LIMIT)
        number = scheduler.request('scrub')
        requested.set()
        assert scheduler.wait('scrub', number, LIMIT)['runs'] == 1
        assert done.log == ['account', 'scrub']


def test_each_request_has_its_own_result(repository, conf, done):
    """A request's result stays available after later runs."""
    with running(repository, conf) as scheduler:
        def run(**arguments):
            number = scheduler.request('collect', **arguments)
            scheduler.wait('collect', number, LIMIT)
            return number

        numbers = [run(dry_run=True), run(), run(dry_run=True)]
        assert [scheduler.wait('collect', number, 0)['last']['number']
                for number in numbers] == numbers
        assert scheduler.task('collect')['last']['number'] == numbers[-1]
        later = [run() for _ in range(task_records.KEPT)]
        # A client this late gets the oldest result that is left.
        last = scheduler.wait('collect', numbers[0], 0)['last']['number']
        assert last == later[0]


def test_intervals(repository, conf, done):
    conf.set_override('collect_interval', 1, 'dedupd')
    with running(repository, conf) as scheduler:
        assert scheduler.task('collect')['next'] >= time.time() - 1
        wait_for(lambda: scheduler.task('collect')['runs'] >= 2)
        conf.set_override('collect_interval', 0, 'dedupd')
        conf.set_override('merge_interval', 1, 'dedupd')
        scheduler.reload()
        assert scheduler.task('collect')['next'] is None
        wait_for(lambda: scheduler.task('merge')['runs'] >= 1)


@pytest.mark.parametrize('interval', [0, 3600])
def test_a_collection_ends_the_intent_in_time(repository, conf, done,
                                              interval):
    """A collection ends the intent on time, whether or not one is due."""
    turns = [time.monotonic() + 0.2, time.monotonic() + 0.4]

    def work(maintainer, pace, **arguments):
        maintainer.busy.clear()
        if turns:
            maintainer.busy[1] = maintainer_role.Busy(
                60, turns.pop(0), announced=True)
        return Result()
    done.work['collect'] = work
    conf.set_override('collect_interval', interval, 'dedupd')
    with running(repository, conf) as scheduler:
        scheduler.request('collect')
        wait_for(lambda: scheduler.task('collect')['runs'] >= 3)
        wait_for(lambda: scheduler.task('collect')['state'] == 'idle')
        # The scheduler decides this after the run has ended.
        wait_for(lambda: (scheduler.task('collect')['next'] or float('inf'))
                 > time.time() + 1000)
        assert (scheduler.task('collect')['next'] is None) == (not interval)
        time.sleep(0.3)
        assert scheduler.task('collect')['runs'] == 3


def test_the_clock_is_set_back_while_a_task_runs(repository, conf, done,
                                                 monkeypatch):
    real = time.time

    def work(maintainer, pace, **arguments):
        monkeypatch.setattr(time, 'time', lambda: real() - 10 ** 7)
        return Result()
    done.work['collect'] = work
    with running(repository, conf) as scheduler:
        number = scheduler.request('collect')
        last = scheduler.wait('collect', number, LIMIT)['last']
        assert last['finished'] < last['started']
        assert 0 <= last['seconds'] < LIMIT


def test_a_scrub_makes_way_and_goes_on(repository, conf, done):
    calls = []

    def scrub(maintainer, pace, **arguments):
        calls.append(arguments)
        if len(calls) < 3:
            forever(maintainer, pace)
        return Result(blocks=7)

    done.work['scrub'] = scrub
    with running(repository, conf) as scheduler:
        number = scheduler.request('scrub', full=True)
        wait_for(lambda: len(calls) == 1)
        again = scheduler.request('scrub')
        assert again > number and len(calls) == 1
        assert scheduler.wait('collect', scheduler.request('collect'), LIMIT
                              )['last']['error'] is None
        wait_for(lambda: len(calls) == 2)
        scheduler.request('account')
        status = scheduler.wait('scrub', again, LIMIT)
        assert status['last']['result']['blocks'] == 7
        assert status['runs'] == 1
        # The task continues, and does not begin again.
        assert calls == [{'full': True}, {}, {}]
        assert [e for e in scheduler.events if e[1] == 'scrub'] == [
            ('start', 'scrub', {'full': True}),
            ('end', 'scrub', {'blocks': 7, 'complete': True})]


def test_recompression_goes_on_as_it_was_asked(repository, conf, done):
    calls = []

    def recompress(maintainer, pace, **arguments):
        calls.append((pace.patient, arguments))
        if len(calls) < 2:
            forever(maintainer, pace)
        return Result(blocks=7)

    done.work['recompress'] = recompress
    with running(repository, conf) as scheduler:
        number = scheduler.request('recompress', codec='zstd', level=9)
        wait_for(lambda: len(calls) == 1)
        # A later request of the task waits; a request of another task does
        # not.
        plan = scheduler.request('recompress', dry_run=True)
        scheduler.wait('merge', scheduler.request('merge'), LIMIT)
        status = scheduler.wait('recompress', plan, LIMIT)
        assert status['runs'] == 2 and status['last']['number'] == plan
        assert calls == [(False, {'codec': 'zstd', 'level': 9})] * 2 + [
            (False, {'dry_run': True})]
        assert number < plan


def test_what_is_due_and_of_lower_rank_waits(repository, conf, done):
    """A running task does not give way to a due task of lower rank.

    A scrub continues although recompression is due, but not vice versa.
    """
    log = []

    due = threading.Event()

    def scrub(maintainer, pace, **arguments):
        log.append('scrub')
        while not due.is_set():
            pace.step(1, 2, 'working')
            time.sleep(0.002)
        for _ in range(20):
            pace.step(1, 2, 'working')
            time.sleep(0.005)
        return Result()

    def recompress(maintainer, pace, **arguments):
        log.append(f'recompress {pace.patient}')
        if len(log) < 4:
            forever(maintainer, pace)
        return Result()

    done.work = {'scrub': scrub, 'recompress': recompress}
    conf.set_override('scrub_interval', 3600, 'dedupd')
    with running(repository, conf) as scheduler:
        scheduler.request('scrub')
        wait_for(lambda: log == ['scrub'])
        with scheduler._changed:
            scheduler._queue.put('recompress', 0)
        due.set()
        wait_for(lambda: log == ['scrub', 'recompress True'])
        with scheduler._changed:
            scheduler._queue.put('scrub', 0)
        wait_for(lambda: log == ['scrub', 'recompress True', 'scrub',
                                 'recompress True'])
        wait_for(lambda: scheduler.task('recompress')['runs'] == 1)


def test_asking_for_what_is_under_way(repository, conf, done):
    paces = []

    def recompress(maintainer, pace, **arguments):
        paces.append(pace)
        while pace.patient:
            pace.step(1, 2, 'waiting')
            time.sleep(0.002)
        return Result()

    done.work['recompress'] = recompress
    with running(repository, conf) as scheduler:
        with scheduler._changed:
            scheduler._queue.put('recompress', 0)
            scheduler._changed.notify_all()
        wait_for(lambda: paces)
        number = scheduler.request('recompress')
        assert scheduler.wait('recompress', number, LIMIT)['runs'] == 1
        assert len(paces) == 1


def test_other_tasks_do_not_make_way(repository, conf, done):
    release = threading.Event()

    def collect(maintainer, pace, **arguments):
        while not release.is_set():
            pace.step(1, 2, 'working')
            time.sleep(0.002)
        return Result()

    done.work['collect'] = collect
    with running(repository, conf) as scheduler:
        scheduler.request('collect')
        wait_for(lambda: 'collect' in done.log)
        number = scheduler.request('account')
        time.sleep(0.1)
        assert done.log[-1] == 'collect'
        assert scheduler.task('account')['state'] == 'waiting'
        release.set()
        scheduler.wait('account', number, LIMIT)


def test_a_failure_is_told_and_the_rest_goes_on(repository, conf, done):
    def fail(maintainer, pace, **arguments):
        raise exceptions.StorageError('the disk is gone')

    def bug(maintainer, pace, **arguments):
        raise KeyError('x')

    done.work = {'collect': fail, 'merge': bug}
    with running(repository, conf) as scheduler:
        scheduler.listeners.insert(0, lambda *event: 1 / 0)
        for name, words in (('collect', 'the disk is gone'), ('merge', 'x')):
            status = scheduler.wait(name, scheduler.request(name), LIMIT)
            assert words in status['last']['error']
            assert status['failures'] == 1 and not status['last_success']
        assert [e['task'] for e in scheduler.errors] == ['collect', 'merge']
        assert ('error', 'collect', {'error': 'the disk is gone'}) in (
            scheduler.events)
        status = scheduler.wait('scrub', scheduler.request('scrub'), LIMIT)
        assert status['last']['error'] is None


def test_figures_are_of_after_the_task_that_ended(repository, conf, done):
    """The status contains a task's effect as soon as the task has ended."""
    def free(maintainer, pace, **arguments):
        group = os.path.join(repository.path, 'groups', '00000001')
        os.truncate(group, os.stat(group).st_size + (1 << 30))
        with open(group, 'r+b') as f:
            f.seek(-1 << 20, os.SEEK_END)
            f.write(b'x' * (1 << 20))
        return Result()

    done.work['collect'] = free
    with running(repository, conf) as scheduler:
        control = operations.Control(repository, scheduler)
        with contextlib.closing(scheduler.figures):
            # The watcher's thread runs this as soon as it is notified of the
            # end.
            seen = []
            scheduler.watchers.append(lambda: seen.append(
                (scheduler.task('collect')['finished'],
                 control.status()['space']['disk_bytes'])))
            before = control.status()['space']['disk_bytes']
            number = scheduler.request('collect')
            scheduler.wait('collect', number, LIMIT)
            assert control.status()['space']['disk_bytes'] >= before + (
                1 << 20)
            scheduler.stop()
            assert scheduler.join(LIMIT)
            after = {space for finished, space in seen if finished >= number}
            assert after and min(after) >= before + (1 << 20)


@dataclasses.dataclass(frozen=True)
class Trouble(Result):
    refused: str | None = None
    found: int = 0
    failed: dict = dataclasses.field(default_factory=dict)
    unreadable: dict = dataclasses.field(default_factory=dict)


def test_what_a_run_could_not_do_is_an_error(repository, conf, done):
    """A run that succeeds but leaves work undone adds an error, each once."""
    done.work = {
        'collect': lambda *a, **k: Trouble(refused='a recipe is bad'),
        'scrub': lambda *a, **k: Trouble(
            found=3, unreadable={'images/b': 'no', 'images/a': 'torn'}),
        'merge': lambda *a, **k: Trouble(failed={'a': 'no room'})}
    with running(repository, conf) as scheduler:
        for _ in range(30):
            scheduler.wait('collect', scheduler.request('collect'), LIMIT)
        for name in ('scrub', 'merge'):
            scheduler.wait(name, scheduler.request(name), LIMIT)
        wait_for(lambda: len([*scheduler.errors]) == 4)
        assert [(e['task'], e['text']) for e in scheduler.errors] == [
            ('collect', 'nothing was freed: a recipe is bad'),
            ('scrub', '3 damaged blocks were found'),
            ('scrub', '2 cannot be read; the first is images/a: torn'),
            ('merge', '1 failed; the first is a: no room')]


def test_how_tasks_did_survives_a_restart(repository, conf, done):
    def fail(maintainer, pace, **arguments):
        raise exceptions.StorageError('the disk is gone')

    with running(repository, conf) as scheduler:
        scheduler.wait('merge', scheduler.request('merge'), LIMIT)
        done.work = {'collect': fail}
        scheduler.wait('collect', scheduler.request('collect'), LIMIT)
        before = scheduler.tasks()
    done.work = {}
    with running(repository, conf) as scheduler:
        for name in ('merge', 'collect'):
            after = scheduler.task(name)
            assert after['last'] == {**before[name]['last'], 'number': 0}
            assert after['last_success'] == before[name]['last_success']
            assert bool(after['last_success_run']) is (name == 'merge')
            assert (after['runs'], after['failures']) == (0, 0)
        assert before['merge']['last_success']
        assert [(e['task'], e['text']) for e in scheduler.errors] == [
            ('collect', 'the disk is gone')]
        scheduler.wait('collect', scheduler.request('collect'), LIMIT)
        assert scheduler.task('collect')['last']['error'] is None


def test_the_end_of_the_daemon_is_no_failure(repository, conf, done):
    with running(repository, conf) as scheduler:
        scheduler.wait('collect', scheduler.request('collect'), LIMIT)
        done.work = {'collect': forever}
        number = scheduler.request('collect')
        wait_for(lambda: scheduler.task('collect')['state'] == 'running')
        scheduler.stop()
        assert scheduler.wait('collect', number, LIMIT)
        assert scheduler.join(LIMIT)
        assert scheduler.task('collect')['failures'] == 0
    done.work = {}
    with running(repository, conf) as scheduler:
        assert scheduler.task('collect')['last']['error'] is None


def test_the_last_whole_pass_is_not_forgotten(repository, conf, done):
    """The last whole pass survives an incomplete pass and a restart."""
    @dataclasses.dataclass
    class Result:
        complete: bool

    done.work = {'scrub': lambda *a, **k: Result(True)}
    with running(repository, conf) as scheduler:
        scheduler.wait('scrub', scheduler.request('scrub'), LIMIT)
        whole = scheduler.task('scrub')['last']
        done.work = {'scrub': lambda *a, **k: Result(False)}
        scheduler.wait('scrub', scheduler.request('scrub'), LIMIT)
        assert scheduler.task('scrub')['last_success_run'] == whole
    with running(repository, conf) as scheduler:
        found = scheduler.task('scrub')
        assert found['last']['result'] == {'complete': False}
        assert found['last_success_run'] == {**whole, 'number': 0}


def test_a_dry_run_is_no_success(repository, conf, done):
    """A dry run does not count as success, so the alarm stays effective."""
    with running(repository, conf) as scheduler:
        scheduler.wait('collect', scheduler.request('collect', dry_run=True),
                       LIMIT)
        assert scheduler.task('collect')['last_success'] is None


def test_a_pass_that_did_not_end_is_no_success(repository, conf, done):
    """An incomplete pass does not count, so such a scrub becomes overdue."""
    @dataclasses.dataclass
    class Result:
        complete: bool

    for complete in (False, True):
        done.work = {'scrub': lambda *args, **kwargs: Result(complete)}
        with running(repository, conf) as scheduler:
            status = scheduler.wait('scrub', scheduler.request('scrub'), LIMIT)
            assert status['last']['result'] == {'complete': complete}
            assert bool(status['last_success']) is complete


def test_a_bad_catalog_is_made_anew(repository, conf, done):
    def fail(maintainer, pace, **arguments):
        raise database.CatalogError('it does not add up')

    done.work['collect'] = fail
    with running(repository, conf) as scheduler:
        maintainer = scheduler.maintainer
        scheduler.wait('collect', scheduler.request('collect'), LIMIT)
        assert any('it does not add up' in w for w in maintainer.warnings)
        assert scheduler.catalog_state == 'ready'
        assert maintainer.catalog.statistics()['images'] == 1


def test_a_sample_meets_a_bad_catalog(repository, conf, done, monkeypatch):
    """A catalog that cannot be read is replaced before the next task."""
    def fail(catalog_, *arguments):
        if catalog_ is first:
            raise database.CatalogError('the history cannot be read')

    with running(repository, conf) as scheduler:
        first = scheduler.maintainer.catalog
        monkeypatch.setattr(catalog_db.Catalog, 'sample', fail)
        scheduler.wait('collect', scheduler.request('collect'), LIMIT)
        wait_for(lambda: any(scheduler.errors))
        assert 'cannot be read' in next(iter(scheduler.errors))['text']
        wait_for(lambda: scheduler.maintainer.catalog is not first)
        assert any('cannot be read; it was set aside' in warning
                   for warning in scheduler.maintainer.warnings)
        assert scheduler.catalog_state == 'ready'


def test_stop_ends_a_task_between_steps(repository, conf, done):
    done.work['collect'] = forever
    with running(repository, conf) as scheduler:
        number = scheduler.request('collect')
        wait_for(lambda: 'collect' in done.log)
        scheduler.stop()
        assert scheduler.join(LIMIT)
        assert 'stopped' in scheduler.task('collect')['last']['error']
        assert scheduler.task('collect')['finished'] == number
        with pytest.raises(task_scheduler.NotMaintainer):
            scheduler.request('collect')
    # The lock is free again.
    maintainer_role.Maintainer(repository).close()


def test_reader_takes_over(repository, conf, done, monkeypatch):
    monkeypatch.setattr(maintainer_takeover, 'TRIAL_INTERVAL', 0.05)
    other = maintainer_role.Maintainer(repository)
    scheduler = task_scheduler.Scheduler(repository, conf)
    scheduler.start()
    time.sleep(0.2)
    assert not scheduler.is_maintainer and scheduler.catalog() is None
    with pytest.raises(task_scheduler.NotMaintainer):
        scheduler.request('collect')
    other.close()
    wait_for(lambda: scheduler.is_maintainer)
    scheduler.stop()
    assert scheduler.join(LIMIT)


def test_a_maintainer_that_had_a_successor(repository, conf, done,
                                           monkeypatch):
    """The maintainer is cut off and opens the catalog again.

    The server dropped its locks, and another process has opened the catalog.
    """
    monkeypatch.setattr(maintainer_takeover, 'TRIAL_INTERVAL', 0.05)

    def work(maintainer, pace, **arguments):
        lost.append(maintainer)
        if len(lost) == 1:
            current = os.path.join(repository.path, 'catalog/CURRENT')
            with open(current, 'rb') as f, open(current + '.new', 'wb') as g:
                g.write(f.read())
            os.rename(current + '.new', current)
        return maintainer.guard(Result)
    lost = []
    done.work['collect'] = work
    with running(repository, conf) as scheduler:
        first = scheduler.maintainer
        scheduler.request('collect')
        wait_for(lambda: first.lost and scheduler.is_maintainer
                 and scheduler.maintainer not in (None, first))
        assert any('it was cut off' in error['text']
                   for error in scheduler.errors)
        number = scheduler.request('collect')
        last = scheduler.wait('collect', number, LIMIT)['last']
        assert last['error'] is None
        assert lost == [first, scheduler.maintainer]


def test_stop_during_a_rebuild(repository, conf, done, monkeypatch):
    """N2.4: a stop leaves a rebuild at once; the next start begins again."""
    begun, release = threading.Event(), threading.Event()
    real = task_scheduler.Scheduler._opening

    def opening(self, *args):
        begun.set()
        release.wait(LIMIT)
        real(self, *args)

    monkeypatch.setattr(task_scheduler.Scheduler, '_opening', opening)
    scheduler = task_scheduler.Scheduler(repository, conf)
    scheduler.start()
    assert begun.wait(LIMIT)
    scheduler.stop()
    release.set()
    assert scheduler.join(LIMIT)
    with maintainer_role.Maintainer(repository) as maintainer:
        assert maintainer.catalog.statistics()['images'] == 1


def test_the_pace_follows_the_options(repository, conf, done):
    done.work['collect'] = forever
    with running(repository, conf) as scheduler:
        scheduler.request('collect')
        wait_for(lambda: 'collect' in done.log)
        pace = scheduler._running.pace
        assert pace.rate is None
        conf.set_override('collect_rate_mib', 2.5, 'dedupd')
        scheduler.reload()
        assert pace.rate == 2.5 * 2**20


# -- Control ------------------------------------------------------------------

def test_arguments_of_control(repository, conf, done):
    with running(repository, conf) as scheduler:
        control = operations.Control(repository, scheduler)
        for arguments in ({'dry_run': 1}, {'full': True}, {'x': 1}):
            with pytest.raises(exceptions.InvalidParameter):
                control.start_task('collect', **arguments)
        with pytest.raises(exceptions.ImageNotFound):
            control.start_task('mark-lost')
        with pytest.raises(exceptions.ImageNotFound):
            control.task('none')
        assert control.task('scrub', after=10, wait=0.01)['finished'] == 0
        with pytest.raises(exceptions.InvalidParameter):
            control.mark_lost('image')
        with pytest.raises(exceptions.ImageNotFound):
            control.mark_lost('none')


def test_mark_lost_does_not_wait_for_ever(repository, conf, done,
                                          monkeypatch):
    monkeypatch.setattr(operations, 'MAX_WAIT', 0.1)
    done.work['collect'] = forever
    with running(repository, conf) as scheduler:
        control = operations.Control(repository, scheduler)
        scheduler.request('collect')
        wait_for(lambda: 'collect' in done.log)
        with pytest.raises(exceptions.BusyError):
            control.mark_lost('image')
        assert not scheduler._queue.is_waiting('mark-lost')


def test_mark_lost_waits_once(repository, monkeypatch):
    """The call waits once; a task that has begun continues by itself."""
    waits = []

    class Event(threading.Event):
        def wait(self, timeout):
            waits.append(timeout)
            return super().wait(timeout)

    monkeypatch.setattr(operations, 'MAX_WAIT', 0.5)
    monkeypatch.setattr(operations, 'threading',
                        types.SimpleNamespace(Event=Event))
    scheduler = mock.Mock()
    scheduler.withdraw.return_value = False     # the task has begun
    control = operations.Control(repository, scheduler)
    with pytest.raises(exceptions.BusyError, match='it goes on'):
        control.mark_lost('image')
    assert waits == [0.5]


# -- the registry -------------------------------------------------------------

@pytest.mark.parametrize('row', registry.TASKS.values(),
                         ids=registry.TASKS.keys())
def test_a_task_has_the_options_that_its_row_names(row):
    """A reload is enough to change a task's options."""
    known = {option.dest: option for option in opts.dedupd_opts}
    named = [row.interval] * isinstance(row.interval, str) + (
        [row.rate] * bool(row.rate))
    assert all(known[name].mutable for name in named)
    # No option exists without a row that names it.
    assert {name for name in (f'{row.name}_interval', f'{row.name}_rate_mib')
            if name in known} == {*named}
    assert set(row.not_again) <= set(row.arguments)


@pytest.mark.parametrize('name, arguments', [
    ('collect', {'full': True}), ('collect', {'dry_run': 1}),
    ('scrub', {'full': None}), ('evict', {'limit_mib': 1.0}),
    ('recompress', {'codec': 'gzip'}), ('recompress', {'codec': 'x' * 99}),
    ('recompress', {'codec': 'zstd', 'level': 256}),
    ('recompress', {'codec': 'zstd', 'level': -1}),
    ('recompress', {'level': 3}), ('evict', {'limit_mib': -1}),
    ('evict', {'limit_mib': (1 << 30) + 1}),
    ('account', {'dry_run': True}), ('replicate', {'dry_run': True})])
def test_a_row_refuses_arguments(name, arguments):
    with pytest.raises(exceptions.InvalidParameter):
        registry.TASKS[name].check(arguments)


@pytest.mark.parametrize('name, arguments', [
    ('collect', {'dry_run': True}), ('scrub', {}),
    ('recompress', {'codec': 'zstd', 'level': 3, 'dry_run': True}),
    ('recompress', {'dry_run': True}), ('evict', {'limit_mib': 1})])
def test_a_row_takes_arguments(name, arguments):
    registry.TASKS[name].check(arguments)


# -- the pace -----------------------------------------------------------------

def test_a_changed_rate_ends_the_wait(repository):
    """A changed rate ends a long wait for a slow pace."""
    pace = pacing.Pace(rate=1)
    threading.Timer(0.1, setattr, (pace, 'rate', None)).start()
    since = time.monotonic()
    pace.step(1, 2, 'working', cost=1000)
    assert time.monotonic() - since < 10
