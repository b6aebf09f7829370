# SPDX-License-Identifier: Apache-2.0

"""Every option of the store, for glance-api.conf.

The options are in the group of a store that ``enabled_backends`` gives the
type ``dedup``, or in ``[backend_defaults]`` for all such stores at once.
"""

from oslo_config import cfg
from oslo_config import types

from glance_dedup.base import locations

# A pebibyte.
_MAX_MIB = 1 << 30


dedup_opts = [
    cfg.StrOpt('dedup_store_datadir',
               default='/var/lib/glance/dedup',
               help="""
Directory of the repository in which the store keeps its images.

If the directory does not exist or is empty, a repository is created
in it when glance-api starts. One with other properties than the
default ones, such as the size of blocks, has to be created before,
with ``glance-dedup repository create``. Every store needs a directory
of its own. Several glance-api processes and hosts may use one
directory together, if it is on a file system that they share.

If the directory is a mount point, create the repository with
``glance-dedup repository create`` and make the directory below the
mount unwritable. A mount that is missing at start then disables
adding images. Otherwise an empty repository would start on the wrong
disk.

Possible values:
    * An absolute path. It must be writable by the user that runs
      glance-api.

"""),
    cfg.StrOpt('dedup_store_codec',
               default='lz4',
               choices=[('none', 'Do not compress.'),
                        ('lz4', 'Fast; costs little more than not '
                                'compressing.'),
                        ('zstd', 'Smaller, and several times slower to '
                                 'store.')],
               help="""
How new blocks are compressed.

The codec is chosen again for each run of blocks. Blocks that it does
not make smaller are stored uncompressed. If it made nothing smaller
for a while, only some blocks are tried. The option can be changed at
any time: stored blocks stay readable.

Related options:
    * ``dedup_store_codec_level``
    * ``dedup_store_adaptive_compression``

"""),
    cfg.IntOpt('dedup_store_codec_level',
               default=0,
               min=0,
               max=19,
               help="""
How hard the codec tries.

Possible values:
    * 0: the codec's own default
    * 1 to 19: a level of zstd. lz4 and none have no levels: with
      these, any value but 0 disables adding images to the store

Related options:
    * ``dedup_store_codec``

"""),
    cfg.BoolOpt('dedup_store_adaptive_compression',
                default=False,
                help="""
Whether uploads compress less when processors are short.

While compressing, each upload measures how long its threads wait for
a processor. If they get less than a quarter of one, a growing share
of the blocks is stored uncompressed, and all of them if they get less
than an eighth: then many uploads run at once, or other programs keep
the processors busy. Such blocks stay so until dedupd compresses their
group again (``recompress_codec``). The option pays if the codec costs
much more than writing does: with ``zstd``, hardly with ``lz4``.

Without this, the same blocks always take up the same space.

Related options:
    * ``dedup_store_codec``

"""),
    cfg.StrOpt('dedup_store_scope',
               default='global',
               choices=[('global', 'All projects share equal blocks.'),
                        ('project', 'Only images of one project share '
                                    'equal blocks.')],
               help="""
Which images a new image may share blocks with.

With ``global``, every distinct block is stored once. This reveals
something: an upload of data that is stored already is quicker and
takes less space than one that is not. So a user who uploads a file,
and measures the time, can find out whether some project has an image
with these very blocks. By trying variants of a file of which only a
few bytes are unknown, the user can find out which variant is there.
The user does not learn who owns it, and gets no byte that the user
did not have.

With ``project``, images share blocks with images of the project that
stored them, and with no others. An upload takes the same steps
whatever other projects have stored, and equal images of two projects
take up space twice.

The option may be changed at any time, and applies to images that are
stored from then on. Earlier images stay where they are, and share
blocks with images that are stored under the same setting.

"""),
    cfg.ListOpt('dedup_store_no_dedup_projects',
                default=[],
                help="""
Projects whose uploads are stored without looking for duplicates.

This saves a little time for data that shares no blocks with other
images. The blocks stay copies for ever: no later upload shares them,
and merging does not join them. Only storing the image once more, as
another image, changes that.

Images that are compressed or encrypted as a whole need no such
option: the store recognises them, and looks for samples only.

Possible values:
    * Ids of projects, separated by commas

Related options:
    * ``dedup_store_scope``

"""),
    cfg.IntOpt('dedup_store_filter_mib',
               default=64,
               min=1,
               max=1048576,
               help="""
Memory for the fingerprint filter, in MiB.

All processes of a host that use the repository share the filter. It
never grows beyond this size. A filter that is small for its
repository misses some duplicates; it never costs correctness. 200 MiB
for each TiB of unique data are enough for nearly all duplicates. The
value takes effect when the filter is rebuilt: after a change, delete
its file, or restart the host. If ``dedup_store_index`` is ``dtb``,
this is the memory of its cache instead.

Possible values:
    * An integer of at least 1

Related options:
    * ``dedup_store_filter_dir``

"""),
    cfg.StrOpt('dedup_store_filter_dir',
               sample_default='/dev/shm/glance-dedup-<uid>',
               help="""
Directory for the fingerprint filter.

It must be on a tmpfs of this host and the same for all of the
host's processes that use the repository. The filter may be deleted
at any time; it is then rebuilt from the repository.

Possible values:
    * A directory, created if missing
    * Unset: a directory of the user that runs glance-api, in
      ``/dev/shm``: the one with the user's name, if it is the
      user's, else the one with the user's number

Related options:
    * ``dedup_store_filter_mib``

"""),
    cfg.StrOpt('dedup_store_index',
               default='filter',
               choices=[('filter', 'The fingerprint filter, in memory'),
                        ('lmdb', 'An LMDB database on a disk of this host, '
                                 'for any number of processes'),
                        ('dtb', 'A hash table on a disk of this host, for '
                                'one process')],
               help="""
What tells uploads which blocks may be stored already.

The filter suits nearly every repository. The others know every
block exactly and survive a restart of the host, but take space and
write access on a disk, and memory as page cache. With ``dtb`` only
the first process that stores has an index; the others miss
duplicates, so set glance-api's ``workers`` to 1.

Whatever is chosen, merging finds the duplicates that were missed.
All programs of a host should be given the same index.

Related options:
    * ``dedup_store_index_dir``
    * ``dedup_store_filter_mib``

"""),
    cfg.StrOpt('dedup_store_index_dir',
               sample_default='/var/lib/glance/dedup-index',
               help="""
Directory for the indexes ``lmdb`` and ``dtb``.

It must be on a local disk of this host, not in the repository, and
the same for all of the host's programs that use the repository. Its
content may be deleted while none of them runs; it is then made again
from the repository. Leave it set when you choose ``filter`` again:
indexes in it that nobody has used for 30 days are then removed.

Possible values:
    * A directory, created if missing

Related options:
    * ``dedup_store_index``

"""),
    cfg.IntOpt('dedup_store_threads',
               min=1,
               max=64,
               sample_default=4,
               help="""
Threads with which each process computes fingerprints and
compresses.

Possible values:
    * Unset: one per processor, at most 4
    * An integer of at least 1

"""),
    cfg.StrOpt('dedup_store_direct_io',
               default='auto',
               choices=('auto', 'on', 'off'),
               help="""
Whether new blocks are written beside the page cache.

This saves the processor time that filling the page cache takes, and
leaves the memory to others. The first read of an image then comes
from the disk.

Possible values:
    * auto: wherever it costs an upload less. Each process measures
      both ways while it stores new blocks. It does not choose this way
      unless the disk takes 500 MB/s
    * on: always, if the file system supports it
    * off: never. Choose it if servers boot from images just after
      their upload, and the memory has room for them

"""),
    cfg.IntOpt('dedup_store_reserve_mib',
               default=64,
               min=0,
               max=1048576,
               help="""
Space that storing leaves free on the repository's file system, in
MiB.

Deleting images and collecting need this space, so that a full disk
can be emptied. When less is free, images are refused with 413, before
anything is written. Deleting, collecting and reading may use the
space.

On a small file system less is kept: a hundredth at most. Several
uploads at once may take up to 5 MiB each of this space, since each
checks before it writes.

Possible values:
    * 0: store until the disk is full
    * MiB. More than the default is of use where many uploads run at
      once, or other programs write to the same file system

"""),
    cfg.IntOpt('dedup_store_required_percent',
               default=0,
               min=0,
               max=100,
               help="""
How much of an image's size must be free before it is stored, in
percent, if its size is known.

An image whose size is known, as in most uploads, is refused with 413
before anything is written if less than this share of it is free above
``dedup_store_reserve_mib``. Before an image is stored, nobody knows
how much of it is new here, and how well that compresses. With 100,
images are refused that would have had space. With 0, some that lack
space are refused only when the disk is full, after some of their
blocks were stored. The next collection frees these.

Possible values:
    * 0: do not ask
    * 1 to 99: for example 100 less the percentage that ``glance-dedup
      status`` says is saved
    * 100: as the file driver would

Related options:
    * ``dedup_store_reserve_mib``

"""),
    cfg.IntOpt('dedup_store_project_limit_mib',
               default=0,
               min=0,
               max=_MAX_MIB,
               help="""
The most that each project may store here, in MiB of the disk.

What counts is what the project's uploads have added: new blocks, after
compression. Data that was stored already counts for the project that
stored it first. When a project has reached the limit, its uploads are
refused with 413. An upload that reaches it is refused as well, and
nothing of it stays.

The maintainer, dedupd, says what projects have stored. While that is
not known, no upload is refused, and the log says so. Deleted images
count until dedupd has counted again, for about a minute.

Glance's own limits (``image_size_total`` in Keystone) count whole
images. Both kinds may be used together.

Possible values:
    * 0: no limit
    * MiB

Related options:
    * ``dedup_store_project_limits_mib``

"""),
    cfg.Opt('dedup_store_project_limits_mib',
            type=types.Dict(types.Integer(min=0, max=_MAX_MIB)),
            default={},
            help="""
Projects with another limit than ``dedup_store_project_limit_mib``.

Possible values:
    * Projects' ids with MiB, separated by commas, for example
      ``3f0b2a4c5d1e4c7a9b600d4a8f1c2e33:10240``; 0: no limit

Related options:
    * ``dedup_store_project_limit_mib``

"""),
    cfg.IntOpt('dedup_store_timeout',
               default=0,
               min=0,
               help="""
Time limit against storage that hangs, in seconds.

The limit applies to every single step of every operation of the
store: opening the repository or an image, storing or reading one
piece of 4 MiB, committing, deleting. If a step takes longer, the
request fails with 503 (a download that has begun is cut off) instead
of occupying the API worker for ever. The step itself cannot be
interrupted. Its thread stays until the storage answers, up to 32 such
threads per store and process, and then undoes what it did for a
request that was given up.

With a limit, steps that touch the storage run in threads of their
own, which costs a few microseconds each. Without one, reads and
deletes run in the thread that asks for them.

Possible values:
    * 0: no limit
    * Seconds. 30 or more is reasonable for shared storage:
      committing an image flushes up to 256 MiB to it

"""),
    cfg.StrOpt('dedup_store_dedupd_socket',
               default='/run/dedupd/dedupd.sock',
               help="""
Unix socket of this host's dedupd, through which images are read.

All readers of a host then share one cache. If the daemon does not
answer within a second, serves another repository, or ends in the
middle of a download, the store reads directly, from where it is, and
leaves the daemon alone for ten seconds. So the daemon may be started
and stopped at any time, and need not exist.

dedupd must let in the user that runs glance-api (its option
``socket_users``), unless it runs as this user.

Possible values:
    * An absolute path
    * Empty: always read directly

"""),
]


def list_opts() -> list[tuple[str, list[cfg.Opt]]]:
    """The options, for ``oslo-config-generator --namespace glance_dedup``."""
    return [(locations.SCHEME, list(dedup_opts))]
