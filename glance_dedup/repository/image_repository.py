# SPDX-License-Identifier: Apache-2.0

"""Repositories: storing, reading and deleting images.

A :class:`Repository` is a directory. Any number of processes and hosts may
have it open at once. They coordinate by kernel locks, links and renames in the
directory itself, and need no daemon.

A :class:`Repository` is safe for use by several threads at once. After a fork
the child's opens itself again at its next use. Transactions and images that
were open before the fork stay the parent's; in the child they raise
:class:`~glance_dedup.base.exceptions.ClosedError`.

Sizes and offsets are in bytes everywhere.
"""

from collections.abc import Callable
from collections.abc import Iterable
import contextlib
import functools
import os
import threading
from typing import Any
import weakref

from glance_dedup import _engine
from glance_dedup.base import access
from glance_dedup.base import closing
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import filesystem
from glance_dedup.base import forks
from glance_dedup.base import hashes
from glance_dedup.base import hexids
from glance_dedup.base import imageids
from glance_dedup.base import inputs
from glance_dedup.base import scopes
from glance_dedup.base import signingkeys
from glance_dedup.base import trialrecord
from glance_dedup.objects import slice_cache
from glance_dedup.repository import cold_settings
from glance_dedup.repository import conversion
from glance_dedup.repository import features
from glance_dedup.repository import hostfilter
from glance_dedup.repository import layout
from glance_dedup.repository import openimages
from glance_dedup.repository import repo_parameters
from glance_dedup.repository import volumes

#: Space that storing leaves free on the file system, MiB.
RESERVE_MIB = 64

# Where similar blocks lie next to each other, one segment has blocks of many
# places of an image. With less than this, readers decode segments repeatedly.
_LISTS_CACHE_MIB = 64

_CODECS = ('none', 'lz4', 'zstd')
_DIRECT_IO = ('off', 'on', 'auto')   # as numbered in params.h

_MAX_THREADS = 64


class Repository(closing.Closing):
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
    :param index: source of hints for look-ups: ``'filter'``; or a store in
        `index_dir`: ``'lmdb'``, or ``'dtb'`` or ``'leveldb'``, which serve one
        process; or ``'inram'``, a table of this process; or ``'none'``: only
        blocks are found for which the caller supplies an address
    :param index_dir: a directory of this host, where the stores lie; unused
        ones are removed from it, whatever the index is
    :param lock_timeout: seconds to wait for another process that is deleting
        the same image
    :param segment_cache_mib: budget, MiB, for decompressed segments that all
        images read through this object share; 0: none are kept; None: 64, of
        those only in which similar blocks lie next to each other
    :param adaptive_compression: store segments uncompressed while processors
        are short
    :param direct_io: whether new blocks are written past the page cache, if
        the file system can: ``'off'``; ``'on'``; or ``'auto'``: where that
        costs less
    :param reserve_mib: room, MiB, that storing leaves free on the file system,
        for deleting and collecting; but never more than a hundredth of the
        file system
    :param ask_slices: requests slices of cold groups from this host's dedupd;
        called with the repository's id, then as :class:`slices.Ask` defines.
        None: this process fetches them itself
    :raises InvalidParameter: for a value out of bounds
    :raises ImageNotFound: if there is no repository
    :raises DamagedError, VersionError, AccessDenied, StorageError:
        as their names say. AccessDenied also for the superuser, if the
        repository is somebody else's
    :raises UnfitFileSystem: the file system's locks would not keep others out
    :raises BusyError: a newer program is setting a feature of the format

    The first store operation opens this host's filter. If that fails (no room
    on the tmpfs), it gives a RuntimeWarning: images are stored without the
    filter, but duplicates are missed. Later store operations try again.

    :ivar filter: this host's filter
    :ivar on_damage: called with the id of an image and the error if opening
        or reading the image finds damage, in the reader's thread; None: nobody
        wants to know
    """

    def __init__(self, path: str | os.PathLike, *, codec: str = 'lz4',
                 codec_level: int = 0, threads: int | None = None,
                 filter_dir: str | None = None, filter_mib: int = 64,
                 lock_timeout: float = 30.0,
                 segment_cache_mib: int | None = None,
                 reserve_mib: int = RESERVE_MIB,
                 adaptive_compression: bool = False, direct_io: str = 'off',
                 index: str = 'filter',
                 index_dir: str | os.PathLike | None = None,
                 ask_slices: Callable[..., bool] | None = None,
                 _allow_weak: bool = False) -> None:
        self.path = os.path.abspath(os.fspath(path))
        if threads is None:
            threads = min(4, len(os.sched_getaffinity(0)))
        repo_parameters.require_range('threads', threads, 0, _MAX_THREADS)
        repo_parameters.require_range('filter_mib', filter_mib, 1, 1 << 20)
        if segment_cache_mib is not None:
            repo_parameters.require_range(
                'segment_cache_mib', segment_cache_mib, 0, 1 << 20)
        repo_parameters.require_range('reserve_mib', reserve_mib, 0, 1 << 20)
        if index not in (*hostfilter.INDEXES, hostfilter.NONE):
            raise exceptions.InvalidParameter(
                f"there is no index '{index}': choose "
                f'{", ".join(hostfilter.INDEXES)}')
        if index in hostfilter.STORES and index_dir is None:
            raise exceptions.InvalidParameter(
                f"the index '{index}' needs a directory: set index_dir")
        if codec not in _CODECS:
            raise exceptions.InvalidParameter(
                f"there is no codec '{codec}': choose none, lz4 or zstd")
        if direct_io not in _DIRECT_IO:
            raise exceptions.InvalidParameter(
                f"direct_io is '{direct_io}': choose off, on or auto")
        if not 0 <= lock_timeout <= 3600:
            raise exceptions.InvalidParameter(
                f'lock_timeout: {lock_timeout!r} is not 0 to 3600 seconds')
        self._mutex = threading.Lock()
        self._closed = False
        self.on_damage: Callable[
            [str, exceptions.DamagedError], None] | None = None
        self._engine: _engine.Repository | None = None
        self._slices: slice_cache.Slices | None = None
        self._ask_slices = ask_slices
        self.parameters = layout.read_parameters(self.path, _allow_weak)
        # An unknown feature may change what follows. The engine reads the
        # features again, with its lock (N15.3).
        features.read(self.path)
        self.read_keys()
        self._open_engine = functools.partial(
            _engine.Repository, os.fsencode(self.path),
            repository_id=bytes.fromhex(self.parameters.repository_id),
            block_size=self.parameters.block_size,
            cut_minimum=self.parameters.cuts[0],
            cut_average=self.parameters.cuts[1],
            group_slots=self.parameters.group_slots,
            segment_size=self.parameters.segment_size,
            fingerprint=self.parameters.fingerprint,
            by_value=self.parameters.verify == 'bytes',
            codec=codec,
            codec_level=codec_level,
            threads=threads,
            lock_timeout_ms=int(lock_timeout * 1000),
            allow_weak=_allow_weak,
            reserve=reserve_mib << 20,
            adaptive_compression=adaptive_compression,
            direct_io=_DIRECT_IO.index(direct_io))
        self._segment_cache_mib = segment_cache_mib
        self.filter = hostfilter.HostFilter(
            self.path, self.parameters.repository_id,
            self.parameters.group_slots, filter_dir, filter_mib << 20, index,
            None if index_dir is None else os.fspath(index_dir),
            self.parameters.cuts[1] or self.parameters.block_size)
        _live.add(self)
        filesystem.require_locks(self.path)
        trialrecord.require_fit(self.path)
        if self.handle().is_shared():
            filesystem.require_direct_reads(self.path)

    create = staticmethod(layout.create)

    # -- opening and closing ----------------------------------------------

    def handle(self) -> _engine.Repository:
        """The engine's handle of this process, opened at first use.

        The maintainer and others use it for what this class does not offer
        (``_engine.pyi``). Callers must not close it, nor keep it past a fork.

        :raises ClosedError: the repository is closed
        :raises BusyError: a newer program is setting a feature of the format
        """
        forks.catch_up()
        handle = self._engine
        if handle is not None:
            return handle
        with self._mutex:
            if self._closed:
                raise exceptions.ClosedError('the repository handle is closed')
            if self._engine is None:
                engine = self._open_handle()
                mib = self._segment_cache_mib
                engine.set_segment_cache(
                    (_LISTS_CACHE_MIB if mib is None else mib) << 20,
                    mib is None)
                self._engine = engine
            return self._engine

    def _open_handle(self) -> _engine.Repository:
        if self._slices is None:
            # A handle from before the first group was cold has none in memory.
            memory = (self.filter.place_for_slices() if self.has_cold
                      else None)
            self._slices = cold_settings.open_slices(
                self.path, self._ask_slices and functools.partial(
                    self._ask_slices, self.repository_id), memory)
        return self._open_engine(
            slice_dir=os.fsencode(self._slices.directory),
            slice_memory=os.fsencode(self._slices.memory or ''),
            slice_source=self._slices)

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
        # The engine keeps it as long as an image is open.
        self._slices = None

    def _after_fork(self) -> None:
        """Forget the parent's handle; its descriptors are closed already."""
        self._mutex = threading.Lock()
        self._engine = None
        self._slices = None
        self.filter.after_fork()

    @property
    def repository_id(self) -> str:
        """32 hexadecimal digits, drawn when the repository was created."""
        return self.parameters.repository_id

    def read_keys(self) -> signingkeys.Keys:
        """Read the keys; each use needs them as they are then.

        :raises DamagedError, AccessDenied, StorageError: as their names say
        """
        return signingkeys.read(os.path.join(self.path, signingkeys.FILE))

    @property
    def group_access(self) -> bool:
        """Return whether all members of a group may use the repository."""
        with files.os_errors(f'cannot look at {self.path}'):
            return access.is_shared(os.stat(self.path))

    @property
    def features(self) -> list[str]:
        """The features of the format that the repository uses.

        :raises VersionError, DamagedError, StorageError: as their names say
        """
        return features.read(self.path)

    @property
    def has_volumes(self) -> bool:
        """Return whether the repository has, or had, volumes."""
        return features.is_set(self.path, features.VOLUMES)

    @property
    def has_cold(self) -> bool:
        """Return whether groups may be cold."""
        return features.is_set(self.path, features.COLD)

    @property
    def trial(self) -> trialrecord.Result | None:
        """Return the results of a trial of hosts on this host's mount.

        None where only this host can change files: there is nothing to try.
        """
        if not self.handle().is_shared():
            return None
        with files.os_errors(f'cannot look at {self.path}'):
            return trialrecord.look(self.path)

    @property
    def is_maintained(self) -> bool:
        """Return whether a process, perhaps on another host, maintains it.

        While there is none, no block is freed.
        """
        path = os.path.join(self.path, layout.MAINTAINER_LOCK)
        try:
            with files.os_errors(f'cannot look at {path}'):
                return filesystem.is_locked(path)
        except exceptions.ImageNotFound:
            return False    # it never had a maintainer

    @property
    def slices(self) -> slice_cache.Slices:
        """The fetcher of cold groups' slices.

        :raises ClosedError: the repository is closed
        """
        self.handle()
        assert self._slices is not None
        return self._slices

    def room(self) -> tuple[int, int]:
        """Return the bytes free on the file system, and those left free.

        While the first number is below the second, storing is refused.
        """
        return self.handle().room()

    def require_room(self, size: int) -> None:
        """Check whether `size` bytes can be stored now.

        :raises NoSpaceError: less than the reserve would stay free
        """
        self.handle().check_room(size)

    # -- storing ----------------------------------------------------------

    def begin(self, image_id: str, project: str = '',
              scope: str | bytes = 'global',
              dedup: bool = True) -> openimages.Transaction:
        """Start to store an image.

        :param scope: the images with which it shares blocks: ``'global'``: all
            global ones; ``'project'``: those that this project stored with
            ``'project'``; or a scope's id of 16 bytes, taken from an image
        :param dedup: False: do not look up the blocks (volumes.rst, "Hints")
        :raises ImageExists: at once, if the image is committed already
        :raises NoSpaceError: at once, if only the reserve is free
        :raises InvalidParameter: for an id other than 1 to 128 characters of
            ``A-Z a-z 0-9 _ -``, and for that of a volume's recipe
        """
        require_text('project', project)
        self.require_image(image_id)
        scope_id = scopes.choose(scope, project)
        handle = self.handle()
        self.filter.complete(handle)
        return openimages.Transaction(
            image_id, handle.begin(image_id, project, scope_id), self, dedup)

    def begin_conversion(self, image_id: str) -> conversion.Conversion:
        """Start to give a stored image a recipe of plain bytes and a table.

        :raises ImageNotFound, DamagedError, NoSpaceError: as their names say
        :raises InvalidParameter: it is no image, but a volume's recipe
        """
        self.require_image(image_id)
        handle = self.handle()
        self.filter.complete(handle)
        return conversion.Conversion(
            image_id, handle.begin_conversion(image_id), self)

    def put(self, image_id: str, source: str | os.PathLike | inputs.Readable,
            size: int | None = None, project: str = '',
            progress: Callable[[int], None] | None = None,
            scope: str = 'global',
            dedup: bool = True,
            check: Callable[[], None] = lambda: None) -> openimages.ImageStat:
        """Store an image from a file's path or an object with ``read()``.

        :param size: how many bytes the source must have; None: any number
        :param progress: called with the bytes read so far
        :param scope: as for :meth:`begin`
        :param dedup: as for :meth:`begin`
        :param check: called when all bytes were read; raises if the image must
            not be stored
        :raises InvalidParameter: if the source has fewer or more bytes than
            `size`
        :raises OSError: the source cannot be read, or a file has changed
            meanwhile

        After any error no part of the image remains.
        """
        with contextlib.ExitStack() as stack:
            if isinstance(source, (str, os.PathLike)):
                with files.os_errors(f'cannot read {os.fspath(source)}'):
                    opened = inputs.open_input(os.fspath(source))
                stack.enter_context(opened)
                if isinstance(opened, inputs.InputFile):
                    check = opened.require_unchanged
                source = opened
            transaction = stack.enter_context(
                self.begin(image_id, project, scope, dedup))
            done = 0
            while piece := source.read(openimages.PIECE):
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
            check()
            return transaction.commit()

    def copy(self, source: openimages.Image, image_id: str,
             project: str = '', scope: str | bytes = 'global',
             progress: Callable[[int], None] | None = None
             ) -> openimages.ImageStat:
        """Store an image with the bytes of a stored one.

        In the source's scope the blocks are shared, and no bytes move. In
        another scope the blocks are read and stored, and keep their marks
        (I14).

        :param source: one that this object opened
        :param project: as for :meth:`begin`
        :param scope: as for :meth:`begin`
        :param progress: called with the bytes copied so far
        :raises ImageExists: there is an image of this id
        :raises DamagedError: the source cannot be read

        After any error no part of the new image remains.
        """
        progress = progress or (lambda done: None)
        stat = source.stat
        ends: Iterable[int] = [source.plain_size]
        if scopes.choose(scope, project).hex() != stat.scope:
            # Storing takes long enough to report progress. To list the
            # extents for that takes 2 % of the time, but of a copy in the
            # same scope 90 %.
            ends = (extents[-1].offset + extents[-1].length
                    for _, extents in source.pages())
        with self.begin(image_id, project, scope) as transaction:
            start = 0
            for end in ends:
                transaction.add_runs(source, start, end)
                progress(end)
                start = end
            transaction.copy_table(source)
            if stat.hash_name:
                transaction.set_hash(stat.hash_name,
                                     bytes.fromhex(stat.hash_value))
            return transaction.commit()

    def delete(self, image_id: str, upload_id: str | None = None) -> None:
        """Delete an image. Readers that have it open can go on reading.

        A later collection frees its space.

        :param upload_id: delete the image only if it is of this upload
        :raises ImageNotFound, BusyError: as their names say
        :raises InvalidParameter: if it is a recipe of a volume that is there
        """
        require_text('image id', image_id)
        self._require_no_volume(image_id)
        with layout.image_errors(self.path):
            self.handle().delete(image_id, _upload_bytes(upload_id))
        hashes.forget(self.path, image_id)

    # -- reading ----------------------------------------------------------

    def open_image(self, image_id: str,
                   upload_id: str | None = None) -> openimages.Image:
        """Open an image for reading; it can be read until closed.

        :param upload_id: open the image only if it is of this upload
        :raises ImageNotFound: if there is no such image
        :raises DamagedError: if its recipe is damaged
        :raises InvalidParameter: if it is no image, but a volume's recipe
        """
        self.require_image(image_id)
        try:
            return self._open(image_id, upload_id)
        except exceptions.DamagedError as e:
            if self.on_damage is not None:
                self.on_damage(image_id, e)
            raise

    def _open(self, image_id: str, upload_id: str | None = None
              ) -> openimages.Image:
        require_text('image id', image_id)
        with layout.image_errors(self.path):
            return openimages.Image(self.handle().open_image(
                image_id, _upload_bytes(upload_id)), self)

    def block_reader(self) -> openimages.BlockReader:
        """An object that reads blocks of images that are being stored."""
        return openimages.BlockReader(self.handle().block_reader(), self)

    def stat(self, image_id: str) -> openimages.ImageStat:
        """The facts in the recipe of an image, or of a volume.

        :raises ImageNotFound: if there is no such recipe
        :raises DamagedError: if it is damaged
        """
        with self._open(image_id) as image:
            return image.stat

    def require_image(self, image_id: str) -> None:
        """Refuse an id that belongs to a volume's recipe.

        :raises InvalidParameter: it does; the message names the volume
        """
        require_text('image id', image_id)
        what = volumes.words(self, image_id)
        if what is not None:
            raise exceptions.InvalidParameter(
                f'{image_id} is no image: the id is that of {what}')

    def _require_no_volume(self, image_id: str) -> None:
        """Refuse to delete a recipe that a volume may need.

        A recipe of a volume comes after the volume's directory, and goes
        before it. So the recipe is not needed if no volume has its id now.
        """
        recipe = imageids.of_volume(image_id)
        if recipe is not None and volumes.name_of(
                self, recipe.volume_id) is not None:
            self.require_image(image_id)

    def images(self) -> list[str]:
        """The ids of all committed images, sorted; see :meth:`recipes`.

        Backups are among them: see :meth:`backups`.
        """
        return list(filter(imageids.is_image, self.recipes()))

    def backups(self) -> list[imageids.Backup]:
        """All backups, sorted by name, then by time."""
        return sorted(filter(None, map(imageids.of_backup, self.recipes())))

    def recipes(self) -> list[str]:
        """The ids of all images and of all recipes of volumes, sorted.

        Names that are no image ids are left out: a network file system gives
        such a name to a file that is removed while it is open.
        """
        self.handle()
        path = os.path.join(self.path, 'images')
        with files.os_errors(f'cannot list {path}'):
            # One whose recipe is being replaced may have its second name alone
            # (N14.2).
            names = {name.removesuffix('~') for name in os.listdir(path)}
        return sorted(filter(imageids.is_valid, names))

    # -- statistics and the filter ----------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Counts of this process since it opened the repository.

        * Blocks: ``blocks`` (non-zero), ``zero_blocks``, ``hits``, ``misses``;
          ``skipped``: blocks that were not looked up, because of a hint;
          ``unmarked``: blocks that were to stay copies, and are ordinary ones,
          since an older program had the repository open.
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
        * Slices of cold groups: ``slice_reads`` of bytes in one, and the
          ``slice_misses`` among them, for which one had to be fetched;
          ``slice_gets``, requests to the object store, and the
          ``slice_received`` bytes that these brought; ``slice_asked``, slices
          that dedupd was asked for; ``slice_evicted``;
          ``slice_unavailable``, slices that the object store did not give;
          ``slice_cached``: bytes of the cache, or None as long as this process
          has fetched none.
        * The host's filter: ``filter_bytes``, ``filter_places``,
          ``filter_hints``, ``filter_dropped``, ``filter_level``,
          ``filter_rebuilt`` (the last group) and ``filter_complete``; zeros if
          the host has no filter yet. If a store is the index, these are its
          memory, its capacity, and its progress; hints and level are 0.
          ``filter_refresh_age_seconds``: seconds since a process of the host
          last read all that others had stored, or None; ``filter_behind``:
          groups that it had to leave.
        """
        handle = self.handle()
        self.filter.attach(handle, create=False)
        figures = self.slices.figures
        return handle.statistics() | {
            f'slice_{name}': value for name, value in vars(figures).items()}

    def rebuild_filter(
            self, progress: Callable[[int, int], None] | None = None) -> None:
        """Empty this host's filter and rebuild it from the groups.

        Other processes may go on storing meanwhile.

        :param progress: called with the groups done and their total
        """
        self.filter.rebuild(self.handle(), progress)

    def follow(self) -> bool:
        """Read other hosts' new fingerprints into this host's filter.

        This takes some tenths of a second at most. If the host has no filter,
        this does nothing.

        :returns: whether there is more to read
        """
        return self.filter.follow(self.handle())


def require_text(name: str, value: str) -> None:
    """Refuse a value that the engine cannot take as a string.

    :param name: name of the value, for the error's message
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
    if not hexids.is_valid(upload_id):
        raise exceptions.InvalidParameter(
            'an upload id has 32 hexadecimal digits')
    return bytes.fromhex(upload_id)


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


forks.register(_engine.after_fork)
forks.register(_close_inherited)
