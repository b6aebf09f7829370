# SPDX-License-Identifier: Apache-2.0

"""Compare options with what was settled when the repository was created."""

from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

from glance_dedup.driver import opts
from glance_dedup.repository import parameters as parameters_module


def differences(option: Callable[[str], Any], path: str,
                parameters: parameters_module.Parameters, group_access: bool
                ) -> Iterator[str]:
    """Yield a sentence for each option with which a store does not start.

    :param option: returns the value of an option, whose name has no prefix;
        None if it is not set
    :param path: the repository's
    :param group_access: whether its directory lets its group in
    """
    for name in opts.CREATION_OPTIONS:
        chosen = option(name)
        if name == 'cutting':
            chosen = parameters_module.full_cutting(chosen)
        found = getattr(parameters, name)
        if chosen is not None and chosen != found:
            yield (f'dedup_store_{name} is {chosen}, but the repository in '
                   f'{path} was created with {found}. Unset the option, or '
                   'use another directory.')
    shared = option('group_access')
    if shared is not None and shared != group_access:
        yield (f'dedup_store_group_access is {shared}, but the directory '
               f'{path} says {group_access}. Unset the option, or use '
               'another directory.')
