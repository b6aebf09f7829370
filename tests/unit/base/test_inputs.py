# SPDX-License-Identifier: Apache-2.0

import errno
import os
import random

import pytest

from glance_dedup.base import inputs

MIB = 1 << 20


def whole(path, length=MIB, **options):
    with inputs.InputFile(path, **options) as source:
        return b''.join(iter(lambda: bytes(source.read(length)), b''))


def sparse(path, parts, size):
    with open(path, 'wb') as f:
        for offset, data in parts:
            f.seek(offset)
            f.write(data)
        f.truncate(size)
    return path


@pytest.mark.parametrize('size', [0, 1, 4095, 4096, 3 * MIB, 3 * MIB + 7])
@pytest.mark.parametrize('length', [1000, MIB])
def test_holes_are_zeros(tmp_path, size, length):
    generator = random.Random(size)
    parts = [(generator.randrange(size or 1), generator.randbytes(5000))
             for _ in range(4) if size > 5000]
    path = sparse(tmp_path / 'file', parts, size)
    assert whole(path, length) == path.read_bytes()


def test_holes_are_not_read(tmp_path, monkeypatch):
    path = sparse(tmp_path / 'disk', [(1 << 40, b'data')], (1 << 40) + MIB)
    read = []
    pread = os.pread
    monkeypatch.setattr(os, 'pread', lambda fd, length, offset: (
        read.append(length), pread(fd, length, offset))[1])
    with inputs.InputFile(path) as source:
        source._at = (1 << 40) - 3 * MIB
        done = 0
        while piece := source.read(MIB):
            done += len(piece)
    assert done == 4 * MIB
    assert sum(read) <= MIB + 4096      # the last read is at the end


@pytest.mark.parametrize('change', [
    lambda f: f.write(b'x'), lambda f: f.truncate(5),
    lambda f: (f.seek(0, os.SEEK_END), f.write(b'x'))])
def test_changes(tmp_path, change):
    path = tmp_path / 'file'
    path.write_bytes(bytes(range(100)))
    os.utime(path, (1, 1))
    with inputs.InputFile(path) as source:
        source.read(10)
        source.require_unchanged()
        with open(path, 'r+b') as f:
            change(f)
        with pytest.raises(inputs.Changed, match='while it was read'):
            source.require_unchanged()


def test_what_comes_next(tmp_path):
    path = sparse(tmp_path / 'file', [(0, b'begin'), (MIB, b'end')], 2 * MIB)
    data = path.read_bytes()
    with inputs.InputFile(path) as source:
        assert source.has_next(data[:7]) and source.has_next(data[7:])
        assert not source.has_next(b'\0')
    with inputs.InputFile(path) as source:
        assert not source.has_next(data[:-1] + b'x')


def test_other_kinds(tmp_path):
    os.mkfifo(tmp_path / 'fifo')
    (tmp_path / 'link').symlink_to('file')
    (tmp_path / 'file').write_bytes(b'data')
    for name, follow in (('fifo', True), ('link', False), ('.', True)):
        with pytest.raises(OSError):
            inputs.InputFile(tmp_path / name, follow)
    assert whole(tmp_path / 'link', follow=True) == b'data'
    with inputs.open_input('/dev/null') as source:
        assert source.read(5) == b''


def test_the_file_that_fails_is_named(tmp_path, monkeypatch):
    path = str(tmp_path / 'file')
    with open(path, 'wb') as f:
        f.write(b'data')

    def fail(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    with inputs.InputFile(path) as source:
        monkeypatch.setattr(os, 'pread', fail)
        with pytest.raises(OSError, match=path):
            source.read(10)
