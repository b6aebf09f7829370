# SPDX-License-Identifier: Apache-2.0

"""``glance-dedup``: the program.

Exit status: 0 fine; 1 damage was found; 2 wrong usage, or the environment does
not allow it; 130 interrupted; 141 nobody reads the output any more.
"""

import importlib.metadata
import io
import logging
import os
import signal
import sys
import threading
import warnings

from cliff import commandmanager
from cliff import display
from cliff import lister

from glance_dedup.base import version
from glance_dedup.cli import common

NAMESPACE = 'glance_dedup.cli'
# The same as in setup.cfg, where the documents' builder finds them.
COMMANDS = {
    'status': 'glance_dedup.cli.maintenance:Status',
    'collect': 'glance_dedup.cli.maintenance:Collect',
    'merge': 'glance_dedup.cli.maintenance:Merge',
    'scrub': 'glance_dedup.cli.maintenance:Scrub',
    'recompress': 'glance_dedup.cli.maintenance:Recompress',
    'evict': 'glance_dedup.cli.maintenance:Evict',
    'space': 'glance_dedup.cli.repository:Space',
    'estimate': 'glance_dedup.cli.adoption:Estimate',
    'import': 'glance_dedup.cli.adoption:Import',
    'export': 'glance_dedup.cli.adoption:Export',
    'orphans': 'glance_dedup.cli.adoption:Orphans',
    'missing': 'glance_dedup.cli.adoption:Missing',
    'replicate': 'glance_dedup.cli.replication:Replicate',
    'mount': 'glance_dedup.cli.mount:Mount',
    'repository create': 'glance_dedup.cli.repository:Create',
    'repository show': 'glance_dedup.cli.repository:Show',
    'repository check': 'glance_dedup.cli.repository:Check',
    'repository rebuild-filter': 'glance_dedup.cli.repository:RebuildFilter',
    'repository collect': 'glance_dedup.cli.maintenance:Collect',
    'repository rebuild-catalog':
    'glance_dedup.cli.maintenance:RebuildCatalog',
    'repository upgrade': 'glance_dedup.cli.repository:Upgrade',
    'repository try-sharing': 'glance_dedup.cli.sharing:TrySharing',
    'image put': 'glance_dedup.cli.image:Put',
    'image register': 'glance_dedup.cli.adoption:Register',
    'image copy': 'glance_dedup.cli.image:Copy',
    'image get': 'glance_dedup.cli.image:Get',
    'image delete': 'glance_dedup.cli.image:Delete',
    'image list': 'glance_dedup.cli.image:List',
    'image show': 'glance_dedup.cli.image:Show',
    'image pull': 'glance_dedup.cli.image:Pull',
    'image verify': 'glance_dedup.cli.adoption:Verify',
    'image mark-lost': 'glance_dedup.cli.maintenance:MarkLost',
    'backup run': 'glance_dedup.cli.batch:Run',
    'backup plan': 'glance_dedup.cli.batch:Plan',
    'backup list': 'glance_dedup.cli.backup:List',
    'backup restore': 'glance_dedup.cli.backup:Restore',
    'backup prune': 'glance_dedup.cli.backup:Prune',
    'volume create': 'glance_dedup.cli.volume:Create',
    'volume clone': 'glance_dedup.cli.volume:Clone',
    'volume snapshot': 'glance_dedup.cli.volume:Snapshot',
    'volume rollback': 'glance_dedup.cli.volume:Rollback',
    'volume rename': 'glance_dedup.cli.volume:Rename',
    'volume list': 'glance_dedup.cli.volume:List',
    'volume show': 'glance_dedup.cli.volume:Show',
    'volume resize': 'glance_dedup.cli.volume:Resize',
    'volume delete': 'glance_dedup.cli.volume:Delete',
    'volume serve': 'glance_dedup.cli.volumeserve:Serve',
}
INTERRUPTED = 130
NO_READER = 141


class CommandManager(commandmanager.CommandManager):
    """Finds the commands, and imports a command's module when it is run."""

    def load_commands(self, namespace):
        # cliff's own would import the modules of all commands at every start,
        # and find none of them in a tree that is not installed.
        self.group_list.append(namespace)
        self.commands.update(
            (name, importlib.metadata.EntryPoint(name, value, namespace))
            for name, value in COMMANDS.items())


class App(common.Program):
    """The program ``glance-dedup``; its one instance runs one command."""

    NAME = 'glance-dedup'

    def __init__(self, **kwargs):
        super().__init__(
            description='Work on a repository of glance-dedup, the '
            'deduplicating image store for OpenStack Glance.',
            version=version.version(),
            command_manager=CommandManager(NAMESPACE),
            deferred_help=True, **kwargs)

    def build_option_parser(self, description, version,
                            argparse_kwargs=None):
        # An abbreviation here would swallow options of the commands.
        parser = super().build_option_parser(
            description, version, {'allow_abbrev': False,
                                   'prog': 'glance-dedup'})
        parser.add_argument(
            '--repository', metavar='DIR',
            default=os.environ.get('GLANCE_DEDUP_REPOSITORY'),
            help="The repository's directory. The default is the "
            'environment variable GLANCE_DEDUP_REPOSITORY.')
        parser.add_argument(
            '--filter-dir', metavar='DIR',
            default=os.environ.get('GLANCE_DEDUP_FILTER_DIR'),
            help='Directory of the fingerprint filter: the value of '
            "Glance's dedup_store_filter_dir, if that is set. The default "
            'is the environment variable GLANCE_DEDUP_FILTER_DIR, or a '
            'directory of the user in /dev/shm.')
        parser.add_argument(
            '--index',
            choices=('filter', 'lmdb', 'dtb', 'inram', 'leveldb'),
            default=os.environ.get('GLANCE_DEDUP_INDEX', 'filter'),
            help="What finds duplicates: the value of Glance's "
            "dedup_store_index. 'volume serve' may have another, also inram "
            'or leveldb, which are of no use to other commands. The default '
            'is the environment variable GLANCE_DEDUP_INDEX, or filter.')
        parser.add_argument(
            '--index-dir', metavar='DIR',
            default=os.environ.get('GLANCE_DEDUP_INDEX_DIR'),
            help="Directory of an index on a disk: the value of Glance's "
            'dedup_store_index_dir. The default is the environment variable '
            'GLANCE_DEDUP_INDEX_DIR.')
        parser.add_argument(
            '--reserve-mib', type=int, metavar='MIB',
            default=os.environ.get('GLANCE_DEDUP_RESERVE_MIB', '64'),
            help='Space that storing leaves free on the file system, in MiB: '
            "the value of Glance's dedup_store_reserve_mib. The default is "
            'the environment variable GLANCE_DEDUP_RESERVE_MIB, or 64.')
        parser.add_argument(
            '--socket', metavar='PATH',
            default=os.environ.get('GLANCE_DEDUP_SOCKET',
                                   '/run/dedupd/dedupd.sock'),
            help='Unix socket of the daemon, which is used if it serves the '
            'repository; empty: use no daemon. The default is the '
            'environment variable GLANCE_DEDUP_SOCKET, or %(default)s.')
        return parser

    def configure_logging(self):
        # `run` reports each error once; cliff's own reports are for --debug.
        logging.getLogger('').setLevel(
            logging.ERROR if self.options.debug else logging.CRITICAL)
        if self.options.log_file:
            try:
                self.log = open(self.options.log_file, 'a')
            except (OSError, ValueError) as e:
                self.error = e
                raise

    def initialize_app(self, argv):
        if not argv and not self.options.deferred_help:
            self.error = common.UsageError(
                "no command is given; see 'glance-dedup --help'")
            raise self.error

    def prepare_to_run_command(self, cmd):
        """Have the command's tables show only plain text.

        The formats json, yaml and csv can express any text themselves.
        """
        if not isinstance(cmd, display.DisplayCommandBase):
            return
        produce = cmd.produce_output

        def produce_plain(parsed_args, column_names, data):
            if parsed_args.formatter not in ('json', 'yaml', 'csv'):
                if isinstance(cmd, lister.Lister):
                    data = (tuple(map(common.Plain, row)) for row in data)
                else:
                    data = tuple(map(common.Plain, data))
            return produce(parsed_args, column_names, data)

        # Only for this instance, not for its class.
        setattr(cmd, 'produce_output', produce_plain)

    def clean_up(self, cmd, result, err):
        self.error = err

    def run_subcommand(self, argv) -> int:
        """As cliff's, but with a message of our own for unknown commands."""
        try:
            self.command_manager.find_command(argv)
        except ValueError:
            self.tell(f"'{' '.join(argv)}' is not a command; see "
                      "'glance-dedup --help'")
            return 2
        return super().run_subcommand(argv)

    def run(self, argv) -> int:
        self.error = None
        self.status = 0
        try:
            return self.judge(super().run(argv))
        except (common.UsageError, OSError, ValueError):
            # It went wrong before the command began; with --debug cliff
            # lets the exception through.
            return self.judge(2)
        finally:
            if self.log is not None:
                self.log.close()

    def judge(self, result: int) -> int:
        """Report the command's error, if any; returns the exit status."""
        if self.error is None or isinstance(
                self.error, (KeyboardInterrupt, BrokenPipeError)):
            return result or self.status
        self.tell(self.error)
        return common.status_of(self.error)


def _show_warning(message, category, filename, lineno, file=None, line=None):
    if issubclass(category, RuntimeWarning):
        sys.stderr.write(f'glance-dedup: {message}\n')


def _terminated(signum, frame):
    # The command undoes its unfinished work, as after an interrupt.
    raise KeyboardInterrupt()


def _run(argv) -> int:
    # A program that calls `main` may have replaced it.
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names need not be valid text.
        sys.stdout.reconfigure(errors='backslashreplace')
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            warnings.simplefilter('always', RuntimeWarning)
            result = App().run(argv)
        sys.stdout.flush()
        return result
    except BrokenPipeError:
        return NO_READER
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as e:             # argparse's
        return 2 if e.code else 0
    except OSError as e:
        sys.stderr.write('glance-dedup: cannot write to standard output: '
                         f'{common.sentence_of(e)}\n')
        _lose_output()
        return 2


def _lose_output():
    """Keep Python from flushing the output again when it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    in_charge = threading.current_thread() is threading.main_thread()
    if in_charge:
        before = signal.signal(signal.SIGTERM, _terminated)
    try:
        result = _run(sys.argv[1:] if argv is None else argv)
    finally:
        if in_charge:
            signal.signal(signal.SIGTERM, before)
    if result == INTERRUPTED:
        sys.stderr.write('glance-dedup: interrupted\n')
    elif result == NO_READER:
        _lose_output()
    return result


if __name__ == '__main__':
    sys.exit(main())
