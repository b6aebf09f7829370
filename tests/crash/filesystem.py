# SPDX-License-Identifier: Apache-2.0

"""A model of the files that a file system may have after a crash.

It assumes no more than "What a crash may do" of the design document. A
:class:`FileSystem` is fed with a journal's records; at any point it has, of
each file, the durable data and the writes since its last sync, and of each
name its target at its directory's last fsync, and since. A :class:`Choice`
selects the part that the crash leaves, and :meth:`FileSystem.crash` makes a
:class:`Tree` of it, which can be written to a real file system.
"""

import hashlib
import os

from tests.crash import record

SECTOR = 512
Kind = record.Kind


class Change:
    """An unsynced write to a file: a version of sectors."""

    __slots__ = ('number', 'sectors', 'length')

    def __init__(self, number, sectors, length):
        self.number = number        #: of the record
        self.sectors = sectors      #: what each holds after it, 512 bytes
        self.length = length        #: of the file, after it


class File:
    def __init__(self, number):
        self.number = number        #: in the order of creation
        self.durable = b''
        self.data = bytearray()
        self.changes = []

    def write(self, number, offset, data):
        end = offset + len(data)
        if len(self.data) < end:
            self.data.extend(bytes(end - len(self.data)))
        self.data[offset:end] = data
        self._note(number, offset, end)

    def punch(self, number, offset, length):
        end = min(offset + length, len(self.data))
        if offset < end:
            self.data[offset:end] = bytes(end - offset)
            self._note(number, offset, end)

    def truncate(self, number, length):
        before = len(self.data)
        if length < before:
            del self.data[length:]
        else:
            self.data.extend(bytes(length - before))
        self._note(number, length, before)

    def allocate(self, number, length):
        if length > len(self.data):
            self.truncate(number, length)

    def _note(self, number, start, end):
        sectors = {}
        for sector in range(start // SECTOR, -(-end // SECTOR)):
            at = sector * SECTOR
            sectors[sector] = bytes(
                self.data[at:at + SECTOR]).ljust(SECTOR, b'\0')
        self.changes.append(Change(number, sectors, len(self.data)))

    def sync(self):
        if self.changes:
            self.durable = bytes(self.data)
            self.changes = []

    def content(self, kept, length):
        """Return the content after a crash.

        :param kept: for each change None (lost), True, or the sectors of it
            that are kept
        :param length: of which change, -1: the durable one
        """
        length = (len(self.durable) if length < 0
                  else self.changes[length].length)
        data = bytearray(self.durable)
        for change, which in zip(self.changes, kept):
            if which is None:
                continue
            for sector, content in change.sectors.items():
                if which is True or sector in which:
                    at = sector * SECTOR
                    if len(data) < at + SECTOR:
                        data.extend(bytes(at + SECTOR - len(data)))
                    data[at:at + SECTOR] = content
        if len(data) < length:
            data.extend(bytes(length - len(data)))
        del data[length:]
        return bytes(data)


class Event:
    """A change of names: of one, or by a rename of two."""

    __slots__ = ('number', 'halves', 'durable')

    def __init__(self, number, halves):
        self.number = number
        self.halves = halves        #: (directory, name, its target)
        self.durable = False        #: for one of its directories


class Directory:
    def __init__(self, number):
        self.number = number
        self.durable = {}           #: names: File or Directory
        self.names = {}
        self.events = {}            #: names: [(Event, its target)]

    def sync(self):
        for events in self.events.values():
            for event, _ in events:
                event.durable = True
        self.durable = dict(self.names)
        self.events = {}


class Choice:
    """The part of the volatile data that a crash leaves.

    :ivar data: whether all of it is kept of files that `files` does not name
    :ivar names: the same of names
    :ivar files: of File: (kept, length) as in File.content
    :ivar contents: of File: its content
    :ivar versions: of (Directory, name): how many of its events happened
    """

    def __init__(self, data=True, names=True):
        self.data = data
        self.names = names
        self.files = {}
        self.contents = {}
        self.versions = {}


class Tree:
    """The files and directories after a crash.

    :ivar files: paths relative to the top: (number of the inode, content)
    :ivar directories: paths, each after its parent
    """

    def __init__(self):
        self.files = {}
        self.directories = []

    def digest(self):
        digest = hashlib.blake2b(digest_size=16)
        aliases = {}
        for path in self.directories:
            digest.update(f'{path}/\n'.encode())
        for path, (inode, content) in sorted(self.files.items()):
            alias = aliases.setdefault(inode, len(aliases))
            digest.update(f'{path} {alias} {len(content)}\n'.encode())
            digest.update(content)
        return digest.digest()

    def contents(self):
        """Return the content of each path; None: a directory."""
        return {**dict.fromkeys(self.directories),
                **{path: content
                   for path, (_, content) in self.files.items()}}

    def write(self, top):
        """Write the tree to a real file system, with its hard links."""
        os.mkdir(top, 0o700)
        for path in self.directories:
            os.mkdir(os.path.join(top, path), 0o700)
        made = {}
        for path, (inode, content) in self.files.items():
            path = os.path.join(top, path)
            if inode in made:
                os.link(made[inode], path)
                continue
            made[inode] = path
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            if content:
                os.write(fd, content)
            os.close(fd)


class FileSystem:
    """The state of a directory in the course of a journal.

    :param root: the path of a directory; its content is durable
    :ivar inodes: File or Directory by the number of the inode
    """

    def __init__(self, root):
        self._made = 0
        self.number = 0             #: records fed so far
        self.synced = 0             #: of them, up to the last sync
        self.files = []
        self.directories = []
        self.inodes = {}
        self.root = self._load(root)

    def _new(self, kind, inode):
        self._made += 1
        made = kind(self._made)
        self.inodes[inode] = made
        (self.files if kind is File else self.directories).append(made)
        return made

    def _load(self, path):
        directory = self._new(Directory, os.stat(path).st_ino)
        for entry in sorted(os.scandir(path), key=lambda e: e.name):
            if entry.is_dir(follow_symlinks=False):
                found = self._load(entry.path)
            else:
                found = self.inodes.get(entry.inode())
                if found is None:
                    found = self._new(File, entry.inode())
                    with open(entry.path, 'rb') as f:
                        found.durable = f.read()
                    found.data = bytearray(found.durable)
            directory.names[entry.name] = found
        directory.durable = dict(directory.names)
        return directory

    def move(self, root):
        """Refer to an equal copy in another directory from now on."""
        self.inodes = {os.stat(os.path.join(root, path)).st_ino: target
                       for path, target in self.paths()}

    # -- changes --------------------------------------------------------------

    def feed(self, made):
        """Take the next record."""
        number = self.number
        self.number += 1
        kind = made.kind
        if kind is Kind.MARK:
            return
        if kind is Kind.UNKNOWN:
            raise AssertionError(f'the journal does not know: {made}')
        if kind in (Kind.CREATE, Kind.MKDIR):
            self._new(File if kind is Kind.CREATE else Directory, made.inode)
        target = self.inodes[made.inode]
        if kind in (Kind.CREATE, Kind.MKDIR, Kind.LINK):
            self._rename(number, [(made.dir, made.name, target)])
        elif kind is Kind.UNLINK:
            self._rename(number, [(made.dir, made.name, None)])
        elif kind is Kind.RENAME:
            self._rename(number, [(made.dir, made.name, None),
                                  (made.other_dir, made.other, target)])
        elif kind is Kind.SYNC:
            target.sync()
            self.synced = self.number
        elif kind is Kind.WRITE:
            target.write(number, made.offset, made.data)
        elif kind is Kind.TRUNCATE:
            target.truncate(number, made.length)
        elif kind is Kind.ALLOCATE:
            target.allocate(number, made.length)
        else:
            target.punch(number, made.offset, made.length)

    def _rename(self, number, halves):
        halves = [(self.inodes[dir_], name, target)
                  for dir_, name, target in halves]
        event = Event(number, halves)
        for directory, name, target in halves:
            if target is None:
                directory.names.pop(name)
            else:
                directory.names[name] = target
            directory.events.setdefault(name, []).append((event, target))

    def paths(self, directory=None, path=''):
        """Yield (path, File or Directory) of all that exists now."""
        directory = directory or self.root
        yield path, directory
        for name, target in directory.names.items():
            below = f'{path}/{name}' if path else name
            if isinstance(target, Directory):
                yield from self.paths(target, below)
            else:
                yield below, target

    # -- volatile data --------------------------------------------------------

    def changed_files(self):
        return [f for f in self.files if f.changes]

    def changed_names(self):
        """Return the (Directory, name) pairs that have changed."""
        return [(d, name) for d in self.directories for name in d.events]

    # -- the crash --------------------------------------------------------

    def crash(self, choice):
        versions = self._versions(choice)
        tree = Tree()
        self._add(tree, self.root, '', choice, versions)
        return tree

    def _versions(self, choice):
        """Return the number of events of each name that happened.

        A rename that happened to one of its names happened to the other.
        """
        versions = {}
        renames = {}
        for directory, name in self.changed_names():
            events = directory.events[name]
            versions[directory, name] = choice.versions.get(
                (directory, name), len(events) if choice.names else 0)
            for place, (event, _) in enumerate(events, 1):
                if len(event.halves) > 1:
                    renames.setdefault(event, []).append(
                        ((directory, name), place))
        again = True
        while again:
            again = False
            for event, halves in renames.items():
                if event.durable or any(
                        versions[key] >= place for key, place in halves):
                    for key, place in halves:
                        if versions[key] < place:
                            versions[key] = place
                            again = True
        return versions

    def _add(self, tree, directory, path, choice, versions):
        names = dict(directory.durable)
        for name, events in directory.events.items():
            version = versions[directory, name]
            if version:
                names[name] = events[version - 1][1]
        for name in sorted(names):
            target = names[name]
            if target is None:
                continue
            below = f'{path}/{name}' if path else name
            if isinstance(target, Directory):
                tree.directories.append(below)
                self._add(tree, target, below, choice, versions)
            else:
                tree.files[below] = (target.number,
                                     self._content(target, choice))

    @staticmethod
    def _content(file, choice):
        if file in choice.contents:
            return choice.contents[file]
        if file in choice.files:
            return file.content(*choice.files[file])
        return bytes(file.data) if choice.data else file.durable
