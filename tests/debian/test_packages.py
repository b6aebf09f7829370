# SPDX-License-Identifier: Apache-2.0
"""The packages for Debian, as ``debian/`` describes them."""

import configparser
import fnmatch
import pathlib
import re

from packaging import requirements
import pytest

TOP = pathlib.Path(__file__).resolve().parents[2]
DEBIAN = TOP / 'debian'
#: What Debian 13 has of each requirement; a stable release keeps these.
TRIXIE = {
    'cliff': '4.9.1', 'cryptography': '43.0.0', 'glance-store': '4.9.1',
    'h11': '0.14.0', 'keystoneauth1': '5.10.0', 'libvirt': '11.3.0',
    'lz4': '4.4.0', 'mpi4py': '4.0.3', 'openstacksdk': '4.4.0',
    'oslo.config': '9.7.1', 'oslo.log': '7.1.0', 'oslo.messaging': '16.1.0',
    'oslo.reports': '3.5.1', 'oslo.upgradecheck': '2.5.0',
    'oslo.utils': '8.2.0', 'packaging': '25.0', 'plyvel': '1.5.1',
    'prometheus-client': '0.21.1', 'pyfuse3': '3.4.0', 'trio': '0.29.0',
    'xxhash': '3.2.0', 'zstandard': '0.23.0'}


@pytest.fixture(scope='module')
def setup_cfg():
    parser = configparser.ConfigParser()
    parser.read(TOP / 'setup.cfg')
    return parser


@pytest.fixture(scope='module')
def control():
    """The fields of each package, that of the sources under ''."""
    found = {}
    for text in (DEBIAN / 'control').read_text().split('\n\n'):
        fields = dict(re.findall(r'^([A-Z][\w-]+):((?:.*\n? )*.*)', text,
                                 re.MULTILINE))
        found[fields.get('Package', '').strip()] = fields
    return found


def required(lines):
    """Requirements by the names that Debian's packages have after python3-."""
    for line in lines:
        if line.strip() and not line.startswith('#'):
            found = requirements.Requirement(line.partition(' #')[0])
            yield found.name.lower().replace('_', '-').removesuffix(
                '-python'), found.specifier


def lines(kind):
    """The lines of all packages' files of a kind, such as ``install``."""
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
                      for package in ('python3-glance-dedup', 'dedupd')
                      for field in ('Depends', 'Recommends', 'Suggests'))
    for name in extras:
        assert f' python3-{name},' in offered


def test_every_program_and_its_manual_page_has_a_package(setup_cfg):
    programs = {line.split('=')[0].strip() for line in setup_cfg[
        'entry_points']['console_scripts'].splitlines() if line}
    installed = [line[0] for line in lines('install')
                 if line[0].startswith('usr/bin/')]
    assert sorted(installed) == sorted(f'usr/bin/{x}' for x in programs)
    pages = {pathlib.Path(line[-1]).stem
             for kind in ('manpages', 'links') for line in lines(kind)}
    assert pages == programs


def test_every_unit_is_known_to_systemd_and_to_apt():
    assert ['usr/share/glance-dedup/systemd/*', 'usr/lib/systemd/system'] in [
        *lines('install')]
    rules = (DEBIAN / 'rules').read_text()
    named = set(re.findall(r'[\w@-]+\.(?:service|socket|timer)\b', rules))
    units = {path.name for ending in ('service', 'socket', 'timer')
             for path in (TOP / 'etc').glob(f'*.{ending}')
             # apt cannot know which instances of a template there are.
             if '[Install]' in path.read_text() and '@' not in path.name}
    assert named == units


def test_every_directory_of_data_has_a_package():
    text = (TOP / 'setup.py').read_text()
    wanted = set(re.findall(r"'(share/glance-dedup/[\w.]+)'", text))
    assert len(wanted) >= 5
    sources = [line[0] for line in lines('install')]
    for directory in wanted:
        assert fnmatch.filter(sources, f'usr/{directory}*'), directory
