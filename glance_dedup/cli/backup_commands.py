# SPDX-License-Identifier: Apache-2.0

"""The commands on backups: listing, restoring and pruning them.

A backup is an image; its id names the source, and the time of the backup
(``base/imageids.py``).
"""

import argparse
import contextlib
import fcntl
import functools
import os
import stat
import struct
import sys
import time

from cliff import lister
from cliff import show

from glance_dedup.backup import retention
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import imageids
from glance_dedup.cli import command
from glance_dedup.cli import common
from glance_dedup.cli import copying
from glance_dedup.cli import image_commands
from glance_dedup.cli import targets

# ioctl: the bytes of a range of a block device become zeros.
_BLKZEROOUT = 0x127f
# A multiple of every device's block size.
_BLOCK = 4096
# Zeros are reported in pieces of this many bytes, so that progress is shown.
_ZEROS = 256 << 20


def _name(text):
    if not imageids.is_backup_name(text):
        raise argparse.ArgumentTypeError(
            f'{text!r} cannot name backups: a name has 1 to 109 characters '
            'of A-Z a-z 0-9 _ -')
    return text


def _time(text):
    try:
        return retention.parse_time(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(
            f'{text!r} is no time such as 2026-11-23T18:00:00Z, or a day '
            'such as 2026-11-23') from e


def _number(text):
    if not (text.isascii() and text.isdigit() and len(text) < 10
            and int(text)):
        raise argparse.ArgumentTypeError(f'{text!r} is no number above 0')
    return int(text)


def _add_names(parser):
    parser.add_argument(
        'names', metavar='NAME', nargs='*', type=_name,
        help='Of what the backups are. Default: of everything.')


def _named(repo, names):
    """The backups of each name: of these, or of all.

    :raises ImageNotFound: a name has none
    """
    backups = repo.backups()
    return {name: retention.of_name(backups, name) for name in (
        names or sorted({backup.name for backup in backups}))}


def tell_of_future(app, backups, now):
    """Name the backups that are dated in the future."""
    for warning in retention.warnings(backups, now):
        app.tell(warning)


class List(image_commands.Known, lister.Lister):
    """List the backups, by name and time.

    The figures are those of image list. A backup that is dated in the future
    is not the newest; a warning names it.
    """

    def add_arguments(self, parser):
        _add_names(parser)
        parser.add_argument(
            '--newest', action='store_true',
            help='Only the newest backup of each name.')

    def take_action(self, parsed_args):
        now = retention.now()
        with self.open() as repo:
            listed = {}
            for backups in _named(repo, parsed_args.names).values():
                tell_of_future(self.app, backups, now)
                newest = [backup for backup in backups
                          if not retention.is_future(backup, now)][-1:]
                for backup in newest if parsed_args.newest else backups:
                    listed[backup.image_id] = backup, backup in newest
            rows = [self._row(*listed[fields['image_id']], fields)
                    for fields in self.described(repo, list(listed))]
        return _COLUMNS, rows

    @staticmethod
    def _row(backup, is_newest, fields):
        fields |= {'name': backup.name, 'newest': is_newest,
                   'time': common.Time(int(backup.time.timestamp()))}
        return tuple(fields[column] for column in _COLUMNS)


_COLUMNS = ('name', 'time', 'newest', 'size', 'zero_bytes', 'new_bytes',
            'stored_bytes', 'damaged', 'image_id')


class Restore(command.RepositoryCommand, show.ShowOne):
    """Write a backup to a file or to a block device.

    Every byte is verified. A file appears whole or not at all, and long runs
    of zeros become holes. A block device must be at least as large as the
    backup and not be in use; what is behind the backup's end stays as it is.
    """

    def add_arguments(self, parser):
        parser.add_argument('name', metavar='NAME', type=_name)
        parser.add_argument('file', metavar='FILE',
                            help='- for standard output')
        parser.add_argument(
            '--at', metavar='TIME', type=_time,
            help='Restore the newest backup of this time or before. A time '
            'without a zone is in UTC; a day means its end in UTC. Default: '
            'the newest of all that are not dated in the future.')
        parser.add_argument(
            '--force', action='store_true',
            help='Replace the file if it exists, or overwrite the device.')
        targets.add_mode(parser)

    def take_action(self, parsed_args):
        if parsed_args.file == '-':
            write = image_commands.write_to(sys.stdout.buffer)
        else:
            target = _target(parsed_args)
            target.require_allowed()
            write = target.write
        with self.open() as repo:
            now = retention.now()
            backups = repo.backups()
            backup = retention.chosen(
                backups, parsed_args.name, now, parsed_args.at)
            tell_of_future(self.app, retention.of_name(
                backups, parsed_args.name), now)
            when = retention.words(backup.time)
            self.app.tell(f'restoring {backup.name} of {when}')
            with (_opened(repo, backup) as image,
                  self.progress(f'restoring {backup.name}', image.size
                                ) as progress):
                write(image, progress)
                return common.shown({
                    'name': backup.name,
                    'time': common.Time(int(backup.time.timestamp())),
                    'image_id': backup.image_id, 'file': parsed_args.file,
                    'size': common.Size(image.size)})

    def produce_output(self, parsed_args, column_names, data):
        # Standard output has only the image.
        if parsed_args.file == '-':
            return 0
        return super().produce_output(parsed_args, column_names, data)


def _opened(repo, backup):
    """A backup, opened.

    :raises ImageNotFound: it was pruned; the message lists the others
    """
    try:
        return repo.open_image(backup.image_id)
    except exceptions.ImageNotFound as e:
        left = [other for other in repo.backups() if other != backup]
        newest = retention.chosen(left, backup.name, retention.now())
        raise exceptions.ImageNotFound(
            f'the backup of {backup.name} of {retention.words(backup.time)} '
            'was deleted meanwhile: the newest is of '
            f'{retention.words(newest.time)}') from e


def _target(parsed_args):
    """Return the device, if it is one, or the file."""
    target = targets.Target(parsed_args.file, parsed_args.force,
                            parsed_args.mode)
    try:
        found = os.stat(parsed_args.file)
    except OSError:     # which the target reports
        return target
    if not stat.S_ISBLK(found.st_mode):
        return target
    if parsed_args.mode is not None:
        raise common.UsageError(f'{parsed_args.file} is a device, which '
                                'keeps its permissions: leave out --mode')
    return Device(parsed_args.file, parsed_args.force)


class Device:
    """A block device that gets the bytes of an image.

    Nobody else may have it: an open that is exclusive fails while the device,
    or a part of it, is mounted or used by the kernel otherwise.
    """

    def __init__(self, file: str, force: bool):
        self.file = file
        self.force = force

    def require_allowed(self):
        """Check that the device may be overwritten.

        :raises UsageError: it may not
        """
        if not self.force:
            raise common.UsageError(
                f'{self.file} is a block device; --force would overwrite it')

    def write(self, image, progress):
        """Write an image to the device.

        :raises FailedError: the device is too small
        :raises RepositoryError: the image cannot be read; the device then has
            a part of it
        :raises OSError: the device is in use, or cannot be written
        """
        fd = os.open(self.file, os.O_WRONLY | os.O_EXCL | os.O_CLOEXEC)
        try:
            size = os.lseek(fd, 0, os.SEEK_END)
            if not stat.S_ISBLK(os.fstat(fd).st_mode):
                raise common.FailedError(
                    f'{self.file} is not a block device any more')
            if size < image.size:
                raise common.FailedError(
                    f'{self.file} has {size} bytes, and the backup has '
                    f'{image.size}')
            self._fill(fd, image, progress)
            os.fsync(fd)
        except OSError as e:
            e.filename = e.filename or self.file
            raise
        finally:
            os.close(fd)

    def _fill(self, fd, image, progress):
        end = 0
        with copying.Copier(fd, image, progress) as copier:
            for begin, after in copying.filled_ranges(image):
                self._zero(fd, end, begin, progress)
                copier.copy(begin, after)
                end = after
        self._zero(fd, end, image.size, progress)

    @staticmethod
    def _zero(fd, begin, end, progress):
        """Make the bytes from `begin` to `end` zeros.

        The kernel does it for whole blocks of the device.
        """
        first = min(end, -(-begin // _BLOCK) * _BLOCK)
        last = max(first, end // _BLOCK * _BLOCK)
        copying.write_all(fd, bytes(first - begin), begin)
        for at in range(first, last, _ZEROS):
            length = min(_ZEROS, last - at)
            fcntl.ioctl(fd, _BLKZEROOUT, struct.pack('=QQ', at, length))
            progress.update(at + length)
        copying.write_all(fd, bytes(end - last), last)


def _require_directory(path):
    """Look for it before hours of work, and not behind them."""
    with files.os_errors(f'cannot look at {path}'):
        if not files.is_directory(path):
            raise common.UsageError(
                f'{path} is no directory: make it, or give another one')


class Verify(command.RepositoryCommand, lister.Lister):
    """Restore backups to nowhere, and compare them: a drill.

    Every byte of the newest backup of each name is read and verified, as for a
    restore. The bytes are compared with the digests that this host computed
    from the disk when it was backed up, if the state directory has them, and
    with the hash that an earlier drill has recorded. If a backup fails, the
    command goes on with the next. The exit status is then 1 if bytes are
    damaged or others than those of the disk, else 3.
    """

    def add_arguments(self, parser):
        from glance_dedup.backup import backup_job

        _add_names(parser)
        parser.add_argument(
            '--restore-sample', metavar='N', type=_number,
            help='Only so many of the disks, which are drawn for each drill. '
            'Default: all.')
        parser.add_argument(
            '--state', metavar='DIR', default=backup_job.Settings.state,
            help='The directory of digests, as of backup run. '
            'Default: %(default)s.')
        parser.add_argument(
            '--metrics', metavar='FILE',
            help='Write to this file how many backups failed, and when none '
            "did, as metrics for the node exporter's textfile collector. The "
            'name ends with .prom.')

    def take_action(self, parsed_args):
        from glance_dedup.backup import drill

        metrics = parsed_args.metrics and os.path.abspath(parsed_args.metrics)
        if metrics:
            _require_directory(os.path.dirname(metrics))
        rows, failed = [], 0
        with self.open() as repo:
            now = retention.now()
            newest = [found[-1] for found in (
                [backup for backup in backups
                 if not retention.is_future(backup, now)] for backups in
                _named(repo, parsed_args.names).values()) if found]
            chosen = drill.sample(
                newest, parsed_args.restore_sample or len(newest))
            total = sum(stat.size for stat in self._stats(repo, chosen))
            with self.progress('restoring', total) as progress:
                done = 0
                for backup in chosen:
                    found = drill.restore(
                        repo, backup, parsed_args.state,
                        functools.partial(self._show, progress, done))
                    done += found.size
                    if found.error is not None:
                        failed += 1
                        self.app.report(found.error)
                    rows.append(self._row(found))
        if metrics and rows:
            try:
                drill.write_metrics(metrics, len(rows), failed, time.time())
            except exceptions.RepositoryError as e:
                self.app.report(e)
        return ('name', 'time', 'size', 'compared_bytes', 'sha256', 'error',
                'image_id'), rows

    @staticmethod
    def _show(progress, before, done):
        progress.update(before + done)

    @staticmethod
    def _stats(repo, backups):
        for backup in backups:
            with contextlib.suppress(exceptions.RepositoryError):
                yield repo.stat(backup.image_id)

    @staticmethod
    def _row(found):
        return (found.backup.name,
                common.Time(int(found.backup.time.timestamp())),
                common.Size(found.size), common.Size(found.compared),
                found.hash_value,
                found.error and common.sentence_of(found.error),
                found.backup.image_id)


def _stored(repo, backups):
    """Return when each backup was stored.

    Those that were deleted meanwhile, or whose recipe is damaged, are left
    out: pruning needs neither.
    """
    stored = {}
    for backup in backups:
        with contextlib.suppress(exceptions.ImageNotFound,
                                 exceptions.DamagedError):
            stored[backup] = repo.stat(backup.image_id).created
    return stored


class Prune(command.RepositoryCommand, lister.Lister):
    """Delete backups that no rule keeps.

    Of each name, --keep-last N keeps the newest N backups. The other rules
    keep the newest backup of each of the last N days, ISO weeks or months that
    have any, in UTC. A backup that several rules keep counts for each. The
    newest backup of a name always stays, and so does the one that was stored
    last. A backup that is dated in the future stays, too, and counts for no
    rule. The next collection frees the space.
    """

    def add_arguments(self, parser):
        _add_names(parser)
        for rule, help in (
                ('last', 'Keep the newest N backups.'),
                ('daily', 'Keep the newest of each of the last N days.'),
                ('weekly', 'Keep the newest of each of the last N weeks.'),
                ('monthly', 'Keep the newest of each of the last N months.')):
            parser.add_argument(
                f'--keep-{rule}', type=_number, default=0, metavar='N',
                help=help)
        common.add_dry_run(parser)

    def take_action(self, parsed_args):
        rules = {rule: getattr(parsed_args, f'keep_{rule}')
                 for rule in retention.RULES}
        if not any(rules.values()):
            raise common.UsageError(
                'say which backups to keep: give at least one of '
                + ', '.join(f'--keep-{rule}' for rule in rules))
        rows = []
        now = retention.now()
        with self.open() as repo:
            # Before anything is deleted, all names are looked at.
            for backups in _named(repo, parsed_args.names).values():
                tell_of_future(self.app, backups, now)
                for backup, reasons in retention.kept(
                        backups, rules, now, _stored(repo, backups)).items():
                    deleted = error = None
                    if not reasons and not parsed_args.dry_run:
                        deleted, error = self._delete(repo, backup)
                    rows.append((
                        backup.name,
                        common.Time(int(backup.time.timestamp())),
                        bool(reasons), common.Words(reasons),
                        deleted, error))
        return ('name', 'time', 'kept', 'reasons', 'deleted', 'error'), rows

    def _delete(self, repo, backup):
        """Delete a backup; returns whether that worked, and the error."""
        try:
            repo.delete(backup.image_id)
        except exceptions.ImageNotFound:
            pass                # another process pruned it
        except exceptions.RepositoryError as e:
            self.app.report(e)
            return False, common.sentence_of(e)
        return True, None
