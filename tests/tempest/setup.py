# SPDX-License-Identifier: Apache-2.0
"""Gives the plugin the project's version, so that one tag names both.

pbr reads git, ``PBR_VERSION``, or the ``PKG-INFO`` of the plugin's own sdist.
In an sdist of the project, the version is in ``PKG-INFO`` at the top.
"""

import email
import os
import pathlib

from pbr import packaging
import setuptools

HERE = pathlib.Path(__file__).resolve().parent


def version():
    of_project = HERE.parents[1] / 'PKG-INFO'
    if of_project.exists() and not (HERE / 'PKG-INFO').exists():
        os.environ.setdefault(
            'PBR_VERSION',
            email.message_from_string(of_project.read_text())['Version'])
    return packaging.get_version('glance-dedup-tempest-plugin')


setuptools.setup(version=version())
