# SPDX-License-Identifier: Apache-2.0

"""The volumes: the directories in ``volumes/``, and their recipes.

Written from ``format-volumes.rst`` alone; see ``checker.py``.
``volume_reader.py`` reads one journal. The extents of the recipes are judged
with those of images.

An owner changes a volume's journals and recipes while they are read. So each
volume is read several times if it looks wrong, and only problems that every
reading found are reported. Files that an owner has yet to remove are noted
only if there is no owner.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import os
import stat
import struct

from glance_dedup.base import closing
from glance_dedup.check import files
from glance_dedup.check import locks
from glance_dedup.check import ondisk
from glance_dedup.check import recipe_reader
from glance_dedup.check import record_table
from glance_dedup.check import repo_directories
from glance_dedup.check import volume_reader

_OPENING = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW

# A mark as it is remembered: part, edition.
_PART = struct.Struct('>Q')

#: Severity, file, offset, sentence.
Finding = tuple[str, str, int | None, str]


class _Look:
    """One reading of a volume.

    :ivar findings: problems, in the order in which they were found
    :ivar volume_id: 32 hexadecimal digits; None: it is not known
    :ivar owned: whether the volume had an owner
    """

    def __init__(self, judge: 'Volumes', name: str, fd: int) -> None:
        self._judge = judge
        self._name = name
        self._fd = fd
        self._advance = judge.directories.findings.advance
        self._repository_id = judge.repository_id
        self._marks = judge.marks
        self._marks.close()
        self.findings: list[Finding] = []
        self.volume_id: str | None = None
        self.owned = self._is_owned()
        self._heads: dict[int, volume_reader.Head] = {}
        self._is_stored = False     # of the journals before the newest
        self._is_proven = False     # that those before were durable in full
        self._is_torn = False       # one that is needed; later ones are void

    def run(self) -> None:
        """Judge the journals, then the recipes."""
        names = sorted(os.listdir(self._fd))
        matches = map(volume_reader.JOURNAL_NAME.match, names)
        # They are sorted, as all have 8 digits.
        numbers = [*filter(None, (int(m[1], 16) for m in matches if m))]
        if not numbers:
            self._unowned('', 'has no journal: it was being made or deleted, '
                          'and the next collection removes it')
            return
        newest = numbers[-1]
        head = self._read_head(newest)
        if head is None:
            return
        self.volume_id = head.volume_id.hex()
        if head.state != volume_reader.READY:
            what = ('making' if head.state == volume_reader.MAKING
                    else 'deleting')
            self._unowned('', f'is in the state {what}, and nobody is at '
                          'it: the next collection removes it')
            return
        # First, for it may make the others superfluous.
        is_known = self._read_journal(newest, self._keep_mark)
        first = newest if self._is_stored else head.needed
        for number in numbers:
            if number < first:
                self._unowned(self._journal(number), 'is not needed any more: '
                              'the next owner removes it')
        self._note_new_files(names)
        needed = [number for number in numbers if number >= first]
        self._check_chain(head, first, needed)
        for number in reversed(needed[:-1]):
            self._read_journal(number)
        if self._is_torn:
            self._marks.close()
            is_known &= self._read_marks(newest)
        # Otherwise it is unknown which editions the volume needs.
        if is_known:
            self._check_recipes(head)

    # -- findings ----------------------------------------------------------

    def _damage(self, file: str, offset: int | None, sentence: str) -> None:
        self.findings.append((
            ondisk.DAMAGE, file, offset,
            f'{sentence}; volume {self._name} cannot be used until the file '
            'is restored from a backup; without one, delete the volume'))

    def _unowned(self, file: str, sentence: str) -> None:
        """Note something that only an owner may leave as it is."""
        if not self.owned:
            file = file or f'volumes/{self._name}'
            self.findings.append((ondisk.NOTE, file, None, sentence))

    def _journal(self, number: int) -> str:
        return f'volumes/{self._name}/journal-{number:08x}'

    # -- the directory -----------------------------------------------------

    def _is_owned(self) -> bool:
        try:
            with files.File(self._fd, 'lock', f'volumes/{self._name}/lock'
                            ) as f:
                return locks.is_locked(f.fd, 0)
        except OSError:
            return True     # perhaps: concurrent change is no damage
        except (files.Gone, ondisk.Damage):
            return False

    def _open(self, number: int) -> files.File:
        file = self._journal(number)
        return files.File(self._fd, os.path.basename(file), file)

    @contextlib.contextmanager
    def _noting(self, number: int) -> Iterator[None]:
        """Turn a journal's problem into a finding."""
        file = self._journal(number)
        try:
            yield
        except files.Gone:
            self._damage(file, None, 'is missing')
        except ondisk.Damage as e:
            self._damage(file, e.offset, e.sentence)

    def _note_new_files(self, names: list[str]) -> None:
        for name in names:
            if name.startswith('journal.new'):
                with contextlib.suppress(OSError):
                    size = os.stat(name, dir_fd=self._fd,
                                   follow_symlinks=False).st_size
                    self._unowned(
                        f'volumes/{self._name}/{name}', f'has {size} bytes, '
                        'and is not needed any more: the next owner removes '
                        'it')

    # -- journals ----------------------------------------------------------

    def _read_head(self, number: int) -> volume_reader.Head | None:
        head = None
        with self._noting(number), self._open(number) as f:
            head = self._heads[number] = volume_reader.parse_head(
                f.read(0, volume_reader.HEAD), number, self._repository_id)
        return head

    def _check_chain(self, newest: volume_reader.Head, first: int,
                     needed: list[int]
                     ) -> None:
        """Judge whether the needed journals are there, and of one volume."""
        expected = range(first, newest.number + 1)
        for number, there in zip(expected, needed):
            if number != there:
                missing = len(expected) - len(needed)
                self._damage(self._journal(number), None, 'is missing' + (
                    f', as are {missing - 1} later ones' if missing > 1
                    else ''))
                break
        for number in needed[:-1]:
            head = self._read_head(number)
            if head is None:
                continue
            for what, offset, its, theirs in (
                    ('is of another volume than the newest journal', 32,
                     head.volume_id, newest.volume_id),
                    ('has another scope than the newest journal', 48,
                     head.scope, newest.scope),
                    ('has parts of another size than the newest journal', 88,
                     head.part_size, newest.part_size)):
                if its != theirs:
                    self._damage(self._journal(number), offset, what)
            if head.needed > first:
                self._damage(
                    self._journal(number), 100, 'needs no journal before '
                    f'{head.needed}, but the newest one needs {first}')

    def _read_journal(self, number: int,
                      found: Callable[[int, int], None]
                      = lambda part, edition: None) -> bool:
        """Read marks and records; return whether all is well.

        :param found: called with part and edition of each mark
        """
        head = self._heads.get(number)
        if head is None:
            return False
        follower = self._heads.get(number + 1)
        limit = None if follower is None else follower.before or None
        with self._noting(number), self._open(number) as f:
            journal = volume_reader.JournalReader(f, head, found,
                                                  self._advance)
            journal.read_marks()
            journal.read_records(limit)
            if follower is None:
                self._is_stored = journal.is_stored
            if limit is not None and follower is not None:
                needed = limit if self._is_proven else follower.before_durable
                if journal.end < needed or journal.end > limit:
                    raise ondisk.Damage(
                        f'has valid records up to here, and journal '
                        f'{number + 1} needs them up to {needed}: '
                        'writes are lost', journal.end)
                self._is_torn |= journal.end < limit
            proof = journal.proof() if journal.end != limit else None
            if proof is not None:
                raise ondisk.Damage(
                    'has no valid record here, but the record at '
                    f'{proof} says that it was durable: writes that '
                    'were acknowledged are lost', journal.end)
            self._is_proven |= journal.proves_earlier()
            return True
        return False

    def _read_marks(self, number: int) -> bool:
        """Keep the marks of a journal's head; return whether all is well."""
        with self._noting(number), self._open(number) as f:
            volume_reader.JournalReader(
                f, self._heads[number], self._keep_mark, self._advance
            ).read_marks()
            return True
        return False

    def _keep_mark(self, part: int, edition: int) -> None:
        self._marks.put(_PART.pack(part), _PART.pack(edition))

    # -- recipes -----------------------------------------------------------

    def _check_recipes(self, head: volume_reader.Head) -> None:
        used = set()
        before = len(self.findings)
        if head.base_size:
            name = f'v_{self.volume_id}_base_0'
            used.add(name)
            header = self._read_recipe(name, 'the base', head)
            if header is not None and header.size < head.base_size:
                self._damage(
                    f'images/{name}', 80, f'has {header.size} bytes, and the '
                    f'base has {head.base_size}')
        for key, value in self._marks.items(b''):
            (part,), (edition,) = _PART.unpack(key), _PART.unpack(value)
            name = f'v_{self.volume_id}_{part}_{edition}'
            used.add(name)
            header = self._read_recipe(name, f'part {part}', head)
            # The last part may have been longer before the volume was shrunk.
            if header is not None and header.size > head.part_size:
                self._damage(f'images/{name}', 80, f'has {header.size} bytes, '
                             f'and a part has {head.part_size}')
        if len(self.findings) == before:
            for name in self._judge.recipes_of(self.volume_id):
                if name not in used and self._judge.exists(name):
                    self._unowned(
                        f'images/{name}', f'is a recipe of volume '
                        f'{self._name} without a mark: the next owner removes '
                        'it')

    def _read_recipe(self, name: str, what: str, head: volume_reader.Head
                     ) -> recipe_reader.RecipeHeader | None:
        """The header of a recipe that the volume needs."""
        file = f'images/{name}'
        try:
            with files.File(self._judge.directories['images'], name, file
                            ) as f:
                header = recipe_reader.parse_header(
                    f.read(0, ondisk.PAGE), f.size(), self._repository_id)
        except (KeyError, files.Gone):
            self._damage(file, None, f'is missing: it has {what}')
            return None
        except ondisk.Damage as e:
            # The listed ones were read, and reported, before.
            if not self._judge.was_listed(name):
                self._damage(file, e.offset, e.sentence)
            return None
        if header.scope != head.scope:
            self._damage(file, 32, f'has another scope than volume '
                         f'{self._name}')
        return header


class Volumes:
    """Judges all volumes.

    :param images: the names in ``images/``, listed before
    :ivar marks: editions by their parts, of the volume that is looked at
    """

    def __init__(self, directories: repo_directories.Directories,
                 repository_id: bytes | None, images: list[str]) -> None:
        self.directories = directories
        self.repository_id = repository_id
        self.marks = record_table.RecordTable()
        self._findings = directories.findings
        self._recipes: dict[str, set[str]] = {}
        for name in images:
            match = ondisk.VOLUME_RECIPE.match(name)
            if match is not None:
                self._recipes.setdefault(match[1], set()).add(name)
        self._unknown = False   # a volume's id is not known

    def close(self) -> None:
        """Forget everything."""
        self.marks.close()

    def recipes_of(self, volume_id: str | None) -> list[str]:
        """The recipes of a volume that were listed, sorted."""
        return sorted(self._recipes.get(volume_id or '', ()))

    def was_listed(self, recipe: str) -> bool:
        """Return whether the listing of images had a volume's recipe."""
        return recipe in self._recipes.get(recipe[2:34], ())

    def exists(self, recipe: str) -> bool:
        """Return whether a recipe is there now."""
        return ('images' in self.directories and self.directories.status_now(
            'images', recipe) is not None)

    def check(self) -> None:
        """Report the problems of the volumes and their recipes."""
        seen: set[str] = set()
        # One that was renamed meanwhile is in the next list.
        while names := sorted({*self.directories.names('volumes')} - seen):
            seen.update(names)
            for name in names:
                self._require_name(name)
        self._check_others()

    def _require_name(self, name: str) -> None:
        file = f'volumes/{name}'
        try:
            fd = os.open(name, _OPENING, dir_fd=self.directories['volumes'])
        except FileNotFoundError:
            return              # it was deleted or renamed meanwhile
        except OSError as e:
            files.refused_by_system(e, file)
            self._findings.find(ondisk.NOTE, file, None,
                                f'is no directory of a volume: {e.strerror}')
            return
        with closing.descriptor(fd):
            if volume_reader.NAME.match(name):
                try:
                    self._check_volume(name, fd)
                except OSError as e:
                    if not files.is_forgotten(e):
                        raise
                    # Another host deleted it meanwhile.
                    self._findings.figures['volumes'] -= 1
            else:
                self._findings.find(ondisk.NOTE, file, None,
                                    'has an unknown name')

    def _check_volume(self, name: str, fd: int) -> None:
        figures = self._findings.figures
        figures['volumes'] += 1
        size = self._check_names(name, fd)
        figures['journal_bytes'] += size
        self._findings.total += size
        suspects: list[Finding] | None = None
        for _ in files.looks():
            look = _Look(self, name, fd)
            look.run()
            found = set(look.findings)
            suspects = (look.findings if suspects is None
                        else [s for s in suspects if s in found])
            if not suspects:
                break
        if not os.fstat(fd).st_nlink:
            figures['volumes'] -= 1
            return              # it was deleted meanwhile
        figures['volumes_in_use'] += look.owned
        if look.volume_id is None:
            self._unknown |= any(s[0] == ondisk.DAMAGE for s in suspects or ())
        elif self._is_renamed(self._findings.names.get(look.volume_id)):
            figures['volumes'] -= 1
            self._findings.names[look.volume_id] = name
        elif look.volume_id in self._findings.names:
            self._findings.find(
                ondisk.DAMAGE, f'volumes/{name}', None, 'has the same id as '
                f'volume {self._findings.names[look.volume_id]}: it is a '
                'copy. Remove the copy, and use neither before',
                volume=name)
        else:
            self._findings.names[look.volume_id] = name
        for severity, file, offset, sentence in suspects or ():
            self._findings.find(severity, file, offset, sentence,
                                volume=name)

    def _is_renamed(self, name: str | None) -> bool:
        """Return whether a volume has lost its name since it was read."""
        return name is not None and self.directories.status_now(
            'volumes', name) is None

    def _check_names(self, name: str, fd: int) -> int:
        """Report unknown names and wrong modes.

        :returns: the bytes of the journals, and of their files without the
            name of one
        """
        find, check_mode = self._findings.find, self.directories.check_mode
        check_mode(os.fstat(fd), f'volumes/{name}', 0o700)
        total = 0
        names = sorted(os.listdir(fd))
        for inner in names:
            file = f'volumes/{name}/{inner}'
            try:
                status = os.stat(inner, dir_fd=fd, follow_symlinks=False)
            except OSError:
                continue
            match = volume_reader.JOURNAL_NAME.match(inner)
            if inner == 'control' and stat.S_ISSOCK(status.st_mode):
                continue
            if not stat.S_ISREG(status.st_mode) or not (
                    inner == 'lock' or inner.startswith('journal.new')
                    or match is not None and int(match[1], 16)):
                find(ondisk.NOTE, file, None, 'has an unknown name'
                     if stat.S_ISREG(status.st_mode) else
                     'is not a regular file')
                continue
            check_mode(status, file, 0o600)
            if inner != 'lock':
                total += status.st_size
            elif status.st_size:
                find(ondisk.NOTE, file, None,
                     'has content; it should only carry locks')
        if 'lock' not in names and any(
                map(volume_reader.JOURNAL_NAME.match, names)) and (
                    os.fstat(fd).st_nlink):
            find(ondisk.DAMAGE, f'volumes/{name}/lock', None,
                 'is missing, so that nothing keeps a second owner out: stop '
                 'what serves the volume, and make an empty file of this name '
                 'and of mode 0600', volume=name)
        return total

    def _check_others(self) -> None:
        """Report recipes of volumes that are not there."""
        for volume_id in sorted(self._recipes.keys() - self._findings.names):
            for name in sorted(self._recipes[volume_id]):
                if self.exists(name):
                    self._findings.find(
                        ondisk.NOTE, f'images/{name}', None,
                        'is of no volume that can be read' if self._unknown
                        else 'is of a volume that does not exist: '
                        f'glance-dedup image delete {name} removes it')
