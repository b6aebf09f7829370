# SPDX-License-Identifier: Apache-2.0

"""Access to the Glance of the options, and to the facts of its images."""

import typing

from glance_dedup.cli import common

if typing.TYPE_CHECKING:
    from glance_dedup.client import glance_api


def add_cloud(parser, **options):
    """Add ``--os-cloud``."""
    parser.add_argument(
        '--os-cloud', metavar='NAME', help='The cloud of clouds.yaml whose '
        'Glance is asked. Default: the one of the environment variables '
        'OS_*.', **options)


def add_address(parser):
    """Add the options that name a Glance."""
    add_cloud(parser)
    parser.add_argument(
        '--glance-url', metavar='URL',
        help="Ask this glance-api instead of the cloud's.")


def add_options(parser):
    """Add the options of commands that may do without a Glance."""
    add_address(parser)
    parser.add_argument(
        '--no-glance', action='store_true',
        help='Ask no Glance, whatever the environment says.')


def add_names(parser):
    """Add the options of commands that can show the names of images."""
    parser.add_argument(
        '--names', action='store_true',
        help='Ask Glance for the names of images, and show them.')
    add_cloud(parser)


def connect(cloud: str | None = None, url: str | None = None
            ) -> 'glance_api.Glance':
    """A Glance of which the user is an administrator.

    :raises UsageError: no option names a Glance
    :raises GlanceError: it refuses, or the user is no administrator
    """
    from glance_dedup.client import glance_api

    if cloud is None and not glance_api.is_configured():
        raise common.UsageError(
            'there is no Glance to ask: use --os-cloud NAME, or set OS_CLOUD '
            'or OS_AUTH_URL and the like')
    glance = glance_api.Glance(cloud, url)
    glance.require_administrator()
    return glance
