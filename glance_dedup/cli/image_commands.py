# SPDX-License-Identifier: Apache-2.0

"""The commands on images: storing, reading and deleting them."""

import argparse
from collections.abc import Iterator
import contextlib
import hashlib
import os
import re
import sys

from cliff import lister
from cliff import show

from glance_dedup.base import exceptions
from glance_dedup.base import inputs
from glance_dedup.base import scopes
from glance_dedup.cli import command
from glance_dedup.cli import common
from glance_dedup.cli import copying
from glance_dedup.cli import glance_access
from glance_dedup.cli import image_facts
from glance_dedup.cli import targets

#: Hashes of which the user may give a value.
CHECKSUMS = ('md5', 'sha1', 'sha256', 'sha512')


class Put(command.RepositoryCommand, show.ShowOne):
    """Store an image."""

    def add_arguments(self, parser):
        parser.add_argument(
            'id', metavar='ID',
            help='1 to 128 characters of A-Z a-z 0-9 _ -')
        parser.add_argument(
            'file', metavar='FILE', help='- for standard input')
        common.add_codec(parser)
        parser.add_argument(
            '--project', default='', metavar='NAME',
            help='The project that the image belongs to.')
        common.add_scope(parser)
        parser.add_argument(
            '--no-dedup', action='store_true',
            help='Store every block without looking for it, and never share '
            'it later: for data that is known to share none, or that is to '
            'stay a copy.')
        parser.add_argument(
            '--size', type=common.size, metavar='SIZE',
            help='Store the image only if exactly so many bytes come. Give it '
            'for a pipe: how its writer ended, nobody is told.')
        parser.add_argument(
            '--checksum', type=_checksum, metavar='ALGORITHM:HEX',
            help='Store the image only if its bytes have this hash. '
            f'ALGORITHM is one of {", ".join(CHECKSUMS)}.')
        parser.add_argument(
            '--backup', action='store_true',
            help='Allow the id of a backup, to take back one that was '
            'exported.')

    def take_action(self, parsed_args):
        if not parsed_args.backup:
            common.require_no_backup(parsed_args.id)
        with contextlib.ExitStack() as stack:
            repo = stack.enter_context(self.open(codec=parsed_args.codec))
            source = _open_source(parsed_args.file, stack)
            name = ('standard input' if parsed_args.file == '-'
                    else parsed_args.file)
            checked = Checked(source, name, parsed_args.checksum)
            progress = stack.enter_context(
                self.progress(f'storing {parsed_args.id}', getattr(
                    source, 'size', parsed_args.size)))
            try:
                found = repo.put(parsed_args.id, checked, parsed_args.size,
                                 project=parsed_args.project,
                                 progress=progress.update,
                                 scope=parsed_args.scope,
                                 dedup=not parsed_args.no_dedup,
                                 check=checked.check)
            except exceptions.InvalidParameter as e:
                if not checked.was_read:
                    raise
                # Not the arguments are wrong, but the number of bytes.
                raise common.FailedError(str(e)) from e
        return common.shown(common.add_stat({}, found))


def _open_source(file, stack):
    """Open a file, or standard input for ``-``; the stack closes it."""
    if file == '-':
        return stack.enter_context(
            open(0, 'rb', buffering=0, closefd=False))
    if '\0' in file:
        raise common.UsageError("the file's name holds a NUL")
    return stack.enter_context(inputs.open_input(file))


def _checksum(word: str) -> tuple[str, str]:
    name, _, value = word.partition(':')
    if name not in CHECKSUMS or not re.fullmatch(
            f'[0-9a-f]{{{2 * hashlib.new(name).digest_size}}}',
            value.lower()):
        raise argparse.ArgumentTypeError(
            f'{word!r} is not a checksum such as sha256:HEX; known are '
            + ', '.join(CHECKSUMS))
    return name, value.lower()


class Checked:
    """Source that is compared with the hash and size from the user.

    :param name: of the source, for errors
    :param checksum: the name of a hash and its value; None: it is not known
    """

    def __init__(self, source: inputs.Readable, name: str,
                 checksum: tuple[str, str] | None):
        self._source = source
        self._name = name
        self._checksum = checksum
        self._digest = hashlib.new(checksum[0]) if checksum else None
        self.was_read = False

    def read(self, length: int) -> bytes | memoryview:
        """Read some of the next bytes; none only at the end.

        :raises OSError: names the source
        """
        self.was_read = True
        with _naming(self._name):
            piece = self._source.read(length)
        if self._digest is not None:
            self._digest.update(piece)
        return piece

    def check(self) -> None:
        """Check the bytes read.

        :raises inputs.Changed: the file changed meanwhile
        :raises FailedError: the bytes have another hash
        """
        if isinstance(self._source, inputs.InputFile):
            self._source.require_unchanged()
        if self._digest is None or self._checksum is None:
            return
        name, value = self._checksum
        if self._digest.hexdigest() != value:
            raise common.FailedError(
                f'the bytes that came have the {name} '
                f'{self._digest.hexdigest()}, not {value}: nothing was stored')


class Copy(command.RepositoryCommand, show.ShowOne):
    """Store an image again under another id.

    The new image shares the blocks of the first, so this takes a moment and
    nearly no space, and stays intact if the first is deleted. In another scope
    the blocks cannot be shared: the image is then read and stored.
    """

    def add_arguments(self, parser):
        parser.add_argument('source', metavar='SOURCE',
                            help='The id of the stored image.')
        parser.add_argument(
            'id', metavar='ID',
            help='The new id: 1 to 128 characters of A-Z a-z 0-9 _ -')
        parser.add_argument(
            '--project', metavar='NAME',
            help='The project that the new image belongs to. Default: that of '
            'the stored image.')
        parser.add_argument(
            '--scope', choices=scopes.CHOICES,
            help='Share equal blocks with all images of the scope global, or '
            'only with those of the project. Default: as the stored image.')
        common.add_codec(parser)

    def take_action(self, parsed_args):
        common.require_no_backup(parsed_args.id)
        with (self.open(codec=parsed_args.codec) as repo,
              repo.open_image(parsed_args.source) as source,
              self.progress(f'copying {parsed_args.source}', source.size
                            ) as progress):
            project, scope = parsed_args.project, parsed_args.scope
            found = repo.copy(
                source, parsed_args.id,
                source.stat.project if project is None else project,
                scope or scopes.describe(bytes.fromhex(source.stat.scope)),
                progress.update)
        return common.shown(common.add_stat({}, found))


class Get(command.RepositoryCommand, show.ShowOne):
    """Write an image to a file, after verifying every byte.

    The file appears whole or not at all. Long runs of zeros become holes.
    """

    def add_arguments(self, parser):
        parser.add_argument('id', metavar='ID')
        parser.add_argument(
            'file', metavar='FILE', help='- for standard output')
        parser.add_argument(
            '--force', action='store_true',
            help='Replace the file if it exists.')
        targets.add_mode(parser)

    def take_action(self, parsed_args):
        with contextlib.ExitStack() as stack:
            if parsed_args.file == '-':
                write = write_to(sys.stdout.buffer)
            else:
                target = targets.Target(parsed_args.file, parsed_args.force,
                                        parsed_args.mode)
                target.require_allowed()
                write = target.write
            repo = stack.enter_context(self.open())
            image = stack.enter_context(repo.open_image(parsed_args.id))
            progress = stack.enter_context(
                self.progress(f'reading {parsed_args.id}', image.size))
            write(image, progress)
            fields = {'image_id': parsed_args.id, 'file': parsed_args.file,
                      'size': common.Size(image.size)}
            if repo.has_cold:
                figures = repo.slices.figures
                fields['slices_fetched'] = figures.gets + figures.asked
            return common.shown(fields)

    def produce_output(self, parsed_args, column_names, data):
        # Standard output has only the image.
        if parsed_args.file == '-':
            return 0
        return super().produce_output(parsed_args, column_names, data)


def write_to(stream):
    """Return a writer of an image to a stream, like `Target.write`."""
    def write(image, progress):
        buffer, = copying.buffers_for(image, 1)
        done = 0
        while done < image.size:
            view = buffer[:image.size - done]
            copying.fill(view, image, done)
            with _naming('standard output'):
                stream.write(view)
            done += len(view)
            progress.update(done)
        with _naming('standard output'):
            stream.flush()
    return write


@contextlib.contextmanager
def _naming(name):
    """Have errors of the system name the failed action."""
    try:
        yield
    except BrokenPipeError:     # its reader is gone
        raise
    except OSError as e:
        e.filename = name
        raise


class Delete(command.RepositoryCommand, lister.Lister):
    """Delete images.

    Readers that have an image open go on reading it. The next collection frees
    the space.
    """

    def add_arguments(self, parser):
        parser.add_argument('ids', metavar='ID', nargs='+')
        parser.add_argument(
            '--collect', action='store_true',
            help='Then free the blocks that no image uses any more, as the '
            'command task collect does.')

    def take_action(self, parsed_args):
        rows = []
        with self.open() as repo:
            for image_id in parsed_args.ids:
                try:
                    repo.delete(image_id)
                except exceptions.RepositoryError as e:
                    self.app.report(e)
                    rows.append((image_id, False, common.sentence_of(e)))
                else:
                    rows.append((image_id, True, ''))
        return ('image_id', 'deleted', 'error'), rows

    def produce_output(self, parsed_args, column_names, data):
        # First: the deletions are shown even if the collection fails.
        result = super().produce_output(parsed_args, column_names, data)
        if parsed_args.collect:
            from glance_dedup.cli import maintenance

            names, values = maintenance.Collect(
                self.app, self.app_args).run_task(dry_run=False)
            freed = dict(zip(names, values))
            self.app.tell(
                f'{freed["freed_blocks"]} blocks were freed; the file system '
                f'got {freed["disk_bytes"].human_readable()} back')
        return result


class Known(command.RepositoryCommand):
    """A command that lists images, and which are known to be damaged."""

    def described(self, repo, image_ids: list[str]) -> Iterator[dict]:
        """The columns of those images that exist and can be read.

        The caller has listed `image_ids` just now. Images that were deleted
        since are left out, because the figures are looked up later.
        """
        figures, damaged = image_facts.known_images(
            repo, self.healthy_daemon(), self.status)
        for image_id in image_ids:
            found = figures(image_id)
            if found is None:
                for read in common.stats(repo, self.app, [image_id]):
                    found = vars(read)
            if found is not None:
                yield self._columns(found, damaged)

    @staticmethod
    def _columns(found: dict, damaged: set[str] | None) -> dict:
        return {
            'image_id': found['image_id'],
            **{name: common.Size(found[name]) for name in (
                'size', 'zero_bytes', 'new_bytes', 'stored_bytes')},
            'saved_percent': common.saved(
                found['size'] - found['zero_bytes'], found['stored_bytes']),
            'created': common.Time(found['created']),
            'project': found['project'],
            'damaged': _damaged(found['image_id'], damaged)}


def _damaged(image_id: str, damaged: set[str] | None) -> bool | None:
    return None if damaged is None else image_id in damaged


class List(Known, lister.Lister):
    """List the images with the figures of their recipes.

    The figures of counted images come from the daemon or from the catalog,
    which is faster than opening each recipe. The last scrub tells whether
    images are damaged. For backups there is backup list.
    """

    def add_arguments(self, parser):
        glance_access.add_names(parser)

    def take_action(self, parsed_args):
        with self.open() as repo:
            rows = list(self.described(repo, common.plain_images(repo)))
        columns = ['image_id', 'size', 'zero_bytes', 'new_bytes',
                   'stored_bytes', 'saved_percent', 'created', 'project',
                   'damaged']
        if parsed_args.names:
            known_there = self.images_of(
                glance_access.connect(parsed_args.os_cloud))
            for row in rows:
                row['name'] = getattr(known_there.get(row['image_id']),
                                      'name', None)
            columns.insert(1, 'name')
        return columns, [tuple(row[name] for name in columns) for row in rows]


def _disk_of(repo, image_id: str, stat) -> dict[str, object]:
    """The columns on the disk in an image's file."""
    from glance_dedup.repository import conversion
    from glance_dedup.repository import format_verdicts

    names = {number: name for name, number in conversion.FORMATS.items()}
    with contextlib.suppress(exceptions.ImageNotFound):
        with repo.open_image(image_id) as image:
            if image.disk is not None:
                return {
                    'kept': 'disk', 'kept_because': None,
                    'format': names.get(image.disk.format),
                    'virtual_size': common.Size(image.disk.size),
                    'derived_percent': round(
                        100 * image.disk.derived_bytes / max(1, image.size))}
    verdict = format_verdicts.read(repo.path, image_id, stat.upload_id)
    return {'kept': 'file', 'kept_because': verdict and verdict.reason,
            'format': None, 'virtual_size': None, 'derived_percent': None}


class Show(command.RepositoryCommand, show.ShowOne):
    """Show the figures of an image's recipe."""

    def add_arguments(self, parser):
        parser.add_argument('id', metavar='ID')
        glance_access.add_names(parser)

    def take_action(self, parsed_args):
        with self.open() as repo:
            repo.require_image(parsed_args.id)
            found = repo.stat(parsed_args.id)
            # Images can be shown even if the daemon is in trouble.
            self.healthy_daemon()
            fields: dict[str, object] = {}
            if parsed_args.names:
                there = glance_access.connect(parsed_args.os_cloud).find(
                    parsed_args.id)
                fields['name'] = None if there is None else there.name
            common.add_stat(fields, found)
            fields |= _disk_of(repo, parsed_args.id, found)
            fields['damaged'] = _damaged(
                parsed_args.id, image_facts.damaged_images(repo, self.status))
            return common.shown(fields)


class Pull(command.RepositoryCommand, show.ShowOne):
    """Copy an image from another repository, through its daemon.

    Only missing blocks are fetched, and each is verified. An interrupted pull
    goes on where it was when you start it again.
    """

    def add_arguments(self, parser):
        parser.add_argument('id', metavar='ID')
        parser.add_argument(
            '--from', dest='address', metavar='URL', required=True,
            help='https://HOST:PORT, or unix:/PATH.')
        common.add_certificates(parser)
        parser.add_argument(
            '--token-env', default='OS_TOKEN', metavar='NAME',
            help='The environment variable with a Keystone token, which is '
            'used if there is no --cert. Default: %(default)s.')
        common.add_codec(parser)
        parser.add_argument(
            '--project', default='', metavar='NAME',
            help='The project that will own the image.')
        common.add_scope(parser)

    def take_action(self, parsed_args):
        from glance_dedup.transfer import pull

        with contextlib.ExitStack() as stack:
            token = None
            if parsed_args.cert is None:
                token = os.environ.get(parsed_args.token_env) or None
            client = stack.enter_context(common.client_of(parsed_args, token))
            repo = stack.enter_context(self.open(codec=parsed_args.codec))
            progress = stack.enter_context(
                self.progress(f'pulling {parsed_args.id}'))
            result = pull.pull(repo, parsed_args.id, client,
                               project=parsed_args.project,
                               scope=parsed_args.scope,
                               progress=progress.update)
        if result.whole is not None:
            self.app.tell(f'the whole image was sent, because {result.whole}')
        fields = common.add_stat({}, result.stat)
        fields['found_blocks'] = result.found_blocks
        fields['asked_blocks'] = result.asked_blocks
        fields['received_bytes'] = common.Size(result.received_bytes)
        fields['whole'] = result.whole
        return common.shown(fields)
