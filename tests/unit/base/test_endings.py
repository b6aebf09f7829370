# SPDX-License-Identifier: Apache-2.0

import signal

import pytest

from glance_dedup.base import endings


@pytest.mark.parametrize('handler, ends', [
    (signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_nohup_is_obeyed(handler, ends):
    before = signal.signal(signal.SIGHUP, handler)
    try:
        found = endings.signals()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (signal.SIGHUP in found) == ends
    assert {signal.SIGINT, signal.SIGTERM} <= {*found}
