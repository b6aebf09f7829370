# SPDX-License-Identifier: Apache-2.0

"""The manifest of a metadata backup: the objects to restore a directory from.

It is a sequence of lines, each in JSON, compressed as one frame of zstd:

* the head: kind, version, owner, number, when it was taken, the content of
  ``repository.json``, and the features of the format that the repository uses;
* a line for each cold group: ``["g", number, object id, length, owner,
  digest]``, by number;
* a line for each recipe: ``["r", image id, transaction id, length, owner,
  digest]``, by image id;
* the foot: how many lines of each kind there are, the SHA-256 of these lines,
  that of all lines before the foot, and the HMAC-SHA-256 of the latter digest.

The owner of a line is the owner of its object
(:mod:`glance_dedup.repository.prefix_owners`). The digest is the SHA-256 of a
recipe's object, or of the bytes in front of a group's segments. A manifest is
*whole* if every line is well-formed, both digests agree, and a key of the
repository made the HMAC. The object store never gets the key, so only
the repository can make a whole manifest, or change the objects that one names.
Nothing in it is trusted before.
Writers and readers need a bounded amount of memory, whatever the number of
lines.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import dataclasses
import hashlib
import hmac
import io
import json
import re
import secrets
import tempfile
import time
from typing import Any
from typing import BinaryIO
from typing import cast
from typing import NamedTuple
from typing import TypeVar

import zstandard

from glance_dedup.base import closing
from glance_dedup.base import exceptions
from glance_dedup.base import hexids
from glance_dedup.base import imageids
from glance_dedup.base import signingkeys
from glance_dedup.metadata_backup import keys
from glance_dedup.objects import object_store
from glance_dedup.objects import slice_cache
from glance_dedup.repository import features
from glance_dedup.repository import layout
from glance_dedup.repository import repo_parameters

_KIND = 'glance-dedup metadata backup'
_VERSION = 3
#: The most bytes of a line; the head is the longest one.
_LINE = 1 << 17
#: The most bytes of a manifest's object, and of the window of its frame.
_MAX_BYTES, _WINDOW = 1 << 33, 1 << 23
_LEVEL = 3
#: Bytes that one GET requests.
_PIECE = 8 << 20
_MAX_GROUPS = 1 << 25
_MAX_LENGTH = 1 << 32
_PAGE = 4096
_DIGEST = re.compile('[0-9a-f]{64}')
#: Number of requests for an object that must be there.
_TRIES = 4

_Result = TypeVar('_Result')
_Line = TypeVar('_Line', 'Group', 'Recipe')


class Group(NamedTuple):
    """A cold group."""

    number: int
    object_id: str
    """32 hexadecimal digits."""
    length: int
    """Bytes of its object."""
    owner: str
    digest: str
    """SHA-256 of the bytes in front of the object's segments."""

    @property
    def key(self) -> str:
        """The key of its object."""
        return slice_cache.key_of(self.owner, self.number,
                                  bytes.fromhex(self.object_id))


class Recipe(NamedTuple):
    """The recipe of an image, of a backup, or of a part of a volume."""

    image_id: str
    transaction_id: str
    """32 hexadecimal digits. No other recipe has it."""
    length: int
    """Bytes of its object, which is its file."""
    owner: str
    digest: str
    """SHA-256 of its object."""

    @property
    def key(self) -> str:
        """The key of its object."""
        return keys.of_recipe(self.owner, self.image_id, self.transaction_id)


@dataclasses.dataclass(frozen=True)
class Head:
    """Start of a manifest."""

    owner: str
    number: int
    taken: float
    """Seconds since 1970, for people only."""
    parameters: str
    """The content of ``repository.json``."""
    features: tuple[str, ...] = ()
    """Features that the repository used. Version 2 has none of them."""

    def read_parameters(self) -> repo_parameters.Parameters:
        """The repository's parameters.

        :raises DamagedError, VersionError: as their names say
        """
        return repo_parameters.Parameters.from_json(
            self.parameters.encode(),
            f'{layout.PARAMETERS_FILE} of metadata backup {self.number}')


@dataclasses.dataclass(frozen=True)
class Foot:
    """End of a manifest."""

    groups: int
    recipes: int
    content: str
    """The digest of the lines between head and foot. Two manifests with equal
    ones name the same objects."""


# -- writing ------------------------------------------------------------------

class Writer:
    """Writes a manifest into a file: first all groups, then all recipes.

    For one thread at a time.
    """

    def __init__(self, file: BinaryIO, head: Head,
                 signing_keys: signingkeys.Keys) -> None:
        self._frame = zstandard.ZstdCompressor(
            level=_LEVEL, write_checksum=True).stream_writer(
                file, closefd=False)
        self._whole = hashlib.sha256()
        self._content = hashlib.sha256()
        self._counts = {'g': 0, 'r': 0}
        self._key = signing_keys.current
        self._add({'kind': _KIND, 'version': _VERSION,
                   **dataclasses.asdict(head)})

    def add(self, line: Group | Recipe) -> None:
        """Add a line, in the order that the module's docstring gives."""
        kind = 'g' if isinstance(line, Group) else 'r'
        self._counts[kind] += 1
        self._content.update(self._add([kind, *line]))

    def finish(self) -> Foot:
        """Complete the manifest."""
        foot = Foot(self._counts['g'], self._counts['r'],
                    self._content.hexdigest())
        whole = self._whole.hexdigest()
        self._add({**dataclasses.asdict(foot), 'whole': whole,
                   'mac': _mac(self._key, whole)})
        self._frame.close()
        return foot

    def _add(self, value: Any) -> bytes:
        line = json.dumps(value, separators=(',', ':')).encode() + b'\n'
        self._whole.update(line)
        self._frame.write(line)
        return line


def _mac(key: bytes, whole: str) -> str:
    """Return the HMAC of a manifest's digest."""
    return hmac.new(signingkeys.manifest_key(key), whole.encode(),
                    hashlib.sha256).hexdigest()


def send(store: object_store.ObjectStore, head: Head,
         lines: Iterable[Group | Recipe], signing_keys: signingkeys.Keys
         ) -> 'Manifest':
    """Write a manifest, send it, and read it back.

    :param lines: as :meth:`Writer.add` needs them
    :returns: the one that was read back; the caller closes it
    :raises UnavailableError: it cannot be sent, or is another one now
    """
    with tempfile.TemporaryFile() as file:
        writer = Writer(cast(BinaryIO, file), head, signing_keys)
        for line in lines:
            writer.add(line)
        foot = writer.finish()
        file.flush()
        return send_file(store, head, cast(BinaryIO, file), foot,
                         signing_keys)


def send_file(store: object_store.ObjectStore, head: Head, file: BinaryIO,
              foot: Foot, signing_keys: signingkeys.Keys) -> 'Manifest':
    """Send a manifest that was written, otherwise as :func:`send`."""
    key = keys.of_manifest(head.owner, head.number, secrets.token_hex(16))
    store.put(key, file)
    try:
        found = Manifest(store, key, signing_keys)
    except exceptions.DamagedError as e:
        raise exceptions.UnavailableError(
            'a metadata backup was sent, and comes back as another one: '
            f'{e}') from e
    if (found.head, found.foot) != (head, foot):
        found.close()
        raise exceptions.UnavailableError(
            f'{store.location.url}: {key} is another metadata backup than was '
            'sent')
    return found


# -- reading ------------------------------------------------------------------

class Manifest(closing.Closing):
    """A whole manifest, in an unnamed file of this host until :meth:`close`.

    For one thread at a time.

    :ivar key: of its object
    :ivar has_current_key: whether the current key authenticates it
    """

    def __init__(self, store: object_store.ObjectStore, key: str,
                 signing_keys: signingkeys.Keys | None) -> None:
        """Fetch it, and verify all of it.

        :param signing_keys: those of the repository; None: they are lost, so
            a forger may have made it
        :raises DamagedError: it is not whole
        :raises VersionError: a newer program wrote it
        :raises UnavailableError: the object store does not give it
        """
        self.key = key
        self._name = f'{store.location.url}: {key}'
        self._file = cast(BinaryIO, tempfile.TemporaryFile())
        try:
            self._fetch(store)
            self.head, self.foot, mac, whole = self._verify()
            self.has_current_key = self._authenticate(
                signing_keys, mac, whole)
        except BaseException:
            self.close()
            raise

    @property
    def parameters(self) -> repo_parameters.Parameters:
        """The repository's parameters."""
        return self.head.read_parameters()

    def groups(self) -> Iterator[Group]:
        """The cold groups, by number."""
        lines = self._lines()
        next(lines)
        for _ in range(self.foot.groups):
            yield _group(json.loads(next(lines)))

    def recipes(self) -> Iterator[Recipe]:
        """The recipes, by image id."""
        lines = self._lines()
        for _ in range(1 + self.foot.groups):
            next(lines)
        for _ in range(self.foot.recipes):
            yield _recipe(json.loads(next(lines)))

    def close(self) -> None:
        """Remove the file. Idempotent."""
        self._file.close()

    def _fetch(self, store: object_store.ObjectStore) -> None:
        size = store.size(self.key)
        if not 0 < size <= _MAX_BYTES:
            raise exceptions.DamagedError(
                f'{self._name} has {size} bytes, which no manifest has')
        for start in range(0, size, _PIECE):
            self._file.write(store.get(self.key, start,
                                       min(_PIECE, size - start)))
        self._file.flush()

    def _lines(self) -> Iterator[bytes]:
        """The lines; several iterations may be under way."""
        # Each has a place of its own in the file.
        file = cast(BinaryIO, open(f'/proc/self/fd/{self._file.fileno()}',
                                   'rb'))
        unpacker = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
        with (file, unpacker.stream_reader(file) as frame,
              io.BufferedReader(cast(io.RawIOBase, frame), 1 << 16) as lines):
            while line := lines.readline(_LINE):
                yield line

    def _authenticate(self, signing_keys: signingkeys.Keys | None,
                      mac: str, whole: str) -> bool:
        """Return whether the current key made a mac.

        :raises DamagedError: no key did
        """
        made = [hmac.compare_digest(_mac(key, whole), mac)
                for key in (signing_keys.accepted if signing_keys else ())]
        if signing_keys and not any(made):
            raise exceptions.DamagedError(
                f"{self._name} was not made with the repository's key: "
                'somebody else made it, or it is another repository\'s, or '
                'the key was changed between it and the copy of the key')
        return made[:1] == [True]

    def _verify(self) -> tuple[Head, Foot, str, str]:
        try:
            return _parsed(self._lines(), self.key)
        except exceptions.VersionError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError,
                RecursionError, StopIteration, zstandard.ZstdError,
                exceptions.DamagedError) as e:
            raise exceptions.DamagedError(
                f'{self._name} is damaged: {e or type(e).__name__}') from e


def _parsed(lines: Iterator[bytes], key: str) -> tuple[Head, Foot, str, str]:
    """Head, foot, HMAC and digest of a manifest; verifies every line."""
    whole, content = hashlib.sha256(), hashlib.sha256()
    first = next(lines)
    whole.update(first)
    head = _head(json.loads(first), key)
    last: dict[str, int | str] = {'g': 0, 'r': ''}
    counts = {'g': 0, 'r': 0}
    for line in lines:
        fields = json.loads(line)
        if isinstance(fields, dict):
            foot = Foot(counts['g'], counts['r'], content.hexdigest())
            mac = fields.pop('mac')
            if fields != {**dataclasses.asdict(foot),
                          'whole': whole.hexdigest()}:
                raise ValueError('its digests or counts are wrong')
            if not _DIGEST.fullmatch(mac):
                raise ValueError('its HMAC is none')
            if next(lines, None) is not None:
                raise ValueError('something follows its end')
            return head, foot, mac, whole.hexdigest()
        kind = fields[0]
        place = (_group(fields) if kind == 'g' else _recipe(fields))[0]
        if place <= last[kind] or kind == 'g' and counts['r']:  # type: ignore
            raise ValueError('its lines are not in order')
        last[kind] = place
        counts[kind] += 1
        whole.update(line)
        content.update(line)
    raise ValueError('its end is missing')


def _head(fields: dict[str, Any], key: str) -> Head:
    if fields.pop('kind') != _KIND:
        raise ValueError('it is no manifest')
    version = fields.pop('version')
    if type(version) is not int:
        raise ValueError('it has no version')
    if version > _VERSION:
        raise exceptions.VersionError(
            f'the metadata backup {key} has format version {version}; this '
            f'program knows up to {_VERSION}')
    names = fields.pop('features', [])
    if type(names) is not list:
        raise ValueError('it has no list of features')
    for name in names:
        if name not in features.KNOWN:
            raise exceptions.VersionError(
                f'the metadata backup {key} uses the feature {name!r:.80}, '
                'which this program does not know: use a newer program')
    head = Head(**fields, features=tuple(names))
    if not all(isinstance(text, str) for text in (
            head.owner, head.parameters)) or (
            type(head.taken) is not float or type(head.number) is not int):
        raise ValueError('its fields are not of their types')
    named = keys.parse(head.owner, key)
    if not isinstance(named, keys.Manifest) or named.number != head.number:
        raise ValueError('it was put under the key of another one')
    head.read_parameters()
    return head


def _group(fields: list[Any]) -> Group:
    group = Group(*fields[1:])
    if fields[0] != 'g' or type(group.number) is not int or (
            not 0 < group.number < _MAX_GROUPS):
        raise ValueError('a group has no number')
    _check(group, group.object_id)
    if not group.object_id.strip('0'):
        raise ValueError(f'group {group.number} has no object')
    return group


def _recipe(fields: list[Any]) -> Recipe:
    recipe = Recipe(*fields[1:])
    if fields[0] != 'r' or not imageids.is_valid(recipe.image_id):
        raise ValueError('a recipe has no image')
    _check(recipe, recipe.transaction_id)
    return recipe


def _check(line: Group | Recipe, object_id: str) -> None:
    if not hexids.is_valid(object_id) or not hexids.is_valid(line.owner) or (
            type(line.length) is not int
            or not _PAGE <= line.length <= _MAX_LENGTH
            or not _DIGEST.fullmatch(line.digest)):
        raise ValueError(f'the line of {line[0]} is wrong')


# -- which there are ----------------------------------------------------------

def newest_first(owner: str, listed: Iterable[str]) -> list[keys.Manifest]:
    """The manifests among the keys of an owner."""
    found = [key for key in (keys.parse(owner, one) for one in listed)
             if isinstance(key, keys.Manifest)]
    return sorted(found, reverse=True)


def newest_whole(store: object_store.ObjectStore, owner: str,
                 listed: Iterable[str], signing_keys: signingkeys.Keys | None,
                 tell: Callable[[str], None]) -> Manifest | None:
    """The newest manifest of an owner that is whole; None: there is none.

    Several have the same number only if a request to store one, which had
    failed as it seemed, was done late. Of these the one that was taken last
    counts.

    :param signing_keys: as for :class:`Manifest`
    :param tell: called with a sentence for each newer one that is not whole
    """
    best: Manifest | None = None
    for found in newest_first(owner, listed):
        if best is not None and found.number < best.head.number:
            break
        try:
            manifest = patiently(lambda: Manifest(
                store, found.key, signing_keys))
        except (exceptions.DamagedError, object_store.ObjectNotFound) as e:
            tell(str(e))
            continue
        if best is None:
            best = manifest
        elif manifest.head.taken > best.head.taken:
            best.close()
            best = manifest
        else:
            manifest.close()
    return best


def patiently(work: Callable[[], _Result]) -> _Result:
    """Do some work that needs an object which must be there.

    An object that the store lacks is requested again, since it may lag.

    :raises ObjectNotFound: the store lacked it each time
    """
    for tried in range(_TRIES - 1):
        try:
            return work()
        except object_store.ObjectNotFound:
            time.sleep(object_store.FIRST_WAIT * 2 ** tried)
    return work()


def merged(old: Iterator[_Line], new: Iterator[_Line]
           ) -> Iterator[tuple[_Line | None, _Line | None]]:
    """Two sequences of lines, side by side: pairs with the same first field.

    The lines are in the manifest's order in both.
    """
    a, b = next(old, None), next(new, None)
    while a is not None or b is not None:
        if b is None or (a is not None and a[0] < b[0]):
            yield a, None
            a = next(old, None)
        elif a is None or b[0] < a[0]:
            yield None, b
            b = next(new, None)
        else:
            yield a, b
            a, b = next(old, None), next(new, None)
