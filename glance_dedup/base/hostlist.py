# SPDX-License-Identifier: Apache-2.0

"""A file that names the hosts on which a command starts processes."""

from glance_dedup.base import exceptions


def read(path: str) -> tuple[str, ...]:
    """The hosts in a file: one on each line; ``#`` begins a comment.

    :raises InvalidParameter: the file cannot be read, or names none
    """
    try:
        with open(path, encoding='utf-8') as file:
            words = [line.partition('#')[0].strip() for line in file]
    except (OSError, UnicodeDecodeError) as e:
        raise exceptions.InvalidParameter(
            f'cannot read the hosts in {path}: {e}') from e
    hosts = tuple(word for word in words if word)
    for host in hosts:
        if host.startswith('-') or any(c in ' ,:' for c in host):
            raise exceptions.InvalidParameter(
                f'{path}: {host!r} is no name of a host: give one on each '
                'line')
    if not hosts:
        raise exceptions.InvalidParameter(f'{path} names no hosts')
    return hosts
