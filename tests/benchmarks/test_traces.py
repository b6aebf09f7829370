# SPDX-License-Identifier: Apache-2.0

"""Traces are read as they are written, and bad lines are refused."""

import collections

import pytest

from tests.benchmarks import papers

MD5 = '0123456789abcdef0123456789abcdef'


traces = papers.fixture('traces')


def test_a_line(traces):
    assert traces.parse(f'89966 4892 syslogd 904265560 8 W 6 0 {MD5}\n') == (
        True, 904265560, 8, bytes.fromhex(MD5))
    assert traces.parse(f'1 -1 a process 0 1 R 6 0 {MD5.upper()}') == (
        False, 0, 1, bytes.fromhex(MD5))


@pytest.mark.parametrize('text, reason', [
    ('', 'it is not'),
    (f'1 2 p 0 8 W 6 {MD5}', 'it is not'),
    (f'1 2 p x 8 W 6 0 {MD5}', 'it is not'),
    (f'1 2 p 0x8 8 W 6 0 {MD5}', 'it is not'),
    (f'1 2 p 0 8_0 W 6 0 {MD5}', 'it is not'),
    (f'1 2 p 0 \u0668 W 6 0 {MD5}', 'it is not'),
    (f'1 2 p 0 8.5 W 6 0 {MD5}', 'it is not'),
    (f'1 2 p {"9" * 5000} 8 W 6 0 {MD5}', 'it is not'),
    (f'1 2 p 0 8 D 6 0 {MD5}', 'it is not'),
    (f'1 2 p 0 8 W 6 0 {MD5[:-1]}', 'it is not'),
    (f'1 2 p 0 8 W 6 0 {MD5}0', 'it is not'),
    (f'1 2 p 0 8 W 6 0 {MD5[:-1]}g', 'it is not'),
    (f'1 2 p 0 8 W 6 0 {MD5} more', 'it is not'),
    (f'1 2 p 0 0 W 6 0 {MD5}', 'its size is 0'),
    (f'1 2 p 0 -8 W 6 0 {MD5}', 'its size is -8'),
    (f'1 2 p 0 65537 W 6 0 {MD5}', 'its size is 65537'),
    (f'1 2 p 0 99999999999999999999 W 6 0 {MD5}', 'its size is 9'),
    (f'1 2 p -1 8 W 6 0 {MD5}', 'begins before 0'),
    (f'1 2 p {(1 << 40) - 7} 8 W 6 0 {MD5}', 'ends behind'),
])
def test_a_bad_line_is_refused(traces, text, reason):
    with pytest.raises(ValueError, match=reason):
        traces.parse(text)


def test_the_bad_line_is_named(traces, tmp_path):
    path = tmp_path / 'trace'
    path.write_text(f'1 2 p 0 8 W 6 0 {MD5}\n1 2 p 0 0 W 6 0 {MD5}\n')
    assert len(list(traces.read(str(path), 1))) == 1
    with pytest.raises(ValueError, match='trace, line 2: its size is 0'):
        list(traces.read(str(path), 2))
    path.write_bytes(b'\xff\x00\n')
    with pytest.raises(ValueError, match='line 1: it is not'):
        list(traces.read(str(path), 2))


@pytest.mark.parametrize('name', ['web', 'mail', 'homes'])
@pytest.mark.parametrize('writes', [0, 1, 2, 5000])
def test_the_ratio_that_was_promised(traces, name, writes):
    server = traces.SERVERS[name]
    lines = [traces.parse(text)
             for text in traces.generate(server, writes, seed=writes)]
    assert len(lines) == writes
    assert all(line.write and line.size * 512 == server.block
               for line in lines)
    counted = collections.Counter(line.md5 for line in lines)
    assert len(counted) == max(min(writes, 1), round(writes / server.ratio))
    found = traces.work(lines, server.block)
    assert (found.written, found.different) == (writes, len(counted))
    if writes == 5000:
        assert found.ratio == pytest.approx(server.ratio, rel=1e-3)


def test_the_same_seed_gives_the_same_trace(traces):
    def made(seed):
        return list(traces.generate(traces.SERVERS['web'], 50, seed))
    assert made(1) == made(1) != made(2)


def test_what_a_trace_asks_for(traces):
    """Ranges become whole blocks; gaps between them vanish."""
    other = bytes(16)
    found = traces.work([
        traces.Line(True, 8000, 8, bytes.fromhex(MD5)),
        traces.Line(True, 8009, 17, other),      # three blocks
        traces.Line(False, 15, 1, other),
        traces.Line(True, 8, 8, bytes.fromhex(MD5))], 4096)
    done = list(traces.operations(found.data))
    assert [(kind, first, len(ids) // 16) for kind, first, ids in done] == [
        (traces.WRITE, 1, 1), (traces.WRITE, 2, 3), (traces.READ, 0, 1),
        (traces.WRITE, 0, 1)]
    assert done[0][2] == done[3][2] == bytes.fromhex(MD5)
    pieces = {done[1][2][i:i + 16] for i in range(0, 48, 16)}
    assert len(pieces) == 3 and other in pieces
    assert (found.blocks, found.written, found.different) == (5, 5, 4)
