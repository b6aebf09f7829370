# SPDX-License-Identifier: Apache-2.0
"""Many similar cases; a usual run tries a part, and ``--long`` all.

A sweep is for cases that differ in a moment or a number, and that each take
noticeable time. The part is the same in every run, so that a failure can be
repeated.
"""

#: Whether to try every case; `tests.conftest` sets it for ``--long``.
everything = False


def part(cases, count):
    """Return `count` of the cases, spread evenly, the first and last included.

    :param cases: a sequence
    """
    cases = list(cases)
    if everything or len(cases) <= count:
        return cases
    step = (len(cases) - 1) / max(1, count - 1)
    return [cases[round(step * index)] for index in range(count)]
