# SPDX-License-Identifier: Apache-2.0

"""S3, as Amazon, Ceph's gateway, Swift and others speak it, by botocore."""

import base64
from collections.abc import Iterator
import contextlib
import functools
import http.client
import os
from typing import Any
from typing import BinaryIO

from botocore import config as botocore_config
from botocore import configprovider
from botocore import exceptions as botocore_exceptions
from botocore import loaders
from botocore import session
from oslo_config import cfg
from urllib3 import exceptions as urllib3_exceptions

from glance_dedup.base import exceptions
from glance_dedup.base import printable
from glance_dedup.objects import backend_base
from glance_dedup.objects import object_location

#: Keys that are requested at once.
PAGE = 1000
#: Connections that a client keeps.
CONNECTIONS = 16

_OPTIONS = [
    cfg.StrOpt('access_key', help='The id of the access key.'),
    cfg.StrOpt('secret_key', secret=True, help='The secret access key.'),
    cfg.StrOpt('session_token', secret=True,
               help='The token of temporary credentials.'),
]
_REFUSED = frozenset((
    'AccessDenied', 'AllAccessDisabled', 'ExpiredToken', 'InvalidAccessKeyId',
    'InvalidToken', 'RequestTimeTooSkewed', 'SignatureDoesNotMatch',
    'TokenRefreshRequired'))


class S3(backend_base.Backend):
    """A bucket."""

    def __init__(self, location: object_location.Location,
                 conf: cfg.ConfigOpts) -> None:
        """Connect to nothing yet.

        :param conf: the credentials
        :raises AccessDenied: there are none for S3
        """
        conf.register_opts(_OPTIONS, group='s3')
        if not conf.s3.access_key or not conf.s3.secret_key:
            raise exceptions.AccessDenied(
                'the file of credentials lacks access_key or secret_key in '
                '[s3]')
        self._bucket = location.container
        self._client: Any = _connect(location, conf,
                                     backend_base.ANSWER_TIMEOUT)
        # The timeout is the client's, and not a request's.
        self._sender: Any = _connect(location, conf, backend_base.PUT_TIMEOUT)

    def urls(self) -> Iterator[str]:
        yield self._client.meta.endpoint_url

    def put(self, key: str, file: BinaryIO, length: int, md5: bytes) -> None:
        with _errors():
            self._sender.put_object(
                Bucket=self._bucket, Key=key, Body=file, ContentLength=length,
                ContentMD5=base64.b64encode(md5).decode())

    def get(self, key: str, start: int, length: int) -> backend_base.Pieces:
        with _errors():
            answer = self._client.get_object(
                Bucket=self._bucket, Key=key,
                Range=f'bytes={start}-{start + length - 1}')
            with contextlib.closing(answer['Body']) as body:
                if answer['ResponseMetadata']['HTTPStatusCode'] != 206:
                    raise exceptions.UnavailableError(
                        'the server does not read ranges of objects')
                yield from backend_base.pieces(body._raw_stream)

    def size(self, key: str) -> int:
        try:
            with _errors():
                return self._client.head_object(
                    Bucket=self._bucket, Key=key)['ContentLength']
        except backend_base.RefusedError:
            # An answer to HEAD has no body, which would give the reason. That
            # to GET has one.
            with _errors():
                self._client.get_object(Bucket=self._bucket, Key=key,
                                        Range='bytes=0-0')['Body'].close()
            raise

    def keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        with _errors():
            for page in self._client.get_paginator('list_objects_v2').paginate(
                    Bucket=self._bucket, Prefix=prefix,
                    PaginationConfig={'PageSize': PAGE}):
                for one in page.get('Contents', ()):
                    yield one['Key'], one['Size']

    def delete(self, key: str) -> None:
        with _errors(), contextlib.suppress(backend_base.ObjectNotFound):
            self._client.delete_object(Bucket=self._bucket, Key=key)

    def close(self) -> None:
        self._client.close()
        self._sender.close()


def _connect(location: object_location.Location, conf: cfg.ConfigOpts,
             timeout: float) -> Any:
    """Return a client; it connects when it is used.

    :param timeout: seconds for an answer to begin
    """
    return _session().create_client(
        's3',
        endpoint_url=location.endpoint or None,
        region_name=location.region or 'us-east-1',
        verify=location.ca_file or None,
        aws_access_key_id=conf.s3.access_key,
        aws_secret_access_key=conf.s3.secret_key,
        aws_session_token=conf.s3.session_token,
        config=botocore_config.Config(
            connect_timeout=backend_base.TIMEOUT,
            read_timeout=timeout,
            max_pool_connections=CONNECTIONS,
            # The store repeats requests.
            retries={'total_max_attempts': 1},
            # AWS_ENDPOINT_URL is not ours.
            ignore_configured_endpoint_urls=True,
            # Servers other than Amazon's know no newer digest than MD5.
            request_checksum_calculation='when_required',
            response_checksum_validation='when_required',
            # A bucket's name in the host's needs a wildcard in DNS.
            s3={'addressing_style': 'path' if location.endpoint
                else 'auto'}))


@functools.cache
def _loader() -> loaders.Loader:
    """Return a loader of botocore's description of S3.

    It remembers the files that it has read, which saves the second client of a
    process a quarter of a second of a processor.
    """
    return loaders.Loader([loaders.Loader.BUILTIN_DATA_PATH],
                          include_default_search_paths=False)


def _session() -> session.Session:
    """Return a session that ignores the files and variables of other programs.

    All that it needs is in our own file and location. So no AWS_PROFILE and no
    file in ~/.aws counts: each variable has botocore's default, and the files
    are empty.
    """
    found = session.Session()
    found.register_component('data_loader', _loader())
    values = {name: default for name, (_, _, default, *_)
              in found.SESSION_VARIABLES.items()}
    values |= {'config_file': os.devnull, 'credentials_file': os.devnull}
    found.register_component('config_store', configprovider.ConfigValueStore({
        name: configprovider.ConstantProvider(value)
        for name, value in values.items()}))
    return found


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except botocore_exceptions.ClientError as e:
        raise _kind(e) from e
    except (botocore_exceptions.BotoCoreError,
            botocore_exceptions.HTTPClientError,
            urllib3_exceptions.HTTPError, http.client.HTTPException) as e:
        # Some of them quote the request's URL, which has no secret.
        raise exceptions.UnavailableError(
            printable.printable(str(e))[:200]) from e


def _kind(error: botocore_exceptions.ClientError
          ) -> exceptions.UnavailableError:
    """Return the meaning of an answer, in our words and the server's."""
    facts = error.response.get('Error', {})
    code = str(facts.get('Code', ''))
    status = error.response.get('ResponseMetadata', {}).get('HTTPStatusCode')
    text = printable.printable(
        f'{code}: {facts.get("Message", "")}')[:200]
    said = f'the server answered {status}, {text}'
    if code in ('NoSuchKey', '404', 'NotFound'):
        return backend_base.ObjectNotFound('there is no such object')
    if code in _REFUSED or status in (401, 403):
        return backend_base.RefusedError(said)
    return exceptions.UnavailableError(said)
