# SPDX-License-Identifier: Apache-2.0

"""Objects that the end of a ``with`` block closes."""

from typing import Any
from typing import Self


class Closing:
    """Base of classes with ``close``, for use in a ``with`` block."""

    def close(self) -> None:
        """Release what the object holds. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()
