# SPDX-License-Identifier: Apache-2.0

"""``repository check``: read a repository and judge every byte of it.

This is a second implementation of the format, written from
``doc/source/contributor/format.rst`` alone.  It shares no code with the
engine, so that a mistake of the engine's is not judged by that same mistake.

The order is: the listings, the recipes in ``images/``, those in ``spool/``,
the spare copies, then the groups, one at a time.  What a recipe names was
durable before the recipe got its name, so whatever is found later is at least
as new as what is asked of it.

The repository may be in use meanwhile.  Nothing is reported at first sight:

* a file that looks wrong is opened and read again, several times;
* before the checker calls an image damaged, it checks whether the recipe is
  still the file that it read.  It forgets an image that was deleted meanwhile,
  and reads a replaced one again, in another round.

The catalog is judged only if no maintainer is at work from beginning to end:
then nothing is removed from the spool, and every recipe that is counted is
found in ``images/`` or in the spool.  See ``catalog.py``.

*Damage* is what should not be, whatever crashed.  A *note* is everything
else worth telling: what a store operation that died left behind, files with
unknown names, modes, a poisoned group.

Memory holds one group's fingerprint store, the names in the directories, and
the findings.  All else that grows with the store goes to a scratch directory:
the extents of all recipes, by their groups, and what is known of each recipe
(``store.py``).  How a file is read is in ``format.py``.
"""

import array
import bisect
import collections
import collections.abc
import contextlib
import dataclasses
import fcntl
import functools
import heapq
import os
import re
import stat
import struct
import tempfile
import time
import typing

from glance_dedup.base import exceptions
from glance_dedup.base import hashes
from glance_dedup.check import catalog as catalog_module
from glance_dedup.check import format as form
from glance_dedup.check import store as store_module

DAMAGE = form.DAMAGE
NOTE = form.NOTE

# Findings beyond these are only counted: a hostile directory may be large.
MAX_FINDINGS = 10000
# What looks wrong is looked at this often before it is reported, with
# pauses: another process may be in the middle of writing it.
LOOKS = 4
PAUSE = 0.05
# Images that are replaced while they are read are read again so often.
ROUNDS = 4
# Of a group without a file: what is wrong, and where.
GONE = 'is missing', None
# Of a recipe in memory, and recipes that were asked for last.
PAGES_AT_ONCE = 256
OWNERS_AT_ONCE = 1 << 10

# Keys and values of what is remembered; each key begins with a letter.
OWNER_KEY = struct.Struct('>cI')        # its number
OWNER_VALUE = struct.Struct('<QQqq16sQQ')   # then directory and name
EXTENTS_KEY = struct.Struct('>cIIQ')    # group, owner, number of the first
GROUP_KEY = struct.Struct('>cI')
FILE_KEY = struct.Struct('>cQQ')        # device and inode

DIRECTORIES = ('groups', 'images', 'spool', 'locks', 'quarantine')
# The maintainer's, which may be missing.
MAINTAINERS = ('catalog', 'spares')
# Made by others that need them.
OPTIONAL = (*MAINTAINERS, hashes.DIRECTORY)
# Lists that daemons keep: their kinds, what they list, and bytes at most.
LISTS = {'cache.json': ('glance-dedup cache', 'images', 8 << 20),
         'replication.json': ('glance-dedup replication', 'images', 1 << 20),
         'tasks.json': ('glance-dedup tasks', 'tasks', 1 << 20)}
# The last is the file system's own, if it has its root here.
FILES = ('repository.json', 'key', 'fence', 'catalog-reserve',
         *(f'catalog-reserve-{i}' for i in range(1, 9)),
         *LISTS, *(f'{name}.new' for name in LISTS), 'lost+found')

# What a creation that was killed may leave beside them.
NEW_FILE = re.compile(r'\.[0-9a-f]{16}\.new\Z')


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was found.

    :ivar severity: ``'damage'`` or ``'note'``
    :ivar file: the file's name inside the repository
    :ivar offset: where in the file, in bytes; None if it is about the file
    :ivar sentence: what is wrong
    :ivar images: the ids of the images that are hit by it; they lose content
        if the report says so, and no spare copy stands in for what is damaged
    """

    severity: str
    file: str
    offset: int | None
    sentence: str
    images: tuple[str, ...] = ()

    def __str__(self):
        where = self.file
        if self.offset is not None:
            where += f', offset {self.offset}'
        return f'{self.severity}: {where}: {self.sentence}'


@dataclasses.dataclass
class Report:
    """What :func:`check` found.

    :ivar findings: all, in the order in which they were found
    :ivar figures: whole numbers by name; sizes are in bytes
    :ivar damaged_images: the sorted ids of the images that lost content
    :ivar ok: whether there is no damage; notes do not count
    """

    findings: list[Finding] = dataclasses.field(default_factory=list)
    figures: dict[str, int] = dataclasses.field(default_factory=dict)
    damaged_images: list[str] = dataclasses.field(default_factory=list)
    ok: bool = True


@dataclasses.dataclass
class _Owner:
    """A recipe whose extents are kept until their groups' turn."""

    directory: str
    name: str
    number: int
    identity: tuple = ()        # of the file that was read
    scope: bytes = form.GLOBAL_SCOPE
    extents: int = 0
    blocks: int | None = None   # None: not all of it could be read
    counted: int = 0            # extents, by the catalog

    @property
    def file(self) -> str:
        return f'{self.directory}/{self.name}'

    @property
    def image_id(self) -> str | None:
        return self.name if self.directory == 'images' else None

    def packed(self) -> bytes:
        return OWNER_VALUE.pack(
            *self.identity, self.scope, self.counted, self.extents
        ) + self.file.encode()

    @classmethod
    def unpacked(cls, key, value):
        *status, scope, counted, extents = OWNER_VALUE.unpack_from(value)
        directory, name = value[OWNER_VALUE.size:].decode().split('/')
        return cls(directory, name, OWNER_KEY.unpack(key)[1], tuple(status),
                   scope, extents, None, counted)


class _KeptExtent(typing.NamedTuple):
    owner: _Owner
    slot: int
    blocks: int
    length: int
    number: int                 # in its recipe
    digest: int

    def slots(self):
        return range(self.slot, self.slot + self.blocks)


class _Doubts(typing.NamedTuple):
    """What a look at a group makes of what recipes name of it."""

    misfits: bool               # some name something else than it has
    slots: set[int]             # that those name
    stale: set[int]             # numbers of owners that are no more


def _locked(fd: int, byte: int) -> bool:
    """Whether somebody holds a lock of any kind on this byte of a file."""
    flock = struct.Struct('@hhqqi4x')
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, flock.pack(
            fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except OSError:
        return True
    return flock.unpack(answer)[0] != fcntl.F_UNLCK


class _Duplicates:
    """Counts blocks that are stored more than once, in bounded memory.

    It keeps 8 bytes of each fingerprint: sorted runs in a temporary file,
    merged at the end.
    """

    RUN = 1 << 18
    PIECE = 1 << 16             # of a run that is in memory, at most
    PIECES = 16 << 20           # of all runs, as far as pieces of 4 KiB allow

    def __init__(self):
        self._values = array.array('Q')
        self._file: typing.IO[bytes] | None = None
        self._runs: list[tuple[int, int]] = []

    def add(self, fingerprint: bytes):
        self._values.append(int.from_bytes(fingerprint[:8], 'little'))
        if len(self._values) >= self.RUN:
            self._flush()

    def _flush(self):
        file = self._file
        if file is None:
            file = self._file = tempfile.TemporaryFile()
        run = array.array('Q', sorted(self._values)).tobytes()
        self._runs.append((file.seek(0, os.SEEK_END), len(run)))
        file.write(run)
        self._values = array.array('Q')

    def _read_run(self, file, start, length):
        fair = self.PIECES // len(self._runs) // 4096 * 4096
        size = min(self.PIECE, max(4096, fair))
        for offset in range(0, length, size):
            file.seek(start + offset)
            yield from array.array(
                'Q', file.read(min(size, length - offset)))

    def count(self) -> int:
        file = self._file
        runs = [self._read_run(file, *run) for run in self._runs]
        found, last = 0, None
        for value in heapq.merge(sorted(self._values), *runs):
            found += value == last
            last = value
        if file is not None:
            file.close()
        return found


class _Checker:
    def __init__(self, path, progress):
        self.path = os.fspath(path)
        self.progress = progress
        self.report = Report()
        self.figures = self.report.figures
        self.damaged_images: set[str] = set()
        self.repository_id: bytes | None = None
        self.parameters: dict = {}
        self.directories: dict[str, int] = {}
        self.recipes = store_module.Store()      # and their extents
        self.owners = 0
        self.owner = functools.lru_cache(OWNERS_AT_ONCE)(self.kept_owner)
        self.stale: set[int] = set()    # their names have other files, or none
        self.again: list[str] = []
        self.duplicates = _Duplicates()
        # Of good copies, the scope ids and fingerprints.
        self.spares = store_module.Store()
        # By letter: k, files that are recipes; a, those that the spool names.
        self.files = store_module.Store()
        self.fence: tuple[bytes, int] | None = None
        self.catalog: catalog_module.Catalog | None = None
        self.done = self.total = 0

    # Findings and progress

    def find(self, severity, file, offset, sentence, images=(), lost=None):
        """Report something.

        :param lost: those of the images that lose content; None: all
        """
        images = tuple(sorted(images))
        self.count(severity)
        if severity == DAMAGE:
            self.damaged_images.update(images if lost is None else lost)
        if len(self.report.findings) >= MAX_FINDINGS:
            self.figures['findings_left_off'] += 1
            return
        self.report.findings.append(
            Finding(severity, form.printable(file), offset, sentence, images))

    def count(self, severity, count=1):
        self.report.ok &= severity != DAMAGE
        self.figures['damage' if severity == DAMAGE else 'notes'] += count

    def advance(self, size, what):
        self.done += size
        if self.progress is not None:
            self.progress(min(self.done, self.total), self.total, what)

    # The whole

    def run(self) -> Report:
        for name in ('images', 'groups', 'logical_bytes', 'zero_bytes',
                     'referenced_bytes', 'stored_bytes', 'garbage_bytes',
                     'metadata_bytes', 'duplicate_blocks', 'blocks_verified',
                     'garbage_blocks', 'freed_blocks', 'damaged_blocks',
                     'spares', 'spare_bytes', 'index_records', 'index_stale',
                     'damage', 'notes', 'findings_left_off'):
            self.figures[name] = 0
        try:
            root = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY
                           | os.O_CLOEXEC)
        except FileNotFoundError:
            raise exceptions.ImageNotFound(
                f'{self.path} does not exist') from None
        except NotADirectoryError:
            raise exceptions.InvalidParameter(
                f'{self.path} is not a repository: it is not a directory'
            ) from None
        except OSError as e:
            form.refused_by_system(e, self.path)
            raise exceptions.StorageError(
                f'{self.path} cannot be opened: {e.strerror}') from e
        try:
            if not self.check_root(root):
                return self.report
            self.open_catalog(root)
            images = self.list_directory('images')
            groups = self.list_directory('groups')
            spares = self.list_directory('spares')
            self.sum_sizes('images', images)
            self.sum_sizes('groups', groups)
            self.sum_sizes('spares', spares)
            self.read_images(self.known_names(
                'images', images, form.IMAGE_NAME))
            self.check_spool()
            self.check_ledger()
            self.reader = form.GroupReader(
                self.repository_id, self.parameters.get('fingerprint'),
                self.parameters.get('block_size'), self.advance)
            numbers = self.group_numbers('groups', groups)
            self.check_spares(self.group_numbers('spares', spares), numbers)
            self.check_groups(numbers)
            self.check_again()
            self.close_catalog(root)
            self.figures['duplicate_blocks'] = self.duplicates.count()
            self.total = self.done
            self.advance(0, 'done')
        finally:
            if self.catalog is not None:
                self.catalog.close()
            for store in self.recipes, self.spares, self.files:
                store.close()
            for fd in self.directories.values():
                os.close(fd)
            os.close(root)
        self.report.damaged_images = sorted(self.damaged_images)
        return self.report

    # The repository's own files

    def check_root(self, root) -> bool:
        """Whether there is a repository to be judged."""
        try:
            names = sorted(os.listdir(root))
        except OSError as e:
            form.refused_by_system(e, self.path)
            raise exceptions.StorageError(
                f'{self.path} cannot be read: {e.strerror}') from e
        if self.is_unfinished(root, names):
            self.find(NOTE, 'repository.json', None, 'is missing, and nothing '
                      'is stored: the creation of the repository did not end; '
                      'glance-dedup repository create completes it')
            return False
        if 'repository.json' not in names and not (
                'groups' in names and 'images' in names):
            raise exceptions.InvalidParameter(
                f'{self.path} is not a repository: it has no '
                'repository.json')
        self.root = os.fstat(root)
        self.check_mode(self.root, '.', 0o700)
        self.check_parameters(root)
        self.check_key(root)
        for name in LISTS:
            self.check_list(root, name)
        for name in DIRECTORIES + OPTIONAL:
            self.open_directory(root, name)
        for name in names:
            if name not in DIRECTORIES + OPTIONAL + FILES:
                self.find(NOTE, name, None, 'has an unknown name')
        for name in self.list_directory(hashes.DIRECTORY):
            self.check_hashes(name)
        for name in self.list_directory('locks'):
            file = 'locks/' + name
            if name == 'trial':
                continue    # hosts try the directory together just now
            if name not in ('groups', 'images', 'maintainer'):
                self.find(NOTE, file, None, 'has an unknown name')
                continue
            status = self.status_of('locks', name)
            if status is not None:
                self.check_mode(status, file, 0o600)
                if status.st_size:
                    self.find(NOTE, file, None,
                              'has content; it should only carry locks')
        quarantined = len(self.list_directory('quarantine'))
        if quarantined:
            self.find(NOTE, 'quarantine', None,
                      f'{quarantined} files of damaged bytes are set aside')
        return True

    def is_unfinished(self, root, names) -> bool:
        """Whether it is what a creation leaves that was killed."""
        made = {'key', *DIRECTORIES}
        if not made.intersection(names) or any(
                name not in made and name != 'lost+found'
                and not NEW_FILE.match(name) for name in names):
            return False
        for name in set(names).intersection(DIRECTORIES) - {'locks'}:
            with contextlib.suppress(OSError):
                fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY
                             | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
                try:
                    if not os.listdir(fd):
                        continue
                finally:
                    os.close(fd)
            return False
        return True

    def open_directory(self, root, name):
        try:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                         | os.O_CLOEXEC, dir_fd=root)
        except FileNotFoundError:
            if name not in OPTIONAL:
                vital = name in ('groups', 'images', 'spool')
                self.find(DAMAGE if vital else NOTE, name, None,
                          'the directory is missing')
        except OSError as e:
            form.refused_by_system(e, os.path.join(self.path, name))
            self.find(DAMAGE, name, None,
                      f'cannot be opened as a directory: {e.strerror}')
        else:
            self.directories[name] = fd
            self.check_mode(os.fstat(fd), name, 0o700)

    def check_mode(self, status, file, mode):
        if self.root.st_mode & stat.S_IWGRP:
            mode = 0o2770 if mode == 0o700 else 0o660
        elif status.st_uid != self.root.st_uid:
            self.find(NOTE, file, None, f'belongs to uid {status.st_uid} '
                      f'instead of uid {self.root.st_uid}')
        if stat.S_IMODE(status.st_mode) != mode:
            self.find(NOTE, file, None,
                      f'has mode {stat.S_IMODE(status.st_mode):04o} instead '
                      f'of {mode:04o}')

    def check_parameters(self, root):
        try:
            with form.File(root, 'repository.json', 'repository.json') as f:
                self.check_mode(os.fstat(f.fd), f.file, 0o600)
                text = f.read(0, form.MAX_JSON + 1)
            self.parameters = form.parse_parameters(text)
        except form.Gone:
            self.find(DAMAGE, 'repository.json', None, 'is missing')
        except form.Damage as e:
            self.find(DAMAGE, 'repository.json', e.offset, e.sentence)
        else:
            self.repository_id = bytes.fromhex(
                self.parameters['repository_id'])
            name = self.parameters['fingerprint']
            if form.digest_of(name) is None:
                raise exceptions.InvalidParameter(
                    f"the repository's fingerprints are by "
                    f'{form.printable(name)}, a digest unknown here')

    def check_key(self, root):
        try:
            with form.File(root, 'key', 'key') as f:
                self.check_mode(os.fstat(f.fd), 'key', 0o600)
                text = f.read(0, form.KEY_LENGTH + 1)
        except form.Gone:
            self.find(DAMAGE, 'key', None, 'is missing')
        except form.Damage as e:
            self.find(DAMAGE, 'key', e.offset, e.sentence)
        else:
            digits = text[:64]
            if not re.fullmatch(rb'[0-9a-f]{64}', digits) or (
                    text != b'%b %016x\n' % (digits, form.xxh3(digits))):
                self.find(DAMAGE, 'key', None, 'is not 64 hexadecimal '
                          'digits, their checksum and a newline')

    def check_list(self, root, name):
        """No image is worse for it, if it is no good."""
        kind, what, longest = LISTS[name]
        try:
            with form.File(root, name, name) as f:
                self.check_mode(os.fstat(f.fd), name, 0o600)
                form.check_list(f.read(0, longest + 1), kind, what, longest)
        except form.Gone:
            pass
        except form.Damage as e:
            self.find(NOTE, name, e.offset, e.sentence)

    def check_hashes(self, name):
        """What is damaged counts as absent."""
        file = f'{hashes.DIRECTORY}/{name}'
        try:
            with form.File(self.directories[hashes.DIRECTORY], name,
                           file) as f:
                self.check_mode(os.fstat(f.fd), file, 0o600)
                hashes.decode(f.read(0, hashes.LARGEST + 1))
        except form.Gone:
            pass
        except form.Damage as e:
            self.find(NOTE, file, e.offset, e.sentence)
        except ValueError as e:
            self.find(NOTE, file, None, f'counts as absent: {e}')

    # The catalog

    def read_fence(self, root) -> bytes | None:
        try:
            with form.File(root, 'fence', 'fence') as f:
                self.check_mode(os.fstat(f.fd), 'fence', 0o600)
                return f.read(0, 2 * form.SECTOR + 1)
        except form.Gone:
            return None
        except form.Damage as e:
            self.find(DAMAGE, 'fence', e.offset, e.sentence)
            return None

    def maintained(self) -> bool:
        """Whether somebody is the maintainer now."""
        try:
            with form.File(self.directories['locks'], 'maintainer',
                           'locks/maintainer') as f:
                return _locked(f.fd, 0)
        except (KeyError, form.Gone, form.Damage):
            return False

    def open_catalog(self, root):
        self.fenced = self.read_fence(root)
        if self.fenced is not None:
            self.fence, problems = form.parse_fence(self.fenced)
            for p in problems:
                self.find(p.severity, 'fence', p.offset, p.sentence)
        if 'catalog' not in self.directories:
            if self.fenced is not None:
                self.find(NOTE, 'catalog', None, 'is missing: the next '
                          'maintainer makes it anew')
            return
        try:
            if self.maintained():
                raise catalog_module.InUse()
            self.catalog = catalog_module.Catalog(
                self.directories['catalog'], self.repository_id, self.fence)
        except catalog_module.InUse:
            self.catalog_in_use()
        except OSError as e:
            self.find(NOTE, 'catalog', None, 'was not looked at: it cannot '
                      f'be copied: {e.strerror}')

    def catalog_in_use(self):
        self.find(NOTE, 'catalog', None,
                  'is in use by a maintainer, and was not looked at')

    def check_ledger(self):
        if self.catalog is None:
            return
        self.catalog.check_ledger(
            owner.file for owner in self.all_owners()
            if owner.image_id is not None
            and owner.counted < max(1, owner.extents)
            and FILE_KEY.pack(b'a', *owner.identity[:2]) not in self.files
            and self.identity_of(owner) == owner.identity)

    def close_catalog(self, root):
        catalog = self.catalog
        if catalog is None:
            return
        catalog.judge_others()
        catalog.judge_index()
        catalog.check_keys()
        if self.maintained() or catalog.changed() or (
                self.read_fence(root) != self.fenced):
            self.catalog_in_use()
            return
        for finding in catalog.findings:
            self.find(*finding)
        for severity, count in catalog.left_off.items():
            self.count(severity, count)
            self.figures['findings_left_off'] += count
        self.figures['index_records'] = catalog.records
        self.figures['index_stale'] = catalog.records - catalog.matched

    def list_directory(self, name) -> list[str]:
        if name not in self.directories:
            return []
        try:
            return sorted(os.listdir(self.directories[name]))
        except OSError as e:
            form.refused_by_system(e, os.path.join(self.path, name))
            self.find(DAMAGE, name, None,
                      f'cannot be listed: {e.strerror}')
            return []

    def status_of(self, directory, name) -> os.stat_result | None:
        try:
            return os.stat(name, dir_fd=self.directories[directory],
                           follow_symlinks=False)
        except OSError:
            return None

    def identity_of(self, owner) -> tuple | None:
        status = self.status_of(owner.directory, owner.name)
        return None if status is None else form.identity(status)

    def sum_sizes(self, directory, names):
        for name in names:
            status = self.status_of(directory, name)
            if status is not None and stat.S_ISREG(status.st_mode):
                self.total += status.st_size

    def known_names(self, directory, names, pattern) -> list[str]:
        known = []
        for name in names:
            file = f'{directory}/{name}'
            if not pattern.match(name):
                self.find(NOTE, file, None, 'has an unknown name')
                continue
            known.append(name)
            status = self.status_of(directory, name)
            if status is not None and stat.S_ISREG(status.st_mode):
                self.check_mode(status, file, 0o600)
        return known

    def group_numbers(self, directory, names) -> list[int]:
        numbers = []
        for name in self.known_names(directory, names, form.GROUP_NAME):
            if 1 <= int(name, 16) < form.MAX_GROUP:
                numbers.append(int(name, 16))
            else:
                self.find(NOTE, f'{directory}/{name}', None,
                          'has an unknown name')
        return numbers

    # Recipes

    def read_images(self, names, again=False):
        for name in names:
            owner = _Owner('images', name, self.owners)
            header = None
            try:
                header = self.read_owner('images', name, owner)
            except form.Gone:
                continue
            except form.Damage as e:
                self.find(DAMAGE, owner.file, e.offset, e.sentence, [name])
                self.counts_unknown()
            if again:
                continue
            self.figures['images'] += 1
            if header is not None:
                self.figures['logical_bytes'] += header.size
                self.figures['zero_bytes'] += header.zero_bytes
                self.figures['metadata_bytes'] += header.file_size

    def read_owner(self, directory, name, owner) -> form.RecipeHeader:
        """Read a recipe and keep its extents.

        The extents before a damaged place are kept, too: their blocks are
        named all the same.
        """
        looks = LOOKS
        while True:
            looks -= 1
            # Of a look that failed the extents are nobody's.
            owner.number, self.owners = self.owners, self.owners + 1
            header = None
            try:
                with form.File(self.directories[directory], name,
                               owner.file) as f:
                    owner.identity = f.identity
                    header = self.read_header(f, directory, name)
                    owner.scope, owner.extents = header.scope, header.extents
                    self.read_extents(f, header, owner)
            except form.Damage:
                if not looks:
                    self.keep(owner, header)
                    raise
                time.sleep(PAUSE)
            else:
                self.keep(owner, header)
                return header

    def counts_unknown(self):
        """A recipe that may be counted names what nobody knows."""
        if self.catalog is not None:
            self.catalog.exact = False

    def keep(self, owner, header):
        if owner.identity:
            self.files.put(FILE_KEY.pack(b'k', *owner.identity[:2]))
        if header is None:
            return
        if self.catalog is not None:
            # None from a catalog that can be read no more.
            owner.counted = self.catalog.meet(
                header, owner.blocks, owner.file) or 0
            if owner.image_id is not None:
                _, inode, _, modified = owner.identity
                self.catalog.meet_file(owner.image_id, inode, modified,
                                       header, owner.file)
        self.recipes.put(OWNER_KEY.pack(b'o', owner.number), owner.packed())

    def all_owners(self) -> collections.abc.Iterator[_Owner]:
        for key, value in self.recipes.items(b'o'):
            yield _Owner.unpacked(key, value)

    def kept_owner(self, number) -> _Owner | None:
        key = OWNER_KEY.pack(b'o', number)
        value = self.recipes.get(key)
        return None if value is None else _Owner.unpacked(key, value)

    def read_header(self, f, directory, name) -> form.RecipeHeader:
        header = form.parse_recipe_header(
            f.read(0, form.PAGE), f.size(), self.repository_id)
        if directory == 'images' and header.image_id != name:
            raise form.Damage(f'is the recipe of image {header.image_id}', 144)
        if name[:2] in ('T-', 'M-') and directory == 'spool' and (
                name[2:] != header.transaction.hex()):
            raise form.Damage('has the transaction id '
                              f'{header.transaction.hex()}', 48)
        return header

    def read_extents(self, f, header, owner):
        """Keep them, and fill in the blocks, as far as all verifies."""
        extents: dict[int, bytearray] = {}
        judge = form.ExtentJudge(header, extents)
        pages = -(-header.extents // form.EXTENTS_PER_PAGE)
        page = 0
        try:
            for page in range(1, pages + 1):
                judge.read_page(
                    page, f.read_ahead(page * form.PAGE, form.PAGE))
                if not page % PAGES_AT_ONCE:
                    self.keep_extents(owner, page, extents)
                    self.advance(PAGES_AT_ONCE * form.PAGE, f.file)
        finally:
            self.keep_extents(owner, page, extents)
        judge.finish()
        owner.blocks = judge.blocks
        if judge.fragments != header.fragments:
            # For people only: nothing depends on it.
            self.find(NOTE, f.file, 120, f'has {judge.fragments} fragments '
                      f'instead of {header.fragments}')
        self.advance((pages % PAGES_AT_ONCE + 1) * form.PAGE, f.file)

    def keep_extents(self, owner, page, extents):
        for group, records in extents.items():
            self.recipes.put(EXTENTS_KEY.pack(
                b'e', group, owner.number, page), bytes(records))
        extents.clear()

    # The spool

    def check_spool(self):
        # In this order the recipe of a deleted image is met by its name
        # ``D-`` before it is met by that of the operation that stored it.
        for name in self.known_names(
                'spool', self.list_directory('spool'), form.SPOOL_NAME):
            for look in range(LOOKS):
                complete, sentence = self.look_at_spool(name)
                if sentence is None:
                    break
                if look < LOOKS - 1:
                    time.sleep(PAUSE)
            if complete:
                sentence = self.check_spooled_recipe(name)
            if sentence is not None:
                self.find(NOTE, f'spool/{name}', None, sentence)

    def look_at_spool(self, name) -> tuple[bool, str | None]:
        """Whether it is a recipe to be read; what there is to be said."""
        try:
            with form.File(self.directories['spool'], name,
                           f'spool/{name}') as f:
                self.files.put(FILE_KEY.pack(b'a', *f.identity[:2]))
                if name[0] not in 'DO' and _locked(f.fd, 0):
                    return False, None
                if name[0] == 'X':
                    return False, 'is what an exchange left'
                if FILE_KEY.pack(b'k', *f.identity[:2]) in self.files:
                    return False, None
                if name[0] == 'G':
                    return False, 'is a group that was never finished'
                if f.size() < form.PAGE or (
                        f.read(0, form.PAGE) == form.PAGE_ZEROS):
                    return False, 'is of a store operation that died'
                return True, None
        except form.Gone:
            return False, None
        except form.Damage as e:
            return False, e.sentence

    def check_spooled_recipe(self, name) -> str | None:
        owner = _Owner('spool', name, self.owners)
        try:
            header = self.read_owner('spool', name, owner)
        except form.Gone:
            return None
        except form.Damage as e:
            # Accounting needs what was an image's, and what it counted;
            # nobody needs the rest.
            needed = name[0] in 'DO' or owner.counted or (
                self.catalog is not None
                and self.catalog.lacks(bytes.fromhex(name[2:])))
            self.find(DAMAGE if needed else NOTE, owner.file, e.offset,
                      e.sentence)
            if needed:
                self.counts_unknown()
            return None
        if 'images' in self.directories:
            image = self.status_of('images', header.image_id)
            if image is not None and form.identity(image) == owner.identity:
                return None     # committed after the listing was taken
        self.figures['metadata_bytes'] += header.file_size
        if name[0] in 'TM':
            return 'is a recipe that no image uses'
        return None

    # Spare copies

    def check_spares(self, numbers, groups):
        if numbers:
            self.reader.scopes = self.known_scopes(groups)
        for number in numbers:
            file = f'spares/{number:08x}'
            group, failure = None, None
            for look in range(LOOKS):
                failure = None
                try:
                    group = self.reader.look(
                        self.directories['spares'], number, spare=True)
                    if not group.problems:
                        break
                except form.Gone:
                    break
                except form.Damage as e:
                    failure = e
                if look < LOOKS - 1:
                    time.sleep(PAUSE)
            if failure is not None:
                self.find(DAMAGE, file, failure.offset, failure.sentence)
            elif group is not None:
                self.report_problems(group, file, [], False)
                if not group.tells:
                    self.find(NOTE, file, None, 'is never read: other blocks '
                              'can have the fingerprints of these')
                self.add_spares(group)

    def known_scopes(self, groups) -> list[bytes]:
        """All that recipes and groups are of, the commonest first."""
        found = collections.Counter({form.GLOBAL_SCOPE: 1})
        found.update(owner.scope for owner in self.all_owners())
        for number in groups:
            # What is wrong with the group is found when it is its turn.
            with contextlib.suppress(form.Gone, form.Damage):
                found[self.reader.scope_of_group(
                    self.directories['groups'], number)] += 1
        return [scope for scope, _ in found.most_common()]

    def add_spares(self, group):
        self.figures['spare_bytes'] += group.size
        for slot, state in enumerate(group.states):
            if state == form.GOOD:
                self.figures['spares'] += 1
                self.spares.put(
                    group.scopes[slot] + group.fingerprint(slot))

    # Groups

    def check_groups(self, numbers):
        for number in numbers:
            self.check_group(number)
        for number in self.named_groups():
            i = bisect.bisect_left(numbers, number)
            if numbers[i:i + 1] != [number]:
                self.check_group(number)

    def named_groups(self) -> collections.abc.Iterator[int]:
        number: int | None = 0
        while number is not None:
            start = GROUP_KEY.pack(b'e', number)
            number = None
            with contextlib.closing(self.recipes.items(b'e', start)) as found:
                for key, _ in found:
                    _, number = GROUP_KEY.unpack_from(key)
                    break
            if number is not None:
                yield number
                number += 1

    def check_again(self):
        """Judge the images that were replaced while they were read."""
        catalog, self.catalog = self.catalog, None  # it has met them before
        for _ in range(ROUNDS):
            names, self.again = sorted(set(self.again)), []
            if not names:
                break
            self.recipes.close()
            self.owner.cache_clear()
            self.stale.clear()
            self.read_images(names, again=True)
            for number in self.named_groups():
                self.check_group(number, again=True)
        self.catalog = catalog
        for name in sorted(set(self.again)):
            self.find(NOTE, f'images/{name}', None,
                      'was replaced again and again while it was read')

    def is_stale(self, owner) -> bool:
        """Whether the recipe has lost its name, or lent it to another."""
        if owner.number not in self.stale:
            found = self.identity_of(owner)
            if found != owner.identity:
                self.stale.add(owner.number)
                if found is not None and owner.image_id is not None:
                    self.again.append(owner.name)
        return owner.number in self.stale

    def named(self, number, stale=frozenset()
              ) -> collections.abc.Iterator[_KeptExtent]:
        """All that recipes name of a group, but for some owners."""
        for key, value in self.recipes.items(GROUP_KEY.pack(b'e', number)):
            _, _, whose, _ = EXTENTS_KEY.unpack(key)
            owner = None if whose in stale else self.owner(whose)
            if owner is not None:
                for fields in form.KEPT_EXTENT.iter_unpack(value):
                    yield _KeptExtent(owner, *fields)

    def doubts(self, number, group, stale) -> _Doubts:
        """Ask whether what looks wrong is asked for any more.

        :param group: None if it could not be read
        :param stale: numbers of owners to leave out
        """
        found = _Doubts(self.any_misfits(number, group, stale), set(), set())
        asked = None
        if group is not None and not found.misfits and not group.problems:
            return found
        for e in self.named(number, stale):
            if group is not None:
                if self.misfit(group, e)[0] is not None:
                    found.slots.update(e.slots())
                elif not self.lost(group, e):
                    continue
            if e.owner.number != asked:
                asked = e.owner.number
                if self.is_stale(e.owner):
                    found.stale.add(asked)
        return found

    def any_misfits(self, number, group, stale) -> bool:
        return group is not None and any(
            self.misfit(group, e)[0] is not None
            for e in self.named(number, stale))

    def check_group(self, number, again=False):
        """Judge a group, and all that recipes name of it."""
        file = f'groups/{number:08x}'
        slots = None            # those to look at; None: all
        if again:
            slots = {slot for e in self.named(number) for slot in e.slots()}
        first = None            # the first look that had a valid header
        stale: set[int] = set()
        for look in range(LOOKS):
            group: form.Group | None = None
            failure: tuple[str, int | None] = GONE
            try:
                group = self.look_at_group(number, slots)
            except form.Gone:
                pass
            except form.Damage as e:
                failure = e.sentence, e.offset
            first = first or group
            doubts = self.doubts(number, group, stale)
            if group is not None and (
                    not doubts.misfits and not group.problems):
                break
            stale |= doubts.stale
            if look == LOOKS - 1:
                break
            if group is not None:
                slots = doubts.slots | group.doubtful
                for p in group.problems:
                    slots.update(range(p.slot, p.slot + p.slots))
            elif failure == GONE and not any(self.named(number, stale)):
                break           # no recipe asks for it any more
            time.sleep(PAUSE)
        if first is not None and self.catalog is not None:
            self.judge_catalog(self.catalog, first, self.named(number))
        if group is None:
            if failure == GONE and not any(self.named(number, stale)):
                return
            images = self.images_of(self.named(number, stale))
            self.find(NOTE if failure == GONE and not images else DAMAGE,
                      file, failure[1], failure[0], images)
        else:
            if group.problems:
                self.report_problems(group, file, self.named(number, stale),
                                     again)
            if doubts.misfits:
                self.report_misfits(group, file, self.named(number, stale))
        if first is not None and not again:
            self.add_figures(first, self.named(number, stale))

    def judge_catalog(self, catalog, group, extents):
        """Compare what the catalog says of a group with the recipes."""
        changes: dict[int, int] = {}
        named = bytearray(group.slots)
        for e in extents:
            end = min(e.slot + e.blocks, group.slots)
            named[e.slot:end] = b'\1' * max(0, end - e.slot)
            if e.number < e.owner.counted:
                for slot, change in ((e.slot, 1), (e.slot + e.blocks, -1)):
                    changes[slot] = changes.get(slot, 0) + change
        catalog.judge_group(group, changes, named)

    def look_at_group(self, number, slots) -> form.Group:
        if 'groups' not in self.directories:
            raise form.Gone()
        return self.reader.look(self.directories['groups'], number, slots)

    def images_of(self, extents) -> set[str]:
        images = {e.owner.image_id for e in extents}
        images.discard(None)
        return images

    def report_problems(self, group, file, extents, again):
        at: dict[int, list[int]] = {}       # problems by slot
        for number, p in enumerate(group.problems):
            for slot in range(p.slot, p.slot + p.slots):
                at.setdefault(slot, []).append(number)
        hit: list[set[str]] = [set() for _ in group.problems]
        bereft: list[set[str]] = [set() for _ in group.problems]
        for e in extents:
            if e.owner.image_id is None or not group.hits(e):
                continue
            lost = self.lost(group, e)
            for number in {n for slot in e.slots() for n in at.get(slot, ())}:
                hit[number].add(e.owner.image_id)
                if lost:
                    bereft[number].add(e.owner.image_id)
        for p, images, losing in zip(group.problems, hit, bereft):
            severity = p.severity
            if severity is None:
                severity = DAMAGE if (
                    losing or p.slot < group.published) else NOTE
            if images or not again:
                self.find(severity, file, p.offset, p.sentence, images,
                          losing)

    def report_misfits(self, group, file, extents):
        for e in extents:
            sentence, severity = self.misfit(group, e)
            if sentence is None:
                continue
            owner = e.owner
            page, place = divmod(e.number, form.EXTENTS_PER_PAGE)
            self.find(
                NOTE if owner.image_id is None else severity, owner.file,
                (page + 1) * form.PAGE + 8 + form.EXTENT * place,
                f'extent {e.number} names {e.blocks} blocks of {file} from '
                f'slot {e.slot}, but {sentence}',
                [] if owner.image_id is None else [owner.image_id])

    def add_figures(self, group, extents):
        figures = self.figures
        named, used = bytearray(group.slots), bytearray(group.slots)
        for e in extents:
            end = min(e.slot + e.blocks, group.slots)
            ones = b'\1' * max(0, end - e.slot)
            named[e.slot:end] = ones
            if e.owner.image_id is not None:
                used[e.slot:end] = ones
        figures['groups'] += 1
        figures['freed_blocks'] += group.freed
        figures['damaged_blocks'] += group.damaged
        figures['metadata_bytes'] += min(group.data, group.size)
        figures['stored_bytes'] += group.stored
        figures['garbage_bytes'] += max(
            0, group.size - group.data - group.covered)
        for slot, state in enumerate(group.states):
            if state == form.GOOD:
                figures['blocks_verified'] += 1
                self.duplicates.add(group.fingerprint(slot))
                figures['garbage_blocks'] += not named[slot]
                if used[slot]:
                    figures['referenced_bytes'] += group.lengths[slot]

    def lost(self, group, e) -> bool:
        """Whether it names a bad block that no spare copy stands in for."""
        return group.hits(e) and any(
            group.states[slot] == form.BAD
            and not group.has_spare(slot, self.spares)
            for slot in range(e.slot, min(e.slot + e.blocks, group.slots)))

    def misfit(self, group, e) -> tuple[str | None, str]:
        """What an extent names that its group has not; and how bad it is."""
        states = group.states[e.slot:e.slot + e.blocks]
        end = e.slot + e.blocks
        if end > group.slots:
            return f'the group has only {group.slots} slots', DAMAGE
        if group.scope != e.owner.scope:
            return 'the group has blocks of another scope', DAMAGE
        marked, lost = None, False
        for slot, state in enumerate(states, e.slot) if (
                states.count(form.GOOD) != e.blocks) else ():
            if state in (form.DAMAGED, form.BAD) and (
                    group.has_spare(slot, self.spares)):
                marked = slot if state == form.DAMAGED else marked
            elif state == form.BAD:
                lost = True     # a finding of its group's
            elif state != form.GOOD:
                return (f'slot {slot} is {form.STATE_NAMES[state]}', DAMAGE)
        if lost:
            return None, NOTE
        # A damaged entry keeps its fields.
        if sum(group.lengths[e.slot:end]) != e.length:
            return 'their lengths do not add up to its own', DAMAGE
        if form.xxh3(group.fingerprints[
                32 * e.slot:32 * end]) != e.digest:
            return 'these are not the blocks that it was made of', DAMAGE
        if marked is not None:
            return (f'slot {marked} is marked as damaged; a spare copy '
                    'stands in for it'), NOTE
        return None, NOTE


def check(path, progress: typing.Callable[[int, int, str], None] | None
          = None) -> Report:
    """Read everything in a repository and judge it.

    The repository may be in use.  Nothing in it is changed, and no lock is
    held.

    :param path: the repository's directory
    :param progress: called now and then with the bytes read, the bytes that
        there are to read, and the name of the file
    :raises ImageNotFound: if there is no such directory
    :raises InvalidParameter: if it is not a repository
    :raises VersionError: if its format has a newer major version
    :raises AccessDenied: if the system refuses to let it be read
    :raises StorageError: if the system is short of descriptors or memory
    """
    return _Checker(path, progress).run()
