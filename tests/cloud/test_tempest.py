# SPDX-License-Identifier: Apache-2.0
"""tempest's tests of Glance, and those of our plugin.

``tempest/file.txt`` and ``tempest/dedup.txt`` have the result of each test of
tempest.api.image with two file stores in Glance, and with two of ours, and the
rest unchanged. A run compares our stores with the lists; with ``--long`` it
tries the file stores, too. With GLANCE_DEDUP_RECORD set such a run writes new
lists.

Not all tests can run in one configuration, so those that the first one skips
are tried in a second.  Those of disk formats need Nova, and have a test of
their own.
"""

import contextlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import pytest
import yaml

from tests.cloud import local_cloud
from tests.cloud import tempest_run

pytestmark = [pytest.mark.slow, pytest.mark.needs('cloud', 'tempest')]

HERE = pathlib.Path(__file__).parent
LISTS = HERE / 'tempest'
SUITE = r'^tempest\.api\.image'
FORMATS = r'^tempest\.api\.image\.v2\.test_images_formats\.ImagesFormatTest'
PLUGIN = r'^glance_dedup_tempest_plugin'
PLUGIN_PLACE = HERE.parent / 'tempest'

#: Tests that are skipped with both stores, and the reasons.
SKIPPED = {
    'tempest.api.image.v2.admin.test_image_task.ImageTaskCreate.'
    'test_image_tasks_create': 'Skipped until bug',
    'tempest.api.image.v2.test_images_dependency.ImageDependencyTests':
        'Nova is not available',
    # See test_formats.
    'tempest.api.image.v2.test_images_formats.ImagesFormatTest':
        'Nova is not available',
}

#: Tests that may be skipped or pass, with either store, and the reasons; or
#: that fail with these words.
VARIES = {
    'tempest.api.image.v2.test_images.HashCalculationRemoteDeletionTest.'
    'test_hash_calculation_cancelled':
        'it wants an address of the machine that is not of the loopback '
        'interface, and is skipped where there is none. It also wants the '
        "name of the hash as soon as the image is active, which Glance's own "
        'task notes a moment later',
}
#: These tests run after all others, when the images of those are deleted. They
#: count the images that are shared with their user's project. The other worker
#: may have another user of this project, with whom its tests share some.
ALONE = '.ListSharedImagesTest.'
#: Message of such a test that was too early.
TOO_EARLY = re.compile(r"MismatchError: 'sha512' != None")


def stores(kind, directory):
    """Return two stores of a type, with weights, and one that only reads."""
    option = {'dedup': 'dedup_store_datadir',
              'file': 'filesystem_store_datadir'}[kind]
    return {
        **{name: {'type': kind, 'weight': weight,
                  option: directory / 'stores' / f'{kind}-{name}'}
           for name, weight in (('first', 2), ('second', 1))},
        'web': {'type': 'http'},
    }


def glance_options(cloud, images, strict):
    """Return the options of Glance that the tests need.

    :param strict: as most tests, and most clouds, have it; otherwise those
        tests run that set locations, that take any bytes for an image of any
        format, and that need no hashes
    """
    ports = [images.port, *(cloud.services[name].port
                            for name in ('glance', 'glance-remote'))]
    return {
        'DEFAULT': {
            'enabled_import_methods':
                '[glance-direct,web-download,glance-download,copy-image]',
            'show_multiple_locations': not strict,
            'image_cache_driver': 'centralized_db',
            'do_secure_hash': strict,
        },
        'image_format': {'require_image_format_match': strict},
        'paste_deploy': {'flavor': 'keystone+cachemanagement'},
        # By default nothing may come from the loopback interface, and only
        # from ports 80 and 443.
        'import_filtering_opts': {
            'allowed_hosts': '[127.0.0.1]',
            'allowed_ports': '[' + ','.join(map(str, ports)) + ']',
        },
    }


class Suite:
    """A cloud with two Glances that have dedup stores, and tempest for it."""

    def __init__(self, cloud, images, directory):
        self.cloud = cloud
        self.images = images
        self._now = 'dedup', True
        self.tempest = tempest_run.Tempest(
            cloud, directory, self.tempest_options(strict=True))
        self.ids = self.tempest.list(SUITE)

    def tempest_options(self, strict):
        return {
            'image': {
                'http_image': f'{self.images.url}/raw',
                'http_qcow2_image': f'{self.images.url}/qcow2',
                'image_caching_enabled': True,
                'alternate_image_endpoint': 'image_remote',
            },
            'image-feature-enabled': {
                'manage_locations': not strict,
                'http_store_enabled': True,
                'store_weight_enabled': True,
                'do_secure_hash': strict,
                'image_format_enforcement': strict,
            },
        }

    def configure(self, kind, strict):
        """Configure both Glances with a type of stores; delete all images."""
        if self._now == (kind, strict):
            return
        self._now = kind, strict
        self._delete_images()
        remote = self.cloud.services['glance-remote']
        remote.stop()
        self.cloud.glance.reconfigure(
            stores(kind, self.cloud.directory),
            options=glance_options(self.cloud, self.images, strict))
        remote.start()
        self.tempest.configure(self.tempest_options(strict))

    def _delete_images(self):
        """Delete the images that tests leave."""
        with contextlib.closing(self.cloud.connect()) as admin:
            for image in admin.image.images():
                if image.is_protected:
                    admin.image.update_image(image, is_protected=False)
                admin.image.delete_image(image)

    def run(self, kind):
        """Run all tests with stores of a type; return the results by name."""
        self.configure(kind, strict=True)
        results = self._run(self.ids)
        again = [one for one in self.ids if results[
            tempest_run.short(one)].outcome == tempest_run.SKIPPED]
        self.configure(kind, strict=False)
        results.update(self._run(again))
        return results

    def _run(self, ids):
        alone = [one for one in ids if ALONE in one]
        results = self.tempest.run([one for one in ids if one not in alone])
        if alone:
            self._delete_images()
            results.update(self.tempest.run(alone))
        return results


@pytest.fixture(scope='module')
def suite():
    with tempfile.TemporaryDirectory(prefix='tempest-') as directory:
        place = pathlib.Path(directory)
        cloud = local_cloud.Cloud(
            place / 'cloud', stores('dedup', place / 'cloud'))
        cloud.services['glance-remote'] = tempest_run.RemoteGlance(cloud)
        with cloud, tempest_run.Images(cloud, place / 'images') as images:
            cloud.configure_glance(
                options=glance_options(cloud, images, strict=True))
            cloud.up(['keystone', 'glance-remote'])
            glance = cloud.glance
            glance.run([
                f'{glance.prefix}/bin/glance-manage', '--config-file',
                glance.etc / 'glance-api.conf', 'db', 'load_metadefs',
                '--path', f'{glance.prefix}/etc/glance/metadefs'])
            yield Suite(cloud, images, place / 'tempest')


def read_list(name):
    lines = (LISTS / f'{name}.txt').read_text().splitlines()
    return {test: outcome for outcome, test in
            (line.split() for line in lines if not line.startswith('#'))}


def write_list(name, results):
    LISTS.mkdir(exist_ok=True)
    (LISTS / f'{name}.txt').write_text(
        f'# How the tests of tempest.api.image end with stores of the type '
        f'{name}.\n' + ''.join(
            f'{result.outcome:<8} {test}\n'
            for test, result in sorted(results.items())))


def check(name, results):
    """Compare results with the stored list."""
    kept = read_list(name)
    problems = []
    for test in sorted({*kept, *results}):
        result = results.get(test, tempest_run.Result('missing', ''))
        wanted = {kept.get(test, 'unknown')}
        if test in VARIES:
            wanted |= {tempest_run.OK, tempest_run.SKIPPED}
            if TOO_EARLY.search(result.words):
                continue
        if result.outcome not in wanted:
            problems.append(
                f'{test}: {result.outcome}, but {kept.get(test, "missing")} '
                f'in {name}.txt\n{result.words}')
    assert not problems, '\n'.join(problems)


PRINTED = """\
{0} a.test_b.C.test_one [0.5s] ... ok
{1} setUpClass (a.test_b.D) ... SKIPPED: not today: really
{1} a.test_b.C.test_two [0.1s] ... FAILED

Captured traceback:
    KeyError: 'x'
{0} tearDownClass (a.test_b.C) [0.0s] ... FAILED

======
Totals
======
 - Passed: 1
 - Skipped: 1
 - Failed: 2
"""


def test_reading():
    """The reader finds all results in tempest's output, or fails."""
    names = ['a.test_b.C.test_one', 'a.test_b.C.test_two',
             'a.test_b.D.test_one', 'a.test_b.E.test_one']
    results = tempest_run.read(PRINTED, names)
    assert {name: result.outcome for name, result in results.items()} == {
        'a.test_b.C.test_one': 'ok', 'a.test_b.C.test_two': 'failed',
        'a.test_b.C.tearDownClass': 'failed',
        'a.test_b.D.test_one': 'skipped', 'a.test_b.E.test_one': 'missing'}
    assert results['a.test_b.D.test_one'].words == 'not today: really'
    assert results['a.test_b.C.test_two'].words.endswith("KeyError: 'x'")
    for text in (PRINTED.replace('Passed: 1', 'Passed: 2'),
                 PRINTED.partition('======')[0]):
        with pytest.raises(AssertionError, match='to its end'):
            tempest_run.read(text, names)


def test_lists():
    """The same tests pass with our stores; skipped ones have a reason."""
    file, dedup = read_list('file'), read_list('dedup')
    assert file == dedup
    assert len(file) > 100
    for test, outcome in file.items():
        known = any(test.startswith(one) for one in SKIPPED)
        assert outcome == (tempest_run.SKIPPED if known else tempest_run.OK), (
            f'{test}: {outcome}')


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_image_api(suite):
    """Every test ends as in the list; each skipped one has its reason."""
    results = suite.run('dedup')
    if os.environ.get('GLANCE_DEDUP_RECORD'):
        write_list('dedup', results)
    check('dedup', results)
    for test, result in results.items():
        if result.outcome == tempest_run.SKIPPED and test not in VARIES:
            reason = next(words for one, words in SKIPPED.items()
                          if test.startswith(one))
            assert reason in result.words, test


@pytest.mark.long
def test_image_api_with_file_stores(suite):
    """The results with file stores match their list."""
    results = suite.run('file')
    if os.environ.get('GLANCE_DEDUP_RECORD'):
        write_list('file', results)
    check('file', results)


def test_options_of_the_plugin_are_documented():
    options = re.findall(r"cfg\.\w+Opt\('(\w+)'", (
        PLUGIN_PLACE / 'glance_dedup_tempest_plugin' / 'config.py'
    ).read_text())
    assert len(options) == 7
    documented = re.findall(
        r'^``(\w+)`` {2}', (PLUGIN_PLACE / 'README.rst').read_text(),
        re.MULTILINE)
    assert sorted(options) == sorted(documented)


def plugin_options(cloud, images):
    """Return the options of tempest.conf for our scenarios."""
    options = tempest_run.options_of(cloud)
    for what in ('stop', 'start'):
        options['dedup'][f'daemon_{what}_command'] = images.command(
            what, 'dedupd')
    return options


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_plugin(cloud):
    """Our scenarios pass, and none is skipped."""
    with tempfile.TemporaryDirectory(prefix='tempest-') as directory:
        place = pathlib.Path(directory)
        with tempest_run.Images(cloud, place / 'images') as images:
            tempest = tempest_run.Tempest(
                cloud, place / 'tempest', plugin_options(cloud, images))
            results = tempest.run(tempest.list(PLUGIN))
    assert len(results) >= 10
    problems = [f'{name}: {result.outcome}\n{result.words}'
                for name, result in results.items()
                if result.outcome != tempest_run.OK]
    assert not problems, '\n'.join(problems)


#: Images for tempest's tests of formats: qemu-img's format and options, and
#: whether Glance and Nova should accept them.
IMAGES = {
    'raw': ('raw', (), True),
    'qcow2': ('qcow2', (), True),
    'qcow2-old': ('qcow2', ('-o', 'compat=0.10'), True),
    'vdi': ('vdi', (), True),
    'vhdx': ('vhdx', (), True),
    'vmdk': ('vmdk', (), True),
    'vmdk-stream': ('vmdk', ('-o', 'subformat=streamOptimized'), True),
    'vmdk-flat': ('vmdk', ('-o', 'subformat=monolithicFlat'), False),
    'qcow2-backed': ('qcow2', ('-b', 'qcow2', '-F', 'qcow2'), False),
    'qcow2-elsewhere': (
        'qcow2', ('-o', 'data_file=elsewhere,data_file_raw=on'), False),
}


def make_manifest(directory):
    """Make the images, and their manifest for tempest; return its path."""
    directory.mkdir()
    for name, (image_format, options, _usable) in IMAGES.items():
        subprocess.run(
            ['qemu-img', 'create', '-q', '-f', image_format, *options, name,
             '8M'], cwd=directory, check=True, timeout=60)
    manifest = directory / 'manifest.yaml'
    manifest.write_text(yaml.safe_dump({'images': [
        {'name': name, 'format': image_format, 'filename': name,
         'usable': usable}
        for name, (image_format, _options, usable) in IMAGES.items()]}))
    return manifest


def image_of(test):
    """Return the name of a test's image."""
    return re.search(r'\(([\w-]+)\)$', test)[1]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_formats(cloud):
    """Glance accepts and converts the right images, and Nova starts them.

    Nova refuses an image whose format is not the declared one; to try that,
    Glance must not be strict.  Glance never accepts unsafe images, so Nova
    cannot be tried with one.
    """
    results = {}
    with tempfile.TemporaryDirectory(prefix='tempest-') as directory, \
            contextlib.ExitStack() as undo:
        place = pathlib.Path(directory)
        images = undo.enter_context(
            tempest_run.Images(cloud, place / 'images'))
        undo.callback(cloud.glance.reconfigure, options={})
        options = plugin_options(cloud, images)
        options['image'] = {
            'images_manifest_file': make_manifest(place / 'formats')}
        # From here on servers without networks are allowed.
        options['compute'].update(
            min_microversion='2.37', max_microversion='latest')
        tempest = tempest_run.Tempest(cloud, place / 'tempest', options)
        tests = tempest.list(FORMATS)
        for strict in (True, False):
            cloud.glance.reconfigure(options={
                'image_import_opts': {
                    'image_import_plugins': '[image_conversion]'},
                'image_conversion': {'output_format': 'raw'},
                'image_format': {'require_image_format_match': strict},
                # uWSGI has sys.executable name the Python without the
                # environment.
                'wsgi': {'python_interpreter': sys.executable}})
            options['image-feature-enabled'] = {
                'image_conversion': True,
                'image_format_enforcement': strict}
            tempest.configure(options)
            chosen = [one for one in tests if (
                '_accept_' in one if strict
                else '_compute_' in one and IMAGES[image_of(one)][2])]
            results.update(tempest.run(chosen))
            # A test deletes its image as soon as that is active; Glance's task
            # may not be over then, and both may fail.
            again = [one for one in chosen if results[
                tempest_run.short(one)].outcome == tempest_run.FAILED]
            if strict and again:
                results.update(tempest.run(again, workers=1))
    usable = [name for name, (_, _, taken) in IMAGES.items() if taken]
    assert len(results) == 2 * len(IMAGES) + 2 * len(usable)
    problems = []
    for test, result in results.items():
        # Tempest has no test that Glance refuses them.
        skipped = 'accept_usable' in test and image_of(test) not in usable
        if result.outcome != (
                tempest_run.SKIPPED if skipped else tempest_run.OK):
            problems.append(f'{test}: {result.outcome}\n{result.words}')
    assert not problems, '\n'.join(problems)
