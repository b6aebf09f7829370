# SPDX-License-Identifier: Apache-2.0

"""``dedupd-nova-base``: links in Nova's ``_base`` that lead into its mount.

The tests use a real FUSE, a real Glance, the storing host's daemon and the
cache's.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import os
import pathlib
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
import uuid

import pytest

from tests.support import cache_harness
from tests.support import cached_glance
from tests.support import daemons
from tests.support import nbd
from tests.support import repositories

pytestmark = [pytest.mark.slow, pytest.mark.needs('fuse')]

MIB = 1 << 20
LIMIT = 60
#: The log's line about a read that waits.
WAITS = 'A read of image'
#: This is nobody: FUSE requires a user with a name.
USER = 65534
noise = repositories.noise
# The program checks everything more often, and waits for dedupd for AWAY
# seconds.
PROGRAM = (
    'import sys; '
    'from dedupd.compute.novabase import image_contents, link_sync, main; '
    'link_sync.INTERVAL = 0.2; image_contents.PAUSE = 0.1; '
    'link_sync.AWAY = {}; '
    'sys.exit(main.main())')
AWAY = 0.2


@pytest.fixture(scope='module', autouse=True)
def fuse():
    nbd.need('fusermount3')
    assert os.path.exists('/dev/fuse'), 'this kernel has no FUSE'


@pytest.fixture(scope='module')
def storing(tmp_path_factory):
    host = cache_harness.Storing(tmp_path_factory.mktemp('storing'))
    # This is as before Glance inspected uploads.
    host.glance.options = {**host.glance.options, 'image_format': {
        'require_image_format_match': False}}
    with host:
        yield host


@pytest.fixture(scope='module')
def ops(storing):
    return storing.glance.client('ops')


class Host:
    """A compute host: the cache's daemon, the mount, and Nova's directory.

    :ivar prefix: a command that runs the mount
    :ivar mounter: a command that runs what mounts for a confined process
    """

    def __init__(self, place, storing, disk=None):
        self.prefix, self.mounter = [], None
        self.base = place / '_base'
        self.base.mkdir()
        self.mounted = place / 'mounted'
        self.peer = cache_harness.Link(storing.listen)
        clouds = place / 'clouds.yaml'
        clouds.write_text(json.dumps({'clouds': {'cache': {
            'auth_type': 'admin_token',
            'auth': {'endpoint': f'{storing.glance.url}/v2',
                     'token': 'ops'}}}}))
        self.repository = repositories.create((disk or place) / 'cache')
        self.daemon = storing.cache(self.repository, {
            'upstream_url': f'https://{self.peer.address}',
            'upstream_cert': storing.operator, 'cloud': 'cache',
            'nova_base': self.base, 'nova_mount': self.mounted})
        self.daemon.program = cached_glance.PROGRAM
        self.daemon.write_config(nbd_socket=self.daemon.directory / 'nbd')
        self._errors = place / 'errors'
        self._environment = {
            **os.environ, 'PYTHONPATH': str(daemons.ROOT),
            'OS_CLIENT_CONFIG_FILE': str(clouds)}
        self.away = AWAY
        self.process = None

    @property
    def program(self):
        return ['-c', PROGRAM.format(self.away)]

    def __enter__(self):
        self.daemon.start().wait_for_catalog()
        return self.mount()

    def __exit__(self, *exc_info):
        self.unmount()
        self.daemon.close()
        self.peer.close()

    def mount(self):
        with open(self._errors, 'ab') as errors:
            self.process = subprocess.Popen(
                [*self.prefix, sys.executable, *self.program, '--config-file',
                 self.daemon.config], cwd=daemons.ROOT, stderr=errors,
                stdin=subprocess.DEVNULL, stdout=errors,
                env=self._environment)
            if self.mounter is not None:
                self.wait_for(pathlib.Path(
                    self.seen(f'{self.mounted}.socket')).exists)
                subprocess.run(
                    [*self.mounter, sys.executable, *self.program, 'mount',
                     '--config-file', self.daemon.config], check=True,
                    cwd=daemons.ROOT, env=self._environment, stderr=errors,
                    timeout=LIMIT)
        self.wait_for(lambda: os.path.ismount(self.seen(self.mounted)))
        return self

    def seen(self, path):
        """Return a path in the mounts that Nova sees."""
        return f'/proc/{self.process.pid}/root{path}'

    def unmount(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT)
        subprocess.run(['umount', '-l', self.mounted], timeout=LIMIT,
                       stderr=subprocess.DEVNULL)

    def text(self):
        return self._errors.read_text()

    def wait_for(self, condition):
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, (
                self.text()[-3000:], self.daemon.text()[-3000:])
            time.sleep(0.02)

    def path(self, image_id):
        return self.base / hashlib.sha1(image_id.encode()).hexdigest()

    def wait_for_link(self, image_id):
        self.wait_for(lambda: os.path.exists(self.path(image_id)))
        return self.path(image_id)

    def wait_for_no_link(self, image_id):
        self.wait_for(lambda: not os.path.lexists(self.path(image_id)))

    def wait_until_here(self, image_id):
        """Wait for the whole image: a reader gets the last bytes earlier."""
        def is_here():
            with repositories.open_repository(self.repository) as repo:
                return image_id in repo.images()

        self.wait_for(is_here)

    def restart_daemon(self):
        """Kill the daemon in the middle, and let all bytes through again."""
        self.daemon.kill()
        self.peer.hold_after(None)
        self.daemon.start()

    @contextlib.contextmanager
    def reading_the_end(self, link):
        """Yield an open file of 8 MiB, and a read of its end that waits."""
        with open(link, 'rb', 0) as f, (
                concurrent.futures.ThreadPoolExecutor(2)) as threads:
            self.begin(link, threads)
            yield f, threads.submit(os.pread, f.fileno(), 4096,
                                    8 * MIB - 4096)

    def begin(self, link, threads):
        """Have an image begin to arrive, and stop in its middle.

        :param threads: run a read of all of it
        """
        self.peer.hold_after(MIB)
        threads.submit(read, link)
        self.peer.wait_until_held()

    def refreshed(self, ops):
        """Wait for a whole refresh that begins from now on."""
        image_id = store(ops, b'x')
        self.wait_for_link(image_id)
        ops.delete(image_id)
        self.wait_for_no_link(image_id)


@pytest.fixture
def host(tmp_path, storing):
    with Host(tmp_path, storing) as found:
        yield found
        text = found.text()
        assert 'Traceback' not in text, text[text.find('Traceback'):][:3000]


def store(client, data, **properties):
    return cached_glance.store(client, data, **{
        'visibility': 'public', **properties})


def content(seed, size=8 * MIB):
    return repositories.mixture(size, seed) + noise(777, seed)


def read(path):
    with open(path, 'rb') as f:
        return f.read()


def with_partitions():
    sector = bytearray(noise(MIB, 99))
    sector[:512] = bytes(512)
    sector[446:462] = struct.pack('<B3xB3xII', 0x80, 0x83, 1, 2000)
    sector[510:512] = b'\x55\xaa'
    return bytes(sector)


def test_only_what_nova_may_use_unseen_is_linked(host, ops):
    wanted = {'raw': store(ops, content(1)),
              'with partitions': store(ops, with_partitions())}
    unwanted = {
        'of another format': store(ops, content(2), disk_format='qcow2'),
        'encrypted': store(ops, content(3), os_encrypt_format='LUKS'),
        'signed': store(ops, content(4), img_signature_key_type='RSA-PSS'),
        'without data': ops.create(visibility='public')['id'],
        'not what it says': store(ops, b'QFI\xfb' + struct.pack(
            '>IQIIQIIQ', 3, 0, 0, 16, MIB, 0, 0, 0) + bytes(MIB))}
    off = unwanted['deactivated'] = store(ops, content(5))
    ops.request('POST', f'/v2/images/{off}/actions/deactivate')
    for image_id in wanted.values():
        host.wait_for_link(image_id)
    host.refreshed(ops)
    found = {name for name, image_id in unwanted.items()
             if os.path.lexists(host.path(image_id))}
    assert not found
    assert 'registered as raw and is of another format' in host.text()


def test_a_read_through_a_link_gives_the_image(host, ops):
    data = content(6)
    link = host.wait_for_link(store(ops, data))
    found = os.stat(link)
    assert found.st_size == len(data)
    assert stat.S_IMODE(found.st_mode) == 0o440
    assert stat.S_IMODE(os.stat(host.mounted).st_mode) == 0o550
    assert found.st_blocks == 1     # Nova counts it as its own disk's
    assert read(link) == data


def test_an_image_that_is_here_needs_no_daemon(host, ops):
    data = content(7)
    image_id = store(ops, data)
    link = host.wait_for_link(image_id)
    with open(link, 'rb') as f:
        assert f.read(4096) == data[:4096]      # and the rest follows
        host.wait_until_here(image_id)
        host.daemon.kill()
        f.seek(MIB)
        assert f.read() == data[MIB:]
    assert read(link) == data


def test_the_whole_image_is_compared_with_what_glance_says(host, ops):
    image_id = store(ops, content(8))
    assert read(host.wait_for_link(image_id)) == content(8)
    host.daemon.wait_for(
        lambda: host.daemon.counts()['arrivals']['images'] == [])
    record = ops.show(image_id)
    with repositories.open_repository(host.repository) as repo:
        assert repo.stat(image_id).hash_value == record['os_hash_value']


def test_a_read_waits_while_dedupd_is_away_and_stat_does_not(host, ops):
    data = noise(8 * MIB, 9)
    image_id = store(ops, data)
    link = host.wait_for_link(image_id)
    with (concurrent.futures.ThreadPoolExecutor(21) as threads,
          contextlib.ExitStack() as stack):
        host.begin(link, threads)
        files = [stack.enter_context(open(link, 'rb', 0)) for _ in range(20)]
        # The offsets are far apart, so that no read waits for another's page.
        offsets = [2 * MIB + n * (MIB // 4) for n in range(len(files))]
        reads = [threads.submit(os.pread, f.fileno(), 4096, offset)
                 for f, offset in zip(files, offsets)]
        host.daemon.kill()
        try:
            host.wait_for(lambda: WAITS in host.text())
            # The MiB that has arrived may serve a few of them.
            assert sum(reading.done() for reading in reads) < len(reads) // 2
            # The link is removed soon after dedupd stopped answering.
            names = subprocess.run(
                ['ls', '-l', host.mounted], check=True, capture_output=True,
                timeout=LIMIT, text=True).stdout
            assert image_id in names
        finally:
            host.peer.hold_after(None)
            host.daemon.start()
        assert [reading.result(LIMIT) for reading in reads] == [
            data[offset:offset + 4096] for offset in offsets]
        assert files[0].read(MIB) == data[:MIB]


def test_a_read_waits_while_the_storing_host_is_away(host, storing, ops):
    data = content(10)
    link = host.wait_for_link(store(ops, data))
    storing.daemon.stop(signal.SIGKILL)
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            reading = threads.submit(read, link)
            host.wait_for(lambda: WAITS in host.text())
            storing.daemon.start().wait_for_catalog()
            assert reading.result(LIMIT) == data
    finally:
        if storing.daemon.process.poll() is not None:
            storing.daemon.start().wait_for_catalog()


def test_a_read_waits_while_the_disk_is_full(tmp_path, storing, ops):
    data = noise(8 * MIB, 24)
    with repositories.small_disk(tmp_path / 'disk', 48 * MIB) as disk, (
            Host(tmp_path, storing, disk)) as host:
        link = host.wait_for_link(store(ops, data))
        filling = repositories.fill_disk(disk)
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            reading = threads.submit(read, link)
            host.wait_for(lambda: WAITS in host.text())
            assert not reading.done()
            filling.unlink()
            assert reading.result(LIMIT) == data
        assert 'waits: no room for' in host.text()


def test_a_read_waits_while_a_block_is_wrong(host, storing, ops):
    """A read waits until the storing host's wrong block is repaired."""
    data = noise(8 * MIB, 25)
    link = host.wait_for_link(store(ops, data))
    place = data[5 * MIB:5 * MIB + 4096]
    (group, at), = [
        (path, content.index(place))
        for path in (pathlib.Path(storing.repository) / 'groups').iterdir()
        if place in (content := path.read_bytes())]
    with open(group, 'r+b') as f, (
            concurrent.futures.ThreadPoolExecutor(1)) as threads:
        os.pwrite(f.fileno(), bytes([place[0] ^ 1]), at)
        reading = threads.submit(read, link)
        try:
            host.wait_for(lambda: WAITS in host.text())
            assert not reading.done()
        finally:
            os.pwrite(f.fileno(), place[:1], at)
        assert reading.result(LIMIT) == data


def test_an_image_that_is_another_one_loses_its_link(host, storing, ops):
    """Nova then downloads the image, and the cache leaves it to Glance."""
    image_id, data = str(uuid.uuid4()), noise(8 * MIB, 31)
    cached_glance.other_there(storing, ops, image_id, data,
                              noise(8 * MIB, 32))
    fd = os.open(host.wait_for_link(image_id), os.O_RDONLY)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        reading = threads.submit(os.pread, fd, 4096, 0)
        host.wait_for_no_link(image_id)
        # The image may be forged: a guest gets none of its bytes.
        assert not reading.done()
        host.process.terminate()
        with pytest.raises(OSError):
            reading.result(LIMIT)
    with contextlib.suppress(OSError):
        os.close(fd)


def test_a_deactivated_image_comes_all_the_same(host, ops):
    """A guest that has the image open can read all of it."""
    data = noise(8 * MIB, 26)
    image_id = store(ops, data)
    link = host.wait_for_link(image_id)
    with host.reading_the_end(link) as (_, reading):
        ops.request('POST', f'/v2/images/{image_id}/actions/deactivate')
        host.refreshed(ops)
        host.restart_daemon()
        assert reading.result(LIMIT) == data[-4096:]


def test_times_can_be_set_and_nothing_else(host, ops):
    data = content(11)
    link = host.wait_for_link(store(ops, data))
    os.utime(link, ns=(10 ** 18, 10 ** 18 + 7))
    found = os.stat(link)
    assert (found.st_atime_ns, found.st_mtime_ns) == (10 ** 18, 10 ** 18 + 7)
    host.refreshed(ops)
    assert os.stat(link).st_mtime_ns == 10 ** 18 + 7
    os.utime(link)
    assert abs(os.stat(link).st_mtime - time.time()) < 100
    for change in (lambda: os.chmod(link, 0o666),
                   lambda: os.chown(link, 12, 34),
                   lambda: os.truncate(link, 0),
                   lambda: os.utime(host.mounted),
                   lambda: os.open(link, os.O_RDWR),
                   lambda: os.unlink(os.path.realpath(link)),
                   lambda: os.mkdir(host.mounted / 'directory'),
                   lambda: os.rename(os.path.realpath(link),
                                     host.mounted / 'other'),
                   lambda: os.open(host.mounted / 'new',
                                   os.O_CREAT | os.O_WRONLY)):
        with pytest.raises(OSError):
            change()
    assert read(link) == data


def test_a_link_that_nova_removed_comes_back(host, ops):
    image_id = store(ops, content(12))
    link = host.wait_for_link(image_id)
    link.unlink()
    assert host.wait_for_link(image_id).is_symlink()


def test_a_file_of_novas_own_stays(host, ops):
    image_id = store(ops, content(13))
    link = host.wait_for_link(image_id)
    part = host.base / 'part'
    part.write_bytes(b'downloaded')
    part.rename(link)
    host.refreshed(ops)
    ops.delete(image_id)
    host.refreshed(ops)
    assert not link.is_symlink() and link.read_bytes() == b'downloaded'


def test_a_deleted_image_stays_while_it_is_open(host, ops):
    data = content(14)
    image_id = store(ops, data)
    link = host.wait_for_link(image_id)
    unused = store(ops, content(15))
    host.wait_for_link(unused)
    with open(link, 'rb') as f:
        assert f.read() == data
        host.wait_until_here(image_id)
        ops.delete(image_id)
        ops.delete(unused)
        host.wait_for_no_link(unused)
        host.refreshed(ops)
        assert link.is_symlink()
        host.daemon.kill()
        host.daemon.start().wait_for_catalog()
        f.seek(0)
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert f.read() == data
    # A stopped server may start again, until Nova removes the link.
    host.refreshed(ops)
    assert link.is_symlink()
    link.unlink()
    host.refreshed(ops)
    assert not os.path.lexists(link)


def test_a_deleted_image_comes_all_the_same(host, ops):
    """The image stays readable, even if the daemon is killed (I12)."""
    data = noise(8 * MIB, 16)
    image_id = store(ops, data)
    link = host.wait_for_link(image_id)
    with host.reading_the_end(link) as (f, reading):
        ops.delete(image_id)
        host.refreshed(ops)
        host.restart_daemon()
        assert reading.result(LIMIT) == data[-4096:]
        assert f.read() == data[:f.tell()] != b''
        host.refreshed(ops)
        assert read(link) == data


def test_an_image_that_is_deleted_while_dedupd_is_away_keeps_its_link(
        host, ops):
    """A server that runs from it needs the link to start again."""
    data = noise(8 * MIB, 24)
    image_id = store(ops, data)
    link = host.wait_for_link(image_id)
    with host.reading_the_end(link) as (_, reading):
        host.daemon.kill()
        host.wait_for_no_link(image_id)     # Glance has it: Nova downloads
        ops.delete(image_id)
        looks = host.text().count('dedupd does not answer')
        host.wait_for(lambda: host.text().count(
            'dedupd does not answer') >= looks + 2)
        host.peer.hold_after(None)
        host.daemon.start()
        assert reading.result(LIMIT) == data[-4096:]
        host.wait_for_link(image_id)
        host.wait_until_here(image_id)
    host.refreshed(ops)
    assert read(link) == data


def test_a_deleted_image_that_nobody_has_fails_its_reads(host, storing, ops):
    image_id = store(ops, noise(8 * MIB, 22))
    link = host.wait_for_link(image_id)
    with host.reading_the_end(link) as (_, reading):
        ops.delete(image_id)
        host.refreshed(ops)
        storing.daemon.stop(signal.SIGKILL)
        storing.daemon.start().wait_for_catalog()
        host.peer.cut()
        host.peer.hold_after(None)
        with pytest.raises(OSError):
            reading.result(LIMIT)


def test_an_image_deleted_through_the_cache_stays(host, storing, ops):
    """The image and its link stay, for stopped servers that start again."""
    data = content(23)
    image_id = store(ops, data)
    link = host.wait_for_link(image_id)
    assert read(link) == data
    host.wait_until_here(image_id)
    storing.glance.client('ops', host.daemon.url).delete(image_id)
    host.refreshed(ops)
    host.unmount()
    host.mount()
    assert read(link) == data


def test_without_dedupd_nova_downloads_what_is_not_here(host, ops):
    here, missing = store(ops, content(17)), store(ops, content(18))
    assert read(host.wait_for_link(here)) == content(17)
    host.wait_for_link(missing)
    host.daemon.wait_for(
        lambda: host.daemon.counts()['arrivals']['images'] == [])
    host.daemon.kill()
    host.wait_for_no_link(missing)
    assert read(host.path(here)) == content(17)
    host.daemon.start()
    host.wait_for_link(missing)


def test_a_restart_of_dedupd_removes_no_link(host, ops):
    """Nova may be about to open the image again."""
    image_id = store(ops, content(25))
    host.unmount()
    host.away = 10 * LIMIT
    host.mount()
    link = host.wait_for_link(image_id)
    host.daemon.kill()
    # The second check begins when the first has dealt with the links.
    host.wait_for(
        lambda: host.text().count('dedupd does not answer') >= 2)
    assert link.is_symlink()
    host.daemon.start()
    assert read(link) == content(25)


# Long: Glance starts again.
def test_a_new_mount_shows_what_the_last_one_did(host, ops, storing):
    image_id = store(ops, content(19))
    link = host.wait_for_link(image_id)
    host.unmount()
    assert not os.path.exists(link)     # Nova would then download it
    storing.glance.stop()
    try:
        host.mount()
        assert os.stat(link).st_size == len(content(19))
    finally:
        storing.glance.start()


class Unprivileged(Host):
    """A host whose mount is a user's, in name spaces of their own.

    The user may read the interpreter's files, wherever they are.

    :ivar user: a command that runs another as this user
    :ivar inside: a command that runs another in the name space, which has an
        empty ``/etc/fuse.conf`` of its own
    """

    user = ['setpriv', f'--reuid={USER}', f'--regid={USER}', '--clear-groups',
            '--inh-caps=-all,+dac_read_search',
            '--ambient-caps=-all,+dac_read_search']

    def __init__(self, place, storing):
        super().__init__(place, storing)
        self.conf = place / 'fuse.conf'
        self.conf.write_text('')
        # The device is open to all, as udev makes it.
        device = place / 'fuse'
        os.mknod(device, stat.S_IFCHR | 0o666, os.stat('/dev/fuse').st_rdev)
        device.chmod(0o666)
        self._holder = subprocess.Popen(
            ['unshare', '--mount', '--propagation', 'private', 'sh', '-c',
             'mount --bind "$0" /etc/fuse.conf && mount --bind "$1" /dev/fuse '
             '&& echo && exec cat', self.conf, device],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout.readline() == b'\n'
        self.inside = ['nsenter', f'--target={self._holder.pid}', '--mount',
                       f'--wdns={daemons.ROOT}']
        self.prefix = [*self.inside, *self.user]
        self.daemon.prefix = self.user
        self.base.chmod(0o1777)
        self.mounted.mkdir()
        for found in (self.repository, self.daemon.directory, self.mounted):
            for directory, _, names in os.walk(found):
                for name in ('', *names):
                    os.chown(os.path.join(directory, name), USER, USER)
        open_for_all(place)
        # The list of images lies beside the repository, and the socket beside
        # the mount.
        for directory in pathlib.Path(self.repository).parent, place:
            directory.chmod(0o777)

    def __exit__(self, *exc_info):
        super().__exit__(*exc_info)
        self._holder.communicate(timeout=LIMIT)

    def seen(self, path):
        return f'/proc/{self._holder.pid}/root{path}'


def open_for_all(place):
    """Let all users enter a directory, and those above it."""
    for parent in (place, *place.parents[:-1]):
        if parent.stat().st_uid == os.getuid() and parent != pathlib.Path(
                tempfile.gettempdir()):
            parent.chmod(parent.stat().st_mode | 0o111)


def require_reads(host, ops, data):
    """A link leads to the image, whose times can be set."""
    link = host.path(store(ops, data))
    host.wait_for(link.is_symlink)
    path = host.seen(os.readlink(link))
    assert os.stat(path).st_uid == USER != os.getuid()
    assert read(path) == data
    os.utime(path, ns=(10 ** 18, 10 ** 18))
    assert os.stat(path).st_mtime_ns == 10 ** 18
    text = host.text() + host.daemon.text()
    assert 'Traceback' not in text, text[text.find('Traceback'):][:3000]


def test_it_needs_no_root(tmp_path, storing, ops):
    """The mount only needs a line in ``/etc/fuse.conf``, and no root.

    The line lets libvirt's user read.
    """
    host = Unprivileged(tmp_path, storing)
    host.daemon.start().wait_for_catalog()
    with pytest.raises(AssertionError, match='user_allow_other'):
        host.mount()
    assert host.daemon.stop() == 0
    host.conf.write_text('user_allow_other\n')
    with host:
        require_reads(host, ops, content(27))


def test_another_process_mounts_for_a_confined_one(tmp_path, storing, ops):
    """A process without privileges, in a name space, gets its mount.

    This is as in the unit.
    """
    host = Unprivileged(tmp_path, storing)
    host.conf.write_text('user_allow_other\n')
    host.mounter = host.prefix
    host.prefix = [
        *host.inside, 'unshare', '--mount', '--propagation', 'slave',
        *host.user, '--no-new-privs']
    with host:
        # Nova is outside of the process's name space, too.
        require_reads(host, ops, content(29))
        assert not os.path.exists(f'{host.mounted}.socket')


def test_it_can_replace_nothing_of_novas(tmp_path, storing, ops):
    """The mount requires the sticky bit, and cannot replace Nova's files."""
    host = Unprivileged(tmp_path, storing)
    host.conf.write_text('user_allow_other\n')
    host.base.chmod(0o777)
    host.daemon.start().wait_for_catalog()
    with pytest.raises(AssertionError, match=r'chmod \+t'):
        host.mount()
    assert host.process.returncode == 2
    assert host.daemon.stop() == 0
    host.base.chmod(0o1777)
    (host.base / 'image').write_text("Nova's")
    with host:
        for command in (['mv', host.base / 'image', host.base / 'other'],
                        ['ln', '-sf', '/etc/passwd', host.base / 'image'],
                        ['rm', '-f', host.base / 'image']):
            found = subprocess.run([*host.user, *command], timeout=LIMIT,
                                   capture_output=True, text=True)
            assert found.returncode == 1, found.stderr
        assert (host.base / 'image').read_text() == "Nova's"


def as_user(group, *command):
    return subprocess.run(
        ['setpriv', f'--reuid={USER}', f'--regid={group}', '--clear-groups',
         *command], capture_output=True, text=True, timeout=LIMIT)


def test_only_the_group_reads_the_mount(tmp_path, host, ops):
    """A user outside of the group can read no image of the mount."""
    link = host.wait_for_link(store(ops, content(28)))
    path = os.readlink(link)
    open_for_all(tmp_path)
    group = os.stat(host.base).st_gid
    assert as_user(group, 'head', '-c1', path).returncode == 0
    for command in (('head', '-c1', path), ('ls', host.mounted),
                    ('stat', path), ('ls', f'{host.mounted}/.')):
        found = as_user(USER, *command)
        assert found.returncode != 0 and 'Permission denied' in found.stderr
    # A member lists and reads, and changes nothing.
    assert os.path.basename(path) in as_user(
        group, 'ls', host.mounted).stdout.split()
    for command in (('touch', path), ('touch', '-d', '2001-01-01', path),
                    ('touch', f'{host.mounted}/new'), ('rm', '-f', path),
                    ('ln', '-s', '/etc/passwd', f'{host.mounted}/link'),
                    ('truncate', '-s0', path), ('chmod', '0666', path),
                    ('mv', path, f'{host.mounted}/other')):
        found = as_user(group, *command)
        assert found.returncode != 0, command
    assert read(path) == content(28)


@pytest.mark.parametrize('changed, words', [
    ({'nova_group': 'no-such-group'}, 'there is no group no-such-group')])
def test_wrong_groups(tmp_path, storing, changed, words):
    host = Host(tmp_path, storing)
    host.daemon.cache |= changed
    host.daemon.write_config(nbd_socket=host.daemon.directory / 'nbd')
    with host.daemon:
        host.daemon.start().wait_for_catalog()
        with pytest.raises(AssertionError, match=words):
            host.mount()


def test_a_kill_in_a_removal_costs_nova_nothing(host, ops):
    """Nova's file, or our link, is moved aside before a link is removed."""
    lost, left = store(ops, content(32)), store(ops, content(33))
    for image_id in lost, left:
        host.wait_for_link(image_id)
    host.unmount()
    aside = [host.base / f'glance-dedup-aside-{host.path(image_id).name}'
             for image_id in (lost, left)]
    # As the process leaves them that is killed between two calls.
    host.path(lost).unlink()
    aside[0].write_bytes(b'downloaded')
    host.path(left).rename(aside[1])
    host.mount()
    host.wait_for(lambda: not any(map(os.path.lexists, aside)))
    assert not host.path(lost).is_symlink()
    assert host.path(lost).read_bytes() == b'downloaded'
    assert read(host.wait_for_link(left)) == content(33)


def test_it_ends_on_a_signal_while_reads_wait(host, ops):
    link = host.wait_for_link(store(ops, content(21)))
    host.daemon.kill()
    fd = os.open(link, os.O_RDONLY)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        reading = threads.submit(os.pread, fd, 4096, 0)
        host.wait_for(lambda: WAITS in host.text())
        host.process.terminate()
        with pytest.raises(OSError):
            reading.result(LIMIT)
    with contextlib.suppress(OSError):
        os.close(fd)
    assert host.process.wait(LIMIT) == 0
    assert not os.path.ismount(host.mounted)
