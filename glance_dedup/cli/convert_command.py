# SPDX-License-Identifier: Apache-2.0

"""``image convert``: keeps the disk in an image's file, or the file."""

from cliff import lister

from glance_dedup.base import exceptions
from glance_dedup.cli import common
from glance_dedup.cli import maintenance


class Convert(maintenance.TaskRunner, lister.Lister):
    """Keep the disk in the file of an image, or its file again.

    The images' bytes, sizes and hashes stay. Of files in the formats qcow2,
    VMDK, VHD, VHDX and VDI, the blocks of the disk are kept, which share with
    everything, and the file is made of them when it is read. A running daemon
    does the same by itself if convert_interval says so. An image that was
    converted to its file stays so until you name it again.
    """

    task = 'convert'
    what = 'converting'

    def add_arguments(self, parser):
        parser.add_argument('ids', metavar='ID', nargs='+')
        parser.add_argument(
            '--to', choices=('disk', 'file'), default='disk',
            help='What to keep. Default: %(default)s.')
        common.add_dry_run(parser)

    def take_action(self, parsed_args):
        from dedupd.tasks import registry

        ids = list(dict.fromkeys(parsed_args.ids))
        arguments = {'images': ids, 'form': parsed_args.to}
        if parsed_args.dry_run:
            arguments['dry_run'] = True
        registry.TASKS[self.task].check(arguments)
        result = self.result_of_task(**arguments)
        if parsed_args.dry_run:
            return ('image_id', 'action', 'reason'), [
                (image['image_id'], image['action'], image['reason'])
                for image in result['images']]
        return ('image_id', 'result', 'reason'), [
            self._row(image_id, result) for image_id in ids]

    def _row(self, image_id: str, result: dict) -> tuple[str, str, str]:
        error = (result.get('failed') or {}).get(image_id)
        if error is not None:
            self.app.report(exceptions.DamagedError(
                f'image {image_id} stays as it is: {error}'))
            return image_id, 'failed', error
        reason = (result.get('reasons') or {}).get(image_id)
        if reason is not None:
            self.app.report(common.FailedError(
                f'image {image_id} stays as it is: {reason}'))
            return image_id, 'unchanged', reason
        return image_id, 'done', ''
