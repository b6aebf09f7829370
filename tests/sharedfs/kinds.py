# SPDX-License-Identifier: Apache-2.0

"""The shared file systems that can be had: what makes the services of each."""

from tests.sharedfs import ceph
from tests.sharedfs import gluster
from tests.sharedfs import juicefs
from tests.sharedfs import nfs

#: By name, which is also the profile of ``bindep.txt``.
KINDS = {'juicefs': juicefs.make, 'gluster': gluster.make, 'ceph': ceph.make,
         'cephfs': ceph.make_kernel, 'nfs': nfs.make}


def kind_of(host):
    """What a host's directory is on; None: the model."""
    mount = getattr(host, 'mount', None)
    return None if mount is None else mount.shared.kind
