# SPDX-License-Identifier: Apache-2.0

"""Options of ``[dedupd]``: how blocks are found that are stored already."""

from oslo_config import cfg

from dedupd.options import kinds

OPTIONS = [
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
    kinds.number('filter_mib', 64, 1, 1048576, mutable=False, help="""
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
