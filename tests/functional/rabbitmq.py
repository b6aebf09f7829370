# SPDX-License-Identifier: Apache-2.0

"""A real RabbitMQ on ports of its own, with all files in one place.

It needs Debian's package rabbitmq-server, but not its service: the broker runs
as the user who runs the test, in a directory of the test's, and is stopped by
its process id.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import time

import amqp

from tests.support import ports

_PROGRAM = '/usr/lib/rabbitmq/bin/rabbitmq-server'
_START_SECONDS = 60
_STOP_SECONDS = 20


def url_of(port, address='127.0.0.1', password='guest'):
    """Return a broker's URL on this port, in oslo.messaging's form."""
    return f'rabbit://guest:{password}@{address}:{port}/'


class RabbitMQ:
    """A broker that can be stopped and started again.

    :param numbers: ports of the broker, of Erlang's distribution, and of its
        mapper; free ones if not given
    :param address: at which it listens
    :param password: of its user, `guest`
    """

    def __init__(self, directory, numbers=None, address='127.0.0.1',
                 password='guest'):
        for program in (_PROGRAM, 'epmd'):
            assert shutil.which(program), (
                f'{program} is missing; install the package rabbitmq-server')
        self._directory = pathlib.Path(directory)
        self._directory.mkdir(exist_ok=True)
        self._port, self._distribution_port, self._mapper_port = (
            numbers or tuple(ports.free_port() for _ in range(3)))
        self._processes = []
        self._address = address
        self._password = password
        self.url = url_of(self._port, address, password)

    def environment(self):
        # No variable of the caller's: the start script heeds names as common
        # as LOGS.
        place = self._directory
        return {
            'PATH': os.environ['PATH'],
            'HOME': str(place),
            'LANG': 'C.UTF-8',
            'ERL_EPMD_PORT': str(self._mapper_port),
            'ERL_EPMD_ADDRESS': '127.0.0.1',
            'RABBITMQ_NODENAME': f'test{self._port}@localhost',
            'RABBITMQ_NODE_IP_ADDRESS': self._address,
            'RABBITMQ_NODE_PORT': str(self._port),
            'RABBITMQ_DIST_PORT': str(self._distribution_port),
            'RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS':
                '+S 1:1 +sbwt none -kernel inet_dist_use_interface '
                '{127,0,0,1}',
            'RABBITMQ_CONF_ENV_FILE': '/dev/null',
            'RABBITMQ_CONFIG_FILE': str(place / 'rabbitmq'),
            'RABBITMQ_ENABLED_PLUGINS_FILE': str(place / 'plugins'),
            'RABBITMQ_MNESIA_BASE': str(place / 'data'),
            'RABBITMQ_LOG_BASE': str(place / 'log'),
            'RABBITMQ_PID_FILE': str(place / 'pid'),
        }

    def launch(self):
        """Start it; returns its process at once."""
        # By default `guest` may come from the loopback alone.
        (self._directory / 'rabbitmq.conf').write_text(
            f'default_pass = {self._password}\nloopback_users = none\n')
        (self._directory / 'plugins').write_text('[].\n')
        # Erlang would leave a mapper of its own behind.
        self._run('epmd', '-port', str(self._mapper_port))
        return self._run(_PROGRAM)

    def start(self):
        """Start the broker; returns when it takes connections."""
        server = self.launch()
        deadline = time.monotonic() + _START_SECONDS
        while not self.answers():
            assert server.poll() is None and time.monotonic() < deadline, (
                f'RabbitMQ did not start:\n{self._output()}')
            time.sleep(0.1)

    def _run(self, *command):
        with open(self._directory / 'output', 'ab') as output:
            process = subprocess.Popen(
                command, env=self.environment(), cwd=self._directory,
                stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True)
        self._processes.append(process)
        return process

    def _output(self):
        return (self._directory / 'output').read_text()[-4000:]

    def connect(self):
        return amqp.Connection(
            f'{self._address}:{self._port}', password=self._password,
            connect_timeout=5, read_timeout=5, write_timeout=5)

    def answers(self):
        try:
            with self.connect():
                return True
        except (OSError, amqp.AMQPError):
            return False

    def consumers(self, queue):
        """Count the consumers of a queue; 0 if there is no such queue."""
        try:
            with self.connect() as connection:
                return connection.channel().queue_declare(
                    queue, passive=True).consumer_count
        except (OSError, amqp.AMQPError):
            return 0

    def stop(self):
        """Stop the broker; returns when none of its processes is left."""
        while self._processes:
            process = self._processes.pop()
            for number in (signal.SIGTERM, signal.SIGKILL):
                # Its session's processes: the script and what it started.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                try:
                    process.wait(_STOP_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    continue


@contextlib.contextmanager
def running(directory):
    broker = RabbitMQ(directory)
    try:
        broker.start()
        yield broker
    finally:
        broker.stop()
