# SPDX-License-Identifier: Apache-2.0

"""Programs that know only older formats, against newer repositories.

They are built from the project's history. The last one that knows only format
1 can use what this program makes by default. It refuses repositories of
formats 2.0 and 3.0, whatever it is told to do, and changes nothing there. One
that knows format 2 refuses those of format 3.0.
"""

import json
import os
import pathlib
import stat
import subprocess
import sys

import pytest

from dedupd.tasks import collector
from dedupd.tasks import merger
from dedupd.tasks import recompressor
from glance_dedup.base import task
from glance_dedup.maintenance import maintainer as maintainer_module
from glance_dedup.repository import openvolumes
from glance_dedup.repository import upgrade
from tests.golden import make
from tests.support import coldgroups
from tests.support import daemons
from tests.support import hostile_names
from tests.support import maintenance
from tests.support import repositories

TOP = pathlib.Path(__file__).resolve().parents[2]
#: The last commit before format 2.0; one before 3.0; and one that knows 3.0,
#: but no packed index.
COMMITS = {1: 'b06ac10b3dcb8b8f58857c9c829bc10fdf674699',
           2: 'a672fbe84fc69680d56fb5ad18b39eb89e1f8af8',
           3: '150ee660cc6915e4dd4aba1b612b48b68c8c6a0d'}
SCRIPT = TOP / 'tests' / 'golden' / 'old_program.py'
DATA = repositories.mixture(200_000)

pytestmark = pytest.mark.long     # three old programs are compiled


def need_history(commit):
    found = subprocess.run(
        ['git', 'cat-file', '-e', f'{commit}^{{commit}}'], cwd=TOP,
        capture_output=True, text=True)
    if found.returncode != 0:
        pytest.skip('the old program cannot be built: there is no commit '
                    f'{commit} here, as in an sdist or a shallow clone')


class OldProgram:
    """A built tree of it."""

    def __init__(self, tree):
        self.tree = tree
        self.environment = {**os.environ, 'PYTHONPATH': str(tree),
                            'PBR_VERSION': '0.0.1.dev0'}

    def build(self, commit):
        packed = subprocess.run(
            ['git', 'archive', commit, 'glance_dedup', 'dedupd', 'setup.py',
             'setup.cfg', 'README.rst', 'pyproject.toml', 'requirements.txt'],
            cwd=TOP, capture_output=True, check=True, timeout=60)
        subprocess.run(['tar', '-x'], cwd=self.tree, input=packed.stdout,
                       check=True, timeout=60)
        self.python('setup.py', '-q', 'build_ext', '--inplace', timeout=240)

    def python(self, *arguments, timeout=120, **keywords):
        done = subprocess.run(
            [sys.executable, *arguments], cwd=self.tree, timeout=timeout,
            env=self.environment, text=True, capture_output=True, **keywords)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, path, *commands, **more):
        """What `old_program` found; the program cannot be another one."""
        asked = {'options': ['--repository', str(path), '--socket', '',
                             '--filter-dir', f'{path}-filter'],
                 'commands': commands, **more}
        found = json.loads(self.python(
            str(SCRIPT), input=json.dumps(asked)).splitlines()[-1])
        assert found['package'].startswith(f'{self.tree}/'), found['package']
        return found


def built(major, directory):
    need_history(COMMITS[major])
    old = OldProgram(directory)
    old.build(COMMITS[major])
    return old


@pytest.fixture(scope='module')
def old(tmp_path_factory):
    """It knows format 1."""
    return built(1, tmp_path_factory.mktemp('old'))


@pytest.fixture(scope='module')
def old_with_volumes(tmp_path_factory):
    """It knows formats 1 and 2."""
    return built(2, tmp_path_factory.mktemp('old'))


@pytest.fixture(scope='module')
def old_with_lists(tmp_path_factory):
    """It knows formats 1 to 3, and version 1 of the exact index."""
    return built(3, tmp_path_factory.mktemp('old'))


@pytest.fixture
def path(tmp_path):
    """What this program makes by default."""
    path = repositories.create(tmp_path / 'repository')
    with repositories.open_repository(path) as repo:
        repositories.put(repo, 'image', DATA)
        repositories.put(repo, 'deleted', DATA[::-1])
        repo.delete('deleted')
    return path


@pytest.fixture
def with_volumes(path):
    """The same, upgraded, with a volume in recipes and in its journal."""
    with repositories.open_repository(path) as repo:
        upgrade.upgrade(repo, lambda *arguments: None, volumes=True)
    with repositories.open_repository(path) as repo:
        openvolumes.create(repo, 'disk', 1 << 20)
        with openvolumes.open_volume(repo, 'disk') as volume:
            volume.write(DATA[:70_000], 1000)
            volume.checkpoint()
            volume.write(b'later', 0)
            volume.flush()
    return path


@pytest.fixture
def with_lists(tmp_path):
    """A repository upgraded to 3.0, with segments that have lists."""
    path = repositories.create(tmp_path / 'with-lists', group_slots=128)
    with repositories.open_repository(path, codec='lz4') as repo:
        repositories.put(repo, 'image', b''.join(
            make.text(4000, i)[:65536] + repositories.noise(65536, i)
            for i in range(10)))
        upgrade.upgrade(repo, lambda *arguments: None, similar=True)
    # A handle goes by the version that it was opened with.
    with repositories.open_repository(path) as repo:
        with maintenance.maintaining(repo) as maintainer:
            recompressor.run_once(maintainer, task.Pace(), 'zstd', 1,
                                  similar=True)
    make.need_lists(path)
    repositories.need_clean(path)
    return path


@pytest.fixture
def with_cold(with_lists):
    """The same, upgraded to 4.0; full groups are cold."""
    path = with_lists
    with repositories.open_repository(path) as repo:
        upgrade.upgrade(repo, lambda *arguments: None, cold=True)
    coldgroups.attach(path)
    with repositories.open_repository(path) as repo:
        assert coldgroups.cool_all(repo)
    make.need_cold(path)
    repositories.need_clean(path)
    return path


def everything(path):
    """Names, kinds, modes, sizes and contents, but not times."""
    found = {}
    for file in [path, *path.rglob('*')]:
        status = file.lstat()
        found[str(file.relative_to(path))] = (
            status.st_mode, status.st_ino, status.st_nlink,
            file.read_bytes() if stat.S_ISREG(status.st_mode) else None)
    assert len(found) > 12
    return found


def test_it_uses_what_this_program_makes(old, path):
    found = old.run(path, 'image put other ' + str(SCRIPT), 'image list',
                    'collect', 'repository check', 'repository upgrade',
                    datadir=str(path))
    assert [c['status'] for c in found['commands']] == [0] * 5, found
    assert found['driver'] is None
    with repositories.open_repository(path) as repo:
        assert repositories.read_all(repo, 'other') == SCRIPT.read_bytes()
        assert repositories.read_all(repo, 'image') == DATA
    repositories.need_clean(path)


def test_it_goes_on_from_a_placeholder(old, path):
    """What is left of the last group is a group like any other to it."""
    with repositories.open_repository(path) as repo:
        merge(repo)
        repo.delete('image')
        with maintainer_module.Maintainer(repo) as maintainer:
            collector.run_once(maintainer, task.Pace())
    groups = path / 'groups'
    left, = groups.iterdir()
    assert left.stat().st_blocks * 512 <= 4096
    found = old.run(path, 'repository check', 'scrub --full', 'merge',
                    'image put other ' + str(SCRIPT), 'merge', 'collect',
                    'recompress', 'repository rebuild-catalog',
                    'repository check', datadir=str(path))
    assert [c['status'] for c in found['commands']] == [0] * 9, found
    for number in (0, -1):
        assert 'damage:' not in found['commands'][number]['words'], found
    assert max(file.name for file in groups.iterdir()) > left.name
    with repositories.open_repository(path) as repo:
        assert repositories.read_all(repo, 'other') == SCRIPT.read_bytes()
        with maintainer_module.Maintainer(repo) as maintainer:
            collector.run_once(maintainer, task.Pace())
    assert not left.exists()
    repositories.need_clean(path)


#: What commands were called that have another name now.
FORMER = {'filter rebuild': 'repository rebuild-filter'}


def need_refused(program, path, knows, major):
    """By all that it can be told to do."""
    before = everything(path)
    commands = [FORMER.get(command, command)
                for command in repositories.COMMANDS]
    found = program.run(path, *commands, datadir=str(path))
    assert everything(path) == before
    assert len(found['commands']) == len(commands)
    for command, result in zip(commands, found['commands']):
        assert result['status'] == 2, (command, result)
        lines = result['words'].splitlines()
        assert len(lines) == 1, (command, result)
        assert 'repository.json has format' in lines[0], (command, result)
        assert (f'version {major};' in lines[0]
                or f'format {major}.0;' in lines[0]), lines
    assert (f'has format version {major}; this program knows up to {knows}'
            in found['driver'])
    repositories.need_clean(path)


def test_it_refuses_format_2(old, with_volumes):
    need_refused(old, with_volumes, 1, 2)


def test_it_refuses_format_3(old, with_lists):
    need_refused(old, with_lists, 1, 3)


def test_one_with_volumes_refuses_format_3(old_with_volumes, with_lists):
    need_refused(old_with_volumes, with_lists, 2, 3)


def test_it_refuses_format_4(old, with_cold):
    need_refused(old, with_cold, 1, 4)


def test_one_with_lists_refuses_format_4(old_with_lists, with_cold):
    need_refused(old_with_lists, with_cold, 3, 4)


def test_cold_groups_are_refused_by_name(old_with_lists, with_cold):
    """Even if somebody made the repository an older one again."""
    repositories.edit_parameters(with_cold, major=3, minor=0)
    cold = [file for file in sorted(with_cold.glob('groups/*'))
            if file.read_bytes()[8] == 3]
    before = [file.read_bytes() for file in cold]
    found = old_with_lists.run(
        with_cold, 'image get image -', 'image put more ' + str(SCRIPT),
        'collect', 'scrub --full', 'recompress', 'merge', 'repository check',
        'image get image -')
    assert [file.read_bytes() for file in cold] == before
    for number in (0, -1):
        result = found['commands'][number]
        assert result['status'] != 0, result
        assert (f'groups/{cold[0].name} has format version 3; this program '
                'knows up to 2') in result['words'], result
    assert 'has format 3.0; this program reads 1.x and 2.x' in (
        found['commands'][-2]['words'])
    repositories.edit_parameters(with_cold, major=4, minor=0)
    with repositories.open_repository(with_cold) as repo:
        assert len(repositories.read_all(repo, 'image')) == 20 * 65536


@pytest.mark.parametrize('major', [1, 2])
def test_groups_with_lists_are_refused_by_name(old_with_volumes, with_lists,
                                               major):
    """Even if somebody made the repository an older one again."""
    repositories.edit_parameters(with_lists, major=major, minor=2 - major)
    if major == 1:
        (with_lists / 'volumes').rmdir()
    file = with_lists / 'groups' / '00000001'
    before = file.read_bytes()
    found = old_with_volumes.run(
        with_lists, 'image get image -', 'image put more ' + str(
            SCRIPT), 'collect', 'scrub --full', 'recompress', 'merge',
        'repository check', 'image get image -')
    assert file.read_bytes() == before
    for number in (0, -1):
        result = found['commands'][number]
        assert result['status'] != 0, result
        assert ('groups/00000001 has format version 2; this program knows up '
                'to 1') in result['words'], result
    assert 'has format 2.0; this program reads 1.x' in (
        found['commands'][-2]['words'])
    repositories.edit_parameters(with_lists, major=3, minor=0)
    (with_lists / 'volumes').mkdir(exist_ok=True, mode=0o700)
    with repositories.open_repository(with_lists) as repo:
        assert len(repositories.read_all(repo, 'image')) == 20 * 65536


@pytest.mark.parametrize('mode', ['store', 'cache'])
def test_its_daemon_refuses_format_2(old, with_volumes, mode):
    before = everything(with_volumes)
    with daemons.Daemon(with_volumes, mode=mode) as daemon:
        done = subprocess.run(
            [sys.executable, '-m', 'dedupd.main', '--config-file',
             str(daemon.config)], cwd=old.tree, env=old.environment,
            text=True, capture_output=True, timeout=60)
    assert done.returncode != 0
    assert 'repository.json has format version 2' in done.stdout + done.stderr
    assert everything(with_volumes) == before


def test_it_merges_by_turns_with_this_program(old, path):
    """Each keeps an exact index of its own, and misreads nothing.

    So the index in files needed no other version of the format.
    """
    with repositories.open_repository(path) as repo:
        merge(repo)
    before = {file: file.read_bytes() for file in path.glob('index/*')}
    assert before
    found = old.run(path, 'image put other ' + str(SCRIPT), 'merge',
                    'collect', 'merge', 'repository check', 'orphans --help',
                    datadir=str(path))
    assert [c['status'] for c in found['commands']] == [0] * 6, found
    assert 'damage:' not in found['commands'][4]['words']
    assert {file: file.read_bytes()
            for file in path.glob('index/*')} == before
    with repositories.open_repository(path) as repo:
        with maintainer_module.Maintainer(repo) as maintainer:
            assert maintainer.warnings == []
            assert maintainer.catalog.has_index_pages()
        merge(repo)
        with maintainer_module.Maintainer(repo) as maintainer:
            assert not maintainer.catalog.has_index_pages()
        assert repositories.read_all(repo, 'image') == DATA
    repositories.need_clean(path)
    # And back: it begins again, with the blocks that it lacks.
    found = old.run(path, 'merge', 'repository check', datadir=str(path))
    assert [c['status'] for c in found['commands']] == [0] * 2, found
    repositories.need_clean(path)


def test_a_packed_index_is_refused_by_name(old_with_lists, path):
    """By merging alone: all else goes on."""
    with repositories.open_repository(path) as repo:
        merge(repo)
    shard, = path.glob('index/shard-*')
    before = shard.read_bytes()
    assert before[8] == 2
    found = old_with_lists.run(
        path, 'image put other ' + str(SCRIPT), 'merge', 'collect',
        'repository check', datadir=str(path))
    assert [bool(c['status']) for c in found['commands']] == [
        False, True, False, False], found
    assert (f'index/{shard.name} has version 2; this program knows 1'
            in found['commands'][1]['words']), found
    assert 'damage:' not in found['commands'][3]['words'], found
    assert shard.read_bytes() == before     # there may be more runs
    with repositories.open_repository(path) as repo:
        merge(repo)
        assert repositories.read_all(repo, 'other') == SCRIPT.read_bytes()
    repositories.need_clean(path)
    # And back, as the release note says.
    for file in path.glob('index/*'):
        file.unlink()
    found = old_with_lists.run(path, 'merge', 'repository check',
                               datadir=str(path))
    assert [c['status'] for c in found['commands']] == [0] * 2, found
    # This program reads what the old one made, and packs it.
    shard, = path.glob('index/shard-*')
    assert shard.read_bytes()[8] == 1
    repositories.need_clean(path)
    with repositories.open_repository(path) as repo:
        repositories.put(repo, 'more', DATA[1000:])
        merge(repo)
    shard, = path.glob('index/shard-*')
    assert shard.read_bytes()[8] == 2
    repositories.need_clean(path)


def test_it_leaves_what_helpers_made(old, path):
    """Their notes, their numbers, and the index in files."""
    with repositories.open_repository(path) as repo:
        merge(repo)
        hostile_names.help_maintaining(repo)

    def made():
        return {str(file.relative_to(path)): file.read_bytes()
                for name in ('helpers/*', 'locks/*', 'index/*')
                for file in path.glob(name)}
    before = made()
    assert {'helpers/0.json', 'locks/hosts', 'locks/index'} <= set(before)
    found = old.run(path, 'image put other ' + str(SCRIPT), 'collect',
                    'merge', 'recompress', 'scrub --full',
                    'repository rebuild-catalog', 'repository check',
                    datadir=str(path))
    assert [c['status'] for c in found['commands']] == [0] * 7, found
    words = found['commands'][-1]['words']
    assert 'damage:' not in words and 'helpers' in words, words
    assert found['driver'] is None
    assert made() == before
    with repositories.open_repository(path) as repo:
        merge(repo)
        hostile_names.help_maintaining(repo)
        assert repositories.read_all(repo, 'image') == DATA
    repositories.need_clean(path)


def merge(repo):
    with maintainer_module.Maintainer(repo) as maintainer:
        merger.run_once(maintainer, task.Pace())
