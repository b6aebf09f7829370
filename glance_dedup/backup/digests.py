# SPDX-License-Identifier: Apache-2.0

"""The digests of a source's segments, as of its last backup.

A file of digests belongs to one backup. It is a hint (B1), but a wrong "this
segment is clean" would put other bytes into the next backup, so everything in
it is bound to that backup::

    0       the head: JSON with a checksum (files.pack_json), filled up with
            spaces to 4096 bytes: repository, backup, upload, SHA-256 of the
            view's identity, size, size of a segment, a random key for the
            pages, and the key of the digests
    4096 i  page i, from 1: the digests of 254 segments, and SHA-256 over the
            pages' key, the page's number, and these digests

The last page is filled up with zeros. A digest is valid if and only if (1) the
head is whole and names the right source, (2) the file has the exact pages for
the size, and (3) its page has the key of the head. So a page of an older file,
of another source, or with one false bit says nothing, and its segments are
read.

A segment's digest is keyed (GMAC), which takes a third of the time of SHA-256.
The key is random, one for each source, and goes on from file to file, so that
digests can be compared. Without it, one finds two segments with one digest
by chance only: 2^-110 for each pair (``keyeddigest.h``). A user who knows
it can make such segments, and can also forge the whole file. So the state
directory is as secret, and as safe, as the repository.

Reading and writing hold one page, whatever the size. The digests of a disk of
1 TiB have 8 MiB. The new file is written beside the scan, with the name
``<name>.digests.new``, and gets its head twice: at the end of the scan,
without a backup, so that a process that goes on after a crash finds it by the
view's identity; and after the commit, before the rename (B3).
"""

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import stat
import struct
from typing import Any

from glance_dedup import _engine
from glance_dedup.backup import places
from glance_dedup.backup import views
from glance_dedup.base import closing
from glance_dedup.base import files

LOG = logging.getLogger(__name__)

_KIND = 'segment digests'
_PAGE = 4096
_DIGEST = 16
_SEAL = 32
_PER_PAGE = (_PAGE - _SEAL) // _DIGEST
_KEY = 16
_DIGEST_KEY = 32
_NO_BASE = views.Base('', '')


def _pages(size: int) -> int:
    """Return how many pages the digests of a view of this size have."""
    return -(-(-(-size // views.SEGMENT)) // _PER_PAGE)


def _seal(key: bytes, page: int, digests: bytes) -> bytes:
    return hashlib.sha256(
        key + struct.pack('<Q', page) + digests).digest()


class _Head:
    """Head of a file of digests: the source that it belongs to."""

    def __init__(self, repository_id: str, identity: str, size: int,
                 key: bytes, digest_key: bytes, base: views.Base) -> None:
        self.repository_id = repository_id
        self.identity = identity
        self.size = size
        self.key = key
        self.digest_key = digest_key
        self.base = base

    def pack(self) -> bytes:
        return files.pack_json(
            _KIND, repository_id=self.repository_id, identity=self.identity,
            size=self.size, segment=views.SEGMENT, key=self.key.hex(),
            digest_key=self.digest_key.hex(), backup_id=self.base.backup_id,
            upload_id=self.base.upload_id).ljust(_PAGE)

    @classmethod
    def unpack(cls, data: bytes, repository_id: str) -> '_Head | None':
        """None: the bytes are no head, or of another repository."""
        try:
            fields = files.unpack_json(data, _KIND, _PAGE)
            strings = [fields[name] for name in (
                'repository_id', 'identity', 'key', 'digest_key', 'backup_id',
                'upload_id')]
            size = fields['size']
            if (not all(isinstance(text, str) for text in strings)
                    or type(size) is not int or not 0 <= size < 1 << 63
                    or fields['segment'] != views.SEGMENT
                    or strings[0] != repository_id):
                return None
            key, digest_key = map(bytes.fromhex, strings[2:4])
        except (ValueError, KeyError, TypeError, AttributeError,
                RecursionError):
            return None
        if (len(key), len(digest_key)) != (_KEY, _DIGEST_KEY):
            return None
        return cls(repository_id, strings[1], size, key, digest_key,
                   views.Base(*strings[4:]))


def _open(path: str, repository_id: str, mode: int = os.O_RDWR
          ) -> tuple[int, _Head] | None:
    """A file of digests that is whole by its length; None: there is none."""
    try:
        fd = os.open(path, mode | os.O_NOFOLLOW | os.O_CLOEXEC
                     | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        head = (_Head.unpack(os.pread(fd, _PAGE, 0), repository_id)
                if stat.S_ISREG(status.st_mode) else None)
        if head and status.st_size == _PAGE * (1 + _pages(head.size)):
            return fd, head
    except OSError as e:
        LOG.warning('%s cannot be read, so every segment is read: %s', path, e)
    os.close(fd)
    return None


class Known(closing.Closing):
    """The digests of the last backup.

    :param fd: of the file; None: no digest is known
    """

    def __init__(self, fd: int | None, head: _Head) -> None:
        self._fd: int | None = fd
        self._head = head
        self._page = -1
        self._digests = b''

    @property
    def base(self) -> views.Base:
        """The backup that they are of."""
        return self._head.base

    @property
    def digest_key(self) -> bytes:
        """Digests of segments can be compared with these if they have it."""
        return self._head.digest_key

    @classmethod
    def of_backup(cls, path: str, repository_id: str, base: views.Base
                  ) -> 'Known':
        """The digests in a file, if they are of this backup; else none."""
        fd, head = _open(path, repository_id, os.O_RDONLY) or (None, None)
        if head is None or head.base != base:
            if fd is not None:
                os.close(fd)
            fd, head = None, _Head(repository_id, '', 0, b'',
                                   bytes(_DIGEST_KEY), base)
        return cls(fd, head)

    def fits(self, number: int, data: Any) -> bool:
        """Return whether a segment has its digest, or none is known."""
        digest = self.get(number)
        return not digest or digest == _engine.keyed_digest(
            self.digest_key, data)

    def get(self, number: int) -> bytes:
        """The digest of a segment; b'': it is not known."""
        page, place = divmod(number, _PER_PAGE)
        if page != self._page:
            self._page, self._digests = page, self._load(page)
        return self._digests[place * _DIGEST:(place + 1) * _DIGEST]

    def _load(self, page: int) -> bytes:
        if self._fd is None or page >= _pages(self._head.size):
            return b''
        try:
            data = os.pread(self._fd, _PAGE, _PAGE * (1 + page))
        except OSError as e:
            LOG.warning('digests cannot be read, so segments are: %s', e)
            return b''
        digests, seal = data[:-_SEAL], data[-_SEAL:]
        # The seal has the page's key, so it also finds a page that is short.
        whole = seal == _seal(self._head.key, page, digests)
        return digests if whole else b''

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


class DigestChanges(views.Changes):
    """Finds clean segments by their digests.

    If the new digests cannot be written, the backup goes on without them, a
    warning is logged, and the next backup reads and sends more than it has to.

    :param place: of the source, locked
    :param identity: of the view
    :param size: of the view, in bytes
    :param resumed: whether this view was scanned before, by a process that
        died
    """

    def __init__(self, place: places.Place, identity: str, size: int,
                 resumed: bool = False) -> None:
        self._place = place
        self._path = place.path('digests')
        self._new_path = place.path('digests.new')
        self._size = size
        self._zeros: dict[int, bytes] = {}
        self._new: int | None = None
        self._page = 0
        self._pending = bytearray()
        self._known = self._find_known()
        self.base = self._known.base if self._known else None
        self._head = _Head(
            place.repository_id,
            hashlib.sha256(identity.encode()).hexdigest(), size,
            secrets.token_bytes(_KEY),
            self._known.digest_key if self._known
            else secrets.token_bytes(_DIGEST_KEY), _NO_BASE)
        try:
            if resumed:
                self._new = self._find_scanned()
            else:
                self._begin()
        except BaseException:
            self.close()
            raise

    def _find_known(self) -> Known | None:
        found = _open(self._path, self._place.repository_id)
        if found is None:
            return None
        if not all(found[1].base):
            os.close(found[0])
            return None
        return Known(*found)

    def _find_scanned(self) -> int | None:
        """The digests that a process that died has left, of this view."""
        found = _open(self._new_path, self._place.repository_id)
        if found is None:
            return None
        fd, head = found
        if (head.identity, head.size) != (self._head.identity, self._size):
            os.close(fd)
            return None
        self._head = head
        return fd

    # -- the scan ----------------------------------------------------------

    def is_clean(self, number: int) -> bool:
        """Never: a file must be read."""
        return False

    def is_same(self, number: int, data: Any) -> bool:
        """Return whether the segment has the same digest as in the base."""
        digest = (self._zero_digest(number) if data is None
                  else self._digest(data))
        self._add(digest)
        return (self.base is not None and self._known is not None
                and self._known.get(number) == digest)

    def _zero_digest(self, number: int) -> bytes:
        length = min(views.SEGMENT, self._size - number * views.SEGMENT)
        if length not in self._zeros:
            self._zeros[length] = self._digest(bytes(length))
        return self._zeros[length]

    def _digest(self, data: Any) -> bytes:
        return _engine.keyed_digest(self._head.digest_key, data)

    def _begin(self) -> None:
        try:
            # A head without its pages is no head: the length is wrong.
            self._new = os.open(
                self._new_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC
                | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, places.MODE)
        except OSError as e:
            self._give_up(e)

    def _add(self, digest: bytes) -> None:
        self._pending += digest
        if len(self._pending) == _PER_PAGE * _DIGEST:
            self._flush()

    def _flush(self) -> None:
        digests = bytes(self._pending).ljust(_PAGE - _SEAL, b'\0')
        self._pending.clear()
        self._write(digests + _seal(self._head.key, self._page, digests),
                    _PAGE * (1 + self._page))
        self._page += 1

    def _write(self, data: bytes, offset: int) -> None:
        if self._new is None:
            return
        try:
            if os.pwrite(self._new, data, offset) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as e:
            self._give_up(e)

    def _give_up(self, error: OSError) -> None:
        LOG.warning(
            'the digests of %s cannot be kept: %s: %s. The backup goes on, '
            'and the next one reads and compares every block. Make room, or '
            'correct the permissions, in the state directory',
            self._place.name, self._new_path, error)
        self._drop_new()

    def _drop_new(self) -> None:
        fd, self._new = self._new, None
        if fd is not None:
            os.close(fd)

    def end_scan(self) -> None:
        """Make the new digests durable, without a backup yet."""
        if self._pending:
            self._flush()
        self._write_head(_NO_BASE)

    def _write_head(self, base: views.Base) -> None:
        self._head.base = base
        self._write(self._head.pack(), 0)
        if self._new is not None:
            try:
                os.fsync(self._new)
            except OSError as e:
                self._give_up(e)

    # -- the end -----------------------------------------------------------

    def commit(self, base: views.Base) -> None:
        """Have the new digests replace the old ones (B3)."""
        self._write_head(base)
        if self._new is None:
            return
        with places.source_errors(
                f'the digests of {self._place.name} cannot be kept, so its '
                f'next backup reads more: {self._path}'):
            os.rename(self._new_path, self._path)
            files.sync_directory(self._place.directory)

    def close(self) -> None:
        """Forget the new digests, unless they were committed. Idempotent."""
        if self._known is not None:
            self._known.close()
        self._drop_new()
        # Its writer has the lock of the place, so this is never another's.
        with contextlib.suppress(OSError):
            os.unlink(self._new_path)
