# SPDX-License-Identifier: Apache-2.0

"""A daemon's share of the work, and a helper's scheduler."""

import contextlib
import itertools
import os

from oslo_config import cfg
import pytest

from dedupd import opts
from dedupd.schedule import host_share
from dedupd.schedule import maintainer_takeover
from dedupd.schedule import task_scheduler
from glance_dedup.base import pacing
from glance_dedup.base import package_version
from glance_dedup.maintenance import live_hosts
from tests.support import maintenance
from tests.support import repositories
from tests.support import schedulers
from tests.support.schedulers import wait_for

pytest_plugins = ['tests.support.maintainer_fixtures']

NAMES = ('account', 'collect', 'scrub', 'recompress')


@pytest.fixture
def conf():
    found = cfg.ConfigOpts()
    found.register_opts(opts.dedupd_opts, group='dedupd')
    found([], default_config_files=[])
    for name in ('collect', 'merge'):
        found.set_override(f'{name}_interval', 0, 'dedupd')
    return found


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(live_hosts, 'MAX_MEMORY', 0.01)
    monkeypatch.setattr(maintainer_takeover, 'TRIAL_INTERVAL', 0.1)
    monkeypatch.setattr(pacing, 'WATCH', 0.001)
    monkeypatch.setattr(pacing, 'idle_seconds',
                        itertools.count(0, 1000).__next__)


@pytest.fixture
def join(repo, conf):
    with contextlib.ExitStack() as stack:
        def joined():
            found = stack.enter_context(
                host_share.Membership(repo, conf, NAMES))
            found.join()
            return found
        yield joined


def test_the_options_say_of_which_tasks_it_takes_a_share(join, conf):
    mine = join()
    assert mine.members() == {0: ['scrub', 'recompress']}
    conf.set_override('scrub_interval', 0, 'dedupd')
    mine.follow()
    assert mine.members() == {0: ['recompress']}
    conf.set_override('recompress_codec', 'none', 'dedupd')
    mine.follow()
    assert mine.members() == {0: []}
    # A daemon that takes no part still runs the whole task on request.
    assert mine.share('recompress')(7) and mine.share('collect') is None


def test_who_lives(join):
    mine, other = join(), join()
    host = {'host': os.uname().nodename, 'version': package_version.version(),
            'tasks': ['scrub', 'recompress']}
    assert mine.described() == {
        '0': host, '1': {**host, 'host': None, 'version': None}}
    assert (mine.number, other.number) == (0, 1)
    other.close()
    wait_for(lambda: mine.described() == {'0': host})


def test_a_daemon_without_a_number_works_alone(path, conf, repo, caplog):
    (path / 'locks/hosts').mkdir()
    with schedulers.running(repo, conf) as scheduler:
        assert scheduler.membership.number is None
        assert scheduler.membership.described() == {}
        number = scheduler.request('scrub')
        status = scheduler.wait('scrub', number, schedulers.LIMIT)
        assert status['last']['error'] is None
    assert 'cannot share the work' in caplog.text
    (path / 'locks/hosts').rmdir()


def test_a_helper_runs_its_tasks_and_takes_over(path, repo, other, conf):
    """A helper runs its own tasks only, and later becomes the maintainer."""
    text = repositories.noise(
        maintenance.SLOTS * maintenance.BLOCK, 1).hex().encode()
    repositories.put(other, 'text', text)
    for name in ('recompress', 'scrub', 'collect', 'merge'):
        conf.set_override(f'{name}_interval', 1, 'dedupd')
    helper = task_scheduler.Scheduler(other, conf)
    helper.events = []
    helper.listeners.append(lambda *event: helper.events.append(event))
    with maintenance.maintaining(repo):
        helper.start()
        try:
            wait_for(lambda: helper.tasks()['recompress']['runs']
                     and helper.tasks()['scrub']['runs']
                     and helper.tasks()['merge']['runs'])
            assert not helper.is_maintainer
            with pytest.raises(task_scheduler.NotMaintainer):
                helper.request('scrub')
            wait_for(lambda: helper.tasks()['recompress']['runs'] > 1)
            done = {name for name, status in helper.tasks().items()
                    if status['runs']}
            assert done == {'recompress', 'scrub', 'merge'}
            assert sum(event[2]['groups'] for event in helper.events
                       if event[:2] == ('end', 'recompress')) == 2
            assert {event[:2] for event in helper.events} >= {
                ('start', 'recompress'), ('end', 'scrub')}
            assert not (path / 'tasks.json').exists()
            assert (path / 'helpers/0.json').exists()
        except BaseException:
            helper.stop()
            raise
    try:
        wait_for(lambda: helper.is_maintainer
                 and helper.tasks()['account']['runs'])
        assert repositories.read_all(other, 'text') == text
    finally:
        helper.stop()
        assert helper.join(schedulers.LIMIT)


def test_a_long_task_of_a_helper_ends_when_it_is_needed(
        path, repo, other, conf):
    """A helper ends its long scrub to replace a dead maintainer."""
    repositories.put(other, 'noise', repositories.noise(1 << 20, 1))
    conf.set_override('scrub_interval', 1, 'dedupd')
    conf.set_override('scrub_rate_mib', 1, 'dedupd')
    helper = task_scheduler.Scheduler(other, conf)
    with maintenance.maintaining(repo):
        helper.start()
        wait_for(lambda: helper.task('scrub')['state'] == 'running')
    try:
        wait_for(lambda: helper.is_maintainer)
    finally:
        helper.stop()
        assert helper.join(schedulers.LIMIT)
