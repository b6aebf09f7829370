# SPDX-License-Identifier: Apache-2.0

"""The options that are settled when a store's repository is created."""

from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

from glance_dedup.driver import opts
from glance_dedup.repository import parameters as parameters_module


def chosen(option: Callable[[str], Any]) -> dict[str, Any]:
    """Return the parameters that options choose for a new repository.

    :param option: returns the value of an option, whose name has no prefix;
        None if it is not set
    """
    return {name: value for name in opts.CREATION_OPTIONS
            if (value := option(name)) is not None}


def differences(option: Callable[[str], Any], path: str,
                parameters: parameters_module.Parameters, group_access: bool
                ) -> Iterator[str]:
    """Yield a sentence for each option with which a store does not start.

    :param option: as for :func:`chosen`
    :param path: the repository's
    :param group_access: whether its directory lets its group in
    """
    for name, value in chosen(option).items():
        if name == 'cutting':
            value = parameters_module.full_cutting(value)
        found = getattr(parameters, name)
        if value != found:
            yield (f'dedup_store_{name} is {value}, but the repository in '
                   f'{path} was created with {found}. Unset the option, or '
                   'use another directory.')
    shared = option('group_access')
    if shared is not None and shared != group_access:
        yield (f'dedup_store_group_access is {shared}, but the directory '
               f'{path} says {group_access}. Unset the option, or use '
               'another directory.')
