# SPDX-License-Identifier: Apache-2.0

"""Everything at once on one repository, all of it killed at any moment.

Two real Glances of two processes each, with one database; daemons; processes
of two hosts that store, read and delete by themselves (they do not see one
another's hints, so that there is something to merge); clients of Glance that
go away in the middle; operators' commands. The oracles are those of
``storm.py`` and ``glance_storm.py``. After each round only the daemons are at
work, and the images that are there are compared with the oracles; at the end
one more accounting, merging and collection must leave exactly the distinct
blocks of the images that are there, and no file or lock of any process that
died.
"""

import collections
import contextlib
import fcntl
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time

from dedupd.tasks import accounting
from dedupd.tasks import collector
from dedupd.tasks import merger
from glance_dedup.base import pacing
from glance_dedup.check import checker
from tests.functional import event_logs
from tests.functional import glance_server
from tests.functional import glance_storm
from tests.functional import storm
from tests.support import daemons
from tests.support import maintenance
from tests.support import repositories

#: The limit in seconds for an operation that ought to take none.
LIMIT = 180
IMAGES = 30
#: The processes of a round, by what they do; None: a client of Glance.
KINDS = [storm.UPLOADER, storm.UPLOADER, storm.DELETER, storm.READER,
         storm.READER, None, None, None]
INTERVALS = {'collect_interval': 1, 'merge_interval': 1, 'scrub_interval': 2,
             'scrub_rate_mib': 0, 'recompress_interval': 1,
             'recompress_rate_mib': 0, 'spare_threshold': 8,
             'collect_live_share': 60}
#: Descriptors of groups that a process keeps open, as fpcache.h says; those
#: of a group that is gone are among them until others take their place.
CACHED_GROUPS = 64
#: Bytes that a process may grow by from its second round on.
GROWTH = 96 << 20

#: Findings that the check may have at the end: the last catalog that was set
#: aside, and the index of that one; and the index keeps records of freed
#: blocks until a run meets others like them.
EXPECTED = ('files of damaged bytes are set aside',
            'is of another catalog: merging makes the index anew',
            'records of blocks that are no more')


class Glance(glance_server.GlanceServer):
    """One of several servers with one database."""

    def _sync_database(self):
        if self.database.startswith(f'sqlite:///{self.directory}/'):
            super()._sync_database()


class Soak:
    """One repository, and the processes that use it."""

    def __init__(self, path, seed):
        self.path = path
        self.seed = seed
        self.rng = random.Random(seed)
        self.events = collections.deque(maxlen=60)
        self.daemon = self.make_daemon()
        self.other = self.make_daemon()     # in some rounds
        self.servers = []
        self.starting = []
        self.ids = path.parent / 'ids'
        self.ids.mkdir()
        self.names = itertools.count()
        self.running = {}
        self.logs = {'storm': [], 'glance': []}
        self.uploads = {}
        self.images = {}
        self.kills = collections.Counter()
        self.done = collections.Counter()
        self.rounds = itertools.count()
        self.spared = False
        self.deadline = 0.0
        self.memory = {}                    # by process, sampled each round

    def note(self, text):
        self.events.append(f'{time.monotonic():.2f} {text}')

    # -- processes ---------------------------------------------------------

    def make_daemon(self):
        daemon = daemons.Daemon(self.path, **INTERVALS)
        daemon.program = daemons.impatient(
            account=1, TRIAL_INTERVAL=0.3, RETRY_INTERVAL=1.0)
        daemon.program[1] = (
            'from dedupd.tasks import collector\n'
            'collector.EVACUATE_SHARE = 30\n' + daemon.program[1])
        return daemon

    def start_glance(self):
        parent = self.path.parent
        for number in range(2):
            store = {
                'type': 'dedup', 'dedup_store_datadir': self.path,
                'dedup_store_filter_dir': parent / f'host-{number}',
                'dedup_store_filter_mib': 1,
                'dedup_store_dedupd_socket': self.daemon.socket}
            server = Glance(
                parent / f'glance-{number}', {'dedup': store}, processes=2,
                database=self.servers[0].database if number else None)
            # The database is in the first server's directory, which makes it.
            server.start()
            self.servers.append(server)

    def start_worker(self, steps):
        name = f'{self.seed % 1000}.{next(self.names)}'
        log = self.path.parent / f'{name}.log'
        job = {'log': str(log), 'name': name, 'deadline': self.deadline}
        if steps is None:
            module = 'glance'
            job |= {'urls': [server.url for server in self.servers],
                    'ids': str(self.ids)}
        else:
            module = 'storm'
            host = self.rng.randrange(2)
            job |= {'path': str(self.path), 'steps': steps, 'ids': IMAGES,
                    'socket': self.daemon.socket,
                    'filter_dir': str(self.path.parent / f'host-{host}')}
        self.logs[module].append(log)
        process = subprocess.Popen(
            [sys.executable, '-m', 'tests.functional.' + (
                'storm' if module == 'storm' else 'glance_storm'),
             json.dumps(job)], cwd=daemons.ROOT, stdin=subprocess.DEVNULL)
        self.running[process] = (steps, log)

    def kill_worker(self):
        process = self.rng.choice(list(self.running))
        steps, log = self.running.pop(process)
        self.note(f'kill {log.stem}')
        process.kill()
        process.wait(LIMIT)
        self.kills['worker' if steps else 'client'] += 1
        self.start_worker(steps)

    def kill_glance_worker(self):
        """Kill a worker; uWSGI makes another one."""
        server = self.rng.choice(self.servers[self.spared:])
        with contextlib.suppress(TypeError, OSError, IndexError):
            pid = self.rng.choice(server.worker_pids())
            self.note(f'kill worker {pid} of {server.directory.name}')
            os.kill(pid, 9)
            self.kills['glance worker'] += 1

    def kill_glance(self):
        """Kill all of one server, and start it again meanwhile."""
        if any(thread.is_alive() for thread in self.starting):
            return
        server = self.rng.choice(self.servers[self.spared:])
        self.note(f'kill {server.directory.name}')
        server.kill()
        self.kills['glance'] += 1
        self.starting = [threading.Thread(target=server.start)]
        self.starting[0].start()

    def reap(self):
        for process in [p for p in self.running if p.poll() is not None]:
            _, log = self.running.pop(process)
            assert process.returncode == 0, (
                log.read_text()[-3000:] if log.exists() else process)

    def command(self, name, kill_after=None):
        """An operator's command, which may be killed."""
        self.note(f'command {name}, killed after {kill_after}')
        process = subprocess.Popen(
            [sys.executable, '-m', 'glance_dedup.cli.entry', '--repository',
             str(self.path), '--filter-dir', str(self.path.parent / 'host-0'),
             '--socket', self.daemon.socket, *name.split(), '--config-file',
             str(self.daemon.config)], cwd=daemons.ROOT,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True)
        try:
            said, _ = process.communicate(
                timeout=LIMIT if kill_after is None else kill_after)
            assert process.returncode == 0, said
            self.kills['command done'] += 1
        except subprocess.TimeoutExpired:
            assert kill_after is not None, f'{name} does not end'
            self.kills['command'] += 1
        finally:
            process.kill()
            process.communicate()

    def kill_daemon(self):
        """Kill the daemon; run without it for a while, or with the other."""
        self.note('kill the daemon')
        self.daemon.kill()
        self.kills['daemon'] += 1
        rng = self.rng
        if self.other.process is None:
            if rng.random() < 0.1:
                # The fence can be missing at any time (I9).
                self.note('unlink the fence')
                (self.path / 'fence').unlink(missing_ok=True)
            for _ in range(rng.randrange(3)):
                self.command(
                    rng.choice(['collect', 'merge', 'scrub',
                                'recompress']),
                    rng.choice([None, rng.uniform(0.3, 1.5)]))
        self.start_daemon()

    def start_daemon(self):
        for _ in range(self.rng.choice([0, 0, 1, 2])):
            # The daemon may be killed as early as in its start.
            self.daemon.start(wait=False)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.daemon.process.wait(self.rng.uniform(0.2, 1.5))
                raise AssertionError(self.daemon.text()[-3000:])
            self.daemon.kill()
            self.kills['start'] += 1
        self.note('start the daemon')
        self.daemon.start(wait=False)

    def chief(self):
        """Return the daemon that maintains the repository, once one does."""
        both = [d for d in (self.daemon, self.other) if d.process is not None]
        found = []

        def ready():
            for daemon in both:
                status = daemon.status()
                if (status['daemon']['role'] == 'maintainer'
                        and status['catalog']['state'] == 'ready'):
                    found.append(daemon)
            return found
        for daemon in both:
            # Each daemon answers, and one of them maintains.
            daemon.wait_for(daemon.status, LIMIT)
        both[0].wait_for(ready, LIMIT)
        return found[0]

    # -- rounds ------------------------------------------------------------

    def round(self, seconds):
        number = next(self.rounds)
        self.deadline = time.monotonic() + seconds
        self.note(f'round {number}')
        # In some rounds there is a second daemon, and neither it nor the first
        # Glance is killed, so that their growth can be measured.
        self.spared = number % 8 not in (0, 7)
        if self.spared and self.other.process is None:
            self.other.start(wait=False)
        if not self.spared and self.other.process is not None:
            self.other.kill()
            self.other.process = None
        for steps in KINDS:
            self.start_worker(steps)
        self.kill_at_random({self.kill_daemon: 3, self.kill_worker: 7,
                             self.kill_glance_worker: 3, self.kill_glance: 1})

    def kill_at_random(self, deeds, rate=1.5):
        """Do each deed at least once, at random times, until the deadline."""
        first = list(deeds)
        self.rng.shuffle(first)
        while first or time.monotonic() < self.deadline:
            time.sleep(min(3 / rate, self.rng.expovariate(rate)))
            if first:
                first.pop()()
                continue
            self.reap()
            if time.monotonic() < self.deadline - 1:
                self.rng.choices(list(deeds), list(deeds.values()))[0]()
        for process in list(self.running):
            process.wait(LIMIT)
        self.reap()
        for thread in self.starting:
            thread.join(LIMIT)
            assert not thread.is_alive(), 'Glance does not start'

    def wait_for_glance(self):
        """Wait until no request of a dead client is left."""
        ports = {f'{server.port:04X}' for server in self.servers}

        def idle():
            with open('/proc/net/tcp') as f:
                return not any(
                    local.rpartition(':')[2] in ports
                    and state in ('01', '08')   # ESTABLISHED, CLOSE_WAIT
                    for _, local, _, state, *_ in map(str.split, f))
        repositories.eventually(idle, LIMIT)

        def is_uploading(name):
            try:
                return repositories.lock_held(self.path / 'spool' / name, 0)
            except FileNotFoundError:
                return False    # it has just ended

        # A request whose client has reset the connection is in no list. It may
        # wait for Glance's database before it gives up.
        repositories.eventually(
            lambda: not any(is_uploading(name)
                            for name in os.listdir(self.path / 'spool')
                            if name.startswith('T')),
            LIMIT, 'an upload goes on')

    def judge(self):
        """Check everything; only the daemons are at work now."""
        self.wait_for_glance()
        self.note('judge')
        uploads, reads = storm.read_logs(self.logs['storm'], self.uploads)
        storm.judge_reads(uploads, reads)
        images, more = glance_storm.read_logs(self.logs['glance'],
                                              self.images)
        glance_storm.judge_reads(images, more)
        self.tally(reads + more, uploads, images)
        chief = self.chief()
        with repositories.open_repository(self.path) as repo:
            contents = storm.judge_end(repo, uploads)
            self.uploads = storm.survivors(uploads, repo)
            contents |= glance_storm.judge_end(
                repo, glance_server.Client(self.rng.choice(self.servers).url),
                images)
            assert repo.images() == sorted(contents)
            for image_id in os.listdir(self.ids):
                if image_id not in images:
                    (self.ids / image_id).unlink()
            for name in ('merge', 'collect', 'scrub'):
                last = chief.run(name)['last']
                assert last['error'] is None, last
                self.done.update({
                    key: value for key, value in last['result'].items()
                    if type(value) is int})
            maintenance.require_contents(repo, contents)
        for daemon in (self.daemon, self.other):
            if daemon.process is not None:
                self.judge_daemon(daemon, contents)
        self.judge_glance()
        self.look_at_processes()
        for logs in self.logs.values():
            for log in logs:
                log.unlink(missing_ok=True)
            logs.clear()
        return contents

    def judge_daemon(self, daemon, contents):
        with daemon.client() as client:
            for image_id, data in contents.items():
                with client.open_image(image_id) as stream:
                    assert stream.read(stream.size) == data, image_id
            status = client.status()
        # A daemon that only reads does not know.
        known = 0 if status['daemon']['role'] == 'maintainer' else None
        assert status['damage'] == {'blocks': known, 'images': [],
                                    'volumes': []}
        assert status['catalog'].get('unreadable', {}) == {}
        assert status['errors'] == []
        text = daemon.text()
        assert 'Traceback' not in text, text[text.index('Traceback'):][:3000]
        for line in text.splitlines():
            assert ' ERROR ' not in line, line
        os.truncate(daemon.log, 0)

    def judge_glance(self):
        """No error of the store is in Glance's log, whichever process dies."""
        for server in self.servers:
            for line in server.log.read_text(errors='replace').splitlines():
                assert ' ERROR glance_dedup' not in line, line

    def tally(self, reads, uploads, images):
        """Count this round's operations, for people."""
        self.done['reads'] += len(reads)
        self.done['read bytes'] += sum(last['bytes'] for _, last in reads)
        for logs in self.logs.values():
            for log in logs:
                for event in event_logs.read(log):
                    done = (event['phase'] == 'end'
                            and event.get('status', 204) == 204)
                    if event['op'] == 'put' and done:
                        self.done['uploads'] += 1
                        self.done['upload bytes'] += event['bytes']
                    elif event['op'] == 'delete' and done:
                        self.done['deletes'] += 1

    # -- what processes keep -----------------------------------------------

    def long_lived(self):
        pids = [daemon.process.pid for daemon in (self.daemon, self.other)
                if daemon.process is not None]
        for server in self.servers:
            pids += [server.pid, *server.worker_pids()]
        return pids

    def look_at_processes(self):
        """Check deleted files that processes hold; note their memory."""
        for pid in self.long_lived():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                gone = deleted_files(pid, self.path)
                self.done['most deleted files'] = max(
                    self.done['most deleted files'], len(gone))
                # The daemons work on, and close at once what they delete.
                strange = {name for name in gone if '/groups/' not in name}
                repositories.eventually(
                    lambda: not strange.intersection(
                        deleted_files(pid, self.path)),
                    LIMIT, (pid, strange))
                assert len(gone) <= CACHED_GROUPS, (pid, len(gone), gone)
                self.memory.setdefault((pid, started(pid)), []).append(
                    resident(pid))

    def judge_memory(self):
        """Check the memory of processes that lived for several rounds."""
        for (pid, _), sizes in self.memory.items():
            self.done['most MiB'] = max(self.done['most MiB'],
                                        max(sizes) >> 20)
            if len(sizes) > 3:
                assert max(sizes[2:]) - sizes[1] < GROWTH, (pid, sizes)

    # -- the end -----------------------------------------------------------

    def report(self):
        print(dict(self.kills), dict(self.done), flush=True)

    def end(self, contents):
        """Stop everything; no lock, file or process may be left."""
        pids = [(pid, started(pid)) for pid in self.long_lived()]
        for server in self.servers:
            server.kill()
        for daemon in (self.daemon, self.other):
            if daemon.process is not None:
                assert daemon.stop(limit=LIMIT) == 0, daemon.text()[-3000:]
        # No process waits for the workers of a dead master.
        repositories.eventually(lambda: not users_of(self.path) and not any(
            started(pid) == when for pid, when in pids), LIMIT)
        require_no_locks(self.path)
        repositories.require_clean(self.path)
        with repositories.open_repository(self.path) as repo:
            print(*settle(repo))
        require_exact(self.path, contents)
        require_no_locks(self.path)

    def last_words(self):
        """Print, after a failure, the seed and the last events."""
        print(f'GLANCE_DEDUP_SOAK_SEED={self.seed}; the repository is left '
              f'in {self.path}')
        print(*self.events, sep='\n')
        for logs in self.logs.values():
            for log in logs:
                if log.exists():
                    for line in log.read_text().splitlines()[-4:]:
                        print(log.stem, line[:400])

    def close(self):
        for process in self.running:
            process.kill()
            process.wait(LIMIT)
        for thread in self.starting:
            thread.join(LIMIT)
        for server in self.servers:
            with contextlib.suppress(AttributeError):
                server.kill()       # it may be dead already
        self.daemon.close()
        self.other.close()


# -- processes ----------------------------------------------------------------

def deleted_files(pid, path):
    """Return a repository's files that a process has open but have no name."""
    found = []
    for fd in os.listdir(f'/proc/{pid}/fd'):
        with contextlib.suppress(OSError):
            target = os.readlink(f'/proc/{pid}/fd/{fd}')
            if (target.startswith(f'{path}/')
                    and target.endswith(' (deleted)')):
                found.append(target)
    return found


def started(pid):
    """Return the process's start time, which tells it from a later one."""
    with contextlib.suppress(OSError), open(f'/proc/{pid}/stat') as f:
        return f.read().rpartition(')')[2].split()[19]
    return None


def resident(pid):
    """Return the bytes of memory that a process uses."""
    with open(f'/proc/{pid}/status') as f:
        for line in f:
            if line.startswith('VmRSS:'):
                return int(line.split()[1]) << 10
    return 0


def users_of(path):
    """Return other processes that have a file of the repository open."""
    found = set()
    for pid in filter(str.isdigit, os.listdir('/proc')):
        with contextlib.suppress(OSError):
            if int(pid) != os.getpid() and any(
                    os.readlink(f'/proc/{pid}/fd/{fd}').startswith(f'{path}/')
                    for fd in os.listdir(f'/proc/{pid}/fd')):
                found.add(int(pid))
    return found


def require_no_locks(path):
    """No process has a lock of any file, and a new process may take them all.

    On file systems in user space a lock falls a moment after its file was
    closed, or its process has ended: the kernel waits for no answer.
    """
    inodes = {}
    for directory, _, names in os.walk(path):
        for name in names:
            file = os.path.join(directory, name)
            inodes[os.stat(file).st_ino] = file
    device = os.stat(path).st_dev
    mine = f'{os.major(device):02x}:{os.minor(device):02x}'
    with open('/proc/locks') as f:
        for line in f:
            major_minor, _, inode = next(
                word for word in line.split() if word.count(':') == 2
            ).rpartition(':')
            assert major_minor != mine or int(inode) not in inodes, (
                line, inodes[int(inode)])
    for file in inodes.values():
        with open(file, 'r+b') as f:
            repositories.eventually(
                lambda: repositories.set_lock(
                    f.fileno(), 0, fcntl.F_WRLCK, bytes_=0),
                LIMIT, f'{file} is locked')
            # The lock is released here, so that it does not fall a moment
            # later.
            repositories.set_lock(f.fileno(), 0, fcntl.F_UNLCK, bytes_=0)


# -- what must be left --------------------------------------------------------

def distinct_blocks(contents):
    blocks = {data[at:at + storm.BLOCK] for data in contents.values()
              for at in range(0, len(data), storm.BLOCK)}
    return {block for block in blocks if any(block)}


def renew_tails(repo):
    """Have a writer lease every group that has room, as uploads will.

    Only then the entries are known that a writer had left unpublished when it
    died (N7.3).
    """
    room = sum(
        group.slots - group.record()[2] for group in (
            repositories.Group(repo.path, number)
            for number in maintenance.groups(repo.path)))
    repositories.put(repo, 'tails', random.randbytes(
        (room + 1) * storm.BLOCK))
    repo.delete('tails')


def settle(repo):
    """Run each task once more."""
    renew_tails(repo)
    pace = pacing.Pace()
    with maintenance.maintaining(repo, wait=LIMIT) as maintainer:
        accounting.run_once(maintainer, pace)
        merged = merger.run_once(maintainer, pace)
        assert not merged.gave_up and not merged.busy, merged
        accounting.run_once(maintainer, pace)
        collected = collector.run_once(maintainer, pace, live_share=0,
                                       evacuate_share=0)
        assert not collected.busy and not collected.refused, collected
        return merged, collected


def extra_blocks(path, expected):
    """Return the live blocks that no image needs, or that are missing.

    The result has, by group: their slots, the published record, the states of
    all slots.
    """
    found = {}
    for group, slot in maintenance.live_slots(path) ^ set(expected):
        slots, *_ = found.setdefault(group, (
            [], repositories.Group(path, group).record(),
            maintenance.states(path, group)))
        slots.append(slot)
    return found


def require_exact(path, contents):
    """The counts, groups and catalog have exactly the images' blocks."""
    wanted = distinct_blocks(contents)
    with repositories.open_repository(path) as repo:
        assert repo.images() == sorted(contents)
        for image_id, data in contents.items():
            assert repositories.read_all(repo, image_id) == data
        expected = maintenance.expected_counts(repo)
        with maintenance.maintaining(repo, wait=LIMIT) as maintainer:
            numbers = {group for group, _ in expected} | set(
                maintenance.groups(path))
            found = maintenance.counts(maintainer.catalog, numbers)
            wrong = {address: (found[address], expected[address])
                     for address in found.keys() | expected.keys()
                     if found[address] != expected[address]}
            assert not wrong, wrong
            statistics = maintainer.catalog.statistics()
            assert maintainer.unreadable.reasons() == {}
    assert os.listdir(path / 'spool') == []
    assert len(expected) == len(wanted), 'blocks are stored twice'
    extra = extra_blocks(path, expected)
    assert not extra, extra
    assert statistics['unique_blocks'] == len(wanted)
    assert statistics['images'] == len(contents)
    assert statistics['logical_bytes'] == sum(map(len, contents.values()))
    # The check reads no catalog that is in use.
    repositories.eventually(lambda: not repositories.lock_held(
        path / 'locks/maintainer', 0), LIMIT)
    report = checker.check(path)
    strange = [str(f) for f in report.findings
               if not f.sentence.endswith(EXPECTED)]
    assert not strange, strange
    assert report.figures['garbage_blocks'] == 0
    assert report.figures['duplicate_blocks'] == 0
