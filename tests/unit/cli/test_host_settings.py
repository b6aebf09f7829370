# SPDX-License-Identifier: Apache-2.0

"""The path of the repository comes from options, a file or a daemon."""

import os
import subprocess
import sys

import pytest

from glance_dedup.cli import host_settings
from tests.support import daemons
from tests.support import repositories
from tests.unit.cli import conftest


@pytest.fixture
def file(created, tmp_path, monkeypatch):
    """The option file of /etc, for the repository; no options are given."""
    path = tmp_path / 'dedupd.conf'
    path.write_text(f'[dedupd]\ndatadir = {created.path}\n'
                    f'filter_dir = {tmp_path}/other-filter\n'
                    f'socket = {tmp_path}/socket\nreserve_mib = 1\n')
    monkeypatch.setattr(host_settings, 'CONFIG_FILE', str(path))
    created.options = []
    return path


def test_the_option_file_says_where_everything_is(created, file, tmp_path):
    image = tmp_path / 'image'
    image.write_bytes(b'content')
    assert created('image', 'put', 'a', image).status == 0
    found = created('repository', 'show', '-f', 'json').json()
    assert found['path'] == str(created.path) and found['images'] == 1
    assert list((tmp_path / 'other-filter').iterdir())
    assert created('index', 'show', '-f', 'json').json()['path'].startswith(
        f'{tmp_path}/other-filter/')


def test_the_command_line_overrides_the_file(created, file, tmp_path):
    assert created('--filter-dir', tmp_path / 'mine', '--config-file', file,
                   'index', 'rebuild').status == 0
    assert list((tmp_path / 'mine').iterdir())
    assert not (tmp_path / 'other-filter').exists()


def test_the_reserve_is_a_size(created, monkeypatch):
    assert created('--reserve', '64M', 'image', 'list').status == 0
    for word, error in (('64', 'no whole number of MiB'), ('x', 'no size')):
        found = created('--reserve', word, 'image', 'list')
        assert found.status == 2 and error in found.err
    monkeypatch.setenv('GLANCE_DEDUP_RESERVE', '64')
    assert 'no whole number of MiB' in created('image', 'list').err


def test_a_repository_that_is_given_needs_no_file(created, file, tmp_path):
    file.write_text('[dedupd]\nreserve_mib = nonsense\n')
    given = ('--repository', created.path, '--filter-dir', tmp_path / 'mine',
             'image', 'list', '-f', 'json')
    assert created(*given).json() == []
    created('image', 'list').refused(str(file), 'reserve_mib')


def test_an_option_that_is_ignored_is_named(created, tmp_path):
    created.options = ['--socket', str(tmp_path / 'none')]
    file = tmp_path / 'given.conf'
    file.write_text(f'[dedupd]\ndatadir = {created.path}\n'
                    f'filter_dir = {tmp_path}/filter\nread_thread = 3\n'
                    '[cache]\nlisten = 127.0.0.1:1\n[other]\nx = 1\n'
                    '[profiler]\nx = 1\n')
    found = created('--config-file', file, 'image', 'list', '-f', 'json')
    assert found.json() == []
    assert found.err == (
        f'glance-dedup: {file}: there is no option read_thread in [dedupd], '
        'and it is ignored; did you mean read_threads?\n')


def test_a_file_that_is_given(created, file, tmp_path):
    other = tmp_path / 'other.conf'
    created('--config-file', other, 'image', 'list').refused(str(other))
    other.write_text(f'[dedupd]\ndatadir = {tmp_path}/else\n')
    created('--config-file', other, '--repository', created.path,
            'image', 'list').refused(str(other), f'{tmp_path}/else')
    created('--config-file', other, 'repository', 'create')
    assert (tmp_path / 'else' / 'repository.json').exists()


@pytest.mark.parametrize('mode, of_directory', [(0, 0o755), (0o644, 0)])
def test_a_file_that_this_user_cannot_read(created, tmp_path, mode,
                                           of_directory):
    """A user that cannot read the file can still name the repository."""
    file = tmp_path / 'etc' / 'dedupd.conf'
    file.parent.mkdir()
    file.write_text(f'[dedupd]\ndatadir = {created.path}\n')
    for path, bits in (file, mode), (file.parent, of_directory):
        os.chown(path, 12345, 12345)
        path.chmod(bits)

    def run(*arguments):
        found = subprocess.run(
            [sys.executable, '-c', 'import sys\n'
             'from glance_dedup.cli import entry\n'
             'from glance_dedup.cli import host_settings\n'
             f'host_settings.CONFIG_FILE = {str(file)!r}\n'
             "host_settings.SOCKET = '/nowhere'\n"
             'sys.exit(entry.main())', *arguments],
            env=created.environment(), capture_output=True, text=True,
            timeout=60, preexec_fn=conftest.become_ordinary)
        return conftest.Result(found.returncode, found.stdout, found.stderr)

    run('--socket', '/else', 'image', 'list').refused('/else')
    run('image', 'list').refused(
        f'{file} cannot be read: Permission denied', '/nowhere')


def test_nothing_says_it(created, monkeypatch, tmp_path):
    monkeypatch.setattr(host_settings, 'CONFIG_FILE', str(tmp_path / 'none'))
    monkeypatch.setattr(host_settings, 'SOCKET', str(tmp_path / 'no-socket'))
    created.options = []
    for name in ('repository check', 'image list', 'status',
                 'task collect'):
        created(*name.split()).refused(
            f'there is no {tmp_path}/none', f'{tmp_path}/no-socket',
            '--repository DIR', '--config-file FILE', '--socket PATH')


def test_a_path_that_is_none(created):
    created.options = []
    created('--repository', 'a\0b', 'image', 'list').refused('NUL')


@pytest.mark.parametrize('given', [(), ('--repository', '/nowhere')])
def test_a_path_that_is_none_in_the_file(created, tmp_path, given):
    created.options = []
    file = tmp_path / 'dedupd.conf'
    file.write_text('[dedupd]\ndatadir = /a\0b\n')
    created(*given, '--config-file', file, 'image', 'list').refused(
        str(file), 'datadir', 'NUL')


def test_a_daemon_says_it(created, monkeypatch, tmp_path):
    monkeypatch.setattr(host_settings, 'CONFIG_FILE', str(tmp_path / 'none'))
    created.options = []
    with daemons.running(created.path) as daemon:
        for given in (['--socket', daemon.socket], []):
            monkeypatch.setattr(host_settings, 'SOCKET', str(daemon.socket))
            found = created(*given, 'repository', 'show', '-f', 'json').json()
            assert found['path'] == str(created.path)
            status = created(*given, 'status', '-f', 'json').json()
            assert status['daemon']['role'] == 'maintainer'


@pytest.mark.parametrize('index', ['filter', 'lmdb'])
def test_a_daemon_says_what_finds_duplicates(created, monkeypatch, tmp_path,
                                             index):
    monkeypatch.setattr(host_settings, 'CONFIG_FILE', str(tmp_path / 'none'))
    image = tmp_path / 'image'
    image.write_bytes(repositories.noise(1 << 20))
    created.options = []
    place = tmp_path / 'daemon'
    with daemons.running(created.path, filter_dir=place, index=index,
                         index_dir=place) as daemon:
        socket = '--socket', daemon.socket
        stored = created(*socket, 'image', 'put', 'one', image)
        assert stored.status == 0, stored.err
        found = created(*socket, 'index', 'show', '-f', 'json').json()
        assert found['index'] == index
        assert found['path'].startswith(str(place))
        assert found['error'] is None
        assert index == 'lmdb' or found['filter_hints'] == 256
        other = created(*socket, '--index', 'dtb', '--index-dir',
                        tmp_path / 'other', 'index', 'show', '-f', 'json')
        assert other.json()['index'] == 'dtb'
        assert created(*socket, '--filter-dir', tmp_path / 'other', '--index',
                       'filter', 'index', 'show', '-f', 'json'
                       ).json()['path'].startswith(str(tmp_path / 'other'))
