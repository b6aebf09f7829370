# SPDX-License-Identifier: Apache-2.0

"""A daemon converts images, beside its other tasks and other hosts."""

import contextlib
import os

import pytest

from dedupd.tasks import collector
from dedupd.tasks import converter
from glance_dedup.base import pacing
from glance_dedup.check import checker
from glance_dedup.client import nbd_reader
from tests.functional.test_hosts import both     # noqa: F401: a fixture
from tests.functional.test_hosts import opened
from tests.functional.test_hosts import shared
from tests.functional.test_nbd import Daemon
from tests.functional.test_nbd import run
from tests.support import maintenance
from tests.support import qcow2files
from tests.support import repositories
from tests.support.repositories import noise

DISK = [noise(qcow2files.CLUSTER // 2, seed).hex().encode()
        for seed in range(200)]
FILE = qcow2files.file_of([qcow2files.deflated(one) for one in DISK])
#: The program does not wait for an idle machine before it converts.
PROGRAM = ['-c', """
import itertools, sys
from dedupd import daemon
from glance_dedup.base import pacing

pacing.WATCH = 0.01
pacing.idle_seconds = itertools.count(0, 1000).__next__
sys.exit(daemon.main())
"""]


@contextlib.contextmanager
def daemon_of(path, **options):
    with Daemon(path, **options) as daemon:
        daemon.program = PROGRAM
        daemon.start().wait_for_catalog()
        yield daemon


def require_disk(repo, image_id='image'):
    with repo.open_image(image_id) as image:
        assert image.read() == FILE
        assert image.read_disk(len(DISK) * qcow2files.CLUSTER) == (
            b''.join(DISK))


@pytest.mark.parametrize('rate', [0, 1])
def test_a_daemon_converts_what_is_uploaded(tmp_path, rate):
    """Readers over HTTP get the same bytes and ranges before and after."""
    path = repositories.create(tmp_path / 'repository')
    with (daemon_of(path, convert_interval=1, convert_rate_mib=rate,
                    collect_interval=1) as daemon,
          repositories.open_repository(path) as repo):
        repositories.put(repo, 'image', FILE)
        repositories.put(repo, 'raw', b''.join(DISK))

        def converted():
            with repo.open_image('image') as image:
                return image.disk is not None
        where = '/v1/images/image'
        # The disk's blocks are there already, so the rate is no wait.

        def read():
            assert daemon.request('GET', where).body == FILE
            return converted()
        daemon.wait_for(read)
        assert daemon.request('GET', where).body == FILE
        part = daemon.request('GET', where, Range='bytes=5000-99999')
        assert part.body == FILE[5000:100000]
        require_disk(repo)
        # Another host, which cannot use disks yet, is refused.
        refused = daemon.request('GET', f'{where}/recipe')
        assert refused.status == 400 and b'kept as its disk' in refused.body
        daemon.wait_for(
            lambda: daemon.status()['space']['derived_bytes'] > 0)
        text = daemon.request('GET', '/metrics').body.decode()
        assert 'dedupd_images_with_disk 1.0' in text
        assert 'convert' in daemon.status()['tasks']
        daemon.wait_for(lambda: not os.listdir(path / 'spool'))
    assert checker.check(path).ok


@pytest.mark.needs('nbd', 'qemu')
@pytest.mark.parametrize('program', ['nbdcopy', 'qemu-img'])
def test_the_file_over_nbd(tmp_path, program):
    """Its data is not reported as zeros, which clients would not read."""
    path = repositories.create(tmp_path / 'repository')
    # Where these are in the file, the plain bytes are zeros.
    file = FILE + noise(1_500_160, 1)
    with repositories.open_repository(path) as repo:
        repositories.put(repo, 'image', file)
        assert convert(repo).images == 1
    copy = tmp_path / 'copy'
    with daemon_of(path) as daemon:
        with nbd_reader.NbdReader(str(daemon.nbd), 'image',
                                  ['base:allocation']) as reader:
            for offset, length in (0, len(file)), (len(file) - 512, 512):
                assert reader.extents(offset, length) == {
                    'base:allocation': [(length, 0)]}
        if program == 'nbdcopy':
            run(program, daemon.uri('image'), copy)
        else:
            run(program, 'convert', '-f', 'raw', '-O', 'raw',
                daemon.uri('image'), copy)
    assert copy.read_bytes() == file


def test_a_daemon_that_may_not(tmp_path):
    """Conversion is off unless an operator turns it on (F10)."""
    path = repositories.create(tmp_path / 'repository')
    with (daemon_of(path) as daemon,
          repositories.open_repository(path) as repo):
        repositories.put(repo, 'image', FILE)
        status = daemon.status()['tasks']['convert']
        assert (status['interval'], status['next']) == (0, None)
        with daemon.client() as client:
            number = client.start('account')
            client.wait('account', number, lambda *args: None)
        assert not repo.features


def convert(repo, pace=None, wait=10):
    with maintenance.maintaining(repo, wait=wait) as maintainer:
        return converter.run_once(maintainer, pace or pacing.Pace())


@pytest.mark.slow
def test_converted_while_another_host_reads_it(both):   # noqa: F811
    """A reader keeps its old recipe (I12); the next reads the new (N11)."""
    with opened(*both) as (here, there):
        repositories.put(there, 'image', FILE)
        with there.open_image('image') as image:
            assert image.read(1000) == FILE[:1000]
            assert convert(here).images == 1
            collect(here)
            assert image.read() == FILE and image.disk is None
            require_disk(there)
        require_disk(here)
        repositories.eventually(lambda: collect(here).freed_blocks > 0)
        require_disk(there)
    repositories.require_clean(shared(both[0]))


@pytest.mark.slow
def test_deleted_by_another_host_meanwhile(both):   # noqa: F811
    with opened(*both) as (here, there):
        repositories.put(here, 'image', FILE)

        def delete(done, total, what):
            if 'comparing' in what and there.images():
                there.delete('image')
        result = convert(here, pacing.Pace(delete))
        assert (result.images, result.gave_up) == (0, 1)
        assert here.images() == there.images() == []
        collect(here)
    repositories.require_clean(shared(both[0]))


@pytest.mark.slow
def test_another_host_becomes_the_maintainer(both):     # noqa: F811
    """It converts the image that the first one left unfinished."""
    class Stopping(pacing.Pace):
        def step(self, done, total, what, *args, **kwargs):
            super().step(done, total, what, *args, **kwargs)
            if 'comparing' in what:
                raise pacing.Stopped
    with opened(*both) as (here, there):
        repositories.put(here, 'image', FILE)
        with pytest.raises(pacing.Stopped):
            convert(here, Stopping())
        assert convert(there).images == 1
        for repo in (here, there):
            require_disk(repo)
        collect(there)
    repositories.require_clean(shared(both[0]))


def collect(repo):
    with maintenance.maintaining(repo, wait=10) as maintainer:
        maintenance.account(maintainer)
        return collector.run_once(maintainer, pacing.Pace())
