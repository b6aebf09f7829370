# SPDX-License-Identifier: Apache-2.0

"""Prints the public names of both packages that have no docstring.

One a line, ``module: name``. It imports every module, and with them libraries
that change the process, so tests/test_style.py runs it as a program.
"""

import ast
from collections.abc import Iterator
import importlib
import inspect
import pathlib
from typing import Any

TOP = pathlib.Path(__file__).resolve().parents[2]


def undocumented(body: list[ast.stmt], owner: Any,
                 prefix: str = '') -> Iterator[str]:
    """Yield public functions, classes and methods without a docstring.

    An overriding method has the docstring of the method that it overrides, and
    a property's setter that of the property. A class needs its own: neither
    that of its base nor the text of a dataclass counts.

    :param owner: the module or class whose body it is
    """
    for node in body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef,
                                 ast.ClassDef)) or node.name[0] == '_':
            continue
        found = getattr(owner, node.name)
        is_class = isinstance(node, ast.ClassDef)
        if ast.get_docstring(node) is None and (
                is_class or inspect.getdoc(found) is None):
            yield prefix + node.name
        if is_class:
            yield from undocumented(node.body, found, f'{prefix}{node.name}.')


def main() -> None:
    """Print the names."""
    for package in ('glance_dedup', 'dedupd'):
        for path in sorted((TOP / package).rglob('*.py')):
            name = '.'.join(path.relative_to(TOP).with_suffix('').parts)
            name = name.removesuffix('.__init__')
            for found in undocumented(ast.parse(path.read_text()).body,
                                      importlib.import_module(name)):
                print(f'{name}: {found}')


if __name__ == '__main__':
    main()
