# SPDX-License-Identifier: Apache-2.0

"""Options of ``[dedupd]``: when the tasks run, how fast, and on what."""

from oslo_config import cfg

from dedupd.options import kinds
from glance_dedup.base import imageids

_EXCLUDE = kinds.Matching(
    f'^(project:)?{imageids.PATTERN}$',
    "the id of an image, or 'project:' and the id of a project: for example "
    'project:0f4e1c7a92d8b3650e47f1a2c9d8b635')

OPTIONS = [
    kinds.interval('collect_interval', 300, """
Seconds between two collections, which give back the space of deleted
images.

Before each, uploaded and deleted images are counted.
"""),
    kinds.interval('merge_interval', 600, """
Seconds between two mergings, which find duplicates that uploads
missed.
"""),
    kinds.interval('scrub_interval', 2592000, """
Seconds from the start of one scrub to that of the next. A scrub reads
and verifies everything in the repository. After a restart of the
daemon it continues where it was.
""", 'scrub_rate_mib'),
    kinds.number('scrub_cold_mib', 1024, 0, 1 << 30, """
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
    kinds.number('recompress_level', 9, 0, 19, """
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
    kinds.interval('recompress_interval', 3600, """
Seconds between two searches for groups to compress again.

A group is started only while half of the host's processors are idle.
All other tasks, and requests for one, go first.
""", 'recompress_codec'),
    kinds.interval('convert_interval', 0, """
Seconds between two searches for images whose disk can be kept.

Files of the formats qcow2, VMDK, VHD, VHDX and VDI are kept as the blocks
of the disk in them, which share with everything, and are given back byte
for byte. An image is started only while half of the host's processors are
idle. All other tasks, and requests for one, go first. Older programs
refuse the repository once an image is kept so.
""", 'convert_rate_mib'),
    kinds.number('convert_idle_days', 0, 0, 36500, """
Days for which the file of an image must not have been downloaded from
Glance, before the disk in it is kept.

To make the file again takes processor time at each download. An image
waits from the first search that finds it. An image that was converted
already stays so.

Possible values:
    * 0: images are converted as soon as they are found
    * Days

Related options:
    * ``convert_interval``

"""),
    kinds.interval('tier_interval', 0, """
Seconds between two searches for groups to move to the object store.

The repository must be attached to one (``glance-dedup object-store
attach``). See the guide on tiers in Swift or S3.
""", 'tier_age_hours'),
    kinds.number('tier_age_hours', 720, 0, 1 << 20, """
Hours for which a group must not have changed, before it moves to the
object store. A group changes when blocks of it are freed.

Possible values:
    * 0: no group moves because of its age
    * Hours

Related options:
    * ``tier_interval``
    * ``tier_free_mib``

"""),
    kinds.number('tier_free_mib', 0, 0, 1 << 30, """
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
    kinds.text_list('tier_keep', item_type=_EXCLUDE, help="""
Images whose groups stay on the disk. A group stays as a whole if one of
them needs a block of it.

Possible values:
    * A list of image ids, and of ``project:ID`` for all images of a
      project

Related options:
    * ``tier_interval``

"""),
    kinds.interval('projects_interval', 86400, """
Seconds between two counts of what projects share with each other.

The task reads the recipes of all images. Other tasks wait for it.
"""),
    kinds.number('collect_volumes_mib', 256, 0, 1 << 20, """
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
    kinds.number('collect_live_share', 50, 0, 100, """
Percentage of a block group's bytes in use below which collection
rewrites the group, to free the unused bytes between them.

Possible values:
    * 0: no group is rewritten
    * A number up to 100; larger ones write more to free less

"""),
    kinds.rate('collect_rate_mib', 0, """
The most MiB that collection reads from and writes to the disk in a
second.
"""),
    kinds.rate('merge_rate_mib', 0, """
The most MiB that merging reads from and writes to the disk in a
second.
"""),
    kinds.rate('scrub_rate_mib', 32, """
The most MiB that a scrub reads from the disk in a second.

At 32 MiB a second a terabyte takes nine hours.
""", 'scrub_interval'),
    kinds.rate('recompress_rate_mib', 32, """
The most MiB that recompression reads from and writes to the disk in a
second.
""", 'recompress_interval'),
    kinds.rate('convert_rate_mib', 32, """
The most MiB that the search for disks, and the storing of their other
form, read from and write to the disk in a second.
""", 'convert_interval'),
    kinds.rate('tier_rate_mib', 32, """
The most MiB that moving groups reads and sends in a second.
""", 'tier_interval'),
    kinds.text_list('merge_exclude', item_type=_EXCLUDE, help="""
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
    kinds.number('reserve_mib', 64, 0, 1048576, mutable=False, help="""
Space that rewriting, evacuating and merging leave free on the
repository's file system, in MiB, as uploads do. See
``dedup_store_reserve_mib``. Set both to the same value.
"""),
]
