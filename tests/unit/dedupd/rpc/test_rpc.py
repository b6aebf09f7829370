# SPDX-License-Identifier: Apache-2.0

"""RPC without a broker: the methods, as its threads call them."""

from concurrent import futures
import subprocess
import sys
import threading

import pytest

from dedupd import rpc
from tests.support import repositories

LIMIT = 20


class Control:
    """A control whose task is running and does not end."""

    def __init__(self):
        self.over = threading.Event()

    def status(self):
        return {'repository': {'id': '0' * 32}}

    def task(self, name, after=0, wait=0):
        if wait:
            assert self.over.wait(LIMIT)
        return {'finished': 0}

    def mark_lost(self, image_id):
        assert self.over.wait(LIMIT)
        return {'image_id': image_id}


def test_the_daemon_imports_oslo_messaging_in_a_thread():
    """The daemon imports oslo.messaging later, in a thread.

    That thread first chooses the backend of oslo.service.
    """
    subprocess.run([sys.executable, '-c', (
        'import sys; from dedupd import daemon; '
        'from dedupd.endpoints import messaging; '
        'assert not {"oslo_messaging", "oslo_service"} & {*sys.modules}')],
        check=True, timeout=60)


@pytest.fixture
def control():
    it = Control()
    yield it
    it.over.set()


@pytest.fixture
def call(control):
    """Return a function that calls a method in one of the server's threads."""
    endpoint = rpc._Endpoint(control)
    with futures.ThreadPoolExecutor(rpc._THREADS) as pool:
        yield lambda method, **arguments: pool.submit(
            getattr(endpoint, method), {}, **arguments)
        control.over.set()


def test_calls_that_wait_leave_threads_to_others(control, call):
    """Calls beyond the limit are answered at once, as a long poll allows."""
    waiting = [call('task', name='collect', after=1, wait=30)
               for _ in range(2 * rpc._THREADS)]
    assert call('status').result(LIMIT)['repository']
    assert call('task', name='collect').result(LIMIT)['finished'] == 0
    # A refused call may still be ending in its thread.
    repositories.eventually(lambda: len(
        futures.wait(waiting, 0).not_done) == rpc._WAITING)
    control.over.set()
    for future in waiting:
        assert future.result(LIMIT)['finished'] == 0
    # The places of the ended calls are free again.
    control.over.clear()
    again = [call('task', name='collect', after=1, wait=30)
             for _ in range(rpc._WAITING)]
    done, not_done = futures.wait(again, 0.1)
    assert len(not_done) == rpc._WAITING


def test_marking_lost_waits_too(control, call):
    """Calls to mark an image as lost wait or raise Busy beyond the limit."""
    waiting = [call('mark_lost', image_id='image')
               for _ in range(2 * rpc._THREADS)]
    assert call('status').result(LIMIT)['repository']
    control.over.set()
    results = [future.exception(LIMIT) for future in waiting]
    assert results.count(None) >= rpc._WAITING
    for error in results:
        # oslo.messaging carries expected errors in this form.
        assert error is None or issubclass(error.exc_info[0], rpc.Busy)
