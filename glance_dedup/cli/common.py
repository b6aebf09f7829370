# SPDX-License-Identifier: Apache-2.0

"""What the commands share: columns, sizes, errors."""

import datetime
import typing

from cliff import app
from cliff import columns
from cliff import command

from glance_dedup.base import exceptions
from glance_dedup.base import printable
from glance_dedup.base import scopes
from glance_dedup.cli import progress as progress_module


class UsageError(Exception):
    """The command line asks for what cannot be done."""


class Plain(columns.FormattableColumn):
    """A cell as a terminal may show it."""

    def __init__(self, cell):
        self._cell = cell
        super().__init__(getattr(cell, '_value', cell))

    def human_readable(self):
        cell = self._cell
        if isinstance(cell, columns.FormattableColumn):
            # One of several lines has them on purpose.
            return _plain(cell.human_readable(), '\n')
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
                else progress_module.format_size(self._value))


class Percent(columns.FormattableColumn):
    def human_readable(self):
        return '-' if self._value is None else f'{self._value} %'


class Time(columns.FormattableColumn):
    """Seconds since 1970: a date in a table, a plain number elsewhere."""

    def human_readable(self):
        try:
            when = datetime.datetime.fromtimestamp(
                self._value, datetime.timezone.utc)
        except (ValueError, OverflowError, OSError):
            return str(self._value)
        return when.strftime('%Y-%m-%d %H:%M:%S UTC')


class YesNo(columns.FormattableColumn):
    """A truth that may not be known."""

    def human_readable(self):
        return '-' if self._value is None else 'yes' if self._value else 'no'


class Lines(columns.FormattableColumn):
    """A list: its length in a table."""

    def human_readable(self):
        return str(len(self._value))


class Words(columns.FormattableColumn):
    """A list of words: one a line in a table."""

    def human_readable(self):
        return '\n'.join(self._value)


def saved(data: int, stored: int) -> Percent:
    """How much of the bytes that are not zeros took no space."""
    if not data:
        return Percent(None)
    # Adding 0 makes a plain zero of a negative one.
    return Percent(round(100 * (1 - stored / data), 1) + 0.0)


def share(part: int, whole: int) -> Percent:
    """A part of something, in percent of it."""
    return Percent(round(100 * part / whole, 2) if whole else None)


def add_codec(parser):
    parser.add_argument(
        '--codec', choices=('none', 'lz4', 'zstd'), default='lz4',
        help='How new blocks are compressed. Default: %(default)s.')


def add_certificates(parser):
    """The options that say who we are to another daemon, and who it is."""
    parser.add_argument(
        '--cert', metavar='FILE',
        help="The operator's certificate, to show the other daemon.")
    parser.add_argument(
        '--key', metavar='FILE',
        help='Its key, if that is not in the same file.')
    parser.add_argument(
        '--ca-file', metavar='FILE',
        help="What the other daemon's certificate is verified by; else "
        "by the system's authorities.")


def add_scope(parser):
    """The option that says whose blocks a new image shares."""
    parser.add_argument(
        '--scope', choices=scopes.CHOICES, default='global',
        help='Share equal blocks with all images that were stored so '
        '(global), or only with those of this project (project). Default: '
        '%(default)s.')


def shown(fields: dict) -> tuple[tuple, tuple]:
    """What a ShowOne command returns."""
    return tuple(fields), tuple(fields.values())


def add_stat(fields: dict, stat) -> dict:
    """The columns that describe an image."""
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


def stats(repo, app):
    """What all recipes say; of those that cannot be read, `app` is told."""
    for image_id in repo.images():
        try:
            yield repo.stat(image_id)
        except exceptions.ImageNotFound:
            continue            # deleted meanwhile
        except (exceptions.DamagedError, exceptions.VersionError,
                exceptions.InvalidParameter) as e:
            app.tell(e)
            app.note(e)


class Program(app.App):
    """What a command is a part of, as it sees it.

    :ivar error: that ended the command
    :ivar status: of what a command survived; it may set or `note` it
    :ivar log: that errors are written to besides
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.error: BaseException | None = None
        self.status = 0
        self.log: typing.TextIO | None = None

    def tell(self, error: BaseException | str):
        """A sentence about something that went wrong."""
        if isinstance(error, BaseException):
            error = sentence_of(error)
        error = printable.printable(error)
        for stream in (self.stderr, self.log):
            if stream is not None:
                stream.write(f'glance-dedup: {error}\n')

    def note(self, error: BaseException):
        """An error that does not end the command counts in its status.

        Damage is the lesser number, but the greater news.
        """
        status = status_of(error)
        self.status = min(self.status or status, status)


class RepositoryCommand(command.Command):
    """For commands that work on the repository of the global option."""

    app: Program

    @property
    def path(self) -> str:
        path = self.app.options.repository
        if not path:
            raise UsageError(
                'there is no repository given: use --repository DIR or set '
                'GLANCE_DEDUP_REPOSITORY')
        if '\0' in path:
            raise UsageError("the repository's path holds a NUL")
        return path

    def open(self, **options):
        # Help and usage errors need no engine.
        from glance_dedup.repository import repository

        return repository.Repository(
            self.path, filter_dir=self.app.options.filter_dir or None,
            reserve_mib=self.app.options.reserve_mib, **options)

    def progress(self, what, total=None, **options):
        return progress_module.Progress(
            what, total, quiet=self.app.options.verbose_level == 0,
            **options)


def status_of(error: BaseException) -> int:
    """The exit status that an error is worth."""
    return 1 if isinstance(error, exceptions.DamagedError) else 2


def sentence_of(error: BaseException) -> str:
    """An error in words, on one line."""
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
        if error.filename is not None:
            text = f'{error.filename}: {text}'
    elif isinstance(error, MemoryError):
        text = 'there is not enough memory'
    else:
        text = str(error) or type(error).__name__
    return printable.printable(' '.join(text.split()))
