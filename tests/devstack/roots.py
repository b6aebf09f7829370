# SPDX-License-Identifier: Apache-2.0
"""Roots of their own, in which the plugin runs as it would on a host.

A :class:`Root` is this host as its processes see it, but with a network, with
processes and with files of its own: all of the host's files can be read in it,
and files written there, as root too, are visible only there; nothing is left
when it ends. Starting it takes a tenth of a second, by Linux' namespaces and
overlayfs. There is a user ``stack`` with sudo, a checkout of this tree in
``/opt/stack``, as DevStack would have cloned it, and ``/opt/stack/devstack``,
which has the part of DevStack in the directory ``devstack`` beside this file.

A root is made of layers: :meth:`Machine.root` makes one on the base, in which
Python's environment is made once, or on the files of another root that has
ended.
"""

import contextlib
import io
import os
import pathlib
import select
import shlex
import socket
import subprocess
import sys
import sysconfig
import tarfile
import tempfile

from tests.functional import glance_server

HERE = pathlib.Path(__file__).resolve().parent
TOP = HERE.parent.parent
START_TIMEOUT = 60
RUN_TIMEOUT = 600

STACK = pathlib.Path('/opt/stack')
DEVSTACK = STACK / 'devstack'
CHECKOUT = STACK / 'glance-dedup'
VENV = STACK / 'data/venv'

NAMESPACES = ('--mount', '--pid', '--net', '--ipc', '--uts')

#: A checkout of DevStack, to have the plugin run by its own functions.
REAL = os.environ.get('DEVSTACK')
REAL_COPY = STACK / 'real-devstack'

#: The plugin must bring these itself.
OURS = ('glance_dedup', 'dedupd', '__editable__', '_glance_dedup')


class Failed(AssertionError):
    """A command in a root ended with another status than 0."""

    def __init__(self, command, status, output):
        self.status = status
        self.output = output
        super().__init__(f'{command}: status {status}\n{output}')


class Root:
    """A root of its own; see above; :class:`Machine` makes it."""

    def __init__(self, machine, layer, lower):
        self.layer = layer
        self.lower = lower
        shown = {TOP, pathlib.Path(sys.prefix), pathlib.Path(sys.base_prefix)}
        self._init = subprocess.Popen(
            [*machine.enter, 'unshare', *NAMESPACES, '--fork',
             '--kill-child', sys.executable, HERE / 'init.py', layer,
             ':'.join(map(str, lower)), ':'.join(sorted(map(str, shown)))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        ready, _, _ = select.select([self._init.stdout], [], [],
                                    START_TIMEOUT)
        if not ready or self._init.stdout.readline() != b'ready\n':
            self.close()
            raise AssertionError(
                'a root could not be made, see above: it needs overlayfs, '
                'and namespaces of mounts, processes and networks')
        self._pid = _child(self._init)

    def close(self):
        """End all processes in it. Its files stay for layers above."""
        self._init.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._init.wait(START_TIMEOUT)
        self._init.kill()
        self._init.wait()
        self._init.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def command(self, *command, user='root', directory='/'):
        """Return the command that runs a command in it from outside."""
        become = []
        if user != 'root':
            become = ['setpriv', f'--reuid={user}', f'--regid={user}',
                      '--init-groups', '--reset-env']
        return ['nsenter', f'--target={self._pid}', '--root', '--wd=/',
                *NAMESPACES, '--', *become, 'env', '-C', directory,
                *map(str, command)]

    def run(self, *command, user='root', check=True, data=None, **options):
        """Run a command; return its output, with that of errors.

        :raises Failed: it ended with another status than 0, and `check`
        """
        done = subprocess.run(
            self.command(*command, user=user, **options), input=data,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=RUN_TIMEOUT)
        output = done.stdout.decode(errors='replace')
        if check and done.returncode:
            raise Failed(shlex.join(map(str, command)), done.returncode,
                         output)
        return output

    def python(self, program, *arguments, user='stack'):
        """Run a program in the environment of the services."""
        return self.run(VENV / 'bin/python', '-c', program, *arguments,
                        user=user)

    def read(self, path):
        return self.run('cat', path)

    def write(self, path, content, user='root'):
        self.run('tee', path, user=user, data=content.encode())

    def exists(self, path):
        return self.run('sh', '-c', 'test -e "$0" -o -L "$0" && echo yes',
                        path, check=False) == 'yes\n'

    def files(self, *places):
        """Return all paths in some directories."""
        return set(self.run('find', *places, '-mindepth', '1').splitlines())

    # -- DevStack ----------------------------------------------------------

    def local_conf(self, localrc='', sections=''):
        """Write local.conf.

        :param localrc: lines of the section ``[[local|localrc]]``, besides
            the line that enables the plugin
        :param sections: further ones
        """
        self.write(DEVSTACK / 'local.conf', '[[local|localrc]]\n'
                   f'enable_plugin glance-dedup file://{CHECKOUT}\n'
                   f'{localrc}\n\n{sections}', user='stack')

    def _script(self, name, *arguments):
        real = [f'DEVSTACK={REAL_COPY}'] if REAL else []
        return self.run('env', *real, DEVSTACK / name, *arguments,
                        user='stack')

    def stack(self, last='test-config'):
        """Run stack.sh to the end of a phase; return its output."""
        output = self._script('stack.sh', last)
        assert output.endswith(f'stack.sh completed {last}\n'), output
        return output

    def make_database(self):
        """Have stack.sh copy Glance's database instead of making one."""
        self.run(VENV / 'bin/glance-manage', '--config-file',
                 '/etc/glance/glance-api.conf', 'db_sync', user='stack')
        self.run('mv', STACK / 'data/glance.sqlite',
                 STACK / 'glance/empty.sqlite', user='stack')
        self.run('rm', '-r', '/etc/glance')

    def unstack(self):
        return self._script('unstack.sh')

    def clean(self):
        return self._script('clean.sh')


class Machine:
    """The place of all roots; closing it removes them."""

    def __init__(self):
        # Only a mount point: only the holder sees the mount.
        self._place = pathlib.Path(tempfile.mkdtemp(prefix='roots-'))
        self._holder = subprocess.Popen(
            ['unshare', '--mount', '--fork', '--kill-child', 'sh', '-c',
             'mount -t tmpfs -o mode=0755 tmpfs "$0" && echo ready && cat',
             self._place], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout.readline() == b'ready\n', (
            'no namespaces can be made here, see above: run this where root '
            'may mount, not in a container without CAP_SYS_ADMIN')
        self.enter = ['nsenter', '--mount',
                      f'--target={_child(self._holder)}', '--']
        self._layers = 0
        self._base = []
        try:
            with self.root() as base:
                prepare(base)
        except BaseException:
            self.close()
            raise
        self._base = [base.layer]

    def root(self, on=None):
        """Return a new root.

        :param on: a root whose files it begins with; it must have ended
        """
        self._layers += 1
        layer = self._place / str(self._layers)
        subprocess.run([*self.enter, 'mkdir', layer], check=True)
        return Root(self, layer,
                    self._base if on is None else [on.layer, *on.lower])

    def close(self):
        self._holder.stdin.close()
        self._holder.wait(START_TIMEOUT)
        self._holder.stdout.close()
        self._place.rmdir()


def _child(process):
    children = pathlib.Path(f'/proc/{process.pid}/task/{process.pid}/children')
    return int(children.read_text().split()[0])


# -- the base -----------------------------------------------------------------

def prepare(root):
    """Set up a host as before stack.sh, and the files that it would fetch."""
    root.run('rm', '-rf', STACK, '/etc/glance', '/etc/dedupd')
    # sudo looks up the machine's name, and a root has no name server. In a
    # container, /etc/hosts is often a mount, which the overlay does not show.
    root.write('/etc/hosts', f'127.0.0.1 localhost {socket.gethostname()}\n')
    if 'stack:' not in root.read('/etc/passwd'):
        root.run('useradd', '--user-group', '--home-dir', STACK,
                 '--shell', '/bin/bash', 'stack')
    root.run('install', '-d', '-o', 'stack', '-g', 'stack', STACK, VENV.parent)
    root.write('/etc/sudoers.d/stack', 'stack ALL=(root) NOPASSWD: ALL\n')
    root.run('chmod', '0440', '/etc/sudoers.d/stack')
    put_program(root, '/usr/local/bin/systemctl',
                f'exec {sys.executable} -I {HERE}/systemctl.py "$@"')
    put_files(root, CHECKOUT, TOP, checkout_files())
    put_files(root, DEVSTACK, HERE / 'devstack',
              os.listdir(HERE / 'devstack'))
    if REAL:
        put_files(root, REAL_COPY, pathlib.Path(REAL), ['.'])
        # These would fetch and configure tempest.
        root.run('rm', '-r', REAL_COPY / 'extras.d')
    root.write(DEVSTACK / 'policy.yaml',
               glance_server.GlanceServer.policy())
    prepare_requirements(root)
    prepare_python(root)


def put_program(root, path, line, shell='/bin/sh', user='root'):
    root.write(path, f'#!{shell}\n{line}\n', user=user)
    root.run('chmod', '0755', path, user=user)


def checkout_files():
    """Return the files that git tracks, and those that it would add."""
    listed = subprocess.run(
        ['git', 'ls-files', '-z', '--cached', '--others',
         '--exclude-standard'], cwd=TOP, capture_output=True, check=True)
    return [name for name in listed.stdout.decode().split('\0')
            if name and (TOP / name).exists()]


def put_files(root, directory, source, names):
    """Copy files into a directory, as the user stack."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode='w') as tar:
        for name in names:
            tar.add(source / name, name)
    root.run('mkdir', '-p', directory, user='stack')
    root.run('tar', '-x', '--no-same-owner', directory=directory,
             user='stack', data=archive.getvalue())


def prepare_requirements(root):
    """Set up OpenStack's requirements: one constraint, and its editor."""
    tools = STACK / 'requirements/.venv/bin'
    root.run('mkdir', '-p', tools, user='stack')
    root.write(STACK / 'requirements/upper-constraints.txt',
               'glance-dedup===0.0.0\n', user='stack')
    put_program(root, tools / 'edit-constraints', 'sed -i "/^$3===/d" "$1"',
                user='stack')


def prepare_python(root):
    """Make the environment of all services, without this project's packages.

    It links to the tests' environment, so that nothing needs to be fetched.
    """
    site = pathlib.Path(sysconfig.get_path('purelib'))
    links = STACK / 'data/packages'
    names = [name for name in os.listdir(site)
             if not name.startswith(OURS)]
    root.run('mkdir', links, user='stack')
    root.run('xargs', '-d', '\n', 'ln', '-s', '-t', links, user='stack',
             data='\n'.join(str(site / name) for name in names).encode())
    root.run(sys.executable, '-m', 'venv', '--without-pip', VENV,
             user='stack')
    here = root.run(VENV / 'bin/python', '-c', 'import sysconfig; '
                    'print(sysconfig.get_path("purelib"))').strip()
    root.write(f'{here}/packages.pth', f'{links}\n', user='stack')
    put_program(root, VENV / 'bin/pip',
                f'exec {VENV}/bin/python -m pip "$@"', user='stack')
    put_program(
        root, VENV / 'bin/glance-manage', 'from glance.cmd.manage import main'
        '\nmain()', shell=VENV / 'bin/python', user='stack')
    put_program(root, '/usr/local/bin/uwsgi', 'import pyuwsgi\npyuwsgi.run()',
                shell=VENV / 'bin/python')
    root.run('mkdir', STACK / 'glance', user='stack')
    root.run('cp', '-r', pathlib.Path(sys.prefix) / 'etc/glance',
             STACK / 'glance/etc', user='stack')
    root.write(STACK / 'glance/etc/schema-image.json', '{}', user='stack')
    # pip fetches nothing, and builds with the installed packages.
    root.write('/etc/pip.conf', '[global]\nno-index = true\n'
               'no-build-isolation = false\n'
               'disable-pip-version-check = true\n')
