# SPDX-License-Identifier: Apache-2.0

"""Helpers write their findings to files of notes."""

import json

import pytest

from glance_dedup.base import files
from glance_dedup.check import checker
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import host_notes
from tests.support import maintenance


@pytest.fixture
def path(tmp_path):
    return maintenance.create(tmp_path)


def full():
    notes = host_notes.Notes('a-host', '1.2')
    notes.begin_scrub(1234.5)
    notes.scrub.update(group=3, slot=4)
    notes.found = {block_addresses.address(1, 5),
                   block_addresses.address(2, 0)}
    notes.unreadable = {7: 'why'}
    notes.kept = {9: (2, 19, False), 10: (2, 9, True)}
    return notes


def test_they_come_back(path):
    assert host_notes.load(path, 3) == host_notes.Notes()
    host_notes.save(path, 3, full().encode())
    assert host_notes.load(path, 3) == full()
    assert [n for n, _ in host_notes.contents(path)] == [3]
    assert checker.check(path).findings == []
    assert (path / 'helpers').stat().st_mode & 0o7777 == 0o700
    assert (path / 'helpers/3.json').stat().st_mode & 0o7777 == 0o600


def test_rows_of_older_formats_have_no_order(path):
    """Rows of the older format have no order, so older programs read them."""
    rows = json.loads(full().encode())['kept']
    assert rows == [[9, 2, 19], [10, 2, 9, True]]


def changed(**fields):
    found = json.loads(full().encode())
    found.update(fields)
    found.pop('kind'), found.pop('version'), found.pop('checksum')
    return files.pack_json(host_notes.KIND, **found)


@pytest.mark.parametrize('content', [
    b'', b'{}', b'[' * 100000, b'\xff', bytes(2 << 20), full().encode()[:-4],
    full().encode().replace(b'a-host', b'b-host'),
    changed(host=1), changed(host='x' * 301), changed(scrub={}),
    changed(program=1), changed(program='x' * 301),
    changed(scrub={**full().scrub, 'group': -1}),
    changed(scrub={**full().scrub, 'complete': 0}),
    changed(scrub={**full().scrub, 'started': float('inf')}),
    changed(found=[1]), changed(found=[1 << 60]), changed(found=['1']),
    changed(found=[True]), changed(found=[32768] * 4097),
    changed(found={}), changed(unreadable=[[0, 'x']]),
    changed(unreadable=[[1 << 40, 'x']]), changed(unreadable=[[1]]),
    changed(kept=[[1, 2]]), changed(kept=[[1, 2, 'x']]),
    changed(kept=[[1, 2, 3, 1]]), changed(kept=[[1, 2, 3, True, 4]])])
def test_anybody_may_have_written_them(path, content):
    with pytest.raises(ValueError):
        host_notes.decode(content)
    host_notes.save(path, 3, full().encode())
    (path / 'helpers/3.json').write_bytes(content)
    assert host_notes.load(path, 3) == host_notes.Notes()
    assert checker.check(path).ok


def test_bounds_are_kept(path):
    """Notes of the largest size can be read again."""
    notes = host_notes.Notes('x' * 1000)
    notes.found = {block_addresses.address(1 << 24, slot) for slot in range(
        host_notes.MAX_FOUND)}
    notes.unreadable = {(1 << 24) + n: 'y' * 1000
                        for n in range(host_notes.MAX_UNREADABLE)}
    notes.kept = {(1 << 24) + n: (255, 255, True)
                  for n in range(host_notes.MAX_RETAINED)}
    host_notes.save(path, 63, notes.encode())
    found = host_notes.load(path, 63)
    assert found.kept == notes.kept and found.found == notes.found
    assert len(found.unreadable) == host_notes.MAX_UNREADABLE
    assert checker.check(path).findings == []


def test_other_names_are_left_alone(path):
    host_notes.save(path, 0, full().encode())
    for name in ('64.json', '00.json', 'x', '1.json.new'):
        (path / 'helpers' / name).write_bytes(full().encode())
        (path / 'helpers' / name).chmod(0o600)
    (path / 'helpers/2.json').mkdir()
    assert [n for n, _ in host_notes.contents(path)] == [0]
    assert {f.file for f in checker.check(path).findings} == {
        'helpers/64.json', 'helpers/00.json', 'helpers/x', 'helpers/2.json'}


def test_a_directory_that_leads_elsewhere(path, tmp_path):
    """Nothing is written to, or read from, a path outside the repository."""
    outside = tmp_path / 'outside'
    outside.mkdir()
    (path / 'helpers').symlink_to(outside)
    with pytest.raises(NotADirectoryError):
        host_notes.save(path, 3, full().encode())
    assert list(outside.iterdir()) == []
    (outside / '3.json').write_bytes(full().encode())
    with pytest.raises(NotADirectoryError):
        host_notes.load(path, 3)
    assert list(host_notes.contents(path)) == []
