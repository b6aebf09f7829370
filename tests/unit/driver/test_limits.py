# SPDX-License-Identifier: Apache-2.0

"""Limits on the storage of projects, as Glance sees them."""

import contextlib
import logging
import os
import pathlib
import subprocess
import sys
import threading
import types

from glance_store import exceptions
from oslo_config import cfg
import pytest

from dedupd.tasks import collector
from glance_dedup.base import pacing
from glance_dedup.driver import limits
from glance_dedup.driver import store_opts
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import projects
from glance_dedup.repository import reservations
from tests.support import maintenance
from tests.support.repositories import noise
from tests.support import stores
from tests.support.stores import ALICE
from tests.support.stores import BOB

MIB = 1 << 20
TOP = pathlib.Path(__file__).resolve().parents[3]

configure = stores.configure


@pytest.fixture
def store(configure):
    return configure(one={'dedup_store_project_limit_mib': 3})


def add(image_id, data, context=ALICE, **options):
    return stores.add(data, image_id, context=context, **options)[0]


def refused(image_id, data, context=ALICE):
    with pytest.raises(exceptions.StorageFull) as found:
        add(image_id, data, context)
    return str(found.value)


def maintain(store, *works):
    with maintainer_role.Maintainer(stores.repo(store)) as maintainer:
        for work in works:
            work(maintainer)


def collect(maintainer):
    collector.run_once(maintainer, pacing.Pace())


def stored(store, project='alice'):
    return store._limits.stored(stores.repo(store), project)


def test_an_upload_over_the_limit_is_refused(store):
    add('one', noise(2 * MIB))
    words = refused('two', noise(2 * MIB, 2))
    assert words.startswith(
        'project alice may store 3 MiB in this store, after deduplication '
        'and compression, and image two would be over that')
    # The amount in use would reveal whether the blocks were stored before.
    assert str(stored(store)) not in words
    assert stores.repo(store).images() == ['one']
    assert len(os.listdir(os.path.join(
        stores.repo(store).path, 'spool'))) == 1     # the file of image one
    # Other projects have limits of their own.
    add('two', noise(2 * MIB, 3), BOB)
    assert stores.repo(store).images() == ['one', 'two']


@pytest.mark.parametrize('known', [True, False])
def test_it_is_refused_while_it_comes(store, known):
    """An upload is refused before its end, which a client may never send."""
    read = []

    def source():
        for seed in range(64):
            read.append(seed)
            yield noise(MIB, seed)
    with pytest.raises(exceptions.StorageFull):
        add('one', source(), size=64 * MIB if known else 0)
    assert len(read) < 32
    stores.assert_nothing_left(store)


def test_nothing_is_stored_once_the_limit_is_reached(store):
    add('one', noise(3 * MIB - 8192))
    add('two', noise(4096, 2))
    before = sorted(os.listdir(os.path.join(
        stores.repo(store).path, 'groups')))
    read = []
    with pytest.raises(exceptions.StorageFull):
        add('three', (read.append(1) or b'x' for _ in range(9)))
        add('four', noise(MIB, 3))
    assert sorted(os.listdir(os.path.join(
        stores.repo(store).path, 'groups'))) == before


def test_what_was_there_takes_nothing(store):
    data = noise(2 * MIB)
    add('one', data)
    add('two', data)
    add('three', data + bytes(64 * MIB))
    assert stored(store) == stores.repo(store).stat('one').stored_bytes
    # Blocks that another project stored do not count.
    add('four', data, BOB)
    assert stored(store, 'bob') == 0


@pytest.mark.parametrize('counted', [False, True])
def test_deletion_and_collection_give_it_back(store, counted):
    """After a collection, a deleted image no longer counts.

    The result is the same if the image was counted before.
    """
    url = add('one', noise(2 * MIB))
    if counted:
        maintain(store, maintenance.account)
    assert stored(store) > 2 * MIB
    refused('two', noise(2 * MIB, 2))
    stores.delete(url, context=ALICE)
    maintain(store, collect)
    assert stored(store) == 0
    add('two', noise(2 * MIB, 2))


def test_limits_of_some_projects(configure):
    store = configure(one={
        'dedup_store_project_limits_mib': {'alice': 1, 'carol': 0}})
    refused('one', noise(2 * MIB))
    add('one', noise(2 * MIB), BOB)
    store = configure(one={
        'dedup_store_project_limit_mib': 1,
        'dedup_store_project_limits_mib': {'alice': 3, 'carol': 0}})
    add('two', noise(2 * MIB, 2))
    refused('three', noise(2 * MIB, 3), BOB)
    add('three', noise(2 * MIB, 3), types.SimpleNamespace(
        project_id='carol', is_admin=False))
    # An image without a project has no limit.
    add('four', noise(2 * MIB, 4), None)
    assert len(stores.repo(store).images()) == 4


@pytest.mark.parametrize('value', ['alice:much', 'alice:-1', 'alice',
                                   f'alice:{1 << 40}'])
def test_limits_that_are_none(tmp_path, value):
    file = tmp_path / 'glance-api.conf'
    file.write_text(f'[one]\ndedup_store_project_limits_mib = {value}\n')
    conf = cfg.ConfigOpts()
    conf.register_opts(store_opts.dedup_opts, 'one')
    conf([], default_config_files=[str(file)])
    with pytest.raises(ValueError, match='dedup_store_project_limits_mib'):
        conf.one.dedup_store_project_limits_mib


def test_limits_in_a_file(tmp_path):
    file = tmp_path / 'glance-api.conf'
    file.write_text('[one]\n'
                    'dedup_store_project_limits_mib = alice:1,bob:0\n')
    conf = cfg.ConfigOpts()
    conf.register_opts(store_opts.dedup_opts, 'one')
    conf([], default_config_files=[str(file)])
    assert conf.one.dedup_store_project_limits_mib == {'alice': 1, 'bob': 0}


def upload_at_once(store, count, size):
    """Upload images at once and return the numbers of those stored."""
    together = threading.Barrier(count)
    results = {}

    def source(number):
        data = noise(size, number)
        yield data[:size // 2]
        together.wait(60)
        yield data[size // 2:]

    def upload(number):
        try:
            add(f'image-{number}', source(number), size=size)
            results[number] = True
        except exceptions.StorageFull:
            together.abort()
            results[number] = False
        except threading.BrokenBarrierError:
            results[number] = False
    threads = [threading.Thread(target=upload, args=(n,))
               for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(results) == count
    return [number for number, there in results.items() if there]


def test_uploads_at_once_never_exceed_the_limit(store):
    upload_at_once(store, 16, MIB)
    assert stored(store) <= 3 * MIB
    maintain(store, collect)
    assert stored(store) <= 3 * MIB


def test_what_runs_counts(store):
    """A running upload counts, so a second upload is refused."""
    with stores.repo(store).begin('running', 'alice') as transaction:
        running = limits.Transaction(
            store._limits, stores.repo(store), 'alice', transaction)
        running.write(noise(2 * MIB, 1))
        refused('other', noise(2 * MIB, 2))
        running.commit()
    assert stores.repo(store).images() == ['running']
    assert reservations_of(store) == {}


def reservations_of(store):
    root = stores.repo(store).path
    with reservations.locked(root):
        return {file.upload: file.size for file in reservations._all(root)}


def give_up(store, seed, size=2 * MIB):
    """Abort an upload when its blocks are durable."""
    with stores.repo(store).begin(f'given-up-{seed}', 'alice') as transaction:
        upload = limits.Transaction(
            store._limits, stores.repo(store), 'alice', transaction)
        with contextlib.closing(types.SimpleNamespace(close=upload.abort)):
            upload.write(noise(size, seed))
            transaction.keep()


def test_what_was_given_up_counts_until_it_is_collected(store):
    give_up(store, 1)
    assert sum(reservations_of(store).values()) > 2 * MIB
    for seed in range(4):
        refused(f'image-{seed}', noise(2 * MIB, 10 + seed))
    # No reservation of these remains.
    assert sum(reservations_of(store).values()) < 2 * MIB + 65536
    add('bobs', noise(2 * MIB, 5), BOB)
    maintain(store, collect)
    assert reservations_of(store) == {}
    add('image', noise(2 * MIB, 3))


def test_a_process_that_dies_gives_up(store):
    root = stores.repo(store).path
    code = (
        'import os, sys\n'
        'from glance_dedup.repository import reservations\n'
        'with reservations.locked(sys.argv[1]):\n'
        '    own = reservations.Reservation(sys.argv[1], "alice", "1" * 32)\n'
        '    own.set(3 << 20)\n'
        'os._exit(0)\n')
    subprocess.run([sys.executable, '-c', code, root], check=True, timeout=60)
    refused('image', noise(MIB))
    maintain(store, collect)
    assert reservations_of(store) == {}
    add('image', noise(MIB))


def test_who_sends_again_what_was_given_up_pays_for_it(store):
    """A project is charged for its aborted blocks when it uses them again.

    The blocks are stored already, but no image was charged for them.
    """
    for seed in range(4):
        with contextlib.suppress(limits.OverLimit):
            give_up(store, seed)
        with contextlib.suppress(exceptions.StorageFull):
            add(f'image-{seed}', noise(2 * MIB, seed))
        maintain(store, collect)
    assert stores.repo(store).images() == ['image-0']
    assert 2 * MIB <= stored(store) < 3 * MIB
    assert stores.repo(store).stat('image-0').stored_bytes >= 2 * MIB


_UPLOADS = '''
from glance_dedup.driver import limits
from glance_dedup.repository import image_repository
import sys
from tests.support.repositories import noise

root, filter_dir, number = sys.argv[1:]
found = limits.Limits(4, {})
with image_repository.Repository(
        root, filter_dir=filter_dir, filter_mib=1) as repo:
    print('ready', flush=True)
    sys.stdin.readline()
    for seed in range(6):
        name = f'{number}-{seed}'
        with repo.begin(name, 'alice') as transaction:
            try:
                upload = limits.Transaction(found, repo, 'alice', transaction)
            except limits.OverLimit:
                continue
            try:
                for piece in range(3):
                    upload.write(noise(1 << 18, f'{name} {piece}'))
                upload.commit()
            except limits.OverLimit:
                upload.abort()
'''


def test_processes_at_once_never_exceed_the_limit(store, tmp_path):
    repo = stores.repo(store)
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(subprocess.Popen(
            [sys.executable, '-c', _UPLOADS, repo.path, tmp_path, str(number)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=TOP)) for number in range(4)]
        for worker in workers:
            assert worker.stdout.readline() == 'ready\n'
        for worker in workers:
            worker.stdin.close()
        for worker in workers:
            assert worker.wait(120) == 0
    assert 1 <= len(repo.images()) <= 5
    assert stored(store) <= 4 * MIB
    assert reservations_of(store) == {}


def test_a_group_in_use_keeps_what_was_given_up(store):
    give_up(store, 1)
    with stores.repo(store).begin('running', 'bob') as transaction:
        transaction.write(noise(MIB, 9))
        transaction.keep()
        with maintainer_role.Maintainer(stores.repo(store)) as maintainer:
            assert collector.run_once(maintainer, pacing.Pace()).busy
            assert reservations_of(store)
            transaction.abort()
            collector.run_once(maintainer, pacing.Pace())
            assert reservations_of(store) == {}


def test_what_is_not_known_refuses_nothing(store, caplog):
    caplog.set_level(logging.INFO)
    add('one', noise(2 * MIB))
    maintain(store, maintenance.account)
    path = os.path.join(stores.repo(store).path, projects.NAME)
    with open(path, 'r+b') as f:
        f.write(b'?')
    add('two', noise(2 * MIB, 2))
    assert 'is not known, so no upload is refused' in caplog.text
    caplog.clear()
    os.unlink(path)
    add('three', noise(2 * MIB, 3))
    assert 'is not known' not in caplog.text    # once is enough
    maintain(store, maintenance.account)
    refused('four', noise(2 * MIB, 4))
    assert 'is known again' in caplog.text
    assert 'Project alice may store 3 MiB, has stored' in caplog.text


def test_copies_by_hand_have_no_limit_but_count(store):
    add('one', noise(2 * MIB))
    repo = stores.repo(store)
    with repo.begin('two', 'alice') as transaction:
        transaction.write(noise(2 * MIB, 2))
        transaction.commit()
    assert stored(store) > 4 * MIB
    refused('three', noise(MIB, 3))
