# SPDX-License-Identifier: Apache-2.0

"""Notes of a daemon for the maintainer, and for itself: ``helpers/``.

A daemon that is no maintainer may change nothing in a group's file (I4), and
has no catalog. So it notes which blocks it could not verify, and which groups
it could not make smaller, in a file of its own. The maintainer reads these
files, and acts on them. The file also has the daemon's cursor.

All of it is a hint: the maintainer verifies again whatever it finds there, and
a lost file costs one more pass. So an invalid file is forgotten. A file has
the number that its daemon has in ``locks/hosts``, so only one daemon writes
it, and the next one with that number goes on with it.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import errno
import os
import re
import stat
from typing import Any

from glance_dedup.base import access
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import live_hosts

DIRECTORY = 'helpers'
KIND = 'glance-dedup helper'
#: The most bytes of a file.
MAX_SIZE = 1 << 20
#: The most blocks, groups and unreadable groups that a file names.
MAX_FOUND = 4096
MAX_RETAINED = 16384
MAX_UNREADABLE = 256

_MAX_TEXT = 300
_NAME = re.compile(r'(0|[1-9][0-9]?)\.json')
#: The fields of the cursor, with the values of a pass that begins.
_CURSOR: dict[str, Any] = {
    'started': 0.0, 'complete': True, 'group': 0, 'slot': 0, 'blocks': 0,
    'bytes': 0, 'damaged': 0, 'worn': 0}


@dataclasses.dataclass
class Notes:
    """The content of a file."""

    host: str = ''
    """Name of the daemon's host, for people."""
    program: str = ''
    """Version of the daemon's program, for people; empty: not noted."""
    scrub: dict[str, Any] = dataclasses.field(
        default_factory=lambda: dict(_CURSOR))
    """Cursor and figures of the daemon's pass."""
    found: set[int] = dataclasses.field(default_factory=set)
    """Addresses of blocks that did not verify, or are marked as damaged."""
    unreadable: dict[int, str] = dataclasses.field(default_factory=dict)
    """Groups that cannot be read, each with its error."""
    kept: dict[int, tuple[int, int, bool]] = dataclasses.field(
        default_factory=dict)
    """Groups that hardly become smaller, each with the codec and level, as
    numbers, with which this was tried, and whether in the order of
    similarity."""

    def begin_scrub(self, now: float) -> None:
        """Begin a new pass.

        :param now: seconds since 1970
        """
        self.scrub = {**_CURSOR, 'started': now, 'complete': False}

    def encode(self) -> bytes:
        """The file's content."""
        return files.pack_json(
            KIND, host=self.host[:_MAX_TEXT],
            program=self.program[:_MAX_TEXT], scrub=self.scrub,
            found=sorted(self.found),
            unreadable=[[number, error[:_MAX_TEXT]] for number, error
                        in sorted(self.unreadable.items())],
            kept=[[number, codec, level, *([True] if similar else ())]
                  for number, (codec, level, similar)
                  in sorted(self.kept.items())])


def decode(content: bytes) -> Notes:
    """The notes in a file, which any user may have written.

    :raises ValueError: if the file is invalid; with the reason
    """
    try:
        fields = files.unpack_json(content, KIND, MAX_SIZE)
        cursor = {name: _number(fields['scrub'][name], type(value))
                  for name, value in _CURSOR.items()}
        return Notes(
            _text(fields['host']), _text(fields.get('program', '')), cursor,
            {_address(address) for address
             in _list(fields['found'], MAX_FOUND)},
            {_group(number): _text(error) for number, error
             in _list(fields['unreadable'], MAX_UNREADABLE)},
            dict(_kept(*row) for row in _list(fields['kept'], MAX_RETAINED)))
    except (KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f'it has not the notes of a daemon: {e!r}') from e


def _kept(number: Any, codec: Any, level: Any, similar: Any = False
          ) -> tuple[int, tuple[int, int, bool]]:
    """A row of the list of groups that hardly become smaller.

    Programs of format 1 and 2 know only the first three.
    """
    return _group(number), (_number(codec, int), _number(level, int),
                            _number(similar, bool))


def _number(value: Any, kind: type) -> Any:
    if kind is bool:
        if type(value) is not bool:
            raise TypeError('a truth value is none')
        return value
    if type(value) not in ((int, float) if kind is float else (int,)) or (
            not 0 <= value < 1 << 63):
        raise TypeError('a number is none, or out of bounds')
    return value


def _address(value: Any) -> int:
    if not block_addresses.is_address(_number(value, int)):
        raise TypeError('an address is none')
    return value


def _group(value: Any) -> int:
    return block_addresses.group_of(_address(
        block_addresses.address(_number(value, int), 0)))


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise TypeError('a text is none, or too long')
    return value


def _list(value: Any, longest: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > longest:
        raise TypeError('a list is none, or too long')
    return value


def path_of(root: str, number: int) -> str:
    """The path of a daemon's file.

    :param root: the repository's path
    """
    return os.path.join(root, DIRECTORY, f'{number}.json')


def _has_directory(root: str) -> bool:
    """Return whether there is the directory of the notes.

    :raises OSError: something else has its name, perhaps a link to elsewhere
    """
    path = os.path.join(root, DIRECTORY)
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, 'not a directory', path)
    return True


def load(root: str, number: int) -> Notes:
    """The notes of the daemon that has a number; empty ones if there are none.

    :raises OSError: as its name says
    """
    with contextlib.suppress(FileNotFoundError, ValueError):
        if _has_directory(root):
            return decode(files.read_file(path_of(root, number), MAX_SIZE + 1))
    return Notes()


def save(root: str, number: int, content: bytes) -> None:
    """Write a daemon's notes, durably and whole, or not at all.

    REQUIRES: this process has the number.

    :param content: from :meth:`Notes.encode`
    :raises OSError: as its name says
    """
    if not _has_directory(root):
        access.make_directory(os.path.join(root, DIRECTORY),
                              access.directory_mode(root))
        files.sync_directory(root)
    files.replace_file(path_of(root, number), content,
                       access.file_mode(root))


def contents(root: str) -> Iterator[tuple[int, bytes]]:
    """The content of each daemon's file, by the daemon's number.

    A file that cannot be read is left out.
    """
    try:
        names = (sorted(os.listdir(os.path.join(root, DIRECTORY)))
                 if _has_directory(root) else [])
    except OSError:
        return
    for name in names:
        match = _NAME.fullmatch(name)
        if match and int(match[1]) < live_hosts.MAX_COUNT:
            with contextlib.suppress(OSError, exceptions.DamagedError):
                yield int(match[1]), files.read_file(
                    os.path.join(root, DIRECTORY, name), MAX_SIZE + 1)
