# SPDX-License-Identifier: Apache-2.0

"""The benchmarks of papers are programs; tests use them as modules."""

import importlib
import pathlib
import sys

import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[2] / 'benchmarks' / 'papers'


def fixture(name):
    """Return a fixture that imports a benchmark."""
    @pytest.fixture(scope='module', name=name)
    def load():
        sys.path.append(str(FOLDER))
        try:
            return importlib.import_module(name)
        finally:
            sys.path.remove(str(FOLDER))
    return load
