# SPDX-License-Identifier: Apache-2.0

"""All recipes of ``images/`` and ``spool/``: read, and kept with extents.

An *owner* is a recipe whose extents are kept until the turn of the groups
that they name. It is *stale* once its name leads to another file, or to none.
"""

from collections.abc import Callable
from collections.abc import Container
from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import struct
import typing

from glance_dedup.check import catalog_check
from glance_dedup.check import files
from glance_dedup.check import ondisk
from glance_dedup.check import recipe_reader
from glance_dedup.check import record_table
from glance_dedup.check import repo_directories

# Pages of one recipe in memory at once; and recipes, those used last.
PAGES_AT_ONCE = 256
OWNERS_AT_ONCE = 1 << 10

# Keys and values of the table; each key begins with a letter.
OWNER_KEY = struct.Struct('>cI')        # its number
OWNER_VALUE = struct.Struct('<QQqq16sQQ')   # then directory and name
EXTENTS_KEY = struct.Struct('>cIIQ')    # group, owner, first number
GROUP_KEY = struct.Struct('>cI')
FILE_KEY = struct.Struct('>cQQ')        # device and inode

Identity = tuple[int, ...]


@dataclasses.dataclass
class Owner:
    """A recipe whose extents are kept until their groups' turn."""

    directory: str
    name: str
    number: int = 0             # set when it is read
    identity: Identity = ()     # of the file that was read
    scope: bytes = ondisk.GLOBAL_SCOPE
    extents: int = 0
    blocks: int | None = None   # None: not all of it could be read
    counted: int = 0            # extents, by the catalog

    @property
    def file(self) -> str:
        """The file's name inside the repository."""
        return f'{self.directory}/{self.name}'

    @property
    def image_id(self) -> str | None:
        """The image that has this recipe now; None if it is in the spool."""
        return self.name if self.directory == 'images' else None

    def packed(self) -> bytes:
        """The value under which the store keeps it; see unpacked."""
        return OWNER_VALUE.pack(
            *self.identity, self.scope, self.counted, self.extents
        ) + self.file.encode()

    @classmethod
    def unpacked(cls, key: bytes, value: bytes) -> 'Owner':
        """The owner that was packed, but for its number of blocks."""
        *status, scope, counted, extents = OWNER_VALUE.unpack_from(value)
        directory, name = value[OWNER_VALUE.size:].decode().split('/')
        return cls(directory, name, OWNER_KEY.unpack(key)[1], tuple(status),
                   scope, extents, None, counted)


class KeptExtent(typing.NamedTuple):
    """An extent of a recipe, as it was read."""

    owner: Owner
    slot: int
    blocks: int
    length: int
    number: int                 # in its recipe
    digest: int

    def slots(self) -> range:
        """The slots that it names."""
        return range(self.slot, self.slot + self.blocks)


class Recipes:
    """Reads recipes and remembers their extents, in bounded memory.

    :param repository_id: the id of all recipes; None if it is not known
    :param has_feature: whether the repository uses a feature
    :ivar catalog: its rows on each recipe are judged; None: nothing is
    """

    def __init__(self, directories: repo_directories.Directories,
                 repository_id: bytes | None,
                 catalog: catalog_check.Catalog | None,
                 has_feature: Callable[[str], bool]) -> None:
        self.catalog = catalog
        self._has_feature = has_feature
        self._directories = directories
        self._findings = directories.findings
        self._repository_id = repository_id
        # Owners and their extents.
        self._kept = record_table.RecordTable()
        self._owners = 0
        self._owner = functools.lru_cache(OWNERS_AT_ONCE)(self._kept_owner)
        self._stale: set[int] = set()
        self._replaced: list[str] = []
        # Files by device and inode, after a letter: k for recipes, a for
        # files that the spool names.
        self._files = record_table.RecordTable()

    def close(self) -> None:
        """Forget everything."""
        self._kept.close()
        self._files.close()

    # Reading

    def read_images(self, names: Iterable[str], again: bool = False) -> None:
        """Read the recipes of images, and report their problems.

        :param again: they were read and counted before
        """
        figures = self._findings.figures
        for name in names:
            owner = Owner('images', name)
            header = None
            try:
                header = self.read(owner)
            except files.Gone:
                continue
            except ondisk.Damage as e:
                self._findings.find(ondisk.DAMAGE, owner.file, e.offset,
                                    e.sentence, [name])
                self.counts_unknown()
            if again:
                continue
            if ondisk.is_backup(name):
                figures['backups'] += 1
            else:
                figures['images'] += ondisk.VOLUME_RECIPE.match(name) is None
            if header is not None:
                self._note_project(header, name)
                figures['logical_bytes'] += header.size
                figures['zero_bytes'] += header.shown_zeros
                figures['metadata_bytes'] += header.file_size

    def _note_project(self, header: recipe_reader.RecipeHeader, name: str
                      ) -> None:
        """Report an image that shares blocks with a project not its own.

        Images of a cache are of no project, whatever their scope is.
        """
        if header.project and not header.has_own_scope:
            self._findings.find(
                ondisk.NOTE, f'images/{name}', 32, 'belongs to project '
                f'{ondisk.printable(header.project)}, but shares blocks in '
                'the '
                'scope of another one, as a snapshot for another project did '
                'in earlier versions: store it again with image copy, and '
                'delete it', [name])

    def read(self, owner: Owner) -> recipe_reader.RecipeHeader:
        """Read a recipe and keep its extents.

        The extents before a damaged place are kept, too: their blocks are
        named all the same.

        :raises Gone: if there is no such file any more
        :raises Damage: if it does not verify
        """
        for _ in files.looks():
            # A failed reading leaves its extents to an unused number.
            owner.number, self._owners = self._owners, self._owners + 1
            header = None
            try:
                with files.File(self._directories[owner.directory],
                                owner.name, owner.file) as f:
                    owner.identity = f.identity
                    header = self._read_header(f, owner)
                    owner.scope, owner.extents = header.scope, header.extents
                    self._read_extents(f, header, owner)
            except (ondisk.Damage, files.Forgotten) as e:
                failure = e
            else:
                self._keep(owner, header)
                return header
        self._keep(owner, header)
        raise failure

    def _read_header(self, f: files.File, owner: Owner
                     ) -> recipe_reader.RecipeHeader:
        header = recipe_reader.parse_header(
            f.read(0, ondisk.PAGE), f.size(), self._repository_id)
        if owner.image_id not in (None, header.image_id):
            raise ondisk.Damage(f'is the recipe of image {header.image_id}',
                                144)
        if owner.name[:2] in ('T-', 'M-') and owner.directory == 'spool' and (
                owner.name[2:] != header.transaction.hex()):
            raise ondisk.Damage('has the transaction id '
                                f'{header.transaction.hex()}', 48)
        return header

    def _read_extents(self, f: files.File,
                      header: recipe_reader.RecipeHeader, owner: Owner
                      ) -> None:
        """Keep them, and fill in the blocks, as far as all verifies."""
        extents: dict[int, bytearray] = {}
        reader = recipe_reader.ExtentReader(header, extents)
        pages = -(-header.extents // ondisk.EXTENTS_PER_PAGE)
        page = 0
        try:
            for page in range(1, pages + 1):
                reader.read_page(
                    page, f.read_ahead(page * ondisk.PAGE, ondisk.PAGE))
                if not page % PAGES_AT_ONCE:
                    self._keep_extents(owner, page, extents)
                    self._findings.advance(PAGES_AT_ONCE * ondisk.PAGE, f.file)
        finally:
            self._keep_extents(owner, page, extents)
        reader.finish()
        owner.blocks = reader.blocks
        if header.disk is not None:
            self._read_table(f, header, header.disk, pages)
        if reader.fragments != header.fragments:
            # For people only: nothing depends on it.
            self._findings.find(
                ondisk.NOTE, f.file, 120, f'has {reader.fragments} fragments '
                f'instead of {header.fragments}')
        self._findings.advance((pages % PAGES_AT_ONCE + 1) * ondisk.PAGE,
                               f.file)

    def _read_table(self, f: files.File, header: recipe_reader.RecipeHeader,
                    disk: recipe_reader.Disk, pages: int) -> None:
        """Read the table behind so many pages of extents."""
        if not self._has_feature(ondisk.DISKS):
            self._findings.find(
                ondisk.DAMAGE, f.file, 8, f'has format {ondisk.WITH_DISK}.x, '
                f'but features/{ondisk.DISKS} is missing: make that file '
                'again')
        table = recipe_reader.TableReader(header, disk)
        more = -(-disk.derived // ondisk.EXTENTS_PER_PAGE)
        for page in range(pages + 1, pages + more + 1):
            table.read_page(
                page, f.read_ahead(page * ondisk.PAGE, ondisk.PAGE))
        table.finish()
        self._findings.advance(more * ondisk.PAGE, f.file)

    # Keeping

    def _keep_extents(self, owner: Owner, page: int,
                      extents: dict[int, bytearray]) -> None:
        for group, records in extents.items():
            self._kept.put(EXTENTS_KEY.pack(
                b'e', group, owner.number, page), bytes(records))
        extents.clear()

    def _keep(self, owner: Owner, header: recipe_reader.RecipeHeader | None
              ) -> None:
        if owner.identity:
            self._files.put(FILE_KEY.pack(b'k', *owner.identity[:2]))
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
        self._kept.put(OWNER_KEY.pack(b'o', owner.number), owner.packed())

    def counts_unknown(self) -> None:
        """Note that a recipe, perhaps counted, has unknown extents."""
        if self.catalog is not None:
            self.catalog.exact = False

    def announce(self, identity: Identity) -> None:
        """The spool has a name of this file."""
        self._files.put(FILE_KEY.pack(b'a', *identity[:2]))

    def is_known(self, identity: Identity) -> bool:
        """Return whether this file was read as a recipe before."""
        return FILE_KEY.pack(b'k', *identity[:2]) in self._files

    def uncounted(self) -> Iterator[str]:
        """Files of images that the catalog should count, and does not.

        Those that the spool announces are yet to be counted.
        """
        for owner in self.owners():
            if (owner.image_id is not None
                    and owner.counted < max(1, owner.extents)
                    and FILE_KEY.pack(b'a', *owner.identity[:2])
                    not in self._files
                    and self.identity_of(owner) == owner.identity):
                yield owner.file

    # Asking

    def owners(self) -> Iterator[Owner]:
        """All recipes that were read, at least their headers."""
        for key, value in self._kept.items(b'o'):
            yield Owner.unpacked(key, value)

    def _kept_owner(self, number: int) -> Owner | None:
        key = OWNER_KEY.pack(b'o', number)
        value = self._kept.get(key)
        return None if value is None else Owner.unpacked(key, value)

    def groups(self) -> Iterator[int]:
        """The numbers of all groups that recipes name, in order."""
        number: int | None = 0
        while number is not None:
            start = GROUP_KEY.pack(b'e', number)
            number = None
            with contextlib.closing(self._kept.items(b'e', start)) as found:
                for key, _ in found:
                    _, number = GROUP_KEY.unpack_from(key)
                    break
            if number is not None:
                yield number
                number += 1

    def extents(self, group: int, stale: Container[int] = frozenset()
                ) -> Iterator[KeptExtent]:
        """All extents of recipes that name a group.

        :param stale: numbers of owners to leave out
        """
        for key, value in self._kept.items(GROUP_KEY.pack(b'e', group)):
            _, _, whose, _ = EXTENTS_KEY.unpack(key)
            owner = None if whose in stale else self._owner(whose)
            if owner is not None:
                for fields in recipe_reader.KEPT_EXTENT.iter_unpack(value):
                    yield KeptExtent(owner, *fields)

    def identity_of(self, owner: Owner) -> Identity | None:
        """The identity of the file that has the owner's name now."""
        status = self._directories.status_now(owner.directory, owner.name)
        return None if status is None else files.identity(status)

    def is_stale(self, owner: Owner) -> bool:
        """Return whether the recipe lost its name, or lent it to another."""
        if owner.number not in self._stale:
            found = self.identity_of(owner)
            if found != owner.identity:
                self._stale.add(owner.number)
                if found is not None and owner.image_id is not None:
                    self._replaced.append(owner.name)
        return owner.number in self._stale

    def take_replaced(self) -> list[str]:
        """Return the ids of images whose recipe was replaced, each once."""
        names, self._replaced = sorted(set(self._replaced)), []
        return names

    def forget(self) -> None:
        """Forget all owners and their extents."""
        self._kept.close()
        self._owner.cache_clear()
        self._stale.clear()
