# SPDX-License-Identifier: Apache-2.0

"""One rank of a batch backup: a process that the job or ``mpiexec`` starts.

::

    python -m glance_dedup.backup.rank PRIORITY RANK SOCKET SENDER,... < order
    mpiexec ... python -m glance_dedup.backup.rank PRIORITY < order

On one host, each rank inherits its sockets, and gets their numbers
(``socket_link.py``). Rank 0 reads the *order* of a round from its standard
input, a JSON object, and sends it to the others. Each rank writes its events
to its standard output, a JSON object on each line (``backup_job.py`` reads
both). An exit status other than 0 means that the round has to be run again.
"""

import contextlib
import datetime
import hashlib
import json
import logging
import math
import os
import socket
import sys
import threading
import time
import traceback
from typing import Any

from glance_dedup.backup import earlier_rounds
from glance_dedup.backup import images
from glance_dedup.backup import limits
from glance_dedup.backup import mpi_link
from glance_dedup.backup import places
from glance_dedup.backup import rank_exchange
from glance_dedup.backup import rank_spool
from glance_dedup.backup import servers
from glance_dedup.backup import socket_link
from glance_dedup.backup import stages
from glance_dedup.backup import views
from glance_dedup.backup import work_split
from glance_dedup.base import exceptions
from glance_dedup.base import imageids
from glance_dedup.base import package_version
from glance_dedup.repository import image_repository
from glance_dedup.repository import openimages

# By its name, since the module runs as '__main__'.
_LOG = logging.getLogger('glance_dedup.backup.rank')
# Seconds between two lines on the progress of a stage.
_PROGRESS = 1.0
_FAILED = 3
_STAGES = ('scan', 'answer', 'store', 'resolve', 'finish')


def tell(rank: int, event: str, **facts: Any) -> None:
    """Write a line for the job."""
    line = json.dumps({'event': event, 'rank': rank, **facts}) + '\n'
    os.write(1, line.encode())


class _Notices(logging.Handler):
    """Sends the job the warnings of this process."""

    def __init__(self, rank: int) -> None:
        super().__init__(logging.WARNING)
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        """Tell of a warning."""
        tell(self._rank, 'notice', text=f'{os.uname().nodename}: '
             f'{record.getMessage()}')


class Rank:
    """This process during a round.

    :param ranks_here: all ranks on this host
    """

    def __init__(self, ranks: rank_exchange.Ranks, ranks_here: list[int],
                 order: dict[str, Any]) -> None:
        self._ranks = ranks
        self._ranks_here = ranks_here
        self._order = order
        self._stack = contextlib.ExitStack()
        self._told = 0.0
        self._time = datetime.datetime.fromisoformat(order['time'])
        self._settings = servers.Settings(
            order['state'], order['scratch'], order['repository_id'],
            order['libvirt'], scratch_bytes=order['views'],
            backing_directories=tuple(order['backing']))
        self._tasks: list[stages.Task] = []
        self._limits = limits.Limits(
            order['read_rate'] / len(ranks_here),
            order['cpu_share'] or math.inf, ranks.show_life)

    def run(self) -> None:
        """Take part in the round."""
        with self._stack:
            self._repository = self._stack.enter_context(
                self._open_repository())
            match self._order['do']:
                case 'look':
                    self._look()
                case 'tidy':
                    self._tidy()
                case _:
                    for source in self._own_sources():
                        self._open(source)
                    self._run_stages()
        tell(self._ranks.rank, 'ended')

    def _own_sources(self) -> list[dict[str, Any]]:
        return work_split.own_sources(self._ranks.rank, self._ranks_here,
                                      self._order['sources'])

    def _tidy(self) -> None:
        """End the views of sources that were given up; remove spools (B6)."""
        for source in self._own_sources():
            with contextlib.suppress(exceptions.RepositoryError):
                for view in self._views_of(source):
                    view.close()
        rank_spool.remove_dead(self._spools, self._is_needed)

    @property
    def _spools(self) -> str:
        """Return where this repository's spools lie on this host."""
        return os.path.join(self._order['spool'],
                            self._repository.repository_id)

    def _is_needed(self, entry: os.DirEntry[str]) -> bool:
        """Return whether a run may need a spool after this order."""
        run = self._order['run']
        if self._order['is_last'] and earlier_rounds.is_of(entry, run):
            return False
        return earlier_rounds.may_be_needed(entry, run)

    def _look(self) -> None:
        """Tell which sources are on this host: one rank for all on it."""
        if self._ranks_here[0] != self._ranks.rank:
            return
        for source in self._order['sources']:
            try:
                found = self._find(source)
            except exceptions.RepositoryError as e:
                tell(self._ranks.rank, 'unseen', name=source['name'],
                     host=os.uname().nodename, error=str(e))
                continue
            if found is not None:
                tell(self._ranks.rank, 'source', name=source['name'],
                     host=os.uname().nodename, size=found.size,
                     written=found.written)

    def _find(self, source: dict[str, Any]) -> servers.Found | None:
        """Look for a source; None: it is not on this host."""
        if source['kind'] == 'server':
            return servers.find(self._settings, source['name'])
        try:
            with open(source['path'], 'rb') as file:
                return servers.Found(file.seek(0, os.SEEK_END))
        except OSError:
            return None

    def _open_repository(self) -> image_repository.Repository:
        order = self._order
        repository = image_repository.Repository(
            order['repository'], codec=order['codec'],
            codec_level=order['codec_level'], threads=order['threads'],
            index='none')
        if repository.repository_id != order['repository_id']:
            repository.close()
            raise exceptions.InvalidParameter(
                f'on {os.uname().nodename}, {order["repository"]} is another '
                'repository than where the backup was started: mount the '
                'shared directory under the same path on all hosts')
        return repository

    def _open(self, source: dict[str, Any]) -> None:
        """Open a source's views, or report why that is impossible (B5)."""
        try:
            found = self._views_of(source)
        except exceptions.RepositoryError as e:
            tell(self._ranks.rank, 'failed', name=source['name'],
                 source=source['name'], error=str(e))
            return
        for view in found:
            self._stack.enter_context(view)
            tell(self._ranks.rank, 'view', name=view.name,
                 source=source['name'], identity=view.identity, size=view.size)
        for view in found:
            backup_id = imageids.backup_id(view.name, self._time)
            if not self._is_there(view, backup_id, source['name']):
                self._tasks.append(stages.Task(
                    view, source['name'], backup_id,
                    self._open_previous(view)))

    def _is_there(self, view: views.View, backup_id: str, source: str) -> bool:
        """Return whether a view has its backup; if so, report it.

        A rank that dies may have committed it without a report. The view may
        be another one by now, so it is not committed (B3).
        """
        try:
            stat = self._repository.stat(backup_id)
        except exceptions.ImageNotFound:
            return False
        if view.name in self._order['identities'].get(source, {}):
            self._tell_backup(view.name, source, stat)
        else:
            tell(self._ranks.rank, 'failed', name=view.name, source=source,
                 error=f'there is {backup_id} already: start again')
        return True

    def _tell_backup(self, name: str, source: str, stat: openimages.ImageStat,
                     **more: Any) -> None:
        tell(self._ranks.rank, 'backup', **{
            'name': name, 'source': source, 'backup_id': stat.image_id,
            'size': stat.size, 'read': 0, 'stored': stat.new_bytes,
            'zeros': stat.zero_bytes, 'note': '', 'clean': 0, **more})

    def _views_of(self, source: dict[str, Any]) -> list[views.View]:
        """Return the spools of a broken round, if still there; or new ones.

        :raises SourceError: the source cannot be backed up
        """
        known = self._order['identities'].get(source['name'])
        if known is not None:
            with contextlib.suppress(views.SourceError):
                return self._opened(source, known)
        return self._opened(source, None)

    def _opened(self, source: dict[str, Any],
                identities: dict[str, str] | None) -> list[views.View]:
        order, name = self._order, source['name']
        if source['kind'] == 'server':
            return servers.open_server(self._settings, name,
                                       identities=identities)
        place = places.Place(order['state'], name,
                             self._repository.repository_id)
        return [images.open_disk(
            place, source['path'], source.get('format'),
            None if identities is None else identities.get(name),
            order['backing'])]

    def _open_previous(self, view: views.View) -> openimages.Image | None:
        """The backup with which the view is compared, held open (B4)."""
        if view.base is not None:
            try:
                image = self._stack.enter_context(self._repository.open_image(
                    view.base.backup_id, view.base.upload_id))
                image.require_no_disk()
                return image
            except exceptions.RepositoryError:
                view.drop_base()
        return None

    # -- stages -------------------------------------------------------------

    def _run_stages(self) -> None:
        round_ = self._make_round()
        done = self._completed()
        if done < 1:
            round_.scan()
            self._note('scan')
        if done < 2:
            round_.answer()
            self._note('answer')
        round_.store()
        self._tell_stage('resolve')
        round_.resolve()
        if not self._order['is_last']:
            round_.retain_references(self._order['round'])
        self._tell_stage('finish')
        round_.finish(self._committed)
        tell(self._ranks.rank, 'held', host=os.uname().nodename, **{
            name: round(seconds * 1000)
            for name, seconds in self._limits.held.items()})
        # Nobody ends before all have the blocks that they share (B1).
        self._ranks.agree(None)
        for task in self._tasks:
            if task.error:
                tell(self._ranks.rank, 'failed', name=task.view.name,
                     source=task.source, error=task.error)
        self._spool.remove()
        if self._earlier is not None and self._order['is_last']:
            self._earlier.remove()
            # There are others of this rank if a host dropped out.
            rank_spool.remove_dead(self._spools, self._is_needed)

    def _make_round(self) -> stages.Round:
        order = self._order
        # Clean segments belong to one base, so another base is another
        # round (B4). Another run is, too: see "Runs that are killed".
        facts = self._ranks.agree([
            [task.view.name, task.view.identity, task.view.size,
             task.view.base] for task in self._tasks])
        key = hashlib.sha256(json.dumps(
            [facts, order['partitions'], order['scope'], order['run']]
        ).encode()).hexdigest()
        for path in rank_spool.remove_dead(
                self._spools, lambda entry: entry.name.startswith(key[:16])
                or earlier_rounds.may_be_needed(entry, order['run'])):
            _LOG.warning('removed %s: a round that was not completed left it',
                         path)
        self._spool = self._stack.enter_context(rank_spool.Spool(
            os.path.join(self._spools, f'{key[:16]}-{self._ranks.rank}')))
        # A run of one round has nothing to keep.
        self._earlier = (
            None if order['is_last'] and order['round'] == 1 else
            self._stack.enter_context(earlier_rounds.EarlierRounds(
                self._spools, order['run'], self._ranks.size,
                self._ranks.rank)))
        return stages.Round(
            self._repository, self._ranks, self._spool, self._tasks,
            order['partitions'], order['project'],
            bytes.fromhex(order['scope']), self._earlier,
            self._tell_progress)

    def _completed(self) -> int:
        """After which stage an earlier run of this round can go on (B5)."""
        done = 0
        for number, stage in enumerate(('scan', 'answer'), 1):
            noted = self._spool.noted(stage)
            if noted is not None and len(noted['tasks']) == len(self._tasks):
                done = number
                for task, (clean, blocks) in zip(self._tasks, noted['tasks'],
                                                 strict=True):
                    task.clean = bytearray.fromhex(clean)
                    task.blocks = blocks
        done = min(self._ranks.agree(done))
        if done == 0:
            for task in self._tasks:
                task.clean, task.blocks = bytearray(), 0
        return done

    def _note(self, stage: str) -> None:
        """Note a stage, unless it went wrong for a view of this rank."""
        if not any(task.error for task in self._tasks):
            self._spool.note(stage, {'tasks': [
                (task.clean.hex(), task.blocks) for task in self._tasks]})
        self._tell_stage(_STAGES[_STAGES.index(stage) + 1])

    def _tell_stage(self, stage: str) -> None:
        tell(self._ranks.rank, 'stage', stage=stage)

    def _tell_progress(self, stage: str, done: int) -> None:
        self._ranks.show_life()
        now = time.monotonic()
        if now - self._told > _PROGRESS:
            self._told = now
            tell(self._ranks.rank, 'progress', stage=stage, done=done)
        self._limits.wait(sum(task.view.read_bytes for task in self._tasks))

    def _committed(self, task: stages.Task, stat: openimages.ImageStat
                   ) -> None:
        note = ''
        try:
            task.view.commit(stat.image_id, stat.upload_id)     # B3
        except exceptions.RepositoryError as e:
            note = str(e)
        self._tell_backup(task.view.name, task.source, stat, read=task.read,
                          note=note, clean=sum(task.clean))


def _ranks_here(ranks: rank_exchange.Ranks) -> list[int]:
    """Return the ranks on this host; require one version on all (B7)."""
    mine = os.uname().nodename
    found = ranks.agree([mine, package_version.version()])
    if len({number for _, number in found}) > 1:
        raise exceptions.VersionError(
            'the hosts have different versions of this software: '
            + ', '.join(f'{host} {number}' for host, number in found)
            + '. Install one version on all')
    return [rank for rank, (host, _) in enumerate(found) if host == mine]


def _end_with_job() -> None:
    """End when the job has died: its end of the pipe is closed."""
    while os.read(0, 1):
        pass
    os._exit(_FAILED)   # so mpiexec ends the others


def _link(arguments: list[str]) -> rank_exchange.Link:
    """Return the link to the other ranks."""
    if not arguments:
        return mpi_link.MpiLink()
    rank, receiver, senders = arguments
    return socket_link.SocketLink(
        int(rank), socket.socket(fileno=int(receiver)),
        [socket.socket(fileno=int(fd)) for fd in senders.split(',')])


def main() -> int:
    """Run one rank."""
    limits.lower_priority(sys.argv[1])
    link = _link(sys.argv[2:])
    ranks = rank_exchange.Ranks(link)
    logging.getLogger('glance_dedup').addHandler(_Notices(ranks.rank))
    try:
        order = (json.loads(sys.stdin.readline()) if ranks.rank == 0
                 else None)
        # mpiexec gives its input to rank 0 alone.
        if ranks.rank == 0 or len(sys.argv) > 2:
            threading.Thread(target=_end_with_job, daemon=True).start()
        ranks_here = _ranks_here(ranks)
        order = ranks.agree(order)[0]
        ranks.limit = order['silence']
        Rank(ranks, ranks_here, order).run()
        link.close()
    except BaseException as e:
        # The other ranks wait for this one, so all have to end.
        expected = isinstance(e, (exceptions.RepositoryError, OSError))
        if not expected:
            traceback.print_exc()
        tell(ranks.rank, 'broken', host=os.uname().nodename,
             expected=expected,
             error=str(e) if expected else f'{type(e).__name__}: {e}')
        link.abort(_FAILED)
    return 0


if __name__ == '__main__':
    sys.exit(main())
