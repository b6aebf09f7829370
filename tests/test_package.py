# SPDX-License-Identifier: Apache-2.0
"""The wheel, made and installed as the installation guide says."""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

from glance_dedup.cli import main as cli

TOP = pathlib.Path(__file__).resolve().parent.parent
VERSION = '7.6.5'
BUILD_SECONDS = 600

pytestmark = pytest.mark.long


def run(*command, cwd, **environment):
    result = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True,
        timeout=BUILD_SECONDS, env={**os.environ, **environment})
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    """Made of a plain copy of the tree, without git, and not in it."""
    place = tmp_path_factory.mktemp('package')
    tree = place / 'tree'
    shutil.copytree(TOP, tree, ignore=shutil.ignore_patterns(
        '.*', 'build', '*.so', '*.egg-info', '__pycache__', 'corpus'))
    run(sys.executable, '-m', 'pip', 'wheel', '--no-deps',
        '--no-build-isolation', '--quiet', '--wheel-dir', place / 'wheels',
        '.', cwd=tree, PBR_VERSION=VERSION)
    found, = (place / 'wheels').iterdir()
    return found


@pytest.fixture(scope='module')
def installed(wheel, tmp_path_factory):
    """The package in a directory of its own."""
    target = tmp_path_factory.mktemp('installed')
    run(sys.executable, '-m', 'pip', 'install', '--no-deps', '--quiet',
        '--target', target, wheel, cwd='/')
    return target


def test_name(wheel):
    """One for every Python from 3.11 on."""
    assert wheel.name.startswith(f'glance_dedup-{VERSION}-cp311-abi3-linux_')


def test_content(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert 'glance_dedup/_engine.abi3.so' in names
    # Its header is among the packages of bindep.txt for tests.
    assert 'glance_dedup/nbdkit-glance-dedup-plugin.so' in names
    for path in (TOP / 'dedupd' / 'page').iterdir():
        assert f'dedupd/page/{path.name}' in names
    for package in ('glance_dedup', 'dedupd'):
        for path in (TOP / package).rglob('*.py'):
            assert str(path.relative_to(TOP)) in names


def test_installed(installed, tmp_path):
    """Programs, driver and engine of there work, and not those of here."""
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


def test_commands(installed):
    """setup.cfg names the same ones as the program itself."""
    found = run(
        sys.executable, '-c',
        'from importlib.metadata import entry_points as e\n'
        f'for p in e(group="{cli.NAMESPACE}"): print(p.name, p.value)',
        cwd='/', PYTHONPATH=str(installed))
    assert {name.replace('_', ' '): value for name, value in (
        line.split() for line in found.splitlines())} == cli.COMMANDS
