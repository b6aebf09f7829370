# SPDX-License-Identifier: Apache-2.0

"""The overview of ``status`` is shown for statuses of any content."""

import os
import signal
import subprocess

import pytest

from glance_dedup.cli import status_report

GIB = 1 << 30
STATUS = {
    'repository': {'path': '/var/lib/glance/dedup'},
    'daemon': {'version': '1.0', 'host': 'a', 'pid': 7, 'ready': True,
               'role': 'maintainer', 'started': 1000.0},
    'problems': [{'code': 'DATA_DAMAGED', 'severity': 'critical',
                  'text': '1 block damaged.'},
                 {'code': 'DISK_NEARLY_FULL', 'severity': 'warning',
                  'text': 'It is nearly full.'}],
    'space': {'images': 1, 'backups': 0, 'volumes': 2,
              'logical_bytes': 8 * GIB, 'nonzero_bytes': 4 * GIB,
              'disk_bytes': GIB, 'metadata_bytes': 1 << 20,
              'saved_percent': 75.0, 'filesystem_bytes': 100 * GIB,
              'filesystem_free_bytes': 25 * GIB, 'reserve_bytes': 1 << 26,
              'journal_bytes': 0},
    'tasks': {
        'collect': {'state': 'idle', 'next': 4660.0, 'last': {
            'finished': 4540.0, 'error': None,
            'result': {'freed_blocks': 12, 'disk_bytes': 4096, 'failed': {},
                       'refused': None, 'unlinked': 0}}},
        'merge': {'state': 'idle', 'next': None, 'last': {
            'finished': 4599.5, 'error': 'no room', 'result': None}},
        'scrub': {'state': 'running', 'done': 1, 'total': 3,
                  'what': 'group 7', 'seconds_left': 240.0, 'last': None},
        'recompress': {'state': 'waiting', 'last': None, 'next': None}},
    'volumes': {'in_use': 1, 'size_bytes': GIB, 'written_bytes': GIB,
                'duplicate_percent': None},
    'hosts': {'1': {'host': 'a', 'tasks': ['scrub']},
              '2': {'host': None, 'tasks': []}},
    'reads': {'connections': 1, 'requests': 2, 'bytes': 4096},
    'nbd': {'socket': None},
    'filter': {'filter_bytes': 1 << 26, 'filter_hints': 5,
               'filter_complete': False},
    'errors': [{'time': 4599.5, 'task': 'merge', 'text': 'no room'}],
}


def test_all_parts():
    assert status_report.page(STATUS, 4600.0) == """\
/var/lib/glance/dedup                                                   TROUBLE
dedupd 1.0 on a, process 7, maintainer, up for 60 min
!! DATA_DAMAGED: 1 block damaged.
 ! DISK_NEARLY_FULL: It is nearly full.

Space
  holds      1 image, 2 volumes
  logical    8.0 GiB, of which 4.0 GiB are not zeros
  stored     1.0 GiB, of which 1.0 MiB are metadata
  saved      75.0 % of what is not zeros
  disk       [######################........] 75 % of 100 GiB used
             25.0 GiB free; storing stops at 64.0 MiB

Maintenance
  collect          done 60 s ago (freed blocks 12, disk 4.0 KiB); next in 60 s
  merge            failed less than 1 s ago
  scrub            running, 33 %, group 7, 4 min left
  recompress       not run yet; waits for its turn

Volumes
  in use     1 of 2, together 1.0 GiB
  written    1.0 GiB, - of it duplicates; 0 B in journals

Hosts
  1: a                     scrub
  2: ?                     -

Reads
  HTTP       1 connection; 2 requests, 4.0 KiB sent

Filter
  64.0 MiB, 5 hints, still reading what is stored

Latest errors
  less than 1 s ago, merge: no room
"""


def test_what_is_not_counted_yet():
    space = {**STATUS['space'], 'uncounted': 2}
    page = status_report.page({**STATUS, 'space': space}, 4600.0)
    assert ('  holds      1 image, 2 volumes\n'
            '             2 more, in no figure until dedupd has counted\n'
            ) in page


def test_a_cache_and_another_site():
    text = status_report.page({
        **STATUS, 'problems': [],
        'cache': {'held': {'images': 2, 'limit_bytes': 0}, 'under_way': 1},
        'replication': {'target_url': 'https://b:1', 'pending': 1,
                        'replicated': 3,
                        'sent_bytes': 1024}}, 4600.0)
    assert text.splitlines()[0].endswith(' healthy')
    assert '\nCache\n  2 images; limit the disk; 1 arriving\n' in text
    assert ('\nReplication\n  to https://b:1: 1 image to send, 3 sent since '
            'the start (1.0 KiB)\n') in text


def test_cold_groups():
    text = status_report.page({**STATUS, 'space': {
        **STATUS['space'], 'object_bytes': 3 << 30}}, 4600.0)
    assert ('  stored     1.0 GiB, of which 1.0 MiB are metadata\n'
            '             3.0 GiB in the object store\n') in text


def test_images_with_a_disk():
    text = status_report.page({**STATUS, 'space': {
        **STATUS['space'], 'disks': 2, 'derived_bytes': 3 << 30}}, 4600.0)
    assert ('             2 images kept as disks, whose files have 3.0 GiB '
            'that are not stored\n') in text


@pytest.mark.parametrize('name', STATUS)
@pytest.mark.parametrize('value', [None, [], {}, 'text', 7])
def test_a_daemon_of_another_version(name, value):
    """Values of an unknown type are left out."""
    assert status_report.page({**STATUS, name: value}, 4600.0)


def test_a_status_cannot_change_the_terminal():
    text = status_report.page({**STATUS, 'problems': [
        {'severity': 'warning', 'text': 'a\x1b[2Jb\nc'}]}, 4600.0)
    assert '\x1b' not in text and 'b\nc' not in text


def test_watch_goes_on_until_an_interrupt(created):
    process = created.start('status', '--watch', '0.1s', text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        seen = 0
        while seen < 3:
            line = process.stdout.readline()
            assert line
            seen += line.startswith(f'{created.path} ')
        os.kill(process.pid, signal.SIGINT)
        process.stdout.read()
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.communicate()


def test_watch_is_for_people(created):
    created('status', '--watch', '-f', 'json').refused('--watch')
    created('status', '--watch', '0s').refused('--watch')
    created('status', '--watch', '2d').refused('--watch')
    for word in '2', 'inf':
        found = created('status', '--watch', word)
        assert found.status == 2 and 'is no duration' in found.err


def test_some_fields_only(created):
    """Selected columns are shown as a table."""
    result = created('status', '-c', 'space')
    assert result.status == 0 and "'images': 0" in result.out
