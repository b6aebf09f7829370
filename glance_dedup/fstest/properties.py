# SPDX-License-Identifier: Apache-2.0

"""The trials of the properties: one function for each.

All hosts call the same functions in the same order. In each, one host acts
while the others observe; their messages keep their steps together.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import subprocess
import sys
import time

import plyvel

from glance_dedup.base import closing
from glance_dedup.base import filesystem
from glance_dedup.base import leveldb
from glance_dedup.fstest import files
from glance_dedup.fstest import host_mailbox
from glance_dedup.fstest import property_findings

Findings = property_findings.Findings
Mailbox = host_mailbox.Mailbox
Member = host_mailbox.Member

LINKS = 50
#: Of one file: some file systems keep each name in the file's attributes, and
#: have room for some forty.
LINKS_OF_ONE = 10
RENAMES = 30
#: Seconds for which each host overwrites a file.
WATCHED = 10.0
#: Of a database, each time that rows are added.
ENTRIES = 1000
#: Each reading finds a missing file only if it was replaced once more.
_MAX_SCANS = 10

# A byte beyond 4 GiB, as those of the groups' shared locks are.
_FAR = (1 << 32) + 5
# It takes its lock again, like a process that enters a group (N6.1): ceph-fuse
# 16 then keeps the lock of such a byte when its holder is killed.
_HOLDER = """
import fcntl, os, struct, sys, time
fd = os.open(sys.argv[1], os.O_RDWR)
for _ in range(2):
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(
        '@hhqqi4x', fcntl.F_WRLCK, 0, int(sys.argv[2]), 1, 0))
os.write(1, b'held\\n')
time.sleep(3600)
"""
# It sends a line when it has begun.
_READER = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
os.pread(fd, 1 << 20, 0)
os.write(1, b'reading\\n')
while True:
    os.pread(fd, 1 << 20, 0)
"""


def owner(mailbox: Mailbox, findings: Findings, actor: Member) -> None:
    """Compare the owner of a file that the actor made, and the clocks."""
    told = mailbox.signal(actor, 'clock', {
        'time': time.time(), 'uid': os.geteuid()})
    if actor is mailbox.me:
        return
    # The time until it was heard makes the difference less, never more; and
    # each host acts once, so the clock that is ahead is found.
    ahead = told['time'] - time.time()
    findings.find('clocks', ahead < 2, None,
                  f'that of {actor.host} is {ahead:.0f} seconds ahead')
    try:
        uid = os.stat(os.path.join(
            mailbox.place, f'{mailbox.step}-clock.{actor.token}')).st_uid
    except FileNotFoundError:
        return      # it has ended since; the next step reports it
    findings.find('owner', uid == told['uid'] == os.geteuid(), None,
                  f'{actor.host} writes as uid {told["uid"]}, its file is '
                  f'of {uid}, and this process is {os.geteuid()}')


def locks(mailbox: Mailbox, findings: Findings, actor: Member) -> None:
    """Hold a lock; no other host may get it until it is given back."""
    path = mailbox.name(actor, 'lock')
    if actor is mailbox.me:
        with files.made(path, b'') as fd:
            if not _granted(findings, fd, fcntl.F_WRLCK):
                findings.find('locks', False, None, 'no lock was granted')
            mailbox.signal(actor, 'locked')
            mailbox.reply(actor, 'refused')
            _granted(findings, fd, fcntl.F_UNLCK)
            mailbox.signal(actor, 'unlocked')
            mailbox.reply(actor, 'granted')
        return
    mailbox.signal(actor, 'locked')
    with files.opened(path, os.O_RDWR) as fd:
        findings.find('locks', not _granted(findings, fd, fcntl.F_RDLCK),
                      None, f'a lock that {actor.host} held was granted')
        _granted(findings, fd, fcntl.F_UNLCK)
        mailbox.reply(actor, 'refused')
        mailbox.signal(actor, 'unlocked')
        took = _until_granted(mailbox, findings, fd)
        findings.find('locks', took is not None, took,
                      f'a lock that {actor.host} gave back stays')
        mailbox.reply(actor, 'granted')


def _until_granted(mailbox: Mailbox, findings: Findings, fd: int,
                   byte: int = 5) -> float | None:
    # Where locks are of no use there is nothing to wait for.
    if findings.by_key['locks'].verdict != property_findings.FINE:
        return None
    return mailbox.until(
        lambda: _granted(findings, fd, fcntl.F_RDLCK, byte))


def _granted(findings: Findings, fd: int, kind: int, byte: int = 5) -> bool:
    try:
        return filesystem.lock(fd, kind, byte)
    except OSError as e:
        findings.find('locks', False, None, f'F_OFD_SETLK: {e.strerror}')
        return False


def locks_fall(mailbox: Mailbox, findings: Findings, actor: Member) -> None:
    """Kill a process that holds a lock; another host then gets the lock."""
    path = mailbox.name(actor, 'held')
    if actor is mailbox.me:
        files.make(path, b'')
        child = subprocess.Popen(
            [sys.executable, '-c', _HOLDER, path, str(_FAR)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert child.stdout is not None     # it is a pipe
        try:
            held = child.stdout.readline() == b'held\n'
            mailbox.signal(actor, 'held', held)
            mailbox.reply(actor, 'tried')
        finally:
            child.kill()
            child.wait()
            child.stdout.close()
        mailbox.signal(actor, 'killed')
        mailbox.reply(actor, 'granted')
        return
    held = mailbox.signal(actor, 'held')
    with files.opened(path, os.O_RDWR) as fd:
        mailbox.reply(actor, 'tried')
        mailbox.signal(actor, 'killed')
        took = (_until_granted(mailbox, findings, fd, _FAR) if held
                else None)
        findings.find('locks-fall', took is not None, took,
                      f'one of {actor.host} stays' if held else
                      f'{actor.host} got none')
        mailbox.reply(actor, 'granted')


def rename(mailbox: Mailbox, findings: Findings, actor: Member) -> None:
    """Replace a file again and again while the others open it.

    The file that is replaced is open on the host that replaces it.
    """
    path = mailbox.name(actor, 'renamed')
    if actor is mailbox.me:
        files.make(path, files.page('0'))
        mailbox.signal(actor, 'there')
        mailbox.reply(actor, 'looking')
        for number in range(1, RENAMES):
            new = mailbox.name(actor, f'new{number}')
            files.make(new, files.page(str(number)))
            with files.opened(path, os.O_RDONLY):
                os.rename(new, path)
            time.sleep(host_mailbox.POLL / 2)
        mailbox.signal(actor, 'renamed')
        mailbox.reply(actor, 'looked')
        return
    mailbox.signal(actor, 'there')
    mailbox.reply(actor, 'looking')
    missing = mixed = 0
    deadline = time.monotonic() + mailbox.limit
    while (not mailbox.said(actor, 'renamed')
            and time.monotonic() < deadline):
        for _ in range(20):
            fd = _open_as_the_store_does(path)
            if fd is None:
                missing += 1
                continue
            # A file that was replaced by now may be gone: see `unlinked`.
            with closing.descriptor(fd), contextlib.suppress(OSError):
                data = os.read(fd, files.PAGE)
                mixed += data != files.page(data[:8].decode().strip())
    findings.find('rename', not missing, None, f'a name that {actor.host} '
                  f'replaced was missing {missing} times')
    if mixed:
        findings.add('rename', property_findings.UNFIT, None, 'a name that '
                     f'{actor.host} replaced led to a mixture {mixed} times')
    mailbox.signal(actor, 'renamed')
    mailbox.reply(actor, 'looked')


def _open_as_the_store_does(path: str) -> int | None:
    """Look up a name again if it is missing, or its file is gone by then.

    A client may have found the file just before it was replaced, and request
    that very file (the engine's `gd_open`). None: it stays missing.
    """
    for look in range(_MAX_SCANS):
        try:
            return os.open(path, os.O_RDONLY)
        except OSError as e:
            if (e.errno == errno.ENOENT and look > 0
                    and not os.path.lexists(path)):
                return None
            if e.errno not in (errno.ENOENT, errno.ESTALE):
                raise
        with files.opened(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY):
            pass
    return None


def new_names(mailbox: Mailbox, findings: Findings, actor: Member) -> None:
    """Make a file that the others looked up in vain before.

    They do not open the directory, in which nothing else is done.
    """
    directory = os.path.join(mailbox.place, actor.token)
    path = os.path.join(directory, 'new')
    if actor is mailbox.me:
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory)
        mailbox.made.append(path)
        mailbox.signal(actor, 'ready')
        mailbox.reply(actor, 'missed')
        files.make(path, b'')
        mailbox.signal(actor, 'made')
        mailbox.reply(actor, 'seen')
        mailbox.unlink(path)
        return
    mailbox.signal(actor, 'ready')
    os.path.exists(path)
    mailbox.reply(actor, 'missed')
    mailbox.signal(actor, 'made')
    took = mailbox.until(lambda: os.path.exists(path))
    findings.find('new-names', took is not None and took < 1, took,
                  f'one of {actor.host} came late' if took is not None else
                  f'one of {actor.host} did not come')
    mailbox.reply(actor, 'seen')


def names_asked(mailbox: Mailbox, findings: Findings, actor: Member) -> None:
    """Change names; the others read them after they open the directory."""
    directory = os.path.join(mailbox.place, actor.token)
    made, gone, other = (os.path.join(directory, name)
                         for name in ('made', 'gone', 'other'))
    if actor is mailbox.me:
        mailbox.made += [made, gone, other]
        for path in (gone, other):
            files.make(path, b'old')
        mailbox.signal(actor, 'ready')
        mailbox.reply(actor, 'looked')
        files.make(made, b'')
        os.unlink(gone)
        new = os.path.join(directory, 'new')
        files.make(new, b'new')
        os.rename(new, other)
        mailbox.signal(actor, 'changed', os.stat(other).st_ino)
        mailbox.reply(actor, 'asked')
        for path in (made, other):
            mailbox.unlink(path)
        return
    mailbox.signal(actor, 'ready')
    os.listdir(directory)
    for path in (made, gone, other):
        os.path.exists(path)
    mailbox.reply(actor, 'looked')
    inode = mailbox.signal(actor, 'changed')
    with files.opened(directory, os.O_RDONLY | os.O_DIRECTORY):
        wrong = [word for word, bad in (
            ('a new name is missing', not os.path.exists(made)),
            ('a name that was removed is there', os.path.exists(gone)),
            ('a name that was replaced leads to the old file',
             files.inode(other) != inode)) if bad]
    took = 0.0 if not wrong else mailbox.until(
        lambda: os.path.exists(made) and not os.path.exists(gone)
        and files.inode(other) == inode)
    findings.find('names-asked', not wrong, took,
                  f'of {actor.host}: {", ".join(wrong)}')
    mailbox.reply(actor, 'asked')


def close_to_open(mailbox: Mailbox, findings: Findings, actor: Member) -> None:
    """Change a file that the others have read; they open it again.

    The first time they leave it open meanwhile, as the store does.
    """
    for word in ('open', 'closed'):
        path = mailbox.name(actor, word)
        if actor is mailbox.me:
            _write_twice(mailbox, actor, path, word)
        else:
            _read_twice(mailbox, findings, actor, path, word)


def _write_twice(mailbox: Mailbox, actor: Member, path: str, word: str
                 ) -> None:
    files.make(path, files.page('before'))
    mailbox.signal(actor, f'{word}-before')
    mailbox.reply(actor, f'{word}-read')
    with files.opened(path, os.O_RDWR) as fd:
        os.pwrite(fd, files.page('after'), 0)
    mailbox.signal(actor, f'{word}-after')
    mailbox.reply(actor, f'{word}-again')


def _read_twice(mailbox: Mailbox, findings: Findings, actor: Member,
                path: str, word: str) -> None:
    mailbox.signal(actor, f'{word}-before')
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(files.opened(path, os.O_RDONLY))
        good = os.pread(first, files.PAGE, 0) == files.page('before')
        if word == 'closed':
            stack.close()
        mailbox.reply(actor, f'{word}-read')
        mailbox.signal(actor, f'{word}-after')
        with files.opened(path, os.O_RDONLY) as fd:
            good &= os.pread(fd, files.PAGE, 0) == files.page('after')
    findings.find('close-to-open', good, None,
                  f'a file that {actor.host} closed was read as it had been')
    mailbox.reply(actor, f'{word}-again')


def synced(mailbox: Mailbox, findings: Findings, actor: Member) -> None:
    """Overwrite a file again and again, synced, while the others open it.

    On each other host a second process reads the file throughout, through an
    open file of its own: some clients then show old bytes to all processes.
    After each round the actor renames another file to the round's number.
    """
    path = mailbox.name(actor, 'synced')
    if actor is mailbox.me:
        mark = _mark(path, 0)
        mailbox.made.append(mark)
        files.make(path, files.page('0'))
        files.make(mark, b'')
        mailbox.signal(actor, 'there')
        mailbox.reply(actor, 'reading')
        mailbox.unlink(_overwrite(path, time.monotonic() + WATCHED))
        mailbox.signal(actor, 'ended')
        mailbox.reply(actor, 'looked')
        return
    mailbox.signal(actor, 'there')
    with _reading_throughout(path):
        mailbox.reply(actor, 'reading')
        looks = {'pages': _Looks(), 'fsync': _Looks()}
        while not mailbox.said(actor, 'ended'):
            for key, read in ('pages', _read), ('fsync', _read_direct):
                looks[key].look(path, read)
    for key, found in looks.items():
        findings.find(key, not found.wrong, None,
                      f'{found.wrong} of {found.count} looks did not show '
                      f'what {actor.host} had synced before')
    mailbox.signal(actor, 'ended')
    mailbox.reply(actor, 'looked')


def _mark(path: str, number: int) -> str:
    return f'{path}-{number}'


def _overwrite(path: str, deadline: float) -> str:
    """Overwrite a file until a moment; return the path of the last mark."""
    number = 0
    with files.opened(path, os.O_RDWR) as fd:
        while time.monotonic() < deadline:
            os.pwrite(fd, files.page(str(number + 1)), 0)
            os.fsync(fd)
            os.rename(_mark(path, number), _mark(path, number + 1))
            number += 1
    return _mark(path, number)


@contextlib.contextmanager
def _reading_throughout(path: str) -> Iterator[None]:
    """Have a process read a file through one open file meanwhile."""
    child = subprocess.Popen(
        [sys.executable, '-c', _READER, path], stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE)
    assert child.stdout is not None     # it is a pipe
    try:
        child.stdout.readline()
        yield
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def _read(path: str) -> bytes:
    with files.opened(path, os.O_RDONLY) as fd:
        return os.pread(fd, files.PAGE, 0)


def _read_direct(path: str) -> bytes:
    with (files.opened(path, os.O_RDONLY | os.O_DIRECT) as fd,
          mmap.mmap(-1, files.PAGE) as page):
        return page[:os.preadv(fd, [page], 0)]


class _Looks:
    """Looks at a file that another host overwrites.

    :ivar count: looks so far
    :ivar wrong: those that showed older bytes than had been synced
    """

    def __init__(self) -> None:
        self.count = self.wrong = 0

    def look(self, path: str, read: Callable[[str], bytes]) -> None:
        """Compare a file with the round that had ended before."""
        directory, name = os.path.split(_mark(path, 0)[:-1])
        ended = max((int(found.removeprefix(name))
                     for found in os.listdir(directory)
                     if found.startswith(name)), default=None)
        if ended is None:
            return      # the mark is being renamed, or is gone
        try:
            data = read(path)
        except OSError:
            data = b''
        # A round may be under way, so each word counts for itself.
        words = {data[i:i + 8] for i in range(0, len(data), 512)}
        self.count += 1
        self.wrong += not words or min(map(int, words)) < ended


def maps(mailbox: Mailbox, findings: Findings, actor: Member) -> None:
    """Map a file as memory, as LevelDB does, and write to it through that."""
    path = mailbox.name(actor, 'mapped')
    if actor is mailbox.me:
        with files.made(path, files.page('x')) as fd:
            try:
                for flags in mmap.MAP_SHARED, mmap.MAP_PRIVATE:
                    with mmap.mmap(fd, files.PAGE, flags) as mapped:
                        mapped[:1] = b'y'
                good = os.pread(fd, 1, 0) == b'y'
                detail = 'it reads other bytes'
            except OSError as e:
                good, detail = False, f'mmap: {e.strerror}'
        findings.find('maps', good, None, detail)
    mailbox.signal(actor, 'mapped')


def database(mailbox: Mailbox, findings: Findings, actor: Member) -> None:
    """Make a LevelDB, which another host opens and adds to; then open it."""
    path = mailbox.name(actor, 'database')
    members = sorted([mailbox.me, *mailbox.others], key=lambda m: m.token)
    other = members[(members.index(actor) + 1) % len(members)]

    def use(done: int) -> None:
        try:
            good, detail = _use_database(path, done), 'it lost what was synced'
        except (OSError, plyvel.Error) as e:
            good, detail = False, leveldb.words(e)
        findings.find('database', good, None, detail)

    if actor is mailbox.me:
        try:
            use(0)
            mailbox.signal(actor, 'filled')
            mailbox.receive(f'{mailbox.step}-used', [other])
            use(2)
        finally:
            shutil.rmtree(path, ignore_errors=True)
    else:
        mailbox.signal(actor, 'filled')
        if other is mailbox.me:
            use(1)
            mailbox.send(f'{mailbox.step}-used', True)
    mailbox.signal(actor, 'checked')


def _use_database(path: str, done: int) -> bool:
    """Add to a database; return whether the earlier rows are there.

    :param done: how often this was done before
    """
    with contextlib.closing(plyvel.DB(
            path, create_if_missing=not done, paranoid_checks=True)) as db:
        found = dict(db.iterator())
        with db.write_batch(sync=True) as batch:
            for number in range(ENTRIES):
                batch.put(f'{done}-{number}'.encode(), bytes(100))
        db.compact_range()      # so that there are tables, which are mapped
    return len(found) == done * ENTRIES and set(found.values()) <= {bytes(100)}


def unlinked(mailbox: Mailbox, findings: Findings, actor: Member) -> None:
    """Remove a file that the others have open, and go on reading."""
    path = mailbox.name(actor, 'unlinked')
    if actor is mailbox.me:
        files.make(path, files.page('x') * 16)
        mailbox.signal(actor, 'made')
        mailbox.reply(actor, 'open')
        os.unlink(path)
        mailbox.signal(actor, 'unlinked')
        mailbox.reply(actor, 'read')
        return
    mailbox.signal(actor, 'made')
    with files.opened(path, os.O_RDONLY) as fd:
        os.pread(fd, 10, 0)
        mailbox.reply(actor, 'open')
        mailbox.signal(actor, 'unlinked')
        detail = 'other bytes were read'
        data = b''
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            data = os.pread(fd, files.PAGE, 15 * files.PAGE)
        except OSError as e:
            detail = e.strerror or str(e)
        findings.find('unlinked', data == files.page('x'), None,
                      f'one that {actor.host} unlinked: {detail}')
    mailbox.reply(actor, 'read')


def punch(mailbox: Mailbox, findings: Findings, actor: Member) -> None:
    """Punch a hole into a file, and compare what the hosts read."""
    path = mailbox.name(actor, 'punched')
    if actor is mailbox.me:
        with files.made(path, files.page('x') * 2) as fd:
            error = files.punch(fd, files.PAGE)
            findings.find('punch', not error, None, os.strerror(error))
        mailbox.signal(actor, 'punched', error)
        mailbox.reply(actor, 'read')
        return
    error = mailbox.signal(actor, 'punched')
    with files.opened(path, os.O_RDONLY) as fd:
        wanted = files.page('x') if error else bytes(files.PAGE)
        findings.find('punch', os.pread(fd, files.PAGE, 0) == wanted, None,
                      f'{actor.host} reads other bytes than this host')
    mailbox.reply(actor, 'read')


def link(mailbox: Mailbox, findings: Findings, members: list[Member]) -> None:
    """Link files to the same names on all hosts; each name has room for one.

    :param members: all hosts, in the same order on all of them
    """
    own = [mailbox.name(mailbox.me, f'own-{number}')
           for number in range(LINKS // LINKS_OF_ONE)]
    # In a directory that no host lists: a listing would send a request.
    paths = [os.path.join(mailbox.place, members[0].token, f'{number:03}')
             for number in range(LINKS)]
    mailbox.made += paths
    for path in own:
        files.make(path, b'')
    # A host that remembers that they are missing must still send a request.
    for path in paths:
        os.path.exists(path)
    mailbox.send(f'{mailbox.step}-ready', True)
    mailbox.receive(f'{mailbox.step}-ready')
    won = []
    for number, path in enumerate(paths):
        try:
            os.link(own[number // LINKS_OF_ONE], path)
            won.append(os.path.basename(path))
        except FileExistsError:
            pass
        except OSError as e:
            findings.find('link', False, None, e.strerror or str(e))
            break
    mailbox.send(f'{mailbox.step}-won', won)
    claims = [set(won), *map(set, mailbox.receive(
        f'{mailbox.step}-won').values())]
    twice = sum(map(len, claims)) - len(set().union(*claims))
    findings.find('link', not twice, None,
                  f'{twice} of {LINKS} names were linked more than once')


#: By property, in the order in which they are tried (`synced` tries two); then
#: :func:`link`, in which all hosts act at once.
TRIALS = {
    'owner': owner, 'locks': locks, 'locks-fall': locks_fall,
    'rename': rename, 'new-names': new_names, 'names-asked': names_asked,
    'close-to-open': close_to_open, 'pages': synced, 'maps': maps,
    'database': database, 'unlinked': unlinked, 'punch': punch}
