# SPDX-License-Identifier: Apache-2.0

"""Measure small operations in repositories with many images.

Run it from a checkout in which the extension is built and the program
installed; gcc and the engine's libraries are needed::

    python benchmarks/manyimages.py [--images 100,10000] [--rounds 5]
        [--dir DIR]

For each number of images it makes a repository with so many, of one block each
(``synthetic.py``), and has its catalog counted. Then it starts a process for
each command: those on a single image, and those on the whole repository. It
shows the medians of the rounds, in seconds: of processor time, and, in
brackets, of wall time. If a command on a single image takes longer with more
images, something in it depends on their number.

``delete, collect`` is an image's deletion and the collection after it, each in
a process of its own; ``delete --collect`` does the same in one process. The
last lines show what starting costs: the interpreter alone, the help, and how
many modules each command imports.

No daemon runs. With ``--dir`` on a disk, syncs are part of the wall time.
"""

from collections.abc import Iterator
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time

import common
import synthetic

LIMIT = 600  #: seconds for any command

#: By name: the commands on one image. {n} is the round, {dir} a directory.
SINGLE = {
    'image show': ['image show synthetic-7'],
    'image get': ['image get --force synthetic-7 {dir}/got'],
    'image put': ['image put put-{n} {dir}/block-{n}'],
    'image copy': ['image copy synthetic-7 copy-{n}'],
    'image verify': ['image verify synthetic-7'],
    'image delete': ['image delete synthetic-{n}{n}'],
    'delete, collect': ['image delete put-{n}', 'task collect'],
    'delete --collect': ['image delete --collect copy-{n}'],
}
WHOLE = {
    'image list': ['image list -f json'],
    'status': ['status'],
    'repository space': ['repository space'],
    'task collect': ['task collect'],
    'repository check': ['repository check'],
}
START = {
    '--help': ['--help'],
    'image show --help': ['image show --help'],
    'task collect --help': ['task collect --help'],
}


def command(line: str, *options: str) -> list[str]:
    """Return the words that run a line of glance-dedup."""
    return [sys.executable, *options, '-m', 'glance_dedup.cli.entry',
            *line.split()]


def spent(arguments: list[str], directory: str) -> tuple[float, float]:
    """Run a process; returns its seconds of processor and of wall time."""
    environment = {
        **os.environ, 'GLANCE_DEDUP_REPOSITORY': f'{directory}/repository',
        'GLANCE_DEDUP_FILTER_DIR': directory, 'GLANCE_DEDUP_SOCKET': ''}
    start = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            arguments, env=environment, cwd=common.TOP, stdout=said,
            stderr=said, stdin=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise SystemExit(f'{" ".join(arguments)}: '
                             f'{said.read().decode(errors="replace")}')
    return (usage.ru_utime + usage.ru_stime, time.perf_counter() - start)


def modules(line: str, directory: str) -> int:
    """Return the number of modules that a process imports for a line."""
    program = ('import atexit, sys; atexit.register(lambda: print('
               'len(sys.modules), file=sys.stderr)); '
               'from glance_dedup.cli import entry; '
               'sys.exit(entry.main(sys.argv[1:]))')
    found = subprocess.run(
        [sys.executable, '-c', program, '--repository',
         f'{directory}/repository', '--filter-dir', directory, '--socket', '',
         *line.split()], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, check=True, cwd=common.TOP, timeout=LIMIT)
    return int(found.stderr.split()[-1])


@contextlib.contextmanager
def repository(images: int, place: str, program: str) -> Iterator[str]:
    """A directory with a repository of so many images, all counted."""
    with tempfile.TemporaryDirectory(dir=place) as directory:
        synthetic.make(f'{directory}/repository', images, images=images,
                       data=True, program=program)
        # The second finds no work: the others start from that state.
        for _ in range(2):
            spent(command('task collect'), directory)
        yield directory


def measured(images: int, rounds: int, place: str, program: str
             ) -> dict[str, list[tuple[float, float]]]:
    """Processor and wall time of each round, by the name of the commands."""
    found: dict[str, list[tuple[float, float]]] = {}
    with repository(images, place, program) as directory:
        for n in range(1, rounds + 1):
            with open(f'{directory}/block-{n}', 'wb') as f:
                f.write(os.urandom(4096))
            for name, lines in {**SINGLE, **WHOLE}.items():
                each = [spent(command(line.format(n=n, dir=directory)),
                              directory) for line in lines]
                found.setdefault(name, []).append(
                    (sum(cpu for cpu, _ in each), sum(w for _, w in each)))
    return found


def starts(rounds: int, place: str, program: str) -> None:
    """Print the cost of starting."""
    with repository(100, place, program) as directory:
        lines = {name: lines[0] for name, lines in {
            **START, **SINGLE, **WHOLE}.items() if '{' not in lines[0]}
        plain = [spent([sys.executable, '-c', 'pass'], directory)
                 for _ in range(rounds)]
        print(f'\n{"python -c pass":20}{median(plain)}')
        for name, line in lines.items():
            each = [spent(command(line), directory) for _ in range(rounds)]
            print(f'{name:20}{median(each)}'
                  f'{modules(line, directory):6} modules', flush=True)


def median(each: list[tuple[float, float]]) -> str:
    """Medians as a cell: of processor and, in brackets, of wall time."""
    cpu, wall = (statistics.median(part) for part in zip(*each))
    return f'{cpu:9.2f} ({wall:.2f})'


def main() -> None:
    parser = common.arguments(__doc__, rounds=5,
                              images=('100,10000', 'how many'))
    args = parser.parse_args()
    if not 1 <= args.rounds <= 8:
        parser.error('--rounds is from 1 to 8')
    numbers = [int(n) for n in args.images.split(',')]
    if min(numbers) < 100:
        parser.error('--images: at least 100')
    with tempfile.TemporaryDirectory() as directory:
        program = synthetic.build(directory)
        for images in numbers:
            print(f'{images:,} images', flush=True)
            found = measured(images, args.rounds, args.dir, program)
            for name, each in found.items():
                print(f'{name:20}{median(each)}', flush=True)
        starts(args.rounds, args.dir, program)


if __name__ == '__main__':
    main()
