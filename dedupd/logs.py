# SPDX-License-Identifier: Apache-2.0

"""The daemon's log: one line a message, which says what it says."""

import copy
import logging

from oslo_config import cfg
from oslo_log import log

from glance_dedup.base import printable


class Formatter(logging.Formatter):
    """Another one's lines, of plain text and without what oslo.log adds.

    To each warning that is logged while an exception is being handled, it
    appends the exception. Whatever of that matters our messages say.
    """

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        record = copy.copy(record)
        record.msg = printable.printable(record.getMessage())
        record.args = None
        if record.exc_info:
            return self._inner.format(record)
        try:
            raise KeyError      # one that oslo.log takes for no error
        except KeyError:
            return self._inner.format(record)


def setup(conf: cfg.ConfigOpts) -> None:
    log.setup(conf, 'dedupd')
    logging.captureWarnings(True)
    for handler in logging.getLogger().handlers:
        if handler.formatter is not None:
            handler.setFormatter(Formatter(handler.formatter))
