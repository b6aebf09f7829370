# SPDX-License-Identifier: Apache-2.0

"""Files of credentials need the right permissions and contents."""

import os

import pytest

from glance_dedup.base import exceptions
from glance_dedup.objects import credentials
from glance_dedup.objects import object_location
from glance_dedup.objects import object_store

GOOD = b'[s3]\naccess_key = key\nsecret_key = hidden-secret\n'


@pytest.fixture
def path(tmp_path):
    made = tmp_path / 'credentials'
    made.write_bytes(GOOD)
    made.chmod(0o600)
    return made


@pytest.mark.parametrize('mode', [0o600, 0o640, 0o400, 0o440])
def test_modes_that_keep_others_out(path, mode):
    path.chmod(mode)
    assert credentials.read(str(path)) == GOOD


@pytest.mark.parametrize('mode', [0o644, 0o660, 0o620, 0o604, 0o602, 0o666])
def test_modes_that_do_not(path, mode):
    path.chmod(mode)
    with pytest.raises(exceptions.AccessDenied, match='chmod'):
        credentials.read(str(path))


@pytest.mark.skipif(os.geteuid() != 0, reason='gives a file away')
def test_a_file_of_somebody_else(path):
    os.chown(path, 12345, -1)
    with pytest.raises(exceptions.AccessDenied, match='12345'):
        credentials.read(str(path))


def test_what_is_no_file(path, tmp_path):
    link = tmp_path / 'link'
    link.symlink_to(path)
    fifo = tmp_path / 'fifo'
    os.mkfifo(fifo, 0o600)
    for bad in (link, fifo, tmp_path, tmp_path / 'missing'):
        with pytest.raises(exceptions.AccessDenied, match=bad.name):
            credentials.read(str(bad))


def test_a_large_file(path):
    path.write_bytes(b'#' * (credentials.MAX_SIZE + 1))
    with pytest.raises(exceptions.AccessDenied, match='larger'):
        credentials.read(str(path))


@pytest.mark.parametrize('content', [
    b'', b'[s3]\naccess_key = key\n', b'[s3]\nsecret_key = hidden-secret\n',
    b'hidden-secret', b'[s3\naccess_key = hidden-secret', b'\0' * 100,
    b'[s3]\naccess_key = \xff\xfe', b'[DEFAULT]\nx = $hidden-secret'])
def test_content_that_is_none(path, content):
    path.write_bytes(content)
    with pytest.raises(exceptions.AccessDenied, match=path.name) as raised:
        object_store.ObjectStore(object_location.parse('s3://bucket/x'),
                                 str(path))
    assert 'hidden-secret' not in str(raised.value)


@pytest.mark.parametrize('content', [
    b'', b'[swift]\nauth_url = http://127.0.0.1\n',
    b'[swift]\nauth_type = unknown\npassword = hidden-secret\n'])
def test_swift_that_is_none(path, content):
    path.write_bytes(content)
    with pytest.raises(exceptions.AccessDenied, match=path.name) as raised:
        object_store.ObjectStore(object_location.parse('swift://container/x'),
                                 str(path))
    assert 'hidden-secret' not in str(raised.value)


def test_no_environment_and_no_other_file(path, monkeypatch, tmp_path):
    """The credentials come only from the file."""
    path.write_bytes(b'[s3]\n')
    monkeypatch.setenv('AWS_ACCESS_KEY_ID', 'key')
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', 'secret')
    with pytest.raises(exceptions.AccessDenied):
        object_store.ObjectStore(object_location.parse('s3://bucket/x'),
                                 str(path))
