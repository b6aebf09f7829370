# SPDX-License-Identifier: Apache-2.0

import pytest

from glance_dedup.base import units


@pytest.mark.parametrize('size, text', [
    (0, '0 B'), (1, '1 B'), (1023, '1023 B'), (1024, '1.0 KiB'),
    (1536, '1.5 KiB'), (102400, '100 KiB'), (1023 << 10, '1023 KiB'),
    ((1 << 20) - 1, '1.0 MiB'), (1 << 40, '1.0 TiB'),
    (1 << 64, '16.0 EiB'), (1 << 80, '1048576 EiB'), (-2048, '-2.0 KiB')])
def test_sizes(size, text):
    assert units.size(size) == text


@pytest.mark.parametrize('seconds, text', [
    (0, 'less than 1 s'), (1, '1 s'), (119, '119 s'), (120, '2 min'),
    (7199, '120 min'), (7200, '2 h'), (172799, '48 h'), (172800, '2 days'),
    (8640000, '100 days')])
def test_durations(seconds, text):
    assert units.duration(seconds) == text


@pytest.mark.parametrize('text, size', [
    ('0', 0), ('512', 512), ('1K', 1 << 10), ('64M', 1 << 26),
    ('10G', 10 << 30), ('2T', 2 << 40), ('1P', 1 << 50), ('007', 7),
    ('1KiB', 1 << 10), ('10GiB', 10 << 30)])
def test_sizes_are_read(text, size):
    assert units.parse_size(text) == size


@pytest.mark.parametrize('text', [
    '', '-1', '1.5G', 'G', '10g', '10 GiB', '10GB', '10B', '10iB', '1E',
    '0x10', '1e9', '\u0661', '1_000', '9' * 20, '10G\n'])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match='is no size'):
        units.parse_size(text)


@pytest.mark.parametrize('text, seconds', [
    ('0s', 0), ('0.1s', 0.1), ('30s', 30), ('5min', 300), ('1.5h', 5400),
    ('12h', 43200), ('7d', 604800), ('12days', 1036800)])
def test_durations_are_read(text, seconds):
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize('text', [
    '', '7', 's', '-1s', '5m', '1e3s', 'infs', '5 min', '.5s', '1h30min',
    '9' * 10 + 's', '\u0661s', '1s\n'])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match='is no duration'):
        units.parse_duration(text)
