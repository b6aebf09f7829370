# SPDX-License-Identifier: Apache-2.0

"""The command ``help``, and the list of commands below ``--help``."""

from collections.abc import Iterator

import autopage.argparse
from cliff import help

from glance_dedup.cli import common


class Help(help.HelpCommand):
    """Show the help of a command, of a noun's commands, or of the program."""

    app: common.Program

    def get_epilog(self) -> str:
        """Return the end of the help, as our other commands do."""
        return self._epilog or ''

    def take_action(self, parsed_args):
        if not parsed_args.cmd:
            show(self.app)
        elif len(parsed_args.cmd) == 1 and any(
                name.startswith(f'{parsed_args.cmd[0]} ')
                for name in self.app.command_manager.commands):
            self.app.stdout.writelines(_lines(self.app, parsed_args.cmd[0]))
        else:
            return super().take_action(parsed_args)
        return 0


def show(app: common.Program) -> None:
    """Show the program's options, and its commands under their headings."""
    pager = autopage.argparse.help_pager(app.stdout)
    with pager as out:
        autopage.argparse.use_color_for_parser(
            app.parser, pager.to_terminal())
        app.parser.print_help(out)
        for line in _lines(app):
            out.write(line)


def _lines(app: common.Program, noun: str = '') -> Iterator[str]:
    """Yield the lines that list the commands: all, or those of a noun."""
    width = max(map(len, app.command_manager.commands))
    for heading, commands in app.groups.items():
        names = [name for name in commands
                 if not noun or name.split()[0] == noun]
        if names:
            yield f'\n{heading}:\n'
        for name in names:
            factory, _, _ = app.command_manager.find_command(name.split())
            described = factory(app, None).get_description()
            sentence = described.split('\n')[0].rstrip('.')
            yield f'  {name:<{width}}  {sentence}\n'
