# SPDX-License-Identifier: Apache-2.0

"""The command that shows images as files: mount."""

import os
import sys

from cliff import command

from glance_dedup.cli import common
from glance_dedup.cli import daemon


#: For segments that are read piece by piece.
CACHE_MIB = 64


class Mount(daemon.DaemonCommand, command.Command):
    """Show images as files that can be read, in a directory.

    Each image is a file with its id as the name; nothing is copied, and every
    byte is verified when it is read. It goes on until the directory is
    unmounted (fusermount3 -u DIR) or the command is interrupted. It reads
    through the daemon if that serves NBD, and else in the repository itself.
    """

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument(
            'directory', metavar='DIR', help='An empty directory.')
        parser.add_argument(
            '--allow-other', action='store_true',
            help='Other users may read the images, too. Unless you are root, '
            '/etc/fuse.conf has to say user_allow_other.')
        return parser

    def take_action(self, parsed_args):
        try:
            from glance_dedup import mount
        except ImportError as e:
            raise common.UsageError(
                f'{e}: install the packages of glance-dedup[mount], and fuse3 '
                'of the distribution') from e
        directory = os.path.abspath(parsed_args.directory)
        if os.listdir(directory):
            raise common.UsageError(
                f'{directory} is not empty: it would be hidden')
        client = self.need_daemon_or_repository()
        socket = self.nbd_socket()
        if client is not None and socket is not None:
            with client:
                self.serve(mount, mount.FromDaemon(client, socket),
                           directory, parsed_args)
        elif self.app.options.repository:
            with self.open(segment_cache_mib=CACHE_MIB) as repo:
                self.serve(mount, mount.FromRepository(repo), directory,
                           parsed_args)
        else:
            raise common.UsageError(
                'the daemon serves no NBD: set nbd_socket in its options, or '
                'use --repository DIR')

    def nbd_socket(self) -> str | None:
        """Of the daemon that was found."""
        nbd = (self.status or {}).get('nbd')
        found = nbd.get('socket') if isinstance(nbd, dict) else None
        return found if isinstance(found, str) else None

    def serve(self, mount, source, directory, parsed_args):
        def ready():
            sys.stdout.write(
                f'The images of {source.name} are in {directory} until it is '
                f'unmounted (fusermount3 -u {directory}).\n')
            sys.stdout.flush()

        mount.serve(source, directory, allow_other=parsed_args.allow_other,
                    owner=(os.geteuid(), os.getegid()), ready=ready,
                    complain=self.app.tell)
