# SPDX-License-Identifier: Apache-2.0

"""Disks in files, of any format: the bytes that a server sees.

A raw file or a block device is read as it is. A qcow2 file is opened by
qemu-nbd, read-only, in a process that ends with ours.

A qcow2 file can name a backing file, and its maker chose the name. So
nothing is left to qemu-nbd: this module follows the chain itself, only into
directories that the operator names, only in formats that the files note, and
gives it the open files. External data files and encryption are refused.
"""

from collections.abc import Iterable
import contextlib
import json
import os
import stat
import struct
import subprocess
import time
from typing import Any

from glance_dedup.backup import digests
from glance_dedup.backup import diskfiles
from glance_dedup.backup import exports
from glance_dedup.backup import places
from glance_dedup.backup import views
from glance_dedup.base import diskformats

_PROGRAM = 'qemu-nbd'
_EXPORT = 'disk'
_END_SECONDS = 10.0
_START_SECONDS = 60.0
_PAUSE = 0.02
_MAX_CHAIN = 8
_HEAD = 4096
# From QEMU's docs/interop/qcow2.txt.
_QCOW2 = struct.Struct('>4sIQI')
_CRYPT_AT = 32
_FEATURES_AT = 72
_DATA_FILE = 1 << 2
_HEADER_LENGTH_AT = 100
_BACKING_FORMAT = 0xe2792aca
_MAX_NAME = 1023


def _refuse(path: str, why: str) -> views.SourceError:
    return views.SourceError(f'{path} cannot be backed up: {why}')


def _advice(found: str) -> str:
    """Return a sentence for a file in a format that the caller did not name.

    :param found: as `diskfiles.format_of` returns it, other than 'raw'
    """
    begins = f'it begins as a file in the format {found}'
    as_it_is = '--disk-format raw'
    if found == 'qcow2':
        return (f'{begins}. Say which bytes to back up: those of the disk in '
                f'it (--disk-format qcow2) or those of the file ({as_it_is})')
    if found == 'luks':
        return ('it begins as a disk that LUKS encrypts. Back up the '
                f'encrypted bytes with {as_it_is}')
    return (f'{begins}, which is not supported. Convert it (qemu-img convert '
            f'-f {found} -O raw), or back up the bytes of the file with '
            f'{as_it_is}')


class _Header:
    """Return the backing file that a qcow2 file names.

    :raises SourceError: it is no qcow2 file, or one that is refused
    """

    def __init__(self, path: str, head: bytes) -> None:
        if len(head) < 104 or head[:4] != b'QFI\xfb':
            raise _refuse(path, 'it is not a qcow2 file, as its server says. '
                          'See qemu-img info')
        _, version, offset, length = _QCOW2.unpack_from(head)
        crypt, = struct.unpack_from('>I', head, _CRYPT_AT)
        features, = struct.unpack_from('>Q', head, _FEATURES_AT)
        if version not in (2, 3) or crypt or version == 3 and (
                features & _DATA_FILE):
            raise _refuse(path, 'it is a qcow2 file that is encrypted, has '
                          'its data in another file, or is of an unknown '
                          'version. Back up the running server')
        self.backing = ''
        self.backing_format = ''
        if length:
            if length > _MAX_NAME or offset + length > len(head):
                raise _refuse(path, 'its header is damaged. Run qemu-img '
                              'check')
            self.backing = os.fsdecode(head[offset:offset + length])
            self.backing_format = self._find_format(version, head)

    @staticmethod
    def _find_format(version: int, head: bytes) -> str:
        at = 72
        if version == 3:
            at, = struct.unpack_from('>I', head, _HEADER_LENGTH_AT)
        while at + 8 <= len(head):
            kind, length = struct.unpack_from('>II', head, at)
            if kind == 0:
                break
            if kind == _BACKING_FORMAT and at + 8 + length <= len(head):
                return head[at + 8:at + 8 + length].decode(errors='replace')
            at += 8 + -(-length // 8) * 8
        return ''


def _backing_path(path: str, header: _Header,
                  directories: Iterable[str]) -> str:
    """The file behind a qcow2 file, if it may be followed."""
    backing = header.backing
    if ':' in backing.partition('/')[0]:
        raise _refuse(path, f"its backing file '{backing}' is no file. Back "
                      'up the running server')
    found = os.path.realpath(os.path.join(
        os.path.dirname(os.path.realpath(path)), backing))
    if not any(os.path.commonpath([found, allowed]) == allowed
               for allowed in map(os.path.realpath, directories)):
        raise _refuse(path, f'its backing file {found} is in no directory '
                      'that may be followed. If you trust whoever made the '
                      'disk, name its directory as one of backing files')
    if header.backing_format not in ('raw', 'qcow2'):
        raise _refuse(path, f'it does not note the format of its backing file '
                      f"{found} as raw or qcow2, but '{header.backing_format}'"
                      '. Run qemu-img rebase -u -F')
    return found


class ImageContent(views.Content):
    """Bytes of the disk in a qcow2 file and its backing files.

    :param directories: where backing files may lie
    :raises SourceError: it is refused, damaged, or in use by a server
    """

    def __init__(self, path: str, directories: Iterable[str]) -> None:
        self._stack = contextlib.ExitStack()
        self._path = path
        self._files: list[tuple[str, diskfiles.FileContent]] = []
        try:
            self._follow(path, list(directories))
            self.identity = ' '.join(
                f'{kind} {file.identity}' for kind, file in self._files)
            self._export = self._serve()
            self._stack.callback(self._export.close)
        except BaseException:
            self._stack.close()
            raise
        self.size = self._export.size

    def _follow(self, path: str, directories: list[str]) -> None:
        kind = 'qcow2'
        while len(self._files) < _MAX_CHAIN:
            file = diskfiles.FileContent(path)
            self._stack.callback(file.close)
            self._files.append((kind, file))
            if kind == 'raw':
                return
            header = _Header(path, file.head(_HEAD))
            if not header.backing:
                return
            path = _backing_path(path, header, directories)
            kind = header.backing_format
        raise _refuse(self._path, f'it has more than {_MAX_CHAIN} files '
                      'behind it. Commit some: qemu-img commit')

    def _serve(self) -> exports.ExportContent:
        """Start qemu-nbd, with this process as its only client."""
        # Only for this kind of disk: it loads much.
        import tempfile

        directory = self._stack.enter_context(tempfile.TemporaryDirectory())
        path = os.path.join(directory, 'nbd')
        fds = [file.fileno() for _, file in self._files]
        with places.source_errors(f'{_PROGRAM}, of the package qemu-utils, '
                                  f'cannot be started for {self._path}'):
            # It ends when its only client is gone, however that ends.
            process = subprocess.Popen(
                [_PROGRAM, '--read-only', f'--export-name={_EXPORT}',
                 f'--socket={path}', f'json:{json.dumps(self._nodes(fds))}'],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, pass_fds=fds)
        self._stack.callback(_end, process)
        return self._connect(process, path)

    def _connect(self, process: subprocess.Popen,
                 path: str) -> exports.ExportContent:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                return exports.ExportContent(path, _EXPORT, self._path, False)
            except views.SourceError as e:
                if process.poll() is None and time.monotonic() < deadline:
                    time.sleep(_PAUSE)
                    continue
                process.kill()
                told = process.communicate(timeout=_END_SECONDS)[1].decode(
                    errors='replace').strip().replace(f'{_PROGRAM}: ', '')
                raise _refuse(
                    self._path, told[-_MAX_NAME:] or str(e)) from e

    def _nodes(self, fds: list[int]) -> Any:
        """The chain, as QEMU takes it: of open files, with their formats."""
        nodes = None
        for (kind, _), fd in reversed(list(
                zip(self._files, fds, strict=True))):
            is_file = stat.S_ISREG(os.fstat(fd).st_mode)
            node = {'driver': kind, 'read-only': True, 'file': {
                'driver': 'file' if is_file else 'host_device',
                'filename': f'/proc/self/fd/{fd}'}}
            nodes = {**node, 'backing': nodes} if kind == 'qcow2' else node
        return nodes

    def readinto(self, buffer: Any, offset: int) -> None:
        """Fill a buffer. Raises as that of the base class."""
        self._export.readinto(buffer, offset)

    def is_hole(self, offset: int, length: int) -> bool:
        """Return whether a segment is known to be zeros."""
        return self._export.is_hole(offset, length)

    def check(self) -> None:
        """Make sure that no file of the chain was changed."""
        for _, file in self._files:
            file.check()
        self._export.check()

    def close(self) -> None:
        """End qemu-nbd. Idempotent."""
        self._stack.close()


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate(timeout=_END_SECONDS)


def open_disk(place: places.Place, path: str, kind: str | None = None,
              identity: str | None = None,
              directories: Iterable[str] = ()) -> views.View:
    """The view of a disk in a file or on a block device.

    :param place: of the source, locked; closed with the view, or on failure
    :param kind: 'raw' or 'qcow2'; None: raw, if the file does not begin as
        one of another format
    :param identity: of a view that a process which died has scanned; None: a
        new one
    :param directories: where backing files may lie
    :raises SourceError: it is refused, is in use, or not of this identity
    """
    with contextlib.ExitStack() as undo:
        undo.enter_context(place)
        content: views.Content
        if kind == 'qcow2':
            content = ImageContent(path, directories)
        else:
            content = diskfiles.FileContent(path)
            undo.callback(content.close)
            found = diskformats.format_of(content.head())
            if kind is None and found != 'raw':
                raise _refuse(path, _advice(found))
        undo.callback(content.close)
        if kind not in (None, 'raw', 'qcow2'):
            raise _refuse(path, f'the format {kind} is not supported. Convert '
                          'it: qemu-img convert -O raw')
        if identity is not None and content.identity != identity:
            raise _refuse(path, 'it was changed since its backup began. Back '
                          'it up again')
        changes = digests.DigestChanges(
            place, content.identity, content.size, identity is not None)
        undo.pop_all()
    return views.View(place.name, content, changes, place)
