# SPDX-License-Identifier: Apache-2.0

"""The command ``volume serve``: a volume as a disk, over NBD.

nbdkit speaks the protocol. The command checks the repository and the volume,
and then becomes nbdkit with our plugin, so a service manager sees one process.
"""

import argparse
import contextlib
import fcntl
import os
import re
import resource
import shutil
import socket
import stat
import subprocess

import xxhash

from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import sockets
from glance_dedup.cli import command
from glance_dedup.cli import common
from glance_dedup.repository import layout

PLUGIN = os.path.join(os.path.dirname(os.path.dirname(__file__)),
                      'nbdkit-glance-dedup-plugin.so')
# The longest path that an address of a Unix socket has room for, less what the
# socket's first name adds.
_MAX_PATH = 96
# The descriptor that systemd.socket(5) has a service find its socket at.
_FIRST_INHERITED = 3
# The first version of nbdkit that aborts if a client hangs up at the wrong
# moment, unless a connection has one thread, and the first that does not any
# more ("server: Don't assert on send if client hangs up early").
_ABORTS = (1, 32, 4), (1, 33, 10)
# The most bytes of a request (plugin.c). nbdkit's filter for the rate serves a
# larger request than its burst in more time than the rate asks for.
_MAX_REQUEST_MIB = 32
_BURST_SECONDS = 2
# The source of GnuTLS's policy: a variable, or else Debian's or Fedora's.
_TLS_POLICY = 'GNUTLS_SYSTEM_PRIORITY_FILE'
_TLS_POLICIES = ('/etc/gnutls/config',
                 '/etc/crypto-policies/back-ends/gnutls.config')
_MAX_TLS_POLICY = 1 << 20
_NO_OLD_TLS = b"""
[overrides]
disabled-version = tls1.0
disabled-version = tls1.1
disabled-version = dtls1.0
"""


class Serve(command.RepositoryCommand):
    """Serve a volume over NBD, as a disk that can be written to.

    The command runs until it gets SIGTERM or SIGINT. It then finishes the
    requests, and makes a checkpoint. Clients use the export named like the
    volume, or the default export, on any number of connections. Without TLS, a
    Unix socket is the only choice: NBD itself asks nobody who they are.
    """

    def add_arguments(self, parser):
        parser.add_argument('name', metavar='VOLUME')
        place = parser.add_mutually_exclusive_group(required=True)
        place.add_argument(
            '--nbd-socket', metavar='PATH',
            help='Listen on this Unix socket. A socket that nobody serves is '
            'replaced.')
        place.add_argument(
            '--port', type=int, metavar='NUMBER',
            help='Listen on this TCP port, with TLS.')
        parser.add_argument(
            '--address', metavar='ADDRESS',
            help='With --port: the address to listen on. Default: all.')
        parser.add_argument(
            '--socket-mode', type=_mode, default=0o600, metavar='MODE',
            help='The mode of the Unix socket, octal. Users who may write '
            'to it can read and change the volume. Default: 600.')
        parser.add_argument(
            '--tls-certificates', metavar='DIR',
            help="A directory with ca-cert.pem, server-cert.pem and "
            'server-key.pem. Clients must then use TLS, and show a '
            'certificate that this authority has signed.')
        parser.add_argument(
            '--threads', type=int, default=16, metavar='N',
            help='Requests of a connection that are worked on at once. '
            'Default: %(default)s.')
        parser.add_argument(
            '--cache-size', dest='cache_mib', type=common.size_in_mib,
            default='64M', metavar='SIZE',
            help='Memory for decompressed segments. Default: %(default)s.')
        parser.add_argument(
            '--index-size', dest='index_mib', type=common.size_in_mib,
            default='64M', metavar='SIZE',
            help='Memory for what finds duplicates (--index): of a new '
            'filter, of the table of inram, which takes 20 bytes for each '
            'block, or of the cache of dtb and leveldb. '
            'Default: %(default)s.')
        parser.add_argument(
            '--max-rate', dest='rate_mib', type=common.size_in_mib,
            metavar='SIZE',
            help='Serve at most so many bytes a second, such as 50M, for '
            'reads, and as many for writes, of all clients together. '
            'Default: no limit.')
        parser.add_argument(
            '--burst', dest='burst_mib', type=common.size_in_mib,
            metavar='SIZE',
            help='With --max-rate: serve up to so many bytes at full speed '
            'after a pause. Default: those of two seconds, or 32M, whichever '
            'is more.')
        parser.add_argument(
            '--read-only', action='store_true',
            help='Refuse all writes of clients. The server owns the volume '
            'all the same.')
        parser.add_argument(
            '--no-dedup', action='store_true',
            help='Store written blocks without looking for duplicates, and '
            'never share them later, for a disk of encrypted data or of swap, '
            'for example.')
        common.add_codec(parser)

    def take_action(self, parsed_args):
        _require_options(parsed_args)
        nbdkit = _find_programs()
        _reserve_descriptor()
        with self.open(codec=parsed_args.codec,
                       filter_mib=parsed_args.index_mib) as repo:
            _require_volume(repo, parsed_args.name)
            keys = _keys(repo, parsed_args, self.settings)
            self._check_daemon(repo)
            if not repo.is_maintained:
                self.app.tell(
                    f'no process maintains {repo.path}: what volumes have '
                    'overwritten takes up space until dedupd runs, or '
                    "'glance-dedup task collect'")
        if parsed_args.nbd_socket:
            _listen(parsed_args.nbd_socket, parsed_args.socket_mode)
        if parsed_args.port is not None:
            # Strangers take descriptors until they are hung up on.
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        if parsed_args.tls_certificates:
            _limit_tls()
        os.execv(nbdkit, [nbdkit, *self._options(nbdkit, parsed_args), PLUGIN,
                          *keys, *_limits(parsed_args)])

    def _options(self, nbdkit: str, args) -> list[str]:
        """nbdkit's own options."""
        options = ['--foreground',
                   f'--threads={self._threads(nbdkit, args.threads)}']
        if args.port is not None:
            options.append(f'--port={args.port}')
            if args.address:
                options.append(f'--ipaddr={args.address}')
        if args.read_only:
            options.append('--readonly')
        if args.rate_mib is not None:
            options.append('--filter=rate')
        if args.tls_certificates:
            options += ['--tls=require', '--tls-verify-peer',
                        f'--tls-certificates={args.tls_certificates}']
        return options

    def _threads(self, nbdkit: str, wanted: int) -> int:
        """Return for how many requests of a connection nbdkit has threads."""
        text = subprocess.run(
            [nbdkit, '--dump-config'], stdin=subprocess.DEVNULL, check=True,
            stdout=subprocess.PIPE, text=True, timeout=60).stdout
        found = re.search(r'^version=((\d+)\.(\d+)\.(\d+))', text, re.M)
        if found is None:
            raise common.FailedError(f'{nbdkit} does not say its version')
        version = tuple(map(int, found.groups()[1:]))
        if wanted == 1 or not _ABORTS[0] <= version < _ABORTS[1]:
            return wanted
        self.app.tell(
            f'nbdkit {found[1]} aborts if a client hangs up while several of '
            'its requests are worked on. So one request of a connection is '
            'worked on at a time. Install nbdkit 1.34 or newer')
        return 1

    def _check_daemon(self, repo) -> None:
        """Warn if blocks that are in an object store cannot be read."""
        from glance_dedup.repository import cold_settings

        if (cold_settings.read(repo.path) is not None
                and self.healthy_daemon() is None):
            self.app.tell(
                f'dedupd does not answer on {self.settings.socket_in_words}: '
                'until it does, blocks that are in the object store cannot '
                'be read')


def _mode(text: str) -> int:
    if not re.fullmatch('0?[0-7]{3}', text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a mode, like 660")
    return int(text, 8)


def _require_options(args) -> None:
    if args.port is not None:
        if not 1 <= args.port <= 65535:
            raise common.UsageError(f'--port: {args.port} is not 1 to 65535')
        if not args.tls_certificates:
            raise common.UsageError(
                '--port needs --tls-certificates: without TLS everybody who '
                'reaches the port could change the volume. Use --nbd-socket '
                'for clients on this host')
    elif args.address:
        raise common.UsageError('--address needs --port')
    elif len(os.fsencode(args.nbd_socket)) > _MAX_PATH:
        raise common.UsageError(
            f'--nbd-socket: the path is longer than {_MAX_PATH} bytes, '
            'the most that a Unix socket can have here')
    if not 1 <= args.threads <= 256:
        raise common.UsageError(f'--threads: {args.threads} is not 1 to 256')
    if args.cache_mib > 1 << 20:
        raise common.UsageError('--cache-size: the most is 1T')
    if args.rate_mib is not None and not 1 <= args.rate_mib <= 1 << 20:
        raise common.UsageError('--max-rate is not 1M to 1T')
    if args.burst_mib is not None:
        if args.rate_mib is None:
            raise common.UsageError('--burst needs --max-rate')
        if not _MAX_REQUEST_MIB <= args.burst_mib <= 1 << 20:
            raise common.UsageError(
                f'--burst is not {_MAX_REQUEST_MIB}M, the size of the largest '
                'request, to 1T')


def _limits(args) -> list[str]:
    """Return the keys of nbdkit's filter for the rate."""
    if args.rate_mib is None:
        return []
    burst_mib = args.burst_mib or max(
        _BURST_SECONDS * args.rate_mib, _MAX_REQUEST_MIB)
    return [f'rate={args.rate_mib << 23}',      # bits
            f'burstiness={burst_mib / args.rate_mib}']


def _find_programs() -> str:
    """The path of nbdkit, if the plugin is there, too."""
    nbdkit = shutil.which('nbdkit')
    if nbdkit is None:
        raise common.FailedError(
            'nbdkit was not found: install the package nbdkit of the '
            'distribution')
    if not os.path.exists(PLUGIN):
        raise common.FailedError(
            f'the plugin {PLUGIN} was not built. Install the package '
            'nbdkit-plugin-dev (nbdkit-devel), which has nbdkit-plugin.h, '
            'and build glance-dedup again: pip install --force-reinstall '
            '--no-deps --no-binary glance-dedup glance-dedup')
    return nbdkit


def _require_volume(repo, name: str) -> None:
    """Refuse a volume that is missing, or that another process serves."""
    from glance_dedup.repository import openvolumes
    from glance_dedup.repository import volumes

    if not volumes.is_name(name):
        raise common.UsageError(
            f"'{name}' is no name of a volume: it has 1 to 64 characters out "
            'of A-Z a-z 0-9 _ -')
    try:
        in_use = openvolumes.is_in_use(repo, name)
    except exceptions.ImageNotFound as e:
        raise common.FailedError(
            f'there is no volume {name} in {repo.path}') from e
    if in_use:
        lock = os.path.join(repo.path, layout.VOLUMES, name, 'lock')
        raise exceptions.BusyError(
            f'the volume {name} is in use: another process has its lock, '
            f'{lock}. Stop it first; it may run on another host')


def _reserve_descriptor() -> None:
    """Take the number of the descriptor that nbdkit inherits.

    The command does so before it starts threads. A thread that tidies filters
    may live until nbdkit takes over. If a file of it had this number, closing
    that file would close nbdkit's socket.
    """
    null = os.open(os.devnull, os.O_RDONLY)
    fd = fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, _FIRST_INHERITED)
    for unused in {null, fd} - {_FIRST_INHERITED}:
        os.close(unused)


def _listen(path: str, mode: int) -> None:
    """Listen at a path, as nbdkit's inherited descriptor.

    nbdkit's own socket would have a fixed mode, and would not replace that of
    a server that was killed.
    """
    temporary = f'{path}.{os.getpid()}'
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise common.UsageError(
                f'--nbd-socket: {path} exists and is not a socket')
        if sockets.is_served(path):
            raise exceptions.BusyError(
                f'--nbd-socket: another process serves {path}')
    sock = socket.socket(socket.AF_UNIX)
    try:
        # The file gets the mode of the socket, less what the umask takes.
        os.fchmod(sock.fileno(), 0o600)
        sock.bind(temporary)
        os.chmod(temporary, mode)
        sock.listen(128)
        # The socket gets its name once it has its mode and answers.
        os.rename(temporary, path)
    except OSError as e:
        raise common.FailedError(
            f'--nbd-socket: cannot listen at {path}: {e.strerror}') from e
    os.dup2(sock.detach(), _FIRST_INHERITED)
    os.environ.update(LISTEN_FDS='1', LISTEN_PID=str(os.getpid()))


def _limit_tls() -> None:
    """Have GnuTLS refuse TLS below 1.2, besides the host's policy.

    nbdkit has no option for that. A policy that lists the permitted versions
    stays as it is.
    """
    policy = b''
    for path in (os.environ.get(_TLS_POLICY, ''), *_TLS_POLICIES):
        with contextlib.suppress(FileNotFoundError), open(path, 'rb') as f:
            policy = f.read(_MAX_TLS_POLICY)
            break
    if b'allowlist' not in policy:
        policy += _NO_OLD_TLS
    # nbdkit inherits it.
    fd = os.memfd_create('gnutls', 0)
    os.write(fd, policy)
    os.environ[_TLS_POLICY] = f'/proc/self/fd/{fd}'


def _keys(repo, args, settings) -> list[str]:
    """Return the settings of the plugin (``nbdkit/settings.h``)."""
    # The plugin compares it again when it has opened the repository.
    content = files.read_file(
        os.path.join(repo.path, layout.PARAMETERS_FILE), 65536)
    parameters = repo.parameters
    cut_minimum, cut_average = parameters.cuts
    keys = {
        'repository': repo.path,
        'volume': args.name,
        'parameters': xxhash.xxh3_64_hexdigest(content),
        'repository-id': parameters.repository_id,
        'block-size': parameters.block_size,
        'cut-minimum': cut_minimum,
        'cut-average': cut_average,
        'group-slots': parameters.group_slots,
        'segment-size': parameters.segment_size,
        'fingerprint': parameters.fingerprint,
        'verify': parameters.verify,
        'codec': args.codec,
        'threads': min(4, len(os.sched_getaffinity(0))),
        'reserve': settings.reserve_mib << 20,
        'segment-cache': args.cache_mib << 20,
        'dedup': 'no' if args.no_dedup else 'yes',
    }
    if settings.socket:
        keys['dedupd-socket'] = os.path.abspath(settings.socket)
        if repo.slices.memory is not None:
            keys['slice-memory'] = os.path.abspath(repo.slices.memory)
    place = repo.filter.place_for(repo.handle(), args.name)
    if place is not None:
        keys['index'] = repo.filter.index
        keys['index-path'], keys['index-keys'] = place
        keys['index-bytes'] = args.index_mib << 20
    return [f'{key}={value}' for key, value in keys.items()]
