# SPDX-License-Identifier: Apache-2.0

"""The engine maps disks as QEMU reads them, in files that QEMU wrote."""

import random
import subprocess

import pytest

from tests.support import diskmaps

pytestmark = pytest.mark.needs('qemu')

MIB = 1 << 20
SIZE = 6 * MIB + 512


def qemu_img(*arguments):
    subprocess.run(['qemu-img', *map(str, arguments)], check=True, timeout=120,
                   stdout=subprocess.DEVNULL)


def qemu_io(path, *commands):
    """Write to the disk in a file, as a server does."""
    words = [word for command in commands for word in ('-c', command)]
    subprocess.run(['qemu-io', *words, path], check=True, timeout=120,
                   stdout=subprocess.DEVNULL)


@pytest.fixture(scope='module')
def raw(tmp_path_factory):
    """A disk with text, random bytes and zeros, in pieces of any length."""
    path = tmp_path_factory.mktemp('raw') / 'disk.raw'
    dice = random.Random(41)
    words = [dice.randbytes(dice.randrange(2, 9)) for _ in range(500)]
    disk = bytearray()
    while len(disk) < SIZE:
        length = dice.choice((700, 5000, 70_000, 300_000))
        disk += dice.choice((
            bytes(length), dice.randbytes(length),
            b' '.join(dice.choices(words, k=length // 6))))
    path.write_bytes(disk[:SIZE])
    return path


def require_same(path, tmp_path):
    """Compare a file's map with the disk that QEMU reads; return the map."""
    wanted = tmp_path / 'wanted.raw'
    found = diskmaps.of_file(path)
    # QEMU takes a fixed VHD for a raw disk unless it is told.
    qemu_img('convert', '-f', found.format, '-O', 'raw', path, wanted)
    disk = wanted.read_bytes()
    assert found.size == len(disk)
    assert found.read(path.read_bytes()) == disk
    return found


def kinds(found):
    return {piece.kind for piece in found.pieces}


@pytest.mark.parametrize('cluster_bits', range(9, 22))
@pytest.mark.parametrize('compress', [(), ('-c',)], ids=['plain', 'deflated'])
def test_qcow2_of_any_cluster_size(raw, tmp_path, cluster_bits, compress):
    path = tmp_path / 'disk'
    version = ('1.1', '0.10')[cluster_bits % 2]
    qemu_img('convert', *compress, '-O', 'qcow2', '-o',
             f'compat={version},cluster_size={1 << cluster_bits}', raw, path)
    found = require_same(path, tmp_path)
    assert found.format == 'qcow2'
    assert (diskmaps.DEFLATED in kinds(found)) == bool(compress)


@pytest.mark.parametrize('cluster', [16 << 10, 64 << 10, 2 << 20])
def test_qcow2_with_extended_tables(raw, tmp_path, cluster):
    path = tmp_path / 'disk'
    qemu_img('convert', '-c', '-O', 'qcow2', '-o',
             f'extended_l2=on,cluster_size={cluster}', raw, path)
    assert diskmaps.DEFLATED in kinds(require_same(path, tmp_path))
    part = max(cluster // 32, 512)
    qemu_img('resize', path, '64M')
    qemu_io(path, f'write -P 7 20M {part}',
            f'write -P 8 {(20 << 20) + 3 * part} {part}',
            f'write -z -u {(20 << 20) + 5 * part} {2 * part}',
            f'write -P 9 {40 << 20} {cluster}',
            f'discard {40 << 20} {4 * part}', f'write -P 1 0 {part}')
    assert kinds(require_same(path, tmp_path)) >= {
        diskmaps.UNALLOCATED, diskmaps.ZEROS, diskmaps.PLAIN}


def test_qcow2_of_a_server_that_ran(raw, tmp_path):
    path = tmp_path / 'disk'
    qemu_img('convert', '-c', '-O', 'qcow2', raw, path)
    qemu_img('snapshot', '-c', 'before', path)
    qemu_img('bitmap', '--add', path, 'changes')
    qemu_img('resize', path, '99M')
    qemu_io(path, 'write -P 3 1M 100k', 'write -P 4 90M 3M',
            'write -z 2M 1M', 'discard 91M 1M', 'write -P 5 70000 512')
    assert kinds(require_same(path, tmp_path)) == {
        diskmaps.UNALLOCATED, diskmaps.ZEROS, diskmaps.PLAIN,
        diskmaps.DEFLATED}


@pytest.mark.parametrize('options', [
    'preallocation=metadata', 'preallocation=falloc', 'preallocation=full',
    'refcount_bits=1', 'refcount_bits=64', 'lazy_refcounts=on'])
def test_qcow2_made_with(tmp_path, options):
    path = tmp_path / 'disk'
    qemu_img('create', '-f', 'qcow2', '-o', options, path, '9M')
    qemu_io(path, 'write -P 3 1M 100k', 'write -P 4 8M 1M')
    require_same(path, tmp_path)


def test_qcow2_with_zstd(raw, tmp_path):
    path = tmp_path / 'disk'
    qemu_img('convert', '-c', '-O', 'qcow2', '-o', 'compression_type=zstd',
             raw, path)
    found = diskmaps.of_file(path)
    assert diskmaps.ZSTD in kinds(found)
    assert sum(piece.length for piece in found.pieces) == found.size == SIZE


@pytest.mark.parametrize('options, reason', [
    (('-b', 'base', '-F', 'raw'), 'backing file'),
    (('-o', 'data_file=data'), 'another file'),
    # Not luks: QEMU measures the processor for it, and fails on a busy one.
    (('-o', 'encrypt.format=aes,encrypt.key-secret=s', '--object',
      'secret,id=s,data=x'), 'encrypted')])
def test_qcow2_that_needs_more_than_its_file(tmp_path, options, reason):
    (tmp_path / 'base').write_bytes(bytes(MIB))
    subprocess.run(
        ['qemu-img', 'create', '-q', '-f', 'qcow2', *options, 'disk', '1M'],
        check=True, timeout=120, cwd=tmp_path)
    with pytest.raises(diskmaps.RefusedError, match=reason):
        diskmaps.of_file(tmp_path / 'disk')


@pytest.mark.parametrize('options', [
    'subformat=monolithicSparse', 'subformat=streamOptimized',
    'subformat=monolithicSparse,zeroed_grain=on'])
def test_vmdk(raw, tmp_path, options):
    path = tmp_path / 'disk'
    qemu_img('convert', '-O', 'vmdk', '-o', options, raw, path)
    found = require_same(path, tmp_path)
    assert found.format == 'vmdk'
    assert (diskmaps.ZLIB in kinds(found)) == ('stream' in options)


def test_vmdk_of_a_server_that_ran(tmp_path):
    path = tmp_path / 'disk'
    qemu_img('create', '-f', 'vmdk', '-o', 'zeroed_grain=on', path, '99M')
    qemu_io(path, 'write -P 3 1M 100k', 'write -P 4 70M 3M',
            'write -z 71M 1M', 'write -P 5 70000 512')
    assert kinds(require_same(path, tmp_path)) == {
        diskmaps.UNALLOCATED, diskmaps.ZEROS, diskmaps.PLAIN}


@pytest.mark.parametrize('subformat', [
    'monolithicFlat', 'twoGbMaxExtentSparse', 'twoGbMaxExtentFlat'])
def test_vmdk_of_several_files(tmp_path, subformat):
    path = tmp_path / 'disk.vmdk'
    qemu_img('create', '-f', 'vmdk', '-o', f'subformat={subformat}', path,
             '9M')
    # The descriptor is a file without a disk.
    assert diskmaps.of_file(path).format == 'raw'
    for extent in tmp_path.glob('disk-s*'):
        with pytest.raises(diskmaps.RefusedError, match='descriptor'):
            diskmaps.of_file(extent)


@pytest.mark.parametrize('name, options', [
    ('vpc', 'subformat=dynamic'), ('vpc', 'subformat=fixed'),
    ('vpc', 'subformat=dynamic,force_size=on'),
    ('vhdx', 'subformat=dynamic'), ('vhdx', 'subformat=fixed'),
    ('vhdx', 'subformat=dynamic,block_size=268435456'),
    ('vdi', 'static=off'), ('vdi', 'static=on')])
def test_other_formats(raw, tmp_path, name, options):
    path = tmp_path / 'disk'
    qemu_img('convert', '-O', name, '-o', options, raw, path)
    assert require_same(path, tmp_path).format == name


@pytest.mark.parametrize('name', ['vpc', 'vhdx', 'vdi'])
def test_other_formats_of_a_server_that_ran(tmp_path, name):
    path = tmp_path / 'disk'
    qemu_img('create', '-f', name, path, '99M')
    qemu_io(path, 'write -P 3 1M 100k', 'write -P 4 70M 9M',
            'write -P 5 70000 512')
    # A new VHDX has blocks of zeros, the others have none.
    hole = diskmaps.ZEROS if name == 'vhdx' else diskmaps.UNALLOCATED
    assert kinds(require_same(path, tmp_path)) == {hole, diskmaps.PLAIN}


@pytest.mark.parametrize('name', ['qed', 'parallels', 'raw'])
def test_formats_that_are_not_mapped(raw, tmp_path, name):
    path = tmp_path / 'disk'
    qemu_img('convert', '-O', name, raw, path)
    assert diskmaps.of_file(path).format == 'raw'
