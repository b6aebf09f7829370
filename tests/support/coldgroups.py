# SPDX-License-Identifier: Apache-2.0

"""Cold groups without an object store: all slices are in the cache."""

import contextlib
import os
import pathlib

from glance_dedup import _engine
from glance_dedup.base import access
from glance_dedup.base import exceptions
from glance_dedup.objects import object_location
from glance_dedup.objects import slice_cache
from glance_dedup.repository import cold_settings

OWNER = '0123456789abcdef' * 2
#: No server listens there.
PLACE = object_location.parse('s3://bucket/prefix', 'http://127.0.0.1:9')
CREDENTIALS = '/nonexistent/credentials'


def attach(path):
    """Write the description of an object store that cannot be reached."""
    cold_settings.write(str(path), cold_settings.Settings(
        PLACE, CREDENTIALS, (OWNER,), os.stat(path).st_ino))


def cool_all(repo):
    """Make all full and whole groups cold; return their numbers."""
    made = []
    with contextlib.closing(_engine.Maintenance(repo.handle())) as engine:
        assert engine.lock()
        for number in engine.groups():
            facts = engine.group_facts(number)
            if facts['published'] < facts['slots'] or facts['flags'] & 1:
                continue
            with contextlib.suppress(exceptions.DamagedError):
                cool(repo, engine, number)
                made.append(number)
    return made


def cool(repo, engine, number):
    """Make a group cold; return its object's content."""
    with contextlib.closing(engine.begin_cooling(number)) as rewriting:
        while not rewriting.step()[0]:
            pass
        object_id, length, name = rewriting.object()
        content = (pathlib.Path(repo.path) / name).read_bytes()
        assert len(content) == length
        keep(repo.path, object_id, content)
        rewriting.cut()
        rewriting.exchange()
    return content


def keep(path, object_id, content):
    """Put all slices of an object into the cache."""
    directory = pathlib.Path(path) / 'slices' / object_id.hex()
    access.make_directory(str(directory), access.directory_mode(str(path)))
    for number, at in enumerate(range(0, len(content), slice_cache.SLICE)):
        file = directory / f'{number:08x}'
        file.write_bytes(content[at:at + slice_cache.SLICE])
        file.chmod(access.file_mode(str(path)))
