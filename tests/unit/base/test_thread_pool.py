# SPDX-License-Identifier: Apache-2.0

"""Workers, strands and time limits."""

import gc
import os
import signal
import threading
import time
import weakref

import pytest

from glance_dedup.base import exceptions
from glance_dedup.base import thread_pool


@pytest.fixture
def pool():
    return thread_pool.Workers('test', 3)


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_results_and_errors(pool):
    assert pool.submit(divmod, 7, 2).result(5) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 7, 0).result(5)
    with pytest.raises(KeyboardInterrupt):
        pool.submit(lambda: (_ for _ in ()).throw(KeyboardInterrupt)).result(5)
    assert pool.submit(int, '5').result(5) == 5  # the worker survives


def test_threads_are_bounded_daemons_and_started_when_needed(pool):
    assert pool._threads == 0
    go, names = threading.Event(), []

    def work():
        names.append(threading.current_thread())
        go.wait(10)

    calls = [pool.submit(work) for _ in range(20)]
    until(lambda: len(names) == 3)
    time.sleep(0.05)
    assert len(names) == pool._threads == 3
    assert all(thread.daemon for thread in names)
    go.set()
    for call in calls:
        call.result(5)
    assert pool._threads == 3


def test_an_idle_worker_is_used_again(pool):
    for _ in range(20):
        pool.submit(int).result(5)
        until(lambda: pool._idle == pool._threads)
    assert pool._threads == 1


def test_idle_workers_end(pool, monkeypatch):
    monkeypatch.setattr(thread_pool, 'IDLE_SECONDS', 0.05)
    for _ in range(3):
        assert pool.submit(int, '3').result(5) == 3
        until(lambda: pool._threads == 0)


def test_no_thread_to_be_had(pool, monkeypatch):
    def fail(self):
        raise RuntimeError("can't start new thread")

    strand = thread_pool.Strand(pool)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, 'start', fail)
        # Request handlers treat NoThread as a temporary error.
        with pytest.raises(exceptions.NoThread, match='start new thread'):
            pool.submit(int)
        with pytest.raises(exceptions.NoThread):
            strand.submit(int)
    assert pool._threads == 0 and not pool._tasks
    assert strand.submit(int, '1').result(5) == 1


def test_nothing_is_kept_of_a_call(pool):
    class Big:
        pass

    def fail(_big):
        raise ValueError

    for function in (id, fail):
        big = Big()
        gone = weakref.ref(big)
        call = pool.submit(function, big)
        call.exception(5)
        del big
        gc.collect()
        if function is id:
            until(lambda: gone() is None)
        del call
        until(lambda: gone() is None)


def test_a_fork_starts_with_no_threads(pool):
    go = threading.Event()
    for _ in range(5):
        pool.submit(go.wait, 10)
    strand = thread_pool.Strand(pool)
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            good = (pool._threads == 0 and not pool._tasks
                    and pool.submit(int, '7').result(5) == 7
                    and strand.submit(int, '8').result(5) == 8)
            os._exit(0 if good else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    go.set()


def test_a_strand_keeps_the_order(pool):
    strands = [thread_pool.Strand(pool) for _ in range(10)]
    seen = [[] for _ in strands]
    running = [0] * len(strands)

    def work(number, turn):
        running[number] += 1
        assert running[number] == 1
        seen[number].append(turn)
        time.sleep(0.0001)
        running[number] -= 1

    calls = [strand.submit(work, number, turn)
             for turn in range(50) for number, strand in enumerate(strands)]
    for call in calls:
        call.result(10)
    assert seen == [list(range(50))] * len(strands)


def test_a_strand_that_never_runs_dry_lets_others_run():
    pool = thread_pool.Workers('test', 1)
    greedy, other = thread_pool.Strand(pool), thread_pool.Strand(pool)
    stop = threading.Event()

    def again():
        if not stop.wait(0.001):
            greedy.submit(again)

    greedy.submit(again)
    try:
        for _ in range(20):
            assert other.submit(int, '5').result(5) == 5
    finally:
        stop.set()


def test_an_error_does_not_stop_a_strand(pool):
    strand = thread_pool.Strand(pool)
    bad = strand.submit(divmod, 1, 0)
    assert strand.submit(int, '4').result(5) == 4
    assert isinstance(bad.exception(), ZeroDivisionError)


def test_dropping_what_has_not_begun(pool):
    strand, go, ran = thread_pool.Strand(pool), threading.Event(), []
    begun = threading.Event()
    first = strand.submit(lambda: (begun.set(), go.wait(10)))
    later = [strand.submit(ran.append, number) for number in range(5)]
    begun.wait(5)
    strand.drop()
    last = strand.submit(ran.append, 'last')
    go.set()
    last.result(5)
    assert first.done() and ran == ['last']
    assert all(call.cancelled() and thread_pool.failed(call) for call in later)


def test_no_limit_needs_no_thread(pool):
    limit = thread_pool.TimeLimit(0, pool)
    assert limit.call(threading.get_ident) == threading.get_ident()
    assert pool._threads == 0


def test_a_limit(pool):
    limit = thread_pool.TimeLimit(0.2, pool)
    assert limit.call(int, '5') == 5
    # A system call that timed out by itself does not count as the limit.
    with pytest.raises(TimeoutError):
        limit.call(lambda: (_ for _ in ()).throw(TimeoutError('ETIMEDOUT')))
    go, undone = threading.Event(), []
    with pytest.raises(thread_pool.Expired, match='0.2 seconds'):
        limit.call(lambda: go.wait(10) and 'late', late=undone.append)
    assert not undone
    go.set()
    until(lambda: undone == ['late'])


def test_a_late_failure_needs_no_undoing(pool):
    limit, go, undone = thread_pool.TimeLimit(0.1, pool), threading.Event(), []
    with pytest.raises(thread_pool.Expired):
        limit.call(lambda: go.wait(10) and 1 // 0, late=undone.append)
    go.set()
    until(lambda: pool._idle == 1)
    assert not undone


def test_a_call_that_found_no_thread_never_begins(pool):
    limit, go, ran = thread_pool.TimeLimit(0.1, pool), threading.Event(), []
    for _ in range(3):
        with pytest.raises(thread_pool.Expired):
            limit.call(go.wait, 10)
    with pytest.raises(thread_pool.Expired):
        limit.call(ran.append, 1)
    go.set()
    until(lambda: pool._idle == 3)
    assert not ran
