# SPDX-License-Identifier: Apache-2.0

"""Options of ``[dedupd]``: what the daemon serves, where, and to whom."""

from oslo_config import cfg

from dedupd.options import kinds
from glance_dedup.base import scopes

_PATH = kinds.Matching(r'^[^\0]*$', 'a path: it holds a NUL')
# The holders of a right to store images (dedupd/serve/upload_rights.py).
_NAME = r'(\*\.)?[^*\s][^*]*'
_HOLDER = kinds.Matching(
    f'^{_NAME}$', "the name of a certificate, with * only as its first label, "
    "or 'user:' and the name of a user: for example compute1.example.org, "
    '*.compute.example.org or user:cinder')
_BACKUP_HOLDER = kinds.Matching(
    f'^{_NAME}:([A-Za-z0-9_-]{{1,109}}|[A-Za-z0-9_-]{{0,108}}\\*)$',
    'the name of a certificate, a colon and the name of backups, which has '
    'letters, digits, _ and -, and may end with *: for example '
    'compute1.example.org:web1-*')

OPTIONS = [
    cfg.Opt('datadir', type=_PATH,
            default='/var/lib/glance/dedup',
            help="""
Directory of the repository that the daemon serves and maintains.

It is the same as ``dedup_store_datadir`` of the store in
``glance-api.conf``. The repository must exist: the daemon does not
create one. If a repository has several daemons, on one host or
several, one is the maintainer. The others are helpers: they serve
reads, and do portions of scrubs, recompression and merging.

Possible values:
    * An absolute path

"""),
    cfg.StrOpt('socket',
               default='/run/dedupd/dedupd.sock',
               help="""
Path of the Unix socket on which the daemon serves reads to the store,
and control to the ``glance-dedup`` command.

Possible values:
    * An absolute path of at most 100 bytes, in a directory that
      exists

Related options:
    * ``socket_users``

"""),
    kinds.text_list('socket_users', """
Users that may use the Unix socket, besides root and the user that
runs the daemon.

The kernel gives the daemon each caller's user. The daemon disconnects
other users before it reads a byte from them. Users of the socket can
read every image and control the daemon. If the list is empty, the
socket has the mode 0600. Otherwise it has 0666, and only this check
protects it.

Possible values:
    * A list of names and ids of users

Related options:
    * ``socket``

"""),
    cfg.StrOpt('nbd_socket',
               sample_default='/run/dedupd/nbd.sock',
               help="""
Path of a Unix socket on which images are served over NBD as read-only
block devices, each under its id.

QEMU can boot a server from this socket before its image has been
copied. Users of the socket can read every image.

Possible values:
    * An absolute path of at most 100 bytes, in a directory that
      exists
    * Unset: images are not served over NBD

Related options:
    * ``nbd_users``

"""),
    kinds.text_list('nbd_users', """
Users that may use ``nbd_socket``, besides root and the user that runs
the daemon: for example the user as which libvirt runs QEMU.

The daemon checks them, and sets the socket's mode, as for
``socket_users``. They cannot control the daemon.

Possible values:
    * A list of names and ids of users

Related options:
    * ``nbd_socket``

"""),
    cfg.Opt('listen',
            type=kinds.ADDRESS,
            sample_default='0.0.0.0:9393',
            help="""
Address on which other hosts read images, over TLS.

Operators have a certificate that ``tls_client_ca`` has signed. Users
have a token with which Glance lets them read the image. Operators
store only what ``replicate_from``, ``upload_from`` and ``backup_from``
allow them.

Possible values:
    * ADDRESS:PORT, for IPv6 [ADDRESS]:PORT
    * Unset: other hosts read nothing

Related options:
    * ``tls_cert``
    * ``tls_key``
    * ``tls_client_ca``
    * ``glance_url``

"""),
    cfg.StrOpt('tls_cert',
               help="""
File with the certificate that the daemon shows to other hosts, and
with the intermediate certificates, in PEM. The daemon reads it again
when it changes.

Possible values:
    * A path; needed if ``listen`` is set

"""),
    cfg.StrOpt('tls_key',
               help="""
File with the private key of ``tls_cert``, in PEM, without a password.
The daemon reads it again when it changes.

Possible values:
    * A path; unset: it is in the file ``tls_cert``

"""),
    cfg.StrOpt('tls_client_ca',
               help="""
File with the authorities, in PEM, that sign the certificates of
operators. Operators may read every image without a token. The daemon
reads the file again when it changes.

Use an authority only for this: each client certificate that it signs
opens the whole repository.

Possible values:
    * A path
    * Unset: certificates are not requested

Related options:
    * ``tls_client_crl``

"""),
    cfg.StrOpt('tls_client_crl',
               help="""
File with revocation lists (CRLs), in PEM, of the authorities in
``tls_client_ca``. A certificate that a list names is refused.

The daemon reads the file again when it changes. Existing connections
then lose an operator's rights, and clients have to connect again.
There must be a list of each authority, and none may be past its next
update. Otherwise the certificates of that authority are refused.
Lists may also be in the file ``tls_client_ca`` itself.

Possible values:
    * A path
    * Unset: certificates are revoked by lists in ``tls_client_ca``, if
      there are any

Related options:
    * ``tls_client_ca``

"""),
    kinds.text_list('replicate_from', item_type=_HOLDER, help="""
Certificates of the sites that may send their images.

They store images under any id that is not taken, except the ids of
backups and uploads. Name no compute host here.

Possible values:
    * A list of names: the common name, or a DNS name, of a certificate
      of ``tls_client_ca``. ``*`` as the first label stands for any
      one: ``*.other.example``
    * In the list, ``user:`` and the name or id of a user in
      ``socket_users``

Related options:
    * ``scope``
    * ``tls_client_ca``

"""),
    kinds.text_list('upload_from', item_type=_HOLDER, help="""
Certificates of the compute hosts whose caches may upload differences.

Such a cache sends the blocks of an upload that are missing here. The
daemon then uploads the image to Glance with the token of the cache's
client. The certificate stores no image by this.

Possible values:
    * A list as for ``replicate_from``

Related options:
    * ``glance_url``
    * ``scope``
    * ``tls_client_ca``

"""),
    kinds.text_list('backup_from', item_type=_BACKUP_HOLDER, help="""
Certificates of the hosts that may send backups, each with the name of
the backups.

The backups ``b_web1-vda_20261123T180000Z`` have the name
``web1-vda``. A host can neither replace backups that are here, nor
send those of a name that it is not given.

Possible values:
    * A list of NAME:BACKUPS. NAME is as for ``replicate_from``. ``*`` at
      the end of BACKUPS stands for any characters:
      ``compute1.example:web1-*``

Related options:
    * ``scope``
    * ``tls_client_ca``

"""),
    cfg.StrOpt('scope',
               choices=scopes.CHOICES,
               sample_default='project',
               help="""
Scope in which images that other hosts send are stored.

The daemon refuses images in any other scope. It has to be the same as
``dedup_store_scope`` of the store in ``glance-api.conf``. Otherwise
uploads of differences send all blocks, and, if it is ``global`` and
that is ``project``, tell whether other projects have uploaded a block.

Possible values:
    * ``global`` or ``project``; needed if ``replicate_from``,
      ``upload_from`` or ``backup_from`` is set

Related options:
    * ``replicate_from``
    * ``upload_from``
    * ``backup_from``

"""),
    cfg.URIOpt('glance_url',
               schemes=['http', 'https'],
               sample_default='http://controller:9292',
               help="""
URL of the Image service, which checks the tokens of users.

When a caller requests an image, the daemon requests its first byte
from Glance with the caller's token. If Glance serves it, the daemon
serves the image. It remembers this permission for a minute.

Possible values:
    * A URL without the version
    * Unset: no token is accepted

Related options:
    * ``glance_ca``

"""),
    cfg.StrOpt('glance_ca',
               help="""
File with the authorities, in PEM, that verify the certificate of
``glance_url``.

Possible values:
    * A path
    * Unset: those of the system

"""),
    cfg.StrOpt('glance_cloud',
               help="""
Cloud of ``clouds.yaml`` whose Glance gives the names of images, which
are then shown beside their ids.

An account with the role ``admin`` sees all names; another one those of
public images and of its own project. Everybody who may see the status
page sees the names.

Possible values:
    * A name in ``/etc/openstack/clouds.yaml``, or in the file that
      the environment variable ``OS_CLIENT_CONFIG_FILE`` names
    * Unset: only ids are shown

Related options:
    * ``status_listen``

"""),
    cfg.Opt('status_listen',
            type=kinds.ADDRESS,
            sample_default='127.0.0.1:9394',
            help="""
Address on which the status page, ``/metrics`` and ``/healthcheck``
are served to everyone, without TLS.

It shows ids of images and projects, and figures; names of images only
if ``glance_cloud`` is set. It gives neither content nor control. But
if projects share blocks (``dedup_store_scope = global``), a user who
has uploaded an image sees there how much of it was stored before: let
only operators reach it.

Possible values:
    * ADDRESS:PORT, for IPv6 [ADDRESS]:PORT
    * Unset: they are served on the Unix socket only

"""),
    cfg.BoolOpt('metrics_projects',
                default=False,
                help="""
Whether ``/metrics`` has figures of each project.

Their labels are ids of projects. Prometheus keeps them, and everybody
who may read its data sees them.

Possible values:
    * True: the 50 projects that have stored most have series of their
      own
    * False: there are only sums, without ids

Related options:
    * ``status_listen``

"""),
    kinds.number('cache_mib', 64, 0, 1048576, """
Memory for decompressed segments, in MiB, which all readers share.

It fills as images are read, and shrinks when the option is lowered.

Possible values:
    * 0: nothing is kept
    * An integer of at least 1

"""),
    kinds.number('read_threads', 4, 1, 256, mutable=False, help="""
Number of threads that read from the repository. NBD has at most 16
threads of its own.

A client that takes its data slowly does not occupy a thread.

"""),
    kinds.number('max_connections', 4096, 1, 1000000, """
The most connections that each listener has at once.

At the limit, a new connection takes the place of the one that has
waited longest for its client's next request. If no connection waits,
the new one is answered 503 and closed.

Related options:
    * ``max_peer_connections``

"""),
    kinds.number('max_peer_connections', 1024, 1, 1000000, """
The most connections that each listener has at once with one peer. A
peer is a user of a Unix socket, otherwise an address, or, with IPv6,
a network of 64 bits. At the limit, a new connection takes the place
of another of the same peer, as with ``max_connections``.

Raise it for a listener that all clients reach through one proxy.

Related options:
    * ``max_connections``

"""),
    kinds.number('max_body_memory_mib', 128, 8, 1048576, """
Memory for the bodies of all requests together, in MiB.

If there is no space for a request's body, the request waits for
``header_timeout``, and is then answered 503. Bodies of up to 16 KiB
are not counted. The largest ones, of images that another site sends,
have 4 MiB, and there are at most 16 of these at once.

Related options:
    * ``header_timeout``

"""),
    kinds.number('header_timeout', 10, 1, 3600, """
Seconds within which a request's header must arrive, and a TLS
handshake must end. Each 256 KiB of a request's body may take as long
again.
"""),
    kinds.number('idle_timeout', 60, 1, 86400, """
Seconds for which a connection without a request stays open.
"""),
    kinds.number('write_timeout', 60, 1, 86400, """
Seconds after which a client that does not take its response is
disconnected.
"""),
]
