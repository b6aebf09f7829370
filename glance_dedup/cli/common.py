# SPDX-License-Identifier: Apache-2.0

"""Columns, sizes and errors, which all commands share."""

import argparse
import collections
import datetime
import typing

from cliff import app
from cliff import columns

from glance_dedup.base import exceptions
from glance_dedup.base import imageids
from glance_dedup.base import printable
from glance_dedup.base import scopes
from glance_dedup.base import units
from glance_dedup.client import client_errors


#: Exit statuses. Those of no repository and of a lock are restic's.
DAMAGED, USAGE, FAILED, NO_REPOSITORY, LOCKED = 1, 2, 3, 10, 11


class UsageError(Exception):
    """The command line is wrong, or lacks a confirmation; nothing was done."""


class FailedError(Exception):
    """The command line is right, but the environment does not allow it."""


class Plain(columns.FormattableColumn):
    """A cell without characters that a terminal would obey."""

    def __init__(self, cell):
        self._cell = cell
        super().__init__(getattr(cell, '_value', cell))

    def human_readable(self):
        cell = self._cell
        if cell is None:
            return '-'
        if isinstance(cell, columns.FormattableColumn):
            # A cell with several lines has them on purpose.
            return _plain(cell.human_readable(), '\n')
        if isinstance(cell, bool):
            return 'yes' if cell else 'no'
        return _plain(cell)

    def machine_readable(self):
        cell = self._cell
        if isinstance(cell, columns.FormattableColumn):
            cell = cell.machine_readable()
        return _plain(cell)


def _plain(value, keep: str = ''):
    return (printable.printable(value, keep) if isinstance(value, str)
            else value)


class Size(columns.FormattableColumn):
    """Bytes, or None: 1.5 GiB in a table, a plain number elsewhere."""

    def human_readable(self):
        return ('-' if self._value is None
                else units.size(self._value))


class Percent(columns.FormattableColumn):
    """A percentage; None: not known."""

    def human_readable(self):
        return '-' if self._value is None else f'{self._value} %'


class Age(columns.FormattableColumn):
    """Seconds, or None: 5 h in a table, a plain number elsewhere."""

    def human_readable(self):
        return '-' if self._value is None else units.duration(self._value)


class Time(columns.FormattableColumn):
    """Seconds since 1970: a date in a table, a plain number elsewhere."""

    def human_readable(self):
        try:
            when = datetime.datetime.fromtimestamp(
                self._value, datetime.timezone.utc)
        except (ValueError, OverflowError, OSError):
            return str(self._value)
        # strftime writes years before 1000 with fewer digits.
        return f'{when.year:04}{when:-%m-%d %H:%M:%S} UTC'


class Lines(columns.FormattableColumn):
    """A list: its length in a table."""

    def human_readable(self):
        return str(len(self._value))


class Actions(columns.FormattableColumn):
    """The items of a plan: their number for each action in a table."""

    def human_readable(self):
        counts = collections.Counter(item['action'] for item in self._value)
        return ', '.join(f'{number} to {action}'
                         for action, number in sorted(counts.items()))


class Words(columns.FormattableColumn):
    """A list of words: one a line in a table."""

    def human_readable(self):
        return '\n'.join(self._value)


def saved(data: int, stored: int) -> Percent:
    """The share of an image's bytes other than zeros that took no space."""
    if not data:
        return Percent(None)
    # Adding 0 makes a plain zero of a negative one.
    return Percent(round(100 * (1 - stored / data), 1) + 0.0)


def share(part: int, whole: int) -> Percent:
    """A part of a whole, in percent."""
    return Percent(round(100 * part / whole, 2) if whole else None)


def size(text: str) -> int:
    """Return the bytes that an argument means."""
    try:
        return units.parse_size(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


def size_in_mib(text: str) -> int:
    """Return the MiB that an argument means, which must be a whole number."""
    mib, rest = divmod(size(text), 1 << 20)
    if rest:
        raise argparse.ArgumentTypeError(
            f"'{text}' is no whole number of MiB: write 64M for 64 MiB")
    return mib


def rate(text: str) -> int:
    """Return the bytes a second that an argument means."""
    return size(text.removesuffix('/s'))


def duration(text: str) -> float:
    """Return the seconds that an argument means."""
    try:
        return units.parse_duration(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


def add_codec(parser):
    """Add the option ``--codec``, for new blocks."""
    parser.add_argument(
        '--codec', choices=('none', 'lz4', 'zstd'), default='lz4',
        help='How new blocks are compressed. Default: %(default)s.')


def add_certificates(parser):
    """Add the options by which we and another daemon authenticate."""
    parser.add_argument(
        '--cert', metavar='FILE',
        help="The operator's certificate, to show the other daemon.")
    parser.add_argument(
        '--key', metavar='FILE',
        help='Its key, if that is not in the same file.')
    parser.add_argument(
        '--ca-file', metavar='FILE',
        help="The authorities that verify the other daemon's certificate. "
        "Default: the system's.")


def add_dry_run(parser):
    """Add ``--dry-run``."""
    parser.add_argument(
        '--dry-run', action='store_true',
        help='Only tell what would be done.')


def client_of(parsed_args, token: str | None = None):
    """A client of the daemon at ``address``, with these certificates.

    :raises UsageError: the address or a file is malformed, or there is a key
        without a certificate
    """
    from glance_dedup.client import daemon_client

    if parsed_args.key is not None and parsed_args.cert is None:
        raise UsageError('--key needs --cert')
    try:
        return daemon_client.Client(
            parsed_args.address, cert=parsed_args.cert, key=parsed_args.key,
            ca_file=parsed_args.ca_file, token=token)
    except ValueError as e:
        raise UsageError(str(e)) from e


def add_scope(parser):
    """Add ``--scope``: the images whose blocks a new image shares."""
    parser.add_argument(
        '--scope', choices=scopes.CHOICES, default='global',
        help='Share equal blocks with all images of the scope global, or '
        'only with those of this project. Default: %(default)s.')


def shown(fields: dict) -> tuple[tuple, tuple]:
    """The names and values that a ShowOne command returns."""
    return tuple(fields), tuple(fields.values())


def add_stat(fields: dict, stat) -> dict:
    """Add the columns that describe an image to `fields`."""
    fields.update({
        'image_id': stat.image_id,
        'size': Size(stat.size),
        'zero_bytes': Size(stat.zero_bytes),
        'new_bytes': Size(stat.new_bytes),
        'stored_bytes': Size(stat.stored_bytes),
        'saved_percent': saved(
            stat.size - stat.zero_bytes, stat.stored_bytes),
        'extents': stat.extents,
        'fragments': stat.fragments,
        'created': Time(stat.created),
        'project': stat.project,
        'scope': scopes.describe(bytes.fromhex(stat.scope)),
        'upload_id': stat.upload_id,
    })
    return fields


def stats(repo, app, image_ids=None):
    """Return the stats of readable images; report the others to `app`.

    :param image_ids: None: all images that are no backups
    """
    for image_id in plain_images(repo) if image_ids is None else image_ids:
        try:
            yield repo.stat(image_id)
        except exceptions.ImageNotFound:
            continue            # deleted meanwhile
        except (exceptions.DamagedError, exceptions.VersionError,
                exceptions.InvalidParameter) as e:
            app.report(e)


def plain_images(repo) -> list[str]:
    """The ids of all images that are no backups."""
    return [image_id for image_id in repo.images()
            if imageids.of_backup(image_id) is None]


def tell_of_backups(repo, app):
    """Say that ``--all`` leaves backups out, if there are any."""
    number = len(repo.backups())
    if number:
        app.tell(f'--all leaves {number} backups out: name those that you '
                 'want')


def require_no_backup(image_id: str):
    """Refuse to store an image under a backup's id unless it is a backup.

    It would be deleted when the backups are pruned.

    :raises UsageError: the id is that of a backup
    """
    if imageids.of_backup(image_id) is not None:
        raise UsageError(f'{image_id} is the id of a backup: choose another')


def sums(repo, app) -> dict[str, int]:
    """The sums over all recipes; only images and backups are counted."""
    names = ('size', 'zero_bytes', 'new_bytes', 'stored_bytes')
    total = dict.fromkeys(('images', 'backups', *names), 0)
    for found in stats(repo, app, repo.recipes()):
        if imageids.of_backup(found.image_id) is not None:
            total['backups'] += 1
        elif imageids.is_image(found.image_id):
            total['images'] += 1
        for name in names:
            total[name] += getattr(found, name)
    return total


class Program(app.App):
    """The program, as its commands see it.

    :cvar groups: the commands, as in `main.GROUPS`
    :ivar error: the error that ended the command
    :ivar status: the exit status for errors that the command survived; the
        command sets it, or calls `note`
    :ivar log: a file to which errors are written, too
    """

    groups: dict[str, dict[str, str]]

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.error: BaseException | None = None
        self.status = 0
        self.log: typing.TextIO | None = None

    def tell(self, error: BaseException | str):
        """Write an error, or a sentence, to standard error and the log."""
        if isinstance(error, BaseException):
            error = sentence_of(error)
        error = printable.printable(error)
        for stream in (self.stderr, self.log):
            if stream is not None:
                stream.write(f'glance-dedup: {error}\n')

    def note(self, error: BaseException):
        """Have the exit status show an error that does not end the command.

        If there are several, damage takes precedence; other statuses that
        differ make `FAILED`.
        """
        statuses = {status_of(error), self.status or status_of(error)}
        self.status = (DAMAGED if DAMAGED in statuses else FAILED
                       if len(statuses) > 1 else statuses.pop())

    def report(self, error: BaseException):
        """Tell of an error that does not end the command, and note it."""
        self.tell(error)
        self.note(error)


def status_of(error: BaseException) -> int:
    """Return the exit status for an error, here or of the daemon."""
    if isinstance(error, client_errors.Refused):
        return {400: USAGE, 409: LOCKED}.get(error.code, FAILED)
    for kind, status in (
            (exceptions.DamagedError, DAMAGED), (UsageError, USAGE),
            (exceptions.InvalidParameter, USAGE),
            (exceptions.RepositoryNotFound, NO_REPOSITORY),
            (exceptions.BusyError, LOCKED)):
        if isinstance(error, kind):
            return status
    return FAILED


def sentence_of(error: BaseException) -> str:
    """An error as one line of plain text."""
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
        if error.filename is not None:
            text = f'{error.filename}: {text}'
    elif isinstance(error, MemoryError):
        text = 'there is not enough memory'
    else:
        text = str(error) or type(error).__name__
    return printable.printable(' '.join(text.split()))
