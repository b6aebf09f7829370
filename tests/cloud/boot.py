# SPDX-License-Identifier: Apache-2.0
"""Servers started from Glance's images, and watched on their consoles.

The images are those of :mod:`tests.cloud.disk_images`, whose servers report on
the console when they are up.
"""

import contextlib
import hashlib
import re
import time
from typing import NamedTuple

from openstack import exceptions

from tests.cloud import cloud_service

# Seconds. Processors are emulated, and the machine may be busy.
BOOT_TIMEOUT = 600
IMAGE_TIMEOUT = 600
DELETE_TIMEOUT = 300
POLL = 1

FLAVOR = 'm1.nano'

UP = re.compile(r'^glance-dedup: up: (?P<md5>[0-9a-f]{32}) '
                r'(?P<state>(?P<boots>[0-9]+) (?P<message>.*?))\r?$',
                re.MULTILINE)
FAILED = re.compile(r'^glance-dedup: FAILED: .*?(?=\r?$)', re.MULTILINE)
# uWSGI's line about an answer, which is written after the last byte.
_DOWNLOAD = r'GET /v2/images/{}/file => generated (\d+) bytes in (\d+) msecs'


class Shown(NamedTuple):
    """Output on the console of a server that is up."""

    message: str
    #: number of starts of its disk
    boots: int


class Download(NamedTuple):
    """Record of a download in the log of Glance, its server."""

    size: int
    seconds: float


def upload(connection, path, name, disk_format='raw', store=None):
    """Upload an image from a file; return its id.

    :param store: of Glance's; the default store if not given
    """
    def checked(response):
        if not response.ok:
            raise cloud_service.CloudError(
                f'{path} was not uploaded: {response.status_code} '
                f'{response.text}')
        return response

    # The SDK's own call does not support stores.
    image = checked(connection.image.post('/images', json={
        'name': name, 'disk_format': disk_format,
        'container_format': 'bare'})).json()['id']
    headers = {'Content-Type': 'application/octet-stream'}
    if store is not None:
        headers['X-Image-Meta-Store'] = store
    with open(path, 'rb') as data:
        checked(connection.image.put(
            f'/images/{image}/file', data=data, headers=headers))
    return image


def create(connection, image, name, host=None):
    """Create a server of an image, without networks; return its id.

    :param host: the compute host, which only `admin` may choose
    """
    flavor = connection.compute.find_flavor(FLAVOR, ignore_missing=False)
    where = {'availability_zone': f'nova:{host}'} if host else {}
    return connection.compute.create_server(
        name=name, image_id=image, flavor_id=flavor.id, networks='none',
        **where).id


def read(console):
    """Return the output on a console; None if its server is not up yet.

    The server prints it three times, and one of them has to be intact.
    """
    if failed := FAILED.search(console):
        raise cloud_service.CloudError(f'a server says {failed[0]!r}')
    for found in UP.finditer(console):
        if hashlib.md5(found['state'].encode(),
                       usedforsecurity=False).hexdigest() == found['md5']:
            return Shown(found['message'], int(found['boots']))
    return None


def shown(connection, server):
    """Return the output on a server's console; None if it is not up yet.

    A server whose console does not exist yet is not up, either.
    """
    response = connection.compute.post(
        f'/servers/{server}/action', json={'os-getConsoleOutput': {}})
    if response.status_code in (404, 409):
        return None
    response.raise_for_status()
    return read(response.json()['output'])


def wait_until_up(connection, server):
    """Return the output on the server's console, once it is up."""
    deadline = time.monotonic() + BOOT_TIMEOUT
    while True:
        found = connection.compute.get_server(server)
        if found.status == 'ERROR':
            raise cloud_service.CloudError(
                f'server {found.name} has failed: {found.fault}')
        if found.status == 'ACTIVE':
            console = shown(connection, server)
            if console:
                return console
        if time.monotonic() > deadline:
            raise cloud_service.CloudError(
                f'server {found.name} is not up after {BOOT_TIMEOUT} s; '
                f'its status is {found.status}, its task '
                f'{found.task_state}')
        time.sleep(POLL)


def snapshot(connection, server, name):
    """Take an image of a server's disk; return its id once it is complete."""
    image = connection.compute.create_server_image(server, name)
    deadline = time.monotonic() + IMAGE_TIMEOUT
    while True:
        found = connection.image.get_image(image.id)
        # Until Nova has recorded it, too, Nova refuses operations on the
        # server.
        if found.status == 'active' and connection.compute.get_server(
                server).task_state is None:
            return image.id
        if found.status not in ('queued', 'saving', 'active') or (
                time.monotonic() > deadline):
            raise cloud_service.CloudError(
                f'snapshot {name} has not come: its status is '
                f'{found.status}')
        time.sleep(POLL)


def delete(connection, server):
    """Delete a server, and return when it is gone."""
    deadline = time.monotonic() + DELETE_TIMEOUT
    with contextlib.suppress(exceptions.NotFoundException):
        connection.compute.delete_server(server, ignore_missing=False)
        while found := connection.compute.get_server(server):
            if found.status == 'ERROR' or time.monotonic() > deadline:
                raise cloud_service.CloudError(
                    f'server {found.name} was not deleted: its status is '
                    f'{found.status}, its task {found.task_state}')
            time.sleep(POLL)


def downloads(cloud, image):
    """Return all whole downloads of an image, from Glance's log."""
    log = cloud.glance.log.read_text(errors='replace')
    return [Download(int(size), int(milliseconds) / 1000)
            for size, milliseconds in re.findall(
                _DOWNLOAD.format(re.escape(image)), log)]
