# SPDX-License-Identifier: Apache-2.0

"""Links in Nova's directory, beside Nova's own files."""

import hashlib
import os

import pytest

from dedupd.compute.novabase import base_links
from tests.support import repositories


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


def killed_in_a_removal(links, base, replace=lambda part: None):
    """Kill a process when it has moved the image's file aside.

    :param replace: makes a file or a link that is put in the place of ours
        just before
    """
    def remove():
        rename = os.rename

        def move(source, target):
            replace(base / 'part')
            if os.path.lexists(base / 'part'):
                rename(base / 'part', path_of(base, 'image'))
            rename(source, target)
            os._exit(9)

        os.rename = move
        links.remove('image')

    links.put('image')
    with pytest.raises(repositories.ChildFailed):
        repositories.in_child(remove)
    aside, = os.listdir(base)
    assert aside != path_of(base, 'image').name


@pytest.mark.parametrize('is_wanted', [True, False])
def test_a_kill_in_a_removal_leaves_no_link(links, base, is_wanted):
    killed_in_a_removal(links, base)
    if is_wanted:
        links.put('image')
    links.sweep({'image'} if is_wanted else ())
    assert links.has('image') == is_wanted
    assert len(os.listdir(base)) == is_wanted


@pytest.mark.parametrize('is_wanted', [True, False])
def test_a_kill_in_a_removal_takes_no_download_from_nova(links, base,
                                                         is_wanted):
    """Guests' disks have the file of that name behind them."""
    killed_in_a_removal(links, base,
                        lambda part: part.write_bytes(b'downloaded'))
    if is_wanted:
        links.put('image')
    links.sweep({'image'} if is_wanted else ())
    assert os.listdir(base) == [path_of(base, 'image').name]
    assert path_of(base, 'image').read_bytes() == b'downloaded'


@pytest.mark.parametrize('is_wanted', [True, False])
def test_a_kill_in_a_removal_takes_no_link_of_others(links, base, is_wanted):
    killed_in_a_removal(links, base,
                        lambda part: part.symlink_to('/elsewhere/image'))
    if is_wanted:
        links.put('image')
    links.sweep({'image'} if is_wanted else ())
    assert os.listdir(base) == [path_of(base, 'image').name]
    assert os.readlink(path_of(base, 'image')) == '/elsewhere/image'


def test_what_only_looks_like_a_removal_stays(links, base):
    name = path_of(base, 'image').name
    prefix = base_links._ASIDE
    (base / f'{prefix}{name}').mkdir()
    (base / f'{prefix}{name[1:]}').write_bytes(b'')
    (base / f'{prefix}{name}.part').write_bytes(b'')
    (base / prefix).write_bytes(b'')
    os.mkfifo(base / f'{prefix}{path_of(base, "other").name}')
    before = sorted(os.listdir(base))
    links.sweep(())
    assert sorted(os.listdir(base)) == before


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
