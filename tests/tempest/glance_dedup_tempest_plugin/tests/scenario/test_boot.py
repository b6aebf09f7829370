# SPDX-License-Identifier: Apache-2.0
"""Nova boots from an image of the store."""

import os

from tempest.common import waiters
from tempest.lib.common.utils import data_utils
from tempest.lib.common.utils import test_utils
from tempest.lib import decorators

from glance_dedup_tempest_plugin.tests.scenario import base

CONF = base.CONF


class BootTest(base.DedupTest):

    @classmethod
    def skip_checks(cls):
        super().skip_checks()
        if not CONF.service_available.nova:
            raise cls.skipException('Nova is not available')
        if not CONF.compute_feature_enabled.console_output:
            raise cls.skipException('servers show no console')
        if not os.path.isfile(CONF.scenario.img_file):
            raise cls.skipException(
                'the file of [scenario] img_file is not there')

    @classmethod
    def setup_clients(cls):
        super().setup_clients()
        cls.servers = cls.os_primary.servers_client

    @classmethod
    def resource_setup(cls):
        super().resource_setup()
        # The first version that accepts servers without a network.
        cls.setup_api_microversion_fixture(compute_microversion='2.37')

    @decorators.idempotent_id('aa4fb585-f737-4391-9f5b-af2f60fb1754')
    def test_server_boots(self):
        """The console shows that the image's system is up."""
        with open(CONF.scenario.img_file, 'rb') as image:
            image_id = self.upload(
                image, disk_format=CONF.scenario.img_disk_format)
        server_id = self.servers.create_server(
            name=data_utils.rand_name(
                prefix=CONF.resource_name_prefix, name='dedup'),
            imageRef=image_id, flavorRef=CONF.compute.flavor_ref,
            networks='none')['server']['id']
        self.addCleanup(waiters.wait_for_server_termination,
                        self.servers, server_id)
        self.addCleanup(test_utils.call_and_ignore_notfound_exc,
                        self.servers.delete_server, server_id)
        waiters.wait_for_server_status(self.servers, server_id, 'ACTIVE')
        self.wait_for(
            lambda: CONF.dedup.console_marker
            in self.servers.get_console_output(server_id)['output'],
            f'The console shows "{CONF.dedup.console_marker}"')
