# SPDX-License-Identifier: Apache-2.0

"""The names, users and ids that the options' items match."""

import os
import pwd

import pytest

from dedupd.http import limited
from dedupd.http import messages
from dedupd.serve import upload_rights

IMAGE, UPLOAD = 'image', 'u_' + 'ab' * 16


def backup(name):
    return f'b_{name}_20261123T180000Z'


def certificate(*names):
    return messages.Peer(operator=True, names=names)


def make(**options):
    return upload_rights.Rights({
        **{right.option: [] for right in upload_rights.RIGHTS}, **options})


def may(found, peer, image_id=IMAGE):
    try:
        found.require(peer, image_id)
    except messages.HTTPError as e:
        assert e.status == 403 and e.message.endswith('.')
        return False
    return True


@pytest.mark.parametrize('image_id, right', [
    (IMAGE, upload_rights.REPLICATE), ('u_', upload_rights.REPLICATE),
    ('u_' + 'AB' * 16, upload_rights.REPLICATE),
    (UPLOAD, upload_rights.UPLOAD),
    (backup('web'), upload_rights.BACK_UP), ('b_web', upload_rights.REPLICATE),
    # This day does not exist.
    ('b_web_20260230T000000Z', upload_rights.REPLICATE)])
def test_which_right_an_id_takes(image_id, right):
    assert upload_rights.needed(image_id) is right


@pytest.mark.parametrize('item, name, covers', [
    ('site', 'site', True), ('site', 'Site', False), ('site', 'site2', False),
    ('a.example', 'a.example', True), ('a.example', 'b.a.example', False),
    ('*.example', 'a.example', True), ('*.example', 'a.b.example', False),
    ('*.example', 'example', False), ('*.example', '.example', False),
    ('*.example', 'a.example.org', False), ('*.example', 'a\0.example', False),
    # A certificate's name does not act as a pattern.
    ('*.example', '*.example', False), ('a.example', '*.example', False),
    # A certificate's name does not act as a user.
    ('user:0', 'user:0', False)])
def test_names_of_certificates(item, name, covers):
    found = make(replicate_from=[item])
    assert may(found, certificate(name)) == covers
    assert may(found, certificate('other', name)) == covers


@pytest.mark.parametrize('item, source, covers', [
    ('host:web-vda', 'web-vda', True), ('host:web-vda', 'web-vdb', False),
    ('host:web-*', 'web-vda', True), ('host:web-*', 'web', False),
    ('host:web', 'web-vda', False), ('host:*', 'anything', True),
    ('other:*', 'anything', False)])
def test_names_of_backups(item, source, covers):
    found = make(backup_from=[item], replicate_from=['site'])
    assert may(found, certificate('host'), backup(source)) == covers
    assert not may(found, certificate('host'))
    # A site has other rights.
    assert not may(found, certificate('site'), backup(source))


def test_users_of_the_socket():
    name = pwd.getpwuid(0).pw_name
    found = make(replicate_from=['user:7'], upload_from=[f'user:{name}'],
                 backup_from=['user:7:web'])
    seven = messages.Peer(7)
    assert may(found, seven) and may(found, seven, backup('web'))
    assert not may(found, seven, UPLOAD)
    assert not may(found, seven, backup('mail'))
    assert not may(found, messages.Peer(8))
    for owner in (0, os.geteuid()):
        assert all(may(found, messages.Peer(owner), image_id)
                   for image_id in (IMAGE, UPLOAD, backup('mail')))
    # Requests over TLS without a certificate have no rights.
    assert not may(found, messages.Peer())


def test_refusals_do_not_fill_the_log(monkeypatch, caplog):
    monkeypatch.setattr(upload_rights, '_STRANGERS',
                        limited.Log(upload_rights.LOG))
    for number in range(limited.MESSAGES + 5):
        assert not may(make(), certificate(f'host{number}'), UPLOAD)
    assert len(caplog.messages) == limited.MESSAGES
    assert "'host0' may not upload" in caplog.messages[0]


def test_an_unknown_user_leaves_all_as_it_was():
    options = {right.option: [] for right in upload_rights.RIGHTS}
    options['replicate_from'] = ['site']
    found = upload_rights.Rights(options)
    options['upload_from'] = ['user:no-such-user']
    options['replicate_from'] = []
    with pytest.raises(ValueError, match='upload_from: there is no user'):
        found.load()
    assert may(found, certificate('site'))


def test_the_refusal_says_who_what_and_what_to_do():
    with pytest.raises(messages.HTTPError) as caught:
        make().require(certificate('a' * 500, 'b', 'c', 'd'), backup('web'))
    assert caught.value.message == (
        f"The certificate of '{'a' * 80}', 'b', 'c' may not send image "
        f'{backup("web")}: it lacks the right to back up web. The option '
        'backup_from of this daemon gives it.')
    with pytest.raises(messages.HTTPError, match='without a common name'):
        make().require(certificate(), IMAGE)
