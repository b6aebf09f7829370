# SPDX-License-Identifier: Apache-2.0

"""Closes objects and file descriptors at the end of a ``with`` block."""

from collections.abc import Iterator
import contextlib
import os
from typing import Any
from typing import Self


class Closing:
    """Base of classes with ``close``, for use in a ``with`` block."""

    def close(self) -> None:
        """Release the object's resources. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()


@contextlib.contextmanager
def descriptor(fd: int) -> Iterator[int]:
    """Close a file descriptor at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)
