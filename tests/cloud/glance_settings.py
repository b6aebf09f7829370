# SPDX-License-Identifier: Apache-2.0
"""Settings of Glance, as users give them to ``tools/cloud up --glance``.

A setting is ``SECTION.OPTION=VALUE``. The section may be left out if only one
has the option; stores come first. Glance, its libraries and the stores define
the options and their values.
"""

import contextlib
import difflib
from importlib import metadata
import warnings

from oslo_config import cfg

from tests.cloud import cloud_service

#: Namespaces of Glance's options, apart from its stores.
NAMESPACES = (
    'glance', 'glance.api', 'keystonemiddleware.auth_token',
    'oslo.concurrency', 'oslo.db', 'oslo.limit', 'oslo.log', 'oslo.messaging',
    'oslo.middleware', 'oslo.policy', 'oslo.reports')
#: Stores of the type file that every Glance has.
INTERNAL = ('os_glance_staging_store', 'os_glance_tasks_store')


def parse(words, stores):
    """Return settings by section and option, in the given order.

    :param words: of the form ``[SECTION.]OPTION=VALUE``
    :param stores: Glance's stores by name, with their types
    :raises CloudError: if Glance and its stores do not know an option, or an
        option does not take its value
    """
    known = _Known(stores)
    found = {}
    for word in words:
        name, equals, value = word.partition('=')
        if not equals or not name:
            raise cloud_service.CloudError(
                f'--glance {word} sets nothing.\nWhat to do: write '
                'SECTION.OPTION=VALUE, as in dedup.dedup_store_codec=zstd.')
        section, option = known.find(name)
        known.check(section, option, value)
        found.setdefault(section, {})[option] = value
    return found


def _load(group, names):
    """Return the objects of these entry points, by name."""
    with warnings.catch_warnings():
        # Eventlet warns, and Glance still imports it.
        warnings.simplefilter('ignore')
        return {name: entry.load() for name in names
                for entry in metadata.entry_points(group=group, name=name)}


class _Known:
    """All options of Glance with these stores."""

    def __init__(self, stores):
        self._stores = list(stores)
        self._conf = cfg.ConfigOpts()
        self._names = {}
        types = {**dict.fromkeys(INTERNAL, 'file'),
                 **{name: one['type'] for name, one in stores.items()}}
        drivers = _load('glance_store.drivers', {*types.values()})
        for name, kind in types.items():
            self._add(name, drivers[kind].OPTIONS)
        for list_opts in _load('oslo.config.opts', NAMESPACES).values():
            for group, options in list_opts():
                self._add(str(getattr(group, 'name', group or 'DEFAULT')),
                          options)

    def _add(self, section, options):
        for option in options:
            # Some are listed twice, and differ in their help.
            with contextlib.suppress(cfg.DuplicateOptError):
                self._conf.register_opt(
                    option, None if section == 'DEFAULT' else section)
            self._names.setdefault(section, set()).add(option.dest)

    def find(self, name):
        """Return the section and the option that a name means."""
        section, dot, option = name.rpartition('.')
        if dot:
            if section not in self._names:
                raise self._unknown(
                    f'Glance has no section [{section}]', section, self._names)
            if option not in self._names[section]:
                raise self._unknown(
                    f'The section [{section}] of Glance has no option '
                    f'{option}', option, self._names[section])
            return section, option
        sections = [one for one in self._names if option in self._names[one]]
        of_stores = [one for one in sections if one in self._stores]
        sections = of_stores or sections
        if not sections:
            raise self._unknown(
                f'Neither Glance nor a store has an option {option}', option,
                set().union(*self._names.values()))
        if len(sections) > 1:
            raise cloud_service.CloudError(
                f'Several sections of Glance have an option {option}.\n'
                'What to do: write which one: '
                + ' or '.join(f'{one}.{option}' for one in sections) + '.')
        return sections[0], option

    @staticmethod
    def _unknown(what, name, known):
        near = difflib.get_close_matches(name, known, 3)
        return cloud_service.CloudError(f'{what}.\nWhat to do: ' + (
            f'write {" or ".join(near)}, if you meant that.' if near else
            'look it up in the documentation of Glance, or of the store.'))

    def check(self, section, option, value):
        """Check the option's value.

        :raises CloudError: if the option does not take the value
        """
        try:
            self._conf.set_override(
                option, value, None if section == 'DEFAULT' else section)
        except (ValueError, TypeError) as exc:
            raise cloud_service.CloudError(
                f'Glance cannot have {section}.{option}={value}: {exc}.\n'
                'What to do: give it another value.') from exc
