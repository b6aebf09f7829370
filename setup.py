# SPDX-License-Identifier: Apache-2.0
"""Build the package and its C extension, ``glance_dedup._engine``.

The metadata is in setup.cfg, read by pbr. Two variables change the build of
the extension:

``GLANCE_DEDUP_WERROR=1``
    makes warnings errors. The project's own tools set it; a distribution's
    newer compiler must not fail to build a release because of a new warning.
``GLANCE_DEDUP_SANITIZE=address,undefined``
    instruments the extension. Python must then be started with the
    sanitizer's runtime preloaded.
"""

import glob
import os
import subprocess

import setuptools

HERE = os.path.dirname(os.path.abspath(__file__))
LIBRARIES = ['crypto', 'xxhash', 'lz4', 'zstd']


def sources(pattern):
    """The files that match `pattern`, sorted so that builds are repeatable."""
    return sorted(
        os.path.relpath(path, HERE)
        for path in glob.glob(os.path.join(HERE, pattern)))


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


def engine():
    compile_args = [
        '-std=c11', '-O2', '-g', '-fvisibility=hidden', '-pthread',
        '-Wall', '-Wextra']
    link_args = ['-pthread']
    if os.environ.get('GLANCE_DEDUP_WERROR') == '1':
        compile_args.append('-Werror')
    sanitize = os.environ.get('GLANCE_DEDUP_SANITIZE')
    if sanitize:
        compile_args += [
            f'-fsanitize={sanitize}', '-fno-omit-frame-pointer',
            '-fno-sanitize-recover=all']
        link_args.append(f'-fsanitize={sanitize}')
    return setuptools.Extension(
        'glance_dedup._engine',
        sources=(sources('glance_dedup/binding/*.c')
                 + sources('glance_dedup/engine/*/*.c')),
        depends=(sources('glance_dedup/binding/*.h')
                 + sources('glance_dedup/engine/*/*.h')),
        include_dirs=['glance_dedup'],
        define_macros=[
            ('_GNU_SOURCE', None),
            ('Py_LIMITED_API', '0x030B0000'),
        ],
        libraries=LIBRARIES,
        extra_compile_args=compile_args,
        extra_link_args=link_args,
        py_limited_api=True)


set_fallback_version()
setuptools.setup(
    setup_requires=['pbr>=6.1.1'], pbr=True, ext_modules=[engine()])
