# SPDX-License-Identifier: Apache-2.0
"""RabbitMQ, as a service of a cloud."""

from tests.cloud import cloud_service
from tests.functional import rabbitmq


class _Server(rabbitmq.RabbitMQ):
    """A broker whose processes are in the cloud's record."""

    def __init__(self, owner):
        state = owner.cloud.state
        super().__init__(owner.directory, [
            state.port(name) for name in
            ('rabbitmq', 'rabbitmq-distribution', 'rabbitmq-mapper')],
            owner.cloud.address, owner.cloud.password)
        self._owner = owner

    def _run(self, *command):
        return self._owner.spawn(command, self.environment())


class Broker(cloud_service.Service):
    name = 'rabbitmq'
    title = 'RabbitMQ'

    @property
    def address(self):
        return f'{self.cloud.address}:{self.port}'

    @property
    def transport_url(self):
        return rabbitmq.url_of(
            self.port, self.cloud.address, self.cloud.password)

    def launch(self):
        _Server(self).launch()

    def answers(self):
        return _Server(self).answers()

    def consumers(self, queue):
        """Return the number of consumers of a queue."""
        return _Server(self).consumers(queue)
