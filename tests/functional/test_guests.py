# SPDX-License-Identifier: Apache-2.0

"""The tests of two hosts on file systems that only the guest's kernel has."""

import pathlib
import re
import sys
import tempfile

import pytest

from tests.functional import test_hosts_storm
from tests.sharedfs import guest
from tests.sharedfs import kinds
from tests.sharedfs import shared_fs

LIMIT = 1500
STORM_LIMIT = test_hosts_storm.ROUNDS * test_hosts_storm.ROUND_LIMIT
HERE = pathlib.Path(__file__).resolve().parent
FILES = ['test_hosts.py', 'test_following.py', 'test_hosts_merging.py',
         'test_trial.py', 'test_helpers.py']
#: It is in the guest's memory: other tests change this machine's /tmp
#: meanwhile.
TEMPORARY = '/run/tests'

pytestmark = [pytest.mark.long, pytest.mark.timeout(LIMIT + 120),
              pytest.mark.skipif(guest.inside(), reason='this is the guest')]


@pytest.fixture(scope='module', params=[
    pytest.param(kind, marks=pytest.mark.needs(kind))
    for kind in ('nfs', 'cephfs')])
def shared(request):
    """A file system that is mounted in a guest."""
    with (tempfile.TemporaryDirectory(prefix=f'{request.param}-') as place,
          shared_fs.Shared(request.param, kinds.KINDS[request.param],
                           pathlib.Path(place, 'fs')) as found):
        found.up()
        yield found


def run_in_the_guest(shared, name, chosen, limit, *options):
    """Run the chosen tests of a file; all pass, and there is one at least."""
    done = shared.services['guest'].call(
        [sys.executable, '-B', '-m', 'pytest', '-n', '0', '-q', '-s', '-p',
         'no:cacheprovider', f'--basetemp={TEMPORARY}', '-k',
         f'{shared.kind} and {chosen}', *options, HERE / name], limit,
        capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r'^[1-9]\d* passed', done.stdout, re.M), done.stdout


@pytest.mark.parametrize('name', FILES)
def test_in_the_guest(shared, name):
    """The tests pass, but for 50 kills, in which NFS-Ganesha 4.3 crashed."""
    run_in_the_guest(shared, name, 'not 50', LIMIT)


@pytest.mark.timeout(STORM_LIMIT + 120)
def test_storm_in_the_guest(shared):
    run_in_the_guest(shared, 'test_hosts_storm.py', 'many', STORM_LIMIT,
                     '--long')
