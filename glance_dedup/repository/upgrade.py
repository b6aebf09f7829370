# SPDX-License-Identifier: Apache-2.0

"""``repository upgrade``: from an older format version to a newer one.

A newer version of the format gets a step in :data:`STEPS`, and a golden
repository of the older version in ``tests/golden``. A test runs the step on
that repository.

A step may be interrupted. It runs with the maintainer's lock, and its changes
are durable when it returns. Only then a new ``repository.json`` with the new
version replaces the old one. After an earlier crash, the next upgrade runs the
step again from the beginning.

A step to another major version locks older programs out, so it runs only if
somebody asks for what it brings. It begins by taking the old version's byte
alone ("Locks" in the description of the format), and so is refused while any
handle is open on the repository. It keeps the byte until the new version is
durable.
"""

from collections.abc import Callable
from collections.abc import Iterator
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

Progress = Callable[[int, int, str], None]


class InUseError(exceptions.BusyError):
    """Another handle is open that works by the old major version."""


@dataclasses.dataclass(frozen=True)
class Step:
    """The upgrade from one version of the format to the next."""

    before: parameters.Version
    after: parameters.Version
    what: str
    """What the step does, in a few words for people."""
    run: Callable[[repository_module.Repository, Progress], None]
    """Does the step. It may find its own work half done, or done."""

    @property
    def is_major(self) -> bool:
        """Whether older programs refuse the repository afterwards."""
        return self.before[0] != self.after[0]


def _nothing(repo: repository_module.Repository, progress: Progress) -> None:
    """Change nothing: what is there already means the same in the new version.

    New fields are in bytes that were zeros, and zeros keep their meaning.
    """


def _make_volumes(repo: repository_module.Repository, progress: Progress
                  ) -> None:
    path = os.path.join(repo.path, layout.VOLUMES)
    with files.os_errors(f'cannot make {path}'):
        access.make_directory(path, access.directory_mode(repo.path))
        files.sync_directory(repo.path)


def _make_slices(repo: repository_module.Repository, progress: Progress
                 ) -> None:
    path = os.path.join(repo.path, layout.SLICES)
    with files.os_errors(f'cannot make {path}'):
        access.make_directory(path, access.directory_mode(repo.path))
        files.sync_directory(repo.path)


#: All steps in order; each begins at the version where the one before ends.
STEPS: Sequence[Step] = (
    Step((1, 0), (1, 1), 'noting that groups may be recompressed',
         _nothing),
    Step((1, 1), (2, 0), 'making the directory of volumes',
         _make_volumes),
    Step((2, 0), (3, 0), 'noting that similar blocks may lie next to each '
         'other', _nothing),
    Step((3, 0), (4, 0), 'making the directory for slices of cold groups',
         _make_slices),)


def version_of(repo: repository_module.Repository) -> parameters.Version:
    """The version that ``repository.json`` had when it was last read."""
    return repo.parameters.major, repo.parameters.minor


def plan(repo: repository_module.Repository, volumes: bool = False,
         similar: bool = False, cold: bool = False) -> list[Step]:
    """The steps that a repository still needs.

    Unless something is asked for, it keeps its major version; otherwise older
    programs are locked out.

    :param volumes: it is to have volumes
    :param similar: similar blocks may come to lie next to each other; it may
        have volumes then, too
    :param cold: groups may become cold; this includes all others
    :raises VersionError: there is no way from its version to one with these
    """
    version = version_of(repo)
    wanted = parameters.asked_for(volumes, similar, cold)
    found = []
    for step in STEPS:
        if step.before == version and (
                not step.is_major or step.after <= wanted):
            found.append(step)
            version = step.after
    if version[0] < wanted[0]:
        raise exceptions.VersionError(
            f'{repo.path} has format version {parameters.words(version)}, '
            'from which this program knows no way to '
            f'{parameters.words(wanted)}: use the program that knows the '
            'version')
    return found


def upgrade(repo: repository_module.Repository, progress: Progress,
            volumes: bool = False, similar: bool = False,
            cold: bool = False) -> list[Step]:
    """Run the steps of :func:`plan`; returns these.

    :param progress: called as `progress(done, total, what)`
    :param volumes: as for :func:`plan`, like `similar` and `cold`
    :raises BusyError: if another process maintains the repository
    :raises InUseError: if the major version is to change, and another handle
        is open; earlier steps may have been done
    :raises VersionError: as :func:`plan`
    """
    with contextlib.closing(
            _engine.Maintenance(repo.handle())) as maintenance:
        if not maintenance.lock():
            raise exceptions.BusyError(
                f'{repo.path} has another maintainer at work')
        # Read with the lock held: another upgrade may have just ended.
        repo.parameters = layout.read_parameters(repo.path)
        wanted = plan(repo, volumes, similar, cold)
        for number, step in enumerate(wanted):
            progress(number, len(wanted), step.what)
            with _alone(repo) if step.is_major else contextlib.nullcontext():
                step.run(repo, progress)
                _set_version(repo, step.after)
        progress(len(wanted), len(wanted), 'upgrading')
    return wanted


@contextlib.contextmanager
def _alone(repo: repository_module.Repository) -> Iterator[None]:
    """Keep all others out that work, or would, by the old major version.

    At the end the handle shares the byte of the version that there is then:
    also a step that failed may have replaced ``repository.json``.
    """
    handle = repo.handle()
    if not handle.exclude_version():
        raise InUseError(
            f'{repo.path} is open in another program, which would go on '
            f'working by format version {repo.parameters.version}. Stop '
            'glance-api, dedupd, mounts and all commands that use the '
            'repository, on all hosts, and start the upgrade again')
    try:
        yield
    finally:
        with contextlib.suppress(exceptions.RepositoryError):
            repo.parameters = layout.read_parameters(repo.path)
        handle.share_version(repo.parameters.major)


def _set_version(repo: repository_module.Repository,
                 version: parameters.Version) -> None:
    """Replace ``repository.json`` with one of this version, durably."""
    wanted = dataclasses.replace(
        repo.parameters, major=version[0], minor=version[1])
    path = os.path.join(repo.path, layout.PARAMETERS_FILE)
    with files.os_errors(f'cannot write {path}'):
        _remove_leftovers(repo.path)
        files.replace_file(path, wanted.to_json(),
                           access.file_mode(repo.path),
                           files.temporary_of(path))
    repo.parameters = wanted


def _remove_leftovers(path: str) -> None:
    """Remove temporary files of killed upgrades and a killed creation."""
    for name in os.listdir(path):
        if files.TEMPORARY.fullmatch(name):
            os.unlink(os.path.join(path, name))
