#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""Text that a terminal would obey, or that hides what it is."""

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
