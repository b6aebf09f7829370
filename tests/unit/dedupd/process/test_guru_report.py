# SPDX-License-Identifier: Apache-2.0

"""Reports on SIGUSR2, from real daemons and from this process."""

import contextlib
import os
import pathlib
import re
import signal
import threading
import weakref

from oslo_config import cfg
import pytest

from dedupd.process import guru_report
from tests.support import cache_harness
from tests.support import daemons
from tests.support import relays
from tests.support import repositories

SECRET = 'not-to-be-told'
END = 'waiting = '          # this is in the last section


@pytest.fixture
def repository(tmp_path):
    return repositories.create(tmp_path / 'repository')


def section(text, title):
    """Return a section of a report."""
    found = re.search(rf'^==== +{title} +====\n=+\n(.*?)(?:^=====|\Z)', text,
                      re.MULTILINE | re.DOTALL)
    assert found, text
    return found[1]


def report_of(daemon):
    """Have a daemon write a report to its log."""
    before = len(daemon.text())
    daemon.process.send_signal(signal.SIGUSR2)
    daemon.wait_for(lambda: END in daemon.text()[before:]
                    and daemon.text().endswith('\n'))
    return daemon.text()[before:]


def test_a_report_has_what_the_daemon_does_and_no_secret(repository):
    with daemons.Daemon(repository, glance_url=(
            f'http://user:{SECRET}@127.0.0.1:1')) as daemon:
        with open(daemon.config, 'a') as f:
            f.write(f'[DEFAULT]\ntransport_url = rabbit://u:{SECRET}'
                    '@127.0.0.1:1/\n')
        daemon.start().wait_for_catalog()
        daemon.run('collect')
        with daemon.connect():
            daemon.wait_for(
                lambda: daemon.status()['reads']['connections'] == 2)
            text = report_of(daemon)
        assert re.search(r'unix = 1', section(text, 'Queues'))
        assert 'waiting_reads = 0' in section(text, 'Queues')
        doing = section(text, 'Daemon')
        assert 'role = maintainer' in doing
        assert re.search(r'collect = \n(    .*\n)*    state = idle', doing)
        assert 'HTTPConnection.run' in section(text, 'Event loop')
        assert 'daemon.py' in section(text, 'Threads')
        assert 'transport_url = ***' in section(text, 'Options')
        assert 'glance_url = http://***@127.0.0.1:1' in text
        assert SECRET not in text


def test_signals_have_the_effects_that_they_had(repository):
    """The daemon keeps running, reads its options again, and stops."""
    with daemons.Daemon(repository, cache_mib=7) as daemon:
        daemon.start().wait_for_catalog()
        assert 'cache_mib = 7' in report_of(daemon)
        daemon.write_config(cache_mib=9)
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_for(lambda: 'cache_mib = 9' in report_of(daemon))
        assert daemon.status()['daemon']['ready']
        assert daemon.stop() == 0


def test_a_report_goes_to_the_directory_that_the_options_name(repository,
                                                              tmp_path):
    directory = tmp_path / 'reports'
    directory.mkdir()
    with daemons.Daemon(repository) as daemon:
        with open(daemon.config, 'a') as f:
            f.write(f'[oslo_reports]\nlog_dir = {directory}\n')
        daemon.start()
        daemon.process.send_signal(signal.SIGUSR2)
        daemon.wait_for(lambda: any(
            END in path.read_text() for path in directory.iterdir()))
        name, = os.listdir(directory)
        assert name.startswith('dedupd_gurumeditation_')
        assert 'Guru Meditation' not in daemon.text()


def test_a_file_triggers_a_report(repository, tmp_path):
    trigger = tmp_path / 'trigger'
    trigger.touch()
    with daemons.Daemon(repository) as daemon:
        with open(daemon.config, 'a') as f:
            f.write(f'[oslo_reports]\nfile_event_handler = {trigger}\n')
        daemon.start()

        def touched():
            os.utime(trigger)
            return END in daemon.text()

        daemon.wait_for(touched)
        assert daemon.stop() == 0


def test_the_relay_has_reports(repository):
    """The relay writes a report without a running cache."""
    with cache_harness.CacheDaemon(
            repository, {'upstream_url': 'https://127.0.0.1:1'},
            glance_url='http://127.0.0.1:1') as cache, (
            contextlib.closing(relays.Relay(cache))) as relay:
        relay.start()
        said = relay.said()
        relay.process.send_signal(signal.SIGUSR2)
        repositories.eventually(lambda: END in said())
        assert 'product = dedupd-relay' in said()
        assert 'Pulse.run' in section(said(), 'Event loop')
        assert relay.stop() == 0


@pytest.fixture
def handler():
    before = signal.getsignal(signal.SIGUSR2)
    yield
    signal.signal(signal.SIGUSR2, before)


def test_what_hangs_does_not_keep_the_report(handler, monkeypatch, capfd):
    """A section that hangs, fails or needs a lock does not stop the report."""
    monkeypatch.setattr(guru_report, 'PATIENCE', 0.2)
    stuck, lock = threading.Event(), threading.Lock()
    # oslo.reports requests the class of every object. This proxy's object no
    # longer exists.
    gone = weakref.proxy(threading.Event())

    def fail():
        raise ValueError('why')

    guru_report.setup('x', cfg.ConfigOpts(), {
        'Stuck': stuck.wait, 'Locked': lambda: {'got': lock.acquire()},
        'Hostile': lambda: {'name': 'a\x1b[2J'}, 'Failed': fail})
    text = ''

    def is_there():
        nonlocal text
        text += capfd.readouterr().err
        return 'why' in text

    try:
        with lock:
            os.kill(os.getpid(), signal.SIGUSR2)
            repositories.eventually(is_there)
    finally:
        stuck.set()
    assert 'no answer within' in section(text, 'Stuck')
    assert 'no answer within' in section(text, 'Locked')
    assert 'ReferenceError' in section(text, 'Green Threads'), type(gone)
    assert '\x1b' not in text
    assert pathlib.Path(__file__).name in section(text, 'Threads')
