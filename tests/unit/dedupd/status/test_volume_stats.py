# SPDX-License-Identifier: Apache-2.0

"""The figures of volumes: from heads, servers and hostile servers."""

import contextlib
import os
import threading
import time

import pytest

from dedupd.status import repository_stats
from dedupd.status import volume_stats
from glance_dedup.repository import openvolumes
from glance_dedup.repository import volumes
from tests.support import repositories
from tests.support import volume_servers
from tests.support import volume_tools

MIB = 1 << 20
LIMIT = 20


@pytest.fixture
def repo(tmp_path):
    path = volume_tools.create_repository(tmp_path / 'repository')
    with repositories.open_repository(path) as opened:
        yield opened


@pytest.fixture
def figures(repo):
    return of(repo)


def of(repo):
    """Return new figures without a cache."""
    return volume_stats.VolumeFigures(
        repo, lambda: repository_stats.journals(repo.path))


def make(repo, name='disk', size=MIB):
    openvolumes.create(repo, name, size, project='a project')


def only(figures):
    found, = figures.all()
    return found


def test_the_table_of_counters_is_whole(repo):
    make(repo)
    assert set(openvolumes.look(repo, 'disk').counters) == set(
        volumes.COUNTERS)


def test_of_a_volume_that_nobody_uses(repo, figures):
    make(repo)
    with openvolumes.open_volume(repo, 'disk') as volume:
        volume.write(b'x' * 1000, 0)
        volume.checkpoint()
    found = only(figures)
    stat = openvolumes.look(repo, 'disk')
    assert found['volume_id'] == stat.volume_id
    assert (found['name'], found['state'], found['size'], found['project'],
            found['source'], found['created']) == (
        'disk', 'ready', MIB, 'a project', '', stat.created)
    assert not found['in_use'] and not found['is_live']
    assert found['latency'] == {}
    assert found['broken'] == '' and found['journal_bytes'] > 0
    assert found['counters']['written_bytes'] == 1000
    for key, (shown, _) in volumes.COUNTERS.items():
        assert found['counters'][shown] == stat.counters[key]
    sums = figures.sums()
    assert sums['size_bytes'] == MIB
    assert (sums['in_use'], sums['unfinished'], sums['broken']) == (0, 0, 0)
    assert sums['duplicate_percent'] == found['duplicate_percent']


def test_directories_are_measured_once(repo, monkeypatch):
    """The sums and the figures of volumes use the same measurement."""
    make(repo, 'one')
    make(repo, 'two')
    monkeypatch.setattr(repository_stats, '_FRESH', LIMIT)
    measured = []
    real = repository_stats._sizes_on_disk
    monkeypatch.setattr(repository_stats, '_sizes_on_disk', lambda path: (
        measured.append(os.path.relpath(path, repo.path)) or real(path)))
    with contextlib.closing(
            repository_stats.Figures(repo, lambda: None)) as space:
        found = volume_stats.VolumeFigures(repo, space.journals).all()
        sums = space.space()
        assert [fields['name'] for fields in found] == ['one', 'two']
        assert (sums['volumes'], sums['journal_bytes']) == (
            2, sum(fields['journal_bytes'] for fields in found))
        assert found[0]['journal_bytes'] > 0
        assert sorted(measured) == sorted([
            'groups', 'spares', 'images', 'catalog', 'volumes/one',
            'volumes/two'])
        make(repo, 'three')
        space.forget()
        assert set(space.journals()) == {'one', 'two', 'three'}


def test_the_share_that_was_stored_already(repo, figures):
    """The percentage of duplicates ignores zeros."""
    make(repo)
    assert only(figures)['duplicate_percent'] is None
    data = repositories.noise(64 << 10, 1)
    with volume_servers.serving(repo, 'disk') as server:
        for offset, content in ((0, data), (256 << 10, bytes(64 << 10)),
                                (512 << 10, data), (768 << 10, data)):
            server.volume.write(content, offset)
            server.volume.checkpoint()
        counters = server.volume.info().counters
        found = only(of(repo))
    assert counters['duplicate'] and counters['unique']
    assert found['duplicate_percent'] == pytest.approx(
        100 * counters['duplicate'] / (
            counters['unique'] + counters['duplicate']), abs=0.01)


def test_of_a_volume_that_is_served(repo, figures):
    make(repo)
    with volume_servers.serving(repo, 'disk') as server:
        server.volume.write(b'x' * 1000, 0)
        server.volume.resize(2 * MIB)
        server.volume.write(b'x' * 1000, 0)
        found = only(figures)
    assert found['in_use'] and found['is_live']
    assert found['size'] == 2 * MIB
    assert found['counters']['written_bytes'] == 2000
    assert figures.sums()['in_use'] == 1


def test_of_an_owner_that_has_no_server(repo, figures):
    """Without an answer, the figures come from the volume's head.

    The owner is a command, or a server on another host.
    """
    make(repo)
    with volume_servers.serving(repo, 'disk', answers=False) as volume:
        volume.write(b'x' * 1000, 0)
        found = only(figures)
    assert found['in_use'] and not found['is_live']
    assert found['counters']['written_bytes'] == 0 and found['broken'] == ''


def test_broken_volumes(repo, figures):
    make(repo, 'bad')
    make(repo, 'good')
    file, = (os.path.join(repo.path, 'volumes/bad', name) for name in
             os.listdir(os.path.join(repo.path, 'volumes/bad'))
             if name.startswith('journal'))
    with open(file, 'r+b') as f:
        f.write(bytes(4096))
    bad, good = figures.all()
    assert bad['state'] is None and os.path.basename(file) in bad['broken']
    assert bad['size'] is None and bad['duplicate_percent'] is None
    assert bad['counters'] == {}
    assert good['broken'] == ''
    sums = figures.sums()
    assert (sums['broken'], sums['size_bytes']) == (1, MIB)


def test_volumes_that_are_not_whole(repo, figures):
    """A volume without a journal is left out."""
    os.mkdir(os.path.join(repo.path, 'volumes/begun'))
    assert figures.all() == []
    assert figures.sums()['size_bytes'] == 0


def test_a_repository_without_volumes(tmp_path):
    with repositories.open_repository(
            repositories.create(tmp_path / 'r')) as repo:
        assert of(repo).sums()['broken'] == 0


# -- servers that cannot be trusted -------------------------------------------

ANSWERS = {
    'silence': lambda client: client.recv(1),
    'drips': lambda client: [
        (client.sendall(b'x'), time.sleep(0.1)) for _ in range(100)],
    'half': lambda client: client.sendall(b'ok\nsize 1'),
    'flood': lambda client: client.sendall(b'ok\n' + b'x' * (1 << 20)),
    'error': lambda client: client.sendall(b'error io no\n\n'),
    'another': lambda client: client.sendall(
        b'ok\nvolume_id ' + b'0' * 32 + b'\nsize 3\n\n'),
}


@pytest.mark.parametrize('answer', ANSWERS.values(), ids=ANSWERS.keys())
def test_servers_that_do_not_answer(repo, figures, answer):
    """A server that does not answer delays the figures only briefly.

    The figures come from the volume's head.
    """
    make(repo)
    with volume_servers.serving(repo, 'disk', answer=answer):
        began = time.monotonic()
        found = only(figures)
        assert time.monotonic() - began < LIMIT / 2
    assert found['in_use'] and not found['is_live']
    assert (found['size'], found['broken']) == (MIB, '')


def test_answers_that_lie(repo, figures):
    """False answers yield valid numbers and short texts."""
    make(repo)
    volume_id = openvolumes.look(repo, 'disk').volume_id

    def answer(client):
        client.sendall(
            f'ok\nvolume_id {volume_id}\nsize -1\nread {"9" * 5000}\n'
            f'written 1e9\nflushes 7\nread_latency -1 5\n'
            f'write_latency {"9" * 20}{" 1" * 21}\n'
            f'flush_latency 48000{" 1" * 21}\n'
            f'broken {"x" * 50000}\n\n'.encode())

    with volume_servers.serving(repo, 'disk', answer=answer):
        found = only(figures)
    assert found['is_live'] and found['size'] == MIB
    counters = found['counters']
    assert (counters['read_bytes'], counters['written_bytes'],
            counters['flushes']) == (0, 0, 7)
    assert found['latency'] == {'flush': {
        'seconds': 48e-6, 'counts': [1] * 21, 'median': 16384e-6,
        'p99': None}}
    assert set(found['broken']) == {'x'} and len(found['broken']) <= 1000


def test_the_time_for_all_is_bounded(repo, figures, monkeypatch):
    """The time is limited, and each server has its turn in a later call."""
    monkeypatch.setattr(volume_stats, 'ASKING', 0.4)
    monkeypatch.setattr(volume_stats, 'PATIENCE', 0.2)
    monkeypatch.setattr(volume_stats, 'FRESH', 0)
    monkeypatch.setattr(volume_stats, 'SHARE', 1e9)
    asked = []
    with contextlib.ExitStack() as stack:
        for n in range(6):
            make(repo, f'disk-{n}')

            def answer(client, n=n):
                asked.append(n)
                client.recv(1)

            stack.enter_context(volume_servers.serving(
                repo, f'disk-{n}', answer=answer))
        began = time.monotonic()
        assert len(figures.all()) == 6
        assert time.monotonic() - began < LIMIT
        # The first server may answer after its client has stopped waiting.
        repositories.eventually(lambda: asked)
        assert len(set(asked)) < 6
        for _ in range(6):
            figures.all()
        repositories.eventually(lambda: set(asked) == set(range(6)))


def test_nobody_waits_for_another_thread(repo, figures, monkeypatch):
    """A call returns older figures while another thread hangs."""
    make(repo)
    monkeypatch.setattr(volume_stats, 'FRESH', 0)
    monkeypatch.setattr(volume_stats, 'SHARE', 1e9)
    before = figures.all()
    look, begun, go_on = figures._look, threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert go_on.wait(LIMIT)
        return look()

    monkeypatch.setattr(figures, '_look', slow)
    thread = threading.Thread(target=figures.all)
    thread.start()
    try:
        assert begun.wait(LIMIT)
        assert figures.all() is before
    finally:
        go_on.set()
        thread.join(LIMIT)
    assert figures._found is not before


def test_figures_are_used_again(repo, figures, monkeypatch):
    monkeypatch.setattr(volume_stats, 'FRESH', 3600)
    make(repo)
    assert len(figures.all()) == 1
    make(repo, 'other')
    assert len(figures.all()) == 1
