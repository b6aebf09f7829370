# SPDX-License-Identifier: Apache-2.0

"""Which task runs next: no thread, no repository."""

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
def agenda(conf):
    return task_queue.Agenda(conf, NAMES)


def started(job):
    job.began, job.pace = time.time(), pacing.Pace()
    return job


def order(agenda):
    """The names of all jobs, in the order in which they would run."""
    found = []
    while (job := agenda.take()) is not None:
        found.append(job.name)
        agenda.put(job.name)
    return found


def test_nothing_runs_by_itself_before_it_begins(agenda):
    assert agenda.take() is None
    agenda.begin()
    assert order(agenda) == ['account']
    agenda.clear()
    assert all(agenda.due(name) is None for name in NAMES)


def test_requests_then_what_is_due_for_longest(agenda):
    for seconds, name in ((-1, 'merge'), (-2, 'scrub'), (-3, 'collect')):
        agenda.put(name, seconds)
    agenda.request('recompress', {}, None)
    agenda.request('merge', {}, None)
    assert order(agenda) == ['recompress', 'merge', 'collect', 'scrub']


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('running', NAMES)
def test_a_due_task_of_a_lower_rank_goes_first(agenda, running, name):
    job = task_queue.Job(running)
    assert not agenda.makes_way(job)
    agenda.put(name, 0)
    assert agenda.makes_way(job) == (
        registry.TASKS[name].rank < registry.TASKS[running].rank)


@pytest.mark.parametrize('running', NAMES)
def test_a_request_goes_before_what_makes_way(agenda, running):
    job = task_queue.Job(running)
    agenda.request('merge', {}, job if running != 'merge' else None)
    assert agenda.makes_way(job) == (running in ('scrub', 'recompress'))


def test_a_suspended_job_waits_for_what_it_made_way_for(agenda):
    scrub = task_queue.Job('scrub', 1, {'full': True})
    recompress = task_queue.Job('recompress', 2, {'dry_run': True})
    for job in (recompress, scrub):
        agenda.suspend(job)
        assert agenda.is_waiting(job.name)
    agenda.put('recompress', 0)
    agenda.put('account', 0)
    assert agenda.take().name == 'account'
    agenda.put('account')
    assert agenda.take() is scrub
    assert agenda.take() is recompress
    # A scrub goes on without beginning again; a dry run stays one.
    assert (scrub.arguments, recompress.arguments) == ({}, {'dry_run': True})
    assert agenda.take().name == 'recompress'


def test_a_request_joins_what_has_begun(agenda):
    running = started(task_queue.Job('scrub'))
    running.pace.patient = True
    assert agenda.request('scrub', {'full': False}, running) is running
    assert running.number == 1 and not running.pace.patient
    assert agenda.request('scrub', {'full': True}, running) is not running
    running.pace = None
    agenda.suspend(running)
    assert agenda.request('scrub', {}, None) is running
    assert running.number == 3
    # Somebody waits for it, so nobody else's scrub makes it superfluous.
    agenda.drop_suspended('scrub')
    assert agenda.take() is running
    assert agenda.take().arguments == {'full': True}
    assert agenda.take() is None


def test_a_scheduled_job_is_dropped_when_another_did_its_work(agenda):
    agenda.suspend(started(task_queue.Job('scrub')))
    agenda.suspend(started(task_queue.Job('scrub', 1)))
    agenda.drop_suspended('scrub')
    assert agenda.take().number == 1
    assert agenda.take() is None


def test_requests_of_one_task_end_in_their_order(agenda):
    first = agenda.request('scrub', {'full': True}, None)
    assert agenda.take() is first
    second = agenda.request('scrub', {}, None)
    assert not agenda.makes_way(started(first))
    other = agenda.request('merge', {}, first)
    assert agenda.makes_way(first)
    agenda.suspend(first)
    assert [agenda.take() for _ in range(4)] == [other, first, second, None]


def test_a_job_makes_no_way_for_a_run_that_does_the_same(agenda):
    """Not even if that is urgent."""
    job = started(task_queue.Job('recompress', 1, {'level': 3}))
    agenda.hurry('recompress')
    assert not agenda.makes_way(job)
    agenda.suspend(job)
    assert agenda.take() is job
    assert (job.number, job.arguments) == (1, {'level': 3})


def test_what_is_due_goes_on_where_it_was_suspended(agenda):
    scrub = started(task_queue.Job('scrub', 1))
    recompress = started(task_queue.Job('recompress', 2))
    for job in (recompress, scrub):
        agenda.suspend(job)
    agenda.hurry('recompress')
    assert agenda.take() is recompress


def test_a_dry_run_is_no_run(agenda):
    """It makes way for one that is urgent, and is joined by no request."""
    plan = started(task_queue.Job('recompress', 1, {'dry_run': True}))
    assert agenda.request('recompress', {}, plan) is not plan
    agenda.hurry('recompress')
    assert agenda.makes_way(plan)


def test_a_task_that_never_makes_way_runs_again(agenda):
    """Images that came meanwhile may concern the second run only."""
    running = started(task_queue.Job('collect'))
    job = agenda.request('collect', {}, running)
    assert job is not running
    assert agenda.request('collect', {}, running) is job
    assert agenda.withdraw(job.number) and not agenda.withdraw(job.number)
    assert not agenda.is_waiting('collect')


def test_no_task_waits_longer_than_its_interval(agenda, conf):
    agenda.begin()
    soon = agenda.due('merge')
    conf.set_override('scrub_interval', 10, 'dedupd')
    conf.set_override('collect_interval', 0, 'dedupd')
    agenda.reload()
    assert agenda.due('scrub') <= time.monotonic() + 10
    assert agenda.due('collect') is None
    assert agenda.due('merge') == soon
    agenda.put('collect', 0)
    assert agenda.due('collect') is None
    agenda.put('scrub', 10 ** 9)
    assert agenda.due('scrub') <= time.monotonic() + 10


def test_a_hurried_task_goes_before_what_makes_way(agenda, conf):
    conf.set_override('tier_interval', 1000, 'dedupd')
    tiering = task_queue.Agenda(conf, (*NAMES, 'tier'))
    tiering.begin()
    assert order(tiering) == ['account']
    scrub = started(task_queue.Job('scrub'))
    tiering.put('tier', 0)
    assert not tiering.makes_way(scrub)
    tiering.hurry('tier')
    assert tiering.makes_way(scrub)
    assert order(tiering) == ['tier']
    # It is as any other from then on.
    tiering.put('tier', 0)
    assert not tiering.makes_way(scrub)
    conf.set_override('tier_interval', 0, 'dedupd')
    tiering.reload()
    tiering.hurry('tier')
    assert tiering.due('tier') is None and not tiering.makes_way(scrub)


@pytest.mark.parametrize('interval', [0, 1000])
def test_a_collection_by_a_moment(agenda, conf, interval):
    """Whether or not collections are due at intervals."""
    conf.set_override('collect_interval', interval, 'dedupd')
    agenda.begin()
    before = agenda.due('collect')
    agenda.collect_by(None)
    assert agenda.due('collect') == before
    moment = time.monotonic() + 5
    agenda.collect_by(moment)
    assert agenda.due('collect') == moment
    assert agenda.until(moment - 1000) == moment - 1000
    agenda.collect_by(None)
    assert agenda.due('collect') == (moment if interval else None)
