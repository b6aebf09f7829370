# SPDX-License-Identifier: Apache-2.0

"""The sums of many hosts are right, as is the page that shows them."""

import subprocess
import sys
import textwrap

import pytest

from tests.benchmarks import papers
from tests.support import documents

BENCHMARK = papers.FOLDER / 'scale.py'
PAGE = documents.SOURCE / 'contributor' / 'scale.rst'


def printed(*options):
    return subprocess.run(
        [sys.executable, BENCHMARK, *options], capture_output=True, text=True,
        timeout=60, check=True).stdout


def sums(*options):
    """Return the sums of one number of hosts, by name."""
    lines = printed(*options).split('\n\n')[1].splitlines()
    return {line[:26].strip(): float(line[26:].replace(',', ''))
            for line in lines}


def test_the_page_shows_what_is_printed():
    assert textwrap.indent(printed(), '    ') in PAGE.read_text()


def test_sums_by_hand():
    """The sums match a count by hand for four hosts with a disk each.

    Each disk has 1,000 segments of 512 blocks.
    """
    size = 1000 * 512 * 4096
    found = sums(
        '--hosts', '4', '--disks', '1', '--disk-gb', str(size / 1e9),
        '--dirty', '50', '--asked', '10', '--new', '25', '--kept', '0',
        '--rate-mb', '100', '--merged', '0.001', '--rank-mb', '30')
    asked = 4 * 500 * 512 * 0.1
    for name, wanted in {
            'requests, M': asked / 1e6, 'new blocks, M': asked / 4e6,
            'sent between hosts, GB': (2 * asked + asked / 4) * 13 / 1e9,
            'index GB': 4 * size / 10 / 4096 * 13 / 1e9,
            'merging, h': asked / 4 / 1000 / 3600,
            'reading, h': size / 2 * 1.025 / 100e6 / 3600,
            'memory of a rank, MB': 30 + 4 * 65536 / 1e6}.items():
        assert found[name] == pytest.approx(wanted, rel=0.01), name


def test_what_is_scarcest_comes_first():
    shares = [float(line.split()[-1]) for line in printed(
        '--hosts', '10000').split('\n\n')[2].splitlines()[1:]]
    assert shares == sorted(shares, reverse=True) and shares[0] > 1
