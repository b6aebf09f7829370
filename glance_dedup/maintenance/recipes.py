# SPDX-License-Identifier: Apache-2.0

"""Recipes, as the maintainer finds them in ``images/`` and counts them."""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import os
import re
from typing import Any

from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import hexids
from glance_dedup.base import imageids
from glance_dedup.maintenance import catalog_db
from glance_dedup.maintenance import records
from glance_dedup.maintenance import unreadable_recipes

_NAMED = re.compile(f'[TM]-({hexids.PATTERN})')


def txid_of_name(name: str) -> bytes | None:
    """The transaction id in a spool entry's name (kinds T and M), or None."""
    found = _NAMED.fullmatch(name)
    return bytes.fromhex(found[1]) if found else None


class RecipeError(Exception):
    """A recipe's extents cannot be read, for the reason in the message.

    This is a class of its own, so that nobody mistakes an error of the catalog
    for one of a recipe.
    """


class Extents:
    """A recipe's extents, as the catalog counts them."""

    def __init__(self, recipe: _engine.Recipe) -> None:
        self._recipe = recipe
        self.pages = recipe.pages

    def runs(self, page: int) -> bytes:
        """The runs of one page, packed.

        :raises RecipeError: the page cannot be read
        """
        try:
            return self._recipe.runs(page, 1)
        except exceptions.UNREADABLE as e:
            raise RecipeError(str(e)) from e


def measure(recipe: _engine.Recipe) -> int:
    """Return the number of blocks in a recipe. Verifies the whole recipe."""
    try:
        return recipe.measure()
    except exceptions.UNREADABLE as e:
        raise RecipeError(str(e)) from e


def file_of(path: str, image_id: str) -> tuple[int, int] | None:
    """A recipe's inode and time of writing; None: they are not known.

    :param path: the repository's
    """
    try:
        found = os.lstat(os.path.join(path, 'images', image_id))
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def facts_of(path: str, image_id: str,
             counted: Mapping[str, tuple[tuple[int, int], dict[str, Any]]]
             ) -> dict[str, Any] | None:
    """The ledger's facts about the image that has this id now.

    :param path: the repository's
    :param counted: the result of :meth:`Catalog.images`
    :returns: None: the image is gone, or only its recipe has the facts
    """
    file, facts = counted.get(image_id, (None, None))
    return facts if facts and file == file_of(path, image_id) else None


def _listing() -> contextlib.AbstractContextManager[None]:
    return files.os_errors('cannot list images', exceptions.StorageError)


class Recipes:
    """The recipes in ``images/``. The maintainer's thread uses it.

    :param path: the repository's
    :param unreadable: recipes that cannot be opened are noted there
    :param warnings: gets a sentence for each file that is no image
    """

    def __init__(self, path: str, engine: _engine.Maintenance,
                 unreadable: unreadable_recipes.Unreadable,
                 warnings: list[str]) -> None:
        self._path = path
        self._images = os.path.join(path, 'images')
        self._engine = engine
        self._unreadable = unreadable
        self._warnings = warnings

    def txids(self, catalog: catalog_db.Catalog) -> dict[bytes, str]:
        """The transaction ids of all images that exist, and their image ids.

        A recipe is written once. If inode and time of writing are those of the
        last reading, the recipe is not read again: reading every recipe would
        cost a seek each.
        """
        names = self._names()
        batch = catalog.batch()
        found: dict[bytes, str] = {}
        for page in catalog.seen_pages():
            for (name, file), same in zip(page, self._engine.are_same(page)):
                if name not in names:
                    catalog.set_seen(batch, name, None)
                elif same:
                    names.remove(name)
                    found[file[records.SEEN_TXID:]] = name.decode()
        for image_id, recipe in self.opened(self._valid(names)):
            with contextlib.closing(recipe):
                if not recipe.complete:
                    self._unreadable.note(recipe.name, recipe.error)
                    continue
                txid = recipe.header()['transaction_id']
                catalog.set_seen(
                    batch, image_id.encode(),
                    (recipe.inode, recipe.modified, txid))
            found[txid] = image_id
        if len(batch):
            # Without room for this batch, the next call reads them again.
            with contextlib.suppress(exceptions.NoSpaceError):
                catalog.write(batch)
        return found

    def entry_facts(self, name: str) -> tuple[bytes | None, bool]:
        """The transaction id of an entry, and whether it is live."""
        with (contextlib.suppress(exceptions.ImageNotFound,
                                  *exceptions.UNREADABLE),
              contextlib.closing(self._engine.open_entry(name)) as entry):
            if entry.complete:
                return entry.header()['transaction_id'], entry.live()
        return txid_of_name(name), False

    def images(self) -> list[str]:
        """All images. Adds a warning for each other file in images/."""
        return self._valid(self._names())

    def _names(self) -> set[bytes]:
        with _listing():
            return set(os.listdir(os.fsencode(self._images)))

    def _valid(self, names: Iterable[bytes]) -> list[str]:
        """Return the names that are image ids, sorted. Warn of others."""
        images = []
        for name in sorted(map(os.fsdecode, names)):
            text = f'images/{name!r} is not an image'
            if imageids.is_valid(name):
                images.append(name)
            elif text not in self._warnings:
                self._warnings.append(text)
        return images

    def opened(self, image_ids: list[str]
               ) -> Iterator[tuple[str, _engine.Recipe]]:
        """The recipes of these images; skips images that are gone by then.

        The caller closes the recipes. A recipe that cannot even be opened is
        noted as unreadable.
        """
        for image_id in image_ids:
            try:
                recipe = self._engine.open_recipe(image_id)
            except exceptions.ImageNotFound:
                continue
            except exceptions.UNREADABLE as e:
                self._unreadable.note(f'images/{image_id}', str(e))
                continue
            yield image_id, recipe

    def image_of(self, inode: int) -> str | None:
        """The image whose recipe has this inode; None: there is none.

        This finds the image of a recipe without a header.

        :raises StorageError: images/ cannot be listed
        """
        with (_listing(), os.scandir(self._images) as entries):
            for entry in entries:
                if entry.inode() == inode:
                    return entry.name
        return None
