# SPDX-License-Identifier: Apache-2.0

"""Checks the protocol's model with Spin, and shows the results.

By hand::

    python -m tests.model.checker                       # lists everything
    python -m tests.model.checker SCENARIO              # checks the protocol
    python -m tests.model.checker SCENARIO MUTANT       # a rule is left out
    python -m tests.model.checker --trace SCENARIO MUTANT

``--trace`` prints the steps that led to the error, one a line: the process,
and the statement of the model.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
_TOP = 'protocol.pml'
_MUTANT = re.compile(
    r'^#define (?P<name>\w+) (?P<number>\d+) '
    r'/\* (?P<rule>N\d+(?:\.\d)?): (?P<text>.+) \*/$', re.M)
_BUILD_TIMEOUT = 240    # seconds
_END_TIMEOUT = 60       # seconds after an interrupt
# Full states, compressed: an answer of the search is exact. MiB.
_MEMORY = 1800
_COMPILE = ['gcc', '-O2', '-w', '-DSAFETY', '-DCOLLAPSE', '-DNOFAIR',
            '-DNOCLAIM', f'-DMEMLIM={_MEMORY}']
_DEPTH = 400_000


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A rule that is left out of the model."""

    name: str
    number: int
    rule: str
    text: str
    """What a process does instead."""


@functools.cache
def mutants() -> dict[str, Mutant]:
    """Return the mutants of ``mutants.pml``, by their names in documents.

    >>> mutants()['no-second-look'].rule
    'N4.3'
    """
    text = (HERE / 'mutants.pml').read_text()
    found = [Mutant(match['name'].lower().replace('_', '-'),
                    int(match['number']), match['rule'], match['text'])
             for match in _MUTANT.finditer(text)]
    assert len(found) == text.count('#define')
    assert [mutant.number for mutant in found] == [
        *range(1, len(found) + 1)]
    return {mutant.name: mutant for mutant in found}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a search."""

    finding: str
    """The property that does not hold; '': all of them hold."""
    states: int
    seconds: float


class Failure(Exception):
    """The model could not be checked, so there is no result."""


class Program:
    """The checker that Spin made of the model.

    :param directory: where it is compiled and runs, and keeps traces
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self._program = directory / 'pan'
        self._call(['spin', '-a', str(HERE / _TOP)])
        self._call([*_COMPILE, '-o', str(self._program), 'pan.c'])

    def _call(self, command: list[str]) -> None:
        result = subprocess.run(
            command, cwd=self._directory, capture_output=True, text=True,
            timeout=_BUILD_TIMEOUT)
        # Spin reports some errors and exits with 0.
        if result.returncode or 'Error' in result.stdout:
            raise Failure(f'{command}: {result.stdout}{result.stderr}')

    def run(self, settings: dict[str, int], timeout: float, *options: str,
            whole: bool = True) -> str:
        """Run the checker; return its output.

        :param settings: the variables that choose scenario and mutant
        :param whole: otherwise it is interrupted after the time, and prints
            what it has found by then
        :raises Failure: it did not end in time
        """
        environment = {**os.environ,
                       **{name: str(int(value))
                          for name, value in settings.items()}}
        with subprocess.Popen(
                [str(self._program), f'-m{_DEPTH}', *options],
                cwd=self._directory, env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            try:
                return process.communicate(timeout=timeout)[0]
            except subprocess.TimeoutExpired as e:
                if whole:
                    raise Failure(
                        f'{settings}: no end after {timeout} s') from e
                process.send_signal(signal.SIGINT)
                return process.communicate(timeout=_END_TIMEOUT)[0]
            finally:
                process.kill()

    def search(self, settings: dict[str, int], timeout: float,
               table: int = 21, whole: bool = True) -> Outcome:
        """Try every order of the steps, up to the first error.

        :param table: log2 of the slots of the table of states
        :param whole: otherwise the search ends with the time or the memory,
            and returns what it has found by then
        :raises Failure: the search was not complete
        """
        begin = time.monotonic()
        printed = self.run(settings, timeout, '-n', f'-w{table}', whole=whole)
        seconds = time.monotonic() - begin
        states = re.search(r'^ *(\S+) states, stored', printed, re.M)
        error = re.search(r'^pan:1: (?:assertion violated )?(.*?) \(at depth',
                          printed, re.M)
        errors = re.search(r'errors: (\d+)', printed)
        if (states is None or errors is None or bool(error) != bool(
                int(errors[1])) or (whole and error is None and re.search(
                'Search not completed|truncated|out of memory|too small'
                '|reached -DMEMLIM', printed))):
            raise Failure(f'{settings}: {printed}')
        return Outcome(error[1] if error else '', int(float(states[1])),
                       seconds)

    def trace(self, settings: dict[str, int], timeout: float) -> list[str]:
        """Return the steps to the error that the last search found."""
        printed = self.run(settings, timeout, '-r', f'{_TOP}.trail')
        return [f'{match[1]}: {match[2]}' for match in re.finditer(
            r'proc +\d+ \((\w+)\).*?\t\[(.*)\]$', printed, re.M)]


def main() -> int:
    """Check one scenario, by hand."""
    from tests.model import scenarios
    parser = argparse.ArgumentParser(description='check the protocol')
    parser.add_argument('scenario', nargs='?', choices=[*scenarios.SCENARIOS])
    parser.add_argument('mutant', nargs='?', choices=[*mutants()])
    parser.add_argument('--trace', action='store_true')
    parser.add_argument('--seconds', type=float, default=1800)
    parser.add_argument('--part', action='store_true',
                        help='say what was found by then')
    arguments = parser.parse_args()
    if arguments.scenario is None:
        for name, scenario in scenarios.SCENARIOS.items():
            print(f'{name}: {scenario.about}')
        for name, mutant in mutants().items():
            print(f'{mutant.rule} {name}: {mutant.text}')
        return 0
    settings = scenarios.SCENARIOS[arguments.scenario].settings()
    if arguments.mutant:
        settings['MUTANT'] = mutants()[arguments.mutant].number
    with tempfile.TemporaryDirectory() as directory:
        program = Program(pathlib.Path(directory))
        outcome = program.search(settings, arguments.seconds,
                                 whole=not arguments.part)
        print(f'{outcome.finding or "no error"}: {outcome.states:,} states, '
              f'{outcome.seconds:.1f} s')
        if arguments.trace and outcome.finding:
            print(*program.trace(settings, arguments.seconds), sep='\n')
    return bool(outcome.finding)


if __name__ == '__main__':
    sys.exit(main())
