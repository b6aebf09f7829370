# SPDX-License-Identifier: Apache-2.0

"""This host's fingerprint filter of one repository: opening and filling it.

The processes of a host share the filter, a file on a tmpfs. It only holds
hints for look-ups. So an image is stored without it if it cannot be opened,
and while it is filled; duplicates are missed then.

The first store operation makes a missing filter, and reads the fingerprints of
the stored blocks into it. If that takes more than some 20 ms, a thread does
it. The filter also follows other hosts: a process reads their new fingerprints
into it. The daemon does that every few seconds; on a host without a daemon,
store operations do.

A key-value store on a disk of the host can serve instead of the filter. It is
made and filled in the same way.
"""

from collections.abc import Callable
import contextlib
import os
import pwd
import re
import shutil
import stat as stat_module
import threading
import time
import warnings

from glance_dedup import _engine
from glance_dedup.base import access
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.repository import filters

# The default place of filters, and after how many seconds a filter that could
# not be opened is tried again.
_SHM = '/dev/shm'  # nosec: a tmpfs; our directory has to be this user's
_AGAIN = 30.0
# A store operation makes a filter of at most so many bytes, and reads so many
# slots of at most 64 groups into it. A thread does the rest, so many slots at
# a time.
_MADE_AT_ONCE = 64 << 20
_READ_AT_ONCE = 1 << 16
_READ_IN_TURN = 1 << 19
# A store operation reads other hosts' new fingerprints if no process of the
# host has done so for so many milliseconds.
_FOLLOW_MS = 10_000
# Rebuilding waits so many seconds for another process that fills the filter
# and makes no progress.
_REBUILD_WAIT = 60.0
# The most that the engine's stores can hold (GD_KV_MAX_CAPACITY), and the
# bytes that a key takes in memory (engine/kv/inram.c).
_MAX_KEYS = 1 << 36
_INRAM_KEY = 20
# The binary logarithm of the keys in dtb's smallest table, which takes 72 MiB,
# and has room for 16 GiB of blocks of 4 KiB.
_MIN_BITS = 22

_is_group = re.compile('[0-9a-f]{8}').fullmatch


def _directory_for(path: str | None) -> str:
    """Return the directory for filter files, and make it at need.

    :param path: the one that was chosen; None or empty: this user's alone

    Every user may make a directory of any name in ``/dev/shm``. So the first
    choice is a directory with this user's name, which systemd makes at each
    boot, before any user can (``etc/tmpfiles.d``).
    """
    if path:
        os.makedirs(path, mode=0o700, exist_ok=True)
        return path
    uid = os.geteuid()
    with contextlib.suppress(KeyError, OSError):
        path = os.path.join(_SHM, f'glance-dedup-{pwd.getpwuid(uid).pw_name}')
        if _is_ours_alone(os.lstat(path)):
            return path
    path = os.path.join(_SHM, f'glance-dedup-{uid}')
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not _is_ours_alone(found):
        raise PermissionError(
            1, f'{path}, which belongs to {access.user_name(found.st_uid)}, '
            f'is not a directory that only {access.user_name(uid)} may '
            'change. Remove it and run systemd-tmpfiles --create, with the '
            "package's glance-dedup.conf in a directory tmpfiles.d")
    return path


def _is_ours_alone(found: os.stat_result) -> bool:
    return (stat_module.S_ISDIR(found.st_mode)
            and found.st_uid == os.geteuid() and not found.st_mode & 0o022)


#: Metadata backends of the engine that keep hints on a disk.
STORES = ('lmdb', 'dtb', 'leveldb')
#: Sources of hints: the filter, a store, or a table in memory.
INDEXES = ('filter', *STORES, 'inram')
#: No index at all.
NONE = 'none'


class HostFilter:
    """The filter of an open repository in this process, or its substitute.

    Any number of threads may use it at once.

    :param repository: the repository's path
    :param repository_id: 32 hexadecimal digits
    :param group_slots: slots of each of its groups
    :param directory: for filters, on a tmpfs of this host; None: a directory
        of this user's in ``/dev/shm``
    :param budget: bytes of a new filter, of the table of ``inram``, or of the
        cache of ``dtb`` and ``leveldb``
    :param index: one of :data:`INDEXES`, or :data:`NONE`
    :param index_dir: where stores lie
    :param block_size: of an average block: a new store has places for as many
        as the repository's file system can hold

    :ivar index: the parameter
    :ivar file: the path of the filter, or of the store's directory, that was
        opened last, or was tried
    :ivar error: why the last try to open the filter failed, or would fail;
        None: nothing is known to be wrong
    """

    def __init__(self, repository: str, repository_id: str, group_slots: int,
                 directory: str | None, budget: int, index: str = 'filter',
                 index_dir: str | None = None,
                 block_size: int = 4096) -> None:
        self.index = index
        self.file: str | None = None
        self.error: str | None = None
        self._repository = repository
        self._repository_id = repository_id
        self._group_slots = group_slots
        self._directory = directory
        self._budget = budget
        self._index_dir = index_dir
        self._block_size = block_size
        self._again = 0.0       # by time.monotonic()
        self._closed = False
        self._forget_handle()

    def _forget_handle(self) -> None:
        self._mutex = threading.Lock()
        self._attached = False
        self._filling = False   # a thread reads groups into it
        self._thread: threading.Thread | None = None

    def after_fork(self) -> None:
        """In a forked child: forget the parent's handle and its thread."""
        self._forget_handle()

    def close(self) -> None:
        """Stop filling the filter, and wait for the thread that does it.

        REQUIRES: the caller closes the engine's handle afterwards, which
        closes the filter.
        """
        with self._mutex:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join()

    def attach(self, handle: _engine.Repository, create: bool = True) -> None:
        """Open the filter for a handle, unless it is open.

        If that fails, this sets :attr:`error` and gives a RuntimeWarning.
        Calls in the next 30 seconds do not try again.

        :param create: make the filter if there is none; processes that only
            read don't create one
        """
        if (self._attached or self.index == NONE
                or time.monotonic() < self._again):
            return
        try:
            self.file = path = self._path()
            if not create and not files.exists(path):
                self.error = self._lack_of_room(path)
                return
            with self._mutex:
                if self._attached:
                    return
                self._open(handle, path)
                # Last: no other thread may store before the filter is there.
                self._attached = True
            self.error = None
            self._tidy(path)
        except (OSError, exceptions.RepositoryError) as e:
            self._warn(e)

    def place_for(self, handle: _engine.Repository,
                  volume: str) -> tuple[str, int] | None:
        """The index that the server of a volume opens in its own process.

        A filter is made, and opened here, too. The host's processes share the
        filter and the store of LMDB. The other stores serve one process, so
        each volume has its own.

        :returns: its path, and the keys for which a new store has room; None:
            there is none, and a RuntimeWarning gives the reason
        """
        if self.index == 'filter':
            self.attach(handle)
            return None if self.file is None or self.error is not None else (
                self.file, 1)
        try:
            path = self._path()
            self._make_directory(path)
            self._tidy(path)
        except OSError as e:
            self._warn(e)
            return None
        return os.path.join(path, 'store' if self.index == 'lmdb'
                            else f'{volume}.volume'), self._capacity()

    def place_for_slices(self) -> str | None:
        """Return the directory of cold groups' slices while the disk is full.

        It is on a tmpfs, as filters are, and is made when it is needed. None:
        there is no directory for filters.
        """
        try:
            return os.path.join(_directory_for(self._directory),
                                f'{self._repository_id}.slices')
        except OSError:
            return None     # attach reports it

    def _warn(self, e: Exception) -> None:
        """Note that there is no index, and log the reason once."""
        self._again = time.monotonic() + _AGAIN
        error = str(e)
        if isinstance(e, OSError) and e.filename is None:
            error = e.strerror or error     # our own sentence
        if error != self.error:
            self.error = error
            warnings.warn(f'{self._lack()}: {error}', RuntimeWarning,
                          stacklevel=5)

    def complete(self, handle: _engine.Repository) -> None:
        """Make sure of a filter that has the stored blocks.

        Blocks that others have stored in the last seconds may be missing. A
        thread does the part that takes long; this does not wait for it.
        """
        if self._filling:
            return
        more = self._must_make_large()
        if not more:
            self.attach(handle)
            if not self._attached:
                return      # a later operation tries again
            more, _, _ = handle.follow(self._groups_of(_READ_AT_ONCE),
                                       _FOLLOW_MS)
        if not more:
            return
        with self._mutex:
            if self._filling or self._closed:
                return
            self._filling = True
            self._thread = threading.Thread(
                target=self._fill, args=(handle,), daemon=True,
                name='glance-dedup-filter')
            self._thread.start()

    def follow(self, handle: _engine.Repository) -> bool:
        """Read into the filter some fingerprints that others stored since.

        If the host has no filter, this does not make one.

        :returns: whether there is more to read
        """
        self.attach(handle, create=False)
        if not self._attached:
            return False
        more, _, _ = handle.follow(self._groups_of(_READ_IN_TURN))
        return more

    def rebuild(self, handle: _engine.Repository,
                progress: Callable[[int, int], None] | None = None) -> None:
        """Empty the filter and fill it again from the groups.

        :param progress: called with the groups done and their total
        :raises BusyError: if another process fills it, and does not end
        """
        self.attach(handle)
        if not self._attached:
            return
        self._wait_for(handle, handle.clear_index)
        more = True
        while more:
            more, done, total = handle.follow(self._groups_of(_READ_IN_TURN))
            if progress is not None and total > 0:
                progress(done, total)
        # Another process may have gone on with it.
        self._wait_for(handle,
                       lambda: handle.statistics()['filter_complete'])

    def remove(self) -> str | None:
        """Remove the file of the filter, or the store in its place.

        The next process that stores makes a new one.

        REQUIRES: it is not open here.

        :returns: its path; None: there is none
        :raises BusyError: another process has it open
        """
        path = self._path()
        try:
            gone = (filters.remove(path) if self.index == 'filter'
                    else filters.remove_stores(path))
        except FileNotFoundError:
            return None
        if not gone:
            raise exceptions.BusyError(
                f'{path} is in use: stop what has the repository open on this '
                'host first (glance-api, dedupd, servers of volumes)')
        return path

    def _wait_for(self, handle: _engine.Repository,
                  condition: Callable[[], bool]) -> None:
        """Wait until something holds, as long as groups are read."""
        seen, until = -1, 0.0
        while not condition():
            if handle.statistics()['filter_rebuilt'] != seen:
                seen = handle.statistics()['filter_rebuilt']
                until = time.monotonic() + _REBUILD_WAIT
            if time.monotonic() > until:
                raise exceptions.BusyError(
                    'another process of this host reads groups into '
                    f'{self.file}, and does not go on')
            time.sleep(0.05)

    def _fill(self, handle: _engine.Repository) -> None:
        """Read until there is no more; a later operation tries again."""
        with contextlib.suppress(exceptions.RepositoryError):
            if not self._closed:
                self.attach(handle)
            more = self._attached
            while more and not self._closed:
                more, _, _ = handle.follow(self._groups_of(_READ_IN_TURN))
        with self._mutex:
            self._filling = False

    def _groups_of(self, slots: int) -> int:
        return max(1, min(64, slots // self._group_slots))

    def _path(self) -> str:
        if self.index == 'inram':
            return ''
        return os.path.join(
            _directory_for(self._directory if self.index == 'filter'
                           else self._index_dir),
            f'{self._repository_id}.{self.index}')

    def _lack(self) -> str:
        what = 'filter' if self.index == 'filter' else 'index'
        return f'no fingerprint {what}, so duplicates will be missed'

    def _open(self, handle: _engine.Repository, path: str) -> None:
        if self.index == 'filter':
            handle.attach_filter(os.fsencode(path), self._budget)
            return
        self._make_directory(path)
        handle.attach_store(self.index, os.path.join(
            os.fsencode(path), b'store'), self._capacity(), self._budget)

    def _make_directory(self, path: str) -> None:
        if self.index == 'inram':
            return
        os.makedirs(path, mode=0o700, exist_ok=True)
        if not _is_ours_alone(os.lstat(path)):
            raise PermissionError(
                1, f'{path} is not a directory that only '
                f'{access.user_name(os.geteuid())} may change')

    def _capacity(self) -> int:
        """The keys for which a new store has room.

        A store that has room for another number is replaced by a new one. So
        it is a power of two, and changes only where a disk grows much; or, for
        dtb, where the repository does: a table that is much larger than its
        cache waits for the disk. The numbers of groups never become smaller.
        """
        if self.index == 'inram':
            return max(1, self._budget // _INRAM_KEY)
        blocks = (shutil.disk_usage(self._repository).total
                  // self._block_size)
        bits = max(16, blocks.bit_length())
        if self.index == 'dtb':
            newest = max((int(name, 16) for name in os.listdir(
                os.path.join(self._repository, 'groups'))
                if _is_group(name)), default=0)
            slots = 2 * newest * self._group_slots
            bits = min(bits, max(_MIN_BITS, slots.bit_length()))
        return min(1 << bits, _MAX_KEYS)

    def _lack_of_room(self, path: str) -> str | None:
        """The error that making the missing filter would meet, if any."""
        if self.index != 'filter':
            return None
        place = os.path.dirname(path)
        if shutil.disk_usage(place).free >= self._budget:
            return None
        return (f'{place} has no room for the {self._budget >> 20} MiB of '
                'the filter')

    def _tidy(self, path: str) -> None:
        """Note that a filter is used; remove unused ones."""
        with contextlib.suppress(OSError):
            if self._index_dir is not None:
                filters.remove_unused_stores(self._index_dir)
            if self.index == 'filter' and filters.note_use(
                    path, self._repository):
                # Other repositories may be on a disk that does not answer.
                threading.Thread(
                    target=filters.remove_dead,
                    args=(os.path.dirname(path),), daemon=True,
                    name='glance-dedup-filters').start()

    def _must_make_large(self) -> bool:
        if (self._attached or self.index != 'filter'
                or self._budget <= _MADE_AT_ONCE
                or time.monotonic() < self._again):
            return False
        try:
            return not files.exists(self._path())
        except (OSError, exceptions.RepositoryError):
            return False    # attach reports it
