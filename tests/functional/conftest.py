# SPDX-License-Identifier: Apache-2.0

"""Two hosts on one directory: a model of a file system, or a real one."""

import contextlib
import pathlib
import tempfile
import uuid

import pytest

from tests.sharedfs import fuse_hosts
from tests.sharedfs import guest
from tests.sharedfs import kinds
from tests.sharedfs import shared_fs

#: On which tests of two hosts run, besides the model; ``-k gluster`` chooses
#: one. Some are mounted in a guest alone: test_guests.py runs these tests
#: there.
REAL_FILE_SYSTEMS = [
    pytest.param(kind, marks=pytest.mark.needs(kind))
    for kind in [shared_fs.kind_in(guest.directory())]
] if guest.inside() else [
    pytest.param('juicefs', marks=[pytest.mark.slow,
                                   pytest.mark.needs('juicefs')]),
    pytest.param('gluster', marks=[pytest.mark.long,
                                   pytest.mark.needs('gluster')]),
    pytest.param('ceph', marks=[pytest.mark.long,
                                pytest.mark.needs('ceph')])]
FILE_SYSTEMS = [*([] if guest.inside() else ['model']), *REAL_FILE_SYSTEMS]


@pytest.fixture(scope='session')
def real_file_systems():
    """Real file systems by name; the first test that needs one starts it."""
    with contextlib.ExitStack() as stack:
        running = {}

        def get(kind):
            if guest.inside():
                running[kind] = shared_fs.Shared(
                    kind, kinds.KINDS[kind], guest.directory())
                running[kind].up()
            elif kind not in running:
                # In a place of its own: the path of a socket must be short.
                place = stack.enter_context(
                    tempfile.TemporaryDirectory(prefix=f'{kind}-'))
                running[kind] = stack.enter_context(shared_fs.Shared(
                    kind, kinds.KINDS[kind], pathlib.Path(place, 'fs')))
                running[kind].up()
            return running[kind]

        yield get


@pytest.fixture(params=FILE_SYSTEMS)
def two_hosts(request, tmp_path, real_file_systems):
    """Two hosts, each with a mount of one empty directory at its ``root``.

    On the model their caches last as long as any test. On a real file system
    the hosts are mounts that later tests use, too; they are mounted again by
    then.
    """
    if request.param == 'model':
        with fuse_hosts.hosts(tmp_path, names=600, attributes=600,
                              pages='stay', rename='gap') as found:
            yield found
        return
    shared = real_file_systems(request.param)
    with shared.place(f'{tmp_path.name}-{uuid.uuid4().hex[:8]}') as found:
        yield found
