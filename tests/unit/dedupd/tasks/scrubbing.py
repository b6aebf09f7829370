# SPDX-License-Identifier: Apache-2.0

"""Damage to a repository, and views of it, for the tests of scrubbing."""

import pytest

from dedupd.tasks import collector
from dedupd.tasks import scrubber
from glance_dedup.base import pacing
from glance_dedup.check import checker
from glance_dedup.check import files
from tests.support import repositories


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(files, 'PAUSE', 0)


def scrub(maintainer, full=True, **options):
    return scrubber.run_once(maintainer, pacing.Pace(), full=full, **options)


def collect(maintainer):
    return collector.run_once(maintainer, pacing.Pace(), live_share=0,
                              evacuate_share=0)


def place_of(path, address):
    """Return the file and offset of a block's first byte, without codec."""
    group, slot = address
    file = repositories.Group(path, group)
    _, _, segment, place = file.entry(slot)
    return file.path, segment + 32 + (place & 0xfffff)


def flip(file, at):
    with open(file, 'r+b') as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 0x40]))


def damage(path, address):
    flip(*place_of(path, address))


def state_of(path, address):
    return repositories.Group(path, address[0]).state(address[1])


def findings(path, severity=checker.DAMAGE):
    return [str(f) for f in checker.check(path).findings
            if f.severity == severity]
