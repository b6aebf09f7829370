# SPDX-License-Identifier: Apache-2.0

"""dedupd and the driver with an index on a disk instead of the filter."""

import contextlib
import glob
import os

import pytest

from tests.functional import test_receiving
from tests.support import daemons
from tests.support import replicas
from tests.support import repositories
from tests.support.stores import add
from tests.support.stores import configure  # noqa: F401
from tests.unit.transfer import test_pull

MIB = 1 << 20
DATA = repositories.noise(4 * MIB, 3)


@pytest.mark.parametrize('index', ['lmdb', 'dtb'])
def test_uploads_beside_the_daemon(configure, tmp_path, index):  # noqa: F811
    """LMDB serves both. DTB serves glance-api; the daemon has the filter."""
    places = {'index_dir': tmp_path / 'index',
              'index': index if index == 'lmdb' else 'filter'}

    def upload(image_id):
        """Upload as a glance-api that is started, and stopped."""
        def run():
            store = configure(one={
                'dedup_store_index': index,
                'dedup_store_index_dir': tmp_path / 'index',
                'dedup_store_dedupd_socket': str(tmp_path / 'd' / 'socket')})
            add(DATA, image_id)
            repo = store._repository
            with repo.open_image(image_id) as image:
                new = image.stat.new_bytes
            repo.close()
            return new, repo.filter.error
        return repositories.in_child(run)

    assert upload('before') == (len(DATA), None)
    with daemons.running(tmp_path / 'one', tmp_path / 'd',
                         **places) as daemon:
        assert upload('first') == (0, None)
        figures = daemon.status()['filter']
        assert figures['filter_error'] is None
        assert daemon.stop() == 0
        assert upload('second') == (0, None)
        daemon.start().wait_for_catalog()
        assert upload('third') == (0, None)
    repositories.require_clean(tmp_path / 'one')


@pytest.mark.parametrize('index', ['lmdb', 'dtb'])
def test_replicas_that_come(tmp_path, index):
    """The daemon finds the blocks of replicas, also from before its start."""
    home, away = (test_pull.Site(tmp_path / name) for name in ('home', 'away'))
    away.put('before', DATA)
    away.repo.close()
    with daemons.running(away.path, index=index,
                         index_dir=tmp_path / 'index') as daemon:
        for image_id in ('first', 'second'):
            if image_id == 'second':
                assert daemon.stop() == 0
                daemon.start().wait_for_catalog()
            home.put(image_id, DATA)
            with contextlib.closing(
                    replicas.Sending(home.repo, image_id)) as sending:
                peer = test_receiving.Peer(daemon, sending, image_id)
                assert peer.complete()['new_bytes'] == 0
    home.repo.close()
    found, = glob.glob(os.path.join(tmp_path, 'index', f'*.{index}', 'store'))
    assert os.path.getsize(found) > 0
    repositories.require_clean(away.path)
