# SPDX-License-Identifier: Apache-2.0
"""The part of tools/release that finishes the wheel and checks all files.

The wheel gets the libraries for which hosts need no updates of their own,
with their licences, and a tag that says which hosts it is for. What is wrong
ends the program with a sentence.
"""

import argparse
import email
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

#: Libraries that go into the wheel: Debian's package, and the licence.
BUNDLED = {'liblz4': ('liblz4-1', 'BSD-2-Clause'),
           'libxxhash': ('libxxhash0', 'BSD-2-Clause'),
           'libzstd': ('libzstd1', 'BSD-3-Clause')}
#: OpenSSL stays the host's, which updates and configures it.
OF_THE_HOST = ('libcrypto.so.3',)
#: Other libraries that one in the wheel may need: the C library, and zlib,
#: which auditwheel expects on every host.
C_LIBRARY = {'libc.so.6', 'ld-linux-x86-64.so.2', 'ld-linux-aarch64.so.1',
             'libz.so.1'}
TAG = re.compile(r'-cp311-abi3-manylinux_2_\d+_\w+\.whl$')
MAX_WHEEL_MIB = 4
MAX_SDIST_MIB = 16
PLUGIN = 'glance_dedup/nbdkit-glance-dedup-plugin.so'
PROGRAM = 'glance_dedup/glance-dedup-confined'
BUILT = re.compile(r'\.so(\.|$)|/glance-dedup-confined$')
DATA = ('share/man/man1/glance-dedup.1', 'share/man/man8/dedupd.8',
        'share/glance-dedup/conf/dedupd.conf.sample',
        'share/glance-dedup/conf/glance-dedup.conf.sample',
        'share/glance-dedup/grafana/glance-dedup.json',
        'share/glance-dedup/prometheus/glance-dedup.rules.yml',
        'share/glance-dedup/systemd/dedupd.service',
        'share/glance-dedup/systemd/dedupd-cache.service',
        'share/glance-dedup/systemd/dedupd-relay.socket',
        'share/glance-dedup/tmpfiles.d/glance-dedup.conf',
        'share/doc/glance-dedup/RELEASENOTES.rst')
PAGE = 'dedupd/status/page/index.html'
COMMAND_SECONDS = 900
#: Pythons that the Debian of the build lacks, and the Debian that has each.
SUITES = {'python3.13': 'trixie', 'python3.14': 'forky'}
#: Packages for a host: nbdkit for the trial, and those that compile plyvel.
PACKAGES = 'g++,libleveldb-dev,nbdkit,python3-dev,python3-venv'
#: Prints the mirror from which apt has Debian.
MIRROR = ('apt-get', 'indextargets', '--format', '$(REPO_URI)',
          'Identifier: Packages', 'Origin: Debian', 'Label: Debian')
#: The settings of apt that mmdebstrap needs, among them a proxy.
APT_CONF = re.compile('^Acquire::(?:https?|check-).* ".+";$', re.I | re.M)
#: Runs a command with mounts and processes of its own, which end with it.
NAMESPACES = ('unshare', '--mount', '--propagation', 'private', '--pid',
              '--fork', '--kill-child')
#: Makes a Debian of a suite, and runs a script in its directory /trial.
HOST = '''
set -e
mmdebstrap --quiet --mode=root --variant=minbase --include="$PACKAGES" \\
    --aptopt=apt.conf "$SUITE" root "$MIRROR"
mount -t proc proc root/proc
mount --bind /dev root/dev
mount -t tmpfs -o mode=1777 tmpfs root/dev/shm
for file in /etc/hosts /etc/resolv.conf /etc/pip.conf \\
    /etc/ssl/certs/ca-certificates.crt; do
    [ ! -e "$file" ] || install -D -m 644 "$file" "root$file"
done
install -D -t root/trial trial.sh "$WHEEL"
chroot root env -C /trial PATH=/usr/bin:/bin bash trial.sh
'''
#: Script that each Python runs with the wheel in an environment of its own.
TRIAL = '''
set -e
"$PYTHON" -m venv venv
venv/bin/pip install --quiet --prefer-binary *.whl
export GLANCE_DEDUP_REPOSITORY=$PWD/repository GLANCE_DEDUP_SOCKET=
export GLANCE_DEDUP_FILTER_DIR=$PWD/filter
export PATH=$PWD/venv/bin:$PATH
python -W ignore -c 'import glance_dedup.driver.dedup_store'
head -c 300000 /dev/urandom >image
glance-dedup repository create
glance-dedup image put one image
glance-dedup image get one back
cmp image back
plugin=$(python -c 'import glance_dedup; print(glance_dedup.__path__[0])')
nbdkit --dump-plugin "$plugin/nbdkit-glance-dedup-plugin.so" | grep ^name=
"$plugin/glance-dedup-confined" 60 </dev/null | grep -q .
version=$(glance-dedup --version)
test "$(dedupd --version)" = "dedupd ${version#* }"
echo "$version"
'''


def fail(message):
    sys.exit(f'tools/release: FAILED: {message}')


def say(message):
    print(f'tools/release: {message}', flush=True)


def run(*command, **options):
    """Return a command's output; one that fails ends the program."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=COMMAND_SECONDS, **options)
    except subprocess.TimeoutExpired:
        fail(f'{command[0]} was stopped after {COMMAND_SECONDS} s')
    if done.returncode:
        fail(f'{command[0]} ended with {done.returncode}:\n{done.stdout}')
    return done.stdout


# -- The wheel ----------------------------------------------------------------

def add_licences(directory):
    """Put the licences of the bundled libraries into an unpacked wheel."""
    info, = directory.glob('*.dist-info')
    names = []
    for package, _ in BUNDLED.values():
        text = pathlib.Path('/usr/share/doc') / package / 'copyright'
        shutil.copyfile(text, info / 'licenses' / package)
        names.append(f'License-File: {package}\n')
    licences = sorted({licence for _, licence in BUNDLED.values()})
    metadata = info / 'METADATA'
    old = metadata.read_text()
    new = old.replace(
        'License-Expression: Apache-2.0\n',
        f'License-Expression: {" AND ".join(["Apache-2.0", *licences])}\n', 1)
    new = new.replace('License-File: LICENSE\n',
                      f'License-File: LICENSE\n{"".join(names)}', 1)
    if new.count('License-File: ') != 1 + len(names) or licences[0] not in new:
        fail('METADATA has no licence of ours: see setup.py')
    metadata.write_text(new)


def finish_wheel(dist):
    """Make the wheel in `dist` one for all hosts of this architecture."""
    linux, = dist.glob('glance_dedup-*-linux_*.whl')
    with tempfile.TemporaryDirectory() as place:
        run('wheel', 'unpack', '--dest', place, linux)
        directory, = pathlib.Path(place).iterdir()
        add_licences(directory)
        linux.unlink()
        run('wheel', 'pack', '--dest-dir', place, directory)
        complete, = pathlib.Path(place).glob('*.whl')
        excluded = [word for name in OF_THE_HOST
                    for word in ('--exclude', name)]
        run('auditwheel', 'repair', '--plat', 'auto', *excluded,
            '--wheel-dir', dist, complete)
    wheel, = dist.glob('glance_dedup-*.whl')
    return wheel


def check_wheel(wheel):
    if not TAG.search(wheel.name):
        fail(f'{wheel.name} is not for Python 3.11 and newer on any host')
    check_size(wheel, MAX_WHEEL_MIB)
    with (zipfile.ZipFile(wheel) as archive,
          tempfile.TemporaryDirectory() as place):
        names = archive.namelist()
        if found := [name for name in names if name.endswith(('.c', '.h'))]:
            fail(f'{wheel.name} has sources: {found[0]}')
        for name in (PLUGIN, PROGRAM, PAGE, *DATA):
            if not any(found.endswith(name) for found in names):
                fail(f'{wheel.name} lacks {name}')
        archive.extractall(place)
        libraries = {path.name: path for path in
                     pathlib.Path(place).rglob('*')
                     if BUILT.search(str(path))}
        for path in libraries.values():
            check_library(path, libraries)
    for library in BUNDLED:
        if not any(name.startswith(f'{library}-') for name in libraries):
            fail(f'{wheel.name} lacks {library}')
    metadata = metadata_of(wheel)
    for field in ('License-Expression', 'Project-URL', 'Requires-Python'):
        if not metadata[field]:
            fail(f'METADATA of {wheel.name} has no {field}: see setup.cfg and '
                 'setup.py')
    return metadata


def check_library(path, libraries):
    needed = re.findall(r'\(NEEDED\).*\[(.*)\]', run('readelf', '-d', path))
    allowed = {*libraries, *OF_THE_HOST, *C_LIBRARY}
    if found := set(needed) - allowed:
        fail(f'{path.name} needs {found.pop()}, which hosts may not have')
    if '.debug_' in run('readelf', '-SW', path):
        fail(f'{path.name} has debug symbols')


def check_size(path, limit_mib):
    if path.stat().st_size > limit_mib << 20:
        fail(f'{path.name} is larger than {limit_mib} MiB')


def metadata_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name, = (name for name in archive.namelist()
                 if re.fullmatch(r'[^/]+\.dist-info/METADATA', name))
        return email.message_from_bytes(archive.read(name))


# -- The rest -----------------------------------------------------------------

def check_sdist(sdist):
    check_size(sdist, MAX_SDIST_MIB)
    with tarfile.open(sdist) as archive:
        names = {name.partition('/')[2] for name in archive.getnames()}
    for name in ('glance_dedup/engine/base/env.c', 'RELEASENOTES.rst',
                 'releasenotes/notes/reno.cache', 'doc/build/man/dedupd.8',
                 'doc/build/man/glance-dedup.1', 'etc/dedupd.conf.sample',
                 'tests/tempest/setup.py'):
        if name not in names:
            fail(f'{sdist.name} lacks {name}: see MANIFEST.in')
    if found := [name for name in names
                 if BUILT.search(name) or name.endswith('.pyc')]:
        fail(f'{sdist.name} has {found[0]}, which was built')


def check_versions(dist, version):
    """All files, the manual pages and the documents have the same one."""
    for path in dist.iterdir():
        if path.is_file() and f'-{version}' not in path.name:
            fail(f'{path.name} is not of version {version}')
    wheel, = dist.glob('glance_dedup-*.whl')
    with zipfile.ZipFile(wheel) as archive:
        pages = {name: archive.read(name).decode()
                 for name in archive.namelist()
                 if re.search(r'/share/man/.*\.[18]$', name)}
    pages['html/index.html'] = (dist / 'html' / 'index.html').read_text()
    for name, text in pages.items():
        if version not in text:
            fail(f'{name} does not tell the version, {version}')


def try_wheel(python, wheel, run_trial):
    """Store and read an image with the wheel, in an environment of its own."""
    with tempfile.TemporaryDirectory() as place:
        place = pathlib.Path(place)
        (place / 'trial.sh').write_text(TRIAL)
        said = run_trial(place, wheel, {**os.environ, 'PYTHON': python})
    said = said.splitlines()[-1]
    if said != f'glance-dedup {wheel.name.split("-")[1]}':
        fail(f'{wheel.name} says with {python} that it is {said}')
    say(f'{python}: {said}')


def try_here(place, wheel, environment):
    shutil.copy(wheel, place)
    return run('bash', 'trial.sh', cwd=place, env=environment)


def try_in_debian(place, wheel, environment):
    """Try it where C library and OpenSSL are newer than here, too."""
    mirrors = run(*MIRROR).split()
    if not mirrors:
        fail('apt has no source whose origin is Debian: add one')
    (place / 'apt.conf').write_text(
        '\n'.join(APT_CONF.findall(run('apt-config', 'dump'))))
    return run(*NAMESPACES, 'bash', '-c', HOST, cwd=place, env={
        **environment, 'SUITE': SUITES[environment['PYTHON']],
        'PACKAGES': PACKAGES, 'MIRROR': mirrors[0], 'WHEEL': wheel})


def is_installed(python):
    """Return whether it works: pyenv puts names on PATH that only fail."""
    return subprocess.run(['bash', '-c', f'{python} -c ""'],
                          capture_output=True, timeout=60).returncode == 0


def try_all(wheel):
    """Try each Python that the wheel is for, here or in a Debian that has it.

    :returns: those that are to be had nowhere
    """
    for minor in range(11, 15):
        python = f'python3.{minor}'
        if is_installed(python):
            try_wheel(python, wheel, try_here)
        elif python in SUITES and os.geteuid() == 0:
            try_wheel(python, wheel, try_in_debian)
        else:
            yield python


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('dist', type=pathlib.Path)
    parser.add_argument('pythons', nargs='*')
    args = parser.parse_args()
    wheel = finish_wheel(args.dist)
    metadata = check_wheel(wheel)
    sdist, = args.dist.glob('glance_dedup-*.tar.gz')
    check_sdist(sdist)
    check_versions(args.dist, metadata['Version'])
    files = sorted(path for path in args.dist.iterdir() if path.is_file())
    run('twine', 'check', '--strict', *files)
    for python in args.pythons:
        try_wheel(python, wheel, try_here)
    for python in [] if args.pythons else try_all(wheel):
        say(f'{python} is not installed: the wheel was not tried with it')
    if not metadata['Home-page']:
        say('setup.cfg names no home page: add it before you upload anything')
    for path in files:
        say(f'{path}: {path.stat().st_size / 1024:.0f} KiB')


if __name__ == '__main__':
    main()
