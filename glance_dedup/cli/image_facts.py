# SPDX-License-Identifier: Apache-2.0

"""Facts about images from the daemon, or else from the catalog."""

from collections.abc import Callable
import contextlib
import os
import typing

from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.client import client_errors

if typing.TYPE_CHECKING:
    from glance_dedup.client import daemon_client


@contextlib.contextmanager
def catalog_of(repo):
    """The catalog, for reading; None if it is invalid or a maintainer runs.

    While it is open, no maintainer can start.
    """
    from glance_dedup import _engine
    from glance_dedup.maintenance import catalog_db

    path = os.path.join(repo.path, 'catalog')
    with contextlib.ExitStack() as stack:
        catalog = None
        # The maintainer reports the problem.
        with contextlib.suppress(exceptions.RepositoryError):
            # Nobody may open it without the lock.
            maintenance = stack.enter_context(contextlib.closing(
                _engine.Maintenance(repo.handle())))
            if files.is_directory(path) and maintenance.lock():
                catalog = stack.enter_context(contextlib.closing(
                    catalog_db.Catalog(path, repo.repository_id)))
        yield catalog if catalog is not None and catalog.valid else None


def damaged_images(repo, status: dict | None) -> set[str] | None:
    """The images that are known to be damaged; None if nothing is known.

    :param status: of the daemon, if there is one
    """
    if status is not None:
        return _damaged_in(status)
    with catalog_of(repo) as catalog:
        return None if catalog is None else catalog.damaged_images()


def _damaged_in(status: dict) -> set[str] | None:
    try:
        if status['catalog']['state'] != 'ready':
            return None
        return {*status['damage']['images'],
                *status['catalog']['unreadable']}
    except (KeyError, TypeError):
        return None


#: Columns of a list of images, besides the one on damage.
LISTED = ('image_id', 'size', 'zero_bytes', 'new_bytes', 'stored_bytes',
          'created', 'project')


def known_images(repo, client: 'daemon_client.Client | None',
                 status: dict | None
                 ) -> tuple[Callable[[str], dict | None], set[str] | None]:
    """Facts about images from the daemon, or else from the catalog.

    :param client: of the daemon, if there is one
    :param status: the daemon's
    :returns: a function that returns the figures of the image that has an id
        now, or None if its recipe must be read; and the images that are known
        to be damaged, or None if nothing is known
    """
    if client is not None and status is not None:
        return _images_of(client).get, _damaged_in(status)
    with catalog_of(repo) as catalog:
        counted, damaged = {}, None
        if catalog is not None:
            damaged = catalog.damaged_images()
            # The recipes have the same figures; the maintainer reports damage.
            with contextlib.suppress(exceptions.RepositoryError):
                counted = catalog.images()
    from glance_dedup.maintenance import recipes

    return lambda image_id: recipes.facts_of(
        repo.path, image_id, counted), damaged


def _images_of(client: 'daemon_client.Client') -> dict[str, dict]:
    """The daemon's figures, by the id; without those that it cannot read."""
    with contextlib.suppress(client_errors.ClientError):
        return {image['image_id']: image for image in client.images()
                if all(image.get(name) is not None for name in LISTED)}
    return {}
