# SPDX-License-Identifier: Apache-2.0

"""The repository's place, and the settings of this host's programs.

The first of these names it:

1. ``--repository``, or its environment variable
2. ``--socket``, or its variable: the daemon that answers there
3. the options of ``--config-file``, or else of `CONFIG_FILE`
4. the daemon that answers on `SOCKET`

An option file also names the filter and the socket, so that commands
use those of the daemon and of glance-api. Options of the command line
override it.
"""

import argparse
import contextlib
import dataclasses
import os
import typing

from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.cli import common

CONFIG_FILE = '/etc/dedupd/dedupd.conf'
SOCKET = '/run/dedupd/dedupd.sock'
INDEXES = ('filter', 'lmdb', 'dtb', 'inram', 'leveldb')
_RESERVE_MIB = 64


@dataclasses.dataclass(frozen=True)
class Settings:
    """Values of the global options, or of an option file, for the repository.

    :ivar path: the repository; None: only the daemon may know it
    :ivar options: the daemon's options, if they are of a file
    :ivar why: why no path is known
    """

    path: str | None
    filter_dir: str | None
    index: str
    index_dir: str | None
    reserve_mib: int
    socket: str
    options: typing.Any = None
    why: str = ''

    @property
    def socket_in_words(self) -> str:
        """Return where a daemon is looked for, for people."""
        return self.socket or 'any socket'


class OtherRepository(common.UsageError):
    """The option file is not of the repository that was named."""


def find(given: argparse.Namespace) -> Settings:
    """The settings that the program's global options lead to.

    :raises OtherRepository: an option file is of another repository
    :raises UsageError: an option file cannot be used
    """
    options, why = None, ''
    if given.repository and '\0' in given.repository:
        raise common.UsageError("the repository's path holds a NUL")
    if given.config_file is not None:
        options = load(given.config_file)
        if given.repository and not _is_same(given.repository,
                                             options.datadir):
            raise OtherRepository(
                f'{given.config_file} is for the repository '
                f'{options.datadir}, not for {given.repository}, which '
                '--repository or GLANCE_DEDUP_REPOSITORY names: leave one '
                'of the two out')
    elif not given.repository and given.socket is None:
        options, why = _default()

    def chosen(name: str, default: typing.Any) -> typing.Any:
        value = getattr(given, name)
        if value == '' and name != 'socket':    # that is: use no daemon
            value = None
        if value is None and options is not None:
            value = options[name]
        return default if value is None else value

    path = given.repository or (None if options is None else options.datadir)
    return Settings(
        path or None, chosen('filter_dir', None) or None,
        chosen('index', INDEXES[0]), chosen('index_dir', None) or None,
        chosen('reserve_mib', _RESERVE_MIB), chosen('socket', SOCKET),
        options, why)


def of_daemon(path: str) -> typing.Any:
    """The options for a task that runs without the daemon of a repository.

    They are those of `CONFIG_FILE` if it is of this repository, or else the
    defaults.

    :raises UsageError: that file cannot be used
    """
    options, _ = _default()
    if options is not None and _is_same(path, options.datadir):
        return options
    return load(None)


def file_of(path: str) -> str | None:
    """Return `CONFIG_FILE`; None: it is missing, or of another repository.

    One that cannot be used may be of any repository.
    """
    if is_missing(CONFIG_FILE):
        return None
    try:
        options, _ = _default()
    except common.UsageError:
        options = None
    return (CONFIG_FILE if options is None
            or _is_same(path, options.datadir) else None)


def is_missing(path: str) -> bool:
    """Return whether nothing is there; False if the system cannot find out."""
    with contextlib.suppress(exceptions.RepositoryError):
        return files.stat_of(path, follow=True) is None
    return False


def load(file: str | None) -> typing.Any:
    """The options in a daemon's option file, all of them valid.

    :param file: None: the defaults
    :raises UsageError: the file is missing or invalid
    """
    # Most of the time that a small command takes is imports.
    from oslo_config import cfg

    from dedupd import opts

    try:
        options = opts.load(file).dedupd
        for name in options:
            options[name]       # it is parsed only when it is read
    except (cfg.Error, ValueError) as e:
        raise common.UsageError(f'{file}: {e}') from e
    return options


def _default() -> tuple[typing.Any, str]:
    """The options of `CONFIG_FILE`; or None, and why there are none."""
    if is_missing(CONFIG_FILE):
        return None, f'there is no {CONFIG_FILE}'
    try:
        open(CONFIG_FILE).close()
    except OSError as e:
        return None, f'{CONFIG_FILE} cannot be read: {e.strerror}'
    return load(CONFIG_FILE), ''


def _is_same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
