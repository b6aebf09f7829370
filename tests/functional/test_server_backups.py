# SPDX-License-Identifier: Apache-2.0

"""The guide's page on backups of servers, and the units for them."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from glance_dedup.cli import backup_commands
from glance_dedup.cli import entry
from tests.support import documents
from tests.support import repositories
from tests.support.repositories import noise
from tests.support.repositories import put

PAGE = documents.SOURCE / 'admin' / 'server-backups.rst'
ETC = documents.TOP / 'etc'
UNITS = ('glance-dedup-backup.service', 'glance-dedup-backup.timer',
         'glance-dedup-drill.service', 'glance-dedup-drill.timer')
TIMES = ('20261123T103000Z', '20261123T180000Z', '20261124T010000Z')


@pytest.fixture
def repo(tmp_path):
    path = repositories.create(tmp_path / 'repository')
    with repositories.open_repository(path) as repo:
        for number, time in enumerate(TIMES):
            put(repo, f'b_web1_{time}', noise(8192, number))
        yield repo


def commands(*sections):
    return [line.text for block in documents.blocks(PAGE)
            if block.section in sections
            for line in documents.commands(block)
            if line.text.startswith('glance-dedup')]


def test_the_page_s_commands(repo, tmp_path, monkeypatch, capfd):
    """The page's commands run; test_register.py has ``glance register``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('GLANCE_DEDUP_REPOSITORY', repo.path)
    monkeypatch.setenv('GLANCE_DEDUP_FILTER_DIR', str(tmp_path / 'filter'))
    found = [text for text in commands(
        'Backups and their names', 'Restore', 'Prune')
        if 'glance register' not in text]
    assert len(found) >= 9
    for text in found:
        words = shlex.split(text)[1:]
        if '|' in words:
            run_in_shell(text, tmp_path / 'bin')
            assert (tmp_path / 'web1.raw').read_bytes() == noise(8192, 2)
        else:
            assert entry.main(words) == 0, (text, capfd.readouterr().err)
    newest, noon, monday = (
        (tmp_path / name).read_bytes() for name in (
            'web1.raw', 'noon.raw', 'monday.raw'))
    assert [noon, monday, newest] == [noise(8192, n) for n in range(3)]
    # The newest backup of each day is left.
    assert [found.image_id for found in repo.backups()] == [
        f'b_web1_{time}' for time in TIMES[1:]]


def run_in_shell(text, place):
    """Run a pipeline; a shell on this machine replaces the other machine."""
    place.mkdir()
    for name, command in (
            ('glance-dedup',
             f'exec {sys.executable} -m glance_dedup.cli.entry "$@"'),
            ('ssh', 'shift; exec sh -c "$*"')):
        script = place / name
        script.write_text(f'#!/bin/sh\n{command}\n')
        script.chmod(0o755)
    environment = {**os.environ, 'PYTHONPATH': str(documents.TOP),
                   'PATH': f'{place}:{os.environ["PATH"]}'}
    subprocess.run(['sh', '-c', text], env=environment, check=True,
                   timeout=60)


def settings():
    return dict(line.split('=', 1) for line in (
        ETC / 'glance-dedup-backup.conf').read_text().splitlines()
        if line and not line.startswith('#'))


def test_the_units_run_what_the_commands_take():
    service = (ETC / UNITS[0]).read_text()
    assert 'EnvironmentFile=/etc/glance-dedup/backup.conf\n' in service
    found = re.findall(
        r'^Exec(\w+)=/usr/bin/glance-dedup backup (\w+) \$(\w+)$', service,
        re.MULTILINE)
    assert found == [('Start', 'run', 'RUN'), ('StopPost', 'prune', 'PRUNE')]
    drill = re.findall(
        r'^Exec(\w+)=/usr/bin/glance-dedup backup (\w+) \$(\w+)$',
        (ETC / UNITS[2]).read_text(), re.MULTILINE)
    assert drill == [('Start', 'verify', 'VERIFY')]
    assert set(settings()) == {'RUN', 'PRUNE', 'VERIFY'}
    assert backup_commands.Verify(None, None).get_parser(
        'backup verify').parse_args(
            settings()['VERIFY'].split()).restore_sample == 3
    parser = backup_commands.Prune(None, None).get_parser('backup prune')
    args = parser.parse_args(settings()['PRUNE'].split())
    assert (args.keep_daily, args.keep_weekly, args.keep_monthly) == (7, 4, 12)
    text = PAGE.read_text()
    assert ('cp systemd/glance-dedup-backup.* systemd/glance-dedup-drill.* '
            '/etc/systemd/system/') in text
    assert 'conf/glance-dedup-backup.conf /etc/glance-dedup/backup' in text
    assert f"backup prune {settings()['PRUNE']}\n" in text


@pytest.mark.needs('systemd')
def test_the_units_are_valid(tmp_path):
    if shutil.which('systemd-analyze') is None:
        pytest.skip('needs systemd-analyze')
    for name in UNITS:
        (tmp_path / name).write_text((ETC / name).read_text().replace(
            '/usr/bin/glance-dedup', '/bin/true'))
    done = subprocess.run(
        ['systemd-analyze', 'verify', '--man=no',
         *(tmp_path / name for name in UNITS)],
        capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, '')
