# SPDX-License-Identifier: Apache-2.0

"""Moving in and out: estimate, import, export; orphans, missing."""

import contextlib
import os
import re
import shutil
import time

from cliff import lister
from cliff import show

from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import imageids
from glance_dedup.base import inputs
from glance_dedup.base import units
from glance_dedup.cli import command
from glance_dedup.cli import common
from glance_dedup.cli import glance_access
from glance_dedup.cli import targets


class Estimate(command.RepositoryCommand, lister.Lister):
    """Tell what images would take here, without storing them.

    Files are only read. The sums are the disk space of a repository with these
    images alone, including its metadata and its catalog: once as uploads
    leave it, and once after recompression. If there are disks in a format such
    as qcow2, rows of the kind "disk" and two more sums show what would be
    stored if the repository kept these disks, and derived their files, as the
    task convert does.
    """

    def add_arguments(self, parser):
        parser.add_argument(
            'paths', metavar='PATH', nargs='+',
            help='An image, or a directory of images, such as a file '
            "store's. Its subdirectories and symbolic links are left out.")
        parser.add_argument(
            '--block-size', type=common.size, metavar='SIZE',
            help='As for repository create.')
        parser.add_argument(
            '--chunking', default='fixed', metavar='fixed|content-defined',
            help='As for repository create.')
        common.add_codec(parser)
        parser.add_argument(
            '--level', type=int, default=0, metavar='N',
            help='The level of zstd, 1 to 19. Default: its own.')
        parser.add_argument(
            '--exact', action='store_true',
            help='Remember all blocks. Otherwise only a sample is remembered '
            'once the blocks need more than 128 MiB of memory.')

    def take_action(self, parsed_args):
        from glance_dedup.adoption import estimate

        options = estimate.Options(
            parsed_args.block_size, parsed_args.chunking, parsed_args.codec,
            parsed_args.level, parsed_args.exact)
        files = estimate.files_of(
            parsed_args.paths, lambda path: self.app.tell(
                f'{path}: left out; it is not an ordinary file'))
        if parsed_args.exact:
            memory = units.size(
                estimate.exact_memory(files, options))
            self.app.tell(f'this may take {memory} of memory')
        to_read = [*files, *estimate.formatted(files)]
        with self.progress(
                'reading', estimate.data_bytes(to_read)) as progress:
            result = estimate.estimate(files, options, progress.update)
        self._tell(result)
        if len(result.unreadable) == len(files):
            raise common.FailedError(
                f'nothing was estimated, for {" ".join(parsed_args.paths)} '
                'has no image that can be read: name images, or directories '
                'with images')
        return (('kind', 'name', 'size', 'nonzero_bytes', 'new_bytes',
                 'stored_bytes', 'saved_percent'), self._rows(result))

    def _tell(self, result):
        for _, error in result.unreadable:
            self.app.report(error)
        for image in result.images:
            for sentence in image.advice, image.disk:
                if sentence:
                    self.app.tell(f'{image.path}: {sentence}')
        if result.unconfined:
            self.app.tell(f'no disk was counted: {result.unconfined}')
        if result.one_of > 1:
            self.app.tell(
                f'one block in {result.one_of} was counted; what is stored '
                f'is off by less than {result.error_percent:.2f} % in 19 of '
                '20 cases (--exact counts all)')

    @staticmethod
    def _rows(result):
        def figures(of):
            return [sum(getattr(image, name) for image in of.images)
                    for name in ('size', 'nonzero', 'new')]

        def row(kind, image):
            return (kind, image.path, image.size, image.nonzero, image.new,
                    image.stored)

        # Of those that could not be opened, nothing is known.
        unknown = {path for path, _ in result.unreadable}
        sums = figures(result)
        rows = [row('image', image) for image in result.images
                if image.size or image.path not in unknown]
        rows += [('sum', 'all blocks', *sums, result.stored),
                 ('sum', 'metadata', None, None, None, result.metadata),
                 ('sum', 'on the disk', *sums, result.on_disk),
                 ('sum', 'on the disk, recompressed', *sums,
                  result.on_disk_recompressed)]
        if disks := result.with_disks:
            sums = figures(disks)
            rows += [row('disk', image) for image in disks.images
                     if image.is_disk]
            rows += [('sum', 'with disks', *sums, disks.on_disk),
                     ('sum', 'with disks, recompressed', *sums,
                      disks.on_disk_recompressed)]
        return [(kind, name, *map(common.Size, (size, nonzero, new, stored)),
                 common.saved(nonzero or 0, stored))
                for kind, name, size, nonzero, new, stored in rows]


class Import(command.RepositoryCommand, lister.Lister):
    """Take the images of a file store in.

    The file store is only read. If Glance is asked, each image is compared
    with the hash that was recorded when it was uploaded, and belongs to the
    project that owns it in Glance. Images that are in the repository already
    are compared and left as they are, so an interrupted import goes on when
    you start it again.
    """

    def add_arguments(self, parser):
        parser.add_argument(
            '--from-file-store', metavar='DIR', nargs='+', required=True,
            help="The file store's directories (filesystem_store_datadir).")
        parser.add_argument(
            '--images', metavar='ID', nargs='+',
            help='Only these. Default: all.')
        glance_access.add_options(parser)
        parser.add_argument(
            '--project', metavar='ID',
            help='If no Glance is asked: the project that all these images '
            'belong to. Default: none; then everybody who may delete an '
            'image in Glance may delete its data.')
        common.add_scope(parser)
        common.add_codec(parser)
        parser.add_argument(
            '--update-locations', metavar='STORE',
            help='Tell Glance that the images are also in this store, which '
            'must be the repository. Glance needs show_multiple_locations.')
        common.add_dry_run(parser)

    def take_action(self, parsed_args):
        entries = self._entries(parsed_args)
        glance = self._glance(parsed_args)
        known = None
        if glance is not None:
            known = self.images_of(glance)
            if parsed_args.update_locations:
                _require_locations(parsed_args.update_locations, glance, known)
        with self.open(codec=parsed_args.codec) as repo:
            outcomes = self._work(parsed_args, repo, glance, known, entries)
        return (('image_id', 'size', 'result', 'stored_bytes', 'project',
                 'verified_by', 'located', 'error'),
                [(o.image_id, common.Size(o.size), o.result,
                  common.Size(o.stored_bytes), o.project, o.verified,
                  o.located,
                  o.error and (o.error if isinstance(o.error, str)
                               else common.sentence_of(o.error)))
                 for o in outcomes])

    def _glance(self, parsed_args):
        from glance_dedup.client import glance_api

        wanted = parsed_args.os_cloud or glance_api.is_configured()
        if wanted and not parsed_args.no_glance:
            if parsed_args.project is not None:
                raise common.UsageError(
                    'an image belongs to the project that Glance says: leave '
                    '--project out, or use --no-glance')
            glance = glance_access.connect(parsed_args.os_cloud,
                                           parsed_args.glance_url)
            self.app.tell(f'asking {glance.url} who owns the images')
            return glance
        if parsed_args.update_locations:
            raise common.UsageError(
                '--update-locations needs a Glance to tell: use --os-cloud')
        whose = (f'project {parsed_args.project}' if parsed_args.project
                 else 'no project')
        self.app.tell(
            'Glance is not asked: no hash is compared, files that may be '
            'uploads under way are taken as they are, and the images belong '
            f'to {whose}')
        return None

    def _entries(self, parsed_args):
        from glance_dedup.adoption import filestore

        wanted = set(parsed_args.images or ())
        found: dict[str, filestore.Entry] = {}
        for directory in parsed_args.from_file_store:
            entries, others = filestore.listing(directory)
            for path, reason in others:
                self.app.tell(f'{path}: left out; {reason}')
            for entry in entries:
                if entry.image_id in found:
                    raise common.FailedError(
                        f'{entry.path} and {found[entry.image_id].path}: '
                        'which of them is the image? Remove the other')
                if not wanted or entry.image_id in wanted:
                    found[entry.image_id] = entry
        absent = sorted(wanted - set(found))
        if absent:
            raise common.FailedError(
                f'there is no image {absent[0]} in '
                f'{" or ".join(parsed_args.from_file_store)}')
        return [found[image_id] for image_id in sorted(found)]

    def _work(self, parsed_args, repo, glance, known, entries):
        from glance_dedup.adoption import importing

        importer = importing.Importer(
            repo, known=known, glance=glance,
            store=parsed_args.update_locations,
            project=parsed_args.project or '', scope=parsed_args.scope,
            dry_run=parsed_args.dry_run)
        outcomes = []
        done = before = 0
        with self.progress('importing', sum(
                entry.size for entry in entries)) as progress:
            def update(length):
                nonlocal done
                done += length
                progress.update(done)

            for number, entry in enumerate(entries, 1):
                progress.what = (f'importing {entry.image_id} '
                                 f'({number} of {len(entries)})')
                outcome = importer.take(entry, update)
                before += entry.size
                done = before       # even if the file was left out
                if isinstance(outcome.error, BaseException):
                    self.app.report(outcome.error)
                outcomes.append(outcome)
        return outcomes


def _require_locations(store, glance, known):
    """Refuse a Glance that lacks the store, or takes no locations."""
    glance.require_store(store)
    if any(image.locations is None for image in known.values()):
        raise common.FailedError(
            f'{glance.url} does not show locations, and so takes none: '
            'run a glance-api of your own with '
            'show_multiple_locations, and name it by --glance-url, as '
            'the guide on migration says')


class Export(command.RepositoryCommand, lister.Lister):
    """Write images as plain files, named by their ids.

    This is the layout of Glance's file store. Each file appears whole and
    durable, with holes for zeros, after every byte was verified. A file that
    exists already is compared and left as it is. The command neither asks nor
    tells Glance.
    """

    def add_arguments(self, parser):
        parser.add_argument('directory', metavar='DIR')
        parser.add_argument('ids', metavar='ID', nargs='*')
        parser.add_argument(
            '--all', action='store_true', help='All images but backups.')
        targets.add_mode(parser)

    def take_action(self, parsed_args):
        if bool(parsed_args.ids) == parsed_args.all:
            raise common.UsageError('name images to export, or give --all')
        mode = parsed_args.mode
        directory = parsed_args.directory
        if not files.is_directory(directory):
            raise common.UsageError(f'{directory} is not a directory')
        rows = []
        with self.open() as repo:
            if parsed_args.all:
                common.tell_of_backups(repo, self.app)
            stats = (list(common.stats(repo, self.app)) if parsed_args.all
                     else [repo.stat(image_id)
                           for image_id in parsed_args.ids])
            self._require_room(directory, stats)
            with self.progress('exporting', sum(
                    stat.size for stat in stats)) as progress:
                done = 0
                for stat in stats:
                    rows.append(self._one(repo, directory, stat, mode, done,
                                          progress))
                    done += stat.size
        return ('image_id', 'size', 'result', 'error'), rows

    @staticmethod
    def _require_room(directory, stats):
        needed = sum(stat.size - stat.zero_bytes for stat in stats
                     if not files.exists(
                         os.path.join(directory, stat.image_id)))
        free = shutil.disk_usage(directory).free
        if needed > free:
            raise exceptions.NoSpaceError(
                f'{directory}: the images need '
                f'{units.size(needed)}, but '
                f'{units.size(free)} are free')

    def _one(self, repo, directory, stat, mode, done, progress):
        path = os.path.join(directory, stat.image_id)
        result, error = 'failed', None
        progress.what = f'exporting {stat.image_id}'
        _remove_leftovers(directory, stat.image_id)
        try:
            with repo.open_image(stat.image_id) as image:
                if files.exists(path):
                    _compare(path, image)
                    result = 'present'
                else:
                    targets.Target(path, False, mode, give_away=True
                                   ).write(image, _From(progress, done))
                    result = 'exported'
        except (exceptions.RepositoryError, common.UsageError,
                OSError) as e:
            self.app.report(e)
            error = common.sentence_of(e)
        return stat.image_id, common.Size(stat.size), result, error


class _From:
    """The progress of one image among several."""

    def __init__(self, progress, done):
        self._progress = progress
        self._done = done

    def update(self, done):
        self._progress.update(self._done + done)


def _remove_leftovers(directory, image_id):
    """Remove the file that a killed export of this image left."""
    pattern = re.compile(rf'\.{re.escape(image_id)}\.[0-9a-f]{{16}}\.new')
    for name in filter(pattern.fullmatch, os.listdir(directory)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, name))


def _compare(path, image):
    differs = exceptions.DamagedError(
        f'{path} exists, but is not the image; it was left alone')
    with inputs.InputFile(path) as source:
        if source.size != image.size:
            raise differs
        for piece in image.pieces():
            if not source.has_next(piece):
                raise differs


class Orphans(command.RepositoryCommand, lister.Lister):
    """List images of the repository that Glance does not have here.

    The account must be an administrator of Glance. --delete deletes orphans,
    except young ones and those whose id Glance cannot have given. If several
    Glances use the repository, name each by an --os-cloud: an orphan is an
    image that none of them has.
    """

    def add_arguments(self, parser):
        parser.add_argument(
            'ids', metavar='ID', nargs='*', help='Only these.')
        glance_access.add_cloud(parser, action='append')
        parser.add_argument(
            '--store', metavar='NAME',
            help="The repository's store in Glance. With it, images that "
            'Glance has only in other stores are orphans, too.')
        parser.add_argument(
            '--delete', action='store_true', help='Delete them.')
        parser.add_argument(
            '--older-than', type=common.duration, default='7d',
            metavar='DURATION',
            help='Delete only images that were stored longer ago, such as '
            '12h. Default: %(default)s.')

    def take_action(self, parsed_args):
        from glance_dedup.adoption import orphans

        with self.open() as repo:
            # First: images that are stored from now on are not looked at.
            # Backups are none of Glance's, and are left out.
            stats = list(common.stats(repo, self.app))
            glances = [glance_access.connect(cloud)
                       for cloud in parsed_args.os_cloud or [None]]
            for glance in glances if parsed_args.store else ():
                glance.require_store(parsed_args.store)
            found = orphans.orphans(
                stats, [self.images_of(glance) for glance in glances],
                parsed_args.store)
            if parsed_args.delete and not parsed_args.ids:
                self._require_likely(stats, found)
            now = time.time()
            rows = []
            for orphan in found:
                stat = orphan.stat
                if parsed_args.ids and stat.image_id not in parsed_args.ids:
                    continue
                kept = deleted = None
                if parsed_args.delete:
                    kept = orphans.why_kept(
                        orphan, glances, parsed_args.store,
                        now - parsed_args.older_than)
                    deleted = kept is None and self.delete(repo, stat)
                rows.append((
                    stat.image_id, common.Size(stat.size),
                    common.Size(stat.stored_bytes), common.Time(stat.created),
                    stat.project, orphan.reason, deleted,
                    kept))
        return (('image_id', 'size', 'stored_bytes', 'created', 'project',
                 'reason', 'deleted', 'kept'), rows)

    @staticmethod
    def _require_likely(stats, found):
        """Refuse a Glance that seems wrong, or to be one of several."""
        unknown = sum(orphan.unknown for orphan in found)
        if unknown * 2 > len(stats):
            raise common.UsageError(
                f'Glance does not know {unknown} of the {len(stats)} images: '
                'is it the one that uses this repository, and the only one? '
                'Nothing was deleted. Name each Glance by --os-cloud, or the '
                'images to delete')

    def delete(self, repo, stat):
        """Delete this upload of an image; False if that failed.

        Another upload of the same id, which came meanwhile, stays.
        """
        try:
            repo.delete(stat.image_id, stat.upload_id)
        except exceptions.RepositoryError as e:
            self.app.report(e)
            return False
        return True


class Missing(command.RepositoryCommand, lister.Lister):
    """List images that Glance has in this store, but the repository lacks.

    The account must be an administrator of Glance. The exit status is 1 if
    there are any.
    """

    def add_arguments(self, parser):
        glance_access.add_cloud(parser)
        parser.add_argument(
            '--store', metavar='NAME', required=True,
            help="The repository's store in Glance.")

    def take_action(self, parsed_args):
        from glance_dedup.adoption import orphans

        with self.open() as repo:
            glance = glance_access.connect(parsed_args.os_cloud)
            glance.require_store(parsed_args.store)
            rows = [(image.image_id, common.Size(image.size or 0),
                     image.status, image.owner,
                     common.Words(sorted(image.stores)))
                    for image in orphans.missing(
                        repo, glance, self.images_of(glance),
                        parsed_args.store)]
        if rows:
            self.app.status = common.DAMAGED
        return ('image_id', 'size', 'status', 'owner', 'stores'), rows


class SignLocations(command.RepositoryCommand, lister.Lister):
    """Give Glance locations that the repository's current key has signed.

    It is for after 'repository rekey', and after 'repository restore
    --new-key'. Locations that the repository accepts no more are removed; the
    data stays. While a change of the key is under way, old locations stay.
    Glance needs show_multiple_locations, and the account must be an
    administrator. Run it as often as you like: what is done stays done. The
    exit status is 1 if an image got no location.
    """

    def add_arguments(self, parser):
        glance_access.add_address(parser)
        parser.add_argument(
            '--store', metavar='NAME', required=True,
            help="The repository's store in Glance.")

    def take_action(self, parsed_args):
        from glance_dedup.adoption import signing
        from glance_dedup.base import signingkeys

        glance = glance_access.connect(parsed_args.os_cloud,
                                       parsed_args.glance_url)
        rows = []
        with self.open() as repo, signingkeys.locked(repo.path) as keys:
            known = self.images_of(glance)
            _require_locations(parsed_args.store, glance, known)
            signer = signing.Signer(repo, keys, glance, parsed_args.store)
            images = list(filter(signer.concerns, known.values()))
            with self.progress('signing', len(images),
                               unit='images') as progress:
                for done, image in enumerate(images, 1):
                    rows.append(self._one(signer, image))
                    progress.update(done)
        return ('image_id', 'owner', 'result', 'error'), rows

    def _one(self, signer, image):
        from glance_dedup.client import glance_api

        try:
            return image.image_id, image.owner, signer.sign(image), None
        except (exceptions.RepositoryError, glance_api.GlanceError) as e:
            self.app.report(e)
            return (image.image_id, image.owner, 'failed',
                    common.sentence_of(e))


class Verify(command.RepositoryCommand, lister.Lister):
    """Read images, and record the hashes of their bytes.

    A user's token opens an image only if Glance's hash of it is recorded here.
    Uploads record the hash. Images that were stored by older versions, or by
    image put or image pull, have none until this command has read them. It
    records the hash of the bytes in the repository. If Glance is asked, it
    compares the hash with Glance's, and names each image that differs.
    """

    def add_arguments(self, parser):
        parser.add_argument('ids', metavar='ID', nargs='*')
        parser.add_argument(
            '--all', action='store_true',
            help='All images but backups, whose hash is not recorded yet.')
        parser.add_argument(
            '--algorithm', metavar='NAME',
            help="The hash, as Glance's option hashing_algorithm names it. "
            'Default: the one that Glance recorded for the image, or sha512 '
            'if Glance is not asked.')
        glance_access.add_options(parser)

    def take_action(self, parsed_args):
        from glance_dedup.base import hashes

        if bool(parsed_args.ids) == parsed_args.all:
            raise common.UsageError('name images to verify, or give --all')
        try:
            hashes.new(parsed_args.algorithm or hashes.DEFAULT)
        except ValueError as e:
            raise common.UsageError(f'--algorithm: {e}') from e
        rows: list[tuple] = []
        with self.open() as repo:
            known = self._images_of_glance(parsed_args)
            stats = (list(common.stats(repo, self.app)) if parsed_args.all
                     else list(self._named(repo, parsed_args.ids, rows)))
            with self.progress('verifying', sum(
                    stat.size for stat in stats)) as progress:
                done = 0
                for stat in stats:
                    rows.append(self._one(repo, parsed_args, stat, known,
                                          lambda n: progress.update(done + n)))
                    done += stat.size
            if parsed_args.all:
                hashes.sweep(repo)
        return ('image_id', 'size', 'result', 'hash_name', 'hash_value',
                'error'), rows

    def _images_of_glance(self, parsed_args):
        """Glance's images by their ids; None: Glance is not asked."""
        from glance_dedup.client import glance_api

        if parsed_args.no_glance or not (
                parsed_args.os_cloud or glance_api.is_configured()):
            self.app.tell('Glance is not asked: no hash is compared')
            return None
        return self.images_of(glance_access.connect(
            parsed_args.os_cloud, parsed_args.glance_url))

    def _named(self, repo, ids, rows):
        for image_id in ids:
            try:
                yield repo.stat(image_id)
            except exceptions.RepositoryError as e:
                rows.append(self._failed(image_id, None, e))

    def _failed(self, image_id, size, error):
        self.app.report(error)
        return (image_id, common.Size(size), 'failed', '', '',
                common.sentence_of(error))

    def _one(self, repo, parsed_args, stat, known, progress):
        """Verify one image; returns its row."""
        from glance_dedup.base import hashes

        record = (known or {}).get(stat.image_id)
        theirs = record and hashes.said(record.hash_name, record.hash_value)
        name = hashes.new(parsed_args.algorithm or (
            theirs.name if theirs else hashes.DEFAULT)).name
        try:
            ours = hashes.recorded(repo.path, stat)
            result = 'known'
            # An image that is named is always read.
            if parsed_args.ids or name not in ours:
                with repo.open_image(stat.image_id) as image:
                    # The image may have been deleted and stored again.
                    stat = image.stat
                    found = hashes.compute(image, name, progress)
                hashes.record(repo.path, stat, found)
                result = 'recorded'
                ours = {found.name: found.value}
            if theirs and ours.get(theirs.name, theirs.value) != theirs.value:
                raise exceptions.DamagedError(
                    f'image {stat.image_id} is not the one that Glance '
                    f'means: its {theirs.name} is {ours[theirs.name]} here, '
                    f"and {theirs.value} in Glance's record")
        except exceptions.RepositoryError as e:
            return self._failed(stat.image_id, stat.size, e)
        return (stat.image_id, common.Size(stat.size), result, name,
                ours[name], '')


class Register(command.RepositoryCommand, show.ShowOne):
    """Give an image of the repository a record in Glance.

    Glance then serves the image, and deletes it with its record. The record
    belongs to the image's project, and says that the image is a raw disk, as
    volume snapshot makes them. The whole image is read twice: here for the
    hash that the record gets, and by Glance. The account must have the roles
    admin and service. If the command was interrupted, start it again: it
    continues. A backup is first stored again, as an image with a new id. That
    takes a moment and no space, and the backup stays when the image is
    deleted.
    """

    def add_arguments(self, parser):
        parser.add_argument(
            'id', metavar='IMAGE',
            help='The id of the stored image, a UUID, or of a backup.')
        parser.add_argument(
            '--name', help="The image's name in Glance. Default: IMAGE.")
        parser.add_argument(
            '--project', default='', metavar='PROJECT',
            help="The project's id to which the image of a backup is to "
            "belong. Default: the backup's.")
        parser.add_argument(
            '--visibility', default='private',
            choices=('private', 'shared', 'community', 'public'),
            help='Default: %(default)s.')
        glance_access.add_cloud(parser)

    def take_action(self, parsed_args):
        from glance_dedup.adoption import registering

        image_id = parsed_args.id
        is_backup = imageids.of_backup(image_id) is not None
        if parsed_args.project and not is_backup:
            raise common.UsageError(
                f'--project is for backups; {image_id} has a project, or '
                'gets one by: glance-dedup image copy')
        with self.open() as repo:
            if is_backup:
                image_id = registering.copy_backup(
                    repo, image_id, parsed_args.project)
            glance = glance_access.connect(parsed_args.os_cloud)
            glance.require_service()
            registering.restore(repo, glance, image_id)
            size = repo.stat(image_id).size
            with self.progress(f'hashing {image_id}', size) as progress:
                result, record = registering.register(
                    repo, glance, image_id,
                    name=parsed_args.name or parsed_args.id,
                    visibility=parsed_args.visibility,
                    progress=progress.update)
        fields = {'image_id': image_id, 'result': result}
        fields |= {name: record.get(name) for name in (
            'name', 'owner', 'visibility', 'status', 'min_disk', 'stores')}
        return common.shown({
            **fields, 'size': common.Size(record['size'])})
