# SPDX-License-Identifier: Apache-2.0

"""Links in Nova's directory, beside Nova's own files."""

import hashlib
import os

import pytest

from dedupd.compute.novabase import base_links


@pytest.fixture
def base(tmp_path):
    path = tmp_path / '_base'
    path.mkdir()
    return path


@pytest.fixture
def links(base):
    return base_links.Links(str(base), '/mounted')


def path_of(base, image_id):
    return base / hashlib.sha1(image_id.encode()).hexdigest()


def test_a_link_leads_to_the_image(links, base):
    links.put('image')
    assert os.readlink(path_of(base, 'image')) == '/mounted/image'
    assert links.has('image') and not links.has('other')
    links.put('image')      # a second call is harmless
    links.remove('image')
    assert os.listdir(base) == []
    links.remove('image')   # a second call is harmless


def test_what_nova_has_there_stays(links, base):
    path_of(base, 'image').write_bytes(b'downloaded')
    links.put('image')
    links.remove('image')
    links.sweep(())
    assert not links.has('image')
    assert path_of(base, 'image').read_bytes() == b'downloaded'


def test_a_download_that_ends_meanwhile_is_not_removed(links, base,
                                                       monkeypatch):
    links.put('image')
    rename = os.rename

    def download(source, target):
        monkeypatch.undo()
        (base / 'part').write_bytes(b'downloaded')
        rename(base / 'part', path_of(base, 'image'))
        rename(source, target)

    monkeypatch.setattr(os, 'rename', download)
    links.remove('image')
    assert path_of(base, 'image').read_bytes() == b'downloaded'
    assert len(os.listdir(base)) == 1


def test_a_sweep_removes_our_links_alone(links, base):
    for image_id in ('wanted', 'unwanted'):
        links.put(image_id)
    others = {base / 'a-name': '/mounted/unwanted',
              path_of(base, 'x'): '/mounted/y',
              path_of(base, 'z'): '/elsewhere/z',
              path_of(base, 'w'): '/mounted/deeper/w'}
    for path, target in others.items():
        path.symlink_to(target)
    (base / 'file').write_bytes(b'')
    links.sweep({'wanted'})
    assert links.has('wanted') and not links.has('unwanted')
    assert {os.readlink(path) for path in others} == {*others.values()}
    assert len(os.listdir(base)) == len(others) + 2


def test_a_missing_directory_is_told(tmp_path):
    links = base_links.Links(str(tmp_path / 'none'), '/mounted')
    links.remove('image')
    for call in (lambda: links.put('image'), lambda: links.sweep(())):
        with pytest.raises(FileNotFoundError):
            call()
