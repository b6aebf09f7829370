# SPDX-License-Identifier: Apache-2.0

"""Works on a repository as another user, with another umask.

  python -m tests.support.other_users UID GID UMASK PATH COMMAND...

All modules are imported before the user is changed, since the new user may not
be able to read the interpreter's files. LevelDB is used in no process that
forks. Each command gives a line: ``ok``, or the error's class and its words.
"""

import os
import subprocess
import sys

from dedupd.tasks import collector
from glance_dedup.base import pacing
from glance_dedup.check import checker
from glance_dedup.cli import entry
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import image_repository
from tests.support import daemons
from tests.support import maintenance
from tests.support import repositories


def create(path):
    image_repository.Repository.create(path, block_size=512, group_slots=64)


def create_shared(path):
    image_repository.Repository.create(path, block_size=512, group_slots=64,
                                       group_access=True)


def use(path):
    """Store, read and delete; an image of each user's stays."""
    with repositories.open_repository(path) as repo:
        own = f'of-{os.geteuid()}'
        for image_id in (own, 'gone'):
            if image_id not in repo.images():
                repositories.put(repo, image_id,
                                 repositories.noise(60000, os.geteuid()))
        assert all(repositories.read_all(repo, i) for i in repo.images())
        repo.delete('gone')


def empty(path):
    """Delete the images that others stored."""
    with repositories.open_repository(path) as repo:
        for image_id in repo.images():
            repo.delete(image_id)


def maintain(path):
    with repositories.open_repository(path) as repo:
        with maintainer_role.Maintainer(repo) as maintainer:
            maintenance.account(maintainer)
            collector.run_once(maintainer, pacing.Pace())


def require_it(path):
    findings = [str(f) for f in checker.check(path).findings]
    assert not findings, findings


def command_line(path):
    """The command's own output goes to stderr."""
    status = entry.main(['--repository', path, '--socket', '', 'image',
                         'list'])
    assert status == 0, f'exit status {status}'


COMMANDS = {name.replace('_', '-'): function for name, function in (
    ('create', create), ('create_shared', create_shared), ('use', use),
    ('empty', empty), ('maintain', maintain), ('check', require_it),
    ('command_line', command_line))}


def run(path, *commands, uid=None, gid=0, umask=0o022):
    """Return the answers of another process to some commands."""
    done = subprocess.run(
        [sys.executable, '-m', 'tests.support.other_users',
         str(os.geteuid() if uid is None else uid), str(gid), oct(umask),
         path, *commands], cwd=daemons.ROOT, capture_output=True, text=True,
        timeout=120)
    answers = done.stdout.splitlines()
    assert len(answers) == len(commands), done.stdout + done.stderr
    return [answer + done.stderr.replace('\n', ' ')
            if name == 'command-line' else answer
            for name, answer in zip(commands, answers)]


def main(uid, gid, umask, path, *commands):
    if int(uid) != os.geteuid():
        os.setgroups([])
        os.setresgid(int(gid), int(gid), int(gid))
        os.setresuid(int(uid), int(uid), int(uid))
    os.umask(int(umask, 8))
    for name in commands:
        try:
            COMMANDS[name](path)
            answer = 'ok'
        except Exception as e:
            answer = f'{type(e).__name__}: {e}'
        print(' '.join(answer.split()), flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
