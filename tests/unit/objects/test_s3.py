# SPDX-License-Identifier: Apache-2.0

"""S3 ignores the environment of its process."""

import http.server
import threading

from oslo_config import cfg
import pytest

from glance_dedup.objects import object_location
from glance_dedup.objects import s3

DATA = b'some bytes of an object'


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers each request for a range of one object."""

    def do_GET(self):
        self.server.authorizations.append(self.headers['Authorization'])
        self.send_response(206)
        self.send_header('Content-Length', str(len(DATA)))
        self.end_headers()
        self.wfile.write(DATA)

    def log_message(self, *args):
        """Log nothing."""


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as found:
        found.authorizations = []
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.fixture
def conf(tmp_path):
    file = tmp_path / 'cold.conf'
    file.write_text('[s3]\naccess_key = ours\nsecret_key = s\n')
    found = cfg.ConfigOpts()
    found([], default_config_files=[str(file)])
    return found


@pytest.fixture(params=['nothing', 'valid', 'broken'])
def environment(request, tmp_path, monkeypatch):
    """Settings for programs of AWS, in variables and in files."""
    home = tmp_path / 'home'
    (home / '.aws' / 'models').mkdir(parents=True)
    monkeypatch.setenv('HOME', str(home))
    for name in ('no_proxy', 'NO_PROXY'):
        monkeypatch.setenv(name, '127.0.0.1')
    if request.param == 'nothing':
        return
    text = ('[default]\naws_access_key_id = theirs\n'
            'aws_secret_access_key = x\nendpoint_url = http://127.0.0.1:1\n'
            'region = eu-north-1\nca_bundle = /nowhere\n')
    for name in ('config', 'credentials'):
        (home / '.aws' / name).write_text(
            text if request.param == 'valid' else 'no ini')
    for name, value in {
            'AWS_PROFILE': 'work', 'AWS_DEFAULT_PROFILE': 'work',
            'AWS_ENDPOINT_URL': 'http://127.0.0.1:1',
            'AWS_ENDPOINT_URL_S3': 'http://127.0.0.1:1',
            'AWS_DEFAULT_REGION': 'eu-north-1', 'AWS_CA_BUNDLE': '/nowhere',
            'AWS_ACCESS_KEY_ID': 'theirs', 'AWS_SECRET_ACCESS_KEY': 'x',
            'AWS_SESSION_TOKEN': 'x', 'AWS_DATA_PATH': str(home),
            'AWS_DEFAULTS_MODE': 'no such mode', 'AWS_RETRY_MODE': 'no mode',
            'AWS_MAX_ATTEMPTS': 'x', 'AWS_USE_DUALSTACK_ENDPOINT': 'true',
            'AWS_USE_FIPS_ENDPOINT': 'true',
            'AWS_S3_US_EAST_1_REGIONAL_ENDPOINT': 'no such value',
            'AWS_REQUEST_CHECKSUM_CALCULATION': 'no such value'}.items():
        monkeypatch.setenv(name, value)
    if request.param == 'broken':
        for name in ('AWS_CONFIG_FILE', 'AWS_SHARED_CREDENTIALS_FILE'):
            monkeypatch.setenv(name, str(home / '.aws' / 'config'))


def test_profiles_and_files_of_the_environment(server, conf, environment):
    """AWS_PROFILE, or a broken file in ~/.aws, kept all from being read."""
    port = server.server_address[1]
    bucket = s3.S3(object_location.parse(
        's3://images/glance', f'http://127.0.0.1:{port}'), conf)
    try:
        assert b''.join(bucket.get('key', 0, len(DATA))) == DATA
    finally:
        bucket.close()
    signed, = server.authorizations
    assert 'Credential=ours/' in signed and '/us-east-1/s3/' in signed


def test_amazon_is_meant_if_there_is_no_endpoint(conf, environment):
    bucket = s3.S3(object_location.parse('s3://images/glance'), conf)
    assert bucket._client.meta.endpoint_url.endswith('.amazonaws.com')
    assert 'dualstack' not in bucket._client.meta.endpoint_url
    bucket.close()
