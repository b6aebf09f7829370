# SPDX-License-Identifier: Apache-2.0

"""The tests of two hosts on NFS: they run in a guest, whose kernel has it."""

import pathlib
import re
import sys
import tempfile

import pytest

from tests.sharedfs import guest
from tests.sharedfs import kinds
from tests.sharedfs import shared as shared_module

LIMIT = 1500
HERE = pathlib.Path(__file__).resolve().parent
FILES = ['test_hosts.py', 'test_following.py', 'test_hosts_merging.py',
         'test_trial.py', 'test_helpers.py']
#: In the guest's memory: other tests change this machine's /tmp meanwhile.
TEMPORARY = '/run/tests'

pytestmark = [pytest.mark.long, pytest.mark.timeout(LIMIT + 120),
              pytest.mark.skipif(guest.inside(), reason='this is the guest')]


@pytest.fixture(scope='module')
def nfs():
    with (tempfile.TemporaryDirectory(prefix='nfs-') as place,
          shared_module.Shared('nfs', kinds.KINDS['nfs'],
                               pathlib.Path(place, 'fs')) as shared):
        shared.up()
        yield shared


@pytest.mark.parametrize('name', FILES)
def test_in_the_guest(nfs, name):
    """Without the 50 kills, in which NFS-Ganesha 4.3 crashed."""
    done = nfs.services['guest'].call(
        [sys.executable, '-B', '-m', 'pytest', '-n', '0', '-q', '-p',
         'no:cacheprovider', f'--basetemp={TEMPORARY}', '-k',
         'nfs and not 50', HERE / name], LIMIT,
        capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r'^[1-9]\d* passed', done.stdout, re.M), done.stdout
