# SPDX-License-Identifier: Apache-2.0

"""The store: a glance_store driver over a repository.

Locations
=========

::

    dedup://<repository id>/<image id>/<upload id>/<mac>

The repository id and the upload id have 32 hexadecimal digits, the mac 64.
The upload id names the one store operation that wrote the image.  The mac is
the HMAC-SHA-256, with the repository's key, of all parts before it.

If so configured, Glance lets project members set locations themselves.  So a
location is a capability: a caller who presents a valid one may read the image.
It cannot be guessed from an image's id, or made without the key.  The store
treats a location with a wrong mac exactly like that of an image that does not
exist.  A user who has seen another project's location must not be able to
delete the image.  So each image records the project that stored it, and only
that project, or an administrator, may delete it.  If Glance shows locations to
no user, the store deletes for all whom Glance lets delete: an image that
an administrator has uploaded or copied for a project belongs to the project.

Processes and threads
=====================

One instance serves all threads of a process, and keeps no state of a call.
The import opens nothing.  The store's configuration opens the repository; if
that fails, the next read tries again.  A store that was opened before a fork
works in the children, also in those that uWSGI forks in C (``forks.py``).
The store needs no other program: if the daemon answers, the store reads images
through its cache, otherwise directly.
"""

from collections.abc import Iterator
import contextlib
import logging
import os
import threading
from typing import Any
import weakref

from glance_store import capabilities
from glance_store import driver
from glance_store import exceptions as glance_exceptions
from glance_store import location
from oslo_config import cfg

from glance_dedup.base import exceptions
from glance_dedup.base import forks
from glance_dedup.base import hashes
from glance_dedup.base import imageids
from glance_dedup.base import locations
from glance_dedup.base import thread_pool
from glance_dedup.base import tracing
from glance_dedup.client import slice_client
from glance_dedup.driver import daemon_reads
from glance_dedup.driver import limits
from glance_dedup.driver import store_opts
from glance_dedup.driver import upload
from glance_dedup.repository import format_verdicts
from glance_dedup.repository import image_repository
from glance_dedup.repository import openimages

LOG = logging.getLogger(__name__)

#: In each process, the most calls into one store's repository that may hang,
#: and the most uploads that write into it at the same instant.
STORAGE_THREADS = 32

#: The exception that reports a time-out to Glance. Without an exception
#: for that in glance_store, Glance answers these with 503 for an upload, and
#: with 409 for a deletion.
UPLOAD_TIMED_OUT = getattr(
    glance_exceptions, 'TimeoutError', glance_exceptions.StorageWriteDenied)
DELETE_TIMED_OUT = getattr(glance_exceptions, 'TimeoutError',
                           glance_exceptions.InUseByStore)

# The stores of this process by repository id: each needs its own repository.
_stores: 'weakref.WeakValueDictionary[str, Store]' = (
    weakref.WeakValueDictionary())


class StoreLocation(location.StoreLocation):
    """The parts of a location.  This class does not verify the mac."""

    def process_specs(self) -> None:
        self.repository_id = self.specs['repository_id']
        self.image_id = self.specs['image_id']
        self.upload_id = self.specs['upload_id']
        self.mac = self.specs['mac']

    def get_uri(self) -> str:
        return locations.uri(self.repository_id, self.image_id,
                             self.upload_id, self.mac)

    def parse_uri(self, uri: str) -> None:
        """Take a location apart.

        :raises glance_store.exceptions.BadStoreUri: it is malformed
        """
        parts = locations.parse(uri)
        if parts is None:
            # The message does not quote the text: that may be anything, or
            # almost a valid location.
            raise glance_exceptions.BadStoreUri(
                message='A location of this store has the form dedup://'
                        '<repository id>/<image id>/<upload id>/<mac>.')
        self.specs = parts._asdict()
        self.process_specs()


class Download:
    """The bytes of an image, or of a range of it, for one reader.

    The end of the iteration closes it, and so do :meth:`close` and the garbage
    collector: a client that goes away leaves nothing open.

    The bytes come from the daemon as long as it gives them.  The open image
    keeps its blocks in any case, so that reading can go on directly.

    :param image: an open image; it is closed with the download
    :param offset: the first byte
    :param length: how many bytes; they must be within the image
    :param limit: how long the storage may take for each piece
    :param daemon: the daemon to try first; None: read directly
    :param span: ends with the download

    :ivar length: how many bytes it has
    """

    PIECE = 4 << 20

    def __init__(self, image: Any, offset: int, length: int,
                 limit: thread_pool.TimeLimit,
                 daemon: daemon_reads.Daemon | None,
                 span: tracing.Span):
        self._image = image
        self._image_id = image.stat.image_id
        self._offset = offset
        self.length = self._left = length
        self._from_daemon = 0
        self._span = span
        self._limit = limit
        self._first: bytes | None = None
        self._daemon = daemon
        self._stream: Any = None
        if daemon is not None and length:
            self._stream = daemon.open(
                self._image_id, image.stat.upload_id, image.size, offset,
                length)

    def prefetch(self) -> None:
        """Read the first piece ahead, while errors can still be reported."""
        self._first = self._read()

    def __iter__(self) -> Iterator[bytes]:
        try:
            piece, self._first = self._first, None
            if piece is None:
                piece = self._read()
            while piece:
                yield piece
                del piece
                piece = self._read()
        except Exception as exc:
            self._span.fail(type(exc))
            raise
        finally:
            self.close()

    def _read(self) -> bytes:
        if self._image is None or not self._left:
            return b''
        piece = self._read_from_daemon()
        if piece is not None:
            self._from_daemon += len(piece)
        else:
            piece = self._read_directly(min(self.PIECE, self._left))
        self._offset += len(piece)
        self._left -= len(piece)
        return piece

    def _read_from_daemon(self) -> bytes | None:
        """The next piece, whole; None if the daemon does not give it."""
        if self._daemon is None or self._stream is None:
            return None
        piece = self._daemon.read(
            self._stream, min(self.PIECE, self._stream.piece, self._left),
            self._limit.seconds)
        if piece is None:
            self._stream = None
        return piece

    def _read_directly(self, length: int) -> bytes:
        image = self._image
        with _read_errors(self._image_id):
            try:
                piece = self._limit.call(image.read, length, self._offset,
                                         late=lambda _piece: image.close())
            except thread_pool.Expired:
                # The thread that hangs closes the image when it returns.
                self._image = None
                raise
            if len(piece) != length:
                raise exceptions.StorageError(
                    f'Image {self._image_id} has only {len(piece)} of '
                    f'{length} bytes at {self._offset}.')
        return piece

    def close(self) -> None:
        """Close the image and the daemon's stream. Idempotent."""
        image, self._image = self._image, None
        stream, self._stream = self._stream, None
        self._first = None
        if stream is not None:
            stream.close()
        if image is not None:
            image.close()
        self._span.facts.update(bytes=self.length - self._left,
                                daemon_bytes=self._from_daemon)
        self._span.end()

    def __del__(self) -> None:
        if getattr(self, '_image', None) is not None:
            self.close()


def _unavailable(exc: Exception) -> Exception:
    return glance_exceptions.RemoteServiceUnavailable(
        message=f'The image store failed: {exc}')


@contextlib.contextmanager
def _read_errors(image_id: str) -> Iterator[None]:
    """Turn errors of reading into those that Glance handles.

    All errors but a missing image become RemoteServiceUnavailable: Glance then
    tries the image's next location, and answers 503 if there is none.
    """
    try:
        yield
    except (exceptions.ImageNotFound,
            exceptions.InvalidParameter) as exc:
        raise glance_exceptions.NotFound(image=image_id) from exc
    except (exceptions.RepositoryError, thread_pool.Expired) as exc:
        LOG.error('Image %s cannot be read: %s', image_id, exc)
        raise _unavailable(exc) from exc


@contextlib.contextmanager
def _upload_errors(image_id: str) -> Iterator[None]:
    try:
        yield
    except (upload.WrongSize, exceptions.InvalidParameter) as exc:
        raise glance_exceptions.Invalid(message=str(exc)) from exc
    except exceptions.ImageExists as exc:
        raise glance_exceptions.Duplicate(image=image_id) from exc
    except limits.OverLimit as exc:
        raise glance_exceptions.StorageFull(message=str(exc)) from exc
    except exceptions.NoSpaceError as exc:
        LOG.error('Image %s cannot be stored: %s', image_id, exc)
        raise glance_exceptions.StorageFull(message=str(exc)) from exc
    except (exceptions.BusyError, thread_pool.Expired) as exc:
        raise UPLOAD_TIMED_OUT(message=str(exc)) from exc
    except exceptions.RepositoryError as exc:
        # The storage is denied, read-only, failing or damaged: always 503.
        LOG.error('Image %s cannot be stored: %s', image_id, exc)
        raise glance_exceptions.StorageWriteDenied(message=str(exc)) from exc


@contextlib.contextmanager
def _delete_errors(image_id: str) -> Iterator[None]:
    try:
        yield
    except (exceptions.ImageNotFound,
            exceptions.InvalidParameter) as exc:
        raise glance_exceptions.NotFound(image=image_id) from exc
    except exceptions.AccessDenied as exc:
        raise glance_exceptions.Forbidden(message=str(exc)) from exc
    except (exceptions.BusyError, thread_pool.Expired) as exc:
        raise DELETE_TIMED_OUT(message=str(exc)) from exc
    except exceptions.RepositoryError as exc:
        LOG.error('Image %s cannot be deleted: %s', image_id, exc)
        raise glance_exceptions.BackendException(str(exc)) from exc


def _open(opened: image_repository.Repository, parts: locations.Parts
          ) -> openimages.Image:
    """Open an image for reading, and note that (image-disks.rst)."""
    image = opened.open_image(parts.image_id, parts.upload_id)
    format_verdicts.note_read(opened.path, parts.image_id)
    return image


def _project(context: Any) -> str:
    """The project of a request's context; '' if there is none."""
    return str(getattr(context, 'project_id', None) or '')


def _hash(name: str) -> Any:
    """A hash object, by any name that hashlib knows.

    :raises glance_store.exceptions.UnknownHashingAlgo: hashlib knows no such
        name, or the digest has no fixed length, like that of shake_128
    """
    try:
        return hashes.new(str(name))
    except ValueError:
        raise glance_exceptions.UnknownHashingAlgo(algo=name)


class Store(driver.Store):
    """Keeps every distinct block of its images once.  Thread-safe."""

    _CAPABILITIES = (capabilities.BitMasks.READ_RANDOM |
                     capabilities.BitMasks.WRITE_ACCESS |
                     capabilities.BitMasks.DRIVER_REUSABLE)
    OPTIONS = store_opts.dedup_opts

    def __init__(self, conf: cfg.ConfigOpts, backend: str | None = None):
        super().__init__(conf, backend)
        if self.backend_group:
            # An older glance_store has no [backend_defaults].
            if hasattr(driver, 'BackendGroupConfiguration'):
                self.store_conf = driver.BackendGroupConfiguration(
                    self.OPTIONS, self.backend_group, conf=self.conf)
            else:
                self.store_conf = getattr(self.conf, self.backend_group)
        else:
            self.store_conf = self.conf.glance_store
        self._lock = threading.Lock()
        self._repository: Any = None
        self._daemon: daemon_reads.Daemon | None = None
        self._limits = limits.Limits(0, {})
        self._storage = thread_pool.Workers('dedup-storage', STORAGE_THREADS)
        self._limit = thread_pool.TimeLimit(0, self._storage)

    def get_schemes(self) -> tuple[str, ...]:
        return (locations.SCHEME,)

    # -- Configuration -----------------------------------------------------

    def _bad(self, reason: Any) -> glance_exceptions.BadStoreConfiguration:
        return glance_exceptions.BadStoreConfiguration(
            store_name=self.backend_group or locations.SCHEME, reason=reason)

    def _option(self, name: str) -> Any:
        return getattr(self.store_conf, f'dedup_store_{name}')

    def configure_add(self) -> None:
        """Open the repository; create it if there is none.

        :raises glance_store.exceptions.BadStoreConfiguration: the store
            cannot take images.  It still serves its images, if it can.
        """
        try:
            with self._lock:
                self._repository = None
                self._limit = thread_pool.TimeLimit(self._option('timeout'),
                                                    self._storage)
                self._adopt(may_create=True)
                self._require_socket()
        except glance_exceptions.BadStoreConfiguration as exc:
            LOG.error('%s', exc)
            raise
        except (exceptions.RepositoryError, thread_pool.Expired, OSError,
                ValueError, cfg.Error) as exc:
            # A ValueError means that an option's value does not parse.
            LOG.error('The dedup store %s: %s', self.backend_group, exc)
            raise self._bad(exc) from exc

    def _open(self, may_create: bool) -> Any:
        path = self._option('datadir')
        if not path or not os.path.isabs(path) or '\0' in path:
            raise self._bad('dedup_store_datadir must be an absolute path, '
                            f'not {path!r}.')
        settings = {name: self._option(name) for name in (
            'codec', 'codec_level', 'adaptive_compression', 'direct_io',
            'threads',
            'filter_mib', 'index', 'reserve_mib')}
        for name in ('filter_dir', 'index_dir'):
            settings[name] = self._option(name) or None
        if self._option('dedupd_socket'):
            settings['ask_slices'] = slice_client.Asker(
                self._option('dedupd_socket'))
        try:
            return image_repository.Repository(path, **settings)
        except exceptions.ImageNotFound:
            if not may_create:
                raise
        with contextlib.suppress(exceptions.ImageExists):
            # If the repository exists now, another process was faster.
            image_repository.Repository.create(path)
            LOG.info('Created a repository in %s', path)
        return image_repository.Repository(path, **settings)

    def _require_socket(self) -> None:
        path = self._option('dedupd_socket')
        if path and not os.path.isabs(path):
            raise self._bad('dedup_store_dedupd_socket must be an absolute '
                            f'path, or empty, not {path!r}.')

    def _adopt(self, may_create: bool) -> None:
        opened = self._repository = self._limit.call(
            self._open, may_create, late=lambda late: late.close())
        self._limits = limits.Limits(self._option('project_limit_mib'),
                                     self._option('project_limits_mib'))
        path = self._option('dedupd_socket')
        self._daemon = None
        if path and os.path.isabs(path):
            self._daemon = daemon_reads.Daemon(path, opened.repository_id)
        other = _stores.get(opened.repository_id)
        if (other is not None and other.conf is self.conf
                and other.backend_group != self.backend_group):
            raise self._bad(
                f'the repository in {opened.path} is already that of the '
                f'store {other.backend_group}. Every store needs its own.')
        _stores[opened.repository_id] = self
        self._url_prefix = f'{locations.SCHEME}://{opened.repository_id}/'

    def _opened(self) -> Any:
        """The repository; opened now if that failed before.

        :raises glance_store.exceptions.RemoteServiceUnavailable: the
            repository cannot be opened now
        """
        # Before the threads of a time limit and connections are used, too.
        forks.catch_up()
        opened = self._repository
        if opened is not None:
            return opened
        try:
            with self._lock:
                if self._repository is None:
                    self._adopt(may_create=False)
                return self._repository
        except (exceptions.RepositoryError, thread_pool.Expired, OSError,
                ValueError, cfg.Error,
                glance_exceptions.BadStoreConfiguration) as exc:
            raise _unavailable(exc) from exc

    # -- Locations ---------------------------------------------------------

    def _find(self, loc: location.Location) -> tuple[Any, StoreLocation]:
        """The repository and a location's parts, after verifying its mac.

        :raises RepositoryError, Expired: the repository's keys cannot be read
        :raises glance_store.exceptions.NotFound: the location is another
            repository's or a backup's, or this repository did not make it.
            This is not Forbidden: that would show a guesser which images
            exist, and would keep Glance from deleting an image to which a
            user attached a false location.
        """
        opened = self._opened()
        parts = loc.store_location
        if parts.repository_id != opened.repository_id:
            raise glance_exceptions.NotFound(image=parts.image_id)
        if imageids.of_backup(parts.image_id) is not None:
            # Glance has no backups, even if the location is signed.
            raise glance_exceptions.NotFound(image=parts.image_id)
        if not locations.is_signed(
                self._limit.call(opened.read_keys), parts.repository_id,
                parts.image_id, parts.upload_id, parts.mac):
            LOG.warning('Refused a location of image %s with a wrong '
                        'signature', parts.image_id)
            raise glance_exceptions.NotFound(image=parts.image_id)
        return opened, parts

    # -- Operations --------------------------------------------------------

    @driver.back_compat_add
    @capabilities.check
    def add(self, image_id: str, image_file: Any, image_size: int,
            hashing_algo: str, context: Any = None,
            verifier: Any = None) -> tuple[str, int, str, str, dict]:
        """Store an image.

        :param image_id: the image's id
        :param image_file: an object with ``read(length)``, or an iterator
        :param image_size: its size in bytes, 0 if unknown
        :param hashing_algo: any name that hashlib knows
        :param context: the request's context; its project, if any, will own
            the data
        :param verifier: an object whose ``update(bytes)`` sees every byte
        :returns: location, size in bytes, md5 and multihash in hexadecimal
                  digits, metadata of the location
        :raises glance_store.exceptions.Duplicate: the image exists
        :raises glance_store.exceptions.Invalid: the source does not have
            `image_size` bytes, or the id is malformed or that of a backup
        :raises glance_store.exceptions.StorageFull: there is no room, or the
            project's limit is reached
        :raises glance_store.exceptions.StorageWriteDenied: the storage
            refuses or fails
        :raises glance_store.exceptions.TimeoutError: the storage hangs
        :raises glance_store.exceptions.UnknownHashingAlgo: hashlib knows no
            such hash
        """
        image_id = str(image_id)
        multihash = _hash(hashing_algo)
        watchers = [multihash.update]
        if multihash.name == 'md5':
            checksum = multihash
        else:
            checksum = _hash('md5')
            watchers.append(checksum.update)
        if verifier:
            # The verifier is not ours: it may keep its argument, or need
            # bytes.
            watchers.append(lambda piece: verifier.update(bytes(piece)))

        with (tracing.Span('dedup_add', image_id=image_id) as span,
              _upload_errors(image_id)):
            opened = self._opened()
            percent = self._option('required_percent')
            if percent and image_size:
                self._limit.call(opened.require_room,
                                 -(-image_size * percent // 100))
            project = _project(context)
            if imageids.of_backup(image_id) is not None:
                raise exceptions.InvalidParameter(
                    f'{image_id} is the id of a backup, which Glance cannot '
                    'store.')
            transaction = self._limit.call(
                self._begin, opened, image_id, project,
                late=lambda late: late.abort())
            stat = upload.store(opened, image_id, transaction, image_file,
                                image_size or 0, watchers, self._storage,
                                self._limit, multihash)
            span.facts.update(bytes=stat.size, zero_bytes=stat.zero_bytes,
                              new_bytes=stat.new_bytes,
                              stored_bytes=stat.stored_bytes)
            # Now: the key may have been changed during the upload.
            url = self._limit.call(locations.url, opened, image_id,
                                   transaction.upload_id)

        metadata = {}
        if self.backend_group:
            metadata['store'] = self.backend_group
        LOG.debug('Stored image %s: %d bytes', image_id, stat.size)
        return (url, stat.size, checksum.hexdigest(),
                multihash.hexdigest(), metadata)

    def _begin(self, opened: Any, image_id: str, project: str) -> Any:
        """Begin to store an image for a project."""
        transaction = opened.begin(
            image_id, project, self._option('scope'),
            project not in self._option('no_dedup_projects'))
        if not self._limits.of(project):
            return transaction
        return limits.Transaction(self._limits, opened, project, transaction)

    @capabilities.check
    def get(self, location: location.Location, offset: int = 0,
            chunk_size: int | None = None,
            context: Any = None) -> tuple[Download, int]:
        """Read an image, or a range of it.

        This reads and verifies the first piece before it returns, so that
        Glance can still answer damage in it with an error.  Damage further on
        ends the iteration with the same error.  Unverified bytes never come
        out.

        :param location: the image's location
        :param offset: the first byte wanted
        :param chunk_size: how many bytes are wanted, all by default; bytes
                           behind the image's end are left out
        :param context: not used: a valid location is the permission to read
        :returns: an iterable of bytes and the number of bytes it will give
        :raises glance_store.exceptions.NotFound: no such image here
        :raises glance_store.exceptions.RemoteServiceUnavailable: the image
            is damaged, or the storage fails or hangs
        """
        with _read_errors(location.store_location.image_id):
            opened, parts = self._find(location)
        span = tracing.Span('dedup_get', image_id=parts.image_id)
        try:
            with _read_errors(parts.image_id):
                image = self._limit.call(_open, opened, parts,
                                         late=lambda late: late.close())
            download = self._download(image, offset, chunk_size, span)
        except BaseException as exc:
            span.fail(type(exc))
            span.end()
            raise
        return download, download.length

    def _download(self, image: Any, offset: int, chunk_size: int | None,
                  span: tracing.Span) -> Download:
        """A download whose first piece has been read; it ends the span."""
        try:
            offset = max(0, offset or 0)
            length = max(0, image.size - offset)
            if chunk_size is not None:
                length = min(length, max(0, chunk_size))
            download = Download(image, offset, length, self._limit,
                                self._daemon, span)
        except BaseException:
            image.close()
            raise
        try:
            download.prefetch()
        except BaseException as exc:
            span.fail(type(exc))
            download.close()
            raise
        return download

    def get_size(self, location: location.Location,
                 context: Any = None) -> int:
        """The size of an image in bytes.

        :raises glance_store.exceptions.NotFound: no such image here
        :raises glance_store.exceptions.RemoteServiceUnavailable: the image's
            recipe is damaged, or the storage fails or hangs
        """
        with _read_errors(location.store_location.image_id):
            opened, parts = self._find(location)
            return self._stat(opened, parts).size

    def _stat(self, opened: Any, parts: StoreLocation) -> Any:
        stat = self._limit.call(opened.stat, parts.image_id)
        if stat.upload_id != parts.upload_id:
            raise exceptions.ImageNotFound(
                f'Image {parts.image_id} was stored again since.')
        return stat

    def _locations_are_shown(self) -> bool:
        """Return whether a user may have got another project's location.

        The store gets the deleting user from Glance, but not the owner.  So it
        cannot know a thief from an owner for whom an administrator has
        stored the image.  If no user can see locations, there are no thieves.
        """
        try:
            return bool(self.conf.show_multiple_locations
                        or self.conf.show_image_direct_url)
        except cfg.NoSuchOptError:  # not Glance, or another version of it
            return True

    @capabilities.check
    def delete(self, location: location.Location,
               context: Any = None) -> None:
        """Delete an image.

        :param location: the image's location
        :param context: that of the deleting user; None: Glance itself
        :raises glance_store.exceptions.NotFound: no such image here
        :raises glance_store.exceptions.Forbidden: the image was stored by
            another project and Glance shows locations, or the storage refuses
        :raises glance_store.exceptions.TimeoutError: the storage hangs, or
            another process held a lock for too long
        """
        with _delete_errors(location.store_location.image_id):
            opened, parts = self._find(location)
        with (tracing.Span('dedup_delete', image_id=parts.image_id),
              _delete_errors(parts.image_id)):
            if (context is not None and not getattr(context, 'is_admin', False)
                    and self._locations_are_shown()):
                owner = self._stat(opened, parts).project
                if owner and owner != _project(context):
                    LOG.warning('Project %s may not delete image %s of '
                                'project %s', _project(context),
                                parts.image_id, owner)
                    raise glance_exceptions.Forbidden(
                        message=f'Image {parts.image_id} was stored by '
                                'another project.')
            self._limit.call(opened.delete, parts.image_id, parts.upload_id)
