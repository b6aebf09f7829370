# SPDX-License-Identifier: Apache-2.0
"""A disk that answers every request with an error: a real XFS, shut down."""

import fcntl
import os
import struct

import pytest

from glance_dedup.cli import main
from tests.support import disks

pytestmark = pytest.mark.needs('disks')

_SHUT_DOWN = 0x8004587D         # FS_IOC_SHUTDOWN of <linux/fs.h>
_WITHOUT_LOG = 2


@pytest.fixture(scope='module')
def command(tmp_path_factory):
    """The options of a command on a repository whose disk fails."""
    place = tmp_path_factory.mktemp('failing')
    with disks.mounted(place, 'xfs') as root:
        command = ['--repository', f'{root}/repository', '--socket', '',
                   '--filter-dir', str(place / 'filter')]
        for line in ('repository create --cold', f'image put a {__file__}',
                     'collect'):
            assert main.main([*command, *line.split()]) == 0
        fd = os.open(root, os.O_RDONLY)
        fcntl.ioctl(fd, _SHUT_DOWN, struct.pack('I', _WITHOUT_LOG))
        os.close(fd)
        yield command


@pytest.mark.parametrize('line', [
    'status', 'status upgrade-check', 'collect', 'merge', 'scrub',
    'recompress', 'tier --all', 'space', 'orphans', 'repository create', 'repository show',
    'repository check', 'repository rebuild-catalog', 'filter show',
    'image put b /dev/null', 'image copy a b', 'image get a -',
    'image delete a', 'image list', 'image show a', 'image verify a',
    'image mark-lost a', 'project list', 'project count', 'backup list',
    'backup prune --keep-last 1', 'cold show', 'volume list',
    'volume create v 1M', 'volume delete v', 'export /tmp --all'])
def test_commands_say_what_the_system_says(command, capfd, line):
    status = main.main([*command, *line.split()])
    told = ''.join(capfd.readouterr())
    assert 'Input/output error' in ' '.join(told.replace('|', ' ').split())
    assert status == 2
    for wrong in 'there is no', 'missing', 'another process', 'not a repos':
        assert wrong not in told, told
