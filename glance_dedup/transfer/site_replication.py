# SPDX-License-Identifier: Apache-2.0

"""Images at another site: their data sent, and its Glance notified.

The steps are R1 to R5 (``replication.rst``, "Replication"). A crash may follow
each of them; the next run then finds the step done. Without Glances, R3 is all
there is: `DataReplication`.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import dataclasses
from typing import Any

from glance_dedup.base import exceptions
from glance_dedup.base import locations
from glance_dedup.base import pacing
from glance_dedup.client import client_errors
from glance_dedup.client import daemon_client
from glance_dedup.client import glance_api
from glance_dedup.repository import image_repository
from glance_dedup.transfer import image_sending
from glance_dedup.transfer import progress_file

REPLICATED, PRESENT, PLANNED, LEFT_OUT, DELETED, FAILED = (
    'replicated', 'present', 'to be replicated', 'left out', 'deleted',
    'failed')

#: Properties that the other site must not get. Deleting an image with this one
#: deletes its key, and the image at home has the same key.
WITHHELD = ('cinder_encryption_key_deletion_policy',)

# The hashes by which Glance verifies a location's data.
_HASHES = ('sha1', 'sha256', 'sha512', 'md5')
# The states of images that count as deleted.
_DELETED = ('deleted', 'pending_delete')
# HTTP status codes by which Glance refuses a part of a record, not all of it.
_REFUSED = (400, 403, 409, 413)


class Pace(pacing.Pace):
    """The pace of taking several images, one after the other.

    :ivar sent: bytes sent over the network
    :ivar image_id: the present image
    :ivar total: bytes of all images; the caller sets it
    """

    sent = 0
    image_id = ''
    _before = 0     # bytes of the images before the present one

    def step(self, done: int, total: int, what: str, cost: int = 0,
             watch: Callable[[], None] | None = None) -> None:
        """Note progress as task.Pace does, for the present image.

        :param cost: bytes that went over the network since the last step
        """
        self.sent += cost
        super().step(self._before + done, self.total, what, cost, watch)

    def over(self, size: int) -> None:
        """Note that the present image is dealt with, which has `size` bytes.

        It counts as a whole, even if it failed, or nothing of it was sent.
        """
        self._before += size
        self.done = self._before


class NotReplicated(Exception):
    """Error with the reason why an image is not at the other site."""


class _LeftOut(Exception):
    """An image is not to be at the other site."""


class _Gone(Exception):
    """An image does not exist at home any more."""


@dataclasses.dataclass
class Outcome:
    """The result of taking one image."""

    image_id: str
    size: int | None = None
    result: str = REPLICATED
    sent_bytes: int = 0
    """Bytes sent over the network."""
    verified: str = ''
    """The hash by which Glance there verified the image; '': none."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Differences from the image at home, in sentences."""
    error: BaseException | str | None = None

    @property
    def absence(self) -> Exception | None:
        """The error, if a server that every image needs did not answer."""
        if isinstance(self.error, client_errors.DaemonUnavailable) or (
                isinstance(self.error, glance_api.GlanceError)
                and self.error.code is None):
            return self.error
        return None


class DataReplication:
    """Takes the data of images to another site, without any Glance.

    :param client: a client of the daemon there
    """

    def __init__(self, repository: image_repository.Repository,
                 client: daemon_client.Client, dry_run: bool = False) -> None:
        self._repository = repository
        self._client = client
        self._dry_run = dry_run

    def left(self, chosen: Iterable[str]) -> Iterator[str]:
        """The unfinished images of earlier runs, without those chosen."""
        return iter(())

    def take(self, image_id: str, pace: Pace) -> Outcome:
        """Take one image to the other site; the outcome has any error.

        :raises task.Stopped: the task was stopped; the next run goes on
        """
        outcome = Outcome(image_id)
        try:
            self._take(outcome, pace)
        except _LeftOut as e:
            outcome.result, outcome.error = LEFT_OUT, str(e)
        except (exceptions.RepositoryError, glance_api.GlanceError,
                client_errors.ClientError, NotReplicated, OSError,
                ValueError) as e:
            outcome.result, outcome.error = FAILED, e
        return outcome

    def _take(self, outcome: Outcome, pace: Pace) -> None:
        if self._dry_run:
            outcome.size = self._repository.stat(outcome.image_id).size
            outcome.result = PLANNED
        elif self._send(outcome, pace).exists:
            outcome.result = PRESENT

    def _send(self, outcome: Outcome, pace: Pace) -> image_sending.Sent:
        """Send the blocks, and commit the image there."""
        image_id = outcome.image_id
        outcome.size = self._repository.stat(image_id).size
        sent = image_sending.send(
            self._repository, image_id, self._client, pace=pace,
            location=self._known_location(image_id),
            confirm=lambda location: self._confirm(image_id, location))
        outcome.sent_bytes += sent.sent_bytes
        if sent.whole is not None:
            outcome.notes.append(f'all of it was sent, since {sent.whole}')
        return sent

    def _known_location(self, image_id: str) -> str | None:
        """The location that an interrupted run noted; None: there is none."""

    def _confirm(self, image_id: str, location: str | None = None) -> None:
        """Check that the image is still wanted; raises if it is not.

        :param location: the one that it is about to get
        """


class Replication(DataReplication):
    """Takes images to another site, and records them in its Glance.

    :param home: the Glance here
    :param away: the Glance there
    """

    def __init__(self, repository: image_repository.Repository,
                 client: daemon_client.Client, home: glance_api.Glance,
                 away: glance_api.Glance, dry_run: bool = False) -> None:
        super().__init__(repository, client, dry_run)
        self._home = home
        self._away = away
        self._underway = progress_file.Underway(repository, away.url)
        self._listed: tuple[dict[str, glance_api.Image], ...] = {}, {}
        self._projects: dict[str, bool | None] = {}

    def need(self) -> None:
        """Check that both Glances allow all steps of replication.

        :raises GlanceError: one of them does not; with a remedy
        """
        if self._home.url == self._away.url:
            raise glance_api.GlanceError(
                f'both clouds have the same Glance, {self._home.url}; name '
                "the other site's as the one to be told")
        for glance in (self._home, self._away):
            glance.require_administrator()
        self._away.require_service()

    def listed(self, home: dict[str, glance_api.Image],
               away: dict[str, glance_api.Image]) -> None:
        """Take lists of images, to save a request to each Glance per image.

        A listing counts only for images that both Glances have and that have
        no note in the journal.
        """
        self._listed = home, away

    def left(self, chosen: Iterable[str]) -> Iterator[str]:
        """The unfinished images of earlier runs, without those chosen."""
        if self._dry_run:
            return
        for image_id in sorted({*self._underway.entries()} - {*chosen}):
            there = self._away.record(image_id)
            if self._at_home(image_id) is None or (
                    there is not None and there['status'] != 'queued'):
                yield image_id

    def _take(self, outcome: Outcome, pace: Pace) -> None:
        image_id = outcome.image_id
        entry = self._underway.entries().get(image_id)
        if entry is None and self._is_there(outcome):
            return
        record = self._at_home(image_id)                            # R1
        there = self._away.record(image_id)
        if record is None:
            if entry is None:
                raise _LeftOut('Glance at home does not know it')
            self._delete(outcome, entry, there)
            return
        outcome.size = record.get('size')
        if there is not None and there['status'] in glance_api.WITH_DATA:
            self._compare(record, there)
            outcome.result = PRESENT
            if entry is None:
                return
        else:
            self._require_new(record, there, entry)
            outcome.result = PLANNED if self._dry_run else REPLICATED
        if not self._dry_run:
            self._bring(record, there, outcome, pace)

    def _bring(self, record: glance_api.Record,
               there: glance_api.Record | None, outcome: Outcome,
               pace: Pace) -> None:
        """Do all remaining steps for an image that is at home."""
        image_id = record['id']
        try:
            with self._looking_again(image_id):
                if there is None or outcome.result != PRESENT:
                    there = self._copy(record, there, outcome, pace)
                self._finish(record, there, outcome)
        except _Gone:
            self._delete(outcome, self._underway.entries()[image_id],
                         self._away.record(image_id))
        except _LeftOut:
            self._underway.end(image_id)
            raise

    @contextlib.contextmanager
    def _looking_again(self, image_id: str) -> Iterator[None]:
        """Find out why a Glance does not find an image any more."""
        try:
            yield
        except glance_api.GlanceError as e:
            if e.code == 404:
                self._confirm(image_id)
            raise

    # -- R1 ---------------------------------------------------------------

    def _at_home(self, image_id: str) -> glance_api.Record | None:
        record = self._home.record(image_id)
        if record is None or record['status'] in _DELETED:
            return None
        return record

    def _is_there(self, outcome: Outcome) -> bool:
        here, there = (images.get(outcome.image_id)
                       for images in self._listed)
        if (here is None or there is None or here.status != 'active'
                or there.status not in glance_api.WITH_DATA
                or not _same(here, there)):
            return False
        outcome.size, outcome.result = here.size, PRESENT
        return True

    def _require_new(self, record: glance_api.Record,
                     there: glance_api.Record | None,
                     entry: progress_file.Entry | None) -> None:
        """Check that an image can be taken to the other site."""
        image_id = record['id']
        if record['status'] != 'active':
            raise _LeftOut(f'at home it is {record["status"]}')
        if self._repository.stat(image_id).size != record['size']:
            raise NotReplicated(
                f'image {image_id} has another size in the repository than '
                f'in Glance at home, {record["size"]} bytes: see whether '
                'this is the right repository')
        if there is None:
            return
        if there['status'] != 'queued' and entry is None:
            raise NotReplicated(
                f'somebody else gives image {image_id} its data at the other '
                f'site, where it is {there["status"]}; try again later')
        if there.get('owner') != record.get('owner'):
            raise NotReplicated(
                f'the id {image_id} belongs to the project '
                f'{there.get("owner")} at the other site, and to '
                f'{record.get("owner")} at home; neither was changed')

    @staticmethod
    def _compare(record: glance_api.Record,
                 there: glance_api.Record) -> None:
        if not _same(*map(glance_api.image_of, (record, there))):
            raise NotReplicated(
                f'image {record["id"]} is at the other site with other bytes '
                'than at home; neither was changed')

    # -- R2 to R4 ---------------------------------------------------------

    def _copy(self, record: glance_api.Record,
              there: glance_api.Record | None, outcome: Outcome,
              pace: Pace) -> glance_api.Record:
        image_id = record['id']
        self._underway.begin(image_id)
        if there is None or there['status'] == 'queued':
            there = self._record(record, there)                     # R2
            self._underway.recorded(image_id)
            self._complete(record, there, outcome)
            found = self._give(record, outcome, pace)               # R3, R4
        else:
            found = self._away.wait_for_data(
                image_id, record['size'], self._verifying(record, pace))
        if found is None:
            raise _deleted_there()
        there = found
        self._compare(record, there)
        if there.get('checksum'):
            # Glance got this hash by reading the whole image.
            outcome.verified = there.get('os_hash_algo') or ''
        return there

    def _record(self, record: glance_api.Record,
                there: glance_api.Record | None) -> glance_api.Record:
        """A record of the same id at the other site."""
        if there is not None:
            return there
        wanted = {'id': record['id'], **_settable(record)}
        try:
            try:
                return self._away.create(wanted)
            except glance_api.GlanceError as e:
                if e.code not in (400, 403):
                    raise
            # Glance refuses some part. Setting them one by one shows which.
            return self._away.create(
                {name: wanted[name] for name in (
                    'id', 'owner', 'disk_format', 'container_format')})
        except glance_api.GlanceError as e:
            if e.code != 409:
                raise
        there = self._away.record(record['id'])
        if there is None:
            raise _LeftOut('it was at the other site, and was deleted there')
        return there

    def _complete(self, record: glance_api.Record, there: glance_api.Record,
                  outcome: Outcome) -> None:
        """Give the record there the values that it has at home."""
        image_id = record['id']
        for name, value in _settable(record).items():
            if _comparable(there.get(name)) != _comparable(value):
                self._try(outcome, name, self._away.set, image_id, name,
                          value)
        for name in WITHHELD:
            if name in record:
                outcome.notes.append(
                    f'{name} is withheld: deleting the image there would '
                    'delete the key of the one at home')
        if record.get('visibility') == 'shared':
            members = self._away.members(image_id)
            for project, status in self._home.members(image_id).items():
                if members.get(project) != status:
                    self._try(outcome, f'member {project}',
                              self._away.add_member, image_id, project, status)
        self._look_for_project(record.get('owner'), outcome)

    @staticmethod
    def _try(outcome: Outcome, what: str, act: Callable, *args: Any) -> None:
        try:
            act(*args)
        except glance_api.GlanceError as e:
            if e.code not in _REFUSED:
                raise
            outcome.notes.append(f'{what} is refused: {e}')

    def _look_for_project(self, project: str | None,
                          outcome: Outcome) -> None:
        if not project:
            return
        if project not in self._projects:
            self._projects[project] = self._away.has_project(project)
        if self._projects[project] is False:
            outcome.notes.append(
                f'the project {project}, whose it is, is not known at the '
                'other site; only administrators, and those it is shared '
                'with, see it there')

    def _known_location(self, image_id: str) -> str | None:
        entry = self._underway.entries().get(image_id)
        return None if entry is None else entry.location

    def _confirm(self, image_id: str, location: str | None = None) -> None:
        if self._at_home(image_id) is None:
            raise _Gone()
        if self._away.record(image_id) is None:
            raise _deleted_there()
        if location is None:
            return
        # Glance there may be able to read more than a user of it.
        if not location.startswith(f'{locations.SCHEME}://'):
            raise NotReplicated(
                f'{self._client.address} gave image {image_id} a location '
                f'that is none of this store: {location[:80]!r}')
        self._underway.located(image_id, location)

    def _give(self, record: glance_api.Record, outcome: Outcome,
              pace: Pace) -> glance_api.Record | None:
        """Send the data, and have Glance there take it; None: it is gone.

        If a task of Glance's fails, and deletes the data there, they are sent
        again: the blocks stay until a collection, so only their addresses go
        over the network.
        """
        image = glance_api.image_of(record)
        verifying = self._verifying(record, pace)
        if not record['size']:
            self._away.add_nothing(image.image_id)
            return self._away.wait_for_data(image.image_id, 0, verifying)
        known = image.hash_name in _HASHES
        return self._away.give_data(
            image.image_id, record['size'],
            image.hash_name if known else None,
            image.hash_value if known else None,
            lambda: self._located(outcome, pace), verifying)

    def _located(self, outcome: Outcome, pace: Pace) -> str:
        """Send the data; return its location for Glance there."""
        location = self._send(outcome, pace).location
        if location is None:
            raise NotReplicated(
                f'image {outcome.image_id} is in the repository there '
                'already, from elsewhere, and so this site gets no location '
                'of it. Delete it there with glance-dedup image delete, and '
                'start again: few blocks will be sent')
        return location

    @staticmethod
    def _verifying(record: glance_api.Record,
                   pace: Pace) -> Callable[[], None]:
        size = record['size']
        return lambda: pace.step(size, size, 'Glance there verifies it')

    # -- R5 ---------------------------------------------------------------

    def _finish(self, record: glance_api.Record, there: glance_api.Record,
                outcome: Outcome) -> None:
        image_id = record['id']
        if self._at_home(image_id) is None:
            raise _Gone()
        # Not earlier: a protected image could not be deleted.
        if record.get('protected') and not there.get('protected'):
            self._try(outcome, 'protected', self._away.set, image_id,
                      'protected', True)
        self._underway.end(image_id)

    def _delete(self, outcome: Outcome, entry: progress_file.Entry,
                there: glance_api.Record | None) -> None:
        """End an image that was deleted at home while it was on its way."""
        outcome.result = DELETED
        # If we made no record of an image, and it has data, another user
        # brought it.
        if there is not None and (
                entry.recorded or there['status'] == 'queued'):
            if self._dry_run:
                outcome.result = PLANNED
                return
            self._away.delete(outcome.image_id)
            outcome.notes.append('it was deleted at home while it was on its '
                                 'way, and so at the other site')
        if not self._dry_run:
            self._underway.end(outcome.image_id)


def _deleted_there() -> _LeftOut:
    return _LeftOut('it was deleted at the other site; if its data came '
                    'there, the command orphans finds it there')


def _settable(record: glance_api.Record) -> glance_api.Record:
    """The values for the record at the other site."""
    wanted = {name: record[name] for name in glance_api.SETTABLE
              if name in record}
    wanted |= {name: value for name, value
               in glance_api.properties(record).items()
               if name not in WITHHELD}
    return wanted


def _comparable(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def _same(here: glance_api.Image, there: glance_api.Image) -> bool:
    """Return whether both are the same image, by the Glances' records."""
    if here.size != there.size:
        return False
    return (here.hash_name != there.hash_name
            or here.hash_value == there.hash_value)
