# SPDX-License-Identifier: Apache-2.0

"""Options that change while other threads read them."""

import os
import threading

import pytest

import dedupd.compute.novabase.main
import dedupd.compute.relay.main
from dedupd import daemon
from dedupd import settings
from glance_dedup.base import package_version

TEXT = '[dedupd]\ndatadir = /\ncollect_interval = %d\n'


def test_a_read_during_a_change(tmp_path):
    """A read during a change returns the old value, a later one the new."""
    path = tmp_path / 'dedupd.conf'
    path.write_text(TEXT % 0)
    conf = settings.parse(['--config-file', str(path)])
    path.unlink()
    os.mkfifo(path)
    for value in (1, 2, 3):
        change = threading.Thread(target=conf.mutate_config_files,
                                  daemon=True)
        change.start()
        # The other thread has opened the file, and waits for its content.
        with open(path, 'w', encoding='ascii') as stream:
            assert conf.dedupd.collect_interval == value - 1
            stream.write(TEXT % value)
        change.join(60)
        assert not change.is_alive()
        assert conf.dedupd.collect_interval == value


@pytest.mark.parametrize('program, words', [
    (daemon, 'Maintain a repository'),
    (dedupd.compute.novabase.main, 'Show the images of a cache'),
    (dedupd.compute.relay.main, "Pass Nova's requests on")])
def test_help_and_version(capsys, monkeypatch, program, words):
    monkeypatch.setattr('sys.argv', ['/usr/bin/dedupd-x'])
    for option in '--help', '--version':
        with pytest.raises(SystemExit) as caught:
            program.main([option])
        assert not caught.value.code
        out = capsys.readouterr().out
        if option == '--help':
            for part in words, '--config-file', 'Exit status: 0,':
                assert part in out
        else:
            assert out == f'dedupd-x {package_version.version()}\n'
