# SPDX-License-Identifier: Apache-2.0

"""The command ``image replicate``, which sends images to another site."""

import contextlib

from cliff import lister

from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.base import units
from glance_dedup.cli import command
from glance_dedup.cli import common
from glance_dedup.cli import maintenance


class Replicate(command.RepositoryCommand, lister.Lister):
    """Send images to another site, through the daemon there.

    Only blocks that are missing there are sent. With --from-cloud and
    --to-cloud, the other site's Glance gets each image's record, under the
    same id, and its location, and verifies the data. An interrupted
    replication goes on where it was when you start it again.
    """

    def add_arguments(self, parser):
        parser.add_argument('ids', metavar='ID', nargs='*')
        parser.add_argument(
            '--all', action='store_true', help='All images but backups.')
        parser.add_argument(
            '--to', dest='address', metavar='URL', required=True,
            help="The other site's daemon: https://HOST:PORT, or unix:/PATH.")
        common.add_certificates(parser)
        parser.add_argument(
            '--from-cloud', metavar='NAME',
            help='The cloud of clouds.yaml whose Glance has the images.')
        parser.add_argument(
            '--to-cloud', metavar='NAME',
            help='The cloud whose Glance is to have them. Without these two '
            'options only the data is copied, and no Glance is asked or '
            'told.')
        parser.add_argument(
            '--rate', type=common.rate, metavar='SIZE',
            help='The most to send in a second, such as 20M. Default: no '
            'limit.')
        common.add_dry_run(parser)

    def take_action(self, parsed_args):
        from glance_dedup.transfer import site_replication

        if bool(parsed_args.ids) == parsed_args.all:
            raise common.UsageError('name images to replicate, or give --all')
        if parsed_args.rate == 0:
            raise common.UsageError('--rate must be more than 0')
        glances = self._glances(parsed_args)
        with self._client(parsed_args) as client, self.open() as repo:
            if glances is None:
                replication = site_replication.DataReplication(
                    repo, client, parsed_args.dry_run)
            else:
                replication = self._with_records(
                    repo, client, parsed_args, *glances)
            outcomes = self._work(parsed_args, replication,
                                  self._sizes(parsed_args, repo))
        return (('image_id', 'size', 'result', 'sent_bytes', 'verified_by',
                 'notes', 'error'),
                [(o.image_id, common.Size(o.size), o.result,
                  common.Size(o.sent_bytes), o.verified,
                  common.Words(o.notes),
                  o.error and (o.error if isinstance(o.error, str)
                               else common.sentence_of(o.error)))
                 for o in outcomes])

    def _with_records(self, repo, client, parsed_args, home, away):
        from glance_dedup.transfer import site_replication

        replication = site_replication.Replication(
            repo, client, home, away, parsed_args.dry_run)
        replication.need()
        if parsed_args.all:
            replication.listed(*map(self.images_of, (home, away)))
        return replication

    def _client(self, parsed_args):
        if parsed_args.cert is None and parsed_args.key is None and (
                parsed_args.address.startswith('https:')):
            raise common.UsageError(
                '--to: another site takes images only from operators: use '
                '--cert')
        return common.client_of(parsed_args)

    def _glances(self, parsed_args):
        """The Glances of this site and of the other; None: none are asked."""
        from glance_dedup.client import glance_api

        names = parsed_args.from_cloud, parsed_args.to_cloud
        if None not in names:
            home, away = map(glance_api.Glance, names)
            return home, away
        if names != (None, None):
            raise common.UsageError(
                '--from-cloud and --to-cloud belong together: the other '
                "site's Glance gets the records of this site's Glance")
        self.app.tell(
            'no Glance is asked or told: only the data is copied, and the '
            'other site does not show the images until its Glance is told '
            '(--from-cloud, --to-cloud)')
        return None

    def _sizes(self, parsed_args, repo):
        """The size of each image to send; 0 if its recipe cannot be read."""
        sizes = {}
        if parsed_args.all:
            common.tell_of_backups(repo, self.app)
        for image_id in (common.plain_images(repo) if parsed_args.all
                         else parsed_args.ids):
            sizes[image_id] = 0
            # Its error is reported when it is sent.
            with contextlib.suppress(exceptions.RepositoryError):
                sizes[image_id] = repo.stat(image_id).size
        return sizes

    def _work(self, parsed_args, replication, sizes):
        from glance_dedup.transfer import site_replication

        todo = {**dict.fromkeys(replication.left(sizes), 0), **sizes}
        outcomes: list[site_replication.Outcome] = []
        with self.progress('replicating', sum(sizes.values())) as progress:
            pace = self._pace(parsed_args, progress, len(todo))
            with maintenance.Interrupt(pace):
                try:
                    self._take_all(replication, pace, todo, outcomes)
                except pacing.Stopped as e:
                    self.app.tell(
                        f'{len(outcomes)} of {len(todo)} images were handled; '
                        'the other site keeps what was sent of the next one '
                        'until it collects: start the command again to go on')
                    raise KeyboardInterrupt() from e
        return outcomes

    @staticmethod
    def _pace(parsed_args, progress, number):
        from glance_dedup.transfer import site_replication

        def show(done, total, what):
            sent = units.size(pace.sent)
            progress.what = (f'replicating {pace.image_id} (of {number}), '
                             f'{sent} sent')
            progress.update(done)

        pace = site_replication.Pace(show, parsed_args.rate)
        return pace

    def _take_all(self, replication, pace, todo, outcomes):
        for image_id, size in todo.items():
            pace.image_id = image_id
            outcome = replication.take(image_id, pace)
            pace.over(size)
            outcomes.append(outcome)
            self._judge(outcome)
            left = len(todo) - len(outcomes)
            if outcome.absence is not None and left:
                self.app.tell(f'{left} more images were not tried; start '
                              'again when the other site answers')
                break

    def _judge(self, outcome):
        from glance_dedup.transfer import site_replication

        for note in outcome.notes:
            self.app.tell(f'{outcome.image_id}: {note}')
        if outcome.result == site_replication.FAILED:
            self.app.tell(f'{outcome.image_id}: '
                          f'{common.sentence_of(outcome.error)}')
            self.app.note(outcome.error)
