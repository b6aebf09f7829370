# SPDX-License-Identifier: Apache-2.0

"""Volumes whose making or deleting was interrupted: removes them (V9).

A collection does this first, so that it counts and frees their blocks.
"""

import logging

from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import volumes

LOG = logging.getLogger(__name__)


def finish(maintainer: maintainer_role.Maintainer, pace: pacing.Pace
           ) -> tuple[int, dict[str, str]]:
    """Remove every volume that is unfinished and has no owner.

    :returns: the number of removed ones; and the names of those that could not
        be removed, each with its error
    :raises pacing.Stopped: between two volumes
    """
    repository = maintainer.repository
    removed, failed = 0, {}
    names = volumes.names(repository.path)
    for done, name in enumerate(names):
        try:
            if not volumes.look(repository, name).is_ready:
                maintainer.handle.finish_volume(name)
                LOG.warning('Volume %s was removed: its making or deleting '
                            'had been interrupted', name)
                removed += 1
        except exceptions.BusyError:
            pass    # another process works on it
        except (exceptions.ImageNotFound, exceptions.ImageExists,
                exceptions.DamagedError, exceptions.VersionError):
            # It is gone, or was made, meanwhile; or its state is not known.
            pass
        except exceptions.RepositoryError as e:
            failed[name] = str(e)
        pace.step(done + 1, len(names), 'looking at volumes')
    return removed, failed
