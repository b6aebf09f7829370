#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""Asking a Glance through its API, by openstacksdk.

The SDK is imported when a Glance is asked, not before: only these few commands
need it (``pip install glance-dedup[glance]``).
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import os
from typing import Any

PAGE = 500
#: States in which Glance may be about to give an image its data.
UNDER_WAY = ('saving', 'uploading', 'importing')
#: States in which it has data.
WITH_DATA = ('active', 'deactivated')


class GlanceError(Exception):
    """Glance did not do what it was asked for, and why."""


@dataclasses.dataclass(frozen=True)
class Image:
    """What Glance says of an image."""

    image_id: str
    status: str
    owner: str
    size: int | None
    stores: frozenset[str]
    importing: frozenset[str]
    """Stores to which a copy is under way."""
    hash_name: str | None
    hash_value: str | None
    """As recorded at the upload: the multihash, or else MD5."""
    locations: frozenset[str] | None
    """URLs; None if Glance does not show them."""


def _words(text: Any) -> frozenset[str]:
    return frozenset(filter(None, str(text or '').split(',')))


def _image(record: dict[str, Any]) -> Image:
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
        else frozenset(place['url'] for place in locations))


def is_configured() -> bool:
    """Whether the environment names a cloud."""
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


class Glance:
    """One Glance.

    :param cloud: its name in clouds.yaml; None: what the environment says
    :param url: of one glance-api; None: what the catalogue says
    :raises GlanceError: it cannot be reached, or the SDK is missing
    """

    def __init__(self, cloud: str | None = None, url: str | None = None):
        try:
            import openstack
        except ImportError as e:
            raise GlanceError(
                'asking Glance needs openstacksdk, which is not installed: '
                "pip install 'glance-dedup[glance]'") from e
        options = {} if url is None else {'image_endpoint_override': url}
        with _errors('cannot reach Glance'):
            self._api = openstack.connect(cloud=cloud, **options).image
            self.url = (self._api.get_endpoint() or 'Glance').rstrip('/')

    def _request(self, method: str, path: str, expect: tuple[int, ...],
                 **options: Any) -> Any:
        with _errors(f'{self.url}: {method} {path}'):
            response = self._api.request(
                path, method, raise_exc=False, **options)
        if response.status_code not in expect:
            text = ' '.join(response.text.split())[:300]
            raise GlanceError(
                f'{self.url}: {method} {path}: {response.status_code} {text}')
        return response

    def need_administrator(self) -> None:
        """See whether Glance shows us the images of all projects.

        Only to administrators it does; what others do not see is no proof of
        anything.

        :raises GlanceError: it does not
        """
        # Glance's policy lets administrators alone list its tasks; and whom
        # it takes for one is what decides on images, too.
        response = self._request('GET', '/tasks?limit=1', (200, 403, 401))
        if response.status_code != 200:
            raise GlanceError(
                f'{self.url} does not take us for an administrator, so it '
                "shows only one project's images; use an account with the "
                'role admin')

    def images(self) -> Iterator[Image]:
        """All images, of all projects, the hidden ones, in all states."""
        for hidden in ('false', 'true'):
            path = (f'/images?visibility=all&os_hidden={hidden}'
                    f'&limit={PAGE}&sort=id:asc&member_status=all')
            while path:
                page = self._request('GET', path, (200,)).json()
                yield from map(_image, page['images'])
                path = page.get('next', '').removeprefix('/v2')

    def find(self, image_id: str) -> Image | None:
        """One image; None if Glance says that there is none."""
        response = self._request('GET', f'/images/{image_id}', (200, 404))
        if response.status_code == 404:
            return None
        return _image(response.json())

    def need_store(self, store: str) -> None:
        """See whether Glance has a store of this name.

        :raises GlanceError: it has not
        """
        found = [entry['id'] for entry in self._request(
            'GET', '/info/stores', (200,)).json()['stores']]
        if store not in found:
            raise GlanceError(
                f"{self.url} has no store '{store}', but "
                f'{", ".join(sorted(found))}')

    def add_location(self, image_id: str, url: str, store: str) -> None:
        """Give an image one more location, behind those that it has."""
        self._request(
            'PATCH', f'/images/{image_id}', (200,), json=[
                {'op': 'add', 'path': '/locations/-',
                 'value': {'url': url, 'metadata': {'store': store}}}],
            headers={'Content-Type':
                     'application/openstack-images-v2.1-json-patch'})
