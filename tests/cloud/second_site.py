# SPDX-License-Identifier: Apache-2.0
"""A second site: a Glance and a dedupd, with a repository of their own.

Both sites have one Keystone, in which the second is a region, and one
database server. Images are sent there with ``glance-dedup image replicate``.
"""

import contextlib

from glance_dedup.base import exceptions
from glance_dedup.repository import image_repository
from tests.cloud import dedupd
from tests.cloud import glance_service

REGION = 'RegionTwo'


def register(identity, url):
    """Register a region in Keystone, and the Glance there."""
    if not any(one.id == REGION for one in identity.regions()):
        identity.create_region(id=REGION)
    service = next(identity.services(type='image'))
    if not any(identity.endpoints(service_id=service.id, region_id=REGION)):
        identity.create_endpoint(
            service_id=service.id, interface='public', region_id=REGION,
            url=url)


def account(home):
    """Return an account that may give images a location at the second site.

    :param home: the administrator's entry, at the first
    """
    auth = {**home['auth'], 'username': 'glance', 'project_name': 'service'}
    return {**home, 'auth': auth, 'region_name': REGION}


class Dedupd(dedupd.Dedupd):
    """The daemon, which receives images over TLS."""

    name = 'other/dedupd'
    title = 'dedupd of the other site'
    needs = ()

    _has_swift = False

    @property
    def socket(self):
        return self.directory / 'dedupd.sock'

    @property
    def repository(self):
        return self.cloud.directory / 'stores' / 'other'

    def _of_the_store(self):
        return {'datadir': self.repository,
                'filter_dir': self.directory / 'filter', 'filter_mib': 16}

    def _sections(self):
        return {'DEFAULT': {'debug': True}, 'dedupd': {
            **self.common(self._of_the_store()),
            'glance_url': self.cloud.url('other/glance')}}

    def prepare(self):
        super().prepare()
        with contextlib.suppress(exceptions.ImageExists):
            image_repository.Repository.create(self.repository)


class Glance(glance_service.Glance):
    """Glance, with one store."""

    name = 'other/glance'
    title = 'Glance of the other site'
    # It registers itself after the first Glance.
    needs = ('mariadb', 'keystone', 'other/dedupd')
    catalogue = None
    database = 'glance_other'

    @property
    def told(self):
        return None

    def options(self):
        return self.common_options()

    def stores(self):
        daemon = self.cloud.services['other/dedupd']
        return {'dedup': {
            'type': 'dedup',
            'dedup_store_datadir': daemon.repository,
            'dedup_store_filter_dir': daemon.directory / 'filter',
            'dedup_store_filter_mib': 16,
            'dedup_store_dedupd_socket': daemon.socket,
        }}, 'dedup'

    def furnish(self):
        with contextlib.closing(self.cloud.connect()) as admin:
            register(admin.identity, self.url)
