# SPDX-License-Identifier: Apache-2.0

"""The program that parses hostile files has no rights, and gets them right."""

import contextlib
import dataclasses
import pathlib
import random
import struct
import subprocess

import pytest

from tests.support import diskmaps
from tests.support import native

READ, PIECE, END, REFUSED, PLAIN = range(1, 6)
MIB = 1 << 20
LIMIT = 60


@dataclasses.dataclass
class Answer:
    """A frame of the program, and the bytes behind it."""

    kind: int
    a: int
    b: int
    content: bytes


class Confined:
    """The program, at work on the bytes of a file."""

    def __init__(self, file: bytes) -> None:
        self.file = file
        self.process = subprocess.Popen(
            [native.directory('plain', 'confined') / 'confined', str(LIMIT)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env={})
        self.send(struct.pack('<Q', len(file)))

    def send(self, content: bytes) -> None:
        self.process.stdin.write(content)
        self.process.stdin.flush()

    def receive(self, length: int) -> bytes:
        content = self.process.stdout.read(length)
        assert len(content) == length
        return content

    def answer(self) -> Answer:
        """Return the next frame that is no request, and serve requests."""
        while True:
            kind, a, b = struct.unpack('<IxxxxQQ', self.receive(24))
            if kind != READ:
                length = {PIECE: 24, REFUSED: a, PLAIN: b}.get(kind, 0)
                return Answer(kind, a, b, self.receive(length))
            assert a + b <= len(self.file)
            self.send(self.file[a:a + b])

    def close(self) -> int:
        """Close the pipes; return the exit status."""
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait(LIMIT)


@pytest.fixture
def confined():
    with contextlib.ExitStack() as stack:
        def start(file):
            program = Confined(file)
            stack.callback(program.process.wait)
            stack.callback(program.process.kill)
            return program
        yield start


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


def disk_of(program):
    """Return the disk, of the pieces that the program sends."""
    pieces = []
    while (answer := program.answer()).kind == PIECE:
        pieces.append(answer)
    assert answer.kind == END
    disk = bytearray(answer.b)
    for piece in pieces:
        place, kind = struct.unpack_from('<QI', piece.content)
        if kind == diskmaps.PLAIN:
            plain = program.file[place:place + piece.b]
        elif kind in diskmaps.HOLES:
            continue
        else:
            program.send(piece.content)
            plain = program.answer().content[:piece.b]
        disk[piece.a:piece.a + piece.b] = plain
    return disk


def converted(raw: pathlib.Path, *options: str) -> bytes:
    path = raw.with_name('converted')
    subprocess.run(['qemu-img', 'convert', *options, raw, path], check=True,
                   timeout=120)
    return path.read_bytes()


@pytest.mark.needs('qemu')
@pytest.mark.parametrize('options', [
    ('-O', 'qcow2', '-c'), ('-O', 'qcow2', '-c', '-o', 'cluster_size=2M'),
    ('-O', 'vmdk', '-o', 'subformat=streamOptimized'), ('-O', 'vdi')])
def test_the_disk_is_that_of_qemu(raw, confined, options):
    program = confined(converted(raw, *options))
    assert disk_of(program) == raw.read_bytes()
    assert program.close() == 0


def status_of(program):
    lines = pathlib.Path(
        f'/proc/{program.process.pid}/status').read_text().splitlines()
    return dict(line.split(':\t', 1) for line in lines if ':\t' in line)


@pytest.mark.needs('qemu')
def test_it_is_in_strict_mode_before_the_first_byte(raw, confined):
    program = confined(converted(raw, '-O', 'qcow2', '-c'))
    # It waits for the bytes that it has requested.
    assert struct.unpack('<IxxxxQQ', program.receive(24))[0] == READ
    assert status_of(program)['Seccomp'].strip() == '1'
    assert int(status_of(program)['VmSize'].split()[0]) < 64 * 1024


@pytest.mark.parametrize('file, reason', [
    (b'QFI\xfb' + bytes(600), b'qcow2 of version 0'),
    (b'KDMV' + bytes(600), b'VMDK of version 0')])
def test_a_refusal_has_its_reason(confined, file, reason):
    program = confined(file)
    answer = program.answer()
    assert answer.kind == REFUSED and reason in answer.content
    assert program.close() == 0


@pytest.mark.parametrize('kind, room, least, most', [
    (diskmaps.DEFLATED, 700, 1, 4096),              # not a stream
    (diskmaps.ZLIB, 700, 1, 4096),
    (diskmaps.ZSTD, 700, 1, 4096),                  # nothing decodes it
    (diskmaps.DEFLATED, 0xffffffff, 1, 4096),       # too large
    (diskmaps.DEFLATED, 700, 1, 0xffffffff)])
def test_a_stream_that_is_damaged(confined, kind, room, least, most):
    program = confined(b'\xff' * 1000)
    assert program.answer() == Answer(END, 0, 1000, b'')
    program.send(struct.pack('<QIIII', 100, kind, room, least, most))
    assert program.answer() == Answer(PLAIN, 0, 0, b'')
    assert program.close() == 0


@pytest.mark.needs('qemu')
def test_a_parent_that_goes_away(raw, confined):
    program = confined(converted(raw, '-O', 'qcow2', '-c'))
    program.receive(24)
    assert program.close() in (0, 1, -13)   # SIGPIPE
