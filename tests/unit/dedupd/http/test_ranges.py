# SPDX-License-Identifier: Apache-2.0

"""Ranges in headers; the functional tests have ranges in bodies."""

from hypothesis import given
from hypothesis import strategies

from dedupd.http import messages
from dedupd.http import ranges


@given(strategies.text('bytes=0123456789-, x', max_size=30),
       strategies.integers(0, 1000))
def test_a_range_is_in_the_image_or_refused(value, size):
    try:
        found = ranges.parse(value, size)
    except messages.HTTPError as e:
        assert e.status == 416
    else:
        assert found is None or 0 <= found[0] < found[1] <= size
