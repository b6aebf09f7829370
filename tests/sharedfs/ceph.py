# SPDX-License-Identifier: Apache-2.0

"""CephFS: one monitor, manager, metadata and object server.

The client is ceph-fuse, or Linux's in a guest. The object server keeps its
blocks in a file (bluestore).
"""

import uuid

from tests.sharedfs import distant
from tests.sharedfs import shared_fs

FILE_SYSTEM = 'shared'
#: Bytes of the file that is the object server's disk; it is sparse.
DISK = 8 << 30
_CONF = """\
[global]
fsid = {fsid}
mon host = {address}
public network = {address}/32
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon warn on pool no redundancy = false
mon data avail crit = 1
mgr initial modules =
osd objectstore = bluestore
bluestore block size = {disk}
osd crush chooseleaf type = 0
osd crush update on start = false
osd class update on start = false
osd memory target = 939524096
run dir = {directory}/run
admin socket = {directory}/run/$name.asok
pid file =
log file = {directory}/log/$name.log
crash dir = {directory}/run
mon data = {directory}/var/mon/data
mgr data = {directory}/var/mgr/data
mds data = {directory}/var/mds/data
osd data = {directory}/var/osd/data
"""


class _Server(shared_fs.Server):
    """One of Ceph's daemons.

    :cvar program: what it is and its package
    :cvar identity: its name among its kind
    """

    program = None
    identity = 'a'

    @property
    def configuration(self):
        return self.cloud.directory / 'ceph.conf'

    def command(self, program, *words):
        return [self.find(program, program if program != 'ceph'
                          else 'ceph-common'), '--conf', self.configuration,
                *words]

    def ceph(self, *words):
        """Return the cluster's answer."""
        return self.ask(*self.command('ceph', '--connect-timeout', '20',
                                      *words))

    def launch(self):
        self.spawn([*self.shared.enter(), *self.command(
            self.program, '--foreground', '--id', self.identity)])


class Monitor(_Server):
    name = 'mon'
    title = 'the monitor'
    program = 'ceph-mon'

    def prepare(self):
        (self.shared.directory / 'run').mkdir()
        fsid = uuid.uuid4()
        self.configuration.write_text(_CONF.format(
            fsid=fsid, address=shared_fs.ADDRESS, disk=DISK,
            directory=self.shared.directory))
        places = self.directory / 'map'
        self.ask(self.find('monmaptool', 'ceph-common'), '--create', '--fsid',
                 fsid, '--add', self.identity, shared_fs.ADDRESS, places)
        (self.directory / 'data').mkdir()
        self.ask(*self.command('ceph-mon', '--mkfs', '--id', self.identity,
                               '--monmap', places))

    def answers(self):
        return 'quorum' in self.ceph('quorum_status')


class Manager(_Server):
    """The manager, which counts used bytes: without it none would be free."""

    name = 'mgr'
    title = 'the manager'
    program = 'ceph-mgr'

    def prepare(self):
        (self.directory / 'data').mkdir()

    def answers(self):
        return '"available": true' in self.ceph('mgr', 'dump')


class Objects(_Server):
    name = 'osd'
    title = 'the object server'
    program = 'ceph-osd'
    identity = '0'

    def prepare(self):
        data = self.directory / 'data'
        data.mkdir()
        identity = uuid.uuid4()
        self.ceph('osd', 'new', identity, self.identity)
        # The daemon would do that itself when it starts.  On a busy machine it
        # then sometimes sends a request before it knows the cluster, gets
        # 'wrong fsid', and ends.
        self.ceph('osd', 'crush', 'add', f'osd.{self.identity}', '1.0',
                  'root=default', 'host=one')
        self.ask(*self.command('ceph-osd', '--mkfs', '--id', self.identity,
                               '--osd-uuid', identity))

    def answers(self):
        return '1 up' in self.ceph('osd', 'stat')

    def furnish(self):
        for pool in ('meta', 'data'):
            self.ceph('osd', 'pool', 'create', pool, '8')
        self.ceph('fs', 'new', FILE_SYSTEM, 'meta', 'data')


class Metadata(_Server):
    name = 'mds'
    title = 'the metadata server'
    program = 'ceph-mds'

    def prepare(self):
        (self.directory / 'data').mkdir()

    def answers(self):
        return 'up:active' in self.ceph('mds', 'stat')


SERVERS = (Monitor, Manager, Objects, Metadata)


class Mount(_Server, shared_fs.Mount):

    def launch(self):
        self.spawn([*self.shared.enter(), *self.command(
            'ceph-fuse', '-f', '--id', self.name, '--client_fs', FILE_SYSTEM,
            self.root)])

    def versions(self):
        return {'Ceph': self.ask('ceph', '--version').split()[2]}


class KernelMount(distant.Mount):
    # Without the helper of ceph-common, which needs a key.
    options = ('-i', '-t', 'ceph', '-o',
               'name=guest,noshare,ms_mode=legacy',
               f'{shared_fs.ADDRESS}:6789:/')


def make(shared):
    return [shared_fs.Network(shared),
            *(server(shared) for server in SERVERS),
            *(Mount(shared, name) for name in shared_fs.HOSTS)]


def make_kernel(shared):
    return distant.make(shared, KernelMount, SERVERS)
