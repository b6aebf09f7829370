# SPDX-License-Identifier: Apache-2.0

"""A daemon announces the space that a deletion frees, while others work."""

import random

import pytest

from glance_dedup.cli import common
from glance_dedup.repository import openvolumes
from tests.support import daemons
from tests.support import repositories
from tests.support import volume_tools
from tests.unit.cli import conftest

MIB = 1 << 20


@pytest.fixture
def path(tmp_path):
    return repositories.create(tmp_path / 'repository', group_slots=512)


@pytest.fixture
def cli(tmp_path, capfd):
    return conftest.Cli(tmp_path, capfd)


def on(cli, daemon):
    cli.options[cli.options.index('--socket') + 1] = str(daemon.socket)
    return cli


def test_with_two_daemons(path, cli):
    """The maintainer answers, and the other one says why it does not."""
    rng = random.Random(1)
    shared = repositories.noise(MIB, 99)
    sizes = [(rng.randrange(1, 40), rng.randrange(40)) for _ in range(12)]
    # No collection but those that the test asks for.
    never = {'collect_interval': 0, 'merge_interval': 0}
    with (daemons.Daemon(path, **never) as one,
          daemons.Daemon(path, **never) as other):
        one.start().wait_for_catalog()
        other.start()
        with repositories.open_repository(path, codec='zstd') as repo:
            for number, (own, common_) in enumerate(sizes):
                repositories.put(
                    repo, f'i{number}',
                    repositories.noise(own * 4096, number)
                    + shared[:common_ * 4096] + b'a' * rng.randrange(9999),
                    project=f'p{number % 2}',
                    scope=rng.choice(['global', 'project']))
            for round in range(3):
                chosen = [f'i{4 * round + n}' for n in range(4)]
                on(cli, other)('image', 'du', *chosen).locked(
                    'does not maintain')
                found = on(cli, one)('image', 'du', *chosen,
                                     '-f', 'json').json()
                for image_id in chosen:
                    repo.delete(image_id)
                result = one.run('collect')['last']['result']
                assert result['refused'] is None
                together = found[-1]
                assert (result['freed_blocks'], result['freed_bytes']) == (
                    together['freed_blocks'], together['freed_bytes'])
        # The other one takes over.
        one.stop()
        other.wait_for(
            lambda: other.status()['daemon']['role'] == 'maintainer')
        on(cli, other.wait_for_catalog())('image', 'du', 'i0').failed(
            'there is no image i0')
        for body in (b'{"images": []}', b'{"images": [1]}',
                     b'{"images": "i0"}', b'{"volumes": ["/"]}',
                     b'{"others": ["x"]}'):
            assert other.request('POST', '/v1/tasks/usage',
                                 body).status == 400


@pytest.mark.needs('nbdkit')
def test_a_volume_that_is_served(path, cli, tmp_path):
    """A lower bound while it is written, and exact when it is not."""
    with repositories.open_repository(path) as repo:
        openvolumes.create(repo, 'disk', 16 * MIB, part_size=MIB)
    with (daemons.Daemon(path, collect_interval=0, merge_interval=0,
                         collect_volumes_mib=0) as daemon,
          volume_tools.Server(path, tmp_path) as server):
        daemon.start().wait_for_catalog()
        on(cli, daemon)
        with server.start().session() as session:
            for offset in range(0, 16 * MIB, MIB):
                volume_tools.write(session, offset,
                                   repositories.noise(MIB, offset))
            while_written, = cli('volume', 'du', 'disk', '-f', 'json').json()
            assert while_written['size'] == 16 * MIB
            assert while_written['journal_bytes'] > 0
        server.stop()       # which makes a checkpoint
        daemon.run('collect')
        found, = cli('volume', 'du', 'disk', '-f', 'json').json()
        assert found['freed_bytes'] == 16 * MIB
        assert cli('volume', 'delete', 'disk').status == 0
        result = daemon.run('collect')['last']['result']
        assert (result['freed_blocks'], result['freed_bytes']) == (
            found['freed_blocks'], found['freed_bytes'])
        assert cli('volume', 'du', 'disk').status == common.FAILED
