# SPDX-License-Identifier: Apache-2.0

"""Recipes whose blocks are not known: they are unreadable, or lost.

While there is one, nothing may be freed anywhere (I9): its blocks may look
unneeded.
"""

import contextlib
import os

from glance_dedup import _engine
from glance_dedup.base import exceptions


class Unreadable:
    """The unreadable and lost recipes of a repository.

    The maintainer's thread changes it. Any thread may call :meth:`reasons`.

    :param path: the repository's
    :ivar lost: counted images whose recipes are neither in images/ nor in the
        spool: image ids by transaction ids
    """

    def __init__(self, path: str, engine: _engine.Maintenance) -> None:
        self._root = path
        self._engine = engine
        # By image id, or name in the spool: path, inode, and the problem.
        self._noted: dict[str, tuple[str, int, str]] = {}
        self.lost: dict[bytes, str] = {}

    def clear(self) -> None:
        """Forget everything, since all recipes will be read again."""
        self._noted.clear()
        self.lost.clear()

    def note(self, name: str, error: str | None) -> None:
        """Remember a file whose blocks are unknown and not counted.

        :param name: the file's path, relative to the repository
        :param error: the file's problem; None: it has no header
        """
        inode = self._inode(name)
        if inode is not None:
            self._noted[name.removeprefix('images/')] = (
                name, inode, error or f'{name} has no header')

    def note_counted(self, image_id: str) -> None:
        """Note that an image is counted, whether it can be read or not."""
        self._noted.pop(image_id, None)

    def images(self) -> list[str]:
        """The unreadable images, without lost ones."""
        return [key for key, (name, _, _) in list(self._noted.items())
                if name.startswith('images/')]

    def __contains__(self, key: str) -> bool:
        return key in self._noted

    def reasons(self) -> dict[str, str]:
        """Return the recipes that cannot be read, so are not counted, and why.

        The keys are image ids, or names in the spool; the values are the
        problems.
        """
        result = {}
        for key, (name, inode, error) in list(self._noted.items()):
            now = self._inode(name)
            # In doubt it stays, so that nothing is freed.
            if now is not None and (now == inode or 0 in (now, inode)):
                result[key] = error
            else:
                self._noted.pop(key, None)
        for txid, image_id in self.lost.items():
            if self._is_lost(txid, image_id):
                result.setdefault(image_id, (
                    f'the recipe {txid.hex()} of image {image_id} is counted, '
                    'and is neither in images/ nor in the spool, though it '
                    'was not deleted: put it back, or run glance-dedup '
                    'repository rebuild-catalog, which gives up what is lost'))
        return result

    def _inode(self, name: str) -> int | None:
        """A file's inode; None: there is no such file; 0: it is not known."""
        try:
            return os.lstat(os.path.join(self._root, name)).st_ino
        except FileNotFoundError:
            return None
        except OSError:
            return 0

    def _is_lost(self, txid: bytes, image_id: str) -> bool:
        try:
            with contextlib.closing(
                    self._engine.open_recipe(image_id)) as recipe:
                return (not recipe.complete
                        or recipe.header()['transaction_id'] != txid)
        except exceptions.RepositoryError:
            return True
