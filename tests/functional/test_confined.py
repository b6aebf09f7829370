# SPDX-License-Identifier: Apache-2.0

"""The program that parses hostile files has no rights, and gets them right.

It is the one that was built beside the engine, as it is installed.
"""

import pathlib
import random
import struct
import subprocess
import sys

import pytest

from glance_dedup.base import confined

MIB = 1 << 20
LIMIT = 60
#: Starts a program below a filter that allows everything, as those of systemd
#: and of containers are below one that allows much.
BELOW_A_FILTER = '''
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
rule = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x7fff0000))
filter = ctypes.create_string_buffer(
    struct.pack('HxxxxxxQ', 1, ctypes.addressof(rule)))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, filter) == 0, os.strerror(ctypes.get_errno())
os.execve(sys.argv[1], sys.argv[1:], {})
'''


def parser_of(file: bytes) -> confined.Parser:
    return confined.Parser(
        lambda length, offset: file[offset:offset + length], len(file))


@pytest.fixture
def raw(tmp_path):
    path = tmp_path / 'disk.raw'
    dice = random.Random(5)
    path.write_bytes(
        bytes(dice.choices(b'zero', k=300_000)) + bytes(MIB)
        + dice.randbytes(200_000) + bytes(dice.choices(b'ab', k=MIB)))
    with path.open('rb+') as f:
        f.truncate(4 * MIB)
    return path


def disk_of(parser, file):
    """Return the disk, of the pieces that the program sends."""
    disk = bytearray()
    for piece in list(parser.pieces()):
        plain = bytes(piece.length)
        if piece.kind == confined.PLAIN:
            plain = file[piece.place:piece.place + piece.length]
        elif piece.is_stream:
            parser.send(piece)
            used, plain = parser.receive()
            assert 0 < used <= piece.room
        disk += plain[:piece.length]
    assert len(disk) == parser.disk_size
    return disk


def converted(raw: pathlib.Path, *options: str) -> bytes:
    path = raw.with_name('converted')
    subprocess.run(['qemu-img', 'convert', *options, raw, path], check=True,
                   timeout=120)
    return path.read_bytes()


@pytest.mark.needs('qemu')
@pytest.mark.parametrize('name, options', [
    ('qcow2', ('-O', 'qcow2', '-c')),
    ('qcow2', ('-O', 'qcow2', '-c', '-o', 'cluster_size=2M')),
    ('qcow2', ('-O', 'qcow2')),
    ('vmdk', ('-O', 'vmdk', '-o', 'subformat=streamOptimized')),
    ('vmdk', ('-O', 'vmdk')), ('vdi', ('-O', 'vdi')),
    ('vpc', ('-O', 'vpc', '-o', 'force_size=on')), ('vhdx', ('-O', 'vhdx'))])
def test_the_disk_is_that_of_qemu(raw, name, options):
    file = converted(raw, *options)
    with parser_of(file) as parser:
        assert disk_of(parser, file) == raw.read_bytes()
        assert parser.format == {'vpc': 'vhd'}.get(name, name)


def test_a_raw_file(raw):
    with parser_of(raw.read_bytes()) as parser:
        assert list(parser.pieces()) == []
        assert (parser.format, parser.disk_size) == ('raw', 4 * MIB)


def status_of(process):
    lines = pathlib.Path(
        f'/proc/{process.pid}/status').read_text().splitlines()
    return dict(line.split(':\t', 1) for line in lines if ':\t' in line)


@pytest.mark.parametrize('before', [
    [], [sys.executable, '-c', BELOW_A_FILTER]], ids=['alone', 'below'])
def test_it_is_confined_before_the_first_byte(before):
    """It works in units and containers, which have a filter of their own."""
    with subprocess.Popen(
            [*before, confined.PROGRAM, str(LIMIT)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env={}) as process:
        hello = process.stdout.read(24)
        status = status_of(process)
        process.stdin.close()
        assert process.wait(LIMIT) == 0
    assert struct.unpack('<IIQQ', hello) == (1, 0, 1, 0)
    assert status['Seccomp'].strip() == '2'
    assert status['Seccomp_filters'].strip() == str(1 + bool(before))
    assert status['NoNewPrivs'].strip() == '1'
    assert int(status['VmSize'].split()[0]) < 64 * 1024


def test_any_other_call_kills_it(tmp_path):
    """The filter, with a program that goes on to open a file."""
    source = tmp_path / 'opens.c'
    top = pathlib.Path(confined.PROGRAM).parent
    source.write_text(
        '#include <fcntl.h>\n#define main confined_main\n'
        '#include "confined/confined.c"\n#undef main\n'
        'int main(void) { confine("60"); return open("/", O_RDONLY); }\n')
    program = tmp_path / 'opens'
    subprocess.run(
        ['gcc', '-std=c11', '-D_GNU_SOURCE', f'-I{top}', source,
         *(top / 'engine' / 'disk').glob('*.c'),
         top / 'engine' / 'base' / 'status.c', '-lz', '-o', program],
        check=True, timeout=600)
    assert subprocess.run([program], timeout=LIMIT).returncode == -31


@pytest.mark.parametrize('file, reason', [
    (b'QFI\xfb' + bytes(600), 'qcow2 of version 0'),
    (b'KDMV' + bytes(600), 'VMDK of version 0')])
def test_a_refusal_has_its_reason(file, reason):
    with (parser_of(file) as parser,
          pytest.raises(confined.RefusedError, match=reason)):
        list(parser.pieces())


@pytest.mark.parametrize('kind, said', [
    (confined.DEFLATED, 'damaged'), (confined.ZLIB, 'damaged'),
    (confined.ZSTD, 'zstd')])
def test_a_stream_that_is_damaged(kind, said):
    with parser_of(b'\xff' * 1000) as parser:
        assert not list(parser.pieces())
        with pytest.raises(confined.RefusedError, match=said):
            parser.send(confined.Piece(0, 4096, 100, kind, 700, 4096, 4096))
            parser.receive()


@pytest.mark.parametrize('room, most', [
    ((4 << 20) + 1, 4096), (700, (2 << 20) + 1)])
def test_a_parent_that_errs(room, most):
    with parser_of(b'\xff' * (5 << 20)) as parser:
        list(parser.pieces())
        with pytest.raises(confined.RefusedError, match='status 1'):
            parser.send(confined.Piece(0, 1, 0, confined.ZLIB, room, 1, most))
            parser.receive()


def test_a_parent_that_goes_away():
    process = subprocess.Popen(
        [confined.PROGRAM, str(LIMIT)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, env={})
    process.stdout.close()
    process.stdin.close()
    assert process.wait(LIMIT) in (0, 1, -13)   # SIGPIPE
