# SPDX-License-Identifier: Apache-2.0
"""The part of tools/demo that runs when everything is installed."""

import argparse
import concurrent.futures
import contextlib
import hashlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

TOP = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TOP))

from glance_dedup.base import exceptions  # noqa: E402
from glance_dedup.client import client_errors  # noqa: E402
from glance_dedup.client import daemon_client  # noqa: E402
from glance_dedup.repository import image_repository  # noqa: E402
from tests.functional import glance_server  # noqa: E402

PIECE = 4 << 20
MIB = 1 << 20
MB = 1_000_000
SHM = '/dev/shm'  # nosec: a tmpfs, where the filter has to be
# Glance compares a file's format with the declared one.
MAGIC = {b'QFI\xfb': 'qcow2', b'KDMV': 'vmdk', b'vhdxfile': 'vhdx'}


class Failure(Exception):
    """Ends the demo with a message for the user."""


def say(text=''):
    print(text, flush=True)


def disk_format(path):
    with open(path, 'rb') as f:
        head = f.read(8)
    return next((name for magic, name in MAGIC.items()
                 if head.startswith(magic)), 'raw')


def pieces(read_into):
    """Yield the pieces that `read_into` gives, in two buffers by turns."""
    buffers = [memoryview(bytearray(PIECE)) for _ in range(2)]
    while length := read_into(buffers[0]):
        yield buffers[0][:length]
        buffers.reverse()


def sha256(read_into):
    """Hash on a thread beside the reading, so as not to slow it down."""
    digest = hashlib.sha256()
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        hashed = None
        for piece in pieces(read_into):
            if hashed is not None:
                hashed.result()
            hashed = executor.submit(digest.update, piece)
    return digest.hexdigest()


def upload(client, path):
    """Return the image's id and the seconds that it took."""
    image = client.create(name=path.name, disk_format=disk_format(path))
    with open(path, 'rb') as f:
        start = time.monotonic()
        client.upload(image['id'], f, size=path.stat().st_size)
        seconds = time.monotonic() - start
    status = client.show(image['id'])['status']
    if status != 'active':
        raise Failure(f'{path} was uploaded, but Glance says it is {status}')
    return image['id'], seconds


def download(client, image_id, path):
    """Return whether the image equals the file, and the seconds."""
    start = time.monotonic()
    with client.open(image_id) as response:
        received = sha256(response.readinto)
    seconds = time.monotonic() - start
    with open(path, 'rb', buffering=0) as f:
        return sha256(f.readinto) == received, seconds


def print_table(rows):
    """`rows`: path, stat, seconds of upload and of download."""
    width = max(12, *(len(path.name) for path, *_ in rows))
    line = '{:<%d}  {:>9}  {:>9}  {:>9}  {:>6}  {:>11}  {:>13}' % width
    say(line.format('image', 'size', 'non-zero', 'stored', 'saved',
                    'upload MB/s', 'download MB/s'))
    total = {'size': 0, 'nonzero': 0, 'new': 0, 'stored': 0}

    def sizes(size, nonzero, stored):
        saved = f'{1 - stored / nonzero:.1%}' if nonzero else '-'
        return [f'{n / MIB:.1f}' for n in (size, nonzero, stored)] + [saved]

    for path, stat, up, down in rows:
        nonzero = stat.size - stat.zero_bytes
        say(line.format(
            path.name, *sizes(stat.size, nonzero, stat.stored_bytes),
            f'{stat.size / MB / up:.0f}', f'{stat.size / MB / down:.0f}'))
        total['size'] += stat.size
        total['nonzero'] += nonzero
        total['new'] += stat.new_bytes
        total['stored'] += stat.stored_bytes
    say(line.format('total', *sizes(total['size'], total['nonzero'],
                                    total['stored']), '', '').rstrip())
    say('Sizes are in MiB.')
    if total['nonzero']:
        say(f'Stored: {total["stored"] / total["nonzero"]:.1%} of the '
            'non-zero bytes; before compression '
            f'{total["new"] / total["nonzero"]:.1%}.')


class Daemon:
    """A dedupd beside Glance, with a status page on the loopback interface."""

    def __init__(self, work, datadir, filter_dir):
        with socket.socket() as free:
            free.bind(('127.0.0.1', 0))
            port = free.getsockname()[1]
        self.page = f'http://127.0.0.1:{port}/'
        # Not in `work`: a socket's path has to be short.
        self.place = tempfile.mkdtemp(prefix='dedupd-')
        self.socket = os.path.join(self.place, 'socket')
        self.log = work / 'dedupd.log'
        self.config = work / 'dedupd.conf'
        self.config.write_text(
            f'[dedupd]\ndatadir = {datadir}\nsocket = {self.socket}\n'
            f'filter_dir = {filter_dir}\nstatus_listen = 127.0.0.1:{port}\n'
            'recompress_rate_mib = 0\n')
        self.process = None

    def start(self):
        with open(self.log, 'ab') as log:
            self.process = subprocess.Popen(
                [sys.executable, '-m', 'dedupd.daemon', '--config-file',
                 str(self.config)], cwd=TOP, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True)
        client = self.client()
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(client_errors.ClientError):
                status = client.status()
                if (status['daemon']['role'] == 'maintainer'
                        and status['catalog']['state'] == 'ready'):
                    return
            if self.process.poll() is not None:
                raise Failure(f'dedupd did not start; see {self.log}')
            if time.monotonic() > deadline:
                raise Failure('dedupd did not get ready in 30 s; see '
                              f'{self.log}')
            time.sleep(0.05)

    def client(self):
        return daemon_client.Client(f'unix:{self.socket}')

    def stop(self):
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.place, ignore_errors=True)


def run_task(daemon, task):
    """Have dedupd run a task; return the bytes of disk that are left."""
    client = daemon.client()
    last = client.wait(task, client.start(task))
    if last['error']:
        raise Failure(f'dedupd: {task}: {last["error"]}')
    return client.status()['space']['disk_bytes']


def report_different(paths, step):
    """Report the images that did not come back as they were."""
    for path in paths:
        print(f'{path}: DIFFERENT after {step}', file=sys.stderr)


def recompress(server, daemon, images):
    """Run at once what dedupd does in idle hours; compare the images again.

    :param images: (path, id)
    :returns: whether all came back as they were, and the bytes that the disk
        has more
    """
    before = run_task(daemon, 'account')
    say('recompress, with similar blocks together ...')
    after = run_task(daemon, 'recompress')
    client = glance_server.Client(server.url)
    different = [path for path, image_id in images
                 if not download(client, image_id, path)[0]]
    report_different(different, 'recompression')
    if not different:
        say(f'Recompressed: {before / MIB:.1f} MiB of disk became '
            f'{after / MIB:.1f}, and every image came back the same.')
    return not different, before - after


def collect(server, daemon, image_id, name):
    """Delete an image; show, and return, the space that comes back."""
    before = run_task(daemon, 'account')
    glance_server.Client(server.url).delete(image_id)
    after = run_task(daemon, 'collect')
    say(f'{name} deleted and collected: {(before - after) / MIB:.1f} MiB came '
        f'back, {after / MIB:.1f} MiB are left on the disk.')
    return before - after


def require_returned(stored, back):
    """Of what images had stored, most must have come back without them.

    Of a few blocks nothing may: the catalog grows meanwhile.
    """
    if stored >= MIB and back < stored / 2:
        raise Failure(
            f'all images were deleted and collected, and {back / MIB:.1f} MiB '
            f'came back of {stored / MIB:.1f} MiB that they had stored')


def print_usage(server, daemon, work, filter_dir):
    bin_dir = pathlib.Path(sys.prefix) / 'bin'
    datadir = server.stores['dedup']['dedup_store_datadir']
    none = '--os-auth-type none'
    say(f"""
Glance is at {server.url} and keeps running. No password, no project:

  PATH={bin_dir}:$PATH
  openstack {none} --os-endpoint {server.url} image list
  openstack {none} --os-endpoint {server.url} image create \\
      --disk-format raw --file FILE NAME
  glance --os-auth-token none --os-image-url {server.url} image-list
  glance --os-auth-token none --os-image-url {server.url} \\
      image-download --file FILE ID

What is stored, without Glance:

  glance-dedup --repository {datadir} image list
  glance-dedup --socket {daemon.socket} status

dedupd's status page: {daemon.page}
Logs: {server.log}
      {daemon.log}
Stop both and remove everything:

  kill {server.pid} {daemon.process.pid}
  rm -r {work} {filter_dir} {daemon.place}
""")


def require_room(paths, directory):
    need = sum(path.stat().st_blocks * 512 for path in paths) + 256 * MIB
    free = shutil.disk_usage(directory).free
    if free < need:
        raise Failure(
            f'{directory} has {free // MIB} MiB free, {need // MIB} are '
            'needed.\nWhat to do: make room, or use a checkout elsewhere.')


def store_all(server, paths, filter_dir):
    """Upload and download every image.

    Returns the ids, the bytes that they stored, and whether all came back as
    they were.
    """
    client = glance_server.Client(server.url)
    stored = []
    for path in paths:
        say(f'upload {path.name} ...')
        stored.append((path, *upload(client, path)))
    rows = []
    different = []
    datadir = server.stores['dedup']['dedup_store_datadir']
    with image_repository.Repository(datadir, threads=0,
                                     filter_dir=filter_dir) as repo:
        for path, image_id, up in stored:
            say(f'download {path.name} and compare SHA-256 ...')
            same, down = download(client, image_id, path)
            if not same:
                different.append(path)
            rows.append((path, repo.stat(image_id), up, down))
    say()
    print_table(rows)
    report_different(different, 'the download')
    if not different:
        say('Every image came back with the same SHA-256, through dedupd.')
    return ([image_id for _, image_id, _ in stored],
            sum(stat.stored_bytes for _, stat, _, _ in rows), not different)


def run(paths, keep):
    with contextlib.ExitStack() as undo:
        parent = TOP / '.demo'
        parent.mkdir(exist_ok=True)
        require_room(paths, parent)
        work = pathlib.Path(tempfile.mkdtemp(prefix='glance-', dir=parent))
        undo.callback(shutil.rmtree, work, ignore_errors=True)
        filter_dir = tempfile.mkdtemp(
            prefix='glance-dedup-demo-',
            dir=SHM if os.path.isdir(SHM) else None)
        undo.callback(shutil.rmtree, filter_dir, ignore_errors=True)
        datadir = work / 'repository'
        image_repository.Repository.create(datadir)
        daemon = Daemon(work, datadir, filter_dir)
        undo.callback(save_log, daemon.log, 'dedupd.log')
        undo.callback(daemon.stop)
        say('start dedupd ...')
        daemon.start()
        server = glance_server.GlanceServer(work, {'dedup': {
            'type': 'dedup',
            'dedup_store_datadir': datadir,
            'dedup_store_dedupd_socket': daemon.socket,
            'dedup_store_codec': 'lz4',
            'dedup_store_adaptive_compression': False,
            'dedup_store_filter_dir': filter_dir,
            'dedup_store_filter_mib': 16,
        }})
        undo.callback(save_log, server.log, 'glance.log')
        undo.callback(server.stop)
        say('start Glance ...')
        server.start()
        say(f'start Glance: {server.url}, {server.processes} processes of '
            f'{server.threads} threads')
        image_ids, stored, same = store_all(server, paths, filter_dir)
        still_same, gained = recompress(
            server, daemon, list(zip(paths, image_ids)))
        result = 0 if same and still_same else 1
        if keep:
            undo.pop_all()
            print_usage(server, daemon, work, filter_dir)
            server.detach()
            return result
        if sys.stdin.isatty() and sys.stdout.isatty():
            say(f"dedupd's status page is at {daemon.page} until you press "
                'Enter.')
            sys.stdin.readline()
        require_returned(stored - gained, sum(
            collect(server, daemon, image_id, path.name)
            for path, image_id in zip(paths, image_ids)))
        say(f"dedupd's status page was at {daemon.page}; tools/demo --keep "
            'leaves all running.')
        return result


def save_log(log, name):
    """Keep a log when the other files are removed."""
    with contextlib.suppress(OSError):
        shutil.copyfile(log, TOP / '.log' / name)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--keep', action='store_true')
    parser.add_argument('image', nargs='+', type=pathlib.Path)
    args = parser.parse_args()

    def end(signum, frame):
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGHUP, end)
    try:
        return run(args.image, args.keep)
    except KeyboardInterrupt:
        print('\ntools/demo: interrupted; Glance and dedupd are stopped and '
              'their files are removed', file=sys.stderr)
        return 130
    except (Failure, OSError, exceptions.RepositoryError,
            client_errors.ClientError, glance_server.HTTPError,
            glance_server.ServerError) as exc:
        print(f'tools/demo: FAILED: {exc}\n'
              'What to do: the logs may say more: '
              f'{TOP}/.log/glance.log and dedupd.log', file=sys.stderr)
        return 2


if __name__ == '__main__':
    sys.exit(main())
