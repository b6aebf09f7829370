# SPDX-License-Identifier: Apache-2.0
"""A small OpenStack cloud on one machine: real services, one directory.

``tools/cloud`` is this as a command; tests have it as the fixture `cloud`::

    with Cloud(directory) as cloud:
        cloud.up()
        admin = cloud.connect()
        admin.image.create_image(...)

Below the directory are ``etc/NAME/``, ``log/NAME.log`` and ``var/NAME/`` for
each service, the stores in ``stores/NAME``, and, for clients, ``clouds.yaml``
and ``openrc``. All is on loopback, unless the cloud has compute hosts
(:mod:`tests.cloud.compute_host`). By its
:class:`~tests.cloud.cloud_state.State` a cloud outlives the process that
started it.
"""

import concurrent.futures
import contextlib
import os
import pathlib
import shlex
import shutil
import threading
import time

import yaml

from glance_dedup.base import exceptions
from glance_dedup.repository import image_repository
from tests.cloud import barbican
from tests.cloud import broker
from tests.cloud import cloud_service
from tests.cloud import cloud_state
from tests.cloud import compute_host
from tests.cloud import dedupd
from tests.cloud import glance_service
from tests.cloud import glance_settings
from tests.cloud import keystone_service
from tests.cloud import libvirt
from tests.cloud import live_process
from tests.cloud import mariadb
from tests.cloud import neutron
from tests.cloud import nova
from tests.cloud import placement
from tests.cloud import second_site
from tests.cloud import swift_service

CloudError = cloud_service.CloudError

#: The order of the services in a table; they are ended in reverse.
SERVICES = (mariadb.MariaDB, broker.Broker, keystone_service.Keystone,
            swift_service.Swift, dedupd.Dedupd, glance_service.Glance,
            barbican.Barbican, placement.Placement, neutron.Neutron,
            nova.Api, nova.Conductor, nova.Scheduler)
#: The services of the other site, if there is one.
OTHER = (second_site.Dedupd, second_site.Glance)
#: The services of a compute host.
COMPUTE = (libvirt.Libvirt, nova.Compute)

LOOPBACK = '127.0.0.1'
#: Size of a group's blocks that may move.
GROUP_SLOTS = 1024
NEED_MIB = 2048
# A Unix socket's path has at most 107 bytes.
PATH_BYTES = 107 - len(f'/{libvirt.SOCKET}')

_OPENRC = """\
# Source this, then use: openstack image list
export OS_CLIENT_CONFIG_FILE={clouds_yaml}
export OS_CLOUD=admin
# The services are on this machine, whatever proxy there is.
export no_proxy={address} NO_PROXY={address}
"""


class Cloud:
    """A cloud in a directory, running or not.

    :param directory: for all of its files; empty, missing, or a cloud's
    :param stores: Glance's stores by name; of each its ``type`` and options.
        A store of the type `dedup` or `file` has its data in
        ``stores/NAME`` unless the options say otherwise. If not given, those
        that the cloud had; at first `dedup` and `file`.
    :param default_store: the first if not given
    :param glance_options: more of glance-api.conf, by section
    :param hosts: compute hosts of their own, by names of two letters, and
        whether each has a cache; besides those that the cloud had. If there
        are none, its one compute host is the machine of all other services
    :param site: whether to have a second site, besides what the cloud had
    :param swift: whether groups move to Swift, if the cloud is new or had that
    :param settings: of Glance, of the form ``[SECTION.]OPTION=VALUE``, besides
        those that the cloud had
    :param say: called with lines about the progress
    """

    def __init__(self, directory, stores=None, default_store=None,
                 glance_options=None, hosts=None, site=False, swift=False,
                 settings=(), say=lambda text: None):
        self.directory = pathlib.Path(directory).resolve()
        self._cancelled = threading.Event()
        self.say = say
        self._make_directory()
        self.state = cloud_state.State(self.directory / 'state.json')
        if stores or default_store or glance_options or not self.state.glance:
            self.configure_glance(
                stores or {'dedup': {'type': 'dedup'},
                           'file': {'type': 'file'}},
                default_store, glance_options)
        # All are checked before any is recorded.
        all_hosts = hosts and compute_host.joined(self.state, hosts)
        if swift:
            self._require_no_other_repository()
        if settings:
            self._set_glance(settings)
        if all_hosts:
            self.state.set_hosts(all_hosts)
        if site:
            self.state.set_site()
        if swift:
            self.state.set_swift()
        self.hosts = {
            name: compute_host.Host(self, name, cache)
            for name, cache in self.state.hosts.items()}
        self.services = {one.name: one for one in self._services()}
        self._write_clients()

    def _services(self):
        yield from self.hosts.values()
        for service in SERVICES:
            yield service(self)
        for service in OTHER if self.state.site else ():
            yield service(self)
        for host in self.hosts.values() or [None]:
            if host and host.cache:
                yield dedupd.Cache(self, host)
            for service in COMPUTE:
                yield service(self, host)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.down()

    def _make_directory(self):
        place = self.directory
        if len(os.fsencode(place)) > PATH_BYTES:
            raise CloudError(
                f'{place} is too long: a socket below it could not be named.\n'
                f'What to do: give --dir a path of at most {PATH_BYTES} '
                'bytes.')
        place.mkdir(parents=True, exist_ok=True)
        if any(place.iterdir()) and not (place / 'state.json').exists():
            raise CloudError(
                f'{place} has something in it that is no cloud.\n'
                'What to do: give --dir another directory, or empty it.')
        # Logs and configurations have the password.
        place.chmod(0o700)
        for name in ('tmp', 'log', 'stores'):
            (place / name).mkdir(exist_ok=True)

    # -- Glance's settings ----------------------------------------------------

    @property
    def settings(self):
        """Return single settings of Glance and its stores, by section."""
        return self.state.glance['settings']

    @property
    def stores(self):
        return {name: {**options, **self.settings.get(name, {})}
                for name, options in self.state.glance['stores'].items()}

    @property
    def default_store(self):
        return self.state.glance['default_store']

    @property
    def glance_options(self):
        options = {name: dict(one)
                   for name, one in self.state.glance['options'].items()}
        for section, values in self.settings.items():
            if section not in self.state.glance['stores']:
                options.setdefault(section, {}).update(values)
        return options

    @property
    def dedup_store(self):
        """Return the options of the first store of the type dedup, if any."""
        return next((options for options in self.stores.values()
                     if options['type'] == 'dedup'), {})

    @property
    def repository(self):
        """Return the path of the first dedup store; None if there is none."""
        return self.dedup_store.get('dedup_store_datadir')

    def configure_glance(self, stores=None, default_store=None, options=None):
        """Set Glance's settings from its next start on; None leaves one."""
        there = self.state.glance or {'options': {}, 'settings': {}}
        if stores is not None:
            default_store = default_store or next(iter(stores))
        stores = stores or there['stores']
        self.state.set_glance({
            **there,
            'stores': self._placed(stores),
            'default_store': default_store or there['default_store'],
            'options': there['options'] if options is None else options,
        })

    def _set_glance(self, words):
        settings = {name: dict(one) for name, one in self.settings.items()}
        for section, values in glance_settings.parse(
                words, self.stores).items():
            settings.setdefault(section, {}).update(values)
        self.state.set_glance({**self.state.glance, 'settings': settings})

    def _require_no_other_repository(self):
        if self.state.is_used and not self.state.swift:
            raise CloudError(
                'This cloud was started without Swift, with a repository '
                'whose groups stay on the disk.\nWhat to do: tools/cloud '
                'down, and then tools/cloud up with all options.')

    def _placed(self, stores):
        """Return the stores with defaults for their missing options."""
        placed = {}
        first = True
        for name, options in stores.items():
            place = str(self.directory / 'stores' / name)
            if options['type'] == 'dedup':
                defaults = {
                    'dedup_store_datadir': place,
                    'dedup_store_filter_dir': str(self.directory / 'filter'),
                    'dedup_store_filter_mib': 16,
                }
                if first:
                    defaults['dedup_store_dedupd_socket'] = str(
                        self.directory / 'dedupd.sock')
                first = False
                options = {**defaults, **options}
            elif options['type'] == 'file':
                options = {'filesystem_store_datadir': place, **options}
            placed[name] = {key: value if isinstance(value, (bool, int))
                            else str(value) for key, value in options.items()}
        return placed

    def make_repositories(self):
        for options in self.stores.values():
            if options['type'] == 'dedup':
                with contextlib.suppress(exceptions.ImageExists):
                    self._make_repository(options['dedup_store_datadir'])

    def _make_repository(self, path):
        if not self.state.swift or path != self.repository:
            image_repository.Repository.create(path)
            return
        # Small images fill a group, too: only full ones move.
        image_repository.Repository.create(path, group_slots=GROUP_SLOTS)

    # -- for services ------------------------------------------------------

    @property
    def password(self):
        return self.state.password

    @property
    def address(self):
        """Return the listening address for compute hosts."""
        if not self.state.hosts:
            return LOOPBACK
        return self.state.address('cloud')

    def database(self, name):
        """Return the URL of a database."""
        return self.services['mariadb'].database(name)

    def marked(self):
        """Return all processes of this cloud, recorded or not."""
        return live_process.marked(self.directory)

    def check(self):
        if self._cancelled.is_set():
            raise cloud_service.Cancelled('interrupted')

    # -- for clients -------------------------------------------------------

    @property
    def clouds_yaml(self):
        return self.directory / 'clouds.yaml'

    @property
    def glance(self):
        return self.services['glance']

    def url(self, name):
        return self.services[name].url

    def connect(self, cloud='admin'):
        """Return the SDK's connection as `admin` or `demo`."""
        return self.services['keystone'].connect(cloud, cloud)

    def _write_clients(self):
        def one(name):
            return {
                'auth': {
                    'auth_url': f'{self.url("keystone")}/v3',
                    'username': name,
                    'password': self.password,
                    'project_name': name,
                    'user_domain_id': 'default',
                    'project_domain_id': 'default',
                },
                'region_name': keystone_service.REGION,
                'identity_api_version': 3,
            }
        clouds = {name: one(name) for name in ('admin', 'demo')}
        if self.state.site:
            clouds['other'] = second_site.account(clouds['admin'])
        for path, text in (
                (self.clouds_yaml, yaml.safe_dump({'clouds': clouds})),
                (self.directory / 'openrc', _OPENRC.format(
                    clouds_yaml=shlex.quote(str(self.clouds_yaml)),
                    address=self.address))):
            path.touch(0o600)
            path.write_text(text)

    # -- up and down -------------------------------------------------------

    def environments(self, services=None):
        """Return the environments below .services/ of these services.

        :param services: as of :meth:`up`
        """
        used = {self.services[name].environment_name
                for name in self._wanted(services)}
        return sorted(used - {None})

    def _wanted(self, services):
        """Return services and their needs; by default non-optional ones."""
        return self._closure(services or [
            name for name, one in self.services.items() if not one.optional])

    def _closure(self, names):
        """Return services and their needs, in the order of `services`."""
        wanted = set()
        todo = list(names)
        while todo:
            name = todo.pop()
            if name not in self.services:
                raise CloudError(
                    f'There is no service {name}.\nWhat to do: name some of '
                    f'{", ".join(self.services)}.')
            if name not in wanted:
                wanted.add(name)
                todo += self.services[name].needs
        return [name for name in self.services if name in wanted]

    def up(self, services=None):
        """Start stopped services, independent ones in parallel.

        :param services: names of the wanted ones, besides their needs; all
            that are not optional if not given
        """
        names = self._wanted(services)
        free = shutil.disk_usage(self.directory).free >> 20
        if free < NEED_MIB:
            raise CloudError(
                f'{self.directory} has {free} MiB free, {NEED_MIB} are '
                'needed.\nWhat to do: make room, or use a directory '
                'elsewhere (--dir).')
        self.state.want(names)
        self._cancelled.clear()
        self._side_by_side(
            {name: self.services[name].needs for name in names}, self._start)

    def _side_by_side(self, order, act):
        """Call `act` for each service, as soon as it may be.

        :param order: for each name those that have to be finished before it
        """
        futures = {}
        all_there = threading.Event()

        def one(name):
            all_there.wait()
            for before in order[name]:
                futures[before].result()
            act(self.services[name])

        with concurrent.futures.ThreadPoolExecutor(len(order)) as pool:
            futures.update((name, pool.submit(one, name)) for name in order)
            all_there.set()
            try:
                for future in concurrent.futures.as_completed(
                        futures.values()):
                    future.result()
            except BaseException:
                # The services that still start end themselves.
                self._cancelled.set()
                raise

    def _start(self, service):
        running = service.is_current()
        begin = time.monotonic()
        if not running:
            self.check()
            self.say(f'start {service.title}' + (
                ' again, with other settings ...' if service.running()
                else ' ...'))
        service.start()
        self.say(f'{service.title} runs already' if running else
                 f'start {service.title}: {service.address}, after '
                 f'{time.monotonic() - begin:.0f} s')

    def _stop(self, service):
        self.say(f'stop {service.title} ...')
        service.stop()

    def down(self, keep=False):
        """End everything, and remove the directory unless `keep`."""
        self._cancelled.set()
        names = [name for name, one in self.services.items() if one.processes]
        try:
            if names:
                self._side_by_side(
                    {name: [user for user in names
                            if name in self.services[user].needs]
                     for name in names}, self._stop)
        finally:
            # A killed command may not have recorded its last process.
            for process in self.marked():
                process.kill()
                process.wait(cloud_service.STOP_TIMEOUT)
        # Otherwise the content of its mounts would be removed, too.
        live_process.unmount_below(self.directory)
        if not keep:
            shutil.rmtree(self.directory)
