# SPDX-License-Identifier: Apache-2.0

"""Files and block devices as sources, with their digests."""

import contextlib
import os
import pathlib
import subprocess
import time

import pytest

from glance_dedup.backup import images
from glance_dedup.backup import views
from tests.support import nbd
from tests.support import sources

SEGMENT = views.SEGMENT


def run(*command):
    return subprocess.run([str(word) for word in command], check=True,
                          capture_output=True, text=True, timeout=60).stdout


@pytest.fixture
def disk(tmp_path):
    """A disk with data, a hole, data again, and a partial last segment."""
    path = tmp_path / 'disk.raw'
    with open(path, 'wb') as f:
        f.write(os.urandom(SEGMENT))
        f.seek(2 * SEGMENT)
        f.write(os.urandom(SEGMENT))
        f.write(os.urandom(5000))
    return path


def view(path, kind=None, identity=None, **options):
    return images.open_disk(sources.place(path.parent / 'state'), str(path),
                            kind, identity, **options)


def write(path, offset, data):
    with open(path, 'r+b') as f:
        f.seek(offset)
        f.write(data)


def test_a_second_backup_finds_what_has_changed(disk):
    with view(disk) as first:
        assert first.base is None and first.size == 3 * SEGMENT + 5000
        assert sources.read(first) == disk.read_bytes()
    assert sources.back_up(view(disk)) == 'dzdd'
    with view(disk) as second:
        assert second.base == (sources.BACKUP, sources.UPLOAD)
    assert sources.back_up(view(disk)) == 'cccc'
    write(disk, 2 * SEGMENT + 77, b'new')
    assert sources.back_up(view(disk)) == 'ccdc'
    write(disk, SEGMENT, b'\0')         # the hole becomes zeros
    assert sources.back_up(view(disk)) == 'cccc'
    os.truncate(disk, 3 * SEGMENT)
    assert sources.back_up(view(disk)) == 'ccc'
    os.truncate(disk, 3 * SEGMENT + 5000)
    assert sources.back_up(view(disk)) == 'cccz'


def test_without_the_commit_everything_is_as_before(disk):
    with view(disk) as given_up:
        sources.scan(given_up)
    state = disk.parent / 'state'
    assert [path.name for path in state.iterdir()] == ['disk.lock']
    sources.back_up(view(disk), 'b_disk_1')
    write(disk, 0, b'new')
    with view(disk) as given_up:
        assert sources.scan(given_up) == 'dccc'
    with view(disk) as again:
        assert again.base.backup_id == 'b_disk_1'
        assert sources.scan(again) == 'dccc'


def test_a_base_that_cannot_be_opened_is_dropped(disk):
    """B4: a scan without a base finds no segment unchanged."""
    sources.back_up(view(disk))
    with view(disk) as second:
        second.drop_base()
        assert second.base is None and sources.scan(second) == 'dzdd'


@pytest.mark.parametrize('change', [
    lambda path: write(path, SEGMENT // 2, b'!'),
    lambda path: os.truncate(path, SEGMENT),
    lambda path: os.truncate(path, 9 * SEGMENT),
    lambda path: os.utime(path, ns=(1, 1))])
def test_a_change_while_it_is_read_is_noticed(disk, change):
    """B2: a scan fails if the source changes meanwhile."""
    with view(disk) as opened:
        buffer = memoryview(bytearray(SEGMENT))
        opened.scan(0, buffer)
        change(disk)
        with pytest.raises(views.SourceError, match='was changed while'):
            opened.end_scan()
        with pytest.raises(views.SourceError, match='was changed while'):
            opened.check()


def test_a_write_right_before_and_after_the_opening_is_noticed(disk):
    """A write just before or after the opening is noticed.

    A file's time has steps of some milliseconds. This holds before Linux 6.13:
    newer kernels use a finer time after a program has read it.
    """
    for number in range(20):
        write(disk, 0, bytes([number]))
        with view(disk) as opened:
            write(disk, 0, bytes([number + 100]))
            with pytest.raises(views.SourceError):
                opened.check()


def test_a_file_that_becomes_shorter_is_no_end(disk):
    with view(disk) as opened:
        os.truncate(disk, SEGMENT)
        with pytest.raises(views.SourceError, match='shorter'):
            sources.read(opened)


def test_two_backups_at_once(disk):
    with view(disk):
        with pytest.raises(views.SourceError,
                           match='another backup of disk is running'):
            view(disk)
    view(disk).close()


def test_a_dead_process_is_followed_by_its_identity(disk):
    """B5: another process continues a scan whose process has died."""
    sources.back_up(view(disk), 'b_disk_1')
    write(disk, 0, b'new')
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        opened = view(disk)
        sources.scan(opened)
        os.write(write_end, opened.identity.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    identity = os.read(read_end, 10000).decode()
    with view(disk, identity=identity) as resumed:
        assert resumed.base.backup_id == 'b_disk_1'
        resumed.commit('b_disk_2', sources.UPLOAD)
    with view(disk) as third:
        assert third.base.backup_id == 'b_disk_2'
        assert sources.scan(third) == 'cccc'
    write(disk, 0, b'more')
    with pytest.raises(views.SourceError, match='since its backup began'):
        view(disk, identity=identity)


def test_what_is_no_disk_is_refused(tmp_path):
    os.mkfifo(tmp_path / 'fifo')
    for path, why in ((tmp_path, 'neither'), (tmp_path / 'fifo', 'neither'),
                      (tmp_path / 'none', 'No such file')):
        with pytest.raises(views.SourceError, match=why) as e:
            view(path)
        assert str(path) in str(e.value)


def test_an_empty_file(tmp_path):
    path = tmp_path / 'empty'
    path.touch()
    for _ in range(2):
        assert sources.back_up(view(path)) == ''


def test_a_block_device_that_is_written_to_is_noticed(disk):
    """A write that is still in the page cache is noticed, too."""
    os.truncate(disk, 4 * SEGMENT)
    try:
        device = pathlib.Path(run('losetup', '--find', '--show', disk).strip())
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f'no loop devices: {e}')
    place = disk.parent / 'state'
    try:
        def opened():
            return images.open_disk(sources.place(place), str(device))

        assert sources.back_up(opened()) == 'dddd'
        assert sources.back_up(opened()) == 'cccc'
        with opened() as changing:
            sources.scan(changing)
            write(device, SEGMENT, b'new')
            with pytest.raises(views.SourceError, match='was changed while'):
                changing.check()
        assert sources.back_up(opened()) == 'cdcc'
    finally:
        run('losetup', '--detach', device)


# -- qcow2 --------------------------------------------------------------------

@pytest.fixture
def qcow2(disk):
    nbd.need('qemu-img')
    nbd.need('qemu-nbd')
    os.truncate(disk, 4 * SEGMENT)
    path = disk.with_suffix('.qcow2')
    run('qemu-img', 'convert', '-f', 'raw', '-O', 'qcow2', disk, path)
    return path


def overlay(backing, name, kind='qcow2'):
    path = backing.parent / name
    run('qemu-img', 'create', '-f', 'qcow2', '-b', backing, '-F', kind, path)
    return path


@pytest.mark.needs('qemu')
def test_the_format_is_not_guessed(disk, qcow2):
    with pytest.raises(views.SourceError, match='Say which bytes'):
        view(qcow2)
    with view(qcow2, 'raw') as container:
        assert sources.read(container) == qcow2.read_bytes()
    with view(qcow2, 'qcow2') as content:
        assert sources.read(content) == disk.read_bytes()
    with pytest.raises(views.SourceError, match='it is not a qcow2 file'):
        view(disk, 'qcow2')
    with pytest.raises(views.SourceError, match='vmdk is not supported'):
        view(disk, 'vmdk')


@pytest.mark.needs('qemu')
@pytest.mark.parametrize('kind', ['vmdk', 'vpc', 'vhdx', 'vdi', 'qed'])
def test_the_advice_for_an_unsupported_format_works(disk, qcow2, kind):
    path = disk.with_suffix('.other')
    run('qemu-img', 'convert', '-f', 'raw', '-O', kind, disk, path)
    with pytest.raises(views.SourceError) as refusal:
        view(path)
    sentence = str(refusal.value)
    advice = f'qemu-img convert -f {kind} -O raw'
    assert advice in sentence
    assert '--disk-format raw' in sentence
    assert f'format {kind})' not in sentence
    converted = disk.with_suffix('.converted')
    run(*advice.split(), path, converted)
    with view(converted, 'raw') as content:
        assert sources.read(content)[:4 * SEGMENT] == disk.read_bytes()
    with view(path, 'raw') as container:
        assert sources.read(container) == path.read_bytes()


def test_an_encrypted_disk_is_backed_up_as_it_is(tmp_path):
    path = tmp_path / 'disk.luks'
    path.write_bytes(b'LUKS\xba\xbe'.ljust(SEGMENT, b'k'))
    with pytest.raises(views.SourceError, match='LUKS') as refusal:
        view(path)
    assert 'qemu-img' not in str(refusal.value)
    assert '--disk-format raw' in str(refusal.value)
    with view(path, 'raw') as container:
        assert sources.read(container) == path.read_bytes()


@pytest.mark.needs('qemu')
def test_a_qcow2_is_backed_up_by_what_is_in_it(disk, qcow2):
    assert sources.back_up(view(qcow2, 'qcow2')) == 'dzdd'
    assert sources.back_up(view(qcow2, 'qcow2')) == 'cccc'
    run('qemu-io', '-c', f'write -P 7 {2 * SEGMENT} 4096', qcow2)
    assert sources.back_up(view(qcow2, 'qcow2')) == 'ccdc'
    with view(qcow2, 'qcow2') as opened:
        with pytest.raises(subprocess.CalledProcessError):
            run('qemu-io', '-c', 'write 0 4096', qcow2)     # a lock
        write(qcow2, qcow2.stat().st_size - 1, b'!')
        with pytest.raises(views.SourceError, match='was changed while'):
            opened.check()


@pytest.mark.needs('qemu')
def test_backing_files_are_followed_where_they_may_lie(disk, qcow2):
    top = overlay(overlay(qcow2, 'middle'), 'top')
    run('qemu-io', '-c', f'write -P 7 {SEGMENT} 4096', top)
    with pytest.raises(views.SourceError, match='is in no directory'):
        view(top, 'qcow2')
    with view(top, 'qcow2', directories=[str(disk.parent)]) as opened:
        data = sources.read(opened)
    wanted = bytearray(disk.read_bytes())
    wanted[SEGMENT:SEGMENT + 4096] = b'\7' * 4096
    assert data == wanted


@pytest.mark.needs('qemu')
def test_no_file_of_the_host_is_backed_up_as_a_disk(disk, qcow2, tmp_path):
    """A qcow2 cannot have another file of the host backed up as its data.

    The creator of a disk chooses the files that the disk names.
    """
    secret = tmp_path / 'secret'
    secret.write_bytes(b'password' * 512)
    allowed = tmp_path / 'allowed'
    allowed.mkdir()
    (allowed / 'link').symlink_to(secret)
    bad = tmp_path / 'bad'
    for options in (
            ('-b', secret, '-F', 'raw'), ('-b', '../secret', '-F', 'raw'),
            ('-b', 'allowed/link', '-F', 'raw'),
            ('-b', 'allowed/../secret', '-F', 'raw'),
            ('-b', f'json:{{"driver": "file", "filename": "{secret}"}}',
             '-F', 'raw'), ('-b', 'nbd:localhost:1', '-F', 'raw')):
        run('qemu-img', 'create', '-u', '-f', 'qcow2', *options, bad, '1M')
        with pytest.raises(views.SourceError, match='backing file'):
            view(bad, 'qcow2', directories=[str(allowed)])
    for name, backing in (('other', 'none'), ('loop', 'other'),
                          ('other', 'loop')):
        run('qemu-img', 'create', '-u', '-f', 'qcow2', '-b',
            allowed / backing, '-F', 'qcow2', allowed / name, '1M')
    with pytest.raises(views.SourceError, match='more than 8'):
        view(allowed / 'loop', 'qcow2', directories=[str(allowed)])
    run('qemu-img', 'create', '-f', 'qcow2', '-o', f'data_file={secret}',
        bad, '4096')
    with pytest.raises(views.SourceError, match='data in another file'):
        view(bad, 'qcow2', directories=[str(allowed)])


@pytest.mark.needs('qemu')
def test_a_qcow2_in_use_is_refused(qcow2):
    process = subprocess.Popen(
        ['qemu-io', str(qcow2)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE)
    try:
        process.stdout.read(1)          # qemu has opened the file
        with pytest.raises(views.SourceError, match='lock'):
            view(qcow2, 'qcow2')
    finally:
        process.communicate(timeout=60)


@pytest.mark.needs('qemu')
def test_damaged_headers(qcow2):
    whole = qcow2.read_bytes()
    top = overlay(qcow2, 'top')
    head = top.read_bytes()
    for data in (b'', whole[:50], whole[:4] + b'\xff' * 500,
                 head[:8] + b'\xff' * 12 + head[20:],
                 head[:100] + b'\xff' * 4 + head[104:],
                 head[:16] + (5000).to_bytes(4, 'big') + head[20:]):
        top.write_bytes(data)
        with pytest.raises(views.SourceError):
            view(top, 'qcow2', directories=[str(top.parent)])


@pytest.mark.needs('qemu')
def test_nothing_is_left_of_the_server(qcow2):
    def servers():
        found = set()
        for path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):
            with contextlib.suppress(OSError):
                if path.read_bytes().partition(b'\0')[0] == b'qemu-nbd':
                    found.add(path.parent.name)
        return found

    before = servers()
    with view(qcow2, 'qcow2'):
        assert len(servers() - before) == 1
    assert servers() == before
    pid = os.fork()
    if not pid:
        view(qcow2, 'qcow2')
        os._exit(0)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + 30
    while servers() != before:
        assert time.monotonic() < deadline
        time.sleep(0.05)
