# SPDX-License-Identifier: Apache-2.0

"""glance_store's own functional tests, over a repository.

Their base class needs a cloud, and a configuration by ``default_store``, which
has a fixed list of choices; its tests run unchanged.
"""

import contextlib

import fixtures
import glance_store
from glance_store import backend
from glance_store import location
from glance_store.tests.functional import base
from oslo_config import cfg
from oslo_config import fixture as config_fixture
import testtools

from glance_dedup.driver import store_opts

CONF = cfg.CONF


class TestsOfGlanceStore(base.BaseFunctionalTests):
    """Inherits all its tests."""

    def __init__(self, name):
        testtools.TestCase.__init__(self, name)

    def setUp(self):
        testtools.TestCase.setUp(self)
        schemes = dict(location.SCHEME_TO_CLS_MAP)
        self.addCleanup(location.SCHEME_TO_CLS_MAP.update, schemes)
        self.addCleanup(location.SCHEME_TO_CLS_MAP.clear)
        path = self.useFixture(fixtures.TempDir()).path
        config = self.useFixture(config_fixture.Config(CONF))
        with contextlib.suppress(cfg.DuplicateOptError):
            glance_store.register_opts(CONF)
        CONF.register_opts(store_opts.dedup_opts, group='glance_store')
        config.config(group='glance_store', stores=['dedup'],
                      dedup_store_datadir=f'{path}/repository',
                      dedup_store_filter_dir=path, dedup_store_filter_mib=1)
        glance_store.create_stores(CONF)
        self.store = backend._load_store(CONF, 'dedup')
        self.store.configure()


def test_there_are_some():
    assert sum(name.startswith('test_')
               for name in dir(TestsOfGlanceStore)) >= 4
