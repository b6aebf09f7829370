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
    (0, '0:00:00'), (59.6, '0:01:00'), (3661, '1:01:01'),
    (360000, '100:00:00')])
def test_clock(seconds, text):
    assert units.clock(seconds) == text


@pytest.mark.parametrize('seconds, text', [
    (0, 'less than 1 s'), (1, '1 s'), (119, '119 s'), (120, '2 min'),
    (7199, '120 min'), (7200, '2 h'), (172799, '48 h'), (172800, '2 days'),
    (8640000, '100 days')])
def test_durations(seconds, text):
    assert units.duration(seconds) == text
