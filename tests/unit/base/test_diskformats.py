# SPDX-License-Identifier: Apache-2.0

"""Every disk format that QEMU would guess is recognised."""

import subprocess

import pytest

from glance_dedup.base import diskformats

DESCRIPTOR = (b'# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\n'
              b'createType="monolithicFlat"\n')


@pytest.mark.needs('qemu')
@pytest.mark.parametrize('name', [
    'qcow2', 'vmdk', 'vhdx', 'vpc', 'qed', 'vdi', 'parallels', 'raw'])
def test_formats_that_qemu_makes(tmp_path, name):
    file = tmp_path / 'disk'
    subprocess.run(['qemu-img', 'create', '-q', '-f', name, file, '64M'],
                   check=True, timeout=60)
    with open(file, 'rb') as f:
        assert diskformats.format_of(f.read(diskformats.HEAD)) == name


@pytest.mark.needs('qemu')
@pytest.mark.parametrize('head', [
    DESCRIPTOR, b'#\n \n  \r\nversion=2\n', b'version=3\n', b'COWD\1'])
@pytest.mark.parametrize('rest', [b'', bytes(1 << 20)])
def test_descriptors_of_vmdk(tmp_path, head, rest):
    """A VMDK descriptor is recognised with and without NULs behind it.

    oslo's inspector takes a descriptor with NULs behind it for a raw disk.
    """
    file = tmp_path / 'disk'
    file.write_bytes(head + rest)
    said = subprocess.run(
        ['qemu-img', 'info', file], capture_output=True, timeout=60)
    assert b'file format: raw' not in said.stdout
    assert diskformats.format_of((head + rest)[:diskformats.HEAD]) == 'vmdk'


@pytest.mark.parametrize('head', [
    b'', b'#', b'#!/bin/sh\nversion', b'\0version=1', b'#\n',
    b'#\n' * 2000 + b' ' * 90])
def test_what_is_raw(head):
    assert diskformats.format_of(head) == 'raw'
