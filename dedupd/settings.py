# SPDX-License-Identifier: Apache-2.0

"""Reads the options of the daemon, and of the processes beside it."""

from typing import Any

from oslo_config import cfg
from oslo_log import log

from dedupd import opts
from glance_dedup.base import package_version


# The end of the help of all of these processes.
_EPILOG = (
    'Without --config-file, the first of ~/.dedupd/dedupd.conf, '
    '~/dedupd.conf, /etc/dedupd/dedupd.conf and /etc/dedupd.conf is read. The '
    'manual page dedupd(8) describes the signals. Exit status: 0, a signal '
    'ended it; 1, it could not start; 2, it could not start because an option '
    'is wrong.')


class Options(cfg.ConfigOpts):
    """Options that one thread may change while others read them.

    ``cfg.ConfigOpts`` keeps each value that was read. It forgets these values
    before it reads the files again, so a value that another thread reads
    meanwhile would stay, until the next change. This class keeps none: a read
    takes 10 microseconds, and no option is read for each block.
    """

    def _get(self, name: str, group: str | cfg.OptGroup | None = None,
             namespace: Any = None) -> Any:
        value, _ = self._do_get(name, group, namespace)
        return value


def parse(arguments: list[str], description: str = '') -> cfg.ConfigOpts:
    """Read the command line, and the files that it names.

    The value of an option is checked when it is read.

    :param description: of the program, for ``--help``
    :raises cfg.Error: if the command line or a file is malformed
    """
    conf = Options()
    log.register_options(conf)
    conf.register_cli_opts(opts.mode_opts)
    conf.register_opts(opts.messaging_opts)
    for group, options in opts.GROUPS.items():
        conf.register_opts(options, group=group)
    conf(arguments, project='dedupd',
         version=f'%(prog)s {package_version.version()}',
         description=description, epilog=_EPILOG)
    return conf
