# SPDX-License-Identifier: Apache-2.0

"""A peer without a daemon, whose images arrive like any others.

Tests use it if no other process may run.
"""

import contextlib
import hashlib

from glance_dedup.client import client_errors
from glance_dedup.client import wire
from glance_dedup.transfer import image_sending
from tests.support import replicas


class Recipe:
    """A recipe with the interface of the client's."""

    def __init__(self, sending):
        self.header = sending.header
        self.upload_id = sending.upload_id
        self.hashes = {'sha512': hashlib.sha512(
            sending.image.read()).hexdigest()}
        self._sending = sending

    def __iter__(self):
        return image_sending._extents(self._sending.image, self.header)

    def close(self):
        self._sending.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()


class Client:
    """The part of the daemon's client that an arriving image uses.

    :param most: so many requests for blocks are answered; None: all
    """

    address = 'near'

    def __init__(self, home, most=None):
        self._home = home
        self._left = most
        self.received = 0

    def recipe(self, image_id):
        return Recipe(replicas.Sending(self._home, image_id))

    def blocks(self, image_id, upload_id, ranges):
        if self._left is not None:
            if not self._left:
                raise client_errors.DaemonUnavailable(
                    'near: it has answered often enough')
            self._left -= 1
        with contextlib.closing(
                replicas.Sending(self._home, image_id)) as sending:
            for body in sending.frames(ranges):
                self.received += len(body)
                yield from wire.Frames(
                    wire.Buffer(body, client_errors.BadAnswer), ranges, 0.0)

    def interrupt(self):
        pass

    def close(self):
        pass
