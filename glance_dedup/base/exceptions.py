# SPDX-License-Identifier: Apache-2.0

"""Errors of a repository, one class for each kind.

The engine raises these itself: a table in ``binding/common.c`` maps its status
to these classes.  Each message is a sentence on the event, and names the
image or file.
"""


class RepositoryError(Exception):
    """Base of everything that a repository raises on purpose.

    :ivar errno: the system's error number where a system call failed, else 0
    """

    errno = 0


class StorageError(RepositoryError):
    """The disk or the file system failed (EIO and its kin)."""


class DamagedError(RepositoryError):
    """A file contradicts its checksums or ids; its bytes are not used."""


class NoSpaceError(RepositoryError):
    """The disk or the quota is full."""


class ImageNotFound(RepositoryError):
    """No such image, or no such file of the repository."""


class RepositoryNotFound(ImageNotFound):
    """There is no repository where one is named."""


class ImageExists(RepositoryError):
    """The image id is taken by a committed image."""


class BusyError(RepositoryError):
    """Another process held a lock for longer than the time limit."""


class LostLocks(RepositoryError):
    """The server dropped this process's locks, and others may have them."""


class NoThread(RepositoryError, RuntimeError):
    """The system lets this process start no thread now."""


class VersionError(RepositoryError):
    """This program does not know the format's version, or a feature of it."""


class InvalidParameter(RepositoryError, ValueError):
    """An argument or option is out of its bounds."""


class AccessDenied(RepositoryError):
    """The operating system refuses access."""


class UnfitFileSystem(RepositoryError):
    """The file system lacks a property needed for sharing it."""


class UnavailableError(RepositoryError):
    """Something that is needed cannot be reached now.

    It is neither lost nor damaged, as far as is known.
    """


class ClosedError(RepositoryError):
    """The handle was closed, or inherited over a fork."""


#: The exceptions for a recipe, or a group, that cannot be read, now or ever.
UNREADABLE = DamagedError, StorageError, VersionError, AccessDenied
