# SPDX-License-Identifier: Apache-2.0

"""A repository whose full groups are all in an object store."""

import contextlib
import json
import secrets
import shutil

from dedupd.tasks import accounting
from dedupd.tasks import tierer
from glance_dedup.base import pacing
from glance_dedup.client import slice_client
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import prefix_owners
from tests.support import objects
from tests.support import repositories

SLOTS = 1024
#: Bytes of blocks in a group.
GROUP = SLOTS * 4096


class ColdRepository:
    """A repository with images, and a record of their bytes.

    :param server: the object store
    :param url: its URL
    :param options: of the repository
    """

    def __init__(self, path, server, url, **options):
        options = {'group_slots': SLOTS, **options}
        self.path = repositories.create(path, **options)
        self.images = {}
        location = objects.object_location.parse(
            f's3://{server.container}/{secrets.token_hex(8)}', url)
        credentials = server.credentials(path.parent / f'{path.name}.secret')
        with self.open() as repo:
            self.settings = prefix_owners.attach(repo, location, credentials)

    def open(self, **options):
        return repositories.open_repository(self.path, **options)

    def put(self, name, data, **options):
        with self.open() as repo:
            repositories.put(repo, name, data, **options)
        self.images[name] = data

    def cool(self):
        """Move all full groups; return their number."""
        self.groups = cool(self.path)
        return len(self.groups)

    def forget(self):
        """Empty the cache."""
        forget(self.path)

    def slices(self):
        """Return the names of the cached slices."""
        return {str(path.relative_to(self.path / 'slices'))
                for path in (self.path / 'slices').glob('*/????????')}

    def request(self, number=1, **changes):
        """Return the body of a request to dedupd for a group's first slice."""
        with self.open() as repo:
            repository_id = repo.repository_id
        return json.dumps({
            'repository': repository_id, 'group': number,
            'object': self.groups[number]['object'].hex(), 'first': 0,
            'count': 1, 'wait': 20, **changes}).encode()


def cool(path):
    """Move all full groups of a repository, and empty the cache.

    :returns: the facts of each cold group, by its number
    """
    with repositories.open_repository(path) as repo, contextlib.closing(
            maintainer_role.Maintainer(repo)) as maintainer:
        accounting.run_once(maintainer, pacing.Pace())
        found = tierer.run_once(maintainer, pacing.Pace(),
                                tierer.Policy(everything=True))
        assert not found.failed and not found.busy
        groups = {
            number: facts for number in maintainer.engine.groups()
            if (facts := maintainer.engine.group_facts(number))['is_cold']}
    forget(path)
    return groups


def forget(path):
    """Empty a repository's cache of slices."""
    for directory in (path / 'slices').iterdir():
        shutil.rmtree(directory)


def gets(faults):
    """Return the GETs of objects that the proxy has seen."""
    return [path for method, path in faults.seen
            if method == 'GET' and '/g/' in path]


def ask(daemon, body):
    """Return dedupd's answer to a request for slices."""
    return daemon.request('POST', slice_client.PATH, body)
