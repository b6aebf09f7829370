# SPDX-License-Identifier: Apache-2.0

"""Verifies the state that a crash left.

:func:`verify` is run in a process of its own: it opens the catalog. It returns
a sentence about the error, or None.
"""

import os
import shutil
import struct
import traceback

from glance_dedup.base import exceptions
from glance_dedup.base import scopes
from glance_dedup.check import checker
from glance_dedup.check import files
from glance_dedup.maintenance import block_addresses
from tests.crash import deeds
from tests.crash.expected_state import make
from tests.crash import recorded_volume
from tests.crash import survivor
from tests.crash import verify_volumes
from tests.crash.verify_volumes import Wrong
from tests.support import bucket
from tests.support import maintenance
from tests.support import repositories

# No other process is at work, so no pause is needed.
files.PAUSE = 0

_ERRORS = (exceptions.DamagedError, exceptions.StorageError,
           exceptions.UnavailableError)

#: Findings allowed as notes after recovery and a collection, by the first part
#: of the file's name. Not allowed are garbage that no task would free, counts
#: that err high, and gaps in the index.
_NOTES = {
    'quarantine': ('are set aside',),
    'groups': ('',),        # tails of groups without a lease yet
    'spares': ('',),
    'catalog': ('instead of 0',),
    'index': ('records of blocks that are no more', 'of another catalog',
              'does not cover all'),
}
#: These are allowed if something was damaged before.
_HARMED = {
    **_NOTES,
    'catalog': (*_NOTES['catalog'], 'the next scrub tells it'),
    'images': ('reads use a spare copy instead',),
}
#: Findings not allowed even before the recovery: a step was done too late,
#: which a starting maintainer would hide.
_TOO_LATE = ('recipes that are gone',)
#: Bytes of a group, at least those in front of its segments.
_GROUP_HEAD = 1 << 16
_WARNED = ('neither counted nor in the spool',)


def _is_among(finding, notes):
    return any(note in finding.sentence
               for note in notes.get(finding.file.split('/')[0], ()))


def _is_shareable(group, slot):
    """Return whether merging and look-ups find the block."""
    return slot < group.record()[2] and not group.is_nodedup(slot)


def _features_of_file(path):
    """Return the features that a group or recipe, finished or not, needs."""
    with open(path, 'rb') as f:
        data = f.read(_GROUP_HEAD)
    if data[:8] == b'GDRECIPE' and data[8] == 2:
        return {'disks'}
    if data[:8] != b'GDGROUP\0':
        return set()
    needed = {2: {'listed-segments'}, 3: {'listed-segments', 'cold'}}.get(
        data[8], set())
    slots, = struct.unpack_from('<I', data, 48)
    for slot in range(slots):
        at = 4096 + 512 * (slot // 9) + 56 * (slot % 9) + 44
        place, = struct.unpack_from('<Q', data.ljust(at + 8, b'\0'), at)
        if place >> 61 in (repositories.LIVE, repositories.DAMAGED) and (
                place >> 60 & 1):
            return needed | {'nodedup'}
    return needed


#: The features that a name in these directories needs.
_FEATURES = {'groups': _features_of_file, 'spool': _features_of_file,
             'images': _features_of_file,
             'volumes': lambda path: {'volumes'}}


def verify(world, expectation, filter_file=None, merge=False):
    """Recover, and compare with the expectation."""
    def run():
        verifier = _Verifier(world, expectation, filter_file, merge)
        with bucket.beside(verifier.path):
            verifier.run()
    return _sentence(run)


def verify_survivor(world, fs, records, expectation, specs):
    """Have a process live through another one's calls until it was killed.

    :param fs: the files when it began, which are in `world`
    :param records: of the calls since
    :param specs: of all contents that were ever stored
    """
    def run():
        path = os.path.join(world, 'repository')
        with bucket.beside(path), repositories.open_repository(
                path, filter_dir=world + '-filter-1', codec='none',
                threads=0, segment_cache_mib=1) as repo:
            survivor.remember(repo, map(make, specs))
            replay = survivor.Replay(fs, world)
            for made in records:
                replay.feed(made)
            replay.close()
            verifier = _Verifier(world, expectation, None, False)
            verifier.read(repo, 'for a process that lives on')
            survivor.go_on(repo, expectation, specs)
            verifier.read(repo, 'when a process that lives on has stored')
            verifier.run()
            verifier.read(repo, 'for a process that lived on')
    return _sentence(run)


def _sentence(run):
    try:
        run()
    except Wrong as e:
        return str(e)
    except Exception:
        return traceback.format_exc()
    return None


def recover(stage, expectation):
    """Recover after a crash, under record; it is verified elsewhere."""
    if not os.path.exists(os.path.join(stage.path, 'repository.json')):
        stage.create()
    number = len(expectation.images)
    image = f'recovered-{number}'
    # Earlier recoveries had numbers of their own.
    stage.fresh(10000 * number)
    with bucket.beside(stage.path), stage.open() as repo:
        for name, model in expectation.copy().volumes.items():
            with recorded_volume.recovered(stage, repo, name, model) as disk:
                if disk is not None:
                    disk.write(1, 2)
                    disk.flush()
        with deeds.maintaining(repo) as maintainer:
            deeds.account(maintainer)
            stage.mark(op='seen', images=repo.images())
            stage.put(repo, image, (901, 4), (1, 8))
            deeds.merge(maintainer)
            deeds.collect(maintainer)
            stage.delete(repo, image)


class _Verifier:
    def __init__(self, world, expectation, filter_file, merge):
        self.path = os.path.join(world, 'repository')
        self.filters = world + '-filter'
        self.expected = expectation
        self.filter_file = filter_file
        self.merge = merge
        self.begun = [spec for may in expectation.images.values()
                      for spec in may if spec is not None]

    def open(self):
        return repositories.open_repository(
            self.path, filter_dir=self.filters, codec='none', threads=0)

    def run(self):
        if not self.expected.created and not os.path.exists(
                os.path.join(self.path, 'repository.json')):
            self.require_unmade()
            # The repository can be created now.
            repositories.create(self.path, block_size=512, group_slots=64,
                                segment_size=4096)
        if self.filter_file is not None:
            os.mkdir(self.filters)
            shutil.copy(self.filter_file, self.filters)
        self.require_first()
        with self.open() as repo:
            self.read(repo, 'at once')
            self.require_copies(repo, 'at once')
            volumes = verify_volumes.Volumes(repo, self.expected.volumes)
            volumes.read('at once')
            with deeds.maintaining(repo) as maintainer:
                for warning in maintainer.warnings:
                    if any(word in warning for word in _WARNED):
                        raise Wrong(f'the maintainer warns: {warning}')
                deeds.account(maintainer)
                if self.merge:
                    deeds.merge(maintainer)
                    self.require_merged(repo, maintainer)
                self.collect(maintainer)
                self.read(repo, 'after the collection')
                self.require_copies(repo, 'after the collection')
                volumes.require_only_these()
                self.require_nothing_leaked(repo)
                volumes.use()
                self.upload(repo)
                self.collect(maintainer)
                self.require_nothing_leaked(repo)
                self.read(repo, 'at the end')
                volumes.read('at the end')
        self.require_last()
        if self.expected.volumes:
            self.delete_volumes()
            self.require_last()

    def groups(self):
        return {group: repositories.Group(self.path, group)
                for group in maintenance.groups(self.path)}

    def require_merged(self, repo, maintainer):
        """Require that images' blocks are stored once.

        Left out are blocks behind a group's published count: no process has
        recovered them yet, so merging does not find them. Others stay copies
        (I14).
        """
        if self.expected.damaged or self.expected.harmed:
            return
        groups = self.groups()
        places = {}
        for image in repo.recipes():
            for group, slot in maintenance.blocks_of(repo, image):
                if group and _is_shareable(groups[group], slot):
                    entry = block_addresses.entry_at(
                        maintainer.engine.entries(group, slot, 1), 0)
                    places.setdefault(entry.fingerprint, set()).add(
                        (group, slot))
        twice = [found for found in places.values() if len(found) > 1]
        if twice:
            raise Wrong(f'{len(twice)} blocks are stored twice after a merge, '
                        f'as {sorted(twice[0])}')

    def delete_volumes(self):
        """Delete all volumes, and require that nothing is left of them."""
        with self.open() as repo, deeds.maintaining(repo) as maintainer:
            verify_volumes.Volumes(repo, self.expected.volumes).delete()
            self.collect(maintainer)
            self.require_nothing_leaked(repo)

    def collect(self, maintainer):
        result = deeds.collect(maintainer)
        if result.evacuated:
            # The evacuation leased a group, and published the tail of a dead
            # writer: the next collection frees it.
            result = deeds.collect(maintainer, evacuate_share=0)
        lost = self.expected.damaged
        if result.failed and not lost:
            raise Wrong(f'a collection failed: {result.failed}')
        if result.refused and not lost:
            raise Wrong(f'a collection was refused: {result.refused}')
        if result.failed_volumes:
            raise Wrong(f'volumes are left: {result.failed_volumes}')
        if result.busy:
            raise Wrong(f'{result.busy} groups were busy')

    # -- the independent check --------------------------------------------

    def require_unmade(self):
        """Check the rest of a creation that did not end."""
        try:
            report = checker.check(self.path)
        except (exceptions.ImageNotFound, exceptions.InvalidParameter):
            return      # nothing of a repository
        if not report.ok:
            raise Wrong(f'before it is made: {report.findings[0]}')

    def require_features(self):
        """Require N15.1, also for files that no process reads."""
        features = os.listdir(os.path.join(self.path, 'features'))
        for directory, feature in _FEATURES.items():
            for name in os.listdir(os.path.join(self.path, directory)):
                path = os.path.join(self.path, directory, name)
                needed = feature(path)
                if not needed <= {*features}:
                    raise Wrong(f'{directory}/{name} needs the features '
                                f'{needed}, and there are {features}')

    def require_first(self):
        self.require_features()
        report = checker.check(self.path)
        for finding in report.findings:
            if finding.severity != checker.DAMAGE and not any(
                    note in finding.sentence for note in _TOO_LATE):
                continue
            if self.is_on_purpose(finding, report):
                continue
            raise Wrong(f'before the recovery: {finding}')

    def is_on_purpose(self, finding, report):
        lost = set(report.damaged_images).intersection(finding.images)
        return self.expected.harmed and lost <= self.expected.damaged

    def require_last(self):
        report = checker.check(self.path)
        for finding in report.findings:
            if self.is_on_purpose(finding, report) and finding.severity == (
                    checker.DAMAGE):
                continue
            if finding.file.endswith('.new'):
                continue    # of a creation that did not end
            notes = _HARMED if self.expected.harmed else _NOTES
            if finding.severity == checker.DAMAGE or not _is_among(
                    finding, notes):
                raise Wrong(f'at the end: {finding}')

    # -- images -----------------------------------------------------------

    def read(self, repo, when):
        """Require that each image has a possible content, and remember it."""
        there = repo.images()
        for image in there:
            if image not in self.expected.images:
                raise Wrong(f'{when} there is an image {image}, which nobody '
                            'stored')
        for image, may in self.expected.images.items():
            if image not in there:
                if None not in may:
                    raise Wrong(f'{when} the image {image} is gone')
                self.expected.images[image] = [None]
                continue
            try:
                data = repositories.read_all(repo, image)
            except _ERRORS as e:
                if image in self.expected.damaged:
                    continue
                raise Wrong(f'{when} the image {image} cannot be read: {e}')
            found = [spec for spec in may
                     if spec is not None and make(spec) == data]
            if not found:
                raise Wrong(f'{when} the image {image} has {len(data)} bytes '
                            'that are not its own, or it was deleted')
            self.expected.images[image] = found[:1]

    def require_copies(self, repo, when):
        """Require I14: the blocks of copies have the mark, and are apart."""
        if self.expected.damaged:
            return
        groups = self.groups()
        images = {*repo.images()}
        marked = [place for image in sorted(images & self.expected.copies)
                  for place in maintenance.blocks_of(repo, image) if place[0]]
        for group, slot in marked:
            if not groups[group].is_nodedup(slot):
                raise Wrong(f'{when} slot {slot} of group {group} is a block '
                            'of a copy, and has no mark')
        others = {place for image in images - self.expected.copies
                  for place in maintenance.blocks_of(repo, image)}
        if len({*marked}) < len(marked) or others & {*marked}:
            raise Wrong(f'{when} a block of a copy is named twice')
        for group, file in groups.items():
            if together := file.copies_together():
                raise Wrong(f'{when} the slots {together} of group {group} '
                            'are copies in one segment')

    # -- garbage ----------------------------------------------------------

    def require_nothing_leaked(self, repo):
        if self.expected.damaged:
            return
        spool = os.listdir(os.path.join(self.path, 'spool'))
        if spool:
            raise Wrong(f'the spool still has {spool[0]}')
        named = set(maintenance.expected_counts(repo))
        for group in maintenance.groups(self.path):
            file = repositories.Group(self.path, group)
            published = file.record()[2]
            for slot in range(file.slots):
                is_live = file.state(slot) == repositories.LIVE
                if is_live and slot < published and (
                        (group, slot) not in named):
                    raise Wrong(f'after a collection slot {slot} of group '
                                f'{group} lives, and no image needs it')
                if not is_live and (group, slot) in named and not (
                        self.expected.harmed
                        and file.state(slot) == repositories.DAMAGED):
                    raise Wrong(f'slot {slot} of group {group} is needed, and '
                                f'has state {file.state(slot)}')

    # -- further use ----------------------------------------------------------

    def upload(self, repo):
        """Require that images can be stored, deduplicated and deleted."""
        spec = [(901, 3), (902, 4)]
        self.expected.images['verified'] = [spec]
        repositories.put(repo, 'verified', make(spec))
        if repositories.put(repo, 'verified-too', make(spec)).new_bytes:
            raise Wrong('an image stored a second time found no duplicates')
        repo.delete('verified-too')
        for number, spec in enumerate(self.begun):
            if [spec] in self.expected.images.values():
                continue
            # The rest of it may be torn, and must not be found. The image
            # stays, so the good parts of a torn segment are in use at the end.
            again = f'begun-{number}'
            repositories.put(repo, again, make(spec))
            try:
                if repositories.read_all(repo, again) != make(spec):
                    raise Wrong(f'{spec} was stored, and is read otherwise')
            except exceptions.DamagedError:
                if not self.expected.is_at_risk(spec):
                    raise
            self.expected.stored(again, spec)
        groups = self.groups()
        for image, may in sorted(self.expected.images.items()):
            spec = may[0]
            if spec is None or image in self.expected.damaged or any(
                    group and not _is_shareable(groups[group], slot)
                    for group, slot in maintenance.blocks_of(repo, image)):
                continue
            found = repo.stat(image)
            # Derived bytes are in no block.
            if (bytes.fromhex(found.scope) != scopes.GLOBAL
                    or found.derived_bytes):
                continue
            again = f'{image}-again'
            stat = repositories.put(repo, again, make(spec))
            if stat.new_bytes and not self.expected.harmed:
                raise Wrong(f'{stat.new_bytes} bytes of {image} were stored '
                            'again')
            repo.delete(again)
            break
