# SPDX-License-Identifier: Apache-2.0

"""``upgrade check`` works on real repositories and with real daemons."""

import json
import re

import pytest

from glance_dedup.base import files
from glance_dedup.base import package_version
from glance_dedup.cli import host_settings
from glance_dedup.cli import upgradecheck
from glance_dedup.maintenance import host_notes
from glance_dedup.maintenance import live_hosts
from tests.support import daemons
from tests.support import repositories

SUCCESS, WARNING, FAILURE = range(3)
GLANCE = """
[DEFAULT]
enabled_backends = fast:dedup, plain:file
[plain]
filesystem_store_datadir = /nowhere
[fast]
dedup_store_datadir = {path}
dedup_store_index = {index}
"""


@pytest.fixture(autouse=True)
def no_files_of_this_machine(monkeypatch, tmp_path):
    for module, name in (host_settings, 'CONFIG_FILE'), (upgradecheck,
                                                         'GLANCE_FILE'):
        monkeypatch.setattr(module, name, str(tmp_path / name))


def check(cli, *arguments):
    """Return the exit status, and each check's result code and sentences."""
    result = cli('upgrade', 'check', '--json', *arguments)
    assert result.err == ''
    found = {item['check']: (item['result'], item['details'])
             for item in json.loads(result.out)['checks']}
    assert result.status == max(code for code, _ in found.values())
    return result.status, found


def test_a_new_repository_is_fine(created):
    status, found = check(created)
    assert status == SUCCESS
    assert len(found) == 9
    assert 'uses: none' in found['Format of the repository'][1]


def test_the_table_is_that_of_openstack(created):
    result = created('upgrade', 'check')
    assert result.status == SUCCESS
    assert '| Upgrade Check Results ' in result.out
    assert result.out.count('| Result: Success ') == 9


def test_the_status_is_still_there(created):
    assert set(created('status', '-f', 'json').json()) >= {'space', 'filter'}


def test_the_features_are_named(created):
    code, sentences = check(created)[1]['Format of the repository']
    assert code == SUCCESS and 'uses: none' in sentences
    assert created('volume', 'create', 'disk', '1M').status == 0
    code, sentences = check(created)[1]['Format of the repository']
    assert code == SUCCESS and 'uses: volumes' in sentences
    (created.path / 'features' / 'later').touch()
    status, found = check(created)
    assert status == FAILURE
    code, sentences = found['Format of the repository']
    assert code == FAILURE and "the feature 'later'" in sentences


def test_a_change_of_the_key_that_is_not_finished_is_a_warning(created):
    assert created('repository', 'rekey').status == 0
    code, sentences = check(created)[1]['Format of the repository']
    assert code == WARNING and 'repository rekey --finish' in sentences
    assert created('repository', 'rekey', '--finish').status == 0
    assert check(created)[0] == SUCCESS


def test_a_newer_major_version_is_a_failure(created):
    path = created.path / 'repository.json'
    fields = json.loads(path.read_text())
    fields['format'] = 9
    path.write_text(json.dumps(fields))
    status, found = check(created)
    assert status == FAILURE
    code, sentences = found['Format of the repository']
    assert code == FAILURE
    assert 'has format version 9' in sentences
    assert 'Do not start services with this version' in sentences


def test_a_repository_that_is_not_there_is_a_failure(cli):
    status, found = check(cli)
    assert status == FAILURE
    assert found['Format of the repository'][0] == FAILURE
    assert str(cli.path) in found['Format of the repository'][1]


def test_a_catalog_that_is_set_aside_is_a_warning(created):
    assert created('task', 'collect').status == 0
    assert check(created)[1]['Catalog'] == (
        SUCCESS, 'This version goes on with it.')
    for path in (created.path / 'catalog').glob('MANIFEST-*'):
        path.write_bytes(b'x' * path.stat().st_size)
    code, sentences = check(created)[1]['Catalog']
    assert code == WARNING
    assert 'counts all images again' in sentences


def test_a_package_that_is_too_old_is_a_failure(created, tmp_path,
                                                monkeypatch):
    place = tmp_path / 'glance_dedup-9.9.dist-info'
    place.mkdir()
    (place / 'METADATA').write_text(
        'Metadata-Version: 2.1\nName: glance-dedup\nVersion: 9.9\n'
        'Requires-Dist: h11>=99\nRequires-Dist: cliff>=1\n'
        'Requires-Dist: no-such-package-here>=2\n'
        'Requires-Dist: none-of-ours>=2; extra == "test"\n')
    package_version.version()           # that of this process, before
    monkeypatch.syspath_prepend(tmp_path)
    code, sentences = check(created)[1]['Required packages']
    assert code == FAILURE
    assert re.search(r'h11 [0-9.]+ is installed: install h11>=99\.',
                     sentences)
    assert 'no-such-package-here is not installed' in sentences
    assert 'cliff' not in sentences
    assert 'none-of-ours' not in sentences


def test_a_package_that_does_not_tell_its_version_is_fine(
        created, tmp_path, monkeypatch):
    for name, told in ('glance_dedup', '9.9'), ('xxhash', '0.0.0'):
        place = tmp_path / f'{name}-{told}.dist-info'
        place.mkdir()
        (place / 'METADATA').write_text(
            f'Metadata-Version: 2.1\nName: {name}\nVersion: {told}\n'
            'Requires-Dist: xxhash>=3\n')
    package_version.version()           # that of this process, before
    monkeypatch.syspath_prepend(tmp_path)
    assert check(created)[1]['Required packages'][0] == SUCCESS


# -- options ------------------------------------------------------------------

def test_an_option_that_dedupd_refuses_is_a_failure(created, tmp_path):
    file = tmp_path / 'dedupd.conf'
    file.write_text('[dedupd]\nread_threads = many\n')
    code, sentences = check(created, '--config-file', file)[1][
        'Options of dedupd']
    assert code == FAILURE
    assert 'read_threads' in sentences


def test_options_of_another_repository(created, tmp_path, monkeypatch):
    """A named file of another repository is refused; the host's is ignored."""
    file = tmp_path / 'dedupd.conf'
    file.write_text(f'[dedupd]\ndatadir = {tmp_path}/b\nread_thread = 3\n')
    created.options = []
    monkeypatch.setenv('GLANCE_DEDUP_REPOSITORY', str(created.path))
    created('--config-file', file, 'upgrade', 'check').refused(
        f'{file} is for the repository {tmp_path}/b', str(created.path),
        'GLANCE_DEDUP_REPOSITORY')
    monkeypatch.setattr(host_settings, 'CONFIG_FILE', str(file))
    assert check(created)[1]['Options of dedupd'] == (
        SUCCESS, f'{file} does not exist, or is for another repository.')
    file.write_text(f'[dedupd]\ndatadir = {created.path}\nread_thread = 3\n')
    assert check(created)[1]['Options of dedupd'][0] == WARNING
    file.write_text('[dedupd\n')
    assert check(created)[1]['Options of dedupd'][0] == FAILURE


def test_a_path_with_a_nul_is_a_failure(created, tmp_path):
    glance, dedupd = tmp_path / 'glance-api.conf', tmp_path / 'dedupd.conf'
    glance.write_text(GLANCE.format(path='/a\0b', index='filter'))
    dedupd.write_text('[dedupd]\ndatadir = /a\0b\n')
    found = check(created, '--glance-config-file', glance, '--config-file',
                  dedupd)[1]
    for name in 'Options of Glance', 'Options of dedupd':
        assert found[name][0] == FAILURE
        assert 'datadir' in found[name][1] and 'x00' in found[name][1]
    assert found['Agreement of the options'][0] == WARNING


def test_files_that_cannot_be_looked_at(created, tmp_path, monkeypatch):
    """A check fails if it cannot find out whether its file exists."""
    # The system refuses a name that is too long, also for root.
    for module, name in (host_settings, 'CONFIG_FILE'), (upgradecheck,
                                                         'GLANCE_FILE'):
        monkeypatch.setattr(module, name, f'{tmp_path}/{"x" * 300}')
    found = check(created)[1]
    assert found['Options of dedupd'][0] == FAILURE
    assert found['Options of Glance'][0] == FAILURE


def test_an_option_that_dedupd_ignores_is_a_warning(created, tmp_path):
    file = tmp_path / 'dedupd.conf'
    file.write_text(f'[dedupd]\ndatadir = {created.path}\nread_thread = 3\n')
    code, sentences = check(created, '--config-file', file)[1][
        'Options of dedupd']
    assert code == WARNING
    assert 'did you mean read_threads?' in sentences


@pytest.mark.parametrize('line, code, words', [
    ('[fast]\ndedup_store_codecs = lz4', WARNING, 'dedup_store_codec.'),
    ('[fats]\ndedup_store_codec = lz4', WARNING, 'has no store fats'),
    ('[plain]\ndedup_store_codec = lz4', WARNING, 'has no store plain'),
    ('[fast]\ndedup_store_codec = lz5', FAILURE, 'lz5'),
    ('[backend_defaults]\ndedup_store_threads = x', FAILURE, 'threads'),
    ('[backend_defaults]\ndedup_store_codec = zstd', SUCCESS, 'fast'),
    ('[fast]\nother_option = x', SUCCESS, 'fast')])
def test_options_of_glance(created, tmp_path, line, code, words):
    file = tmp_path / 'glance-api.conf'
    file.write_text(GLANCE.format(path=created.path, index='filter')
                    + line + '\n')
    found = check(created, '--glance-config-file', file)[1][
        'Options of Glance']
    assert found[0] == code, found
    assert words in found[1]


def test_a_relative_directory_is_a_failure(created, tmp_path):
    file = tmp_path / 'glance-api.conf'
    file.write_text(GLANCE.format(path='repository', index='filter'))
    found = check(created, '--glance-config-file', file)[1][
        'Options of Glance']
    assert found[0] == FAILURE
    assert "must be an absolute path, not 'repository'" in found[1]


def test_options_in_the_directory_of_the_file_count(created, tmp_path,
                                                    monkeypatch):
    home = tmp_path / '.glance' / 'glance-api.conf.d'
    home.mkdir(parents=True)
    (home / 'one.conf').write_text('[fast]\ndedup_store_codecs = lz4\n')
    monkeypatch.setenv('HOME', str(tmp_path))
    file = tmp_path / 'glance-api.conf'
    file.write_text(GLANCE.format(path=created.path, index='filter'))
    code, sentences = check(created, '--glance-config-file', file)[1][
        'Options of Glance']
    assert code == WARNING
    assert 'one.conf: there is no option dedup_store_codecs' in sentences


@pytest.mark.parametrize('index, code', [('filter', SUCCESS),
                                         ('lmdb', WARNING)])
def test_glance_and_dedupd_have_one_index(created, tmp_path, index, code):
    glance = tmp_path / 'glance-api.conf'
    glance.write_text(GLANCE.format(path=created.path, index=index))
    dedupd = tmp_path / 'dedupd.conf'
    dedupd.write_text(f'[dedupd]\ndatadir = {created.path}\n')
    found = check(created, '--glance-config-file', glance, '--config-file',
                  dedupd)[1]['Agreement of the options']
    assert found[0] == code, found
    assert (code == SUCCESS) or (
        '[fast] dedup_store_index is lmdb, and [dedupd] index is filter'
        in found[1])


def test_a_malformed_file_is_a_failure(created, tmp_path):
    file = tmp_path / 'x.conf'
    file.write_text('[fast\n')
    _, found = check(created, '--glance-config-file', file, '--config-file',
                     file)
    assert found['Options of dedupd'][0] == FAILURE
    assert found['Options of Glance'][0] == FAILURE
    assert found['Agreement of the options'][0] == WARNING


# -- running processes --------------------------------------------------------

def daemon_of(created, tmp_path, other):
    """Run a daemon, of another version if `other`."""
    daemon = daemons.Daemon(created.path)
    created.options[created.options.index('--socket') + 1] = daemon.socket
    if other:
        place = tmp_path / 'other' / 'glance_dedup-9.9.dist-info'
        place.mkdir(parents=True)
        (place / 'METADATA').write_text('Version: 9.9\n')
        daemon.environment['PYTHONPATH'] = (
            f'{place.parent}:{daemons.ROOT}')
    return daemon


@pytest.mark.parametrize('other', [False, True])
def test_a_daemon_of_another_version_is_a_warning(created, tmp_path, other):
    with daemon_of(created, tmp_path, other) as daemon:
        daemon.start().wait_for_catalog()
        _, found = check(created)
    code, sentences = found['Version of dedupd']
    assert code == (WARNING if other else SUCCESS)
    assert (f'has version 9.9; {package_version.version()} is installed'
            in sentences) == other
    assert found['Catalog'][0] == SUCCESS


def note_host(path, number, program):
    notes = host_notes.Notes(f'host{number}', program)
    host_notes.save(path, number, notes.encode())


def test_another_host_with_another_version_is_a_warning(created, tmp_path):
    with daemon_of(created, tmp_path, other=False) as daemon:
        daemon.start().wait_for_catalog()
        with (live_hosts.Hosts(created.path) as one,
              live_hosts.Hosts(created.path) as two):
            note_host(created.path, one.number, '9.9')
            note_host(created.path, two.number, package_version.version())
            repositories.eventually(
                lambda: len(daemon.status()['hosts']) == 3)
            code, sentences = check(created)[1]['Versions on other hosts']
    assert code == WARNING
    assert f'dedupd number {one.number} on host{one.number}' in sentences
    assert 'has version 9.9' in sentences
    assert f'host{two.number}' not in sentences


def test_older_daemons_note_no_version(created):
    fields = json.loads(host_notes.Notes('a', 'b').encode())
    for name in 'kind', 'version', 'checksum', 'program':
        del fields[name]
    content = files.pack_json(host_notes.KIND, **fields)
    assert host_notes.decode(content) == host_notes.Notes('a')
