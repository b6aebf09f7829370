# SPDX-License-Identifier: Apache-2.0

"""The options of our stores in a ``glance-api.conf``, to judge them.

Glance reads them through glance_store, which needs a Glance. A *store* is a
backend that ``enabled_backends`` gives the type ``dedup``. What it does not
set, it has from ``[backend_defaults]``.
"""

from collections.abc import Iterator
import difflib
import glob
import os
from typing import Any

from oslo_config import cfg

from glance_dedup.base import locations
from glance_dedup.driver import store_opts

_DEFAULTS = 'backend_defaults'
_PREFIX = 'dedup_store_'


class Options:
    """The options of one file, and of the directory that belongs to it.

    :raises cfg.Error: if the file is missing, or malformed
    """

    def __init__(self, path: str) -> None:
        self._conf = conf = cfg.ConfigOpts()
        conf.register_opt(cfg.DictOpt('enabled_backends', default={}))
        conf(['--config-file', path], project='glance', prog='glance-api')
        self.stores = [name for name, kind in conf.enabled_backends.items()
                       if kind == locations.SCHEME]
        """Names of the stores, in the order of the file."""
        for group in (_DEFAULTS, *self.stores):
            conf.register_opts(store_opts.dedup_opts, group=group)

    def _written(self) -> Iterator[tuple[str, str, str]]:
        """The store's options that are written: file, group and name."""
        paths = [*self._conf.config_file]
        for directory in self._conf.config_dir or ():
            paths += sorted(glob.glob(os.path.join(directory, '*.conf')))
        for path in paths:
            sections: dict[str, dict[str, list[str]]] = {}
            cfg.ConfigParser(path, sections).parse()
            for group, options in sections.items():
                for name in options:
                    plain = name.replace('-', '_')
                    if plain.startswith(_PREFIX):
                        yield path, group, plain

    def value(self, store: str, name: str) -> Any:
        """The value that a store has.

        :raises ValueError: if it is invalid
        """
        for group in (store, _DEFAULTS):
            where = self._conf.get_location(name, group)
            if where is not None and where.location.is_user_controlled:
                return self._conf[group][name]
        return self._conf[store][name]

    def stores_at(self, path: str) -> list[str]:
        """The stores whose repository lies at a path."""
        return [store for store in self.stores if os.path.realpath(
            self.value(store, f'{_PREFIX}datadir')) == os.path.realpath(path)]

    def invalid(self) -> list[str]:
        """A sentence for each value that the store would refuse."""
        found = []
        for group in (_DEFAULTS, *self.stores):
            for option in store_opts.dedup_opts:
                try:
                    self._conf[group][option.dest]
                except (cfg.Error, ValueError) as e:
                    found.append(f'[{group}] {option.dest}: {e}. Correct '
                                 'it before you restart glance-api.')
        return found

    def unknown(self) -> list[str]:
        """A sentence for each option that Glance would ignore."""
        known = [option.dest for option in store_opts.dedup_opts]
        found = []
        for path, group, name in self._written():
            if group not in (_DEFAULTS, *self.stores):
                found.append(
                    f'{path}: [{group}] {name} is ignored, for [DEFAULT] '
                    f'enabled_backends has no store {group} of the type '
                    f'{locations.SCHEME}. Remove it, or add the store.')
            elif name not in known:
                near = difflib.get_close_matches(name, known, 1)
                found.append(
                    f'{path}: there is no option {name} in [{group}], and it '
                    'is ignored. Remove it'
                    + (f', or write {near[0]}.' if near else '.'))
        return found
