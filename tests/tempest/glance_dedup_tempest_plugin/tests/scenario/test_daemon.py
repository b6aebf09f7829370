# SPDX-License-Identifier: Apache-2.0
"""A store works without its daemon."""

import os

from tempest.lib import decorators

from glance_dedup_tempest_plugin.tests.scenario import base


@decorators.serial
class DaemonTest(base.DedupTest):
    """Tests that stop the daemon, which other tests need."""

    needs = ('daemon_url', 'daemon_stop_command', 'daemon_start_command')

    def ready(self):
        try:
            return self.ask_daemon('/healthcheck/ready')['ready']
        except OSError:
            return False

    def stop_daemon(self):
        self.addCleanup(self.start_daemon)
        self.run_command('daemon_stop_command')
        self.assertRaises(OSError, self.ask_daemon, '/healthcheck')

    def start_daemon(self):
        self.run_command('daemon_start_command')
        self.wait_for(self.ready, 'dedupd is ready')

    @decorators.idempotent_id('097e3df0-6b56-4b25-876b-47be7e11bc1a')
    def test_uploads_and_downloads_go_on(self):
        data = os.urandom(base.SIZE)
        before = self.upload(data)
        self.stop_daemon()

        self.assertEqual(data, self.download(before))
        meanwhile = self.upload(data)
        self.assertEqual(data, self.download(meanwhile))
        self.assertEqual(data[5000:9000],
                         self.download_range(meanwhile, 5000, 8999))

        self.start_daemon()
        # The upload was deduplicated all the same.
        self.assertEqual(0, self.image_figures(meanwhile)['new_bytes'])
        self.assertEqual(data, self.download(meanwhile))

    @decorators.idempotent_id('287abfac-6a33-4dfc-8aef-a6ad4b89ae11')
    def test_a_download_under_way_goes_on(self):
        data = os.urandom(4 * base.SIZE)
        image_id = self.upload(data)
        response = self.images.show_image_file(image_id, chunked=True)
        self.addCleanup(response.release_conn)
        begun = response.read(base.BLOCK)

        self.stop_daemon()
        self.assertEqual(data, begun + response.read())

    @decorators.idempotent_id('036293f4-7f8e-4686-8c3d-d478d8882305')
    def test_deleting_goes_on(self):
        image_id = self.upload(os.urandom(base.SIZE))
        self.stop_daemon()

        self.images.delete_image(image_id)
        self.images.wait_for_resource_deletion(image_id)
        self.start_daemon()
        known = self.ask_daemon('/v1/images')['images']
        self.assertNotIn(image_id, [image['image_id'] for image in known])
