# SPDX-License-Identifier: Apache-2.0

"""Control characters that a terminal would obey or that hide text."""

import pytest

from glance_dedup.base.printable import printable


@pytest.mark.parametrize('text, shown', (
    ('plain, äöü, 日本', 'plain, äöü, 日本'),
    ('\x1b[2Jgone', '\\x1b[2Jgone'),
    ('\x9b2J', '\\x9b2J'),
    ('a\rb\nc\td', '\\'.join(('a', 'rb', 'nc', 'td'))),
    ('\x7f\x00', '\\x7f\\x00'),
    ('\u202eevil\u2066', '\\u202eevil\\u2066'),
    ('\u2028', '\\u2028'),
    ('\udc80', '\\udc80')))
def test_printable(text, shown):
    assert printable(text) == shown


def test_lines_of_ours_stay():
    assert printable('a\nb\x1b', '\n') == 'a\nb\\x1b'
