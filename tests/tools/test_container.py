# SPDX-License-Identifier: Apache-2.0

"""tools/container reports errors before it builds anything."""

import pathlib
import subprocess

import pytest

TOP = pathlib.Path(__file__).resolve().parents[2]


def container(*arguments):
    return subprocess.run(
        [TOP / 'tools' / 'container', *arguments], capture_output=True,
        text=True, timeout=60)


@pytest.mark.parametrize('option', ['-h', '--help'])
def test_help(option):
    result = container(option)
    assert result.returncode == 0
    assert result.stdout.startswith('Build a container image with dedupd: ')
    assert 'SPDX' not in result.stdout


@pytest.mark.parametrize('arguments', [(), ('one.tar', 'two.tar'), ('',)])
def test_not_one_file(arguments):
    result = container(*arguments)
    assert result.returncode == 2
    assert 'FAILED: name the file of the image' in result.stderr
    assert 'What to do: see tools/container --help.' in result.stderr


def test_a_directory_that_is_not_there(tmp_path):
    result = container(tmp_path / 'nowhere' / 'image.tar')
    assert result.returncode == 2
    assert f'there is no directory {tmp_path}/nowhere' in result.stderr


def test_a_directory_as_the_file(tmp_path):
    result = container(tmp_path)
    assert result.returncode == 2
    assert f'{tmp_path} is a directory' in result.stderr
