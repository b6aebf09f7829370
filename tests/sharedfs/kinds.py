# SPDX-License-Identifier: Apache-2.0

"""The available shared file systems, and the functions of their services."""

from tests.sharedfs import ceph
from tests.sharedfs import gluster
from tests.sharedfs import juicefs
from tests.sharedfs import nfs

#: By name, which is also the profile of ``bindep.txt``.
KINDS = {'juicefs': juicefs.make, 'gluster': gluster.make, 'ceph': ceph.make,
         'cephfs': ceph.make_kernel, 'nfs': nfs.make}


def kind_of(host):
    """Return the kind of a host's file system; None: the model."""
    mount = getattr(host, 'mount', None)
    return None if mount is None else mount.shared.kind
