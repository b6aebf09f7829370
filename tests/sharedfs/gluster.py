# SPDX-License-Identifier: Apache-2.0

"""GlusterFS: a volume of one brick, as its daemon makes it."""

from tests.sharedfs import shared_fs

VOLUME = 'shared'
#: Of the volume: the client's caches off; a link takes no attribute.
VOLUME_OPTIONS = {
    **{f'performance.{name}': 'off' for name in (
        'io-cache', 'open-behind', 'quick-read', 'read-ahead',
        'readdir-ahead', 'stat-prefetch', 'write-behind')},
    'storage.gfid2path': 'off'}
#: Of a mount.
OPTIONS = ('attribute-timeout=0', 'entry-timeout=0', 'negative-timeout=0',
           'use-readdirp=no')
#: Directories of the daemon and its bricks, and their places in the service's
#: directory. The socket for its command line is in /run itself.
PLACES = {'/var/lib/glusterd': 'lib', '/run': 'run',
          '/var/log/glusterfs': 'log'}
_BIND = """
set -e
for place; do
    mkdir -p "${place%=*}" "${place#*=}"
    mount --bind "${place#*=}" "${place%=*}"
done
exec glusterd --no-daemon --log-file /var/log/glusterfs/glusterd.log
"""


class Daemon(shared_fs.Server):
    name = 'glusterd'
    title = 'GlusterFS'

    def launch(self):
        self.find('glusterd', 'glusterfs-server')
        # It has directories of its own, and the machine's others stay
        # unchanged.
        self.spawn([
            *self.shared.enter(), self.find('unshare', 'util-linux'),
            '--mount', 'sh', '-c', _BIND, 'sh',
            *(f'{place}={self.directory / name}'
              for place, name in PLACES.items())])

    def gluster(self, *words):
        """Return the answer of its command line."""
        pid = self.processes[0].pid
        return self.ask('nsenter', f'--mount=/proc/{pid}/ns/mnt', 'gluster',
                        '--mode=script', *words)

    def answers(self):
        return 'Number of Peers' in self.gluster('peer', 'status')

    def furnish(self):
        self.gluster('volume', 'create', VOLUME,
                     f'{shared_fs.ADDRESS}:{self.directory}/brick',
                     'force')
        for name, value in VOLUME_OPTIONS.items():
            self.gluster('volume', 'set', VOLUME, name, value)

    def start(self):
        super().start()
        if 'Status: Started' not in self.gluster('volume', 'info', VOLUME):
            self.gluster('volume', 'start', VOLUME)


class Mount(shared_fs.Mount):

    def launch(self):
        self.spawn([
            *self.shared.enter(), self.find('glusterfs', 'glusterfs-client'),
            '--no-daemon', f'--volfile-server={shared_fs.ADDRESS}',
            f'--volfile-id=/{VOLUME}', '--log-file', self.log.with_suffix(
                '.gluster.log'), *(f'--{option}' for option in OPTIONS),
            self.root])

    def versions(self):
        return {'GlusterFS': self.ask('glusterfs', '--version').split()[1]}


def make(shared):
    return [shared_fs.Network(shared), Daemon(shared),
            *(Mount(shared, name) for name in shared_fs.HOSTS)]
