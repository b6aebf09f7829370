# SPDX-License-Identifier: Apache-2.0

"""The commands on the object store that has a repository's cold groups."""

import contextlib
import dataclasses
import os

from cliff import show

from glance_dedup.cli import command
from glance_dedup.cli import common
from glance_dedup.cli import maintenance


class Attach(command.RepositoryCommand, show.ShowOne):
    """Say to which object store a repository's groups may move.

    The prefix must be this repository's alone. Nothing moves before the task
    'tier' runs. To change only the credentials' file or the size of the cache,
    give the same URL again, and restart the repository's daemon and Glance.
    """

    def add_arguments(self, parser):
        parser.add_argument(
            'url', metavar='URL',
            help='s3://BUCKET/PREFIX or swift://CONTAINER/PREFIX. The bucket '
            'or container must exist.')
        add_place(parser)
        parser.add_argument(
            '--moved', action='store_true',
            help='This directory was moved to another disk, with its cold '
            'groups, and the old one is used no more. It becomes a new owner '
            'of objects; the old one may write and delete none any more.')

    def take_action(self, parsed_args):
        from glance_dedup.base import signingkeys
        from glance_dedup.repository import prefix_owners

        work = (prefix_owners.move if parsed_args.moved
                else prefix_owners.attach)
        with self.open() as repo:
            settings = work(repo, place_of(parsed_args.url, parsed_args),
                            parsed_args.credentials, options_of(parsed_args))
            self.app.tell(
                f'save a copy of {os.path.join(repo.path, signingkeys.FILE)} '
                "where this disk's loss does not reach: 'repository restore' "
                'needs it, and it is never sent to the object store')
        return common.shown(_fields(settings))


def add_place(parser):
    """Add the options for access to an object store."""
    parser.add_argument(
        '--credentials', metavar='FILE', required=True,
        help='File with the credentials, under the same path on all hosts. '
        'Only its owner may change it, and only its group may read it.')
    parser.add_argument(
        '--endpoint', metavar='URL', default='',
        help="URL of S3's server. Default: Amazon's. Swift's is in the "
        "catalogue of Keystone.")
    parser.add_argument(
        '--region', default='',
        help="The object store's region. Default: its default.")
    parser.add_argument(
        '--ca-file', metavar='FILE', default='',
        help="File with the authorities, in PEM, that verify the server's "
        "certificate. Default: the system's.")
    parser.add_argument(
        '--allow-http', action='store_true',
        help='Allow an http:// URL of another host, of S3, Keystone or Swift.')
    parser.add_argument(
        '--cache-size', dest='cache_mib', type=common.size_in_mib,
        metavar='SIZE', default='1G',
        help='Size of the cache on the disk of the repository, for parts of '
        'cold groups that were read lately. Default: %(default)s.')
    parser.add_argument(
        '--read-limit', metavar='SECONDS', type=int, default=60,
        help='Most seconds that a read waits for the object store, all its '
        'repeated requests together. Default: %(default)s.')


def options_of(parsed_args):
    """Return the options of an attached repository."""
    from glance_dedup.repository import cold_settings

    return cold_settings.Options(
        parsed_args.cache_mib, parsed_args.allow_http, parsed_args.read_limit)


def place_of(url, parsed_args):
    """Return the location that a URL and these options name.

    :raises UsageError: it is reached without encryption, which is not allowed
    """
    from glance_dedup.objects import credentials
    from glance_dedup.objects import object_location
    from glance_dedup.objects import object_store

    place = object_location.parse(url, parsed_args.endpoint,
                                  parsed_args.region,
                                  parsed_args.ca_file)
    if not parsed_args.allow_http:
        path = parsed_args.credentials
        with contextlib.closing(object_store.open_backend(
                place, path, credentials.read(path))) as backend:
            for reached in backend.urls():
                if not object_location.is_protected(reached):
                    raise common.UsageError(
                        f'{reached} has no encryption: who is on the way '
                        'reads the credentials or the images, and changes '
                        'what comes. Use https, or give --allow-http if '
                        'nobody else is on the way')
    return place


def _fields(settings) -> dict[str, object]:
    place = settings.location
    return {
        'url': place.url,
        'endpoint': place.endpoint,
        'region': place.region,
        'ca_file': place.ca_file,
        'credentials': settings.credentials,
        'cache_bytes': common.Size(settings.options.cache_mib << 20),
        'read_limit': settings.options.read_limit,
        'owner': settings.owner,
        'restored_from': common.Words(list(settings.owners[1:])),
    }


class Show(command.RepositoryCommand, show.ShowOne):
    """Show to which object store a repository is attached, and what is there.

    With --list, the objects are counted, too.
    """

    def add_arguments(self, parser):
        parser.add_argument(
            '--list', action='store_true',
            help='Ask the object store for the number and the bytes of the '
            "objects. It bills one request for each 1,000 of them.")

    def take_action(self, parsed_args):
        from glance_dedup.repository import cold_settings

        with self.open() as repo:
            settings = cold_settings.require(repo.path)
            fields = _fields(settings)
            if parsed_args.list:
                with cold_settings.connect(settings) as store:
                    found = [store.keys(f'{owner}/')
                             for owner in settings.owners]
                sizes = [size for keys in found for _, size in keys]
                fields['objects'] = len(sizes)
                fields['object_bytes'] = common.Size(sum(sizes))
        return common.shown(fields)


class BackupMetadata(maintenance.TaskCommand):
    """Send a metadata backup to the object store, now.

    With it and the cold groups' objects, 'repository restore' makes the
    directory again. The task 'tier' does the same at its end, if something has
    changed. No group moves, and no object is deleted.
    """

    task = 'tier'
    what = 'sending the metadata'
    unit = 'group'

    def add_arguments(self, parser):
        """There are none."""

    def take_action(self, parsed_args):
        return self.run_task(metadata_only=True)

    def _judged(self, result):
        return common.shown({'metadata_backup': result.get('metadata_backup'),
                             'sent_recipes': result.get('sent_recipes')})


class Restore(command.RepositoryCommand, show.ShowOne):
    """Make a repository again whose directory is lost, from an object store.

    The newest metadata backup says what it had. Restored are cold groups, and
    images whose blocks are all in these; the command lists the others. First
    stop all programs on the host of the lost directory, if it still runs: its
    images are not shared with the new directory. The exit status is 1 if
    something was lost. An interrupted restoring goes on when you start it
    again.
    """

    def add_arguments(self, parser):
        parser.add_argument(
            '--from', metavar='URL', dest='url', required=True,
            help='s3://BUCKET/PREFIX or swift://CONTAINER/PREFIX, as given to '
            "'object-store attach'.")
        add_place(parser)
        key = parser.add_mutually_exclusive_group(required=True)
        key.add_argument(
            '--key', metavar='FILE',
            help="Your copy of the repository's file 'key', which no object "
            'store has. Only a metadata backup that was made with it is '
            'restored.')
        key.add_argument(
            '--new-key', action='store_true',
            help='There is no copy: make a new key. Nothing then shows '
            'whether somebody else made the metadata backup. Glance reads no '
            "image before 'glance sign-locations' has run.")
        parser.add_argument(
            '--metadata-backup', type=int, metavar='NUMBER',
            help='Restore this metadata backup, even if newer ones are '
            'damaged or were not made by the repository, and no other one. '
            'Default: the newest, if it can be used.')
        parser.add_argument(
            '--owner', metavar='ID',
            help='Whose metadata backup to restore, if several directories '
            'have written there.')
        parser.add_argument(
            '--group-access', action='store_true',
            help="Let all members of the directory's group use the "
            'repository. Default: only you may use it.')
        parser.add_argument(
            '--yes', action='store_true',
            help='Confirm it. Without this, the command only tells what it '
            'would restore.')

    def take_action(self, parsed_args):
        from glance_dedup.metadata_backup import restoring

        place = place_of(parsed_args.url, parsed_args)
        if not parsed_args.yes:
            raise common.UsageError(self._found(place, parsed_args))
        with self.progress('restoring', unit='objects') as progress:
            result = restoring.restore(
                self.path, place, parsed_args.credentials,
                self._keys(parsed_args), owner=parsed_args.owner,
                number=parsed_args.metadata_backup,
                options=options_of(parsed_args),
                group_access=parsed_args.group_access,
                progress=progress.step)
        if parsed_args.new_key:
            self.app.tell(
                f'{self.path} has a new key: save a copy of its file key, '
                "and have 'glance-dedup glance sign-locations' give Glance "
                'new locations')
        return self._judged(result)

    @staticmethod
    def _keys(parsed_args):
        """Return the repository's keys; None: they are lost."""
        from glance_dedup.base import signingkeys

        return parsed_args.key and signingkeys.read(parsed_args.key)

    def _found(self, place, parsed_args) -> str:
        """Return the sentence on the things that would be restored."""
        from glance_dedup.metadata_backup import restoring
        from glance_dedup.objects import object_store

        with (object_store.ObjectStore(place, parsed_args.credentials,
                                       parsed_args.allow_http) as connected,
              restoring.look(
                  connected, self._keys(parsed_args), parsed_args.owner,
                  parsed_args.metadata_backup).manifest as manifest):
            head, foot = manifest.head, manifest.foot
            return (
                f'metadata backup {head.number} of owner {head.owner}, of '
                f'{common.Time(head.taken).human_readable()}, would be '
                f'restored to {self.path}: {foot.groups} groups, and those of '
                f'{foot.recipes} images that need no others. Is it the last '
                'one that you know of? Who can write to the object store can '
                'bring an older one back. The directory that it is of may '
                'write no objects from then on; confirm it with --yes')

    def _judged(self, result):
        fields = dataclasses.asdict(result)
        fields['taken'] = common.Time(result.taken)
        fields['fetched_bytes'] = common.Size(result.fetched_bytes)
        for name in ('lost_groups', 'lost_images'):
            fields[name] = common.Lines(fields[name])
        fields['lost_volumes'] = common.Words(result.lost_volumes)
        for number, error in result.lost_groups.items():
            self.app.tell(f'group {number:08x} is lost: {error}')
        for image_id, error in result.lost_images.items():
            self.app.tell(f'image {image_id} is lost: {error}')
        if result.lost_groups or result.lost_images or result.lost_volumes:
            self.app.status = common.DAMAGED
        return common.shown(fields)
