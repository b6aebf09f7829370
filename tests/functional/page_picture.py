# SPDX-License-Identifier: Apache-2.0
"""Makes README's picture of the status page.

::

    .venv/bin/python -m tests.functional.page_picture

fills a repository as a week of uploads and maintenance would, shows a real
daemon's page in Chromium, and writes ``doc/source/images/page.png``. The week
is in the daemon's clock alone (``clocks.c``).
"""

import contextlib
import pathlib
import tempfile
import uuid

from tests.functional import clocks
from tests.functional import dedupd_watched
from tests.functional import test_dedupd_page
from tests.support import repositories

PICTURE = (pathlib.Path(__file__).resolve().parents[2]
           / 'doc' / 'source' / 'images' / 'page.png')
DAY = 86400
MIB = 1 << 20

#: The images in the order of their upload: name, release, MiB of its own,
#: MiB that it begins with of the release, MiB of zeros.
IMAGES = (
    ('debian-12', 1, 2, 40, 22), ('debian-12-web', 1, 6, 40, 18),
    ('debian-13', 2, 2, 36, 26), ('debian-12-db', 1, 9, 38, 17),
    ('debian-13-web', 2, 5, 36, 23), ('debian-12-monthly', 1, 3, 30, 31),
    ('debian-13-builder', 2, 12, 36, 16))
PROJECTS = ('6d1c0a9f2e7b4f58', 'a83e5b27c91d4066')


def image_id(name):
    """Return an id that stays the same, so that pictures differ little."""
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, name))


def fill(daemon, path, ahead):
    """Replay a week: an image a day, and the daemon's tasks.

    :param ahead: called with the seconds by which its clock is ahead
    """
    releases = {number: repositories.mixture(40 * MIB, seed=number)
                for number in (1, 2)}
    for day, (name, release, own, shared, zeros) in enumerate(IMAGES):
        ahead((day - len(IMAGES)) * DAY)
        with contextlib.closing(repositories.open_repository(path)) as repo:
            repositories.put(
                repo, image_id(name), releases[release][:shared * MIB]
                + repositories.mixture(own * MIB, seed=100 + day)
                + bytes(zeros * MIB), project=PROJECTS[day % 2])
        for hour in (1, 9, 17):
            ahead((day - len(IMAGES)) * DAY + hour * 3600)
            daemon.perform('collect')
    for task, hours in (('projects', 9), ('recompress', 5), ('scrub', 3),
                        ('merge', 1), ('collect', 0.2)):
        ahead(-hours * 3600)
        daemon.perform(task)
    ahead(0)


def make(picture):
    """Write the picture to a file."""
    with contextlib.ExitStack() as stack:
        place = pathlib.Path(stack.enter_context(
            tempfile.TemporaryDirectory()))
        path = repositories.create(place / 'images', group_slots=1024)
        offset = clocks.Clock(place)
        daemon = stack.enter_context(dedupd_watched.Daemon(
            path, collect_interval=3600, merge_interval=DAY,
            scrub_interval=30 * DAY))
        daemon.environment = offset.environment
        offset.set(-len(IMAGES) * DAY)
        daemon.start()
        daemon.wait_for_catalog()
        fill(daemon, path, offset.set)
        browser = test_dedupd_page.Browser(place / 'browser')
        stack.callback(browser.driver.quit)
        browser.show(daemon.url, 'picture')
        # Down to the tasks: all is too long for README.
        height = browser.script(
            'return document.getElementById("tasks").parentElement'
            '.getBoundingClientRect().bottom + 12')
        picture.write_bytes(browser.picture(height))
        daemon.stop()


if __name__ == '__main__':
    make(PICTURE)
