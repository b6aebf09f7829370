# SPDX-License-Identifier: Apache-2.0

"""The expiry of the daemon's own certificates, for its status.

The daemon shows these certificates to others. Each status reads the files
again, because the programs that renew certificates do not notify the daemon.
"""

from typing import Any

from oslo_config import cfg

Fields = dict[str, Any]

# The most bytes of a file that are read. The own certificate comes first.
_MAX_SIZE = 1 << 20


def certificates(conf: cfg.ConfigOpts) -> dict[str, Fields]:
    """Return the certificates in use, by their options.

    Each has its ``path``, and the time when it ``expires`` in seconds since
    1970; None: the file cannot be read now.
    """
    used = {}
    if conf.dedupd.listen:
        used['[dedupd] tls_cert'] = conf.dedupd.tls_cert
    if conf.mode == 'cache':
        used['[cache] upstream_cert'] = conf.cache.upstream_cert
    if conf.replication.target_url:
        used['[replication] cert'] = conf.replication.cert
    return {option: {'path': path, 'expires': _expires(path)}
            for option, path in used.items() if path}


def _expires(path: str) -> int | None:
    """Return the time when the first certificate in a file expires."""
    # Imported only where there are certificates.
    from cryptography import x509

    try:
        with open(path, 'rb') as file:
            found = x509.load_pem_x509_certificate(file.read(_MAX_SIZE))
    except (OSError, ValueError):
        return None
    return int(found.not_valid_after_utc.timestamp())
