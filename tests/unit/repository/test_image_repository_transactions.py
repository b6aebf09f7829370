# SPDX-License-Identifier: Apache-2.0

"""The API: transactions, handles and threads."""

import gc
import os
import threading

import pytest

from glance_dedup.base import exceptions
from tests.support import repositories
from tests.support.repositories import mixture
from tests.support.repositories import noise
from tests.support.repositories import open_repository
from tests.support.repositories import put
from tests.support.repositories import read_all
from tests.unit.repository import fixtures

MIB = 1 << 20

path = fixtures.path
repo = fixtures.repo
large = fixtures.large


@pytest.mark.parametrize('handles', [1, 2])
def test_two_transactions_on_one_id(path, handles):
    """I11: of two uploads of one id exactly one commits."""
    with open_repository(path) as one, open_repository(path) as other:
        for i in range(15):
            outcomes = {}
            barrier = threading.Barrier(2)

            def commit(name, repo, i=i, outcomes=outcomes, barrier=barrier):
                with repo.begin(f'image-{i}') as transaction:
                    transaction.write(name.encode() * 1000)
                    barrier.wait(60)
                    try:
                        transaction.commit()
                        outcomes[name] = True
                    except exceptions.ImageExists:
                        outcomes[name] = False
            threads = [
                threading.Thread(target=commit, args=('a', one)),
                threading.Thread(target=commit, args=(
                    'b', other if handles == 2 else one))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert sorted(outcomes.values()) == [False, True]
            winner = max(outcomes, key=outcomes.get)
            assert read_all(one, f'image-{i}') == winner.encode() * 1000
        assert len(repositories.spool(path)) == 15
    repositories.require_clean(path)


def test_abort_leaves_nothing(large):
    path = large.path
    put(large, 'kept', noise(MIB))
    spool = os.listdir(os.path.join(path, 'spool'))
    group = repositories.group_path(path, 1)
    size = group.stat().st_size
    transaction = large.begin('image')
    for i in range(13):
        transaction.write(noise(MIB, i + 10))
    assert group.stat().st_size > size
    transaction.abort()
    assert group.stat().st_size == size
    assert large.images() == ['kept']
    assert os.listdir(os.path.join(path, 'spool')) == spool
    transaction.abort()
    put(large, 'image', noise(MIB, 99))
    assert read_all(large, 'image') == noise(MIB, 99)
    assert read_all(large, 'kept') == noise(MIB)
    repositories.require_clean(path)


def test_leaving_a_transaction_aborts_it(repo, path):
    with pytest.raises(KeyError):
        with repo.begin('image') as transaction:
            transaction.write(noise(5000))
            raise KeyError
    with repo.begin('image') as transaction:
        transaction.write(noise(5000))
    assert repo.images() == []
    assert os.listdir(path / 'spool') == []
    # A forgotten image does not stay open, either.
    transaction = repo.begin('image')
    transaction.write(noise(5000))
    assert len(os.listdir(path / 'spool')) == 1
    del transaction
    gc.collect()
    assert os.listdir(path / 'spool') == []


def test_use_after_the_end(repo):
    transaction = repo.begin('image')
    transaction.write(b'x')
    transaction.commit()
    transaction.abort()
    for call in (lambda: transaction.write(b'y'), transaction.commit):
        with pytest.raises(exceptions.ClosedError):
            call()
    assert read_all(repo, 'image') == b'x'
    transaction = repo.begin('other')
    transaction.abort()
    for call in (lambda: transaction.write(b'y'), transaction.commit):
        with pytest.raises(exceptions.ClosedError):
            call()
    assert repo.images() == ['image']
    image = repo.open_image('image')
    image.close()
    image.close()
    for call in (image.read, lambda: image.readinto(bytearray(5)),
                 lambda: list(image.extents()),
                 lambda: image.is_zeros(1, 0)):
        with pytest.raises(exceptions.ClosedError):
            call()


def test_use_after_close(path):
    repo = open_repository(path)
    put(repo, 'image', b'content')
    image = repo.open_image('image')
    transaction = repo.begin('late')
    transaction.write(b'late')
    repo.close()
    repo.close()
    for call in (lambda: repo.begin('x'), lambda: repo.open_image('image'),
                 lambda: repo.delete('image'), repo.images, repo.statistics,
                 repo.rebuild_filter, lambda: repo.stat('image')):
        with pytest.raises(exceptions.ClosedError):
            call()
    assert image.read() == b'content'
    transaction.commit()
    image.close()
    with open_repository(path) as repo:
        assert read_all(repo, 'late') == b'late'


def test_close_lets_go_of_everything(path):
    def open_files():
        return sorted(
            target for target in (
                os.readlink(f'/proc/self/fd/{fd}')
                for fd in os.listdir('/proc/self/fd')
                if os.path.lexists(f'/proc/self/fd/{fd}'))
            if str(path) in target)
    threads = set(threading.enumerate())
    for _ in range(3):
        with open_repository(path) as repo:
            put(repo, 'image', mixture(100000))
            read_all(repo, 'image')
            repo.begin('other').write(noise(100000, 4))
            repo.delete('image')
            assert open_files()
        gc.collect()
        assert open_files() == []
    # Threads of other tests may end meanwhile.
    assert set(threading.enumerate()) <= threads


def test_descriptors_are_bounded(path):
    """The number of open files is bounded for many groups and images."""
    with open_repository(path) as repo:
        for i in range(40):
            put(repo, f'image-{i}', noise(33000, i))
        assert len(os.listdir(path / 'groups')) >= 40
        for i in range(40):
            assert read_all(repo, f'image-{i}') == noise(33000, i)
        put(repo, 'all', b''.join(noise(33000, i) for i in range(40)))
        assert read_all(repo, 'all') == b''.join(
            noise(33000, i) for i in range(40))
        count = sum(
            str(path) in os.readlink(f'/proc/self/fd/{fd}')
            for fd in os.listdir('/proc/self/fd')
            if os.path.lexists(f'/proc/self/fd/{fd}'))
        assert count < 200


def test_two_threads_in_one_transaction(large):
    pieces = [noise(4096 * 50, i) for i in range(60)]
    with large.begin('image') as transaction:
        def write(some):
            for piece in some:
                transaction.write(piece)
        threads = [threading.Thread(target=write, args=(pieces[i::3],))
                   for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        transaction.commit()
    data = read_all(large, 'image')
    found = [data[i:i + 4096 * 50] for i in range(0, len(data), 4096 * 50)]
    assert sorted(found) == sorted(pieces)
    # The pieces of each thread are in its order.
    for i in range(3):
        mine = [piece for piece in found if piece in pieces[i::3]]
        assert mine == pieces[i::3]


def test_abort_while_another_thread_writes(large):
    for i in range(5):
        transaction = large.begin('image')
        started = threading.Event()
        outcomes = []

        def write(transaction=transaction, started=started,
                  outcomes=outcomes):
            try:
                for n in range(1000):
                    transaction.write(noise(MIB // 4, n % 50))
                    started.set()
            except exceptions.ClosedError:
                outcomes.append('closed')
        thread = threading.Thread(target=write)
        thread.start()
        assert started.wait(60)
        transaction.abort()
        thread.join(60)
        assert outcomes == ['closed']
    assert large.images() == []
    assert os.listdir(os.path.join(large.path, 'spool')) == []


def test_many_threads_store_and_read(path):
    failures = []

    def work(repo, n):
        try:
            for i in range(4):
                data = mixture(60000 + n * 777, seed=i * 3 + n % 2, unit=512)
                put(repo, f'image-{n}-{i}', data)
                assert read_all(repo, f'image-{n}-{i}') == data
                if i % 2:
                    repo.delete(f'image-{n}-{i}')
        except BaseException as e:
            failures.append(e)
            raise
    with open_repository(path) as repo:
        threads = [threading.Thread(target=work, args=(repo, n))
                   for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert not failures
        assert repo.images() == sorted(
            f'image-{n}-{i}' for n in range(6) for i in (0, 2))
    repositories.require_clean(path)


def test_transaction_whose_upload_id_is_the_recipes(repo):
    with repo.begin('image') as transaction:
        upload_id = transaction.upload_id
        stat = transaction.commit()
    assert stat.upload_id == upload_id == repo.stat('image').upload_id
    assert len(upload_id) == 32
