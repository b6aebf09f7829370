# SPDX-License-Identifier: Apache-2.0

"""The maintainer takes its lock, starts (N2), and makes the catalog."""

import errno
import os
import random
import shutil
import threading

import pytest

from dedupd.tasks import collector
from dedupd.tasks import merger
from dedupd.tasks import scrubber
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import catalog_db
from glance_dedup.maintenance import database
from glance_dedup.maintenance import maintainer_role
from tests.support import maintenance
from tests.support.maintenance import account
from tests.support.maintenance import content
from tests.support.maintenance import maintaining
from tests.support import repositories
from tests.support.repositories import put

pytest_plugins = ['tests.support.maintainer_fixtures']


def collect(maintainer):
    return collector.run_once(maintainer, pacing.Pace())


def some(path, repo, images=4):
    """Store counted images, and delete one that is not uncounted yet."""
    model = {}
    for number in range(images):
        model[f'image-{number}'] = content(number, 77, number + 1)
        put(repo, f'image-{number}', model[f'image-{number}'])
    with maintaining(repo) as maintainer:
        account(maintainer)
    return model


def set_aside(path):
    return [name for name in os.listdir(path / 'quarantine')
            if name.startswith('catalog-')]


def copy_state(path, to):
    """Copy catalog and fence, as a backup does."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir()
    shutil.copytree(path / 'catalog', to / 'catalog')
    shutil.copy(path / 'fence', to / 'fence')


# -- the lock -----------------------------------------------------------------

def test_there_is_one_maintainer(repo, other):
    with maintaining(repo):
        with pytest.raises(exceptions.BusyError, match='another maintainer'):
            maintainer_role.Maintainer(other)
        with pytest.raises(exceptions.BusyError, match='another maintainer'):
            maintainer_role.Maintainer(repo)
    maintainer_role.Maintainer(other).close()


def test_of_another_process(path, repo):
    def try_it():
        with repositories.open_repository(path) as repo:
            try:
                maintainer_role.Maintainer(repo).close()
            except exceptions.BusyError as e:
                return str(e)
    with maintaining(repo):
        assert 'another maintainer' in repositories.in_child(try_it)
    assert repositories.in_child(try_it) is None


def test_close_is_idempotent_and_gives_all_back(path, repo):
    maintainer = maintainer_role.Maintainer(repo)
    maintainer.close()
    maintainer.close()
    with pytest.raises(database.CatalogError):
        maintainer.catalog
    assert repositories.lock_held(path / 'locks' / 'maintainer', 0) is None


def test_failed_start_gives_the_lock_back(path, repo, monkeypatch):
    def fail(*_):
        raise exceptions.StorageError('no')
    with monkeypatch.context() as patch:
        patch.setattr(maintainer_role.Maintainer, '_start', fail)
        with pytest.raises(exceptions.StorageError):
            maintainer_role.Maintainer(repo)
    maintainer_role.Maintainer(repo).close()


# -- the first start ----------------------------------------------------------

def test_first_start_counts_what_is_there(path, repo, other):
    for number in range(3):
        put(other, f'image-{number}', content(number))
    other.delete('image-1')
    told = []
    with maintainer_role.Maintainer(
            repo, lambda *args: told.append(args)) as maintainer:
        assert maintainer.warnings == []
        assert maintainer.unreadable.reasons() == {}
        assert maintenance.counts(
            maintainer.catalog) == maintenance.expected_counts(repo)
        assert told[-1][:2] == (2, 2)
        account(maintainer)
        maintenance.require_counted(maintainer)
    assert set_aside(path) == []
    repositories.require_clean(path)


def test_start_of_nothing(repo):
    with maintaining(repo) as maintainer:
        maintenance.require_counted(maintainer)
        assert account(maintainer).removed == 0


def test_restart_finds_all_as_it_was(path, repo, other):
    some(path, other)
    with maintaining(repo) as maintainer:
        sequence, catalog_id = maintainer.catalog.sequence, (
            maintainer.catalog.id)
    for _ in range(3):
        with maintaining(repo) as maintainer:
            assert maintainer.warnings == []
            assert maintainer.catalog.sequence == sequence
            assert maintainer.catalog.id == catalog_id
            maintenance.require_counted(maintainer)


# -- N2.1: catalogs that must not be used -------------------------------------

def require_rebuilt(path, repo, words):
    """Require that the catalog is set aside with a warning, and rebuilt."""
    with maintaining(repo) as maintainer:
        assert len(maintainer.warnings) == 1
        assert words in maintainer.warnings[0]
        assert maintenance.counts(
            maintainer.catalog) == maintenance.expected_counts(repo)
        account(maintainer)
        maintenance.require_counted(maintainer)
        assert collect(maintainer).refused is None
        maintenance.require_collected(maintainer)
    with maintaining(repo) as maintainer:
        assert maintainer.warnings == []
    repositories.require_clean(path)


def test_n2_1_catalog_is_lost(path, repo, other):
    model = some(path, other)
    other.delete('image-0')
    shutil.rmtree(path / 'catalog')
    require_rebuilt(path, repo, 'does not exist')
    del model['image-0']
    maintenance.require_contents(other, model)


def test_n2_1_fence_is_lost(path, repo, other):
    some(path, other)
    (path / 'fence').unlink()
    require_rebuilt(path, repo, 'fence cannot be read')
    assert len(set_aside(path)) == 1


@pytest.mark.parametrize('garbage', [b'', b'x' * 1024, bytes(1024),
                                     b'GDFENCE\0' + b'\xff' * 1016])
def test_n2_1_fence_is_garbage(path, repo, other, garbage):
    some(path, other)
    (path / 'fence').write_bytes(garbage)
    require_rebuilt(path, repo, 'fence')


def test_n2_1_catalog_is_older_than_the_fence(path, repo, other, tmp_path):
    """A catalog that is older than its fence is rebuilt."""
    model = some(path, other)
    copy_state(path, tmp_path / 'backup')
    put(other, 'new', content(50))
    other.delete('image-0')
    with maintaining(other) as maintainer:
        account(maintainer)
    shutil.rmtree(path / 'catalog')
    shutil.copytree(tmp_path / 'backup' / 'catalog', path / 'catalog')
    require_rebuilt(path, repo, 'older than the fence')
    del model['image-0']
    maintenance.require_contents(other, {**model, 'new': content(50)})


def test_n2_1_catalog_and_fence_are_both_older(path, repo, other, tmp_path):
    """The listing of images/ shows the new image; the deleted one seems lost.

    So nothing is freed until the operator gives it up.
    """
    model = some(path, other)
    copy_state(path, tmp_path / 'backup')
    put(other, 'new', content(50))
    other.delete('image-0')
    with maintaining(other) as maintainer:
        account(maintainer)
    shutil.rmtree(path / 'catalog')
    shutil.copytree(tmp_path / 'backup' / 'catalog', path / 'catalog')
    shutil.copy(tmp_path / 'backup' / 'fence', path / 'fence')
    with maintaining(repo) as maintainer:
        assert 'image-0' in collect(maintainer).refused
        assert 'image-0' in maintainer.unreadable.reasons()
        maintainer.rebuild()
        assert maintainer.unreadable.reasons() == {}
        maintenance.require_counted(maintainer)
    del model['image-0']
    maintenance.require_contents(other, {**model, 'new': content(50)})


def test_n2_1_fence_is_older_than_the_catalog(path, repo, other, tmp_path):
    """The catalog is valid: a crash came between its write and the fence's."""
    model = some(path, other)
    fence = (path / 'fence').read_bytes()
    put(other, 'new', content(50))
    with maintaining(other) as maintainer:
        account(maintainer)
    (path / 'fence').write_bytes(fence)
    with maintaining(repo) as maintainer:
        assert maintainer.warnings == []
        maintenance.require_counted(maintainer)
        # N2.2
        assert maintainer.engine.read_fence()[16:] == (
            maintainer.catalog.sequence.to_bytes(8, 'little'))
    maintenance.require_contents(other, {**model, 'new': content(50)})


def test_n2_1_fence_of_another_catalog(path, repo, other, tmp_path):
    some(path, other)
    copy_state(path, tmp_path / 'backup')
    with maintaining(other) as maintainer:
        maintainer.rebuild()
    shutil.rmtree(path / 'catalog')
    shutil.copytree(tmp_path / 'backup' / 'catalog', path / 'catalog')
    require_rebuilt(path, repo, 'another catalog')


def test_n2_1_catalog_was_not_finished(path, repo, other):
    some(path, other)
    with maintaining(other) as maintainer:
        maintainer.catalog.write(maintainer.catalog.batch(), valid=False)
    require_rebuilt(path, repo, 'did not end')


def test_new_catalog_begins_above_the_fence(path, repo, other):
    """A new catalog's sequence exceeds the old one's.

    So if a record of the fence is damaged later, no old one looks newer.
    """
    some(path, other)
    with maintaining(other) as maintainer:
        old = maintainer.catalog.sequence
        assert old > 1
    shutil.rmtree(path / 'catalog')
    with maintaining(repo) as maintainer:
        assert maintainer.catalog.sequence > old


def test_n2_1_catalog_of_another_repository(path, repo, other, tmp_path):
    some(path, other)
    stranger = repositories.create(tmp_path / 'stranger')
    with repositories.open_repository(stranger) as strange:
        maintainer_role.Maintainer(strange).close()
    shutil.rmtree(path / 'catalog')
    shutil.copytree(stranger / 'catalog', path / 'catalog')
    require_rebuilt(path, repo, 'belongs to repository')


@pytest.mark.parametrize('name', ['CURRENT', 'MANIFEST-*', '*.log'])
def test_n2_1_catalog_is_corrupt(path, repo, other, name):
    some(path, other)
    for file in (path / 'catalog').glob(name):
        file.write_bytes(b'rubbish' * 100)
    require_rebuilt(path, repo, 'catalog')
    assert len(set_aside(path)) == 1


def test_task_meets_a_damaged_table(path, repo, other):
    """A damaged table has the catalog rebuilt, and the warning names it."""
    some(path, other)
    with maintaining(repo):     # makes a table of the log
        pass
    with maintaining(repo):
        pass
    # The first table does not hold the catalog's own metadata.
    table = min((path / 'catalog').glob('*.ldb'))
    data = bytearray(table.read_bytes())
    data[20] ^= 1
    data[30] ^= 1
    table.write_bytes(data)
    with maintaining(repo) as maintainer:
        result = collector.run_once(maintainer, pacing.Pace())
        assert result.refused is None and not result.failed
        maintenance.require_collected(maintainer)
        warning, = [w for w in maintainer.warnings if 'was rebuilt' in w]
        assert warning == (
            f'the catalog {path}/catalog: cannot read it: Corruption: block '
            'checksum mismatch; it was set aside, and the catalog was '
            'rebuilt')
    repositories.require_clean(path)


@pytest.mark.parametrize('make', ['file', 'empty', 'link', 'dangling'])
def test_n2_1_something_else_is_in_its_place(path, repo, other, make,
                                             tmp_path):
    some(path, other)
    shutil.rmtree(path / 'catalog')
    precious = tmp_path / 'precious'
    precious.mkdir()
    (precious / 'file').write_bytes(b'x')
    if make == 'file':
        (path / 'catalog').write_bytes(b'x')
    elif make == 'empty':
        (path / 'catalog').mkdir()
    else:
        (path / 'catalog').symlink_to(
            precious if make == 'link' else 'nowhere')
    require_rebuilt(path, repo, 'catalog')
    # The second time, the maintainer does not remove a link's target.
    (path / 'fence').unlink()
    require_rebuilt(path, repo, 'fence')
    assert (precious / 'file').exists()
    assert len(set_aside(path)) == 1


def test_history_survives_a_rebuild(path, repo):
    with maintaining(repo) as maintainer:
        maintainer.catalog.sample(1000, {'images': 1})
        maintainer.catalog.set_scrub_state({'slot': 5})
        maintainer.rebuild()
        assert maintainer.catalog.history() == [{'time': 1000, 'images': 1}]
        assert maintainer.catalog.scrub_state() == {'slot': 5}
    assert set_aside(path) == []
    (path / 'fence').unlink()
    with maintaining(repo) as maintainer:
        assert maintainer.catalog.history() == [{'time': 1000, 'images': 1}]


# -- N2.2: the fence at the start ---------------------------------------------

def test_n2_2_fence_is_written_though_it_looks_equal(
        path, repo, other, monkeypatch):
    some(path, other)
    with monkeypatch.context() as patch:
        log = maintenance.Log()
        engine = maintainer_role._engine.Maintenance

        class Module:
            @staticmethod
            def Maintenance(handle):
                return maintenance.Watched(engine(handle), 'engine', log)
        patch.setattr(maintainer_role, '_engine', Module)
        with maintainer_role.Maintainer(repo) as maintainer:
            assert len(log.where('write_fence')) == 1
            assert log.where('read_fence')[0] < log.where('write_fence')[0]
            assert maintainer.warnings == []


# -- N2.3, N2.4: the rebuild --------------------------------------------------

def watched_rebuild(maintainer, hook, monkeypatch):
    """Rebuild, with the new catalog watched as well."""
    real = catalog_db.Catalog

    def make(*arguments, **keywords):
        hook('catalog.create', arguments, True)
        return maintenance.Watched(real(*arguments, **keywords), 'catalog',
                                   hook)
    with monkeypatch.context() as patch:
        patch.setattr(catalog_db, 'Catalog', make)
        maintenance.watch(maintainer, hook)
        maintainer.rebuild(why='the test wants it')


def test_n2_3_order_of_the_rebuild(path, repo, other, monkeypatch):
    some(path, other)
    log = maintenance.Log()
    valid = []

    def hook(name, arguments, before):
        log(name, arguments, before)
        if name.startswith('engine.') and not before:
            catalog = maintainer._catalog
            valid.append((name, catalog is not None and catalog.valid))
    with maintaining(repo) as maintainer:
        watched_rebuild(maintainer, hook, monkeypatch)
        counted = log.where('catalog.count')
        images = log.where('sync images')
        spool = log.where('sync spool')
        writes = log.where('catalog.write')
        fence = log.where('write_fence')
        assert len(counted) == 4
        assert counted[-1] < images[0] < writes[-1] < fence[0]
        assert counted[-1] < spool[0] < writes[-1]
        # The catalog is valid only with the final batch.
        for name, is_valid in valid:
            if name not in ('engine.read_fence', 'engine.lock'):
                assert is_valid == (name == 'engine.write_fence'), name


@pytest.mark.parametrize('step', range(1, 60, 2))
def test_n2_4_killed_rebuild_begins_anew(path, repo, other, step,
                                         monkeypatch):
    model = some(path, other)
    maintainer = maintainer_role.Maintainer(repo)
    try:
        watched_rebuild(maintainer, maintenance.Kill(step), monkeypatch)
    except maintenance.Killed:
        pass
    maintenance.kill(maintainer)
    with maintaining(other) as maintainer:
        account(maintainer)
        maintenance.require_counted(maintainer)
        collect(maintainer)
        maintenance.require_collected(maintainer)
    maintenance.require_contents(other, model)
    assert len(set_aside(path)) <= 1


def test_task_begins_a_failed_rebuild_anew(path, repo, other, monkeypatch):
    some(path, other)
    with maintaining(repo) as maintainer:
        def fail(name, arguments, before):
            if name == 'catalog.count':
                raise exceptions.StorageError('no')
        with pytest.raises(exceptions.StorageError):
            watched_rebuild(maintainer, fail, monkeypatch)
        maintenance.unwatch(maintainer)
        account(maintainer)
        maintenance.require_counted(maintainer)


def test_rebuild_while_others_go_on(path, repo, other, monkeypatch):
    """Images may come and go at any step of a rebuild."""
    model = some(path, other)
    rng = random.Random(1)
    steps = [0]

    def hook(name, arguments, before):
        steps[0] += 1
        if rng.random() < 0.3:
            if model and rng.random() < 0.5:
                image_id = rng.choice(sorted(model))
                other.delete(image_id)
                del model[image_id]
            else:
                image_id = f'new-{steps[0]}'
                model[image_id] = content(rng.randrange(9), rng.randrange(9))
                put(other, image_id, model[image_id])
    with maintaining(repo) as maintainer:
        for _ in range(8):
            watched_rebuild(maintainer, hook, monkeypatch)
            maintenance.unwatch(maintainer)
            account(maintainer)
            maintenance.require_counted(maintainer)
        collect(maintainer)
        maintenance.require_collected(maintainer)
    maintenance.require_contents(other, model)


# -- reconciling --------------------------------------------------------------

def test_what_went_on_without_a_maintainer(path, repo, other):
    model = some(path, other)
    put(other, 'new', content(50))
    put(other, 'newer', content(51))
    other.delete('newer')
    other.delete('image-2')
    put(other, 'image-2', content(52))
    with maintaining(repo) as maintainer:
        assert maintainer.warnings == []
        account(maintainer)
        maintenance.require_counted(maintainer)
    maintenance.require_contents(
        other, {**model, 'image-2': content(52), 'new': content(50)})


def test_image_that_nothing_announces_is_counted(path, repo, other):
    """An image without a spool file is counted, with a warning."""
    some(path, other)
    put(other, 'new', content(50))
    for name in repositories.spool(path):
        (path / 'spool' / name).unlink()
    with maintaining(repo) as maintainer:
        collect(maintainer)
        assert 'new' in maintainer.warnings[0]
        maintenance.require_collected(maintainer)
    with maintaining(repo) as maintainer:
        collect(maintainer)
        assert maintainer.warnings == []
    assert repositories.read_all(other, 'new') == content(50)


def test_nothing_is_freed_for_an_image_that_vanished(path, repo, other):
    model = some(path, other)
    (path / 'images' / 'image-1').rename(path / 'aside')
    other.delete('image-0')
    for _ in range(2):
        with maintaining(repo) as maintainer:
            result = collector.run_once(maintainer, pacing.Pace())
            assert 'image-1' in result.refused
            assert not result.freed_blocks
    # The image is back, so a collection is all that is needed.
    (path / 'aside').rename(path / 'images' / 'image-1')
    del model['image-0']
    with maintaining(repo) as maintainer:
        assert collector.run_once(maintainer, pacing.Pace()).refused is None
        maintenance.require_collected(maintainer)
    maintenance.require_contents(other, model)
    # The image is given up.
    (path / 'images' / 'image-1').unlink()
    del model['image-1']
    with maintaining(repo) as maintainer:
        assert 'image-1' in collect(maintainer).refused
        maintainer.rebuild()
        assert collector.run_once(maintainer, pacing.Pace()).refused is None
        maintenance.require_collected(maintainer)
    maintenance.require_contents(other, model)


def test_image_that_vanishes_under_a_maintainer(path, repo, other):
    some(path, other)
    with maintaining(repo) as maintainer:
        (path / 'images' / 'image-1').rename(path / 'aside')
        assert 'image-1' in collector.plan(maintainer).refused
        assert 'image-1' in collector.run_once(
            maintainer, pacing.Pace()).refused
        (path / 'aside').rename(path / 'images' / 'image-1')
        assert collector.run_once(maintainer, pacing.Pace()).refused is None


@pytest.mark.parametrize('kind', ['T', 'D'])
def test_entry_whose_image_is_another_file(path, repo, other, kind):
    """A spool file is accounted though its image is another file (N4.1).

    A copy of a repository may have lost the hard links.
    """
    model = some(path, other)
    put(other, 'new', content(50))
    model['new'] = content(50)
    if kind == 'D':
        with maintaining(repo) as maintainer:
            account(maintainer)
        # A deletion that did not get so far as to unlink the image.
        os.link(path / 'images' / 'new', path / 'spool' / ('D-' + 32 * '7'))
    shutil.copy(path / 'images' / 'new', path / 'aside')
    (path / 'aside').rename(path / 'images' / 'new')
    with maintaining(repo) as maintainer:
        collector.run_once(maintainer, pacing.Pace())
        maintenance.require_collected(maintainer)
    maintenance.require_contents(other, model)


def test_entry_that_is_lost_under_a_maintainer(path, repo, other):
    """An image whose spool file is lost is counted before a collection."""
    model = some(path, other)
    with maintaining(repo) as maintainer:
        put(other, 'new', content(50))
        for name in repositories.spool(path):
            (path / 'spool' / name).unlink()
        collector.run_once(maintainer, pacing.Pace())
        maintenance.require_collected(maintainer)
    maintenance.require_contents(other, {**model, 'new': content(50)})


def test_entry_explains_an_image_that_is_gone(path, repo, other):
    some(path, other)
    other.delete('image-1')
    with maintaining(repo) as maintainer:
        assert maintainer.warnings == []
        assert account(maintainer).uncounted == 1
        maintenance.require_counted(maintainer)


def test_reconciling_while_others_go_on(path, repo, other, monkeypatch):
    model = some(path, other, 12)
    rng = random.Random(5)
    engine = maintainer_role._engine.Maintenance
    number = [0]

    def hook(name, arguments, before):
        number[0] += 1
        if rng.random() < 0.2 and name != 'engine.lock':
            if model and rng.random() < 0.6:
                image_id = rng.choice(sorted(model))
                other.delete(image_id)
                del model[image_id]
            else:
                image_id = f'image-{rng.randrange(12)}'
                if image_id not in model:
                    model[image_id] = content(number[0])
                    put(other, image_id, model[image_id])

    class Module:
        @staticmethod
        def Maintenance(handle):
            return maintenance.Watched(engine(handle), 'engine', hook)
    for _ in range(15):
        with monkeypatch.context() as patch:
            patch.setattr(maintainer_role, '_engine', Module)
            maintainer = maintainer_role.Maintainer(repo)
        with maintainer:
            maintainer.reconcile()
            maintenance.unwatch(maintainer)
            assert maintainer.warnings == []
            account(maintainer)
            maintenance.require_counted(maintainer)
    maintenance.require_contents(other, model)


def watch_opening(maintainer):
    """Return the list of images whose recipes are opened from now on."""
    opened = []
    open_recipe = maintainer.engine.open_recipe

    class Engine:
        def __getattr__(self, name):
            return getattr(engine, name)

        @staticmethod
        def open_recipe(image_id):
            opened.append(image_id)
            return open_recipe(image_id)
    engine = maintainer.engine
    maintenance.set_engine(maintainer, Engine())
    return opened


def test_start_opens_no_recipe(path, repo, other, monkeypatch):
    some(path, other)
    log = maintenance.Log()
    engine = maintainer_role._engine.Maintenance

    class Module:
        @staticmethod
        def Maintenance(handle):
            return maintenance.Watched(engine(handle), 'engine', log)
    monkeypatch.setattr(maintainer_role, '_engine', Module)
    maintainer_role.Maintainer(repo).close()
    assert log.where('read_fence') and not log.where('open_recipe')


def forget_files(maintainer):
    """Remove the files' records, which older programs did not write."""
    batch = maintainer.catalog.batch()
    for image_id, _ in maintainer.catalog.seen():
        maintainer.catalog.set_seen(batch, image_id, None)
    assert len(batch)
    maintainer.catalog.write(batch)


def test_only_what_changed_is_opened_to_reconcile(path, repo, other):
    model = some(path, other)
    with maintaining(repo) as maintainer:
        opened = watch_opening(maintainer)
        maintainer.reconcile()
        assert opened == []     # the rebuild noted the files
        forget_files(maintainer)
        maintainer.reconcile()
        assert opened == sorted(model)
        maintainer.reconcile()
        assert opened == sorted(model)
        put(other, 'new', content(50))
        other.delete('image-1')
        account(maintainer)
    with maintaining(repo) as maintainer:
        opened = watch_opening(maintainer)
        maintainer.reconcile()
        assert opened == []     # accounting noted that of the new image
        assert sorted(key for key, _ in maintainer.catalog.seen()) == [
            b'image-0', b'image-2', b'image-3', b'new']


@pytest.mark.parametrize('same', ['inode', 'time', 'neither'])
def test_another_recipe_in_a_known_place(path, repo, other, same):
    """A collection is refused if the records of a replaced image are lost."""
    model = some(path, other)
    image = path / 'images' / 'image-1'
    with maintaining(repo) as maintainer:
        maintainer.reconcile()
        seen = dict(maintainer.catalog.seen())[b'image-1']
        other.delete('image-1')
        put(other, 'image-1', content(60))
        model['image-1'] = content(60)
        for entry in (path / 'spool').iterdir():
            entry.unlink()
        if same == 'inode':     # since it was free again
            batch = maintainer.catalog.batch()
            maintainer.catalog.set_seen(
                batch, b'image-1', (image.stat().st_ino, *seen[1:]))
            maintainer.catalog.write(batch)
        elif same == 'time':
            os.utime(image, ns=(0, seen[1]))
        # The earlier upload is counted, though its recipe cannot be found.
        assert 'image-1' in collect(maintainer).refused
        assert len(list(maintainer.catalog.txids())) == 5
        maintainer.rebuild()
        assert collect(maintainer).refused is None
        maintenance.require_collected(maintainer)
    maintenance.require_contents(other, model)


def test_where_recipes_were_seen_needs_no_room(path, repo, other,
                                               monkeypatch):
    """A lack of space for an optimization does not prevent collections."""
    some(path, other)
    with maintaining(repo) as maintainer:
        write = maintainer.catalog.write

        def no_room(batch, **options):
            if any(key.startswith(b'i') for key, _ in batch.items()):
                raise exceptions.NoSpaceError('no room')
            write(batch, **options)
        forget_files(maintainer)
        monkeypatch.setattr(maintainer.catalog, 'write', no_room)
        assert collect(maintainer).refused is None
        maintenance.require_collected(maintainer)


def test_strange_files_in_images(path, repo, other):
    some(path, other)
    images = repo.images()
    (path / 'images' / 'x.bak').write_bytes(b'x')
    (path / 'images' / '.nfs0123456789').write_bytes(b'')
    (path / 'images' / os.fsdecode(b'\xff\xfe')).write_bytes(b'x')
    with maintaining(repo) as maintainer:
        collect(maintainer)
        assert len(maintainer.warnings) == 3
        assert ['x.bak' in w for w in maintainer.warnings].count(True) == 1
        assert maintainer.unreadable.reasons() == {}
        maintainer.rebuild()
        assert len(maintainer.warnings) == 3
        # Nothing treats these files as images.
        assert repo.images() == images
        merger.run_once(maintainer, pacing.Pace())
        result = scrubber.run_once(maintainer, pacing.Pace())
        assert result.complete and result.unreadable == {}


# -- recipes that cannot be read ----------------------------------------------

def ruin(file, at):
    with open(file, 'r+b') as f:
        f.seek(at)
        f.write(b'\xff' * 64)


@pytest.mark.parametrize('at', [16, 4096 + 16])
def test_rebuild_meets_a_damaged_recipe(path, repo, other, at):
    some(path, other)
    put(other, 'bad', content(50, 77))
    ruin(path / 'images' / 'bad', at)
    (path / 'fence').unlink()
    for _ in range(2):
        with maintaining(repo) as maintainer:
            result = collect(maintainer)
            assert list(maintainer.unreadable.reasons()) == ['bad']
            assert 'bad' in result.refused and not result.freed_blocks
    live = maintenance.live_slots(path)
    with maintaining(repo) as maintainer:
        # `image mark-lost` does the same.
        (path / 'images' / 'bad').unlink()
        maintainer.rebuild()
        assert maintainer.unreadable.reasons() == {}
        assert collect(maintainer).refused is None
        maintenance.require_collected(maintainer)
    assert maintenance.live_slots(path) < live


@pytest.mark.parametrize('at', [16, 4096 + 16])
def test_damaged_after_it_was_counted(path, repo, other, at):
    """An image damaged after it was counted keeps its blocks.

    Nothing else has to wait.
    """
    model = some(path, other)
    before = set(maintenance.blocks_of(other, 'image-1'))
    ruin(path / 'images' / 'image-1', at)
    other.delete('image-0')
    for _ in range(2):
        with maintaining(repo) as maintainer:
            assert maintainer.warnings == []
            assert maintainer.unreadable.reasons() == {}
            assert collect(maintainer).refused is None
    assert before <= maintenance.live_slots(path)
    for image_id in ('image-2', 'image-3'):
        assert repositories.read_all(other, image_id) == model[image_id]


def test_image_that_cannot_be_opened(path, repo, other):
    some(path, other)
    (path / 'images' / 'strange').symlink_to(path / 'key')
    with maintaining(repo) as maintainer:
        assert collect(maintainer).refused is not None
        assert list(maintainer.unreadable.reasons()) == ['strange']
        (path / 'images' / 'strange').unlink()
        assert collect(maintainer).refused is None


# -- room ---------------------------------------------------------------------

def test_reserve(path, repo):
    with maintaining(repo) as maintainer:
        reserve = path / 'catalog-reserve'
        size = reserve.stat().st_size
        assert reserve.stat().st_blocks * 512 >= size > 0
        reserve.unlink()
        maintainer.reserve.keep()
        assert reserve.stat().st_size == size


def test_the_reserve_follows_the_catalog(path, repo, monkeypatch):
    with maintaining(repo) as maintainer:
        reserve = path / 'catalog-reserve'

        def keep(catalog):
            with open(path / 'catalog' / 'more', 'wb') as f:
                f.truncate(catalog)
            maintainer.reserve.keep()
            status = reserve.stat()
            assert status.st_blocks * 512 >= status.st_size
            return status.st_size >> 20, status.st_ino
        least, inode = keep(0)
        assert least == 4
        assert keep(3 << 20) == (16, inode)
        assert keep(1 << 40) == (32, inode)
        # The reserve does not shrink by only one step.
        assert keep(3 << 20) == (32, inode)
        assert keep(1 << 20) == (8, inode)
        # A larger one cannot be had: the smaller one stays.

        def refuse(fd, offset, size):
            os.truncate(fd, size)
            raise OSError(errno.ENOSPC, 'no room')
        monkeypatch.setattr(os, 'posix_fallocate', refuse)
        assert keep(3 << 20) == (8, inode)
        reserve.unlink()
        with pytest.raises(FileNotFoundError):
            keep(0)
        # The next opening must find only the reserve's own files.
        (path / 'catalog' / 'more').unlink()


def test_an_older_programs_reserve_becomes_smaller(path, repo):
    reserve = path / 'catalog-reserve'
    reserve.write_bytes(bytes(32 << 20))
    reserve.chmod(0o600)
    with maintaining(repo):
        assert reserve.stat().st_size == 4 << 20


def test_start_on_a_full_disk(tmp_path):
    with repositories.small_disk(tmp_path / 'disk', '16m') as disk:
        path = maintenance.create(disk)
        with repositories.open_repository(
                path, codec='none', filter_dir=str(tmp_path)) as repo:
            model = some(path, repo)
            filling = repositories.fill_disk(disk)
            with maintaining(repo) as maintainer:
                assert maintainer.warnings == []
                maintenance.require_counted(maintainer)
            with maintaining(repo) as maintainer:
                maintenance.require_counted(maintainer)
            repositories.fill_disk(disk)
            if os.path.lexists(path / 'catalog-reserve'):
                (path / 'catalog-reserve').unlink()
                repositories.fill_disk(disk / 'repository')
            with pytest.raises(exceptions.NoSpaceError):
                maintainer_role.Maintainer(repo)
            filling.unlink()
            with maintaining(repo) as maintainer:
                assert maintainer.warnings == []
                maintenance.require_counted(maintainer)
            maintenance.require_contents(repo, model)


# -- the rest -----------------------------------------------------------------

def test_guard_does_it_once_more(path, repo, other):
    some(path, other)
    with maintaining(repo) as maintainer:
        done = []

        def work():
            done.append(maintainer.catalog.id)
            if len(done) == 1:
                raise database.CatalogError('it is bad')
            return 5
        assert maintainer.guard(work) == 5
        assert done[0] != done[1]
        assert 'it is bad' in maintainer.warnings[0]

        def bad():
            raise database.CatalogError('always')
        with pytest.raises(database.CatalogError):
            maintainer.guard(bad)


def test_statistics_from_other_threads(path, repo, other):
    """Other threads can read statistics during a rebuild and while closing."""
    some(path, other)
    maintainer = maintainer_role.Maintainer(repo)
    done = threading.Event()
    errors = []

    def read():
        while not done.is_set():
            try:
                maintainer.catalog.statistics()
                maintainer.unreadable.reasons()
            except (database.CatalogError, exceptions.ClosedError):
                pass
            except Exception as e:
                errors.append(e)
    thread = threading.Thread(target=read)
    thread.start()
    try:
        for _ in range(5):
            maintainer.rebuild()
        maintainer.close()
    finally:
        done.set()
        thread.join()
    assert errors == []


@pytest.mark.parametrize('seed', range(4))
def test_killed_maintainer(path, repo, other, seed):
    """A maintainer is killed at any time; the next one collects all."""
    model = maintenance.kill_at_random(path, other, collect, seed)
    with maintaining(repo) as maintainer:
        # The first collection may evacuate blocks into a group with a killed
        # process's tail, which is published then. The second one frees unused
        # blocks of it.
        for _ in range(2):
            assert collect(maintainer).busy == 0
        maintenance.require_collected(maintainer)
    maintenance.require_contents(other, model)
    repositories.require_clean(path)
