# SPDX-License-Identifier: Apache-2.0

"""The store in several processes and threads."""

import hashlib
import os
import signal
import threading

import glance_store

from tests.support.repositories import noise
from tests.support import stores
from tests.support.stores import add
from tests.support.stores import delete
from tests.support.stores import Dribble
from tests.support.stores import get
from tests.support.stores import get_size
from tests.support.stores import repo

MIB = 1 << 20

configure = stores.configure
store = stores.store


def in_children(count, function):
    """Run a function in forked processes and require that all succeed."""
    children = []
    for number in range(count):
        child = os.fork()
        if not child:
            signal.alarm(60)  # a child that hangs must not stay
            try:
                function(number)
                os._exit(0)
            except BaseException as exc:
                print(repr(exc), flush=True)
            finally:
                os._exit(1)
        children.append(child)
    results = [os.waitpid(child, 0)[1] for child in children]
    assert results == [0] * count


def test_processes_that_start_at_once_make_one_repository(configure,
                                                          tmp_path):
    """Six processes configure the store at once, as uWSGI's workers do."""
    ids = tmp_path / 'ids'
    ids.mkdir()
    for attempt in range(5):
        def start(number, attempt=attempt):
            store = configure(one={
                'dedup_store_datadir': tmp_path / f'r{attempt}'})
            url = add(noise(MIB), f'image{number}')[0]
            assert get(url) == noise(MIB)
            (ids / str(number)).write_text(repo(store).repository_id)

        in_children(6, start)
        assert len({path.read_text() for path in ids.iterdir()}) == 1


def test_a_fork_after_use(store):
    """A child and its parent use the store independently after a fork."""
    data = noise(6 * MIB)
    url = add(data, 'parent')[0]
    download, _size = glance_store.get(url, 'one')
    pieces = iter(download)
    first = next(pieces)

    def child(number):
        assert get(url) == data
        mine = add(noise(5 * MIB, number), f'child{number}')[0]
        assert get(mine) == noise(5 * MIB, number)
        if number:
            delete(mine)

    in_children(3, child)
    assert first + b''.join(pieces) == data
    assert repo(store).images() == ['child0', 'parent']


def test_one_instance_many_threads(store):
    errors = []

    def run(number):
        try:
            for turn in range(4):
                data = noise(number * 100000 + turn, turn)
                url, size, md5, _multihash, _metadata = add(
                    Dribble(data, 200000), f'image-{number}-{turn}')
                assert md5 == hashlib.md5(data).hexdigest()
                assert get_size(url) == size == len(data)
                assert get(url) == data
                assert get(url, offset=5, chunk_size=7) == data[5:12]
                if turn % 2:
                    delete(url)
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(number,))
               for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(repo(store).images()) == 24
