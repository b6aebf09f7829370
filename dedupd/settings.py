# SPDX-License-Identifier: Apache-2.0

"""Reads the options of the daemon, and of the processes beside it."""

from typing import Any

from oslo_config import cfg
from oslo_log import log

from dedupd import opts
from glance_dedup.base import version


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


def parse(arguments: list[str]) -> cfg.ConfigOpts:
    """Read the command line, and the files that it names.

    The value of an option is checked when it is read.

    :raises cfg.Error: if the command line or a file is malformed
    """
    conf = Options()
    log.register_options(conf)
    conf.register_cli_opts(opts.mode_opts)
    conf.register_opts(opts.messaging_opts)
    for group, options in opts.GROUPS.items():
        conf.register_opts(options, group=group)
    conf(arguments, project='dedupd', version=version.version())
    return conf
