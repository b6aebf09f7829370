# SPDX-License-Identifier: Apache-2.0

"""The choice of the next task, without threads and without a repository."""

import time

from oslo_config import cfg
import pytest

from dedupd import opts
from dedupd.schedule import task_queue
from dedupd.tasks import registry
from glance_dedup.base import pacing

NAMES = ('account', 'collect', 'merge', 'scrub', 'recompress')


@pytest.fixture
def conf():
    found = cfg.ConfigOpts()
    found.register_opts(opts.dedupd_opts, group='dedupd')
    found([], default_config_files=[])
    for name in NAMES[1:]:
        found.set_override(f'{name}_interval', 1000, 'dedupd')
    return found


@pytest.fixture
def queue(conf):
    return task_queue.TaskQueue(conf, NAMES)


def started(job):
    job.began, job.pace = time.time(), pacing.Pace()
    return job


def order(queue):
    """Return the names of all jobs, in the order in which they would run."""
    found = []
    while (job := queue.take()) is not None:
        found.append(job.name)
        queue.put(job.name)
    return found


def test_nothing_runs_by_itself_before_it_begins(queue):
    assert queue.take() is None
    queue.begin()
    assert order(queue) == ['account']
    queue.clear()
    assert all(queue.due(name) is None for name in NAMES)


def test_requests_then_what_is_due_for_longest(queue):
    for seconds, name in ((-1, 'merge'), (-2, 'scrub'), (-3, 'collect')):
        queue.put(name, seconds)
    queue.request('recompress', {}, None)
    queue.request('merge', {}, None)
    assert order(queue) == ['recompress', 'merge', 'collect', 'scrub']


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('running', NAMES)
def test_a_due_task_of_a_lower_rank_goes_first(queue, running, name):
    job = task_queue.Job(running)
    assert not queue.makes_way(job)
    queue.put(name, 0)
    assert queue.makes_way(job) == (
        registry.TASKS[name].rank < registry.TASKS[running].rank)


@pytest.mark.parametrize('running', NAMES)
def test_a_request_goes_before_what_makes_way(queue, running):
    job = task_queue.Job(running)
    queue.request('merge', {}, job if running != 'merge' else None)
    assert queue.makes_way(job) == (running in ('scrub', 'recompress'))


def test_a_suspended_job_waits_for_what_it_made_way_for(queue):
    scrub = task_queue.Job('scrub', 1, {'full': True})
    recompress = task_queue.Job('recompress', 2, {'dry_run': True})
    for job in (recompress, scrub):
        queue.suspend(job)
        assert queue.is_waiting(job.name)
    queue.put('recompress', 0)
    queue.put('account', 0)
    assert queue.take().name == 'account'
    queue.put('account')
    assert queue.take() is scrub
    assert queue.take() is recompress
    # A scrub continues without beginning again; a dry run stays a dry run.
    assert (scrub.arguments, recompress.arguments) == ({}, {'dry_run': True})
    assert queue.take().name == 'recompress'


def test_a_request_joins_what_has_begun(queue):
    running = started(task_queue.Job('scrub'))
    running.pace.patient = True
    assert queue.request('scrub', {'full': False}, running) is running
    assert running.number == 1 and not running.pace.patient
    assert queue.request('scrub', {'full': True}, running) is not running
    running.pace = None
    queue.suspend(running)
    assert queue.request('scrub', {}, None) is running
    assert running.number == 3
    # A client waits for this scrub, so another client's scrub does not replace
    # it.
    queue.drop_suspended('scrub')
    assert queue.take() is running
    assert queue.take().arguments == {'full': True}
    assert queue.take() is None


def test_a_scheduled_job_is_dropped_when_another_did_its_work(queue):
    queue.suspend(started(task_queue.Job('scrub')))
    queue.suspend(started(task_queue.Job('scrub', 1)))
    queue.drop_suspended('scrub')
    assert queue.take().number == 1
    assert queue.take() is None


def test_requests_of_one_task_end_in_their_order(queue):
    first = queue.request('scrub', {'full': True}, None)
    assert queue.take() is first
    second = queue.request('scrub', {}, None)
    assert not queue.makes_way(started(first))
    other = queue.request('merge', {}, first)
    assert queue.makes_way(first)
    queue.suspend(first)
    assert [queue.take() for _ in range(4)] == [other, first, second, None]


def test_a_job_makes_no_way_for_a_run_that_does_the_same(queue):
    """A job does not make way for an equal run, even for an urgent one."""
    job = started(task_queue.Job('recompress', 1, {'level': 3}))
    queue.hurry('recompress')
    assert not queue.makes_way(job)
    queue.suspend(job)
    assert queue.take() is job
    assert (job.number, job.arguments) == (1, {'level': 3})


def test_what_is_due_goes_on_where_it_was_suspended(queue):
    scrub = started(task_queue.Job('scrub', 1))
    recompress = started(task_queue.Job('recompress', 2))
    for job in (recompress, scrub):
        queue.suspend(job)
    queue.hurry('recompress')
    assert queue.take() is recompress


def test_a_dry_run_is_no_run(queue):
    """A dry run makes way for an urgent run, and no request joins it."""
    plan = started(task_queue.Job('recompress', 1, {'dry_run': True}))
    assert queue.request('recompress', {}, plan) is not plan
    queue.hurry('recompress')
    assert queue.makes_way(plan)


def test_a_task_that_never_makes_way_runs_again(queue):
    """A request during such a run gets a run of its own.

    New images may concern the second run only.
    """
    running = started(task_queue.Job('collect'))
    job = queue.request('collect', {}, running)
    assert job is not running
    assert queue.request('collect', {}, running) is job
    assert queue.withdraw(job.number) and not queue.withdraw(job.number)
    assert not queue.is_waiting('collect')


def test_no_task_waits_longer_than_its_interval(queue, conf):
    queue.begin()
    soon = queue.due('merge')
    conf.set_override('scrub_interval', 10, 'dedupd')
    conf.set_override('collect_interval', 0, 'dedupd')
    queue.reload()
    assert queue.due('scrub') <= time.monotonic() + 10
    assert queue.due('collect') is None
    assert queue.due('merge') == soon
    queue.put('collect', 0)
    assert queue.due('collect') is None
    queue.put('scrub', 10 ** 9)
    assert queue.due('scrub') <= time.monotonic() + 10


def test_a_hurried_task_goes_before_what_makes_way(queue, conf):
    conf.set_override('tier_interval', 1000, 'dedupd')
    tiering = task_queue.TaskQueue(conf, (*NAMES, 'tier'))
    tiering.begin()
    assert order(tiering) == ['account']
    scrub = started(task_queue.Job('scrub'))
    tiering.put('tier', 0)
    assert not tiering.makes_way(scrub)
    tiering.hurry('tier')
    assert tiering.makes_way(scrub)
    assert order(tiering) == ['tier']
    # From then on it is like any other task.
    tiering.put('tier', 0)
    assert not tiering.makes_way(scrub)
    conf.set_override('tier_interval', 0, 'dedupd')
    tiering.reload()
    tiering.hurry('tier')
    assert tiering.due('tier') is None and not tiering.makes_way(scrub)


@pytest.mark.parametrize('interval', [0, 1000])
def test_a_collection_by_a_moment(queue, conf, interval):
    """A collection can get an earlier date, with and without an interval."""
    conf.set_override('collect_interval', interval, 'dedupd')
    queue.begin()
    before = queue.due('collect')
    queue.collect_by(None)
    assert queue.due('collect') == before
    moment = time.monotonic() + 5
    queue.collect_by(moment)
    assert queue.due('collect') == moment
    assert queue.until(moment - 1000) == moment - 1000
    queue.collect_by(None)
    assert queue.due('collect') == (moment if interval else None)


@pytest.mark.parametrize('name, arguments, does_all', [
    ('convert', {}, True), ('convert', {'images': ['a']}, False),
    ('convert', {'dry_run': True}, False),
    ('recompress', {'codec': 'zstd'}, True),
    ('tier', {'metadata_only': True}, False)])
def test_a_job_that_does_all(name, arguments, does_all):
    """Only such a job takes the place of a scheduled one."""
    assert task_queue.Job(name, 1, arguments).does_all is does_all
