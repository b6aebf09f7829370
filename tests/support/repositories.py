# SPDX-License-Identifier: Apache-2.0

"""Shared helpers for tests of repositories.

They make contents, edit a repository's files from outside (written from
``doc/source/contributor/format.rst``), hold locks as another program of the
repository would, and run functions in a child with a time limit.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import pathlib
import pickle
import random
import select
import signal
import struct
import subprocess
import time
import traceback
import warnings

import pytest
import xxhash

from glance_dedup.repository import image_repository

PAGE = 4096
SHARE_BYTE = 1 << 32
INTENT_BYTE = 1 << 33
FEATURE_BYTE = 1 << 35
USERS_BYTE = 1

LIVE, VOID, FREED, DAMAGED = 1, 2, 3, 4
POISONED = 1


# Commands that open the repository before any other step.
COMMANDS = (
    'image copy image other', 'image delete image', 'image get image -',
    'image list', 'image mark-lost image --yes', 'image put other /dev/null',
    'image show image', 'image verify --all --no-glance',
    'glance export --all /tmp', 'glance orphans --delete',
    'glance missing --store x', 'task collect', 'task collect --dry-run',
    'task merge', 'task recompress', 'task scrub', 'task scrub --full',
    'task evict --limit 1M', 'repository space', 'repository check',
    'repository rebuild-catalog', 'index rebuild', 'repository show')


# -- contents -----------------------------------------------------------------

def noise(length, seed=1):
    """Return bytes that neither compress nor repeat."""
    return random.Random(seed).randbytes(length)


def mixture(length, seed=1, unit=4096):
    """Return data like a disk image's: noise, text, repetition and zeros."""
    rng = random.Random(seed)
    data = bytearray()
    while len(data) < length:
        kind = rng.randrange(4)
        if kind == 0:
            data += rng.randbytes(rng.randrange(1, 4) * unit)
        elif kind == 1:
            data += bytes(rng.randrange(1, 4) * unit)
        elif kind == 2:
            data += (b'line %d of a text\n' % rng.randrange(99)) * (unit // 8)
            data += bytes(-len(data) % unit)
        else:
            # Add one of a few blocks that every image has.
            data += noise(unit, rng.randrange(5))
    return bytes(data[:length])


# -- repositories -------------------------------------------------------------

def create(path, **parameters):
    """Create a repository; also with the digest that only tests may choose."""
    weak = parameters.get('fingerprint') == 'weak-8'
    if weak:
        parameters['fingerprint'] = 'xxh3-128'
    image_repository.Repository.create(path, **parameters)
    if weak:
        edit_parameters(path, fingerprint='weak-8')
    return pathlib.Path(path)


def edit_parameters(path, **changes):
    """Change repository.json and give it the right checksum again."""
    file = pathlib.Path(path) / 'repository.json'
    fields = json.loads(file.read_text())
    del fields['checksum']
    fields.update(changes)
    plain = json.dumps(fields, sort_keys=True, separators=(',', ':'))
    fields['checksum'] = xxhash.xxh3_64_hexdigest(plain.encode())
    file.write_text(json.dumps(fields))


def open_repository(path, **options):
    """Open with a small filter in a directory beside the repository."""
    path = pathlib.Path(path)
    options.setdefault('filter_dir', str(path.parent / f'{path.name}-filter'))
    options.setdefault('filter_mib', 1)
    return image_repository.Repository(path, **options)


def remove_filters(top, directory=f'/dev/shm/glance-dedup-{os.geteuid()}'):
    """Remove the filters of repositories below `top`: they are memory."""
    top = os.fsencode(os.path.realpath(top)) + b'/'
    for path in pathlib.Path(directory).glob('*.filter'):
        with contextlib.suppress(OSError), open(path, 'rb') as f:
            if f.read(4096)[1024:].startswith(top):
                path.unlink()


def read_all(repo, image_id):
    with repo.open_image(image_id) as image:
        return image.read()


def put(repo, image_id, data, **options):
    with repo.begin(image_id, **options) as transaction:
        transaction.write(data)
        return transaction.commit()


def put_unaware(repo, image_id, data):
    """Store an image as a host that does not see the blocks of others."""
    with open_repository(repo.path, codec='none', index='none') as unaware:
        return put(unaware, image_id, data)


def spool(path, kind='T'):
    return sorted(
        name for name in os.listdir(os.path.join(path, 'spool'))
        if name.startswith(f'{kind}-'))


def require_clean(path):
    """Require that the checker, the second implementation, finds no fault."""
    from glance_dedup.check import checker
    report = checker.check(path)
    damage = [str(f) for f in report.findings if f.severity == checker.DAMAGE]
    assert report.ok and not damage, damage
    return report


# -- files of a repository ----------------------------------------------------

def ruin(file, at):
    """Overwrite 64 bytes of a file."""
    with open(file, 'r+b') as f:
        f.seek(at)
        f.write(b'\xff' * 64)


def group_path(path, number):
    """Return the path of a group, by its second name if it has no other."""
    name = pathlib.Path(path) / 'groups' / f'{number:08x}'
    second = name.with_name(f'{name.name}~')
    return second if second.exists() and not name.exists() else name


class Group:
    """A group's file, which can be read and edited."""

    RECORD = struct.Struct('<QQIIQ')
    ENTRY = struct.Struct('<32sQIQ')
    SEGMENT = struct.Struct('<4sBBHIIII')

    def __init__(self, path, number):
        self.path = group_path(path, number)
        self.data = bytearray(self.path.read_bytes())
        self.seed, = struct.unpack_from('<Q', self.data, 504)
        self.slots, = struct.unpack_from('<I', self.data, 48)

    def save(self):
        with open(self.path, 'r+b') as f:
            f.write(self.data)
            f.truncate(len(self.data))

    # Published records, as [sequence, generation, count, flags, end].

    def records(self):
        """Return the valid records, the newest first."""
        found = []
        for at in (512, 1024):
            checksum, = struct.unpack_from('<Q', self.data, at + 504)
            if checksum == xxhash.xxh3_64_intdigest(
                    self.data[at:at + 504], seed=self.seed):
                found.append(list(self.RECORD.unpack_from(self.data, at)))
        return sorted(found, reverse=True)

    def record(self):
        found = self.records()
        return found[0] if found else [0, 0, 0, 0, 0]

    def write_record(self, record):
        at = 512 + 512 * (record[0] % 2)
        page = bytearray(504)
        self.RECORD.pack_into(page, 0, *record)
        self.data[at:at + 512] = page + struct.pack(
            '<Q', xxhash.xxh3_64_intdigest(bytes(page), seed=self.seed))

    def forget_newest_record(self):
        """Clear the newest record: a crash came before its write."""
        at = 512 + 512 * (self.record()[0] % 2)
        self.data[at:at + 512] = bytes(512)

    # Entries

    @staticmethod
    def entry_offset(slot):
        return 4096 + 512 * (slot // 9) + 56 * (slot % 9)

    def raw_entry(self, slot):
        at = self.entry_offset(slot)
        return bytes(self.data[at:at + 56])

    def entry(self, slot):
        """Return (fingerprint, checksum, segment, place)."""
        return self.ENTRY.unpack_from(self.data, self.entry_offset(slot))

    def state(self, slot):
        return self.entry(slot)[3] >> 61

    def is_nodedup(self, slot):
        return bool(self.entry(slot)[3] >> 60 & 1)

    def copies_together(self):
        """Return slots of copies that lie in one segment: (earlier, later)."""
        last, found = {}, []
        for slot in range(self.record()[2]):
            fingerprint, _, segment, _ = self.entry(slot)
            if self.state(slot) != LIVE:
                continue
            earlier = last.setdefault((segment, fingerprint), slot)
            if earlier != slot and (self.is_nodedup(earlier)
                                    or self.is_nodedup(slot)):
                found.append((earlier, slot))
        return found

    def list_size(self, segment):
        """Return the bytes of a segment's list of slots; 0: it has none."""
        layout, blocks = struct.unpack_from('<BH', self.data, segment + 5)
        return 2 * blocks if self.data[8] >= 2 and layout == 1 else 0

    def write_entry(self, slot, fingerprint=bytes(32), checksum=0, segment=0,
                    place=0, state=None):
        if state is not None:
            place = place & ((1 << 61) - 1) | state << 61
        raw = self.ENTRY.pack(fingerprint, checksum, segment, place)
        low = xxhash.xxh3_64_intdigest(
            raw, seed=(self.seed + slot) % (1 << 64)) & 0xffffffff
        at = self.entry_offset(slot)
        self.data[at:at + 56] = raw + struct.pack('<I', low)

    def used(self):
        """Return the number of slots up to the last that is not empty."""
        last = 0
        for slot in range(self.slots):
            if self.raw_entry(slot) != bytes(56):
                last = slot + 1
        return last

    def data_start(self):
        sectors = -(-self.slots // 9)
        return -(-(4096 + 512 * sectors) // 4096) * 4096


# -- locks, as other programs hold them ---------------------------------------

_FLOCK = struct.Struct('@hhqqi4x')


def set_lock(fd, byte, kind, bytes_=1):
    """Set one OFD lock; return False if it is refused.

    :param bytes_: how many; 0: to the end of the file
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK,
                    _FLOCK.pack(kind, os.SEEK_SET, byte, bytes_, 0))
    except OSError as e:
        if e.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def lock_held(path, byte):
    """Return the lock of other processes: None, 'shared' or 'exclusive'."""
    with open(path, 'r+b') as f:
        answer = fcntl.fcntl(f, fcntl.F_OFD_GETLK, _FLOCK.pack(
            fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    kind = _FLOCK.unpack(answer)[0]
    return {fcntl.F_UNLCK: None, fcntl.F_RDLCK: 'shared',
            fcntl.F_WRLCK: 'exclusive'}[kind]


def group_lock_held(path, byte):
    return lock_held(pathlib.Path(path) / 'locks' / 'groups', byte)


def image_lock_byte(image_id):
    """Return the byte of ``locks/images`` that is an image's lock."""
    return xxhash.xxh3_64_intdigest(image_id.encode()) >> 2


@contextlib.contextmanager
def holding(path, *bytes_, shared=False):
    """Hold lock bytes of a file for a while."""
    with open(path, 'r+b') as f:
        for byte in bytes_:
            assert set_lock(f.fileno(), byte,
                            fcntl.F_RDLCK if shared else fcntl.F_WRLCK)
        yield f


@contextlib.contextmanager
def collector_in(path, *groups):
    """Hold the maintainer's lease and exclusive lock of groups."""
    wanted = [byte for group in groups
              for byte in (group, SHARE_BYTE + group)]
    with holding(pathlib.Path(path) / 'locks' / 'groups', *wanted):
        yield


# -- children -----------------------------------------------------------------

class ChildFailed(Exception):
    pass


def fork_child(function, unnoticed=False):
    """Run `function` in a forked child; return wait_for_child's argument.

    :param unnoticed: fork in C, so that Python calls nothing in the child
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Some tests fork on purpose while the parent has threads.
        warnings.simplefilter('ignore', DeprecationWarning)
        pid = ctypes.PyDLL(None).fork() if unnoticed else os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        os.close(reading)
        # pytest's own alarm must not fire in the child.
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            result = (True, function())
        except BaseException:
            result = (False, traceback.format_exc())
        result = pickle.dumps(result)
        with os.fdopen(writing, 'wb') as f:
            # The length comes first, since a child of this child may hold the
            # pipe.
            f.write(len(result).to_bytes(8, 'little') + result)
    finally:
        os._exit(0)


def wait_for_child(child, timeout=60):
    """Return the function's result; raise an exception if it failed."""
    pid, reading = child
    data = b''
    deadline = time.monotonic() + timeout
    try:
        while len(data) < 8 + int.from_bytes(data[:8], 'little'):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([reading], [], [], left)[0]:
                raise ChildFailed(f'nothing came in {timeout} seconds')
            piece = os.read(reading, 1 << 16)
            if not piece:
                break
            data += piece
    except BaseException:
        # SIGABRT makes Python print all stacks: pytest has set up
        # faulthandler.
        os.kill(pid, signal.SIGABRT)
        raise
    finally:
        os.close(reading)
        _, status = os.waitpid(pid, 0)
    if not data:
        raise ChildFailed(f'it ended with status {status} and said nothing')
    good, result = pickle.loads(data[8:])
    if not good:
        raise ChildFailed(result)
    return result


def in_child(function, timeout=60, unnoticed=False):
    return wait_for_child(fork_child(function, unnoticed), timeout)


def as_user(uid, function):
    """Return a function that changes to another user first."""
    def run():
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        return function()
    return run


def eventually(condition, timeout=60, failure='it did not come about'):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, failure
        time.sleep(0.01)


# -- small disks --------------------------------------------------------------

@contextlib.contextmanager
def small_disk(path, size):
    """Mount a tmpfs of so many bytes on `path`."""
    if os.geteuid() != 0:
        pytest.skip('mounting needs root')
    path.mkdir()
    mount = subprocess.run(
        ['mount', '-t', 'tmpfs', '-o', f'size={size},mode=0700', 'tmpfs',
         str(path)], capture_output=True, text=True, timeout=30)
    if mount.returncode != 0:
        pytest.skip(f'mounting is not possible here: {mount.stderr}')
    try:
        yield path
    finally:
        subprocess.run(['umount', '-l', str(path)], check=True, timeout=30)


def fill_disk(path):
    """Leave no space; return the file to be unlinked."""
    file = path / 'filling'
    with open(file, 'wb', buffering=0) as f:
        with contextlib.suppress(OSError):
            while f.write(bytes(1 << 16)):
                pass
        with contextlib.suppress(OSError):
            while f.write(bytes(512)):
                pass
    return file
