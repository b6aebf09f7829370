# SPDX-License-Identifier: Apache-2.0

"""Sources of backups, as the stages of a backup use them."""

import io

from glance_dedup.backup import places
from glance_dedup.backup import views

REPOSITORY = 'ab' * 16
BACKUP = 'b_disk_20261123T180000Z'
UPLOAD = 'cd' * 16


def place(directory, name='disk', repository_id=REPOSITORY):
    return places.Place(str(directory), name, repository_id)


def scan(view):
    """Return a scan's results, one letter for each segment: c, z or d.

    Compare its data with a second read.
    """
    found = io.StringIO()
    buffer, again = (memoryview(bytearray(views.SEGMENT)) for _ in range(2))
    for number in range(view.segments):
        kind = view.scan(number, buffer)
        length = view.length(number)
        if kind != views.Found.CLEAN:
            view.readinto(again[:length], number * views.SEGMENT)
            if kind == views.Found.DATA:
                assert buffer[:length] == again[:length]
            else:
                assert not any(again[:length])
        found.write(kind.name[0].lower())
    view.end_scan()
    return found.getvalue()


def read(view):
    """Return all bytes of a view."""
    data = bytearray(view.size)
    for number in range(view.segments):
        start = number * views.SEGMENT
        view.readinto(memoryview(data)[start:start + view.length(number)],
                      start)
    return bytes(data)


def back_up(view, backup=BACKUP, upload=UPLOAD):
    """Scan, commit and close a view; return the scan's results."""
    with view:
        found = scan(view)
        view.check()
        view.commit(backup, upload)
    return found
