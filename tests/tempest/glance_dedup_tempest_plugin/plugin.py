# Licensed under the Apache License, Version 2.0 (the "License"); you may
# not use this file except in compliance with the License. You may obtain
# a copy of the License at
#
#      http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
# WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
# License for the specific language governing permissions and limitations
# under the License.
"""What tempest asks a plugin for."""

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
