# SPDX-License-Identifier: Apache-2.0

"""Ids of 16 bytes as text, of repositories, uploads and transactions."""

import re

#: A valid id's pattern, for larger patterns with an id in them.
PATTERN = '[0-9a-f]{32}'

is_valid = re.compile(PATTERN).fullmatch
