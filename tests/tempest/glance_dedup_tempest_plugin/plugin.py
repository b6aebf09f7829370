# SPDX-License-Identifier: Apache-2.0
"""The interface of a plugin for tempest."""

import os

from tempest.test_discover import plugins

from glance_dedup_tempest_plugin import config


class GlanceDedupPlugin(plugins.TempestPlugin):

    def load_tests(self):
        package = os.path.dirname(os.path.abspath(__file__))
        return os.path.join(package, 'tests'), os.path.dirname(package)

    def register_opts(self, conf):
        conf.register_group(config.dedup_group)
        conf.register_opts(config.DEDUP_OPTS, config.dedup_group)

    def get_opt_lists(self):
        return [(config.dedup_group.name, config.DEDUP_OPTS)]
