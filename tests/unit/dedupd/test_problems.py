# SPDX-License-Identifier: Apache-2.0

import pytest

from dedupd import problems

FINE = {'repository': {'maintained': True},
        'catalog': {'state': 'ready', 'unreadable': {}, 'warnings': []},
        'damage': {'blocks': 0, 'images': [], 'volumes': []},
        'filter': {'filter_error': None}, 'volumes': {'broken': 0},
        'tasks': {'merge': {'last': None},
                  'scrub': {'last': {'error': None}}},
        'space': {'filesystem_bytes': 1000, 'filesystem_free_bytes': 500,
                  'reserve_bytes': 10}}


def test_nothing():
    assert problems.found_in(FINE) == []
    assert problems.found_in({}) == []
    assert problems.found_in(dict.fromkeys(FINE)) == []


@pytest.mark.parametrize('part, value, severity, words', [
    ('damage', {'blocks': 1, 'images': ['a', 'b'], 'volumes': ['c']},
     'critical', '1 block damaged, used by 2 images and 1 volume.'),
    ('damage', {'blocks': 2, 'images': [], 'volumes': []}, 'critical',
     '2 blocks damaged, used by no image.'),
    ('damage', {'blocks': 0, 'images': ['a']}, 'critical', '1 image damaged.'),
    ('catalog', {'unreadable': {'a': 'EIO'}}, 'critical',
     'The recipe of image a cannot be read, so nothing is freed: EIO'),
    ('catalog', {'state': 'failed'}, 'critical',
     'The catalog has failed; nothing is freed.'),
    ('catalog', {'state': 'rebuilding'}, 'warning', 'is being rebuilt'),
    ('catalog', {'warnings': ['some words']}, 'warning', 'some words'),
    ('repository', {'maintained': False}, 'warning', 'start dedupd'),
    ('repository', {'trial': {'verdict': 'not tried', 'valid': False}},
     'warning', 'mount is not tried: run "glance-dedup repository try-'),
    ('filter', {'filter_error': 'no room'}, 'warning', 'no room'),
    ('volumes', {'broken': 3}, 'critical', '3 volumes broken.'),
    ('tasks', {'merge': {'last': {'error': 'no room'}}}, 'warning',
     'The task merge failed: no room'),
    ('space', {'filesystem_bytes': 1000, 'filesystem_free_bytes': 9,
               'reserve_bytes': 10}, 'critical', 'Storing is refused'),
    ('space', {'filesystem_bytes': 1000, 'filesystem_free_bytes': 49,
               'reserve_bytes': 10}, 'warning',
     'Storing will be refused when the reserve is reached: 49 B are free'),
    ('space', {'filesystem_bytes': 1000, 'filesystem_free_bytes': 500,
               'reserve_bytes': 10, 'full_in_seconds': 86400}, 'warning',
     'Storing will be refused in about 24 h')])
def test_each(part, value, severity, words):
    found, = problems.found_in({**FINE, part: value})
    assert found['severity'] == severity
    assert words in found['text']


def test_critical_ones_come_first():
    found = problems.found_in({
        **FINE, 'catalog': {'warnings': ['one']}, 'volumes': {'broken': 1}})
    assert [problem['severity'] for problem in found] == [
        'critical', 'warning']
