# SPDX-License-Identifier: Apache-2.0

"""The tests of a cloud read the console of a server."""

import re
import subprocess

import pytest

from tests.cloud import boot
from tests.cloud import cloud_service
from tests.support import daemons

pytestmark = pytest.mark.slow

# A line of a server that has printed something before.
LINE = ('glance-dedup: up: bc9145a63c9b54e57a907290b5670ebc '
        '2 a disk of mine\r\n')
UP = 'SeaBIOS\r\n[    0.1] kernel\r\n' + 3 * LINE


def test_a_server_that_is_up():
    assert boot.read(UP) == ('a disk of mine', 2)
    assert boot.read(UP.replace('\r', '')) == ('a disk of mine', 2)


@pytest.mark.parametrize('length', [0, 9, 40, len(UP) - 3 * len(LINE),
                                    len(UP) - 2 * len(LINE) - 3])
def test_a_server_that_is_not_up_yet(length):
    assert boot.read(UP[:length]) is None


@pytest.mark.parametrize('at', range(len(LINE) - 2))
def test_a_stray_letter(at):
    """One intact line is enough, and a damaged line is not used."""
    for stray in ('x', ' ', '3', '\n', '\ufffd'):
        for spoiled in (LINE[:at] + stray + LINE[at:],
                        LINE[:at] + stray + LINE[at + 1:]):
            assert boot.read(spoiled) in (None, ('a disk of mine', 2))
            assert boot.read(2 * spoiled + LINE) == ('a disk of mine', 2)


def test_a_server_that_gave_up():
    with pytest.raises(cloud_service.CloudError, match='no power button'):
        boot.read('glance-dedup: FAILED: no power button\r\n')


@pytest.mark.parametrize('message', ['a disk of mine', 'x', r'a\tb  $HOME "'])
def test_the_servers_own_words(tmp_path, message):
    """The server's script, in a shell of this machine, prints a valid line."""
    script = (daemons.ROOT / 'tools/build_boot_image').read_text()
    say, = re.findall(r'^say\(\) {.*?^}$', script, re.MULTILINE | re.DOTALL)
    up, = re.findall(r'^state=.*?^say "up: [^\n]*$', script,
                     re.MULTILINE | re.DOTALL)
    (tmp_path / 'message.txt').write_text(message + '\n')
    up = up.replace('/disk/', f'{tmp_path}/')
    done = subprocess.run(['sh', '-euc', f'boots=7\n{say}\n{up}'],
                          capture_output=True, text=True, timeout=60)
    assert not done.stderr and done.stdout.count('glance-dedup: up') == 3
    assert boot.read(done.stdout) == (message, 7)
