# SPDX-License-Identifier: Apache-2.0

"""The bytes of a repository: every one that ``du`` counts, by name.

The numbers of a group come from its entries, and from its file's size on the
disk; no block is read. Nothing is locked, so this may see a part of the
changes that others make meanwhile.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import os

from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.repository import image_repository
from glance_dedup.repository import layout

#: Bytes of a segment's header.
SEGMENT_HEADER = 32
#: Names of codecs; a codec's number is its index here.
CODECS = ('none', 'lz4', 'zstd')
#: Directories whose files are all of one kind, and the names of their parts.
_DIRECTORIES = {'images': 'recipes', 'spool': 'recipes in flight',
                'catalog': 'catalog', 'index': 'exact index',
                'spares': 'spare copies',
                'quarantine': 'quarantine',
                layout.SLICES: 'cache of cold groups',
                layout.VOLUMES: 'journals of volumes'}


@dataclasses.dataclass
class Part:
    """Some of a repository's bytes."""

    name: str
    bytes: int = 0
    """Bytes of the disk, or of the object store."""
    plain_bytes: int | None = None
    """Bytes of the live blocks before compression; None: not blocks."""
    is_local: bool = True
    """Whether they are on the disk."""


def parts(repo: image_repository.Repository,
          progress: Callable[[int, int], None] = lambda done, total: None,
          unreadable: Callable[[Exception], None] = lambda error: None
          ) -> list[Part]:
    """All parts of a repository.

    The sum of the local ones is its size on the disk.

    :param progress: called as `progress(done, total)`, in groups
    :param unreadable: called for each group that cannot be read; its bytes of
        the disk are then in the part 'not known'
    """
    blocks = [Part(f'blocks, {codec}', plain_bytes=0) for codec in CODECS]
    headers, stores = Part('segment headers'), Part('fingerprint stores')
    dead, unknown = Part('dead, or rounded up'), Part('not known')
    cold = Part('cold groups, in objects', plain_bytes=0, is_local=False)
    numbers = []
    with contextlib.closing(
            _engine.Maintenance(repo.handle())) as engine:
        numbers = engine.groups()
        for done, number in enumerate(numbers):
            with contextlib.suppress(exceptions.ImageNotFound):
                try:
                    used = engine.group_space(number)
                except (exceptions.DamagedError, exceptions.StorageError,
                        exceptions.VersionError) as e:
                    unreadable(e)
                    unknown.bytes += _disk_bytes(os.path.join(
                        repo.path, 'groups', f'{number:08x}'))
                else:
                    if used['is_cold']:
                        cold.bytes += engine.group_facts(number)['end']
                        used = _local(used, cold)
                    _add_group(used, blocks, headers, stores, dead)
            progress(done + 1, len(numbers))
    found = [*blocks, headers, dead, stores, *_others(repo.path)]
    return [part for part in [*found, unknown, cold] if part.bytes]


def taken(path: str) -> int:
    """A repository's bytes of the disk, as du counts them; quick."""
    return _disk_bytes(path) + below(path) - _twice(path)


def _local(used: dict, cold: Part) -> dict:
    """Return the local figures of a cold group; its blocks are elsewhere."""
    assert cold.plain_bytes is not None
    cold.plain_bytes += sum(used['plain'])
    none = [0] * len(CODECS)
    return used | {'plain': none, 'stored': none, 'segments': 0}


def _add_group(used: dict, blocks: list[Part], headers: Part, stores: Part,
               dead: Part) -> None:
    for part, plain, stored in zip(blocks, used['plain'], used['stored']):
        part.bytes += stored
        part.plain_bytes += plain
    here = SEGMENT_HEADER * used['segments']
    # The store of an empty last group is a hole.
    store = min(used['store'], used['allocated'])
    headers.bytes += here
    stores.bytes += store
    dead.bytes += used['allocated'] - store - here - sum(used['stored'])


def _others(path: str) -> list[Part]:
    """The parts that are not in groups."""
    named = {name: Part(name) for name in (
        *_DIRECTORIES.values(), 'reserve', 'others')}
    others = named['others']
    others.bytes += _disk_bytes(path)
    for entry in os.scandir(path):
        size = _disk_bytes(entry.path)
        if entry.name.startswith(layout.CATALOG_RESERVE):
            named['reserve'].bytes += size
        elif entry.name in _DIRECTORIES:
            named[_DIRECTORIES[entry.name]].bytes += size + below(entry.path)
        elif entry.name == 'groups':
            others.bytes += size    # its files are counted one by one
        else:
            others.bytes += size + below(entry.path)
    # One file under two names is counted once, as du does.
    named['recipes in flight'].bytes -= _twice(path)
    return list(named.values())


def _disk_bytes(path: str) -> int:
    with contextlib.suppress(FileNotFoundError):
        return os.lstat(path).st_blocks * 512
    return 0


def below(path: str) -> int:
    """The bytes of the disk of all files and directories below this one."""
    return sum(_disk_bytes(os.path.join(directory, name))
               for directory, directories, files in os.walk(path)
               for name in (*directories, *files))


def of_tree(path: str) -> int:
    """The bytes of the disk of a file, or of a directory and all below it."""
    return _disk_bytes(path) + below(path)


def _twice(path: str) -> int:
    """Bytes of files that have names in both images/ and the spool."""
    with os.scandir(os.path.join(path, 'images')) as entries:
        images = {entry.inode() for entry in entries}
    seen: set[int] = set()
    size = 0
    for entry in os.scandir(os.path.join(path, 'spool')):
        if entry.inode() in images or entry.inode() in seen:
            size += _disk_bytes(entry.path)
        seen.add(entry.inode())
    return size
