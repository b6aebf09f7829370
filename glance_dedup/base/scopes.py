# SPDX-License-Identifier: Apache-2.0

"""Scopes: a block is a duplicate only of blocks in the same scope.

A block's fingerprint covers the scope's id and the block. So equal blocks of
two scopes have nothing in common (``access.rst``, "Scopes").
"""

import hashlib

from glance_dedup.base import exceptions

#: The scopes that an upload may choose.
CHOICES = ('global', 'project')

#: The id of the scope that all projects share.
GLOBAL = bytes(16)


def of_project(project: str) -> bytes:
    """The id of a project's scope, 16 bytes; the same in every repository."""
    return hashlib.sha256(
        b'glance-dedup scope\0' + project.encode()).digest()[:16]


def choose(scope: str | bytes, project: str) -> bytes:
    """The id of the scope that an image of this project is stored in.

    :param scope: one of CHOICES; or an id, if only that is known, for
        example of another site's image
    :raises InvalidParameter: for any other value, and for the scope of another
        project
    """
    if isinstance(scope, bytes) and len(scope) == len(GLOBAL):
        # A cache does not know the projects of its images.
        if project and scope not in (GLOBAL, of_project(project)):
            raise exceptions.InvalidParameter(
                f'scope: {scope.hex()} is not the scope of the project '
                f'{project!r}')
        return scope
    if scope not in CHOICES:
        raise exceptions.InvalidParameter(
            f"scope: {scope!r} is neither 'global' nor 'project'")
    return GLOBAL if scope == 'global' else of_project(project)


def describe(scope_id: bytes) -> str:
    """Return which of CHOICES gave an image its scope."""
    return 'global' if scope_id == GLOBAL else 'project'
