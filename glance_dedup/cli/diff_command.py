# SPDX-License-Identifier: Apache-2.0

"""``volume diff``: the ranges that changed between two snapshots."""

import json

from glance_dedup.base import units
from glance_dedup.cli import command
from glance_dedup.cli import common


class Diff(command.RepositoryCommand):
    """Show the ranges that changed between two snapshots of a volume.

    This compares the recipes, and reads no blocks. A range has whole blocks,
    so a part of it may be equal. What is not listed is equal. The daemon's NBD
    server offers the same as the metadata context qemu:dirty-bitmap:BEFORE of
    the export AFTER.
    """

    def add_arguments(self, parser):
        parser.add_argument('before', metavar='IMAGE',
                            help='The id of the earlier snapshot.')
        parser.add_argument('after', metavar='IMAGE',
                            help='The id of the later snapshot.')
        parser.add_argument(
            '-f', '--format', choices=('table', 'json'), default='table',
            help='json: an object on each line, with offset, length, and '
            'zeros: whether the later snapshot has only zeros there. Default: '
            '%(default)s.')
        parser.add_argument(
            '--unrelated', action='store_true',
            help='Compare images that have no block in common, too. They are '
            'hardly of one volume.')

    def take_action(self, parsed_args):
        before, after = parsed_args.before, parsed_args.after
        with (self.open(index='none') as repo,
              self._compared(repo, before, after) as comparison):
            if not parsed_args.unrelated and not comparison.are_related():
                raise common.UsageError(
                    f'images {before} and {after} have no block in common at '
                    'the same place, so they are hardly snapshots of one '
                    'volume; to compare them all the same, give --unrelated')
            write = getattr(self, f'_write_{parsed_args.format}')
            changed = count = 0
            with self.progress(f'comparing {before} and {after}',
                               comparison.size) as progress:
                for found in comparison.ranges():
                    if found.changed:
                        write(found, not count)
                        changed += found.length
                        count += 1
                    progress.update(found.offset + found.length)
        if parsed_args.format == 'table':
            self.app.tell(f'{units.count(count, "range")}, '
                          f'{units.size(changed)} together, changed')

    def _compared(self, repo, before, after):
        from glance_dedup.repository import image_diff

        for image_id in before, after:
            repo.require_image(image_id)
        return image_diff.Comparison(repo, before, after)

    def _write_table(self, found, is_first):
        if is_first:
            self.app.stdout.write(f'{"offset":>20} {"length":>20} content\n')
        self.app.stdout.write(f'{found.offset:>20} {found.length:>20} '
                              f'{"zeros" if found.zeros else "data"}\n')

    def _write_json(self, found, is_first):
        self.app.stdout.write(json.dumps({
            'offset': found.offset, 'length': found.length,
            'zeros': found.zeros}) + '\n')
