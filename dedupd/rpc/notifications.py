# SPDX-License-Identifier: Apache-2.0

"""Notifications over oslo.messaging: those sent, and those of Glance.

Sent are ``dedup.<task>.start``, ``.end`` and ``.error`` of the tasks of which
the registry says so, by the publisher ``dedupd.<host>``. As with every service
of OpenStack, the options of ``[oslo_messaging_notifications]`` say how, and
whether at all: without a ``driver`` nothing is sent.
"""

import socket
from typing import Any

from oslo_config import cfg
from oslo_log import log
import oslo_messaging

from dedupd import control as control_module
from glance_dedup.base import exceptions

LOG = log.getLogger(__name__)

# What the payload's part besides the repository is called.
_PARTS = {'start': 'arguments', 'end': 'result', 'error': None}

# What Glance publishes under, unless its option control_exchange was changed.
_GLANCE_EXCHANGE = 'glance'

# The task that each of Glance's notifications asks for.
_ANSWERS = {'image.delete': 'collect', 'image.upload': 'account'}


class Sender:
    """Publishes what the maintainer's tasks do. Of one thread.

    :param conf: the options of oslo.messaging
    :param repository_id: for each payload
    """

    def __init__(self, conf: cfg.ConfigOpts, repository_id: str) -> None:
        self._repository_id = repository_id
        self._notifier = oslo_messaging.Notifier(
            oslo_messaging.get_notification_transport(conf),
            publisher_id=f'dedupd.{socket.gethostname()}')

    def send(self, event: str, task: str, payload: dict[str, Any]) -> None:
        """Publish; while the broker is away, wait for it.

        :param event: ``start``, ``end`` or ``error``
        """
        part = _PARTS[event]
        body = {'repository_id': self._repository_id,
                **({part: payload} if part else payload)}
        notify = (self._notifier.error if event == 'error'
                  else self._notifier.info)
        try:
            notify({}, f'dedup.{task}.{event}', body)
        except Exception as e:
            LOG.warning('The notification dedup.%s.%s is lost: %s', task,
                        event, e)


class _Endpoint:
    """Has tasks run when Glance tells of images.

    Only the type of a notification counts, nothing of its content: whoever
    can publish can have tasks run, which they do anyway, and nothing else.
    """

    filter_rule = oslo_messaging.NotificationFilter(
        event_type=r'^image\.(delete|upload)$')

    def __init__(self, control: control_module.Control) -> None:
        self._control = control

    def info(self, context, publisher_id, event_type, payload, metadata):
        try:
            # Requests that are alike become one, however many images go.
            self._control.start_task(_ANSWERS[event_type])
        except exceptions.BusyError:
            # Another daemon is the maintainer, and heard it, too.
            LOG.debug('%s: left to the maintainer', event_type)


class Listener:
    """Has deleted images collected, and new ones counted, at once.

    :param conf: the options of oslo.messaging
    """

    def __init__(self, conf: cfg.ConfigOpts,
                 control: control_module.Control) -> None:
        transport = oslo_messaging.get_notification_transport(conf)
        targets = [
            oslo_messaging.Target(topic=topic, exchange=_GLANCE_EXCHANGE)
            for topic in conf.oslo_messaging_notifications.topics]
        # A pool, which is a queue, of its own: else each notification would
        # be taken from those for whom Glance publishes it. Not 'dedupd.HOST':
        # that is the queue of the RPC server.
        self._listener = oslo_messaging.get_notification_listener(
            transport, targets, [_Endpoint(control)],
            pool=f'dedupd_glance.{socket.gethostname()}')

    def start(self) -> None:
        """Returns when the broker was reached."""
        self._listener.start(override_pool_size=1)
        LOG.info('Listening to notifications of Glance.')

    def stop(self) -> None:
        self._listener.stop()
        self._listener.wait()
