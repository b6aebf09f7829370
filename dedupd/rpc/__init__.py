# SPDX-License-Identifier: Apache-2.0

"""Control over oslo.messaging: the server's side, and a client.

The target has the topic ``dedupd`` and the version 1.1; the server's name is
that of its host. Each method is one of
:class:`dedupd.endpoints.operations.Control`. The server checks the arguments,
since every program that reaches the broker can send anything. An error becomes
one of the exceptions below, and the client raises it again.
"""

import socket
import threading
from typing import Any

from oslo_config import cfg
from oslo_log import log
import oslo_messaging

from dedupd.endpoints import operations
from dedupd.schedule import task_scheduler
from dedupd.tasks import registry
from glance_dedup.base import exceptions

LOG = log.getLogger(__name__)

TOPIC = 'dedupd'
VERSION = '1.1'

# The version that added each method: a client requires no more than it needs.
_FIRST = '1.0'
_SINCE = {'projects': '1.1'}

#: The most seconds that a call of ``task`` waits.
MAX_WAIT = 30.0

# The most calls that run at once, and the most of them that wait for a task.
_THREADS = 16
_WAITING = 8

Reply = dict[str, Any]


class RPCError(Exception):
    """The daemon's answer if there is no result.

    :ivar message: a sentence. In the client, ``str`` of the error has the
        daemon's traceback, too.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidArguments(RPCError):
    """An argument is missing, unknown, of the wrong type or out of bounds."""


class NotFound(RPCError):
    """There is no such image, or no such task."""


class Busy(RPCError):
    """Another task or call is under way; the same call may work later."""


class NotMaintainer(Busy):
    """The called daemon does not maintain its repository now."""


class WrongRepository(RPCError):
    """The called daemon has another repository than was meant."""


class Failed(RPCError):
    """The repository could not do it; the message has the reason."""


def read_options(files: list[str] | None,
                 directories: list[str] | None) -> cfg.ConfigOpts:
    """The options of oslo.messaging, from the daemon's own files.

    They are in the process's global object, because oslo.messaging looks some
    of them up there, even if it gets another object.
    """
    cfg.CONF([], project='dedupd', default_config_files=files or [],
             default_config_dirs=directories or [])
    return cfg.CONF


class _Endpoint:
    """The methods that can be called. Thread-safe."""

    target = oslo_messaging.Target(version=VERSION)

    def __init__(self, control: operations.Control) -> None:
        self._control = control
        self._repository_id = control.status()['repository']['id']
        self._host = socket.gethostname()
        self._waiting = threading.Semaphore(_WAITING)

    @oslo_messaging.expose
    def status(self, context, /, **arguments):
        return self._call(self._control.status, arguments)

    @oslo_messaging.expose
    def history(self, context, /, **arguments):
        return self._call(self._control.history, arguments, since=_number)

    @oslo_messaging.expose
    def images(self, context, /, **arguments):
        return self._call(self._control.images, arguments)

    @oslo_messaging.expose
    def projects(self, context, /, **arguments):
        return self._call(self._control.projects, arguments)

    @oslo_messaging.expose
    def groups(self, context, /, **arguments):
        return self._call(self._control.groups, arguments)

    @oslo_messaging.expose
    def sharing(self, context, /, **arguments):
        return self._call(self._control.sharing, arguments)

    @oslo_messaging.expose
    def start_task(self, context, /, **arguments):
        return self._call(self._control.start_task, arguments, ('name',),
                          name=_text, **_TASK_ARGUMENTS)

    @oslo_messaging.expose
    def task(self, context, /, **arguments):
        return self._call(self._task, arguments, ('name',),
                          name=_text, after=_number, wait=_wait)

    @oslo_messaging.expose
    def mark_lost(self, context, /, **arguments):
        return self._call(self._mark_lost, arguments, ('image_id',),
                          image_id=_text)

    # -- calls that may wait: they must not occupy all threads

    def _task(self, name, after=0, wait=0):
        if wait and self._waiting.acquire(blocking=False):
            try:
                return self._control.task(name, after, wait)
            finally:
                self._waiting.release()
        return self._control.task(name, after)

    def _mark_lost(self, image_id):
        if not self._waiting.acquire(blocking=False):
            raise Busy(f'{_WAITING} calls wait already; try again later.')
        try:
            return self._control.mark_lost(image_id)
        finally:
            self._waiting.release()

    # Expected: no error of the daemon's, so not for its log.
    @oslo_messaging.expected_exceptions(RPCError)
    def _call(self, method, arguments, required=(), **known):
        repository_id = arguments.pop('repository_id', None)
        if repository_id not in (None, self._repository_id):
            raise WrongRepository(
                f'The daemon on {self._host} has the repository '
                f'{self._repository_id}.')
        for name in required:
            if name not in arguments:
                raise InvalidArguments(f'{name!r} is missing.')
        for name, value in arguments.items():
            if name not in known:
                raise InvalidArguments(f'There is no argument {name!r}.')
            known[name](name, value)
        try:
            result = method(*[arguments.pop(name) for name in required],
                            **arguments)
        except exceptions.RepositoryError as e:
            for kind, error in _ERRORS:
                if isinstance(e, kind):
                    raise error(str(e)) from None
        return {'repository_id': self._repository_id, 'host': self._host,
                **result}


# The first class that fits is used.
_ERRORS = (
    (exceptions.ImageNotFound, NotFound),
    (exceptions.InvalidParameter, InvalidArguments),
    (task_scheduler.NotMaintainer, NotMaintainer),
    (exceptions.BusyError, Busy),
    (exceptions.RepositoryError, Failed))


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value or len(value) > 255:
        raise InvalidArguments(f'{name!r} is not a string of 1 to 255 '
                               'characters.')


def _number(name: str, value: Any) -> None:
    if (isinstance(value, bool) or not isinstance(value, (int, float))
            or not 0 <= value < 1 << 53):
        raise InvalidArguments(f'{name!r} is not a number from 0 on.')


def _wait(name: str, value: Any) -> None:
    _number(name, value)
    if value > MAX_WAIT:
        raise InvalidArguments(
            f'{name!r} is more than {MAX_WAIT:.0f} seconds.')


def _truth(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidArguments(f'{name!r} is neither true nor false.')


def _list(name: str, value: Any) -> None:
    if not isinstance(value, list):
        raise InvalidArguments(f'{name!r} is not a list.')


_CHECKS = {bool: _truth, str: _text, int: _number, list: _list}
# The arguments of all tasks; Control checks which task has which.
_TASK_ARGUMENTS = {
    name: _CHECKS[kind] for task in registry.TASKS.values()
    for name, kind in task.arguments.items()}


class Server:
    """Serves the methods.

    :param conf: the result of :func:`read_options`
    """

    def __init__(self, conf: cfg.ConfigOpts,
                 control: operations.Control) -> None:
        transport = oslo_messaging.get_rpc_transport(conf)
        target = oslo_messaging.Target(topic=TOPIC, version=VERSION,
                                       server=socket.gethostname())
        self._server = oslo_messaging.get_rpc_server(
            transport, target, [_Endpoint(control)],
            access_policy=oslo_messaging.ExplicitRPCAccessPolicy)

    def start(self) -> None:
        """Start to serve; returns when the broker was reached, at any time."""
        self._server.start(override_pool_size=_THREADS)
        LOG.info('RPC is served.')

    def stop(self) -> None:
        """Accept no more calls, and finish those that are under way."""
        self._server.stop()
        self._server.wait()


class Client:
    """Calls the daemon on another host, over the broker.

    Every method returns what the method of the same name of
    :class:`dedupd.endpoints.operations.Control` does, with ``repository_id``
    and ``host`` of the daemon that answered. It raises the classes of this
    module, and ``oslo_messaging.MessagingTimeout`` if there was no answer in
    time.

    ::

        from dedupd import rpc
        from oslo_config import cfg

        cfg.CONF([], default_config_files=['/etc/dedupd/dedupd.conf'])
        client = rpc.Client.from_options(cfg.CONF, host='controller1')
        print(client.status()['space'])
        number = client.start_task('collect')['number']
        print(client.task('collect', after=number, wait=30)['last'])

    :param transport: an RPC transport that allows the exceptions of
        ``rpc.EXCEPTIONS``; see :meth:`from_options`
    :param host: the host of the called daemon; None: any that answers
    :param repository_id: if given, a daemon with another repository refuses
    :param timeout: seconds to wait for an answer
    """

    def __init__(self, transport: oslo_messaging.transport.RPCTransport,
                 host: str | None = None, repository_id: str | None = None,
                 timeout: float = 60.0) -> None:
        target = oslo_messaging.Target(topic=TOPIC, version=_FIRST)
        self._client = oslo_messaging.get_rpc_client(transport, target)
        self._host = host
        self._repository_id = repository_id
        self._timeout = timeout

    @classmethod
    def from_options(cls, conf: cfg.ConfigOpts, **options: Any) -> 'Client':
        """A client for the broker of the option ``transport_url``.

        :param conf: should be ``oslo_config.cfg.CONF``, since oslo.messaging
            looks there anyway
        """
        return cls(oslo_messaging.get_rpc_transport(
            conf, allowed_remote_exmods=list(EXCEPTIONS)), **options)

    def status(self) -> Reply:
        """The daemon's whole status."""
        return self._call('status')

    def history(self, since: float = 0) -> Reply:
        """Samples for plots.

        :param since: seconds since 1970
        """
        return self._call('history', since=since)

    def images(self) -> Reply:
        """``images``: all images, each with its sums."""
        return self._call('images')

    def projects(self) -> Reply:
        """``projects``: the sums of each; needs a daemon of 1.1."""
        return self._call('projects')

    def groups(self) -> Reply:
        """``groups``: all block groups."""
        return self._call('groups')

    def sharing(self) -> Reply:
        """The blocks that each two of the largest images have in common."""
        return self._call('sharing')

    def start_task(self, name: str, **arguments: bool | str | int | list[str]
                   ) -> Reply:
        """Have a task run as soon as possible.

        :param name: ``account``, ``collect``, ``merge``, ``scrub``,
            ``recompress``, ``tier``, ``evict``, ``projects``, ``usage``,
            ``rebuild-catalog`` or ``replicate``
        :param arguments: ``dry_run``, of collect, merge, recompress, tier and
            evict; ``full``, of scrub; ``codec`` and ``level``, of recompress;
            ``everything`` and ``metadata_only``, of tier; ``limit_mib``, of
            evict; ``images`` and ``volumes``, of usage
        :returns: with ``number``, to wait for
        """
        return self._call('start_task', name=name, **arguments)

    def task(self, name: str, after: int = 0, wait: float = 0) -> Reply:
        """A task's status.

        :param after: the number of a request
        :param wait: seconds, at most 30, to wait for the end of that request
        """
        return self._call('task', name=name, after=after, wait=wait)

    def mark_lost(self, image_id: str) -> Reply:
        """Give up an image whose recipe cannot be read.

        It waits for a running task, for at most a minute.
        """
        return self._call('mark_lost', image_id=image_id)

    def _call(self, method: str, /, **arguments: Any) -> Reply:
        if self._repository_id is not None:
            arguments['repository_id'] = self._repository_id
        context = self._client.prepare(
            server=self._host, version=_SINCE.get(method, _FIRST),
            timeout=self._timeout + arguments.get('wait', 0)
            + (operations.MAX_WAIT if method == 'mark_lost' else 0))
        return context.call({}, method, **arguments)


#: Modules whose exceptions a client's transport should allow.
EXCEPTIONS = (__name__, 'oslo_messaging.rpc.dispatcher')
