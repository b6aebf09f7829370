# SPDX-License-Identifier: Apache-2.0

"""Chooses mutants, tries them and reports; see ``tools/mutate --help``."""

import argparse
import collections
import collections.abc
import concurrent.futures
import contextlib
import dataclasses
import difflib
import fnmatch
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time

from tests.mutation import operators
from tests.mutation import suite

TOP = pathlib.Path(__file__).resolve().parents[2]
# The files of a repository, and concurrent processes, rely on these.
PROTOCOL = ('accounting.py', 'refcounts.py', 'catalog_db.py', 'collector.py',
            'database.py', 'maintainer_role.py', 'merger.py', 'leveldb.py',
            'records.py')
STATUSES = ('killed', 'timed out', 'survived', 'equivalent',
            'did not compile')


@dataclasses.dataclass
class Result:
    mutant: operators.Mutant
    status: str
    by: str
    """The tests that noticed, or the last lines of the compiler."""
    tried: list[str]
    seconds: float


class Trial:
    """Tries mutants, each in a copy of the tree that no other uses."""

    def __init__(self, suite_: suite.Suite, programs: list[suite.Program],
                 directory: pathlib.Path, options: argparse.Namespace) -> None:
        self._suite = suite_
        self._programs = programs
        self._options = options
        self._trees: list[pathlib.Path] = []
        for number in range(options.jobs):
            tree = directory / str(number) / 'tree'
            tree.parent.mkdir()
            suite.copy_tree(suite_.top, tree)
            for variant in ('plain', 'asan'):
                (tree / 'mutated' / variant).mkdir(parents=True)
            self._trees.append(tree)

    def tests(self, mutant: operators.Mutant
              ) -> list[tuple[suite.Program, list[str]]]:
        return suite.tests_of(self._programs, mutant.file, mutant.lines,
                              self._options.budget)

    def judge(self, mutant: operators.Mutant) -> Result:
        tree = self._trees.pop()    # there are as many as there are threads
        path = tree / mutant.file
        text = path.read_bytes()
        start = time.monotonic()
        tried: list[str] = []
        try:
            path.write_bytes(mutant.apply(text))
            status, by = self._status(mutant, tree, tried)
        finally:
            path.write_bytes(text)
            self._suite.reset_extension(tree)
            self._trees.append(tree)
        return Result(mutant, status, by, tried, time.monotonic() - start)

    def _status(self, mutant: operators.Mutant, tree: pathlib.Path,
                tried: list[str]) -> tuple[str, str]:
        changed = {}
        if mutant.file.endswith('.c'):
            complaint = self._compile('plain', mutant, tree)
            if complaint is not None:
                return 'did not compile', complaint[-500:]
            plain = tree / 'mutated/plain/object.o'
            same = self._suite.object('plain', mutant.file)
            if same.read_bytes() == plain.read_bytes():
                return 'equivalent', 'the compiler makes the same of it'
            changed = {mutant.file: plain}
            self._link('plain', mutant, tree)
        sanitized = False
        for number, (program, ids) in enumerate(self.tests(mutant)):
            tried.append(program.name)
            limit = self._options.timeout or 30 + 5 * program.seconds
            if program.name.endswith('.c'):
                status, _ = self._suite.run_c(program.name, 'plain', tree,
                                              limit)
                if status == 0 and (number == 0 or suite.is_namesake(
                        program.name, mutant.file)):
                    if not sanitized:
                        self._compile('asan', mutant, tree)
                        self._link('asan', mutant, tree)
                        sanitized = True
                    status, _ = self._suite.run_c(program.name, 'asan', tree,
                                                  limit)
            else:
                if changed:
                    self._suite.link_extension('plain', tree, changed)
                    changed = {}
                # The tests of one file, the fastest first.
                status, _ = self._suite.run_python(
                    ids or [program.name], tree, limit, '-x')
            if status is None:
                return 'timed out', program.name
            if status != 0:
                return 'killed', program.name
        return 'survived', ''

    def _compile(self, variant: str, mutant: operators.Mutant,
                 tree: pathlib.Path) -> str | None:
        return self._suite.compile(variant, mutant.file, tree,
                                   tree / 'mutated' / variant / 'object.o')

    def _link(self, variant: str, mutant: operators.Mutant,
              tree: pathlib.Path) -> None:
        directory = tree / 'mutated' / variant
        self._suite.link(variant, directory / 'libengine.so',
                         {mutant.file: directory / 'object.o'})


def choose(mutants: list[operators.Mutant], sample: int, seed: int
           ) -> list[operators.Mutant]:
    """Choose by operator in turn, or constants would crowd out the rest."""
    shuffled = mutants.copy()
    random.Random(seed).shuffle(shuffled)
    by_operator = collections.defaultdict(list)
    for mutant in shuffled:
        by_operator[mutant.operator].append(mutant)
    result: list[operators.Mutant] = []
    queues = [by_operator[name] for name in sorted(by_operator)]
    while any(queues) and (not sample or len(result) < sample):
        result += [queue.pop() for queue in queues if queue]
    return result[:sample or None]


def diff(mutant: operators.Mutant, top: pathlib.Path) -> str:
    old = (top / mutant.file).read_bytes()
    return ''.join(difflib.unified_diff(
        old.decode().splitlines(True),
        mutant.apply(old).decode().splitlines(True),
        mutant.file, mutant.file, n=2))


def wanted_files(suite_: suite.Suite, patterns: list[str]) -> list[str]:
    python = [str(path.relative_to(suite_.top))
              for package in suite.PACKAGES
              for path in sorted((suite_.top / package).rglob('*.py'))]
    if not patterns:
        return suite_.engine + [name for name in python
                                if os.path.basename(name) in PROTOCOL]
    found = [name for name in suite_.engine + python
             if any(fnmatch.fnmatch(name, pattern) or
                    fnmatch.fnmatch(os.path.basename(name), pattern)
                    for pattern in patterns)]
    if not found:
        sys.exit(f'tools/mutate: no source is named {" or ".join(patterns)}')
    return found


def ranges(numbers: collections.abc.Iterable[int]) -> str:
    result: list[list[int]] = []
    for number in sorted(set(numbers)):
        if result and number == result[-1][1] + 1:
            result[-1][1] = number
        else:
            result.append([number, number])
    return ', '.join(f'{a}-{b}' if a != b else f'{a}' for a, b in result)


def say(message: str) -> None:
    print(message, flush=True)


def try_all(trial: Trial, chosen: list[operators.Mutant],
            runner: suite.Runner, jobs: int) -> list[Result]:
    results: list[Result] = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(trial.judge, mutant) for mutant in chosen]
        try:
            for future in concurrent.futures.as_completed(futures):
                result = future.result()
                results.append(result)
                say(f'[{len(results)}/{len(chosen)}] {result.status:9} '
                    f'{result.seconds:5.1f} s  {result.mutant.id}  '
                    f'{result.by if result.status == "killed" else ""}')
        except KeyboardInterrupt:
            say('interrupted; this is what is known so far')
        finally:
            runner.interrupt()
            pool.shutdown(cancel_futures=True)
    return results


def report(results: list[Result], uncovered: list[operators.Mutant],
           options: argparse.Namespace) -> None:
    counts = collections.Counter(result.status for result in results)
    for result in results:
        if result.status == 'survived':
            say(f'\nSURVIVED {result.mutant.id}\n'
                f'{diff(result.mutant, options.top)}'
                f'tried: {", ".join(result.tried)}')
    lines = collections.defaultdict(set)
    for mutant in uncovered:
        lines[mutant.file].add(mutant.lines[0])
    if lines:
        say('\nExecuted by none of the tests (no mutants there were tried):')
    for file, numbers in sorted(lines.items()):
        say(f'  {file}: {ranges(numbers)}')
    say('\n' + ', '.join(f'{counts[status]} {status}' for status in STATUSES))
    options.report.write_text(json.dumps({
        'counts': counts, 'seed': options.seed,
        'results': [{**dataclasses.asdict(result),
                     'diff': diff(result.mutant, options.top)}
                    for result in results],
        'uncovered': [mutant.id for mutant in uncovered]}, indent=1))
    say(f'report: {options.report}')


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog='tools/mutate', formatter_class=argparse.RawTextHelpFormatter,
        description='Change the code in small ways, one at a time, and see '
        'whether the tests notice.\n\nA change that no test notices has '
        'survived: a test is missing, or the change\nmakes no difference. '
        'All happens in copies of this checkout. The first run\nfinds out '
        'which lines each test executes, and keeps that in .log/mutate/.',
        epilog='Exit status: 0 none survived, 1 some did, 2 anything else, '
        '130 interrupted.')
    parser.add_argument('ids', nargs='*', metavar='ID',
                        help='try these mutants only')
    parser.add_argument('--files', action='append', metavar='PATTERN',
                        default=[], help='of sources, as in "*/files/*.c" or '
                        'merger.py; more than once\n(default: the engine, '
                        f'{", ".join(PROTOCOL)})')
    parser.add_argument('--sample', type=int, metavar='N', default=30,
                        help='how many, taken from all operators by turns '
                        '(default 30; 0: all)')
    parser.add_argument('--seed', type=int, default=1,
                        help='of the sample (default 1)')
    parser.add_argument('--list', action='store_true',
                        help='print all mutants, without running any test')
    parser.add_argument('--jobs', type=int, default=os.cpu_count(),
                        help='how many at once (default: a processor each)')
    parser.add_argument('--timeout', type=float, metavar='S',
                        help='for a file of tests with a mutant (default: 30 '
                        's and five\ntimes what it takes without)')
    parser.add_argument('--budget', type=float, metavar='S', default=60,
                        help='what all tests of one mutant may take (default '
                        '60);\nthose that take more are not tried')
    parser.add_argument('--report', type=pathlib.Path, metavar='FILE',
                        help='written as JSON (default '
                        '.log/mutate/report.json)')
    parser.add_argument('--top', type=pathlib.Path, default=TOP,
                        help='another tree than this checkout')
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    options.top = options.top.resolve()
    cache = options.top / '.log' / 'mutate'
    options.report = options.report or cache / 'report.json'
    runner = suite.Runner()
    # By default the signal would end the process, and leave the copies behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    suite_ = suite.Suite(options.top, cache, runner)
    files = ([one.partition(':')[0] for one in options.ids]
             or wanted_files(suite_, options.files))
    found = [mutant for file in dict.fromkeys(files)
             for mutant in operators.mutants(
                 file, (options.top / file).read_bytes())]
    if options.ids:
        found = [mutant for mutant in found if mutant.id in options.ids]
        if len(found) != len(set(options.ids)):
            missing = set(options.ids) - {mutant.id for mutant in found}
            print(f'tools/mutate: there is no mutant {", ".join(missing)}; '
                  'see --list', file=sys.stderr)
            return 2
    if options.list:
        for mutant in found:
            print(mutant.id)
        return 0
    directory = pathlib.Path(tempfile.mkdtemp(prefix='mutate-')).resolve()
    try:
        with contextlib.suppress(suite.Interrupted):
            programs = suite_.programs(
                any(mutant.file.endswith('.c') for mutant in found),
                {mutant.file for mutant in found
                 if mutant.file.endswith('.py')}, options.jobs, say)
            if any(mutant.file.endswith('.c') for mutant in found):
                suite_.compile_all(options.jobs)
            trial = Trial(suite_, programs, directory, options)
            uncovered = [mutant for mutant in found if not trial.tests(mutant)]
            left_out = set(uncovered)
            covered = [mutant for mutant in found if mutant not in left_out]
            chosen = (covered if options.ids else
                      choose(covered, options.sample, options.seed))
            say(f'{len(found)} mutants, {len(covered)} of executed lines, '
                f'{len(chosen)} are tried')
            results = try_all(trial, chosen, runner, options.jobs)
            report(results, uncovered, options)
            if len(results) < len(chosen):
                return 130
            return int(any(result.status == 'survived' for result in results))
    except KeyboardInterrupt:
        runner.interrupt()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return 130


if __name__ == '__main__':
    sys.exit(main())
