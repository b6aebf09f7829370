# SPDX-License-Identifier: Apache-2.0

"""Comparing a repository with the Glances that use it.

An *orphan* is an image in the repository that no Glance has there. A *missing*
image is the reverse. Both lists change while they are compared, so the order
matters: the list from which an image must be absent is read last. Before an
image is deleted, each Glance is asked for it again (``replication.rst``,
"Moving in and out").
"""

from collections.abc import Iterable, Iterator
import dataclasses

from glance_dedup.base import exceptions
from glance_dedup.base import imageids
from glance_dedup.client import glance_api
from glance_dedup.repository import image_repository
from glance_dedup.repository import openimages


@dataclasses.dataclass(frozen=True)
class Orphan:
    """An image of the repository that no Glance has there."""

    stat: openimages.ImageStat
    reason: str
    unknown: bool
    """Whether, by their answers, no Glance has ever known the image."""


def _reason(answers: Iterable[glance_api.Image | None],
            store: str | None) -> str | None:
    """Return why an image is an orphan; None if it is not, or may not be.

    :param answers: each Glance's answer about the image
    :param store: the repository's name in Glance; None: any store's image
        may have its data here
    """
    found = [answer for answer in answers if answer is not None]
    if not found:
        return 'Glance does not know it'
    for image in found:
        if image.status in glance_api.UNDER_WAY or image.importing:
            return None
        if image.status in glance_api.WITH_DATA and (
                store is None or store in image.stores
                or not image.stores):
            return None
        if image.status not in (*glance_api.WITH_DATA, 'queued'):
            return None
    if any(image.status == 'queued' for image in found):
        return 'Glance has no data of it'
    return 'Glance has it elsewhere: ' + ', '.join(sorted(
        {name for image in found for name in image.stores}))


Known = dict[str, glance_api.Image]
"""All images of one Glance, by their ids."""


def orphans(stats: Iterable[openimages.ImageStat], known: list[Known],
            store: str | None) -> list[Orphan]:
    """The orphans among a repository's images.

    :param stats: the stats of all its images
    :param known: each Glance's images; listed after `stats`
    """
    found = []
    for stat in stats:
        answers = [images.get(stat.image_id) for images in known]
        reason = _reason(answers, store)
        if reason is not None:
            found.append(Orphan(stat, reason, not any(answers)))
    return found


def why_kept(orphan: Orphan, glances: list[glance_api.Glance],
             store: str | None, youngest: float) -> str | None:
    """Return why an orphan must not be deleted; None if it may be.

    This requests the image from each Glance once more.

    :param youngest: seconds since 1970: images stored later stay
    """
    image_id = orphan.stat.image_id
    if not imageids.is_glances(image_id):
        return 'its id is not one of Glance: it was stored by hand'
    if orphan.stat.created > youngest:
        return 'it is too young'
    if _reason((glance.find(image_id) for glance in glances),
               store) is None:
        return 'Glance has it by now'
    return None


def missing(repository: image_repository.Repository,
            glance: glance_api.Glance, known: Known,
            store: str) -> Iterator[glance_api.Image]:
    """Images that Glance has in this store, but that the repository lacks.

    :param known: Glance's images
    """
    present = set(repository.images())
    for image in known.values():
        if store not in image.stores or image.image_id in present:
            continue
        # Deleted meanwhile, or put elsewhere?
        now = glance.find(image.image_id)
        if now is None or store not in now.stores:
            continue
        try:
            repository.stat(image.image_id)
        except exceptions.ImageNotFound:
            yield now
