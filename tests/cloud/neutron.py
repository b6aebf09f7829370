# SPDX-License-Identifier: Apache-2.0
"""A stub of Neutron: a network service that has no networks.

It is the one stub of the cloud. An image store does not use networks, and
servers are created with none; but Nova still requests the ports of each
server, and the extensions, from Neutron. The answer to each such request is an
empty list; any other request is an error, which shows if Nova one day needs
more.
"""

import http.server
import json
import re
import sys

from tests.cloud import cloud_service

#: Collections that Nova lists for servers without a network.
EMPTY = re.compile(
    r'/v2\.0/(extensions|floatingips|networks|ports|subnets'
    r'|security-groups)(\.json)?(\?|$)')


class Neutron(cloud_service.Service):
    """The stub as a process."""

    name = 'neutron'
    title = 'Neutron (stub)'
    catalogue = ('network', '')
    user = 'neutron'

    def launch(self):
        self.spawn([sys.executable, '-m', 'tests.cloud.neutron',
                    self.cloud.address, self.port], cwd=cloud_service.TOP)

    def answers(self):
        return cloud_service.glance_server.Client(self.url,
                                                  timeout=30).request(
            'GET', '/', expect=(200,))


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with empty lists, and otherwise with an error."""

    protocol_version = 'HTTP/1.1'
    # A client that keeps its connection open does not hold a thread for ever.
    timeout = 60

    def do_GET(self):
        collection = EMPTY.match(self.path)
        if collection:
            self._answer(200, {collection[1].replace('-', '_'): []})
        elif self.path.rstrip('/') in ('', '/v2.0'):
            link = {'rel': 'self',
                    'href': f'http://{self.headers["Host"]}/v2.0/'}
            self._answer(200, {'versions': [
                {'id': 'v2.0', 'status': 'CURRENT', 'links': [link]}]})
        else:
            self._refuse()

    def _refuse(self):
        # The body is not read.
        self.close_connection = True
        self._answer(501, {'NeutronError': {
            'type': 'NotImplementedError', 'detail': '',
            'message': f'this stub has no {self.command} {self.path}'}})

    do_POST = do_PUT = do_DELETE = _refuse

    def _answer(self, status, document):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header('Content-Type', 'application/json')
        self.send_header('Content-Length', str(len(body)))
        if self.close_connection:
            self.send_header('Connection', 'close')
        self.end_headers()
        self.wfile.write(body)


if __name__ == '__main__':
    http.server.ThreadingHTTPServer(
        (sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
