# SPDX-License-Identifier: Apache-2.0
"""Contributors and continuous integration begin with these files.

The hooks of ``.pre-commit-config.yaml`` check the files that the tests of the
style check, with commands that exist, and the jobs of ``.zuul.yaml`` run
existing environments of ``tox.ini`` and the plugin of DevStack.
"""

import configparser
import functools
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml

from tests.devstack import test_plugin
from tests import test_style

TOP = pathlib.Path(__file__).resolve().parent.parent
#: pre-commit uses this path: an environment that is active comes first.
PATH = f'{pathlib.Path(sys.executable).parent}:{os.environ["PATH"]}'


def load(name):
    return yaml.safe_load((TOP / name).read_text())


@functools.cache
def tracked():
    """Return all files that git tracks, which pre-commit gets."""
    listed = subprocess.run(['git', 'ls-files'], cwd=TOP, capture_output=True,
                            text=True, timeout=60)
    if listed.returncode:
        pytest.skip('not a git checkout')
    return listed.stdout.splitlines()


# -- .pre-commit-config.yaml --------------------------------------------------

def hooks():
    return {hook['id']: hook
            for repository in load('.pre-commit-config.yaml')['repos']
            for hook in repository['hooks']}


def selected(hook):
    return [name for name in tracked() if re.search(hook['files'], name)]


def relative(paths):
    return sorted(str(path.relative_to(TOP)) for path in paths)


def shell_scripts():
    """Return the scripts that tests/test_style.py checks."""
    mark, = (mark for mark in test_style.test_shell_style.pytestmark
             if mark.name == 'parametrize')
    return relative(mark.args[1])


def run(hook, *files):
    return subprocess.run(
        [*shlex.split(hook['entry']), *files], cwd=TOP, capture_output=True,
        text=True, timeout=120, env={**os.environ, 'PATH': PATH})


@pytest.mark.needs('shellcheck')
def test_hooks_need_nothing_but_what_the_tests_install():
    """No hook is fetched from a repository of its own."""
    found = load('.pre-commit-config.yaml')
    assert [repository['repo'] for repository in found['repos']] == ['local']
    for hook in hooks().values():
        assert hook['language'] == 'system' and hook['name']
        assert not hook.keys() - {'id', 'name', 'entry', 'language', 'files'}
        command = shlex.split(hook['entry'])[0]
        assert shutil.which(command, path=PATH), f'there is no {command}'


def test_hooks_check_what_the_tests_check():
    found = hooks()
    assert set(found) == {'flake8', 'mypy', 'shellcheck', 'bashate'}
    assert selected(found['flake8']) == [
        name for name in tracked() if name.endswith('.py')]
    files = tomllib.loads(
        (TOP / 'pyproject.toml').read_text())['tool']['mypy']['files']
    checked = tuple(f'{name}/' for name in files)
    assert selected(found['mypy']) == [
        name for name in tracked() if name in files
        or name.startswith(checked) and name.endswith(('.py', '.pyi'))]
    plugin = relative(test_plugin.SCRIPTS)
    assert selected(found['bashate']) == plugin
    assert selected(found['shellcheck']) == sorted(shell_scripts() + plugin)


@pytest.mark.parametrize(('name', 'wrong'), [
    ('flake8', 'import os\n'), ('mypy', 'number: int = None\n'),
    pytest.param('shellcheck', '#!/bin/bash\necho $1\n',
                 marks=pytest.mark.needs('shellcheck')),
    ('bashate', 'if true\nthen\n  true\nfi\n')])
def test_a_hook_finds_what_is_wrong(name, wrong, tmp_path):
    hook = hooks()[name]
    first = selected(hook)[0]
    good = run(hook, first)
    assert good.returncode == 0, good.stdout + good.stderr
    bad = tmp_path / pathlib.Path(first).name
    bad.write_text(wrong)
    assert run(hook, bad).returncode == 1


# -- .zuul.yaml ---------------------------------------------------------------

#: Templates of openstack-zuul-jobs, and the tox environments of each.
TEMPLATES = {
    'openstack-python3-jobs': {'pep8', 'py3'},
    'openstack-cover-jobs': {'cover'},
    'publish-openstack-docs-pti': {'docs'},
    'release-notes-jobs-python3': {'releasenotes'}}
#: Others' jobs that are parents of ours.
PARENTS = {'openstack-tox', 'devstack-tempest'}


def zuul(kind):
    return [part[kind] for part in load('.zuul.yaml') if kind in part]


def jobs():
    return {job['name']: job for job in zuul('job')}


def environments():
    """Return tox.ini's environments, with py3 for [testenv] itself."""
    tox = configparser.RawConfigParser()
    tox.read(TOP / 'tox.ini')
    return {'py3'} | {section.partition(':')[2] for section in tox.sections()
                      if section.startswith('testenv:')}


def test_the_project_runs_jobs_that_there_are():
    project, = zuul('project')
    for pipeline in ('check', 'gate'):
        assert set(project[pipeline]['jobs']) == set(jobs())
    for job in jobs().values():
        assert job['parent'] in PARENTS
    assert set(project['templates']) <= set(TEMPLATES)


def test_jobs_run_environments_of_tox():
    project, = zuul('project')
    wanted = {name for template in project['templates']
              for name in TEMPLATES[template]}
    wanted |= {job['vars']['tox_envlist'] for job in jobs().values()
               if job['parent'] == 'openstack-tox'}
    assert {'pep8', 'py3', 'functional', 'docs'} <= wanted <= environments()


def test_the_job_with_devstack_uses_the_plugin():
    job, = (job for job in jobs().values()
            if job['parent'] == 'devstack-tempest')
    settings = (TOP / 'devstack' / 'settings').read_text()
    name, = job['vars']['devstack_plugins']
    assert f'define_plugin {name}\n' in settings
    script = settings + (TOP / 'devstack' / 'plugin.sh').read_text()
    for service in job['vars']['devstack_services']:
        assert re.search(rf'is_service_enabled {service}\b', script)
    for option in job['vars'].get('devstack_localrc', {}):
        assert f'{option}=${{{option}:-' in settings
    # The expression matches tests of tempest, and of our own plugin.
    expression = re.compile(job['vars']['tempest_test_regex'])
    scenario = (TOP / 'tests' / 'tempest' / 'glance_dedup_tempest_plugin'
                / 'tests' / 'scenario')
    assert list(scenario.glob('test_*.py'))
    assert expression.search(
        'glance_dedup_tempest_plugin.tests.scenario.test_boot.TestBoot')
    assert expression.search('tempest.api.image.v2.test_images.ImportImages')
    assert not expression.search('tempest.api.volume.test_volumes_get')


def test_a_change_that_no_job_needs_is_one_of_documents():
    """Each job's patterns match files that only documents need.

    A pattern without a file would skip a job silently.
    """
    for job in jobs().values():
        for pattern in job['irrelevant-files']:
            found = [name for name in tracked() if re.search(pattern, name)]
            assert found, f'{job["name"]}: {pattern} is no file'
            # Jobs that build the documents test their tools.
            assert not any(
                name.endswith(('.py', '.c', '.h', '.sh')) for name in found
                if not name.startswith(('doc/', 'releasenotes/')))
