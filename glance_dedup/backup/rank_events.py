# SPDX-License-Identifier: Apache-2.0

"""Check the events that ranks send the job, a line of JSON each.

Ranks run on other hosts. A host with false programs, disk or memory must not
end the backups of all others: a line that is no event is left out, and
named.
"""

from collections.abc import Callable
import json
from typing import Any

from glance_dedup.backup import limits
from glance_dedup.base import printable

# Characters of a text, such as an error with paths.
_MAX_TEXT = 1 << 16
_MAX_SHOWN = 200


def _is_text(value: Any) -> bool:
    return (isinstance(value, str) and len(value) <= _MAX_TEXT
            and '\0' not in value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


_Check = Callable[[Any], bool]
_OF_BACKUP: dict[str, _Check] = {
    'name': _is_text, 'source': _is_text, 'backup_id': _is_text,
    'size': _is_count, 'read': _is_count, 'stored': _is_count,
    'note': _is_text}
_EVENTS: dict[str, dict[str, _Check]] = {
    'unseen': {'name': _is_text, 'host': _is_text, 'error': _is_text},
    'source': {'name': _is_text, 'host': _is_text, 'size': _is_count,
               'written': _is_count},
    'view': {'name': _is_text, 'source': _is_text, 'identity': _is_text,
             'size': _is_count},
    'failed': {'name': _is_text, 'source': _is_text, 'error': _is_text},
    'backup': _OF_BACKUP,
    'stage': {'stage': _is_text},
    'progress': {'stage': _is_text, 'done': _is_count},
    'held': {'host': _is_text, **dict.fromkeys(limits.NAMES, _is_count)},
    'broken': {'host': _is_text, 'error': _is_text, 'expected': _is_bool},
    'notice': {'text': _is_text},
    'ended': {},
}


class FalseEvent(ValueError):
    """A line is no event of a rank; the message quotes it."""


def parse(line: bytes) -> dict[str, Any]:
    """Return the event of a line.

    :raises FalseEvent: it is none
    """
    try:
        event = json.loads(line)
        fields = _EVENTS[event['event']]
        is_good = _is_count(event['rank']) and all(
            check(event[name]) for name, check in fields.items())
    except (ValueError, KeyError, TypeError, RecursionError):
        is_good = False
    if not is_good:
        text = line[:_MAX_SHOWN].decode(errors='replace')
        raise FalseEvent('a rank told what no rank tells, which was left out: '
                         + printable.printable(text))
    return event
