# SPDX-License-Identifier: Apache-2.0
"""kolla's own programs read the files of the containers page.

No image is built, and nothing is deployed: kolla writes its Dockerfile, and
kolla-ansible merges the options and lists the volumes.
"""

import configparser
import json
import os
import subprocess
import sys

import pytest

from tests.support import documents

PAGE = documents.SOURCE / 'install' / 'containers.rst'
#: The page names these versions. kolla imports docker, the filters of
#: kolla-ansible import netaddr, and ansible has the collections.
PACKAGES = ('kolla==23.0.0', 'kolla-ansible==22.2.0', 'ansible', 'docker',
            'netaddr')
INSTALL_SECONDS = 1200
PLAY = """
- hosts: all
  vars:
    project_name: glance
    network_interface: lo
    kolla_internal_vip_address: 192.0.2.10
  tasks:
    - include_vars: "{{ role }}/defaults/main.yml"
    - include_vars: "{{ here }}/globals.yml"
    - merge_configs:
        sources:
          - "{{ role }}/templates/glance-api.conf.j2"
          - "{{ here }}/glance-api.conf"
        dest: "{{ here }}/merged.conf"
        mode: "0600"
    - copy:
        content: "{{ glance_services['glance-api'].volumes | to_json }}"
        dest: "{{ here }}/volumes.json"
        mode: "0600"
"""

pytestmark = pytest.mark.long


def run(*command, cwd, **environment):
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd,
        timeout=INSTALL_SECONDS, env={**os.environ, **environment})
    said = result.stdout + result.stderr
    assert result.returncode == 0, said
    return said


def block(language, start):
    """Return the text of the page's only block with this start."""
    found, = (found.text for found in documents.blocks(PAGE)
              if found.language == language and found.text.startswith(start))
    return found


@pytest.fixture(scope='module')
def kolla(tmp_path_factory):
    """The environment of kolla and kolla-ansible."""
    for package in PACKAGES[:2]:
        assert package.replace('==', ' ') in PAGE.read_text()
    venv = tmp_path_factory.mktemp('kolla') / 'venv'
    run(sys.executable, '-m', 'venv', venv, cwd='/')
    run(venv / 'bin' / 'pip', 'install', '--quiet', *PACKAGES, cwd='/')
    return venv


def test_the_image(kolla, tmp_path):
    wheels = tmp_path / 'dedup'
    wheels.mkdir()
    conf = block('ini', '[glance-api-additions-dedup]')
    assert 'location = /srv/build/dedup' in conf
    (tmp_path / 'kolla-build.conf').write_text(
        conf.replace('/srv/build/dedup', str(wheels)))
    (tmp_path / 'template-overrides.j2').write_text(
        block('jinja', '{% extends'))
    command, = (found.text for found in documents.commands(next(
        found for found in documents.blocks(PAGE)
        if '$ kolla-build' in found.text)))
    run('sh', '-c', f'{command} --template-only --work-dir work',
        cwd=tmp_path, PATH=f'{kolla / "bin"}:{os.environ["PATH"]}')
    made, = tmp_path.glob('work/**/glance-api/Dockerfile')
    lines = made.read_text().replace('\\\n', '').splitlines()
    install, = (line for line in lines if ' qemu-utils ' in line)
    assert {'libleveldb1d', 'liblz4-1', 'libxxhash0', 'libzstd1'} <= set(
        install.split())
    at = lines.index('ADD additions-archive /')
    assert lines[at + 1].startswith('RUN python3 -m pip ')
    assert lines[-1] == 'USER glance'


def test_options_and_volumes(kolla, tmp_path):
    share = kolla / 'share' / 'kolla-ansible'
    ansible = share / 'ansible'
    passwords = tmp_path / 'passwords.yml'
    passwords.write_bytes(
        (share / 'etc_examples' / 'kolla' / 'passwords.yml').read_bytes())
    run(kolla / 'bin' / 'kolla-genpwd', '-p', passwords, cwd=tmp_path)
    (tmp_path / 'group_vars').symlink_to(ansible / 'group_vars')
    (tmp_path / 'glance-api.conf').write_text(block('ini', '[DEFAULT]'))
    (tmp_path / 'globals.yml').write_text(
        block('yaml', 'glance_file_datadir_volume'))
    (tmp_path / 'play.yml').write_text(PLAY)
    variables = {'role': str(ansible / 'roles' / 'glance'),
                 'here': str(tmp_path),
                 'ansible_python_interpreter': str(kolla / 'bin' / 'python')}
    run(kolla / 'bin' / 'ansible-playbook', '--inventory',
        ansible / 'inventory' / 'all-in-one', '--extra-vars',
        f'@{passwords}', '--extra-vars', json.dumps(variables), 'play.yml',
        cwd=tmp_path, ANSIBLE_NOCOLOR='1', ANSIBLE_HOME=str(tmp_path / 'home'),
        ANSIBLE_ACTION_PLUGINS=str(ansible / 'action_plugins'),
        ANSIBLE_FILTER_PLUGINS=str(ansible / 'filter_plugins'),
        ANSIBLE_LIBRARY=str(ansible / 'library'))
    merged = configparser.ConfigParser(interpolation=None)
    merged.read(tmp_path / 'merged.conf')
    assert merged['DEFAULT']['enabled_backends'] == (
        'file:file, http:http, dedup1:dedup')
    assert merged['glance_store']['default_backend'] == 'dedup1'
    assert merged['dedup1']['dedup_store_datadir'] == '/var/lib/glance/dedup'
    assert 'filesystem_store_datadir' in merged['file']
    volumes = json.loads((tmp_path / 'volumes.json').read_text())
    assert {'/srv/glance:/var/lib/glance/', '/dev/shm:/dev/shm',
            '/run/dedupd:/run/dedupd'} <= set(filter(None, volumes))
