# SPDX-License-Identifier: Apache-2.0

"""Taking the images of a file store in: :class:`Importer`.

Each image has one commit point (I3). So an interrupted import goes on when it
is started again: it compares committed images and leaves them as they are, and
finds the blocks of half-stored ones. The file store is only read.
"""

from collections.abc import Callable
from concurrent import futures
import dataclasses
import errno
from typing import Any

from glance_dedup.adoption import filestore
from glance_dedup.base import exceptions
from glance_dedup.base import hashes
from glance_dedup.base import inputs
from glance_dedup.base import locations
from glance_dedup.client import glance_api
from glance_dedup.repository import image_repository
from glance_dedup.repository import openimages

PIECE = openimages.PIECE

IMPORTED, PRESENT, PLANNED, LEFT_OUT, FAILED = (
    'imported', 'present', 'to be imported', 'left out', 'failed')


class Differs(exceptions.DamagedError):
    """An image's bytes are not the recorded or stored ones."""


class _LeftOut(Exception):
    """The file is not to be imported, for the reason in the message."""


@dataclasses.dataclass
class Outcome:
    """The result of importing one file."""

    image_id: str
    size: int
    result: str = IMPORTED
    project: str = ''
    stored_bytes: int | None = None
    """Bytes that storing the image took; None: nothing was stored."""
    verified: str = ''
    """Proof of the image: a hash's name, or 'bytes'; '': nothing."""
    located: bool = False
    """Whether Glance has the image's location."""
    error: BaseException | str | None = None


class Importer:
    """Takes images of a file store into a repository, one by one.

    :param known: Glance's images by their ids; None: Glance gets no request
    :param glance: the Glance that gets the new locations
    :param store: the repository's store in Glance; None: Glance gets none
    :param project: the owner of the images, if Glance gets no request
    """

    def __init__(self, repository: image_repository.Repository, *,
                 known: dict[str, glance_api.Image] | None = None,
                 glance: glance_api.Glance | None = None,
                 store: str | None = None, project: str = '',
                 scope: str = 'global', dry_run: bool = False):
        self._repository = repository
        self._known = known
        self._glance = glance
        self._store = store
        self._project = project
        self._scope = scope
        self._dry_run = dry_run

    def take(self, entry: filestore.Entry,
             progress: Callable[[int], None]) -> Outcome:
        """Take in one image; the outcome has any error.

        :param progress: called with the bytes handled since the last call
        """
        outcome = Outcome(entry.image_id, entry.size, project=self._project)
        try:
            self._take(entry, outcome, progress)
        except _LeftOut as e:
            outcome.result, outcome.error = LEFT_OUT, str(e)
        except (exceptions.RepositoryError, glance_api.GlanceError, OSError,
                ValueError) as e:
            outcome.result = FAILED
            outcome.error = e
        return outcome

    def _take(self, entry: filestore.Entry, outcome: Outcome,
              progress: Callable[[int], None]) -> None:
        record = None
        if self._known is not None:
            record = _with_data(self._known.get(entry.image_id))
            outcome.project = record.owner
            if record.size != entry.size:
                raise Differs(
                    f'{entry.path} has {entry.size} bytes, but Glance '
                    f'recorded {record.size}; it was left alone')
        with inputs.InputFile(entry.path) as source:
            stat = self._stat(entry.image_id)
            if stat is not None:
                self._compare(entry, source, record, outcome, progress)
            elif self._dry_run:
                outcome.result = PLANNED
                return
            else:
                stat = self._store_one(entry, source, record, outcome,
                                       progress)
                outcome.stored_bytes = stat.stored_bytes
        self._locate(record, stat, outcome)

    def _stat(self, image_id: str):
        try:
            return self._repository.stat(image_id)
        except exceptions.ImageNotFound:
            return None

    def _store_one(self, entry, source, record, outcome, progress):
        digest = _digest(record, outcome)
        with self._repository.begin(entry.image_id, outcome.project,
                                    self._scope) as transaction, \
                futures.ThreadPoolExecutor(1) as beside:
            done = 0
            while piece := source.read(PIECE):
                hashed = (beside.submit(digest.update, piece)
                          if digest else None)
                transaction.write(piece)
                if hashed:
                    hashed.result()
                done += len(piece)
                progress(len(piece))
            source.require_unchanged()
            if done != source.size:
                raise inputs.Changed(
                    errno.EIO, f'only {done} of {source.size} bytes could be '
                    'read', entry.path)
            _require_equal(digest, record, entry.path)
            if digest:
                transaction.set_hash(digest.name, digest.digest())
            return transaction.commit()

    def _compare(self, entry, source, record, outcome, progress) -> None:
        """Compare a stored image with the file; both are verified."""
        outcome.result = PRESENT
        digest = _digest(record, outcome)
        with self._repository.open_image(entry.image_id) as image:
            if image.size != source.size:
                raise Differs(
                    f'image {entry.image_id} is in the repository with '
                    f'{image.size} bytes, but {entry.path} has '
                    f'{source.size}; neither was changed')
            outcome.project = image.stat.project
            for piece in image.pieces(piece=PIECE):
                if digest:
                    digest.update(piece)
                elif not source.has_next(piece):
                    raise Differs(
                        f'image {entry.image_id} is in the repository with '
                        f'other bytes than {entry.path}; neither was '
                        'changed')
                progress(len(piece))
        _require_equal(digest, record,
                       f'image {entry.image_id} of the repository')
        if not digest:
            outcome.verified = 'bytes'
        elif not self._dry_run:
            self._record(image.stat, digest)

    def _record(self, stat, digest) -> None:
        """Record the hash of an image that was stored without one."""
        if digest.name not in hashes.recorded(self._repository.path, stat):
            hashes.record(self._repository.path, stat, hashes.Hash(
                digest.name, digest.hexdigest()))

    def _locate(self, record, stat, outcome) -> None:
        if self._glance is None or self._store is None or self._dry_run:
            return
        url = locations.url(self._repository, stat.image_id, stat.upload_id)
        if url not in record.locations:
            self._glance.add_location(stat.image_id, url, self._store)
        outcome.located = True


def _with_data(record: glance_api.Image | None) -> glance_api.Image:
    """Glance's record of an image, which must have data there.

    :raises _LeftOut: Glance has no such image, or no data of it
    """
    if record is None:
        raise _LeftOut('Glance does not know it')
    if record.status not in glance_api.WITH_DATA:
        raise _LeftOut(f'in Glance it is {record.status}')
    return record


def _digest(record, outcome) -> Any:
    """A hash object of the kind that Glance recorded; None: there is none."""
    if record is None or record.hash_name is None:
        return None
    outcome.verified = record.hash_name
    return hashes.new(record.hash_name)


def _require_equal(digest, record, what: str) -> None:
    if digest and digest.hexdigest() != record.hash_value:
        raise Differs(
            f'{what} does not have the {record.hash_name} that Glance '
            'recorded when it was uploaded; it was not imported')
