# SPDX-License-Identifier: Apache-2.0

"""One image that arrives from another repository, and its readers.

An arrival runs one pull. The pull goes through the image in order, some lots
ahead of the stored ones, and goes on after the readers have left. Readers get
the bytes that have come (``image_pull.py``).

The arrival hashes the stored bytes in order, as Glance has recorded the hash.
So it finds a description of another image before the commit, and before
readers get the image's last piece. On the commit the readers go over to the
committed image (I12).
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import hashlib
import json
import logging
import threading
from typing import Any
from typing import Protocol

from dedupd.compute.cache import image_pull
from dedupd.compute.cache import neighbour_caches
from dedupd.serve import image_source
from glance_dedup.base import exceptions
from glance_dedup.base import hashes
from glance_dedup.base import thread_pool
from glance_dedup.client import client_errors
from glance_dedup.client import daemon_client
from glance_dedup.repository import image_repository
from glance_dedup.repository import openimages
from glance_dedup.transfer import image_assembly
from glance_dedup.transfer import image_description
from glance_dedup.transfer import pull
from glance_dedup.transfer import source_peer

LOG = logging.getLogger(__name__)

#: Bytes of the image's last piece. Readers get it once the whole image is
#: known to be right.
LAST_BYTES = 64 << 10

_WAIT = 10.0


class WrongImage(image_source.ArrivalFailed):
    """The received image is not the one that Glance means.

    So no response with bytes of it may end as if it were whole.
    """


class Over(Exception):
    """The arrival ended, and nothing of it can be read from it any more.

    The image is in the repository.
    """


@dataclasses.dataclass(frozen=True)
class Expected:
    """Glance's facts of an image."""

    size: int
    md5: str | None = None
    hash_name: str | None = None
    hash_value: str | None = None

    @property
    def mark(self) -> str:
        """64 hexadecimal digits that identify all these facts."""
        return hashlib.sha256(json.dumps(
            dataclasses.astuple(self)).encode()).hexdigest()

    @property
    def hash(self) -> hashes.Hash | None:
        """The hash of the image; None: Glance named none."""
        return (hashes.said(self.hash_name, self.hash_value)
                or hashes.said('md5', self.md5))

    def hasher(self) -> tuple[Any, str] | None:
        """A new hash object, and the expected result; None if unknown."""
        for name, value in ((self.hash_name, self.hash_value),
                            ('md5', self.md5)):
            if name and value:
                with contextlib.suppress(ValueError):
                    return hashes.new(name), value.lower()
        return None


class Owner(Protocol):
    """Gets an arrival's progress. Called in any thread; does not raise."""

    def arrived(self, image_id: str, expected: Expected | None) -> None:
        """The image is committed; no reader knows yet.

        :param expected: the facts that it was compared with
        """

    def is_wrong(self, image_id: str, expected: Expected, why: str) -> None:
        """The peer's image is not the one that Glance means."""

    def ended(self, arrival: 'Arrival', cause: Exception | None) -> None:
        """The arrival is over; the next one of the image may begin.

        :param cause: the cause of the arrival's failure; None: it did not fail
        """


class Arrival:
    """One arriving image, and its readers. Thread-safe.

    Making it requests the description from the peer; then one thread calls
    :meth:`run`.

    :param connect: makes a client of the peer that shows a token; None: none
    :param workers: read the description and fetch lots, ``pull.LOTS``
    :param neighbours: get requests before the peer does; None: there are none
    :ivar changed: the lock for the fields; it is notified of changes
    :ivar partial: the received part; None: the image cannot be read early
    :ivar present: the committed image, until all is released
    :ivar failure: the reason why the arrival ended without an image
    :raises ArrivalFailed, ClientError, RepositoryError: if nothing comes
    """

    def __init__(self, owner: Owner,
                 repository: image_repository.Repository, image_id: str,
                 expected: Expected | None,
                 connect: Callable[[str | None], daemon_client.Client],
                 token: str | None, workers: thread_pool.Workers,
                 neighbours: neighbour_caches.Neighbours | None = None
                 ) -> None:
        self._owner = owner
        self._repository = repository
        self.image_id = image_id
        self._expected = expected
        self.changed = threading.Condition()
        self._readings: set['_Reading'] = set()
        self._at_work = 0               # calls of readinto, and loans
        self._ended = self._over = self._cut = False
        self.failure: Exception | None = None
        self.present: image_source.Present | None = None
        # The facts to compare the image with, and its hash.
        self._judge: Expected | None = None
        self._judged = False            # or about to be
        self._hash: tuple[Any, str] | None = None
        try:
            self._source = source_peer.Peer(connect, image_id, token)
        except (OSError, ValueError) as e:
            raise image_source.ArrivalFailed(f'image {image_id}: {e}') from e
        with contextlib.ExitStack() as stack:
            stack.callback(self._source.close)
            self._begin(stack, workers, neighbours)
            self._holding = stack.pop_all()

    def _begin(self, stack: contextlib.ExitStack,
               workers: thread_pool.Workers,
               neighbours: neighbour_caches.Neighbours | None) -> None:
        """Request the image's description, and prepare for it."""
        recipe = stack.enter_context(self._source.recipe())
        header = recipe.header
        self.size = header.size
        self._known = recipe.hashes
        self._data_bytes = header.size - header.zero_bytes
        self._require_size(self._expected)
        self._transaction = stack.enter_context(
            self._repository.begin(self.image_id, scope=header.scope))
        self.upload_id = self._transaction.upload_id
        self._require_known(self._expected)
        self._whole = image_assembly.why_whole(self._repository.parameters,
                                               header)
        self.partial: image_pull.ImagePull | None = None
        if self._whole is not None:
            recipe.close()
            return
        description = stack.enter_context(contextlib.closing(
            image_description.Description(str(self), header,
                                          image_assembly.READ_LOT_BYTES)))
        self.partial = stack.enter_context(contextlib.closing(
            image_pull.ImagePull(
                self._repository, self._transaction, header, description,
                self._source, workers,
                None if neighbours is None else neighbours.asking(
                    self.image_id, lambda: self._source.token))))
        self.partial.submit(description.fill, recipe)

    def __str__(self) -> str:
        return f'image {self.image_id} from {self._source.address}'

    def _require_size(self, expected: Expected | None) -> None:
        """:raises WrongImage: if Glance's image has another size"""
        if expected is not None and expected.size != self.size:
            raise self._wrong(expected, f'it has {self.size} bytes, and '
                              f"{expected.size} by Glance's record")

    def _require_known(self, expected: Expected | None) -> None:
        """Compare Glance's facts with those that the peer has of its bytes.

        :raises WrongImage: the peer has another image
        """
        theirs = None if expected is None else expected.hash
        if expected is None or theirs is None:
            return
        ours = self._known.get(theirs.name, theirs.value)
        if ours != theirs.value:
            raise self._wrong(expected, f'it has the {theirs.name} {ours}, '
                              f"and {theirs.value} by Glance's record")

    def _require_early(self, expected: Expected | None) -> None:
        """Check that the image may be read before all of it is here.

        Readers get bytes before the whole image is compared. So the peer must
        know the hash of its own bytes, of the kind that Glance names.

        :raises ArrivalFailed: it may not; the message gives a remedy
        """
        why = None
        theirs = None if expected is None else expected.hash
        if self._whole is not None:
            why = (f'{self._whole}; make this repository with the same '
                   'parameters')
        elif not self._known if theirs is None else (
                theirs.name not in self._known):
            name = hashes.DEFAULT if theirs is None else theirs.name
            why = (f'the peer knows no {name} of its bytes; run glance-dedup '
                   f'image verify --algorithm {name} there')
        if why is not None:
            raise image_source.ArrivalFailed(
                f'{self} cannot be read before all of it is here, since {why}')

    def _wrong(self, expected: Expected, why: str) -> WrongImage:
        """Note that the image is wrong; return the exception to raise."""
        self._owner.is_wrong(self.image_id, expected, why)
        return WrongImage(f'{self}: {why}')

    def close(self) -> None:
        """Release an arrival that never ran."""
        if self.partial is not None:
            self.partial.end(image_source.ArrivalFailed(
                f'{self} did not begin'))
        self._holding.close()

    # -- the pull ---------------------------------------------------------

    def run(self) -> None:
        """Pull the image. Does not raise."""
        cause: Exception | None = None
        try:
            with pull.keeping(self._transaction):
                if self.partial is None:
                    self._pull_whole()
                else:
                    self._pull(self.partial)
                self._require_right()
                self._commit()
        except exceptions.ImageExists as e:
            cause = self._use_other(e)
        except Exception as e:
            cause = e
        finally:
            self._end(cause)

    def _pull(self, partial: image_pull.ImagePull) -> None:
        self._require_time()
        partial.greet()
        for _ in partial.run():
            self._require_time()
            self._tell()
            self._hash_on(partial)
        with self.changed:
            # Later clients cannot have it judged by their own facts.
            self._judged = True
        self._hash_on(partial)

    def _pull_whole(self) -> None:
        self._require_hash()
        for piece in pull.whole_image(self._transaction, self._source,
                                      self.size):
            self._require_time()
            if self._hash is not None:
                self._hash[0].update(piece)

    def _require_time(self) -> None:
        if self._cut:
            raise image_source.ArrivalFailed('the daemon is stopping')

    def cut_off(self) -> None:
        """Make the pull fail, from any thread."""
        self._cut = True
        self._source.interrupt()
        if self.partial is not None:
            self.partial.interrupt()

    # -- comparison with Glance's image -----------------------------------

    def _require_hash(self) -> None:
        with self.changed:
            if self._judge is None and self._expected is not None:
                self._judge = self._expected
                self._hash = self._judge.hasher()

    def _hash_on(self, partial: image_pull.ImagePull) -> None:
        """Hash the stored bytes that were not hashed yet."""
        self._require_hash()
        if self._hash is not None:
            for data in partial.content():
                self._hash[0].update(data)

    def _require_right(self) -> None:
        """Make sure that this is the image that Glance means.

        :raises WrongImage: if it is not
        """
        if self._hash is not None and self._judge is not None:
            hasher, value = self._hash
            if hasher.hexdigest() != value:
                raise self._wrong(
                    self._judge, f'the image has the {hasher.name} '
                    f"{hasher.hexdigest()}, and {value} by Glance's record")
            self._transaction.set_hash(hasher.name, hasher.digest())

    def require_same(self, theirs: hashes.Hash | None) -> None:
        """Check that this is the image that Glance means; see `hashes`.

        At the end, the image is compared with the expected facts. This
        compares these with Glance's present facts.

        :raises Unproven, Other: as for hashes.require_same
        """
        expected = self._expected
        ours = None if expected is None else expected.hash
        if ours is None or theirs is None or ours.name != theirs.name:
            raise hashes.Unproven(
                f'{self} is not compared with a hash that Glance recorded.')
        if ours != theirs:
            raise hashes.Other(f'Glance means another image than {self}: '
                               f'their {theirs.name} differs.')

    # -- the end ----------------------------------------------------------

    def _commit(self) -> None:
        self._become(self._transaction.commit_open())
        if self.partial is not None:
            self.partial.forget_recent()
        LOG.info('%s is here: %d bytes, %d received for it', self, self.size,
                 self.received)

    def _become(self, image: openimages.Image) -> None:
        self._owner.arrived(self.image_id, self._judge)
        with self.changed:
            self.present = image_source.Present(image)

    def _use_other(self, error: exceptions.ImageExists) -> Exception | None:
        """Another upload of this id was committed first: use it if possible.

        Returns the reason why it cannot be used, or None.
        """
        try:
            image = self._repository.open_image(self.image_id)
        except exceptions.RepositoryError as e:
            return e
        # The other upload was not hashed here.
        if image.size != self.size or self._expected is not None:
            image.close()
            return error
        self._become(image)
        return None

    def _end(self, cause: Exception | None) -> None:
        """Wake all waiting threads, and stop threads without further use."""
        if cause is not None:
            kind = (WrongImage if isinstance(cause, WrongImage)
                    else image_source.ArrivalFailed)
            self.failure = kind(f'{self} does not arrive: {cause}')
        if self.partial is not None:
            self.partial.end(self.failure)
        self._owner.ended(self, cause)
        with self.changed:
            self._ended = True
        self._tell()
        self._release()

    def _tell(self) -> None:
        with self.changed:
            self.changed.notify_all()
            callbacks = [reading.callback for reading in self._readings]
        for callback in callbacks:
            if callback is not None:
                callback()

    def _release(self) -> None:
        """Release everything, once the arrival and all reads have ended."""
        with self.changed:
            if not self._ended or self._readings or self._at_work:
                return
            self._over = True
            present, self.present = self.present, None
        # Idempotent, in case two threads come here.
        self._holding.close()
        if present is not None:
            present.close()

    # -- reading ----------------------------------------------------------

    def open(self, expected: Expected | None, token: str | None,
             held_back: bool) -> image_source.Reading:
        """Let a client read the image.

        :param expected: Glance's facts of the image for this client
        :param held_back: the last piece comes after the image was judged
        :raises Over: if the image is here, and all readers have left
        :raises ArrivalFailed: if the client wants another image, the image
            cannot be read early, or the arrival has just failed
        """
        self.require_progress()
        self._require_size(expected)
        self._require_known(expected)
        self._require_early(expected)
        with self.changed:
            if self._over:
                self.require_progress()
                raise Over()
            if self._expected is None and not self._judged:
                self._expected = expected
            if expected not in (None, self._expected):
                raise image_source.ArrivalFailed(
                    f'{self} is not compared with Glance\'s present facts')
            reading = _Reading(self, held_back)
            self._readings.add(reading)
        self._source.add_token(token)
        return reading

    def leave(self, reading: '_Reading') -> None:
        """Let go of the image. Idempotent."""
        with self.changed:
            self._readings.discard(reading)
        self._release()

    def require_progress(self) -> None:
        """:raises ArrivalFailed, WrongImage: if no more will come"""
        if isinstance(self.failure, WrongImage):
            raise WrongImage(str(self.failure))
        if self.failure is not None:
            raise image_source.ArrivalFailed(str(self.failure))

    @contextlib.contextmanager
    def working(self) -> Iterator[image_source.Present | None]:
        """Prevent the release of anything meanwhile; yields `present`."""
        with self.changed:
            self._at_work += 1
            present = self.present
        try:
            yield present
        finally:
            self.let_go()

    def hold(self) -> bool:
        """Prevent the release of anything until :meth:`let_go`.

        :returns: False: all was released, and the image is in the repository
            if it came
        """
        with self.changed:
            self._at_work += not self._over
            return not self._over

    def let_go(self) -> None:
        """Permit the release again."""
        with self.changed:
            self._at_work -= 1
        self._release()

    def settled(self, seconds: float) -> image_source.Present | None:
        """Wait until a pull that has ended has a result.

        REQUIRES: the caller prevents the release.

        :returns: the committed image; None: it failed, or takes longer
        """
        with self.changed:
            self.changed.wait_for(lambda: (
                self.present is not None or self.failure is not None), seconds)
            return self.present

    @property
    def stored(self) -> int:
        """The offset before which everything is stored."""
        if self.present is not None:
            return self.size
        return 0 if self.partial is None else self.partial.stored

    # -- figures ----------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The arrival's figures, for operators."""
        with self.changed:
            return {'id': self.image_id, 'size': self.size,
                    'done': self.stored, 'readers': len(self._readings),
                    'received_bytes': self.received}

    @property
    def received(self) -> int:
        """Bytes of all responses so far, as received on the wire."""
        return self._source.received

    @property
    def found(self) -> int:
        """Bytes of blocks that were here."""
        return (0 if self.partial is None
                else self.partial.assembly.found_bytes)

    def coming(self) -> int:
        """Estimate the bytes that are still to be stored."""
        with self.changed:
            left = min(self._data_bytes, self.size - self.stored)
            asked = 1 if self.partial is None else (
                self.partial.assembly.asked_bytes)
            found = self.found
            return left * asked // (found + asked) if found + asked else left


class _Reading:
    """A Reading of an arriving image."""

    def __init__(self, arrival: Arrival, held_back: bool) -> None:
        self._arrival = arrival
        self.size = arrival.size
        self.upload_id = arrival.upload_id
        # Readers get no bytes behind it before the image is here.
        self._last = max(0, self.size - LAST_BYTES) if held_back else self.size
        self.callback: Callable[[], None] | None = None

    @property
    def here(self) -> bool:
        return self._arrival.present is not None

    def available(self, offset: int) -> int:
        with self._arrival.changed:
            end = self.size if self.here else min(self._arrival.stored,
                                                  self._last)
            if end <= offset < self.size:
                self._arrival.require_progress()
            return max(0, end - offset)

    def readinto(self, view: memoryview, offset: int) -> int:
        wanted = max(0, min(len(view), self.size - offset))
        done = 0
        while done < wanted:
            with self._arrival.working() as present:
                if present is not None:
                    done += present.readinto(view[done:wanted], offset + done)
                else:
                    done += self._read(view[done:wanted], offset + done)
        return wanted

    def _read(self, view: memoryview, offset: int) -> int:
        """Read a part before the image is here; 0: something changed."""
        arrival = self._arrival
        if offset >= self._last or arrival.partial is None:
            with arrival.changed:
                if not self.here:
                    arrival.require_progress()
                    arrival.changed.wait(_WAIT)
            return 0
        try:
            return arrival.partial.read(view[:self._last - offset], offset)
        except image_pull.NoMore:
            arrival.require_progress()
            return 0
        except (client_errors.ClientError, image_assembly.BadBlock,
                OSError) as e:
            if self.here:
                return 0
            raise image_source.ArrivalFailed(f'{arrival}: {e}') from e

    def extents(self, offset: int, length: int) -> list[tuple[int, bool]]:
        with self._arrival.working() as present:
            if present is not None:
                return present.extents(offset, length)
        return [(min(length, self.size - offset), False)]

    def on_more(self, callback: Callable[[], None] | None) -> None:
        self.callback = callback
        if callback is not None:
            # Else the reader would miss bytes that came between two calls.
            callback()

    def close(self) -> None:
        self.callback = None
        self._arrival.leave(self)
