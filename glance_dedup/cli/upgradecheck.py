# SPDX-License-Identifier: Apache-2.0

"""``upgrade check``: whether services may start with this software."""

import argparse
import contextlib
import functools

from glance_dedup.base import exceptions
from glance_dedup.cli import command
from glance_dedup.cli import common
from glance_dedup.cli import host_settings

GLANCE_FILE = '/etc/glance/glance-api.conf'


class UpgradeCheck(command.RepositoryCommand):
    """Check whether the services may be restarted with this version.

    Install the new version, and run this on each host before you restart
    dedupd and glance-api. It changes nothing. Each check succeeds, warns or
    fails, and says what to do. The exit status is 0 if all succeed, 1 if one
    warns, 2 if one fails, and 255 if a check could not be made.
    """

    def add_arguments(self, parser):
        parser.add_argument(
            '--json', action='store_true',
            help='Show the results as JSON instead of a table.')
        parser.add_argument(
            '--glance-config-file', metavar='FILE',
            help=f"glance-api's options. Default: {GLANCE_FILE}, if it "
            'exists.')

    @functools.cached_property
    def settings(self) -> host_settings.Settings:
        """Open as other commands do; an invalid option file is a finding."""
        given = argparse.Namespace(**vars(self.app.options))
        try:
            return host_settings.find(given)
        except host_settings.OtherRepository:
            raise
        except common.UsageError:
            if not given.repository:
                raise
            given.config_file = None
            return host_settings.find(given)

    def take_action(self, parsed_args):
        # Imports take longer than a small command, or the help.
        from glance_dedup.cli import upgrade_check

        # A repository that this version refuses is a finding, no error.
        with contextlib.suppress(exceptions.RepositoryError):
            self.require_repository()
        dedupd_file = self.app.options.config_file
        if dedupd_file is None:
            dedupd_file = host_settings.file_of(self.path)
        glance_file = parsed_args.glance_config_file
        if glance_file is None and not host_settings.is_missing(GLANCE_FILE):
            glance_file = GLANCE_FILE
        checks = upgrade_check.Checks(
            self, self.path, self.status, dedupd_file, glance_file)
        self.app.status = upgrade_check.show(checks, parsed_args.json)
