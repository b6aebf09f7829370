# SPDX-License-Identifier: Apache-2.0

"""Giving Glance locations that the repository's current key has signed.

After a change of the key, or a restoring that made a new one, Glance has
locations that this key did not sign. Glance lets nobody exchange a location,
and deletes the data of one that is removed. So the new location is added
first. The old one is removed only when the repository accepts it no more: the
store then takes it for one without data, and deletes nothing.
"""

from typing import Any

from glance_dedup.base import exceptions
from glance_dedup.base import locations
from glance_dedup.base import signingkeys
from glance_dedup.client import glance_api
from glance_dedup.repository import image_repository
from glance_dedup.repository import openimages

SIGNED, ADDED, REMOVED = 'signed', 'added', 'removed'


class NotSigned(exceptions.RepositoryError):
    """An image gets no new location; the message says why."""


class Signer:
    """Signs the locations of one Glance's images; for one thread at a time.

    :param keys: keys that do not change meanwhile
    :param store: the repository's name in Glance
    """

    def __init__(self, repository: image_repository.Repository,
                 keys: signingkeys.Keys, glance: glance_api.Glance,
                 store: str) -> None:
        self._repository = repository
        self._keys = keys
        self._glance = glance
        self._store = store

    def concerns(self, image: glance_api.Image) -> bool:
        """Return whether Glance has a location of the repository's."""
        return bool(self._ours(image.locations or (), image.image_id))

    def sign(self, image: glance_api.Image) -> str:
        """Make sure that Glance has a location of the current key.

        :returns: SIGNED: it had one, and none that is to go; ADDED; or
            REMOVED, which may come with an addition
        :raises NotSigned: the image is not the one of Glance's record
        :raises GlanceError: Glance refused something, or did not answer
        :raises RepositoryError: as its name says
        """
        stat = self._repository.stat(image.image_id)
        ours = self._ours(image.locations or (), image.image_id)
        self._require_same(image, stat, ours)
        wanted = locations.url(self._repository, stat.image_id,
                               stat.upload_id)
        result = SIGNED
        if wanted not in (image.locations or ()):
            self._glance.add_location(image.image_id, wanted, self._store)
            result = ADDED
        if not all(map(self._is_accepted, ours)):
            self._remove(image.image_id, wanted)
            result = REMOVED
        return result

    def _ours(self, urls: Any, image_id: str) -> list[locations.Parts]:
        """The locations of an image of the repository."""
        found = map(locations.parse, urls)
        return [parts for parts in found if parts is not None
                and parts.repository_id == self._repository.repository_id
                and parts.image_id == image_id]

    def _is_accepted(self, parts: locations.Parts) -> bool:
        return locations.is_signed(self._keys, *parts)

    def _require_same(self, image: glance_api.Image,
                      stat: openimages.ImageStat,
                      ours: list[locations.Parts]) -> None:
        """Refuse to sign for a caller who only knows an image's id.

        A user may have attached a false location to an image of their own.
        """
        same = [parts for parts in ours if parts.upload_id == stat.upload_id]
        if not same:
            raise NotSigned(
                f'image {stat.image_id} was stored again after Glance got its '
                'location. Compare it with Glance: glance-dedup image verify')
        if not any(map(self._is_accepted, same)) and (
                stat.project != image.owner):
            raise NotSigned(
                f'image {stat.image_id} has no location of an accepted key, '
                f'and belongs to project {image.owner or "none"} in Glance, '
                f'but to {stat.project or "none"} here. Copy it: glance-dedup '
                f'image copy {stat.image_id} NEW --project PROJECT, then '
                'register NEW')

    def _remove(self, image_id: str, wanted: str) -> None:
        """Remove the locations of an image that are accepted no more."""
        urls = self._glance.locations(image_id)
        if wanted not in urls:
            raise NotSigned(
                f'image {image_id}: Glance does not have the location that '
                'it got; nothing was removed')
        # From the last one, so that the others keep their places.
        for place in reversed(range(len(urls))):
            if any(not self._is_accepted(parts)
                   for parts in self._ours([urls[place]], image_id)):
                self._glance.remove_location(image_id, place)
