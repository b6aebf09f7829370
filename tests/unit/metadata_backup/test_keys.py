# SPDX-License-Identifier: Apache-2.0

"""Keys of objects are made and parsed."""

import pytest

from glance_dedup.metadata_backup import keys
from glance_dedup.objects import slice_cache

OWNER = 'a' * 32
ID = '0123456789abcdef' * 2


@pytest.mark.parametrize('key, meaning', [
    (slice_cache.key_of(OWNER, 0x2a, bytes.fromhex(ID)), keys.Group(0x2a, ID)),
    (keys.of_recipe(OWNER, 'x', ID), keys.Recipe('x', ID)),
    (keys.of_recipe(OWNER, f'x-{ID}-{ID}', ID),
     keys.Recipe(f'x-{ID}-{ID}', ID)),
    (keys.of_manifest(OWNER, 1 << 40, ID),
     keys.Manifest(1 << 40, ID, OWNER))])
def test_keys(key, meaning):
    assert keys.parse(OWNER, key) == meaning
    assert keys.parse('b' * 32, key) is None
    for wrong in (key + 'x', key[:-1], f'x{key}', key.upper(), f'{key}\n',
                  key.replace('/', '//')):
        assert keys.parse(OWNER, wrong) is None


def test_manifests_sort_by_number():
    made = [keys.of_manifest(OWNER, number, ID) for number in (1, 9, 10, 300)]
    assert sorted(made) == made
    assert sorted(keys.parse(OWNER, key) for key in made)[-1].key == made[-1]


@pytest.mark.parametrize('key', [
    '', 'g/', f'owners/{OWNER}.json', f'retired/{OWNER}', f'{OWNER}/',
    f'{OWNER}/g/0000002a-{ID[1:]}', f'{OWNER}/x/0000002a-{ID}',
    f'{OWNER}/r/-{ID}', f'{OWNER}/r/a b-{ID}', f'{OWNER}/m/7-{ID}'])
def test_what_is_no_key(key):
    assert keys.parse(OWNER, key) is None
