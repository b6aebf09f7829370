# SPDX-License-Identifier: Apache-2.0

"""Fixtures: a repository from `format_writer`, and the checker's findings."""

import pytest

from glance_dedup.check import checker
from glance_dedup.check import files
from tests.unit.repository import format_writer

DAMAGE, NOTE = checker.DAMAGE, checker.NOTE


def block(number, size=512):
    return (b'block %d. ' % number * size)[:size]


def noise(number, size=512):
    """Return incompressible bytes; the same for the same number."""
    return b''.join(format_writer.sha256(b'%d %d' % (number, i))
                    for i in range(size // 32))


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(files, 'PAUSE', 0)


@pytest.fixture
def repository(tmp_path):
    return format_writer.Repository(tmp_path / 'repository')


@pytest.fixture
def group(repository):
    """A group with a segment of each codec and garbage between two."""
    group = format_writer.Group(repository, 1)
    group.append([noise(i) for i in range(3)])
    group.publish()
    group.append([block(i) for i in range(4)], format_writer.LZ4)
    group.garbage(b'garbage')
    group.append([block(i) for i in range(4, 8)] + [b'short'],
                 format_writer.ZSTD)
    group.publish()
    group.save()
    return group


@pytest.fixture
def image(repository, group):
    return repository.image(
        'one', [(group, 0, 5), ('zeros', 1000), (group, 3, 9)])


def look(repository, severity=DAMAGE):
    """Return the findings of this severity, and the report."""
    report = checker.check(repository.path)
    assert report.ok == (not any(
        f.severity == DAMAGE for f in report.findings))
    return [f for f in report.findings if f.severity == severity], report


def one_damage(repository, file, *images):
    """Assert that there is damage, all in one file; return the first."""
    found, report = look(repository)
    assert found, 'no damage was found'
    assert {f.file for f in found} == {file}
    assert sorted({i for f in found for i in f.images}) == sorted(images)
    assert report.damaged_images == sorted(images)
    return found[0]


def patch(path, offset, data):
    content = bytearray(path.read_bytes())
    content[offset:offset + len(data)] = data
    path.write_bytes(content)
