# SPDX-License-Identifier: Apache-2.0

"""The table of tasks, and the modules that a daemon loads for them."""

import importlib.util
import json
import pathlib
import subprocess
import sys

from tests import test_layers

#: Modules that the daemon imports when it starts, if an option says so.
BY_OPTION = {'dedupd.endpoints.messaging', 'dedupd.http.tracing',
             'dedupd.rpc', 'dedupd.rpc.notifications',
             'dedupd.sync.image_names', 'dedupd.sync.replicator'}
#: Clients of object stores, whose libraries take a second and 28 MiB.
OBJECT_STORES = {'glance_dedup.objects.s3', 'glance_dedup.objects.swift'}


def is_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:     # the name of a module's attribute
        return False


def test_a_daemon_loads_all_modules_of_its_tasks():
    """No module that it has imports another one later."""
    done = subprocess.run([sys.executable, '-c', (
        'import json, sys; from dedupd import daemon; '
        'from dedupd.tasks import registry; registry.load(); '
        'print(json.dumps({name: module.__file__ for name, module in '
        'sys.modules.items() if name.split(".")[0] in '
        '("dedupd", "glance_dedup")}))')],
        check=True, capture_output=True, timeout=60)
    loaded = json.loads(done.stdout)
    assert 'dedupd.tasks.merger' in loaded
    imported = {
        name for module, path in loaded.items() if path.endswith('.py')
        for name in test_layers.imports_of(
            module, pathlib.Path(path).read_text())}
    missing = {name for name in imported - set(loaded) if is_module(name)}
    assert missing <= BY_OPTION | OBJECT_STORES
