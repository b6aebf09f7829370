# SPDX-License-Identifier: Apache-2.0

"""The commands on volumes: making, cloning, resizing and deleting them.

A volume that is in use belongs to the process that serves it. Commands that
need its owner send a request to that process, over its control socket.
"""

import contextlib
import threading

from cliff import lister
from cliff import show

from glance_dedup.base import exceptions
from glance_dedup.base import scopes
from glance_dedup.cli import command
from glance_dedup.cli import common

# Seconds in which a server has to send its status.
_STATUS_SECONDS = 5.0


def _add_name(parser, **options):
    parser.add_argument(
        'name', metavar='NAME',
        help='1 to 64 characters of A-Z a-z 0-9 _ -', **options)


def _add_size(parser, name='size', **options):
    parser.add_argument(
        name, metavar='SIZE', type=common.size,
        help='A multiple of 512 bytes, such as 10G. '
        + options.pop('more', ''), **options)


class VolumeCommand(command.RepositoryCommand):
    """A command on a volume, which another process may have in use."""

    @staticmethod
    def server_status(repo, name) -> dict[str, str] | None:
        """Return the status from a volume's server; None: none answers."""
        from glance_dedup.client import volume_control

        try:
            return volume_control.VolumeControl(
                repo.path, name, _STATUS_SECONDS).status()
        except volume_control.NotServed:
            return None

    @contextlib.contextmanager
    def owned(self, repo, name):
        """The volume, opened; or its server's control.

        Both have `snapshot` and `resize`.

        :raises BusyError: it is in use, and no process answers for it
        """
        from glance_dedup.client import volume_control
        from glance_dedup.repository import openvolumes

        try:
            volume = openvolumes.open_volume(repo, name)
        except exceptions.BusyError as e:
            if self.server_status(repo, name) is None:
                raise exceptions.BusyError(
                    f'volume {name} is in use by another process, which does '
                    'not answer on this host. Run the command on the host '
                    'that serves the volume, or stop what uses it') from e
            yield volume_control.VolumeControl(repo.path, name)
        else:
            with volume:
                yield volume

    @contextlib.contextmanager
    def stopped(self, repo, name, what):
        """Return advice on a volume that is in use.

        :param what: the command's action on a volume that is free
        """
        try:
            yield
        except exceptions.BusyError as e:
            pid = (self.server_status(repo, name) or {}).get('pid')
            who = (f'process {pid}' if pid else
                   'another process, perhaps on another host,')
            raise exceptions.BusyError(
                f'volume {name} is in use: {who} serves it. Stop its server '
                f'first (systemctl stop glance-dedup-volume@{name}), then '
                f'{what}') from e

    def described(self, repo, name) -> dict:
        """Return the columns of a volume, with its server's present ones."""
        from glance_dedup.client import volume_control
        from glance_dedup.repository import openvolumes
        from glance_dedup.repository import volumes

        stat = openvolumes.look(repo, name)
        in_use = openvolumes.is_in_use(repo, name)
        status = self.server_status(repo, name) or {} if in_use else {}
        numbers, broken = volume_control.figures(status)
        fields = {
            'name': name,
            'volume_id': stat.volume_id,
            'state': stat.state,
            'in_use': in_use,
            'size': common.Size(numbers.get('size', stat.size)),
            'project': stat.project,
            'scope': scopes.describe(bytes.fromhex(stat.scope)),
            'source': stat.source,
            'created': common.Time(stat.created),
        }
        for key, (shown, _) in volumes.COUNTERS.items():
            value = numbers.get(key, stat.counters[key])
            fields[shown] = (common.Size(value) if shown.endswith('_bytes')
                             else value)
        fields['journal_bytes'] = common.Size(numbers.get('journal_bytes'))
        is_complete = numbers.get('index_complete')
        fields |= {
            'index': status.get('index', ''),
            'index_complete': (None if is_complete is None
                               else bool(is_complete)),
            'index_bytes': common.Size(numbers.get('index_bytes')),
            'index_dropped': numbers.get('index_dropped'),
            'broken': broken}
        return fields


class _Watch:
    """Shows how many bytes of images were read while a call runs."""

    SECONDS = 0.2

    def __init__(self, repo, progress):
        self._repo = repo
        self._progress = progress
        self._before = self._read()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _read(self):
        return self._repo.statistics()['bytes_read']

    def _run(self):
        while not self._end.wait(self.SECONDS):
            self._progress.update(self._read() - self._before)

    def __enter__(self):
        self._thread.start()

    def __exit__(self, *exc_info):
        self._end.set()
        self._thread.join()


class Create(VolumeCommand, show.ShowOne):
    """Make a volume of zeros."""

    def add_arguments(self, parser):
        _add_name(parser)
        _add_size(parser)
        parser.add_argument(
            '--project', default='', metavar='NAME',
            help='The project that the volume belongs to.')
        common.add_scope(parser)

    def take_action(self, parsed_args):
        from glance_dedup.repository import openvolumes

        with self.open() as repo:
            openvolumes.create(
                repo, parsed_args.name, parsed_args.size,
                project=parsed_args.project, scope=parsed_args.scope)
            return common.shown(self.described(repo, parsed_args.name))


class Clone(VolumeCommand, show.ShowOne):
    """Make a volume that begins with the bytes of an image.

    The volume shares the blocks of the image, so this takes a moment and
    nearly no space, and the image may be deleted afterwards. In another scope
    the blocks cannot be shared: the image is then read and stored.
    """

    def add_arguments(self, parser):
        parser.add_argument('image', metavar='IMAGE',
                            help='The id of the stored image.')
        _add_name(parser)
        _add_size(parser, '--size', more="Default: the image's size, rounded "
                  'up to a multiple of 512. More bytes are zeros.')
        parser.add_argument(
            '--project', metavar='NAME',
            help='The project that the volume belongs to. Default: that of '
            'the image.')
        parser.add_argument(
            '--scope', choices=scopes.CHOICES,
            help='Share equal blocks with all images of the scope global, or '
            'only with those of the project. Default: as the image.')
        common.add_codec(parser)

    def take_action(self, parsed_args):
        from glance_dedup.repository import openvolumes

        with (self.open(codec=parsed_args.codec) as repo,
              repo.open_image(parsed_args.image) as image,
              self.progress(f'cloning {parsed_args.image}', image.size
                            ) as progress,
              _Watch(repo, progress)):
            project = parsed_args.project
            if project is None:
                project = image.stat.project
            stored = openvolumes.create(
                repo, parsed_args.name, parsed_args.size, image=image,
                project=project, scope=parsed_args.scope or scopes.describe(
                    bytes.fromhex(image.stat.scope)))
            fields = self.described(repo, parsed_args.name)
        fields['copied_bytes'] = common.Size(stored)
        return common.shown(fields)


class Snapshot(VolumeCommand, show.ShowOne):
    """Store a volume's bytes, as of one moment, as an image.

    The volume may be in use meanwhile. The image shares the volume's blocks.
    It has what the disk would have if the power failed at that moment; freeze
    the file systems of the server first if it is to have more.
    """

    def add_arguments(self, parser):
        _add_name(parser)
        parser.add_argument(
            'image', metavar='IMAGE',
            help='The new id: 1 to 128 characters of A-Z a-z 0-9 _ -')
        parser.add_argument(
            '--project', metavar='NAME',
            help='The project that the image belongs to. Default: that of '
            'the volume.')
        common.add_codec(parser)

    def take_action(self, parsed_args):
        from glance_dedup.repository import openvolumes

        with self.open(codec=parsed_args.codec) as repo:
            project = parsed_args.project
            if project is None:
                project = openvolumes.look(repo, parsed_args.name).project
            # A server of an older program would not refuse it.
            repo.require_image(parsed_args.image)
            common.require_no_backup(parsed_args.image)
            with self.owned(repo, parsed_args.name) as volume:
                volume.snapshot(parsed_args.image, project)
            return common.shown(common.add_stat(
                {}, repo.stat(parsed_args.image)))


class Resize(VolumeCommand, show.ShowOne):
    """Change the size of a volume.

    New bytes are zeros. Clients that are connected to a volume in use see the
    new size when they connect again, and --reconnect has them do so. A volume
    does not become smaller while clients are connected.
    """

    def add_arguments(self, parser):
        _add_name(parser)
        _add_size(parser)
        parser.add_argument(
            '--shrink', action='store_true',
            help='Allow a smaller size. What is behind it is lost.')
        parser.add_argument(
            '--reconnect', action='store_true',
            help='Disconnect the clients of a volume in use. One that does '
            'not connect again by itself, such as QEMU without a reconnect '
            'delay, gets I/O errors.')

    def take_action(self, parsed_args):
        from glance_dedup.client import volume_control
        from glance_dedup.repository import openvolumes

        name, size = parsed_args.name, parsed_args.size
        with self.open() as repo:
            before = openvolumes.look(repo, name).size
            if size < before and not parsed_args.shrink:
                raise common.UsageError(
                    f'volume {name} has {before} bytes; {size} are less, and '
                    'what is behind them would be lost. Shrink the file '
                    'system first, then give --shrink')
            with self.owned(repo, name) as volume:
                volume.resize(size)
                if parsed_args.reconnect and isinstance(
                        volume, volume_control.VolumeControl):
                    volume.disconnect()
            return common.shown(self.described(repo, name))


class Rollback(VolumeCommand, show.ShowOne):
    """Give a volume the bytes and the size of an image, such as a snapshot.

    What was written since is lost. The volume must not be in use. It shares
    the image's blocks, so this takes a moment and nearly no space. If it is
    interrupted, the volume is as it was, or as the image is.
    """

    def add_arguments(self, parser):
        _add_name(parser)
        parser.add_argument('image', metavar='IMAGE',
                            help='The id of the stored image.')
        common.add_codec(parser)

    def take_action(self, parsed_args):
        from glance_dedup.repository import openvolumes

        name = parsed_args.name
        with (self.open(codec=parsed_args.codec) as repo,
              repo.open_image(parsed_args.image) as image,
              self.progress(f'rolling back {name}', image.size) as progress,
              self.stopped(repo, name, 'roll it back'),
              _Watch(repo, progress)):
            stored = openvolumes.roll_back(repo, name, image)
            fields = self.described(repo, name)
        fields['copied_bytes'] = common.Size(stored)
        return common.shown(fields)


class Rename(VolumeCommand, show.ShowOne):
    """Give a volume another name.

    The volume must not be in use.
    """

    def add_arguments(self, parser):
        _add_name(parser)
        parser.add_argument(
            'new_name', metavar='NEW',
            help='1 to 64 characters of A-Z a-z 0-9 _ -')

    def take_action(self, parsed_args):
        from glance_dedup.repository import openvolumes

        name, new_name = parsed_args.name, parsed_args.new_name
        with self.open() as repo:
            with self.stopped(repo, name, 'rename it'):
                openvolumes.rename(repo, name, new_name)
            return common.shown(self.described(repo, new_name))


class List(VolumeCommand, lister.Lister):
    """List the volumes."""

    def take_action(self, parsed_args):
        from glance_dedup.repository import openvolumes

        rows = []
        columns = ('name', 'size', 'state', 'in_use', 'source', 'created',
                   'project')
        with self.open() as repo:
            for name in openvolumes.names(repo):
                try:
                    fields = self.described(repo, name)
                except exceptions.ImageNotFound:
                    continue            # deleted meanwhile, or not made yet
                except exceptions.RepositoryError as e:
                    self.app.report(e)
                else:
                    rows.append(tuple(fields[key] for key in columns))
        return columns, rows


class Show(VolumeCommand, show.ShowOne):
    """Show the figures of a volume.

    If the volume is in use on this host, they are as of now, else of the last
    checkpoint.
    """

    def add_arguments(self, parser):
        _add_name(parser)

    def take_action(self, parsed_args):
        with self.open() as repo:
            return common.shown(self.described(repo, parsed_args.name))


class Delete(VolumeCommand, lister.Lister):
    """Delete volumes.

    The next collection frees the space. Images that were made by volume
    snapshot stay. A volume whose newest journal is damaged is deleted only
    with --damaged: nothing can restore it then.
    """

    def add_arguments(self, parser):
        parser.add_argument('names', metavar='NAME', nargs='+')
        parser.add_argument(
            '--damaged', action='store_true',
            help='Delete volumes even if their newest journal is damaged.')

    def take_action(self, parsed_args):
        rows = []
        with self.open() as repo:
            for name in parsed_args.names:
                try:
                    self._delete(repo, name, parsed_args.damaged)
                except exceptions.RepositoryError as e:
                    self.app.report(e)
                    rows.append((name, False, common.sentence_of(e)))
                else:
                    rows.append((name, True, ''))
        return ('name', 'deleted', 'error'), rows

    def _delete(self, repo, name, damaged):
        from glance_dedup.repository import openvolumes

        try:
            with self.stopped(repo, name, 'delete it'):
                if not damaged:
                    openvolumes.delete(repo, name)
                    return
                for recipe in openvolumes.discard(repo, name):
                    self.app.tell(
                        f'{recipe} stays: another volume cannot be read, and '
                        'may need it. Delete that volume, too, or repair it; '
                        f'then run glance-dedup image delete {recipe}')
        except exceptions.DamagedError as e:
            raise exceptions.DamagedError(
                f'{e}. Restore volumes/{name} from a backup, or give the '
                'volume up: glance-dedup volume delete --damaged '
                f'{name}') from e
