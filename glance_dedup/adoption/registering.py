# SPDX-License-Identifier: Apache-2.0

"""Giving an image of the repository a record in Glance: :func:`register`.

The image's bytes are hashed, then the record is made, then it gets the
location. Each step finds the results of an interrupted run.

A task of Glance's that takes the location, and fails, deletes the data there.
So a copy of the image is kept until the task has ended, even if this process
is killed. It shares all blocks, and has an id that no image of Glance's can
have. An image that is copied back has another location, so no older task can
delete it.
"""

from collections.abc import Callable
import contextlib
import uuid

from glance_dedup.base import exceptions
from glance_dedup.base import hashes
from glance_dedup.base import imageids
from glance_dedup.base import locations
from glance_dedup.base import scopes
from glance_dedup.client import glance_api
from glance_dedup.repository import image_repository

REGISTERED, PRESENT = 'registered', 'present'

# Behind an image's id: that of the copy.
_KEPT = '-registering'
# Of the ids of backups' copies.
_COPIES = uuid.UUID('6f3d1f0a-6c43-5b0e-9a2f-1d7c5be0a948')


class NotRegistered(Exception):
    """Glance gets no record of an image; the message has why, and a remedy."""


def copy_backup(repository: image_repository.Repository, backup_id: str,
                project: str) -> str:
    """Store a backup again, as an image that Glance can have; its id.

    The id follows from the backup and the project. So a run after one that was
    interrupted finds the copy.

    :param project: the copy's; '': that of the backup
    :raises NotRegistered: there is no project
    """
    with repository.open_image(backup_id) as backup:
        project = project or backup.stat.project
        if not project:
            raise NotRegistered(
                f'the backup {backup_id} belongs to no project: name the one '
                'that the image is to belong to (--project)')
        image_id = str(uuid.uuid5(
            _COPIES, f'{backup_id}/{backup.stat.upload_id}/{project}'))
        with contextlib.suppress(exceptions.ImageExists):
            repository.copy(backup, image_id, project, scopes.describe(
                bytes.fromhex(backup.stat.scope)))
    return image_id


def register(repository: image_repository.Repository,
             glance: glance_api.Glance, image_id: str, *, name: str,
             visibility: str, progress: Callable[[int], None]
             ) -> tuple[str, glance_api.Record]:
    """Give a raw disk of the repository a record in Glance.

    The record belongs to the image's project, which may then delete the image.
    It gets the hash of the bytes here, so it does not depend on Glance's
    option ``do_secure_hash`` whether the image has one.

    Call :func:`restore` before.

    :param progress: called with the bytes hashed so far
    :returns: REGISTERED or PRESENT, and Glance's record
    :raises NotRegistered: as its name says
    :raises GlanceError: Glance refused something, or did not answer
    """
    if not imageids.is_glances(image_id):
        raise NotRegistered(
            f"image {image_id}: Glance's ids are UUIDs. "
            + _copy(image_id))
    stat = repository.stat(image_id)
    owner = stat.project
    if not owner:
        raise NotRegistered(
            f'image {image_id} belongs to no project. '
            + _copy(image_id, ' --project PROJECT'))
    value = _hash(repository, image_id, progress)
    record = glance.record(image_id)
    if record is None:
        record = _create(glance, {
            'id': image_id, 'name': name, 'owner': owner,
            'visibility': visibility, 'disk_format': 'raw',
            'container_format': 'bare', 'min_disk': -(-stat.size >> 30)})
    elif record.get('owner') != owner:
        raise NotRegistered(
            f'image {image_id} belongs to project {record.get("owner")} in '
            f'Glance, not to {owner}; nothing was changed. '
            + _copy(image_id))
    result = PRESENT
    if record['status'] not in glance_api.WITH_DATA:
        result = REGISTERED
        record = _give_data(repository, glance, image_id, value)
    theirs = hashes.of_record(record)
    if record['size'] != stat.size or (
            theirs != hashes.Hash(hashes.DEFAULT, value)):
        raise NotRegistered(
            f'image {image_id} has other bytes in Glance, or none that can '
            'be compared; nothing was changed. ' + _copy(image_id))
    return result, record


def _copy(image_id: str, more: str = '') -> str:
    return (f'Copy it: glance-dedup image copy {image_id} NEW{more}, then '
            'register NEW')


def _hash(repository: image_repository.Repository, image_id: str,
          progress: Callable[[int], None]) -> str:
    """The hash of the image's bytes, recorded here for users' tokens."""
    with repository.open_image(image_id) as image:
        known = hashes.recorded(repository.path, image.stat)
        if hashes.DEFAULT in known:
            return known[hashes.DEFAULT]
        found = hashes.compute(image, hashes.DEFAULT, progress)
        hashes.record(repository.path, image.stat, found)
        return found.value


def _create(glance: glance_api.Glance,
            wanted: glance_api.Record) -> glance_api.Record:
    try:
        return glance.create(wanted)
    except glance_api.GlanceError as e:
        if e.code != 409:
            raise
        raise NotRegistered(
            f'an image {wanted["id"]} was deleted in Glance, which uses no '
            'id twice. ' + _copy(wanted['id'])) from e


def restore(repository: image_repository.Repository,
            glance: glance_api.Glance, image_id: str) -> None:
    """End the remains of a killed run of :func:`register`.

    Its copy replaces the image if that is gone, and is removed, but not before
    the task has ended that the run may have begun.

    :raises GlanceError: Glance does not end its task, or does not answer
    """
    if not imageids.is_glances(image_id):
        return
    kept = image_id + _KEPT
    try:
        size = repository.stat(kept).size
    except exceptions.ImageNotFound:
        return
    glance.wait_for_task(image_id, size)
    _copy_image(repository, kept, image_id)
    repository.delete(kept)


def _copy_image(repository: image_repository.Repository, image_id: str,
                copy_id: str) -> None:
    """Copy an image if it is there, and the copy is not."""
    with contextlib.suppress(exceptions.ImageExists, exceptions.ImageNotFound):
        with repository.open_image(image_id) as image:
            repository.copy(image, copy_id, image.stat.project,
                            scopes.describe(bytes.fromhex(image.stat.scope)))


def _give_data(repository: image_repository.Repository,
               glance: glance_api.Glance, image_id: str, value: str
               ) -> glance_api.Record:
    kept = image_id + _KEPT

    def offer() -> str:
        # At each moment one of the two is there: Glance deletes the image
        # only.
        _copy_image(repository, image_id, kept)
        _copy_image(repository, kept, image_id)
        return locations.url(repository, image_id,
                             repository.stat(image_id).upload_id)

    try:
        record = glance.give_data(
            image_id, repository.stat(image_id).size, hashes.DEFAULT, value,
            offer)
    except glance_api.GlanceError as e:
        # Otherwise a task may have begun, so the copy stays for the next run.
        if isinstance(e, glance_api.DataNotTaken):
            restore(repository, glance, image_id)
        raise _left_without_data(e, image_id) from e
    # If the user deleted the record, and so the data, both are to go.
    with contextlib.suppress(exceptions.ImageNotFound):
        repository.delete(kept)
    if record is None:
        raise NotRegistered(
            f'the record of image {image_id} was deleted in Glance '
            'meanwhile, perhaps with its data')
    return record


def _left_without_data(e: glance_api.GlanceError,
                       image_id: str) -> glance_api.GlanceError:
    return glance_api.GlanceError(
        f'{e}. The record of image {image_id} stays in Glance, without '
        'data: run the command again. If that never helps, '
        + _copy(image_id)[0].lower() + _copy(image_id)[1:], e.code)
