# SPDX-License-Identifier: Apache-2.0

"""The wire format: what a peer may not say."""

import dataclasses

import pytest

from glance_dedup.client import wire

HEADER = wire.RecipeHeader(4096, 10000, 0, 1, 'sha256', bytes(16), 'fixed')


class Bad(Exception):
    """What unpacking raises here."""


def test_header_there_and_back():
    assert wire.RecipeHeader.unpack(HEADER.pack(), Bad) == HEADER


@pytest.mark.parametrize('name', ['', 'sha\0256', 'sha 256', '\x7f'])
def test_header_without_a_fingerprint(name):
    header = dataclasses.replace(HEADER, fingerprint=name)
    with pytest.raises(Bad, match='names no fingerprint'):
        wire.RecipeHeader.unpack(header.pack(), Bad)
