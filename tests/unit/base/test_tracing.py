# SPDX-License-Identifier: Apache-2.0

"""Spans in a trace of the real OSProfiler, whose store is a list."""

import logging
import sys
import threading

from osprofiler import notifier
from osprofiler import profiler
import pytest

from glance_dedup.base import tracing

KEY = 'a-key'


@pytest.fixture
def told():
    """Messages that the store of traces receives."""
    before, found = notifier.get(), []
    notifier.set(found.append)
    yield found
    notifier.set(before)
    profiler.clean()


def names(told):
    return [item['name'] for item in told]


def test_a_span_is_a_child_of_what_runs(told):
    profiler.init(KEY)
    with profiler.Trace('wsgi'):
        with tracing.Span('dedup_add', image_id='one') as span:
            span.facts['bytes'] = 5
    outer, begin, end, _ = told
    assert names(told) == ['wsgi-start', 'dedup_add-start', 'dedup_add-stop',
                           'wsgi-stop']
    assert begin['parent_id'] == outer['trace_id'] == end['parent_id']
    assert begin['trace_id'] == end['trace_id'] != outer['trace_id']
    assert begin['base_id'] == outer['base_id']
    assert begin['info']['image_id'] == 'one' and end['info']['bytes'] == 5


def test_without_a_trace_nothing_is_told(told):
    with tracing.Span('dedup_add') as span:
        span.facts['bytes'] = 5
    assert told == []


def test_without_osprofiler_nothing_is_told(told, monkeypatch):
    profiler.init(KEY)
    monkeypatch.delitem(sys.modules, 'osprofiler.profiler')
    with tracing.Span('dedup_add'):
        pass
    assert told == [] and 'osprofiler.profiler' not in sys.modules


def test_a_span_may_end_elsewhere_and_after_the_trace(told):
    profiler.init(KEY)
    with profiler.Trace('wsgi'):
        span = tracing.Span('dedup_get')
    profiler.clean()
    thread = threading.Thread(target=span.end)
    thread.start()
    thread.join(60)
    span.end()
    assert names(told) == ['wsgi-start', 'dedup_get-start', 'wsgi-stop',
                           'dedup_get-stop']
    assert told[1]['trace_id'] == told[3]['trace_id']
    assert told[1]['parent_id'] == told[0]['trace_id']


def test_an_error_is_told_by_its_class_alone(told):
    profiler.init(KEY)
    with pytest.raises(LookupError):
        with tracing.Span('dedup_add'):
            raise LookupError('dedup://a-location')
    assert told[1]['info']['etype'] == 'builtins.LookupError'
    assert 'a-location' not in str(told)


@pytest.mark.parametrize('good', [0, 1])
def test_a_store_that_fails_fails_nothing_else(told, caplog, good):
    """A span succeeds if the store fails at its beginning or at its end."""
    def notify(info):
        if len(told) >= good:
            raise ConnectionError('redis://:password@host')
        told.append(info)

    notifier.set(notify)
    profiler.init(KEY)
    with caplog.at_level(logging.WARNING), tracing.Span('dedup_add') as span:
        span.facts['bytes'] = 5
    assert len(told) == good
    record, = caplog.records
    assert 'ConnectionError' in record.getMessage()
    assert 'password' not in record.getMessage()
