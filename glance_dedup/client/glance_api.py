# SPDX-License-Identifier: Apache-2.0

"""Asking a Glance through its API, by openstacksdk.

The SDK is imported when a Glance is asked, not before: only these few commands
need it (``pip install glance-dedup[glance]``).
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import os
import time
from typing import Any
import urllib.parse

PAGE = 500
#: States in which Glance may be about to give an image its data.
UNDER_WAY = ('saving', 'uploading', 'importing')
#: States in which an image has data.
WITH_DATA = ('active', 'deactivated')


#: Fields that the creator of an image's record may set.
SETTABLE = ('name', 'disk_format', 'container_format', 'min_disk', 'min_ram',
            'owner', 'visibility', 'os_hidden', 'tags')
# Further fields of a record: they are not properties.
_OWN = frozenset((
    *SETTABLE, 'id', 'protected', 'status', 'size', 'virtual_size',
    'checksum', 'os_hash_algo', 'os_hash_value', 'created_at', 'updated_at',
    'locations', 'direct_url', 'self', 'file', 'schema', 'stores'))
# The prefix of properties that Glance's tasks set.
_OF_TASKS = 'os_glance_'
_PATCH = {'Content-Type': 'application/openstack-images-v2.1-json-patch'}
#: Seconds that Glance and Keystone have for each answer.
TIMEOUT = 120
#: Seconds between two polls whether Glance has verified an image: at first,
#: and at last.
LOOKS = 0.1, 2.0
#: How slowly Glance may verify an image: bytes a second, and further seconds.
SLOWEST, MIN_TIMEOUT = 8 << 20, 120.0
# Number of Glance's attempts to take an image's data: the cause of a failure
# may be over the next time.
_TRIES = 2

Record = dict[str, Any]


class GlanceError(Exception):
    """Glance did not execute our request, for the reason in the message.

    :ivar code: the HTTP status, if Glance answered
    """

    def __init__(self, message: str, code: int | None = None):
        super().__init__(message)
        self.code = code


class DataNotTaken(GlanceError):
    """Glance has tried to take an image's data, and has ended with none."""


@dataclasses.dataclass(frozen=True)
class Image:
    """Glance's facts about an image."""

    image_id: str
    status: str
    owner: str
    size: int | None
    stores: frozenset[str]
    importing: frozenset[str]
    """Stores to which a copy is under way."""
    hash_name: str | None
    hash_value: str | None
    """The hash recorded at the upload: the multihash, or else MD5."""
    locations: frozenset[str] | None
    """URLs; None if Glance does not show them."""
    name: str | None = None
    """Its owner's name for it; any text."""


def _words(text: Any) -> frozenset[str]:
    return frozenset(filter(None, str(text or '').split(',')))


def properties(record: Record) -> dict[str, str]:
    """The properties that users or operators gave an image."""
    return {name: value for name, value in record.items()
            if name not in _OWN and not name.startswith(_OF_TASKS)}


def image_of(record: Record) -> Image:
    """An image, from Glance's record of it."""
    name, value = record.get('os_hash_algo'), record.get('os_hash_value')
    if not value:
        name, value = 'md5', record.get('checksum')
    locations = record.get('locations')
    return Image(
        record['id'], record['status'], record.get('owner') or '',
        record.get('size'), _words(record.get('stores')),
        _words(record.get('os_glance_importing_to_stores')),
        name if value else None, value or None,
        None if locations is None
        else frozenset(place['url'] for place in locations),
        record.get('name'))


def is_configured() -> bool:
    """Return whether the environment names a cloud."""
    return any(os.environ.get(name) for name in (
        'OS_CLOUD', 'OS_AUTH_URL', 'OS_AUTH_TYPE'))


@contextlib.contextmanager
def _errors(what: str) -> Iterator[None]:
    from keystoneauth1 import exceptions as keystone
    from openstack import exceptions as sdk

    try:
        yield
    except (sdk.SDKException, keystone.ClientException) as e:
        details = getattr(e, 'details', None)
        raise GlanceError(f'{what}: {details or e}') from e


def _quoted(name: str) -> str:
    """A name as a part of a path."""
    return urllib.parse.quote(name, safe='')


def _path(image_id: str, *parts: str) -> str:
    return '/'.join(('/images', *map(_quoted, (image_id, *parts))))


def _pointer(name: str) -> str:
    """A name as a part of a JSON pointer."""
    return name.replace('~', '~0').replace('/', '~1')


class Glance:
    """One Glance.

    :param cloud: its name in clouds.yaml; None: the environment's cloud
    :param url: the URL of one glance-api; None: the one in the catalogue
    :raises GlanceError: Glance cannot be reached, or the SDK is missing
    """

    def __init__(self, cloud: str | None = None, url: str | None = None):
        try:
            import openstack
        except ImportError as e:
            raise GlanceError(
                'asking Glance needs openstacksdk, which is not installed: '
                "pip install 'glance-dedup[glance]'") from e
        options: dict[str, Any] = (
            {} if url is None else {'image_endpoint_override': url})
        with _errors('cannot reach Glance'):
            self._cloud = openstack.connect(
                cloud=cloud, api_timeout=TIMEOUT, **options)
            self._api = self._cloud.image
            self.url = (self._api.get_endpoint() or 'Glance').rstrip('/')

    def _request(self, method: str, path: str, expect: tuple[int, ...],
                 **options: Any) -> Any:
        with _errors(f'{self.url}: {method} {path}'):
            response = self._api.request(
                path, method, raise_exc=False, **options)
        if response.status_code not in expect:
            text = ' '.join(response.text.split())[:300]
            raise GlanceError(
                f'{self.url}: {method} {path}: {response.status_code} {text}',
                response.status_code)
        return response

    def require_administrator(self) -> None:
        """Check that Glance shows us the images of all projects.

        It does so only for administrators. If others do not see an image, that
        proves nothing.

        :raises GlanceError: Glance does not show us all images
        """
        # Glance's policy lets only administrators list its tasks, and takes
        # the same users for administrators when it shows images.
        response = self._request('GET', '/tasks?limit=1', (200, 403, 401))
        if response.status_code != 200:
            raise GlanceError(
                f'{self.url} does not take us for an administrator, so it '
                "shows only one project's images; use an account with the "
                'role admin')

    def require_service(self) -> None:
        """Check that Glance lets us set the location of an image's data.

        :raises GlanceError: it does not
        """
        with _errors(f'{self.url}: cannot log in'):
            access = getattr(self._cloud.session.auth, 'get_access',
                             lambda session: None)(self._cloud.session)
        if access is not None and 'service' not in access.role_names:
            raise GlanceError(
                f"{self.url}: the account has not the role 'service' (but "
                f'{", ".join(sorted(access.role_names)) or "none"}), without '
                "which Glance takes no location: use an account with the "
                "roles 'admin' and 'service'")

    def has_project(self, project: str) -> bool | None:
        """Return whether Keystone knows a project; None: it does not show."""
        from keystoneauth1 import exceptions
        from keystoneauth1 import plugin

        session = self._cloud.session
        try:
            # Not by the catalogue: a region may share its Keystone.
            response = session.get(
                f'/projects/{_quoted(project)}', raise_exc=False,
                endpoint_filter={'interface': plugin.AUTH_INTERFACE,
                                 'version': (3,)})
        except exceptions.ClientException:
            # There is no Keystone. Nothing depends on the answer.
            return None
        return {200: True, 404: False}.get(response.status_code)

    def images(self) -> Iterator[Image]:
        """All images, of all projects, in all states, with hidden ones."""
        return map(image_of, self.records())

    def records(self) -> Iterator[Record]:
        """The records of `images`, as Glance sends them."""
        for hidden in ('false', 'true'):
            path = (f'/images?visibility=all&os_hidden={hidden}'
                    f'&limit={PAGE}&sort=id:asc&member_status=all')
            while path:
                page = self._request('GET', path, (200,)).json()
                yield from map(self._checked, page['images'])
                path = page.get('next', '').removeprefix('/v2')

    def find(self, image_id: str) -> Image | None:
        """Return one image; None if Glance has none."""
        record = self.record(image_id)
        return None if record is None else image_of(record)

    def record(self, image_id: str) -> Record | None:
        """The record of one image, as Glance sends it; None: there is none."""
        response = self._request('GET', _path(image_id), (200, 404))
        return (None if response.status_code == 404
                else self._checked(response.json()))

    def head(self, image_id: str, length: int) -> bytes:
        """The first bytes of an image.

        :param length: at least 1, and at most the image's size
        :raises GlanceError: Glance does not send them all
        """
        path = _path(image_id, 'file')
        # A store that knows no ranges sends all of the image.
        response = self._request(
            'GET', path, (200, 206), stream=True,
            headers={'Range': f'bytes=0-{length - 1}',
                     'Accept': 'application/octet-stream'})
        data = b''
        try:
            with contextlib.closing(response):
                for piece in response.iter_content(length):
                    data += piece
                    if len(data) >= length:
                        return data[:length]
        except OSError as e:    # as all errors of the HTTP client
            raise GlanceError(f'{self.url}: GET {path}: {e}') from e
        raise GlanceError(f'{self.url}: GET {path}: {len(data)} of {length} '
                          'bytes came')

    def _checked(self, record: Any) -> Record:
        """Glance's record of an image, if its main fields are valid.

        :raises GlanceError: they are not
        """
        if not (isinstance(record, dict) and isinstance(record.get('id'), str)
                and isinstance(record.get('status'), str)
                and isinstance(record.get('size'), int | None)
                and isinstance(record.get('name'), str | None)):
            raise GlanceError(
                f'{self.url}: the answer is not the record of an image: '
                f'{str(record)[:80]}', 200)
        return record

    def require_store(self, store: str) -> None:
        """Check that Glance has a store of this name.

        :raises GlanceError: it has none
        """
        found = [entry['id'] for entry in self._request(
            'GET', '/info/stores', (200,)).json()['stores']]
        if store not in found:
            raise GlanceError(
                f"{self.url} has no store '{store}', but "
                f'{", ".join(sorted(found))}')

    def add_location(self, image_id: str, url: str, store: str) -> None:
        """Append a location to those of an image."""
        self._request(
            'PATCH', f'/images/{image_id}', (200,), json=[
                {'op': 'add', 'path': '/locations/-',
                 'value': {'url': url, 'metadata': {'store': store}}}],
            headers=_PATCH)

    def locations(self, image_id: str) -> list[str]:
        """Return the URLs of an image's locations, in Glance's order.

        :raises GlanceError: Glance does not show them, or has no such image
        """
        record = self.record(image_id) or {}
        try:
            return [place['url'] for place in record['locations']]
        except (KeyError, TypeError) as e:
            raise GlanceError(f'{self.url} does not show the locations of '
                              f'image {image_id}') from e

    def remove_location(self, image_id: str, place: int) -> None:
        """Remove a location of an image; Glance deletes the data there.

        :param place: where it is in :meth:`locations`
        """
        self._request(
            'PATCH', f'/images/{image_id}', (200,), headers=_PATCH, json=[
                {'op': 'remove', 'path': f'/locations/{place}'}])

    # -- making another Glance's image --------------------------------------

    def create(self, record: Record) -> Record:
        """Create an image's record; returns it as Glance stored it.

        :raises GlanceError: with the code 409 if the id is in use, or was
        """
        return self._checked(self._request(
            'POST', '/images', (201,), json=record).json())

    def set(self, image_id: str, name: str, value: Any) -> None:
        """Set a property of an image."""
        self._request(
            'PATCH', _path(image_id), (200,), headers=_PATCH,
            json=[{'op': 'add', 'path': f'/{_pointer(name)}',
                   'value': value}])

    def members(self, image_id: str) -> dict[str, str]:
        """The projects that share an image, and whether they accepted it."""
        return {found['member_id']: found['status'] for found in self._request(
            'GET', _path(image_id, 'members'), (200,)).json()['members']}

    def add_member(self, image_id: str, project: str, status: str) -> None:
        """Share an image with a project; set whether the project accepts it.

        :param status: ``pending``, ``accepted`` or ``rejected``
        """
        self._request('POST', _path(image_id, 'members'), (200, 409),
                      json={'member': project})
        self._request('PUT', _path(image_id, 'members', project), (200,),
                      json={'status': status})

    def add_data(self, image_id: str, url: str, hash_name: str | None,
                 hash_value: str | None) -> None:
        """Tell Glance where the data of a queued image is.

        Glance then goes on by itself: it reads the data, unless it is
        configured not to (``do_secure_hash``), and the image becomes active,
        or queued again.

        :param hash_name: the hash that verifies the data; None: no hash
        :raises GlanceError: with the code 409 if the image is not queued, or
            not any more
        """
        body: Record = {'url': url}
        if hash_name is not None:
            body['validation_data'] = {'os_hash_algo': hash_name,
                                       'os_hash_value': hash_value}
        self._request('POST', _path(image_id, 'locations'), (202,),
                      json=body)

    def give_data(self, image_id: str, size: int, hash_name: str | None,
                  hash_value: str | None, offer: Callable[[], str],
                  step: Callable[[], None] = lambda: None) -> Record | None:
        """Tell Glance where an image's data is, and wait until it has it.

        A task of Glance's that takes the location, and fails, deletes the data
        there. Then this tries once more.

        :param offer: called before each try; it sees that the data is there,
            and returns the location
        :param step: called before each pause
        :returns: the record; None: it was deleted meanwhile
        :raises DataNotTaken: Glance refused the data, and has deleted it
        :raises GlanceError: as :meth:`add_data` and :meth:`wait_for_data`
        """
        for left in reversed(range(_TRIES)):
            url = offer()
            try:
                self.add_data(image_id, url, hash_name, hash_value)
            except GlanceError as e:
                # If it is not queued, an earlier run, or another user, sent
                # Glance the same.
                if e.code != 409:
                    raise
            try:
                return self.wait_for_data(image_id, size, step)
            except DataNotTaken:
                if not left:
                    raise
        raise AssertionError

    def wait_for_data(self, image_id: str, size: int,
                      step: Callable[[], None] = lambda: None
                      ) -> Record | None:
        """Wait until Glance has verified the data of :meth:`add_data`.

        :param step: called before each pause
        :returns: the record; None: it was deleted meanwhile
        :raises DataNotTaken: Glance refused the data
        :raises GlanceError: Glance takes too long, or does not answer
        """
        record = self._wait(image_id, size, step, lambda record: (
            record['status'] in (*WITH_DATA, 'queued')))
        if record is not None and record['status'] == 'queued':
            said = self.last_message(image_id)
            raise DataNotTaken(
                f'{self.url} did not take the data of image {image_id} '
                f'({said or "it does not say why"}): either it has not '
                'the hash that was recorded, or Glance could not read '
                'it; its log says which', 200)
        return record

    def wait_for_task(self, image_id: str, size: int) -> None:
        """Wait until none of Glance's tasks has an image, if it knows it.

        :raises GlanceError: Glance takes too long, or does not answer
        """
        self._wait(image_id, size, lambda: None, lambda record: True)

    def _wait(self, image_id: str, size: int, step: Callable[[], None],
              has_ended: Callable[[Record], bool]) -> Record | None:
        delay, last = LOOKS
        left = MIN_TIMEOUT + size / SLOWEST
        while True:
            record = self.record(image_id)
            if record is None:
                return None
            # While one of Glance's tasks has the image, the task may overwrite
            # the new value with the one that it read before.
            if 'os_glance_import_task' not in record and has_ended(record):
                return record
            if left <= 0:
                raise GlanceError(
                    f'{self.url} still verifies image {image_id}, or has '
                    'forgotten to; try again later', 200)
            step()
            time.sleep(delay)
            left -= delay
            delay = min(2 * delay, last)

    def add_nothing(self, image_id: str) -> None:
        """Upload no bytes to a queued image that is empty.

        Glance takes no location of an empty image.
        """
        self._request('PUT', _path(image_id, 'file'), (204,), data=b'',
                      headers={'Content-Type': 'application/octet-stream'})

    def last_message(self, image_id: str) -> str:
        """The message of Glance's last task with an image; '' if none."""
        response = self._request('GET', _path(image_id, 'tasks'),
                                 (200, 403, 404))
        tasks = (response.json()['tasks'] if response.status_code == 200
                 else [])
        last: Record = max(
            tasks, key=lambda task: task.get('updated_at') or '', default={})
        return ' '.join(str(last.get('message') or '').split())[:300]

    def delete(self, image_id: str) -> None:
        """Delete an image if it exists, even a protected one."""
        record = self.record(image_id)
        if record is None:
            return
        if record.get('protected'):
            self.set(image_id, 'protected', False)
        self._request('DELETE', _path(image_id), (204, 404))
