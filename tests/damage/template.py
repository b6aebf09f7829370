# SPDX-License-Identifier: Apache-2.0

"""A small repository with one of each thing, and three others beside it.

``build`` makes a directory with

``now``
    the repository that is damaged;
``older``
    the same, before some uploads, deletions and a merge;
``other``
    another repository, with images of the same ids;
``facts.json``
    the images, and facts about them.
"""

import contextlib
import json
import os
import pathlib
import shutil
import types
from unittest import mock

from dedupd.compute.cache import cache_catalog
from dedupd.tasks import collector
from dedupd.tasks import recompressor
from dedupd.tasks import registry
from glance_dedup.base import pacing
from glance_dedup.maintenance import helper_daemon
from glance_dedup.maintenance import live_hosts
from glance_dedup.maintenance import maintainer_role
from glance_dedup.maintenance import reserve
from glance_dedup.repository import openvolumes
from tests.crash import volume_model
from tests.support import maintenance
from tests.support import repositories
from tests.support.repositories import mixture
from tests.support.repositories import noise
from tests.support.repositories import put

BLOCK = maintenance.BLOCK
PAGE = repositories.PAGE
_SECTOR = 512

#: Content that a test stores in addition.
NEW = noise(9 * BLOCK, 'new')

_TEXT = b''.join(b'line %d of it\n' % i for i in range(1500))
_TWIN = noise(6 * BLOCK, 'twin')

_FIRST = {
    'plain': noise(40 * BLOCK, 1),
    'text': _TEXT,
    # Blocks of it are shared with 'plain', and named more than once.
    'mixed': mixture(60 * BLOCK, 2, unit=BLOCK) + noise(10 * BLOCK, 1),
    # The recipe of this image has two pages of extents.
    'holes': b''.join(noise(BLOCK, i % 7) + bytes(BLOCK) for i in range(55)),
    'deleted': noise(20 * BLOCK, 'deleted') + noise(5 * BLOCK, 1),
    'merged': noise(6 * BLOCK, 'merged') + _TWIN,
    'replaced': noise(3 * BLOCK, 'first'),
    # Its blocks have the mark nodedup; 'plain' has the same.
    'copies': noise(9 * BLOCK, 1),
}
_LATER = {
    'later': noise(12 * BLOCK, 'later') + noise(3 * BLOCK, 1),
    'replaced': noise(4 * BLOCK, 'second'),
    # A twin of a part of 'merged', to be found by merging.
    'twin': noise(2 * BLOCK, 'beside') + _TWIN,
}
UNCOUNTED = {
    'fresh': noise(7 * BLOCK, 'fresh') + noise(4 * BLOCK, 1),
}

IMAGES = {**_FIRST, **_LATER, **UNCOUNTED}
del IMAGES['deleted']

#: Name of the one volume among the images.
VOLUME = 'volume disk'
_VOLUME_SECTORS = 2 * volume_model.PART + 5
#: Writes to the volume: a checkpoint follows each of the first two.
_DEEDS = [['write', 3, 1000, 20], ['write', volume_model.PART - 4, 1100, 9],
          ['write', 9, 1200, 5], ['write', 5, 0, 3],
          ['write', volume_model.PART, 1300, 30]]


def volume():
    """Return the volume's model; the last writes are in its journal alone."""
    model = volume_model.Model([0] * _VOLUME_SECTORS, absent=False)
    for deed in _DEEDS:
        model.did(deed)
    model.kept(2)
    return model


def _write(volume, deeds):
    for _, at, first, count in deeds:
        if first:
            volume.write(volume_model.content(range(first, first + count)),
                         at * volume_model.SECTOR)
        else:
            volume.zero(count * volume_model.SECTOR,
                        at * volume_model.SECTOR)
    volume.flush()


#: Patterns for the files of each kind in format.rst.
STRUCTURES = {
    'group': 'groups/*',
    'recipe': 'images/*',
    'stored': 'spool/T-*',
    'deleted': 'spool/D-*',
    'made': 'spool/G-*',
    'merged': 'spool/M-*',
    'taken out': 'spool/O-*',
    'exchange': 'spool/X-*',
    'spare': 'spares/*',
    'catalog': 'catalog/*',
    'index': 'index/*',
    'notes': 'helpers/*',
    'fence': 'fence',
    'reserve': 'catalog-reserve',
    'locks': 'locks/*',
    'feature': 'features/*',
    'quarantine': 'quarantine/*',
    'cache': 'cache.json',
    'journal': 'volumes/disk/journal-*',
    'owner': 'volumes/disk/lock',
    'parameters': 'repository.json',
    'key': 'key',
}


def options(codec):
    return {'codec': codec, 'threads': 0}


def run(worker, name, **arguments):
    """Run a task with options that have it do as much as possible.

    :param worker: a maintainer or a helper
    """
    options = types.SimpleNamespace(
        collect_live_share=100, merge_exclude=[],
        recompress_codec='zstd', recompress_level=1,
        recompress_cluster_similar=True, spare_threshold=2, scrub_cold_mib=0)
    # Files are exchanged though nothing is gained.
    with (mock.patch.object(recompressor, '_WORTH', -1),
          mock.patch.object(collector, 'EVACUATE_SHARE', 30)):
        return registry.run(name, worker, pacing.Pace(), options, **arguments)


@contextlib.contextmanager
def helping(repo):
    """A helper, as in a daemon that is no maintainer."""
    with (live_hosts.Hosts(repo.path) as hosts,
          helper_daemon.Helper(repo, hosts) as helper):
        yield helper


def copy(source, target):
    """Copy a whole tree; two names of one file stay its names."""
    known = {}

    def copy_file(one, other):
        inode = os.lstat(one).st_ino
        if inode in known:
            os.link(known[inode], other)
        else:
            known[inode] = shutil.copy2(one, other)
        return other
    shutil.copytree(source, target, copy_function=copy_file, symlinks=True)


def build(top, codec='none'):
    """Make all of them.

    This needs a process of its own, for LevelDB's sake.
    """
    # The space reserved for the catalog would be most of the copied bytes.
    reserve.RESERVE_BYTES = PAGE
    top = pathlib.Path(top)
    path = _create(top / 'now', codec)
    with repositories.open_repository(path, **options(codec)) as repo:
        _note(repo)
        for image_id, data in _FIRST.items():
            put(repo, image_id, data, dedup=image_id != 'copies')
        _make_volume(repo, _DEEDS)
        with maintainer_role.Maintainer(repo) as maintainer:
            run(maintainer, 'merge')
            run(maintainer, 'recompress')
            run(maintainer, 'scrub')
        _note(repo)
        _help(repo)
    copy(path, top / 'older')
    with repositories.open_repository(path, **options(codec)) as repo:
        _age(repo)
        _note(repo)
        _help(repo)
    # A crash of the machine loses the newest published record: committed
    # recipes name blocks beyond the published count (N7.3).
    last = repositories.Group(path, maintenance.groups(path)[-1])
    last.forget_newest_record()
    last.save()
    with repositories.open_repository(_create(top / 'other', codec),
                                      **options(codec)) as repo:
        _note(repo)
        for image_id, data in IMAGES.items():
            put(repo, image_id, data[::-1])
        _make_volume(repo, _DEEDS[1:])
        with maintainer_role.Maintainer(repo) as maintainer:
            run(maintainer, 'scrub')
        _note(repo)
    for path in (top / 'now', top / 'older', top / 'other'):
        _cut_journals(path)
    (top / 'facts.json').write_text(json.dumps({'codec': codec}))


def _make_volume(repo, deeds):
    openvolumes.create(repo, 'disk', _VOLUME_SECTORS * volume_model.SECTOR,
                       part_size=volume_model.PART_SIZE)
    with openvolumes.open_volume(repo, 'disk') as opened:
        for deed in deeds[:2]:
            _write(opened, [deed])
            opened.checkpoint()


def _cut_journals(path):
    """Cut off most of the zeros, so that damage at random hits records."""
    for file in path.glob(STRUCTURES['journal']):
        written = len(file.read_bytes().rstrip(b'\0'))
        os.truncate(file, -(-written // _SECTOR) * _SECTOR + _SECTOR)


def _help(repo):
    """Have a helper write notes: no damage, and no group to shrink."""
    with helping(repo) as helper, mock.patch.object(
            recompressor, '_WORTH', 1):
        run(helper, 'scrub', is_mine=lambda group: True)
        recompressor.run_once(helper, pacing.Pace(), 'zstd', 1, similar=True)


def _note(repo):
    """Make the repository a cache, too, that lists most of its images."""
    with contextlib.closing(cache_catalog.Held(repo)) as held:
        for image_id in repo.images()[1:]:
            held.note(image_id, repo.stat(image_id).size, None)


def _create(path, codec):
    # With a codec blocks are cut by their content.
    return repositories.create(
        path, block_size=BLOCK, group_slots=64, segment_size=4 * BLOCK,
        chunking='fixed' if codec == 'none' else 'content-defined 128 256')


def _age(repo):
    path = pathlib.Path(repo.path)
    with openvolumes.open_volume(repo, 'disk') as opened:
        _write(opened, _DEEDS[2:])
    for image_id in ('deleted', 'replaced'):
        repo.delete(image_id)
    for image_id in ('later', 'replaced'):
        put(repo, image_id, _LATER[image_id])
    with maintainer_role.Maintainer(repo) as maintainer:
        run(maintainer, 'account')
        run(maintainer, 'collect')
    # The groups are locked, so the blocks in them are not found.
    with repositories.collector_in(path, *maintenance.groups(path)):
        put(repo, 'twin', _LATER['twin'])
    # The merge has ended, and its spool files are not accounted yet.
    with maintainer_role.Maintainer(repo) as maintainer:
        run(maintainer, 'account')
        _merge_unsettled(maintainer)
    put(repo, 'gone', noise(5 * BLOCK, 'gone') + noise(3 * BLOCK, 1))
    with maintainer_role.Maintainer(repo) as maintainer:
        # Counted; and the entries of the merge are put back.
        _account_keeping(maintainer)
    repo.delete('gone')
    put(repo, 'fresh', UNCOUNTED['fresh'])
    # Spool files of a dead writer, and of two group creations without result.
    (path / 'spool' / ('T-' + '5a' * 16)).write_bytes(bytes(2 * PAGE))
    (path / 'spool' / ('G-' + '5b' * 16)).write_bytes(bytes(PAGE))
    (path / 'quarantine' / '00000001-8192-0011223344556677').write_bytes(
        noise(PAGE, 'quarantine'))


def _merge_unsettled(maintainer):
    """Merge 'twin' into 'merged', and leave M, O and X behind."""
    from dedupd.tasks import duplicate_pairs
    from dedupd.tasks import merger
    duplicate_pairs.Duplicates(maintainer, pacing.Pace()).catch_up()
    chosen, = merger._Run(maintainer, pacing.Pace(), None)._rounds()
    merged = merger.merge_image(maintainer, 'twin', chosen.mapping(),
                                pacing.Pace())
    assert merged.exchanged
    spool = pathlib.Path(maintainer.repository.path) / 'spool'
    entry, = spool.glob('M-*')
    os.link(entry, spool / ('X-' + '5c' * 16))


def _account_keeping(maintainer):
    """Account, and restore the spool files of the merge afterwards."""
    spool = pathlib.Path(maintainer.repository.path) / 'spool'
    kept = [p for p in spool.iterdir() if p.name[0] in 'MOX']
    aside = spool.parent / 'aside'
    aside.mkdir()
    for p in kept:
        os.link(p, aside / p.name)
    run(maintainer, 'account')
    for p in kept:
        os.link(aside / p.name, p)
        with contextlib.suppress(FileNotFoundError):
            (aside / p.name).unlink()
    aside.rmdir()
