# SPDX-License-Identifier: Apache-2.0

"""Hosts with mounts and daemons find duplicates, and merging the rest."""

import pathlib
import time

import pytest

from tests.benchmarks import papers

pytestmark = pytest.mark.long

BLOCK = 4096
MIB = 1 << 20
COUNT = 12


hosts = papers.fixture('hosts')


@pytest.fixture(scope='module')
def images(hosts, tmp_path_factory):
    return hosts.made_images(str(tmp_path_factory.mktemp('images')), COUNT, 4)


def blocks_of(paths):
    contents = [pathlib.Path(path).read_bytes() for path in paths]
    return [content[at:at + BLOCK] for content in contents
            for at in range(0, len(content), BLOCK)]


def test_made_images_have_aged(images):
    """Each image has most of its blocks in common with the others."""
    blocks = blocks_of(images)
    assert len(blocks) == COUNT * 1024
    for path in images:
        own = set(blocks_of([path]))
        others = set(blocks_of(set(images) - {path}))
        assert 0.05 < len(own - others) / len(own) < 0.25


def test_in_turn(hosts, images, tmp_path):
    """The daemons scan between the images, so nearly all is found inline."""
    exact = len(set(blocks_of(images))) * BLOCK
    kept = hosts.store('in turn', images, str(tmp_path), str(tmp_path),
                       interval=0.1)
    assert not list(tmp_path.iterdir())
    assert kept.named == [4 * MIB * n for n in range(COUNT + 1)]
    assert kept.named[-1] - kept.stored[-1] >= 0.98 * (
        kept.named[-1] - exact)
    assert kept.left == exact
    # 8.5 bytes for each block, in frames, and the heads of files.
    assert 8.5 * exact // BLOCK < kept.index < 10 * exact // BLOCK


def test_at_once(hosts, images, tmp_path):
    """Without a scan each host finds its own images' blocks, and no others.

    Merging finds the rest.
    """
    exact = len(set(blocks_of(images))) * BLOCK
    own = BLOCK * sum(len(set(blocks_of(images[number::4])))
                      for number in range(4))
    kept = hosts.store('at once', images, str(tmp_path), str(tmp_path),
                       interval=3600)
    assert kept.named[-1] == COUNT * 4 * MIB
    # Less, if a process stored so late that it scanned by itself.
    assert exact <= kept.stored[-1] <= 1.02 * own
    assert kept.left == exact


def test_daemon_that_does_not_look(hosts, monkeypatch):
    """The program ends with an error if a daemon does not scan."""
    class Deaf(hosts.Host):
        def __init__(self):
            self.daemon = self

        def status(self):
            return {'filter': {'filter_refresh_age_seconds': 1000.0}}

        def text(self):
            return 'its log'

    monkeypatch.setattr(hosts, 'LIMIT', 0.1)
    with pytest.raises(SystemExit, match='does not look .* its log'):
        Deaf().wait_for_scan(time.monotonic())


def test_table(hosts, capsys):
    """Savings are shown as shares of the possible savings."""
    hosts.show({'a way': hosts.Kept(
        [0, 50 * MIB, 100 * MIB], [0, 50 * MIB, 70 * MIB], 10 * MIB, 1.5, 1,
        1)}, 60 * MIB)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ['a', 'way', '70.0', '70.0%', '75.00%', '60.0', '60.0%',
                        '100.00%', '1.50']
