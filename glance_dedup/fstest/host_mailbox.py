# SPDX-License-Identifier: Apache-2.0

"""Hosts that meet in a shared directory, and speak by files there.

Since it is such files that are on trial, a message has a name of its own,
which no host looks up before a listing has shown it, is made whole and closed
before it gets this name, and is read until it is whole. A host that opened it
earlier could see an empty file until its cache of attributes ends, and miss
the step under trial meanwhile.

A wait for another host has a limit, and ends with a sentence that names
the missing host.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import json
import os
import secrets
import socket
import time
from typing import Any

from glance_dedup.base import exceptions

POLL = 0.05         # seconds


@dataclasses.dataclass
class Member:
    """One of the hosts, in this trial."""

    host: str
    token: str

    def __str__(self) -> str:
        return f'{self.host} ({self.token})'


class Mailbox:
    """This host among the others.

    :param path: the repository
    :param place: the directory in which hosts meet
    :param limit: seconds that another host may take for a step
    :ivar me: this host
    :ivar others: the other hosts, once they met
    :ivar step: the number of the step that all hosts are at
    :ivar over: whether no host waits for this one any more
    :ivar made: paths of files that are to be removed at the end
    """

    def __init__(self, path: str, place: str, limit: float) -> None:
        self.place = place
        self.limit = limit
        self.me = Member(socket.gethostname(), secrets.token_hex(4))
        self.others: list[Member] = []
        self.step = 0
        self.over = False
        self.made: list[str] = []
        self._path = path

    def wait_for_all(self, hosts: int, wait: float,
                     progress: Callable[[int, int, str], None]) -> None:
        """Wait until as many hosts as take part are seen alive.

        The file of a trial that was killed stays there for ever; a living
        host renews its file.

        :param wait: seconds to wait for the others to come
        :param progress: called with the hosts that came, all, and words
        :raises BusyError: too few came, or too many
        """
        deadline = time.monotonic() + wait
        first: dict[str, str] = {}
        alive: dict[str, Member] = {}
        beat, told = 0, ''
        while True:
            self.unlink(told)
            told = self.send(f'here.{beat}', {
                'host': self.me.host, 'sees': sorted(alive)})
            beat += 1
            for name in self._list('here.'):
                token = name.rpartition('.')[2]
                if first.setdefault(token, name) != name:
                    alive.setdefault(token, Member('', token))
            if len(alive) > hosts:
                raise exceptions.BusyError(
                    f'more than {hosts} hosts try {self._path}: say how '
                    'many there are, on each of them, by --hosts')
            if len(alive) == hosts and self._all_see(alive):
                break
            progress(len(alive), hosts, 'waiting for hosts')
            if time.monotonic() > deadline:
                raise exceptions.BusyError(
                    f'{len(alive)} of {hosts} hosts came within '
                    f"{wait:.0f} seconds: run 'glance-dedup repository "
                    f"test-filesystem' on all of them at the same time")
            time.sleep(0.2)
        self.send('met', True)
        self.others = sorted(
            (m for token, m in alive.items() if token != self.me.token),
            key=lambda m: m.token)
        self.receive('met')
        self.unlink(told)

    def _all_see(self, alive: dict[str, Member]) -> bool:
        """Return whether all members see each other; note their names."""
        agree = set()
        names = self._list('here.') + self._list('met.')
        for name in names:
            token = name.rpartition('.')[2]
            said = self._read(name)
            if name.startswith('met.') and token in alive:
                agree.add(token)
            elif said is not None and token in alive:
                alive[token].host = said['host']
                if said['sees'] == sorted(alive):
                    agree.add(token)
        return agree == set(alive)

    # -- messages ----------------------------------------------------------

    def _file(self, name: str) -> str:
        path = os.path.join(self.place, name)
        self.made.append(path)
        return path

    def send(self, what: str, message: Any) -> str:
        """Leave a message to all; its path."""
        name = f'{what}.{self.me.token}'
        path, unsaid = self._file(name), self._file(f'unsaid-{name}')
        with open(unsaid, 'x') as f:
            f.write(json.dumps(message) + '\n')
            f.flush()
            os.fsync(f.fileno())
        os.rename(unsaid, path)
        return path

    def _list(self, prefix: str) -> list[str]:
        return sorted(n for n in os.listdir(self.place)
                      if n.startswith(prefix))

    def _read(self, name: str) -> Any:
        """A message; None if it is not whole, or gone."""
        try:
            with open(os.path.join(self.place, name)) as f:
                text = f.read()
            return json.loads(text) if text.endswith('\n') else None
        except (OSError, ValueError):
            return None

    def receive(self, what: str, members: list[Member] | None = None
                ) -> dict[str, Any]:
        """Return the others' messages by token, once all have sent one.

        :param members: the members to wait for; None: all others
        :raises BusyError: one of them sent nothing within the limit
        """
        members = self.others if members is None else members
        waited = {f'{what}.{m.token}': m for m in members}
        heard: dict[str, Any] = {}
        deadline = time.monotonic() + self.limit
        while len(heard) < len(waited):
            for name in self._list(f'{what}.'):
                if name in waited and waited[name].token not in heard:
                    said = self._read(name)
                    if said is not None:
                        heard[waited[name].token] = said
            if len(heard) == len(waited):
                break
            if time.monotonic() > deadline:
                silent = [str(m) for m in members if m.token not in heard]
                raise exceptions.BusyError(
                    f'nothing was heard of {", ".join(silent)} for '
                    f'{self.limit:.0f} seconds, at the step "{what}": it '
                    'ended, or does not see the files that this host makes')
            time.sleep(POLL)
        return heard

    def unlink(self, path: str) -> None:
        """Remove a file, if it is there."""
        if path:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def is_first(self) -> bool:
        """Return whether this host acts for all."""
        return all(self.me.token < m.token for m in self.others)

    # -- steps --------------------------------------------------------------

    def signal(self, actor: Member, what: str, message: Any = True) -> Any:
        """Send a message, as the actor, or wait for the actor's message.

        :param message: anything but None
        :returns: the actor's message, on all hosts
        """
        what = f'{self.step}-{what}'
        if actor is self.me:
            self.send(what, message)
            return message
        return self.receive(what, [actor])[actor.token]

    def reply(self, actor: Member, what: str) -> None:
        """Tell the actor that it is done, or wait, as the actor, for all."""
        what = f'{self.step}-{what}'
        if actor is self.me:
            self.receive(what)
        else:
            self.send(what, True)

    def until(self, good: Callable[[], bool]) -> float | None:
        """The seconds until it is true; None: not within the limit.

        They are 0 if the first look shows it, however long that takes.
        """
        start = time.monotonic()
        took = 0.0
        while not good():
            if took > self.limit * 0.75:
                return None
            time.sleep(POLL)
            took = time.monotonic() - start
        return took

    def name(self, actor: Member, what: str) -> str:
        """The path of a file that one host makes and all use."""
        path = os.path.join(self.place,
                            f'file-{self.step}-{what}.{actor.token}')
        if actor is self.me:
            self.made.append(path)
        return path

    def said(self, actor: Member, what: str) -> bool:
        """Return whether the actor has sent it by now."""
        return f'{self.step}-{what}.{actor.token}' in self._list(
            f'{self.step}-{what}.')

    def clean(self) -> None:
        """Remove the files of this trial.

        Once the trial is over, the first host does this for all; until then
        each host does it for itself.
        """
        if self.over and not self.is_first():
            return
        mine = '' if self.over else f'.{self.me.token}'
        for directory, _, names in os.walk(self.place, topdown=False):
            for name in names:
                if name.endswith(mine) or os.path.join(
                        directory, name) in self.made:
                    self.unlink(os.path.join(directory, name))
            # Before the end, the last host to leave succeeds.
            with contextlib.suppress(OSError):
                os.rmdir(directory)
