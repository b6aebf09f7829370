# SPDX-License-Identifier: Apache-2.0
"""Sphinx extension: lists the modules of a folder, each with its purpose.

``.. module-map:: FOLDER`` makes a list for each folder of C and each package
of Python below FOLDER. The purpose of a file is the first sentence of its
docstring, or of its header's comment, so no list of modules is kept by hand.
"""

import ast
import pathlib
import re

from docutils import nodes
from docutils import statemachine
from sphinx.util import docutils

TOP = pathlib.Path(__file__).resolve().parent.parent


def _first_sentence(text):
    text = ' '.join(text.split('\n\n')[0].split())
    return re.split(r'(?<=\.)\s', text)[0].rstrip('.')


def purpose(path):
    """Return the first sentence about a file.

    :raises ValueError: the file has none
    """
    text = path.read_text()
    if path.suffix == '.py':
        text = ast.get_docstring(ast.parse(text)) or ''
    else:
        comment = re.search(rf'/\*\n \* {re.escape(path.name)} - (.*?)\*/',
                            text, re.DOTALL)
        text = re.sub(r'^ \* ?', '', comment[1], flags=re.M) if comment else ''
        text = re.sub(r'`(.*?)`', r'``\1``', text)
    if not (sentence := _first_sentence(text)):
        raise ValueError(f'{path} has no sentence about its purpose')
    return sentence


def files_of(folder):
    """Return the file that describes each module of a folder, by name."""
    found = {path.stem: path for path in sorted(folder.glob('*.py'))
             if path.stem != '__init__'}
    for ending in ('c', 'h'):
        found |= {path.stem: path for path in folder.glob(f'*.{ending}')}
    return dict(sorted(found.items()))


def folders(top):
    """Return the folders below `top`, and itself, that have modules."""
    python = (top / '__init__.py').exists()
    for folder in sorted({top, *top.iterdir()}):
        if folder.is_dir() and (folder / '__init__.py').exists() == python:
            if python or files_of(folder):
                yield folder


def lines(top):
    """Return the lists of a folder as lines of reStructuredText."""
    for folder in folders(top):
        init = folder / '__init__.py'
        words = f': {purpose(init)}' if init.exists() else ''
        yield from (f'``{folder.relative_to(TOP)}/``{words}', '')
        yield from (f'* ``{name}``: {purpose(path)}'
                    for name, path in files_of(folder).items())
        yield ''


class ModuleMap(docutils.SphinxDirective):
    """The directive ``module-map``."""

    required_arguments = 1

    def run(self):
        """Return the lists of the folder that the argument names."""
        top = TOP / self.arguments[0]
        for folder in folders(top):
            for path in folder.iterdir():
                if path.is_file():
                    self.env.note_dependency(str(path))
        node = nodes.container()
        self.state.nested_parse(
            statemachine.StringList(list(lines(top)), source=str(top)),
            self.content_offset, node)
        return node.children


def setup(app):
    """Add the directive to Sphinx."""
    app.add_directive('module-map', ModuleMap)
    return {'parallel_read_safe': True}
