# SPDX-License-Identifier: Apache-2.0

"""The expiry dates of the daemon's own certificates."""

import time

import pytest

from dedupd import settings
from dedupd.status import expiry
from tests.support import certificates

OPTIONS = """
[DEFAULT]
mode = {mode}
[dedupd]
datadir = /nowhere
tls_cert = {cert}
{listen}
[cache]
upstream_cert = {cert}
[replication]
cert = {cert}
{to}
"""


@pytest.fixture
def authority(tmp_path):
    return certificates.Authority(tmp_path)


def found(tmp_path, cert, mode='store', listen='', to=''):
    path = tmp_path / 'dedupd.conf'
    path.write_text(OPTIONS.format(mode=mode, cert=cert, listen=listen, to=to))
    return expiry.certificates(settings.parse(['--config-file', str(path)]))


def test_those_that_are_in_use(tmp_path, authority):
    """Each certificate in use is listed with its expiry.

    The daemon's own certificate comes first in the file, before those of
    authorities.
    """
    path = authority.issue('server')
    with open(path, 'ab') as file:
        file.write(authority.path.read_bytes())
    tomorrow = pytest.approx(time.time() + 86400, abs=120)
    for options, names in (
            ({}, []),
            ({'listen': 'listen = localhost:1'}, ['[dedupd] tls_cert']),
            ({'mode': 'cache'}, ['[cache] upstream_cert']),
            ({'to': 'target_url = https://elsewhere:1'},
             ['[replication] cert'])):
        assert found(tmp_path, path, **options) == {
            name: {'path': str(path), 'expires': tomorrow} for name in names}


def test_a_file_that_is_no_certificate(tmp_path, authority):
    whole = authority.issue('server').read_bytes()
    only_key = whole[whole.index(b'-----BEGIN P'):]
    for content in (None, b'', whole[:200], only_key,
                    b'-----BEGIN CERTIFICATE-----\nAAAA\n'
                    b'-----END CERTIFICATE-----\n'):
        path = tmp_path / 'bad.pem'
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        assert found(tmp_path, path, listen='listen = localhost:1') == {
            '[dedupd] tls_cert': {'path': str(path), 'expires': None}}
