# SPDX-License-Identifier: Apache-2.0

"""The links in Nova's directory of base images, ``_base``.

Nova looks for an image under the SHA-1 of its id. A link of that name leads to
the file of the mount. Nova may put a file in the place of a link, or remove
one, at any time. Only links that lead into the mount are ours: nothing else in
the directory is touched.
"""

from collections.abc import Container
import contextlib
import hashlib
import os
import re
import stat

_ASIDE = 'glance-dedup-aside-'
_ASIDE_NAME = re.compile(f'{_ASIDE}[0-9a-f]{{40}}')


def name_of(image_id: str) -> str:
    """The name under which Nova keeps an image."""
    return hashlib.sha1(image_id.encode(), usedforsecurity=False).hexdigest()


class Links:
    """Our links in a directory. Used by one thread.

    :param base: Nova's directory
    :param mounted: the directory that has the images, by their ids
    """

    def __init__(self, base: str, mounted: str) -> None:
        self._base = base
        self._mounted = os.path.abspath(mounted)

    def _path(self, image_id: str) -> str:
        return os.path.join(self._base, name_of(image_id))

    def _target(self, image_id: str) -> str:
        return os.path.join(self._mounted, image_id)

    def _leads(self, path: str, image_id: str) -> bool:
        try:
            return os.readlink(path) == self._target(image_id)
        except OSError:
            return False    # it is no link, or gone

    def has(self, image_id: str) -> bool:
        """Return whether the image's link is there."""
        return self._leads(self._path(image_id), image_id)

    def put(self, image_id: str) -> None:
        """Make the image's link, unless something has its name.

        :raises OSError: if it cannot be made
        """
        with contextlib.suppress(FileExistsError):
            os.symlink(self._target(image_id), self._path(image_id))

    def remove(self, image_id: str) -> None:
        """Remove the image's link, if it is there.

        :raises OSError: if it cannot be removed
        """
        if not self.has(image_id):
            return
        # Nova may rename a downloaded image to this name at any time. So the
        # file of this name is moved aside first, and put back if it is no
        # link.
        path = self._path(image_id)
        aside = os.path.join(self._base, _ASIDE + name_of(image_id))
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, aside)
            if self._leads(aside, image_id):
                os.unlink(aside)
            else:
                os.rename(aside, path)

    def _finish_removal(self, name: str) -> None:
        """Finish the removal of a process that died within it.

        :param name: the name to which that process moved a file aside
        """
        aside = os.path.join(self._base, name)
        with contextlib.suppress(FileNotFoundError):
            kind = os.lstat(aside).st_mode
            if stat.S_ISLNK(kind) and (
                    os.path.dirname(os.readlink(aside)) == self._mounted):
                os.unlink(aside)
            elif stat.S_ISREG(kind) or stat.S_ISLNK(kind):
                # It has the image's bytes, as any file of that name has.
                os.rename(aside, os.path.join(
                    self._base, name.removeprefix(_ASIDE)))

    def sweep(self, wanted: Container[str]) -> None:
        """Remove our links to all other images.

        Finish removals that a kill has interrupted, too.

        :raises OSError: if one cannot be removed
        """
        names = os.listdir(self._base)
        for name in names:
            try:
                target = os.readlink(os.path.join(self._base, name))
            except OSError:
                continue
            directory, image_id = os.path.split(target)
            if directory == self._mounted and image_id not in wanted and (
                    name == name_of(image_id)):
                self.remove(image_id)
        for name in names:
            if _ASIDE_NAME.fullmatch(name) is not None:
                self._finish_removal(name)
