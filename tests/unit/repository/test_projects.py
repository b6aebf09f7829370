# SPDX-License-Identifier: Apache-2.0

"""The file of projects is read and written, with any content."""

import pytest

from glance_dedup.base import imagelist
from glance_dedup.repository import projects
from tests.support import repositories

SUMS = dict.fromkeys(projects.SUMS, 1)
GOOD = {'project': 'one', **SUMS, 'sharing': {
    'counted': 1.5, 'exclusive_blocks': 1, 'shared_blocks': 2,
    'charged_bytes': 3}}


@pytest.mark.parametrize('change', [
    {'project': 1}, {'images': -1}, {'stored_bytes': 1.5}, {'blocks': True},
    {'stored_bytes': 1 << 63}, {'more': 1}, {'sharing': 1},
    {'sharing': {}}, {'sharing': {**GOOD['sharing'], 'charged_bytes': '1'}},
    {'sharing': {**GOOD['sharing'], 'counted': float('nan')}},
    {'sharing': {**GOOD['sharing'], 'counted': -1}}])
def test_a_file_that_anybody_may_have_written(change):
    def encoded(**fields):
        return imagelist.encode(
            'glance-dedup projects', [fields], of='projects')
    assert projects.decode(encoded(**GOOD))['one'].sharing.shared_blocks == 2
    with pytest.raises(ValueError):
        projects.decode(encoded(**{**GOOD, **change}))


def test_what_was_written_is_read(tmp_path):
    path = repositories.create(tmp_path / 'repository')
    assert projects.load(path) is None
    sharing = projects.Sharing(1.5, 2, 3, 4)
    projects.save(path, {'one': SUMS, '': SUMS}, {'one': sharing})
    found = projects.load(path)
    assert found == {
        'one': projects.Project(project='one', sharing=sharing, **SUMS),
        '': projects.Project(project='', **SUMS)}
    # New sums leave the counted sharing unchanged.
    projects.save(path, {'one': {**SUMS, 'images': 9}})
    assert projects.load(path) == {'one': projects.Project(
        project='one', sharing=sharing, **{**SUMS, 'images': 9})}


def test_other_files(tmp_path, caplog):
    path = repositories.create(tmp_path / 'repository')
    file = path / projects.NAME
    for content in (b'', b'[]', b'{}', b'\xff', b'[' * 100000):
        file.write_bytes(content)
        assert projects.load(path) is None
        assert 'projects.json is invalid' in caplog.text
        caplog.clear()
    file.unlink()
    file.symlink_to(tmp_path / 'elsewhere')
    assert projects.load(path) is None
    file.unlink()
    file.mkdir()
    assert projects.load(path) is None
    projects_report = repositories.require_clean(path)
    assert any('projects.json' in str(found)
               for found in projects_report.findings)
