# SPDX-License-Identifier: Apache-2.0

"""The checks before services start with this software, and their table.

As in OpenStack's other services, an operator installs the new software, has
these checks made, and then restarts the services.
"""

from collections.abc import Iterator
import functools
import importlib.metadata
import os
import typing

from oslo_config import cfg
from oslo_upgradecheck import upgradecheck
from packaging import requirements

from glance_dedup.base import access
from glance_dedup.base import exceptions
from glance_dedup.base import filesystem
from glance_dedup.base import package_version
from glance_dedup.base import printable
from glance_dedup.base import trialrecord
from glance_dedup.cli import common
from glance_dedup.cli import glanceoptions
from glance_dedup.cli import host_settings


# The options of dedupd that have to be equal to those of Glance's store.
_EQUAL = ('index', 'index_dir', 'filter_dir', 'reserve_mib')

# Version in a package's metadata if its build got no version, as in
# xxhash in Debian 13.
_UNKNOWN_VERSION = '0.0.0'


def _result(code: upgradecheck.Code, *sentences: str) -> upgradecheck.Result:
    return upgradecheck.Result(code, printable.printable(' '.join(sentences)))


_success = functools.partial(_result, upgradecheck.Code.SUCCESS)
_warning = functools.partial(_result, upgradecheck.Code.WARNING)
_failure = functools.partial(_result, upgradecheck.Code.FAILURE)


def _judged(failures: list[str], warnings: list[str], fine: str
            ) -> upgradecheck.Result:
    """The result with these sentences; the worst counts."""
    if failures:
        return _failure(*failures, *warnings)
    return _warning(*warnings) if warnings else _success(fine)


class Checks(upgradecheck.UpgradeCommands):
    """The checks, on one repository.

    :param command: opens the repository, and has the settings
    :param path: the repository's
    :param status: of the daemon that serves it; None: none answers
    :param dedupd_file: dedupd's options
    :param glance_file: glance-api's options
    """

    def __init__(self, command: typing.Any, path: str,
                 status: dict | None, dedupd_file: str | None,
                 glance_file: str | None) -> None:
        super().__init__()
        self._command = command
        self._path = path
        self._status = status
        self._dedupd_file = dedupd_file
        self._glance_file = glance_file

    # -- installed software ------------------------------------------------

    def packages(self) -> upgradecheck.Result:
        """Return whether all packages are there, in tested versions."""
        try:
            wanted = importlib.metadata.requires('glance-dedup') or []
        except importlib.metadata.PackageNotFoundError:
            return _warning(
                'Python knows no package glance-dedup, so the versions that '
                'it needs are unknown: install the package.')
        missing = []
        for line in wanted:
            need = requirements.Requirement(line)
            if need.marker is not None and not need.marker.evaluate(
                    {'extra': ''}):
                continue
            try:
                found = importlib.metadata.version(need.name)
            except importlib.metadata.PackageNotFoundError:
                missing.append(f'{need.name} is not installed: install '
                               f'{need.name}{need.specifier}.')
                continue
            if found != _UNKNOWN_VERSION and not need.specifier.contains(
                    found, prereleases=True):
                missing.append(
                    f'{need.name} {found} is installed: install '
                    f'{need.name}{need.specifier}.')
        return _judged(missing, [],
                       f'glance-dedup {package_version.version()}')

    # -- the repository ----------------------------------------------------

    def locks(self) -> upgradecheck.Result:
        """Return whether the file system is fit for a repository."""
        try:
            filesystem.require_locks(self._path)
            trialrecord.require_fit(self._path)
            mount = filesystem.mount_of(self._path)
        except exceptions.RepositoryError as e:
            return _failure(f'{e}')
        except OSError as e:
            return _failure(f'{common.sentence_of(e)}.', 'Mount the file '
                            'system, or name the right repository.')
        return _success('' if mount is None else
                        f'{mount.kind} on {mount.place}')

    def format(self) -> upgradecheck.Result:
        """Return whether this software reads and writes the format alike."""
        try:
            with self._command.open() as repo:
                found = ', '.join(repo.features) or 'none'
                keys = repo.read_keys()
        except exceptions.VersionError as e:
            return _failure(
                f'{e}.', 'Do not start services with this version: install '
                'the version that last used the repository, or a newer one.')
        except exceptions.RepositoryError as e:
            return _failure(
                f'{e}.', 'Remove the cause, and check again before services '
                'are restarted.')
        warnings = []
        if keys.previous is not None:
            warnings.append(
                f'{self._path} accepts an old key, too: when '
                "'glance-dedup glance sign-locations' adds nothing more, run "
                "'glance-dedup repository rekey --finish'.")
        return _judged([], warnings, (
            f'This program knows all features that {self._path} uses: '
            f'{found}'))

    def catalog(self) -> upgradecheck.Result:
        """Return whether this software can go on with the catalog as it is."""
        from glance_dedup import _engine
        from glance_dedup.maintenance import catalog_db

        path = os.path.join(self._path, 'catalog')
        if self._status is not None:
            return self._catalog_of_daemon()
        try:
            owner = os.stat(path).st_uid
        except OSError:
            return _success('There is none: the first maintainer makes it.')
        if owner != os.geteuid():
            return _warning(
                f'{path} was not checked: it belongs to '
                f'{access.user_name(owner)}. Check again as this user.')
        try:
            with self._command.open() as repo:
                maintenance = _engine.Maintenance(repo.handle())
                try:
                    if not maintenance.lock():
                        return _warning(
                            f'{path} was not checked: another process '
                            'maintains the repository. Check on its host, or '
                            'with --socket.')
                    catalog_db.Catalog(path, repo.repository_id).close()
                finally:
                    maintenance.close()
        except exceptions.RepositoryError as e:
            return _warning(
                f'{e}.', 'dedupd sets the catalog aside and counts all images '
                'again when it starts. Meanwhile nothing is collected.')
        return _success('This version goes on with it.')

    def _catalog_of_daemon(self) -> upgradecheck.Result:
        state = (self._status or {}).get('catalog', {}).get('state')
        role = (self._status or {}).get('daemon', {}).get('role')
        if state == 'ready' or role != 'maintainer':
            return _success(f'dedupd is the {role}; its catalog is {state}.')
        return _warning(
            f'The catalog of dedupd is {state}. Restart dedupd when its log '
            'and its status page show the catalog as ready, or it begins '
            'again.')

    # -- options -----------------------------------------------------------

    def options_of_dedupd(self) -> upgradecheck.Result:
        """Return whether dedupd of this version starts with its options."""
        from dedupd import daemon
        from dedupd import opts

        path = self._dedupd_file
        if path is None:
            return _success(
                f'{host_settings.CONFIG_FILE} does not exist, or is '
                'for another repository.')
        try:
            conf = daemon.read_options(['--config-file', path])
            unknown = [f'{sentence}. Remove it, or correct its name.'
                       for sentence in opts.unknown(conf)]
        except (cfg.Error, OSError, ValueError) as e:
            return _failure(f'dedupd would not start with {path}: {e}. '
                            'Correct the option.')
        return _judged([], unknown, f'{path} has no option that dedupd would '
                       'ignore or refuse.')

    def options_of_glance(self) -> upgradecheck.Result:
        """Return whether the store of this version starts with its options."""
        path = self._glance_file
        if path is None:
            return _success('Glance has no options on this host.')
        try:
            found = glanceoptions.Options(path)
        except (cfg.Error, OSError, ValueError) as e:
            return _failure(f'{path} cannot be read: {e}. Check as a user '
                            'that may read it, or correct it.')
        invalid = found.invalid()
        return _judged(
            invalid or [*self._relative(found)], found.unknown(),
            f'{path} has no option of the store that would be ignored or '
            f'refused; stores: {", ".join(found.stores) or "none"}.')

    @staticmethod
    def _relative(glance: glanceoptions.Options) -> Iterator[str]:
        for store in glance.stores:
            path = glance.value(store, 'dedup_store_datadir')
            if not os.path.isabs(path) or '\0' in path:
                yield (f'[{store}] dedup_store_datadir must be an absolute '
                       f'path, not {path!r}. Correct the option.')

    def agreement(self) -> upgradecheck.Result:
        """Return whether Glance and dedupd use the repository alike."""
        from dedupd import daemon

        if self._dedupd_file is None or self._glance_file is None:
            return _success('dedupd or Glance has no options on this host.')
        try:
            ours = daemon.read_options(
                ['--config-file', self._dedupd_file]).dedupd
            glance = glanceoptions.Options(self._glance_file)
            different = [
                f'[{store}] dedup_store_{name} is {theirs}, and [dedupd] '
                f'{name} is {ours[name]}. Set both to the same value.'
                for store in glance.stores_at(ours.datadir)
                for name in _EQUAL
                if (theirs := glance.value(store, f'dedup_store_{name}'))
                != ours[name]]
        except (cfg.Error, OSError, ValueError):
            return _warning('Not checked: the options have an error, which '
                            'another check shows. Correct it first.')
        return _judged([], different, 'The options of Glance and dedupd '
                       'agree.')

    # -- running programs --------------------------------------------------

    def daemon(self) -> upgradecheck.Result:
        """Return whether dedupd of this host runs this version."""
        daemon = (self._status or {}).get('daemon')
        if not isinstance(daemon, dict):
            return _success('No dedupd answers for this repository on '
                            f'{self._command.settings.socket_in_words}.')
        found, ours = daemon.get('version'), package_version.version()
        where = f'dedupd, process {daemon.get("pid")} on {daemon.get("host")},'
        if found != ours:
            return _warning(
                f'{where} has version {found}; {ours} is installed. Restart '
                'it when no check fails.')
        return _success(f'{where} has version {found}.')

    def hosts(self) -> upgradecheck.Result:
        """Return whether the daemons of other hosts run this version."""
        hosts = (self._status or {}).get('hosts')
        if not isinstance(hosts, dict):
            return _success('Without a daemon, other hosts are unknown.')
        own = str((self._status or {}).get('daemon', {}).get('number'))
        others = {number: host for number, host in hosts.items()
                  if number != own and isinstance(host, dict)}
        ours = package_version.version()
        different = [
            f'dedupd number {number} on {host.get("host")} has version '
            f'{host["version"]}; this host has {ours}. Install one version on '
            'all hosts before you change the format.'
            for number, host in others.items()
            if host.get('version') not in (None, ours)]
        unknown = sum(host.get('version') is None for host in others.values())
        return _judged([], different,
                       f'{len(others)} other daemons, of which {unknown} did '
                       'not note their version.')

    _upgrade_checks = (
        ('Required packages', packages),
        ('Locks of the file system', locks),
        ('Format of the repository', format),
        ('Catalog', catalog),
        ('Options of dedupd', options_of_dedupd),
        ('Options of Glance', options_of_glance),
        ('Agreement of the options', agreement),
        ('Version of dedupd', daemon),
        ('Versions on other hosts', hosts),
    )


def show(checks: Checks, as_json: bool) -> int:
    """Make all checks, and show what they found.

    :returns: 0, every check succeeded; 1, there are warnings; 2, there are
        failures, which have to be removed before a service starts; 255, a
        check itself failed
    """
    return upgradecheck.main(
        cfg.ConfigOpts(), 'glance-dedup', checks,
        ['upgrade', 'check', *(['--json'] if as_json else ())],
        default_config_files=[])
