# SPDX-License-Identifier: Apache-2.0

"""A proxy before an object store that breaks requests as tests plan."""

import contextlib
import http.client
from http import server
import threading
import time

#: Maximum seconds for an upstream server.
LIMIT = 60


class Faults:
    """The planned faults of the next requests, in order.

    Each is ``None`` (nothing), a status to answer with instead, or the name of
    a method of :class:`_Handler`.

    :ivar delay: seconds by which each request is delayed
    :ivar seen: methods and paths of the requests that came
    :ivar most: how many GETs were under way at once at most
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._next = []
        self.always = None
        self.delay = 0
        self.seen = []
        self.most = self._under_way = 0
        self._go_on = threading.Event()
        self._go_on.set()

    def reset(self):
        """Clear the plan and the record."""
        self.plan()
        self.always = None
        self.delay = 0
        self.seen.clear()
        self.most = 0

    def plan(self, *faults, methods=('GET', 'PUT', 'HEAD', 'DELETE')):
        """Set the faults of the next requests that have these methods."""
        with self._lock:
            self._next = list(faults)
            self._methods = methods

    @contextlib.contextmanager
    def held(self):
        """Hold incoming requests until the block ends, or for a minute."""
        self._go_on.clear()
        try:
            yield
        finally:
            self._go_on.set()

    def wait(self):
        """Wait until requests are not held any more."""
        self._go_on.wait(LIMIT)

    def take(self, method, path):
        with self._lock:
            self.seen.append((method, path))
            if self.always is not None:
                return self.always
            # A login is no request for an object.
            if (not self._next or method not in self._methods
                    or path.startswith('/auth/')):
                return None
            return self._next.pop(0)

    @contextlib.contextmanager
    def under_way(self, method):
        """Count a request while it is served."""
        with self._lock:
            self._under_way += method == 'GET'
            self.most = max(self.most, self._under_way)
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= method == 'GET'


class _Handler(server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *args):
        """Log nothing."""

    def relay(self):
        body = None
        if 'content-length' in self.headers:
            body = self.rfile.read(int(self.headers['content-length']))
        elif 'chunked' in self.headers.get('transfer-encoding', ''):
            body = b''
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        with self.server.faults.under_way(self.command):
            self.serve(body)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = relay  # noqa: N815

    def serve(self, body):
        fault = self.server.faults.take(self.command, self.path)
        time.sleep(self.server.faults.delay)
        self.server.faults.wait()
        if isinstance(fault, int):
            self.close_connection = True
            self.answer(fault, [], b'')
        elif fault is None:
            self.answer(*self.ask(body))
        else:
            getattr(self, fault)(body)

    def ask(self, body):
        """Return the server's answer."""
        headers = {name: value for name, value in self.headers.items()
                   if name.lower() not in ('transfer-encoding', 'expect')}
        if body is not None:
            headers['Content-Length'] = str(len(body))
        with contextlib.closing(http.client.HTTPConnection(
                '127.0.0.1', self.server.port, timeout=LIMIT)) as connection:
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()

    def answer(self, status, headers, body, send=None):
        self.send_response_only(status)
        length = None
        for name, value in headers:
            if name.lower() == 'content-length':
                length = value
            elif name.lower() not in ('transfer-encoding', 'connection'):
                self.send_header(name, value)
        if self.command != 'HEAD' or length is None:
            length = len(body)
        self.send_header('Content-Length', length)
        if self.close_connection:
            # Otherwise a client may send its next request before it sees the
            # end.
            self.send_header('Connection', 'close')
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(body if send is None else send)

    # -- faults --

    def truncate(self, body):
        """Send half of the answer's body, and then the end."""
        status, headers, found = self.ask(body)
        self.close_connection = True
        self.answer(status, headers, found, found[:len(found) // 2])

    def shorten(self, body):
        """Send half of the answer's body, as if it were all."""
        status, headers, found = self.ask(body)
        self.answer(status, headers, found[:len(found) // 2])

    def lengthen(self, body):
        """Send more than the answer's body."""
        status, headers, found = self.ask(body)
        self.answer(status, headers, found + found)

    def flip(self, body):
        """Change one byte of the answer."""
        status, headers, found = self.ask(body)
        if found:
            found = bytes((found[0] ^ 1, *found[1:]))
        self.answer(status, headers, found)

    def spoil(self, body):
        """Change one byte on the way to the server."""
        self.answer(*self.ask(bytes((body[0] ^ 1, *body[1:]))))

    def repeat(self, body):
        """Send the request twice, and return the second answer."""
        self.ask(body)
        self.answer(*self.ask(body))

    def forget(self, body):
        """Send the request on, and close the connection without an answer."""
        self.ask(body)
        self.close_connection = True

    def hang(self, body):
        """Send nothing until the client leaves."""
        self.close_connection = True
        self.connection.settimeout(LIMIT)
        with contextlib.suppress(OSError):
            self.connection.recv(1)

    def trickle(self, body):
        """Send an answer byte by byte, until the client leaves."""
        status, headers, found = self.ask(body)
        self.close_connection = True
        self.answer(status, headers, found, b'')
        with contextlib.suppress(OSError):
            for byte in found:
                self.wfile.write(bytes((byte,)))
                time.sleep(0.05)

    def expire(self, body):
        """Answer as S3 does when temporary credentials have ended."""
        self.close_connection = True
        self.answer(400, [('Content-Type', 'application/xml')],
                    b'<?xml version="1.0"?><Error><Code>ExpiredToken</Code>'
                    b'<Message>The provided token has expired.</Message>'
                    b'</Error>')

    def whole(self, body):
        """Answer with the range as if it were the whole object."""
        _, headers, found = self.ask(body)
        self.answer(200, headers, found)


class FaultyProxy(server.ThreadingHTTPServer):
    """A proxy on loopback that passes requests to a port.

    :ivar faults: the faults of the next requests
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, port):
        self.port = port
        self.faults = Faults()
        super().__init__(('127.0.0.1', 0), _Handler)
        self.url = f'http://127.0.0.1:{self.server_port}'

    def handle_error(self, request, client_address):
        """Ignore the error: a client that left causes it."""

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True,
                         kwargs={'poll_interval': 0.05}).start()
        return self

    def __exit__(self, *exc_info):
        self.shutdown()
        self.server_close()
