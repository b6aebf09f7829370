# SPDX-License-Identifier: Apache-2.0

"""The valid ids of images; the engine refuses all others."""

import re

#: The pattern of a valid id, as a part of larger patterns.
PATTERN = '[A-Za-z0-9_-]{1,128}'

is_valid = re.compile(PATTERN).fullmatch
