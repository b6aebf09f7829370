# SPDX-License-Identifier: Apache-2.0

"""``glance-dedup complete``: completion on the Tab key in bash, zsh and fish.

A shell's script has the program itself complete each line. So it knows all
commands and options of the program that is installed, and the images and
volumes that exist now.
"""

import argparse
import collections
from collections.abc import Iterable
from collections.abc import Iterator
import contextlib

from glance_dedup.cli import command
from glance_dedup.cli import common

#: The line that has the shell complete names of files.
FILES = ':files'

# The kind of an argument's value is known by its name in the help.
_OF_FILES = ('FILE', 'DIR', 'PATH', 'FILE|SERVER|volume:VOLUME')

_SCRIPTS = {
    'bash': """\
_glance_dedup() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        case $line in
        :files) compopt -o default ;;
        *) COMPREPLY+=("${line%%$'\\t'*}") ;;
        esac
    done < <(glance-dedup complete line -- "${COMP_WORDS[@]:1:COMP_CWORD}" \\
        2>/dev/null)
}
complete -F _glance_dedup glance-dedup
""",
    'zsh': """\
#compdef glance-dedup
_glance_dedup() {
    local line
    local -a lines found
    lines=("${(@f)$(glance-dedup complete line -- \\
        "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    for line in $lines; do
        if [[ $line == :files ]]; then
            _files
        else
            found+=("${${line%%$'\\t'*}//:/\\\\:}:${line#*$'\\t'}")
        fi
    done
    (( $#found )) && _describe glance-dedup found
}
if [[ $funcstack[1] == _glance_dedup ]]; then
    _glance_dedup "$@"
else
    compdef _glance_dedup glance-dedup
fi
""",
    'fish': """\
function __glance_dedup
    set -l words (commandline -opc) (commandline -ct)
    for line in (glance-dedup complete line -- $words[2..-1] 2>/dev/null)
        if test $line = :files
            __fish_complete_path (commandline -ct)
        else
            echo $line
        end
    end
end
complete -c glance-dedup -f -a '(__glance_dedup)'
""",
}


class Complete(command.RepositoryCommand):
    """Print the script with which a shell completes commands on Tab.

    bash: source <(glance-dedup complete bash), for example in ~/.bashrc. zsh:
    the same after compinit, in ~/.zshrc. fish: glance-dedup complete fish >
    ~/.config/fish/completions/glance-dedup.fish. The scripts ask glance-dedup
    for each line: glance-dedup complete line -- WORD...
    """

    def add_arguments(self, parser):
        parser.add_argument('shell', choices=(*_SCRIPTS, 'line'),
                            help='The shell, or line: to complete a line.')
        parser.add_argument(
            'words', metavar='WORD', nargs=argparse.REMAINDER,
            help='With line: its words after the program, up to the one that '
            'is completed, which may be empty.')

    def take_action(self, parsed_args):
        if parsed_args.shell != 'line':
            self.app.stdout.write(_SCRIPTS[parsed_args.shell])
            return
        # Whatever is wrong with a line, a shell goes on.
        with contextlib.suppress(Exception, SystemExit):
            line = _Line(self, parsed_args.words)
            for word, about in line.matches():
                self.app.stdout.write(f'{word}\t{about}\n' if about
                                      else f'{word}\n')


Candidates = Iterable[tuple[str, str]]


class _Line:
    """A line that is being typed.

    :param place: returns the repository's place
    :param words: after the program's name; the last one is to be completed
    """

    def __init__(self, place: command.RepositoryCommand, words: list[str]
                 ) -> None:
        # bash makes words of the equals signs in options.
        *self._words, self._last = [
            word for word in words if word != '='] or ['']
        if words[-1:] == ['=']:
            self._words.append(self._last)
            self._last = ''
        self._place = place
        self._app = place.app
        self._name = ''
        self._parser = place.app.parser
        self._positionals = 0       # those before the last word

    def matches(self) -> Iterator[tuple[str, str]]:
        """Return candidates for the last word, each with a description."""
        for word, about in self._candidates():
            if word.startswith(self._last) or word == FILES:
                yield word, about

    def _candidates(self) -> Candidates:
        option = self._read()
        if option is not None:
            return self._values(option)
        if self._last.startswith('-'):
            return self._options()
        if not self._is_command():
            return self._next_words()
        return self._arguments()

    def _read(self) -> argparse.Action | None:
        """Take the words in; returns the option that the last one is for."""
        option = None
        for word in self._words:
            if option is not None:
                option = None
            elif word.startswith('-'):
                option = self._option(word)
            elif self._is_command():
                self._positionals += 1
            else:
                self._name = f'{self._name} {word}'.lstrip()
                if self._is_command():
                    self._parser = self._parser_of(self._name)
        return option

    def _is_command(self) -> bool:
        return (self._name in self._app.command_manager.commands
                and self._name != 'help')

    def _parser_of(self, name: str) -> argparse.ArgumentParser:
        factory, _, _ = self._app.command_manager.find_command(name.split())
        return factory(self._app, None).get_parser(name)

    def _option(self, word: str) -> argparse.Action | None:
        """The option of this name, if a value follows it."""
        for parser in (self._parser, self._app.parser):
            action = parser._option_string_actions.get(word)
            if action is not None:
                return action if action.nargs is None else None
        return None

    def _options(self) -> Candidates:
        for action in self._parser._actions:
            for name in action.option_strings:
                if name.startswith('--') and action.help != argparse.SUPPRESS:
                    yield name, _first_sentence(action.help or '')

    def _next_words(self) -> Candidates:
        begin = f'{self._name} ' if self._name else ''
        if self._name.split()[:1] == ['help']:
            begin = begin.removeprefix('help ')
        found = collections.defaultdict(list)
        for name in self._app.command_manager.commands:
            if name.startswith(begin):
                found[name[len(begin):].split()[0]].append(name)
        return [(word, '') for word in sorted(found)]

    def _arguments(self) -> Candidates:
        places = [action for action in self._parser._actions
                  if not action.option_strings]
        if not places:
            return []
        action = places[min(self._positionals, len(places) - 1)]
        if self._positionals >= len(places) and action.nargs not in ('*', '+'):
            return []
        return self._values(action)

    def _values(self, action: argparse.Action) -> Candidates:
        if action.choices is not None:
            return [(str(choice), '') for choice in action.choices]
        metavar = str(action.metavar or '')
        if metavar in _OF_FILES:
            return [(FILES, '')]
        kind = self._name.split()[:1]
        if metavar == 'IMAGE' or metavar == 'ID' and kind == ['image']:
            return [(name, '') for name in self._existing('images')]
        if metavar == 'NAME' and kind == ['volume']:
            return [(name, '') for name in self._existing('volumes')]
        return []

    def _existing(self, what: str) -> list[str]:
        from glance_dedup.repository import volumes

        if what == 'volumes':
            return volumes.names(self._place.path)
        with self._place.open(index='none') as repo:
            return common.plain_images(repo)


def _first_sentence(text: str) -> str:
    return ' '.join(text.split()).partition('. ')[0].rstrip('.')
