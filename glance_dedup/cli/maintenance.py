# SPDX-License-Identifier: Apache-2.0

"""The maintainer's commands: ``status``, ``task collect`` and others.

If a daemon serves the repository, the command has the daemon run the task, and
shows its progress. Otherwise the same task runs in this process.
"""

import contextlib
import dataclasses
import signal
import sys
import threading
import time

from cliff import show

from glance_dedup.base import endings
from glance_dedup.base import hostlist
from glance_dedup.base import pacing
from glance_dedup.base import printable
from glance_dedup.cli import command
from glance_dedup.cli import common
from glance_dedup.cli import host_settings
from glance_dedup.cli import image_facts
from glance_dedup.cli import status_report


class TaskFailed(Exception):
    """The daemon's task ended with an error."""


class Status(command.RepositoryCommand, show.ShowOne):
    """Show a repository's space, and what its daemon is doing.

    Without a daemon, the figures come from the repository and its catalog. A
    table is an overview; the other formats have all figures.
    """

    def add_arguments(self, parser):
        parser.add_argument(
            '--watch', metavar='DURATION', type=common.duration, nargs='?',
            const=2.0, help='Show it again and again, until an interrupt. '
            'Default: every 2s.')

    def take_action(self, parsed_args):
        if parsed_args.watch is None:
            self._found = self._look()
            return common.shown(self._found)
        if not 0.1 <= parsed_args.watch <= 86400:
            raise common.UsageError('--watch: 0.1s to 1d')
        if not self._is_overview(parsed_args):
            raise common.UsageError('--watch shows only the overview, without '
                                    '-f and -c')
        while True:
            self._show(self._look(), clear=sys.stdout.isatty())
            time.sleep(parsed_args.watch)

    def produce_output(self, parsed_args, column_names, data):
        if not self._is_overview(parsed_args):
            return super().produce_output(parsed_args, column_names, data)
        self._show(self._found)
        return 0

    @staticmethod
    def _is_overview(parsed_args) -> bool:
        return parsed_args.formatter == 'table' and not parsed_args.columns

    def _show(self, status: dict, clear: bool = False) -> None:
        self.app.stdout.write(
            '\x1b[H\x1b[2J' * clear + status_report.page(status))
        self.app.stdout.flush()

    def _look(self) -> dict:
        self.status = None
        self.require_repository()
        if self.status is not None:
            return self.status
        self.app.tell('no daemon answers for this repository on '
                      f'{self.settings.socket_in_words}')
        return self._without_daemon()

    def _without_daemon(self) -> dict:
        from dedupd.status import problems
        from dedupd.status import repository_stats
        from dedupd.status import volume_stats
        from glance_dedup.repository import volumes

        with contextlib.ExitStack() as stack:
            repo = stack.enter_context(self.open())
            # First: to read the catalog, this process becomes the maintainer.
            described = repository_stats.described(repo)
            catalog = stack.enter_context(image_facts.catalog_of(repo))
            figures = repository_stats.Figures(repo, lambda: catalog)
            with contextlib.closing(figures):
                space = figures.space()
                blocks, damaged = figures.damage()
                of_volumes = volume_stats.VolumeFigures(
                    repo, figures.journals).sums()
            images, names = volumes.apart(repo, damaged)
            if catalog is None:
                sums = common.sums(repo, self.app)
                space |= {
                    'images': sums['images'], 'backups': sums['backups'],
                    'logical_bytes': sums['size'],
                    'zero_bytes': sums['zero_bytes'],
                    'nonzero_bytes': sums['size'] - sums['zero_bytes']}
            status = {
                'repository': described,
                'daemon': None,
                'space': space,
                'volumes': of_volumes,
                'damage': None if catalog is None else {
                    'blocks': blocks, 'images': images, 'volumes': names},
                'filter': repository_stats.of_filter(repo, repo.statistics()),
            }
        return {**status, 'problems': problems.found_in(status)}


# -- tasks --------------------------------------------------------------------

class Interrupt:
    """Has a signal that ends programs stop a task between two of its steps.

    A second signal ends the task at once. That does no harm either, because
    every step survives a crash.
    """

    def __init__(self, pace):
        self.pace = pace
        self.before: dict = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in endings.signals():
                self.before[number] = signal.signal(
                    number, self._stop)
        return self

    def __exit__(self, *exc_info):
        self._restore()

    def _stop(self, number, frame):
        self.pace.stop()
        self._restore()

    def _restore(self):
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before.clear()


class TaskRunner(command.RepositoryCommand):
    """A command that has the daemon run a task, or runs it here.

    :cvar task: the task's name in the registry
    :cvar what: the name of the work in the progress
    """

    task = ''
    what = ''

    def result_of_task(self, **arguments) -> dict:
        """Run the task, here or in the daemon; returns its result."""
        client = self.require_repository()
        with self.progress(self.what, unit='steps') as progress:
            def update(done, total, what):
                progress.what = printable.printable(what or self.what)
                progress.update(done, total)

            if client is not None:
                return self._ask(client, update, arguments)
            return self._run_here(update, arguments)

    def _ask(self, client, update, arguments) -> dict:
        number = client.start(self.task, **arguments)
        last = client.wait(self.task, number, update)
        if last.get('error') is not None:
            raise TaskFailed(f'{self.task}: {last["error"]}')
        result = last.get('result')
        return result if isinstance(result, dict) else {}

    def _run_here(self, update, arguments) -> dict:
        from dedupd.tasks import registry
        from glance_dedup.maintenance import maintainer_role

        pace = pacing.Pace(update)
        with self.open() as repo, Interrupt(pace):
            options = (self.settings.options
                       or host_settings.of_daemon(repo.path))
            try:
                with maintainer_role.Maintainer(
                        repo, pace.step) as maintainer:
                    told = len(maintainer.warnings)
                    for warning in maintainer.warnings:
                        self.app.tell(warning)
                    if registry.TASKS[self.task].counts_first:
                        registry.run('account', maintainer, pace, options)
                    result = registry.run(self.task, maintainer, pace,
                                          options, **arguments)
                    for warning in maintainer.warnings[told:]:
                        self.app.tell(warning)
            except pacing.Stopped as e:
                raise KeyboardInterrupt() from e
        return {} if result is None else dataclasses.asdict(result)


class TaskCommand(TaskRunner, show.ShowOne):
    """A command that shows a task's result.

    :cvar unit: the kind of things that the result's failures name
    """

    unit = ''

    def add_arguments(self, parser):
        from dedupd.tasks import registry

        if 'dry_run' in registry.TASKS[self.task].arguments:
            common.add_dry_run(parser)

    def take_action(self, parsed_args):
        from dedupd.tasks import registry

        return self.run_task(**{
            name: getattr(parsed_args, name)
            for name in registry.TASKS[self.task].arguments})

    def run_task(self, **arguments):
        """Run the task, here or in the daemon; returns the columns."""
        return self._judged(self.result_of_task(**arguments))

    def _judged(self, result: dict):
        """The result's columns; failures make the exit status 1."""
        if result.get('refused'):
            self.app.tell(f'nothing was freed: {result["refused"]}')
            self.app.status = common.DAMAGED
        for which, error in (result.get('failed') or {}).items():
            self.app.tell(
                f'{self.unit} {which} was left unchanged: {error}')
            self.app.status = common.DAMAGED
        return common.shown({name: _column(name, value)
                             for name, value in result.items()})


def _column(name: str, value):
    if isinstance(value, list) and value and (
            isinstance(value[0], dict) and 'action' in value[0]):
        return common.Actions(value)
    if isinstance(value, (list, dict)):
        return common.Lines(value)
    if isinstance(value, int) and (
            name == 'bytes' or name.endswith('_bytes')):
        return common.Size(value)
    return value


def _add_counters(parser):
    """Return the options for the place of a count."""
    from glance_dedup.maintenance import refcount_rebuild

    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        '--local', type=int, metavar='N', dest='processes',
        help='Count by N processes on this host, at most '
        f'{refcount_rebuild.MAX_COUNT}. Each takes 35 MB of memory; the disk '
        'of '
        'TMPDIR, or '
        "of /var/tmp, needs as many bytes as the images' recipes. Default: "
        'one.')
    where.add_argument(
        '--hosts', metavar='FILE',
        help='Count by one process on each of the hosts in this file, one on '
        'each line. They are reached by ssh, and have the repository under '
        'the same path. No daemon may run.')


def _counters(command, parsed_args) -> dict:
    """Return the task's arguments for the place of a count.

    :raises UsageError: too many are to count, or a daemon would have to
    """
    from glance_dedup.maintenance import refcount_rebuild

    number = parsed_args.processes
    if number is not None:
        if not 1 <= number <= refcount_rebuild.MAX_COUNT:
            raise common.UsageError(
                f'--local {number} is not from 1 to '
                f'{refcount_rebuild.MAX_COUNT}')
        return {'processes': number}
    if parsed_args.hosts is None:
        return {}
    hosts = hostlist.read(parsed_args.hosts)
    if len(hosts) > refcount_rebuild.MAX_COUNT:
        raise common.UsageError(
            f'{parsed_args.hosts} names {len(hosts)} hosts: at most '
            f'{refcount_rebuild.MAX_COUNT} can count')
    if command.require_repository() is not None:
        raise common.UsageError(
            'the daemon maintains this repository, and starts no process on '
            'other hosts: stop it, or use --local')
    return {'hosts': hosts}


class Collect(TaskCommand):
    """Free the blocks that no image uses any more.

    The file system gets the space back. Uploads and downloads go on
    meanwhile.
    """

    task = 'collect'
    what = 'collecting'
    unit = 'group'

    def add_arguments(self, parser):
        super().add_arguments(parser)
        _add_counters(parser)
        parser.add_argument(
            '--by-partition', action='store_true',
            help='First count again how often recipes name each block. '
            "Nothing is freed before the catalog's counts are the same; a "
            'catalog with a wrong count is rebuilt.')

    def take_action(self, parsed_args):
        arguments = _counters(self, parsed_args)
        if parsed_args.by_partition:
            if parsed_args.dry_run:
                raise common.UsageError(
                    '--by-partition compares nothing with --dry-run')
            arguments['by_partition'] = True
        elif arguments:
            raise common.UsageError(
                '--local and --hosts are only for --by-partition')
        return self.run_task(dry_run=parsed_args.dry_run, **arguments)


class Merge(TaskCommand):
    """Find blocks that are stored twice, and have images share them.

    The next collection frees the blocks that no image uses then.
    """

    task = 'merge'
    what = 'merging'
    unit = 'image'


class Scrub(TaskCommand):
    """Read and verify every block; heal damaged ones that have a copy.

    A scrub that was interrupted goes on where it was. The exit status is 1 if
    the scrub finds damage, or cannot heal damage that was known before. It is
    3 if the object store did not answer: then the scrub is not complete.
    """

    task = 'scrub'
    what = 'scrubbing'

    def add_arguments(self, parser):
        super().add_arguments(parser)
        parser.add_argument(
            '--full', action='store_true',
            help='Start from the beginning, even if a scrub was interrupted.')

    def _judged(self, result):
        if result.get('unavailable'):
            self.app.tell(
                f'{result["unchecked"]} blocks in cold groups were not '
                f'checked: {result["unavailable"]}. The scrub is not '
                'complete: when the object store answers again, run '
                "'glance-dedup task scrub', which checks the rest")
            self.app.status = common.FAILED
        if result.get('damaged', 0) > result.get('healed', 0) or any(
                result.get(name) for name in ('found', 'images', 'volumes',
                                              'unreadable')):
            self.app.status = common.DAMAGED
        return super()._judged(result)


class Recompress(TaskCommand):
    """Compress block groups again, smaller than uploads did.

    Each group is compressed once for each codec and level; a group that is
    not full, again when it has twice as many blocks. Uploads and downloads go
    on meanwhile. A running daemon does the same when its host is idle.
    """

    task = 'recompress'
    what = 'compressing groups again'
    unit = 'group'

    def add_arguments(self, parser):
        super().add_arguments(parser)
        parser.add_argument(
            '--codec', choices=('lz4', 'zstd'),
            help="Use this codec instead of the daemon's options "
            'recompress_codec and recompress_level.')
        parser.add_argument(
            '--level', type=int, default=0,
            help='1 to 19, for --codec zstd. Default: 0, the codec\'s own.')

    def take_action(self, parsed_args):
        if parsed_args.level and parsed_args.codec != 'zstd':
            raise common.UsageError('--level is only for --codec zstd')
        arguments = {'dry_run': parsed_args.dry_run}
        if parsed_args.codec is not None:
            arguments |= {'codec': parsed_args.codec,
                          'level': parsed_args.level}
        return self.run_task(**arguments)


class Tier(TaskCommand):
    """Move sealed groups to the object store, to make space on the disk.

    The options tier_age_hours, tier_free_mib and tier_keep choose the groups.
    A group moves after it was recompressed. Uploads and downloads go on
    meanwhile. An interrupted run loses only the group that it was at.
    """

    task = 'tier'
    what = 'moving groups to the object store'
    unit = 'group'

    def add_arguments(self, parser):
        super().add_arguments(parser)
        parser.add_argument(
            '--all', dest='everything', action='store_true',
            help='Move every sealed group, whatever tier_age_hours and '
            'tier_free_mib say. Those that tier_keep names stay.')
        # 'repository backup-metadata' is for that.
        parser.set_defaults(metadata_only=False)


class Evict(TaskCommand):
    """Delete the least recently used images of a cache, to make space.

    Images that are being read stay. The daemon of a cache does the same by
    itself; use this command if you need the space now. It refuses a repository
    that is not a cache.
    """

    task = 'evict'
    what = 'evicting'
    unit = 'image'

    def add_arguments(self, parser):
        super().add_arguments(parser)
        parser.add_argument(
            '--limit', dest='limit_mib', type=common.size_in_mib,
            metavar='SIZE',
            help="Disk space that the cache may take. Default: the daemon's "
            'option limit_mib. It is required if no daemon runs.')

    def take_action(self, parsed_args):
        limit = parsed_args.limit_mib
        if limit is not None and not 0 < limit < 1 << 30:
            raise common.UsageError('--limit: 1M to less than 1P')
        if limit is None and self.require_repository() is None:
            raise common.UsageError(
                'no daemon answers for this cache: use --limit')
        return self.run_task(
            dry_run=parsed_args.dry_run,
            **({} if limit is None else {'limit_mib': limit}))


class RebuildCatalog(TaskCommand):
    """Rebuild the catalog from the images and the groups."""

    task = 'rebuild-catalog'
    what = 'counting'

    def add_arguments(self, parser):
        super().add_arguments(parser)
        _add_counters(parser)

    def take_action(self, parsed_args):
        return self.run_task(**_counters(self, parsed_args))

    def _judged(self, result):
        return common.shown({'rebuilt': True, **result})


class MarkLost(command.RepositoryCommand, show.ShowOne):
    """Give up an image whose recipe cannot be read.

    Nothing is freed while such a recipe exists, because nobody knows which
    blocks it names. This command moves the recipe to quarantine/. The image is
    then gone.
    """

    def add_arguments(self, parser):
        parser.add_argument('id', metavar='ID')
        parser.add_argument(
            '--yes', action='store_true',
            help='Confirm it. Without this, the command does nothing.')

    def take_action(self, parsed_args):
        if not parsed_args.yes:
            from glance_dedup.repository import volumes

            with contextlib.ExitStack() as stack:
                repo = (stack.enter_context(self.open())
                        if self.settings.path is not None else None)
                image = volumes.described(repo, parsed_args.id)
            raise common.UsageError(
                f'image {image} would be lost for ever; confirm it with '
                '--yes')
        client = self.require_repository()
        if client is not None:
            client.mark_lost(parsed_args.id)
        else:
            self._mark_here(parsed_args.id)
        return common.shown({'image_id': parsed_args.id, 'lost': True})

    def _mark_here(self, image_id):
        from dedupd.tasks import scrubber
        from glance_dedup.maintenance import maintainer_role

        with self.open() as repo, maintainer_role.Maintainer(
                repo) as maintainer:
            scrubber.mark_lost(maintainer, image_id)
