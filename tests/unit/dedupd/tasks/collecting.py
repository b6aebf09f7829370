# SPDX-License-Identifier: Apache-2.0

"""Helpers that the tests of collection share."""

from dedupd.tasks import collector
from glance_dedup.base import pacing
from tests.support.maintenance import content
from tests.support import repositories
from tests.support.repositories import put

SHARE = repositories.SHARE_BYTE


def collect(maintainer, **options):
    # By default, the run does nothing except the collection.
    return collector.run_once(maintainer, pacing.Pace(),
                              **{'live_share': 0, 'evacuate_share': 0,
                                 **options})


def pin(path, other, *seeds):
    """Open an image that is deleted before it was counted."""
    put(other, 'read', content(*seeds))
    image = other.open_image('read')
    other.delete('read')
    return image
