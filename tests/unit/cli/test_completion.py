# SPDX-License-Identifier: Apache-2.0

"""Completion proposes the right words, and the shells accept them."""

import os
import pty
import select
import subprocess
import sys
import time

import pytest

from glance_dedup.cli import completion
from glance_dedup.cli import entry

LIMIT = 60


@pytest.fixture
def filled(created, tmp_path):
    image = tmp_path / 'image.raw'
    image.write_bytes(b'content')
    for name in ('first', 'second'):
        assert created('image', 'put', name, image).status == 0
    return created


def proposed(cli, *words):
    result = cli('complete', 'line', '--', *words)
    assert result.status == 0 and result.err == ''
    return [line.partition('\t')[0] for line in result.out.splitlines()]


def test_commands(cli):
    assert proposed(cli, '') == sorted(
        {name.split()[0] for name in entry.COMMANDS})
    assert proposed(cli, 'im') == ['image']
    assert proposed(cli, 'index', '') == ['rebuild', 'remove', 'show']
    assert proposed(cli, 'help', 'index', 're') == ['rebuild', 'remove']
    assert proposed(cli, '--socket', 'x', '--quiet', 'in') == ['index']
    assert proposed(cli, 'nonsense', '') == []


def test_options_have_the_first_sentence_of_their_help(cli):
    assert proposed(cli, 'image', 'put', '--no-d') == ['--no-dedup']
    assert '--repository' in proposed(cli, '--')
    line = cli('complete', 'line', '--', '--config-f').out
    assert line.startswith('--config-file\tThe daemon')
    assert line.count('\n') == 1


def test_values(cli):
    assert proposed(cli, 'image', 'put', '--codec', '') == [
        'none', 'lz4', 'zstd']
    # Bash splits --codec=z this way.
    assert proposed(cli, 'image', 'put', '--codec', '=') == [
        'none', 'lz4', 'zstd']
    assert proposed(cli, 'image', 'put', '--codec', '=', 'z') == ['zstd']
    assert proposed(cli, '--index', 'l') == ['lmdb', 'leveldb']
    assert proposed(cli, '--repository', '/us') == [completion.FILES]
    assert proposed(cli, 'image', 'mount', '') == [completion.FILES]
    assert proposed(cli, 'glance', 'estimate', 'a', 'b') == [completion.FILES]


def test_images_and_volumes(filled):
    assert proposed(filled, 'image', 'show', '') == ['first', 'second']
    assert proposed(filled, 'image', 'show', 's') == ['second']
    assert proposed(filled, 'image', 'show', 'first', '') == []
    assert proposed(filled, 'image', 'delete', 'first', 's') == ['second']
    assert proposed(filled, 'image', 'put', 'a', '') == [completion.FILES]
    assert proposed(filled, 'volume', 'show', '') == []
    assert filled('volume', 'create', 'disk', '1M').status == 0
    assert proposed(filled, 'volume', 'show', 'd') == ['disk']
    assert proposed(filled, 'volume', 'clone', 'f') == ['first']


def test_a_line_of_which_nothing_is_right(cli):
    """Completing a wrong line prints no errors into the shell."""
    for words in (['image', 'show', ''], ['--nonsense', ''], ['-', ''], []):
        proposed(cli, *words)
    cli.options = ['--config-file', '/nowhere']
    assert proposed(cli, 'image', 'show', '') == []


def test_unknown_shell(cli):
    assert cli('complete', 'csh').status == 2


@pytest.fixture
def place(filled, tmp_path):
    """The program by its name, and the repository in its environment."""
    program = tmp_path / 'bin' / 'glance-dedup'
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\nexec {sys.executable} -m glance_dedup.cli.entry "$@"\n')
    program.chmod(0o755)
    return {**filled.environment(), 'HOME': str(tmp_path), 'TERM': 'dumb',
            'PATH': f'{program.parent}:{os.environ["PATH"]}',
            'GLANCE_DEDUP_REPOSITORY': str(filled.path),
            'GLANCE_DEDUP_SOCKET': ''}


def run(*command, place):
    return subprocess.run(
        command, env=place, capture_output=True, text=True, timeout=LIMIT,
        check=True).stdout.split('\n')


def test_bash(place, tmp_path):
    def completed(*words):
        quoted = ' '.join(f"'{word}'" for word in ('glance-dedup', *words))
        return run('bash', '--norc', '-c', f"""
            eval "$(glance-dedup complete bash)"
            compopt() {{ echo "compopt $*"; }}
            COMP_WORDS=({quoted}) COMP_CWORD={len(words)}
            _glance_dedup
            printf '%s\\n' "${{COMPREPLY[@]}}"
            """, place=place)[:-1]

    assert completed('image', 'de') == ['delete']
    assert completed('image', 'show', '') == ['first', 'second']
    assert completed('image', 'mount', '') == ['compopt -o default', '']


@pytest.mark.needs('shells')
def test_fish(place, tmp_path):
    def completed(line):
        return [found.partition('\t')[0] for found in run(
            'fish', '-c', 'glance-dedup complete fish | source; '
            f'complete -C "glance-dedup {line}"', place=place)[:-1]]

    assert completed('image de') == ['delete']
    assert completed('image show ') == ['first', 'second']
    assert completed(f'image mount {tmp_path}/bi') == [f'{tmp_path}/bin/']


@pytest.mark.needs('shells')
def test_zsh(place):
    """Zsh completes only on a terminal, so the test gives it one."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe('zsh', ['zsh', '-f', '-i'], place)
    seen = b''

    def wait_for(text):
        nonlocal seen
        until = time.monotonic() + LIMIT
        while text not in seen:
            assert time.monotonic() < until, seen
            if select.select([terminal], [], [], 1)[0]:
                seen += os.read(terminal, 65536)
        seen = b''

    try:
        os.write(terminal, b'PS1=; unsetopt beep prompt_cr; autoload -U '
                 b'compinit; compinit -D; eval "$(glance-dedup complete zsh)";'
                 b' echo rea""dy\n')
        wait_for(b'ready')
        os.write(terminal, b'glance-dedup image sho\t')
        wait_for(b'show ')
        os.write(terminal, b'sec\t')
        wait_for(b'second ')
    finally:
        os.close(terminal)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
