# SPDX-License-Identifier: Apache-2.0

"""``image du`` and ``volume du``: what deleting would free."""

from cliff import lister

from glance_dedup.base import exceptions
from glance_dedup.base import units
from glance_dedup.cli import common
from glance_dedup.cli import maintenance

# No image or volume can have this name.
_TOGETHER = '(together)'
_SIZES = ('size', 'referenced_bytes', 'freed_bytes', 'freed_disk_bytes',
          'journal_bytes', 'freed_object_bytes')


class _Du(maintenance.TaskRunner, lister.Lister):
    """A command that measures images or volumes.

    :cvar columns: the columns of the list
    """

    task = 'usage'
    what = 'measuring'
    columns: tuple[str, ...] = ()

    def shown(self, **names: list[str]):
        """Measure; return the columns and rows.

        :param names: the task's arguments
        """
        from dedupd.tasks import registry

        names = {what: list(dict.fromkeys(some))
                 for what, some in names.items() if some}
        registry.TASKS[self.task].check(names)
        result = self.result_of_task(**names)
        usages = result['usages']
        for usage in usages:
            self._report(usage)
        self._report_rest(result)
        if len(usages) > 1:
            usages = [*usages, {**result['together'], 'name': _TOGETHER}]
        columns = self.columns
        if any(usage['freed_object_bytes'] for usage in usages):
            columns = (*columns, 'freed_object_bytes')
        return (*columns, 'error'), [
            (*map(_cells(usage).get, columns), usage['error'] or '')
            for usage in usages]

    def _report(self, usage):
        """Report an error, or what the figures do not include."""
        if usage['error'] is not None:
            kind = (exceptions.DamagedError if usage['is_damaged']
                    else common.FailedError)
            self.app.report(kind(usage['error']))
        elif usage['left_out']:
            self.app.tell(
                f'{"volume" if usage["is_volume"] else "image"} '
                f'{usage["name"]} changes all the time: '
                f'{units.count(usage["left_out"], "recipe")} of it could not '
                'be counted, so deleting it frees at least as much as shown. '
                'For the exact figures, run this again when less is written')
        if usage['invalid_blocks']:
            self.app.report(exceptions.DamagedError(
                f'{usage["name"]} needs '
                f'{units.count(usage["invalid_blocks"], "block")} with '
                'damaged entries, whose size is not known, and is in no '
                "figure. 'glance-dedup task scrub' restores the blocks if it "
                'can'))

    def _report_rest(self, result):
        """Report what the figures do not include."""
        if result['in_use']:
            self.app.tell(
                f'{result["in_use"]} uploads, or deleted images that are '
                'being read, are in use: the blocks that they need stay '
                'until they end')
        for name, error in sorted(result['uncounted'].items())[:1]:
            self.app.report(exceptions.DamagedError(
                f'{units.count(len(result["uncounted"]), "recipe")} cannot '
                'be read, so nothing is freed before they are repaired or '
                "given up ('glance-dedup image mark-lost'); the first is "
                f'{name}: {error}'))
        for group, error in sorted(result['unread_groups'].items())[:1]:
            self.app.report(exceptions.DamagedError(
                f'{units.count(len(result["unread_groups"]), "group")} '
                'cannot be read, and are left out; the first is number '
                f'{group}: {error}'))


def _cells(usage: dict) -> dict:
    """The cells of a row by their columns; None: not known."""
    if usage['error'] is not None:
        return {'name': usage['name'], 'image_id': usage['name']}
    figures = {**usage, 'image_id': usage['name'], 'freed_disk_bytes': sum(
        usage[name] for name in ('freed_stored_bytes', 'recipe_bytes',
                                 'journal_bytes'))}
    return {name: common.Size(value) if name in _SIZES else value
            for name, value in figures.items()}


class ImageDu(_Du):
    """Show what images take, and what deleting them would free.

    The last row shows what deleting all of them together would free, with the
    blocks that only they share. This reads the recipes, and no blocks.
    referenced_bytes and freed_bytes are before compression. freed_disk_bytes
    are the compressed segments and the recipes that nothing else needs; the
    next collection gives them back. The space of segments that other images
    need in part comes back when their group is written again.
    """

    columns = ('image_id', 'size', 'referenced_bytes', 'freed_blocks',
               'freed_bytes', 'freed_disk_bytes')

    def add_arguments(self, parser):
        parser.add_argument('ids', metavar='ID', nargs='+')

    def take_action(self, parsed_args):
        return self.shown(images=parsed_args.ids)


class VolumeDu(_Du):
    """Show what volumes take, and what deleting them would free.

    The last row shows what deleting all of them together would free, with the
    blocks that only they share. Images that were made by volume snapshot
    keep their blocks unless --image names them, too. The columns are those of
    image du; freed_disk_bytes includes journal_bytes, which the journals take.
    """

    columns = ('name', 'size', 'referenced_bytes', 'freed_blocks',
               'freed_bytes', 'freed_disk_bytes', 'journal_bytes')

    def add_arguments(self, parser):
        parser.add_argument('names', metavar='NAME', nargs='+')
        parser.add_argument(
            '--image', metavar='IMAGE', action='append', default=[],
            help='Measure this image, too, such as a snapshot of the volume. '
            'May be given several times.')

    def take_action(self, parsed_args):
        return self.shown(volumes=parsed_args.names, images=parsed_args.image)
