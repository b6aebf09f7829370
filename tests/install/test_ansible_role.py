# SPDX-License-Identifier: Apache-2.0
"""The variables and options of the Ansible role, without Ansible."""

import re

import pytest
import yaml

from dedupd import opts
from glance_dedup.driver import store_opts
from tests.support import documents

ANSIBLE = documents.TOP / 'etc' / 'ansible'
ROLE = ANSIBLE / 'roles' / 'glance_dedup'
PAGE = documents.SOURCE / 'install' / 'ansible.rst'
#: A variable of the role's users: those of its own begin with '_'.
_VARIABLE = re.compile(r'\bglance_dedup_\w+')
#: Variables that the tasks use, and that have no default.
_UNSET = {'glance_dedup_default_backend'}
ENTRY_POINTS = ('store', 'cache')


def load(path):
    return yaml.safe_load(path.read_text())


def specs():
    """Return the options of both entry points, by name."""
    found = load(ROLE / 'meta' / 'argument_specs.yml')['argument_specs']
    return {name: spec['options'] for name, spec in found.items()}


def all_options():
    return {name: option for options in specs().values()
            for name, option in options.items()}


def used():
    """Return the variables in tasks, handlers and templates."""
    return {name for part in ('tasks', 'handlers', 'templates')
            for path in (ROLE / part).iterdir()
            for name in _VARIABLE.findall(path.read_text())}


def settings(template):
    """Return each option that a template sets by name, after its group."""
    group = None
    found = []
    for line in (ROLE / 'templates' / template).read_text().splitlines():
        if match := re.fullmatch(r'\[(\w+)\]', line):
            group = match[1]
        elif match := re.match(r'(\w+) = ', line):
            found.append((group, match[1]))
    return found


def test_files_are_yaml():
    files = [*ANSIBLE.rglob('*.yml')]
    assert len(files) > len(ENTRY_POINTS)
    for path in files:
        assert load(path), path


def test_entry_points():
    assert set(specs()) == set(ENTRY_POINTS)
    for name in ENTRY_POINTS:
        assert (ROLE / 'tasks' / f'{name}.yml').exists()


def test_variables_are_specified():
    """All variables in use are described, and no others."""
    assert used() == set(all_options())
    for name, option in all_options().items():
        assert option['description'], name


def test_defaults_are_those_of_the_specification():
    wanted = {name: option['default']
              for name, option in all_options().items()
              if 'default' in option}
    assert load(ROLE / 'defaults' / 'main.yml') == wanted


def test_variables_without_a_default_are_required():
    options = all_options()
    assert _UNSET == {
        name for name, option in options.items()
        if ('default' in option) == option.get('required', False)}


def test_variables_of_both_are_the_same():
    store, cache = (specs()[name] for name in ENTRY_POINTS)
    for name in store.keys() & cache.keys():
        for key in ('type', 'default', 'required'):
            assert store[name].get(key) == cache[name].get(key), name


@pytest.mark.parametrize('template', ['dedupd.conf.j2',
                                      'dedupd-cache.conf.j2'])
def test_dedupd_knows_the_options(template):
    known = {(group, option.dest)
             for group, options in opts.list_opts()
             for option in options}
    found = settings(template)
    assert ('dedupd', 'datadir') in found
    assert set(found) <= known


def test_the_store_knows_the_options():
    known = {option.dest for _, options in store_opts.list_opts()
             for option in options}
    found = re.findall(r"'(dedup_\w+)'",
                       (ROLE / 'tasks' / 'store.yml').read_text())
    assert found
    assert set(found) <= known


def test_units_exist():
    """The units exist that the tasks copy, or that have a drop-in."""
    found = {name for task in ENTRY_POINTS for name in re.findall(
        r'\bdedupd[\w-]*\.(?:service|socket)\b',
        (ROLE / 'tasks' / f'{task}.yml').read_text())}
    assert 'dedupd.service' in found
    for name in found:
        assert (documents.TOP / 'etc' / name).exists(), name


def test_the_guide_lists_the_variables():
    """The guide lists the variables and their defaults."""
    rows = dict(re.findall(r'\* - ``(glance_dedup_\w+)``\n +- (.+)',
                           PAGE.read_text()))
    options = all_options()
    assert set(rows) == set(options)
    for name, option in options.items():
        if default := option.get('default'):
            assert rows[name].replace('`', '').endswith(f'; {default}')


def test_the_guide_has_the_playbook():
    inventory, playbook = (
        yaml.safe_load(block.text) for block in documents.blocks(PAGE)
        if block.language == 'yaml')
    assert set(inventory) == {'all', 'glance', 'compute'}
    assert playbook == load(ANSIBLE / 'site.yml')
