# SPDX-License-Identifier: Apache-2.0

"""``glance-dedup``: the program.

Exit status: 0 fine; 1 damage was found; 2 wrong usage; 3 the environment does
not allow it; 10 there is no repository; 11 another process has a lock; 130
interrupted; 141 the reader of the output is gone.
"""

import argparse
import contextlib
import difflib
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

from glance_dedup.base import endings
from glance_dedup.base import package_version
from glance_dedup.cli import common
from glance_dedup.cli import host_settings

#: The commands, by the heading under which ``--help`` lists them. Except for
#: the general ones, each is a noun and a verb, and a noun has one heading.
GROUPS = {
    'General': {
        'status': 'glance_dedup.cli.maintenance:Status',
        'upgrade check': 'glance_dedup.cli.upgradecheck:UpgradeCheck',
        'complete': 'glance_dedup.cli.completion:Complete',
        'help': 'glance_dedup.cli.help:Help',
    },
    'The repository': {
        'repository create': 'glance_dedup.cli.repository_commands:Create',
        'repository show': 'glance_dedup.cli.repository_commands:Show',
        'repository space': 'glance_dedup.cli.repository_commands:Space',
        'repository check': 'glance_dedup.cli.repository_commands:Check',
        'repository rebuild-catalog':
        'glance_dedup.cli.maintenance:RebuildCatalog',
        'repository rekey': 'glance_dedup.cli.repository_commands:Rekey',
        'repository backup-metadata': 'glance_dedup.cli.cold:BackupMetadata',
        'repository restore': 'glance_dedup.cli.cold:Restore',
        'repository test-filesystem':
        'glance_dedup.cli.sharing:TestFilesystem',
    },
    'Images': {
        'image put': 'glance_dedup.cli.image_commands:Put',
        'image get': 'glance_dedup.cli.image_commands:Get',
        'image copy': 'glance_dedup.cli.image_commands:Copy',
        'image delete': 'glance_dedup.cli.image_commands:Delete',
        'image list': 'glance_dedup.cli.image_commands:List',
        'image show': 'glance_dedup.cli.image_commands:Show',
        'image convert': 'glance_dedup.cli.convert_command:Convert',
        'image du': 'glance_dedup.cli.usage_commands:ImageDu',
        'image mount': 'glance_dedup.cli.mount:Mount',
        'image pull': 'glance_dedup.cli.image_commands:Pull',
        'image replicate': 'glance_dedup.cli.replication:Replicate',
        'image verify': 'glance_dedup.cli.adoption:Verify',
        'image mark-lost': 'glance_dedup.cli.maintenance:MarkLost',
    },
    'Images on the side of Glance': {
        'glance estimate': 'glance_dedup.cli.adoption:Estimate',
        'glance import': 'glance_dedup.cli.adoption:Import',
        'glance export': 'glance_dedup.cli.adoption:Export',
        'glance register': 'glance_dedup.cli.adoption:Register',
        'glance orphans': 'glance_dedup.cli.adoption:Orphans',
        'glance missing': 'glance_dedup.cli.adoption:Missing',
        'glance sign-locations': 'glance_dedup.cli.adoption:SignLocations',
    },
    'Maintenance tasks': {
        'task collect': 'glance_dedup.cli.maintenance:Collect',
        'task merge': 'glance_dedup.cli.maintenance:Merge',
        'task scrub': 'glance_dedup.cli.maintenance:Scrub',
        'task recompress': 'glance_dedup.cli.maintenance:Recompress',
        'task tier': 'glance_dedup.cli.maintenance:Tier',
        'task evict': 'glance_dedup.cli.maintenance:Evict',
    },
    'Volumes': {
        'volume create': 'glance_dedup.cli.volume_commands:Create',
        'volume clone': 'glance_dedup.cli.volume_commands:Clone',
        'volume snapshot': 'glance_dedup.cli.volume_commands:Snapshot',
        'volume rollback': 'glance_dedup.cli.volume_commands:Rollback',
        'volume rename': 'glance_dedup.cli.volume_commands:Rename',
        'volume diff': 'glance_dedup.cli.diff_command:Diff',
        'volume list': 'glance_dedup.cli.volume_commands:List',
        'volume show': 'glance_dedup.cli.volume_commands:Show',
        'volume du': 'glance_dedup.cli.usage_commands:VolumeDu',
        'volume resize': 'glance_dedup.cli.volume_commands:Resize',
        'volume delete': 'glance_dedup.cli.volume_commands:Delete',
        'volume serve': 'glance_dedup.cli.volumeserve:Serve',
    },
    'Backups of servers and disks': {
        'backup run': 'glance_dedup.cli.batch:Run',
        'backup plan': 'glance_dedup.cli.batch:Plan',
        'backup list': 'glance_dedup.cli.backup_commands:List',
        'backup restore': 'glance_dedup.cli.backup_commands:Restore',
        'backup verify': 'glance_dedup.cli.backup_commands:Verify',
        'backup prune': 'glance_dedup.cli.backup_commands:Prune',
    },
    'Projects': {
        'project list': 'glance_dedup.cli.project:List',
        'project show': 'glance_dedup.cli.project:Show',
        'project count': 'glance_dedup.cli.project:Count',
    },
    'The index of duplicates on this host': {
        'index show': 'glance_dedup.cli.index_commands:Show',
        'index rebuild': 'glance_dedup.cli.index_commands:Rebuild',
        'index remove': 'glance_dedup.cli.index_commands:Remove',
    },
    'The object store of cold groups': {
        'object-store attach': 'glance_dedup.cli.cold:Attach',
        'object-store show': 'glance_dedup.cli.cold:Show',
    },
}
COMMANDS = {name: value for group in GROUPS.values()
            for name, value in group.items()}
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

    def add_command(self, name, command_class):
        """Add a command, unless there is one of this name.

        cliff's own ``complete`` knows only bash.
        """
        if name not in COMMANDS:
            super().add_command(name, command_class)


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Add the global options. Those that are not given stay None."""
    def add(name, help, **more):
        variable = 'GLANCE_DEDUP_' + name.upper().replace('-', '_')
        parser.add_argument(
            f'--{name}', default=os.environ.get(variable),
            help=f'{help} The default is the environment variable '
            f'{variable}.', **more)

    parser.add_argument(
        '--config-file', metavar='FILE',
        help="The daemon's option file, which says where the repository, the "
        'filter and the socket are. The default is '
        f'{host_settings.CONFIG_FILE}, unless --repository or --socket is '
        'given.')
    add('repository', "The repository's directory.", metavar='DIR')
    add('filter-dir', 'Directory of the fingerprint filter: the value of '
        "Glance's dedup_store_filter_dir, if that is set. Without it, it is "
        'that of the option file, or a directory of the user in /dev/shm.',
        metavar='DIR')
    add('index', "What finds duplicates: the value of Glance's "
        "dedup_store_index. 'volume serve' may have another, also inram or "
        'leveldb, which are of no use to other commands. Without it, it is '
        'that of the option file, or filter.', choices=host_settings.INDEXES)
    add('index-dir', "Directory of an index on a disk: the value of Glance's "
        'dedup_store_index_dir. Without it, it is that of the option file.',
        metavar='DIR')
    add('reserve', 'Space that storing leaves free on the file system, such '
        "as 64M: the value of Glance's dedup_store_reserve_mib. Without it, "
        'it is that of the option file, or 64M.', dest='reserve_mib',
        type=common.size_in_mib, metavar='SIZE')
    add('socket', 'Unix socket of the daemon, which is used if it serves the '
        'repository; empty: use no daemon. Without it, it is that of the '
        f'option file, or {host_settings.SOCKET}.', metavar='PATH')


class _OutputError(Exception):
    """Standard output does not take a command's output."""


class _Output:
    """Standard output; its errors are of a class of their own."""

    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._marking():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._marking():
            self._stream.flush()

    @staticmethod
    @contextlib.contextmanager
    def _marking():
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as e:
            raise _OutputError(common.sentence_of(e)) from e


class App(common.Program):
    """The program ``glance-dedup``; its one instance runs one command."""

    NAME = 'glance-dedup'
    groups = GROUPS

    def __init__(self, **kwargs):
        super().__init__(
            description='Work on a repository of glance-dedup, the '
            'deduplicating image store for OpenStack Glance.',
            version=package_version.version(),
            command_manager=CommandManager('glance_dedup.cli'),
            deferred_help=True, **kwargs)

    def build_option_parser(self, description, version,
                            argparse_kwargs=None):
        # An abbreviation here would swallow options of the commands.
        parser = super().build_option_parser(
            description, version, {'allow_abbrev': False,
                                   'prog': 'glance-dedup'})
        # cliff's has the name of the file that was started.
        shown, = (action for action in parser._actions
                  if '--version' in action.option_strings)
        setattr(shown, 'version', f'%(prog)s {version}')
        _add_options(parser)
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

    def print_help_if_requested(self):
        if not self.options.deferred_help:
            return
        from glance_dedup.cli import help

        try:
            help.show(self)
        except _OutputError as e:
            self.error = e
            raise
        raise SystemExit(0)

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
        """Run cliff's, but with a message of our own for unknown commands."""
        try:
            self.command_manager.find_command(argv)
        except ValueError:
            self.tell(f"'{' '.join(argv)}' is not a command"
                      f"{_advice(argv)}; see 'glance-dedup --help'")
            return common.USAGE
        return super().run_subcommand(argv)

    def run(self, argv) -> int:
        self.error = None
        self.status = 0
        try:
            return self.judge(super().run(argv))
        except (common.UsageError, OSError, ValueError):
            # It went wrong before the command began; with --debug cliff
            # lets the exception through.
            return self.judge(common.USAGE)
        finally:
            if self.log is not None:
                self.log.close()

    def judge(self, result: int) -> int:
        """Report the command's error, if any; returns the exit status."""
        if isinstance(self.error, _OutputError):
            raise self.error
        if self.error is None or isinstance(
                self.error, (KeyboardInterrupt, BrokenPipeError)):
            return result or self.status
        self.tell(self.error)
        return common.status_of(self.error)


def _advice(words: list[str]) -> str:
    """Return the commands that a user may have meant, as a sentence's end."""
    noun, typed = words[0], ' '.join(words[:2])
    of_noun = [name for name in COMMANDS if name.split()[0] == noun]
    near = (len(words) == 1 and of_noun
            or [name for name in COMMANDS if name.split()[-1] == noun]
            or difflib.get_close_matches(typed, COMMANDS, 3)
            or difflib.get_close_matches(noun, COMMANDS, 3) or of_noun)
    return f"; did you mean {', '.join(near)}?" if near else ''


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
            try:
                result = App(stdout=_Output(sys.stdout)).run(argv)
            except SystemExit as e:         # argparse's
                result = common.USAGE if e.code else 0
        sys.stdout.flush()
        return result
    except BrokenPipeError:
        return NO_READER
    except KeyboardInterrupt:
        return INTERRUPTED
    except (OSError, _OutputError) as e:
        sys.stderr.write('glance-dedup: cannot write to standard output: '
                         f'{common.sentence_of(e)}\n')
        _lose_output()
        return common.FAILED


def _lose_output():
    """Keep Python from flushing the output again when it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _open_missing() -> None:
    """Put something in the place of standard files that are closed.

    Otherwise the next file that is opened would be one of them, and get the
    output. Output to a closed descriptor fails.
    """
    for fd, flags in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            found = os.open(os.devnull, flags)
            os.set_inheritable(found, True)
    if sys.stdout is None:
        sys.stdout = open(1, 'w', closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, 'w', closefd=False)


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    _open_missing()
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, _terminated)
                  for number in endings.signals()}
    try:
        result = _run(sys.argv[1:] if argv is None else argv)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if result == INTERRUPTED:
        sys.stderr.write('glance-dedup: interrupted\n')
    elif result == NO_READER:
        _lose_output()
    return result


if __name__ == '__main__':
    sys.exit(main())
