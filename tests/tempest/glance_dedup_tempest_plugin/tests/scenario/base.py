# SPDX-License-Identifier: Apache-2.0
"""Helpers for the scenarios: images, and dedupd as seen from outside."""

import http.client
import io
import json
import shlex
import subprocess
import time
import urllib.parse

from tempest.common import waiters
from tempest import config
from tempest.lib.common.utils import data_utils
from tempest.lib.common.utils import test_utils
import tempest.test

CONF = config.CONF

BLOCK = 4096
SIZE = 2048 * BLOCK

# Seconds
REQUEST_TIMEOUT = 30
POLL = 0.5


class DedupTest(tempest.test.BaseTestCase):
    """Base class; a test names the options that it requires.

    :cvar needs: names of options of the group ``[dedup]``
    """

    credentials = ['primary']
    needs = ()

    @classmethod
    def skip_checks(cls):
        super().skip_checks()
        if not CONF.service_available.glance:
            raise cls.skipException('Glance is not available')
        missing = [name for name in cls.needs if not CONF.dedup[name]]
        if missing:
            raise cls.skipException(
                'not given in [dedup]: ' + ', '.join(missing))

    @classmethod
    def setup_credentials(cls):
        cls.set_network_resources()
        super().setup_credentials()

    @classmethod
    def setup_clients(cls):
        super().setup_clients()
        cls.images = cls.os_primary.image_client_v2

    # -- images ------------------------------------------------------------

    def create_image(self, **properties):
        """Create a record without data, for the test; return its id."""
        properties.setdefault('disk_format', 'raw')
        image = self.images.create_image(
            name=data_utils.rand_name(
                prefix=CONF.resource_name_prefix, name='dedup'),
            container_format='bare', visibility='private', **properties)
        self.addCleanup(test_utils.call_and_ignore_notfound_exc,
                        self.images.delete_image, image['id'])
        return image['id']

    def upload(self, data, **properties):
        """Store bytes, or a file, in a new image; return its id."""
        image_id = self.create_image(**properties)
        if isinstance(data, bytes):
            data = io.BytesIO(data)
        self.images.store_image_file(image_id, data)
        waiters.wait_for_image_status(self.images, image_id, 'active')
        stores = self.images.show_image(image_id).get('stores')
        self.assertEqual(
            CONF.dedup.store, stores,
            f'The image is in the store {stores}, not in that of [dedup] '
            'store, which has to be the default store')
        return image_id

    def download(self, image_id):
        return self.images.show_image_file(image_id).data

    def download_range(self, image_id, first, last):
        """Return the bytes from offset `first` to offset `last`, inclusive."""
        headers = {'Range': f'bytes={first}-{last}'}
        response, body = self.images.get(
            f'images/{image_id}/file', headers=headers, extra_headers=True)
        self.images.expected_success(206, response.status)
        return body

    # -- the daemon --------------------------------------------------------

    def ask_daemon(self, path):
        """Return dedupd's answer, parsed.

        :raises OSError: if nothing answers
        """
        address = urllib.parse.urlsplit(CONF.dedup.daemon_url)
        # Use no proxy, even if the environment names one.
        connection = http.client.HTTPConnection(
            address.hostname, address.port, timeout=REQUEST_TIMEOUT)
        try:
            connection.request('GET', path)
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        self.assertEqual(200, response.status, f'{path}: {body[:400]}')
        return json.loads(body)

    def wait_for(self, condition, what):
        """Wait until a condition holds."""
        self.assertTrue(
            test_utils.call_until_true(condition, CONF.dedup.timeout, POLL),
            f'{what}: not within {CONF.dedup.timeout} s')

    def image_figures(self, image_id):
        """Return dedupd's figures of one image."""
        for image in self.ask_daemon('/v1/images')['images']:
            if image['image_id'] == image_id:
                return image
        self.fail(f'dedupd does not know the image {image_id}: does it '
                  'serve the repository of this Glance?')

    def disk_bytes(self):
        """Return the repository's bytes, measured after the call."""
        # The daemon's figures may be some seconds old.
        time.sleep(6)
        return self.ask_daemon('/v1/status')['space']['disk_bytes']

    def run_command(self, option):
        """Run the command in an option of ``[dedup]``."""
        command = CONF.dedup[option]
        result = subprocess.run(
            shlex.split(command), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=CONF.dedup.timeout)
        self.assertEqual(0, result.returncode,
                         f'[dedup] {option}: {command}: {result.stdout}')
