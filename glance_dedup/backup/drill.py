# SPDX-License-Identifier: Apache-2.0

"""Restore drills: backups are read as for a restore, and compared.

The engine verifies each block by its fingerprint. Besides, the bytes are
compared with digests that were computed elsewhere: those of the disk's
segments, which its host computed from the disk when it was backed up, where
the newest backup has them (``digests.py``); and the hash of the whole disk
that an earlier drill has recorded. The first drill records it.
"""

from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import os
import random
import re

from glance_dedup.backup import digests
from glance_dedup.backup import views
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import hashes
from glance_dedup.base import imageids
from glance_dedup.repository import image_repository

_HASH = 'sha256'
_MODE = 0o644
_PREFIX = 'glance_dedup_backup_drill_'
#: The metrics' names and help texts.
METRICS = {
    f'{_PREFIX}last_success_timestamp_seconds':
        'When a restore drill last found no fault, in seconds since the '
        'epoch.',
    f'{_PREFIX}disks': 'Disks that the last restore drill has read.',
    f'{_PREFIX}failed_disks': 'Those of them in which it found a fault.',
}
_MAX_SIZE = 1 << 16


@dataclasses.dataclass
class Drilled:
    """Result of the drill of a backup."""

    backup: imageids.Backup
    size: int = 0
    compared: int = 0
    """Bytes that were compared with digests of the disk."""
    hash_value: str = ''
    error: Exception | None = None


def sample(backups: Sequence[imageids.Backup], count: int
           ) -> list[imageids.Backup]:
    """Return so many of the backups, at random, in order."""
    return sorted(random.SystemRandom().sample(
        backups, min(count, len(backups))))


def restore(repository: image_repository.Repository, backup: imageids.Backup,
            state: str, progress: Callable[[int], None]) -> Drilled:
    """Read a whole backup, and compare it.

    :param state: the state directory of this host
    :param progress: called with the bytes read so far
    """
    result = Drilled(backup)
    try:
        with repository.open_image(backup.image_id) as image:
            result.size = image.size
            with digests.Known.of_backup(
                    os.path.join(state, repository.repository_id,
                                 f'{backup.name}.digests'),
                    repository.repository_id, views.Base(
                        backup.image_id, image.stat.upload_id)) as known:
                found = hashes.compute(
                    image, _HASH, progress,
                    functools.partial(_compare, result, known), views.SEGMENT)
            result.hash_value = found.value
            hashes.record(repository.path, image.stat, found)
    except exceptions.RepositoryError as e:
        result.error = e
    return result


def _compare(result: Drilled, known: digests.Known, offset: int, data: bytes
             ) -> None:
    """Compare a segment with the digest of the disk's, if that is known.

    :raises DamagedError: it is another
    """
    number = offset // views.SEGMENT
    if not known.fits(number, data):
        raise exceptions.DamagedError(
            f'{result.backup.image_id} differs from the disk that was backed '
            f'up, between {offset} and {offset + len(data)}: keep it, back '
            'the disk up again, and check the memory of the host')
    if known.get(number):
        result.compared += len(data)


def write_metrics(path: str, disks: int, failed: int, now: float) -> None:
    """Replace a file of the node exporter's textfile collector.

    If disks failed, the time of the last success stays as the file has it.

    :param path: absolute
    :raises StorageError, NoSpaceError, AccessDenied: it cannot be written
    """
    with files.os_errors(f'cannot write {path}'):
        success = _last_success(path) if failed else int(now)
        lines = []
        for (name, text), value in zip(METRICS.items(),
                                       (success, disks, failed), strict=True):
            if value is not None:
                lines += [f'# HELP {name} {text}', f'# TYPE {name} gauge',
                          f'{name} {value}']
        files.replace_file(path, ('\n'.join(lines) + '\n').encode(), _MODE)


def _last_success(path: str) -> int | None:
    name = next(iter(METRICS))
    with contextlib.suppress(FileNotFoundError):
        found = re.search(f'^{name} ([0-9]{{1,12}})$'.encode(),
                          files.read_file(path, _MAX_SIZE), re.MULTILINE)
        return found and int(found[1])
    return None
