# SPDX-License-Identifier: Apache-2.0

"""The store: the right to delete an image, and scopes of projects."""

import types

from glance_store import exceptions as glance_exceptions
from oslo_config import cfg
import pytest

from glance_dedup.base import exceptions
from glance_dedup.driver import dedup_store
from tests.support.repositories import noise
from tests.support import stores
from tests.support.stores import add
from tests.support.stores import ADMIN
from tests.support.stores import ALICE
from tests.support.stores import BOB
from tests.support.stores import delete
from tests.support.stores import get
from tests.support.stores import refused
from tests.support.stores import repo

MIB = 1 << 20

configure = stores.configure
store = stores.store


# -- Deletion --------------------------------------------------------------

def glance_shows(store, **options):
    """Have a store know these options of Glance, and no others."""
    store.conf = cfg.ConfigOpts()
    for name, value in options.items():
        store.conf.register_opt(cfg.BoolOpt(name, default=value))


@pytest.mark.parametrize('owner,who,allowed', [
    (ALICE, ALICE, True), (ALICE, BOB, False), (ALICE, ADMIN, True),
    (ALICE, None, True), (None, BOB, True), (ADMIN, ALICE, False),
    (ALICE, types.SimpleNamespace(project_id=None, is_admin=False), False),
    (ALICE, types.SimpleNamespace(), False),
    (types.SimpleNamespace(project_id=None, is_admin=True), BOB, True)])
def test_who_may_delete(store, owner, who, allowed):
    glance_shows(store, show_multiple_locations=True)
    url = add(b'data', context=owner)[0]
    if allowed:
        delete(url, context=who)
        refused(url)
    else:
        with pytest.raises(glance_exceptions.Forbidden):
            delete(url, context=who)
        assert get(url) == b'data'


@pytest.mark.parametrize('options,allowed', [
    ({'show_multiple_locations': False, 'show_image_direct_url': False}, True),
    ({'show_multiple_locations': True, 'show_image_direct_url': False}, False),
    ({'show_multiple_locations': False, 'show_image_direct_url': True}, False),
    ({'show_multiple_locations': False}, False),
    ({'show_image_direct_url': False}, False),
    ({}, False)])
def test_whose_image_is_asked_where_locations_are_shown(
        store, options, allowed):
    """A project may delete its image if Glance hides the locations.

    An administrator has stored this image for the project.
    """
    glance_shows(store, **options)
    url = add(b'data', context=ADMIN)[0]
    if allowed:
        delete(url, context=ALICE)
        refused(url)
    else:
        with pytest.raises(glance_exceptions.Forbidden):
            delete(url, context=ALICE)
        assert get(url) == b'data'


def test_delete_twice(store):
    url = add(b'data')[0]
    delete(url)
    with pytest.raises(glance_exceptions.NotFound):
        delete(url)


@pytest.mark.parametrize('raised,expected', [
    (exceptions.ImageNotFound, glance_exceptions.NotFound),
    (exceptions.BusyError, dedup_store.DELETE_TIMED_OUT),
    (exceptions.AccessDenied, glance_exceptions.Forbidden),
    (exceptions.StorageError, glance_exceptions.BackendException),
    (exceptions.DamagedError, glance_exceptions.BackendException)])
def test_repository_errors_of_deletes(store, monkeypatch, raised, expected):
    url = add(b'data')[0]
    real = repo(store)

    def fail(*args):
        raise raised('words')

    monkeypatch.setattr(store, '_repository', types.SimpleNamespace(
        delete=fail, read_keys=real.read_keys,
        repository_id=real.repository_id))
    with pytest.raises(expected):
        delete(url)


# -- Scopes ----------------------------------------------------------------

def new_bytes(store, image_id, data, context):
    add(data, image_id, context=context)
    return repo(store).stat(image_id).new_bytes


def test_projects_share(store):
    """Projects share blocks by default."""
    data = noise(MIB)
    assert [new_bytes(store, f'i{n}', data, who) for n, who in enumerate(
        (ALICE, BOB, ALICE, None))] == [MIB, 0, 0, 0]


def test_projects_do_not_share(configure):
    """A project shares with itself only, as do users without a project."""
    store = configure(one={'dedup_store_scope': 'project'})
    nobody = types.SimpleNamespace(project_id=None, is_admin=False)
    data = noise(MIB)
    assert [new_bytes(store, f'i{n}', data, who) for n, who in enumerate(
        (ALICE, BOB, ALICE, BOB, None, nobody, ADMIN))] == [
            MIB, MIB, 0, 0, MIB, 0, MIB]
    # The repository does not fix the setting.
    store = configure(one={'dedup_store_scope': 'global'})
    assert [new_bytes(store, f'j{n}', data, who) for n, who in enumerate(
        (ALICE, BOB))] == [MIB, 0]
    store = configure(one={'dedup_store_scope': 'project'})
    assert new_bytes(store, 'k', data, ALICE) == 0


def test_projects_that_are_opted_out(configure):
    """An opted-out project shares no blocks; other projects still do."""
    store = configure(
        one={'dedup_store_no_dedup_projects': f'{BOB.project_id},other'})
    data = noise(MIB)
    assert [new_bytes(store, f'i{n}', data, who) for n, who in enumerate(
        (ALICE, BOB, ALICE, None))] == [MIB, MIB, 0, 0]


def test_another_scope_is_refused(configure):
    with pytest.raises(ValueError, match='tenant'):
        configure(one={'dedup_store_scope': 'tenant'})
