# SPDX-License-Identifier: Apache-2.0

"""The disks of libvirt's servers, running or not, as views.

A running server gets one backup job in pull mode for all of its disks: QEMU
exports them as of one moment, and writes the server's overwrites meanwhile
to scratch files. A server that is shut off has files (`diskfiles.py`,
`images.py`).

A disk in the format qcow2 has a bitmap of the writes since the last
backup (`checkpoints.py`). Others can have none that outlives QEMU, so they are
read whole, and compared by digests.

A job outlives its process. It ends when the last view is closed, when its
scratch files have become too large, or when the next backup of the server
begins.
"""

from collections.abc import Collection
from collections.abc import Mapping
import contextlib
import dataclasses
import json
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from typing import Any

from glance_dedup.backup import checkpoints
from glance_dedup.backup import digests
from glance_dedup.backup import exports
from glance_dedup.backup import images
from glance_dedup.backup import places
from glance_dedup.backup import rates
from glance_dedup.backup import views

LOG = logging.getLogger(__name__)

#: Seconds for a request to libvirt. Removing a bitmap of a large disk, and
#: waiting for another job's end, take some.
REQUEST_SECONDS = 180.0
_MAX_ANSWER = 1 << 20
# Bytes of a Unix socket's path, without its end.
_MAX_SOCKET = 107
# Numbers of libvirt's errors.
_NO_SERVER = 42


@dataclasses.dataclass(frozen=True)
class Settings:
    """Access to the servers, and limits of their backups."""

    state_directory: str
    """Directory of the state between backups; this repository's alone."""
    scratch_directory: str
    """For scratch files and sockets. QEMU writes to it, so its user must be
    able to enter it."""
    repository_id: str
    uri: str = 'qemu:///system'
    """Libvirt's URI."""
    scratch_bytes: int = 10 << 30
    """The most that the scratch files of one server may take. Then the backup
    ends, and the server goes on."""
    free_bytes: int = 1 << 30
    """Bytes that must be free on their file system. If it is full, the servers
    get errors when they write."""
    backing_directories: tuple[str, ...] = ()
    """Directories of backing files, for disks whose server is shut off."""


class _Refused(views.SourceError):
    """libvirt has refused a request."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def _ask(uri: str, server: str, do: str, **arguments: Any) -> dict[str, Any]:
    """Have a separate process send libvirt the request (`libvirt_jobs.py`).

    :raises SourceError: it is not installed, or does not answer
    :raises _Refused: libvirt has refused
    """
    request = {'uri': uri, 'server': server, 'do': do, **arguments}
    try:
        done = subprocess.run(
            [sys.executable, '-m', 'glance_dedup.backup.libvirt_jobs'],
            input=json.dumps(request).encode(), capture_output=True,
            timeout=REQUEST_SECONDS)
    except subprocess.TimeoutExpired as e:
        raise views.SourceError(
            f'libvirt at {uri} has not answered for {REQUEST_SECONDS:g} s '
            f'about the server {server}. See whether virsh answers') from e
    except OSError as e:
        raise views.SourceError(
            f'libvirt at {uri} cannot be asked about the server {server}: '
            f'{e.strerror or e}') from e
    try:
        answer = json.loads(done.stdout[:_MAX_ANSWER])
    except ValueError as e:
        told = done.stderr.decode(errors='replace').strip()
        if "No module named 'libvirt'" in told:
            raise views.SourceError(
                f'the server {server} cannot be backed up: the Python module '
                'libvirt is missing. Install glance-dedup[libvirt]') from e
        raise views.SourceError(
            f'libvirt at {uri} cannot be asked about the server {server}: '
            f'{told.splitlines()[-1] if told else done.returncode}') from e
    if 'error' in answer:
        raise _refusal(uri, server, answer['error'], answer['code'])
    return answer


def _refusal(uri: str, server: str, text: str, code: int) -> _Refused:
    if code == _NO_SERVER:
        return _Refused(f'there is no server {server} at {uri}. See virsh '
                        'list --all for the names', code)
    return _Refused(f'the server {server} at {uri} cannot be backed up: '
                    f'{text}', code)


@dataclasses.dataclass
class _Disk:
    """A disk of a running server, for as long as its job."""

    target: str
    place: places.Place
    has_bitmap: bool
    known: checkpoints.Known
    scratch: str
    export: str = ''

    def request(self) -> dict[str, Any]:
        return {'target': self.target, 'bitmap': self.has_bitmap,
                'checkpoint': self.known.checkpoint, 'export': self.export,
                'others': self.known.others, 'scratch': self.scratch}


def _socket(settings: Settings, uuid: str) -> str:
    return os.path.join(settings.scratch_directory, f'{uuid}.sock')


def _scratch(settings: Settings, place: places.Place) -> str:
    return os.path.join(settings.scratch_directory, f'{place.name}.scratch')


class _Job:
    """A backup job of a running server.

    It owns the places of the disks. A thread watches the scratch files.

    :param found: the result of `describe` for the server
    :param stack: closes the places
    """

    SECONDS = 1.0

    def __init__(self, settings: Settings, found: dict[str, Any],
                 disks: list[_Disk], stack: contextlib.ExitStack) -> None:
        self._settings = settings
        self._server = found['name']
        self._uuid = found['uuid']
        self._disks = disks
        self._stack = stack
        self._open = 0
        self._why = ''
        self._begun: float | None = None    # by this process
        self._is_over = threading.Event()
        self._watch = threading.Thread(
            target=self._watch_scratch, daemon=True, name='scratch')
        self.socket = _socket(settings, self._uuid)
        if len(os.fsencode(self.socket)) > _MAX_SOCKET:
            raise views.SourceError(
                f'the scratch directory {settings.scratch_directory} has too '
                f'long a path for the socket {self.socket}. Give one of at '
                f'most {_MAX_SOCKET - 42} bytes')

    def _ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        return _ask(self._settings.uri, self._uuid, do,
                    prefix=checkpoints.PREFIX, **arguments)

    def _requests(self) -> list[dict[str, Any]]:
        return [disk.request() for disk in self._disks]

    def begin(self) -> set[str]:
        """Begin a new job; the targets whose bitmaps are exported.

        :raises SourceError: as its name says; no part of the job remains
        """
        nonce = checkpoints.PREFIX + secrets.token_hex(8)
        self._ask('end', disks=self._requests())
        self._require_room()
        checkpoints.remove_stale(
            self.socket, *(disk.scratch for disk in self._disks))
        for disk in self._disks:
            disk.known.others = []
            disk.export = f'{nonce}-{disk.target}'
            if disk.has_bitmap:
                checkpoints.announce(disk.place, disk.known, nonce)
        try:
            answer = self._ask('begin', disks=self._requests(),
                               checkpoint=nonce, socket=self.socket,
                               bitmap=exports.BITMAP)
            self._begun = time.monotonic()
        except BaseException:
            self._end()
            raise
        self._watch.start()
        return set(answer['incremental'])

    def find(self, identities: Mapping[str, str]) -> set[str]:
        """Find the job of a process that died.

        Gives the same as :meth:`begin`.

        :param identities: of the views that it had, by name
        :raises SourceError: it has ended
        """
        found = self._ask('find')
        for disk in self._disks:
            disk.export = found['exports'].get(disk.target, '')
            if disk.export != identities.get(disk.place.name):
                raise views.SourceError(
                    f'the view of {disk.place.name} has ended since its '
                    'backup began. Back it up again')
        self._watch.start()
        return {disk.target for disk in self._disks if disk.known.checkpoint
                and found['since'].get(disk.target) == disk.known.checkpoint}

    def view(self, disk: _Disk, is_incremental: bool,
             resumed: bool) -> views.View:
        """The view of one disk; closing the last one ends the job."""
        content = exports.ExportContent(
            self.socket, disk.export, disk.place.name, is_incremental,
            lambda: self._why, self._leave)
        self._open += 1
        try:
            changes: views.Changes
            if disk.has_bitmap:
                checkpoint = disk.export.removesuffix(f'-{disk.target}')
                changes = checkpoints.BitmapChanges(
                    disk.place, disk.known, checkpoint, content,
                    is_incremental)
            else:
                changes = digests.DigestChanges(
                    disk.place, content.identity, content.size, resumed)
        except BaseException:
            content.close()
            raise
        return views.View(disk.place.name, content, changes)

    def _leave(self) -> None:
        self._open -= 1
        if not self._open:
            self.end()

    def end(self) -> None:
        """End the job. Idempotent."""
        if not self._is_over.is_set():
            self._is_over.set()
            if self._watch.is_alive():
                self._watch.join()
            self._note_rate()
            try:
                self._end()
            finally:
                self._stack.close()

    def _end(self) -> None:
        """End QEMU's job, and remove the checkpoints that are not needed.

        Errors are logged: the next backup of the server does it again.
        """
        try:
            is_done = self._end_job()
            for disk in self._disks:
                if disk.known.others and is_done:
                    disk.known.others = []
                    disk.known.save(disk.place)
            checkpoints.remove_stale(
                self.socket, *(disk.scratch for disk in self._disks))
        except views.SourceError as e:
            LOG.warning('the backup job of the server %s may go on, and its '
                        'next backup will end it: %s', self._server, e)

    def _end_job(self) -> bool:
        """End QEMU's job; return whether the server runs."""
        try:
            return self._ask('end', disks=self._requests())['done']
        except _Refused as e:
            if e.code != _NO_SERVER:
                raise
            return False    # a transient server, whose job has ended with it

    # -- the scratch files -------------------------------------------------

    def _require_room(self) -> None:
        directory = self._settings.scratch_directory
        with places.source_errors(
                f'the scratch directory {directory} cannot be used'):
            found = os.statvfs(directory)
        free = found.f_bavail * found.f_frsize
        if free < self._settings.free_bytes:
            raise views.SourceError(
                f'the scratch directory {directory} has {free >> 20} MiB '
                f'free, and {self._settings.free_bytes >> 20} are needed: '
                f'the server {self._server} would get errors when it writes. '
                'Make room, or give another directory')

    def _scratch_bytes(self) -> int:
        total = 0
        for disk in self._disks:
            with contextlib.suppress(OSError):
                total += os.stat(disk.scratch).st_blocks * 512
        return total

    def _note_rate(self) -> None:
        """Note how fast the server overwrites its disks, for later plans."""
        if self._begun is not None:
            seconds = max(time.monotonic() - self._begun, self.SECONDS)
            rates.save(self._settings.state_directory, self._uuid,
                       int(self._scratch_bytes() / seconds))

    def _watch_scratch(self) -> None:
        while not self._is_over.wait(self.SECONDS):
            try:
                taken = self._scratch_bytes()
                if taken > self._settings.scratch_bytes:
                    raise views.SourceError(
                        f'its scratch files have {taken >> 20} MiB, and may '
                        f'have {self._settings.scratch_bytes >> 20}')
                self._require_room()
            except views.SourceError as e:
                self._why = f'it was given up: {e}'
                try:
                    self._ask('end', disks=[])
                except views.SourceError as failed:
                    LOG.error('the backup job of the server %s cannot be '
                              'ended: %s', self._server, failed)
                return


# -- opening ------------------------------------------------------------------

def open_server(settings: Settings, server: str, *, name: str | None = None,
                targets: Collection[str] | None = None,
                identities: Mapping[str, str] | None = None
                ) -> list[views.View]:
    """The views of a server's disks, all of one moment.

    The name of each is that of the server, a minus sign, and the target:
    ``web-vda``. If one is refused, all are.

    :param server: its name or UUID in libvirt
    :param name: instead of the server's name in the names of backups
    :param targets: only these disks; None: all disks but CD-ROMs that
        the server may write to
    :param identities: identities of the views that a process which died has
        scanned, by name; None: new views. Remains of old ones are then removed
    :raises SourceError: with the disk, the reason, and what to do
    """
    found = _ask(settings.uri, server, 'describe')
    disks = [disk for disk in found['disks']
             if targets is None or disk['target'] in targets]
    missing = {*(targets or ())} - {disk['target'] for disk in disks}
    if missing or not disks:
        raise views.SourceError(
            f'the server {server} has no disk '
            f'{", ".join(sorted(missing)) or "that it may write to"}. See '
            'virsh domblklist for its disks')
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(places.Place(
            settings.state_directory,
            f'{found["name"] if name is None else name}-{disk["target"]}',
            settings.repository_id)) for disk in disks]
        if found['running']:
            opened = _open_running(settings, found, disks, held, identities,
                                   stack.pop_all())
        else:
            checkpoints.remove_stale(
                _socket(settings, found['uuid']),
                *(_scratch(settings, place) for place in held))
            opened = _open_files(settings, disks, held, identities)
            stack.pop_all()
    return opened


def _open_running(settings: Settings, found: dict[str, Any],
                  disks: list[dict[str, str]], held: list[places.Place],
                  identities: Mapping[str, str] | None,
                  stack: contextlib.ExitStack) -> list[views.View]:
    with contextlib.ExitStack() as undo:
        undo.enter_context(stack)
        mine = [_Disk(disk['target'], place, disk['format'] == 'qcow2',
                      checkpoints.load(place, found['uuid']),
                      _scratch(settings, place))
                for disk, place in zip(disks, held, strict=True)]
        job = _Job(settings, found, mine, stack)
        incremental = (job.begin() if identities is None
                       else job.find(identities))
        undo.pop_all()
        undo.callback(job.end)
        opened = []
        for disk in mine:
            view = job.view(disk, disk.target in incremental,
                            identities is not None)
            undo.callback(view.close)
            opened.append(view)
        undo.pop_all()
    return opened


def _open_files(settings: Settings, disks: list[dict[str, str]],
                held: list[places.Place],
                identities: Mapping[str, str] | None) -> list[views.View]:
    with contextlib.ExitStack() as undo:
        opened = []
        for disk, place in zip(disks, held, strict=True):
            if not disk['path']:
                raise views.SourceError(
                    f'{place.name} cannot be backed up: its server is shut '
                    'off, and the disk is no file of this host. Start the '
                    'server')
            identity = (None if identities is None
                        else identities.get(place.name, ''))
            view = images.open_disk(
                place, disk['path'], disk['format'], identity,
                settings.backing_directories)
            undo.callback(view.close)
            opened.append(view)
        undo.pop_all()
    return opened


@dataclasses.dataclass(frozen=True)
class Found:
    """Return the facts about a source that a plan needs."""

    size: int
    """About how many bytes its disks have."""
    written: int = 0
    """Bytes that it overwrites in a second, while a view is kept."""


def find(settings: Settings, server: str) -> Found | None:
    """Look for a server; None: it is not here.

    :raises SourceError: libvirt does not answer
    """
    try:
        found = _ask(settings.uri, server, 'describe')
    except _Refused as e:
        if e.code == _NO_SERVER:
            return None
        raise
    return Found(sum(disk['size'] for disk in found['disks']),
                 rates.load(settings.state_directory, found['uuid'])
                 if found['running'] else 0)
