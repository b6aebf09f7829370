# SPDX-License-Identifier: Apache-2.0
"""Images share their common blocks, and free them."""

import os

from tempest.lib import decorators
from tempest.lib import exceptions

from glance_dedup_tempest_plugin.tests.scenario import base


def changed(data, blocks):
    """Return `data` with that many of its blocks, far apart, replaced."""
    data = bytearray(data)
    for number in range(blocks):
        start = number * len(data) // blocks
        data[start:start + base.BLOCK] = os.urandom(base.BLOCK)
    return bytes(data)


class SharingTest(base.DedupTest):

    needs = ('daemon_url',)

    @decorators.idempotent_id('8950777f-3071-4072-9b4d-b5969772afe7')
    def test_similar_images_save_space(self):
        """Only the differing part of the second image is new."""
        one = os.urandom(base.SIZE)
        other = changed(one, 16)
        ids = [self.upload(data) for data in (one, other)]

        first, second = [self.image_figures(each) for each in ids]
        self.assertEqual(base.SIZE, first['new_bytes'])
        self.assertEqual(base.SIZE, second['size'])
        # Blocks may be larger than the changed pieces.
        self.assertLess(second['new_bytes'], base.SIZE // 8)
        self.assertGreaterEqual(second['new_bytes'], 16 * base.BLOCK)
        self.assertLess(second['stored_bytes'], base.SIZE // 8)
        for image_id, data in zip(ids, (one, other)):
            self.assertEqual(data, self.download(image_id))

    @decorators.idempotent_id('195f0e45-ffec-42e7-acb6-3e611c653a6f')
    def test_zeros_take_nothing(self):
        data = bytes(base.SIZE)
        image_id = self.upload(data)

        figures = self.image_figures(image_id)
        self.assertEqual(base.SIZE, figures['zero_bytes'])
        self.assertEqual(0, figures['stored_bytes'])
        self.assertEqual(data, self.download(image_id))

    @decorators.idempotent_id('25c0e473-297a-4a05-b4d8-17f3bcc935d0')
    def test_deleting_one_keeps_the_other(self):
        one = os.urandom(base.SIZE)
        other = changed(one, 16)
        ids = [self.upload(data) for data in (one, other)]

        self.images.delete_image(ids[0])
        self.images.wait_for_resource_deletion(ids[0])
        self.assertRaises(exceptions.NotFound, self.download, ids[0])
        self.assertEqual(other, self.download(ids[1]))


@decorators.serial
class CollectionTest(base.DedupTest):
    """No other test may store images at the same time."""

    needs = ('daemon_url',)

    @decorators.idempotent_id('6f2b51c3-1251-48a8-aafe-608977cb4ec9')
    def test_deleting_gives_back_the_space(self):
        before = self.disk_bytes()
        image_id = self.upload(os.urandom(base.SIZE))
        full = self.disk_bytes()
        self.assertGreaterEqual(full, before + base.SIZE)

        self.images.delete_image(image_id)
        self.images.wait_for_resource_deletion(image_id)
        if base.CONF.dedup.collect_command:
            self.run_command('collect_command')
        self.wait_for(lambda: self.disk_bytes() < full - base.SIZE * 7 // 8,
                      'The space of a deleted image comes back')


class RangeTest(base.DedupTest):

    @decorators.idempotent_id('9e9f952b-d891-4ce7-95e1-590ab3865b78')
    def test_ranges(self):
        """A download returns exactly the requested range."""
        # The length is not a whole number of blocks.
        data = os.urandom(base.SIZE // 2) + bytes(
            base.SIZE // 4) + os.urandom(base.BLOCK + 1)
        image_id = self.upload(data)
        end = len(data) - 1
        for first, last in ((0, 0), (0, end), (1, base.BLOCK),
                            (base.BLOCK - 1, 5 * base.BLOCK),
                            (base.SIZE // 2 - 10, base.SIZE // 2 + 10),
                            (base.SIZE // 2, base.SIZE // 2 + base.BLOCK),
                            (end - base.BLOCK - 3, end), (end, end)):
            self.assertEqual(data[first:last + 1],
                             self.download_range(image_id, first, last),
                             f'bytes {first}-{last}')

    @decorators.attr(type=['negative'])
    @decorators.idempotent_id('09cb1e9a-678b-4e35-b5f5-746d4b6d0d1f')
    def test_range_beyond_the_end(self):
        image_id = self.upload(os.urandom(base.BLOCK))
        self.assertRaises(
            exceptions.RestClientException, self.download_range,
            image_id, base.BLOCK, 2 * base.BLOCK)
        self.assertEqual(base.BLOCK, len(self.download(image_id)))
