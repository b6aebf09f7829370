# SPDX-License-Identifier: Apache-2.0

"""The checker checks ``repository.json``, and refuses other directories."""

import json
import os
import subprocess
import sys

import pytest

from glance_dedup.base import exceptions
from glance_dedup.check import checker
from tests.unit.check import fixtures
from tests.unit.check.fixtures import look
from tests.unit.check.fixtures import one_damage

no_pause = fixtures.no_pause
repository = fixtures.repository
group = fixtures.group
image = fixtures.image


PARAMETERS = {
    'kind': {'kind': 'another'},
    'format 0': {'format': 0},
    'format a bool': {'format': True},
    'format a string': {'format': '1'},
    'id': {'repository_id': 'x' * 32},
    'block size no power': {'block_size': 3000},
    'block size small': {'block_size': 256},
    'block size large': {'block_size': 131072},
    'block size float': {'block_size': 512.0},
    'block size huge': {'block_size': 2**100},
    'slots small': {'group_slots': 63},
    'slots large': {'group_slots': 32769},
    'segment small': {'segment_size': 256},
    'segment large': {'segment_size': 1 << 21},
    'chunking': {'chunking': 'other'},
    'chunking without sizes': {'chunking': 'content-defined'},
    'chunking padded': {'chunking': 'content-defined 0128 256',
                        'block_size': 512},
    'minimum small': {'chunking': 'content-defined 63 256', 'block_size': 512},
    'minimum large': {'chunking': 'content-defined 256 256',
                      'block_size': 512},
    'average large': {'chunking': 'content-defined 128 512',
                      'block_size': 512},
    'average no power': {'chunking': 'content-defined 128 300',
                         'block_size': 512},
    'verify': {'verify': 'other'},
    'verify surrogate': {'verify': '\ud800\n'},
    'more keys': {'more': 1},
    'major a string': {'major': '1'},
    'minor': {'minor': 0},
    'nested': {'more': [[[[]]]]},
}


@pytest.mark.parametrize('change', PARAMETERS.values(), ids=PARAMETERS)
def test_parameters(repository, group, image, change):
    repository.parameters.update(change)
    repository.save_parameters()
    finding = one_damage(repository, 'repository.json')
    str(finding).encode('utf-8')


@pytest.mark.parametrize('text', [
    b'', b'{}', b'[]', b'1', b'\xff', b'[' * 60000, b'{"kind": 1}',
    b'9' * 60000, b' ' * 70000,
    b'{"kind": "glance-dedup repository", "x": 1, "x": 1}',
    b'{"kind": "glance-dedup repository", "x": NaN, "checksum": ""}',
    b'{"kind": "glance-dedup repository", "x": ' + 900 * b'[' + 900 * b']'
    + b'}'], ids=range(12))
def test_parameters_that_are_no_object(repository, group, image, text):
    (repository.path / 'repository.json').write_bytes(text)
    one_damage(repository, 'repository.json')


def test_parameters_of_content_defined_chunking(repository):
    repository.parameters['chunking'] = 'content-defined 128 256'
    repository.save_parameters()
    assert look(repository)[1].findings == []


def test_parameters_with_a_key_missing(repository):
    del repository.parameters['chunking']
    repository.save_parameters()
    one_damage(repository, 'repository.json')


def test_parameters_with_spaces(repository):
    path = repository.path / 'repository.json'
    path.write_text(json.dumps(json.loads(path.read_text()), indent=8))
    assert look(repository)[1].findings == []


def test_newer_format(repository):
    repository.parameters['format'] = 2
    repository.save_parameters()
    with pytest.raises(exceptions.VersionError,
                       match='has format 2; this program reads 1'):
        checker.check(repository.path)


@pytest.mark.parametrize('major', [1, 4])
def test_a_format_that_was_never_released(repository, major):
    del repository.parameters['format']
    repository.parameters.update(major=major, minor=0)
    repository.save_parameters()
    with pytest.raises(exceptions.VersionError, match=(
            f'has format version {major} .* never released: make a new one')):
        checker.check(repository.path)


def test_unknown_digest(repository):
    repository.parameters['fingerprint'] = 'none\n'
    repository.save_parameters()
    with pytest.raises(exceptions.InvalidParameter, match='none'):
        checker.check(repository.path)


def test_not_a_repository(tmp_path):
    (tmp_path / 'file').touch()
    for path in tmp_path / 'missing', tmp_path, tmp_path / 'file':
        with pytest.raises(exceptions.RepositoryNotFound):
            checker.check(path)


@pytest.mark.skipif(os.getuid() != 0, reason='becomes another user')
@pytest.mark.parametrize('name', ['.', 'groups', 'images', 'images/one',
                                  'groups/00000001', 'repository.json'])
def test_not_readable(repository, group, image, name):
    """A file without read permission is an error, not damage."""
    for path in (repository.path, *repository.path.rglob('*')):
        os.chown(path, 65534, 65534)
    path = repository.path
    while path.parent != path:
        if not os.stat(path.parent).st_mode & 1:
            os.chmod(path.parent, 0o711)
        path = path.parent
    os.chmod(repository.path / name, 0)
    program = (
        'import os, sys\n'
        'from glance_dedup.base import exceptions\n'
        'from glance_dedup.check import checker\n'
        'os.setresuid(65534, 65534, 65534)\n'
        'try:\n'
        '    print(checker.check(sys.argv[1]))\n'
        'except exceptions.AccessDenied as e:\n'
        '    print("denied", e)\n')
    answer = subprocess.run(
        [sys.executable, '-c', program, repository.path], text=True,
        capture_output=True, timeout=60)
    assert answer.stdout.startswith('denied'), answer
