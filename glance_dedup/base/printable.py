# SPDX-License-Identifier: Apache-2.0

"""Text of others, as a terminal or a log may show it.

Names of projects and images, errors of other hosts: any of them may hold an
escape sequence, which a terminal obeys, or turn the direction of the text
around it.
"""

import re

# Control characters of ASCII and of Latin 1; line and paragraph separators;
# what changes the direction of text; halves of surrogate pairs.
_UNSAFE = re.compile('[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e'
                     '\u2066-\u2069\ud800-\udfff]')


def printable(text: str, keep: str = '') -> str:
    """The text with each such character as in a literal of Python's.

    :param keep: characters that stay, such as a line feed
    """
    return _UNSAFE.sub(
        lambda found: found[0] if found[0] in keep
        else found[0].encode('unicode_escape').decode(), text)
