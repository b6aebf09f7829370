#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""Every file has a place, and every place uses only what it may use.

:data:`ENGINE` is the table of the C engine's folders. A file includes what
lies in its own folder or in one that stands above it in the table, and nothing
else of ours. The map of the engine in the design document is made from this
table and from the first sentence of each file. To write it anew::

    python -m tests.test_layers --write
"""

import pathlib
import re
import sys
import textwrap

import pytest

TOP = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = TOP / 'glance_dedup'
TESTS = TOP / 'tests' / 'c'
DESIGN = TOP / 'doc' / 'source' / 'contributor' / 'design.rst'

#: The folders of ``glance_dedup/engine``, and what each is. A folder may
#: include itself and those above it.
ENGINE = {
    'base': 'the outside world, and small tools',
    'format': 'every byte on the disk, as pure functions',
    'files': 'the files of a repository, and their locks',
    'handle': 'what one open repository keeps in memory',
    'read': 'from a recipe to bytes',
    'write': 'from bytes to a committed recipe',
    'maintain': "what only a group's holder does",
    'exchange': 'what other programs ask for',
}
#: The binding to Python includes itself and all of the engine.
BINDING = 'binding'
#: Folders of ``tests/c`` beside those of the engine.
TESTS_ALONE = {'support', 'whole'}

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">\n]*)[">]',
                      re.MULTILINE)
_BEGIN = '.. The engine\'s map: python -m tests.test_layers --write\n'
_END = '.. The end of the engine\'s map\n'


def place_of(path):
    """The folder of the engine, or the binding; None: it has no place.

    :param path: of a C file, from ``glance_dedup``
    """
    match path.split('/'):
        case ['engine', folder, _] if folder in ENGINE:
            return folder
        case ['binding', _]:
            return BINDING
    return None


def may_include(folder):
    if folder == BINDING:
        return {BINDING, *ENGINE}
    order = list(ENGINE)
    return set(order[:order.index(folder) + 1])


def wrong_includes(path, text, paths):
    """What is wrong with a file's includes, a sentence each."""
    allowed = may_include(place_of(path))
    for quote, name in _INCLUDE.findall(text):
        ours = name in paths
        if quote == '<' and not ours:
            if name == 'Python.h' and place_of(path) != BINDING:
                yield f'{path} includes Python.h, which the binding alone may'
        elif quote == '<' or not ours:
            yield (f'{path} includes {name}: write "engine/FOLDER/FILE.h", '
                   'in double quotes')
        elif place_of(name) not in allowed:
            yield (f'{path} includes {name}, but {place_of(path)} may include '
                   f'only {", ".join(sorted(allowed))}')


def complaints(files):
    """All that is wrong with the C files of ``glance_dedup``.

    :param files: the text of each by its path from ``glance_dedup``
    """
    found = []
    for path, text in sorted(files.items()):
        if place_of(path) is None:
            found.append(f'{path} has no place: see ENGINE in test_layers.py')
        else:
            found.extend(wrong_includes(path, text, files))
    return found


def c_files(top):
    return {str(path.relative_to(top)): path.read_text()
            for path in sorted(top.rglob('*.[ch]'))}


def test_engine():
    files = c_files(PACKAGE)
    assert not (found := complaints(files)), '\n'.join(found)
    assert {place_of(path) for path in files} == {*ENGINE, BINDING}


GOOD = {
    'engine/base/env.h': '#include <stdint.h>\n',
    'engine/base/pool.h': '#include "engine/base/env.h"\n',
    'engine/files/spool.c': '#include "engine/base/pool.h"\n',
    'binding/module.c': '#include <Python.h>\n'
                        '#include "engine/files/spool.c"\n',
}


def test_engine_that_keeps_the_order():
    assert complaints(GOOD) == []


@pytest.mark.parametrize('path, text, words', [
    ('engine/base/pool.h', '#include "engine/files/spool.c"\n',
     'base may include only base'),
    ('engine/base/pool.h', '#ifdef X\n # include "binding/module.c"\n#endif\n',
     'base may include only base'),
    ('engine/files/spool.c', '#include "env.h"\n', 'write "engine/'),
    ('engine/files/spool.c', '#include "../base/env.h"\n', 'write "engine/'),
    ('engine/files/spool.c', '#include <engine/base/env.h>\n',
     'write "engine/'),
    ('engine/files/spool.c', '#include "engine/base/gone.h"\n',
     'write "engine/'),
    ('engine/files/spool.c', '#include <Python.h>\n', 'the binding alone'),
    ('engine/loose.c', '', 'has no place'),
    ('engine/other/loose.c', '', 'has no place'),
    ('engine/base/deep/loose.c', '', 'has no place'),
    ('loose.h', '', 'has no place'),
])
def test_engine_that_does_not(path, text, words):
    found = complaints({**GOOD, path: text})
    assert len(found) == 1 and found[0].startswith(path), found
    assert words in found[0]


def test_includes_of_others():
    """Tests and benchmarks name their headers in the same way."""
    roots = (PACKAGE, TOP)
    wrong = [f'{path.relative_to(TOP)} includes "{name}"'
             for directory in ('tests', 'benchmarks')
             for path in sorted((TOP / directory).rglob('*.[ch]'))
             for quote, name in _INCLUDE.findall(path.read_text())
             if quote == '"' and not any(
                 (root / name).is_file() and '..' not in name
                 for root in roots)]
    assert not wrong, '\n'.join(wrong)


def concepts():
    """The engine's files without their ending, by folder."""
    found = {folder: set() for folder in ENGINE}
    for path in c_files(PACKAGE):
        folder = place_of(path)
        if folder in ENGINE:
            found[folder].add(pathlib.PurePath(path).stem)
    return found


def test_tests_mirror_the_engine():
    """``tests/c/FOLDER/test_FILE.c``, or ``test_FILE_more.c``."""
    lost = []
    for path in sorted(TESTS.rglob('*.[ch]')):
        folder = path.parent.name
        if path.parent.parent != TESTS or (
                folder not in TESTS_ALONE and not any(
                    re.fullmatch(rf'test_{concept}(_\w+)?', path.stem)
                    for concept in concepts().get(folder, ()))):
            lost.append(str(path.relative_to(TOP)))
    assert not lost, f'no file of the engine belongs to {", ".join(lost)}'


def first_sentence(path):
    """What a file says that it is, behind its own name."""
    comment = re.search(r'/\*\n(.*?)\*/', path.read_text(), re.DOTALL)
    assert comment, f'{path} does not say what it is'
    text = ' '.join(line.strip().removeprefix('*').strip()
                    for line in comment[1].split('\n\n')[0].splitlines())
    name, dash, rest = text.partition(' - ')
    assert name == path.name and dash, f'{path} begins with: {text}'
    sentence = re.split(r'(?<=\.)\s', rest + ' ')[0].rstrip(' .')
    assert sentence, f'{path} does not say what it is'
    return re.sub(r'`(.*?)`', r'``\1``', sentence)


def engine_map():
    lines = []
    for folder, files in concepts().items():
        lines += [f'``{folder}/``: {ENGINE[folder]}', '']
        for concept in sorted(files):
            path = PACKAGE / 'engine' / folder / f'{concept}.h'
            if not path.exists():
                path = path.with_suffix('.c')
            lines += textwrap.wrap(
                f'``{concept}``: {first_sentence(path)}', 86,
                initial_indent='* ', subsequent_indent='  ',
                break_long_words=False, break_on_hyphens=False)
        lines.append('')
    return '\n'.join(lines) + '\n'


def parts_of_the_page():
    """What stands before the map, the map, and what stands behind it."""
    before, begin, rest = DESIGN.read_text().partition(_BEGIN)
    kept, end, behind = rest.partition(_END)
    assert begin and end, f'{DESIGN} has no place for the map'
    return before + begin + '\n', kept.removeprefix('\n'), end + behind


def test_map():
    assert parts_of_the_page()[1] == engine_map(), (
        'the map of the engine is not up to date: run '
        'python -m tests.test_layers --write')


def main(arguments):
    if arguments != ['--write']:
        sys.exit('usage: python -m tests.test_layers --write')
    before, _, behind = parts_of_the_page()
    DESIGN.write_text(before + engine_map() + behind)


if __name__ == '__main__':
    main(sys.argv[1:])
