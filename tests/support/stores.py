# SPDX-License-Identifier: Apache-2.0

"""Stores of the driver, set up and used as Glance does it."""

import contextlib
import io
import os
import random
import types

import glance_store
from glance_store import exceptions
from glance_store import location as glance_location
from glance_store import multi_backend
from oslo_config import cfg
from oslo_config import fixture as config_fixture
import pytest

CONF = cfg.CONF

ALICE = types.SimpleNamespace(project_id='alice', is_admin=False)
BOB = types.SimpleNamespace(project_id='bob', is_admin=False)
ADMIN = types.SimpleNamespace(project_id='ops', is_admin=True)


@pytest.fixture
def configure(tmp_path):
    """A function that sets up stores: ``configure(one={...}, two={...})``."""
    saved = dict(glance_location.SCHEME_TO_CLS_BACKEND_MAP)
    config = config_fixture.Config(CONF)
    config.setUp()
    with contextlib.suppress(cfg.DuplicateOptError):
        CONF.register_opt(cfg.DictOpt('enabled_backends'))

    def _configure(**groups):
        glance_location.SCHEME_TO_CLS_BACKEND_MAP.clear()
        config.config(enabled_backends={
            group: values.pop('type', 'dedup')
            for group, values in groups.items()})
        glance_store.register_store_opts(CONF)
        config.config(group='glance_store', default_backend=next(iter(groups)))
        for group, values in groups.items():
            if CONF.enabled_backends[group] == 'dedup':
                values.setdefault('dedup_store_datadir', tmp_path / group)
                values.setdefault('dedup_store_filter_dir', tmp_path)
                values.setdefault('dedup_store_filter_mib', 1)
            for name, value in values.items():
                if value is ...:  # the configuration file's value
                    continue
                value = str(value) if isinstance(value, os.PathLike) else value
                config.config(group=group, **{name: value})
        glance_store.create_multi_stores(CONF)
        found = [multi_backend.get_store_from_store_identifier(group)
                 for group in groups]
        return found[0] if len(found) == 1 else found

    yield _configure
    config.cleanUp()
    glance_location.SCHEME_TO_CLS_BACKEND_MAP.clear()
    glance_location.SCHEME_TO_CLS_BACKEND_MAP.update(saved)


@pytest.fixture
def store(configure):
    return configure(one={})


def add(data, image_id='image', size=None, backend='one', algo='sha512',
        context=None, verifier=None):
    source = io.BytesIO(data) if isinstance(data, bytes) else data
    if size is None:
        size = len(data) if isinstance(data, bytes) else 0
    return glance_store.add_with_multihash(
        CONF, image_id, source, size, backend, algo, context=context,
        verifier=verifier)


def get(url, backend='one', **kwargs):
    download, size = glance_store.get(url, backend, **kwargs)
    data = b''.join(download)
    assert len(data) == size
    return data


def get_size(url, backend='one'):
    return glance_store.get_size_from_uri_and_backend(url, backend)


def delete(url, backend='one', context=None):
    glance_store.delete(url, backend, context=context)


def repo(store):
    return store._repository


def options(store):
    """Return the arguments of the store's repository to the engine."""
    return repo(store)._open_engine.keywords


def assert_nothing_left(store, image_id='image'):
    """Require no image and no transaction: the id can be used again."""
    assert repo(store).images() == []
    assert os.listdir(os.path.join(repo(store).path, 'spool')) == []
    url = add(b'again', image_id)[0]
    assert get(url) == b'again'
    delete(url)


class Dribble:
    """A reader that returns fewer bytes than requested."""

    def __init__(self, data, most):
        self.data = io.BytesIO(data)
        self.random = random.Random(7)
        self.most = most

    def read(self, length):
        return self.data.read(min(length, self.random.randint(1, self.most)))


def open_files(path):
    """Return the number of this process's files open below a path."""
    count = 0
    for number in os.listdir('/proc/self/fd'):
        with contextlib.suppress(OSError):
            count += os.readlink(f'/proc/self/fd/{number}').startswith(
                os.path.join(path, 'images'))
    return count


def refused(url, backend='one'):
    """Require that nothing is found at a location."""
    for call in (glance_store.get, get_size, delete):
        with pytest.raises((exceptions.NotFound, exceptions.BadStoreUri)):
            call(url, backend)


GOOD = f'dedup://{"0" * 32}/image/{"1" * 32}/{"a" * 64}'
