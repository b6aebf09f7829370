# SPDX-License-Identifier: Apache-2.0
"""The system packages of bindep.txt: enough to install what is required."""

import os
import shutil
import subprocess

import pytest

from tests.support import documents

#: What pip compiles plyvel with, for a Python for which it has no wheel.
PLYVEL = """
#include <leveldb/db.h>
int main() { return leveldb::kMajorVersion < 1; }
"""


def packages(profile, platform):
    """What bindep.txt names for a profile on a platform."""
    found = set()
    for line in (documents.TOP / 'bindep.txt').read_text().splitlines():
        name, _, profiles = line.partition(' [')
        if {profile, f'platform:{platform}'} <= set(
                profiles.rstrip(']').split()):
            found.add(name)
    return found


def test_plyvel_can_be_compiled(tmp_path):
    assert {'g++', 'libleveldb-dev'} <= packages('compile', 'dpkg')
    assert {'gcc-c++', 'leveldb-devel'} <= packages('compile', 'rpm')
    if not shutil.which('dpkg-query'):
        pytest.skip('not Debian: nobody has installed them')
    program = tmp_path / 'program'
    result = subprocess.run(
        ['g++', '-x', 'c++', '-std=c++11', '-', '-lleveldb', '-o', program],
        input=PLYVEL, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    subprocess.run([program], check=True, timeout=60)


def test_libvirt_can_start_qemu():
    """A daemon without the driver runs, and refuses every connection."""
    package = 'libvirt-daemon-driver-qemu'
    assert package in packages('cloud', 'dpkg')
    if not shutil.which('dpkg-query'):
        pytest.skip('not Debian: nobody has installed it')
    files = subprocess.run(
        ['dpkg-query', '-L', package], capture_output=True, text=True,
        timeout=60).stdout.split()
    assert any(name.endswith('/libvirt_driver_qemu.so') for name in files)


@pytest.mark.parametrize('program, package', [
    ('/usr/bin/fincore', 'util-linux-extra'), ('/usr/bin/fio', 'fio'),
    ('/usr/bin/nbdkit', 'nbdkit'),
    ('/usr/include/nbdkit-plugin.h', 'nbdkit-plugin-dev'),
    ('/usr/bin/spin', 'spin'),
    ('/sbin/mkfs.ext4', 'e2fsprogs'), ('/sbin/mkfs.xfs', 'xfsprogs')])
def test_programs_of_tests(program, package):
    """A Debian made for a container or a cloud may come without them."""
    assert package in packages('test', 'dpkg')
    if not shutil.which('dpkg-query'):
        pytest.skip('not Debian: nobody has installed it')
    # Debian 12 has some directly in /sbin, and 13 in /usr/sbin.
    assert os.path.exists(program)
