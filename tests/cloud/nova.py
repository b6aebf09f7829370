# SPDX-License-Identifier: Apache-2.0
"""Nova: the API, conductor, scheduler, and compute hosts.

All are one host, with one configuration, unless the cloud has compute hosts.
The API owns the databases: one for the API, one for cell0, and one for the
cell that the hosts are in.
"""

import contextlib
import shutil

from tests.cloud import cloud_service
from tests.cloud import keystone_service

HOST = 'cloud'
#: Memory in MiB. Each has one processor and a disk of 1 GiB.
FLAVORS = {'m1.nano': 128, 'm1.micro': 192}


def _options(one, directory):
    """Return the nova.conf of one of Nova's services, by section."""
    cloud = one.cloud
    services = cloud.services

    def client(user):
        """Return the options of Nova as a client of another service."""
        options = services['keystone'].middleware(user)
        for name in ('www_authenticate_uri', 'service_token_roles',
                     'service_token_roles_required'):
            del options[name]
        return options

    options = {
        'DEFAULT': {
            'use_stderr': True,
            'debug': False,
            'host': one.host.name if one.host else HOST,
            'my_ip': one.host.ip if one.host else cloud.address,
            'transport_url': services['rabbitmq'].transport_url,
            'state_path': directory,
            'instances_path': directory / 'instances',
            'compute_driver': 'libvirt.LibvirtDriver',
            'reserved_host_memory_mb': 0,
            'cpu_allocation_ratio': 16,
            'ram_allocation_ratio': 4,
            'graceful_shutdown_timeout': 5,
            # Otherwise the scheduler looks for hosts up to a minute later.
            'periodic_fuzzy_delay': 0,
        },
        'api_database': {'connection': cloud.database('nova_api')},
        'database': {'connection': cloud.database('nova')},
        'keystone_authtoken': services['keystone'].middleware('nova'),
        'service_user': {'send_service_user_token': True, **client('nova')},
        'placement': client('nova'),
        'neutron': client('nova'),
        'glance': {'region_name': keystone_service.REGION},
        'conductor': {'workers': 1},
        'scheduler': {'workers': 1, 'discover_hosts_in_cells_interval': 2},
        # Its steps that need root run as the cloud's user, without sudo.
        'nova_sys_admin': {'helper_command':
                           one.prefix / 'bin' / 'privsep-helper'},
        'vnc': {'enabled': False},
        'oslo_concurrency': {'lock_path': directory / 'lock'},
    }
    if isinstance(one, Compute):
        # It uses the conductor, and logs an error if it need not.
        del options['api_database'], options['database']
        options['libvirt'] = {
            'connection_uri': services[one.there('libvirt')].uri,
            'virt_type': 'qemu',
            'cpu_mode': 'none',
        }
        if one.cache:
            options['glance']['endpoint_override'] = services[one.cache].url
    return options


def _configure(one):
    """Write the nova.conf of one of Nova's services; return its path."""
    directory = one.cloud.directory / 'var' / one.there('nova')
    for name in ('instances', 'lock'):
        (directory / name).mkdir(parents=True, exist_ok=True)
    return one.write('nova.conf', _options(one, directory))


class _Worker(cloud_service.Service):
    """A process of Nova that takes calls from a queue."""

    environment_name = 'nova'
    # Workers connect to Keystone and Placement as they start.
    needs = ('nova-api', 'rabbitmq', 'keystone', 'placement')

    @property
    def queue(self):
        kind = type(self).name.removeprefix('nova-')
        return f'{kind}.{self.host.name if self.host else HOST}'

    @property
    def address(self):
        return f'queue {self.queue}'

    def launch(self):
        self.spawn([self.prefix / 'bin' / type(self).name,
                    '--config-file', _configure(self)])

    def answers(self):
        return self.cloud.services['rabbitmq'].consumers(self.queue) > 0


class Conductor(_Worker):
    name = 'nova-conductor'
    title = "Nova's conductor"


class Scheduler(_Worker):
    name = 'nova-scheduler'
    title = "Nova's scheduler"

    def furnish(self):
        with contextlib.closing(self.cloud.connect()) as admin:
            there = {flavor.name for flavor in admin.compute.flavors()}
            for name, ram in FLAVORS.items():
                if name not in there:
                    admin.compute.create_flavor(
                        name=name, ram=ram, vcpus=1, disk=3)


class Compute(_Worker):
    name = 'nova-compute'
    title = "Nova's compute host"
    needs = ('nova-conductor', 'nova-scheduler', 'glance', 'neutron')

    @property
    def cache(self):
        """Return the name of its images' cache; None without one."""
        return self.there('dedupd') if self.host and self.host.cache else None

    @property
    def beside(self):
        return ('libvirt', 'dedupd') if self.cache else ('libvirt',)

    @property
    def instances(self):
        """Return the directory of servers' files; images are in ``_base``."""
        return (self.cloud.directory / 'var' / self.there('nova')
                / 'instances')

    def forget_images(self):
        """Delete cached images that no server uses, as Nova does in a day."""
        for path in (self.instances / '_base').glob('*'):
            # dedupd-nova-base removes links at the same time.
            path.unlink(missing_ok=True)

    def answers(self):
        if not super().answers():
            return False
        # The scheduler must have it, too.
        with contextlib.closing(self.cloud.connect()) as admin:
            return any(
                one.state == 'up' and one.status == 'enabled'
                and (self.host is None or one.name == self.host.name)
                for one in admin.compute.hypervisors())


class Api(cloud_service.WsgiService):
    name = 'nova-api'
    title = "Nova's API"
    needs = ('mariadb',)
    application = 'nova.wsgi.osapi_compute:application'
    catalogue = ('compute', '/v2.1')
    user = 'nova'
    environment_name = 'nova'

    def prepare(self):
        config = _configure(self)
        self.cloud.services['mariadb'].provide(
            self, 'nova', ['nova_api', 'nova_cell0', 'nova'],
            lambda: self._migrate(config))

    def _migrate(self, config):
        manage = [self.prefix / 'bin' / 'nova-manage',
                  '--config-file', config]
        # Cells are named by templates, which are filled in from nova.conf:
        # the next cloud has other ports.
        address = '{scheme}://{username}:{password}@{hostname}:{port}/'
        self.run([*manage, 'api_db', 'sync'])
        self.run([*manage, 'cell_v2', 'map_cell0', '--database_connection',
                  address + 'nova_cell0?{query}'])
        self.run([*manage, 'cell_v2', 'create_cell', '--name', 'cell1',
                  '--database_connection', address + '{path}?{query}',
                  '--transport-url', address + '{path}'])
        self.run([*manage, 'db', 'sync'])

    def launch(self):
        _configure(self)
        paste = self.prefix / 'etc' / 'nova' / 'api-paste.ini'
        shutil.copyfile(paste, self.etc / 'api-paste.ini')
        self.serve({'OS_NOVA_CONFIG_DIR': str(self.etc)})
