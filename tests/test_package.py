# SPDX-License-Identifier: Apache-2.0
"""The wheel is made and installed as in the installation guide.

One test compares the files of a wheel without extensions, which takes no
compiler, with those of the checkout. ``tools/release``, which makes a release,
is run once. The tests that compile something are long.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import zipfile

import pytest


TOP = pathlib.Path(__file__).resolve().parent.parent
VERSION = '7.6.5'
BUILD_SECONDS = 600
RELEASE_SECONDS = 3000
#: Pythons that tools/release finds in some Debian.
IN_DEBIAN = ('python3.13', 'python3.14')
#: The wheel's directory of the files installed below ``share``.
SHARE = f'glance_dedup-{VERSION}.data/data/share'
#: Its content: a directory, the endings of the files, and their source.
DATA = [('glance-dedup/systemd', ('service', 'socket', 'timer'), 'etc'),
        ('glance-dedup/conf', ('conf', 'sample'), 'etc'),
        ('glance-dedup/tmpfiles.d', ('conf',), 'etc/tmpfiles.d'),
        ('glance-dedup/prometheus', ('yml',), 'etc/prometheus'),
        ('glance-dedup/grafana', ('json',), 'etc/grafana'),
        ('man/man1', ('1',), 'doc/build/man'),
        ('man/man8', ('8',), 'doc/build/man')]
#: The files among them that tools/release makes.
GENERATED = ('etc/glance-dedup.conf.sample', 'etc/dedupd.conf.sample',
             'doc/build/man/glance-dedup.1', 'doc/build/man/dedupd.8',
             'RELEASENOTES.rst')


def run(*command, cwd, seconds=BUILD_SECONDS, **environment):
    result = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True,
        timeout=seconds, env={**os.environ, **environment})
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope='module')
def tree(tmp_path_factory):
    """A plain copy, without git, with the files that tools/release makes."""
    tree = tmp_path_factory.mktemp('package') / 'tree'
    shutil.copytree(TOP, tree, ignore=shutil.ignore_patterns(
        '.*', 'build', '*.so', 'glance-dedup-confined', '*.egg-info',
        '__pycache__', 'corpus', '*.sample'))
    for name in GENERATED:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text('generated')
    return tree


def names_in(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist()
                if not name.endswith('/')}


def wanted(tree):
    """Yield all files of the wheel, except compiled ones."""
    for package in ('glance_dedup', 'dedupd'):
        for path in (tree / package).rglob('*.py*'):
            yield str(path.relative_to(tree))
    for path in (tree / 'dedupd' / 'status' / 'page').iterdir():
        yield str(path.relative_to(tree))
    for directory, endings, source in DATA:
        for path in (tree / source).iterdir():
            if path.name.rpartition('.')[2] in endings:
                yield f'{SHARE}/{directory}/{path.name}'
    yield f'{SHARE}/doc/glance-dedup/RELEASENOTES.rst'


@pytest.mark.slow
def test_files(tree, tmp_path):
    """The wheel has each module, page, unit and sample, and no source in C."""
    run(sys.executable, 'setup.py', '-q', 'build_py', 'bdist_wheel',
        '--skip-build', '--dist-dir', tmp_path / 'dist', cwd=tree,
        PBR_VERSION=VERSION)
    found, = (tmp_path / 'dist').iterdir()
    names = {name for name in names_in(found) if '.dist-info/' not in name}
    assert names == set(wanted(tree))
    for name in GENERATED:
        assert any(found.endswith(f'/{name.rpartition("/")[2]}')
                   for found in names), name


@pytest.mark.slow
def test_one_version(tree, tmp_path):
    """The project and its tempest plugin have the same version."""
    copy = tmp_path / 'copy'
    shutil.copytree(tree, copy, ignore=shutil.ignore_patterns('build'))

    def versions():
        """Return each version: the last line, since pbr may print more."""
        return {run(sys.executable, '-W', 'ignore', 'setup.py', '--version',
                    cwd=directory).splitlines()[-1]
                for directory in (copy, copy / 'tests' / 'tempest')}

    for command in (('init', '-q'), ('add', 'setup.py'),
                    ('commit', '-q', '-m', 'A commit'),
                    ('tag', '-a', '-m', 'A release', '6.5.4')):
        run('git', '-c', 'user.name=A', '-c', 'user.email=a@example.org',
            *command, cwd=copy)
    assert versions() == {'6.5.4'}
    shutil.rmtree(copy / '.git')
    # An sdist has this file.
    (copy / 'PKG-INFO').write_text(
        f'Metadata-Version: 2.1\nName: glance-dedup\nVersion: {VERSION}\n')
    assert versions() == {VERSION}


@pytest.fixture(scope='module')
def wheel(tree):
    place = tree.parent
    run(sys.executable, '-m', 'pip', 'wheel', '--no-deps',
        '--no-build-isolation', '--quiet', '--wheel-dir', place / 'wheels',
        '.', cwd=tree, PBR_VERSION=VERSION)
    found, = (place / 'wheels').iterdir()
    return found


@pytest.fixture(scope='module')
def installed(wheel, tmp_path_factory):
    """The package, installed in a directory of its own."""
    target = tmp_path_factory.mktemp('installed')
    run(sys.executable, '-m', 'pip', 'install', '--no-deps', '--quiet',
        '--target', target, wheel, cwd='/')
    return target


@pytest.mark.long
def test_the_same_commit_gives_the_same_wheel(tmp_path):
    """The wheel depends on neither the directory, file times nor the date."""
    clones = tmp_path / 'one', tmp_path / 'another' / 'place'
    for clone in clones:
        run('git', 'clone', '-q', TOP, clone, cwd='/')
    old = time.time() - 100_000
    for path in clones[1].rglob('*'):
        if not path.is_symlink() and '.git' not in path.parts:
            os.utime(path, (old, old))
    environment = {name: value for name, value in os.environ.items()
                   if name != 'SOURCE_DATE_EPOCH'}
    for clone in clones:
        subprocess.run(
            [sys.executable, '-m', 'pip', 'wheel', '--no-deps', '--quiet',
             '--no-build-isolation', '--wheel-dir', clone / 'wheels', '.'],
            cwd=clone, env=environment, check=True, timeout=BUILD_SECONDS)
    one, another = (next((clone / 'wheels').iterdir()) for clone in clones)
    assert one.name == another.name
    assert one.read_bytes() == another.read_bytes()


@pytest.mark.long
def test_name(wheel):
    """One wheel serves every Python from 3.11 on."""
    assert wheel.name.startswith(f'glance_dedup-{VERSION}-cp311-abi3-linux_')


@pytest.mark.long
def test_content(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        program = archive.getinfo('glance_dedup/glance-dedup-confined')
    assert 'glance_dedup/_engine.abi3.so' in names
    assert program.external_attr >> 16 & 0o111 == 0o111
    assert not any(name.endswith(('.c', '.h')) for name in names)
    # The plugin's header is among the packages of bindep.txt for tests.
    assert 'glance_dedup/nbdkit-glance-dedup-plugin.so' in names
    for path in (TOP / 'dedupd' / 'status' / 'page').iterdir():
        assert f'dedupd/status/page/{path.name}' in names
    for package in ('glance_dedup', 'dedupd'):
        for path in (TOP / package).rglob('*.py'):
            assert str(path.relative_to(TOP)) in names


@pytest.mark.long
def test_installed(installed, tmp_path):
    """The installed programs, driver and engine work, not the tree's."""
    environment = {'PYTHONPATH': str(installed), 'GLANCE_DEDUP_SOCKET': '',
                   'GLANCE_DEDUP_FILTER_DIR': str(tmp_path),
                   'GLANCE_DEDUP_REPOSITORY': str(tmp_path / 'repository')}

    def python(text):
        return run(sys.executable, '-W', 'ignore', '-c', text, cwd=tmp_path,
                   **environment)

    def program(name, *arguments):
        return run(installed / 'bin' / name, *arguments, cwd=tmp_path,
                   **environment)

    assert str(installed) in python(
        'from importlib.metadata import entry_points as e\n'
        'driver, = e(group="glance_store.drivers", name="dedup")\n'
        'import sys; print(sys.modules[driver.load().__module__].__file__)')
    assert VERSION in program('glance-dedup', '--version')
    assert VERSION in program('dedupd', '--version')
    (tmp_path / 'image').write_bytes(os.urandom(100_000))
    program('glance-dedup', 'repository', 'create')
    program('glance-dedup', 'image', 'put', 'one', 'image')
    program('glance-dedup', 'image', 'get', 'one', 'back')
    assert ((tmp_path / 'back').read_bytes()
            == (tmp_path / 'image').read_bytes())


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_release(tmp_path):
    """tools/release runs its checks, and fails if the sdist lacks a file."""
    clone = tmp_path / 'clone'
    run('git', 'clone', '-q', TOP, clone, cwd='/')
    run('git', '-c', 'user.name=A', '-c', 'user.email=a@example.org', 'tag',
        '-a', '-m', 'A release', VERSION, cwd=clone)
    # As root: for this Debian's Python, and for those of newer ones.
    here = f'python3.{sys.version_info.minor}'
    said = run(clone / 'tools' / 'release', cwd='/', seconds=RELEASE_SECONDS,
               PYTHONS=here if os.geteuid() else '')
    tried = set(re.findall(rf'(python3\.\d+): glance-dedup {VERSION}', said))
    assert tried >= ({here} if os.geteuid() else {here, *IN_DEBIAN})
    dist = clone / 'dist'
    wheel, = dist.glob('glance_dedup-*.whl')
    assert wheel.name.startswith(
        f'glance_dedup-{VERSION}-cp311-abi3-manylinux_')
    assert {path.name.partition(f'-{VERSION}')[0]
            for path in dist.iterdir() if path.is_file()} == {
        'glance_dedup', 'glance_dedup_tempest_plugin'}
    assert (dist / 'html' / 'changelog.html').exists()
