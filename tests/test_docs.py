# SPDX-License-Identifier: Apache-2.0
"""The documents build, and describe the programs correctly.

No reference dangles, since they are built with warnings as errors; the manual
pages are well formed; and commands, options, files and messages that they name
exist.
"""

import ast
import configparser
import functools
import html.parser
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import urllib.parse
from xml.etree import ElementTree

from cliff import command
from docutils import core
from docutils import nodes
from osprofiler import opts as profiler_opts
import pytest

from dedupd import opts
from dedupd.status import problems
from glance_dedup.cli import entry
from glance_dedup.driver import store_opts
from tests.support import documents

TOP = documents.TOP
MANUAL = {'glance-dedup.1', 'dedupd.8'}


def in_git():
    """Both builds run git, from which reno makes the notes' history."""
    return subprocess.run(
        ['git', 'rev-parse', '--verify', '-q', 'HEAD'], cwd=TOP,
        capture_output=True).returncode == 0


def build(source, builder, target):
    """Build documents; every builder shares the parsed documents."""
    result = subprocess.run(
        [sys.executable, '-m', 'sphinx', '-W', '--keep-going', '-q',
         '-b', builder, '-d', target.parent / 'doctrees', TOP / source,
         target],
        cwd=TOP, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, f'\n{result.stdout}{result.stderr}'


# -- building -----------------------------------------------------------------

@pytest.fixture(scope='module')
def place(tmp_path_factory):
    return tmp_path_factory.mktemp('documents')


# Long: Sphinx writes every page.
@pytest.mark.skipif(not in_git(), reason='not a git checkout with a commit')
@pytest.mark.parametrize('source', ['doc/source', 'releasenotes/source'])
def test_build(source, place):
    target = place / source.split('/')[0] / 'html'
    build(source, 'html', target)
    assert (target / 'index.html').exists()
    for page in target.rglob('*.html'):
        require_links(page)


class Links(html.parser.HTMLParser):
    """Targets of a page's references and pictures."""

    def __init__(self):
        super().__init__()
        self.found = set()
        self.loaded = set()
        # The theme makes everything outside the text.
        self.depth = 0

    def handle_starttag(self, tag, attrs):
        self.depth += tag == 'section'
        if tag in ('script', 'img', 'link'):
            self.loaded.update(value for name, value in attrs
                               if name in ('href', 'src') and value)
        if self.depth:
            self.found.update(value for name, value in attrs
                              if name in ('href', 'src') and value)

    def handle_endtag(self, tag):
        self.depth -= tag == 'section'


def require_links(page):
    links = Links()
    links.feed(page.read_text())
    for link in links.loaded:
        assert not urllib.parse.urlsplit(link).netloc, (
            f'{page} loads {link} from another host')
    for link in links.found:
        parts = urllib.parse.urlsplit(link)
        if not parts.scheme and not parts.netloc and parts.path:
            assert (page.parent / urllib.parse.unquote(parts.path)).exists(), (
                f'{page}: {link} leads nowhere')


# -- pages that are read as they stand ----------------------------------------

def outside():
    return [pytest.param(path, id=str(path.relative_to(TOP)))
            for path in documents.outside()]


@pytest.mark.parametrize('page', outside())
def test_a_page_that_is_read_as_it_stands(page):
    """docutils alone reports nothing, and the named files exist."""
    said = io.StringIO()
    tree = core.publish_doctree(
        page.read_text(), source_path=str(page), settings_overrides={
            'report_level': 1, 'halt_level': 5, 'warning_stream': said,
            'file_insertion_enabled': False, 'raw_enabled': False})
    assert not said.getvalue()
    for node in tree.findall():
        name = node.get('uri' if isinstance(node, nodes.image) else 'refuri',
                        '') if isinstance(node, nodes.Element) else ''
        if name and not urllib.parse.urlsplit(name).scheme:
            assert (page.parent / name).exists(), f'{name} leads nowhere'


def linked(page):
    return set(re.findall(r'<([\w./-]+\.rst)>`_', page.read_text()))


def test_the_way_in_is_linked_and_packaged():
    """README and the contributor's guide link the pages; an sdist has them."""
    pages = {path.name for path in documents.outside()
             if path.parent == TOP} - {'README.rst'}
    assert pages <= linked(TOP / 'README.rst')
    index = (documents.SOURCE / 'contributor' / 'index.rst').read_text()
    manifest = (TOP / 'MANIFEST.in').read_text().split()
    for name in pages:
        short = name.removesuffix('.rst').lower()
        assert re.search(rf'^   {short}$', index, re.MULTILINE)
        included = documents.SOURCE / 'contributor' / f'{short}.rst'
        assert f'.. include:: ../../../{name}' in included.read_text()
        assert name in manifest
    assert {'.pre-commit-config.yaml', '.zuul.yaml'} <= set(manifest)


def test_readme_is_short_and_the_package_says_what_it_is():
    assert len((TOP / 'README.rst').read_text().splitlines()) <= 150
    setup = configparser.RawConfigParser()
    setup.read(TOP / 'setup.cfg')
    metadata = setup['metadata']
    assert metadata['description_file'] == 'README.rst'
    assert metadata['description_content_type'].startswith('text/x-rst')


@pytest.mark.needs('manual')
@pytest.mark.skipif(not in_git(), reason='not a git checkout with a commit')
def test_manual_pages(place):
    """Each page has a name that ``apropos`` finds, and valid markup."""
    for tool in ('man', 'lexgrog'):
        assert shutil.which(tool), f'{tool} is missing: see bindep.txt, man-db'
    target = place / 'doc' / 'man'
    build('doc/source', 'man', target)
    assert {path.name for path in target.iterdir()
            if path.is_file()} == MANUAL
    for name in MANUAL:
        text = page_of(target / name)
        assert '%(' not in text and '<>' not in text
        for heading in ('NAME', 'SYNOPSIS', 'DESCRIPTION', 'EXIT STATUS',
                        'FILES', 'SEE ALSO'):
            assert re.search(f'^{heading}$', text, re.MULTILINE), (
                name, heading)
    text = page_of(target / 'glance-dedup.1')
    for heading, commands in entry.GROUPS.items():
        _, _, below = text.partition(f'\n{heading.upper()}\n')
        section = re.split(r'^\S', below, maxsplit=1, flags=re.MULTILINE)[0]
        for name in commands:
            assert re.search(f'^   {name}$', section, re.MULTILINE), name


def page_of(path):
    """Return a manual page as it is shown."""
    name = path.name.split('.')[0]
    result = subprocess.run(
        ['lexgrog', path], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f'{name} - ' in result.stdout
    result = subprocess.run(
        ['man', '--local-file', '--warnings=w', path], timeout=200,
        capture_output=True, text=True,
        env={**os.environ, 'MANWIDTH': '80', 'LC_ALL': 'C.UTF-8'})
    assert result.returncode == 0 and not result.stderr, result.stderr
    # Bold is a letter typed over itself.
    return re.sub('.\b', '', result.stdout)


def figures():
    """Return rows of README's results: subject, result, source."""
    rows = re.findall(
        r'^   \* - (.+?)\n     - (.+?)\n     - (.+?)(?=\n   \* |\n\n)',
        (TOP / 'README.rst').read_text(), re.MULTILINE | re.DOTALL)
    assert rows[0][2] == 'from'
    return rows[1:]


@pytest.mark.parametrize('row', figures(), ids=lambda row: row[0][:30])
def test_a_figure_of_readme_stands_in_the_guide(row):
    """A figure is on a page that names its command, or on the linked page."""
    _, result, source = row
    guide = {page: page.read_text().replace(',', '')
             for page in documents.SOURCE.rglob('*.rst')}
    link = re.search('<(.+)>`_', source)
    named = [text for page, text in guide.items()
             if (page == TOP / link[1] if link else source.strip('`') in text)]
    numbers = re.findall(r'\d[\d.]*', result.replace(',', ''))
    assert numbers
    assert any(all(re.search(rf'(?<![\d.]){re.escape(number)}(?![\d.]\d|\d)',
                             text) for number in numbers)
               for text in named), f'{result} is not what {source} gives'


def test_the_figures_of_the_comparison_stand_in_the_guide():
    """README's comparison with other stores has the figures of the guide."""
    comparison = re.search('^Beside a file store.*?^Where to go on',
                           (TOP / 'README.rst').read_text(),
                           re.MULTILINE | re.DOTALL)[0]
    figures = re.findall(r'(\d+\.\d) (?:s|MB)\b', comparison)
    assert len(figures) > 10
    guide = (documents.SOURCE / 'contributor' / 'measurements'
             / 'compute-hosts.rst').read_text()
    for figure in figures:
        assert re.search(rf'^     - {re.escape(figure)}$', guide,
                         re.MULTILINE), figure


# -- pictures -----------------------------------------------------------------

SVG = '{http://www.w3.org/2000/svg}'


@functools.cache
def drawing():
    return runpy.run_path(TOP / 'doc' / 'pictures.py')


@pytest.mark.parametrize('name', ['overview', 'life'])
def test_a_picture_is_what_its_program_draws(name):
    """A picture equals its program's output, and has text and both colours."""
    path = documents.SOURCE / 'images' / f'{name}.svg'
    text = path.read_text()
    assert text == str(drawing()['PICTURES'][name]()), (
        'run python doc/pictures.py')
    tree = ElementTree.fromstring(text)
    assert tree.find(f'{SVG}title').text and tree.find(f'{SVG}desc').text
    style = tree.find(f'{SVG}style').text
    assert '@media (prefers-color-scheme: dark)' in style
    assert len(list(tree.iter(f'{SVG}text'))) > 15
    width = int(tree.get('width'))
    boxes = [tuple(int(box.get(key)) for key in ('x', 'y', 'width', 'height'))
             for box in tree.iter(f'{SVG}rect') if box.get('rx')]
    for words in tree.iter(f'{SVG}text'):
        x, y = int(words.get('x')), int(words.get('y'))
        # A letter of 13 pixels is seven wide, on average; a bold one, eight.
        half = len(words.text) * (4.2 if words.get('class') == 'name'
                                  else 3.6)
        if words.get('text-anchor') == 'start':
            x += half
        assert 0 <= x - half and x + half <= width, words.text
        # The text fits into the innermost box around it.
        inside = [box for box in boxes if box[0] <= x <= box[0] + box[2]
                  and box[1] <= y <= box[1] + box[3]]
        if inside and words.get('class') != 'label':
            left, _, wide, _ = min(inside, key=lambda box: box[2] * box[3])
            assert left <= x - half and x + half <= left + wide, words.text


def test_pages_show_the_pictures():
    assert '.. image:: doc/source/images/overview.svg' in (
        TOP / 'README.rst').read_text()
    assert '.. image:: ../images/life.svg' in (
        documents.SOURCE / 'contributor' / 'design.rst').read_text()


# -- glossary -----------------------------------------------------------------

#: The pages of the design, which introduce the terms.
DESIGN = ('access', 'cache', 'daemon', 'design', 'hints', 'hosts',
          'maintenance', 'merging', 'protocol', 'replication', 'speed')


def guide(name):
    """Return the text of a page for contributors."""
    return (documents.SOURCE / 'contributor' / f'{name}.rst').read_text()


def glossary():
    """Return the terms, with the meaning of each."""
    body = guide('glossary').partition('.. glossary::\n\n')[2]
    parts = re.split(r'^   (\S.*)$', body, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2]))


def test_the_glossary_defines_each_term_once_in_order():
    terms = [term for term, _ in glossary()]
    assert len(terms) > 40
    assert terms == sorted(set(terms), key=str.lower)
    for term, meaning in glossary():
        assert meaning.strip().endswith('.'), f'{term} has no sentence'


def test_terms_of_the_glossary_are_used():
    """The contributor's guide uses each term of the glossary elsewhere."""
    text = ' '.join(' '.join(map(guide, (
        *DESIGN, 'format', 'format-derived', 'volumes'))).split()).lower()
    for term, _ in glossary():
        assert len(re.findall(rf'\b{re.escape(term.lower())}', text)) > 1, (
            f'{term} is used nowhere')


#: Emphasised in the pages of the design, and no terms.
_NO_TERMS = {'begun', 'execute', 'exists already', 'gear', 'needs', 'nothing',
             'no processor to spare', 'no space', 'not', 'nothing to gain',
             'plan', 'recompress', 'tests', 'without it'}


def test_words_that_are_introduced_as_terms_are_in_the_glossary():
    terms = {term.lower() for term, _ in glossary()}
    found = 0
    for name in DESIGN:
        text = re.sub(r'^Alternatives.*\n([-=])\1+\n(?:.*\n(?!\1{3}))*', '',
                      guide(name), flags=re.MULTILINE)
        for words in re.findall(r'(?<![*\w])\*([A-Za-z][a-z -]+)[.:]?\*(?!\*)',
                                ' '.join(text.split())):
            word = words.lower()
            if word not in _NO_TERMS:
                found += 1
                assert terms & {word, word.removesuffix('s')}, (
                    f'{name}: {words} is not in the glossary')
    assert found > 8


def test_the_design_page_leads_to_each_folder():
    """Each folder has a row in the tables, with a link to its description."""
    rows = re.findall(r'^   \* - ``([a-z_]+)``\n     - (.+?)(?=^   \* - |^$)',
                      guide('design'), re.MULTILINE | re.DOTALL)
    found = [name for name, row in rows if '`_' in row or ':doc:' in row]
    for top in 'glance_dedup/engine', 'glance_dedup', 'dedupd':
        for folder in (TOP / top).iterdir():
            if any(folder.glob('__init__.py')) or any(folder.glob('*.c')):
                assert folder.name in found, folder
                found.remove(folder.name)
    assert found == ['mount']       # a module


@pytest.fixture(scope='module')
def module_map():
    return runpy.run_path(TOP / 'doc' / 'module_map.py')


def test_the_page_of_modules_has_each_module(module_map):
    tops = re.findall(r'^\.\. module-map:: (.+)$', guide('modules'),
                      re.MULTILINE)
    text = '\n'.join(line for top in tops
                     for line in module_map['lines'](TOP / top))
    for module in ('engine/base/', 'base/', 'cli/', 'dedupd/', 'tasks/'):
        assert re.search(rf'^``[\w/]*{module}``', text, re.MULTILINE), module
    for module in ('task_queue', 'grouphead', 'hashes'):
        assert re.search(rf'^\* ``{module}``: [A-Z]?\w', text, re.MULTILINE)


@pytest.mark.parametrize(('name', 'text'), [
    ('a.py', '"""Do this.\n\nThen that.\n"""\n'),
    ('a.h', '/* License */\n/*\n * a.h - Do this.  Then that.\n */\n')])
def test_the_purpose_of_a_module(module_map, tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    assert module_map['purpose'](path) == 'Do this'
    path.write_text(text.replace('Do this', ''))
    with pytest.raises(ValueError, match=name):
        module_map['purpose'](path)


# -- length -------------------------------------------------------------------

@pytest.mark.parametrize('page', sorted(documents.SOURCE.rglob('*.rst')),
                         ids=lambda page: str(
                             page.relative_to(documents.SOURCE)))
def test_a_page_can_be_read_at_one_sitting(page):
    words = len(page.read_text().split())
    assert words <= 6000, words


# -- commands -----------------------------------------------------------------

class Misused(Exception):
    """The program would not accept this command line."""


@functools.cache
def application():
    return entry.App()


def parser_of(words):
    """Return the parser of a command, and the words of its arguments."""
    app = application()
    try:
        factory, name, rest = app.command_manager.find_command(list(words))
    except ValueError as e:
        raise Misused(f'there is no such command: {e}') from e
    assert issubclass(factory, command.Command)
    return factory(app, None, cmd_name=name).get_parser(name), rest


def parse(parser, words):
    def fail(message):
        raise Misused(message)

    parser.error = fail
    return parser.parse_known_args(words)


def require_glance_dedup(words, whole):
    """Check a command line; the arguments only if `whole`.

    :raises Misused: if it is no command
    """
    if not whole:
        # The rest is cut short: options must exist, in any position.
        known = set()
        _, words = parse(application().parser, words)
        plain = [word for word in words if not word.startswith('-')]
        if plain:
            parser, _ = parser_of(plain)
            known |= set(parser._option_string_actions)
        for word in words:
            option = word.partition('=')[0]
            if option.startswith('-') and option not in known:
                raise Misused(f'{word} is no option')
        return
    if {'--version', '--help'} & set(words):
        return
    _, rest = parse(application().parser, words)
    if not rest:
        raise Misused('there is no command')
    parser, rest = parser_of(rest)
    _, left = parse(parser, rest)
    if left:
        raise Misused(f'{left} is too much')


@functools.cache
def help_of_dedupd():
    return subprocess.run(
        [sys.executable, '-m', 'dedupd.daemon', '--help'], cwd=TOP, check=True,
        capture_output=True, text=True, timeout=200).stdout


def require_dedupd(words):
    for word in words:
        if word.startswith('-') and not re.search(
                rf'(^|[\s,\[]){re.escape(word.partition("=")[0])}[\s,\]]',
                help_of_dedupd()):
            raise Misused(f'{word} is no option')


#: Words that may precede a program: a user for it, and variables.
_BEFORE = re.compile(
    r'(sudo -u [a-z]+ |[A-Z_]+=\S+ |\S*/(?=(glance-dedup|dedupd)\b))*')


def used(text):
    """Return our programs in a line of shell, with their arguments."""
    for part in re.split(r'[|;]|&&', text):
        part = _BEFORE.sub('', part.strip(), count=1)
        try:
            words = shlex.split(part, comments=True)
        except ValueError:
            continue
        if words and words[0] in ('glance-dedup', 'dedupd'):
            yield words[0], [word for word in words[1:]
                             if not re.fullmatch(r'\d?>.*', word)]


def check_line(place, text, whole):
    """Return the number of commands in a line; each must be valid."""
    found = 0
    if ' [' in text:            # a synopsis
        return 0
    for program, words in used(text):
        found += 1
        try:
            if program == 'dedupd':
                require_dedupd(words)
            else:
                require_glance_dedup(words, whole)
        except Misused as e:
            pytest.fail(f'{place}: {text}: {e}')
    return found


def test_commands_of_blocks():
    found = 0
    for page in documents.pages():
        for block in documents.blocks(page):
            for line in documents.commands(block):
                found += check_line(line.place, line.text, whole=True)
    assert found > 30


def test_commands_of_sentences():
    """Commands may lack the program's name, such as ``repository check``."""
    found = 0
    for page in documents.pages():
        if page.name.startswith('format'):  # structures, not commands
            continue
        for text in documents.literals(page):
            if re.match('(repository|image) [a-z]', text):
                text = f'glance-dedup {text}'
            found += check_line(page, text.replace('...', ''), whole=False)
    assert found > 60


@pytest.mark.parametrize('line', [
    'glance-dedup image gett ID', 'glance-dedup image get ID',
    'glance-dedup image list --force', 'dedupd --no-such',
    'sudo -u glance glance-dedup --repo DIR image list',
    'X=1 /opt/bin/glance-dedup task recompress --codec none'])
def test_a_wrong_command_is_found(line):
    with pytest.raises(pytest.fail.Exception):
        check_line('here', line, whole=True)


# -- references ---------------------------------------------------------------

def headings(page):
    return re.findall(r'^(.+)\n([=~-])\2{3,}$', page.read_text(),
                      re.MULTILINE)


def test_sections_that_references_name():
    """The named section exists, as in :doc:`space`, "What to choose"."""
    found = 0
    for page in documents.pages():
        for target, title in re.findall(
                r':doc:`([^`]+)`,\s+"([^"]+)"', page.read_text()):
            base = documents.SOURCE if target[0] == '/' else page.parent
            other = base / f'{target.lstrip("/")}.rst'
            found += 1
            assert ' '.join(title.split()) in {
                heading for heading, _ in headings(other)}, (
                f'{page}: {other.name} has no section {title}')
    assert found > 20


def test_sections_that_comments_name():
    """The named section exists, as in (design.rst, "Storing")."""
    sections = {(page.stem, heading) for page in documents.pages()
                for heading, _ in headings(page)}
    found = 0
    for path in (path for top in ('glance_dedup', 'dedupd', 'tests')
                 for path in (TOP / top).rglob('*')):
        if path.suffix in ('.c', '.h', '.pml', '.py', '.pyi'):
            text = re.sub(r'\n\s*(?:\*|#:?)? *', ' ', path.read_text())
            for section in re.findall(
                    r'\b([\w-]+)\.rst(?:``)?,? ?\(?"([^"]+)"', text):
                found += 1
                assert section in sections, f'{path}: {section}'
    assert found > 20


# -- options ------------------------------------------------------------------

def names_of(options):
    return {option.name for option in options}


def test_options_of_sentences():
    """Each ``dedup_store_...`` in a page is an option."""
    known = names_of(store_opts.dedup_opts)
    for page in documents.pages():
        for name in re.findall(r'\bdedup_store_[a-z_]*[a-z]',
                               page.read_text()):
            assert name in known, f'{page}: there is no option {name}'


def test_options_of_blocks():
    """Every piece of a configuration file has only known options."""
    driver = names_of(store_opts.dedup_opts)
    daemon = {group: names_of(options)
              for group, options in opts.list_opts()
              if group != 'DEFAULT'}
    # One of them is the daemon's own, the others OSProfiler's.
    daemon['profiler'] |= names_of(profiler_opts.list_opts()[0][1])
    found = 0
    for page in documents.pages():
        for block in documents.blocks(page):
            if not block.text.startswith('[') or block.language not in (
                    '', 'ini'):
                continue
            parser = configparser.RawConfigParser(
                strict=False, allow_no_value=True, default_section='')
            parser.optionxform = str
            # DevStack's local.conf has headings of its own.
            parser.read_string(re.sub(r'^\[\[(.*)\]\]$', r'[\1]', block.text,
                                      flags=re.MULTILINE))
            for section in parser.sections():
                for name in parser[section]:
                    if section in daemon or name.startswith('dedup_store_'):
                        found += 1
                        assert name in daemon.get(section, driver), (
                            f'{block.place}: there is no option {name}')
    assert found > 10


# -- files --------------------------------------------------------------------

def test_files_of_the_checkout():
    """The named files of the checkout exist, such as ``tools/demo``."""
    tops = '|'.join(path.name for path in TOP.iterdir() if path.is_dir()
                    and not path.name.startswith('.') and path.name != 'build')
    found = 0
    for page in documents.pages():
        for text in documents.literals(page):
            name = text.split()[0] if text.split() else ''
            if not re.fullmatch(rf'({tops})/[\w./-]+', name):
                continue
            if name.startswith('doc/build'):
                continue
            found += 1
            assert (TOP / name).exists(), f'{page}: there is no {name}'
    assert found > 30


# -- messages -----------------------------------------------------------------

_C_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
_C_STRINGS = re.compile(r'"(?:[^"\\\n]|\\.)*"(?:\s*(?:PRI\w+\s*)?'
                        r'"(?:[^"\\\n]|\\.)*")*')
_FORMAT = re.compile(r'%(\(\w+\))?[-#0 +.*\d]*(hh|h|ll|l|z|j)?[a-zA-Z]')


def messages_of_c(text):
    for found in _C_STRINGS.finditer(text):
        joined = ''.join(_C_STRING.findall(found[0]))
        yield _FORMAT.sub('...', joined)


def messages_of_python(text):
    """Yield every string, with ... for each value inserted."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):
            yield ''.join(
                value.value if isinstance(value, ast.Constant) else '...'
                for value in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield _FORMAT.sub('...', node.value)


@functools.cache
def messages():
    """Return all messages of the programs."""
    found = set()
    for directory in ('glance_dedup', 'dedupd'):
        for path in (TOP / directory).rglob('*.py'):
            found.update(messages_of_python(path.read_text()))
        for path in (TOP / directory).rglob('*.c'):
            found.update(messages_of_c(path.read_text()))
    return found


@functools.cache
def pattern(text):
    """Compile a pattern that matches anything for each ..."""
    return re.compile(re.escape(text).replace(r'\.\.\.', '(.+)'))


def is_message(text):
    """Return whether a text is a message, or a part of one."""
    return any(map(pattern(text).search, messages()))


def is_said(line):
    """Return whether a line is a message, or one inside another."""
    # A system call's error follows the failed operation.
    line = line.removesuffix(': ...')
    if is_message(line):
        return True
    for message in messages():
        if '...' in message and len(message.replace('...', '')) >= 20:
            match = pattern(message).fullmatch(line)
            if match and all(part == '...' or is_message(part)
                             for part in match.groups()):
                return True
    return False


def quoted():
    page = documents.SOURCE / 'admin' / 'troubleshooting.rst'
    return [(block.place, line) for block in documents.blocks(page)
            if block.language == 'text' for line in block.text.splitlines()]


def test_messages():
    """The page on troubleshooting quotes messages of the programs."""
    lines = quoted()
    assert len(lines) > 25
    for place, line in lines:
        assert is_said(line), f'{place}: nobody says {line!r}'


def test_the_codes_of_problems():
    page = documents.SOURCE / 'admin' / 'troubleshooting.rst'
    table = page.read_text().partition('.. _problem-codes:')[2]
    listed = re.findall(r'^   \* - ``([A-Z_]+)``\n     - (\w+)$', table, re.M)
    assert listed == list(problems.CODES.items())


def test_messages_that_are_not_said():
    assert not is_said('there is no repository here, and no daemon')
    assert not is_said('... belongs to nobody, and ...')
    assert not is_said('Refused a location of image ... with a false name')


# -- tools --------------------------------------------------------------------

def tools():
    """Return the tools for people; the other files are parts of these."""
    return sorted(
        path.name for path in (TOP / 'tools').iterdir()
        if path.is_file() and os.access(path, os.X_OK)
        and 'the part of ' not in path.read_text()[:200].lower())


@pytest.mark.parametrize('tool', tools())
def test_help_of_tools(tool):
    path = TOP / 'tools' / tool
    # A tool without --help would do its work instead.
    assert '--help' in path.read_text()
    result = subprocess.run(
        [path, '--help'], cwd='/', stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    assert f'tools/{tool}' in result.stdout
