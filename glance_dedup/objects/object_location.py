# SPDX-License-Identifier: Apache-2.0

"""Locations of objects: the bucket or container of an object store.

Credentials are no part of it (:mod:`glance_dedup.objects.credentials`), so it
may be written down and shown.
"""

import contextlib
import dataclasses
import ipaddress
import re
from typing import Any
import urllib.parse

from glance_dedup.base import exceptions

#: Longest prefix. Keys have up to 1024 bytes on S3 and Swift.
MAX_PREFIX = 512

# The stricter rules are those of S3. A container of Swift has up to 256 bytes
# and no slash; these characters need no quoting anywhere.
_BUCKET = re.compile(r'[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]')
_CONTAINER = re.compile(r'[A-Za-z0-9_.-]{1,256}')
_PREFIX = re.compile(r'[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*')
_REGION = re.compile(r'[A-Za-z0-9_.-]{1,64}')


@dataclasses.dataclass(frozen=True)
class Location:
    """A bucket or container, and the prefix of all keys in it."""

    kind: str
    """'s3' or 'swift'."""
    container: str
    """S3 calls it bucket."""
    prefix: str
    """Without a slash at its ends."""
    endpoint: str = ''
    """The URL of S3's server. '': Amazon's; Swift's is in the catalogue."""
    region: str = ''
    """'': the default one."""
    ca_file: str = ''
    """Certificates of authorities to trust; '': the system's."""

    @property
    def url(self) -> str:
        """The URL, as users write it."""
        return f'{self.kind}://{self.container}/{self.prefix}'

    def fields(self) -> dict[str, str]:
        """Return the fields for JSON; :func:`from_fields` reads them."""
        return dataclasses.asdict(self)


def is_protected(url: str) -> bool:
    """Return whether nobody on the way can read what is sent to a URL.

    It is encrypted, or of this host.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != 'http':
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(parts.hostname or '').is_loopback
    return parts.hostname == 'localhost'


def parse(url: str, endpoint: str = '', region: str = '', ca_file: str = ''
          ) -> Location:
    """The location that a user named.

    :param url: ``s3://BUCKET/PREFIX`` or ``swift://CONTAINER/PREFIX``
    :raises InvalidParameter: names the part that is wrong, and how
    """
    kind, separator, rest = url.partition('://')
    container, slash, prefix = rest.partition('/')
    if kind not in ('s3', 'swift') or not separator or not slash:
        raise exceptions.InvalidParameter(
            f'{url!r} is not s3://BUCKET/PREFIX or swift://CONTAINER/PREFIX')
    return _checked(Location(kind, container, prefix.strip('/'),
                             endpoint.rstrip('/'), region, ca_file))


def from_fields(fields: dict[str, Any]) -> Location:
    """The location out of a file's fields; trusts nothing.

    :raises InvalidParameter: they are no location
    """
    names = [field.name for field in dataclasses.fields(Location)]
    if set(fields) != set(names) or not all(
            isinstance(value, str) for value in fields.values()):
        raise exceptions.InvalidParameter('these are no fields of a location')
    if fields['kind'] not in ('s3', 'swift'):
        raise exceptions.InvalidParameter(
            f'no object store is called {fields["kind"]!r}')
    return _checked(Location(**fields))


def _checked(location: Location) -> Location:
    named = _BUCKET if location.kind == 's3' else _CONTAINER
    if not named.fullmatch(location.container):
        raise exceptions.InvalidParameter(
            f'{location.container!r} cannot be the name of a bucket or '
            'container')
    prefix = location.prefix
    if not _PREFIX.fullmatch(prefix) or len(prefix) > MAX_PREFIX or (
            {'.', '..'} & set(prefix.split('/'))):
        raise exceptions.InvalidParameter(
            f'the prefix {prefix!r} must have 1 to {MAX_PREFIX} of the '
            'characters A-Z a-z 0-9 _ . - and /')
    if location.region and not _REGION.fullmatch(location.region):
        raise exceptions.InvalidParameter(
            f'{location.region!r} cannot be the name of a region')
    if location.endpoint:
        _require_endpoint(location)
    return location


def _require_endpoint(location: Location) -> None:
    endpoint = location.endpoint
    try:
        parts = urllib.parse.urlsplit(endpoint)
        right = (parts.scheme in ('http', 'https') and parts.hostname
                 and not parts.username and not parts.password
                 and not parts.query and not parts.fragment
                 and parts.port != 0 and endpoint.isascii()
                 and endpoint.isprintable() and ' ' not in endpoint)
    except ValueError:
        right = False
    if not right:
        raise exceptions.InvalidParameter(
            f'the endpoint {endpoint!r} is not http://HOST:PORT or '
            'https://HOST:PORT; credentials belong into their own file')
    if location.kind == 'swift':
        raise exceptions.InvalidParameter(
            "Swift's endpoint is found in Keystone's catalogue: name none")
