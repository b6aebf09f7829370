# SPDX-License-Identifier: Apache-2.0

"""The keys of all objects that an owner has, made and parsed.

=========================================  ====================================
``<owner>/g/<group>-<object id>``          a cold group (:mod:`slices
                                           <glance_dedup.objects.slice_cache>`)
``<owner>/r/<image id>-<transaction id>``  a recipe
``<owner>/m/<number>-<object id>``         a metadata backup's manifest
=========================================  ====================================

A recipe is written once, under a transaction id that no other has. So its
object needs no other id, and an interrupted metadata backup finds its objects.
"""

import re
from typing import NamedTuple

from glance_dedup.base import hexids
from glance_dedup.base import imageids

_GROUP = re.compile(f'g/([0-9a-f]{{8}})-({hexids.PATTERN})')
_RECIPE = re.compile(f'r/({imageids.PATTERN})-({hexids.PATTERN})')
_MANIFEST = re.compile(f'm/([0-9a-f]{{16}})-({hexids.PATTERN})')


class Manifest(NamedTuple):
    """The key of a manifest. They sort by number."""

    number: int
    object_id: str
    owner: str

    @property
    def key(self) -> str:
        """The key itself."""
        return of_manifest(self.owner, self.number, self.object_id)


class Group(NamedTuple):
    """The key of a cold group's object."""

    number: int
    object_id: str


class Recipe(NamedTuple):
    """The key of a recipe's object."""

    image_id: str
    transaction_id: str


def of_manifest(owner: str, number: int, object_id: str) -> str:
    """The key of a manifest."""
    return f'{owner}/m/{number:016x}-{object_id}'


def of_recipe(owner: str, image_id: str, transaction_id: str) -> str:
    """The key of a recipe."""
    return f'{owner}/r/{image_id}-{transaction_id}'


def parse(owner: str, key: str) -> Manifest | Group | Recipe | None:
    """Return the meaning of an owner's key; None: it is not of our making."""
    rest = key.removeprefix(f'{owner}/')
    if rest == key:
        return None
    if found := _GROUP.fullmatch(rest):
        return Group(int(found[1], 16), found[2])
    if found := _RECIPE.fullmatch(rest):
        return Recipe(found[1], found[2])
    if found := _MANIFEST.fullmatch(rest):
        return Manifest(int(found[1], 16), found[2], owner)
    return None
