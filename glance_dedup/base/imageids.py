# SPDX-License-Identifier: Apache-2.0

"""What an image's id may be: the engine takes these, and no others."""

import re

#: A valid id's pattern, for larger patterns with an id in them.
PATTERN = '[A-Za-z0-9_-]{1,128}'

is_valid = re.compile(PATTERN).fullmatch
