# SPDX-License-Identifier: Apache-2.0

"""NFS 4.2: Linux's server and client, in a guest.

The server shares an ext4 that is in the guest's memory. The hosts reach it
through this machine, which forwards between their links and the guest's own.
"""

from tests.sharedfs import distant
from tests.sharedfs import guest
from tests.sharedfs import shared_fs

#: Of a mount.
OPTIONS = 'vers=4.2,proto=tcp,hard,local_lock=none'
#: Seconds until a silent host loses its locks.
LEASE = 10
#: Bytes of the file system.
SIZE = 1 << 30
_CONTROL = len(guest.LINKS) - 1
# The directory, the size, the lease, this machine's address, and the networks
# of the hosts.
_SERVE = """
cd "$0"
mkdir -p modules/lib export /var/lib/nfs/v4recovery
ln -sfn /usr/lib/uml/modules modules/lib/modules
modprobe -d "$0/modules" -a nfsd loop
truncate -s "$1" disk
mkfs.ext4 -q -F disk
mount -o loop disk export
mount -t nfsd nfsd /proc/fs/nfsd
echo "$2" >/proc/fs/nfsd/nfsv4leasetime
echo "$2" >/proc/fs/nfsd/nfsv4gracetime
touch /var/lib/nfs/etab /var/lib/nfs/rmtab
exportfs -o rw,no_root_squash,fsid=0,no_subtree_check "*:$0/export"
rpc.nfsd -N 3 -V 4.2 8
by=$3
shift 3
for network; do ip route add "$network" via "$by"; done
exec rpc.mountd -F -N 2 -N 3
"""


class Nfsd(shared_fs.Server):
    """The server, which is part of the guest's kernel."""

    name = 'nfsd'
    title = 'the NFS server'

    def launch(self):
        self.find('rpc.nfsd', 'nfs-kernel-server')
        self.spawn(['sh', '-ec', _SERVE, self.directory, SIZE, LEASE,
                    guest.address(_CONTROL, 1),
                    *(f'{guest.address(number, 0)}/24'
                      for number in range(_CONTROL))])

    def answers(self):
        return self.ask(
            self.find('ss', 'iproute2'), '--no-header', '--listening',
            '--numeric', '--tcp', 'sport = 2049')


class Mount(distant.Mount):
    options = ('-t', 'nfs4', '-o', OPTIONS,
               f'{guest.address(_CONTROL, 2)}:/')


def make(shared):
    return distant.make(shared, Mount, inner=[Nfsd])
