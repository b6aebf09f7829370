# SPDX-License-Identifier: Apache-2.0

"""Limits on what projects store, as Glance meets them."""

import logging
import os
import threading
import types

from glance_store import exceptions
from oslo_config import cfg
import pytest

from dedupd.tasks import collector
from glance_dedup.base import task
from glance_dedup.driver import limits
from glance_dedup.driver import opts
from glance_dedup.maintenance import maintainer as maintainer_module
from glance_dedup.repository import projects
from tests.support import maintenance
from tests.support.repositories import noise
from tests.support import stores
from tests.support.stores import ALICE
from tests.support.stores import BOB

MIB = 1 << 20

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
    with maintainer_module.Maintainer(stores.repo(store)) as maintainer:
        for work in works:
            work(maintainer)


def collect(maintainer):
    collector.run_once(maintainer, task.Pace())


def stored(store, project='alice'):
    return store._limits.stored(stores.repo(store), project)


def test_an_upload_over_the_limit_is_refused(store):
    add('one', noise(2 * MIB))
    words = refused('two', noise(2 * MIB, 2))
    assert words.startswith(
        'project alice may store 3 MiB in this store, after deduplication '
        'and compression, and image two would be over that')
    # How much is there already tells whether it was there before.
    assert str(stored(store)) not in words
    assert stores.repo(store).images() == ['one']
    assert len(os.listdir(os.path.join(
        stores.repo(store).path, 'spool'))) == 1     # that of image one
    # Others have limits of their own.
    add('two', noise(2 * MIB, 3), BOB)
    assert stores.repo(store).images() == ['one', 'two']


@pytest.mark.parametrize('known', [True, False])
def test_it_is_refused_while_it_comes(store, monkeypatch, known):
    """It need not come to its end, which a client may never send."""
    monkeypatch.setattr(limits, 'EVERY', MIB)
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
    # And what another project had stored takes nothing of one's own.
    add('four', data, BOB)
    assert stored(store, 'bob') == 0


@pytest.mark.parametrize('counted', [False, True])
def test_deletion_and_collection_give_it_back(store, counted):
    """Whether the image was counted before or not."""
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
    # What is stored for no project has no limit.
    add('four', noise(2 * MIB, 4), None)
    assert len(stores.repo(store).images()) == 4


@pytest.mark.parametrize('value', ['alice:much', 'alice:-1', 'alice',
                                   f'alice:{1 << 40}'])
def test_limits_that_are_none(tmp_path, value):
    file = tmp_path / 'glance-api.conf'
    file.write_text(f'[one]\ndedup_store_project_limits_mib = {value}\n')
    conf = cfg.ConfigOpts()
    conf.register_opts(opts.dedup_opts, 'one')
    conf([], default_config_files=[str(file)])
    with pytest.raises(ValueError, match='dedup_store_project_limits_mib'):
        conf.one.dedup_store_project_limits_mib


def test_limits_in_a_file(tmp_path):
    file = tmp_path / 'glance-api.conf'
    file.write_text('[one]\n'
                    'dedup_store_project_limits_mib = alice:1,bob:0\n')
    conf = cfg.ConfigOpts()
    conf.register_opts(opts.dedup_opts, 'one')
    conf([], default_config_files=[str(file)])
    assert conf.one.dedup_store_project_limits_mib == {'alice': 1, 'bob': 0}


def test_uploads_at_once_look_again(store):
    """The one that is committed first is seen by the other."""
    halfway, go_on = threading.Event(), threading.Event()
    results = []

    def source():
        yield noise(2 * MIB, 1)
        halfway.set()
        assert go_on.wait(60)

    def upload():
        try:
            results.append(add('one', source(), size=2 * MIB))
        except exceptions.StorageFull as exc:
            results.append(exc)
    thread = threading.Thread(target=upload)
    thread.start()
    try:
        assert halfway.wait(60)
        add('two', noise(2 * MIB, 2))
    finally:
        go_on.set()
        thread.join(60)
    assert isinstance(results[0], exceptions.StorageFull)
    assert stores.repo(store).images() == ['two']


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
