# SPDX-License-Identifier: Apache-2.0

"""JSON objects of a repository, which carry their kind and a checksum."""

import json

from glance_dedup.check import ondisk


def load(text: bytes, kind: str) -> dict:
    """The object in a file; its checksum is not looked at.

    :raises Damage: it is no object of this kind, or has a key twice
    """
    def once(pairs):
        if len(dict(pairs)) != len(pairs):
            raise ValueError('a key is there twice')
        return dict(pairs)

    try:
        found = json.loads(text.decode('utf-8'), object_pairs_hook=once)
    except (ValueError, RecursionError) as e:
        raise ondisk.Damage('is not a JSON object') from e
    if not isinstance(found, dict) or found.get('kind') != kind:
        raise ondisk.Damage(f'is not of the kind {kind!r}')
    return found


def require_checksum(found: dict) -> None:
    """Raise Damage unless the object has the checksum of its other keys."""
    canonical = json.dumps(
        {k: v for k, v in found.items() if k != 'checksum'},
        sort_keys=True, separators=(',', ':'))
    if found.get('checksum') != f'{ondisk.xxh3(canonical.encode()):016x}':
        raise ondisk.Damage('its checksum does not agree')
