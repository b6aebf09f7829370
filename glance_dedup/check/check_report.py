# SPDX-License-Identifier: Apache-2.0

"""The result of ``repository check``: findings, figures and progress."""

from collections.abc import Callable
from collections.abc import Collection
import dataclasses

from glance_dedup.check import ondisk

# Findings beyond these are only counted: a hostile directory may be large.
MAX_FINDINGS = 10000
FIGURES = ('images', 'backups', 'groups', 'logical_bytes', 'zero_bytes',
           'referenced_bytes', 'stored_bytes', 'garbage_bytes',
           'metadata_bytes', 'duplicate_blocks', 'copy_blocks',
           'blocks_verified',
           'garbage_blocks', 'freed_blocks', 'damaged_blocks',
           'cold_groups', 'cold_bytes', 'slice_bytes',
           'spares', 'spare_bytes', 'index_records', 'index_stale',
           'volumes', 'volumes_in_use', 'journal_bytes',
           'damage', 'notes', 'findings_left_off')


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was found.

    :ivar severity: ``'damage'`` or ``'note'``
    :ivar file: the file's name inside the repository
    :ivar offset: where in the file, in bytes; None if it is about the file
    :ivar sentence: the problem, in words
    :ivar images: the ids of the images that are hit by it; they lose content
        if the report says so, and no spare copy replaces the damaged block
    :ivar volumes: the volumes that are hit by it: their names, or the id of
        one whose name is not known
    """

    severity: str
    file: str
    offset: int | None
    sentence: str
    images: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()

    def __str__(self):
        where = self.file
        if self.offset is not None:
            where += f', offset {self.offset}'
        return f'{self.severity}: {where}: {self.sentence}'


@dataclasses.dataclass
class Report:
    """Result of :func:`glance_dedup.check.checker.check`.

    :ivar findings: all, in the order in which they were found
    :ivar figures: whole numbers by name; sizes are in bytes
    :ivar damaged_images: the sorted ids of the images that lost content
    :ivar damaged_volumes: the sorted names of the volumes that did, or the id
        of one whose name is not known
    :ivar ok: whether there is no damage; notes do not count
    """

    findings: list[Finding] = dataclasses.field(default_factory=list)
    figures: dict[str, int] = dataclasses.field(default_factory=dict)
    damaged_images: list[str] = dataclasses.field(default_factory=list)
    damaged_volumes: list[str] = dataclasses.field(default_factory=list)
    ok: bool = True


class Findings:
    """A report that is being made; every part of the check adds to it.

    :param progress: called with the bytes read, the bytes that there are to
        read, and the name of the file
    :ivar figures: the figures of the report
    :ivar total: bytes that there are to read, as far as it is known
    :ivar names: of volumes, by the 32 hexadecimal digits of their ids
    """

    def __init__(self, progress: Callable[[int, int, str], None] | None
                 ) -> None:
        self.figures = dict.fromkeys(FIGURES, 0)
        self.total = 0
        self.names: dict[str, str] = {}
        self._progress = progress
        self._report = Report(figures=self.figures)
        self._damaged_images: set[str] = set()
        self._damaged_volumes: set[str] = set()
        self._done = 0

    def find(self, severity: str, file: str, offset: int | None,
             sentence: str, images: Collection[str] = (),
             lost: Collection[str] | None = None,
             volume: str | None = None) -> None:
        """Report something.

        :param images: the images that are hit by it, recipes of volumes too
        :param lost: the images among them that lose content; None: all
        :param volume: the name of a volume that is hit by it
        """
        images = tuple(sorted(images))
        self.count(severity)
        if severity == ondisk.DAMAGE:
            self._damaged_images.update(images if lost is None else lost)
            self._damaged_volumes.update(() if volume is None else [volume])
        if len(self._report.findings) >= MAX_FINDINGS:
            self.figures['findings_left_off'] += 1
            return
        self._report.findings.append(
            Finding(severity, ondisk.printable(file), offset, sentence, images,
                    () if volume is None else (volume,)))

    def count(self, severity: str, count: int = 1) -> None:
        """Count findings, which the report may name or leave off."""
        self._report.ok &= severity != ondisk.DAMAGE
        self.figures['damage' if severity == ondisk.DAMAGE
                     else 'notes'] += count

    def advance(self, size: int, what: str) -> None:
        """Tell the progress that so many more bytes were read."""
        self._done += size
        if self._progress is not None:
            self._progress(min(self._done, self.total), self.total, what)

    def done(self) -> None:
        """Tell the progress that nothing is left to read."""
        self.total = self._done
        self.advance(0, 'done')

    def report(self) -> Report:
        """Return the report of all findings so far."""
        images, volumes = self._apart(self._damaged_images)
        self._report.damaged_images = images
        self._report.damaged_volumes = sorted(
            self._damaged_volumes.union(volumes))
        for i, finding in enumerate(self._report.findings):
            images, volumes = self._apart(finding.images)
            if volumes:
                self._report.findings[i] = dataclasses.replace(
                    finding, images=tuple(images), volumes=tuple(
                        sorted({*finding.volumes, *volumes})))
        return self._report

    def _apart(self, recipes: Collection[str]
               ) -> tuple[list[str], list[str]]:
        """The images among recipes, and the volumes that have the others."""
        images, volumes = [], set()
        for recipe in recipes:
            match = ondisk.VOLUME_RECIPE.match(recipe)
            if match is None:
                images.append(recipe)
            else:
                volumes.add(self.names.get(match[1], match[1]))
        return sorted(images), sorted(volumes)
