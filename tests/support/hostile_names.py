# SPDX-License-Identifier: Apache-2.0

"""Puts wrong files into a repository, and uses it.

  python -m tests.support.hostile_names DIRECTORY CASE...

A case is ``NAME=KIND``: one of NAMES, or DIRECTORIES, is taken out, and
something of a KIND put in its place. Then every operation on a repository
runs. Each result must be success or an error of the package that names a file
of the repository, in finite time; and the victim must be unchanged. Each case
gives a line: ``ok``, or the problem.

A new file of the repository must be added to NAMES.
"""

import os
import pathlib
import shutil
import socket
import stat
import sys
import traceback

from dedupd.tasks import collector
from dedupd.tasks import findings
from dedupd.tasks import merger
from dedupd.tasks import recompressor
from dedupd.tasks import scrubber
from dedupd.tasks import sharescrub
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.check import checker
from glance_dedup.maintenance import helper_daemon
from glance_dedup.maintenance import live_hosts
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import openvolumes
from glance_dedup.repository import repo_parameters
from tests.support import maintenance
from tests.support import repositories

#: These belong to another user, if there can be one.
FOREIGN = 65531

NAMES = ('repository.json', 'key', 'fence', 'catalog-reserve',
         'catalog-reserve-1', 'locks/groups', 'locks/images',
         'locks/maintainer', 'locks/hosts', 'locks/index', 'helpers/0.json',
         'index/cursors', 'index/shard', 'groups/00000001', 'groups/00000002',
         'images/one', 'spool/T', 'spool/D', 'spares/00000001',
         'quarantine/catalog-0', 'catalog/CURRENT', 'catalog/LOCK',
         'catalog/LOG', 'catalog/MANIFEST', 'catalog/NEXT',
         'filter', 'filter.new', 'volumes/disk/lock', 'volumes/disk/journal')
DIRECTORIES = ('groups', 'images', 'spool', 'locks', 'quarantine', 'spares',
               'catalog', 'volumes', 'volumes/disk', 'helpers', 'index')
KINDS = ('link', 'dangling', 'hard-link', 'fifo', 'directory', 'socket',
         'device')


def make_template(path):
    repositories.create(path, block_size=512, group_slots=64)
    with repositories.open_repository(path, filter_dir=f'{path}-f') as repo:
        repositories.put(repo, 'one', repositories.noise(60000, 1))
        repositories.put(repo, 'two', repositories.noise(60000, 2))
        repositories.put(repo, 'gone', repositories.noise(40000, 3))
        with maintainer_role.Maintainer(repo) as maintainer:
            maintenance.account(maintainer)
            merger.run_once(maintainer, pacing.Pace())
        help_maintaining(repo)
        repositories.put(repo, 'three', b'not counted')
        repo.delete('gone')
        openvolumes.create(repo, 'disk', 1 << 20)
    (path / 'spares').mkdir(mode=0o700)


def help_maintaining(repo):
    """Run the tasks of a daemon that is no maintainer."""
    with (live_hosts.Hosts(repo.path) as hosts,
          helper_daemon.Helper(repo, hosts) as helper):
        sharescrub.run_once(helper, pacing.Pace(), lambda group: True)
        recompressor.run_once(helper, pacing.Pace(), 'zstd')


def place_of(path, name, repository_id):
    """Return the path of a case's name."""
    if name.startswith('filter'):
        return path.parent / 'f' / f'{repository_id}.{name}'
    if name == 'spool/T':
        return path / 'spool' / f'T-{"7" * 32}'
    if name == 'spool/D':
        return next((path / 'spool').glob('D-*'))
    if name == 'volumes/disk/journal':
        return next((path / 'volumes' / 'disk').glob('journal-*'))
    if path.joinpath(name).parent == path / 'index':
        return next(path.glob(f'{name}-*'))
    if name == 'catalog/MANIFEST':
        return next((path / 'catalog').glob('MANIFEST-*'))
    if name == 'catalog/NEXT':
        # LevelDB makes this file when it is opened.
        last = max(int(''.join(filter(str.isdigit, p.name)) or 0)
                   for p in (path / 'catalog').iterdir())
        return path / 'catalog' / f'MANIFEST-{last + 2:06}'
    return path / name


def plant(place, kind, victim):
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    elif os.path.lexists(place):
        place.unlink()
    if kind == 'link':
        place.symlink_to(victim)
    elif kind == 'dangling':
        place.symlink_to(victim.parent / 'nowhere')
    elif kind == 'hard-link':
        os.link(victim, place)
    elif kind == 'fifo':
        os.mkfifo(place, 0o600)
    elif kind == 'directory':
        place.mkdir()
    elif kind == 'socket':
        here = os.getcwd()
        os.chdir(place.parent)      # its path may be too long
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(place.name)
        os.chdir(here)
    else:
        os.mknod(place, stat.S_IFCHR | 0o600, os.makedev(1, 5))


def state(path):
    """Return the state of a victim that must not change."""
    status = os.lstat(path)
    names = sorted(os.listdir(path)) if path.is_dir() else []
    return (status.st_mode, status.st_uid, status.st_size, status.st_mtime_ns,
            path.read_bytes() if path.is_file() else names)


class Uses:
    """Runs all operations, and collects their errors."""

    def __init__(self, path):
        self.path = path
        self.errors = []

    def attempt(self, function, *arguments):
        try:
            return function(*arguments)
        except exceptions.RepositoryError as e:
            self.errors.append(f'{function.__name__}: {e}')

    def all(self):
        self.attempt(self.with_repository)
        self.attempt(checker.check, self.path)

    def with_repository(self):
        with repositories.open_repository(
                self.path, filter_dir=str(self.path.parent / 'f')) as repo:
            for image_id in ('one', 'two'):
                self.attempt(self.read, repo, image_id)
            self.attempt(repositories.put, repo, 'new',
                         repositories.noise(90000, 4))
            self.attempt(repo.delete, 'two')
            self.attempt(self.use_volume, repo)
            self.attempt(help_maintaining, repo)
            self.attempt(self.maintain, repo)
            self.attempt(repo.delete, 'one')
            self.attempt(openvolumes.delete, repo, 'disk')
            self.attempt(repo.rebuild_filter)

    def read(self, repo, image_id):
        data = repositories.noise(60000, 1 if image_id == 'one' else 2)
        assert repositories.read_all(repo, image_id) == data, (
            f'other bytes of {image_id} came')

    def use_volume(self, repo):
        with openvolumes.open_volume(repo, 'disk') as volume:
            volume.write(repositories.noise(5000, 1), 100)
            volume.checkpoint()
            assert volume.read(5000, 100) == repositories.noise(5000, 1)

    def maintain(self, repo):
        with maintainer_role.Maintainer(repo) as maintainer:
            self.errors += maintainer.warnings
            self.attempt(maintenance.account, maintainer)
            self.attempt(findings.take, maintainer, pacing.Pace())
            self.attempt(merger.run_once, maintainer, pacing.Pace())
            self.attempt(collector.run_once, maintainer, pacing.Pace())
            self.attempt(scrubber.run_once, maintainer, pacing.Pace(), True)
            self.attempt(recompressor.run_once, maintainer, pacing.Pace(),
                         'zstd')
            maintainer.reserve.keep()


def examine(directory, case):
    name, kind = case.split('=')
    path = directory / 'r'
    victim = directory / 'victim'
    for old in (path, directory / 'f', victim):
        if old.is_dir():
            shutil.rmtree(old)
        elif old.exists():
            old.unlink()
    shutil.copytree(directory / 'template', path)
    (directory / 'f').mkdir(mode=0o700)
    if name in DIRECTORIES:
        shutil.copytree(path / name, victim)
    else:
        victim.write_bytes(b'foreign' * 1000)
        victim.chmod(0o640)
        if os.geteuid() == 0:
            os.chown(victim, FOREIGN, FOREIGN)
    repository_id = repo_parameters.Parameters.from_json(
        (path / 'repository.json').read_bytes(), '').repository_id
    before = state(victim)
    plant(place_of(path, name, repository_id), kind, victim)
    uses = Uses(path)
    uses.all()
    if state(victim) != before:
        return f'the victim was {before[:4]} and is {state(victim)[:4]}'
    if os.path.lexists(directory / 'nowhere'):
        return 'the target of a dangling link was made'
    for error in uses.errors:
        if not any(word in error for word in (
                str(path), 'groups', 'images', 'spool', 'locks', 'fence',
                'key', 'spares', 'quarantine', 'image', 'volume',
                'helpers', 'index')):
            return f'names no file: {error}'
    return 'ok'


def main(directory, *cases):
    directory = pathlib.Path(directory)
    make_template(directory / 'template')
    for case in cases:
        try:
            answer = examine(directory, case)
        except Exception:
            answer = traceback.format_exc().replace('\n', ' | ')
        print(f'{case}: {answer}', flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
