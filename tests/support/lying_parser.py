# SPDX-License-Identifier: Apache-2.0

"""A program in place of the parser of disk formats, which an image took over.

Its first argument names one of :data:`LIES`. It speaks the protocol of
``confined.c`` up to the frame in which it lies.
"""

import itertools
import os
import pathlib
import shlex
import signal
import struct
import sys
import time

HELLO, READ, PIECE, END, REFUSED, PLAIN = range(1, 7)
QCOW2, DEFLATED = 1, 3
CLUSTER = 4096
MAX = (1 << 64) - 1
#: The stream that it says the disk consists of.
ROOM = 700


def send(content: bytes) -> None:
    while content:
        content = content[os.write(1, content):]


def receive(length: int) -> bytes:
    content = b''
    while len(content) < length:
        more = os.read(0, length - len(content))
        if not more:
            os._exit(0)
        content += more
    return content


def frame(kind: int, a: int = 0, b: int = 0, zeros: int = 0) -> None:
    send(struct.pack('<IIQQ', kind, zeros, a, b))


def piece(offset: int = 0, length: int = CLUSTER, place: int = 0,
          kind: int = 2, room: int = 0, least: int = 0, most: int = 0) -> None:
    frame(PIECE, offset, length)
    send(struct.pack('<QIIII', place, kind, room, least, most))


def stream(**other: int) -> None:
    piece(**{'kind': DEFLATED, 'room': ROOM, 'least': CLUSTER,
             'most': CLUSTER, **other})


def end(number: int = QCOW2, size: int = CLUSTER) -> None:
    frame(END, number, size)


def read(offset: int, length: int) -> None:
    frame(READ, offset, length)
    receive(length)


def for_ever(say, *args: int) -> None:
    while True:
        say(*args)


def drip() -> None:
    for byte in itertools.cycle(struct.pack('<IIQQ', READ, 0, 0, 1)):
        send(bytes([byte]))
        time.sleep(0.01)


def ask_and_not_read() -> None:
    for _ in range(10):
        frame(READ, 0, 64 << 10)
    time.sleep(600)


def many_pieces() -> None:
    for number in itertools.count():
        piece(number)


def answer(*frames) -> None:
    stream()
    end()
    receive(16 + ROOM)
    for say, *args in frames:
        say(*args)
    for_ever(receive, 1)


def plain(used: int, length: int, sent: int | None = None) -> None:
    frame(PLAIN, used, length)
    send(bytes(length if sent is None else sent))


#: What it does before it is confined.
BEFORE = {
    'ends at once': (),
    'is not confined': ((os._exit, 2),),
    'another version': ((frame, HELLO, 2),),
    'no version': ((frame, READ, 0, 512),),
    'half of a frame': ((send, b'\1\0'),),
    'never begins': ((time.sleep, 600),),
}
#: What it does in place of mapping, and the lie in a few words, or how it is
#: found out.
MAP = {
    'ends': ((), 'status 0'),
    'ends with a status': (((os._exit, 77),), 'status 77'),
    'crashes': (((signal.raise_signal, signal.SIGSEGV),), 'signal 11'),
    'half of a frame': (((send, b'\2\0\0'),), 'status 0'),
    'half of a piece': (((frame, PIECE, 0, CLUSTER),), 'status 0'),
    'hangs': (((time.sleep, 600),), 'took too long'),
    'drips': (((drip,),), 'took too long'),
    'asks and does not read': (((ask_and_not_read,),), 'took too long'),
    'kind 0': (((frame, 0),), 'frame 0'),
    'kind 99': (((frame, 99),), 'frame 99'),
    'greets again': (((frame, HELLO, 1),), 'frame 1'),
    'no zeros': (((frame, READ, 0, 1, 7),), 'without zeros'),
    'noise': (((send, b'\xff' * 1000),), 'without zeros'),
    'plain bytes': (((plain, 1, 1),), 'frame 6'),
    'reads behind the end': (((read, 100_000, 1),), 'a read of no'),
    'reads over the end': (((read, 99_999, 2),), 'a read of no'),
    'reads far away': (((read, MAX, 2),), 'a read of no'),
    'reads nothing': (((for_ever, frame, READ, 0, 0),), 'a read of no'),
    'reads too much': (((frame, READ, 0, (64 << 10) + 1),), 'a read of no'),
    'reads for ever': (((for_ever, read, 0, 50_000),), 'more reads'),
    'a gap': (((piece, CLUSTER),), 'out of order'),
    'an overlap': (((piece,), (piece, 512)), 'out of order'),
    'twice the same': (((piece,), (piece,)), 'out of order'),
    'an empty piece': (((piece, 0, 0),), 'no length'),
    'a long piece': (((piece, 0, MAX),), 'no length'),
    'a disk beyond 2^62': (
        ((piece, 0, 1 << 62, 0, 0), (piece, 1 << 62, 512, 0, 0)), 'no length'),
    'an unknown kind': (((piece, 0, CLUSTER, 0, 6),), 'no kind'),
    'no kind at all': (((piece, 0, CLUSTER, 0, (1 << 32) - 1),), 'no kind'),
    'a place behind the end': (((piece, 0, 1, 100_000),), 'outside'),
    'a place over the end': (((piece, 0, CLUSTER, 99_000),), 'outside'),
    'a place far away': (((piece, 0, CLUSTER, MAX),), 'outside'),
    'longer than the file': (((piece, 0, 1 << 40),), 'outside'),
    'many pieces': (((many_pieces,),), 'out of order'),
    'more pieces than bytes': (
        [(piece, number, 1) for number in range(1500)], 'more pieces'),
    'a stream without room': (((lambda: stream(room=0),),), 'no length'),
    'a stream with much room': (
        ((lambda: stream(room=(4 << 20) + 1),),), 'no length'),
    'a stream outside': (((lambda: stream(place=99_999),),), 'outside'),
    'a stream far away': (((lambda: stream(place=MAX),),), 'outside'),
    'a stream for less': (((lambda: stream(least=100),),), 'no plain length'),
    'a stream for more': (
        ((lambda: stream(most=(2 << 20) + 1),),), 'no plain length'),
    'a stream upside down': (
        ((lambda: stream(most=CLUSTER - 1),),), 'no plain length'),
    'a format without a name': (((piece,), (end, 6)), 'no name'),
    'a format far away': (((piece,), (end, MAX)), 'no name'),
    'an empty disk': (((end, QCOW2, 0),), 'another size'),
    'a disk of no sectors': (
        ((piece, 0, 100), (end, QCOW2, 100)), 'another size'),
    'a larger disk': (((piece,), (end, QCOW2, 2 * CLUSTER)), 'another size'),
    'a smaller disk': (((piece,), (end, QCOW2, 512)), 'another size'),
    'raw, with pieces': (((piece,), (end, 0, 100_000)), 'raw file'),
    'raw, of another size': (((end, 0, 512),), 'raw file'),
    'no reason': (((frame, REFUSED, 0),), 'reason without end'),
    'a long reason': (((frame, REFUSED, 1 << 60),), 'reason without end'),
    'half of a reason': (
        ((frame, REFUSED, 100), (send, b'since')), 'status 0'),
}
#: What it answers when it gets the stream.
STREAM = {
    'ends': (((os._exit, 0),), 'status 0'),
    'hangs': (((time.sleep, 600),), 'took too long'),
    'another frame': (((frame, READ, 0, 512),), 'frame 2'),
    'a longer stream': (((plain, ROOM + 1, CLUSTER),), 'outside its room'),
    'no stream': (((plain, 0, CLUSTER),), 'outside its room'),
    'a stream far away': (((plain, MAX, CLUSTER),), 'outside its room'),
    'no bytes': (((plain, ROOM, 0),), 'of no such length'),
    'fewer bytes': (((plain, ROOM, CLUSTER - 1),), 'of no such length'),
    'more bytes': (((plain, ROOM, CLUSTER + 1),), 'of no such length'),
    'bytes without end': (((plain, ROOM, MAX, 1),), 'of no such length'),
    'half of the bytes': (
        ((plain, ROOM, CLUSTER, 100), (os._exit, 0)), 'status 0'),
}


def make(directory: pathlib.Path, when: str, lie: str) -> str:
    """Make the program that lies so; return its path."""
    program = directory / 'program'
    command = [sys.executable, __file__, when, lie]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    program.chmod(0o755)
    return str(program)


def main() -> None:
    when, lie = sys.argv[1:3]
    if when == 'before':
        for say, *args in BEFORE[lie]:
            say(*args)
        return
    frame(HELLO, 1)
    receive(8)
    if when == 'map':
        for say, *args in MAP[lie][0]:
            say(*args)
    elif when == 'stream':
        answer(*STREAM[lie][0])
    else:
        frame(REFUSED, len(lie.encode()))
        send(lie.encode())
        for_ever(receive, 1)


if __name__ == '__main__':
    main()
