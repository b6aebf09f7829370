# SPDX-License-Identifier: Apache-2.0

"""tools/release detects errors of a wheel; test_package.py runs it."""

import importlib.util
import pathlib
import subprocess
import zipfile

import pytest

TOP = pathlib.Path(__file__).resolve().parents[2]
NAME = 'glance_dedup-1.2.3-cp311-abi3-manylinux_2_34_x86_64.whl'
METADATA = 'glance_dedup-1.2.3.dist-info/METADATA'
FIELDS = {'Version': '1.2.3', 'License-Expression': 'Apache-2.0',
          'Project-URL': 'Glance, https://docs.openstack.org/glance/latest/',
          'Requires-Python': '>=3.11'}
#: Here each of these is a library without functions.
LIBRARIES = ('glance_dedup.libs/liblz4-1.so.1',
             'glance_dedup.libs/libxxhash-1.so.0',
             'glance_dedup.libs/libzstd-1.so.1')


@pytest.fixture(scope='module')
def release():
    spec = importlib.util.spec_from_file_location(
        'release', TOP / 'tools' / 'release.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope='module')
def library(tmp_path_factory):
    """Makes a shared library with the given arguments of the compiler."""
    place = tmp_path_factory.mktemp('libraries')

    def make(*arguments):
        path = place / 'library.so'
        subprocess.run(
            ['gcc', '-shared', '-x', 'c', '-', '-o', path,
             '-Wl,--no-as-needed', *arguments], check=True, timeout=60,
            input=b'int number(void) { return 1; }\n')
        return path.read_bytes()
    return make


@pytest.fixture
def files(release, library):
    """Return the content of a valid wheel."""
    good = library('-g0')
    data = {f'glance_dedup-1.2.3.data/data/{name}': b''
            for name in release.DATA}
    return {METADATA: metadata(FIELDS), release.PLUGIN: good,
            release.PROGRAM: good, release.PAGE: b'', **data,
            **dict.fromkeys(LIBRARIES, good)}


def metadata(fields):
    return ''.join(f'{name}: {value}\n'
                   for name, value in fields.items()).encode()


def check(release, directory, files, name=NAME):
    with zipfile.ZipFile(directory / name, 'w') as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return release.check_wheel(directory / name)


def test_a_good_wheel(release, files, tmp_path):
    assert check(release, tmp_path, files)['Version'] == '1.2.3'


def test_a_wheel_for_this_host_alone(release, files, tmp_path):
    name = NAME.replace('manylinux_2_34', 'linux')
    with pytest.raises(SystemExit, match='is not for Python 3.11'):
        check(release, tmp_path, files, name)


def test_sources(release, files, tmp_path):
    files['glance_dedup/engine/base/env.c'] = b''
    with pytest.raises(SystemExit, match='has sources: .*env.c'):
        check(release, tmp_path, files)


def test_debug_symbols(release, files, library, tmp_path):
    files[release.PLUGIN] = library('-g')
    with pytest.raises(SystemExit, match='plugin.so has debug symbols'):
        check(release, tmp_path, files)


def test_a_library_that_hosts_lack(release, files, library, tmp_path):
    files[release.PLUGIN] = library('-g0', '-lcrypto')
    assert check(release, tmp_path, files)
    files[release.PLUGIN] = library('-g0', '-llz4')
    with pytest.raises(SystemExit, match='plugin.so needs liblz4.so.1, which'):
        check(release, tmp_path, files)


def test_what_a_wheel_must_have(release, files, tmp_path):
    assert LIBRARIES[0] in files
    for name in files:
        if name != METADATA:
            rest = {path: files[path] for path in files if path != name}
            with pytest.raises(SystemExit, match='lacks '):
                check(release, tmp_path, rest)


def test_what_its_metadata_must_have(release, files, tmp_path):
    for field in set(FIELDS) - {'Version'}:
        files[METADATA] = metadata(
            {name: FIELDS[name] for name in FIELDS if name != field})
        with pytest.raises(SystemExit, match=f'has no {field}'):
            check(release, tmp_path, files)


def test_a_file_that_is_too_large(release, tmp_path):
    path = tmp_path / 'file'
    path.write_bytes(bytes(1 << 20))
    release.check_size(path, 1)
    path.write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(SystemExit, match='file is larger than 1 MiB'):
        release.check_size(path, 1)


def test_licences(release, tmp_path):
    info = tmp_path / 'glance_dedup-1.2.3.dist-info'
    (info / 'licenses').mkdir(parents=True)
    (info / 'METADATA').write_text(
        'License-Expression: Apache-2.0\nLicense-File: LICENSE\n\ntext\n')
    release.add_licences(tmp_path)
    head, text = (info / 'METADATA').read_text().split('\n\n')
    assert head.splitlines() == [
        'License-Expression: Apache-2.0 AND BSD-2-Clause AND BSD-3-Clause',
        'License-File: LICENSE', 'License-File: liblz4-1',
        'License-File: libxxhash0', 'License-File: libzstd1']
    assert text == 'text\n'
    for name in ('liblz4-1', 'libxxhash0', 'libzstd1'):
        assert 'BSD' in (info / 'licenses' / name).read_text()
    (info / 'METADATA').write_text('License: Apache-2.0\n\ntext\n')
    with pytest.raises(SystemExit, match='no licence of ours'):
        release.add_licences(tmp_path)
