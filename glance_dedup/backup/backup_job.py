# SPDX-License-Identifier: Apache-2.0

"""A batch backup as a whole: plans rounds, and has ranks run each.

A round that breaks, since a rank or its host died, is run again, and goes on
where all ranks were (B5). If it breaks each time, its sources are given up,
and the next round begins.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import datetime
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
from typing import Any

from glance_dedup.backup import limits
from glance_dedup.backup import rank_events
from glance_dedup.backup import rank_exchange
from glance_dedup.backup import rank_spool
from glance_dedup.backup import reachable_hosts
from glance_dedup.backup import rounds
from glance_dedup.backup import socket_link
from glance_dedup.backup import volume_backups
from glance_dedup.base import exceptions
from glance_dedup.base import imageids
from glance_dedup.base import printable
from glance_dedup.repository import image_repository

#: Number of runs of a round that breaks.
ATTEMPTS = 3
#: Program that each rank runs with its Python.
RANK: tuple[str, ...] = ('-m', 'glance_dedup.backup.rank')
# Settings for small ranks. Freed memory goes back at once, and of Open MPI's
# ways to send only the plain ones are loaded: the libraries of fast networks
# take 2.4 MB, whether there is one or not. Messages are few.
_MALLOC = {'MALLOC_MMAP_THRESHOLD_': '65536',
           'MALLOC_TRIM_THRESHOLD_': '65536', 'MALLOC_ARENA_MAX': '1'}
_SMALL = {**_MALLOC, 'OMPI_MCA_pml': 'ob1', 'OMPI_MCA_btl': '^ofi,uct',
          'OMPI_MCA_coll': 'basic,libnbc'}
_END_SECONDS = 30.0
# Cost of a round without any disk, seconds, and how fast a host reads.
_OVERHEAD = 5.0
_RATE = 100e6
# Length of the end of MPI's own text that an error quotes.
_TAIL = 2000
_MAX_SHOWN = 200
# Bytes of a line that a rank writes.
_MAX_LINE = 1 << 20


class Broken(exceptions.RepositoryError):
    """The ranks ended before the round was complete.

    :ivar is_final: a rank refused to work, and would do so again
    """

    def __init__(self, message: str, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


@dataclasses.dataclass(frozen=True)
class Source:
    """Choice of the sources to be backed up."""

    name: str
    """Name of a disk's or volume's backups; libvirt's name of a server."""
    kind: str
    """'disk', 'server' or 'volume'"""
    path: str = ''
    """Path of a disk."""
    format: str | None = None
    """Of a disk: 'raw' or 'qcow2'; None: raw, unless its bytes differ."""


@dataclasses.dataclass
class Result:
    """Result of one backup. Sizes are in bytes."""

    name: str
    backup_id: str = ''
    size: int = 0
    read: int = 0
    stored: int = 0
    """Plain bytes that were not in the repository before."""
    note: str = ''
    """Reason why there is no backup; or a note on it."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Parameters of the backups."""

    codec: str = 'lz4'
    codec_level: int = 0
    threads: int = 0
    """Besides the one that each rank has."""
    ranks: int = 1
    """On this host, unless there are `hosts`."""
    hosts: tuple[str, ...] = ()
    """One rank runs on each, started by ssh."""
    state: str = '/var/lib/glance-dedup/backup'
    """A directory of each host for the state between backups."""
    spool: str = '/var/lib/glance-dedup/backup/spool'
    """A directory of each host for the spool of a round."""
    scratch: str = '/var/lib/glance-dedup/backup/scratch'
    """A directory of each host, for data that running servers overwrite."""
    views: int = 10 << 30
    """Bytes that the views on one host may take."""
    libvirt: str = 'qemu:///system'
    """The URI of each host's libvirt."""
    backing: tuple[str, ...] = ()
    """Directories of backing files, of servers that are shut off."""
    weight: float = 0.5
    """Weight of the average backup time in a plan's cost (``rounds.py``)."""
    read_rate: int = 0
    """Bytes that each host reads of its disks in a second; 0: no limit."""
    cpu_share: float = 0.0
    """Of a processor, for each rank; 0: no limit."""
    priority: str = limits.LOW
    """One of :data:`limits.PRIORITIES`."""
    project: str = ''
    scope: bytes = bytes(16)
    silence: float = rank_exchange.SILENCE
    """Seconds without a word from other ranks, after which a rank gives up,
    and the round is run again."""


class Job:
    """A run of backups.

    :param progress: called with the work done, the total, and words for it
    :raises InvalidParameter: there are several hosts, and no MPI

    :ivar lost: why hosts were left out, by name
    :ivar notices: sentences for the operator
    :ivar held: for how many seconds each limit has held each host, by the host
        and the limit's name
    """

    def __init__(self, repository: image_repository.Repository,
                 settings: Settings, time_: datetime.datetime,
                 progress: Callable[[int, int, str], None]) -> None:
        self._repository = repository
        self._settings = settings
        self._time = time_
        self._progress = progress
        self._run = secrets.token_hex(8)
        self._identities: dict[str, dict[str, str]] = {}
        self._results: dict[str, Result] = {}
        self._names: dict[str, str] = {}    # of hosts, by their hostnames
        self.lost: dict[str, str] = {}
        self.notices: list[str] = []
        self.held: dict[tuple[str, str], float] = {}

    def plan(self, sources: list[Source]) -> rounds.Plan:
        """Find out where the sources are, and which go together."""
        return self._plan(self._find(sources))

    def missing(self) -> list[Result]:
        """The sources that were found on no host."""
        return list(self._results.values())

    def run(self, sources: list[Source]) -> list[Result]:
        """Back everything up. A source that fails does not stop the others."""
        for source in sources:
            if source.kind == 'volume':
                self._back_up_volume(source)
        found = self._find([s for s in sources if s.kind != 'volume'])
        plan = self._plan(found)
        for number, disks in enumerate(plan.rounds, 1):
            self._run_round([found[disk.name] for disk in disks], number,
                            len(plan.rounds))
        return sorted(self._results.values(), key=lambda result: result.name)

    def _back_up_volume(self, source: Source) -> None:
        result = self._results[source.name] = Result(source.name)
        backup_id = imageids.backup_id(source.name, self._time)
        try:
            volume_backups.back_up(self._repository, source.name, backup_id)
            stat = self._repository.stat(backup_id)
        except exceptions.RepositoryError as e:
            result.note = str(e)
        else:
            result.backup_id, result.size = backup_id, stat.size

    # -- plan ---------------------------------------------------------------

    def _find(self, sources: list[Source]) -> dict[str, dict[str, Any]]:
        """Return where each source is, and how large; by name."""
        found: dict[str, dict[str, Any]] = {}
        if not sources:
            return found
        wanted = {source.name: dataclasses.asdict(source)
                  for source in sources}
        why: dict[str, str] = {}

        def note(event: dict[str, Any]) -> None:
            if event['event'] == 'unseen':
                why[event['name']] = f'{event["host"]}: {event["error"]}'
            elif (event['event'] == 'source' and event['name'] in wanted
                    and event['name'] not in found
                    and self._takes_part(event['host'])):
                found[event['name']] = {
                    **wanted[event['name']], 'host': event['host'],
                    'size': event['size'], 'written': event['written']}
        self._look({'do': 'look', 'sources': list(wanted.values())}, note)
        nowhere = 'it was found on no host: see whether the file, or the ' \
            'server, exists'
        if self.lost:
            nowhere += '. These hosts were left out: ' + ', '.join(self.lost)
        for name in wanted.keys() - found.keys():
            self._results[name] = Result(name, note=why.get(name, nowhere))
        return found

    def _takes_part(self, nodename: str) -> bool:
        """Return whether a host takes part; if not, notify the operator."""
        if not self._settings.hosts or nodename in self._names:
            return True
        self._note('a host says that it has a disk and is '
                   + printable.printable(repr(nodename)[:_MAX_SHOWN])
                   + ', which takes no part: it is left out')
        return False

    def _look(self, order: dict[str, Any],
              note: Callable[[dict[str, Any]], None]) -> None:
        """Have the ranks find sources, again if MPI fails them.

        :raises Broken: they cannot, or not in as many attempts as a round has
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._run_ranks(order, self._reach(), note)
                return
            except Broken as e:
                if e.is_final or attempt == ATTEMPTS:
                    raise
                self._note(f'looking for the disks broke, time {attempt} of '
                           f'{ATTEMPTS}: {e}')

    def _plan(self, found: dict[str, dict[str, Any]]) -> rounds.Plan:
        return rounds.best(
            [self._disk(name, source)
             for name, source in sorted(found.items())],
            rounds.Limits(_OVERHEAD, self._settings.views,
                          1 if self._settings.hosts else self._settings.ranks),
            self._settings.weight)

    def _disk(self, name: str, source: dict[str, Any]) -> rounds.Disk:
        seconds = source['size'] / min(
            _RATE, self._settings.read_rate or _RATE)
        # An estimate that is too high must not refuse a server (B5). If its
        # view fits into no round, it gets a round of its own, and is watched.
        fits = 0.99 * self._settings.views / (_OVERHEAD + seconds)
        return rounds.Disk(name, source['host'], seconds, source['size'],
                           min(source['written'], fits))

    # -- rounds -------------------------------------------------------------

    def _run_round(self, sources: list[dict[str, Any]], number: int,
                   count: int) -> None:
        left = {source['name']: source for source in sources}
        is_complete, is_last = False, True
        try:
            is_complete = self._attempt_round(left, number, count)
            is_last = number == count
        finally:
            if left or not is_complete:
                self._tidy(left, is_last)

    def _attempt_round(self, left: dict[str, dict[str, Any]], number: int,
                       count: int) -> bool:
        """Return whether the ranks completed the round."""
        words = f'round {number} of {count}'
        total = 3 * sum(source['size'] for source in left.values())
        for attempt in range(1, ATTEMPTS + 1):
            watch = Watch(self._results, self._identities, left, total,
                          lambda done, stage: self._progress(
                              done, total, f'{words}: {stage}'))
            try:
                hosts = self._reach()
                self._give_up_lost(left, hosts)
                if not left:
                    return False
                self._run_ranks({
                    'do': 'back up', 'round': number,
                    'is_last': number == count, 'sources': list(left.values()),
                    'identities': self._identities,
                    'partitions': self._partitions(
                        left.values(), len(hosts) or self._settings.ranks)},
                    hosts, watch.note)
                for name in left:
                    self._results[name] = Result(
                        name, note='its host did not say what became of it. '
                        'Back it up again')
                return True
            except Broken as e:
                self._note(f'{words} broke, time {attempt} of {ATTEMPTS}: {e}')
                why = str(e)
        for name in left:
            self._results[name] = Result(
                name, note=f'the round broke {ATTEMPTS} times: {why}')
        return False

    def _tidy(self, left: dict[str, dict[str, Any]], is_last: bool) -> None:
        """End the remains of sources that were given up (B6).

        :param is_last: no other round of this run follows
        """
        try:
            self._run_ranks({'do': 'tidy', 'sources': list(left.values()),
                             'identities': self._identities,
                             'is_last': is_last}, self._reach(),
                            lambda event: None)
        except Broken as e:
            self._note('what was left of the round could not be removed, and '
                       f'the next run does it: {e}')

    def _note(self, text: str) -> None:
        if text not in self.notices:
            self.notices.append(text)

    def _partitions(self, sources: Any, ranks: int) -> int:
        """Return how many each rank has, so that one fits into memory."""
        blocks = sum(source['size'] for source in sources) // (
            self._repository.parameters.block_size)
        return max(1, -(-blocks // (ranks * rank_spool.PIECE)))

    # -- ranks --------------------------------------------------------------

    def _reach(self) -> list[reachable_hosts.Host]:
        """The hosts that can take part now; none, if this one works alone.

        :raises Broken: there should be some, and none can
        """
        found, lost = reachable_hosts.reach(self._settings.hosts)
        self.lost |= lost
        self._names |= {host.nodename: host.name for host in found}
        if lost and not found:
            raise Broken('no host can take part: ' + '; '.join(
                f'{name}: {why}' for name, why in lost.items()))
        return found

    def _give_up_lost(self, left: dict[str, dict[str, Any]],
                      hosts: list[reachable_hosts.Host]) -> None:
        """Give up sources on hosts that cannot be reached any more."""
        if not hosts:
            return
        there = {host.nodename for host in hosts}
        for name, source in list(left.items()):
            if source['host'] not in there:
                host = self._names[source['host']]
                why = self.lost.get(host, 'it has another hostname now')
                self._results[name] = Result(
                    name, note=f'its host {host} cannot take part any more: '
                    + why)
                del left[name]

    def _run_ranks(self, order: dict[str, Any],
                   hosts: list[reachable_hosts.Host],
                   note: Callable[[dict[str, Any]], None]) -> None:
        """Start the ranks, give them an order, and pass on their events.

        :raises Broken: they did not end well
        """
        settings = self._settings
        order = {
            **order, 'run': self._run, 'repository': self._repository.path,
            'repository_id': self._repository.repository_id,
            'codec': settings.codec, 'codec_level': settings.codec_level,
            'threads': settings.threads, 'state': os.path.join(
                settings.state, self._repository.repository_id),
            'spool': settings.spool, 'scratch': settings.scratch,
            'read_rate': settings.read_rate, 'cpu_share': settings.cpu_share,
            'views': settings.views, 'libvirt': settings.libvirt,
            'backing': settings.backing,
            'project': settings.project, 'scope': settings.scope.hex(),
            'time': self._time.isoformat(), 'silence': settings.silence}
        errors: list[str] = []
        is_final = False
        count = len(hosts) or settings.ranks
        held: dict[tuple[str, str], int] = {}   # milliseconds
        with ranks_running(count, hosts, settings.priority) as ranks:
            ranks.order(json.dumps(order).encode() + b'\n')
            for event in _events(ranks, 2 * settings.silence):
                if event['event'] == 'broken':
                    errors.append(f'{event["host"]}: {event["error"]}')
                    is_final |= event['expected']
                elif event['event'] == 'notice':
                    self._note(event['text'])
                elif event['event'] == 'held':
                    if self._takes_part(event['host']):
                        for name in limits.NAMES:
                            key = event['host'], name
                            held[key] = max(held.get(key, 0), event[name])
                elif event['event'] == 'ended':
                    count -= 1
                else:
                    note(event)
            # If a host has died, mpiexec's status may be 0.
            if not ranks.have_succeeded() or count:
                raise Broken('; '.join(errors) or _tail(ranks.said) or (
                    f'{count} of the processes ended without a word'),
                    is_final)
        for key, milliseconds in held.items():
            self.held[key] = self.held.get(key, 0.0) + milliseconds / 1000


class Watch:
    """Follows a round by the events of its ranks.

    :param identities: of the views of each source; they are filled in
    :param left: sources without a backup yet; they are taken out
    """

    def __init__(self, results: dict[str, Result],
                 identities: dict[str, dict[str, str]],
                 left: dict[str, dict[str, Any]], total: int,
                 progress: Callable[[int, str], None]) -> None:
        self._results = results
        self._identities = identities
        self._left = left
        self._total = total
        self._progress = progress
        self._done: dict[tuple[int, str], int] = {}
        self._ended: dict[str, set[str]] = {}   # disks of sources

    def note(self, event: dict[str, Any]) -> None:
        """Take an event. One of a source that is not in the round is none."""
        if event.get('source', '') not in {'', *self._left, *self._ended}:
            return
        match event['event']:
            case 'view':
                self._identities.setdefault(event['source'], {})[
                    event['name']] = event['identity']
            case 'backup':
                self._results[event['name']] = Result(**{
                    field.name: event[field.name]
                    for field in dataclasses.fields(Result)})
                self._end(event['source'], event['name'])
            case 'failed':
                self._results[event['name']] = Result(
                    event['name'], note=event['error'])
                self._end(event['source'], event['name'])
            case 'progress':
                self._done[event['rank'], event['stage']] = event['done']
                self._progress(min(sum(self._done.values()), self._total),
                               event['stage'])

    def _end(self, source: str, name: str) -> None:
        """A disk has ended; a server has when all its disks have."""
        ended = self._ended.setdefault(source, set())
        ended.add(name)
        if name == source or ended >= self._identities.get(
                source, {}).keys():
            self._left.pop(source, None)


class Processes:
    """The processes of a round: the ranks of one host, or ``mpiexec``.

    :ivar said: the file with their other output
    :ivar signal: by which they are ended
    """

    def __init__(self, said: Any) -> None:
        self.said = said
        self.all: list[Any] = []
        self.signal = signal.SIGKILL

    def start(self, command: list[str], environment: dict[str, str],
              fds: tuple[int, ...] = ()) -> None:
        """Start a process; a signal of the terminal does not reach it."""
        self.all.append(subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.said, env=environment, pass_fds=fds,
            process_group=0))

    def order(self, order: bytes) -> None:
        """Give an order to the first one."""
        with contextlib.suppress(BrokenPipeError):  # its status shows it
            self.all[0].stdin.write(order)
            self.all[0].stdin.flush()

    def note_end(self, stdout: Any) -> None:
        """Note that one has ended; if it failed, so have all."""
        ended, = (process for process in self.all if process.stdout is stdout)
        if self._status_of(ended) != 0:
            self.terminate()

    def have_succeeded(self) -> bool:
        """Return whether all ended well."""
        return not any([self._status_of(process) for process in self.all])

    @staticmethod
    def _status_of(process: Any) -> int:
        """:raises Broken: it hangs in the kernel"""
        try:
            return process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired as e:
            raise Broken(f'process {process.pid} does not end') from e

    def terminate(self) -> None:
        """Begin to end all."""
        for process in self.all:
            process.send_signal(self.signal)

    def end(self) -> None:
        """End all."""
        self.terminate()
        for process in self.all:
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_SECONDS)
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()


@contextlib.contextmanager
def ranks_running(count: int, hosts: list[reachable_hosts.Host],
                  priority: str) -> Iterator[Processes]:
    """The processes of a round; all are gone behind this.

    :param count: how many ranks
    :param hosts: on each runs one; none: all run on this host
    :param priority: one of :data:`limits.PRIORITIES`
    :raises InvalidParameter: there are hosts, and no MPI
    """
    with tempfile.TemporaryFile() as said:
        processes = Processes(said)
        try:
            command = [sys.executable, *RANK, priority]
            if hosts:
                _start_mpi(processes, hosts, command)
            else:
                _start_local(processes, count, command)
            yield processes
        finally:
            processes.end()


def _start_local(processes: Processes, count: int, command: list[str]
                 ) -> None:
    """Start ranks on this host, each with sockets to all others."""
    with contextlib.ExitStack() as stack:
        pairs = [socket_link.make_pair() for _ in range(count)]
        for pair in pairs:
            for end in pair:
                stack.enter_context(end)
        senders = [sender.fileno() for _, sender in pairs]
        for rank, (receiver, _) in enumerate(pairs):
            own = receiver.fileno()
            processes.start(
                [*command, str(rank), str(own), ','.join(map(str, senders))],
                {**_MALLOC, **os.environ}, (own, *senders))
            receiver.close()


def _start_mpi(processes: Processes, hosts: list[reachable_hosts.Host],
               rank: list[str]) -> None:
    """Have MPI start one rank on each host.

    :raises InvalidParameter: MPI is not installed
    """
    program = reachable_hosts.mpiexec()
    if program is None:
        raise exceptions.InvalidParameter(
            'MPI is not installed here, and backups of several hosts need it: '
            + reachable_hosts.INSTALL_MPI)
    processes.signal = signal.SIGTERM   # mpiexec ends its ranks
    # Not bound to a processor: a rank's threads may use all.
    command = [program, '-n', str(len(hosts)), '--bind-to', 'none']
    for name in _MALLOC:
        command += ['-x', name]     # on other hosts, too
    command += ['--host', ','.join(f'{host.name}:1' for host in hosts)]
    processes.start([*command, *rank], {
        **_SMALL, **os.environ, **reachable_hosts.environment(hosts),
        'OMPI_ALLOW_RUN_AS_ROOT': '1', 'OMPI_ALLOW_RUN_AS_ROOT_CONFIRM': '1'})


def _events(processes: Processes, silence: float
            ) -> Iterator[dict[str, Any]]:
    """Yield the events of the ranks, until all have ended.

    Lines that are no event become notices.

    :param silence: seconds; the ranks give up earlier by themselves
    :raises Broken: nothing came for a long time
    """
    with selectors.DefaultSelector() as selector:
        for process in processes.all:
            selector.register(process.stdout, selectors.EVENT_READ,
                              bytearray())
        while selector.get_map():
            ready = selector.select(silence)
            if not ready:
                raise Broken(f'no rank said anything for {silence:.0f} s')
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                    processes.note_end(key.fileobj)
                    continue
                yield from _whole_events(key.data, data)


def _whole_events(rest: bytearray, data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the events that are whole with new data.

    :param rest: the begin of a line, which is replaced
    :raises Broken: a line is too long
    """
    *lines, rest[:] = bytes(rest + data).split(b'\n')
    if len(rest) > _MAX_LINE:
        raise Broken('a rank told a line that does not end')
    for line in filter(None, lines):
        try:
            yield rank_events.parse(line)
        except rank_events.FalseEvent as e:
            yield {'event': 'notice', 'text': str(e)}


def _tail(said: Any) -> str:
    """Return the end of MPI's text, on one line."""
    said.seek(0, os.SEEK_END)
    said.seek(max(0, said.tell() - _TAIL))
    return ' '.join(said.read().decode(errors='replace').split())
