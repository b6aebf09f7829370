# SPDX-License-Identifier: Apache-2.0
"""The packages of bindep.txt suffice to install the requirements."""

import os
import shutil
import subprocess

import pytest

from tests.support import documents

#: pip compiles plyvel with this for a Python without a wheel of it.
PLYVEL = """
#include <leveldb/db.h>
int main() { return leveldb::kMajorVersion < 1; }
"""


def packages(profile, platform):
    """Return the packages of a profile on a platform, by bindep.txt."""
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


@pytest.mark.needs('libvirtd')
def test_libvirt_can_start_qemu():
    """bindep.txt names the package with libvirt's driver for QEMU.

    Without it the daemon runs, and refuses every connection.
    """
    package = 'libvirt-daemon-driver-qemu'
    assert package in packages('libvirtd', 'dpkg')
    if not shutil.which('dpkg-query'):
        pytest.skip('not Debian: nobody has installed it')
    files = subprocess.run(
        ['dpkg-query', '-L', package], capture_output=True, text=True,
        timeout=60).stdout.split()
    assert any(name.endswith('/libvirt_driver_qemu.so') for name in files)


@pytest.mark.parametrize('program, package, profile', [
    pytest.param(*row, marks=pytest.mark.needs(row[-1])) for row in (
        ('/usr/bin/fincore', 'util-linux-extra', 'fincore'),
        ('/usr/bin/fio', 'fio', 'fio'),
        ('/usr/bin/nbdkit', 'nbdkit', 'nbdkit'),
        ('/usr/include/nbdkit-plugin.h', 'nbdkit-plugin-dev', 'nbdkit'),
        ('/usr/bin/spin', 'spin', 'spin'),
        ('/sbin/mkfs.ext4', 'e2fsprogs', 'disks'),
        ('/sbin/mkfs.xfs', 'xfsprogs', 'disks'))])
def test_programs_of_tests(program, package, profile):
    """bindep.txt names packages of programs that a minimal Debian lacks."""
    assert package in packages(profile, 'dpkg')
    if not shutil.which('dpkg-query'):
        pytest.skip('not Debian: nobody has installed it')
    # Debian 12 has some directly in /sbin, and 13 in /usr/sbin.
    assert os.path.exists(program)


@pytest.mark.parametrize('name', ['cloud', 'demo', 'images', 'test'])
def test_every_profile_of_the_tools_is_there(name):
    assert packages(name, 'dpkg')
