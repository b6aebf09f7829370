# SPDX-License-Identifier: Apache-2.0

"""Runs Glance's own functional tests, with the dedup store swapped in.

A program, because Glance's tests change the process they run in, and want a
working directory of their own::

    python -m tests.functional.glance_own dedup RESULTS [NAME...]

Each line of the file RESULTS is one test: a JSON list of its name, how it
ended, its seconds, whether it used one of the stores under test (not only the
staging area), and what went wrong.  The names are those of tests or of
modules; all functional tests without any.  With ``file`` instead of ``dedup``
the tests run as they are.
"""

import json
import os
import pathlib
import shutil
import sys
import time
import unittest

STORES = ('store1', 'store2', 'store3')
PACKAGE = 'glance.tests.functional'


def use_dedup(functional, CONF, glance_store):
    """Have the base class configure dedup stores instead of file stores."""
    def setup_stores(self):
        self.config(enabled_backends=dict.fromkeys(STORES, 'dedup'))
        reserved = functional.wsgi_app.RESERVED_STORES
        glance_store.register_store_opts(CONF, reserved_stores=reserved)
        self.config(default_backend='store1', group='glance_store')
        for name in STORES:
            self.config(dedup_store_datadir=self._store_dir(name),
                        dedup_store_filter_dir=self._store_dir('filters'),
                        dedup_store_filter_mib=1, group=name)
        for name in ('staging', 'tasks'):
            self.config(filesystem_store_datadir=self._store_dir(name),
                        group=f'os_glance_{name}_store')
        glance_store.create_multi_stores(CONF, reserved_stores=reserved)
        glance_store.verify_store()

    functional.SynchronousAPIBase.setup_stores = setup_stores

    # These methods look into, and break, the directory of a file store.
    def break_store(self, name):
        shutil.rmtree(self._store_dir(name))

    def has_image_data(self, name):
        images = os.path.join(self._store_dir(name), 'images')
        return bool(os.path.isdir(images) and os.listdir(images))

    from glance.tests.functional.v2 import test_parallel_store_import
    tests = test_parallel_store_import.TestParallelStoreImport
    tests._break_store = break_store
    tests._store_has_image_data = has_image_data


class Result(unittest.TestResult):
    """Writes each test's outcome as it ends."""

    def __init__(self, output):
        super().__init__()
        self.output = output
        self.touched = False

    def watch(self, store_class):
        for name in ('add', 'get', 'delete'):
            self._watch(store_class, name)

    def _watch(self, store_class, name):
        real = getattr(store_class, name)

        def call(store, *args, **kwargs):
            if store.backend_group in STORES:
                self.touched = True
            return real(store, *args, **kwargs)

        call.__name__ = name
        setattr(store_class, name, call)

    def startTest(self, test):
        self.begun = time.monotonic()
        self.touched = False
        self.outcome = 'ok'
        self.words = ''

    def _end(self, outcome, err, details):
        self.outcome = outcome
        if details:
            self.words = '\n'.join(
                content.as_text() for name, content in details.items()
                if 'traceback' in name or 'reason' in name)
        else:
            self.words = str(err)

    def addSuccess(self, test, details=None):
        pass

    def addError(self, test, err=None, details=None):
        self._end('error', err, details)

    def addFailure(self, test, err=None, details=None):
        self._end('failure', err, details)

    def addSkip(self, test, reason=None, details=None):
        self._end('skip', reason, details)

    def addExpectedFailure(self, test, err=None, details=None):
        self._end('ok', err, details)

    def addUnexpectedSuccess(self, test, details=None):
        self._end('failure', 'unexpected success', details)

    def stopTest(self, test):
        self.output.write(json.dumps([
            test.id(), self.outcome, round(time.monotonic() - self.begun, 3),
            self.touched, self.words[-3000:]]) + '\n')
        self.output.flush()


def all_modules(functional):
    """Return the modules of Glance's functional tests.

    The tests of the database and those of ``serial`` are not among them: they
    start daemons with a configuration of their own and wait minutes for them.
    """
    root = pathlib.Path(functional.__file__).parent
    return [f'{PACKAGE}.' + '.'.join(path.relative_to(root).with_suffix('')
                                     .parts)
            for path in sorted(root.rglob('test_*.py'))
            if not {'db', 'serial'} & set(path.relative_to(root).parts)]


def main(driver, results, *names):
    # Glance's tests copy files from the source tree that they expect here.
    import glance.tests
    etc = pathlib.Path(glance.tests.__file__).parent / 'etc'
    os.makedirs('glance/tests', exist_ok=True)
    os.symlink(etc, 'glance/tests/etc')

    import glance_store
    from glance_store._drivers import filesystem
    from oslo_config import cfg
    from oslo_db import options
    options.set_defaults(cfg.CONF)
    import glance.tests.functional as functional

    # A test that closes or redirects output does not cut this file off.
    with open(results, 'w') as output:
        result = Result(output)
        if driver == 'dedup':
            from glance_dedup.driver import dedup_store
            use_dedup(functional, cfg.CONF, glance_store)
            result.watch(dedup_store.Store)
        else:
            result.watch(filesystem.Store)
        suite = unittest.defaultTestLoader.loadTestsFromNames(
            names or all_modules(functional))
        suite.run(result)
        output.write('"done"\n')
    # Threads of Glance's may be left.
    sys.stdout.flush()
    os._exit(0)


if __name__ == '__main__':
    main(*sys.argv[1:])
