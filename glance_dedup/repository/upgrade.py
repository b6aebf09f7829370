# SPDX-License-Identifier: Apache-2.0

"""``repository upgrade``: from an older format version to this program's.

A newer version of the format gets a step in :data:`STEPS`, and a golden
repository of the older version in ``tests/golden``. A test runs the step on
that repository.

A step may be interrupted. It runs with the maintainer's lock, and its changes
are durable when it returns. Only then a new ``repository.json`` with the new
version replaces the old one. After an earlier crash, the next upgrade runs the
step again from the beginning.
"""

from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import dataclasses
import os

from glance_dedup import _engine
from glance_dedup.base import access
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.repository import layout
from glance_dedup.repository import parameters
from glance_dedup.repository import repository as repository_module

Version = tuple[int, int]
Progress = Callable[[int, int, str], None]

#: The version that this program writes.
CURRENT: Version = (parameters.FORMAT_MAJOR, parameters.FORMAT_MINOR)


@dataclasses.dataclass(frozen=True)
class Step:
    """The upgrade from one version of the format to the next."""

    before: Version
    after: Version
    what: str
    """What the step does, in a few words for people."""
    run: Callable[[repository_module.Repository, Progress], None]
    """Does the step. It may find its own work half done, or done."""


def _nothing(repo: repository_module.Repository, progress: Progress) -> None:
    """Change nothing.

    The new fields are in bytes that were zeros, and zeros keep their meaning.
    """


#: All steps in order; each begins at the version where the one before ends.
STEPS: Sequence[Step] = (
    Step((1, 0), (1, 1), 'noting that groups may be recompressed',
         _nothing),)


def words(version: Version) -> str:
    """A version as people write it: ``1.1``."""
    return f'{version[0]}.{version[1]}'


def version_of(repo: repository_module.Repository) -> Version:
    """The version that ``repository.json`` had when it was last read."""
    return repo.parameters.major, repo.parameters.minor


def plan(repo: repository_module.Repository) -> list[Step]:
    """The steps that a repository still needs."""
    version = version_of(repo)
    found = []
    for step in STEPS:
        if step.before == version:
            found.append(step)
            version = step.after
    return found


def upgrade(repo: repository_module.Repository,
            progress: Progress) -> list[Step]:
    """Run the steps of :func:`plan`; returns these.

    :param progress: called as `progress(done, total, what)`
    :raises BusyError: if another process maintains the repository
    """
    with contextlib.closing(
            _engine.Maintenance(repo.handle())) as maintenance:
        if not maintenance.lock():
            raise exceptions.BusyError(
                f'{repo.path} has another maintainer at work')
        # Read with the lock held: another upgrade may have just ended.
        repo.parameters = layout.read_parameters(repo.path)
        wanted = plan(repo)
        for number, step in enumerate(wanted):
            progress(number, len(wanted), step.what)
            step.run(repo, progress)
            _set_version(repo, step.after)
        progress(len(wanted), len(wanted), 'upgrading')
    return wanted


def _set_version(repo: repository_module.Repository,
                 version: Version) -> None:
    """Replace ``repository.json`` with one of this version, durably."""
    parameters = dataclasses.replace(
        repo.parameters, major=version[0], minor=version[1])
    path = os.path.join(repo.path, layout.PARAMETERS_FILE)
    with files.os_errors(f'cannot write {path}'):
        _remove_leftovers(repo.path)
        files.replace_file(path, parameters.to_json(),
                           access.file_mode(repo.path),
                           files.temporary_of(path))
    repo.parameters = parameters


def _remove_leftovers(path: str) -> None:
    """Remove temporary files of killed upgrades and a killed creation."""
    for name in os.listdir(path):
        if files.TEMPORARY.fullmatch(name):
            os.unlink(os.path.join(path, name))
