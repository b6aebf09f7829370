# SPDX-License-Identifier: Apache-2.0

"""``repository.json`` and ``key``: a repository's parameters and secret."""

import re

from glance_dedup.base import exceptions
from glance_dedup.check import json_objects
from glance_dedup.check import ondisk
from glance_dedup.check import repo_directories


def check(directories: repo_directories.Directories) -> dict:
    """The valid parameters; none, and a finding, if they are not valid.

    :raises InvalidParameter: this program does not have the digest
    :raises VersionError: the format is another one
    """
    with directories.reported(ondisk.DAMAGE, 'repository.json', 'is missing'):
        found = _parse(directories.read('repository.json',
                                        ondisk.MAX_JSON + 1))
        if ondisk.digest_of(found['fingerprint']) is None:
            raise exceptions.InvalidParameter(
                f"the repository's fingerprints are by "
                f'{ondisk.printable(found["fingerprint"])}, a digest unknown '
                'here')
        return found
    return {}


def read_features(directories: repo_directories.Directories
                  ) -> frozenset[str]:
    """Return the features that the repository uses.

    :raises VersionError: it uses one that this program does not know
    """
    found = frozenset(directories.names('features'))
    for name in sorted(found - {*ondisk.FEATURES}):
        raise exceptions.VersionError(
            f'the repository uses the feature {ondisk.printable(name)}, which '
            'this program does not know')
    return found


def require_key(directories: repo_directories.Directories) -> None:
    """Report a key that is missing or not whole."""
    with directories.reported(ondisk.DAMAGE, 'key', 'is missing'):
        text = directories.read('key', ondisk.MAX_KEY + 1)
        digits = text[:-18]
        if not re.fullmatch(rb'[0-9a-f]{64}( [0-9a-f]{64})?', digits) or (
                text != b'%b %016x\n' % (digits, ondisk.xxh3(digits))):
            raise ondisk.Damage('is not one or two keys of 64 hexadecimal '
                                'digits, their checksum and a newline')


def _parse(text: bytes) -> dict:
    if len(text) > ondisk.MAX_JSON:
        raise ondisk.Damage(f'is longer than {ondisk.MAX_JSON} bytes')
    found = json_objects.load(text, ondisk.KIND)
    # First: another version may have another checksum.
    version = found.get('format')
    if type(version) is int and version > ondisk.FORMAT:
        raise exceptions.VersionError(
            f'repository.json has format {version}; this program reads '
            f'{ondisk.FORMAT}')
    if version is None and type(found.get('major')) is int:
        raise exceptions.VersionError(
            f'repository.json has format version {found["major"]} of the time '
            'before the first release. Such repositories were never released: '
            'make a new one, and store the images in it')
    json_objects.require_checksum(found)
    texts = ('kind', 'repository_id', 'chunking', 'fingerprint', 'verify',
             'checksum')
    numbers = ('format', 'block_size', 'group_slots', 'segment_size')
    if set(found) != set(texts + numbers):
        raise ondisk.Damage('has not the keys that it should have')
    for key in found:
        if type(found[key]) is not (str if key in texts else int):
            raise ondisk.Damage(f'{key} is not of the type that it should be')
    block, segment = found['block_size'], found['segment_size']
    for key, holds in (
            ('format', found['format'] >= 1),
            ('repository_id', ondisk.HEX_ID.match(found['repository_id'])),
            ('block_size', ondisk.MIN_BLOCK <= block <= ondisk.MAX_BLOCK
             and _is_power_of_two(block)),
            ('group_slots',
             ondisk.MIN_SLOTS <= found['group_slots'] <= ondisk.MAX_SLOTS),
            ('segment_size', block <= segment <= ondisk.MAX_SEGMENT
             and _is_power_of_two(segment)),
            ('chunking', _are_cuts(found['chunking'], block)),
            ('verify', found['verify'] == 'bytes' or (
                found['verify'] == 'fingerprint'
                and ondisk.is_cryptographic(found['fingerprint'])))):
        if not holds:
            raise ondisk.Damage(
                f'{key} is {ondisk.printable(str(found[key]))}, which cannot '
                'be')
    return found


def _are_cuts(text: str, block_size: int) -> bool:
    """Return whether blocks up to `block_size` bytes can be cut like that."""
    if text == 'fixed':
        return True
    match = re.fullmatch(
        'content-defined ([1-9][0-9]{0,8}) ([1-9][0-9]{0,8})', text)
    if match is None:
        return False
    minimum, average = int(match[1]), int(match[2])
    return (64 <= minimum < average < block_size
            and _is_power_of_two(average))


def _is_power_of_two(value: int) -> bool:
    return value > 0 and not value & (value - 1)
