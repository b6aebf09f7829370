# SPDX-License-Identifier: Apache-2.0

"""The process ``dedupd-nova-base``, beside a daemon in the mode ``cache``.

It reads the daemon's options. It shows images as files, and keeps links to
them in Nova's directory of base images. It is not part of the daemon because
a guest's disk must not vanish when the daemon restarts. One thread serves the
kernel's requests, others read, and one keeps the links.
"""

import grp
import logging
import os
import stat
import sys
import threading

from oslo_config import cfg
from oslo_log import log

from dedupd.compute.cache import cache_service
from dedupd.compute.cache import offered_images
from dedupd.compute.novabase import base_links
from dedupd.compute.novabase import file_attributes
from dedupd.compute.novabase import image_contents
from dedupd.compute.novabase import link_sync
from dedupd.compute.novabase import mounting
from dedupd import daemon
from dedupd.process import guru_report
from dedupd.process import logs
from dedupd.process import systemd
from glance_dedup.base import exceptions
from glance_dedup.client import client_errors
from glance_dedup.client import daemon_client
from glance_dedup.client import glance_api
from glance_dedup import fuse_operations
from glance_dedup.repository import image_repository

LOG = log.getLogger('dedupd.compute.novabase')

#: Memory for decompressed segments, in MiB.
CACHE_MIB = 64
_MOUNT = {'allow_other': True, 'writable': True}


def _wrong_images(conf: cfg.ConfigOpts) -> frozenset[str] | None:
    """The images that the daemon found wrong; None: it does not answer."""
    try:
        with daemon_client.Client(f'unix:{conf.dedupd.socket}') as client:
            return frozenset(client.status()['cache']['held']['wrong'])
    except (client_errors.ClientError, KeyError, TypeError) as e:
        LOG.warning('dedupd does not answer: %s', e)
        return None


def _is_missing(conf: cfg.ConfigOpts, image_id: str) -> bool:
    """Return whether the daemon reports that no host has the image."""
    try:
        with daemon_client.Client(f'unix:{conf.dedupd.socket}') as client:
            client.request('HEAD', f'/v1/images/{image_id}').close()
    except client_errors.Refused as e:
        return e.code == 404
    except client_errors.ClientError:
        pass    # it may come later
    return False


def _readers(conf: cfg.ConfigOpts) -> int:
    """Return the group whose members may read the images.

    :raises ValueError: there is no such group
    """
    name = conf.cache.nova_group
    if not name:
        return os.stat(conf.cache.nova_base).st_gid
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError as e:
        raise ValueError(f'[cache] nova_group: there is no group {name}'
                         ) from e


def _require_protected(directory: str) -> None:
    """Check that this process can replace no other user's files there.

    :raises ValueError: it could
    """
    found = os.stat(directory)
    if os.geteuid() not in (0, found.st_uid) and not (
            found.st_mode & stat.S_ISVTX):
        raise ValueError(
            f'[cache] nova_base: a user who may make links in {directory} may '
            "also replace Nova's files there. Run chmod +t, so that only "
            'their owner and that of the directory may')


def _serve(conf: cfg.ConfigOpts,
           repository: image_repository.Repository) -> None:
    options = conf.cache
    _require_protected(options.nova_base)
    owner = os.geteuid(), _readers(conf)
    os.makedirs(options.nova_mount, exist_ok=True)
    directory = options.nova_mount
    if mounting.is_confined():
        with mounting.listening(directory) as listener:
            systemd.notify('READY=1')   # systemd starts the other process
            directory = f'/dev/fd/{mounting.receive(listener)}'
    contents = image_contents.Contents(
        repository, conf.dedupd.nbd_socket,
        lambda image_id: _is_missing(conf, image_id))
    keeper = link_sync.Keeper(
        contents, base_links.Links(options.nova_base, options.nova_mount),
        offered_images.File(conf.dedupd.datadir),
        lambda: glance_api.Glance(options.cloud),
        lambda: _wrong_images(conf))
    thread = threading.Thread(target=keeper.run, name='nova-links',
                              daemon=True)

    def ready() -> None:
        LOG.info('The images for Nova are in %s', options.nova_mount)
        thread.start()
        systemd.notify('READY=1')

    fuse_operations.serve(
        file_attributes.Operations(
            contents, lambda text: LOG.error('%s', text), owner,
            others=False),
        directory, ready=ready, ending=contents.stopping.set, **_MOUNT)


def main(arguments: list[str] | None = None) -> int:
    """Run until the directory is unmounted, or a signal ends it.

    With the first argument ``mount``, mount for the confined process instead.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments[:1] == ['mount']:
            conf = daemon.read_options(arguments[1:])
            mounting.mount(conf.cache.nova_mount,
                           fuse_operations.options(**_MOUNT))
        conf = daemon.read_options(
            arguments, 'Show the images of a cache of dedupd as files to '
            'Nova. With the first argument "mount", mount the directory for '
            'it.')
        logs.setup(conf)
        if conf.mode != 'cache' or not conf.cache.nova_base:
            raise ValueError('set mode = cache, and [cache] nova_base')
        cache_service.require_nova_options(conf)
        guru_report.setup('dedupd-nova-base', conf)
        with image_repository.Repository(
                conf.dedupd.datadir, index='none',
                segment_cache_mib=CACHE_MIB) as repository:
            _serve(conf, repository)
    except (exceptions.RepositoryError, cfg.Error, OSError, ValueError) as e:
        LOG.critical('dedupd-nova-base cannot start: %s', e)
        print(f'dedupd-nova-base: {e}', file=sys.stderr)
        return systemd.exit_status(e)
    logging.shutdown()
    return 0


if __name__ == '__main__':
    sys.exit(main())
