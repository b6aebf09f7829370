# SPDX-License-Identifier: Apache-2.0

"""Makes text of others safe for a terminal or a log.

Names of projects and images, or errors of other hosts, may hold an escape
sequence, which a terminal obeys. They may also change the direction of the
text around them.
"""

import re

# Control characters of ASCII and of Latin 1; line and paragraph separators;
# characters that change the direction of text; halves of surrogate pairs.
_UNSAFE = re.compile('[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e'
                     '\u2066-\u2069\ud800-\udfff]')


def printable(text: str, keep: str = '') -> str:
    """The text with each unsafe character escaped as in a Python literal.

    :param keep: characters that stay, such as a line feed
    """
    return _UNSAFE.sub(
        lambda found: found[0] if found[0] in keep
        else found[0].encode('unicode_escape').decode(), text)
