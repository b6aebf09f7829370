# SPDX-License-Identifier: Apache-2.0

"""Disks and a repository, and runs of batch backups by real ranks."""

import contextlib
import datetime
import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from dedupd.tasks import collector
from glance_dedup.backup import backup_job
from glance_dedup.base import imageids
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import image_repository
from tests.support import maintenance
from tests.support import repositories

SEGMENT = 2 << 20
NIGHT = datetime.datetime(2026, 11, 20, 22, tzinfo=datetime.timezone.utc)


class Disks:
    """Files to back up, and their content on each night."""

    def __init__(self, directory, count=4):
        self.directory = directory
        self.directory.mkdir()
        common = repositories.noise(2 * SEGMENT, 9)
        for number in range(count):
            (directory / f'disk{number}').write_bytes(
                common + repositories.noise(SEGMENT, number)
                + bytes(SEGMENT) + repositories.noise(5000, 100 + number))

    def sources(self):
        return [backup_job.Source(path.name, 'disk', str(path), 'raw')
                for path in sorted(self.directory.iterdir())]

    def digests(self):
        return {path.name: digest_of([path.read_bytes()])
                for path in self.directory.iterdir()}


def digest_of(pieces):
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


class Cloud:
    """A repository, disks, and runs of backups."""

    def __init__(self, tmp_path, ranks_=3, **parameters):
        self.path = repositories.create(tmp_path / 'repo', **parameters)
        self.disks = Disks(tmp_path / 'disks')
        self.state = tmp_path / 'state'
        self.spool = tmp_path / 'spool'
        self.settings = backup_job.Settings(
            ranks=ranks_, state=str(self.state), spool=str(self.spool),
            scratch=str(tmp_path / 'scratch'))

    def run(self, night=0, watch=None, sources=None, monkeypatch=None):
        """Back up; `watch` is called with each line of the ranks."""
        with image_repository.Repository(self.path) as repo:
            job = backup_job.Job(repo, self.settings, self.time(night),
                                 lambda done, total, words: None)
            self.notices, self.lost = job.notices, job.lost
            if watch is not None:
                events = backup_job._events

                def watched(process, silence):
                    for event in events(process, silence):
                        watch(process, event)
                        yield event
                monkeypatch.setattr(backup_job, '_events', watched)
            try:
                return {result.name: result for result in job.run(
                    self.disks.sources() if sources is None else sources)}
            finally:
                if monkeypatch is not None:
                    monkeypatch.undo()

    def command(self, *arguments, **options):
        """Return the command line of `backup run` for all disks."""
        return [
            sys.executable, '-m', 'glance_dedup.cli.entry', '--repository',
            str(self.path), 'backup', 'run', '--local',
            str(self.settings.ranks), '--disk-format', 'raw',
            *(word for name in ('state', 'spool', 'scratch') for word in (
                f'--{name}', getattr(self.settings, name))),
            *(source.path for source in self.disks.sources()), *arguments]

    def start(self, *arguments):
        """Start the command, in a session of its own."""
        return subprocess.Popen(
            self.command(*arguments), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True)

    @staticmethod
    def time(night):
        return NIGHT + datetime.timedelta(days=night)

    def backups(self, night=0):
        """Return the digest of each backup of a night, by name."""
        found = {}
        with image_repository.Repository(self.path) as repo:
            for image_id in repo.recipes():
                backup = imageids.of_backup(image_id)
                if backup is not None and backup.time == self.time(night):
                    with repo.open_image(image_id) as image:
                        found[backup.name] = digest_of(image.pieces())
        return found

    def require_clean(self):
        repositories.require_clean(self.path)

    def spooled(self):
        return [str(path) for path in self.spool.rglob('*')
                if path.is_file()]

    def require_nothing_left(self):
        """Require that a run left no spool, digests, lock or upload (B6)."""
        assert not self.spooled()
        assert not [path.name for path in self.state.rglob('*.new')]
        for path in self.state.rglob('*.lock'):
            with open(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.collect()
        assert not list((self.path / 'spool').glob('T*'))
        self.require_clean()

    def collect(self):
        """Free all unreferenced blocks."""
        with (image_repository.Repository(self.path) as repo,
              maintainer_role.Maintainer(repo) as maintainer):
            maintenance.account(maintainer)
            collector.run_once(maintainer, pacing.Pace(), live_share=0)


def ranks_of(processes):
    """Return the process ids of a round's ranks on this host, in order."""
    return [process.pid for process in processes.all]


def kill_all(ranks_):
    """Kill ranks; MPI may have ended some, since another one died."""
    for rank in ranks_:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)


def in_ranks(directory, monkeypatch, program):
    """Have each rank run some lines of Python when it starts."""
    directory.mkdir()
    (directory / 'sitecustomize.py').write_text(
        "import sys\nif 'glance_dedup.backup.rank' in sys.orig_argv:\n"
        + textwrap.indent(program, '    '))
    monkeypatch.setenv('PYTHONPATH', str(directory))


def hold(directory, monkeypatch, stage):
    """Have each rank wait before a stage; return the file that ends this.

    :param stage: the name of a method of :class:`stages.Round`
    """
    proceed = directory / 'proceed'
    in_ranks(directory, monkeypatch, f"""
import os, time
from glance_dedup.backup import stages
run = stages.Round.{stage}
def wait_and_run(*arguments):
    deadline = time.monotonic() + 300
    while not os.path.exists({str(proceed)!r}):
        assert time.monotonic() < deadline, 'nobody let the rank proceed'
        time.sleep(0.01)
    return run(*arguments)
stages.Round.{stage} = wait_and_run
""")
    return proceed


class Hosts:
    """Hosts of a batch job: each has its own name, and its own mounts.

    They share everything else with this host. In place of ssh there is a
    program that makes the namespaces. (``test_batch_hosts.py`` has the real
    one, and hosts with networks of their own.)
    """

    def __init__(self, directory, monkeypatch, names=('one', 'two')):
        if os.geteuid() != 0:
            pytest.skip('mounting needs root')
        self.names = names
        self.directory = directory
        directory.mkdir()
        for name in names:
            (directory / name).touch()
        ssh = directory / 'ssh'
        ssh.write_text(
            '#!/bin/sh\n'
            'while [ "${1#-}" != "$1" ]; do\n'
            '    if [ "$1" = -o ]; then shift; fi\n'
            '    shift\n'
            'done\n'
            'host=$1; shift\n'
            "export SSH_CONNECTION='127.0.0.1 1 127.0.0.1 22'\n"
            "exec unshare --mount --uts sh -ec 'hostname \"$1\"; "
            f'. {directory}/"$1"; shift; exec sh -c "$*"\' sh "$host" "$@"\n')
        ssh.chmod(0o700)
        monkeypatch.setenv('PATH', f'{directory}:{os.environ["PATH"]}')

    def mount(self, name, source, target):
        """Have a host see another directory or file at a path."""
        with open(self.directory / name, 'a') as file:
            file.write(f'mount --bind {source} {target}\n')
