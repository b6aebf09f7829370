# SPDX-License-Identifier: Apache-2.0

"""DEDE's experiments measure all possible sharing."""


import pytest

from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import image_repository
from tests.benchmarks import papers
from tests.benchmarks import test_hosts

pytestmark = pytest.mark.long

BLOCK = 4096
MIB = 1 << 20
#: MiB of the images that rates are measured with.
MERGED = 8


dede = papers.fixture('dede')


@pytest.fixture(scope='module')
def program(dede, tmp_path_factory):
    return dede.synthetic.build(str(tmp_path_factory.mktemp('program')))


# -- savings ------------------------------------------------------------------

@pytest.fixture(scope='module')
def images(dede, tmp_path_factory):
    return dede.hosts.made_images(
        str(tmp_path_factory.mktemp('images')), 12, 4)


@pytest.mark.parametrize('number', range(3))
def test_savings(dede, images, tmp_path, number):
    """Merging finds all duplicates; hosts find nearly all while they store."""
    way = dede.WAYS[number]
    exact = len(set(test_hosts.blocks_of(images))) * BLOCK
    kept = dede.store(way, images, str(tmp_path), str(tmp_path))
    assert not list(tmp_path.iterdir())
    assert kept.named == [4 * MIB * n for n in range(13)]
    assert kept.left == exact
    # 8.5 bytes for each block, in frames, and the heads of files.
    assert 8.5 * exact // BLOCK < kept.index < 10 * exact // BLOCK
    if way.dedup:
        assert kept.named[-1] - kept.stored[-1] >= 0.98 * (
            kept.named[-1] - exact)
    else:
        assert kept.stored == kept.named


def test_ways(dede):
    assert [(way.hosts, way.dedup) for way in dede.WAYS] == [
        (1, True), (4, True), (4, False)]


def test_table_of_savings(dede, capsys):
    """Savings are shown as shares of the possible savings."""
    kept = dede.hosts.Kept(
        [0, 50 * MIB, 100 * MIB], [0, 50 * MIB, 70 * MIB], 10 * MIB, 1.5,
        MIB // 2, 3 * MIB)
    dede.show_savings({'a way': kept}, 60 * MIB)
    dede.show_metadata(kept)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:2] == ['100', 'MiB'] and '60.0%' in lines[0]
    assert lines[3] == ['a', 'way', '70.0', '70.0%', '75.00%', '60.0', '60.0%',
                        '100.00%', '1.50']
    assert lines[5][:4] == ['index', '0.5', 'MiB,', '0.83%']
    # 56.9 bytes for each of 15,360 blocks.
    assert lines[6][2:5] == ['0.8', 'MiB,', '1.39%']
    assert lines[7][:4] == ['catalog', '3.0', 'MiB,', '5.00%']


# -- rates --------------------------------------------------------------------

def test_noise(dede):
    """One image shares one block of each MiB with the others."""
    base, twin, few = (b''.join(dede.noise(MERGED, kind))
                       for kind in ('base', 'twin', 'few'))
    assert len(base) == MERGED * MIB and base == twin
    equal = [at for at in range(0, len(base), BLOCK)
             if base[at:at + BLOCK] == few[at:at + BLOCK]]
    assert equal == list(range(0, MERGED * MIB, MIB))
    blocks = {data[at:at + BLOCK] for data in (base, few)
              for at in range(0, len(data), BLOCK)}
    assert len(blocks) == 2 * len(base) // BLOCK - MERGED


@pytest.mark.parametrize('policy', ['hash', 'value'])
def test_rates(dede, tmp_path, policy):
    """All blocks are shared; otherwise the program ends."""
    blocks = MERGED * 256
    rates = list(dede.rates_of_stages(str(tmp_path), str(tmp_path / 'filters'),
                                      MERGED, policy))
    rates.append(dede.rate_of_merging(str(tmp_path), str(tmp_path / 'filters'),
                                      MERGED, policy))
    assert [(rate.name, rate.blocks) for rate in rates] == [
        ('find', 3 * blocks), ('subdivide', blocks), ('share', blocks),
        ('merging', blocks + MERGED)]
    assert all(rate.processor > 0 and rate.clock > 0 for rate in rates)


def test_exchanged_images_are_what_they_were(dede, tmp_path):
    """Exchanged images are unchanged, and name the base's blocks."""
    path = str(tmp_path / 'repository')
    image_repository.Repository.create(path)
    with image_repository.Repository(
            path, filter_dir=str(tmp_path / 'filters')) as repo:
        dede.put_noise(repo, 4)
        with maintainer_role.Maintainer(repo) as maintainer:
            dede.accounting.run_once(maintainer, dede.pacing.Pace())
            assert dede.duplicate_pairs.Duplicates(
                maintainer, dede.pacing.Pace()).catch_up() == 3 * 1024
            mapping = dede.mapping_of(maintainer)
            old = block_addresses.unpack(mapping, 'Q')[::2]
            assert list(old) == sorted(set(old)) and len(old) == 1028
            assert dede.exchange(maintainer, 'few', mapping) == 4
            assert dede.exchange(maintainer, 'twin', mapping) == 1024
            assert dede.exchange(maintainer, 'twin', mapping) == 0
        named = {}
        for kind in ('base', 'twin', 'few'):
            with repo.open_image(kind) as image:
                assert b''.join(image.pieces()) == b''.join(
                    dede.noise(4, kind))
                named[kind] = {(extent.group, extent.slot + i)
                               for extent in image.extents()
                               for i in range(extent.blocks)}
        assert named['twin'] == named['base']
        assert len(named['few'] & named['base']) == 4


def test_what_is_not_shared_ends_the_program(dede):
    dede.need(3, 3)
    with pytest.raises(SystemExit, match='2 blocks were shared, and not 3'):
        dede.need(2, 3)


def test_table_of_rates(dede, capsys):
    dede.show_rates([dede.Rate('share', 500_000, 2.0, 4.0),
                     dede.Rate('find', 100, 1.0, 1.0)], 'hash')
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    # 500,000 blocks of 4 KiB in 4 s: 512 MB/s.
    assert lines[2] == ['share', '500,000', '0.250', '0.125', '512.0', '2.6']
    assert lines[3] == ['find', '100', '0.000', '0.000', '0.4']


# -- indexes and logs ---------------------------------------------------------

def test_index(dede, program, tmp_path):
    """The index has each block once, though some are merged again."""
    path = str(tmp_path / 'repository')
    found = dede.exactindex.measure(path, 40_000, program)
    assert [(stage.name, stage.entries) for stage in found.stages.values()
            ] == [(name, 40_000) for name in ('scan', 'merge', 'merge, again')]
    assert 8.5 * 40_000 < found.bytes < 8.7 * 40_000
    with image_repository.Repository(path) as repo:
        for number in (0, 1, 39_999):
            group, slot = dede.synthetic.address(number)
            assert dede.exactindex.exactindex.find(
                repo.handle(), dede.exactindex.CATALOG_ID,
                dede.synthetic.fingerprint(number)) == group << 15 | slot
        assert dede.exactindex.exactindex.find(
            repo.handle(), dede.exactindex.CATALOG_ID,
            dede.synthetic.fingerprint(40_000)) is None


def test_again_is_a_tenth(dede, program, tmp_path, monkeypatch):
    """A second merge takes a tenth of the entries, up to the limit."""
    counts = []
    add = dede.exactindex.exactindex.Index.add
    monkeypatch.setattr(
        dede.exactindex.exactindex.Index, 'add',
        lambda self, records: (counts.append(len(records)),
                               add(self, records)))
    for limit in 1_000_000, 300:
        monkeypatch.setattr(dede.exactindex, 'AGAIN', limit)
        dede.exactindex.measure(str(tmp_path / str(limit)), 5000, program)
    assert counts == [500, 300]


def test_logs(dede, tmp_path, capsys):
    """A host reads 57 bytes for each block that another stored."""
    dede.show_logs(str(tmp_path), 16)
    line = capsys.readouterr().out.split()
    assert line[:3] == ['of', '17', 'MB']
    assert 0.2 < float(line[7]) < 0.4   # MB
    assert not list(tmp_path.iterdir())


@pytest.fixture
def found(dede):
    """Two indexes with invented figures."""
    def measured(count, size, clock):
        return dede.exactindex.Measured(
            {name: dede.exactindex.Stage(name, count, 1.0, clock)
             for name in ('scan', 'merge', 'merge, again')}, size)
    return {2_000_000: measured(2_000_000, 26 * MIB, 4.0),
            4_000_000: measured(4_000_000, 52 * MIB, 2.0)}


def test_table_of_indexes(dede, found, capsys):
    dede.show_indexes(found)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[2:] == [
        ['2,000,000', '26.0', '13.63', '4.00', '4.00', '4.00'],
        ['4,000,000', '52.0', '13.63', '2.00', '2.00', '2.00']]
    assert dede.rate_of_scan(found[4_000_000]) == dede.Rate(
        'scan', 4_000_000, 1.0, 2.0)


def test_figures(dede, found, monkeypatch):
    """The figures plot MiB against MiB, and millions of records a second."""
    drawn = []
    monkeypatch.setattr(dede.plot, 'lines',
                        lambda *args, **_: drawn.append(args))
    dede.draw_savings({'a way': dede.hosts.Kept(
        [0, MIB], [0, MIB // 2], 0, 1.0, 1, 1)}, '/there')
    dede.draw_indexes(found, '/there')
    (hosts, *_, path), (index, *_, other) = drawn
    assert hosts == {'a way': ([0, 1], [0, 0.5])}
    assert index['scan'] == ([2_000_000, 4_000_000], [0.5, 2.0])
    assert index["DEDE's scan"][1] == [pytest.approx(1.611, abs=0.001)] * 2
    assert (path, other) == ('/there/experiments-dede-hosts.svg',
                             '/there/experiments-dede-index.svg')
