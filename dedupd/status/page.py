# SPDX-License-Identifier: Apache-2.0

"""The status page at ``GET /``: one document without outside resources.

It is HTML with its style and its script inside. The script requests JSON from
the same server. The policy in its headers lets the browser run exactly this
script, and load nothing from elsewhere.
"""

import base64
import functools
import hashlib
from importlib import resources
import re

CONTENT_TYPE = 'text/html; charset=utf-8'

_INLINE = re.compile(rb'<(script|style)>(.*?)</\1>', re.DOTALL)


@functools.cache
def content() -> bytes:
    """The page, with its style and script inserted."""
    files = resources.files('dedupd.status').joinpath('page')
    page = files.joinpath('index.html').read_bytes()
    for reference, name, kind in (
            (b'<link rel="stylesheet" href="style.css">', 'style.css',
             b'style'),
            (b'<script src="script.js"></script>', 'script.js', b'script')):
        text = files.joinpath(name).read_bytes()
        page = page.replace(
            reference, b'<%b>%b</%b>' % (kind, text, kind))
    return page


@functools.cache
def headers() -> dict[str, str]:
    """The headers of its response, besides Content-Type and -Length.

    They allow the inline script and style by their hashes, so an injected
    script, style or attribute does nothing.
    """
    sources: dict[str, list[str]] = {'script': [], 'style': []}
    for kind, text in _INLINE.findall(content()):
        digest = base64.b64encode(hashlib.sha256(text).digest()).decode()
        sources[kind.decode()].append(f"'sha256-{digest}'")
    return {
        'Content-Security-Policy': '; '.join((
            "default-src 'none'",
            f"script-src {' '.join(sources['script'])}",
            f"style-src {' '.join(sources['style'])}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'")),
        'X-Content-Type-Options': 'nosniff',
        'Referrer-Policy': 'no-referrer',
        'Cache-Control': 'no-cache',
    }
