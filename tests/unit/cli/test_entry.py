# SPDX-License-Identifier: Apache-2.0

import io
import json
import re
import signal
import subprocess
import sys

import pytest

from glance_dedup.base import exceptions
from glance_dedup.base import package_version
from glance_dedup.cli import common
from glance_dedup.cli import entry
from glance_dedup.cli import repository_commands
from glance_dedup.client import client_errors
from tests.support import repositories


@pytest.mark.parametrize('line', [
    '--help', 'image show --help', 'image delete --help', 'status --help',
    'repository check --help', 'image show a', 'image list', 'image delete a'])
def test_start_imports_only_what_the_command_needs(cli, line):
    """A small command only imports the modules that it needs."""
    cli.program('repository', 'create')
    script = ('import sys; from glance_dedup.cli import entry; '
              'entry.main(sys.argv[1:]); '
              'print(*sorted(sys.modules), file=sys.stderr)')
    found = subprocess.run(
        [sys.executable, '-c', script, *cli.options, *line.split()],
        env=cli.environment(), capture_output=True, text=True, timeout=60)
    imported = set(found.stderr.splitlines()[-1].split())
    assert 'glance_dedup.cli.entry' in imported
    # These commands do not need TLS, options, tasks or the second reader.
    assert not imported & {
        'ssl', 'http.client', 'oslo_config.cfg', 'multiprocessing',
        'glance_dedup.client.daemon_client', 'dedupd.tasks.registry',
        'glance_dedup.maintenance.maintainer_role',
        'glance_dedup.check.checker'}
    if line.endswith(' --help'):
        assert 'glance_dedup._engine' not in imported


def test_start_reads_no_metadata_of_other_distributions(created, monkeypatch):
    """Commands do not read the metadata of other distributions."""
    from cliff import command

    asked = []
    monkeypatch.setattr(command, '_dists_by_mods', None)
    monkeypatch.setattr(command, 'packages_distributions',
                        lambda: asked.append(1) or {})
    assert created('image', 'list').status == 0
    assert asked == []
    assert created('image', 'list', '--help').status == 0
    assert created('--help').status == 0
    assert asked == []


def test_every_command_has_help_and_json(cli):
    for name in entry.COMMANDS:
        result = cli(*name.split(), '--help')
        assert result.status == 0
        assert f'glance-dedup {name}' in result.out
        # A command that runs until it is stopped has no result for a table.
        assert ('json' in result.out) == (
            name not in ('image mount', 'volume serve', 'complete', 'help'))


def test_help(cli):
    result = cli('--help')
    assert result.status == 0
    assert '--repository' in result.out
    for heading, commands in entry.GROUPS.items():
        _, found, below = result.out.partition(f'\n{heading}:\n')
        assert found
        lines = below.partition('\n\n')[0].splitlines()
        for name, line in zip(commands, lines, strict=True):
            # Two blanks separate a command's name from its description.
            assert re.fullmatch(rf'  {name} {{2,}}[A-Z].*[^.]', line)
    assert cli(
        '--version').out == f'glance-dedup {package_version.version()}\n'


def test_each_noun_has_one_heading():
    headings = {}
    for heading, commands in entry.GROUPS.items():
        for name in commands:
            if heading != 'General':
                noun, _ = name.split()
                assert headings.setdefault(noun, heading) == heading, name


def test_help_of_a_noun(cli):
    result = cli('task', '--help')
    assert result.status == 0
    assert cli('help', 'task').out == result.out
    assert [line.split('  ')[1] for line in result.out.splitlines()[2:]] == [
        name for name in entry.COMMANDS if name.startswith('task ')]


def test_no_command(cli):
    cli().refused('--help')
    assert cli('--debug').status == 2


def test_unknown_command(cli):
    cli('help', 'images').failed('images')
    cli('image', 'frobnicate').refused('frobnicate')
    cli('nonsense').refused('nonsense')
    cli('image').refused("'image'")


@pytest.mark.parametrize('words, meant', [
    ('image lst', 'image list'), ('colect', 'complete, task collect'),
    ('collect', 'task collect'), ('space', 'repository space'),
    ('rebuild', 'index rebuild'), ('image', 'image put, image get'),
    ('index rebiuld', 'index rebuild'), ('imgae list', 'image list')])
def test_did_you_mean(cli, words, meant):
    cli(*words.split()).refused(f'did you mean {meant}')


@pytest.mark.parametrize('arguments', [
    ('image', 'put'), ('image', 'put', 'a'), ('image', 'delete'),
    ('image', 'get', 'a'), ('image', 'list', 'a'),
    ('image', 'list', '--nonsense'), ('image', 'list', '-f', 'nonsense'),
    ('image', 'put', 'a', 'b', '--codec', 'gzip'),
    ('repository', 'create', '--block-size', 'x'),
    ('repository', 'create', '--verify', 'x'), ('--nonsense',)])
def test_usage(created, arguments):
    result = created(*arguments)
    assert result.status == 2
    assert result.err
    assert 'Traceback' not in result.err


def test_no_repository_given(cli, monkeypatch):
    monkeypatch.delenv('GLANCE_DEDUP_REPOSITORY', raising=False)
    cli.options = []
    for name in ('repository check', 'repository show', 'image list'):
        cli(*name.split()).refused('--repository', '--config-file')


def test_repository_of_the_environment(created, monkeypatch):
    monkeypatch.setenv('GLANCE_DEDUP_REPOSITORY', str(created.path))
    created.options = created.options[2:]
    assert created('image', 'list', '-f', 'json').json() == []


def test_repository_may_follow_the_command(created):
    options, created.options = created.options, []
    assert created('image', 'list', '-f', 'json', *options).json() == []


@pytest.mark.parametrize('command', [
    'repository show', 'repository check', 'index rebuild',
    'image list', 'image show a', 'image get a b', 'image copy a b',
    'image delete a',
    'image put a /dev/null'])
def test_not_a_repository(cli, tmp_path, command):
    for path, kind in ((tmp_path / 'missing', None),
                       (tmp_path / 'empty', 'directory'),
                       (tmp_path / 'file', 'file')):
        if kind == 'directory':
            path.mkdir()
        elif kind == 'file':
            path.touch()
        cli.options[1] = str(path)
        cli(*command.split()).no_repository(str(path))
    cli.options[1] = 'a\0b'
    cli(*command.split()).refused()


def test_newer_format(created):
    path = created.path / 'repository.json'
    fields = json.loads(path.read_text())
    fields['format'] = 5
    del fields['checksum']
    from tests.unit.repository import format_writer
    text = json.dumps(fields, sort_keys=True, separators=(',', ':'))
    fields['checksum'] = f'{format_writer.xxh3(text.encode()):016x}'
    path.write_text(json.dumps(fields))
    for command in ('repository show', 'repository check', 'image list',
                    'image put a /dev/null'):
        created(*command.split()).failed('5')


def test_debug_shows_where(cli):
    result = cli.program('--debug', 'image', 'list')
    assert result.status == 10
    assert 'Traceback' in result.err


def test_log_file(cli, tmp_path):
    cli('--log-file', tmp_path / 'log', 'image', 'list').no_repository(
        'directory')
    assert 'directory' in (tmp_path / 'log').read_text()
    cli('--log-file', tmp_path, 'image', 'list').failed(str(tmp_path))
    cli('--log-file', 'a\0b', 'image', 'list').failed('null')


def test_help_command(created):
    result = created('help', 'image', 'put')
    assert result.status == 0
    assert '--codec' in result.out
    created('help', 'nonsense').failed('nonsense')


@pytest.mark.parametrize('error, status, sentence', [
    (exceptions.DamagedError('a b\nc'), 1, 'a b c'),
    (common.UsageError('no'), 2, 'no'),
    (exceptions.InvalidParameter('no'), 2, 'no'),
    (exceptions.NoSpaceError('full'), 3, 'full'),
    (exceptions.ImageNotFound('none'), 3, 'none'),
    (RuntimeError('a mistake'), 3, 'a mistake'),
    (ValueError(), 3, 'ValueError'),
    (MemoryError(), 3, 'there is not enough memory'),
    (exceptions.RepositoryNotFound('none'), 10, 'none'),
    (exceptions.BusyError('busy'), 11, 'busy'),
    (client_errors.Refused(400, 'no'), 2, 'no'),
    (client_errors.Refused(404, 'none'), 3, 'none'),
    (client_errors.Refused(409, 'busy'), 11, 'busy'),
    (OSError(28, 'No space left on device', 'x\udcff'), 3,
     'x\\udcff: No space left on device')])
def test_errors(created, monkeypatch, error, status, sentence):
    def fail(self, parsed_args):
        raise error

    monkeypatch.setattr(repository_commands.Show, 'take_action', fail)
    result = created('repository', 'show')
    assert result.status == status
    assert result.err == f'glance-dedup: {sentence}\n'


def test_note_keeps_the_greater_news():
    app = entry.App(stdout=io.StringIO(), stderr=io.StringIO())
    for error, status in (
            (exceptions.BusyError('x'), 11), (exceptions.BusyError('x'), 11),
            (exceptions.ImageNotFound('x'), 3), (exceptions.BusyError('x'), 3),
            (exceptions.DamagedError('x'), 1),
            (exceptions.ImageNotFound('x'), 1)):
        app.note(error)
        assert app.status == status


def test_columns():
    assert common.Time(2**70).human_readable() == str(2**70)
    assert common.Time(0).human_readable() == '1970-01-01 00:00:00 UTC'
    assert common.Time(5).machine_readable() == 5
    assert common.saved(0, 0).human_readable() == '-'
    assert common.saved(100, 25).human_readable() == '75.0 %'
    assert common.Size(1 << 30).human_readable() == '1.0 GiB'
    assert common.Size(1 << 30).machine_readable() == 1 << 30


@pytest.mark.parametrize('number, status', [
    (signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGHUP, 130)])
def test_interrupted_put(created, number, status):
    """An interrupted put leaves nothing, and the repository stays usable."""
    process = created.start(
        'image', 'put', 'a', '-', stdin=subprocess.PIPE,
        stderr=subprocess.PIPE)
    process.stdin.write(b'content' * 1000000)
    process.stdin.flush()
    repositories.eventually(
        lambda: list((created.path / 'spool').iterdir()))
    process.send_signal(number)
    assert process.wait(60) == status
    error = process.stderr.read().decode()
    assert error == 'glance-dedup: interrupted\n'
    process.stdin.close()
    process.stderr.close()
    assert created('image', 'list', '-f', 'json').json() == []
    assert list((created.path / 'spool').iterdir()) == []
    assert created('image', 'put', 'a', '/dev/null').status == 0
    assert created('repository', 'check').status == 0


def test_reader_that_goes_away(created, tmp_path):
    (tmp_path / 'content').write_bytes(b'x' * 10000000)
    assert created('image', 'put', 'a', tmp_path / 'content').status == 0
    process = created.start('image', 'get', 'a', '-',
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr.read() == b''
    process.stderr.close()


def test_a_closed_terminal_ends_an_image_get(created, tmp_path):
    """A closed terminal ends the command, without a part of the image."""
    (tmp_path / 'content').write_bytes(b'x' * (1 << 26))
    assert created('image', 'put', 'a', tmp_path / 'content').status == 0
    place = tmp_path / 'place'
    place.mkdir()
    code = """if True:
        import os, signal, sys
        from glance_dedup.cli import copying, entry
        write = copying.write_all
        def write_all(*arguments):
            write(*arguments)
            os.kill(os.getpid(), signal.SIGHUP)
        copying.write_all = write_all
        sys.exit(entry.main())
        """
    ended = subprocess.run(
        [sys.executable, '-c', code, *created.options, 'image', 'get', 'a',
         place / 'file'], env=created.environment(), capture_output=True,
        text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (
        130, 'glance-dedup: interrupted\n')
    assert not list(place.iterdir())


def closed(created, redirection, *arguments):
    """Run a command with some standard files closed."""
    found = subprocess.run(
        ['sh', '-c', f'exec "$@" {redirection}', 'sh',
         *created.command(*arguments)], env=created.environment(),
        capture_output=True, text=True, timeout=60)
    assert 'Traceback' not in found.stderr
    return found


def test_output_that_is_closed(created):
    """A command does its work, and then reports that its output is closed."""
    put = closed(created, '>&-', 'image', 'put', 'a', __file__)
    assert put.returncode == 3
    assert put.stderr == (
        'glance-dedup: cannot write to standard output: Bad file descriptor\n')
    for command in 'image list', 'task collect', 'repository check':
        assert closed(created, '>&-', *command.split()).returncode == 3
    assert closed(created, '>&-', 'image', 'get', 'a', '-').returncode == 3
    closed(created, '>&-', 'image', 'delete', 'a')
    assert created('image', 'list', '-f', 'json').json() == []


@pytest.mark.parametrize('redirection, reason', [
    ('>&-', 'Bad file descriptor'),
    ('>/dev/full', 'No space left on device')])
@pytest.mark.parametrize('command', ['status', 'image list', 'help',
                                     '--help', 'complete bash'])
def test_output_that_fails_is_named_once(created, monkeypatch, command,
                                         redirection, reason):
    """An unbuffered output that fails is also reported once."""
    monkeypatch.setenv('PYTHONUNBUFFERED', '1')
    found = closed(created, redirection, *command.split())
    assert found.returncode == 3
    assert [line for line in found.stderr.splitlines() if reason in line] == [
        f'glance-dedup: cannot write to standard output: {reason}']


@pytest.mark.parametrize('redirection', ['>&-', '>/dev/full'])
@pytest.mark.parametrize('command', ['--version', '--help',
                                     'image list --version'])
def test_output_before_a_command_fails(created, monkeypatch, command,
                                       redirection):
    # Without a buffer argparse gets the error, and reports nothing.
    monkeypatch.delenv('PYTHONUNBUFFERED', raising=False)
    found = closed(created, redirection, *command.split())
    assert found.returncode == 3
    line, = found.stderr.splitlines()
    assert line.startswith('glance-dedup: cannot write to standard output: ')


def test_all_standard_files_are_closed(created):
    """No file of the repository gets a standard file's number."""
    everything = '<&- >&- 2>&-'
    assert closed(created, everything, 'image', 'put', 'a',
                  '/dev/null').returncode == 3
    assert closed(created, everything, 'image', 'put', 'b', '-'
                  ).returncode == 3
    without = closed(created, '<&-', 'image', 'put', 'b', '-')
    assert without.stderr == ('glance-dedup: standard input: '
                              'Bad file descriptor\n'), without.stderr
    assert [image['image_id'] for image in created(
        'image', 'list', '-f', 'json').json()] == ['a']
    assert created('repository', 'check').status == 0


def test_output_that_is_full(created):
    with open('/dev/full', 'w') as full:
        process = created.start('repository', 'show', stdout=full,
                                stderr=subprocess.PIPE)
        error = process.stderr.read().decode()
    assert process.wait(60) == 3
    process.stderr.close()
    assert 'No space left' in error
    assert 'Traceback' not in error
    assert len(error.splitlines()) == 1
