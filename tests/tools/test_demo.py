# SPDX-License-Identifier: Apache-2.0

"""tools/demo reports its figures."""

import importlib.util
import pathlib

import pytest

TOP = pathlib.Path(__file__).resolve().parents[2]
MIB = 1 << 20


@pytest.fixture(scope='module')
def demo():
    spec = importlib.util.spec_from_file_location(
        'demo', TOP / 'tools' / 'demo.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize('stored, back', (
    (181 * MIB, 0), (181 * MIB, -MIB), (181 * MIB, 50 * MIB)))
def test_nothing_came_back(demo, stored, back):
    with pytest.raises(demo.Failure, match='came back'):
        demo.require_returned(stored, back)


@pytest.mark.parametrize('stored, back', (
    (181 * MIB, 186 * MIB), (181 * MIB, 150 * MIB),
    (0, 0), (4096, -65536)))        # the catalog's log is larger
def test_enough_came_back(demo, stored, back):
    demo.require_returned(stored, back)
