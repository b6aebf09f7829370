# SPDX-License-Identifier: Apache-2.0

"""The upgrade to another major version, and the lock of each version."""

import contextlib
import os
import signal
import stat

import pytest

from glance_dedup.base import exceptions
from glance_dedup.repository import layout
from glance_dedup.repository import parameters
from glance_dedup.repository import upgrade
from tests.support import daemons
from tests.support import maintenance
from tests.support import repositories
from tests.support import stores
from tests.unit.cli import conftest

pytest_plugins = ['tests.support.maintainer_fixtures']
configure = stores.configure

DATA = maintenance.content(1, 2)
OLD, NEW = (repositories.VERSION_BYTE + major for major in (1, 2))


@pytest.fixture
def cli(tmp_path, path, capfd):
    return conftest.Cli(tmp_path, capfd)


@pytest.fixture
def filled(path):
    with repositories.open_repository(path) as repo:
        repositories.put(repo, 'image', DATA)
    return path


def to_volumes(path):
    with repositories.open_repository(path) as repo:
        return upgrade.upgrade(repo, lambda *arguments: None, volumes=True)


def held(path):
    """What is held of the old version's byte, and of the new one's."""
    return tuple(repositories.group_lock_held(path, byte)
                 for byte in (OLD, NEW))


def contents(path):
    """Of all files; a maintainer may make the empty one with its lock."""
    return {str(file.relative_to(path)): file.read_bytes()
            for file in path.rglob('*')
            if file.is_file() and file.parent.name != 'locks'}


def need_version(path, major, minor):
    with repositories.open_repository(path) as repo:
        assert upgrade.version_of(repo) == (major, minor)
        assert repositories.read_all(repo, 'image') == DATA
    repositories.need_clean(path)


# -- making one ---------------------------------------------------------------

def test_new_ones_have_no_volumes_by_default(path, repo):
    assert upgrade.version_of(repo) == parameters.DEFAULT == (1, 1)
    assert not repo.has_volumes
    assert not (path / 'volumes').exists()
    before = contents(path)
    with pytest.raises(exceptions.VersionError,
                       match=r'1\.1, which has no volumes.*--volumes'):
        repo.need_volumes()
    assert contents(path) == before


@pytest.mark.parametrize('shared, mode', [(False, 0o700), (True, 0o2770)])
def test_a_new_one_with_volumes(tmp_path, monkeypatch, shared, mode):
    path = repositories.create(tmp_path / 'new', volumes=True,
                               group_access=shared)
    assert stat.S_IMODE((path / 'volumes').stat().st_mode) == mode
    with repositories.open_repository(path) as repo:
        assert upgrade.version_of(repo) == parameters.WITH_VOLUMES == (2, 0)
        assert repo.has_volumes
        assert held(path) == (None, 'shared')
        synced = []
        monkeypatch.setattr(repo, 'path', str(path))
        monkeypatch.setattr('glance_dedup.base.files.sync_directory',
                            synced.append)
        repo.need_volumes()
        assert synced == [str(path)]
    assert held(path) == (None, None)
    repositories.need_clean(path)


def test_creating_again_after_a_kill(tmp_path):
    path = tmp_path / 'new'
    (path / 'volumes').mkdir(parents=True)
    repositories.create(path)
    repositories.need_clean(path)
    (path / 'repository.json').unlink()
    (path / 'volumes' / 'disk').mkdir()
    with pytest.raises(exceptions.InvalidParameter,
                       match='lost its repository.json: volumes/'):
        repositories.create(path, volumes=True)


def test_the_commands(filled, cli, tmp_path):
    new = tmp_path / 'other'
    cli.options[cli.options.index('--repository') + 1] = str(new)
    made = cli('repository', 'create', '--volumes', '-f', 'json').json()
    assert made['format'] == '2.0'
    assert (new / 'volumes').is_dir()
    cli.options[cli.options.index('--repository') + 1] = str(filled)
    command = 'repository', 'upgrade', '-f', 'json'
    assert cli(*command).json()['result'] == 'nothing to do'
    found = cli(*command, '--volumes', '--dry-run').json()
    assert found['result'] == 'to be done'
    assert found['format'] == '1.1'
    assert not (filled / 'volumes').exists()
    with repositories.open_repository(filled):
        before = contents(filled)
        cli(*command, '--volumes').refused(
            str(filled), 'open in another program', 'glance-api, dedupd',
            'on all hosts')
        assert contents(filled) == before
    found = cli(*command, '--volumes').json()
    assert found['result'] == 'done'
    assert (found['format_before'], found['format']) == ('1.1', '2.0')
    for options in ((), ('--volumes',)):
        found = cli(*command, *options).json()
        assert found['result'] == 'nothing to do'
        assert found['format'] == '2.0'
    need_version(filled, 2, 0)


def test_all_programs_use_one_with_volumes(tmp_path, configure, cli):
    path = repositories.create(tmp_path / 'other', volumes=True)
    cli.options[cli.options.index('--repository') + 1] = str(path)
    configure(one={'dedup_store_datadir': path})
    assert stores.get(stores.add(DATA)[0]) == DATA
    assert held(path) == (None, 'shared')
    with daemons.running(path) as daemon, daemon.client() as client:
        assert client.status()['repository']
    for command in ('collect', 'repository check', 'space',
                    'repository rebuild-catalog'):
        assert cli(*command.split()).status == 0, command


# -- the way there ------------------------------------------------------------

def test_steps_from_the_first_version(filled):
    repositories.edit_parameters(filled, minor=0)
    assert [step.after for step in to_volumes(filled)] == [(1, 1), (2, 0)]
    need_version(filled, 2, 0)
    assert to_volumes(filled) == []


def test_steps_to_lists(filled):
    """They lead over the version with volumes, and may begin there."""
    with repositories.open_repository(filled) as repo:
        assert not repo.has_lists
        done = upgrade.upgrade(repo, lambda *arguments: None, similar=True)
        assert [step.after for step in done] == [(2, 0), (3, 0)]
        assert repo.has_lists and repo.has_volumes
        assert repositories.group_lock_held(
            filled, repositories.VERSION_BYTE + 3) == 'shared'
        assert held(filled) == (None, None)
    need_version(filled, 3, 0)
    for asked in ({}, {'volumes': True}, {'similar': True}):
        with repositories.open_repository(filled) as repo:
            assert upgrade.plan(repo, **asked) == []
    assert (filled / 'volumes').is_dir()


def test_lists_after_volumes(filled):
    to_volumes(filled)
    with repositories.open_repository(filled) as repo:
        done = upgrade.upgrade(repo, lambda *arguments: None, similar=True)
        assert [step.after for step in done] == [(3, 0)]
    need_version(filled, 3, 0)


@pytest.mark.parametrize('option, major, directories', [
    ('--similar', 3, ['volumes']), ('--cold', 4, ['slices', 'volumes'])])
def test_the_commands_for_later_versions(filled, cli, tmp_path, option, major,
                                         directories):
    version = f'{major}.0'
    new = tmp_path / 'other'
    cli.options[cli.options.index('--repository') + 1] = str(new)
    made = cli('repository', 'create', option, '-f', 'json').json()
    assert made['format'] == version
    repositories.need_clean(new)
    cli.options[cli.options.index('--repository') + 1] = str(filled)
    command = 'repository', 'upgrade', option, '-f', 'json'
    found = cli(*command, '--dry-run').json()
    assert (found['result'], found['format']) == ('to be done', '1.1')
    with repositories.open_repository(filled):
        cli(*command).refused('open in another program')
    found = cli(*command).json()
    assert (found['format_before'], found['format']) == ('1.1', version)
    assert found['format_of_program'] == '4.0'
    assert cli(*command).json()['result'] == 'nothing to do'
    need_version(filled, major, 0)
    for path in (new, filled):
        assert [name for name in ('slices', 'volumes')
                if (path / name).is_dir()] == directories


def test_from_lists_to_cold_groups(tmp_path):
    """As whoever has 3.0 already; and a directory of slices that is gone."""
    path = repositories.create(tmp_path / 'with-lists', similar=True)
    with repositories.open_repository(path) as repo:
        repositories.put(repo, 'image', DATA)
        assert [step.after for step in upgrade.plan(repo, cold=True)] == [
            parameters.WITH_COLD]
        upgrade.upgrade(repo, lambda *arguments: None, cold=True)
    need_version(path, 4, 0)
    (path / 'slices').rmdir()
    need_version(path, 4, 0)
    repositories.open_repository(path).close()
    assert not list((path / 'slices').iterdir())


def test_what_the_handle_holds(filled):
    with repositories.open_repository(filled) as repo:
        assert held(filled) == ('shared', None)
        seen = []

        def progress(done, total, what):
            seen.append((what, held(filled)))
        upgrade.upgrade(repo, progress, volumes=True)
        assert held(filled) == (None, 'shared')
        assert repo.has_volumes
        repositories.put(repo, 'other', DATA)
    assert seen[0] == ('making the directory of volumes', ('shared', None))
    assert held(filled) == (None, None)


def test_the_old_version_is_kept_out_until_the_new_one_is_durable(
        filled, monkeypatch):
    seen, opened = [], []
    fsync = os.fsync

    def seen_fsync(fd):
        fsync(fd)
        seen.append(held(filled))
        try:
            with repositories.open_repository(filled) as other:
                opened.append(upgrade.version_of(other))
        except exceptions.BusyError as e:
            opened.append(str(e))
    with repositories.open_repository(filled) as repo:
        monkeypatch.setattr(os, 'fsync', seen_fsync)
        upgrade.upgrade(repo, lambda *arguments: None, volumes=True)
    # The directory, the new file, its name.
    assert seen == [('exclusive', None)] * 3
    assert ['is being upgraded' in str(words) for words in opened] == [
        True, True, False]
    assert opened[2] == (2, 0)


def test_an_unknown_minor_version_has_no_way(filled, cli):
    repositories.edit_parameters(filled, minor=7)
    before = contents(filled)
    for options in ((), ('--dry-run',)):
        cli('repository', 'upgrade', '--volumes', *options).refused(
            '1.7', 'knows no way to 2.0')
    assert contents(filled) == before


# -- others at work -----------------------------------------------------------

def need_refused(path):
    before = contents(path)
    with pytest.raises(upgrade.InUseError, match='Stop glance-api, dedupd'):
        to_volumes(path)
    assert contents(path) == before
    assert not (path / 'volumes').exists()


def test_a_handle_of_this_process(filled):
    with repositories.open_repository(filled) as other:
        need_refused(filled)
        assert repositories.read_all(other, 'image') == DATA
        assert held(filled) == ('shared', None)
    to_volumes(filled)
    need_version(filled, 2, 0)


def test_an_open_image(filled):
    """It can be read although its repository was closed."""
    with contextlib.ExitStack() as stack:
        with repositories.open_repository(filled) as other:
            image = stack.enter_context(other.open_image('image'))
        need_refused(filled)
        assert image.read() == DATA
    to_volumes(filled)


@pytest.fixture
def other_process(filled):
    """The process id of one that has the repository open."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            with repositories.open_repository(filled):
                os.write(writing, b'x')
                signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    assert os.read(reading, 1) == b'x'
    os.close(reading)
    yield pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_another_process(filled, other_process):
    need_refused(filled)
    os.kill(other_process, signal.SIGSTOP)
    need_refused(filled)
    os.kill(other_process, signal.SIGKILL)
    os.waitpid(other_process, 0)
    to_volumes(filled)
    need_version(filled, 2, 0)


def test_daemons_that_do_not_maintain(filled, cli):
    """The first one has the maintainer's lock, the other only its byte."""
    with daemons.running(filled):
        with pytest.raises(exceptions.BusyError, match='another maintainer'):
            to_volumes(filled)
    to_volumes(filled)
    need_version(filled, 2, 0)


def test_a_minor_upgrade_disturbs_nobody(filled):
    repositories.edit_parameters(filled, minor=0)
    with repositories.open_repository(filled) as other:
        with repositories.open_repository(filled) as repo:
            done = upgrade.upgrade(repo, lambda *arguments: None)
        assert [step.after for step in done] == [(1, 1)]
        assert repositories.read_all(other, 'image') == DATA
        # The way to 2.0 ends there, too, while somebody is in.
        repositories.edit_parameters(filled, minor=0)
        with pytest.raises(upgrade.InUseError):
            to_volumes(filled)
    need_version(filled, 1, 1)


def test_opening_does_not_wait_for_an_upgrade(filled):
    with repositories.holding(filled / 'locks' / 'groups', OLD):
        with pytest.raises(exceptions.BusyError, match='is being upgraded'):
            repositories.open_repository(filled)
    need_version(filled, 1, 1)


def test_upgraded_while_it_is_opened(filled, monkeypatch):
    """Between the first reading of repository.json and the lock."""
    real = layout.read_parameters
    monkeypatch.setattr(layout, 'read_parameters',
                        lambda *arguments: upgrade_after(*arguments))

    def upgrade_after(*arguments):
        monkeypatch.setattr(layout, 'read_parameters', real)
        found = real(*arguments)
        to_volumes(filled)
        return found
    with repositories.open_repository(filled) as repo:
        assert repo.has_volumes
        assert held(filled) == (None, 'shared')
        assert repositories.read_all(repo, 'image') == DATA


def test_unreadable_when_it_is_read_again(filled, monkeypatch):
    """The handle that was open is closed."""
    real = layout.read_parameters
    found = [real(str(filled))]

    def read(*arguments):
        if found:
            return found.pop()
        raise exceptions.DamagedError('spoilt')
    monkeypatch.setattr(layout, 'read_parameters', read)
    with pytest.raises(exceptions.DamagedError, match='spoilt') as caught:
        repositories.open_repository(filled)
    # Though the traceback still has it.
    assert caught.tb is not None
    assert held(filled) == (None, None)


def test_a_version_that_never_settles(filled, monkeypatch):
    real = layout.read_parameters
    read = []

    def flip(*arguments):
        read.append(1)
        fields = {**vars(real(*arguments)), 'major': 1 + len(read) % 2}
        return parameters.Parameters(**fields)
    monkeypatch.setattr(layout, 'read_parameters', flip)
    with pytest.raises(exceptions.BusyError, match='changed each time'):
        repositories.open_repository(filled)
    assert held(filled) == (None, None)


def test_upgraded_while_a_child_has_not_opened_its_own_yet(filled):
    """A child neither keeps the parent's lock nor its version."""
    repo = repositories.open_repository(filled)
    reading, writing = os.pipe()

    def child():
        os.read(reading, 1)
        assert repositories.read_all(repo, 'image') == DATA
        return repo.has_volumes, held(filled)
    forked = repositories.fork_child(child)
    repo.close()
    # The child has closed what it inherited before it runs anything.
    repositories.eventually(lambda: held(filled) == (None, None))
    to_volumes(filled)
    os.write(writing, b'x')
    assert repositories.wait_for_child(forked) == (True, (None, 'shared'))
    os.close(reading)
    os.close(writing)


def test_a_child_that_ends_leaves_the_parents_lock(filled):
    with repositories.open_repository(filled):
        repositories.in_child(lambda: None)
        assert held(filled) == ('shared', None)
        need_refused(filled)


# -- interrupted --------------------------------------------------------------

CALLS = 'mkdir', 'open', 'fsync', 'rename', 'fchmod'


def interrupt(monkeypatch, number, how):
    """Call `how` in place of the `number`-th system call that changes."""
    count = [0]

    def watched(name, real):
        def call(*arguments, **keywords):
            count[0] += 1
            if count[0] == number:
                how(name)
            return real(*arguments, **keywords)
        return call
    for name in CALLS:
        monkeypatch.setattr(os, name, watched(name, getattr(os, name)))
    return count


def test_killed_at_each_call(filled, monkeypatch):
    """It is of the one version or the other, and goes on from there."""
    backup = (filled / 'repository.json').read_bytes()
    versions = []
    for number in range(1, 100):
        def child():
            repo = repositories.open_repository(filled)
            interrupt(monkeypatch, number,
                      lambda name: os.kill(os.getpid(), signal.SIGKILL))
            upgrade.upgrade(repo, lambda *arguments: None, volumes=True)
        try:
            repositories.in_child(child)
            break
        except repositories.ChildFailed:
            pass
        assert held(filled) == (None, None)
        with repositories.open_repository(filled) as repo:
            versions.append(upgrade.version_of(repo))
            assert repositories.read_all(repo, 'image') == DATA
            upgrade.upgrade(repo, lambda *arguments: None, volumes=True)
        need_version(filled, 2, 0)
        (filled / 'repository.json').write_bytes(backup)
        (filled / 'volumes').rmdir()
    assert versions == sorted(versions)
    assert set(versions) == {(1, 1), (2, 0)}
    need_version(filled, 2, 0)


def test_failed_at_each_call(filled, monkeypatch):
    """The handle goes on, and holds the byte of the version there is."""
    def fail(name):
        raise OSError(5, os.strerror(5))
    backup = (filled / 'repository.json').read_bytes()
    versions = []
    for number in range(1, 100):
        with repositories.open_repository(filled) as repo:
            with monkeypatch.context() as patch:
                count = interrupt(patch, number, fail)
                with contextlib.suppress(exceptions.StorageError):
                    upgrade.upgrade(repo, lambda *arguments: None,
                                    volumes=True)
            version = upgrade.version_of(repo)
            assert held(filled) == (
                ('shared', None) if version == (1, 1) else (None, 'shared'))
            assert repositories.read_all(repo, 'image') == DATA
        need_version(filled, *version)
        versions.append(version)
        (filled / 'repository.json').write_bytes(backup)
        if (filled / 'volumes').exists():
            (filled / 'volumes').rmdir()
        if count[0] < number:
            break
    assert versions == sorted(versions)
    assert versions.count((2, 0)) >= 2
