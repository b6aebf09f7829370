# SPDX-License-Identifier: Apache-2.0

"""Damages to a file, or to a directory.

A damage is a function of a :class:`Target` and of numbers that choose among
its many forms, and returns a function that undoes it. Undoing restores only
what is still as the damage left it: changes that a task or a user has made
since, on purpose, stay. It returns whether it could: data made in a lost
file's place would be lost in its turn.
"""

import dataclasses
import json
import os
import pathlib
import random
import secrets
import shutil

from tests.damage import template

SECTOR = 512
PAGE = 4096


@dataclasses.dataclass(frozen=True)
class Target:
    """A file, or a directory, of a repository, and its relations."""

    path: pathlib.Path
    """The repository."""
    name: str
    older: pathlib.Path
    """The same repository, as it was before."""
    other: pathlib.Path
    """Another repository."""

    @property
    def file(self):
        return self.path / self.name

    def siblings(self):
        """Return other files of its kind, in a constant order."""
        def kind(p):
            return p.name[:2] if p.parent.name == 'spool' else ''
        return [p for p in sorted(self.file.parent.iterdir())
                if p != self.file and p.is_file() and kind(p) == kind(
                    self.file)]


def _rewrite(target, change):
    """Change the bytes in place; all names of the file have them."""
    # The open file stays the same if a task gives it another name.
    file = open(target.file, 'r+b', buffering=0)
    good = file.read()
    bad = bytearray(good)
    change(bad)
    _store(file, bad)

    def undo():
        with file:
            file.seek(0)
            now = file.read()
            if len(bad) < len(good) and len(now) == len(bad):
                now += good[len(bad):]
            elif len(bad) > len(good) and len(now) == len(bad):
                now = now[:len(good)]
            _store(file, bytes(
                good[i] if i < len(good) and i < len(bad)
                and byte == bad[i] else byte for i, byte in enumerate(now)))
        return True
    return undo


def _store(file, data):
    file.seek(0)
    file.write(data)
    file.truncate(len(data))


def _put(file, source):
    """Replace it by another file, or directory: a copy of `source`."""
    aside = file.parent.parent / f'aside-{secrets.token_hex(4)}'
    os.rename(file, aside)
    if source is None:
        pass
    elif source.is_dir():
        template.copy(source, file)
    else:
        shutil.copy2(source, file)
    inode = file.stat().st_ino if source is not None else None

    def undo():
        there = file.stat().st_ino if file.exists() else None
        if there != inode:
            return False
        if file.is_dir():
            # Files made in it meanwhile go to the right directory.
            for p in file.iterdir():
                if not (aside / p.name).exists() and not (
                        source / p.name).exists():
                    os.rename(p, aside / p.name)
            shutil.rmtree(file)
        elif inode is not None:
            file.unlink()
        os.rename(aside, file)
        return True
    return undo


# -- in place -----------------------------------------------------------------

def flip(target, offset, mask=1):
    def change(data):
        data[offset] ^= mask
    return _rewrite(target, change)


def truncate(target, length):
    def change(data):
        del data[length:]
    return _rewrite(target, change)


def lengthen(target, more, byte=0):
    def change(data):
        data += bytes([byte]) * more
    return _rewrite(target, change)


def overwrite(target, offset, length, byte=0):
    """Write zeros, or other bytes; None means random ones."""
    def change(data):
        end = min(offset + length, len(data))
        data[offset:end] = (
            random.Random(offset).randbytes(end - offset) if byte is None
            else bytes([byte]) * (end - offset))
    return _rewrite(target, change)


def copy_sector(target, one, other):
    """Overwrite a sector with another one of the file."""
    def change(data):
        data[one * SECTOR:one * SECTOR + SECTOR] = (
            data[other * SECTOR:other * SECTOR + SECTOR])
    return _rewrite(target, change)


def older_sectors(target, offset, length):
    """Restore old content of a part: its writes never reached the disk."""
    def change(data):
        source = target.older / target.name
        if source.is_file():
            old = source.read_bytes()[offset:offset + length]
            data[offset:offset + len(old)] = old
    return _rewrite(target, change)


# -- as a whole ---------------------------------------------------------------

def missing(target):
    return _put(target.file, None)


def empty(target):
    return truncate(target, 0)


def older_content(target):
    """Restore the old content in the same inode, or change nothing."""
    source = target.older / target.name
    left = source.read_bytes() if source.is_file() else None

    def change(data):
        if left is not None:
            data[:] = left
    undo = _rewrite(target, change)

    def undo_if_left():
        same = left is None or (
            target.file.is_file() and target.file.read_bytes() == left)
        return undo() and same
    return undo_if_left


def older_copy(target):
    """Restore the older version, as another file or directory."""
    source = target.older / target.name
    return _put(target.file, source if source.exists() else None)


def same_copy(target):
    """Replace a file by its copy, which loses its other names."""
    aside = target.path / 'copy'
    if target.file.is_dir():
        shutil.copytree(target.file, aside)
    else:
        shutil.copy2(target.file, aside)
    try:
        return _put(target.file, aside)
    finally:
        if aside.is_dir():
            shutil.rmtree(aside)
        else:
            aside.unlink()


def of_another_repository(target):
    source = target.other / target.name
    if not source.exists() and target.file.parent.is_dir():
        kind = target.file.name[:2]
        source = next(
            (p for p in sorted((target.other / target.name).parent.iterdir())
             if p.name[:2] == kind), source) if (
                 target.other / target.name).parent.is_dir() else source
    return _put(target.file, source if source.exists() else None)


def swapped(target, number):
    """Swap the file with another one of its kind."""
    siblings = target.siblings()
    if not siblings:
        return lambda: True
    other = siblings[number % len(siblings)]
    inodes = target.file.stat().st_ino, other.stat().st_ino

    def swap():
        aside = target.path / 'aside'
        os.rename(target.file, aside)
        os.rename(other, target.file)
        os.rename(aside, other)

    def undo():
        if (target.file.exists() and other.exists() and inodes == (
                other.stat().st_ino, target.file.stat().st_ino)):
            swap()
            return True
        return False
    swap()
    return undo


def directory(target):
    """Put a directory in a file's place."""
    undo = _put(target.file, None)
    target.file.mkdir()

    def remove():
        if target.file.is_dir():
            shutil.rmtree(target.file)
        return undo()
    return remove


# -- in the catalog -----------------------------------------------------------

def record(target, number, form):
    """Write a wrong record of the catalog, under LevelDB's right checksums.

    It cannot be undone.

    :param number: of the record, in the order of their keys
    :param form: its new content, of RECORDS
    """
    import plyvel
    with plyvel.DB(str(target.path / 'catalog')) as db:
        items = list(db)
        key, value = items[number % len(items)]
        for other, changed in RECORDS[form](key, value):
            if changed is None:
                db.delete(other)
            else:
                db.put(other, changed)
    return lambda: True


def _number_more(key, value):
    """Add one to numbers in JSON, or to the first byte of packed data."""
    if value[:1] == b'{':
        fields = json.loads(value)
        return json.dumps({name: v + 1 if type(v) is int else v
                           for name, v in fields.items()}).encode()
    return bytes([value[0] + 1 & 255]) + value[1:] if value else value


def _other_types(key, value):
    if value[:1] == b'{':
        fields = json.loads(value)
        return json.dumps(dict.fromkeys(fields, {'x': []})).encode()
    return value[::-1]


#: By name: the changed record, as (key, value) to be put, None: deleted.
RECORDS = {
    'missing': lambda key, value: [(key, None)],
    'empty': lambda key, value: [(key, b'')],
    'short': lambda key, value: [(key, value[:-1])],
    'long': lambda key, value: [(key, value + b'\0')],
    'no object': lambda key, value: [(key, b'[]')],
    'empty object': lambda key, value: [(key, b'{}')],
    'no text': lambda key, value: [(key, b'\xff' * len(value))],
    'zeros': lambda key, value: [(key, bytes(len(value)))],
    'other types': lambda key, value: [(key, _other_types(key, value))],
    'negative': lambda key, value: [(key, value.replace(b':', b':-'))],
    'huge': lambda key, value: [(key, value.replace(b':', b':1e400,"x":'))],
    'short key': lambda key, value: [(key[:-1], value)],
    'long key': lambda key, value: [(key + b'\0', value)],
    'other key': lambda key, value: [
        (key[:1] + bytes(len(key) - 1), value)],
    'further key': lambda key, value: [
        (key[:-1] + bytes([key[-1] ^ 1]), value)],
    # Well-formed and wrong: a count is too high.
    'more': lambda key, value: [(key, _number_more(key, value))],
}


#: The undone file may hold data that was stored after these.
WHOLE = ('missing', 'older_content', 'older_copy', 'same_copy',
         'of_another_repository', 'swapped', 'directory', 'empty')

DAMAGES = {function.__name__: function for function in (
    flip, truncate, lengthen, overwrite, copy_sector, older_sectors, record,
    missing,
    empty, older_content, older_copy, same_copy, of_another_repository,
    swapped, directory)}
