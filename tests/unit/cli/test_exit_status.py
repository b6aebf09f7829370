# SPDX-License-Identifier: Apache-2.0

"""Each command ends with 0 if all is well.

A status other than 0 means damage or a failure to scripts that call the
command, so one that is never 0 is of no use to them.
"""

import os

import pytest

from glance_dedup.cli import entry
from tests.support import documents
from tests.support import repositories

#: The commands that need other servers, with a test of each in the good case.
ELSEWHERE = {
    'glance import':
    'functional/test_adoption.py::test_import_and_switch',
    'glance missing':
    'functional/test_adoption.py::test_import_and_switch',
    'glance orphans':
    'functional/test_adoption.py::test_import_and_switch',
    'glance register':
    'functional/test_register.py::test_a_snapshot_becomes_an_image',
    'glance sign-locations':
    'functional/test_sign_locations.py::test_a_change_of_the_key',
    'image mount': 'functional/test_mount.py::test_unmounted',
    'image pull': 'unit/transfer/test_pull.py::test_the_command',
    'image replicate': 'functional/test_sites.py::test_metadata_and_data',
    'object-store attach': 'unit/cli/test_cold.py::test_attach',
    'object-store show': 'unit/cli/test_cold.py::test_show',
    'repository backup-metadata':
    'functional/test_restore.py::test_the_commands',
    'repository restore': 'functional/test_restore.py::'
    'test_the_exit_status_says_whether_something_is_lost',
    'repository test-filesystem':
    'functional/test_trial.py::test_command_where_all_is_well',
    'task evict': 'functional/test_cache_eviction.py::test_the_command',
    'task tier': 'unit/cli/test_cold.py::test_tier',
    'volume serve': 'functional/test_volume_nbd.py::test_the_last_checkpoint'}

#: Lines that follow each other on one repository.
LINES = """
repository create
repository show
repository rekey
repository rekey --finish
image put one {file} --project p
image put unreadable {file}.other
image show one
image list
image get one {file}.got
image copy one copied --project q
image verify one --no-glance
glance estimate {file}
glance export {out} one
volume clone one disk --size 4M
volume create empty 1M
volume show disk
volume list
volume snapshot disk moment
volume rollback disk moment
volume snapshot disk later
volume diff moment later
volume resize disk 8M
volume rename disk renamed
backup run volume:renamed
backup plan volume:renamed
backup list
backup restore renamed {file}.disk
backup verify renamed
backup prune renamed --keep-last 1
task merge
task recompress
task scrub
task collect
project count
project list
project show p
image convert one --to file
image du one copied
volume du renamed
repository space
repository check
repository rebuild-catalog
index show
index rebuild
status
upgrade check
image delete one copied
image delete moment later
volume delete renamed empty
image mark-lost unreadable --yes
task collect
repository check
index remove
help
complete bash
"""


def of_line(line):
    """The command of a line."""
    found = [name for name in entry.COMMANDS if f'{line} '.startswith(
        f'{name} ')]
    assert len(found) == 1, line
    return found[0]


def test_all_is_well(cli, tmp_path):
    file = tmp_path / 'content'
    file.write_bytes(repositories.noise(2 << 20, 1))
    out = tmp_path / 'exported'
    out.mkdir()
    (tmp_path / 'content.other').write_bytes(repositories.noise(1 << 20, 2))
    for line in LINES.split('\n')[1:-1]:
        if line.startswith('image mark-lost'):
            # What only an image that cannot be read may be called.
            os.truncate(cli.path / 'images' / 'unreadable', 1000)
        result = cli(*line.format(file=file, out=out).split())
        assert result.status == 0, (line, result.err, result.out)


def test_no_command_is_left_out():
    there = {of_line(line) for line in LINES.split('\n')[1:-1]}
    assert there | {*ELSEWHERE} == {*entry.COMMANDS}
    assert not there & {*ELSEWHERE}


@pytest.mark.parametrize('command', ELSEWHERE)
def test_the_others_have_tests(command):
    name, _, function = ELSEWHERE[command].partition('::')
    assert function and documents.has_test(name, function)
