# SPDX-License-Identifier: Apache-2.0

"""Choose the signals at which a program ends after it has cleaned up."""

import signal


def signals() -> tuple[signal.Signals, ...]:
    """Return SIGINT, SIGTERM, and SIGHUP, which a closed terminal sends.

    SIGHUP is left out if it is ignored: the program runs under nohup.
    """
    found = signal.SIGINT, signal.SIGTERM
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return found
    return *found, signal.SIGHUP
