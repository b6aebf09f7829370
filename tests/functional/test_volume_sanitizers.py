# SPDX-License-Identifier: Apache-2.0

"""The plugin for nbdkit with all of the engine, under the sanitizers."""

import concurrent.futures
import itertools
import pathlib
import platform
import random
import subprocess
import threading

import pytest

from glance_dedup.base import exceptions
from glance_dedup.client import volume_control
from glance_dedup.repository import openvolumes
from tests.support import cold_repositories
from tests.support import daemons
from tests.support import native
from tests.support import nbd
from tests.support import repositories
from tests.support import volume_tools

MIB = 1 << 20
SIZE = 6 * MIB

# Long: the engine and the plugin are compiled for each sanitizer, under which
# they run for a quarter of a minute.
pytestmark = [pytest.mark.slow, pytest.mark.needs('nbdkit')]
pytest_plugins = ['tests.support.object_fixtures']

# This replaces nbdkit's own plugin, with the sanitizer's runtime for nbdkit
# alone.
BEFORE = '''
from glance_dedup.cli import volumeserve
import os
volumeserve.PLUGIN = {plugin!r}
os.environ['LD_PRELOAD'] = {runtime!r}
'''


@pytest.fixture(scope='module', params=[
    pytest.param('asan', marks=pytest.mark.needs('clang')), 'tsan'])
def plugin(request):
    """The sanitizer's name, the plugin, and the runtime."""
    found = native.directory(request.param, 'plugin') / 'plugin.so'
    command = {
        'asan': ['clang', '-print-file-name='
                 f'libclang_rt.asan-{platform.machine()}.so'],
        'tsan': ['gcc', '-print-file-name=libtsan.so']}[request.param]
    runtime = subprocess.run(
        command, check=True, capture_output=True, text=True,
        timeout=60).stdout.strip()
    return request.param, found, str(pathlib.Path(runtime).resolve())


def environment(plugin):
    """Options of a server with this plugin."""
    _, path, runtime = plugin
    return {
        'before': BEFORE.format(plugin=str(path), runtime=runtime),
        # nbdkit keeps memory and threads to its end.
        'ASAN_OPTIONS': 'detect_leaks=0',
        'UBSAN_OPTIONS': 'print_stacktrace=1',
        'TSAN_OPTIONS': 'report_thread_leaks=0'}


@pytest.mark.timeout(900)
def test_all_at_once(plugin, tmp_path):
    """Writers, checkpoints, snapshots, resizes and the end overlap safely."""
    repository = volume_tools.create_repository(tmp_path / 'repository')
    volume_tools.create(repository, 'disk', SIZE)
    ended = threading.Event()
    failed = []

    def guarded(work):
        def run():
            try:
                while not ended.is_set():
                    work()
            except Exception as e:
                if not ended.is_set():
                    failed.append(e)
        return threading.Thread(target=run)

    with volume_tools.Server(
            repository, tmp_path, **environment(plugin)) as server:
        server.start()
        sessions = [server.session() for _ in range(3)]
        threads = []
        for n, session in enumerate(sessions):
            rng = random.Random(n)
            threads.append(guarded(
                lambda session=session, rng=rng: requests(session, rng)))
        count = itertools.count()
        numbers = []

        def new_number():
            number = next(count)
            numbers.append(number)
            return number

        def snapshot():
            server.control.snapshot(f'image-{new_number()}')

        def resize():
            server.control.resize(SIZE + 512 * new_number())
            with pytest.raises(exceptions.InvalidParameter):
                server.control.resize(SIZE * 512 + 3)
            with pytest.raises(exceptions.BusyError):
                server.control.resize(SIZE - 512)

        for work in (snapshot, resize, server.control.checkpoint,
                     server.control.status):
            threads.append(guarded(work))
        for thread in threads:
            thread.start()
        ended.wait(15)
        repositories.eventually(lambda: failed or len(numbers) > 5, 200)
        assert not failed, failed
        # The server ends in the middle of it all.
        ended.set()
        server.stop()
        for thread in threads:
            thread.join(nbd.LIMIT)
        assert 'Sanitizer' not in server.text(), server.text()
        assert 'runtime error' not in server.text(), server.text()
        with pytest.raises(volume_control.NotServed):
            server.control.status()


@pytest.mark.timeout(900)
def test_cold_groups(plugin, tmp_path, server, proxy, faults):
    """Reads work while the daemon is killed, or the store does not answer."""
    size = 2 * cold_repositories.GROUP
    cold = cold_repositories.ColdRepository(tmp_path / 'r', server, proxy.url)
    cold.put('one', repositories.noise(size, 1))
    with cold.open() as repo, repo.open_image('one') as image:
        openvolumes.create(repo, 'disk', image=image, part_size=MIB)
    assert cold.cool() == 2
    with daemons.Daemon(cold.path) as daemon, volume_tools.Server(
            cold.path, tmp_path, **environment(plugin),
            GLANCE_DEDUP_SOCKET=daemon.socket) as disk:
        daemon.start()
        disk.start()

        def read(seed):
            rng = random.Random(seed)
            with disk.session() as session:
                for _ in range(100):
                    offset = rng.randrange(size - 300_000)
                    error, data = session.answer(nbd.READ, offset, 300_000)
                    assert error in (0, nbd.EIO)
                    assert error or data == (
                        cold.images['one'][offset:offset + 300_000])

        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            for _ in range(2):
                reading = [pool.submit(read, seed) for seed in range(3)]
                faults.always = 503
                daemon.kill()
                cold.forget()
                daemon.start()
                faults.always = None
                for one in reading:
                    one.result(400)
        disk.stop()
        assert 'Sanitizer' not in disk.text(), disk.text()
        assert 'runtime error' not in disk.text(), disk.text()


def requests(session, rng):
    offset = rng.randrange(SIZE - 100_000)
    length = rng.randrange(1, 100_000)
    volume_tools.write(session, offset, rng.randbytes(length),
                       rng.choice([0, 0, volume_tools.FUA]))
    session.read(*rng.choice([(offset, length), (0, 100_000)]))
    volume_tools.ask(session, rng.choice([nbd.TRIM, nbd.ZEROES, nbd.CACHE,
                                          nbd.STATUS]), offset, length)
