# SPDX-License-Identifier: Apache-2.0

"""The commands on the object store that has a repository's cold groups."""

from cliff import show

from glance_dedup.cli import command
from glance_dedup.cli import common


class Attach(command.RepositoryCommand, show.ShowOne):
    """Say to which object store a repository's groups may move.

    The prefix must be this repository's alone. Nothing moves before the task
    'tier' runs. To change only the credentials' file or the size of the cache,
    give the same URL again, and restart the repository's daemon and
    glance-api.
    """

    def add_arguments(self, parser):
        parser.add_argument(
            'url', metavar='URL',
            help='s3://BUCKET/PREFIX or swift://CONTAINER/PREFIX. The bucket '
            'or container must exist.')
        parser.add_argument(
            '--credentials', metavar='FILE', required=True,
            help='File with the credentials, under the same path on all '
            'hosts. Only its owner may change it, and only its group may '
            'read it.')
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
            '--cache-mib', type=int, metavar='MIB', default=1024,
            help='Size of the cache on the disk of the repository, for parts '
            'of cold groups that were read lately. Default: %(default)s.')

    def take_action(self, parsed_args):
        from glance_dedup.objects import location
        from glance_dedup.repository import owners

        place = location.parse(parsed_args.url, parsed_args.endpoint,
                               parsed_args.region, parsed_args.ca_file)
        with self.open() as repo:
            return common.shown(_fields(owners.attach(
                repo, place, parsed_args.credentials, parsed_args.cache_mib)))


def _fields(settings) -> dict[str, object]:
    place = settings.location
    return {
        'url': place.url,
        'endpoint': place.endpoint,
        'region': place.region,
        'ca_file': place.ca_file,
        'credentials': settings.credentials,
        'cache_bytes': common.Size(settings.cache_mib << 20),
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
        from glance_dedup.repository import cold

        with self.open() as repo:
            settings = cold.need(repo.path)
            fields = _fields(settings)
            if parsed_args.list:
                with cold.connect(settings) as store:
                    found = [store.keys(f'{owner}/')
                             for owner in settings.owners]
                sizes = [size for keys in found for _, size in keys]
                fields['objects'] = len(sizes)
                fields['object_bytes'] = common.Size(sum(sizes))
        return common.shown(fields)
