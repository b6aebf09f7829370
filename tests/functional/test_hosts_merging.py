# SPDX-License-Identifier: Apache-2.0

"""Merging on one host while another uses the same images and volumes.

DEDE leaves merge requests for files that another host has locked. Here there
are no requests. A recipe is exchanged under its readers, on whichever host
they are: they read the old one to their end. Only the space of the duplicates
waits for them. The server of a volume checks every 30 seconds if its recipes
were exchanged.
"""

import contextlib
import multiprocessing
import os
import pathlib
import subprocess
import sys
import time

import pytest

from dedupd.tasks import merger
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.repository import openvolumes
from tests.functional import test_hosts
from tests.functional.test_hosts import both     # noqa: F401: a fixture
from tests.functional.test_hosts import opened
from tests.functional.test_hosts import shared
from tests.sharedfs import fuse_hosts
from tests.support import daemons
from tests.support import maintenance
from tests.support import repositories
from tests.support import volume_tools

pytestmark = [pytest.mark.slow, pytest.mark.needs('nbdkit')]

LIMIT = test_hosts.LIMIT
#: Seconds within which the server of a volume opens exchanged recipes.
REOPENED = 60
MIB = 1 << 20


def merge(repo):
    """Merge all that can be merged; return the number of changed images."""
    with maintenance.maintaining(repo, wait=10) as maintainer:
        maintenance.account(maintainer)
        result = merger.run_once(maintainer, pacing.Pace())
        assert not result.failed and not result.gave_up, result
        maintenance.account(maintainer)
        return result.images


def freed(repo):
    """Collect; return the number of freed blocks."""
    return test_hosts.collect(repo, live_share=0).freed_blocks


def test_image_is_merged_while_another_host_reads_it(both):   # noqa: F811
    """A reader keeps its old recipe (I12); the next reads the new (N11)."""
    data = maintenance.content(1, blocks=40)
    with opened(*both) as (here, there):
        repositories.put(here, 'first', data)
        repositories.put_unaware(there, 'second', data)
        with there.open_image('second') as image:
            assert image.read(1000) == data[:1000]
            assert merge(here) == 1
            assert freed(here) == 0
            assert image.read() == data
            maintenance.require_contents(there,
                                         {'first': data, 'second': data})
        assert maintenance.blocks_of(
            there, 'second') == maintenance.blocks_of(here, 'first')
        assert repositories.eventually(
            lambda: freed(here) == 40, LIMIT) is None
        maintenance.require_contents(there, {'first': data, 'second': data})
    repositories.require_clean(shared(both[0]))


def test_long_recipe_is_merged_while_another_host_reads_it(
        both):     # noqa: F811
    """A reader can still read pages of a recipe that was replaced."""
    data = maintenance.scattered(1, pages=40)
    with opened(*both) as (here, there):
        repositories.put(here, 'first', data)
        repositories.put_unaware(there, 'second', data)
        with there.open_image('second') as image:
            assert image.read(1000) == data[:1000]
            assert merge(here) == 1
            assert image.read() == data


def test_any_host_merges_the_others_images(both):     # noqa: F811
    """Hosts take turns at the maintainer's work, and need no requests."""
    data = maintenance.content(1, blocks=20)
    with opened(*both) as repos:
        for number in range(4):
            repositories.put_unaware(
                repos[number % 2], f'image-{number}', data)
        for number in range(4, 8):
            here, there = repos if number % 2 else reversed(repos)
            repositories.put_unaware(here, f'image-{number}', data)
            assert merge(there) == (4 if number == 4 else 1)
        assert freed(repos[0]) == 7 * 20
        contents = {f'image-{number}': data for number in range(8)}
        for repo in repos:
            maintenance.require_contents(repo, contents)
    repositories.require_clean(shared(both[0]))


def read_on(root, filters, seeds, ended):
    """Read all images again and again, in another host's process."""
    with repositories.open_repository(root, filter_dir=filters) as repo:
        while not ended.is_set():
            for image_id, seed in seeds.items():
                assert repositories.read_all(
                    repo, image_id) == maintenance.content(*seed)


# Long: images are merged for five seconds, while two processes read them.
def test_images_are_merged_and_collected_under_their_readers(
        both):      # noqa: F811
    """Readers on another host never read a block that was freed (I12)."""
    seeds = {f'image-{number}': (number % 5, 5 + number % 3)
             for number in range(15)}
    context = multiprocessing.get_context('spawn')
    ended = context.Event()
    with opened(both[0]) as (here,):
        for image_id, seed in seeds.items():
            repositories.put_unaware(
                here, image_id, maintenance.content(*seed))
        readers = [context.Process(
            target=read_on, args=(str(shared(both[1])), str(both[1].filters),
                                  seeds, ended)) for _ in range(2)]
        for reader in readers:
            reader.start()
        try:
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                merge(here)
                freed(here)
                # These are duplicates again.
                for image_id in 'image-3', 'image-11':
                    name = f'copy-of-{image_id}'
                    with contextlib.suppress(exceptions.ImageNotFound):
                        here.delete(name)
                    repositories.put_unaware(here, name, maintenance.content(
                        *seeds[image_id]))
        finally:
            ended.set()
            for reader in readers:
                reader.join(LIMIT)
                reader.kill()
        assert [reader.exitcode for reader in readers] == [0, 0]
    repositories.require_clean(shared(both[0]))


# -- volumes ------------------------------------------------------------------

@pytest.fixture
def hosts(tmp_path):
    with fuse_hosts.hosts(tmp_path, names=600, attributes=600,
                          pages='stay') as found:
        volume_tools.create_repository(shared(found[0]), block_size=512)
        yield found


def test_volume_is_merged_while_another_host_has_it(hosts):
    """A volume's owner reads the old recipe until it renews."""
    data = maintenance.content(1, blocks=40)
    with opened(*hosts) as (here, there):
        repositories.put(here, 'image', data)
        openvolumes.create(there, 'disk', MIB)
        with (repositories.open_repository(there.path, codec='none',
                                           index='none') as unaware,
              openvolumes.open_volume(unaware, 'disk') as volume):
            volume.write(data, 0)
            volume.checkpoint()
            assert volume.read(len(data), 0) == data
            assert merge(here) == 1
            assert freed(here) == 0
            assert volume.read(len(data), 0) == data
            volume.renew()
            assert freed(here) == 40
            assert volume.read(len(data), 0) == data
            # The next write goes on top of the new recipe.
            volume.write(b'x' * 512, 512)
            volume.checkpoint()
            data = data[:512] + b'x' * 512 + data[1024:]
            assert volume.read(len(data), 0) == data
    repositories.require_clean(hosts[0].backing / 'repository')


# Long: the server of a volume opens exchanged recipes after half a minute.
def test_server_of_a_volume_opens_what_was_exchanged(hosts):
    """A volume's server opens exchanged recipes by itself, within a minute."""
    data = maintenance.content(1, blocks=40)
    place = pathlib.Path(hosts[1].directory)
    volume_tools.create(shared(hosts[0]), 'disk', MIB)
    with opened(hosts[0]) as (here,), volume_tools.Server(
            shared(hosts[1]), place) as server:
        repositories.put(here, 'image', data)
        server.start()
        with server.session() as session:
            volume_tools.write(session, 0, data)
            # The server cannot name the image's blocks meanwhile.
            with repositories.holding(
                    os.path.join(here.path, 'locks', 'groups'),
                    repositories.INTENT_BYTE + 1):
                server.control.snapshot('snapshot')
            assert session.read(0, len(data)) == data
            assert merge(here) == 2     # the snapshot, too
            assert session.read(0, len(data)) == data
            began = time.monotonic()
            repositories.eventually(lambda: freed(here) == 40, 2 * REOPENED)
            assert time.monotonic() - began < REOPENED + LIMIT
            assert session.read(0, len(data)) == data
        server.stop()
    repositories.require_clean(hosts[0].backing / 'repository')


def test_volume_that_another_host_serves(hosts):
    """Its control socket is the other host's, and its lock is held (V1)."""
    volume_tools.create(shared(hosts[0]), 'disk', MIB)
    with opened(hosts[0]) as (here,), volume_tools.Server(
            shared(hosts[1]), pathlib.Path(hosts[1].directory)) as server:
        server.start()
        done = subprocess.run(
            [sys.executable, '-m', 'glance_dedup.cli.entry', '--repository',
             shared(hosts[0]), 'volume', 'snapshot', 'disk', 'snapshot'],
            cwd=daemons.ROOT, capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 11
        assert 'Run the command on the host that serves' in done.stderr
        with pytest.raises(exceptions.BusyError):
            openvolumes.open_volume(here, 'disk')
        server.stop()
        openvolumes.open_volume(here, 'disk').close()
