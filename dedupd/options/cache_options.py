# SPDX-License-Identifier: Apache-2.0

"""Options of ``[cache]``: a compute host's cache of images."""

from oslo_config import cfg
from oslo_config import types

from dedupd.options import kinds

_PLACE = kinds.Matching(
    f'^(/.|{kinds.ADDRESS_PATTERN})',
    'a host and a port, or the path of a Unix socket: for example '
    '127.0.0.1:9292 or /run/dedupd-cache/relay.sock')

OPTIONS = [
    cfg.Opt('listen',
            type=_PLACE,
            default='127.0.0.1:9292',
            help="""
Address on which the daemon serves in place of the Image service, if
``mode`` is ``cache``. ``endpoint_override`` in the group ``[glance]``
of ``nova.conf`` names it. If ``dedupd-relay`` runs, ``nova.conf``
names ``relay_listen`` instead, and this is a Unix socket, which only
the daemon's user reaches. While the daemon is away, any user could
listen on a port of its, and the relay would send tokens there.

The daemon passes requests on to ``[dedupd] glance_url``. Only the
bytes of images come from the cache, once Glance has allowed it.
Tokens pass this address unencrypted.

Possible values:
    * ADDRESS:PORT, of the loopback interface; for IPv6 [ADDRESS]:PORT
    * The path of a Unix socket, in a directory that only the daemon's
      user may write to

Related options:
    * ``relay_listen``
    * ``[dedupd] glance_url``
    * ``[dedupd] glance_ca``

"""),
    cfg.Opt('relay_listen',
            type=kinds.ADDRESS,
            sample_default='127.0.0.1:9292',
            help="""
Address on which ``dedupd-relay`` answers in place of the Image
service, whether the daemon runs or not. ``endpoint_override`` in
``nova.conf`` then names this address, and ``listen`` is the path of a
Unix socket, such as /run/dedupd-cache/relay.sock. A socket that
systemd passes to ``dedupd-relay`` takes the place of this option.

Possible values:
    * ADDRESS:PORT, of the loopback interface; for IPv6 [ADDRESS]:PORT
    * Unset: there is no relay, or systemd passes it a socket

Related options:
    * ``listen``
    * ``[dedupd] socket``
    * ``[dedupd] glance_url``

"""),
    cfg.URIOpt('upstream_url',
               schemes=['https'],
               sample_default='https://controller:9393',
               help="""
URL of the storing host's daemon, its ``[dedupd] listen``. The cache
fetches missing blocks from there.

Possible values:
    * https://HOST:PORT; needed if ``mode`` is ``cache``

Related options:
    * ``upstream_ca``
    * ``upstream_cert``

"""),
    cfg.StrOpt('upstream_ca',
               help="""
File with the authorities, in PEM, that verify the certificate of
``upstream_url``.

Possible values:
    * A path
    * Unset: those of the system

"""),
    cfg.StrOpt('upstream_cert',
               help="""
File with a certificate, in PEM, that makes this host an operator of
``upstream_url``, which may read every image.

Possible values:
    * A path
    * Unset: blocks are fetched with the token of the caller that
      requested the image, which is enough for a compute host

Related options:
    * ``upstream_key``
    * ``[dedupd] tls_client_ca``, at the storing host

"""),
    cfg.StrOpt('upstream_key',
               help="""
File with the private key of ``upstream_cert``, in PEM, without a
password.

Possible values:
    * A path; unset: it is in the file ``upstream_cert``

"""),
    cfg.ListOpt('neighbours',
                item_type=types.URI(schemes=['https']),
                default=[],
                sample_default=['https://compute1:9393',
                                'https://compute2:9393'],
                help="""
URLs of the caches of the hosts of this rack, their ``[dedupd]
listen``. They are asked for missing blocks before ``upstream_url`` is.

The host itself may be in the list, so all hosts of a rack can have
the same one. ``upstream_ca`` verifies the certificates. Without
``upstream_cert`` the neighbours see the tokens of this host's callers, as
``upstream_url`` does. See the guide on image caches.

Possible values:
    * A list of https://HOST:PORT, at most 100
    * Empty: only ``upstream_url`` is asked

Related options:
    * ``upstream_ca``
    * ``upstream_cert``
    * ``[dedupd] listen``

"""),
    kinds.number('limit_mib', 0, 0, 1 << 30, """
Disk space that the cache may take, in MiB.

When the cache takes more, or a new image needs space, it evicts the
least recently used images, except those that are being read. It does
not keep an image that is larger than the limit. The limit applies to
the whole directory: make it some ten percent less than the disk's
size.

Possible values:
    * 0: the whole disk, except ``reserve_mib``; images are evicted
      when it is full
    * MiB; at least what a block group takes, 128 by default, and 32
      for the catalog

Related options:
    * ``[dedupd] datadir``
    * ``[dedupd] reserve_mib``

"""),
    cfg.StrOpt('nova_base',
               sample_default='/var/lib/nova/instances/_base',
               help="""
Nova's directory of base images, in which ``dedupd-nova-base`` keeps
links, so that Nova starts servers before their images have been
copied. See the guide on instant start.

Possible values:
    * An absolute path: ``_base`` in Nova's ``instances_path``
    * Unset: Nova downloads each image

Related options:
    * ``nova_mount``
    * ``cloud``
    * ``upstream_cert``
    * ``[dedupd] nbd_socket``

"""),
    cfg.StrOpt('nova_mount',
               default='/run/dedupd-nova-base/images',
               help="""
Directory in which ``dedupd-nova-base`` shows the images, and to which
its links lead. It makes the directory.

Possible values:
    * An absolute path, not below ``nova_base``

Related options:
    * ``nova_base``

"""),
    cfg.StrOpt('nova_group',
               help="""
Group whose members may read the images that ``dedupd-nova-base``
shows. Nova's user and QEMU's must be in it.

Possible values:
    * A group's name
    * Unset: the group to which ``nova_base`` belongs

Related options:
    * ``nova_base``

"""),
    cfg.StrOpt('cloud',
               help="""
Cloud of ``clouds.yaml`` whose account lists the images that
``dedupd-nova-base`` offers to Nova, and reads the first MiB of each.

Possible values:
    * A name in ``/etc/openstack/clouds.yaml``, or in the file that
      the environment variable ``OS_CLIENT_CONFIG_FILE`` names; needed
      if ``nova_base`` is set

Related options:
    * ``nova_base``

"""),
]
