# SPDX-License-Identifier: Apache-2.0

"""Runs the commands and Glance's driver of the program on ``PYTHONPATH``.

``test_old_program`` starts it in an older program's tree, so it may import of
this project only what that program has. Standard input is a JSON object:
``options`` of every command, the ``commands``, and the repository as
``datadir``, where the driver is wanted. The last line of standard output is
one: ``package``, where the program lies; of each command ``status`` and
``words``; ``driver``, what the driver raised, in words.
"""

import contextlib
import io
import json
import sys

import glance_store
from glance_store import exceptions
from glance_store import multi_backend
from oslo_config import cfg

import glance_dedup
from glance_dedup.cli import main


def run(arguments):
    out = io.TextIOWrapper(io.BytesIO())
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main.main(arguments)
    return {'status': status, 'words': err.getvalue()}


def open_by_driver(datadir):
    conf = cfg.CONF
    conf.register_opt(cfg.DictOpt('enabled_backends'))
    conf([], default_config_files=[])
    conf.set_override('enabled_backends', {'one': 'dedup'})
    glance_store.register_store_opts(conf)
    conf.set_override('default_backend', 'one', 'glance_store')
    conf.set_override('dedup_store_datadir', datadir, 'one')
    glance_store.create_multi_stores(conf)
    store = multi_backend.get_store_from_store_identifier('one')
    try:
        store.configure_add()
    except exceptions.BadStoreConfiguration as e:
        return str(e)
    return None


def program():
    asked = json.load(sys.stdin)
    found = {
        'package': glance_dedup.__file__,
        'commands': [run([*asked['options'], *command.split()])
                     for command in asked['commands']]}
    if 'datadir' in asked:
        found['driver'] = open_by_driver(asked['datadir'])
    print()
    print(json.dumps(found))


if __name__ == '__main__':
    program()
