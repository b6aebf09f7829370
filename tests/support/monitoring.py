# SPDX-License-Identifier: Apache-2.0

"""The dashboard and the rules, and the metrics that they name."""

import functools
import json
import pathlib
import re

from dedupd.status import metrics

ETC = pathlib.Path(__file__).resolve().parents[2] / 'etc'
RULES = ETC / 'prometheus' / 'glance-dedup.rules.yml'
DASHBOARD = ETC / 'grafana' / 'glance-dedup.json'

# A histogram has series with these endings.
_NAME = re.compile(r'\bdedupd_\w+?(?=(?:_bucket|_count|_sum)?\b)')
# A rate needs two samples; tests take one each second.
_VARIABLES = {'$job': '.*', '$instance': '.*', '$__rate_interval': '30s'}


@functools.cache
def dashboard():
    """Return the dashboard, which callers must not change."""
    return json.loads(DASHBOARD.read_text())


def panels():
    """Return all panels that are not rows."""
    return [panel for panel in dashboard()['panels']
            if panel['type'] != 'row']


def targets():
    """Return the queries of all panels."""
    return [target for panel in panels() for target in panel['targets']]


def filled(query):
    """Return a query as Grafana sends it when everything is selected."""
    for name, value in _VARIABLES.items():
        query = query.replace(name, value)
    return query


def names_in(text):
    """Return the daemon's metrics that a text names."""
    return set(_NAME.findall(text))


def published_names():
    """Return the metrics that the source names, in Prometheus' form."""
    found = re.findall(r"'(dedupd_\w+)'",
                       pathlib.Path(metrics.__file__).read_text())
    tables = [name for table in (
        metrics._GAUGES, metrics._COUNTERS, metrics._TASK_GAUGES,
        metrics._TASK_COUNTERS) for name, _, _ in table]
    infos = {'dedupd_build', 'dedupd_repository'}
    return ({*found, *tables} - infos
            | {f'{name}_info' for name in infos})
