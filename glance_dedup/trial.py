# SPDX-License-Identifier: Apache-2.0

"""What hosts that share a directory can do there together, tried.

Each host runs :class:`Trial` on the same repository at the same time. They
meet in ``locks/trial``, and speak by files there. Since it is these that are
on trial, a message has a name of its own, which nobody asks for before a
listing has shown it, is made whole and closed, and is read until it is whole.

For each property every host acts once, while the others observe; *steps* keep
them together. A wait for another host has a limit, and ends with a sentence
that says who was waited for. Each host removes what it made, also when it is
interrupted.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from typing import Any

from glance_dedup.base import access
from glance_dedup.base import exceptions
from glance_dedup.base import filesystem

_PLACE = os.path.join('locks', 'trial')
_POLL = 0.05        # seconds
#: Names may be remembered for a minute, as NFS does by default.
STEP_LIMIT = 120.0
_LINKS = 50
#: Of one file: some file systems keep each name in the file's attributes, and
#: have room for some forty.
_LINKS_OF_ONE = 10
_RENAMES = 30
_PAGE = 65536

_AT_EMPTY_PATH = 0x1000
_AT_STATX_FORCE_SYNC = 0x2000
_STATX_BASIC_STATS = 0x7ff
_PUNCH_HOLE_KEEP_SIZE = 3

# Verdicts, from good to bad.
FINE = 'fine'
LIMITED = 'limited'
UNFIT = 'not fine'
_ORDER = (FINE, LIMITED, UNFIT)

#: By property: the title, and what it means if it is not fine.
PROPERTIES = {
    'owner': (
        'a file belongs to the same user',
        'Hosts would refuse one another\'s files. Give the user the same '
        'number on all of them, and squash none.'),
    'locks': (
        'locks exclude other hosts',
        'Hosts overwrite one another\'s blocks: images are lost. Mount with '
        'locks that the server keeps, or use another file system.'),
    'locks-fall': (
        'locks fall with their holder',
        'What a process had locked when it was killed stays locked: its '
        'groups are never appended to or collected again.'),
    'link': (
        'link fails where the name exists',
        'Of two uploads of an image both would be acknowledged. Use another '
        'file system.'),
    'rename': (
        'rename replaces without a gap',
        'Images and groups are missing for a moment while they are rewritten, '
        'and for ever if the host dies just then. Have nothing rewritten '
        '(see "Several hosts, one repository" in the guide), or use another '
        'file system.'),
    'new-names': (
        'names that others made are seen',
        'Only a directory that is opened shows them at once. The store opens '
        'it before it says that an image is missing.'),
    'names-asked': (
        'opening a directory shows its names',
        'An image that another host stored may not be found, and may be '
        'taken for deleted, which loses it. Mount without a cache of names '
        '(NFS: lookupcache=none), or use another file system.'),
    'close-to-open': (
        'who opens sees what was closed',
        'Hosts read one another\'s files as they were. Mount with '
        'close-to-open consistency (NFS: without nocto).'),
    'open-asked': (
        'an open file can be asked for changes',
        'Blocks that another host has freed may be used again: images are '
        'damaged. Mount without a cache of attributes (NFS: noac), or use '
        'another file system.'),
    'fsync': (
        'who opens sees what was synced',
        'Recipes name blocks that other hosts cannot read, and that are lost '
        'if this host dies. Use another file system.'),
    'unlinked': (
        'an open file stays when it is unlinked',
        'The download of an image that another host deletes meanwhile breaks '
        'off. Files of groups are opened anew.'),
    'punch': (
        'holes can be punched',
        'Freed blocks keep their space until their group is rewritten.'),
    'clocks': (
        'clocks agree within two seconds',
        'Nothing of the store depends on them. Times that are shown, and '
        'tokens, do.'),
}

_LIMITED_ONLY = {'new-names', 'unlinked', 'punch', 'clocks'}


@dataclasses.dataclass
class Finding:
    """What was found out about one property, over all hosts."""

    key: str
    verdict: str
    seconds: float | None = None
    detail: str = ''

    @property
    def title(self) -> str:
        return PROPERTIES[self.key][0]

    @property
    def meaning(self) -> str:
        return '' if self.verdict == FINE else PROPERTIES[self.key][1]


@dataclasses.dataclass
class Member:
    """One of the hosts, in this trial."""

    host: str
    token: str

    def __str__(self) -> str:
        return f'{self.host} ({self.token})'


class Trial:
    """This host's part in it.

    :param path: the repository
    :param hosts: how many take part
    :param wait: seconds to wait for the others to come
    :param limit: seconds that another host may take for a step
    :param progress: called with the steps done, their total, and words
    """

    def __init__(self, path: str, hosts: int = 2, wait: float = 300.0,
                 limit: float = STEP_LIMIT,
                 progress: Callable[[int, int, str], None] | None = None):
        self.path = os.path.abspath(path)
        self.room = os.path.join(self.path, _PLACE)
        self.hosts = hosts
        self.wait = wait
        self.limit = limit
        self.progress = progress or (lambda done, total, what: None)
        self.me = Member(socket.gethostname(), secrets.token_hex(4))
        self.others: list[Member] = []
        self.findings = {key: Finding(key, FINE) for key in PROPERTIES}
        self._made: list[str] = []
        self._step = 0
        self._over = False
        self._children: list[subprocess.Popen] = []

    # -- meeting -----------------------------------------------------------

    def run(self) -> list[Finding]:
        """Try everything; the findings of all hosts together.

        :raises BusyError: another host did not come, or fell silent
        :raises RepositoryError: the directory is not one for this
        """
        if not os.path.isdir(os.path.join(self.path, 'locks')):
            raise exceptions.ImageNotFound(
                f'{self.path} is not a repository: make it first, with '
                "'glance-dedup repository create'")
        access.check_user(self.path)
        try:
            with contextlib.suppress(FileExistsError):
                access.make_directory(
                    self.room, access.directory_mode(self.path))
            self._meet()
            self._try_all()
            return self._compare()
        finally:
            self._clean()

    def _meet(self) -> None:
        """Until as many hosts as are to take part are seen alive.

        A file of a trial that was killed lies there for ever; who is alive
        renews his.
        """
        deadline = time.monotonic() + self.wait
        first: dict[str, str] = {}
        alive: dict[str, Member] = {}
        beat, told = 0, ''
        while True:
            self._unlink(told)
            told = self._say(f'here.{beat}', {
                'host': self.me.host, 'sees': sorted(alive)})
            beat += 1
            for name in self._list('here.'):
                token = name.rpartition('.')[2]
                if first.setdefault(token, name) != name:
                    alive.setdefault(token, Member('', token))
            if len(alive) > self.hosts:
                raise exceptions.BusyError(
                    f'more than {self.hosts} hosts try {self.path}: say how '
                    'many there are, on each of them, by --hosts')
            if len(alive) == self.hosts and self._all_see(alive):
                break
            self.progress(len(alive), self.hosts, 'waiting for hosts')
            if time.monotonic() > deadline:
                raise exceptions.BusyError(
                    f'{len(alive)} of {self.hosts} hosts came within '
                    f"{self.wait:.0f} seconds: run 'glance-dedup repository "
                    f"try-sharing' on all of them at the same time")
            time.sleep(0.2)
        self._say('met', True)
        self.others = sorted(
            (m for token, m in alive.items() if token != self.me.token),
            key=lambda m: m.token)
        self._hear('met')
        self._unlink(told)

    def _all_see(self, alive: dict[str, Member]) -> bool:
        """Whether all of them have seen all of them; learns their names."""
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
        path = os.path.join(self.room, name)
        self._made.append(path)
        return path

    def _say(self, what: str, message: Any) -> str:
        path = self._file(f'{what}.{self.me.token}')
        with open(path, 'x') as f:
            f.write(json.dumps(message) + '\n')
            f.flush()
            os.fsync(f.fileno())
        return path

    def _list(self, prefix: str) -> list[str]:
        return sorted(n for n in os.listdir(self.room)
                      if n.startswith(prefix))

    def _read(self, name: str) -> Any:
        """A message; None if it is not whole, or gone."""
        try:
            with open(os.path.join(self.room, name)) as f:
                text = f.read()
            return json.loads(text) if text.endswith('\n') else None
        except (OSError, ValueError):
            return None

    def _hear(self, what: str, members: list[Member] | None = None
              ) -> dict[str, Any]:
        """What others say, by their tokens, once all of them have."""
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
            time.sleep(_POLL)
        return heard

    def _unlink(self, path: str) -> None:
        if path:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _is_first(self) -> bool:
        return all(self.me.token < m.token for m in self.others)

    def _clean(self) -> None:
        """Remove what was made.

        At the end the first host does, for all, once they have heard of one
        another's findings; if it does not come to that, each for itself.
        """
        for child in self._children:
            child.kill()
            child.wait()
        if self._over and not self._is_first():
            return
        mine = '' if self._over else f'.{self.me.token}'
        for directory, _, names in os.walk(self.room, topdown=False):
            for name in names:
                if name.endswith(mine) or os.path.join(
                        directory, name) in self._made:
                    self._unlink(os.path.join(directory, name))
            # Without an end, who is the last one succeeds.
            with contextlib.suppress(OSError):
                os.rmdir(directory)

    # -- what was found ----------------------------------------------------

    def _find(self, key: str, good: bool, seconds: float | None = None,
              detail: str = '') -> None:
        self._add(key, FINE if good else LIMITED if key in _LIMITED_ONLY
                  else UNFIT, seconds, detail)

    def _add(self, key: str, verdict: str, seconds: float | None,
             detail: str) -> None:
        """The worse verdict counts, and the longer time."""
        finding = self.findings[key]
        if _ORDER.index(verdict) > _ORDER.index(finding.verdict):
            finding.verdict, finding.detail = verdict, detail
        if seconds is not None:
            finding.seconds = max(finding.seconds or 0.0, seconds)

    def _compare(self) -> list[Finding]:
        """All hosts' findings in one."""
        self._say('found', {
            key: dataclasses.astuple(finding)[1:]
            for key, finding in self.findings.items()})
        for token, found in self._hear('found').items():
            host = next(m.host for m in self.others if m.token == token)
            for key, (verdict, seconds, detail) in found.items():
                self._add(key, verdict, seconds, f'{host}: {detail}')
        if self._is_first():
            self._hear('heard')
        else:
            self._say('heard', True)
        self._over = True
        return list(self.findings.values())

    # -- trying ------------------------------------------------------------

    def _try_all(self) -> None:
        trials = [self._owner, self._locks, self._locks_fall, self._rename,
                  self._new_names, self._names_asked, self._close_to_open,
                  self._open_asked, self._fsync, self._unlinked, self._punch]
        members = sorted([self.me, *self.others], key=lambda m: m.token)
        total = len(trials) * len(members) + 1
        done = 0
        for trial in trials:
            for actor in members:
                self._step += 1
                self.progress(done, total,
                              PROPERTIES[self._key(trial)][0])
                trial(actor)
                done += 1
        self._step += 1
        self.progress(done, total, PROPERTIES['link'][0])
        self._link(members)

    @staticmethod
    def _key(trial: Callable) -> str:
        return trial.__name__[1:].replace('_', '-')

    def _act(self, actor: Member, what: str, message: Any = True) -> Any:
        """The actor says something but None, and all the others hear it."""
        what = f'{self._step}-{what}'
        if actor is self.me:
            self._say(what, message)
            return message
        return self._hear(what, [actor])[actor.token]

    def _answer(self, actor: Member, what: str) -> None:
        """The others have done something, and the actor waits for them."""
        what = f'{self._step}-{what}'
        if actor is self.me:
            self._hear(what)
        else:
            self._say(what, True)

    def _until(self, good: Callable[[], bool]) -> float | None:
        """Seconds until it is so; None: not within the limit."""
        start = time.monotonic()
        while not good():
            if time.monotonic() - start > self.limit * 0.75:
                return None
            time.sleep(_POLL)
        return time.monotonic() - start

    def _name(self, actor: Member, what: str) -> str:
        """The path of a file that one host makes and all use."""
        path = os.path.join(self.room,
                            f'file-{self._step}-{what}.{actor.token}')
        if actor is self.me:
            self._made.append(path)
        return path

    def _owner(self, actor: Member) -> None:
        told = self._act(actor, 'clock', {
            'time': time.time(), 'uid': os.geteuid()})
        if actor is self.me:
            return
        # What it took to be heard makes it less, never more; and of two hosts
        # each acts once.
        ahead = told['time'] - time.time()
        self._find('clocks', ahead < 2, None,
                   f'that of {actor.host} is {ahead:.0f} seconds ahead')
        uid = os.stat(os.path.join(
            self.room, f'{self._step}-clock.{actor.token}')).st_uid
        self._find('owner', uid == told['uid'] == os.geteuid(), None,
                   f'{actor.host} writes as uid {told["uid"]}, its file is '
                   f'of {uid}, and this process is {os.geteuid()}')

    def _locks(self, actor: Member) -> None:
        path = self._name(actor, 'lock')
        if actor is self.me:
            with _file_of(path, b'') as fd:
                if not self._granted(fd, fcntl.F_WRLCK):
                    self._find('locks', False, None, 'no lock was granted')
                self._act(actor, 'locked')
                self._answer(actor, 'refused')
                self._granted(fd, fcntl.F_UNLCK)
                self._act(actor, 'unlocked')
                self._answer(actor, 'granted')
            return
        self._act(actor, 'locked')
        with _open(path, os.O_RDWR) as fd:
            self._find('locks', not self._granted(fd, fcntl.F_RDLCK), None,
                       f'a lock that {actor.host} held was granted')
            self._granted(fd, fcntl.F_UNLCK)
            self._answer(actor, 'refused')
            self._act(actor, 'unlocked')
            took = self._until_granted(fd)
            self._find('locks', took is not None, took,
                       f'a lock that {actor.host} gave back stays')
            self._answer(actor, 'granted')

    def _until_granted(self, fd: int) -> float | None:
        # Where locks are of no use there is nothing to wait for.
        if self.findings['locks'].verdict != FINE:
            return None
        return self._until(lambda: self._granted(fd, fcntl.F_RDLCK))

    def _granted(self, fd: int, kind: int) -> bool:
        try:
            return filesystem.lock(fd, kind, 5)
        except OSError as e:
            self._find('locks', False, None, f'F_OFD_SETLK: {e.strerror}')
            return False

    def _locks_fall(self, actor: Member) -> None:
        path = self._name(actor, 'held')
        if actor is self.me:
            with _file_of(path, b''):
                pass
            child = subprocess.Popen(
                [sys.executable, '-c', _HOLDER, path],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            self._children.append(child)
            assert child.stdout is not None     # it is a pipe
            held = child.stdout.readline() == b'held\n'
            self._act(actor, 'held', held)
            self._answer(actor, 'tried')
            child.kill()
            child.wait()
            child.stdout.close()
            self._children.remove(child)
            self._act(actor, 'killed')
            self._answer(actor, 'granted')
            return
        held = self._act(actor, 'held')
        with _open(path, os.O_RDWR) as fd:
            self._answer(actor, 'tried')
            self._act(actor, 'killed')
            took = self._until_granted(fd) if held else None
            self._find('locks-fall', took is not None, took,
                       f'one of {actor.host} stays' if held else
                       f'{actor.host} got none')
            self._answer(actor, 'granted')

    def _rename(self, actor: Member) -> None:
        """The file that is replaced is open on the host that replaces it."""
        path = self._name(actor, 'renamed')
        if actor is self.me:
            with _file_of(path, _page('0')):
                pass
            self._act(actor, 'there')
            self._answer(actor, 'looking')
            for number in range(1, _RENAMES):
                new = self._name(actor, f'new{number}')
                with _file_of(new, _page(str(number))):
                    pass
                with _open(path, os.O_RDONLY):
                    os.rename(new, path)
                time.sleep(_POLL / 2)
            self._act(actor, 'renamed')
            self._answer(actor, 'looked')
            return
        self._act(actor, 'there')
        self._answer(actor, 'looking')
        missing = mixed = 0
        deadline = time.monotonic() + self.limit
        while (not self._said(actor, 'renamed')
                and time.monotonic() < deadline):
            for _ in range(20):
                try:
                    with _open(path, os.O_RDONLY) as fd:
                        data = os.read(fd, _PAGE)
                    mixed += data != _page(data[:8].decode().strip())
                except OSError as e:
                    missing += e.errno == errno.ENOENT
        self._find('rename', not missing and not mixed, None,
                   f'a name that {actor.host} replaced was missing {missing} '
                   f'times, and led to a mixture {mixed} times')
        self._act(actor, 'renamed')
        self._answer(actor, 'looked')

    def _said(self, actor: Member, what: str) -> bool:
        return f'{self._step}-{what}.{actor.token}' in self._list(
            f'{self._step}-{what}.')

    def _new_names(self, actor: Member) -> None:
        """Without opening the directory, in which nothing else is done."""
        directory = os.path.join(self.room, actor.token)
        path = os.path.join(directory, 'new')
        if actor is self.me:
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
            self._made.append(path)
            self._act(actor, 'ready')
            self._answer(actor, 'missed')
            with _file_of(path, b''):
                pass
            self._act(actor, 'made')
            self._answer(actor, 'seen')
            self._unlink(path)
            return
        self._act(actor, 'ready')
        os.path.exists(path)
        self._answer(actor, 'missed')
        self._act(actor, 'made')
        took = self._until(lambda: os.path.exists(path))
        self._find('new-names', took is not None and took < 1, took,
                   f'one of {actor.host} came late' if took is not None else
                   f'one of {actor.host} did not come')
        self._answer(actor, 'seen')

    def _names_asked(self, actor: Member) -> None:
        directory = os.path.join(self.room, actor.token)
        made, gone, other = (os.path.join(directory, name)
                             for name in ('made', 'gone', 'other'))
        if actor is self.me:
            self._made += [made, gone, other]
            for path in (gone, other):
                with _file_of(path, b'old'):
                    pass
            self._act(actor, 'ready')
            self._answer(actor, 'looked')
            with _file_of(made, b''):
                pass
            os.unlink(gone)
            new = os.path.join(directory, 'new')
            with _file_of(new, b'new'):
                pass
            os.rename(new, other)
            self._act(actor, 'changed', os.stat(other).st_ino)
            self._answer(actor, 'asked')
            for path in (made, other):
                self._unlink(path)
            return
        self._act(actor, 'ready')
        os.listdir(directory)
        for path in (made, gone, other):
            os.path.exists(path)
        self._answer(actor, 'looked')
        inode = self._act(actor, 'changed')
        start = time.monotonic()
        with _open(directory, os.O_RDONLY | os.O_DIRECTORY):
            wrong = [word for word, bad in (
                ('a new name is missing', not os.path.exists(made)),
                ('a name that was removed is there', os.path.exists(gone)),
                ('a name that was replaced leads to the old file',
                 _inode(other) != inode)) if bad]
        took = time.monotonic() - start if not wrong else self._until(
            lambda: os.path.exists(made) and not os.path.exists(gone)
            and _inode(other) == inode)
        self._find('names-asked', not wrong, took,
                   f'of {actor.host}: {", ".join(wrong)}')
        self._answer(actor, 'asked')

    def _close_to_open(self, actor: Member) -> None:
        path = self._name(actor, 'closed')
        if actor is self.me:
            self._write_twice(actor, path)
            return
        self._act(actor, 'before')
        with _open(path, os.O_RDONLY) as fd:
            good = os.pread(fd, _PAGE, 0) == _page('before')
        self._answer(actor, 'read')
        self._act(actor, 'after')
        with _open(path, os.O_RDONLY) as fd:
            good &= os.pread(fd, _PAGE, 0) == _page('after')
        self._find('close-to-open', good, None,
                   f'a file that {actor.host} closed was read as it had been')
        self._answer(actor, 'again')

    def _open_asked(self, actor: Member) -> None:
        path = self._name(actor, 'asked')
        if actor is self.me:
            self._write_twice(actor, path)
            return
        self._act(actor, 'before')
        with _open(path, os.O_RDONLY) as fd:
            os.pread(fd, _PAGE, 0)
            self._answer(actor, 'read')
            self._act(actor, 'after')
            _ask(fd)
            good = os.pread(fd, _PAGE, 0) == _page('after')
        self._find('open-asked', good, None,
                   f'one of {actor.host} was read as it had been')
        self._answer(actor, 'again')

    def _write_twice(self, actor: Member, path: str) -> None:
        with _file_of(path, _page('before')):
            pass
        self._act(actor, 'before')
        self._answer(actor, 'read')
        with _open(path, os.O_RDWR) as fd:
            os.pwrite(fd, _page('after'), 0)
        self._act(actor, 'after')
        self._answer(actor, 'again')

    def _fsync(self, actor: Member) -> None:
        """Of a file that stays open on the host that writes it."""
        path = self._name(actor, 'synced')
        if actor is self.me:
            with _file_of(path, _page('one')):
                pass
            with _open(path, os.O_RDWR) as fd:
                self._act(actor, 'one')
                self._answer(actor, 'read')
                os.pwrite(fd, _page('two'), _PAGE)
                os.fsync(fd)
                self._act(actor, 'two')
                self._answer(actor, 'again')
            return
        self._act(actor, 'one')
        with _open(path, os.O_RDONLY) as fd:
            os.pread(fd, 2 * _PAGE, 0)
        self._answer(actor, 'read')
        self._act(actor, 'two')
        with _open(path, os.O_RDONLY) as fd:
            data = os.pread(fd, 2 * _PAGE, 0)
        self._find('fsync', data == _page('one') + _page('two'), None,
                   f'what {actor.host} appended was not there')
        self._answer(actor, 'again')

    def _unlinked(self, actor: Member) -> None:
        path = self._name(actor, 'unlinked')
        if actor is self.me:
            with _file_of(path, _page('x') * 16):
                pass
            self._act(actor, 'made')
            self._answer(actor, 'open')
            os.unlink(path)
            self._act(actor, 'unlinked')
            self._answer(actor, 'read')
            return
        self._act(actor, 'made')
        with _open(path, os.O_RDONLY) as fd:
            os.pread(fd, 10, 0)
            self._answer(actor, 'open')
            self._act(actor, 'unlinked')
            detail = 'other bytes were read'
            data = b''
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            try:
                data = os.pread(fd, _PAGE, 15 * _PAGE)
            except OSError as e:
                detail = e.strerror or str(e)
            self._find('unlinked', data == _page('x'), None,
                       f'one that {actor.host} unlinked: {detail}')
        self._answer(actor, 'read')

    def _punch(self, actor: Member) -> None:
        path = self._name(actor, 'punched')
        if actor is self.me:
            with _file_of(path, _page('x') * 2) as fd:
                error = _punch(fd, _PAGE)
                self._find('punch', not error, None, os.strerror(error))
            self._act(actor, 'punched', error)
            self._answer(actor, 'read')
            return
        error = self._act(actor, 'punched')
        with _open(path, os.O_RDONLY) as fd:
            wanted = _page('x') if error else bytes(_PAGE)
            self._find('punch', os.pread(fd, _PAGE, 0) == wanted, None,
                       f'{actor.host} reads other bytes than this host')
        self._answer(actor, 'read')

    def _link(self, members: list[Member]) -> None:
        """All at the same names; of each, one may succeed."""
        own = [self._name(self.me, f'own-{number}')
               for number in range(_LINKS // _LINKS_OF_ONE)]
        # Where nobody lists, which would have names asked for anew.
        paths = [os.path.join(self.room, members[0].token, f'{number:03}')
                 for number in range(_LINKS)]
        self._made += paths
        for path in own:
            with _file_of(path, b''):
                pass
        # Who remembers that they are missing has to leave it to the server.
        for path in paths:
            os.path.exists(path)
        self._say(f'{self._step}-ready', True)
        self._hear(f'{self._step}-ready')
        won = []
        for number, path in enumerate(paths):
            try:
                os.link(own[number // _LINKS_OF_ONE], path)
                won.append(os.path.basename(path))
            except FileExistsError:
                pass
            except OSError as e:
                self._find('link', False, None, e.strerror or str(e))
                break
        self._say(f'{self._step}-won', won)
        claims = [set(won), *map(set, self._hear(
            f'{self._step}-won').values())]
        twice = sum(map(len, claims)) - len(set().union(*claims))
        self._find('link', not twice, None,
                   f'{twice} of {_LINKS} names were linked more than once')


# -- files --------------------------------------------------------------------

_HOLDER = """
import fcntl, os, struct, sys, time
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.fcntl(fd, fcntl.F_OFD_SETLK,
            struct.pack('@hhqqi4x', fcntl.F_WRLCK, 0, 5, 1, 0))
os.write(1, b'held\\n')
time.sleep(3600)
"""


@contextlib.contextmanager
def _open(path: str, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _file_of(path: str, content: bytes) -> Iterator[int]:
    """Make a file, which stays open meanwhile."""
    with _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
        os.pwrite(fd, content, 0)
        os.fsync(fd)
        yield fd


def _page(word: str) -> bytes:
    """A page that begins with a word of up to eight letters."""
    return word.ljust(8).encode() * (_PAGE // 8)


def _inode(path: str) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None


def _ask(fd: int) -> None:
    """Have the server asked what an open file has become, as the engine."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.statx(fd, b'', _AT_EMPTY_PATH | _AT_STATX_FORCE_SYNC,
               _STATX_BASIC_STATS, ctypes.create_string_buffer(256))


def _punch(fd: int, length: int) -> int:
    """Punch a hole at the start of a file; 0, or the error's number."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_int64(0),
                          ctypes.c_int64(length))
    return 0 if done == 0 else ctypes.get_errno()
