# SPDX-License-Identifier: Apache-2.0

"""Every option of the daemon, by its group (``options/``).

SIGHUP makes the daemon read the mutable options again.
"""

from collections.abc import Iterable
from collections.abc import Iterator
import difflib
import glob
import os

from oslo_config import cfg

from dedupd.options import cache_options
from dedupd.options import index_options
from dedupd.options import replication_options
from dedupd.options import serving_options
from dedupd.options import task_options

GROUP = 'dedupd'
CACHE_GROUP = 'cache'
REPLICATION_GROUP = 'replication'
PROFILER_GROUP = 'profiler'

dedupd_opts = [*serving_options.OPTIONS, *task_options.OPTIONS,
               *index_options.OPTIONS]
cache_opts = cache_options.OPTIONS
replication_opts = replication_options.OPTIONS

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
