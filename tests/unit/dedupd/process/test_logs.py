# SPDX-License-Identifier: Apache-2.0

"""The daemon's log, with the formatters of oslo.log."""

import io
import logging

from oslo_config import cfg
from oslo_log import formatters
from oslo_log import log
import pytest

from dedupd.process import logs
from glance_dedup.base import pacing


@pytest.fixture
def conf():
    conf = cfg.ConfigOpts()
    log.register_options(conf)
    conf([], default_config_files=[])
    return conf


@pytest.fixture(params=['line', 'json'])
def written(request, conf):
    """Return a logger and the stream that it writes to."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.Formatter(
        formatters.ContextFormatter(config=conf) if request.param == 'line'
        else formatters.JSONFormatter()))
    logger = logging.Logger('dedupd.test')
    logger.addHandler(handler)
    return logger, stream


def test_what_is_being_handled_is_not_appended(written):
    logger, stream = written
    try:
        try:
            raise pacing.Stopped()
        finally:
            logger.error('A block is damaged: %s', 5)
    except pacing.Stopped:
        logger.warning('It goes on.')
    assert 'A block is damaged: 5' in stream.getvalue()
    assert 'It goes on.' in stream.getvalue()
    assert 'Stopped' not in stream.getvalue()


def test_what_is_given_is(written):
    logger, stream = written
    try:
        raise pacing.Stopped()
    except pacing.Stopped as e:
        logger.error('It failed', exc_info=e)
    assert 'Stopped' in stream.getvalue()
    assert 'Traceback' in stream.getvalue()


def test_one_line(written):
    logger, stream = written
    logger.warning('Image %s\x1b[2J: %s', 'a\nERROR all is lost', '%s')
    assert len(stream.getvalue().splitlines()) == 1
    assert '\x1b' not in stream.getvalue()
    assert '%s' in stream.getvalue()


def test_of_the_daemon(conf, monkeypatch):
    root = logging.getLogger()
    before = root.handlers[:]
    try:
        logs.setup(conf)
        assert any(isinstance(handler.formatter, logs.Formatter)
                   for handler in root.handlers)
    finally:
        logging.captureWarnings(False)
        root.handlers[:] = before


def test_figures_are_names_and_values():
    assert logs.fields({
        'groups': 3, 'seconds': 0.5, 'complete': True, 'refused': None,
        'failed': {'1': 'EIO', '2': 'EIO'}, 'images': [], 'codec': 'zstd',
        'why': 'no room', 'empty': '', 'other': 'a=b"c\n'}) == (
        'groups=3 seconds=0.5 complete=true failed=2 images=0 codec=zstd '
        'why="no room" empty="" other="a=b\\"c\\n"')
    assert logs.fields({}) == ''
