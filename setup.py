# SPDX-License-Identifier: Apache-2.0
"""Build the package and its C extension, ``glance_dedup._engine``.

This also builds the program that parses files of disk formats and, where
nbdkit-plugin.h is installed, the plugin with which nbdkit serves volumes. The
metadata is in setup.cfg, read by pbr. Three variables change the build:

``CFLAGS=-g``
    keeps debug symbols, as a distribution's build does that then puts them
    into a package of their own. Python's own flags have no say in it.
``GLANCE_DEDUP_WERROR=1``
    makes warnings errors. The project's own tools set it; a distribution's
    newer compiler must not fail to build a release because of a new warning.
``GLANCE_DEDUP_SANITIZE=address,undefined``
    instruments extension and plugin. Python and nbdkit must then be started
    with the sanitizer's runtime preloaded. The program's limits leave a
    sanitizer neither memory nor system calls.
"""

import concurrent.futures
import glob
import os
import shlex
import subprocess
import sys
import sysconfig

import setuptools
from setuptools.command import build_ext

HERE = os.path.dirname(os.path.abspath(__file__))
LIBRARIES = ['crypto', 'xxhash', 'lz4', 'z', 'zstd']
ENGINE = 'glance_dedup/engine/*/*'
PLUGIN = 'glance_dedup.nbdkit-glance-dedup-plugin'
PROGRAM = 'glance_dedup.glance-dedup-confined'
INCLUDE_DIRS = ['glance_dedup']
MACROS = [('_GNU_SOURCE', None)]
SANITIZE = os.environ.get('GLANCE_DEDUP_SANITIZE')
DEBUG = SANITIZE or '-g' in shlex.split(os.environ.get('CFLAGS', ''))
#: What is no part of a Python package: where it is installed, below the
#: environment, and where it lies here. The changelog, the manual pages and the
#: samples are there if tools/release, or tox (docs, genconfig), has made them.
DATA_FILES = {
    'share/glance-dedup/systemd': (
        'etc/*.service', 'etc/*.socket', 'etc/*.timer'),
    'share/glance-dedup/tmpfiles.d': ('etc/tmpfiles.d/*.conf',),
    'share/glance-dedup/prometheus': ('etc/prometheus/*.yml',),
    'share/glance-dedup/grafana': ('etc/grafana/*.json',),
    'share/glance-dedup/conf': ('etc/*.conf', 'etc/*.conf.sample'),
    'share/doc/glance-dedup': ('RELEASENOTES.rst',),
    'share/man/man1': ('doc/build/man/*.1',),
    'share/man/man8': ('doc/build/man/*.8',),
}


def sources(pattern):
    """The files that match `pattern`, sorted so that builds are repeatable."""
    return sorted(
        os.path.relpath(path, HERE)
        for path in glob.glob(os.path.join(HERE, pattern)))


def data_files():
    for directory, patterns in DATA_FILES.items():
        found = [name for pattern in patterns for name in sources(pattern)]
        if found:
            yield directory, found


def has_commit():
    """Whether git can tell pbr a version, here or in a directory above."""
    try:
        return subprocess.run(
            ['git', 'rev-parse', '--verify', '-q', 'HEAD'], cwd=HERE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


def set_fallback_version():
    """Let a plain copy of the tree build.

    pbr takes the version from ``PBR_VERSION``, an sdist's ``PKG-INFO`` or
    git, and gives up where it finds none of them.
    """
    if not os.path.exists(os.path.join(HERE, 'PKG-INFO')) and not has_commit():
        os.environ.setdefault('PBR_VERSION', '0.0.1.dev0')


def set_build_date():
    """Let the same commit, or sdist, give the same wheel at any time.

    The files of a wheel get the time in ``SOURCE_DATE_EPOCH``. Without it,
    that is the commit's, or that of the sdist.
    """
    info = os.path.join(HERE, 'PKG-INFO')
    if os.path.exists(info):
        date = str(int(os.stat(info).st_mtime))
    elif has_commit():
        date = subprocess.run(
            ['git', 'log', '-1', '--format=%ct'], cwd=HERE, check=True,
            stdout=subprocess.PIPE, text=True).stdout.strip()
    else:
        return
    os.environ.setdefault('SOURCE_DATE_EPOCH', date)


def compile_args(sanitize=SANITIZE):
    args = [
        '-std=c11', '-O2', '-g' if DEBUG else '-g0', '-fvisibility=hidden',
        '-pthread', '-Wall', '-Wextra']
    if os.environ.get('GLANCE_DEDUP_WERROR') == '1':
        args.append('-Werror')
    if sanitize:
        args += [f'-fsanitize={sanitize}', '-fno-omit-frame-pointer',
                 '-fno-sanitize-recover=all']
    return args


def extension(name, pattern, **options):
    """A library that the engine is linked into.

    :param pattern: its own files, without the ending
    """
    link_args = ['-pthread']
    if SANITIZE:
        link_args.append(f'-fsanitize={SANITIZE}')
    return setuptools.Extension(
        name,
        sources=sources(f'{pattern}.c'),
        depends=(sources(f'{pattern}.h') + sources(f'{ENGINE}.c')
                 + sources(f'{ENGINE}.h')),
        include_dirs=INCLUDE_DIRS,
        libraries=LIBRARIES,
        extra_compile_args=compile_args(),
        extra_link_args=link_args,
        **options)


def program():
    """The program that parses disk formats: it has no other library."""
    return setuptools.Extension(
        PROGRAM,
        sources=[*sources('glance_dedup/confined/*.c'),
                 *sources('glance_dedup/engine/disk/*.c'),
                 'glance_dedup/engine/base/status.c'],
        depends=sources(f'{ENGINE}.h'), define_macros=MACROS,
        include_dirs=INCLUDE_DIRS, libraries=['z'],
        extra_compile_args=compile_args(sanitize=None),
        extra_link_args=shlex.split(os.environ.get('LDFLAGS', '')))


def has_nbdkit():
    """Whether the compiler finds the header for plugins of nbdkit."""
    command = shlex.split(
        os.environ.get('CC') or sysconfig.get_config_var('CC') or 'cc')
    for variable in ('CPPFLAGS', 'CFLAGS'):
        command += shlex.split(os.environ.get(variable, ''))
    try:
        return subprocess.run(
            [*command, '-E', '-x', 'c', '-'], text=True,
            input='#include <nbdkit-plugin.h>\n', stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


def extensions():
    yield extension(
        'glance_dedup._engine', 'glance_dedup/binding/*',
        define_macros=[*MACROS, ('Py_LIMITED_API', '0x030B0000')],
        py_limited_api=True)
    yield program()
    if has_nbdkit():
        yield extension(PLUGIN, 'glance_dedup/nbdkit/*', define_macros=MACROS)
    else:
        print('nbdkit-plugin.h was not found: the plugin for nbdkit is not '
              'built, and "glance-dedup volume serve" will not work',
              file=sys.stderr)


class BuildExt(build_ext.build_ext):
    """Compiles the engine once, in parallel, for both extensions."""

    def build_extensions(self):
        def compile_one(source):
            return self.compiler.compile(
                [source], output_dir=self.build_temp, macros=MACROS,
                include_dirs=INCLUDE_DIRS, extra_postargs=compile_args(),
                depends=sources(f'{ENGINE}.h'))

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [name for names in pool.map(
                compile_one, sources(f'{ENGINE}.c')) for name in names]
        for ext in self.extensions:
            ext.extra_objects = objects
        super().build_extensions()

    def build_extension(self, ext):
        if ext.name != PROGRAM:
            super().build_extension(ext)
            return
        objects = self.compiler.compile(
            ext.sources, output_dir=os.path.join(self.build_temp, 'program'),
            macros=ext.define_macros, include_dirs=ext.include_dirs,
            extra_postargs=ext.extra_compile_args, depends=ext.depends)
        self.compiler.link_executable(
            objects, self.get_ext_fullpath(ext.name), libraries=ext.libraries,
            extra_postargs=ext.extra_link_args)

    def get_ext_filename(self, fullname):
        if PROGRAM.endswith(fullname):
            return fullname.replace('.', '/')
        if PLUGIN.endswith(fullname):
            # nbdkit loads it, so the file has no mark of a Python.
            return fullname.replace('.', '/') + '.so'
        return super().get_ext_filename(fullname)


class Distribution(setuptools.Distribution):
    """Has a command of this file; pbr drops what cmdclass names."""

    def get_command_class(self, command):
        if command == 'build_ext':
            return BuildExt
        return super().get_command_class(command)


set_fallback_version()
set_build_date()
setuptools.setup(
    setup_requires=['pbr>=6.1.1'], pbr=True, ext_modules=[*extensions()],
    data_files=[*data_files()], exclude_package_data={'': ['*.c', '*.h']},
    license_expression='Apache-2.0', distclass=Distribution)
