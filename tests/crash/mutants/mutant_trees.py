# SPDX-License-Identifier: Apache-2.0

"""Makes trees with one mutant in them.

A tree has a copy of the sources, and an engine in which only the changed files
are compiled again. An edit's old text must be found exactly once, otherwise
the mutant is outdated and its test fails: it must be updated to the code.
"""

import concurrent.futures
import functools
import os
import pathlib
import shutil
import subprocess
import sysconfig

from tests.crash.mutants.mutant import Mutant

TOP = pathlib.Path(__file__).resolve().parents[3]

_COPIED = ('glance_dedup', 'dedupd', 'tests')
_ALONGSIDE = ('bindep.txt', 'pyproject.toml', 'setup.cfg', 'tox.ini')
_ENGINE = 'glance_dedup/_engine.abi3.so'
# The options of the tests in C: a mutant that does not compile with them would
# only seem to be found.
_COMPILE = ['gcc', '-std=c11', '-O1', '-g', '-fPIC', '-fvisibility=hidden',
            '-Wall', '-Wextra', '-Werror', '-pthread', '-D_GNU_SOURCE',
            '-DPy_LIMITED_API=0x030B0000']
_LIBRARIES = ['-lcrypto', '-lxxhash', '-llz4', '-lzstd', '-lz']
_BUILD_TIMEOUT = 100    # seconds for one file


class RottenError(Exception):
    """An edit does not fit the code any more."""


def edited(mutant: Mutant, top: pathlib.Path = TOP) -> dict[str, str]:
    """The changed files' new texts.

    :raises RottenError: unless each old text is found exactly once
    """
    texts: dict[str, str] = {}
    for edit in mutant.edits:
        text = texts.get(edit.file)
        if text is None:
            text = (top / edit.file).read_text()
        found = text.count(edit.old)
        if found != 1:
            raise RottenError(
                f'{mutant.name}: {edit.file} has this {found} times, not '
                f'once:\n{edit.old}')
        texts[edit.file] = text.replace(edit.old, edit.new)
    return texts


class Builder:
    """Makes trees with a mutant in each.

    :param directory: for the objects; must exist. They are compiled once
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory

    def build(self, mutant: Mutant | None, tree: pathlib.Path) -> None:
        """Make a tree that must not exist yet; without a mutant all is good.

        :raises RottenError: as its name says
        :raises subprocess.CalledProcessError: if it does not compile
        """
        texts = {} if mutant is None else edited(mutant)
        for name in _COPIED:
            shutil.copytree(
                TOP / name, tree / name,
                ignore=shutil.ignore_patterns('__pycache__', '*.so',
                                              'corpus', '*.tar.xz'))
        for name in _ALONGSIDE:
            shutil.copy(TOP / name, tree / name)
        for name, text in texts.items():
            (tree / name).write_text(text)
        objects = dict(self._objects)
        if any(name.endswith('.c') for name in texts):
            changed = tree / 'mutated'
            changed.mkdir()
            for name in texts:
                if name.endswith('.c'):
                    objects[name] = self._compile(tree, name, changed)
        _run(['gcc', '-shared', '-pthread', *objects.values(), *_LIBRARIES,
              '-o', tree / _ENGINE])

    @functools.cached_property
    def _objects(self) -> dict[str, pathlib.Path]:
        names = [str(path.relative_to(TOP)) for path in sorted(
            [*TOP.glob('glance_dedup/binding/*.c'),
             *TOP.glob('glance_dedup/engine/*/*.c')])]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            return dict(zip(names, pool.map(
                lambda name: self._compile(TOP, name, self._directory),
                names)))

    @staticmethod
    def _compile(tree: pathlib.Path, name: str, directory: pathlib.Path
                 ) -> pathlib.Path:
        result = directory / name.replace('/', '-').replace('.c', '.o')
        _run([*_COMPILE, f'-I{tree}/glance_dedup',
              f'-I{sysconfig.get_paths()["include"]}',
              '-c', tree / name, '-o', result])
        return result


def environment(tree: pathlib.Path) -> dict[str, str]:
    """Return the environment for a Python that runs a tree's code."""
    return {**os.environ, 'PYTHONPATH': str(tree),
            'PYTHONDONTWRITEBYTECODE': '1'}


def _run(command: list) -> None:
    subprocess.run([str(part) for part in command], check=True,
                   timeout=_BUILD_TIMEOUT, capture_output=True, text=True)
