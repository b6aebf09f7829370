# SPDX-License-Identifier: Apache-2.0

"""The reasons why images stay as they came: ``formats/<image id>``.

A file has the reason for one image, of one upload (F11). All of it is a hint:
a lost or invalid file costs one more try. Only the maintainer writes here, and
removes the files of images that are gone.

While the conversion of an image waits until its file is not read any more, the
time of the file's last change is that of the last read, to within a day.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import errno
import os
import stat
import time

from glance_dedup.base import access
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import imageids
from glance_dedup.base import package_version
from glance_dedup.base import printable

DIRECTORY = 'formats'
_KIND = 'glance-dedup format verdict'
_MAX_SIZE = 4096
_MAX_REASON = 300
_DAY = 86400


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The reason why an image stays as it came."""

    upload_id: str
    reason: str
    is_wish: bool = False
    """An operator wants it so. Otherwise another version of the program may
    find otherwise, and tries again."""
    since: float | None = None
    """If the conversion waits: when the file was read last, or this began;
    seconds since 1970."""


def _directory(root: str) -> str:
    """The path of the directory.

    :raises OSError: it is missing, or something else has its name, perhaps a
        link to elsewhere
    """
    path = os.path.join(root, DIRECTORY)
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, 'not a directory', path)
    return path


def read(root: str, image_id: str, upload_id: str) -> Verdict | None:
    """The verdict on this upload of an image that holds for this program.

    :param root: the repository's path
    :param upload_id: hexadecimal digits
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError,
                             AttributeError, RecursionError,
                             exceptions.DamagedError):
        path = os.path.join(_directory(root), image_id)
        fields = files.unpack_json(files.read_file(path, _MAX_SIZE + 1),
                                   _KIND, _MAX_SIZE)
        reason, is_wish, waits = (
            fields[name] for name in ('reason', 'is_wish', 'waits'))
        if (fields['upload_id'] == upload_id and isinstance(reason, str)
                and isinstance(is_wish, bool) and isinstance(waits, bool)
                and (is_wish or waits
                     or fields['program'] == package_version.version())):
            return Verdict(
                upload_id, printable.printable(reason)[:_MAX_REASON], is_wish,
                os.stat(path).st_mtime if waits else None)
    return None


def note_read(root: str, image_id: str) -> None:
    """Note that the file of an image is read, if its conversion waits.

    That takes a look at one file, and once a day a change of its time. What
    fails, or is late, makes the conversion come earlier at most.
    """
    with contextlib.suppress(OSError):
        path = os.path.join(root, DIRECTORY, image_id)
        age = time.time() - os.stat(path, follow_symlinks=False).st_mtime
        if not 0 <= age < _DAY:
            os.utime(path, follow_symlinks=False)


def write(root: str, image_id: str, verdict: Verdict) -> None:
    """Write the verdict on an image.

    REQUIRES: this process is the maintainer.

    :raises OSError: as its name says
    """
    try:
        path = _directory(root)
    except FileNotFoundError:
        access.make_directory(os.path.join(root, DIRECTORY),
                              access.directory_mode(root))
        path = _directory(root)
    name = os.path.join(path, image_id)
    files.replace_file(
        name, files.pack_json(
            _KIND, upload_id=verdict.upload_id,
            reason=verdict.reason[:_MAX_REASON], is_wish=verdict.is_wish,
            waits=verdict.since is not None,
            program=package_version.version()),
        access.file_mode(root), files.temporary_of(name))


def remove(root: str, image_id: str) -> None:
    """Forget the verdict on an image, if there is one.

    :raises OSError: as its name says
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(_directory(root), image_id))


def prune(root: str, exists: Callable[[str], bool]) -> None:
    """Remove the files of images that are gone, and what a kill left.

    REQUIRES: this process is the maintainer.

    :param exists: returns whether there is an image of an id
    :raises OSError: as its name says
    """
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(_directory(root)):
            if files.TEMPORARY.fullmatch(name) or (
                    imageids.is_valid(name) and not exists(name)):
                remove(root, name)
