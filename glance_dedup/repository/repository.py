# SPDX-License-Identifier: Apache-2.0

"""Repositories: creating one, and storing, reading and deleting images.

A :class:`Repository` is a directory. Any number of processes and hosts may
have it open at once. They coordinate by kernel locks, links and renames in the
directory itself, and need no daemon.

All objects here are safe for use by several threads at once. After a fork the
child's :class:`Repository` opens itself again at its next use. Transactions
and images that were open before the fork stay the parent's; in the child they
raise :class:`~glance_dedup.base.exceptions.ClosedError`.

Sizes and offsets are in bytes everywhere.
"""

import bisect
from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import os
import re
import secrets
import threading
from typing import Any
from typing import BinaryIO
import weakref

import xxhash

from glance_dedup import _engine
from glance_dedup.base import access
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import filesystem
from glance_dedup.base import hashes
from glance_dedup.base import imageids
from glance_dedup.base import scopes
from glance_dedup.repository import hostfilter
from glance_dedup.repository import parameters as parameters_module

PIECE = 4 * 1024 * 1024

#: How much room storing leaves free on the file system, MiB.
RESERVE_MIB = 64

_PARAMETERS_FILE = 'repository.json'
_KEY_FILE = 'key'
_DIRECTORIES = ('groups', 'images', 'spool', 'locks', 'quarantine')
_LOCK_FILES = ('locks/groups', 'locks/images')
_CODECS = ('none', 'lz4', 'zstd')

_MAX_THREADS = 64


@dataclasses.dataclass(frozen=True)
class ImageStat:
    """The facts in a recipe about its image. Sizes are in bytes."""

    image_id: str
    upload_id: str
    project: str
    scope: str
    """The scope whose blocks the image shares: 32 hexadecimal digits, all
    zeros for the global one."""
    size: int
    zero_bytes: int
    new_bytes: int
    """Plain bytes of the blocks that this image was the first to store."""
    stored_bytes: int
    """Bytes written for these blocks: compressed, with segment headers."""
    extents: int
    fragments: int
    """Runs of blocks that do not continue the run before them."""
    created: int
    """Seconds since 1970."""
    hash_name: str = ''
    """The name of the hash that the storing program computed; '': none."""
    hash_value: str = ''
    """Hexadecimal digits."""


@dataclasses.dataclass(frozen=True)
class Extent:
    """A run of zeros, or of blocks with consecutive addresses."""

    offset: int
    length: int
    kind: str
    """'zeros' or 'blocks'"""
    group: int
    slot: int
    blocks: int


def _key_file(digits: bytes) -> bytes:
    return digits + b' ' + xxhash.xxh3_64_hexdigest(digits).encode() + b'\n'


class Repository:
    """An open repository.

    :param path: its directory
    :param codec: the codec of new segments: ``'none'``, ``'lz4'`` or
        ``'zstd'``
    :param codec_level: 1 to 19 for zstd; 0 is the codec's default
    :param threads: threads for fingerprints and compression; None: one for
        each processor, at most 4; 0: the caller's thread does all work
    :param filter_dir: the fingerprint filter's directory, on a tmpfs of this
        host; None: a directory of this user's in ``/dev/shm``
    :param filter_mib: budget of the fingerprint filter, MiB, at least 1; it
        counts only if the filter does not exist yet
    :param lock_timeout: seconds to wait for another process that is deleting
        the same image
    :param segment_cache_mib: budget, MiB, for decompressed segments that all
        images read through this object share; 0: none are kept
    :param codec_yields: store segments uncompressed while processors are short
    :param direct_io: write new blocks past the page cache, if the file system
        can
    :param reserve_mib: room, MiB, that storing leaves free on the file system,
        for deleting and collecting; but never more than a hundredth of the
        file system
    :raises InvalidParameter: for a value out of bounds
    :raises ImageNotFound: if there is no repository
    :raises DamagedError, VersionError, AccessDenied, StorageError:
        as their names say. AccessDenied also for the superuser, if the
        repository is somebody else's
    :raises UnfitFileSystem: the file system's locks would not keep others out

    The first store operation opens this host's filter. If that fails (no room
    on the tmpfs), it gives a RuntimeWarning: images are stored without the
    filter, but duplicates are missed. Later store operations try again.

    :ivar filter: this host's filter
    """

    def __init__(self, path: str | os.PathLike, *, codec: str = 'lz4',
                 codec_level: int = 0, threads: int | None = None,
                 filter_dir: str | None = None, filter_mib: int = 64,
                 lock_timeout: float = 30.0, segment_cache_mib: int = 0,
                 reserve_mib: int = RESERVE_MIB,
                 codec_yields: bool = False, direct_io: bool = False,
                 _allow_weak: bool = False) -> None:
        self.path = os.path.abspath(os.fspath(path))
        if threads is None:
            threads = min(4, len(os.sched_getaffinity(0)))
        parameters_module.need_range('threads', threads, 0, _MAX_THREADS)
        parameters_module.need_range('filter_mib', filter_mib, 1, 1 << 20)
        parameters_module.need_range(
            'segment_cache_mib', segment_cache_mib, 0, 1 << 20)
        parameters_module.need_range('reserve_mib', reserve_mib, 0, 1 << 20)
        if codec not in _CODECS:
            raise exceptions.InvalidParameter(
                f"there is no codec '{codec}': choose none, lz4 or zstd")
        if not 0 <= lock_timeout <= 3600:
            raise exceptions.InvalidParameter(
                f'lock_timeout: {lock_timeout!r} is not 0 to 3600 seconds')
        self._mutex = threading.Lock()
        self._closed = False
        self._engine: _engine.Repository | None = None
        self.parameters = self._read_parameters(_allow_weak)
        self.key = self._read_key()
        self._open_engine = functools.partial(
            _engine.Repository, os.fsencode(self.path),
            repository_id=bytes.fromhex(self.parameters.repository_id),
            block_size=self.parameters.block_size,
            cut_minimum=self.parameters.cuts[0],
            cut_average=self.parameters.cuts[1],
            group_slots=self.parameters.group_slots,
            segment_size=self.parameters.segment_size,
            fingerprint=self.parameters.fingerprint,
            by_value=self.parameters.compare == 'value',
            codec=codec,
            codec_level=codec_level,
            threads=threads,
            lock_timeout_ms=int(lock_timeout * 1000),
            allow_weak=_allow_weak,
            reserve=reserve_mib << 20,
            codec_yields=codec_yields,
            direct_io=direct_io)
        self._segment_cache_bytes = segment_cache_mib << 20
        self.filter = hostfilter.HostFilter(
            self.path, self.parameters.repository_id,
            self.parameters.group_slots, filter_dir, filter_mib << 20)
        _live.add(self)
        filesystem.check_locks(self.path)
        self.handle()

    # -- creating ---------------------------------------------------------

    @staticmethod
    def create(path: str | os.PathLike, *, group_access: bool = False,
               **chosen: Any) -> None:
        """Make a repository in a directory that is missing or empty.

        :param chosen: as for
            :meth:`~glance_dedup.repository.parameters.Parameters.choose`
        :param group_access: all members of the directory's group may use the
            repository; otherwise it is this user's alone
        :raises InvalidParameter: for a value out of bounds, or a directory
            that holds something else
        :raises ImageExists: if the directory holds a repository already

        If a call dies in the middle, the next call completes its work.
        """
        path = os.path.abspath(os.fspath(path))
        parameters = parameters_module.Parameters.choose(**chosen)
        with files.os_errors(f'cannot create the repository {path}'):
            os.makedirs(path, mode=0o700, exist_ok=True)
            Repository._need_fresh(path)
            access.settle(path, group_access)
            mode = access.file_mode(path)
            for name in _DIRECTORIES:
                access.make_directory(os.path.join(path, name),
                                      access.directory_mode(path))
            for name in _LOCK_FILES:
                with contextlib.suppress(FileExistsError):
                    os.close(access.make_file(os.path.join(path, name), mode))
            with contextlib.suppress(FileExistsError):
                files.create_file(
                    os.path.join(path, _KEY_FILE),
                    _key_file(secrets.token_hex(32).encode()), mode)
            for name in ('locks', ''):
                files.sync_directory(os.path.join(path, name))
            # Last: with it the directory is a repository.
            try:
                files.create_file(os.path.join(path, _PARAMETERS_FILE),
                                  parameters.to_json(), mode)
            except FileExistsError:
                raise exceptions.ImageExists(
                    f'{path} is a repository already')
            files.sync_directory(path)
            # The parent may be somebody else's, and closed to this user.
            with contextlib.suppress(PermissionError):
                files.sync_directory(os.path.dirname(path))

    @staticmethod
    def _need_fresh(path: str) -> None:
        ours = {_KEY_FILE, *_DIRECTORIES, 'lost+found'}
        names = set(os.listdir(path))
        if _PARAMETERS_FILE in names:
            raise exceptions.ImageExists(f'{path} is a repository already')
        strange = sorted(n for n in names - ours
                         if not files.TEMPORARY.fullmatch(n))
        if strange:
            raise exceptions.InvalidParameter(
                f'{path} is neither empty nor a repository: it holds '
                f'{strange[0]}')
        # With a new id, existing files would count as damaged.
        for name in names & {'groups', 'images'}:
            if os.listdir(os.path.join(path, name)):
                if os.path.lexists(os.path.join(path, _PARAMETERS_FILE)):
                    # Another process was faster, and stores already.
                    raise exceptions.ImageExists(
                        f'{path} is a repository already')
                raise exceptions.InvalidParameter(
                    f'{path} is a repository that has lost its '
                    f'{_PARAMETERS_FILE}: {name}/ is not empty. Restore the '
                    'file from a backup')

    # -- opening and closing ----------------------------------------------

    def _read_parameters(
            self, allow_weak: bool) -> parameters_module.Parameters:
        path = os.path.join(self.path, _PARAMETERS_FILE)
        if not os.path.isdir(self.path):
            raise exceptions.ImageNotFound(
                f'there is no directory {self.path}')
        with files.os_errors(f'cannot look at {self.path}'):
            access.check_user(self.path)
        if not os.path.lexists(path):
            try:
                os.listdir(self.path)
            except OSError as e:
                raise exceptions.AccessDenied(
                    f'cannot read {self.path}: {e.strerror}')
            raise exceptions.ImageNotFound(
                f'{self.path} is not a repository: it has no '
                f'{_PARAMETERS_FILE}')
        with files.os_errors(f'cannot read {path}'):
            return parameters_module.Parameters.from_json(
                files.read_file(path, 65536), path, allow_weak)

    def _read_key(self) -> bytes:
        path = os.path.join(self.path, _KEY_FILE)
        with files.os_errors(f'cannot read {path}'):
            content = files.read_file(path, 1024)
        digits = content[:64]
        if not re.fullmatch(rb'[0-9a-f]{64}', digits) or (
                content != _key_file(digits)):
            raise exceptions.DamagedError(
                f'{path} is damaged: it does not hold a key and its checksum')
        return bytes.fromhex(digits.decode())

    def handle(self) -> _engine.Repository:
        """The engine's handle of this process, opened at first use.

        The maintainer and others use it for what this class does not offer
        (``_engine.pyi``). Callers must not close it, nor keep it past a fork.

        :raises ClosedError: the repository is closed
        """
        handle = self._engine
        if handle is not None:
            return handle
        with self._mutex:
            if self._closed:
                raise exceptions.ClosedError('the repository handle is closed')
            if self._engine is None:
                engine = self._open_engine()
                engine.set_segment_cache(self._segment_cache_bytes)
                self._engine = engine
            return self._engine

    def close(self) -> None:
        """Close the repository. Open images stay readable until closed.

        Idempotent. Later calls of other methods raise ClosedError.
        """
        with self._mutex:
            self._closed = True
            engine, self._engine = self._engine, None
        self.filter.close()
        if engine is not None:
            engine.close()

    def __enter__(self) -> 'Repository':
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    def _after_fork(self) -> None:
        """Forget the parent's handle; its descriptors are closed already."""
        self._mutex = threading.Lock()
        self._engine = None
        self.filter.after_fork()

    @property
    def repository_id(self) -> str:
        """32 hexadecimal digits, drawn when the repository was created."""
        return self.parameters.repository_id

    @property
    def group_access(self) -> bool:
        """Whether all members of a group may use the repository."""
        with files.os_errors(f'cannot look at {self.path}'):
            return access.is_shared(os.stat(self.path))

    def room(self) -> tuple[int, int]:
        """Bytes free on the file system, and those that storing leaves free.

        While the first number is below the second, storing is refused.
        """
        return self.handle().room()

    def need_room(self, size: int) -> None:
        """Check whether `size` bytes can be stored now.

        :raises NoSpaceError: less than the reserve would stay free
        """
        self.handle().check_room(size)

    # -- storing ----------------------------------------------------------

    def begin(self, image_id: str, project: str = '',
              scope: str | bytes = 'global') -> 'Transaction':
        """Start to store an image.

        :param scope: the images with which it shares blocks: ``'global'``: all
            global ones; ``'project'``: those that this project stored with
            ``'project'``; or a scope's id of 16 bytes, taken from an image
            elsewhere
        :raises ImageExists: at once, if the image is committed already
        :raises NoSpaceError: at once, if only the reserve is free
        :raises InvalidParameter: for an id other than 1 to 128 characters of
            ``A-Z a-z 0-9 _ -``
        """
        for name, value in (('image id', image_id), ('project', project)):
            need_text(name, value)
        scope_id = scopes.choose(scope, project)
        handle = self.handle()
        self.filter.complete(handle)
        return Transaction(
            image_id, handle.begin(image_id, project, scope_id), self)

    def put(self, image_id: str, source: str | os.PathLike | BinaryIO,
            size: int | None = None, project: str = '',
            progress: Callable[[int], None] | None = None,
            scope: str = 'global') -> ImageStat:
        """Store an image from a file's path or an object with ``read()``.

        :param size: how many bytes the source must have; None: any number
        :param progress: called with the bytes read so far
        :param scope: as for :meth:`begin`
        :raises InvalidParameter: if the source has fewer or more bytes than
            `size`

        After any error no part of the image remains.
        """
        with contextlib.ExitStack() as stack:
            if isinstance(source, (str, os.PathLike)):
                with files.os_errors(f'cannot read {os.fspath(source)}'):
                    # Unbuffered, or a pipe would be read PIECE by PIECE.
                    source = stack.enter_context(
                        open(source, 'rb', buffering=0))
            transaction = stack.enter_context(
                self.begin(image_id, project, scope))
            done = 0
            while piece := source.read(PIECE):
                done += len(piece)
                if size is not None and done > size:
                    break
                transaction.write(piece)
                if progress is not None:
                    progress(done)
            if size is not None and done != size:
                raise exceptions.InvalidParameter(
                    f'image {image_id}: {size} bytes were announced, but '
                    f'{"more" if done > size else f"only {done}"} came')
            return transaction.commit()

    def delete(self, image_id: str, upload_id: str | None = None) -> None:
        """Delete an image. Readers that have it open can go on reading.

        A later collection frees its space.

        :param upload_id: delete the image only if it is of this upload
        :raises ImageNotFound, BusyError: as their names say
        """
        need_text('image id', image_id)
        with self._need_directories():
            self.handle().delete(image_id, _upload_bytes(upload_id))
        hashes.forget(self.path, image_id)

    @contextlib.contextmanager
    def _need_directories(self) -> Iterator[None]:
        """Turn ImageNotFound into StorageError if a directory is missing.

        Glance forgets an image that is not found.
        """
        try:
            yield
        except exceptions.ImageNotFound as e:
            for name in ('images', 'spool'):
                path = os.path.join(self.path, name)
                if not os.path.lexists(path):
                    raise exceptions.StorageError(
                        f'the directory {path} is missing. Mount the '
                        "repository's disk, or restore the directory from a "
                        'backup') from e
            raise

    # -- reading ----------------------------------------------------------

    def open_image(self, image_id: str,
                   upload_id: str | None = None) -> 'Image':
        """Open an image for reading; it can be read until closed.

        :param upload_id: open the image only if it is of this upload
        :raises ImageNotFound: if there is no such image
        :raises DamagedError: if its recipe is damaged
        """
        need_text('image id', image_id)
        with self._need_directories():
            return Image(self.handle().open_image(
                image_id, _upload_bytes(upload_id)), self)

    def block_reader(self) -> 'BlockReader':
        """An object that reads blocks of images that are being stored."""
        return BlockReader(self.handle().block_reader(), self)

    def stat(self, image_id: str) -> ImageStat:
        """The facts in an image's recipe; raises as :meth:`open_image`."""
        with self.open_image(image_id) as image:
            return image.stat

    def images(self) -> list[str]:
        """The ids of all committed images, sorted.

        Names that are no image ids are left out: a network file system gives
        such a name to a file that is removed while it is open.
        """
        self.handle()
        path = os.path.join(self.path, 'images')
        with files.os_errors(f'cannot list {path}'):
            return sorted(filter(imageids.is_valid, os.listdir(path)))

    # -- statistics and the filter ----------------------------------------

    def statistics(self) -> dict[str, int]:
        """Counts of this process since it opened the repository.

        * Blocks: ``blocks`` (non-zero), ``zero_blocks``, ``hits``, ``misses``.
        * Look-ups: ``candidates`` from the filter, and the
          ``false_candidates`` among them; ``cold_loads`` of fingerprint
          stores, and ``capped_loads`` that were left out; ``compares`` by
          value; ``phase_samples``, blocks that were looked up at another
          phase, and ``phase_changes``, batches that were then cut at another
          phase.
        * Reading and writing: ``lock_refusals``; ``sync_points``;
          ``bytes_read``; ``spare_reads`` of spare copies in place of damaged
          blocks; ``yielded_segments`` that were not compressed for want of a
          processor.
        * Disk access: ``store_reads``, ``store_seeks`` and ``store_bytes`` of
          fingerprint stores that look-ups read; ``image_reads``,
          ``image_seeks`` and ``image_bytes`` of reading images. A seek is a
          read that does not begin where the last one of its kind ended.
        * The segment cache: ``cache_bytes`` now, ``cache_hits`` and
          ``cache_misses``.
        * The host's filter: ``filter_bytes``, ``filter_places``,
          ``filter_hints``, ``filter_dropped``, ``filter_level``,
          ``filter_rebuilt`` (the last group) and ``filter_complete``; zeros if
          the host has no filter yet.
        """
        handle = self.handle()
        self.filter.attach(handle, create=False)
        return handle.statistics()

    def rebuild_filter(
            self, progress: Callable[[int, int], None] | None = None) -> None:
        """Empty this host's filter and rebuild it from the groups.

        Other processes may go on storing meanwhile.

        :param progress: called with the groups done and their total
        """
        self.filter.rebuild(self.handle(), progress)


def need_text(name: str, value: str) -> None:
    """Refuse a value that the engine cannot take as a string.

    :param name: what the value is, for the error's message
    :raises InvalidParameter: the value is no string, holds a NUL, or is not
        valid Unicode
    """
    if not isinstance(value, str):
        raise exceptions.InvalidParameter(f'the {name} is not a string')
    if '\0' in value:
        raise exceptions.InvalidParameter(f'the {name} holds a NUL')
    try:
        value.encode()
    except UnicodeEncodeError:
        raise exceptions.InvalidParameter(f'the {name} is not valid Unicode')


def _upload_bytes(upload_id: str | None) -> bytes | None:
    if upload_id is None:
        return None
    if not re.fullmatch('[0-9a-f]{32}', upload_id):
        raise exceptions.InvalidParameter(
            'an upload id has 32 hexadecimal digits')
    return bytes.fromhex(upload_id)


def _image_stat(header: dict[str, Any]) -> ImageStat:
    return ImageStat(**{**header, 'scope': header['scope'].hex(),
                        'upload_id': header['upload_id'].hex(),
                        'hash_value': header['hash_value'].hex()})


class Transaction:
    """One image's store operation.

    Leaving its ``with`` block aborts it, unless it was committed.
    """

    def __init__(self, image_id: str, engine: '_engine.Transaction',
                 repository: Repository) -> None:
        self.image_id = image_id
        # Keeps the repository alive: only then a fork closes its descriptors.
        self._repository = repository
        self._engine = engine
        self.upload_id: str = engine.upload_id.hex()
        """32 hexadecimal digits; no other upload ever has them."""

    def write(self, data: Any) -> int:
        """Append bytes to the image; returns their number.

        The caller may reuse the buffer when this returns, though the bytes may
        not be on the disk yet. After an error only :meth:`abort` is possible.

        :raises NoSpaceError, StorageError: as their names say
        """
        return self._engine.write(data)

    def find(self, fingerprints: bytes, lengths: bytes) -> bytes:
        """Look blocks up by their fingerprints, for :meth:`add`.

        This finds blocks that this transaction wrote, too. Blocks that it
        finds stay until the transaction ends. If the repository compares
        blocks by value, this finds none, since it has no bytes to compare.

        :param fingerprints: 32 bytes for each block
        :param lengths: each block's plain bytes, a little-endian number of 32
            bits
        :returns: an address of 64 bits for each block; 0: the caller has to
            write the block
        :raises NoSpaceError, StorageError: bytes written before could not be
            stored; only :meth:`abort` is possible
        """
        return self._engine.find(fingerprints, lengths)

    def add(self, fingerprints: bytes, lengths: bytes,
            addresses: bytes) -> None:
        """Append blocks that :meth:`find` found.

        :param fingerprints: as for :meth:`find`
        :param lengths: as for :meth:`find`
        :param addresses: as :meth:`find` returned them
        :raises InvalidParameter: if the last ``write`` ended within a block,
            or this transaction's :meth:`find` would not return one of the
            addresses for its block. Nothing is appended then.
        :raises NoSpaceError, StorageError: only :meth:`abort` is possible
        """
        self._engine.add(fingerprints, lengths, addresses)

    def write_blocks(self, data: Any, lengths: bytes) -> bytes:
        """Append blocks that were cut elsewhere; they are not cut again.

        :param data: the blocks' bytes, one block behind the other
        :param lengths: as for :meth:`find`
        :returns: the blocks' addresses, as from :meth:`find`; 0 for a block of
            zeros
        :raises InvalidParameter: if the last ``write`` ended within a block,
            or a block is longer than this repository's blocks may be
        :raises NoSpaceError, StorageError: only :meth:`abort` is possible
        """
        return self._engine.write_blocks(data, lengths)

    def add_zeros(self, length: int) -> None:
        """Append `length` bytes of zeros.

        :raises InvalidParameter: if the last ``write`` ended within a block,
            or the image would become longer than any file
        :raises NoSpaceError, StorageError: only :meth:`abort` is possible
        """
        parameters_module.need_range('length', length, 0, (1 << 63) - 1)
        self._engine.add_zeros(length)

    def keep(self) -> None:
        """Make the blocks stored so far durable, and known to others.

        Later transactions find these blocks, even if this one is aborted,
        until a collection frees them.

        :raises NoSpaceError, StorageError: only :meth:`abort` is possible
        """
        self._engine.keep()

    def set_hash(self, name: str, value: bytes) -> None:
        """Set the whole image's hash, which the recipe records.

        :param name: the hash's name in hashlib
        :param value: the digest
        :raises InvalidParameter: the hash is too long for a recipe
        """
        self._engine.set_hash(name, value)

    def commit(self) -> ImageStat:
        """Make the image exist, durably.

        :raises ImageExists: if another transaction committed the id first
        :raises StorageError: if the disk failed. If it failed after the image
            came to exist, the image stays: :meth:`Repository.stat` tells.
        """
        return _image_stat(self._engine.commit())

    def commit_open(self) -> 'Image':
        """Commit, and return the image, open for reading.

        It was opened while the transaction still held its blocks. Raises as
        :meth:`commit`.
        """
        return Image(self._engine.commit_open(), self._repository)

    def abort(self) -> None:
        """Give up the image; its recipe and unsynced blocks are dropped.

        Idempotent; it has no effect after a commit.
        """
        self._engine.abort()

    def __enter__(self) -> 'Transaction':
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.abort()


class Image:
    """An image open for reading. It keeps its blocks until it is closed."""

    def __init__(self, engine: '_engine.Image',
                 repository: Repository) -> None:
        self._engine = engine
        self._repository = repository  # as in Transaction
        self.stat = _image_stat(engine.header())

    @property
    def size(self) -> int:
        return self.stat.size

    def readinto(self, buffer: Any, offset: int = 0) -> int:
        """Fill a writable buffer from `offset`; returns the bytes read.

        They are fewer than the buffer's only at the image's end.

        :raises DamagedError: names the file and the offset in it. The buffer's
            content is then undefined
        """
        if offset < 0:
            raise exceptions.InvalidParameter(f'offset {offset} is negative')
        return self._engine.readinto(buffer, min(offset, self.size))

    def read(self, length: int = -1, offset: int = 0) -> bytes:
        """At most `length` bytes from `offset`; -1: all bytes to the end.

        :raises DamagedError: names the file and the offset in it
        """
        if offset < 0:
            raise exceptions.InvalidParameter(f'offset {offset} is negative')
        size = self.size
        return self._engine.read(size if length < 0 else min(length, size),
                                 min(offset, size))

    def pieces(self, offset: int = 0, length: int | None = None,
               piece: int = PIECE) -> Iterator[bytes]:
        """The bytes of a range (to the end if `length` is None), in pieces."""
        parameters_module.need_range('piece', piece, 1, 1 << 40)
        end = self.size
        if length is not None:
            end = min(end, offset + length)
        while offset < end:
            data = self.read(min(piece, end - offset), offset)
            offset += len(data)
            yield data

    def extents(self, offset: int = 0) -> Iterator[Extent]:
        """The image's extents, in order, from the one at `offset` on."""
        page = self._page_of(offset)
        while extents := self._engine.extents(page):
            for fields in extents:
                extent = Extent(*fields)
                if extent.offset + extent.length > offset:
                    yield extent
            page += 1

    def _page_of(self, offset: int) -> int:
        """The page of extents that covers an offset."""
        if not offset:
            return 0
        # All pages but the last are as full as the first.
        pages = range(0, self.stat.extents, len(self._engine.extents(0)) or 1)
        return max(0, bisect.bisect_right(
            range(len(pages)), offset,
            key=lambda page: self._engine.extents(page)[0][0]) - 1)

    def describe(self, page: int) -> bytes:
        """One page of extents, with the fingerprints of their blocks.

        :param page: its number, from 0
        :returns: extents in the wire format, without its header; ``b''``
            behind the last page
        :raises DamagedError: the entries have changed since the image's commit
        """
        parameters_module.need_range('page', page, 0, (1 << 63) - 1)
        return self._engine.describe(page)

    def frames(self, ranges: list[tuple[int, int]]
               ) -> tuple[list[bytes], int]:
        """The blocks of some ranges, for another repository.

        The frames hold only these blocks. A segment is sent as it is stored
        only if this call asks for all its bytes.

        :param ranges: pairs of offset and length, sorted, without overlap;
            none begins or ends within a block
        :returns: frames in the wire format, in no order, without the final
            one, with at most 2 MiB of blocks; zeros are left out. And the
            offset from which the next call has to go on: if this call took
            everything, the last range's end
        :raises InvalidParameter: for other ranges
        :raises DamagedError: a block does not verify, and has no spare copy
        """
        for offset, length in ranges:
            parameters_module.need_range('offset', offset, 0, (1 << 63) - 1)
            parameters_module.need_range('length', length, 0, (1 << 63) - 1)
        return self._engine.frames(list(ranges))

    def close(self) -> None:
        """Close the image. Idempotent."""
        self._engine.close()

    def __enter__(self) -> 'Image':
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()


class BlockReader:
    """Reads blocks by their addresses, while a transaction holds them.

    It serves one thread at a time; others wait.
    """

    def __init__(self, engine: '_engine.BlockReader',
                 repository: Repository) -> None:
        self._engine = engine
        self._repository = repository  # as in Transaction

    def read(self, fingerprints: bytes, lengths: bytes,
             addresses: bytes) -> bytes:
        """The blocks' bytes, one block behind the other.

        Blocks that a transaction found can be read until it ends. Blocks that
        it wrote can be read from its next :meth:`~Transaction.keep` on. The
        arguments are as for :meth:`Transaction.add`.

        :raises DamagedError: names group and slot: the slot has no good block,
            or another one
        """
        return self._engine.read(fingerprints, lengths, addresses)

    def close(self) -> None:
        """Close the reader. Idempotent."""
        self._engine.close()


# -- forking ------------------------------------------------------------------

_live: 'weakref.WeakSet[Repository]' = weakref.WeakSet()


def _close_inherited() -> None:
    """In a forked child: close every descriptor into a repository or filter.

    A lock belongs to the open file, which parent and child share. If the child
    kept the file open, the lock would outlive the parent. If the child
    unlocked it, the parent would lose the lock. Closing does neither.
    """
    repositories = list(_live)
    if not repositories:
        return
    roots = [os.path.realpath(path) for r in repositories
             for path in (r.path, r.filter.file) if path is not None]
    for name in os.listdir('/proc/self/fd'):
        try:
            target = os.readlink(f'/proc/self/fd/{name}')
        except OSError:
            continue
        for root in roots:
            if (target in (root, f'{root} (deleted)')
                    or target.startswith(root + '/')):
                os.close(int(name))
                break
    for repository in repositories:
        repository._after_fork()


os.register_at_fork(after_in_child=_engine.after_fork)
os.register_at_fork(after_in_child=_close_inherited)
