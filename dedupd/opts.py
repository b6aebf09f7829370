# SPDX-License-Identifier: Apache-2.0

"""Every option of the daemon, by its group.

SIGHUP makes the daemon read the mutable options again.
"""

from collections.abc import Iterable
from collections.abc import Iterator
import difflib
import glob
import os

from oslo_config import cfg
from oslo_config import types

from glance_dedup.base import imageids
from glance_dedup.base import scopes

GROUP = 'dedupd'
CACHE_GROUP = 'cache'
REPLICATION_GROUP = 'replication'
PROFILER_GROUP = 'profiler'


class _Matching(types.String):
    """Text that matches a pattern, and a sentence for text that does not.

    :param regex: matches valid text
    :param what: describes valid text, with an example
    """

    def __init__(self, regex: str, what: str) -> None:
        super().__init__(regex=regex)
        self._what = what

    def __call__(self, value: str) -> str:
        try:
            return super().__call__(value)
        except ValueError:
            raise ValueError(f'{value!r} is not {self._what}') from None


_PATH = _Matching(r'^[^\0]*$', 'a path: it holds a NUL')
# The holders of a right to store images (dedupd/serve/upload_rights.py).
_NAME = r'(\*\.)?[^*\s][^*]*'
_HOLDER = _Matching(
    f'^{_NAME}$', "the name of a certificate, with * only as its first label, "
    "or 'user:' and the name of a user: for example compute1.example.org, "
    '*.compute.example.org or user:cinder')
_BACKUP_HOLDER = _Matching(
    f'^{_NAME}:([A-Za-z0-9_-]{{1,109}}|[A-Za-z0-9_-]{{0,108}}\\*)$',
    'the name of a certificate, a colon and the name of backups, which has '
    'letters, digits, _ and -, and may end with *: for example '
    'compute1.example.org:web1-*')
_EXCLUDE = _Matching(
    f'^(project:)?{imageids.PATTERN}$',
    "the id of an image, or 'project:' and the id of a project: for example "
    'project:0f4e1c7a92d8b3650e47f1a2c9d8b635')
_PROPERTY = _Matching(
    r'^[^=\s][^=]*=.*$', 'the name of a property, = and its value: for '
    'example replicate=yes')
_AT = r'(\[[0-9A-Fa-f:.]+\]|[^:\[\]\s]+):[0-9]{1,5}$'
_ADDRESS = _Matching(
    f'^{_AT}', 'a host and a port: for example 127.0.0.1:9393 or [::1]:9393')
_PLACE = _Matching(
    f'^(/.|{_AT})', 'a host and a port, or the path of a Unix socket: for '
    'example 127.0.0.1:9292 or /run/dedupd-cache/relay.sock')


def _rate(name: str, default: float, help: str, related: str = ''
          ) -> cfg.Opt:
    """An option that limits the bytes to or from a disk or a network."""
    return cfg.FloatOpt(
        name, default=default, min=0, mutable=True,
        help=f"""{help}
Possible values:
    * 0: as fast as it goes
    * MiB
{_related(related)}
""")


def _interval(name: str, default: int, help: str, related: str = ''
              ) -> cfg.Opt:
    """An option with the time between two runs of a task."""
    return cfg.IntOpt(
        name, default=default, min=0, mutable=True,
        help=f"""{help}
Possible values:
    * 0: only on request
    * Seconds
{_related(related)}
""")


def _number(name: str, default: int, least: int, most: int, help: str,
            mutable: bool = True) -> cfg.Opt:
    """An option with a whole number."""
    return cfg.IntOpt(name, default=default, min=least, max=most,
                      mutable=mutable, help=help)


def _list(name: str, help: str, item_type: types.String | None = None
          ) -> cfg.Opt:
    """An option with a list, which is empty unless it is set."""
    return cfg.ListOpt(name, item_type=item_type, default=[], mutable=True,
                       help=help)


def _related(name: str) -> str:
    return f'\nRelated options:\n    * ``{name}``\n' if name else ''


dedupd_opts = [
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
    _list('socket_users', """
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
    _list('nbd_users', """
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
            type=_ADDRESS,
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
    _list('replicate_from', item_type=_HOLDER, help="""
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
    _list('upload_from', item_type=_HOLDER, help="""
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
    _list('backup_from', item_type=_BACKUP_HOLDER, help="""
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
            type=_ADDRESS,
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
    _number('cache_mib', 64, 0, 1048576, """
Memory for decompressed segments, in MiB, which all readers share.

It fills as images are read, and shrinks when the option is lowered.

Possible values:
    * 0: nothing is kept
    * An integer of at least 1

"""),
    _number('read_threads', 4, 1, 256, mutable=False, help="""
Number of threads that read from the repository. NBD has at most 16
threads of its own.

A client that takes its data slowly does not occupy a thread.

"""),
    _number('max_connections', 4096, 1, 1000000, """
The most connections that each listener has at once.

At the limit, a new connection takes the place of the one that has
waited longest for its client's next request. If no connection waits,
the new one is answered 503 and closed.

Related options:
    * ``max_peer_connections``

"""),
    _number('max_peer_connections', 1024, 1, 1000000, """
The most connections that each listener has at once with one peer. A
peer is a user of a Unix socket, otherwise an address, or, with IPv6,
a network of 64 bits. At the limit, a new connection takes the place
of another of the same peer, as with ``max_connections``.

Raise it for a listener that all clients reach through one proxy.

Related options:
    * ``max_connections``

"""),
    _number('max_body_memory_mib', 128, 8, 1048576, """
Memory for the bodies of all requests together, in MiB.

If there is no space for a request's body, the request waits for
``header_timeout``, and is then answered 503. Bodies of up to 16 KiB
are not counted. The largest ones, of images that another site sends,
have 4 MiB, and there are at most 16 of these at once.

Related options:
    * ``header_timeout``

"""),
    _number('header_timeout', 10, 1, 3600, """
Seconds within which a request's header must arrive, and a TLS
handshake must end. Each 256 KiB of a request's body may take as long
again.
"""),
    _number('idle_timeout', 60, 1, 86400, """
Seconds for which a connection without a request stays open.
"""),
    _number('write_timeout', 60, 1, 86400, """
Seconds after which a client that does not take its response is
disconnected.
"""),
    _interval('collect_interval', 300, """
Seconds between two collections, which give back the space of deleted
images.

Before each, uploaded and deleted images are counted.
"""),
    _interval('merge_interval', 600, """
Seconds between two mergings, which find duplicates that uploads
missed.
"""),
    _interval('scrub_interval', 2592000, """
Seconds from the start of one scrub to that of the next. A scrub reads
and verifies everything in the repository. After a restart of the
daemon it continues where it was.
""", 'scrub_rate_mib'),
    _number('scrub_cold_mib', 1024, 0, 1 << 30, """
The most MiB that a scrub reads from the object store.

Of cold groups, a scrub verifies what is on the disk, and whether their
objects are there. Of the objects it verifies a sample of this size, each
time another one, until it has been through all.

Possible values:
    * 0: no object is read
    * MiB

Related options:
    * ``scrub_interval``
    * ``scrub_rate_mib``

"""),
    cfg.StrOpt('recompress_codec',
               default='zstd',
               choices=[('none', 'Segments stay as uploads stored them'),
                        ('lz4', 'Quick to read'),
                        ('zstd', 'Smaller; slower to read')],
               mutable=True,
               help="""
Codec with which block groups are compressed again when no other
task is due.

Uploads compress with a quick codec (``dedup_store_codec`` in
``glance-api.conf``), but stored data is read for years. A full
group is compressed again once, and once more when codec, level or
order change; another when it has not changed for an hour, and each
time it has doubled.

Related options:
    * ``recompress_level``
    * ``recompress_cluster_similar``
    * ``recompress_interval``
    * ``recompress_rate_mib``

"""),
    _number('recompress_level', 9, 0, 19, """
How hard ``zstd`` tries. 9 makes blocks 6 % smaller than 3 does, and
takes 4 times the processor time. 19 makes them a tenth smaller than 3,
and takes 35 times. ``lz4`` has no levels.

Possible values:
    * 0: the codec's own default, which is 3
    * 1 to 19

Related options:
    * ``recompress_codec``

"""),
    cfg.BoolOpt('recompress_cluster_similar',
                default=True,
                mutable=True,
                help="""
Whether recompression puts similar blocks of a group next to each other.

They take less space together, and keep their addresses. Otherwise the
blocks stay in the order in which uploads stored them.

Related options:
    * ``recompress_codec``

"""),
    _interval('recompress_interval', 3600, """
Seconds between two searches for groups to compress again.

A group is started only while half of the host's processors are idle.
All other tasks, and requests for one, go first.
""", 'recompress_codec'),
    _interval('tier_interval', 0, """
Seconds between two searches for groups to move to the object store.

The repository must be attached to one (``glance-dedup object-store
attach``). See the guide on tiers in Swift or S3.
""", 'tier_age_hours'),
    _number('tier_age_hours', 720, 0, 1 << 20, """
Hours for which a group must not have changed, before it moves to the
object store. A group changes when blocks of it are freed.

Possible values:
    * 0: no group moves because of its age
    * Hours

Related options:
    * ``tier_interval``
    * ``tier_free_mib``

"""),
    _number('tier_free_mib', 0, 0, 1 << 30, """
Free space on the repository's disk, in MiB, below which groups move to
the object store whatever their age is, those first that have not
changed for longest.

The daemon checks every five seconds. If less is free, groups move ahead
of the interval, also those that were not recompressed yet. A group's move
needs as much space as the group takes, 128 MiB by default. Storing leaves
this free, and moving begins before storing is refused, even if this value
is smaller.

Possible values:
    * 0: no group moves for want of space
    * MiB

Related options:
    * ``tier_interval``
    * ``tier_age_hours``

"""),
    _list('tier_keep', item_type=_EXCLUDE, help="""
Images whose groups stay on the disk. A group stays as a whole if one of
them needs a block of it.

Possible values:
    * A list of image ids, and of ``project:ID`` for all images of a
      project

Related options:
    * ``tier_interval``

"""),
    _interval('projects_interval', 86400, """
Seconds between two counts of what projects share with each other.

The task reads the recipes of all images. Other tasks wait for it.
"""),
    _number('collect_volumes_mib', 256, 0, 1 << 20, """
MiB that volumes may leave behind before a collection runs ahead of
its interval.

A volume that is overwritten leaves its old blocks behind. The daemon
checks every five seconds what checkpoints of volumes have deleted.

Possible values:
    * 0: collections run at their interval only
    * MiB

Related options:
    * ``collect_interval``; if it is 0, no collection runs by itself

"""),
    _number('collect_live_share', 50, 0, 100, """
Percentage of a block group's bytes in use below which collection
rewrites the group, to free the unused bytes between them.

Possible values:
    * 0: no group is rewritten
    * A number up to 100; larger ones write more to free less

"""),
    _rate('collect_rate_mib', 0, """
The most MiB that collection reads from and writes to the disk in a
second.
"""),
    _rate('merge_rate_mib', 0, """
The most MiB that merging reads from and writes to the disk in a
second.
"""),
    _rate('scrub_rate_mib', 32, """
The most MiB that a scrub reads from the disk in a second.

At 32 MiB a second a terabyte takes nine hours.
""", 'scrub_interval'),
    _rate('recompress_rate_mib', 32, """
The most MiB that recompression reads from and writes to the disk in a
second.
""", 'recompress_interval'),
    _rate('tier_rate_mib', 32, """
The most MiB that moving groups reads and sends in a second.
""", 'tier_interval'),
    _list('merge_exclude', item_type=_EXCLUDE, help="""
Images that are never rewritten to share duplicates with others.

Possible values:
    * A list of image ids, and of ``project:ID`` for all images of a
      project

"""),
    cfg.IntOpt('spare_threshold',
               default=0,
               min=0,
               mutable=True,
               help="""
Number of uses by images from which a block gets a second copy.

Scrubs write the copies. Reading and healing use them when the disk
has lost the first copy. A repository whose fingerprints are not
cryptographic (``xxh3-128``, ``sha1``) never has second copies.

Possible values:
    * 0: there are no spare copies
    * An integer, for example 1000

"""),
    cfg.BoolOpt('glance_notifications',
                default=False,
                help="""
Whether to listen to the notifications of Glance. The daemon then
collects as soon as an image is deleted, and counts as soon as one is
uploaded, instead of when the interval is over.

The daemon has a queue of its own, ``dedupd_glance.HOST``, so that
other listeners miss nothing. If you switch this off, delete that
queue, because it would grow.

Possible values:
    * True, if Glance publishes notifications to the same broker
    * False

Related options:
    * ``[DEFAULT] transport_url``

"""),
    _number('reserve_mib', 64, 0, 1048576, mutable=False, help="""
Space that rewriting, evacuating and merging leave free on the
repository's file system, in MiB, as uploads do. See
``dedup_store_reserve_mib``. Set both to the same value.
"""),
    cfg.StrOpt('filter_dir',
               sample_default='/dev/shm/glance-dedup-<uid>',
               help="""
Directory for the fingerprint filter, the same as glance-api's; see
``dedup_store_filter_dir``.

Possible values:
    * A directory, created if missing
    * Unset: a directory of the user that runs the daemon, in
      ``/dev/shm``: the one with the user's name, if it is the
      user's, else the one with the user's number

"""),
    _number('filter_mib', 64, 1, 1048576, mutable=False, help="""
Memory for the fingerprint filter, in MiB, if the daemon creates it;
see ``dedup_store_filter_mib``.
"""),
    cfg.StrOpt('index',
               default='filter',
               choices=['filter', 'lmdb', 'dtb'],
               help="""
Index by which the daemon finds blocks that may be stored already, the
same as glance-api's; see ``dedup_store_index``. But ``dtb`` serves one
process of the host: leave this at ``filter`` where glance-api has it.

Related options:
    * ``index_dir``
"""),
    cfg.StrOpt('index_dir',
               sample_default='/var/lib/glance/dedup-index',
               help="""
Directory for the indexes ``lmdb`` and ``dtb``, the same as
glance-api's; see ``dedup_store_index_dir``.
"""),
]

#: Also on the command line.
mode_opts = [
    cfg.StrOpt('mode',
               default='store',
               choices=[('store', 'It serves and maintains the repository '
                                  'of a store'),
                        ('cache', "It is a compute host's cache of images, "
                                  'between Nova and Glance')],
               help="""
What the daemon does.

Related options:
    * ``[cache] listen``
    * ``[cache] upstream_url``

"""),
]

cache_opts = [
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
            type=_ADDRESS,
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
    _number('limit_mib', 0, 0, 1 << 30, """
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

replication_opts = [
    cfg.URIOpt('target_url',
               schemes=['https'],
               sample_default='https://other-site:9393',
               help="""
URL of the daemon of another site, its ``[dedupd] listen``, to which
new images are sent.

The Glance there gets each image's record and location. See the guide
on replication. If a repository has several daemons, the maintainer
sends the images.

Possible values:
    * https://HOST:PORT
    * Unset: no image is sent

Related options:
    * ``cert``
    * ``from_cloud``
    * ``to_cloud``

"""),
    cfg.StrOpt('cert',
               help="""
File with the certificate, in PEM, that makes this daemon an operator
of the other site's daemon.

Possible values:
    * A path; needed if ``target_url`` is set

Related options:
    * ``key``
    * ``[dedupd] tls_client_ca``, at the other site

"""),
    cfg.StrOpt('key',
               help="""
File with the private key of ``cert``, in PEM, without a password.

Possible values:
    * A path; unset: it is in the file ``cert``

"""),
    cfg.StrOpt('ca_file',
               help="""
File with the authorities, in PEM, that verify the other daemon's
certificate.

Possible values:
    * A path
    * Unset: those of the system

"""),
    cfg.StrOpt('from_cloud',
               help="""
Cloud of ``clouds.yaml`` whose Glance has the images. The account
needs the role ``admin``.

Possible values:
    * A name in ``/etc/openstack/clouds.yaml``, or in the file that
      the environment variable ``OS_CLIENT_CONFIG_FILE`` names; needed
      if ``target_url`` is set

"""),
    cfg.StrOpt('to_cloud',
               help="""
Cloud of ``clouds.yaml`` whose Glance is to have the images. The
account needs the roles ``admin`` and ``service``.

Possible values:
    * A name, as ``from_cloud``; needed if ``target_url`` is set

"""),
    _list('projects', """
Projects whose images are sent.

Possible values:
    * A list of projects' ids
    * Empty: the images of all projects

Related options:
    * ``properties``

"""),
    _list('properties', item_type=_PROPERTY, help="""
Properties that an image needs to be sent, for example
``replicate=yes`` or ``visibility=public``. It needs all of them.

Possible values:
    * A list of NAME=VALUE
    * Empty: images need none

Related options:
    * ``projects``

"""),
    _rate('rate_mib', 0, """
The most MiB to send in a second.
"""),
    _interval('interval', 300, """
Seconds between two searches for new images.
"""),
]

# Only this option decides whether oslo.messaging, which has an option of the
# same name, is imported.
messaging_opts = [
    cfg.StrOpt('transport_url',
               secret=True,
               sample_default='rabbit://dedupd:PASSWORD@controller:5672/',
               help="""
Message broker over which operators can control the daemon, and the
daemon sends notifications; see ``transport_url`` of the other
services.

The options of oslo.messaging, such as those of
``[oslo_messaging_notifications]`` and ``[oslo_messaging_rabbit]``,
are read from the same file.

Possible values:
    * A URL
    * Unset: no messaging

Related options:
    * ``[dedupd] glance_notifications``

"""),
]


# Only this option decides whether OSProfiler, which has an option of the same
# name, is imported.
profiler_opts: list[cfg.Opt] = [
    cfg.BoolOpt('enabled',
                default=False,
                help="""
Whether the cache's proxy continues traces of OSProfiler. In the mode
``cache``.

A request that carries a trace, signed with one of ``hmac_keys``,
gets a span, of which Glance's own span becomes a part. The other
options of this group are OSProfiler's, and are read from the same
file: ``hmac_keys`` and ``connection_string``, with Glance's values.
The package ``osprofiler`` must be installed, with the client of the
store of traces. See the guide on monitoring.

Possible values:
    * True, False
"""),
]

#: The options that have a group of their own, by its name.
GROUPS: dict[str, list[cfg.Opt]] = {
    GROUP: dedupd_opts, CACHE_GROUP: cache_opts,
    REPLICATION_GROUP: replication_opts, PROFILER_GROUP: profiler_opts}


def list_opts() -> list[tuple[str, list[cfg.Opt]]]:
    """The options, for ``oslo-config-generator --namespace dedupd``."""
    return [('DEFAULT', [*mode_opts, *messaging_opts]),
            *((group, list(options)) for group, options in GROUPS.items())]


# Former names of options of oslo.log, which it still reads.
_FORMER = {'log_config', 'logdir', 'logfile'}
# If oslo.messaging may know an option of [DEFAULT], it counts as mistyped only
# if it is this similar to a known name.
_ALIKE = 0.8


def load(path: str | None = None) -> cfg.ConfigOpts:
    """Load the options of the group ``[dedupd]`` alone.

    :param path: the daemon's option file; None: the defaults apply
    :raises cfg.Error: if the file is missing or invalid
    """
    conf = cfg.ConfigOpts()
    conf.register_opts(dedupd_opts, group=GROUP)
    conf([], project='dedupd',
         default_config_files=[] if path is None else [path],
         default_config_dirs=[])
    return conf


def unknown_in(path: str) -> Iterator[str]:
    """Yield a sentence for each option of a file that our groups lack.

    This imports less than :func:`unknown`, and does not judge other groups.
    """
    for group, names in _sections(path).items():
        if group not in GROUPS or group == PROFILER_GROUP:
            continue
        known = {option.dest for option in GROUPS[group]}
        for name in names:
            if name.replace('-', '_') not in known:
                yield _sentence(path, f'option {name} in [{group}]', name,
                                known)


def unknown(conf: cfg.ConfigOpts) -> Iterator[str]:
    """Yield a sentence for each option of the files that no module reads.

    An option that may be oslo.messaging's or OSProfiler's passes: a check with
    these would import all of their drivers.
    """
    known = {group: set(conf[group]) for group in GROUPS}
    known['DEFAULT'] = {name for name in conf if name not in known} | _FORMER
    paths = [*(conf.config_file or ())]
    for directory in conf.config_dir or ():
        paths += sorted(glob.glob(os.path.join(directory, '*.conf')))
    for path in paths:
        for group, options in _sections(path).items():
            if group == PROFILER_GROUP:
                continue
            if group not in known:
                if not group.startswith('oslo_'):
                    yield _sentence(path, f'group [{group}]', group, known)
                continue
            for name in options:
                plain = name.replace('-', '_')
                if plain not in known[group] and not (
                        group == 'DEFAULT' and conf.transport_url
                        and not difflib.get_close_matches(
                            plain, known[group], 1, _ALIKE)):
                    yield _sentence(path, f'option {name} in [{group}]', name,
                                    known[group])


def _sections(path: str) -> dict[str, dict[str, list[str]]]:
    """Return the values of a file, by section and name."""
    sections: dict[str, dict[str, list[str]]] = {}
    cfg.ConfigParser(path, sections).parse()
    return sections


def _sentence(path: str, what: str, name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return (f'{path}: there is no {what}, and it is ignored'
            + (f'; did you mean {near[0]}?' if near else ''))
