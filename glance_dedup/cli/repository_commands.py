# SPDX-License-Identifier: Apache-2.0

"""The commands on the repository as a whole."""

import contextlib
import os

from cliff import lister
from cliff import show

from glance_dedup.cli import command
from glance_dedup.cli import common
from glance_dedup.cli import index_commands


class Create(command.RepositoryCommand, show.ShowOne):
    """Make a repository in a directory that is missing or empty."""

    def add_arguments(self, parser):
        parser.add_argument(
            '--block-size', type=common.size, metavar='SIZE',
            help='The unit of deduplication: a power of two from 512 to 64K. '
            'With content-defined chunking, the size of the largest blocks. '
            'Default: 4K, or 16K with content-defined chunking.')
        parser.add_argument(
            '--chunking', default='fixed', metavar='fixed|content-defined',
            help="Where images are cut into blocks: at multiples of the block "
            'size (fixed), or where the content says so (content-defined). '
            'The sizes of the smallest and of an average block may follow; '
            "the word alone means 'content-defined 2048 4096'. Default: "
            '%(default)s.')
        parser.add_argument(
            '--group-slots', type=int, default=32768, metavar='N',
            help='Blocks in a block group, 64 to 32768. Default: '
            '%(default)s.')
        parser.add_argument(
            '--segment-size', type=common.size, default='64K',
            metavar='SIZE',
            help='Bytes that are compressed together: a power of two, at '
            'least the block size, at most 1M. Default: %(default)s.')
        parser.add_argument(
            '--fingerprint', default='sha256', metavar='DIGEST',
            help='A digest of OpenSSL of 160 bits or more, or xxh3-128. '
            'Default: %(default)s.')
        parser.add_argument(
            '--verify', choices=('fingerprint', 'bytes'),
            default='fingerprint', help='Whether blocks are equal if their '
            'fingerprints are, or only if their bytes are. xxh3-128 needs '
            'bytes, and its damaged blocks are not healed. Default: '
            '%(default)s.')
        parser.add_argument(
            '--group-access', action='store_true',
            help="Let all members of the directory's group use the "
            'repository. Default: only you may use it.')

    def take_action(self, parsed_args):
        from glance_dedup.repository import image_repository
        from glance_dedup.repository import repo_parameters

        image_repository.Repository.create(
            self.path, block_size=parsed_args.block_size,
            chunking=parsed_args.chunking,
            group_slots=parsed_args.group_slots,
            segment_size=parsed_args.segment_size,
            fingerprint=parsed_args.fingerprint,
            verify=parsed_args.verify,
            group_access=parsed_args.group_access)
        file = os.path.join(self.path, 'repository.json')
        with open(file, 'rb') as f:
            found = repo_parameters.Parameters.from_json(f.read(), file)
        return common.shown(_described(self.path, found))


def _described(path, parameters) -> dict:
    return {
        'path': os.path.abspath(path),
        'repository_id': parameters.repository_id,
        'format': parameters.format,
        'block_size': common.Size(parameters.block_size),
        'group_slots': parameters.group_slots,
        'segment_size': common.Size(parameters.segment_size),
        'chunking': parameters.chunking,
        'fingerprint': parameters.fingerprint,
        'verify': parameters.verify,
    }


class Show(command.RepositoryCommand, show.ShowOne):
    """Show a repository's parameters, its images' sums, and its filter.

    The sums come from the recipes, those of volumes among them; no block is
    read.
    """

    def take_action(self, parsed_args):
        with self.open() as repo:
            fields = _described(self.path, repo.parameters)
            fields['features'] = common.Words(repo.features)
            groups, group_bytes = self._groups()
            fields.update(self._sums(repo, group_bytes))
            fields['accepted_keys'] = len(repo.read_keys().accepted)
            fields['groups'] = groups
            fields['group_bytes'] = common.Size(group_bytes)
            fields.update(index_commands.fields_of(repo))
        return common.shown(fields)

    def _sums(self, repo, group_bytes) -> dict:
        from glance_dedup.repository import volumes

        sums = common.sums(repo, self.app)
        return {
            'images': sums['images'],
            'backups': sums['backups'],
            'volumes': len(volumes.names(self.path)),
            'logical_bytes': common.Size(sums['size']),
            'zero_bytes': common.Size(sums['zero_bytes']),
            'new_bytes': common.Size(sums['new_bytes']),
            'stored_bytes': common.Size(sums['stored_bytes']),
            'saved_percent': common.saved(
                sums['size'] - sums['zero_bytes'], group_bytes),
        }

    def _groups(self) -> tuple[int, int]:
        """The number of groups, and the bytes that they take on the disk."""
        count = size = 0
        with os.scandir(os.path.join(self.path, 'groups')) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    count += 1
        return count, size


class Space(command.RepositoryCommand, lister.Lister):
    """Show what a repository's disk space is used for.

    The parts are the blocks, by the codec that compressed them, and every kind
    of metadata. One percentage is of the live blocks before compression, the
    other of the bytes of images and volumes that are not zeros. Cold groups
    are in an object store, and not in the sum.
    """

    def take_action(self, parsed_args):
        from glance_dedup.repository import space

        with self.open() as repo:
            with self.progress('looking', unit='groups') as progress:
                parts = space.parts(repo, progress.update, self.app.report)
            nonzero = sum(found.size - found.zero_bytes
                          for found in common.stats(repo, self.app,
                                                    repo.recipes()))
        plain = sum(part.plain_bytes or 0 for part in parts)
        local = [part for part in parts if part.is_local]
        parts = [*local, space.Part('all', sum(part.bytes for part in local),
                                    plain),
                 *(part for part in parts if not part.is_local)]
        return (('part', 'disk_bytes', 'plain_bytes', 'percent_of_unique',
                 'percent_of_nonzero'),
                [(part.name, common.Size(part.bytes),
                  common.Size(part.plain_bytes),
                  common.share(part.bytes, plain),
                  common.share(part.bytes, nonzero)) for part in parts])


class Check(command.RepositoryCommand, show.ShowOne):
    """Read everything in a repository, and report all damage.

    This is a second implementation of the format, which shares no code with
    the engine. The repository may be in use meanwhile. The exit status is 1
    if there is damage.
    """

    def take_action(self, parsed_args):
        from glance_dedup.check import checker

        with self.progress('checking') as progress:
            report = checker.check(self.path, progress.update)
        figures = report.figures
        fields: dict[str, object] = {
            'result': 'fine' if report.ok else 'damaged'}
        for name, value in figures.items():
            fields[name] = (
                common.Size(value) if name.endswith('_bytes') else value)
        fields['damaged_images'] = common.Words(report.damaged_images)
        fields['damaged_volumes'] = common.Words(report.damaged_volumes)
        fields['findings'] = common.Lines([{
            'severity': f.severity, 'file': f.file, 'offset': f.offset,
            'sentence': f.sentence, 'images': list(f.images),
            'volumes': list(f.volumes)}
            for f in report.findings])
        if parsed_args.formatter not in ('json', 'yaml'):
            for finding in report.findings:
                self.app.tell(str(finding))
            if figures['findings_left_off']:
                self.app.tell(
                    f'{figures["findings_left_off"]} more findings are not '
                    'shown')
        if not report.ok:
            self.app.status = common.DAMAGED
        return common.shown(fields)


class Rekey(command.RepositoryCommand, show.ShowOne):
    """Change the key with which a repository signs.

    The repository signs the locations of its images, which Glance keeps, and
    the manifests in the object store. Begin the change without --finish: new
    locations are signed with a new key, and those of the old key stay valid.
    Then have 'glance sign-locations' give Glance new locations, and finish the
    change: the old key opens nothing any more. Nothing need be stopped.
    """

    def add_arguments(self, parser):
        parser.add_argument(
            '--finish', action='store_true',
            help='Make what the old key has signed invalid. Glance reads no '
            'image any more whose location is not signed with the new key.')

    def take_action(self, parsed_args):
        from glance_dedup.base import signingkeys

        work = (signingkeys.finish_change if parsed_args.finish
                else signingkeys.begin_change)
        with self.open() as repo:
            keys = work(repo.path)
            file = os.path.join(repo.path, signingkeys.FILE)
            # Until then, the two newest need a copy of the old key.
            before = (", but not before 'glance-dedup repository "
                      "backup-metadata' has run twice with the new key"
                      if repo.has_cold else '')
        self.app.tell(
            "run 'glance-dedup glance sign-locations' again, which removes "
            f'the locations of the old key, and replace all copies of {file}'
            f'{before}'
            if parsed_args.finish else
            f"save a copy of {file}, run 'glance-dedup glance "
            "sign-locations' until it adds nothing, and 'glance-dedup "
            "repository backup-metadata' "
            'twice if groups are cold; then finish the change with --finish')
        return common.shown({'path': os.path.abspath(self.path),
                             'accepted_keys': len(keys.accepted)})
