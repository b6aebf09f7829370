# SPDX-License-Identifier: Apache-2.0

"""The other files of cold groups: ``cold.json`` and ``slices/``.

Written from ``format-volumes.rst`` alone; see ``checker.py``.
Without a valid ``cold.json`` nobody finds the objects, so it is damage if that
is not there. The slices are a cache, whose files may go and come at any time.
Any other file is a *note*: programs go round it.
"""

from collections.abc import Iterator
import contextlib
import os
import re
import stat
import urllib.parse

from glance_dedup.base import closing
from glance_dedup.check import files
from glance_dedup.check import json_objects
from glance_dedup.check import ondisk
from glance_dedup.check import repo_directories

_FILE = 'cold.json'
_SLICES = repo_directories.SLICES
_KIND = 'glance-dedup object store'
_KEYS = {'kind', 'version', 'location', 'credentials', 'cache_mib', 'owners',
         'inode', 'allow_http', 'read_limit', 'checksum'}
_MAX_CACHE_MIB = 1 << 20
_MAX_READ_LIMIT = 3600
_MAX_OWNERS = 64
_PLACES = ('kind', 'container', 'prefix', 'endpoint', 'region', 'ca_file')
_CONTAINERS = {'s3': re.compile(r'[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]\Z'),
               'swift': re.compile(r'[A-Za-z0-9_.-]{1,256}\Z')}
_PREFIX = re.compile(r'(?=.{1,512}\Z)[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*\Z')
_REGION = re.compile(r'[A-Za-z0-9_.-]{0,64}\Z')
_OPENING = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_WHAT_TO_DO = (': restore the file from a backup, or the repository with '
               "'glance-dedup repository restore'")


def check(directories: repo_directories.Directories) -> None:
    """Judge ``cold.json`` and the slices, after all groups were read.

    A repository is attached to an object store before its first group is cold.
    """
    findings = directories.findings
    groups = findings.figures['cold_groups']
    missing = None
    if groups:
        missing = (f'is missing, and {groups} cold groups cannot be read'
                   f'{_WHAT_TO_DO}')
    with directories.reported(ondisk.DAMAGE, _FILE, missing):
        strange = _parse(directories.read(_FILE, ondisk.MAX_JSON + 1))
        if strange:
            findings.find(ondisk.NOTE, _FILE, None, 'has unknown keys: '
                          + ondisk.printable(', '.join(strange)))
    for name in directories.known_names(
            _SLICES, directories.names(_SLICES), ondisk.HEX_ID):
        findings.figures['slice_bytes'] += _add_slices(directories, name)


# -- cold.json ----------------------------------------------------------------

def _parse(text: bytes) -> list[str]:
    """The keys that are unknown here.

    :raises Damage: if it does not name the objects' place
    """
    with _saying_what_to_do():
        if len(text) > ondisk.MAX_JSON:
            raise ondisk.Damage(f'is longer than {ondisk.MAX_JSON} bytes')
        found = json_objects.load(text, _KIND)
        if found.get('version') != 1:
            version = ondisk.printable(str(found.get('version')))
            raise ondisk.Damage(f'has version {version}; this program reads 1')
        json_objects.require_checksum(found)
        for key, holds in (
                ('location', _is_location(found.get('location'))),
                ('credentials', _is_path(found.get('credentials'))),
                ('cache_mib', type(found.get('cache_mib')) is int
                 and 1 <= found['cache_mib'] <= _MAX_CACHE_MIB),
                ('owners', _are_owners(found.get('owners'))),
                ('inode', type(found.get('inode')) is int),
                ('allow_http', type(found.get('allow_http', False)) is bool),
                ('read_limit', type(found.get('read_limit', 1)) is int
                 and 1 <= found.get('read_limit', 1) <= _MAX_READ_LIMIT)):
            if not holds:
                raise ondisk.Damage(
                    f'{key} is missing, or cannot be what it is')
    return sorted(set(found) - _KEYS)


@contextlib.contextmanager
def _saying_what_to_do() -> Iterator[None]:
    try:
        yield
    except ondisk.Damage as e:
        raise ondisk.Damage(e.sentence + _WHAT_TO_DO, e.offset) from e


def _is_location(found: object) -> bool:
    if not isinstance(found, dict) or set(found) != set(_PLACES) or not all(
            isinstance(value, str) for value in found.values()):
        return False
    container = _CONTAINERS.get(found['kind'])
    prefix = found['prefix']
    return (container is not None
            and container.match(found['container']) is not None
            and _PREFIX.match(prefix) is not None
            and not {'.', '..'} & set(prefix.split('/'))
            and _REGION.match(found['region']) is not None
            and (not found['endpoint'] or (
                found['kind'] == 's3' and _is_endpoint(found['endpoint']))))


def _is_endpoint(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return bool(
            parts.scheme in ('http', 'https') and parts.hostname
            and parts.port != 0
            and not (parts.username or parts.password or parts.query
                     or parts.fragment)
            and url.isascii() and url.isprintable() and ' ' not in url)
    except ValueError:
        return False


def _is_path(found: object) -> bool:
    return isinstance(found, str) and found.startswith('/')


def _are_owners(found: object) -> bool:
    return (isinstance(found, list) and 1 <= len(found) <= _MAX_OWNERS
            and all(isinstance(owner, str) and ondisk.HEX_ID.match(owner)
                    for owner in found))


# -- slices/ ------------------------------------------------------------------

def _add_slices(directories: repo_directories.Directories, name: str) -> int:
    """Return the bytes of an object's slices; report any other file there.

    :param name: of the object's directory
    """
    file = f'{_SLICES}/{name}'
    try:
        with closing.descriptor(os.open(
                name, _OPENING, dir_fd=directories[_SLICES])) as fd:
            directories.check_mode(os.fstat(fd), file, 0o700)
            with os.scandir(fd) as entries:
                return sum(_size_of(directories, file, entry)
                           for entry in entries)
    except FileNotFoundError:
        return 0
    except OSError as e:
        files.refused_by_system(e, file)
        directories.findings.find(
            ondisk.NOTE, file, None,
            f'cannot be read as a directory: {e.strerror}; remove it')
        return 0


def _size_of(directories: repo_directories.Directories, directory: str,
             entry: os.DirEntry[str]) -> int:
    file = f'{directory}/{entry.name}'
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return 0
    sentence = None
    if not ondisk.SLICE_NAME.match(entry.name):
        sentence = 'has an unknown name'
    elif not stat.S_ISREG(status.st_mode):
        sentence = 'is not a regular file; remove it'
    elif status.st_size > ondisk.MAX_SLICE:
        sentence = (f'has {status.st_size} bytes, more than a slice; remove '
                    'it')
    else:
        directories.check_mode(status, file, 0o600)
    if sentence is not None:
        directories.findings.find(ondisk.NOTE, file, None, sentence)
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
