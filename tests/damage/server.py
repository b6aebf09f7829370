# SPDX-License-Identifier: Apache-2.0

"""A process that runs cases, each in a child of its own.

The children of a test's own process would hang in LevelDB, if a test before
them had used that. A case is::

  {"top": ..., "name": "groups/00000001", "damage": "flip",
   "arguments": [17, 1], "operation": "collect", "hit": ["plain"],
   "given_up": []}

``hit`` are the images that may be lost, ``given_up`` those that stay lost when
the damage is undone. The answer has an ``error`` if something is wrong.
"""

import contextlib
import faulthandler
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

from tests.support import repositories

#: Seconds of one case. A job of reading has up to thousands of cases.
TIMEOUT = 60
JOB_TIMEOUT = 3600


class Server:
    """The process, for a test. It serves one thread."""

    def __init__(self, scratch):
        self._process = subprocess.Popen(
            [sys.executable, '-m', 'tests.damage.server', str(scratch)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=pathlib.Path(__file__).resolve().parents[2])

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._process.stdin.close()
        try:
            self._process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        finally:
            self._process.stdout.close()

    def ask(self, job):
        print(json.dumps(job), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f'the server died of {job}'
        return json.loads(answer)


# -- the other side -----------------------------------------------------------

def _build(job):
    from tests.damage import template
    template.build(job['build'], job['codec'])
    return None


def _run(job, scratch):
    """Run a case: damage, operation, read; undo, read; maintain, read."""
    from glance_dedup.base import exceptions
    from glance_dedup.maintenance import reserve
    from tests.damage import damages
    from tests.damage import operations
    from tests.damage import template
    reserve.RESERVE_BYTES = template.PAGE
    top = pathlib.Path(job['top'])
    codec = json.loads((top / 'facts.json').read_text())['codec']
    directory = pathlib.Path(tempfile.mkdtemp(dir=scratch))
    try:
        path = directory / 'repository'
        template.copy(top / 'now', path)
        world = operations.World(path, codec)
        undo = damages.DAMAGES[job['damage']](
            damages.Target(path, job['name'], top / 'older', top / 'other'),
            *job['arguments'])
        said = None
        try:
            operations.OPERATIONS[job['operation']](world)
        except exceptions.RepositoryError as e:
            said = f'{type(e).__name__}: {e}'

        def require_all(what, but=()):
            lost = {i: why for i, why in world.look_at_all().items()
                    if i not in but}
            assert not lost, f'{what}: {lost} (said: {said})'

        stored = set(world.images).difference(template.IMAGES)
        require_all('damaged without being hit', stored.union(job['hit']))
        undone = undo()
        # These were stored in the place of lost data, and go with the undo.
        lost = stored if job['damage'] in damages.WHOLE else set()
        lost = lost.union(job['given_up'])
        if not undone:
            lost.update(job['hit'])
        require_all('lost for ever', lost)
        if job['operation'] not in operations.READING:
            with contextlib.suppress(exceptions.RepositoryError):
                operations.recover(world)
            require_all('lost later', lost)
    finally:
        shutil.rmtree(directory)


def _read_all(job, scratch):
    """Read after each of many damages to one repository, undoing each."""
    from tests.damage import damages
    from tests.damage import operations
    from tests.damage import template
    top = pathlib.Path(job['top'])
    codec = json.loads((top / 'facts.json').read_text())['codec']
    directory = pathlib.Path(tempfile.mkdtemp(dir=scratch))
    hits = 0
    try:
        template.copy(top / 'now', directory / 'repository')
        world = operations.World(directory / 'repository', codec)
        assert not world.look()
        for name, damage, arguments, hit in job['read']:
            _limit_case()
            undo = damages.DAMAGES[damage](damages.Target(
                world.path, name, top / 'older', top / 'other'), *arguments)
            try:
                wrong = set(world.look()).difference(hit)
            except AssertionError as e:
                raise AssertionError(f'{name} {damage}{arguments}: {e}') from e
            assert not wrong, (
                f'{name} {damage}{arguments}: not hit, but not read: {wrong}')
            hits += bool(world.wrong)
            assert undo()
        assert not world.look()
    finally:
        shutil.rmtree(directory)
    return hits


def _limit_case():
    """End this process in a while, with a traceback, if the case hangs."""
    faulthandler.dump_traceback_later(TIMEOUT, exit=True, file=sys.__stderr__)


def _answer(job, scratch):
    def work():
        _limit_case()
        if 'build' in job:
            return _build(job)
        return (_read_all if 'read' in job else _run)(job, scratch)
    try:
        return {'result': repositories.in_child(work, timeout=JOB_TIMEOUT)}
    except repositories.ChildFailed as e:
        return {'error': str(e)}


def _serve(scratch):
    import logging

    from dedupd.tasks import merger
    from dedupd.tasks import scrubber
    from tests.damage import operations
    assert merger and scrubber and operations   # imported once for all
    logging.disable(logging.CRITICAL)
    faulthandler.enable(file=sys.__stderr__)
    with contextlib.suppress(BrokenPipeError):
        for line in sys.stdin:
            print(json.dumps(_answer(json.loads(line), scratch)), flush=True)


if __name__ == '__main__':
    _serve(sys.argv[1])
