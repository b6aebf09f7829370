# SPDX-License-Identifier: Apache-2.0

"""The packages require exactly the distributions that they import."""

import ast
import configparser
import importlib.metadata
import pathlib
import re
import sys

import pytest

TOP = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ('glance_dedup', 'dedupd')
NAME = re.compile(r'^[A-Za-z0-9_.-]+')
# Modules that are imported only if an extra is installed.
EXTRAS = {'backup': {'glance_dedup/backup/mpi_link.py'},
          'glance': {'glance_dedup/client/glance_api.py'},
          'libvirt': {'glance_dedup/backup/libvirt_jobs.py'},
          's3': {'glance_dedup/objects/s3.py'},
          'swift': {'glance_dedup/objects/swift.py'},
          'trace': {'dedupd/http/tracing.py'},
          'mount': {'dedupd/compute/novabase/file_attributes.py',
                    'glance_dedup/fuse_operations.py'}}
# Imported only if oslo.messaging brings it, so that it does not load eventlet.
NOT_NEEDED = {'oslo-service'}


def normal(name):
    return re.sub('[-_.]+', '-', name).lower()


def names(lines):
    return {normal(NAME.match(line)[0]) for line in lines
            if line.strip() and not line.startswith('#')}


def imported():
    """Yield the distributions that each file imports from."""
    of = importlib.metadata.packages_distributions()
    for package in PACKAGES:
        for path in (TOP / package).rglob('*.py'):
            found = set()
            for node in ast.walk(ast.parse(path.read_text())):
                modules = ()
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    modules = [node.module]
                found.update(module.split('.')[0] for module in modules)
            found -= {*sys.stdlib_module_names, *PACKAGES}
            yield str(path.relative_to(TOP)), {
                normal(of[module][0]) for module in found} - NOT_NEEDED


@pytest.fixture(scope='module')
def setup_cfg():
    parser = configparser.ConfigParser()
    parser.read(TOP / 'setup.cfg')
    return parser


def test_requirements():
    optional = set().union(*EXTRAS.values())
    wanted = set()
    for path, found in imported():
        if path not in optional:
            wanted |= found
    assert names((TOP / 'requirements.txt').read_text().splitlines()) == wanted


@pytest.mark.parametrize('extra', EXTRAS)
def test_extras(setup_cfg, extra):
    always = names((TOP / 'requirements.txt').read_text().splitlines())
    wanted = set().union(*(found for path, found in imported()
                           if path in EXTRAS[extra])) - always
    assert names(setup_cfg['extras'][extra].splitlines()) == wanted


def test_no_other_extra(setup_cfg):
    assert set(setup_cfg['extras']) == set(EXTRAS)


def test_tests_have_the_extras(setup_cfg):
    lines = (TOP / 'test-requirements.txt').read_text().splitlines()
    found = names(line for line in lines if not line.startswith('-r'))
    for extra in EXTRAS:
        assert names(setup_cfg['extras'][extra].splitlines()) <= found
