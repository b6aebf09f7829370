# SPDX-License-Identifier: Apache-2.0

"""Runs RPC and notifications, which need a message broker.

Without a ``transport_url``, oslo.messaging is not imported. With one, it is
imported and waits for the broker in threads of its own: a broker that is away
delays nothing else, and oslo.messaging connects again when the broker is back.
"""

from collections.abc import Callable
import contextlib
import queue
import threading
from typing import Any

from oslo_config import cfg
from oslo_log import log

from dedupd.endpoints import operations
from dedupd.schedule import task_scheduler
from dedupd.tasks import registry

LOG = log.getLogger(__name__)

#: The most notifications that are kept while the broker is away. Further ones
#: are lost.
MAX_EVENTS = 1000

_Event = tuple[str, str, task_scheduler.Fields]


class Messaging:
    """RPC, the daemon's notifications, and those of Glance.

    :param conf: the daemon's options; those of oslo.messaging are read from
        the same files
    """

    def __init__(self, conf: cfg.ConfigOpts,
                 control: operations.Control,
                 scheduler: task_scheduler.Scheduler) -> None:
        self._conf = conf
        self._control = control
        self._events: queue.Queue[_Event | None] = queue.Queue(MAX_EVENTS)
        self._threads: list[threading.Thread] = []
        self._closers: list[Callable[[], Any]] = []
        # Now, so that no task begins without a notification.
        scheduler.listeners.append(self._put)

    def start(self) -> None:
        """Start the threads; returns at once."""
        self._in_thread('dedupd-messaging', self._run)

    def stop(self, timeout: float) -> None:
        """Send the remaining notifications, and finish the calls under way.

        If the broker is away, this gives up after `timeout` seconds.
        """
        self._put_or_lose(None)
        closing = threading.Thread(target=self._close, daemon=True)
        closing.start()
        closing.join(timeout)

    def _in_thread(self, name: str, function) -> None:
        thread = threading.Thread(target=function, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _put(self, event: str, task: str,
             payload: task_scheduler.Fields) -> None:
        """The scheduler's listener; never waits."""
        if registry.TASKS[task].is_told:
            self._put_or_lose((event, task, payload))

    def _put_or_lose(self, event: _Event | None) -> None:
        try:
            self._events.put_nowait(event)
        except queue.Full:
            LOG.warning('A notification is lost: %d wait for the broker '
                        'already.', MAX_EVENTS)

    def _run(self) -> None:
        try:
            # Otherwise oslo.service would load eventlet.
            with contextlib.suppress(ImportError):
                from oslo_service import backend
                backend.init_backend(backend.BackendType.THREADING)
            from dedupd import rpc
            from dedupd.rpc import notifications
            conf = rpc.read_options(self._conf.config_file,
                                    self._conf.config_dir)
            sender = notifications.Sender(
                conf, self._control.status()['repository']['id'])
            self._in_thread('dedupd-notify', lambda: self._send(sender))
            server = rpc.Server(conf, self._control)
            self._closers.append(server.stop)
            server.start()
            if self._conf.dedupd.glance_notifications:
                listener = notifications.Listener(conf, self._control)
                self._closers.append(listener.stop)
                listener.start()
        except Exception as e:
            # The text before an @ may be the broker's password.
            LOG.error('Messaging cannot be used; everything else works. %s: '
                      '%s', type(e).__name__,
                      'see transport_url' if '@' in str(e) else e)

    def _send(self, sender) -> None:
        while (event := self._events.get()) is not None:
            sender.send(*event)

    def _close(self) -> None:
        for close in self._closers:
            close()
        for thread in self._threads:
            thread.join()
