# SPDX-License-Identifier: Apache-2.0

"""Notifications over oslo.messaging: the daemon's own, and Glance's.

The publisher ``dedupd.<host>`` sends ``dedup.<task>.start``, ``.end`` and
``.error`` for the tasks that the registry marks. As in every service of
OpenStack, the options of ``[oslo_messaging_notifications]`` configure that;
without a ``driver`` nothing is sent.
"""

import socket
from typing import Any

from oslo_config import cfg
from oslo_log import log
import oslo_messaging

from dedupd.endpoints import operations
from glance_dedup.base import exceptions

LOG = log.getLogger(__name__)

# The payload's second part, besides the repository.
_PARTS = {'start': 'arguments', 'end': 'result', 'error': None}

# The exchange of Glance, unless its option control_exchange was changed.
_GLANCE_EXCHANGE = 'glance'

# The task that each of Glance's notifications requests.
_ANSWERS = {'image.delete': 'collect', 'image.upload': 'account'}


class Sender:
    """Publishes the starts and ends of tasks. Used in one thread only.

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
    """Has tasks run when Glance notifies of images.

    Only the type of a notification counts, not its content. So a program that
    can publish can start these tasks, which run anyway, and nothing else.
    """

    filter_rule = oslo_messaging.NotificationFilter(
        event_type=r'^image\.(delete|upload)$')

    def __init__(self, control: operations.Control) -> None:
        self._control = control

    def info(self, context, publisher_id, event_type, payload, metadata):
        try:
            # Equal requests become one, however many images are deleted.
            self._control.start_task(_ANSWERS[event_type])
        except exceptions.BusyError:
            # Another daemon is the maintainer, and gets it, too.
            LOG.debug('%s: left to the maintainer', event_type)


class Listener:
    """Has deleted images collected and new ones counted, on notifications.

    :param conf: the options of oslo.messaging
    """

    def __init__(self, conf: cfg.ConfigOpts,
                 control: operations.Control) -> None:
        transport = oslo_messaging.get_notification_transport(conf)
        targets = [
            oslo_messaging.Target(topic=topic, exchange=_GLANCE_EXCHANGE)
            for topic in conf.oslo_messaging_notifications.topics]
        # A pool is a queue. Without its own, the daemon would take
        # notifications away from their other readers. The name is not
        # 'dedupd.HOST', which is the queue of the RPC server.
        self._listener = oslo_messaging.get_notification_listener(
            transport, targets, [_Endpoint(control)],
            pool=f'dedupd_glance.{socket.gethostname()}')

    def start(self) -> None:
        """Start to receive; returns when the broker was reached."""
        self._listener.start(override_pool_size=1)
        LOG.info('Listening to notifications of Glance.')

    def stop(self) -> None:
        """Stop receiving; returns when no notification is being handled."""
        self._listener.stop()
        self._listener.wait()
