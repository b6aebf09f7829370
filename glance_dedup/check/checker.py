# SPDX-License-Identifier: Apache-2.0

"""``repository check``: read a repository and judge every byte of it.

This is a second implementation of the format, written from the pages on the
format alone (``format.rst`` and two others in ``doc/source/contributor``).  It
shares no code with the engine, so that a mistake of the engine's is not judged
by that same mistake.

The order is: the listings, the recipes in ``images/``, those in ``spool/``,
the volumes, the spare copies, then the groups, one at a time.  The blocks of a
recipe were durable before the recipe got its name, so a file read later is at
least as new as the recipe that names it.

The repository may be in use meanwhile.  Nothing is reported at first sight:

* a file that looks wrong is opened and read again, several times;
* before the checker calls an image damaged, it checks whether the recipe is
  still the file that it read.  It forgets an image that was deleted meanwhile,
  and reads a replaced one again, in another round.

The catalog is judged only if no maintainer is at work from beginning to end:
then nothing is removed from the spool, and every recipe that is counted is
found in ``images/`` or in the spool.  See ``catalog_check.py``.

*Damage* is a state that no crash leaves behind.  A *note* is any other
remarkable state: files that a killed store operation left behind, files with
unknown names, modes, a poisoned group.

Memory holds one group's fingerprint store, the names in the directories, and
the findings.  All data that grows with the store goes to a scratch directory:
the extents of all recipes, by their groups, and the facts about each recipe
(``record_table.py``).

Here is only the order of things.  Each structure has a module of its name:
``directories``, ``parameters``, ``lists``, ``hashes``, ``locks``, ``fence``,
``recipes``, ``spool``, ``volumes``, ``spares``, ``groups``, ``cold``,
``catalog``, ``index``, and ``space`` for the figures.  How one file is read
and verified is in ``files``, ``recipe_reader``, ``volume_reader``,
``group_reader`` and ``cold_group``, the constants of the format are in
``format``.

The checker sends no request to an object store.  It does not read objects;
the figures give their size.
"""

import collections
import contextlib
import os
import typing

from glance_dedup.base import exceptions
from glance_dedup.check import catalog_check
from glance_dedup.check import catalog_copy
from glance_dedup.check import check_report
from glance_dedup.check import cold
from glance_dedup.check import exact_index
from glance_dedup.check import fence
from glance_dedup.check import files
from glance_dedup.check import group_check
from glance_dedup.check import group_reader
from glance_dedup.check import hashes
from glance_dedup.check import helpers
from glance_dedup.check import lists
from glance_dedup.check import locks
from glance_dedup.check import ondisk
from glance_dedup.check import parameters
from glance_dedup.check import recipe_table
from glance_dedup.check import repo_directories
from glance_dedup.check import reservations
from glance_dedup.check import spare_files
from glance_dedup.check import spool
from glance_dedup.check import volume_check

DAMAGE = ondisk.DAMAGE
NOTE = ondisk.NOTE

# Images that are replaced while they are read are read again so often.
ROUNDS = 4


class _Checker:
    def __init__(self, directories: repo_directories.Directories) -> None:
        self.directories = directories
        self.findings = directories.findings
        self.parameters: dict = {}
        self.features: frozenset[str] = frozenset()
        self.repository_id: bytes | None = None
        self.fence: bytes | None = None
        self.catalog: catalog_check.Catalog | None = None

    def run(self) -> None:
        if not self.check_root():
            return
        with contextlib.ExitStack() as stack:
            self.open_catalog(stack)
            images, groups, spares = self.list_files()
            recipes = recipe_table.Recipes(
                self.directories, self.repository_id, self.catalog,
                self.has_feature)
            stack.callback(recipes.close)
            recipes.read_images(self.directories.known_names(
                'images', images, ondisk.IMAGE_NAME))
            spool.check(self.directories, recipes)
            volumes = volume_check.Volumes(
                self.directories, self.repository_id, images)
            stack.callback(volumes.close)
            volumes.check()
            if self.catalog is not None:
                self.catalog.check_ledger(recipes.uncounted())
            self.check_groups(stack, recipes, groups, spares)
            cold.check(self.directories)
            self.close_catalog()
        self.findings.done()

    def list_files(self) -> list[list[str]]:
        """Return the names in ``images/``, ``groups/`` and ``spares/``."""
        names = ('images', 'groups', 'spares')
        listed = [self.directories.names(name) for name in names]
        for name, its in zip(names, listed):
            self.findings.total += self.directories.sum_of_sizes(name, its)
        return listed

    # The repository's own files

    def check_root(self) -> bool:
        """Return whether there is a repository to be judged."""
        names = self.directories.own_names()
        if self.directories.is_unfinished(names):
            self.findings.find(
                NOTE, 'repository.json', None, 'is missing, and nothing '
                'is stored: the creation of the repository did not end; '
                'glance-dedup repository create completes it')
            return False
        if 'repository.json' not in names and not (
                'groups' in names and 'images' in names):
            raise exceptions.RepositoryNotFound(
                f'{self.directories.path} is not a repository: it has no '
                'repository.json')
        self.directories.check_own_mode()
        has_volumes = self.directories.has_volumes(names)
        self.parameters = parameters.check(self.directories)
        if self.parameters:
            self.repository_id = bytes.fromhex(
                self.parameters['repository_id'])
        parameters.require_key(self.directories)
        lists.check(self.directories)
        self.directories.open_all()
        self.directories.check_own_names(names)
        hashes.check(self.directories)
        helpers.check(self.directories)
        reservations.check(self.directories)
        locks.check(self.directories)
        self.features = parameters.read_features(self.directories)
        if has_volumes and not self.has_feature(ondisk.VOLUMES):
            self.findings.find(
                ondisk.DAMAGE, 'volumes', None, 'the directory is not empty, '
                f'but features/{ondisk.VOLUMES} is missing: make that file '
                'again')
        quarantined = len(self.directories.names('quarantine'))
        if quarantined:
            self.findings.find(
                NOTE, 'quarantine', None,
                f'{quarantined} files of damaged bytes are set aside')
        return True

    # The catalog

    def open_catalog(self, stack: contextlib.ExitStack) -> None:
        newest = None
        self.fence = fence.read(self.directories)
        if self.fence is not None:
            newest = fence.newest(self.fence, self.findings)
        if 'catalog' not in self.directories:
            if self.fence is not None:
                self.findings.find(NOTE, 'catalog', None, 'is missing: the '
                                   'next maintainer rebuilds it')
            return
        try:
            if locks.is_maintained(self.directories):
                raise catalog_copy.InUse()
            self.catalog = catalog_check.Catalog(
                self.directories['catalog'], self.repository_id, newest,
                self.make_index)
            stack.callback(self.catalog.close)
        except catalog_copy.InUse:
            self.catalog_in_use()
        except OSError as e:
            self.findings.find(NOTE, 'catalog', None, 'was not looked at: it '
                               f'cannot be copied: {e.strerror}')

    def make_index(self, catalog_id: bytes | None, find: exact_index.Find
                   ) -> exact_index.Index:
        directory = (self.directories['index']
                     if 'index' in self.directories else None)
        return exact_index.Index(
            directory, self.directories.names('index'), catalog_id,
            self.parameters.get('verify') == 'fingerprint', find)

    def catalog_in_use(self) -> None:
        self.findings.find(NOTE, 'catalog', None,
                           'is in use by a maintainer, and was not looked at')

    def close_catalog(self) -> None:
        """Report the catalog's problems, if no maintainer was at work."""
        catalog = self.catalog
        if catalog is None:
            return
        catalog.judge_others()
        catalog.judge_index()
        catalog.check_keys()
        if (locks.is_maintained(self.directories) or catalog.copy.changed()
                or fence.read(self.directories) != self.fence):
            self.catalog_in_use()
            return
        for finding in catalog.findings:
            self.findings.find(*finding)
        for severity, count in catalog.left_off.items():
            self.findings.count(severity, count)
            self.findings.figures['findings_left_off'] += count
        self.findings.figures['index_records'] = catalog.index.records
        self.findings.figures['index_stale'] = catalog.index.stale

    # Groups and spare copies

    def check_groups(self, stack: contextlib.ExitStack,
                     recipes: recipe_table.Recipes,
                     groups: list[str], spares: list[str]) -> None:
        """Judge the spare copies, then the groups.

        :param groups: the names of their files
        :param spares: the names of their files
        """
        reader = group_reader.GroupReader(
            self.repository_id, self.parameters.get('fingerprint'),
            self.parameters.get('block_size'), self.findings.advance,
            self.has_feature)
        numbers = self.directories.group_numbers('groups', groups)
        spare_numbers = self.directories.group_numbers('spares', spares)
        if spare_numbers:
            reader.scopes = self.known_scopes(recipes, reader, numbers)
        copies = spare_files.Spares(self.directories, reader)
        stack.callback(copies.close)
        copies.check(spare_numbers)
        judge = group_check.Groups(self.directories, reader, recipes, copies)
        judge.check_all(numbers)
        self.check_again(recipes, judge)
        judge.count_duplicates()

    def has_feature(self, name: str | None) -> bool:
        """Return whether a feature is set; true if that cannot be known.

        :param name: None: the features of every repository
        """
        if 'features' not in self.directories:
            return True     # reported already
        if name is not None and name not in self.features:
            # It may have been set meanwhile.
            self.features = parameters.read_features(self.directories)
        return name is None or name in self.features

    def known_scopes(self, recipes: recipe_table.Recipes,
                     reader: group_reader.GroupReader, groups: list[int]
                     ) -> list[bytes]:
        """The scopes of all recipes and groups, the commonest first."""
        found = collections.Counter({ondisk.GLOBAL_SCOPE: 1})
        found.update(owner.scope for owner in recipes.owners())
        for number in groups:
            # Damage of the group is reported when it is the group's turn.
            with contextlib.suppress(files.Gone, ondisk.Damage):
                found[reader.scope_of_group(
                    self.directories['groups'], number)] += 1
        return [scope for scope, _ in found.most_common()]

    def check_again(self, recipes: recipe_table.Recipes,
                    judge: group_check.Groups) -> None:
        """Judge the images that were replaced while they were read."""
        recipes.catalog = None      # it has met them before
        for _ in range(ROUNDS):
            names = recipes.take_replaced()
            if not names:
                break
            recipes.forget()
            recipes.read_images(names, again=True)
            for number in recipes.groups():
                judge.check(number, again=True)
        for name in recipes.take_replaced():
            self.findings.find(
                NOTE, f'images/{name}', None,
                'was replaced again and again while it was read')


def check(path: str | os.PathLike[str],
          progress: typing.Callable[[int, int, str], None] | None = None
          ) -> check_report.Report:
    """Read everything in a repository and judge it.

    The repository may be in use.  Nothing in it is changed, and no lock is
    held.

    :param path: the repository's directory
    :param progress: called now and then with the bytes read, the bytes that
        there are to read, and the name of the file
    :raises RepositoryNotFound: if it is not a repository
    :raises VersionError: if its format has a newer major version
    :raises AccessDenied: if the system refuses to let it be read
    :raises StorageError: if the system is short of descriptors or memory
    """
    findings = check_report.Findings(progress)
    with contextlib.closing(
            repo_directories.Directories(path, findings)) as directories:
        _Checker(directories).run()
    return findings.report()
