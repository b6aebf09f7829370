# SPDX-License-Identifier: Apache-2.0

"""Parameters of a repository, fixed when it was created: ``repository.json``.

:class:`Parameters` checks the values, and writes and parses the file's
content. The parser trusts no byte of it. Safe for use by several threads.
"""

import dataclasses
import json
import re
import secrets

from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import hexids

#: The version of the format. What is added to it later is a feature.
FORMAT = 1
_KIND = 'glance-dedup repository'
_CUTS = re.compile('content-defined ([1-9][0-9]{0,8}) ([1-9][0-9]{0,8})')
#: The meaning of ``content-defined`` without numbers, and its block size.
CONTENT_DEFINED, CONTENT_DEFINED_BLOCK = 'content-defined 2048 4096', 16384


def require_range(name: str, value: int, low: int, high: int) -> None:
    """Refuse a value that is not an integer from `low` to `high`.

    :param name: name of the value, for the error's message
    :raises InvalidParameter: names the value and its bounds
    """
    if (not isinstance(value, int) or isinstance(value, bool)
            or not low <= value <= high):
        raise exceptions.InvalidParameter(
            f'{name}: {value!r} is not a number from {low} to {high}')


def _require_power_of_two(name: str, value: int, low: int, high: int) -> None:
    if (not isinstance(value, int) or isinstance(value, bool)
            or not low <= value <= high or value & (value - 1)):
        raise exceptions.InvalidParameter(
            f'{name}: {value!r} is not a power of two from {low} to {high}')


@dataclasses.dataclass(frozen=True)
class Parameters:
    """A repository's parameters, fixed when it was created.

    :ivar block_size: bytes of each block; if blocks are cut by their content,
        bytes of the largest ones
    """

    repository_id: str
    block_size: int
    group_slots: int
    segment_size: int
    fingerprint: str
    verify: str
    chunking: str = 'fixed'
    format: int = FORMAT

    @classmethod
    def choose(cls, *, block_size: int | None = None,
               group_slots: int = 32768, segment_size: int = 65536,
               fingerprint: str = 'sha256', verify: str = 'fingerprint',
               chunking: str = 'fixed') -> 'Parameters':
        """Parameters of a new repository, with a new id.

        :param block_size: bytes; None: 4096, or 16384 with content-defined
            chunking
        :param chunking: ``fixed``; ``content-defined``; or this with the
            smallest and the average block's bytes, as in
            ``content-defined 2048 4096``
        :raises InvalidParameter: for a value out of bounds
        """
        if block_size is None:
            block_size = 4096 if chunking == 'fixed' else CONTENT_DEFINED_BLOCK
        found = cls(secrets.token_hex(16), block_size, group_slots,
                    segment_size, fingerprint, verify,
                    CONTENT_DEFINED if chunking == 'content-defined'
                    else chunking)
        found.validate()
        return found

    def validate(self, allow_weak: bool = False) -> None:
        """Raise InvalidParameter naming the first value out of bounds.

        :param allow_weak: accept the digest that only tests may choose, too
        """
        _require_power_of_two('block_size', self.block_size, 512, 65536)
        require_range('group_slots', self.group_slots, 64, 32768)
        _require_power_of_two('segment_size', self.segment_size,
                              self.block_size, 1 << 20)
        self._validate_chunking()
        if self.verify not in ('fingerprint', 'bytes'):
            raise exceptions.InvalidParameter(
                f"verify: '{self.verify}' is neither 'fingerprint' nor "
                "'bytes'")
        cryptographic = (
            self.is_cryptographic if allow_weak
            else _engine.is_cryptographic(self.fingerprint))
        if not cryptographic and self.verify == 'fingerprint':
            raise exceptions.InvalidParameter(
                f"fingerprint: '{self.fingerprint}' is not cryptographic, so "
                "equal fingerprints may be unequal blocks; choose verify "
                "'bytes', or a cryptographic digest")

    @property
    def is_cryptographic(self) -> bool:
        """Return whether equal fingerprints alone mean equal blocks (I5)."""
        return self.fingerprint != 'weak-8' and (
            _engine.is_cryptographic(self.fingerprint))

    def _validate_chunking(self) -> None:
        minimum, average = self.cuts
        if not average:
            return
        if minimum < 64:
            problem = f'the minimum is {minimum} bytes; it must be at least 64'
        elif minimum >= average:
            problem = (f'the minimum, {minimum} bytes, is not below the '
                       f'average, {average}')
        elif average >= self.block_size:
            problem = (f'the average, {average} bytes, is not below the block '
                       f'size, {self.block_size}, which is the maximum')
        elif average & (average - 1):
            problem = (f'the average is {average} bytes; it must be a power '
                       'of two')
        else:
            return
        raise exceptions.InvalidParameter(f'chunking: {problem}')

    @property
    def cuts(self) -> tuple[int, int]:
        """Smallest and average block of content-defined chunking, in bytes.

        Zeros for fixed blocks.
        """
        if self.chunking == 'fixed':
            return 0, 0
        match = (_CUTS.fullmatch(self.chunking)
                 if isinstance(self.chunking, str) else None)
        if match is None:
            raise exceptions.InvalidParameter(
                f"chunking: there is no '{self.chunking}'; choose fixed, "
                "content-defined, "
                "or 'content-defined MINIMUM AVERAGE'")
        return int(match[1]), int(match[2])

    @property
    def average_block(self) -> int:
        """About how many bytes a block has."""
        return self.cuts[1] or self.block_size

    def to_json(self) -> bytes:
        """The content of repository.json."""
        fields = {'kind': _KIND, **dataclasses.asdict(self)}
        fields['checksum'] = files.json_checksum(fields)
        return json.dumps(fields, indent=2, sort_keys=True).encode() + b'\n'

    @classmethod
    def from_json(cls, content: bytes, path: str,
                  allow_weak: bool = False) -> 'Parameters':
        """Parse repository.json.

        :param path: the file's path, for messages
        :raises DamagedError, VersionError: as their names say
        """
        try:
            fields = json.loads(content)
            kind = fields.pop('kind')
            checksum = fields.pop('checksum')
            version = None if 'major' in fields else fields['format']
        except (ValueError, KeyError, TypeError, AttributeError,
                RecursionError) as e:
            why = (f'it lacks the field {e}' if isinstance(e, KeyError)
                   else 'it is no JSON object')
            raise exceptions.DamagedError(
                f'{path} is not the description of a repository: {why}')
        if kind != _KIND:
            raise exceptions.DamagedError(
                f'{path} does not describe a repository of glance-dedup')
        if version is None and 'major' in fields:
            raise exceptions.VersionError(
                f'{path} has format version {fields["major"]}.'
                f'{fields.get("minor")} of the time before the first release. '
                'Such repositories were never released: make a new one, and '
                'store the images in it')
        if type(version) is not int or version != FORMAT:
            raise exceptions.VersionError(
                f'{path} has format version {version}; this program knows '
                f'{FORMAT}')
        if checksum != files.json_checksum({'kind': kind, **fields}):
            raise exceptions.DamagedError(f'{path}: its checksum is wrong')
        try:
            parameters = cls(**fields)
            if not hexids.is_valid(parameters.repository_id):
                raise ValueError('the repository id has not 32 hexadecimal '
                                 'digits')
            parameters.validate(allow_weak)
        except (TypeError, ValueError) as e:
            raise exceptions.DamagedError(f'{path}: {e}')
        return parameters
