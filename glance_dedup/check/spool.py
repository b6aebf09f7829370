# SPDX-License-Identifier: Apache-2.0

"""The files in ``spool/``: remains of operations, and recipes among them."""

from glance_dedup.check import files
from glance_dedup.check import locks
from glance_dedup.check import ondisk
from glance_dedup.check import recipe_table
from glance_dedup.check import repo_directories


def check(directories: repo_directories.Directories,
          recipes: recipe_table.Recipes) -> None:
    """Report the files left in the spool, and read the recipes there.

    The recipes of all images were read before.
    """
    # In this order the recipe of a deleted image is met by its name
    # ``D-`` before it is met by that of the operation that stored it.
    for name in directories.known_names(
            'spool', directories.names('spool'), ondisk.SPOOL_NAME):
        for _ in files.looks():
            complete, sentence = _look(directories, recipes, name)
            if sentence is None:
                break
        if complete:
            sentence = _check_recipe(directories, recipes, name)
        if sentence is not None:
            directories.findings.find(
                ondisk.NOTE, f'spool/{name}', None, sentence)


def _look(directories: repo_directories.Directories,
          recipes: recipe_table.Recipes, name: str
          ) -> tuple[bool, str | None]:
    """Return whether it is a recipe to be read, and the report on it."""
    try:
        with files.File(directories['spool'], name, f'spool/{name}') as f:
            recipes.announce(f.identity)
            if name[0] not in 'DO' and locks.is_locked(f.fd, 0):
                return False, None
            if name[0] == 'X':
                return False, 'is what an exchange left'
            if recipes.is_known(f.identity):
                return False, None
            if name[0] == 'G':
                return False, 'is a group that was never finished'
            if f.size() < ondisk.PAGE or (
                    f.read(0, ondisk.PAGE) == ondisk.PAGE_ZEROS):
                return False, 'is of a store operation that died'
            return True, None
    except files.Gone:
        return False, None
    except ondisk.Damage as e:
        return False, e.sentence


def _check_recipe(directories: repo_directories.Directories,
                  recipes: recipe_table.Recipes, name: str) -> str | None:
    """Read a recipe; return the report on the file."""
    catalog = recipes.catalog
    owner = recipe_table.Owner('spool', name)
    try:
        header = recipes.read(owner)
    except files.Gone:
        return None
    except ondisk.Damage as e:
        # Accounting needs recipes that were an image's, and the counted
        # ones; nothing needs the rest.
        needed = name[0] in 'DO' or owner.counted or (
            catalog is not None
            and catalog.lacks(bytes.fromhex(name[2:])))
        directories.findings.find(ondisk.DAMAGE if needed else ondisk.NOTE,
                                  owner.file, e.offset, e.sentence)
        if needed:
            recipes.counts_unknown()
        return None
    if 'images' in directories:
        image = directories.status_now('images', header.image_id)
        if image is not None and files.identity(image) == owner.identity:
            return None     # committed after the listing was taken
    directories.findings.figures['metadata_bytes'] += header.file_size
    if name[0] in 'TM':
        return 'is a recipe that no image uses'
    return None
