# SPDX-License-Identifier: Apache-2.0

"""A guest with this machine's files, and a kernel that has NFS and CephFS.

It is Linux as a process (user-mode Linux): it needs no virtual machine, and
its programs run about as fast as any. Its root is this machine's; files
written there stay in its memory. It has a link to the servers for each host,
and one more, on which it receives commands: a command is one line of JSON, and
frames with its output come back. An empty frame is the last, and the exit
status follows. If a file that the guest has read changes here, the guest does
not notice.
"""

import contextlib
import json
import os
import pathlib
import select
import signal
import socket
import socketserver
import struct
import subprocess
import sys

from tests.sharedfs import shared_fs

#: In the guest: the directory of its file system.
VARIABLE = 'GLANCE_DEDUP_GUEST'
HERE = pathlib.Path(__file__).resolve().parent
TOP = HERE.parents[1]
MEMORY_MIB = 2048
#: Links, by number: ``vecN`` in the guest.
LINKS = (*shared_fs.HOSTS, 'control')
PORT = 1024
FRAME = struct.Struct('>I')
_MODULES = '/usr/lib/uml/modules'
_INIT = f"""#!/bin/sh -e
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
mkdir -p /run/own /run/root /run/modules/lib
ln -s {_MODULES} /run/modules/lib/modules
modprobe -d /run/modules -a overlay nfsv4 ceph
mount -t tmpfs tmpfs /run/own
mkdir /run/own/upper /run/own/work
mount -t overlay -o lowerdir=/,upperdir=/run/own/upper,workdir=/run/own/work \\
    root /run/root
cd /run/root
mount -t proc proc proc
mount -t sysfs sys sys
mount -t devtmpfs dev dev
mkdir -p dev/shm dev/pts
mount -t devpts devpts dev/pts
for place in dev/shm run "./$directory"; do mount -t tmpfs tmpfs "$place"; done
ip link set lo up
ip address add "$address" dev vec2
ip link set vec2 up
hostname guest
export PYTHONPATH="$top" {VARIABLE}="$directory" LANG=C.UTF-8
exec chroot . "$python" -P -m tests.sharedfs.guest
"""


def inside():
    """Return whether this process runs in a guest."""
    return VARIABLE in os.environ


def directory():
    """Return the directory of this guest's file system."""
    return pathlib.Path(os.environ[VARIABLE])


def address(number, end):
    """Return a link end's address: 1 for this machine, 2 for the guest."""
    return f'198.18.{number + 1}.{end}'


# -- on this machine ----------------------------------------------------------

class Guest(shared_fs.Server):
    name = 'guest'
    title = 'the guest'

    def launch(self):
        ip = self.find('ip', 'iproute2')
        for number, link in enumerate(LINKS):
            # A guest that was killed may have left it.
            with contextlib.suppress(shared_fs.SharedError):
                self.ask(ip, 'link', 'delete', link)
            for words in (f'tuntap add dev {link} mode tap',
                          f'address add {address(number, 1)}/24 dev {link}',
                          f'link set {link} up'):
                self.ask(ip, *words.split())
        # The hosts' traffic with a server in the guest goes through here.
        self.ask('sh', '-c', 'echo 1 >/proc/sys/net/ipv4/ip_forward')
        init = self.directory / 'init'
        init.write_text(_INIT)
        init.chmod(0o755)
        self.find('modprobe', 'kmod')
        registers = self.directory / 'registers.so'
        self.ask(self.find('gcc', 'gcc'), '-std=c11', '-D_GNU_SOURCE', '-O2',
                 '-Wall', '-Wextra', '-Werror', '-shared', '-fPIC',
                 HERE / 'preload/registers.c', '-o', registers)
        # The kernel passes unknown arguments to its first process.
        self.spawn([
            *self.shared.enter(), 'env', f'LD_PRELOAD={registers}',
            self.find('linux.uml', 'user-mode-linux'),
            f'mem={MEMORY_MIB}M', 'rootfstype=hostfs', 'rootflags=/', 'ro',
            f'init={init}', f'uml_dir={self.directory}', 'con=null',
            'con0=null,fd:1', 'quiet', 'panic=-1',
            # This machine sends several segments of TCP in one frame.
            *(f'vec{number}:transport=tap,ifname={link},gro=1'
              for number, link in enumerate(LINKS)),
            f'python={sys.executable}', f'top={TOP}',
            f'directory={self.shared.directory}',
            f'address={address(len(LINKS) - 1, 2)}/24'])

    def environment(self):
        # Its memory is a file.
        return {**super().environment(), 'TMPDIR': '/dev/shm'}

    def answers(self):
        return self.call(['true'], 5, capture_output=True).returncode == 0

    def stop(self):
        self.kill()         # the guest has nothing to save

    def call(self, command, limit=shared_fs.LIMIT, cwd=TOP, **options):
        """Run a command in the guest, as subprocess.run does."""
        return subprocess.run(
            [*self.shared.enter(), sys.executable, '-P', '-m',
             'tests.sharedfs.guest', cwd, *command], check=False,
            env={**os.environ, 'PYTHONPATH': str(TOP)}, timeout=limit,
            stdin=subprocess.DEVNULL, **options)


def _received(sock, length):
    data = b''
    while len(data) < length:
        piece = sock.recv(length - len(data))
        if not piece:
            raise shared_fs.SharedError('the guest has ended')
        data += piece
    return data


def ask(cwd, *command):
    """Have the guest run a command; print its output; return its status."""
    place = address(len(LINKS) - 1, 2), PORT
    with socket.create_connection(place, shared_fs.LIMIT) as sock:
        sock.settimeout(None)
        sock.sendall(json.dumps([cwd, command]).encode() + b'\n')
        while True:
            length, = FRAME.unpack(_received(sock, FRAME.size))
            if not length:
                return FRAME.unpack(_received(sock, FRAME.size))[0]
            os.write(1, _received(sock, length))


# -- in the guest -------------------------------------------------------------

class Handler(socketserver.StreamRequestHandler):
    """Runs one command, and ends it if its caller disconnects."""

    def handle(self):
        cwd, command = json.loads(self.rfile.readline())
        try:
            process = subprocess.Popen(
                command, cwd=cwd, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True)
        except OSError as exc:
            self._send(f'{exc}\n'.encode())
            self._end(127)
            return
        with process:
            try:
                self._pass_on(process)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            status = process.wait()
        self._end(status if status >= 0 else 128 - status)

    def _pass_on(self, process):
        """Send its output until it has ended; its children may run on."""
        output = process.stdout.fileno()
        sources = [self.connection, output]
        while True:
            ended = process.poll() is not None
            ready, _, _ = select.select(sources, [], [], 0 if ended else 0.05)
            if self.connection in ready:
                os.killpg(process.pid, signal.SIGKILL)
                return
            if output in ready:
                data = os.read(output, 1 << 16)
                if data:
                    self._send(data)
                else:
                    sources.remove(output)
            elif ended:
                return

    def _send(self, data):
        self.wfile.write(FRAME.pack(len(data)) + data)

    def _end(self, status):
        self.wfile.write(FRAME.pack(0) + FRAME.pack(status))


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True


def serve():
    if os.fork():
        while True:         # no other process reaps orphans
            with contextlib.suppress(ChildProcessError):
                os.wait()
    with Server((address(len(LINKS) - 1, 2), PORT), Handler) as server:
        server.serve_forever()


if __name__ == '__main__':
    if inside():
        serve()
    sys.exit(ask(*sys.argv[1:]))
