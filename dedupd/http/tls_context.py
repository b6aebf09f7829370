# SPDX-License-Identifier: Apache-2.0

"""The SSLContext of the listener: its certificate, and whose it accepts.

The files are read again when one of them has changed, because the programs
that renew revocation lists send no notification. A certificate is judged when
its connection begins, by the authorities and the lists of that moment. Their
fingerprint, ``trust``, goes with the connection. At each request it is
compared with the current one.
"""

from collections.abc import Iterator
import contextlib
import hashlib
import os
import re
import ssl
from typing import Any

from oslo_log import log

LOG = log.getLogger(__name__)

_PEM = re.compile(rb'-----BEGIN ([A-Z0-9 ]+)-----')
_CRL = b'X509 CRL'


class TLSContext:
    """The listener's context, by the files of the options.

    Used in the event loop's thread.

    :param options: the group ``[dedupd]``
    :raises ValueError: if there is no certificate, or a file is invalid
    :raises OSError: if a file cannot be read, or is invalid
    """

    def __init__(self, options: Any) -> None:
        self._options = options
        self.load()

    def load(self) -> None:
        """Read the files; if one is invalid, everything stays as it was.

        :raises: the errors of the class
        """
        self._seen = self._look()
        self._context, self._trust = _read(self._options)

    def current(self) -> tuple[ssl.SSLContext, bytes]:
        """The context for a new connection, and the current ``trust``."""
        if self._look() != self._seen:
            LOG.info('A file of certificates has changed.')
            try:
                self.load()
            except (OSError, ValueError) as e:
                LOG.error('The certificates stay as they were: %s', e)
        return self._context, self._trust

    def _look(self) -> list[tuple[int, ...] | None]:
        """Return a value that changes when a file does."""
        options = self._options
        return [_stamp(path) for path in (
            options.tls_cert, options.tls_key, options.tls_client_ca,
            options.tls_client_crl)]


def _stamp(path: str | None) -> tuple[int, ...] | None:
    try:
        stat = os.stat(path or '')
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _read(options: Any) -> tuple[ssl.SSLContext, bytes]:
    if not options.tls_cert:
        raise ValueError('listen needs tls_cert')
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    with _naming(options.tls_cert, options.tls_key):
        context.load_cert_chain(options.tls_cert, options.tls_key)
    trust = hashlib.sha256()
    if options.tls_client_ca:
        found = _load(context, options.tls_client_ca, trust)
        context.verify_mode = ssl.CERT_OPTIONAL
        if options.tls_client_crl:
            # A certificate in that file would become an authority.
            if _load(context, options.tls_client_crl, trust) != {_CRL}:
                raise ValueError(f'{options.tls_client_crl} has something '
                                 'else than revocation lists')
            found |= {_CRL}
        if _CRL in found:
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_CHAIN
    elif options.tls_client_crl:
        raise ValueError('tls_client_crl needs tls_client_ca')
    return context, trust.digest()


def _load(context: ssl.SSLContext, path: str, trust: Any) -> set[bytes]:
    """Load a file of authorities or lists; return the kinds of its parts."""
    with open(path, 'rb') as file:
        data = file.read()
    with _naming(path):
        context.load_verify_locations(path)
    trust.update(len(data).to_bytes(8, 'big') + data)
    return set(_PEM.findall(data))


@contextlib.contextmanager
def _naming(*paths: str | None) -> Iterator[None]:
    """Make OpenSSL's errors name the files."""
    try:
        yield
    except OSError as e:
        raise OSError(
            f'{", ".join(filter(None, paths))}: {e.strerror or e}') from e
