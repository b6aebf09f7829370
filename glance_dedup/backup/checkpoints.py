# SPDX-License-Identifier: Apache-2.0

"""The checkpoints of a running server's disk, and the dirty segments by them.

A checkpoint is a bitmap in QEMU, kept in the disk's qcow2 file, of all writes
since some backup job began. A host keeps the name of that backup. The
file ``<name>.checkpoint`` of the source's place is JSON with a checksum, and
has at any time:

* the checkpoint of the last backup, and that backup, the size of the disk
  then, and the server's UUID. It is replaced after the commit alone (B3).
* every other checkpoint that there may be. A new one is entered before QEMU
  makes it, so one that a dead process made is known, and removed next time.

libvirt's own data about checkpoints is removed at once when a job has begun,
and made again for the next one: libvirt refuses to undefine a server that has
any, and Nova undefines servers to delete or to reboot them. The bitmaps stay.
"""

import contextlib
import dataclasses
import os
import re

from glance_dedup.backup import exports
from glance_dedup.backup import places
from glance_dedup.backup import views
from glance_dedup.base import exceptions
from glance_dedup.base import files

_KIND = 'checkpoint of a disk'
_MAX_SIZE = 16384
#: Of checkpoints and exports; only ours begin so.
PREFIX = 'glance-dedup-'
_is_name = re.compile(f'{PREFIX}[0-9a-f]{{16}}').fullmatch
_MAX_OTHERS = 100


@dataclasses.dataclass
class Known:
    """A host's record of a disk's checkpoints."""

    server: str = ''
    """The UUID of the server that has them."""
    checkpoint: str = ''
    """That of the last backup; '': none is known."""
    base: views.Base = views.Base('', '')
    size: int = 0
    others: list[str] = dataclasses.field(default_factory=list)
    """More that there may be, and that are to be removed."""

    def save(self, place: places.Place) -> None:
        """Write it, durably.

        :raises SourceError: that failed; the old file is still there
        """
        data = files.pack_json(
            _KIND, repository_id=place.repository_id, server=self.server,
            checkpoint=self.checkpoint, backup_id=self.base.backup_id,
            upload_id=self.base.upload_id, size=self.size, others=self.others)
        with places.source_errors(
                f'the checkpoint of {place.name} cannot be noted in '
                f'{place.path("checkpoint")}'):
            files.replace_file(place.path('checkpoint'), data, places.MODE)


def load(place: places.Place, server: str) -> Known:
    """Return the record of a disk's checkpoints.

    A record that does not fit, or is of another repository or server, is void.

    :param server: the UUID of the server
    """
    nothing = Known(server)
    try:
        fields = files.unpack_json(files.read_file(
            place.path('checkpoint'), _MAX_SIZE + 1), _KIND, _MAX_SIZE)
        if (fields['repository_id'], fields['server']) != (
                place.repository_id, server):
            return nothing
        known = Known(
            server, fields['checkpoint'],
            views.Base(fields['backup_id'], fields['upload_id']),
            fields['size'], fields['others'])
        names = [known.checkpoint, *known.others]
        if (not all(isinstance(text, str) for text in (*names, *known.base))
                or not isinstance(known.size, int)
                or not all(name == '' or _is_name(name) for name in names)):
            return nothing
    except (OSError, exceptions.DamagedError, ValueError, KeyError, TypeError,
            AttributeError, RecursionError):
        return nothing
    return known


def announce(place: places.Place, known: Known, checkpoint: str) -> None:
    """Note a checkpoint before it is made.

    :raises SourceError: that failed, so it must not be made
    """
    known.others = [*known.others[-_MAX_OTHERS:], checkpoint]
    known.save(place)


class BitmapChanges(views.Changes):
    """Finds clean segments by QEMU's record of writes since the last backup.

    :param checkpoint: the new one
    :param has_bitmap: whether QEMU exports the bitmap of writes since the
        checkpoint of the last backup
    """

    def __init__(self, place: places.Place, known: Known, checkpoint: str,
                 content: exports.ExportContent, has_bitmap: bool) -> None:
        self._place = place
        self._known = known
        self._checkpoint = checkpoint
        self._content = content
        # QEMU does not note in a bitmap that a disk was resized.
        fits = known.size == content.size
        self.base = known.base if has_bitmap and fits and all(
            known.base) else None

    def is_clean(self, number: int) -> bool:
        """Return whether nothing was written to a segment.

        Segments without any data cost nothing, and are not called clean: if
        the disk was shrunk and has grown again since, they are zeros, and no
        bitmap says so.
        """
        return (self.base is not None and not self._content.is_dirty(number)
                and not self._content.is_hole(number * views.SEGMENT, 1))

    def is_same(self, number: int, data: object) -> bool:
        """Never: it was written to."""
        return False

    def end_scan(self) -> None:
        """Do nothing: QEMU has all that the commit needs."""

    def commit(self, base: views.Base) -> None:
        """Have the new checkpoint take the place of the old one (B3)."""
        known = self._known
        others = [name for name in [known.checkpoint, *known.others]
                  if name and name != self._checkpoint]
        changed = dataclasses.replace(
            known, checkpoint=self._checkpoint, base=base,
            size=self._content.size, others=others)
        changed.save(self._place)
        for field in dataclasses.fields(changed):
            setattr(known, field.name, getattr(changed, field.name))

    def close(self) -> None:
        """Do nothing: the end of the job removes the bitmap."""


def remove_stale(*paths: str) -> None:
    """Remove files of a job that has not ended, such as after a crash.

    :raises SourceError: one cannot be removed
    """
    for path in paths:
        with places.source_errors(f'{path} cannot be removed'), (
                contextlib.suppress(FileNotFoundError)):
            os.unlink(path)
