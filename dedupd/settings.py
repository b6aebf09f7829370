# SPDX-License-Identifier: Apache-2.0

"""Reads the options of the daemon, and of the processes beside it."""

from oslo_config import cfg
from oslo_log import log

from dedupd import opts
from glance_dedup.base import version


def parse(arguments: list[str]) -> cfg.ConfigOpts:
    """Read the command line, and the files that it names.

    The value of an option is checked when it is read.

    :raises cfg.Error: if the command line or a file is malformed
    """
    conf = cfg.ConfigOpts()
    log.register_options(conf)
    conf.register_cli_opts(opts.mode_opts)
    conf.register_opts(opts.messaging_opts)
    for group, options in opts.GROUPS.items():
        conf.register_opts(options, group=group)
    conf(arguments, project='dedupd', version=version.version())
    return conf
