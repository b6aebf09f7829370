# SPDX-License-Identifier: Apache-2.0

"""Upgrading, with steps that only tests know."""

import json
import os
import stat

import pytest

from glance_dedup.base import exceptions
from glance_dedup.repository import parameters
from glance_dedup.repository import upgrade
from tests.support import daemons
from tests.support import maintenance
from tests.support import repositories
from tests.unit.cli import conftest

pytest_plugins = ['tests.support.maintainer_fixtures']

DATA = maintenance.content(1, 2)


@pytest.fixture
def path(path):
    """One of the first version."""
    repositories.edit_parameters(path, minor=0)
    return path


@pytest.fixture
def cli(tmp_path, path, capfd):
    return conftest.Cli(tmp_path, capfd)


class Killed(BaseException):
    """As if the process ended here."""


@pytest.fixture
def steps(monkeypatch):
    steps = Steps()
    monkeypatch.setattr(upgrade, 'STEPS', [steps.step(1), steps.step(2)])
    return steps


class Steps:
    """Two steps, each of which leaves a file."""

    def __init__(self):
        self.ran = []
        self.kill = None

    def step(self, minor):
        def run(repo, progress):
            self.ran.append(minor)
            progress(0, 1, f'doing {minor}')
            with open(os.path.join(repo.path, 'quarantine', f'step-{minor}'),
                      'a') as f:
                f.write('x')
            if self.kill == minor:
                raise Killed
        return upgrade.Step((1, minor - 1), (1, minor), f'step {minor}', run)


def version(path):
    fields = json.loads((path / 'repository.json').read_text())
    return fields['major'], fields['minor']


def no_progress(done, total, what):
    pass


def test_the_steps_lead_to_the_newest_version():
    version = upgrade.STEPS[0].before
    ends = []
    for step in upgrade.STEPS:
        assert step.before == version
        assert step.after > step.before
        if step.is_major:
            ends.append(version)
        version = step.after
    assert version == parameters.WITH_COLD == parameters.NEWEST
    # Without being asked for, no step locks programs out that the default
    # would let in.
    assert ends == [parameters.DEFAULT, parameters.WITH_VOLUMES,
                    parameters.WITH_LISTS]


def test_to_this_programs_version(path, repo):
    repositories.put(repo, 'image', DATA)
    assert [step.after for step in upgrade.plan(repo)] == [(1, 1)]
    upgrade.upgrade(repo, no_progress)
    assert version(path) == parameters.DEFAULT
    with repositories.open_repository(path) as again:
        assert repositories.read_all(again, 'image') == DATA
    repositories.need_clean(path)


def test_nothing_to_do(path):
    repositories.edit_parameters(path, minor=parameters.DEFAULT[1])
    with repositories.open_repository(path) as repo:
        need_nothing(path, repo)


def need_nothing(path, repo):
    before = (path / 'repository.json').read_bytes()
    assert upgrade.plan(repo) == []
    assert upgrade.upgrade(repo, no_progress) == []
    assert (path / 'repository.json').read_bytes() == before


def test_all_steps(path, repo, steps):
    repositories.put(repo, 'image', DATA)
    told = []
    before = json.loads((path / 'repository.json').read_text())
    mode = stat.S_IMODE((path / 'repository.json').stat().st_mode)
    done = upgrade.upgrade(repo, lambda *a: told.append(a))
    assert [step.what for step in done] == ['step 1', 'step 2']
    assert told == [(0, 2, 'step 1'), (0, 1, 'doing 1'), (1, 2, 'step 2'),
                    (0, 1, 'doing 2'), (2, 2, 'upgrading')]
    assert version(path) == (1, 2)
    after = json.loads((path / 'repository.json').read_text())
    changed = {key for key in after if after[key] != before[key]}
    assert changed == {'minor', 'checksum'}
    assert stat.S_IMODE((path / 'repository.json').stat().st_mode) == mode
    assert upgrade.upgrade(repo, no_progress) == []
    assert steps.ran == [1, 2]
    with repositories.open_repository(path) as again:
        assert upgrade.version_of(again) == (1, 2)
        assert repositories.read_all(again, 'image') == DATA
    (path / 'quarantine' / 'step-1').unlink()
    (path / 'quarantine' / 'step-2').unlink()
    repositories.need_clean(path)


def test_from_the_middle(path, repo, steps):
    repositories.edit_parameters(path, minor=1)
    with repositories.open_repository(path) as repo:
        assert [s.what for s in upgrade.plan(repo)] == ['step 2']
        upgrade.upgrade(repo, no_progress)
    assert steps.ran == [2]
    assert version(path) == (1, 2)


@pytest.mark.parametrize('number', [1, 2])
def test_killed_in_a_step(path, steps, number):
    steps.kill = number
    with repositories.open_repository(path) as repo:
        with pytest.raises(Killed):
            upgrade.upgrade(repo, no_progress)
    assert version(path) == (1, number - 1)
    steps.kill = None
    with repositories.open_repository(path) as repo:
        upgrade.upgrade(repo, no_progress)
    assert steps.ran == ([1, 1, 2] if number == 1 else [1, 2, 2])
    assert version(path) == (1, 2)


def test_order(path, repo, monkeypatch):
    """The new file is durable before it takes the name, and then the name."""
    calls = []
    inodes = {}
    fsync, rename = os.fsync, os.rename

    def seen_fsync(fd):
        status = os.fstat(fd)
        inodes[status.st_ino] = len(calls)
        calls.append('directory' if stat.S_ISDIR(status.st_mode) else 'file')
        fsync(fd)

    def seen_rename(source, target):
        assert inodes.get(os.stat(source).st_ino) is not None
        calls.append('rename')
        rename(source, target)
    monkeypatch.setattr(os, 'fsync', seen_fsync)
    monkeypatch.setattr(os, 'rename', seen_rename)
    monkeypatch.setattr(upgrade, 'STEPS', [upgrade.Step(
        (1, 0), (1, 1), 'step', lambda *a: calls.append('step'))])
    upgrade.upgrade(repo, no_progress)
    assert calls == ['step', 'file', 'rename', 'directory']


@pytest.mark.parametrize('name', ['fsync', 'rename'])
def test_what_fails_leaves_the_old_version(path, repo, steps, monkeypatch,
                                           name):
    def fail(*arguments):
        raise OSError(5, os.strerror(5))
    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        with pytest.raises(exceptions.StorageError, match='repository.json'):
            upgrade.upgrade(repo, no_progress)
    assert version(path) == (1, 0)
    assert [n for n in os.listdir(path) if n.startswith('.')] == []


def test_leftovers_of_a_killed_upgrade_go(path, repo, steps):
    (path / f'.{"a" * 16}.new').write_bytes(b'half')
    (path / '.other').write_bytes(b'precious')
    upgrade.upgrade(repo, no_progress)
    assert [n for n in os.listdir(path) if n.startswith('.')] == ['.other']


def test_it_needs_the_maintainers_lock(path, repo, steps, other):
    with maintenance.maintaining(other):
        with pytest.raises(exceptions.BusyError, match='another maintainer'):
            upgrade.upgrade(repo, no_progress)
        assert upgrade.plan(repo) != []
    assert steps.ran == []
    assert version(path) == (1, 0)
    # And gives it back.
    upgrade.upgrade(repo, no_progress)
    maintenance.maintainer_module.Maintainer(other).close()


def test_two_upgrades(path, repo, steps, other):
    """The second one looks again when it has the lock."""
    upgrade.upgrade(repo, no_progress)
    assert upgrade.version_of(other) == (1, 0)
    assert upgrade.upgrade(other, no_progress) == []
    assert steps.ran == [1, 2]


# -- the command --------------------------------------------------------------

def test_command_with_nothing_to_do(path, cli):
    repositories.edit_parameters(path, minor=parameters.DEFAULT[1])
    for options in ((), ('--dry-run',)):
        found = cli('repository', 'upgrade', '-f', 'json', *options)
        assert found.status == 0, found.err
        assert found.json() == {
            'path': str(path), 'format': '1.1', 'format_before': '1.1',
            'format_of_program': '4.0', 'steps': [],
            'result': 'nothing to do'}
        assert found.err == ''


def test_command(path, cli, steps):
    found = cli('repository', 'upgrade', '-f', 'json', '--dry-run').json()
    assert found['result'] == 'to be done'
    assert found['steps'] == ['step 1', 'step 2']
    assert found['format'] == found['format_before'] == '1.0'
    assert steps.ran == []
    with repositories.open_repository(path) as repo:
        with maintenance.maintaining(repo):
            cli('repository', 'upgrade').refused('another maintainer')
    found = cli('repository', 'upgrade', '-f', 'json').json()
    assert found['result'] == 'done'
    assert found['format_before'] == '1.0'
    assert found['format'] == '1.2'
    assert steps.ran == [1, 2]


def test_command_says_which_daemon_has_the_lock(path, cli, steps):
    with daemons.running(path) as daemon:
        cli.options[cli.options.index('--socket') + 1] = daemon.socket
        with daemon.client() as client:
            pid = client.status()['daemon']['pid']
        cli('repository', 'upgrade').refused(
            'another maintainer', f'dedupd, process {pid} on',
            'stop it first')
    assert cli('repository', 'upgrade').status == 0


def test_newer_versions_are_refused(path, cli):
    repositories.edit_parameters(path, major=5)
    cli('repository', 'upgrade').refused('repository.json', 'version 5',
                                         'up to 4')


def test_newer_minor_versions_are_left(path, cli):
    repositories.edit_parameters(path, minor=7)
    found = cli('repository', 'upgrade', '-f', 'json').json()
    assert found['format'] == '1.7'
    assert found['result'] == 'nothing to do'
    assert version(path) == (1, 7)
