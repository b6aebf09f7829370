# SPDX-License-Identifier: Apache-2.0

"""The problems in a status: codes and sentences for an operator.

The status page and ``glance-dedup status`` show them. The alert rules for
Prometheus use the same figures. A code stays when its sentence changes;
the guide's page on troubleshooting lists all of them.
"""

from collections.abc import Iterator
from typing import Any

from dedupd.status import forecast
from glance_dedup.base import units

CRITICAL = forecast.CRITICAL
WARNING = forecast.WARNING

#: The severity of each problem, by its code.
CODES = {
    'DATA_DAMAGED': CRITICAL,
    'RECIPE_UNREADABLE': CRITICAL,
    'VOLUME_BROKEN': CRITICAL,
    'CATALOG_FAILED': CRITICAL,
    'CATALOG_REBUILDING': WARNING,
    'NO_MAINTAINER': WARNING,
    'MAINTENANCE_WARNING': WARNING,
    'TASK_FAILED': WARNING,
    'NO_INDEX': WARNING,
    'FILESYSTEM_UNTESTED': WARNING,
    **forecast.CODES,
}

Fields = dict[str, Any]


def found_in(status: Fields) -> list[Fields]:
    """The problems in a status, the critical ones first.

    Each has a ``code`` of `CODES`, a ``severity``, which is `CRITICAL` or
    `WARNING`, and a ``text``.

    :param status: of a daemon, or of a repository without one, which lacks
        parts
    """
    found = [{'code': code, 'severity': CODES[code], 'text': text}
             for look in (_damage, _unreadable, _filter, _trial, _catalog,
                          _volumes, _tasks, _space)
             for code, text in look(status)]
    return sorted(found, key=lambda problem: problem['severity'] != CRITICAL)


Problems = Iterator[tuple[str, str]]


def _part(status: Fields, name: str) -> Fields:
    return status.get(name) or {}


def _damage(status: Fields) -> Problems:
    damage = _part(status, 'damage')
    blocks = damage.get('blocks') or 0
    users = [units.count(len(damage.get(name) or ()), name[:-1])
             for name in ('images', 'volumes') if damage.get(name)]
    if blocks:
        yield 'DATA_DAMAGED', (
            f'{units.count(blocks, "block")} damaged, used by '
            f'{" and ".join(users) or "no image"}.')
    elif users:
        yield 'DATA_DAMAGED', f'{" and ".join(users)} damaged.'


def _unreadable(status: Fields) -> Problems:
    names = _part(status, 'names')
    for image_id, why in _part(_part(status, 'catalog'),
                               'unreadable').items():
        named = f' ({names[image_id]})' if image_id in names else ''
        yield 'RECIPE_UNREADABLE', (
            f'The recipe of image {image_id}{named} cannot be read, so '
            f'nothing is freed: {why}')


def _filter(status: Fields) -> Problems:
    error = _part(status, 'filter').get('filter_error')
    if error:
        yield 'NO_INDEX', (
            'There is no fingerprint filter on this host, so new images are '
            f'stored without finding duplicates: {error}')


def _trial(status: Fields) -> Problems:
    trial = _part(_part(status, 'repository'), 'trial')
    if trial.get('valid') is False:
        yield 'FILESYSTEM_UNTESTED', (
            "Other hosts may use the file system, and this host's mount is "
            f'{trial["verdict"]}: run "glance-dedup repository '
            'test-filesystem" on two hosts at the same time.')


def _catalog(status: Fields) -> Problems:
    catalog = _part(status, 'catalog')
    if catalog.get('state') == 'failed':
        yield 'CATALOG_FAILED', 'The catalog has failed; nothing is freed.'
    elif catalog.get('state') == 'rebuilding':
        yield 'CATALOG_REBUILDING', (
            'The catalog is being rebuilt; nothing is freed meanwhile, and '
            'some figures are missing.')
    if _part(status, 'repository').get('maintained') is False:
        yield 'NO_MAINTAINER', (
            'No process maintains the repository, so nothing is freed: start '
            'dedupd. If it runs, its log has the reason.')
    for warning in catalog.get('warnings') or ():
        yield 'MAINTENANCE_WARNING', str(warning)


def _volumes(status: Fields) -> Problems:
    broken = _part(status, 'volumes').get('broken') or 0
    if broken:
        yield 'VOLUME_BROKEN', f'{units.count(broken, "volume")} broken.'


def _tasks(status: Fields) -> Problems:
    for name, task in _part(status, 'tasks').items():
        error = _part(task, 'last').get('error')
        if error:
            yield 'TASK_FAILED', f'The task {name} failed: {error}'


def _space(status: Fields) -> Problems:
    space = _part(status, 'space')
    if all(space.get(name) is not None for name in forecast.NEEDED):
        found = forecast.trouble(space)
        if found is not None:
            yield found
