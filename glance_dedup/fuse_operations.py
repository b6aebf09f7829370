# SPDX-License-Identifier: Apache-2.0

"""Images as files, to be read: a file system (FUSE).

A directory shows each image as a file that has the image's id as its name.
The engine verifies the bytes, or the daemon does, which sends them over NBD.

Pages that were read stay in the page cache of the host, since images do not
change: an inode is of one upload. An image that was deleted and stored again
has another inode.

The kernel's requests come to an event loop; calls that may block run in
threads. :class:`Operations` has a handler for each. The documentation of
pyfuse3 describes the handlers.
"""

from collections.abc import Callable
import dataclasses
import errno
import itertools
import re
import stat as stat_module
from typing import Any
from typing import Protocol

import pyfuse3
import trio

from glance_dedup.base import endings
from glance_dedup.base import exceptions
from glance_dedup.base import imageids
from glance_dedup.client import client_errors
from glance_dedup.client import daemon_client
from glance_dedup.client import nbd_client
from glance_dedup.repository import image_repository

#: Calls that may block at once: of all look-ups, and of each open file.
THREADS = 8
#: The most requests of the kernel that are under way at once.
REQUESTS = 4096
#: Seconds for which the kernel need not revalidate a name.
NAME_SECONDS = 1.0
#: Seconds for which it need not revalidate size and time, which are fixed.
FACTS_SECONDS = 86400.0

_NANOSECONDS = 10 ** 9


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts about an image before it is opened."""

    image_id: str
    upload_id: str
    size: int
    created: int
    """Seconds since 1970; 0: it is not known."""


class Opened(Protocol):
    """An image that is open, and stays while it is. Thread-safe."""

    def read(self, length: int, offset: int) -> bytes:
        """Read so many bytes; fewer only at the end."""

    def close(self) -> None:
        """Let go. Idempotent."""


class Source(Protocol):
    """Source of images. Its methods may block; they are thread-safe.

    They raise LookupError if an image is not there, or not of this upload.
    The text of any other exception is a sentence for the user.

    :ivar name: of the source, for messages
    """

    name: str

    def names(self) -> list[str]:
        """The ids of the images that the directory shows, sorted."""

    def facts(self, image_id: str) -> Facts:
        """Look up an image that is there now."""

    def open(self, facts: Facts) -> Opened:
        """Open the image, if it is still of this upload."""


class FromRepository(Source):
    """Images of a repository that this process reads itself."""

    def __init__(self, repository: image_repository.Repository) -> None:
        self.name = repository.path
        self._repository = repository

    def names(self) -> list[str]:
        return self._repository.images()

    def facts(self, image_id: str) -> Facts:
        try:
            stat = self._repository.stat(image_id)
        except exceptions.ImageNotFound as e:
            raise LookupError(str(e)) from e
        return Facts(image_id, stat.upload_id, stat.size, stat.created)

    def open(self, facts: Facts) -> Opened:
        try:
            return self._repository.open_image(facts.image_id,
                                               facts.upload_id)
        except exceptions.ImageNotFound as e:
            raise LookupError(str(e)) from e


class FromDaemon(Source):
    """Images that the daemon has, or that it fetches once they are named.

    :param socket: on which the daemon serves NBD
    """

    def __init__(self, client: daemon_client.Client, socket: str) -> None:
        self.name = f'the daemon on {client.address}'
        self._client = client
        self._socket = socket
        self._created: dict[str, int] = {}

    def names(self) -> list[str]:
        created = {}
        for image in self._client.images():
            name, when = image.get('image_id'), image.get('created')
            if isinstance(name, str):
                created[name] = when if isinstance(when, int) else 0
        self._created = created
        return sorted(filter(imageids.is_image, created))

    def facts(self, image_id: str) -> Facts:
        upload_id, size = self._call(self._head, image_id)
        return Facts(image_id, upload_id, size,
                     self._created.get(image_id, 0))

    def _head(self, image_id: str) -> tuple[str, int]:
        with self._client.request(
                'HEAD', f'/v1/images/{image_id}') as answer:
            size = answer.header('Content-Length')
            if not re.fullmatch('[0-9]{1,18}', size):
                raise answer.bad('an image without its length')
            return answer.header('ETag').strip('"'), int(size)

    def open(self, facts: Facts) -> Opened:
        return self._call(nbd_client.Export, self._socket, facts.image_id,
                          facts.upload_id)

    @staticmethod
    def _call(function: Callable, *args: Any) -> Any:
        try:
            return function(*args)
        except client_errors.Refused as e:
            if e.code == 404:
                raise LookupError(str(e)) from e
            raise


class _Inodes:
    """The inode numbers of uploads, for as long as the kernel knows them."""

    def __init__(self) -> None:
        self._numbers = itertools.count(pyfuse3.ROOT_INODE + 1)
        self._by_number: dict[int, Facts] = {}
        self._by_upload: dict[tuple[str, str], int] = {}
        self._looked_up: dict[int, int] = {}

    def number(self, facts: Facts) -> int:
        """The number of an upload; one that has none gets the next."""
        key = facts.image_id, facts.upload_id
        number = self._by_upload.get(key)
        if number is None:
            number = next(self._numbers)
            self._by_upload[key] = number
            self._looked_up[number] = 0
        self._by_number[number] = facts
        return number

    def told(self, number: int) -> None:
        """Count one more time that the kernel got the number."""
        self._looked_up[number] += 1

    def forget(self, number: int, times: int = 0) -> None:
        """Count down; the number goes once the kernel does not know it.

        :param times: how often the kernel got the number, and forgot it
        """
        if number in self._looked_up:
            self._looked_up[number] -= times
            if self._looked_up[number] <= 0:
                facts = self._by_number.pop(number)
                del self._looked_up[number]
                del self._by_upload[facts.image_id, facts.upload_id]

    def facts(self, number: int) -> Facts:
        """The upload that has the number.

        :raises FUSEError: no upload has it
        """
        try:
            return self._by_number[number]
        except KeyError:
            raise pyfuse3.FUSEError(errno.ESTALE) from None


class Operations(pyfuse3.Operations):
    """The handlers of the kernel's requests.

    :param complain: gets a problem in words, but not twice in a row the same
    :param owner: user and group of the files
    :param others: whether users outside of the group may read them, if they
        reach the mount at all
    """

    def __init__(self, source: Source, complain: Callable[[str], None],
                 owner: tuple[int, int], others: bool = True) -> None:
        super().__init__()
        self._source = source
        self._complain = complain
        self._complaint = ''
        self._owner = owner
        self._permissions = 0o444 if others else 0o440
        self._inodes = _Inodes()
        self._handles = itertools.count(1)
        self._files: dict[int, tuple[Opened, trio.CapacityLimiter]] = {}
        self._directories: dict[int, list[str]] = {}
        self._limiter = trio.CapacityLimiter(THREADS)

    async def _call(self, function: Callable, *args: Any,
                    missing: int = errno.ENOENT,
                    limiter: trio.CapacityLimiter | None = None) -> Any:
        """Call a blocking function in a thread; translate its errors."""
        try:
            return await trio.to_thread.run_sync(
                function, *args, limiter=limiter or self._limiter)
        except LookupError as e:
            raise pyfuse3.FUSEError(missing) from e
        except Exception as e:
            text = f'{e or type(e).__name__}'
            if text != self._complaint:
                self._complaint = text
                self._complain(text)
            raise pyfuse3.FUSEError(errno.EIO) from e

    # -- names -------------------------------------------------------------

    async def lookup(self, parent_inode, name, ctx):
        if parent_inode != pyfuse3.ROOT_INODE:
            raise pyfuse3.FUSEError(errno.ENOTDIR)
        if name in (b'.', b'..'):
            return self._directory()
        image_id = name.decode(errors='replace')
        if not imageids.is_image(image_id):
            raise pyfuse3.FUSEError(errno.ENOENT)
        facts = await self._call(self._source.facts, image_id)
        number = self._inodes.number(facts)
        self._inodes.told(number)
        return self._file(number, facts)

    async def forget(self, inode_list):
        for number, times in inode_list:
            self._inodes.forget(number, times)

    async def getattr(self, inode, ctx):
        if inode == pyfuse3.ROOT_INODE:
            return self._directory()
        return self._file(inode, self._inodes.facts(inode))

    def _entry(self, inode: int, mode: int) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = mode
        entry.st_uid, entry.st_gid = self._owner
        entry.entry_timeout = NAME_SECONDS
        return entry

    def _directory(self) -> pyfuse3.EntryAttributes:
        entry = self._entry(pyfuse3.ROOT_INODE, stat_module.S_IFDIR
                            | self._permissions | self._permissions >> 2)
        entry.st_nlink = 2
        return entry

    def _file(self, inode: int, facts: Facts) -> pyfuse3.EntryAttributes:
        entry = self._entry(inode, stat_module.S_IFREG | self._permissions)
        entry.attr_timeout = FACTS_SECONDS
        entry.st_nlink = 1
        entry.st_size = facts.size
        entry.st_blksize = 65536
        entry.st_blocks = -(-facts.size // 512)
        entry.st_mtime_ns = entry.st_ctime_ns = entry.st_atime_ns = (
            facts.created * _NANOSECONDS)
        return entry

    # -- the directory -----------------------------------------------------

    async def opendir(self, inode, ctx):
        handle = next(self._handles)
        self._directories[handle] = await self._call(self._source.names)
        return handle

    async def readdir(self, fh, start_id, token):
        names = self._directories[fh]
        for position in range(start_id, len(names)):
            name = names[position]
            try:
                facts = await self._call(self._source.facts, name)
            except pyfuse3.FUSEError:
                continue    # the image is gone, or reported to the user
            number = self._inodes.number(facts)
            if not pyfuse3.readdir_reply(
                    token, name.encode(), self._file(number, facts),
                    position + 1):
                self._inodes.forget(number)
                return
            self._inodes.told(number)

    async def releasedir(self, fh):
        del self._directories[fh]

    async def statfs(self, ctx):
        facts = pyfuse3.StatvfsData()
        facts.f_bsize = facts.f_frsize = 4096
        facts.f_namemax = 128
        return facts

    # -- files -------------------------------------------------------------

    async def open(self, inode, flags, ctx):
        # On ESTALE the kernel looks up the name again and opens the new
        # file, before it answers the process with the request.
        opened = await self._call(
            self._source.open, self._inodes.facts(inode),
            missing=errno.ESTALE)
        handle = next(self._handles)
        # Reads that wait delay neither those of other files, nor look-ups.
        self._files[handle] = opened, trio.CapacityLimiter(THREADS)
        return pyfuse3.FileInfo(fh=handle, keep_cache=True)

    async def read(self, fh, off, size):
        opened, limiter = self._files[fh]
        return await self._call(opened.read, size, off, limiter=limiter)

    async def release(self, fh):
        opened, limiter = self._files.pop(fh)
        await self._call(opened.close, limiter=limiter)


def options(*, allow_other: bool, writable: bool) -> set[str]:
    """Return the options of a mount; see `serve`."""
    found = {'nosuid', 'nodev', 'noexec', 'default_permissions',
             'fsname=glance-dedup', 'subtype=glance-dedup'}
    if allow_other:
        found.add('allow_other')
    if not writable:
        found.add('ro')
    return found


def serve(operations: Operations, directory: str, *, allow_other: bool,
          ready: Callable[[], None], writable: bool = False,
          ending: Callable[[], None] = lambda: None) -> None:
    """Show images in a directory until it is unmounted, or a signal ends it.

    :param directory: or ``/dev/fd/N``, for a mount that another process made
    :param ready: called once the directory shows them
    :param writable: whether the operations refuse writes, not the kernel
    :param ending: called at a signal; has the operations that wait fail
    :raises OSError: they cannot be shown there; the library has written why
    """
    try:
        pyfuse3.init(operations, directory, options(
            allow_other=allow_other, writable=writable))
    except RuntimeError as e:
        raise OSError(errno.EIO, 'cannot show images there', directory) from e
    try:
        trio.run(_serve, ready, ending)
    finally:
        pyfuse3.close()


async def _serve(ready: Callable[[], None], ending: Callable[[], None]
                 ) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(_end_on_signal, ending)
        ready()
        await pyfuse3.main(max_tasks=REQUESTS)
        nursery.cancel_scope.cancel()


async def _end_on_signal(ending: Callable[[], None],
                         task_status=trio.TASK_STATUS_IGNORED) -> None:
    with trio.open_signal_receiver(*endings.signals()) as signals:
        task_status.started()
        async for _ in signals:
            ending()
            pyfuse3.terminate()
