# SPDX-License-Identifier: Apache-2.0

"""What can go wrong with a repository, one class per kind.

The engine raises these itself: ``binding/common.c`` has the one table from its
status to these classes.  Each message is a sentence that says what happened,
and to which image or file.
"""


class RepositoryError(Exception):
    """Base of everything that a repository raises on purpose.

    :ivar errno: the system's error number where a system call failed, else 0
    """

    errno = 0


class StorageError(RepositoryError):
    """The disk or the file system failed (EIO and its kin)."""


class DamagedError(RepositoryError):
    """A file is not what its checksums and ids say; its bytes are not used."""


class NoSpaceError(RepositoryError):
    """The disk or the quota is full."""


class ImageNotFound(RepositoryError):
    """No such image, or no such file of the repository."""


class ImageExists(RepositoryError):
    """The image id is taken by a committed image."""


class BusyError(RepositoryError):
    """A lock was not had within its time limit."""


class VersionError(RepositoryError):
    """The format has a newer major version than this program knows."""


class InvalidParameter(RepositoryError, ValueError):
    """An argument or option is out of its bounds."""


class AccessDenied(RepositoryError):
    """The operating system refuses access."""


class UnfitFileSystem(RepositoryError):
    """The file system lacks what several processes or hosts need."""


class ClosedError(RepositoryError):
    """The handle was closed, or inherited over a fork."""


#: What says that a recipe, or a group, cannot be read, for now or for ever.
UNREADABLE = DamagedError, StorageError, VersionError, AccessDenied
