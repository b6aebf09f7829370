#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""The HTTP server's parts, in the test's own event loop."""

import asyncio
import contextlib
import socket
import types

from dedupd import http


def limits(**changed):
    return types.SimpleNamespace(**{
        'max_connections': 1000, 'header_timeout': 10, 'idle_timeout': 10,
        'write_timeout': 10, **changed})


@contextlib.asynccontextmanager
async def serving(path, router, **changed):
    """A server on a Unix socket."""
    server = http.Server(limits(**changed))
    server.add(http.Listener('unix', http.listen_unix(str(path), 0o600),
                             router, allowed=lambda uid: True))
    try:
        yield server
    finally:
        await server.stop(0)


# -- turns --------------------------------------------------------------------

def test_connections_that_wait_let_others_go_on(tmp_path):
    """One is accepted, then all others have their turn."""
    async def check():
        async with serving(tmp_path / 'socket', http.Router()) as server:
            with contextlib.ExitStack() as stack:
                for _ in range(200):
                    sock = stack.enter_context(socket.socket(socket.AF_UNIX))
                    sock.connect(str(tmp_path / 'socket'))
                steps = []
                while server.connections < 200:
                    before = server.connections
                    await asyncio.sleep(0)
                    steps.append(server.connections - before)
        assert max(steps) == 1

    asyncio.run(asyncio.wait_for(check(), 60))
