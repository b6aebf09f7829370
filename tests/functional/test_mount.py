# SPDX-License-Identifier: Apache-2.0

"""Images as files: ``glance-dedup image mount``, with a real FUSE."""

import concurrent.futures
import contextlib
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.cloud import disk_images
from tests.support import daemons
from tests.support import nbd
from tests.support import repositories

pytestmark = [pytest.mark.slow, pytest.mark.needs('fuse')]

BLOCK = 4096
MIB = 1 << 20
LIMIT = 60
MAIN = 'import sys; from glance_dedup.cli import entry; sys.exit(entry.main())'


@pytest.fixture(scope='module', autouse=True)
def fuse():
    nbd.need('fusermount3')
    assert os.path.exists('/dev/fuse'), 'this kernel has no FUSE'


@pytest.fixture(scope='module')
def content():
    return {'image': repositories.mixture(6_000_000, seed=7)
            + repositories.noise(777),
            'other': repositories.noise(2 * MIB, 8) + bytes(3 * MIB)
            + repositories.noise(MIB, 9), 'empty': b''}


def command(place, *arguments, before=''):
    """Return the words of the program, with a filter of its own.

    :param before: statements that are run before it
    """
    return [sys.executable, '-c', f'{before}\n{MAIN}', '--filter-dir',
            str(place / 'filter'), *map(str, arguments)]


class Mount:
    """A directory with images, while it is entered."""

    def __init__(self, place, *arguments, options=(), before=''):
        self.directory = place / 'mounted'
        self.directory.mkdir(exist_ok=True)
        self._errors = place / 'errors'
        self._command = command(place, *arguments, 'image', 'mount', *options,
                                self.directory, before=before)
        self.process = None

    def __enter__(self):
        with open(self._errors, 'ab') as errors:
            self.process = subprocess.Popen(
                self._command, cwd=daemons.ROOT, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=errors, text=True)
        line = self.process.stdout.readline()
        assert f'are in {self.directory}' in line, self.text()
        assert os.path.ismount(self.directory)
        return self

    def __exit__(self, *exc_info):
        self.process.kill()
        self.process.wait(LIMIT)
        self.process.stdout.close()
        # This also removes a mount that no process serves any more.
        subprocess.run(['umount', '-l', self.directory], timeout=LIMIT,
                       stderr=subprocess.DEVNULL)

    def __truediv__(self, name):
        return self.directory / name

    def text(self):
        return self._errors.read_text()

    def unmount(self):
        subprocess.run(['fusermount3', '-u', self.directory], check=True,
                       timeout=LIMIT)

    def require_ended(self):
        assert self.process.wait(LIMIT) == 0, self.text()
        assert not os.path.ismount(self.directory)
        assert os.listdir(self.directory) == []


class Place:
    """A repository, a daemon of it, and a directory to mount images."""

    def __init__(self, directory, data):
        self.directory = directory
        self.path = repositories.create(directory / 'repository',
                                        group_slots=512)
        with self.open(codec='none') as repo:
            for image_id, bytes_ in data.items():
                repositories.put(repo, image_id, bytes_)
        self.daemon = daemons.Daemon(self.path, cache_mib=0)
        self.daemon.write_config(nbd_socket=self.daemon.directory / 'nbd')

    def open(self, **options):
        return repositories.open_repository(self.path, **options)

    def mount(self, source, **options):
        """Mount images from the repository itself, or through the daemon."""
        if source == 'repository':
            return Mount(self.directory, '--socket', '', '--repository',
                         self.path, **options)
        if self.daemon.process is None:
            self.daemon.start()
        return Mount(self.directory, '--socket', self.daemon.socket,
                     **options)


@pytest.fixture
def place(tmp_path, content):
    found = Place(tmp_path, content)
    with found.daemon:
        yield found


@pytest.fixture(scope='module', params=['repository', 'daemon'])
def source(request):
    return request.param


@pytest.fixture(scope='module')
def mount(tmp_path_factory, source, content):
    """A mount for all tests that only read."""
    place = Place(tmp_path_factory.mktemp(source), content)
    with place.daemon, place.mount(source) as mount:
        mount.place = place
        yield mount


def read_at(path, offset, length):
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, length, offset)
    finally:
        os.close(fd)


# -- contents -----------------------------------------------------------------

def test_files(mount, content):
    assert sorted(os.listdir(mount.directory)) == sorted(content)
    with mount.place.open() as repo:
        created = {name: repo.stat(name).created for name in content}
    for entry in os.scandir(mount.directory):
        found = os.stat(entry.path)
        assert entry.is_file() and found.st_ino == entry.inode()
        assert found.st_size == len(content[entry.name])
        assert found.st_mtime == created[entry.name]
        assert found.st_mode & 0o777 == 0o444
        assert (mount / entry.name).read_bytes() == content[entry.name]
    assert os.stat(mount.directory).st_mode & 0o777 == 0o555
    assert not mount.text()


def test_many_readers(mount, content):
    data = content['image']

    def read(seed):
        rng = random.Random(seed)
        for _ in range(40):
            first, end = sorted(rng.sample(range(len(data) + 9000), 2))
            assert read_at(mount / 'image', first, end - first) == (
                data[first:end])
            if not rng.randrange(10):
                # The following reads come from the program again.
                fd = os.open(mount / 'image', os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(8)))
    assert mount.process.poll() is None and not mount.text()


def test_nothing_is_changed(mount, content):
    file, new = mount / 'image', mount / 'new'
    for attempt in (lambda: open(file, 'r+b'), lambda: open(file, 'wb'),
                    lambda: open(new, 'xb'), file.unlink, new.mkdir,
                    lambda: os.truncate(file, 0),
                    lambda: os.rename(file, new), lambda: os.chmod(file, 511),
                    lambda: os.symlink(file, new),
                    lambda: os.utime(file, (0, 0)),
                    lambda: os.setxattr(file, 'user.x', b'')):
        with pytest.raises(OSError, match='Read-only file system'):
            attempt()
    assert file.read_bytes() == content['image']


def test_names_that_there_are_not(mount):
    for name in (b'nothing', b'image ', b'image\n', b'\xff\xfe',
                 '\u00e9'.encode(), b'i' * 129, b'i' * 255, b'%69mage',
                 b'image?x', b'.image', b'IMAGE', b'-' * 128):
        with pytest.raises(FileNotFoundError):
            os.stat(os.fsencode(mount.directory) + b'/' + name)
    with pytest.raises(NotADirectoryError):
        os.stat(mount / 'image' / 'x')
    assert (mount / 'empty').read_bytes() == b''
    assert not mount.text()


def test_what_was_read_stays_in_the_page_cache(place, content):
    with place.mount('daemon') as mount:
        for _ in range(2):
            assert (mount / 'other').read_bytes() == content['other']
            read = place.daemon.status()['nbd']['bytes']
        # Another process reads it, and opens it again.
        subprocess.run(['cmp', mount / 'other', mount / 'other'], check=True,
                       timeout=LIMIT)
        assert place.daemon.status()['nbd']['bytes'] == read == (
            len(content['other']))


def test_large_images(place, source):
    """Offsets beyond 32 bits are read correctly."""
    end = repositories.noise(10_000)
    with place.open() as repo, repo.begin('large') as transaction:
        transaction.add_zeros(9 << 30)
        transaction.write(end)
        transaction.commit()
    with place.mount(source) as mount:
        assert os.stat(mount / 'large').st_size == (9 << 30) + len(end)
        assert read_at(mount / 'large', 9 << 30, 10_001) == end
        assert read_at(mount / 'large', (5 << 30) + 1, 9) == bytes(9)


# -- images that change -------------------------------------------------------

def test_deleted_while_open(place, source, content):
    """A deleted image can be read until closed; a new one is separate."""
    with place.mount(source) as mount, (
            open(mount / 'other', 'rb', buffering=0)) as old:
        assert old.read(10) == content['other'][:10]
        with place.open() as repo:
            repo.delete('other')
        # The kernel may trust its cached name for a second.
        repositories.eventually(lambda: not (mount / 'other').exists())
        assert 'other' not in os.listdir(mount.directory)
        new = repositories.noise(len(content['other']), 77)
        with place.open() as repo:
            repositories.put(repo, 'other', new)
        assert (mount / 'other').read_bytes() == new
        old.seek(0)
        assert old.readall() == content['other']
        assert os.fstat(old.fileno()).st_ino != os.stat(
            mount / 'other').st_ino
        # The image is replaced at once, while the kernel still has the name.
        for seed in range(5):
            assert (mount / 'other').stat().st_size
            new = repositories.noise(100_000 + seed, seed)
            with place.open() as repo:
                repo.delete('other')
                repositories.put(repo, 'other', new)
            assert (mount / 'other').read_bytes() == new
        assert not mount.text()


def test_damage(place, source, content):
    """Reading damaged blocks is an error (I7); the rest can be read."""
    data = repositories.noise(300 * BLOCK, 5)
    with place.open(codec='none') as repo:
        repositories.put(repo, 'bad', data)
        with repo.open_image('bad') as image:
            last = list(image.extents())[-1]
    group = repositories.Group(place.path, last.group)
    group.data[-64:] = bytes(byte ^ 0xff for byte in group.data[-64:])
    group.save()
    with place.mount(source) as mount:
        bad = []
        for offset in range(0, len(data), BLOCK):
            try:
                found = read_at(mount / 'bad', offset, BLOCK)
            except OSError as e:
                assert e.strerror == 'Input/output error'
                bad.append(offset)
            else:
                assert found == data[offset:offset + BLOCK]
        assert len(bad) == 1
        # The damage is logged, though not each time.
        lines = mount.text().splitlines()
        assert 0 < len(lines) < 5
        assert f'groups/{last.group:08x}' in mount.text()
        assert source == 'repository' or (
            f'groups/{last.group:08x}' in place.daemon.text())
        assert (mount / 'image').read_bytes() == content['image']


# -- ends ---------------------------------------------------------------------

@pytest.mark.parametrize('source,number', [
    ('repository', signal.SIGTERM), ('daemon', signal.SIGINT),
    ('repository', signal.SIGHUP)])
def test_signals(place, source, number):
    """A signal ends the program, even while a file is open."""
    with place.mount(source) as mount:
        fd = os.open(mount / 'image', os.O_RDONLY)
        assert os.read(fd, 1)
        mount.process.send_signal(number)
        mount.require_ended()
        assert not mount.text()
        with contextlib.suppress(OSError):
            os.close(fd)


def test_unmounted(place):
    with place.mount('daemon') as mount:
        assert (mount / 'image').read_bytes()
        mount.unmount()
        mount.require_ended()
        assert not mount.text()


#: A program that waits for a daemon's return as long as the tests do.
PATIENT = ('from glance_dedup.client import nbd_client\n'
           'nbd_client.RETURN_SECONDS = 3600')


def test_a_daemon_that_is_started_anew(place, content):
    with place.mount('daemon', before=PATIENT) as mount:
        with open(mount / 'image', 'rb', buffering=0) as file:
            assert file.read(10) == content['image'][:10]
            place.daemon.kill()
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                rest = pool.submit(file.readall)
                time.sleep(0.5)
                assert not rest.done()
                place.daemon.start()
                assert rest.result(LIMIT) == content['image'][10:]
        assert not mount.text()


def test_a_daemon_that_does_not_come_back(place):
    before = ('from glance_dedup.client import nbd_client\n'
              'nbd_client.RETURN_SECONDS = 0.5')
    with place.mount('daemon', before=before) as mount:
        with open(mount / 'image', 'rb', buffering=0) as file:
            place.daemon.kill()
            with pytest.raises(OSError, match='Input/output error'):
                file.read(10)
        with pytest.raises(OSError, match='Input/output error'):
            os.listdir(mount.directory)
        assert 'nbd' in mount.text()


def test_an_image_that_is_another_when_the_daemon_is_back(place, content):
    """Reading an image that was replaced meanwhile is an error.

    Its bytes in the page cache are the old image's.
    """
    with place.mount('daemon', before=PATIENT) as mount:
        with open(mount / 'image', 'rb', buffering=0) as file:
            assert file.read(10) == content['image'][:10]
            place.daemon.kill()
            with place.open() as repo:
                repo.delete('image')
                repositories.put(repo, 'image', content['image'][::-1])
            place.daemon.start()
            with pytest.raises(OSError, match='Input/output error'):
                os.pread(file.fileno(), 10, 5_000_000)
        assert 'is not the one that it was' in mount.text()
        assert (mount / 'image').read_bytes() == content['image'][::-1]


def test_on_a_compute_host(tmp_path):
    """Files that are not listed are found by their names."""
    data = repositories.mixture(8 * MIB)
    with nbd.compute_host(tmp_path, image=data) as (cache, _), Mount(
            tmp_path, '--socket', cache.socket) as mount:
        assert os.listdir(mount.directory) == []
        assert not (mount / 'nothing').exists()
        assert read_at(mount / 'image', 7 * MIB, MIB) == data[7 * MIB:]
        assert (mount / 'image').read_bytes() == data
        repositories.eventually(
            lambda: os.listdir(mount.directory) == ['image'])


# -- users, and options -------------------------------------------------------

@pytest.mark.skipif(os.geteuid() != 0, reason='only root becomes others')
@pytest.mark.parametrize('allowed', [False, True])
def test_other_users(place, source, allowed):
    options = ['--allow-other'] if allowed else []
    with place.mount(source, options=options) as mount:
        for part in (place.directory, *place.directory.parents):
            if part.name.startswith(('pytest-', 'popen-', 'test_')):
                part.chmod(0o755)
        done = subprocess.run(
            ['cat', mount / 'empty'], user=65534, group=65534,
            extra_groups=[], capture_output=True, text=True, timeout=LIMIT)
        assert (done.returncode == 0) == allowed, done.stderr
        assert allowed or 'Permission denied' in done.stderr


def refused(place, *arguments, before='', status=2):
    """Return the error of a program that does not start."""
    done = subprocess.run(
        command(place, *arguments, before=before), cwd=daemons.ROOT,
        capture_output=True, text=True, timeout=LIMIT,
        stdin=subprocess.DEVNULL)
    assert done.returncode == status and not done.stdout
    assert 'Traceback' not in done.stderr
    return done.stderr


def test_what_does_not_begin(tmp_path, place):
    here = tmp_path / 'here'
    here.mkdir()
    ours = ['--socket', '', '--repository', place.path, 'image', 'mount']
    assert 'No such file or directory' in refused(
        tmp_path, *ours, tmp_path / 'nowhere', status=3)
    assert 'is not empty, and mounting would hide' in refused(
        tmp_path, *ours, tmp_path)
    assert 'no daemon answers' in refused(
        tmp_path, '--socket', tmp_path / 'none', 'image', 'mount', here)
    assert 'install the packages of glance-dedup[mount]' in refused(
        tmp_path, *ours, here,
        before="import sys; sys.modules['pyfuse3'] = None",
        status=3)
    with daemons.Daemon(place.path) as daemon:
        daemon.start()
        assert 'the daemon serves no NBD: set nbd_socket' in refused(
            tmp_path, '--socket', daemon.socket, 'image', 'mount', here)


# -- a guest ------------------------------------------------------------------

# Long: a guest boots, without KVM.
@pytest.mark.needs('bootimage', 'guest', 'qemu')
@pytest.mark.timeout(300)
def test_a_guest_boots(tmp_path):
    """A guest boots from the file, with a writable layer of its own."""
    place = Place(tmp_path, {})
    with place.open() as repo:
        repo.put('boot', disk_images.images().raw)
    with place.mount('repository') as mount, (
            nbd.Guest(tmp_path, mount / 'boot')) as guest:
        assert guest.wait_until_up() == ('a disk of tools/boot_image', 1)
        guest.process.kill()
        guest.process.wait(LIMIT)
        mount.unmount()
        mount.require_ended()
        assert not mount.text()
