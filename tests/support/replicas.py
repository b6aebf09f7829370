# SPDX-License-Identifier: Apache-2.0

"""Sends images to a receiver that is no daemon, step by step."""

import contextlib
import types

from dedupd.serve import replica_receiver
from glance_dedup.client import wire
from glance_dedup.transfer import image_sending

#: Limits that a sender receives; small lots give several of them.
LOTS = types.SimpleNamespace(offset=0, lot_blocks=16, lot_bytes=1 << 20,
                             lot_zeros=1 << 20)


class Sending:
    """An image's description, its lots and their frames.

    To be closed.
    """

    def __init__(self, home, image_id, most=LOTS):
        self.image = home.open_image(image_id)
        self.header = wire.RecipeHeader.of(self.image.stat, home.parameters)
        self.upload_id = self.image.stat.upload_id
        self.lots = list(image_sending._lots(
            image_sending._extents(self.image, self.header), most,
            self.header.block_size))

    def frames(self, ranges):
        """Yield bodies that together have the blocks of ranges."""
        while ranges:
            frames, end = self.image.frames(ranges)
            ranges = wire.rest_of(ranges, end)
            yield b''.join([*frames, wire.END_FRAME])

    def replica(self, repo, project=''):
        """Begin a replica, which closes at the end of the context."""
        return contextlib.closing(replica_receiver.Replica(
            repo, self.image.stat.image_id, self.header, project))

    def deliver(self, replica, lots=None):
        """Offer lots, all if `lots` is None, and send what is missing."""
        for lot in self.lots[:lots]:
            ranges, _ = replica.offer(lot.offset, lot.extents)
            for body in self.frames(ranges):
                replica.take(lot.offset, body)

    def close(self):
        self.image.close()


def receive(repo, home, image_id):
    """Receive the whole image."""
    with contextlib.closing(Sending(home, image_id)) as sending:
        with sending.replica(repo) as replica:
            sending.deliver(replica)
            return replica.commit()
