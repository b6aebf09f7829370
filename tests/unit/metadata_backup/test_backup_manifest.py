# SPDX-License-Identifier: Apache-2.0

"""Manifests are written and read, and other contents are refused."""

import contextlib
import dataclasses
import hashlib
import hmac
import io
import json
import tracemalloc

import pytest
import zstandard

from glance_dedup.base import exceptions
from glance_dedup.base import signingkeys
from glance_dedup.metadata_backup import backup_manifest
from glance_dedup.metadata_backup import keys
from glance_dedup.objects import object_store
from glance_dedup.repository import repo_parameters

OWNER, OTHER = 'a' * 32, 'b' * 32
PARAMETERS = repo_parameters.Parameters.choose()
HEAD = backup_manifest.Head(OWNER, 7, 1.5, PARAMETERS.to_json().decode())
SIGNING = signingkeys.Keys(b'k' * 32)
DIGEST = 'c' * 64
KEY = keys.of_manifest(OWNER, 7, 'd' * 32)
GROUPS = [backup_manifest.Group(1, 'e' * 32, 5000, OWNER, DIGEST),
          backup_manifest.Group(3, 'f' * 32, 1 << 32, OTHER, DIGEST)]
RECIPES = [backup_manifest.Recipe('b', '1' * 32, 8192, OWNER, DIGEST),
           backup_manifest.Recipe('b-1', '2' * 32, 4096, OTHER, DIGEST)]


class Location:
    url = 's3://cold/prefix'


class Store:
    """An object store that has one object."""

    location = Location()

    def __init__(self, content, key=KEY):
        self.content = content
        self.key = key

    def size(self, key):
        if key != self.key:
            raise object_store.ObjectNotFound(key)
        return len(self.content)

    def get(self, key, start, length):
        assert length and key == self.key
        return self.content[start:start + length]


def written(lines=(*GROUPS, *RECIPES), head=HEAD, signing=SIGNING):
    file = io.BytesIO()
    writer = backup_manifest.Writer(file, head, signing)
    for line in lines:
        writer.add(line)
    return file, writer.finish()


def lines_of(content):
    return zstandard.ZstdDecompressor().stream_reader(
        content).read().splitlines(keepends=True)


def packed(lines, level=3):
    return zstandard.ZstdCompressor(level=level).compress(b''.join(lines))


def sealed(lines):
    """Return a manifest of these lines without a foot, and the right one."""
    content = hashlib.sha256(b''.join(lines[1:])).hexdigest()
    foot = {'groups': sum(line.startswith(b'["g"') for line in lines),
            'recipes': sum(line.startswith(b'["r"') for line in lines),
            'content': content,
            'whole': hashlib.sha256(b''.join(lines)).hexdigest()}
    foot['mac'] = hmac.new(
        signingkeys.manifest_key(SIGNING.current), foot['whole'].encode(),
        hashlib.sha256).hexdigest()
    return packed([*lines, json.dumps(foot).encode()])


def opened(content, key=KEY, signing=SIGNING):
    return backup_manifest.Manifest(Store(content, key), key, signing)


def test_what_is_written_is_read():
    file, foot = written()
    with opened(file.getvalue()) as found:
        assert (found.head, found.foot) == (HEAD, foot)
        assert found.head.read_parameters() == PARAMETERS
        assert (foot.groups, foot.recipes) == (2, 2)
        # Several iterations run at the same time.
        a, b = found.groups(), found.groups()
        assert [next(a), next(b), *a] == [GROUPS[0], *GROUPS]
        assert list(found.recipes()) == RECIPES
    assert GROUPS[1].key == f'{OTHER}/g/00000003-{"f" * 32}'
    assert RECIPES[1].key == f'{OTHER}/r/b-1-{"2" * 32}'
    assert keys.parse(OTHER, RECIPES[1].key) == ('b-1', '2' * 32)


def test_equal_contents():
    """Manifests with equal entries are equal despite number and time."""
    other = backup_manifest.Head(OWNER, 8, 2.5, HEAD.parameters)
    assert written()[1].content == written(head=other)[1].content
    assert written()[1].content != written(GROUPS)[1].content


@pytest.mark.parametrize('accepted,current', [
    (SIGNING, True),
    (signingkeys.Keys(b'n' * 32, SIGNING.current), False)])
def test_keys_that_are_accepted(accepted, current):
    with opened(written()[0].getvalue(), signing=accepted) as found:
        assert found.has_current_key == current


@pytest.mark.parametrize('made', [
    b'other', b'', b'k' * 31, signingkeys.manifest_key(SIGNING.current)])
def test_a_manifest_of_another_key(made):
    content = written(signing=signingkeys.Keys(made))[0].getvalue()
    with pytest.raises(exceptions.DamagedError,
                       match=f'{KEY} was not made with the repository'):
        opened(content)
    # The operator accepts manifests of lost keys.
    with opened(content, signing=None) as found:
        assert not found.has_current_key


@pytest.mark.parametrize('mac', [None, '', 'c' * 63, 'C' * 64, 7, [], True])
def test_an_hmac_that_is_none(mac):
    *lines, foot = lines_of(written()[0].getvalue())
    for fields in ({**json.loads(foot), 'mac': mac},
                   {key: value for key, value in json.loads(foot).items()
                    if key != 'mac'}):
        for signing in (SIGNING, None):
            with pytest.raises(exceptions.DamagedError):
                opened(packed([*lines, json.dumps(fields).encode()]),
                       signing=signing)


def test_every_flipped_bit_is_noticed():
    content = written()[0].getvalue()
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1 << at % 8
        with contextlib.suppress(exceptions.DamagedError), opened(
                bytes(changed)) as found:
            # Reserved bits of zstd may change.
            assert list(found.groups()) == GROUPS
            assert list(found.recipes()) == RECIPES


def test_every_cut_is_noticed():
    content = written()[0].getvalue()
    for length in range(len(content) - 4):    # the checksum of zstd
        with pytest.raises(exceptions.DamagedError, match=r'm/0+7-d'):
            opened(content[:length])


def test_every_line_counts():
    lines = lines_of(written()[0].getvalue())
    for at in range(len(lines)):
        for changed in (lines[:at] + lines[at + 1:],
                        lines[:at] + [lines[at]] + lines[at:],
                        lines[:at] + [b'\n'] + lines[at:],
                        lines[:at] + [b'{}\n'] + lines[at:],
                        lines + [lines[at]]):
            with pytest.raises(exceptions.DamagedError):
                opened(packed(changed))


@pytest.mark.parametrize('line', [
    ['g', 0, 'e' * 32, 5000, OWNER, DIGEST],
    ['g', 1 << 25, 'e' * 32, 5000, OWNER, DIGEST],
    ['g', True, 'e' * 32, 5000, OWNER, DIGEST],
    ['g', '1', 'e' * 32, 5000, OWNER, DIGEST],
    ['g', 5, 'E' * 32, 5000, OWNER, DIGEST],
    ['g', 5, '0' * 32, 5000, OWNER, DIGEST],
    ['g', 5, 'e' * 32, 0, OWNER, DIGEST],
    ['g', 5, 'e' * 32, 1 << 40, OWNER, DIGEST],
    ['g', 5, 'e' * 32, 5000, '../x'], ['g', 5, 'e' * 32, 5000],
    ['g', 5, None, 5000, OWNER, DIGEST],
    ['g', 2, 'e' * 32, 5000, OWNER, DIGEST],
    ['r', '../../etc', '1' * 32, 8192, OWNER, DIGEST],
    ['r', '', '1' * 32, 1, OWNER, DIGEST],
    ['r', 7, '1' * 32, 8192, OWNER, DIGEST],
    ['r', 'x', 'y', 8192, OWNER, DIGEST],
    ['g', 5, 'e' * 32, 5000, OWNER, DIGEST[1:]],
    ['g', 5, 'e' * 32, 5000, OWNER, None],
    ['r', 'x', '1' * 32, 8192, OWNER],
    ['r', 'x', '1' * 32, 8192.5, OWNER, DIGEST],
    ['x'], [], 7, None, 'x', [[]]])
def test_lines_that_are_none(line):
    first = lines_of(written(())[0].getvalue())[0]
    before = [json.dumps(['g', 3, 'f' * 32, 5000, OWNER, DIGEST]).encode()
              + b'\n']
    with opened(sealed([first, *before])) as found:
        assert found.foot.groups == 1
    with pytest.raises(exceptions.DamagedError):
        opened(sealed([first, *before, json.dumps(line).encode() + b'\n']))


@pytest.mark.parametrize('change', [
    {'kind': 'x'}, {'version': '1'}, {'owner': OTHER}, {'owner': 7},
    {'number': 8}, {'number': True}, {'taken': 'x'}, {'taken': None},
    {'parameters': '{}'}, {'parameters': 7}, {'more': 1},
    {'features': 'cold'}, {'features': None}, {'features': {'cold': 1}}])
def test_heads_that_are_none(change):
    first = json.loads(lines_of(written(())[0].getvalue())[0])
    with opened(sealed([json.dumps(first).encode() + b'\n'])):
        pass
    with pytest.raises(exceptions.DamagedError):
        opened(sealed([json.dumps({**first, **change}).encode() + b'\n']))


def test_a_newer_version():
    first = json.loads(lines_of(written(())[0].getvalue())[0])
    with pytest.raises(exceptions.VersionError, match='version 4'):
        opened(sealed([json.dumps({**first, 'version': 4}).encode() + b'\n']))


def test_features():
    head = dataclasses.replace(HEAD, features=('cold', 'nodedup'))
    with opened(written((), head)[0].getvalue()) as manifest:
        assert manifest.head == head
    first = json.loads(lines_of(written(())[0].getvalue())[0])
    for name in 'later', '', 7:
        with pytest.raises(exceptions.VersionError,
                           match=f'feature {name!r}.*newer program'):
            opened(sealed([json.dumps({**first, 'features': ['cold', name]}
                                      ).encode() + b'\n']))
    # Version 2 had no list.
    del first['features']
    with opened(sealed([json.dumps({**first, 'version': 2}).encode()
                        + b'\n'])) as manifest:
        assert manifest.head.features == ()


@pytest.mark.parametrize('content', [
    b'', b'x' * 100, packed([]), packed([b'[' * 100000]),
    packed([b'{"a":' * 10000]), packed([b'\xff\n'])])
def test_what_is_no_manifest(content):
    with pytest.raises(exceptions.DamagedError):
        opened(content)


def test_a_manifest_under_the_key_of_another():
    with pytest.raises(exceptions.DamagedError, match='key of another'):
        opened(written()[0].getvalue(), keys.of_manifest(OWNER, 8, 'd' * 32))


def test_a_bomb():
    """A gigabyte of zeros in few bytes is unpacked only in small part."""
    piece = bytes(1 << 20)
    file = io.BytesIO()
    with zstandard.ZstdCompressor(level=1).stream_writer(
            file, closefd=False) as writer:
        for _ in range(256):
            writer.write(piece)
    tracemalloc.start()
    with pytest.raises(exceptions.DamagedError):
        opened(file.getvalue())
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


# Long: tracemalloc follows the memory of a hundred thousand lines.
def test_memory_is_bounded():
    """Memory is bounded for as many lines as a large repository has."""
    def lines():
        for number in range(1, 50000):
            yield backup_manifest.Group(number, f'{number:032x}', 5000, OWNER,
                                        DIGEST)
        for number in range(1, 50000):
            yield backup_manifest.Recipe(f'{number:08}', f'{number:032x}',
                                         8192,
                                         OWNER, DIGEST)

    with open('/dev/null', 'wb') as nowhere:
        tracemalloc.start()
        writer = backup_manifest.Writer(nowhere, HEAD, SIGNING)
        for line in lines():
            writer.add(line)
        writer.finish()
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        tracemalloc.stop()
    content = written(lines())[0].getvalue()
    tracemalloc.start()
    with opened(content) as found:
        assert sum(1 for _ in found.groups()) == 49999
        assert sum(1 for _ in found.recipes()) == 49999
    # The object is fetched in pieces of some MiB.
    assert tracemalloc.get_traced_memory()[1] < (4 << 20) + len(content)
    tracemalloc.stop()


def test_merged():
    a = [backup_manifest.Group(number, 'e' * 32, 5000, OWNER, DIGEST)
         for number in (1, 2, 4)]
    b = [backup_manifest.Group(number, 'f' * 32, 5000, OWNER, DIGEST)
         for number in (2, 3, 4, 9)]
    assert [(x and x.number, y and y.number) for x,
            y in backup_manifest.merged(
        iter(a), iter(b))] == [
            (1, None), (2, 2), (None, 3), (4, 4), (None, 9)]


def test_two_of_one_number(monkeypatch):
    """Of two manifests with one number the latest counts."""
    contents = {}
    for number, taken, name in ((7, 1.0, 'a'), (7, 3.0, 'b'), (7, 2.0, 'c'),
                                (6, 9.0, 'd')):
        head = backup_manifest.Head(OWNER, number, taken, HEAD.parameters)
        contents[keys.of_manifest(OWNER, number, name * 32)] = written(
            head=head)[0].getvalue()

    class Several(Store):
        def __init__(self):
            """A store with all contents."""

        def size(self, key):
            return len(contents[key])

        def get(self, key, start, length):
            return contents[key][start:start + length]

    with backup_manifest.newest_whole(Several(), OWNER, contents, SIGNING,
                                      pytest.fail) as found:
        assert found.head.taken == 3.0
    told = []
    for key in list(contents)[:3]:
        contents[key] = b'x'
    with backup_manifest.newest_whole(Several(), OWNER, contents, SIGNING,
                                      told.append) as found:
        assert found.head.number == 6
    assert len(told) == 3


def test_a_key_that_lags(monkeypatch):
    monkeypatch.setattr(object_store, 'FIRST_WAIT', 0.0)
    content = written()[0].getvalue()
    left = [3]

    class Lagging(Store):
        def size(self, key):
            left[0] -= 1
            if left[0] >= 0:
                raise object_store.ObjectNotFound(key)
            return super().size(key)

    with backup_manifest.newest_whole(Lagging(content), OWNER, [KEY], SIGNING,
                                      pytest.fail) as found:
        assert found.head == HEAD
    left[0] = 4
    told = []
    assert backup_manifest.newest_whole(
        Lagging(content), OWNER, [KEY], SIGNING, told.append) is None
    assert len(told) == 1
