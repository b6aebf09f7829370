# SPDX-License-Identifier: Apache-2.0

"""What the maintainer does: ``glance-dedup status``, ``collect`` and others.

If a daemon serves the repository it is asked, and shows how far it is.
Otherwise the same tasks run here.
"""

import contextlib
import dataclasses
import os
import signal
import threading

from cliff import columns
from cliff import show
from oslo_config import cfg

from dedupd.tasks import registry
from glance_dedup.base import printable
from glance_dedup.base import task as task_module
from glance_dedup.cli import common
from glance_dedup.cli import daemon as daemon_module
from glance_dedup.maintenance import maintainer as maintainer_module

CONFIG_FILE = '/etc/dedupd/dedupd.conf'


class TaskFailed(Exception):
    """The daemon's task ended with an error."""


class Section(columns.FormattableColumn):
    """A part of the status: its figures one a line in a table."""

    def human_readable(self):
        if not isinstance(self._value, dict):
            return '-' if self._value in (None, [], {}) else str(self._value)
        return '\n'.join(f'{name}: {worded(name, value)}'
                         for name, value in self._value.items())


def worded(name: str, value) -> str:
    """A figure of the status as people read it."""
    if value is None or value in ([], {}):
        return '-'
    if isinstance(value, bool):
        return 'yes' if value else 'no'
    if isinstance(value, (int, float)):
        if name.endswith('_bytes') or name in ('bytes', 'block_size'):
            return common.Size(value).human_readable()
        if name.endswith('percent'):
            return common.Percent(value).human_readable()
        if name in ('started', 'finished', 'next', 'time', 'last_success'):
            return common.Time(value).human_readable()
    if isinstance(value, dict):
        return ', '.join(f'{key} {worded(key, item)}'
                         for key, item in value.items())
    if isinstance(value, list):
        return ', '.join(worded('', item) for item in value)
    return printable.printable(str(value))


def worded_task(task: dict) -> str:
    """How a task is, on one line."""
    words = [str(task.get('state'))]
    if task.get('state') == 'running':
        words.append(f'{worded("", task.get("what"))} {task.get("done")} of '
                     f'{task.get("total")}')
        if task.get('seconds_left') is not None:
            words.append(f'{task["seconds_left"]:.0f} s left')
    last = task.get('last')
    if isinstance(last, dict):
        words.append('last ' + worded('finished', last.get('finished')))
        words.append(worded('', last.get('error') or last.get('result')))
    if task.get('next') is not None:
        words.append('next ' + worded('next', task['next']))
    return ', '.join(words)


class Tasks(Section):
    def human_readable(self):
        return '\n'.join(f'{name}: {worded_task(task)}'
                         for name, task in self._value.items())


class Errors(Section):
    def human_readable(self):
        return '\n'.join(
            f'{worded("time", error.get("time"))} {error.get("task")}: '
            f'{worded("", error.get("text"))}' for error in self._value) or '-'


_SECTIONS = {'tasks': Tasks, 'errors': Errors}


class Status(daemon_module.DaemonCommand, show.ShowOne):
    """Show a repository's space, and what its daemon is at.

    Without a daemon, what the repository and its catalog say is shown.
    """

    def take_action(self, parsed_args):
        self.need_daemon_or_repository()
        status = self.status
        if status is None:
            self.app.tell('no daemon answers for this repository on '
                          f'{self.app.options.socket or "any socket"}')
            status = self.without_daemon()
        return common.shown({
            name: _SECTIONS.get(name, Section)(value)
            for name, value in status.items()})

    def without_daemon(self) -> dict:
        from dedupd import figures as figures_module

        with self.open() as repo, daemon_module.catalog_of(repo) as catalog:
            parameters = repo.parameters
            figures = figures_module.Figures(repo, lambda: catalog)
            with contextlib.closing(figures):
                space = figures.space()
                blocks, images = figures.damage()
            if catalog is None:
                space |= self.sums(repo, space['disk_bytes'])
            return {
                'repository': {
                    'path': repo.path, 'id': parameters.repository_id,
                    'block_size': parameters.block_size,
                    'cutting': parameters.cutting,
                    'group_slots': parameters.group_slots,
                    'fingerprint': parameters.fingerprint,
                    'compare': parameters.compare},
                'daemon': None,
                'space': space,
                'damage': None if catalog is None else {
                    'blocks': blocks, 'images': sorted(images)},
                'filter': {
                    **{name: value for name, value
                       in repo.statistics().items()
                       if name.startswith('filter_')},
                    'filter_error': repo.filter.error},
            }

    def sums(self, repo, disk_bytes: int) -> dict:
        """What the recipes say."""
        images = logical = zeros = 0
        for found in common.stats(repo, self.app):
            images += 1
            logical += found.size
            zeros += found.zero_bytes
        return {'images': images, 'logical_bytes': logical,
                'zero_bytes': zeros, 'nonzero_bytes': logical - zeros}


# -- tasks --------------------------------------------------------------------

class Interrupt:
    """Has an interrupt stop a task between two of its steps.

    A second one ends it at once, which does no harm either: every step
    survives a crash.
    """

    def __init__(self, pace):
        self.pace = pace
        self.before: dict = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self.stop)
        return self

    def __exit__(self, *exc_info):
        self.restore()

    def stop(self, number, frame):
        self.pace.stop()
        self.restore()

    def restore(self):
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before.clear()


class TaskCommand(daemon_module.DaemonCommand, show.ShowOne):
    """A task of the maintainer's, by the daemon or in this process."""

    task = ''
    what = ''
    unit = ''                   # which a result's failures are of
    config_file: str | None = None

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--config-file', metavar='FILE',
            help="The daemon's options, for where no daemon runs. Default: "
            f'{CONFIG_FILE}, if it is for this repository. Rates in it do '
            'not count here.')
        if 'dry_run' in registry.TASKS[self.task].arguments:
            parser.add_argument(
                '--dry-run', action='store_true',
                help='Only tell what would be done.')
        return parser

    def take_action(self, parsed_args):
        return self.run_task(**{
            name: getattr(parsed_args, name)
            for name in registry.TASKS[self.task].arguments})

    def run(self, parsed_args):
        self.config_file = parsed_args.config_file
        return super().run(parsed_args)

    def run_task(self, **arguments):
        client = self.need_daemon_or_repository()
        with self.progress(self.what, unit='steps') as progress:
            def update(done, total, what):
                progress.what = printable.printable(what or self.what)
                progress.update(done, total)

            if client is not None:
                result = self.ask(client, update, arguments)
            else:
                result = self.run_here(update, arguments)
        return self.judged(result)

    def ask(self, client, update, arguments) -> dict:
        number = client.start(self.task, **arguments)
        last = client.wait(self.task, number, update)
        if last.get('error') is not None:
            raise TaskFailed(f'{self.task}: {last["error"]}')
        result = last.get('result')
        return result if isinstance(result, dict) else {}

    def run_here(self, update, arguments) -> dict:
        pace = task_module.Pace(update)
        with self.open() as repo, Interrupt(pace):
            options = self.options_of(repo.path)
            try:
                with maintainer_module.Maintainer(
                        repo, pace.step) as maintainer:
                    for warning in maintainer.warnings:
                        self.app.tell(warning)
                    if registry.TASKS[self.task].counts_first:
                        registry.run('account', maintainer, pace, options)
                    result = registry.run(self.task, maintainer, pace,
                                          options, **arguments)
            except task_module.Stopped as e:
                raise KeyboardInterrupt() from e
        return {} if result is None else dataclasses.asdict(result)

    def options_of(self, path):
        """The daemon's options, as far as the task asks for any."""
        given = self.config_file
        if given is None and os.path.exists(CONFIG_FILE):
            given = CONFIG_FILE
        try:
            options = registry.load_options(given).dedupd
            # Each is parsed when it is read.
            ours = os.path.realpath(options.datadir) == os.path.realpath(path)
            for name in options:
                options[name]
            registry.check_options(options)
        except (cfg.Error, ValueError) as e:
            raise common.UsageError(f'{given}: {e}') from e
        if ours or given is None:
            return options
        if self.config_file is not None:
            raise common.UsageError(
                f'{given} is for the repository {options.datadir}')
        return registry.load_options().dedupd

    def judged(self, result: dict):
        """The result's columns; damage makes the status 1."""
        if result.get('refused'):
            self.app.tell(f'nothing was freed: {result["refused"]}')
            self.app.status = 1
        for which, error in (result.get('failed') or {}).items():
            self.app.tell(
                f'{self.unit} {which} was left as it is: {error}')
            self.app.status = 1
        return common.shown({name: column(name, value)
                             for name, value in result.items()})


def column(name: str, value):
    if isinstance(value, (list, dict)):
        return common.Lines(value)
    if isinstance(value, int) and (
            name == 'bytes' or name.endswith('_bytes')):
        return common.Size(value)
    return value


class Collect(TaskCommand):
    """Free the blocks that no image uses any more.

    The space comes back in the file system. Uploads and downloads go on
    meanwhile.
    """

    task = 'collect'
    what = 'collecting'
    unit = 'group'


class Merge(TaskCommand):
    """Find blocks that are stored twice, and have images share them.

    What images no longer use is freed by the next collection.
    """

    task = 'merge'
    what = 'merging'
    unit = 'image'


class Scrub(TaskCommand):
    """Read and verify every block; heal those of which there is a copy.

    It begins where the last one was interrupted. The exit status is 1 if it
    finds damage, or if damage that was known before is not healed.
    """

    task = 'scrub'
    what = 'scrubbing'

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--full', action='store_true',
            help='Begin anew, wherever the last one was.')
        return parser

    def judged(self, result):
        if result.get('damaged', 0) > result.get('healed', 0) or any(
                result.get(name) for name in ('found', 'images',
                                              'unreadable')):
            self.app.status = 1
        return super().judged(result)


class Recompress(TaskCommand):
    """Compress full block groups anew, smaller than uploads did.

    Each group once for each codec and level. Uploads and downloads go on
    meanwhile. A running daemon does the same when its host is idle.
    """

    task = 'recompress'
    what = 'compressing groups anew'
    unit = 'group'

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--codec', choices=('lz4', 'zstd'),
            help="Instead of the daemon's options recompress_codec and "
            'recompress_level.')
        parser.add_argument(
            '--level', type=int, default=0,
            help='For zstd 1 to 19; only with --codec. Default: 0, the '
            "codec's own.")
        return parser

    def take_action(self, parsed_args):
        arguments = {'dry_run': parsed_args.dry_run}
        if parsed_args.codec is not None:
            arguments |= {'codec': parsed_args.codec,
                          'level': parsed_args.level}
        elif parsed_args.level:
            raise common.UsageError('--level is only for --codec')
        return self.run_task(**arguments)


class Evict(TaskCommand):
    """Delete images of a cache, those not used for longest, to make room.

    Images that are being read stay. The daemon of a cache does the same by
    itself; this is for room that is wanted now. A repository that is no cache
    is refused.
    """

    task = 'evict'
    what = 'evicting'
    unit = 'image'

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--limit-mib', type=int, metavar='MIB',
            help="What the cache may take of the disk. Default: the daemon's "
            'option limit_mib; where no daemon runs it has to be given.')
        return parser

    def take_action(self, parsed_args):
        limit = parsed_args.limit_mib
        if limit is not None and not 0 < limit < 1 << 30:
            raise common.UsageError(f'--limit-mib {limit} is not a number '
                                    'from 1 to 1073741823')
        if limit is None and self.need_daemon_or_repository() is None:
            raise common.UsageError('no daemon answers for this cache: say '
                                    '--limit-mib')
        return self.run_task(
            dry_run=parsed_args.dry_run,
            **({} if limit is None else {'limit_mib': limit}))


class RebuildCatalog(TaskCommand):
    """Make the catalog anew, from the images and the groups."""

    task = 'rebuild-catalog'
    what = 'counting'

    def judged(self, result):
        return common.shown({'rebuilt': True, **result})


class MarkLost(daemon_module.DaemonCommand, show.ShowOne):
    """Give an image up whose recipe cannot be read.

    As long as there is such a recipe nothing is freed, for nobody knows what
    it names. It is moved to quarantine/, and the image is gone.
    """

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument('id', metavar='ID')
        parser.add_argument(
            '--yes', action='store_true',
            help='Really do so; nothing is done without it.')
        return parser

    def take_action(self, parsed_args):
        if not parsed_args.yes:
            raise common.UsageError(
                f'image {parsed_args.id} would be lost for ever; --yes says '
                'that you mean it')
        client = self.need_daemon_or_repository()
        if client is not None:
            client.mark_lost(parsed_args.id)
        else:
            self.mark_here(parsed_args.id)
        return common.shown({'image_id': parsed_args.id, 'lost': True})

    def mark_here(self, image_id):
        from dedupd.tasks import scrubber

        with self.open() as repo, maintainer_module.Maintainer(
                repo) as maintainer:
            scrubber.mark_lost(maintainer, image_id)
