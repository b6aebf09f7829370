# SPDX-License-Identifier: Apache-2.0
"""The documents' contents, for tests that compare them with the code."""

import pathlib
import re
import textwrap
from typing import NamedTuple

TOP = pathlib.Path(__file__).resolve().parents[2]
SOURCE = TOP / 'doc' / 'source'

_DIRECTIVE = re.compile(r'\s*\.\. code-block:: *(\w+)')
_PROMPT = re.compile(r'[$#] ')
_LITERAL = re.compile(r'``(.+?)``', re.DOTALL)


def has_test(name, function=''):
    """Return whether a file of tests exists, and has a function of this name.

    :param name: of a file of Python or C, below tests/
    """
    path = TOP / 'tests' / name
    return path.is_file() and (not function or re.search(
        rf'^(def {function}\(|TEST(_WITH|_SINGLE)?\({function}[,)])',
        path.read_text(), re.M) is not None)


class Block(NamedTuple):
    """A literal block."""

    file: pathlib.Path
    line: int
    """of its first line, from 1"""
    language: str
    """'' of one that begins with '::'"""
    section: str
    """the heading above it"""
    text: str

    @property
    def place(self) -> str:
        return f'{self.file.relative_to(TOP)}:{self.line}'


class Command(NamedTuple):
    """A command line, its continuations joined."""

    place: str
    section: str
    prompt: str
    """'$', '#', or ''"""
    text: str


def outside() -> list[pathlib.Path]:
    """Return the pages that are also read in a checkout or on a forge."""
    return [*(TOP / f'{name}.rst' for name in (
        'README', 'CONTRIBUTING', 'HACKING', 'SECURITY')),
        TOP / 'devstack' / 'README.rst']


def pages() -> list[pathlib.Path]:
    """Return all pages for people, except the release notes."""
    return [*outside(), *sorted(SOURCE.rglob('*.rst'))]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def blocks(file: pathlib.Path) -> list[Block]:
    """Return all literal blocks of a page."""
    lines = file.read_text().splitlines()
    found = []
    section = ''
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if number < len(lines) and re.fullmatch(r'([=~-])\1{3,}',
                                                lines[number]):
            section = line
        match = _DIRECTIVE.match(line)
        if not match and (not line.endswith('::')
                          or line.lstrip().startswith('..')):
            continue
        begin = number
        while number < len(lines) and (
                not lines[number].strip()
                or _indent(lines[number]) > _indent(line)):
            number += 1
        text = lines[begin:number]
        while text and (not text[0].strip()
                        or match and re.match(r'\s+:\w+:', text[0])):
            del text[0]
            begin += 1
        found.append(Block(
            file, begin + 1, match[1] if match else '', section,
            textwrap.dedent('\n'.join(text)).rstrip()))
    return found


def commands(block: Block) -> list[Command]:
    """Return a block's command lines: the prompted ones, if any is."""
    text = re.sub(r' *\\\n\s*', ' ', block.text)
    lines = [line for line in text.splitlines() if line.strip()]
    prompted = any(_PROMPT.match(line) for line in lines)
    return [Command(block.place, block.section,
                    line[0] if prompted else '',
                    line[2:] if prompted else line)
            for line in lines if not prompted or _PROMPT.match(line)]


def literals(file: pathlib.Path) -> list[str]:
    """Return the inline literals of a page, each on one line."""
    text = file.read_text()
    for block in blocks(file):
        # Two colons in a block's text are not markup.
        text = text.replace(textwrap.indent(block.text, '   '), '')
    return [' '.join(found.split()) for found in _LITERAL.findall(text)]
