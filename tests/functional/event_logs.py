# SPDX-License-Identifier: Apache-2.0

"""Logs of processes that may be killed: one JSON object in each line."""

import json


def read(log):
    """Yield the events in a log.

    A process that was killed may not have come to make its log, and its last
    line may lack its end.
    """
    for line in log.read_text().splitlines() if log.exists() else []:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        yield event
