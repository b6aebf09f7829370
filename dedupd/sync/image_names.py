# SPDX-License-Identifier: Apache-2.0

"""The names that images have in Glance, which the status shows beside ids.

The store never gets a name, so a thread requests them from Glance, with the
account of a cloud that the operator names in ``[dedupd] glance_cloud``.
Without that option it requests nothing. Glance decides which names the account
sees: an administrator's sees every name, another's those of public images and
of its own project. The
notifications of Glance have names, too, but every client of the broker
could give any image any name; so they are not used (``security.rst``).

A name is any text that a user chose. It is made printable and cut here, once,
for all programs that show it. Names are kept in memory only, of images that
are in the repository, and up to a limit in all. They are only shown: a name
that is missing, or that was changed meanwhile, is no error, and if Glance does
not answer, the names stay as they were.
"""

import itertools
import threading
import time

from oslo_log import log

from glance_dedup.base import exceptions
from glance_dedup.base import printable
from glance_dedup.client import glance_api
from glance_dedup.repository import image_repository

LOG = log.getLogger(__name__)

#: Seconds between two checks whether there are images without a known name.
LOOK_INTERVAL = 30.0
#: Seconds after which all names are requested again.
LIST_INTERVAL = 600.0
#: The most images that are requested one by one, instead of a list of all.
FEW = 20
#: The most characters of a name; Glance's have no more.
MAX_LENGTH = 255
#: The most characters of all names.
MAX_CHARACTERS = 4 << 20
#: The most of Glance's records that are read.
MAX_RECORDS = 1_000_000

# Errors of parsing an answer that is none of Glance's.
_WRONG = (KeyError, TypeError, AttributeError, ValueError, RecursionError)


class Names:
    """Requests names from Glance in a thread of its own. Thread-safe.

    :param cloud: the name in ``clouds.yaml``
    """

    def __init__(self, repository: image_repository.Repository,
                 cloud: str) -> None:
        self._repository = repository
        self._cloud = cloud
        self._glance: glance_api.Glance | None = None
        self._names: dict[str, str] = {}        # replaced, never changed
        self._asked: set[str] = set()
        self._due = 0.0
        self._error: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True,
                                        name='dedupd-names')

    def start(self) -> None:
        """Start the thread, which sends a request at once."""
        self._thread.start()

    def stop(self) -> None:
        """Have the thread end. Its end need not be awaited."""
        self._stopping.set()

    def get(self, image_id: str) -> str | None:
        """An image's name, printable; None: it is not known."""
        return self._names.get(image_id)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.run_once()
            self._stopping.wait(LOOK_INTERVAL)

    def run_once(self) -> None:
        """Request the names that are missing, or due for a refresh."""
        try:
            self._ask(set(self._repository.images()))
        except (exceptions.RepositoryError, glance_api.GlanceError,
                OSError) as e:
            self._note(str(e))
        except _WRONG as e:
            self._note(f'the answer is not a list of images: {e!r}')
        else:
            self._note(None)

    def _ask(self, present: set[str]) -> None:
        new = present - self._asked
        is_due = time.monotonic() >= self._due
        if not new and not is_due:
            return
        if self._glance is None:
            self._glance = glance_api.Glance(self._cloud)
        if is_due or len(new) > FEW:
            images = itertools.takewhile(
                lambda image: not self._stopping.is_set(),
                itertools.islice(self._glance.images(), MAX_RECORDS))
            found = {image.image_id: image.name for image in images
                     if image.image_id in present}
            self._due = time.monotonic() + LIST_INTERVAL
        else:
            found = dict(self._names)
            for image_id in new:
                image = self._glance.find(image_id)
                found[image_id] = None if image is None else image.name
        self._asked = present
        self._names = _bounded({image_id: name for image_id, name
                                in found.items() if image_id in present})

    def _note(self, error: str | None) -> None:
        """Log a failure once, and that it is over."""
        if error is not None:
            # The next request reads the cloud's credentials again.
            self._glance = None
            if self._error is None:
                LOG.warning('The names of images are not requested: %s. They '
                            'stay as they are; the daemon tries again.',
                            printable.printable(error[:500]))
        elif self._error is not None:
            LOG.info('Glance sends the names of images again.')
        self._error = error


def _bounded(found: dict[str, str | None]) -> dict[str, str]:
    """Names that can be shown, as many as there is memory for."""
    names = {}
    left = MAX_CHARACTERS
    for image_id, name in found.items():
        name = printable.printable((name or '')[:MAX_LENGTH])[:MAX_LENGTH]
        left -= len(name)
        if left < 0:
            break
        if name:
            names[image_id] = name
    return names
