# SPDX-License-Identifier: Apache-2.0

"""The file with the credentials for an object store.

It is a file of oslo.config. For S3 it has ``access_key``, ``secret_key`` and
perhaps ``session_token`` in its section ``[s3]``; for Swift, ``[swift]`` has
the options of keystoneauth, beginning with ``auth_type`` and ``auth_url``.

Only its owner, who is root or the user of this process, may change it; others
than its group may not read it. Its values never appear in messages.
"""

import os
import stat
import typing

from glance_dedup.base import access
from glance_dedup.base import closing
from glance_dedup.base import exceptions

if typing.TYPE_CHECKING:
    from oslo_config import cfg

#: Bytes of a file that is not too large.
MAX_SIZE = 65536


def read(path: str) -> bytes:
    """The content of a file of credentials.

    :raises AccessDenied: it cannot be read, or others may read or change it
    """
    try:
        with closing.descriptor(access.open_file(
                path, os.O_RDONLY | os.O_NOFOLLOW)) as fd:
            _check(path, os.fstat(fd))
            content = os.read(fd, MAX_SIZE + 1)
    except OSError as e:
        raise exceptions.AccessDenied(
            f'cannot read the credentials in {path}: {e.strerror}') from e
    if len(content) > MAX_SIZE:
        raise exceptions.AccessDenied(
            f'{path} is larger than a file of credentials, {MAX_SIZE} bytes')
    return content


def _check(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise exceptions.AccessDenied(f'{path} is not an ordinary file')
    if status.st_uid not in (0, os.geteuid()):
        raise exceptions.AccessDenied(
            f'{path} belongs to {access.user_name(status.st_uid)}, who could '
            'change the credentials: have it belong to root, or to '
            f'{access.user_name(os.geteuid())}')
    if status.st_mode & 0o027:
        raise exceptions.AccessDenied(
            f'{path} has mode {stat.S_IMODE(status.st_mode):04o}, so others '
            'could read or change the credentials: chmod 0640, or 0600')


def options(path: str, content: bytes) -> 'cfg.ConfigOpts':
    """Options that have the values of a file of credentials.

    :param path: of the file, for messages
    :raises AccessDenied: it is no file of oslo.config
    """
    # Each command imports this module; few of them need credentials.
    from oslo_config import cfg

    conf = cfg.ConfigOpts()
    # oslo.config reads files by their names; this content has none any more.
    fd = os.memfd_create('credentials', os.MFD_CLOEXEC)
    with closing.descriptor(fd):
        os.write(fd, content)
        try:
            conf(args=[], project='glance-dedup', default_config_dirs=[],
                 default_config_files=[f'/proc/self/fd/{fd}'])
        except (cfg.Error, ValueError) as e:
            raise exceptions.AccessDenied(
                f'{path} is no file of options, as it is described in the '
                'guide') from e
    return conf
