# SPDX-License-Identifier: Apache-2.0
"""Base classes of the services of a cloud.

A :class:`Service` is started, queried and ended by name. Its processes are in
the cloud's record, whatever process started it. A service that runs as a WSGI
application is a :class:`WsgiService`; Debian's uWSGI is not needed, since the
checkout's own loads the application from the service's environment.
"""

import contextlib
from importlib import metadata
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time

from tests.cloud import live_process
from tests.functional import glance_server

TOP = pathlib.Path(__file__).resolve().parents[2]

# Seconds. Generous: the machine may be busy, and only an error takes this
# long.
START_TIMEOUT = 240
COMMAND_TIMEOUT = 300
STOP_TIMEOUT = 30
POLL = 0.1
# A request to Nova takes a fifth of a second of a processor.
MAX_POLL = 1.0


class CloudError(Exception):
    """An event, the thing that it happened to, and the remedy."""


class Cancelled(CloudError):
    """The cloud is being ended while something still starts."""


class Service:
    """One service of a cloud.

    A service's class says what it needs, and has `launch`, `answers` and what
    is to be done once, `prepare` and `furnish`. Its files are in
    ``var/NAME`` and ``etc/NAME`` of the cloud's directory, its log is
    ``log/NAME.log``.

    :param host: the compute host on which it runs, whose name is then in front
        of its own; that of all others if not given
    """

    #: Its name in the cloud, in messages and in names of files.
    name = None
    #: The services that have to run before it starts.
    needs = ()
    #: The needed services that are on the same host.
    beside = ()
    #: Its name in messages.
    title = None
    #: Its type in Keystone's catalogue, and the path of its URL.
    catalogue = None
    #: Whether it runs only on request.
    optional = False
    #: Its user in Keystone.
    user = None
    #: The directory below .services/ that it runs from; None: the checkout's
    #: own environment.
    environment_name = None

    def __init__(self, cloud, host=None):
        self.cloud = cloud
        self.host = host
        if host is None:
            # It listens on the hosts' links, so it needs them.
            self.needs = (*self.needs, *cloud.state.hosts)
        else:
            self.needs = (*self.needs, host.name)
            self.title = f'{self.title} of {host.name}'
        self.needs += tuple(map(self.there, self.beside))
        self.name = self.there(self.name)
        self.directory = cloud.directory / 'var' / self.name
        self.etc = cloud.directory / 'etc' / self.name
        self.log = cloud.directory / 'log' / f'{self.name}.log'

    # -- attributes of each service -------------------------------------------

    def prepare(self):
        """Prepare it once in a cloud's life, before the first start."""

    def furnish(self):
        """Set it up once in a cloud's life, at its first answer."""

    def launch(self):
        """Write the configuration and start processes, with `spawn`."""
        raise NotImplementedError

    def answers(self):
        """Return whether it serves; an error means not yet."""
        return True

    @property
    def told(self):
        """Return the settings read at its start that `up` may change."""
        return None

    # -- attributes of all services -------------------------------------------

    def there(self, name):
        """Return the name of another service, on the same host."""
        return f'{self.host.name}/{name}' if self.host else name

    @property
    def port(self):
        """Return a port, chosen once for the cloud's life."""
        return self.cloud.state.port(self.name)

    @property
    def url(self):
        return f'http://{self.cloud.address}:{self.port}'

    @property
    def address(self):
        """Return its address for people."""
        return self.url

    @property
    def processes(self):
        return self.cloud.state.processes(self.name)

    def running(self):
        """Return whether all of its processes still run."""
        processes = self.processes
        return bool(processes) and all(
            process.poll() is None for process in processes)

    def is_current(self):
        """Return whether it runs with its current settings."""
        return self.running() and (
            self.cloud.state.started_with(self.name) == self.told)

    def start(self):
        """Start it, unless it runs and is current; return when it answers."""
        for path in (self.directory, self.etc, self.log.parent):
            path.mkdir(parents=True, exist_ok=True)
        begin = self.log.stat().st_size if self.log.exists() else 0
        try:
            if not self.is_current():
                if self.running():
                    self.stop()
                # A killed process may have left these.
                self.kill()
                self._once(self.prepare)
                told = self.told
                self.launch()
                self.cloud.state.set_started_with(self.name, told)
            # Do this for a running service, too: the process that started it
            # may have been killed before the first answer.
            self.wait_for(self.answers)
            self._once(self.furnish)
        except Cancelled:
            self.kill()
            raise
        except Exception as exc:
            self.kill()
            raise CloudError(self._complaint(exc, begin)) from exc

    def step(self, method):
        """Return the name under which this step is recorded as done."""
        return f'{self.name} {method.__name__}'

    def _once(self, step):
        done = self.step(step)
        if not self.cloud.state.prepared(done):
            begin = time.monotonic()
            step()
            self.cloud.state.set_prepared(done)
            seconds = time.monotonic() - begin
            if seconds >= 1:
                self.cloud.say(
                    f'{step.__name__} {self.title}, once: {seconds:.0f} s')

    def stop(self):
        """End it as an operator would; by force after some seconds."""
        for process in reversed(self.processes):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT)
        self.kill()

    def kill(self):
        """End everything at once, as a crash would."""
        processes = [*self.processes,
                     *self.cloud.state.processes(self._commands)]
        if not processes:
            return
        leaders = {process.pid for process in processes}
        deadline = time.monotonic() + STOP_TIMEOUT
        rest = []
        # A process that is ending has no mark any more.
        while rest := ([process for process in self.cloud.marked()
                        if process.session() in leaders]
                       + [process for process in rest
                          if process.poll() is None]):
            for process in rest:
                process.kill()
            if time.monotonic() > deadline:
                raise CloudError(
                    f'{self.title} cannot be ended: process {rest[0].pid} '
                    f'does not go.\nWhat to do: see what it waits for in '
                    f'/proc/{rest[0].pid}/stack, and try again.')
            time.sleep(live_process.POLL)
        for process in processes:
            process.poll()
        for name in (self.name, self._commands):
            self.cloud.state.forget_processes(name)

    @property
    def prefix(self):
        """Return the root of the Python environment that it runs from."""
        return (environment(self.environment_name) if self.environment_name
                else pathlib.Path(sys.prefix))

    @property
    def _commands(self):
        """Return the name under which its commands are recorded."""
        return f'{self.name} commands'

    def spawn(self, command, env=None, cwd=None, name=None):
        """Start a process of this service, with a clean environment."""
        if self.host:
            command = [*self.host.enter(), *command]
        command = [str(word) for word in command]
        self.cloud.check()
        with open(self.log, 'ab') as output:
            output.write(f'--- {shlex.join(command)}\n'.encode())
            output.flush()
            process = live_process.Process.spawn(
                command, self.cloud.directory, stdout=output, stderr=output,
                cwd=cwd or self.directory,
                env={**self.environment(), **(env or {})})
        self.cloud.state.add_process(name or self.name, process)
        return process

    def run(self, command, env=None):
        """Run a command of this service to its end, into its log."""
        begin = time.monotonic()
        process = self.spawn(command, env, name=self._commands)
        deadline = time.monotonic() + COMMAND_TIMEOUT
        while (status := process.poll()) is None:
            self.cloud.check()
            if time.monotonic() > deadline:
                process.kill()
                raise CloudError(
                    f'{pathlib.Path(command[0]).name} took more than '
                    f'{COMMAND_TIMEOUT} s')
            time.sleep(POLL)
        self.cloud.state.forget_processes(self._commands, process)
        with open(self.log, 'a') as log:
            log.write(f'--- status {status} after '
                      f'{time.monotonic() - begin:.1f} s\n')
        if status:
            raise CloudError(
                f'exit status {status} of '
                f'{shlex.join(str(word) for word in command)}')

    def environment(self):
        """Return an environment without variables such as proxies or LOGS."""
        return {
            'PATH': os.environ['PATH'],
            'HOME': str(self.directory),
            'LANG': 'C.UTF-8',
            'TMPDIR': str(self.cloud.directory / 'tmp'),
        }

    def wait_for(self, condition):
        """Wait until a condition is true; an error means not yet."""
        deadline = time.monotonic() + START_TIMEOUT
        last, pause = '', POLL
        while True:
            self.cloud.check()
            for process in self.processes:
                if process.poll() is not None:
                    raise CloudError('it ended while starting')
            try:
                if condition():
                    return
            except Exception as exc:  # of sockets, HTTP, the SDK, databases
                last = f' ({exc})'
            if time.monotonic() > deadline:
                raise CloudError(
                    f'it does not answer after {START_TIMEOUT} s{last}')
            time.sleep(pause)
            pause = min(2 * pause, MAX_POLL)

    def state(self):
        """Return the state: up, not started, down, or does not answer."""
        if not self.processes:
            return 'not started'
        if not self.running():
            return 'down'
        with contextlib.suppress(Exception):
            if self.answers():
                return 'up'
        return 'does not answer'

    def write(self, name, sections):
        """Write a configuration file as oslo.config's; return its path."""
        path = self.etc / name
        path.write_text(glance_server.ini(sections))
        path.chmod(0o600)
        return path

    def _complaint(self, exc, begin):
        with contextlib.suppress(OSError), open(self.log, 'rb') as log:
            log.seek(begin)
            lines = log.read().decode(errors='replace').splitlines()[-15:]
            tail = ''.join(f'\n  | {line}' for line in lines)
            return (
                f'{self.title} did not start: {exc}{tail}\nWhole log: '
                f'{self.log}\nWhat to do: correct what it says there, then '
                'run this again: what runs stays, the rest is started.')
        return f'{self.title} did not start: {exc}'


class WsgiService(Service):
    """An OpenStack API under uWSGI, from an environment of its own."""

    #: The application for uWSGI, and uWSGI's option for it: by default a
    #: module and its callable.
    application = None
    loader = 'module'
    #: Processes that serve, and threads of each.
    workers = 1
    threads = 4

    def serve(self, variables):
        """Run uWSGI; `variables` are for the application."""
        path = self.write('uwsgi.ini', {'uwsgi': glance_server.uwsgi_options(
            self.application, self.port, self.workers, self.threads,
            self.cloud.address, self.loader)})
        self.spawn([self.prefix / 'bin' / 'uwsgi', '--ini', path], variables)

    def answers(self):
        return glance_server.Client(self.url, timeout=30).request(
            'GET', '/', expect=(200, 300))


def path():
    """Return PATH with the directories of daemons, which users may lack."""
    return os.environ['PATH'] + ':/usr/sbin:/sbin'


def find(program, package):
    """Return the path of a program that a package of the system has."""
    found = shutil.which(program, path=path())
    if found is None:
        raise CloudError(f'{program} is missing.\nWhat to do: install the '
                         f'package {package}.')
    return found


def version(prefix, distribution):
    """Return the version of a distribution in the environment at `prefix`."""
    packages = sysconfig.get_path('purelib', vars={'base': str(prefix)})
    return next(iter(metadata.distributions(
        name=distribution, path=[packages]))).version


def environment(name):
    """Return the root of a service's Python environment."""
    prefix = TOP / '.services' / name
    if not (prefix / 'bin' / 'python').exists():
        raise CloudError(
            f'There is no environment {prefix}.\n'
            'What to do: tools/cloud up installs what is missing.')
    return prefix
