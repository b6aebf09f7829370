# SPDX-License-Identifier: Apache-2.0

import pytest

from dedupd.status import problems

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


CASES = [
    ('damage', {'blocks': 1, 'images': ['a', 'b'], 'volumes': ['c']},
     'DATA_DAMAGED', 'critical',
     '1 block damaged, used by 2 images and 1 volume.'),
    ('damage', {'blocks': 2, 'images': [], 'volumes': []},
     'DATA_DAMAGED', 'critical', '2 blocks damaged, used by no image.'),
    ('damage', {'blocks': 0, 'images': ['a']}, 'DATA_DAMAGED', 'critical',
     '1 image damaged.'),
    ('catalog', {'unreadable': {'a': 'EIO'}}, 'RECIPE_UNREADABLE', 'critical',
     'The recipe of image a cannot be read, so nothing is freed: EIO'),
    ('catalog', {'state': 'failed'}, 'CATALOG_FAILED', 'critical',
     'The catalog has failed; nothing is freed.'),
    ('catalog', {'state': 'rebuilding'}, 'CATALOG_REBUILDING', 'warning',
     'is being rebuilt'),
    ('catalog', {'warnings': ['some words']}, 'MAINTENANCE_WARNING', 'warning',
     'some words'),
    ('repository', {'maintained': False}, 'NO_MAINTAINER', 'warning',
     'start dedupd. If it runs, its log has the reason.'),
    ('repository', {'trial': {'verdict': 'not tried', 'valid': False}},
     'FILESYSTEM_UNTESTED', 'warning',
     'mount is not tried: run "glance-dedup repository test-filesystem"'),
    ('filter', {'filter_error': 'no room'}, 'NO_INDEX', 'warning', 'no room'),
    ('volumes', {'broken': 3}, 'VOLUME_BROKEN', 'critical',
     '3 volumes broken.'),
    ('tasks', {'merge': {'last': {'error': 'no room'}}}, 'TASK_FAILED',
     'warning', 'The task merge failed: no room'),
    ('space', {'filesystem_bytes': 1000, 'filesystem_free_bytes': 9,
               'reserve_bytes': 10}, 'DISK_FULL', 'critical',
     'Storing is refused'),
    ('space', {'filesystem_bytes': 1000, 'filesystem_free_bytes': 49,
               'reserve_bytes': 10}, 'DISK_NEARLY_FULL', 'warning',
     'Storing will be refused when the reserve is reached: 49 B are free'),
    ('space', {'filesystem_bytes': 1000, 'filesystem_free_bytes': 500,
               'reserve_bytes': 10, 'full_in_seconds': 86400},
     'DISK_FULL_SOON', 'warning',
     'Storing will be refused in about 24 h')]


@pytest.mark.parametrize('part, value, code, severity, words', CASES)
def test_each(part, value, code, severity, words):
    found, = problems.found_in({**FINE, part: value})
    assert (found['code'], found['severity']) == (code, severity)
    assert words in found['text']


def test_critical_ones_come_first():
    found = problems.found_in({
        **FINE, 'catalog': {'warnings': ['one']}, 'volumes': {'broken': 1}})
    assert [problem['severity'] for problem in found] == [
        'critical', 'warning']


def test_each_code_has_a_case():
    assert {case[2]: case[3] for case in CASES} == problems.CODES
