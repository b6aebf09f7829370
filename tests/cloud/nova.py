# Licensed under the Apache License, Version 2.0 (the "License"); you may
# not use this file except in compliance with the License. You may obtain
# a copy of the License at
#
#      http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
# WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
# License for the specific language governing permissions and limitations
# under the License.
"""Nova: the API, conductor, scheduler, and one compute host.

All are one host, with one configuration. The API owns the databases: one for
the API, one for cell0, and one for the cell that the host is in.
"""

import contextlib
import shutil

from tests.cloud import keystone
from tests.cloud import service

HOST = 'cloud'
#: Memory in MiB. Each has one processor and a disk of 1 GiB.
FLAVORS = {'m1.nano': 128, 'm1.micro': 192}


def _options(cloud, directory):
    """nova.conf, by section."""
    services = cloud.services

    def client(user):
        """How Nova itself asks another service."""
        options = services['keystone'].middleware(user)
        for name in ('www_authenticate_uri', 'service_token_roles',
                     'service_token_roles_required'):
            del options[name]
        return options

    return {
        'DEFAULT': {
            'use_stderr': True,
            'debug': False,
            'host': HOST,
            'my_ip': '127.0.0.1',
            'transport_url': services['rabbitmq'].transport_url,
            'state_path': directory,
            'instances_path': directory / 'instances',
            'compute_driver': 'libvirt.LibvirtDriver',
            'reserved_host_memory_mb': 0,
            'cpu_allocation_ratio': 16,
            'ram_allocation_ratio': 4,
            'graceful_shutdown_timeout': 5,
        },
        'api_database': {'connection': cloud.database('nova_api')},
        'database': {'connection': cloud.database('nova')},
        'keystone_authtoken': services['keystone'].middleware('nova'),
        'service_user': {'send_service_user_token': True, **client('nova')},
        'placement': client('nova'),
        'neutron': client('nova'),
        'glance': {'region_name': keystone.REGION},
        'conductor': {'workers': 1},
        'scheduler': {'workers': 1, 'discover_hosts_in_cells_interval': 2},
        'libvirt': {
            'connection_uri': services['libvirt'].uri,
            'virt_type': 'qemu',
            'cpu_mode': 'none',
        },
        # Its steps that need root run as whoever runs the cloud, without
        # sudo.
        'nova_sys_admin': {'helper_command':
                           service.environment('nova') / 'bin'
                           / 'privsep-helper'},
        'vnc': {'enabled': False},
        'oslo_concurrency': {'lock_path': directory / 'lock'},
    }


def _configure(one):
    """Write the nova.conf of one of Nova's services; its path."""
    directory = one.cloud.directory / 'var' / 'nova'
    for name in ('instances', 'lock'):
        (directory / name).mkdir(parents=True, exist_ok=True)
    options = _options(one.cloud, directory)
    if one.name == 'nova-compute':
        # A compute host asks the conductor, and complains if it need not.
        del options['api_database'], options['database']
    return one.write('nova.conf', options)


class _Worker(service.Service):
    """A process of Nova's that takes calls from a queue."""

    # They ask Keystone and Placement as they start.
    needs = ('nova-api', 'rabbitmq', 'keystone', 'placement')

    @property
    def queue(self):
        return f'{self.name.removeprefix("nova-")}.{HOST}'

    @property
    def address(self):
        return f'queue {self.queue}'

    def launch(self):
        self.spawn([service.environment('nova') / 'bin' / self.name,
                    '--config-file', _configure(self)])

    def answers(self):
        return self.cloud.services['rabbitmq'].consumers(self.queue) > 0


class Conductor(_Worker):
    name = 'nova-conductor'
    title = "Nova's conductor"


class Scheduler(_Worker):
    name = 'nova-scheduler'
    title = "Nova's scheduler"


class Compute(_Worker):
    name = 'nova-compute'
    title = "Nova's compute host"
    needs = ('nova-conductor', 'nova-scheduler', 'glance', 'neutron',
             'libvirt')

    def answers(self):
        if not super().answers():
            return False
        # Known to the scheduler, too.
        with contextlib.closing(self.cloud.connect()) as admin:
            return any(host.state == 'up' and host.status == 'enabled'
                       for host in admin.compute.hypervisors())

    def furnish(self):
        with contextlib.closing(self.cloud.connect()) as admin:
            there = {flavor.name for flavor in admin.compute.flavors()}
            for name, ram in FLAVORS.items():
                if name not in there:
                    admin.compute.create_flavor(
                        name=name, ram=ram, vcpus=1, disk=1)


class Api(service.WsgiService):
    name = 'nova-api'
    title = "Nova's API"
    needs = ('mariadb',)
    application = 'nova.wsgi.osapi_compute:application'
    catalogue = ('compute', '/v2.1')
    user = 'nova'
    environment_name = 'nova'
    workers = 1

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
