# SPDX-License-Identifier: Apache-2.0

"""etc/grafana, checked by Grafana's own library and Prometheus' tool.

The file ``tests/functional/test_monitoring.py`` has real daemons answer the
dashboard's queries.
"""

import itertools
import json
import re

from grafana_foundation_sdk.cog import encoder
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.models import dashboard as dashboard_module
from grafana_foundation_sdk.models import units
import pytest

from tests.support import monitoring
from tests.unit.dedupd import test_alerts

COLUMNS = 24
UNITS = {value for name, value in vars(units).items()
         if not name.startswith('_')}
# No panel shows these metrics; some change only with the options.
NOT_SHOWN = {'dedupd_block_size_bytes', 'dedupd_derived_bytes',
             'dedupd_failed_reads_total', 'dedupd_images_with_disk',
             'dedupd_mount_tried', 'dedupd_task_interval_seconds'}


def missing(wanted, found, where=''):
    """Yield the places whose value is in `wanted` but not in `found`."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key, value in wanted.items():
            if key not in found:
                yield f'{where}.{key}'
            else:
                yield from missing(value, found[key], f'{where}.{key}')
    elif isinstance(wanted, list) and isinstance(found, list) and (
            len(wanted) == len(found)):
        for number, (a, b) in enumerate(zip(wanted, found)):
            yield from missing(a, b, f'{where}[{number}]')
    elif wanted != found:
        yield where


def read_by_grafana(text):
    """Return the dashboard as Grafana's library understands it."""
    plugins.register_default_plugins()
    return json.loads(encoder.JSONEncoder().encode(
        dashboard_module.Dashboard.from_json(json.loads(text))))


def test_grafana_knows_every_field():
    wanted = monitoring.dashboard()
    text = json.dumps(wanted)
    assert list(missing(wanted, read_by_grafana(text))) == []
    # The library drops unknown fields at any depth.
    for known, unknown in (('gridPos', 'gridPlace'), ('unit', 'units'),
                           ('expr', 'expression'), ('showLegend', 'legend')):
        assert f'"{known}"' in text
        bad = text.replace(f'"{known}"', f'"{unknown}"')
        assert list(missing(json.loads(bad), read_by_grafana(bad)))


def test_it_can_be_provisioned():
    """The dashboard has no instance's id and works with any data source."""
    found = monitoring.dashboard()
    assert 'id' not in found and found['uid'] and found['title']
    assert '__inputs' not in found and '__requires' not in found
    source, *others = found['templating']['list']
    assert (source['type'], source['name'], source['query']) == (
        'datasource', 'datasource', 'prometheus')
    assert source['current'] == {}
    for holder in (*others, *monitoring.panels(), *monitoring.targets()):
        assert holder['datasource'] == {'type': 'prometheus',
                                        'uid': '${datasource}'}


def test_panels():
    found = monitoring.dashboard()['panels']
    ids = [panel['id'] for panel in found]
    assert len(ids) == len(set(ids))
    rows = [panel for panel in found if panel['type'] == 'row']
    assert len({row['title'] for row in rows}) == len(rows)
    for panel in monitoring.panels():
        assert panel['title'] and panel['description'].endswith('.'), panel
        assert panel['fieldConfig']['defaults']['unit'] in UNITS, panel
        names = [target['refId'] for target in panel['targets']]
        assert names and len(names) == len(set(names)), panel
        legends = [target['legendFormat'] for target in panel['targets']]
        assert len(legends) == len(set(legends)), panel['title']


def test_panels_do_not_overlap():
    def place(panel):
        at = panel['gridPos']
        assert 0 <= at['x'] and at['x'] + at['w'] <= COLUMNS, panel
        assert at['w'] > 0 and at['h'] > 0 and at['y'] >= 0
        return at['x'], at['y'], at['x'] + at['w'], at['y'] + at['h']

    places = [(place(panel), panel['title'])
              for panel in monitoring.dashboard()['panels']]
    for (a, name), (b, other) in itertools.combinations(places, 2):
        assert (a[2] <= b[0] or b[2] <= a[0]
                or a[3] <= b[1] or b[3] <= a[1]), (name, other)


@pytest.mark.needs('prometheus')
def test_queries_are_valid(tmp_path):
    def check(queries):
        path = tmp_path / 'rules.json'
        path.write_text(json.dumps({'groups': [{'name': 'all', 'rules': [
            {'record': f'query:{number}', 'expr': monitoring.filled(query)}
            for number, query in enumerate(queries)]}]}))
        return test_alerts.promtool('check', 'rules', path)

    queries = [target['expr'] for target in monitoring.targets()]
    found = check(queries)
    assert found.returncode == 0, found.stdout + found.stderr
    assert check([*queries, 'sum(dedupd_images']).returncode != 0


def test_every_query_follows_the_variables():
    for target in monitoring.targets():
        for selector in re.findall(r'dedupd_\w+\{([^}]*)\}', target['expr']):
            assert selector.startswith(
                'job=~"$job", instance=~"$instance"'), target['expr']


def test_it_shows_every_metric():
    published = monitoring.published_names()
    shown = monitoring.names_in(
        ' '.join(target['expr'] for target in monitoring.targets()))
    assert shown <= published
    assert published - shown == NOT_SHOWN
