# SPDX-License-Identifier: Apache-2.0

"""What the tests of collection share."""

from dedupd.tasks import collector
from glance_dedup.base import pacing
from tests.support.maintenance import content
from tests.support import repositories
from tests.support.repositories import put

SHARE = repositories.SHARE_BYTE


def collect(maintainer, **options):
    # As little else as possible, unless it is asked for.
    return collector.run_once(maintainer, pacing.Pace(),
                              **{'live_share': 0, 'evacuate_share': 0,
                                 **options})


def pin(path, other, *seeds):
    """An image that is deleted before it was counted, and is being read."""
    put(other, 'read', content(*seeds))
    image = other.open_image('read')
    other.delete('read')
    return image
