# SPDX-License-Identifier: Apache-2.0

"""Options of ``[replication]``: sending images to another site."""

from oslo_config import cfg

from dedupd.options import kinds

_PROPERTY = kinds.Matching(
    r'^[^=\s][^=]*=.*$', 'the name of a property, = and its value: for '
    'example replicate=yes')

OPTIONS = [
    cfg.URIOpt('target_url',
               schemes=['https'],
               sample_default='https://other-site:9393',
               help="""
URL of the daemon of another site, its ``[dedupd] listen``, to which
new images are sent.

The Glance there gets each image's record and location. See the guide
on replication. If a repository has several daemons, the maintainer
sends the images.

Possible values:
    * https://HOST:PORT
    * Unset: no image is sent

Related options:
    * ``cert``
    * ``from_cloud``
    * ``to_cloud``

"""),
    cfg.StrOpt('cert',
               help="""
File with the certificate, in PEM, that makes this daemon an operator
of the other site's daemon.

Possible values:
    * A path; needed if ``target_url`` is set

Related options:
    * ``key``
    * ``[dedupd] tls_client_ca``, at the other site

"""),
    cfg.StrOpt('key',
               help="""
File with the private key of ``cert``, in PEM, without a password.

Possible values:
    * A path; unset: it is in the file ``cert``

"""),
    cfg.StrOpt('ca_file',
               help="""
File with the authorities, in PEM, that verify the other daemon's
certificate.

Possible values:
    * A path
    * Unset: those of the system

"""),
    cfg.StrOpt('from_cloud',
               help="""
Cloud of ``clouds.yaml`` whose Glance has the images. The account
needs the role ``admin``.

Possible values:
    * A name in ``/etc/openstack/clouds.yaml``, or in the file that
      the environment variable ``OS_CLIENT_CONFIG_FILE`` names; needed
      if ``target_url`` is set

"""),
    cfg.StrOpt('to_cloud',
               help="""
Cloud of ``clouds.yaml`` whose Glance is to have the images. The
account needs the roles ``admin`` and ``service``.

Possible values:
    * A name, as ``from_cloud``; needed if ``target_url`` is set

"""),
    kinds.text_list('projects', """
Projects whose images are sent.

Possible values:
    * A list of projects' ids
    * Empty: the images of all projects

Related options:
    * ``properties``

"""),
    kinds.text_list('properties', item_type=_PROPERTY, help="""
Properties that an image needs to be sent, for example
``replicate=yes`` or ``visibility=public``. It needs all of them.

Possible values:
    * A list of NAME=VALUE
    * Empty: images need none

Related options:
    * ``projects``

"""),
    kinds.rate('rate_mib', 0, """
The most MiB to send in a second.
"""),
    kinds.interval('interval', 300, """
Seconds between two searches for new images.
"""),
]
