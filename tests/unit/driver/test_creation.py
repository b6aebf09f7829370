# SPDX-License-Identifier: Apache-2.0

import dataclasses

import pytest

from glance_dedup.driver import creation
from glance_dedup.driver import opts
from tests.support import repositories


@pytest.mark.parametrize('name, value, words', [
    ('block_size', 65536, 'was created with 4096'),
    ('group_slots', 64, 'was created with'),
    ('cutting', 'gear', 'was created with fixed'),
    ('group_access', True, 'says False'),
    ('block_size', 4096, None), ('cutting', 'fixed', None),
    ('group_access', False, None)])
def test_one_option(tmp_path, name, value, words):
    path = repositories.create(tmp_path / 'r', block_size=4096)
    with repositories.open_repository(path) as repo:
        found = list(creation.differences(
            lambda option: value if option == name else None, str(path),
            repo.parameters, repo.group_access))
    assert len(found) == (words is not None)
    if words:
        assert words in found[0] and f'dedup_store_{name}' in found[0]


def test_all_options(tmp_path):
    path = repositories.create(tmp_path / 'r')
    with repositories.open_repository(path) as repo:
        fields = {field.name: getattr(repo.parameters, field.name)
                  for field in dataclasses.fields(repo.parameters)}
        assert not list(creation.differences(
            lambda option: fields.get(option), str(path), repo.parameters,
            repo.group_access))
    assert {*opts.CREATION_OPTIONS} <= {*fields}
