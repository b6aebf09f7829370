# SPDX-License-Identifier: Apache-2.0
"""The state of a cloud, for the next process that continues with it.

One file, ``state.json``, replaced as a whole: ports, addresses, the processes
of each service, the compute hosts, whether there is a second site, whether
groups move to Swift, the preparations done, the stores of Glance, the services
that are wanted, and the one password.
"""

import contextlib
import json
import os
import pathlib
import secrets
import tempfile
import threading

from tests.cloud import live_process
from tests.support import ports

#: The password of all clouds of this checkout: their databases are kept.
_PASSWORD = (pathlib.Path(__file__).resolve().parents[2]
             / '.services/databases/password')


def _password():
    _PASSWORD.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile('w', dir=_PASSWORD.parent) as new:
        new.write(secrets.token_hex(8))
        new.flush()
        with contextlib.suppress(FileExistsError):
            os.link(new.name, _PASSWORD)
    return _PASSWORD.read_text()


class State:
    """The record of a cloud; each change is written at once.

    :param path: of the file, which is made if it is missing
    """

    def __init__(self, path):
        self._path = path
        self._lock = threading.Lock()
        self._all = {
            'password': _password(), 'ports': {}, 'addresses': {},
            'processes': {}, 'hosts': {}, 'site': False, 'swift': False,
            'prepared': [], 'started_with': {}, 'wanted': [], 'glance': None}
        if path.exists():
            self._all.update(json.loads(path.read_text()))
        else:
            with self._lock:
                self._save()

    def _save(self):
        new = self._path.with_suffix('.new')
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
                  'w') as f:
            json.dump(self._all, f, indent=1)
        new.replace(self._path)

    @property
    def password(self):
        return self._all['password']

    def port(self, name):
        with self._lock:
            if name not in self._all['ports']:
                self._all['ports'][name] = ports.free_port()
                self._save()
            return self._all['ports'][name]

    def address(self, name):
        """Return an address on the links to compute hosts."""
        with self._lock:
            addresses = self._all['addresses']
            while name not in addresses:
                address = live_process.free_address()
                if address not in addresses.values():
                    addresses[name] = address
                    self._save()
            return addresses[name]

    def processes(self, name):
        with self._lock:
            return [live_process.Process(*one)
                    for one in self._all['processes'].get(name, ())]

    def add_process(self, name, process):
        with self._lock:
            self._all['processes'].setdefault(name, []).append(
                [process.pid, process.started])
            self._save()

    def forget_processes(self, name, *processes):
        """Forget the given processes, or all of the service."""
        gone = [[process.pid, process.started] for process in processes]
        with self._lock:
            self._all['processes'][name] = [
                one for one in self._all['processes'].get(name, ())
                if gone and one not in gone]
            self._save()

    def prepared(self, name):
        return name in self._all['prepared']

    def set_prepared(self, name):
        with self._lock:
            self._all['prepared'].append(name)
            self._save()

    @property
    def is_used(self):
        """Return whether anything was ever started."""
        return bool(self._all['prepared'])

    def started_with(self, name):
        """Return the settings of a service at its last start."""
        return self._all['started_with'].get(name)

    def set_started_with(self, name, told):
        with self._lock:
            self._all['started_with'][name] = told
            self._save()

    @property
    def wanted(self):
        return self._all['wanted']

    def want(self, names):
        with self._lock:
            self._all['wanted'] = sorted({*self._all['wanted'], *names})
            self._save()

    @property
    def hosts(self):
        """Return the compute hosts, and whether each has a cache."""
        return self._all['hosts']

    def set_hosts(self, hosts):
        with self._lock:
            self._all['hosts'] = hosts
            self._save()

    @property
    def site(self):
        """Return whether there is a second site."""
        return self._all['site']

    def set_site(self):
        with self._lock:
            self._all['site'] = True
            self._save()

    @property
    def swift(self):
        """Return whether groups of the repository move to Swift."""
        return self._all['swift']

    def set_swift(self):
        with self._lock:
            self._all['swift'] = True
            self._save()

    @property
    def glance(self):
        """Return stores, default store, options, settings; None at first."""
        return self._all['glance']

    def set_glance(self, configuration):
        with self._lock:
            self._all['glance'] = configuration
            self._save()
