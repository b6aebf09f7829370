# SPDX-License-Identifier: Apache-2.0

"""The last run of each task, even before the daemon's start: ``tasks.json``.

The maintainer keeps this file in the repository, for the next maintainer. It
has, for each task, the last run, the last success, and the last error. All of
it is for people and their alarms; nothing depends on it. So an invalid file is
reported and forgotten, and a failure to write it is reported once.
"""

from collections.abc import Iterable
import json
import math
import os
import threading
import time
from typing import Any

from oslo_log import log

from glance_dedup.base import access
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import imagelist

LOG = log.getLogger(__name__)

NAME = 'tasks.json'
#: The most bytes of the file.
MAX_SIZE = 1 << 20
#: The most characters of an error, and bytes of a result, that are kept.
MAX_ERROR = 1000
MAX_RESULT = 8192

_KIND = 'glance-dedup tasks'
_MAX_NAME = 64
_MAX_COUNT = 64      # tasks
_DEPTH = 8      # of a result

Fields = dict[str, Any]


def _is_plain(value: Any, depth: int = _DEPTH) -> bool:
    """Return whether every reader of JSON takes this value."""
    if value is None or isinstance(value, (bool, str)):
        return True
    if isinstance(value, int):
        return abs(value) < 1 << 63
    if isinstance(value, float):
        return math.isfinite(value)
    if depth and isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item, depth - 1)
                   for key, item in value.items())
    return bool(depth) and isinstance(value, list) and all(
        _is_plain(item, depth - 1) for item in value)


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f'its {what} cannot be')


def _moment(value: Any, what: str) -> float:
    """A time that is not in the future: a clock may have been set back."""
    _need(type(value) in (int, float) and 0 <= value < 1 << 53, what)
    return min(value, time.time())


def _error(value: Any) -> str | None:
    _need(value is None or isinstance(value, str)
          and len(value) <= MAX_ERROR, 'error')
    return value


def _run(run: Any) -> Fields:
    arguments, result = run['arguments'], run['result']
    _need(isinstance(arguments, dict) and _is_plain(arguments), 'arguments')
    _need(result is None or isinstance(result, dict) and _is_plain(result),
          'result')
    return {
        # Requests are numbered from 1 in each process.
        'number': 0, 'started': _moment(run['started'], 'start'),
        'finished': _moment(run['finished'], 'end'),
        'seconds': _moment(run['seconds'], 'duration'),
        'arguments': arguments, 'result': result,
        'error': _error(run['error'])}


def _task(name: Any, last: Any, last_success: Any, last_error: Any,
          last_success_run: Any = None) -> tuple[str, Fields]:
    """Parse a task's entry in the file, which any user may have written.

    :raises KeyError, TypeError, ValueError: if the entry is invalid
    """
    _need(isinstance(name, str) and len(name) <= _MAX_NAME, 'name')
    if last_success_run is None and last['finished'] == last_success:
        last_success_run = last
    return name, {
        'last': _run(last),
        'last_success_run': (None if last_success_run is None
                             else _run(last_success_run)),
        'last_success': (None if last_success is None
                         else _moment(last_success, 'last success')),
        'last_error': None if last_error is None else {
            'time': _moment(last_error['time'], 'time'),
            'text': _error(last_error['text']) or ''}}


def decode(content: bytes) -> dict[str, Fields]:
    """The tasks of a file.

    :raises ValueError: if the file is invalid; the message has the reason
    """
    return dict(imagelist.decode(
        content, _KIND, MAX_SIZE,
        lambda **fields: _task(**fields), of='tasks')[:_MAX_COUNT])


def encode(runs: dict[str, Fields]) -> bytes:
    """The file's content."""
    return imagelist.encode(_KIND, (
        {'name': name, **_short(facts)} for name, facts in runs.items()),
        of='tasks')


def _short(facts: Fields) -> Fields:
    """A task's entry without a success that is the last run anyway.

    Versions before this field take no entry that has it.
    """
    if facts['last_success_run'] in (None, facts['last']):
        facts = dict(facts)
        del facts['last_success_run']
    return facts


def _bounded(run: Fields) -> Fields:
    """Return a run without values that are too long for the file."""
    run = dict(run)
    if len(json.dumps(run['result'])) > MAX_RESULT:
        run['result'] = None
    if run['error'] is not None:
        run['error'] = run['error'][:MAX_ERROR]
    return run


class Past:
    """The last runs of the tasks. Thread-safe.

    :param path: the repository's path
    """

    def __init__(self, path: str) -> None:
        self._root = path
        self._path = os.path.join(path, NAME)
        self._mutex = threading.Lock()
        self._runs: dict[str, Fields] = {}
        self._dirty = False
        self._told = False      # a failure to write was logged

    def load(self, names: Iterable[str]) -> list[Fields]:
        """Read what other processes wrote about these tasks.

        :returns: the last error of each, in their order
        """
        try:
            found = decode(files.read_file(self._path, MAX_SIZE + 1))
        except FileNotFoundError:
            return []
        except (OSError, ValueError, exceptions.DamagedError) as e:
            LOG.warning('%s is invalid: %s. The last runs of the tasks are '
                        'not known; the next run writes the file again.',
                        self._path, str(e)[:200])
            return []
        with self._mutex:
            names = [name for name in names
                     if name in found and name not in self._runs]
            self._runs.update((name, found[name]) for name in names)
        errors = ({'task': name, **found[name]['last_error']}
                  for name in names if found[name]['last_error'])
        return sorted(errors, key=lambda error: error['time'])

    def facts(self, name: str) -> Fields:
        """A task's ``last`` run, the last success, and its time.

        Unknown values are None.
        """
        with self._mutex:
            facts = self._runs.get(name, {})
            return {key: facts.get(key) for key in
                    ('last', 'last_success', 'last_success_run')}

    def note(self, name: str, last: Fields,
             last_success_run: Fields | None) -> None:
        """Note that a run has ended. The next `save` writes it.

        :param last_success_run: None: this process saw no success
        """
        last = _bounded(last)
        with self._mutex:
            before = self._runs.get(name, {})
            last_error = before.get('last_error')
            success = {key: before.get(key) for key in
                       ('last_success', 'last_success_run')}
            if last_success_run is not None:
                success = {'last_success': last_success_run['finished'],
                           'last_success_run': _bounded(last_success_run)}
            if last['error'] is not None:
                last_error = {'time': last['finished'], 'text': last['error']}
            self._runs[name] = {
                'last': last, 'last_error': last_error, **success}
            self._dirty = True

    def save(self) -> None:
        """Write the file if it has changed.

        REQUIRES: this process holds the maintainer's lock, so that no other
        process writes the file.
        """
        with self._mutex:
            if not self._dirty:
                return
            self._dirty = False
            content = encode(self._runs)
        try:
            files.replace_file(self._path, content,
                               access.file_mode(self._root))
        except OSError as e:
            self._dirty = True
            if not self._told:
                LOG.warning('%s cannot be written: %s. The daemon tries '
                            'again; if it ends before, the last runs of the '
                            'tasks are forgotten.', self._path, e.strerror)
            self._told = True
        else:
            self._told = False
