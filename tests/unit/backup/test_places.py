# SPDX-License-Identifier: Apache-2.0

"""The names and the locks of the state directory."""

import os
import stat

import pytest

from glance_dedup.backup import views
from tests.support import sources


@pytest.mark.parametrize('name', ['', 'a/b', '..', 'a' * 110, 'é', 'a b',
                                  'a\n', 'web.example.com'])
def test_names_that_cannot_name_backups(tmp_path, name):
    with pytest.raises(views.SourceError, match='Give another name'):
        sources.place(tmp_path, name)
    assert not list(tmp_path.iterdir())


def test_a_lock_for_each_name(tmp_path):
    with sources.place(tmp_path, 'a' * 109), sources.place(tmp_path, 'b'):
        with pytest.raises(views.SourceError, match='of b is running'):
            sources.place(tmp_path, 'b')
    with sources.place(tmp_path, 'b') as again:
        again.close()
        sources.place(tmp_path, 'b').close()


def test_a_lock_ends_with_its_process(tmp_path):
    pid = os.fork()
    if not pid:
        sources.place(tmp_path)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    sources.place(tmp_path).close()


def test_nobody_else_may_look(tmp_path):
    with sources.place(tmp_path / 'state') as place:
        for path, mode in ((tmp_path / 'state', 0o700),
                           (place.path('lock'), 0o600)):
            assert stat.S_IMODE(os.stat(path).st_mode) == mode


def test_a_state_directory_that_cannot_be_used(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(views.SourceError, match='file/state'):
        sources.place(tmp_path / 'file' / 'state')
    (tmp_path / 'disk.lock').symlink_to('elsewhere')
    with pytest.raises(views.SourceError, match='cannot be used'):
        sources.place(tmp_path)
