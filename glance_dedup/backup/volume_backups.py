# SPDX-License-Identifier: Apache-2.0

"""Backups of volumes of this repository: snapshots, which need no stages."""

from glance_dedup.backup import views
from glance_dedup.base import exceptions
from glance_dedup.client import volume_control
from glance_dedup.repository import image_repository
from glance_dedup.repository import openvolumes


def back_up(repository: image_repository.Repository, name: str,
            backup_id: str) -> None:
    """Commit the bytes of a volume, as of one moment, as a backup.

    The backup shares the volume's blocks, and belongs to its project. A volume
    in use is asked of the process that serves it, which has to be on this
    host.

    :param name: the volume's
    :param backup_id: ``b_<name>_<time>``
    :raises SourceError: the volume is in use elsewhere
    :raises RepositoryError: there is no such volume; there is a backup of that
        id; or it cannot be stored
    """
    project = openvolumes.look(repository, name).project
    repository.require_image(backup_id)
    try:
        volume = openvolumes.open_volume(repository, name)
    except exceptions.BusyError as e:
        try:
            volume_control.VolumeControl(
                repository.path, name).snapshot(backup_id, project)
        except volume_control.NotServed as not_served:
            raise views.SourceError(
                f'the volume {name} cannot be backed up: it is in use, and no '
                'process on this host answers for it. Back it up on the host '
                f'that serves it: {e}') from not_served
        return
    with volume:
        volume.snapshot(backup_id, project)
