# SPDX-License-Identifier: Apache-2.0

"""The command ``image mount``, which shows images as files."""

import os
import sys


from glance_dedup.cli import command
from glance_dedup.cli import common


#: Memory for decompressed segments, if the command reads by itself.
CACHE_MIB = 64


class Mount(command.RepositoryCommand):
    """Show images as read-only files in a directory.

    Each image is a file, named by its id. Nothing is copied. Every byte is
    verified when it is read. The command runs until the directory is unmounted
    (fusermount3 -u DIR) or it is interrupted. It reads through the daemon if
    that serves NBD, otherwise from the repository itself.
    """

    def add_arguments(self, parser):
        parser.add_argument(
            'directory', metavar='DIR', help='An empty directory.')
        parser.add_argument(
            '--allow-other', action='store_true',
            help='Let other users read the images, too. Unless you are root, '
            '/etc/fuse.conf must have the line user_allow_other.')

    def take_action(self, parsed_args):
        try:
            from glance_dedup import fuse_operations
        except ImportError as e:
            raise common.FailedError(
                f'{e}: install the packages of glance-dedup[mount], and the '
                'package fuse3 of the distribution') from e
        directory = os.path.abspath(parsed_args.directory)
        if os.listdir(directory):
            raise common.UsageError(
                f'{directory} is not empty, and mounting would hide what is '
                'there: use an empty directory')
        client = self.require_repository()
        socket = self._nbd_socket()
        if client is not None and socket is not None:
            with client:
                self._serve(fuse_operations,
                            fuse_operations.FromDaemon(client, socket),
                            directory, parsed_args)
        elif self.settings.path is not None:
            with self.open(segment_cache_mib=CACHE_MIB) as repo:
                self._serve(fuse_operations,
                            fuse_operations.FromRepository(repo), directory,
                            parsed_args)
        else:
            raise common.UsageError(
                'the daemon serves no NBD: set nbd_socket in its options, or '
                'use --repository DIR')

    def _nbd_socket(self) -> str | None:
        """The NBD socket of the daemon that was found."""
        nbd = (self.status or {}).get('nbd')
        found = nbd.get('socket') if isinstance(nbd, dict) else None
        return found if isinstance(found, str) else None

    def _serve(self, fuse_operations, source, directory, parsed_args):
        def ready():
            sys.stdout.write(
                f'The images of {source.name} are in {directory} until it is '
                f'unmounted (fusermount3 -u {directory}).\n')
            sys.stdout.flush()

        operations = fuse_operations.Operations(source, self.app.tell,
                                                (os.geteuid(), os.getegid()))
        fuse_operations.serve(operations, directory,
                              allow_other=parsed_args.allow_other, ready=ready)
