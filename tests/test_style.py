# SPDX-License-Identifier: Apache-2.0
"""The Python code, the C code and the shell scripts follow the style."""

import ast
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

TOP = pathlib.Path(__file__).resolve().parent.parent
LICENSE = 'SPDX-License-Identifier: Apache-2.0'


# Long: flake8 reads every file of Python.
@pytest.mark.timeout(1200)
def test_python_style():
    """flake8 with OpenStack's hacking checks, as in tox.ini, finds nothing."""
    result = subprocess.run(
        [sys.executable, '-m', 'flake8'], cwd=TOP, capture_output=True,
        text=True, timeout=1100)
    assert result.returncode == 0, f'\n{result.stdout}{result.stderr}'


# Long: mypy reads every module, and the modules of the libraries.
@pytest.mark.timeout(1200)    # without a cache
def test_types():
    """mypy finds nothing."""
    result = subprocess.run(
        [sys.executable, '-m', 'mypy'], cwd=TOP, capture_output=True,
        text=True, timeout=1100)
    assert result.returncode == 0, f'\n{result.stdout}{result.stderr}'


def test_docstrings():
    """Public functions, classes and methods have a docstring.

    A command's class has it for users, too: its docstring is the command's
    help, and its methods override cliff's.
    """
    result = subprocess.run(
        [sys.executable, '-m', 'tests.support.docstrings'], cwd=TOP,
        check=True, capture_output=True, text=True, timeout=100)
    assert not result.stdout, f'\n{result.stdout}'


def sources():
    """Yield every source file that is in the repository, or would be."""
    names = subprocess.run(
        ['git', 'ls-files', '-co', '--exclude-standard'], cwd=TOP, check=True,
        capture_output=True, text=True, timeout=60).stdout.splitlines()
    for path in map(TOP.joinpath, names):
        if path.is_file() and (
                path.suffix in {'.c', '.h', '.py', '.pyi', '.sh'}
                or path.read_bytes()[:2] == b'#!'):
            yield path


def test_license():
    """Every source file begins with the line of its licence."""
    paths = list(sources())
    assert len(paths) > 500
    without = [str(path.relative_to(TOP)) for path in paths
               if path.stat().st_size
               and LICENSE not in path.read_text()[:200]]
    assert not without, f'no "{LICENSE}" in {without}'


@pytest.mark.needs('shellcheck')
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


#: Files in which an error of the disk is treated as a missing file.
HIDES_ERRORS = {
    'adoption/estimate.py', 'backup/reachable_hosts.py', 'cli/command.py',
    'cli/volumeserve.py', 'driver/daemon_reads.py', 'objects/slicefiles.py',
    'fstest/properties.py'}


def test_a_failing_disk_is_not_taken_for_an_empty_one():
    """os.path.isdir and the like hide the system's error: base/files.py."""
    hides = re.compile(r'os\.path\.(isdir|isfile|islink|l?exists)\(')
    found = {str(path.relative_to(top))
             for top in (TOP / 'glance_dedup', TOP / 'dedupd')
             for path in top.rglob('*.py') if hides.search(path.read_text())}
    assert found == HIDES_ERRORS


def words_like(pattern):
    """List the words of our sources, except this file, that match."""
    return [f'{path.relative_to(TOP)}: {word}' for path in sources()
            if path.suffix in ('.py', '.c', '.h')
            and path != pathlib.Path(__file__)
            for word in sorted(set(
                re.findall(r'[A-Za-z_]\w*', path.read_text())))
            if re.fullmatch(pattern, word)]


def test_minimum_and_maximum():
    """Minimum and maximum are MIN and MAX in every constant."""
    found = words_like(
        r'_?(?:[A-Z0-9]+_)*'
        r'(?:LEAST|MOST|LONGEST|SHORTEST|LARGEST|SMALLEST)(?:_[A-Z0-9]+)*')
    assert not found, '\n'.join(found)


#: Functions of tools/lib.sh make the thing in their name, if necessary.
SHELL = 'engine|mirrors|packages|python|services|venv'


def test_what_raises_requires():
    """A function that raises unless something holds is ``require_...``."""
    found = words_like(rf'(?!need_(?:{SHELL})$)_?(?:gd_\w+_)?need_\w+')
    assert not found, '\n'.join(found)


def aliases(text):
    """Yield imports of our modules under another name than their own.

    The two names that Python and pytest prescribe are left out.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or '').split(
                '.')[0] in ('glance_dedup', 'dedupd', 'tests'):
            yield from (f'{node.module}.{alias.name} as {alias.asname}'
                        for alias in node.names if alias.asname
                        and alias.name not in ('__main__', 'conftest'))


def test_modules_go_by_their_own_names():
    """A module that must be imported under another name has the wrong name."""
    found = [f'{path.relative_to(TOP)}: {name}' for path in sources()
             if path.suffix == '.py' for name in aliases(path.read_text())]
    assert not found, '\n'.join(found)


#: The folders whose docstrings are sentences with a verb, or name a thing.
SENTENCES = ('glance_dedup', 'dedupd', 'tools', 'tests', 'benchmarks', 'doc')


def questions(text):
    """Return the docstrings that begin like a question, with their lines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef,
                             ast.AsyncFunctionDef)):
            found = ast.get_docstring(node) or ''
            if re.match(r'(What|Whether|How|Where|Which|Who|Whose|Why)\b',
                        found):
                yield getattr(node, 'lineno', 1), found.splitlines()[0]


def test_docstrings_do_not_begin_like_questions():
    found = [f'{path.relative_to(TOP)}:{line}: {words}'
             for folder in SENTENCES
             for path in sorted((TOP / folder).rglob('*.py'))
             for line, words in questions(path.read_text())]
    assert not found, '\n'.join(found)


def test_a_question_is_found():
    text = ('"""Reads."""\ndef f():\n    """Whether it is."""\n'
            'def g():\n    """Return whether it is."""\n')
    assert list(questions(text)) == [(2, 'Whether it is.')]


def test_an_alias_is_found():
    text = ('from dedupd import opts\nfrom dedupd import daemon as program\n'
            'from os import path as paths\n')
    assert list(aliases(text)) == ['dedupd.daemon as program']
