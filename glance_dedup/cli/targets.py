# SPDX-License-Identifier: Apache-2.0

"""Write an image to a file that a user names.

Others may write to the directory: /tmp is the usual one. So it is opened once,
everything in it is done by that descriptor, and the last part of the name is
never followed. The kernel's own protection of links in sticky directories
then holds for the directories above, which the kernel follows.
"""

import argparse
from collections.abc import Iterator
import contextlib
import errno
import os
import secrets
import stat
import typing

from glance_dedup.cli import common
from glance_dedup.cli import copying

if typing.TYPE_CHECKING:
    from glance_dedup.repository import openimages

#: Permissions of a new file: an image may hold the secrets of a server.
MODE = 0o600


def _mode(word: str) -> int:
    try:
        mode = int(word, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777:
        raise argparse.ArgumentTypeError(
            f'{word!r} is not a mode such as 640')
    return mode


def add_mode(parser: argparse.ArgumentParser) -> None:
    """Add the option --mode, which is None if it is not given."""
    parser.add_argument(
        '--mode', metavar='MODE', type=_mode,
        help='Permissions of the file, in octal. Default: 600, or those of '
        'the file of yours that it replaces.')


class Target:
    """A file that gets its name once it is whole and on the disk.

    :param file: its path
    :param force: replace a regular file
    :param mode: its permissions; None: 0600, or those of the file that is
        replaced if it has the same owner
    :param give_away: give it to the directory's owner, if root makes it
    """

    def __init__(self, file: str, force: bool, mode: int | None = None,
                 give_away: bool = False) -> None:
        if '\0' in file:
            raise common.UsageError("the file's name holds a NUL")
        self.file = file
        self._directory, self._name = os.path.split(file)
        self._force = force
        self._mode = mode
        self._give_away = give_away

    def require_allowed(self) -> None:
        """Check that the file may be written.

        :raises UsageError: it exists, and is not to be replaced, or its path
            names no file
        :raises OSError: that cannot be found out
        """
        try:
            found = os.lstat(self.file)
        except FileNotFoundError:
            found = None
        self._require_allowed(found)

    def _require_allowed(self, found: os.stat_result | None) -> None:
        if not self._name:
            raise common.UsageError(f'{self.file!r} names no file')
        if found is None:
            return
        if stat.S_ISLNK(found.st_mode):
            raise common.UsageError(
                f'{self.file} is a symbolic link, which is not followed: name '
                'the file to which it points')
        if not stat.S_ISREG(found.st_mode):
            raise common.UsageError(f'{self.file} is not a regular file')
        if not self._force:
            raise common.UsageError(
                f'{self.file} exists; --force would replace it')

    def write(self, image: 'openimages.Image', progress: copying.Progress
              ) -> None:
        """Write an image to the file.

        :raises UsageError: the file has appeared meanwhile
        :raises RepositoryError: the image cannot be read
        :raises OSError: the file cannot be written; it names the file
        """
        with self._errors(), self._opened() as parent:
            # A file system limits the bytes of a name, not its characters.
            name = os.fsdecode(os.fsencode(self._name)[:200])
            temporary = f'.{name}.{secrets.token_hex(8)}.new'
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL
                         | os.O_CLOEXEC, MODE, dir_fd=parent)
            try:
                with open(fd, 'wb', buffering=0) as f:
                    self.fill(f, image, progress)
                    self._set_owner_and_mode(fd, parent)
                    os.fsync(fd)
                self._give_name(temporary, parent)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=parent)
            os.fsync(parent)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            e.filename, e.filename2 = self.file, None
            raise

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        parent = os.open(self._directory or '.',
                         os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield parent
        finally:
            os.close(parent)

    def _found(self, parent: int) -> os.stat_result | None:
        try:
            return os.stat(self._name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def _set_owner_and_mode(self, fd: int, parent: int) -> None:
        mode = self._mode
        if mode is None:
            replaced = self._found(parent)
            ours = replaced is not None and (
                replaced.st_uid == os.fstat(fd).st_uid)
            mode = (stat.S_IMODE(replaced.st_mode)
                    if replaced is not None and ours else MODE)
        if self._give_away and os.geteuid() == 0:
            owner = os.fstat(parent)
            os.fchown(fd, owner.st_uid, owner.st_gid)
        os.fchmod(fd, mode)

    def _give_name(self, temporary: str, parent: int) -> None:
        if not self._force:
            try:
                # Unlike a rename, a link replaces no file that came meanwhile.
                os.link(temporary, self._name, src_dir_fd=parent,
                        dst_dir_fd=parent, follow_symlinks=False)
                return
            except FileExistsError:
                self._require_allowed(self._found(parent))
                raise
            except OSError as e:
                # FAT and similar file systems have no hard links.
                if e.errno not in (errno.EPERM, errno.EOPNOTSUPP,
                                   errno.ENOSYS):
                    raise
        self._require_allowed(self._found(parent))
        os.rename(temporary, self._name, src_dir_fd=parent,
                  dst_dir_fd=parent)

    def fill(self, f: typing.BinaryIO | typing.Any, image: 'openimages.Image',
             progress: copying.Progress) -> None:
        """Write an image's bytes to an open file, with holes for zeros."""
        with copying.Copier(f.fileno(), image, progress) as copier:
            for start, end in copying.filled_ranges(image):
                copier.copy(start, end)
        f.truncate(image.size)
        progress.update(image.size)
