# SPDX-License-Identifier: Apache-2.0

"""Conversion: keeps the disks in files of disk formats (image-disks.rst).

A run works image by image, and exchanges each recipe as merging does (N10).
If it makes way in the middle of an image, it keeps the unfinished conversion,
and its groups' locks, until it goes on, or the maintainer ends. A collection
cannot enter these groups meanwhile, as with a long upload.

A scheduled run takes the images that it has not judged yet. A request names
images. An image that was converted back to its file is not converted again,
unless a request names it.
"""

from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import dataclasses
import time

from dedupd.tasks import accounting
from dedupd.tasks import disk_conversion
from dedupd.tasks import merger
from glance_dedup.base import confined
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import imageids
from glance_dedup.base import pacing
from glance_dedup.base import units
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import database
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import disk_survey
from glance_dedup.repository import format_verdicts
from glance_dedup.repository import openimages

DISK, FILE = 'disk', 'file'
#: The most images of a request.
MAX_NAMES = 512

_DAY = 86400
_LOOK = 16 << 10        # bytes read to choose an image, or so
_IS_FILE = 'an operator wants its file'
_COPIES = ('it was stored as a copy that shares no blocks, or has blocks of '
           'one')


@dataclasses.dataclass(frozen=True)
class ImagePlan:
    """Plan of a run for one image."""

    image_id: str
    action: str
    """'convert' or 'skip'."""
    reason: str
    """The reason why the run would skip the image, or what it would find."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Plan of a run."""

    images: list[ImagePlan]


@dataclasses.dataclass
class Result:
    """Result of a run."""

    images: int = 0
    """Images that have another form now."""
    derived_bytes: int = 0
    """Bytes of their files that are derived now."""
    unchanged: int = 0
    """Images of a request that had the form already."""
    waiting: int = 0
    """Images that wait until their file is not read any more."""
    unsuitable: int = 0
    """Images that stay as they came, each with a reason that stays."""
    gave_up: int = 0
    """Images that were deleted, or in use by other processes, meanwhile."""
    busy: int = 0
    """Images put off because the collector is in a group."""
    skipped_for_space: int = 0
    """Images for whose other form the disk had no room."""
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    """Of a request: the images that stay as they are, each with the reason."""
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    """Images that could not be read or written, each with its error."""


def plan(maintainer: maintainer_role.Maintainer, pace: pacing.Pace,
         images: Iterable[str] = (), form: str = DISK) -> Plan:
    """Plan a run; change nothing. Each image that may convert is mapped.

    A plan does not wait for images to be idle.

    :raises UnavailableError: no process can be confined
    """
    _require_possible()
    return maintainer.guard(
        lambda: _Run(maintainer, pace, images, form, 0).plan(), pace.step)


def run_once(maintainer: maintainer_role.Maintainer, pace: pacing.Pace,
             images: Iterable[str] = (), form: str = DISK,
             idle_days: int = 0) -> Result:
    """Convert images.

    :param images: ids; none: all images that were not judged yet
    :param form: 'disk' or 'file'
    :param idle_days: of images without a name in the request, take those whose
        file was not read for so many days; 0: all
    :raises pacing.Stopped: the next run goes on with the same image
    :raises UnavailableError: no process can be confined
    :raises VersionError: this build's encoder makes other bytes
    """
    try:
        _require_possible()
        return maintainer.guard(
            lambda: _Run(maintainer, pace, images, form, idle_days).run(),
            pace.step)
    except pacing.Stopped:
        raise
    except BaseException:
        maintainer.end_conversion()     # nobody might go on with it
        raise


def _require_possible() -> None:
    confined.require_program()
    disk_conversion.require_encoder()       # F3


class _SkipError(Exception):
    """The image stays as it is, in this run; the message is the reason."""


class _HasFormError(_SkipError):
    """The image has the form that it would get."""


class _PutOffError(_SkipError):
    """The image is looked at again by the next run."""


class _WaitsError(_SkipError):
    """The image is converted when its file is not read any more."""


class _Run:
    def __init__(self, maintainer: maintainer_role.Maintainer,
                 pace: pacing.Pace, images: Iterable[str], form: str,
                 idle_days: int) -> None:
        self._maintainer = maintainer
        self._repository = maintainer.repository
        self._root = maintainer.repository.path
        self._pace = pace
        self._images = list(images)
        self._to_disk = form == DISK
        self._idle_days = 0 if self._images else idle_days
        self._result = Result()
        self._upload_id = ''    # of the image under way
        self._is_ended = False  # no further image can be converted now

    # -- choosing ---------------------------------------------------------

    def _wanted(self) -> list[str]:
        """The images of the request; or else those that are not judged yet."""
        if self._images:
            return self._images
        judged = self._maintainer.judged
        images = set(self._repository.images())
        for image_id in judged.keys() - images:
            del judged[image_id]
        return sorted(
            facts['image_id'] for _, facts
            in self._maintainer.catalog.ledger()
            if facts['image_id'] in images
            and imageids.of_backup(facts['image_id']) is None
            and judged.get(facts['image_id']) != facts['upload_id'])

    def _forget_the_gone(self) -> None:
        images = set(self._repository.images())
        with _os_errors():
            format_verdicts.prune(self._root, images.__contains__)

    def _require_choice(self, image: openimages.Image) -> None:
        """Require that an image is to be converted.

        :raises _SkipError: it is not
        """
        image_id, upload_id = image.stat.image_id, image.stat.upload_id
        self._upload_id = upload_id
        if not self._to_disk:
            if image.disk is None:
                raise _HasFormError('it has the form of its file')
            return
        if image.disk is not None:
            raise _HasFormError('it has the form of its disk')
        if imageids.of_backup(image_id) is not None:
            raise _SkipError('it is a backup: its bytes are those of a disk')
        verdict = format_verdicts.read(self._root, image_id, upload_id)
        if verdict is not None and not self._images and (
                verdict.since is None):
            raise _SkipError(verdict.reason)
        engine = self._maintainer.engine
        with contextlib.closing(engine.open_recipe(image_id)) as recipe:
            groups: set[int] = set()
            for runs in block_addresses.pieces(recipe):
                groups.update(block_addresses.groups_in(runs))
                self._pace.check()
            if any(engine.group_facts(group)['is_cold'] for group in groups):
                raise _PutOffError('blocks of it are in the object store')
            if not disk_survey.has_format(image.read, image.size):
                raise _SkipError('it has no format of a disk')
            for runs in block_addresses.pieces(recipe):             # F9
                self._pace.check()
                if any(block_addresses.has_copies(engine.entries(*run))
                       for run in block_addresses.runs_in(runs)):
                    raise confined.RefusedError(_COPIES)
        if self._idle_days:
            self._require_idle(image_id, upload_id, verdict)

    def _require_idle(self, image_id: str, upload_id: str,
                      verdict: format_verdicts.Verdict | None) -> None:
        """Require that the file was not read for so many days.

        The driver notes reads only while there is a verdict, so an image waits
        from the first run that finds it.

        :raises _WaitsError: it was, or may have been
        """
        now = time.time()
        since = None if verdict is None else verdict.since
        reason = (f'its file was read, or found, less than '
                  f'{units.count(self._idle_days, "day")} ago')
        if since is None:
            self._judge(image_id, format_verdicts.Verdict(
                upload_id, reason, since=now))
        # A time to come is a clock's mistake.
        if since is None or 0 <= now - since < self._idle_days * _DAY:
            raise _WaitsError(reason)

    # -- planning ---------------------------------------------------------

    def plan(self) -> Plan:
        found = []
        wanted = self._wanted()
        for done, image_id in enumerate(wanted):
            action, reason = self._foresee(image_id, done, len(wanted))
            if action == 'convert' or self._images:
                found.append(ImagePlan(image_id, action, reason))
            self._pace.step(done + 1, len(wanted), 'planning')
        return Plan(found)

    def _foresee(self, image_id: str, done: int, total: int
                 ) -> tuple[str, str]:
        try:
            with self._repository.open_image(image_id) as image:
                self._require_choice(image)
                if not self._to_disk:
                    return 'convert', 'to its file'
                with disk_survey.Disk(image.read, image.size,
                                      bool(self._images)) as disk:
                    for _ in disk.survey():
                        self._pace.step(done, total, 'planning')
                    return 'convert', (
                        f'a disk of {disk.size} bytes in this {disk.format}; '
                        f'zlib makes {100 * disk.equal:.0f} % of its '
                        'compressed bytes again')
        except (_SkipError, confined.RefusedError, exceptions.ImageNotFound,
                exceptions.BusyError, exceptions.UnavailableError,
                *exceptions.UNREADABLE) as e:
            return 'skip', str(e)

    # -- converting -------------------------------------------------------

    def run(self) -> Result:
        accounting.run_once(self._maintainer, self._pace)
        self._forget_the_gone()
        resumed = self._resume()
        wanted = self._wanted()
        for done, image_id in enumerate(wanted):
            self._pace.step(done, len(wanted), 'choosing images', _LOOK)
            if self._is_ended:
                break
            if image_id != resumed:
                self._try(image_id)
        return self._result

    def _resume(self) -> str | None:
        """Go on with the image in which the last run made way."""
        work = self._maintainer.converting
        if work is None:
            return None
        if self._images and (work.image_id not in self._images
                             or work.to_disk != self._to_disk):
            self._maintainer.end_conversion()   # that run begins it again
            return None
        self._go_on(work.image_id)
        return work.image_id

    def _try(self, image_id: str) -> None:
        self._upload_id = ''
        with self._noting(image_id):
            with self._repository.open_image(image_id) as image:
                self._require_choice(image)
            self._pace.wait_until_idle()
            with contextlib.ExitStack() as stack:
                work = stack.enter_context(disk_conversion.Work(
                    self._repository, image_id, self._to_disk,
                    bool(self._images)))
                self._require_choice(work.source)   # it may be another by now
                stack.pop_all()
            self._maintainer.converting = work
        if self._maintainer.converting is not None:
            self._go_on(image_id)

    def _go_on(self, image_id: str) -> None:
        """Convert the image that is under way; if this makes way, it stays."""
        work = self._maintainer.converting
        self._upload_id = work.upload_id
        try:
            with self._noting(image_id):
                self._finish(image_id, work)
        except pacing.Stopped:
            raise
        except BaseException:       # such as a catalog that is rebuilt now
            self._maintainer.end_conversion()
            raise
        self._maintainer.end_conversion()
        accounting.run_once(self._maintainer, self._pace)

    def _finish(self, image_id: str, work: disk_conversion.Work) -> None:
        for step in work.steps:
            self._pace.step(step.done, step.total,
                            f'{step.what} of {image_id}', step.cost)
        merger.count(self._maintainer, self._pace,
                     work.header['transaction_id'])             # N10.3
        if not work.to_disk:
            # Now, or a kill would leave a file that is converted again.
            self._judge_wish(image_id)
        self._maintainer.confirm()
        if work.exchange():                                     # N10.4 to 7
            self._result.images += 1
            if work.to_disk:
                self._end(image_id)
        else:
            self._give_up(image_id, work)

    def _give_up(self, image_id: str, work: disk_conversion.Work) -> None:
        """Note that there was no exchange."""
        self._result.gave_up += 1
        self._note(image_id, 'it was deleted, or another process was busy '
                   'with it: try again')
        if not work.to_disk:
            self._forget_verdict(image_id)

    def _end(self, image_id: str) -> None:
        """Note that an image has the form of its disk."""
        with self._repository.open_image(image_id) as image:
            if image.disk is not None:
                self._result.derived_bytes += image.disk.derived_bytes
        self._forget_verdict(image_id)

    # -- judging ----------------------------------------------------------

    @contextlib.contextmanager
    def _noting(self, image_id: str) -> Iterator[None]:
        """Note the reason why an image is not converted."""
        try:
            yield
        except _HasFormError:
            self._result.unchanged += bool(self._images)
            if not self._to_disk:
                self._judge_wish(image_id)
            self._remember(image_id)
        except _WaitsError:
            self._result.waiting += 1
        except _PutOffError as e:
            self._note(image_id, str(e))
        except _SkipError as e:
            self._note(image_id, str(e))
            self._remember(image_id)
        except confined.RefusedError as e:
            self._result.unsuitable += 1
            self._note(image_id, str(e))
            if self._to_disk:
                with contextlib.suppress(exceptions.RepositoryError):
                    self._judge(image_id, format_verdicts.Verdict(
                        self._upload_id, str(e)))
            self._remember(image_id)
        except exceptions.ImageNotFound as e:
            self._result.gave_up += 1
            self._note(image_id, str(e))
        except (exceptions.BusyError, exceptions.UnavailableError) as e:
            # An older program stops each image, after a wait of its own.
            self._is_ended = isinstance(e, disk_conversion.OlderProgramError)
            self._result.busy += 1
            self._note(image_id, str(e))
        except exceptions.NoSpaceError as e:
            self._result.skipped_for_space += 1
            self._note(image_id, str(e))
        except database.CatalogError:
            raise
        except (*exceptions.UNREADABLE, exceptions.InvalidParameter,
                OSError) as e:      # as of a temporary file
            self._result.failed[image_id] = str(e)
            self._remember(image_id)

    def _note(self, image_id: str, reason: str) -> None:
        if self._images:
            self._result.reasons[image_id] = reason

    def _remember(self, image_id: str) -> None:
        """Leave the image out of later runs of this process."""
        if self._upload_id:
            self._maintainer.judged[image_id] = self._upload_id

    def _judge(self, image_id: str, verdict: format_verdicts.Verdict
               ) -> None:
        """Write the reason why an image stays as it is (F11)."""
        with _os_errors():
            format_verdicts.write(self._root, image_id, verdict)

    def _judge_wish(self, image_id: str) -> None:
        self._judge(image_id, format_verdicts.Verdict(
            self._upload_id, _IS_FILE, is_wish=True))

    def _forget_verdict(self, image_id: str) -> None:
        with _os_errors():
            format_verdicts.remove(self._root, image_id)


def _os_errors() -> contextlib.AbstractContextManager[None]:
    return files.os_errors('cannot write to formats/',
                           exceptions.StorageError)
