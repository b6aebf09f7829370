# SPDX-License-Identifier: Apache-2.0

"""The store: a glance_store driver over a repository.

Locations
=========

::

    dedup://<repository id>/<image id>/<upload id>/<mac>

The repository id and the upload id have 32 hexadecimal digits, the mac 64.
The upload id names the one store operation that wrote the image.  The mac is
the HMAC-SHA-256, with the repository's key, of all that stands before it.

Glance lets project members set locations themselves, if it is so configured.
So a location is a capability: whoever presents a valid one may read the image.
It cannot be guessed from an image's id, nor made without the key, and one with
a wrong mac is treated exactly like that of an image that does not exist.  A
location seen by somebody else's eyes must still not let them destroy the
image behind it: the project that stored an image is recorded with it, and only
that project, or an administrator, may delete it.  Where Glance shows locations
to nobody, whoever Glance lets delete may delete: what an administrator has
uploaded or copied for a project is the project's.

Processes and threads
=====================

One instance serves all threads of a process, and keeps no state of a call.
Nothing is opened at import.  The repository is opened when the store is
configured, or, if that failed, by the next read.  It follows a fork by
itself.  No other program needs to run for the store to work: if the daemon
answers, images are read through its cache, and directly if not.
"""

from collections.abc import Iterator
import contextlib
import hashlib
import hmac
import logging
import os
import re
import threading
from typing import Any
import weakref

from glance_store import capabilities
from glance_store import driver
from glance_store import exceptions
from glance_store import location
from oslo_config import cfg

from glance_dedup.base import exceptions as dedup_exceptions
from glance_dedup.base import imageids
from glance_dedup.base import locations
from glance_dedup.base import workers
from glance_dedup.driver import daemon as daemon_module
from glance_dedup.driver import opts
from glance_dedup.driver import upload
from glance_dedup.repository import parameters
from glance_dedup.repository import repository

LOG = logging.getLogger(__name__)

#: The most calls into one store's repository that may hang at once, and the
#: most uploads that write into it at the same instant, per process.
STORAGE_THREADS = 32

_LOCATION = re.compile(r'dedup://(?P<repository_id>[0-9a-f]{32})'
                       rf'/(?P<image_id>{imageids.PATTERN})'
                       r'/(?P<upload_id>[0-9a-f]{32})'
                       r'/(?P<mac>[0-9a-f]{64})')

# The stores of this process by repository id: two must not share one.
_stores: 'weakref.WeakValueDictionary[str, Store]' = (
    weakref.WeakValueDictionary())


class StoreLocation(location.StoreLocation):
    """The parts of a location.  Says nothing about their being true."""

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
        parts = _LOCATION.fullmatch(uri) if isinstance(uri, str) else None
        if not parts:
            # The text itself stays out of the message: it may be anything,
            # or all but a valid location.
            raise exceptions.BadStoreUri(
                message='A location of this store has the form dedup://'
                        '<repository id>/<image id>/<upload id>/<mac>.')
        self.specs = parts.groupdict()
        self.process_specs()


class Download:
    """The bytes of an image, or of a range of it, for one reader.

    Iterating closes it at the end, as does :meth:`close`, as does the garbage
    collector: a client that goes away leaves nothing open.

    The bytes come from the daemon as long as it gives them.  The open image
    keeps its blocks in any case, so that reading can go on directly.

    :param image: an open image; it is closed with the download
    :param offset: the first byte
    :param length: how many bytes; within the image
    :param limit: how long the storage may take for each piece
    :param daemon: to be asked first, if any
    """

    PIECE = 4 << 20

    def __init__(self, image: Any, offset: int, length: int,
                 limit: workers.TimeLimit,
                 daemon: daemon_module.Daemon | None = None):
        self._image = image
        self._image_id = image.stat.image_id
        self._offset = offset
        self._left = length
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
        finally:
            self.close()

    def _read(self) -> bytes:
        if self._image is None or not self._left:
            return b''
        length = min(self.PIECE, self._left)
        piece = self._read_from_daemon(length)
        if piece is None:
            piece = self._read_directly(length)
        self._offset += length
        self._left -= length
        return piece

    def _read_from_daemon(self, length: int) -> bytes | None:
        """The next piece, whole; None if the daemon does not give it."""
        if self._daemon is None or self._stream is None:
            return None
        piece = self._daemon.read(self._stream, length, self._limit.seconds)
        if piece is None:
            self._stream = None
        return piece

    def _read_directly(self, length: int) -> bytes:
        image = self._image
        with _read_errors(self._image_id):
            try:
                piece = self._limit.call(image.read, length, self._offset,
                                         late=lambda _piece: image.close())
            except workers.Expired:
                # The thread that hangs in the image closes it, if ever.
                self._image = None
                raise
            if len(piece) != length:
                raise dedup_exceptions.StorageError(
                    f'Image {self._image_id} has only {len(piece)} of '
                    f'{length} bytes at {self._offset}.')
        return piece

    def close(self) -> None:
        image, self._image = self._image, None
        stream, self._stream = self._stream, None
        self._first = None
        if stream is not None:
            stream.close()
        if image is not None:
            image.close()

    def __del__(self) -> None:
        if getattr(self, '_image', None) is not None:
            self.close()


def _unavailable(exc: Exception) -> Exception:
    return exceptions.RemoteServiceUnavailable(
        message=f'The image store failed: {exc}')


@contextlib.contextmanager
def _read_errors(image_id: str) -> Iterator[None]:
    """Make errors of reading into those that Glance has answers to.

    All but a missing image become RemoteServiceUnavailable: Glance then tries
    the image's next location, and tells the client 503 if there is none.
    """
    try:
        yield
    except dedup_exceptions.ImageNotFound as exc:
        raise exceptions.NotFound(image=image_id) from exc
    except dedup_exceptions.InvalidParameter as exc:
        raise exceptions.NotFound(image=image_id) from exc
    except (dedup_exceptions.RepositoryError, workers.Expired) as exc:
        LOG.error('Image %s cannot be read: %s', image_id, exc)
        raise _unavailable(exc) from exc


@contextlib.contextmanager
def _upload_errors(image_id: str) -> Iterator[None]:
    try:
        yield
    except (upload.WrongSize, dedup_exceptions.InvalidParameter) as exc:
        raise exceptions.Invalid(message=str(exc)) from exc
    except dedup_exceptions.ImageExists as exc:
        raise exceptions.Duplicate(image=image_id) from exc
    except dedup_exceptions.NoSpaceError as exc:
        LOG.error('Image %s cannot be stored: %s', image_id, exc)
        raise exceptions.StorageFull(message=str(exc)) from exc
    except (dedup_exceptions.BusyError, workers.Expired) as exc:
        raise exceptions.TimeoutError(message=str(exc)) from exc
    except dedup_exceptions.RepositoryError as exc:
        # Denied, read-only, failing or damaged: 503 in any case.
        LOG.error('Image %s cannot be stored: %s', image_id, exc)
        raise exceptions.StorageWriteDenied(message=str(exc)) from exc


@contextlib.contextmanager
def _delete_errors(image_id: str) -> Iterator[None]:
    try:
        yield
    except (dedup_exceptions.ImageNotFound,
            dedup_exceptions.InvalidParameter) as exc:
        raise exceptions.NotFound(image=image_id) from exc
    except dedup_exceptions.AccessDenied as exc:
        raise exceptions.Forbidden(message=str(exc)) from exc
    except (dedup_exceptions.BusyError, workers.Expired) as exc:
        raise exceptions.TimeoutError(message=str(exc)) from exc
    except dedup_exceptions.RepositoryError as exc:
        LOG.error('Image %s cannot be deleted: %s', image_id, exc)
        raise exceptions.BackendException(str(exc)) from exc


def _project(context: Any) -> str:
    """The project that acts, '' if there is none."""
    return str(getattr(context, 'project_id', None) or '')


def _hash(name: str) -> Any:
    """A hash object, by any name that hashlib knows.

    :raises glance_store.exceptions.UnknownHashingAlgo: it knows no such name,
        or the digest has no length of its own, as shake_128's has not
    """
    try:
        digest = hashlib.new(str(name), usedforsecurity=False)
    except ValueError:
        raise exceptions.UnknownHashingAlgo(algo=name)
    if not digest.digest_size:
        raise exceptions.UnknownHashingAlgo(algo=name)
    return digest


class Store(driver.Store):
    """Keeps every distinct block of its images once."""

    _CAPABILITIES = (capabilities.BitMasks.READ_RANDOM |
                     capabilities.BitMasks.WRITE_ACCESS |
                     capabilities.BitMasks.DRIVER_REUSABLE)
    OPTIONS = opts.dedup_opts

    def __init__(self, conf: cfg.ConfigOpts, backend: str | None = None):
        super().__init__(conf, backend)
        if self.backend_group:
            self.store_conf = driver.BackendGroupConfiguration(
                self.OPTIONS, self.backend_group, conf=self.conf)
        else:
            self.store_conf = self.conf.glance_store
        self._lock = threading.Lock()
        self._repository: Any = None
        self._daemon: daemon_module.Daemon | None = None
        self._storage = workers.Workers('dedup-storage', STORAGE_THREADS)
        self._limit = workers.TimeLimit(0, self._storage)

    def get_schemes(self) -> tuple[str, ...]:
        return (locations.SCHEME,)

    # -- Configuration -----------------------------------------------------

    def _bad(self, reason: Any) -> exceptions.BadStoreConfiguration:
        return exceptions.BadStoreConfiguration(
            store_name=self.backend_group or locations.SCHEME, reason=reason)

    def _option(self, name: str) -> Any:
        return getattr(self.store_conf, f'dedup_store_{name}')

    def configure_add(self) -> None:
        """Open the repository; create it if there is none.

        :raises glance_store.exceptions.BadStoreConfiguration: the store
            cannot take images.  It serves those it has, if it can.
        """
        try:
            with self._lock:
                self._repository = None
                self._limit = workers.TimeLimit(self._option('timeout'),
                                                self._storage)
                self._adopt(self._limit.call(self._open, True,
                                             late=lambda late: late.close()))
                self._check_parameters(self._repository)
        except exceptions.BadStoreConfiguration as exc:
            LOG.error('%s', exc)
            raise
        except (dedup_exceptions.RepositoryError, workers.Expired, OSError,
                ValueError, cfg.Error) as exc:
            # A ValueError is an option's value that does not parse.
            LOG.error('The dedup store %s: %s', self.backend_group, exc)
            raise self._bad(exc) from exc

    def _open(self, may_create: bool) -> Any:
        path = self._option('datadir')
        if not path or not os.path.isabs(path):
            raise self._bad('dedup_store_datadir must be an absolute path, '
                            f'not {path!r}.')
        settings = {
            'codec': self._option('codec'),
            'codec_level': self._option('codec_level'),
            'codec_yields': self._option('codec_yields'),
            'direct_io': self._option('direct_io'),
            'threads': self._option('threads'),
            'filter_dir': self._option('filter_dir') or None,
            'filter_mib': self._option('filter_mib'),
            'reserve_mib': self._option('reserve_mib')}
        try:
            return repository.Repository(path, **settings)
        except dedup_exceptions.ImageNotFound:
            if not may_create:
                raise
        chosen = {name: self._option(name) for name in opts.CREATION_OPTIONS
                  if self._option(name) is not None}
        with contextlib.suppress(dedup_exceptions.ImageExists):
            # If it exists after all, another process was faster.
            repository.Repository.create(
                path, group_access=bool(self._option('group_access')),
                **chosen)
            LOG.info('Created a repository in %s', path)
        return repository.Repository(path, **settings)

    def _check_parameters(self, opened: Any) -> None:
        for name in opts.CREATION_OPTIONS:
            chosen = self._option(name)
            if name == 'cutting':
                chosen = parameters.full_cutting(chosen)
            found = getattr(opened.parameters, name)
            if chosen is not None and chosen != found:
                raise self._bad(
                    f'dedup_store_{name} is {chosen}, but the repository in '
                    f'{opened.path} was created with {found}. Unset the '
                    'option, or use another directory.')
        shared = self._option('group_access')
        if shared is not None and shared != opened.group_access:
            raise self._bad(
                f'dedup_store_group_access is {shared}, but the directory '
                f'{opened.path} says {opened.group_access}. Unset the option, '
                'or use another directory.')
        path = self._option('dedupd_socket')
        if path and not os.path.isabs(path):
            raise self._bad('dedup_store_dedupd_socket must be an absolute '
                            f'path, or empty, not {path!r}.')

    def _adopt(self, opened: Any) -> None:
        self._repository = opened
        path = self._option('dedupd_socket')
        self._daemon = None
        if path and os.path.isabs(path):
            self._daemon = daemon_module.Daemon(path, opened.repository_id)
        other = _stores.get(opened.repository_id)
        if (other is not None and other.conf is self.conf
                and other.backend_group != self.backend_group):
            raise self._bad(
                f'the repository in {opened.path} is already that of the '
                f'store {other.backend_group}. Every store needs its own.')
        _stores[opened.repository_id] = self
        self._url_prefix = f'{locations.SCHEME}://{opened.repository_id}/'

    def _opened(self) -> Any:
        """The repository.

        :raises glance_store.exceptions.RemoteServiceUnavailable: it cannot
            be opened now
        """
        opened = self._repository
        if opened is not None:
            return opened
        try:
            with self._lock:
                if self._repository is None:
                    self._adopt(self._limit.call(
                        self._open, False, late=lambda late: late.close()))
                return self._repository
        except (dedup_exceptions.RepositoryError, workers.Expired, OSError,
                ValueError, cfg.Error,
                exceptions.BadStoreConfiguration) as exc:
            raise _unavailable(exc) from exc

    # -- Locations ---------------------------------------------------------

    def _find(self, loc: location.Location) -> tuple[Any, StoreLocation]:
        """The repository and the parts of a location that are true.

        :raises glance_store.exceptions.NotFound: the location is another
            repository's, or was not made by this one.  Not Forbidden: that
            would tell a guess from a miss, and would keep an image to which
            somebody attached a false location from being deleted.
        """
        opened = self._opened()
        parts = loc.store_location
        if parts.repository_id != opened.repository_id:
            raise exceptions.NotFound(image=parts.image_id)
        mac = locations.sign(opened.key, parts.repository_id,
                             parts.image_id, parts.upload_id)
        if not hmac.compare_digest(mac, parts.mac):
            LOG.warning('Refused a location of image %s with a wrong '
                        'signature', parts.image_id)
            raise exceptions.NotFound(image=parts.image_id)
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
        :param context: whose project will own the data, if given
        :param verifier: an object whose ``update(bytes)`` sees every byte
        :returns: location, size in bytes, md5 and multihash in hexadecimal
                  digits, metadata of the location
        :raises glance_store.exceptions.Duplicate: the image exists
        :raises glance_store.exceptions.Invalid: the size is not what was
            said, or the id is none
        :raises glance_store.exceptions.StorageFull: no room
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
            # It is whose it is: it may keep what it is given, or want bytes.
            watchers.append(lambda piece: verifier.update(bytes(piece)))

        with _upload_errors(image_id):
            opened = self._opened()
            percent = self._option('required_percent')
            if percent and image_size:
                self._limit.call(opened.need_room,
                                 -(-image_size * percent // 100))
            transaction = self._limit.call(
                opened.begin, image_id, _project(context),
                self._option('scope'),
                late=lambda late: late.abort())
            size = upload.store(opened, image_id, transaction, image_file,
                                image_size or 0, watchers, self._storage,
                                self._limit, multihash)

        url = locations.url(opened, image_id, transaction.upload_id)
        metadata = {}
        if self.backend_group:
            metadata['store'] = self.backend_group
        LOG.debug('Stored image %s: %d bytes', image_id, size)
        return (url, size, checksum.hexdigest(),
                multihash.hexdigest(), metadata)

    @capabilities.check
    def get(self, location: location.Location, offset: int = 0,
            chunk_size: int | None = None,
            context: Any = None) -> tuple[Download, int]:
        """Read an image, or a range of it.

        The first piece is read and verified before this returns, so that
        damage in it can still be answered with an error.  Damage further on
        ends the iteration with the same error; unverified bytes never come
        out.

        :param location: where it is
        :param offset: the first byte wanted
        :param chunk_size: how many bytes are wanted, all by default; what
                           lies behind the end is left out
        :param context: not used: a true location is the permission to read
        :returns: an iterable of bytes and the number of bytes it will give
        :raises glance_store.exceptions.NotFound: no such image here
        :raises glance_store.exceptions.RemoteServiceUnavailable: the image
            is damaged, or the storage fails or hangs
        """
        opened, parts = self._find(location)
        with _read_errors(parts.image_id):
            image = self._limit.call(opened.open_image, parts.image_id,
                                     parts.upload_id,
                                     late=lambda late: late.close())
        try:
            offset = max(0, offset or 0)
            length = max(0, image.size - offset)
            if chunk_size is not None:
                length = min(length, max(0, chunk_size))
            download = Download(image, offset, length, self._limit,
                                self._daemon)
        except BaseException:
            image.close()
            raise
        try:
            download.prefetch()
        except BaseException:
            download.close()
            raise
        return download, length

    def get_size(self, location: location.Location,
                 context: Any = None) -> int:
        """The size of an image in bytes.

        :raises glance_store.exceptions.NotFound: no such image here
        :raises glance_store.exceptions.RemoteServiceUnavailable: the image's
            recipe is damaged, or the storage fails or hangs
        """
        opened, parts = self._find(location)
        with _read_errors(parts.image_id):
            return self._stat(opened, parts).size

    def _stat(self, opened: Any, parts: StoreLocation) -> Any:
        stat = self._limit.call(opened.stat, parts.image_id)
        if stat.upload_id != parts.upload_id:
            raise dedup_exceptions.ImageNotFound(
                f'Image {parts.image_id} was stored anew since.')
        return stat

    def _locations_are_shown(self) -> bool:
        """Whether somebody may have come by another's location.

        The store is not told for which image Glance deletes, only who acts;
        that is not enough to tell an owner, whose image an administrator has
        stored, from a thief.  Without a location there is no thief.
        """
        try:
            return bool(self.conf.show_multiple_locations
                        or self.conf.show_image_direct_url)
        except cfg.NoSuchOptError:  # not Glance, or another one
            return True

    @capabilities.check
    def delete(self, location: location.Location,
               context: Any = None) -> None:
        """Delete an image.

        :param location: where it is
        :param context: who wants it deleted; None: Glance itself
        :raises glance_store.exceptions.NotFound: no such image here
        :raises glance_store.exceptions.Forbidden: the image was stored by
            another project and Glance shows locations, or the storage refuses
        :raises glance_store.exceptions.TimeoutError: the storage hangs, or
            a lock was not had in time
        """
        opened, parts = self._find(location)
        with _delete_errors(parts.image_id):
            if (context is not None and not getattr(context, 'is_admin', False)
                    and self._locations_are_shown()):
                owner = self._stat(opened, parts).project
                if owner and owner != _project(context):
                    LOG.warning('Project %s may not delete image %s of '
                                'project %s', _project(context),
                                parts.image_id, owner)
                    raise exceptions.Forbidden(
                        message=f'Image {parts.image_id} was stored by '
                                'another project.')
            self._limit.call(opened.delete, parts.image_id, parts.upload_id)
