# SPDX-License-Identifier: Apache-2.0

"""The format of the daemon's log: one line of plain text per message."""

from collections.abc import Mapping
import copy
import json
import logging
from typing import Any

from oslo_config import cfg
from oslo_log import log

from glance_dedup.base import printable


class Formatter(logging.Formatter):
    """Formats as another formatter does, with two changes.

    Unsafe characters of the message are escaped. And oslo.log does not append
    the exception that is being handled: our messages name its cause.
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
            raise KeyError      # oslo.log does not append this one
        except KeyError:
            return self._inner.format(record)


def fields(result: Mapping[str, Any]) -> str:
    """Return figures as ``name=value``, for programs that read the log.

    A list or an object is the number of its items, and text with a space has
    quotes. A value of None is left out.
    """
    return ' '.join(f'{name}={_value(value)}'
                    for name, value in result.items() if value is not None)


def _value(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return str(len(value))
    if isinstance(value, str) and value.isprintable() and (
            value and not set(value) & set(' "=')):
        return value
    return json.dumps(value)


def setup(conf: cfg.ConfigOpts) -> None:
    """Set up oslo.log by its options, with this module's format.

    It is global to the process. Warnings of Python go to the log, too.
    """
    log.setup(conf, 'dedupd')
    logging.captureWarnings(True)
    for handler in logging.getLogger().handlers:
        if handler.formatter is not None:
            handler.setFormatter(Formatter(handler.formatter))
