# SPDX-License-Identifier: Apache-2.0

"""The class of mutants."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Edit:
    """One place of the sources, and its new text."""

    file: str
    """Relative to the top. It is no header, because a changed header needs the
    whole engine to be compiled again."""
    old: str
    new: str


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A bug put in on purpose."""

    name: str
    rule: str
    """of the contributors' guide, that it breaks"""
    edits: tuple[Edit, ...]
    workload: str | None = None
    """Of the crash explorer, that must show it; None: a crash alone does
    not."""
    tests: tuple[str, ...] = ()
    """Ordinary tests that show it: node ids of pytest."""
    why_not: str = ''
    """Why a crash alone does not show it."""
    quick: bool = False
    """It is looked for in every run of the tests."""


def c_tests(program: str) -> tuple[str, ...]:
    """Return the tests of a program ``test_PROGRAM`` in C."""
    return (f'tests/unit/test_c.py::TestPlain::test_c[test_{program}-plain]',)
