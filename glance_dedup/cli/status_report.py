# SPDX-License-Identifier: Apache-2.0

"""A status as a page of text, which ``glance-dedup status`` shows.

Every value comes from a daemon and may have any type, so each part does
without those that it cannot use.
"""

from collections.abc import Callable
from collections.abc import Iterator
import time
from typing import Any

from glance_dedup.base import printable
from glance_dedup.base import units

_WIDTH = 79
_BAR = 30
_MAX_IMAGES = 10
#: Tasks that are not shown before they run.
_ON_REQUEST = ('tier', 'usage', 'rebuild-catalog')

Fields = dict[str, Any]


def page(status: Fields, now: float | None = None) -> str:
    """The text; lines end with a newline.

    :param status: a daemon's, or a repository's without one
    :param now: seconds since 1970
    """
    look = _Overview(status, time.time() if now is None else now)
    return '\n'.join(printable.printable(line) for line in look.lines()) + '\n'


class _Overview:
    def __init__(self, status: Fields, now: float) -> None:
        self._status = status
        self._now = now

    def lines(self) -> Iterator[str]:
        """All lines of the page."""
        yield from self._head()
        for title, part in (
                ('Damaged images', self._damaged), ('Space', self._space),
                ('Maintenance', self._tasks),
                ('Volumes', self._volumes), ('Hosts', self._hosts),
                ('Reads', self._reads), ('Filter', self._filter),
                ('Cache', self._cache), ('Replication', self._replication),
                ('Latest errors', self._errors)):
            lines = list(part())
            if lines:
                yield ''
                yield title
                yield from (f'  {line}' for line in lines)

    def _part(self, name: str) -> Fields:
        found = self._status.get(name)
        return found if isinstance(found, dict) else {}

    def _list(self, name: str) -> list[Fields]:
        found = self._status.get(name)
        return [entry for entry in found if isinstance(entry, dict)] if (
            isinstance(found, list)) else []

    # -- parts ----------------------------------------------------------------

    def _head(self) -> Iterator[str]:
        problems = self._list('problems')
        kinds = {problem.get('severity') for problem in problems}
        state = ('TROUBLE' if 'critical' in kinds else 'ATTENTION' if kinds
                 else 'healthy')
        path = str(self._part('repository').get('path'))
        yield f'{path:<{_WIDTH - len(state) - 1}} {state}'
        daemon = self._part('daemon')
        if daemon:
            yield (f'dedupd {daemon.get("version")} on {daemon.get("host")}, '
                   f'process {daemon.get("pid")}, {daemon.get("role")}, '
                   f'up for {self._since(daemon.get("started"))}'
                   + ('' if daemon.get('ready') else ', starting'))
        else:
            yield 'no daemon answers'
        for problem in problems:
            mark = '!!' if problem.get('severity') == 'critical' else ' !'
            yield f'{mark} {problem.get("code")}: {problem.get("text")}'

    def _damaged(self) -> Iterator[str]:
        found = self._part('damage').get('images')
        images = found if isinstance(found, list) else []
        names = self._part('names')
        for image_id in images[:_MAX_IMAGES]:
            yield f'{image_id} {names.get(str(image_id)) or ""}'.rstrip()
        if len(images) > _MAX_IMAGES:
            yield f'and {len(images) - _MAX_IMAGES} more'

    def _space(self) -> Iterator[str]:
        space = self._part('space')
        counts = [_count(number, noun)
                  for noun in ('image', 'backup', 'volume')
                  if (number := space.get(f'{noun}s'))]
        yield _row('holds', ', '.join(counts) or '-')
        if space.get('uncounted'):
            yield _row('', f'{space["uncounted"]} more, in no figure until '
                       'dedupd has counted')
        yield _row('logical', f'{_size(space.get("logical_bytes"))}, of which '
                   f'{_size(space.get("nonzero_bytes"))} are not zeros')
        yield _row('stored', f'{_size(space.get("disk_bytes"))}, of which '
                   f'{_size(space.get("metadata_bytes"))} are metadata')
        if space.get('object_bytes'):
            yield _row('', f'{_size(space["object_bytes"])} in the object '
                       'store')
        if space.get('disks'):
            yield _row('', f'{_count(space["disks"], "image")} kept as disks, '
                       f'whose files have {_size(space.get("derived_bytes"))} '
                       'that are not stored')
        yield _row('saved', f'{_percent(space.get("saved_percent"))} of what '
                   'is not zeros')
        yield from self._disk(space)

    def _disk(self, space: Fields) -> Iterator[str]:
        free, whole = (space.get(f'filesystem_{name}')
                       for name in ('free_bytes', 'bytes'))
        if not whole or free is None:
            return
        used = 1 - free / whole
        full = round(used * _BAR)
        yield _row('disk', f'[{"#" * full}{"." * (_BAR - full)}] '
                   f'{100 * used:.0f} % of {_size(whole)} used')
        yield _row('', f'{_size(free)} free; storing stops at '
                   f'{_size(space.get("reserve_bytes"))}')
        left = space.get('full_in_seconds')
        if left:
            yield _row('', f'which will be in {_of(left, units.duration)}, '
                       'if it goes on as in the last days')

    def _tasks(self) -> Iterator[str]:
        for name, task in self._part('tasks').items():
            if isinstance(task, dict) and not (
                    name in _ON_REQUEST and task.get('state') == 'idle'
                    and not task.get('last') and not task.get('next')):
                yield _row(name, self._task(task), 16)

    def _task(self, task: Fields) -> str:
        if task.get('state') == 'running':
            return _progress(task)
        words = []
        last = task.get('last')
        if isinstance(last, dict):
            outcome = 'failed' if last.get('error') else 'done'
            words.append(f'{outcome} {self._since(last.get("finished"))} ago'
                         f'{_result(last.get("result"))}')
        else:
            words.append('not run yet')
        if task.get('state') == 'waiting':
            words.append('waits for its turn')
        elif task.get('next'):
            left = task['next'] - self._now
            words.append('next now' if left < 1 else
                         f'next in {units.duration(left)}')
        return '; '.join(words)

    def _volumes(self) -> Iterator[str]:
        volumes = self._part('volumes')
        if not self._part('space').get('volumes'):
            return
        yield _row('in use', f'{volumes.get("in_use")} of '
                   f'{self._part("space")["volumes"]}, together '
                   f'{_size(volumes.get("size_bytes"))}')
        yield _row('written', f'{_size(volumes.get("written_bytes"))}, '
                   f'{_percent(volumes.get("duplicate_percent"))} of it '
                   'duplicates; '
                   f'{_size(self._part("space").get("journal_bytes"))} in '
                   'journals')

    def _hosts(self) -> Iterator[str]:
        hosts = self._part('hosts')
        if len(hosts) > 1:
            for number, host in hosts.items():
                if isinstance(host, dict):
                    yield _row(f'{number}: {host.get("host") or "?"}',
                               ', '.join(map(str, host.get('tasks') or ()))
                               or '-', 24)

    def _reads(self) -> Iterator[str]:
        reads = self._part('reads')
        if reads:
            yield _row('HTTP', _count(reads.get("connections"), "connection")
                       + f'; {_count(reads.get("requests"), "request")}, '
                       f'{_size(reads.get("bytes"))} sent')
            nbd = self._part('nbd')
            if nbd.get('socket'):
                yield _row('NBD', _count(nbd.get("exports"), "export")
                           + f'; {_count(nbd.get("requests"), "request")}, '
                           f'{_size(nbd.get("bytes"))} sent')

    def _filter(self) -> Iterator[str]:
        found = self._part('filter')
        if found.get('filter_bytes'):
            complete = ('complete' if found.get('filter_complete')
                        else 'still reading what is stored')
            yield (f'{_size(found["filter_bytes"])}, '
                   f'{_count(found.get("filter_hints"), "hint")}, {complete}')

    def _cache(self) -> Iterator[str]:
        cache = self._part('cache')
        held = cache.get('held')
        if isinstance(held, dict):
            limit = held.get('limit_bytes')
            yield (f'{_count(held.get("images"), "image")}; limit '
                   f'{_size(limit) if limit else "the disk"}; '
                   f'{cache.get("under_way")} arriving')

    def _replication(self) -> Iterator[str]:
        found = self._part('replication')
        if found:
            pending = _count(found.get('pending'), 'image')
            yield (f'to {found.get("target_url")}: {pending} to send, '
                   f'{found.get("replicated")} sent since the start '
                   f'({_size(found.get("sent_bytes"))})')

    def _errors(self) -> Iterator[str]:
        for error in self._list('errors'):
            yield (f'{self._since(error.get("time"))} ago, '
                   f'{error.get("task")}: {error.get("text")}')

    def _since(self, moment: Any) -> str:
        return _of(moment, lambda m: units.duration(max(0, self._now - m)))


# -- words --------------------------------------------------------------------

def _row(name: str, text: str, width: int = 10) -> str:
    return f'{name:<{width}} {text}'


def _of(number: Any, word: Callable[[float], str]) -> str:
    """The words for a number; for all else, that it is not known."""
    is_known = isinstance(number, (int, float)) and not isinstance(number,
                                                                   bool)
    return word(number) if is_known else '-'


def _size(number: Any) -> str:
    return _of(number, units.size)


def _count(number: Any, noun: str) -> str:
    return _of(number, lambda n: units.count(int(n), noun))


def _percent(number: Any) -> str:
    return _of(number, lambda n: f'{n:.1f} %')


def _progress(task: Fields) -> str:
    done, total = task.get('done'), task.get('total')
    words = ['running']
    if isinstance(done, int) and isinstance(total, int) and total > 0:
        words.append(f'{100 * min(done, total) // total} %')
    if task.get('what'):
        words.append(str(task['what']))
    left = task.get('seconds_left')
    if left is not None:
        words.append(f'{_of(left, units.duration)} left')
    return ', '.join(words)


def _result(result: Any) -> str:
    """The figures of a result that are not zero, in brackets."""
    if not isinstance(result, dict):
        return ''
    words = [f'{name.removesuffix("_bytes").replace("_", " ")} '
             f'{_size(value) if name.endswith("bytes") else value}'
             for name, value in result.items()
             if isinstance(value, (int, float)) and value
             and not isinstance(value, bool)]
    return f' ({", ".join(words[:3])})' if words else ''
