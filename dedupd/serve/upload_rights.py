# SPDX-License-Identifier: Apache-2.0

"""Rights to store images over HTTP, by the names in certificates.

A certificate of ``tls_client_ca`` reads, and stores nothing. Options give
rights to names (``security.rst``, "Rights to store"). The id of an image
determines the right:

* ``u_...``, an upload on its way to Glance: *upload*;
* ``b_<source>_<time>``, a backup: *back up*, for this source;
* any other: *replicate*.

On the Unix socket, root and the daemon's own user have all rights, since they
may write to the repository. Other users need a right like all clients.
"""

import dataclasses
import os
import pwd
import re
from typing import Any

from oslo_log import log

from dedupd.http import limited
from dedupd.http import messages
from glance_dedup.base import imageids

LOG = log.getLogger(__name__)
_STRANGERS = limited.Log(LOG)

#: In front of the name of a user of the Unix socket, in the options.
USER = 'user:'
_LABEL = re.compile('[A-Za-z0-9_-]+')
# The most names of a certificate that a message has, and their characters.
_SHOWN, _MAX_LENGTH = 3, 80


@dataclasses.dataclass(frozen=True)
class Right:
    """A right, and the option that gives it."""

    words: str
    """To be put behind "the right to"."""
    option: str


REPLICATE = Right('replicate', 'replicate_from')
UPLOAD = Right('upload', 'upload_from')
BACK_UP = Right('back up', 'backup_from')
RIGHTS = (REPLICATE, UPLOAD, BACK_UP)


def needed(image_id: str) -> Right:
    """Return the right that storing an image of this id takes."""
    if imageids.is_upload(image_id):
        return UPLOAD
    return (REPLICATE if imageids.of_backup(image_id) is None
            else BACK_UP)


def user_id(name: str, option: str) -> int:
    """Return the id of a user.

    :param name: of the user, or the id in digits
    :raises ValueError: there is no such user
    """
    if name.isdecimal():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        raise ValueError(f'{option}: there is no user {name!r}')


def require_sender(peer: messages.Peer) -> None:
    """Refuse peers without a certificate, which cannot have a right.

    :raises HTTPError: 403
    """
    if peer.uid is None and not peer.operator:
        raise messages.HTTPError(
            403, 'Only clients with a certificate of tls_client_ca may send '
                 'images.')


@dataclasses.dataclass(frozen=True)
class _Grant:
    """An item of an option.

    :ivar holder: a name in certificates, maybe with ``*`` as its first label;
        or the id of a user
    :ivar source: the name of backups, maybe with ``*`` at its end
    """

    holder: str | int
    source: str = '*'

    def covers(self, peer: messages.Peer, source: str) -> bool:
        """Return whether the peer has the right, for backups of this name."""
        if self.source.endswith('*'):
            if not source.startswith(self.source[:-1]):
                return False
        elif source != self.source:
            return False
        if isinstance(self.holder, int):
            return peer.uid == self.holder
        return any(map(self._is_name, peer.names))

    def _is_name(self, name: str) -> bool:
        if not str(self.holder).startswith('*.'):
            return name == self.holder
        first, _, rest = name.partition('.')
        return (f'*.{rest}' == self.holder
                and _LABEL.fullmatch(first) is not None)


class Rights:
    """The rights that the options give. Used in the event loop's thread.

    :param options: the group ``[dedupd]``
    :raises ValueError: an option names an unknown user
    """

    def __init__(self, options: Any) -> None:
        self._options = options
        self.load()

    def load(self) -> None:
        """Read the options; if one is invalid, all rights stay as they were.

        :raises ValueError: as for the class
        """
        self._grants = {
            REPLICATE: self._of_holders(REPLICATE),
            UPLOAD: self._of_holders(UPLOAD),
            BACK_UP: [
                _Grant(_holder(holder, BACK_UP), source)
                for holder, _, source in (
                    item.rpartition(':')
                    for item in self._options[BACK_UP.option])]}

    def _of_holders(self, right: Right) -> list[_Grant]:
        return [_Grant(_holder(item, right))
                for item in self._options[right.option]]

    def require(self, peer: messages.Peer, image_id: str) -> None:
        """Refuse a peer that may not store an image of this id.

        :raises HTTPError: 403
        """
        require_sender(peer)
        if peer.uid in (0, os.geteuid()):
            return
        right = needed(image_id)
        backup = imageids.of_backup(image_id)
        source = '' if backup is None else backup.name
        if any(grant.covers(peer, source) for grant in self._grants[right]):
            return
        what = 'upload' if right is UPLOAD else f'send image {image_id[:140]}'
        words = right.words if backup is None else f'{right.words} {source}'
        why = (f'{_named(peer)} may not {what}: it lacks the right to '
               f'{words}. The option {right.option} of this daemon gives it.')
        _STRANGERS.warning('%s', why)
        raise messages.HTTPError(403, why)


def _holder(text: str, right: Right) -> str | int:
    """Return the user's id, or the certificate's name, in an option's item."""
    if text.startswith(USER):
        return user_id(text.removeprefix(USER), right.option)
    return text


def _named(peer: messages.Peer) -> str:
    """Return words for a peer."""
    if peer.uid is not None:
        return f'The user with the id {peer.uid}'
    if not peer.names:
        return 'A certificate without a common name or a DNS name'
    names = ', '.join(repr(name[:_MAX_LENGTH]) for name in peer.names[:_SHOWN])
    return f'The certificate of {names}'
