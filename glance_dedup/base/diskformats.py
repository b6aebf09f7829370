# SPDX-License-Identifier: Apache-2.0

"""Recognise files that hold a disk in a format of their own.

QEMU guesses a format by these bytes. Such a guess serves only to refuse a
file: a server that writes the beginning of a qcow2 file to its raw disk could
otherwise have any file of the host read as its own.
"""

import re

#: The bytes at the beginning of a file by which its format is recognised.
HEAD = 4096

# Offset, and bytes.
_MAGICS = (('qcow2', 0, b'QFI\xfb'), ('vmdk', 0, b'KDMV'),
           ('vmdk', 0, b'COWD'), ('vhdx', 0, b'vhdxfile'),
           ('vpc', 0, b'conectix'), ('qed', 0, b'QED\0'),
           ('luks', 0, b'LUKS\xba\xbe'), ('vdi', 64, b'\x7f\x10\xda\xbe'),
           ('parallels', 0, b'WithoutFreeSpace'),
           ('parallels', 0, b'WithouFreSpacExt'),
           ('bochs', 0, b'Bochs Virtual HD Image'),
           ('cloop', 0, b'#!/bin/sh\n#V2.0 Format\n'))
# A VMDK's descriptor is text: its version, behind comments and empty lines.
# Bytes behind them, such as NULs, do not matter.
_DESCRIPTOR = re.compile(
    rb'(?:#[^\n]*\n| *\r?\n)*version=[0-9]|# *Disk DescriptorFile',
    re.IGNORECASE)


def format_of(head: bytes) -> str:
    """Return the format of a file by its first HEAD bytes, or 'raw'."""
    for name, offset, magic in _MAGICS:
        if head[offset:offset + len(magic)] == magic:
            return name
    return 'vmdk' if _DESCRIPTOR.match(head) else 'raw'
