# SPDX-License-Identifier: Apache-2.0

"""Kinds of options that several groups have."""

from oslo_config import cfg
from oslo_config import types


class Matching(types.String):
    """Text that matches a pattern, and a sentence for text that does not.

    :param regex: matches valid text
    :param what: describes valid text, with an example
    """

    def __init__(self, regex: str, what: str) -> None:
        super().__init__(regex=regex)
        self._what = what

    def __call__(self, value: str) -> str:
        try:
            return super().__call__(value)
        except ValueError:
            raise ValueError(f'{value!r} is not {self._what}') from None


ADDRESS_PATTERN = r'(\[[0-9A-Fa-f:.]+\]|[^:\[\]\s]+):[0-9]{1,5}$'
ADDRESS = Matching(
    f'^{ADDRESS_PATTERN}',
    'a host and a port: for example 127.0.0.1:9393 or [::1]:9393')


def rate(name: str, default: float, help: str, related: str = '') -> cfg.Opt:
    """An option that limits the bytes to or from a disk or a network."""
    return cfg.FloatOpt(
        name, default=default, min=0, mutable=True,
        help=f"""{help}
Possible values:
    * 0: as fast as it goes
    * MiB
{_related(related)}
""")


def interval(name: str, default: int, help: str, related: str = ''
             ) -> cfg.Opt:
    """An option with the time between two runs of a task."""
    return cfg.IntOpt(
        name, default=default, min=0, mutable=True,
        help=f"""{help}
Possible values:
    * 0: only on request
    * Seconds
{_related(related)}
""")


def number(name: str, default: int, least: int, most: int, help: str,
           mutable: bool = True) -> cfg.Opt:
    """An option with a whole number."""
    return cfg.IntOpt(name, default=default, min=least, max=most,
                      mutable=mutable, help=help)


def text_list(name: str, help: str, item_type: types.String | None = None
              ) -> cfg.Opt:
    """An option with a list, which is empty unless it is set."""
    return cfg.ListOpt(name, item_type=item_type, default=[], mutable=True,
                       help=help)


def _related(name: str) -> str:
    return f'\nRelated options:\n    * ``{name}``\n' if name else ''
