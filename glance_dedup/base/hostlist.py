# SPDX-License-Identifier: Apache-2.0

"""A file that names the hosts on which a command starts processes."""

from glance_dedup.base import exceptions


def read(path: str) -> tuple[str, ...]:
    """The hosts in a file: one on each line; ``#`` begins a comment.

    :raises InvalidParameter: the file cannot be read, or has wrong names
    """
    try:
        with open(path, encoding='utf-8') as file:
            lines = [line.partition('#')[0].strip() for line in file]
    except (OSError, UnicodeDecodeError) as e:
        raise exceptions.InvalidParameter(
            f'cannot read the hosts in {path}: {e}') from e
    hosts: dict[str, int] = {}
    for number, host in enumerate(lines, 1):
        if host.startswith('-') or any(c.isspace() or c in ',:'
                                       for c in host):
            raise exceptions.InvalidParameter(
                f'{path}, line {number}: {host!r} is no name of a host: give '
                'one on each line')
        if host and hosts.setdefault(host, number) != number:
            raise exceptions.InvalidParameter(
                f'{path}, line {number}: {host} is in line {hosts[host]} '
                'already: name each host once')
    if not hosts:
        raise exceptions.InvalidParameter(f'{path} names no hosts')
    return tuple(hosts)
