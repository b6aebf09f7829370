# SPDX-License-Identifier: Apache-2.0
"""The packages for Debian have their files; a new operator installs them.

The walk (``walk.py``) is long: it builds them (``tools/packages``), and goes
from their installation to their removal. The other tests read ``debian/``.
"""

import configparser
import fnmatch
import os
import pathlib
import re
import shutil
import subprocess
import sys

from packaging import requirements
import pytest

from glance_dedup.cli import completion

TOP = pathlib.Path(__file__).resolve().parents[2]
DEBIAN = TOP / 'debian'
#: Version of each requirement in Debian 13; a stable release keeps them.
TRIXIE = {
    'autopage': '0.4.0', 'botocore': '1.37.9', 'cliff': '4.9.1',
    'cryptography': '43.0.0', 'glance-store': '4.9.1',
    'h11': '0.14.0', 'keystoneauth1': '5.10.0', 'libvirt': '11.3.0',
    'lz4': '4.4.0', 'mpi4py': '4.0.3', 'openstacksdk': '4.4.0',
    'oslo.config': '9.7.1', 'oslo.log': '7.1.0', 'oslo.messaging': '16.1.0',
    'oslo.reports': '3.5.1', 'oslo.upgradecheck': '2.5.0',
    'oslo.utils': '8.2.0', 'osprofiler': '4.2.0', 'packaging': '25.0',
    'plyvel': '1.5.1', 'prometheus-client': '0.21.1', 'pyfuse3': '3.4.0',
    'requests': '2.32.3', 'swiftclient': '4.7.0', 'trio': '0.29.0',
    'urllib3': '2.3.0', 'xxhash': '3.2.0', 'zstandard': '0.23.0'}
LONG_SECONDS = 7200


@pytest.fixture(scope='module')
def setup_cfg():
    parser = configparser.ConfigParser()
    parser.read(TOP / 'setup.cfg')
    return parser


@pytest.fixture(scope='module')
def control():
    """Return the fields of each package, those of the sources under ''."""
    found = {}
    for text in (DEBIAN / 'control').read_text().split('\n\n'):
        fields = dict(re.findall(r'^([A-Z][\w-]+):((?:.*\n? )*.*)', text,
                                 re.MULTILINE))
        found[fields.get('Package', '').strip()] = fields
    return found


def required(lines):
    """Return requirements by their names in Debian after python3-."""
    for line in lines:
        if line.strip() and not line.startswith('#'):
            found = requirements.Requirement(line.partition(' #')[0])
            yield found.name.lower().replace('_', '-').removesuffix(
                '-python').removeprefix('python-'), found.specifier


def lines(kind):
    """Return the lines of all packages' files of a kind: ``install``, ..."""
    for path in DEBIAN.glob(f'*.{kind}'):
        for line in path.read_text().splitlines():
            yield line.split()


def test_requirements_are_in_debian(setup_cfg, control):
    always = dict(required(
        (TOP / 'requirements.txt').read_text().splitlines()))
    extras = {name: specifier for extra in setup_cfg['extras'].values()
              for name, specifier in required(extra.splitlines())}
    assert set(TRIXIE) == {*always, *extras}
    for name, specifier in {**always, **extras}.items():
        assert TRIXIE[name] in specifier, name
    built_with = control['']['Build-Depends']
    for name in always:
        assert f' python3-{name},' in built_with
    offered = ''.join(control[package].get(field, '')
                      for package in ('python3-glance-dedup', 'dedupd',
                                      'dedupd-nova-base')
                      for field in ('Depends', 'Recommends', 'Suggests'))
    for name in extras:
        assert f' python3-{name},' in offered


def test_every_program_and_its_manual_page_has_a_package(setup_cfg):
    programs = {line.split('=')[0].strip() for line in setup_cfg[
        'entry_points']['console_scripts'].splitlines() if line}
    installed = [line[0] for line in lines('install')
                 if line[0].startswith('usr/bin/')]
    assert sorted(installed) == sorted(f'usr/bin/{x}' for x in programs)
    pages = {pathlib.Path(line[-1]).name.partition('.')[0]
             for kind in ('manpages', 'links') for line in lines(kind)}
    assert pages == programs


def test_every_unit_is_known_to_systemd_and_to_apt():
    units = [path for ending in ('service', 'socket', 'timer')
             for path in (TOP / 'etc').glob(f'*.{ending}')]
    installed = [line[0] for line in lines('install')
                 if line[-1] == 'usr/lib/systemd/system']
    for unit in units:
        assert [pattern for pattern in installed if fnmatch.fnmatch(
            f'usr/share/glance-dedup/systemd/{unit.name}', pattern)], unit
    rules = (DEBIAN / 'rules').read_text()
    named = set(re.findall(r'[\w@-]+\.(?:service|socket|timer)\b', rules))
    # With this option an upgrade would stop the running services, and not
    # start them.
    assert '--no-start' not in rules
    # The other package's only unit has its name.
    assert named | {'dedupd-nova-base.service'} == {
        unit.name for unit in units
        # apt cannot list the instances of a template.
        if '[Install]' in unit.read_text() and '@' not in unit.name}


@pytest.mark.needs('systemd')
def test_every_service_is_confined(tmp_path):
    services = sorted((TOP / 'etc').glob('*.service'))
    assert len(services) >= 6
    for service in services:
        # An instance has a name.
        path = tmp_path / service.name.replace('@', '@disk')
        path.write_text(service.read_text())
        done = subprocess.run(
            ['systemd-analyze', 'security', '--offline=true', '--threshold=40',
             '--no-pager', path], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout[-200:] + done.stderr


def test_the_mount_for_nova_is_its_users():
    """Commands outside the unit's limits run as the unit's user."""
    text = (TOP / 'etc/dedupd-nova-base.service').read_text()
    user, = re.findall('^User=(.*)$', text, re.M)
    outside = re.findall(r'^Exec\w+=-?\+(.*)$', text, re.M)
    assert len(outside) == 3
    for command in outside:
        assert command.startswith(
            '/usr/bin/nsenter --target=1 --mount '
            f'/usr/bin/setpriv --reuid={user} --regid={user} --init-groups '
            '/usr/bin/')
    start, = re.findall('^ExecStart=(.*)$', text, re.M)
    assert outside[1].endswith(start.replace('nova-base ', 'nova-base mount '))
    assert outside[0] == outside[2]


def test_the_tests_of_the_build_have_their_files(tmp_path):
    """The tests run with only the package and the named files."""
    for name in ('glance_dedup', 'dedupd', *(
            DEBIAN / 'pybuild.testfiles').read_text().split()):
        copy = shutil.copytree if (TOP / name).is_dir() else shutil.copy
        copy(TOP / name, tmp_path / name)
    options, = re.findall('^TEST = (.*) tests/unit/driver$', (
        DEBIAN / 'rules').read_text(), re.M)
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', *options.split(),
         f'--basetemp={tmp_path}/places', '-n', '0',
         'tests/unit/driver/test_store_opts.py'], cwd=tmp_path,
        capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_upgrade_restarts_nothing():
    """An upgrade restarts no daemon: the guide has a check before it."""
    rules = (DEBIAN / 'rules').read_text()
    calls = re.findall(r'^\tdh_installsystemd (?:.*\\\n)*.*', rules, re.M)
    assert len(calls) == 2
    for call in calls:
        assert ' --no-stop-on-upgrade' in call


def test_each_shell_has_its_completion():
    rules = (DEBIAN / 'rules').read_text()
    made = dict(re.findall(r'\$\(COMPLETE\) (\w+) >(\S+)', rules))
    assert set(made) == set(completion._SCRIPTS)
    assert set(made.values()) <= {line[0] for line in lines('install')}


@pytest.mark.needs('packages')
@pytest.mark.skipif(os.geteuid() != 0, reason='only root can build packages')
def test_packages_have_the_version_of_the_wheel(tmp_path):
    """The packages have the wheel's version; the build itself is skipped."""
    program = tmp_path / 'bin' / 'mmdebstrap'
    program.parent.mkdir()
    program.write_text('#!/bin/sh\n')
    program.chmod(0o755)
    said = subprocess.run(
        [TOP / 'tools/packages', 'trixie', tmp_path / 'packages'], check=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=300, env={**os.environ, 'PATH': (
            f'{program.parent}:{os.environ["PATH"]}')}).stdout
    version, = re.findall(r'packages of version (\S+)\+deb13 are', said)
    wheel = subprocess.run(
        [sys.executable, '-W', 'ignore', 'setup.py', '--version'], cwd=TOP,
        check=True, capture_output=True, text=True, timeout=300).stdout
    assert version.replace('~', '.') == wheel.splitlines()[-1]


def test_what_breaks_eventlet_is_not_installed_with_glance(control):
    """Glance's host gets no library that breaks eventlet.

    See the comment in debian/control.
    """
    for package in ('python3-glance-dedup', 'dedupd'):
        for field in ('Depends', 'Recommends'):
            assert 'trio' not in control[package][field]
            assert 'pyfuse3' not in control[package][field]
    assert 'python3-httpcore' in control['dedupd-nova-base']['Conflicts']


def test_every_directory_of_data_has_a_package():
    text = (TOP / 'setup.py').read_text()
    wanted = set(re.findall(r"'(share/glance-dedup/[\w.]+)'", text))
    assert len(wanted) >= 5
    sources = [line[0] for line in lines('install')]
    for directory in wanted:
        assert fnmatch.filter(sources, f'usr/{directory}*'), directory


@pytest.mark.parametrize('arguments, told', [
    ((), 'one or two arguments'), (('sid',), 'no packages for "sid"')])
def test_wrong_arguments(arguments, told):
    result = subprocess.run(
        [TOP / 'tools/packages', *arguments], capture_output=True, text=True,
        timeout=60)
    assert result.returncode == 2
    assert told in result.stderr


@pytest.mark.long
@pytest.mark.timeout(2 * LONG_SECONDS)
@pytest.mark.skipif(os.geteuid() != 0, reason='only root can boot a Debian')
def test_a_new_operator_gets_through(tmp_path):
    """A new operator follows the guide, from the build to the purge."""
    directory = tmp_path / 'packages'
    subprocess.run([TOP / 'tools/packages', 'trixie', directory], check=True,
                   timeout=LONG_SECONDS)
    subprocess.run([sys.executable, '-m', 'tests.debian.walk', directory],
                   cwd=TOP, check=True, timeout=LONG_SECONDS)
