# SPDX-License-Identifier: Apache-2.0
"""The style of the Python code, of the C code and of the shell scripts."""

import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

TOP = pathlib.Path(__file__).resolve().parent.parent
LICENSE = 'SPDX-License-Identifier: Apache-2.0'
# Modules with public names that have no docstring. The list only gets shorter.
WITHOUT_DOCSTRINGS = [
    'dedupd.cache.pulls',
    'dedupd.cache.source_client',
    'dedupd.replicator',
    'dedupd.scheduler',
    'dedupd.serve.incoming_replicas',
    'dedupd.serve.nbd',
    'dedupd.serve.readings',
    'dedupd.tasks.accounting',
    'glance_dedup.check.catalog',
    'glance_dedup.check.format',
    'glance_dedup.check.store',
    'glance_dedup.maintenance.addresses',
    'glance_dedup.maintenance.catalog',
    'glance_dedup.mount',
    'glance_dedup.repository.repository',
    'glance_dedup.repository.upgrade',
    'glance_dedup.transfer.assembler',
    'glance_dedup.trial',
]


def test_python_style():
    """flake8 with OpenStack's hacking checks, configured in tox.ini."""
    result = subprocess.run(
        [sys.executable, '-m', 'flake8'], cwd=TOP, capture_output=True,
        text=True, timeout=280)
    assert result.returncode == 0, f'\n{result.stdout}{result.stderr}'


def module_of(path):
    """The module whose file it is, from the top of the tree."""
    return re.sub(r'(/__init__)?\.pyi?$', '', path).replace('/', '.')


@pytest.mark.timeout(300)     # without a cache
def test_types(tmp_path):
    """mypy finds nothing but in the modules that pyproject.toml exempts.

    One of these in which it finds nothing, or that is no more, is to be taken
    off the list.
    """
    text = (TOP / 'pyproject.toml').read_text()
    exempt = [module for override
              in tomllib.loads(text)['tool']['mypy']['overrides']
              if 'ignore_errors' in override for module in override['module']]
    everything = tmp_path / 'pyproject.toml'
    everything.write_text(text.replace('ignore_errors = true', ''))
    result = subprocess.run(
        [sys.executable, '-m', 'mypy', '--config-file', everything,
         '--cache-dir', TOP / '.mypy_cache' / 'everything'], cwd=TOP,
        capture_output=True, text=True, timeout=280)
    assert result.returncode < 2, f'\n{result.stdout}{result.stderr}'
    errors = [line for line in result.stdout.splitlines()
              if ': error: ' in line]
    found = {module_of(line.partition(':')[0]) for line in errors}
    new = '\n'.join(line for line in errors
                    if module_of(line.partition(':')[0]) not in exempt)
    assert not new, f'\n{new}'
    assert exempt == sorted(found), 'the list in pyproject.toml is too long'


def test_docstrings():
    """Public functions, classes and methods say what their names do not.

    A command's class says it to users, too: its docstring is the command's
    help, and its methods override cliff's.
    """
    result = subprocess.run(
        [sys.executable, '-m', 'tests.support.docstrings'], cwd=TOP,
        check=True, capture_output=True, text=True, timeout=100)
    missing = result.stdout.splitlines()
    new = '\n'.join(line for line in missing
                    if line.partition(':')[0] not in WITHOUT_DOCSTRINGS)
    assert not new, f'\n{new}'
    assert WITHOUT_DOCSTRINGS == sorted(
        {line.partition(':')[0] for line in missing}), (
        'WITHOUT_DOCSTRINGS is too long, or not sorted')


def sources():
    """Every source file that is in the repository, or would be."""
    names = subprocess.run(
        ['git', 'ls-files', '-co', '--exclude-standard'], cwd=TOP, check=True,
        capture_output=True, text=True, timeout=60).stdout.splitlines()
    for path in map(TOP.joinpath, names):
        if path.is_file() and (
                path.suffix in {'.c', '.h', '.py', '.pyi', '.sh'}
                or path.read_bytes()[:2] == b'#!'):
            yield path


def test_license():
    """Every source file says at its begin under which licence it stands."""
    paths = list(sources())
    assert len(paths) > 500
    without = [str(path.relative_to(TOP)) for path in paths
               if path.stat().st_size
               and LICENSE not in path.read_text()[:200]]
    assert not without, f'no "{LICENSE}" in {without}'


@pytest.mark.parametrize(
    'path', sorted(
        path for directory in ('tools', '.ci')
        for path in (TOP / directory).iterdir()
        if path.is_file() and path.read_bytes().startswith(
            (b'#!/bin/bash', b'# shellcheck shell=bash'))),
    ids=lambda path: str(path.relative_to(TOP)))
def test_shell_style(path):
    shellcheck = shutil.which('shellcheck')
    if shellcheck is None:
        pytest.skip('shellcheck is not installed')
    result = subprocess.run(
        [shellcheck, '--external-sources', str(path)], cwd=TOP,
        capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, f'\n{result.stdout}{result.stderr}'
