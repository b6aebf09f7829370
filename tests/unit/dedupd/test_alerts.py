# SPDX-License-Identifier: Apache-2.0

"""The rules of etc/prometheus, tried by Prometheus' own tool.

The series are what a daemon publishes, or does not publish, when something is
wrong.
"""

import json
import pathlib
import re
import shutil
import subprocess

import pytest
import yaml

from dedupd import metrics

RULES = (pathlib.Path(__file__).resolve().parents[3]
         / 'etc' / 'prometheus' / 'glance-dedup.rules.yml')
HOUR = 60       # samples, one a minute
NAMED = {rule['alert']: rule
         for group in yaml.safe_load(RULES.read_text())['groups']
         for rule in group['rules']}
METRIC = re.compile(r'dedupd_\w+')


def promtool(*arguments):
    assert shutil.which('promtool'), (
        'promtool is missing; install the package prometheus')
    return subprocess.run(['promtool', *map(str, arguments)],
                          capture_output=True, text=True, timeout=60)


def labels_of(instance='one:9394', **labels):
    labels = {'instance': instance, 'job': 'dedupd', **labels}
    return '{' + ', '.join(
        f'{key}="{value}"' for key, value in labels.items()) + '}'


def daemon(instance='one:9394', repository='a' * 32, **changed):
    """The series of one that is well, by name; None leaves one out."""
    values = {
        'dedupd_start_time_seconds': '0+0x%d' % (8 * HOUR),
        'dedupd_maintainer': '1+0x%d' % (8 * HOUR),
        'dedupd_damaged_images': '0+0x%d' % (8 * HOUR),
        'dedupd_unreadable_recipes': '0+0x%d' % (8 * HOUR),
        'dedupd_volumes_broken': '0+0x%d' % (8 * HOUR),
        'dedupd_filesystem_free_bytes': '500+0x%d' % (8 * HOUR),
        'dedupd_filesystem_size_bytes': '1000+0x%d' % (8 * HOUR),
        'dedupd_filter_available': '1+0x%d' % (8 * HOUR),
        'dedupd_reserve_bytes': '10+0x%d' % (8 * HOUR),
        'dedupd_repository_info': '1+0x%d' % (8 * HOUR),
        'dedupd_task_interval_seconds': '300+0x%d' % (8 * HOUR),
        'dedupd_task_last_failed': '0+0x%d' % (8 * HOUR),
        'dedupd_task_last_success_timestamp_seconds':
            '0+60x%d' % (8 * HOUR),
        **changed}
    for name, series in values.items():
        labels = {}
        if name.startswith('dedupd_task_'):
            labels = {'task': 'collect'}
        elif name == 'dedupd_repository_info':
            labels = {'id': repository}
        if series is not None:
            yield name + labels_of(instance, **labels), series


def firing(tmp_path, series, alert, minute):
    """Whether an alert fires at a minute."""
    def ends(expected):
        test = {'rule_files': [str(RULES)], 'evaluation_interval': '1m',
                'tests': [{
                    'interval': '1m',
                    'input_series': [{'series': name, 'values': values}
                                     for name, values in series],
                    'alert_rule_test': [{
                        'eval_time': f'{minute}m', 'alertname': alert,
                        'exp_alerts': expected}]}]}
        file = tmp_path / 'test.yml'
        file.write_text(json.dumps(test))
        return promtool('test', 'rules', file)

    assert alert in NAMED
    quiet = ends([])
    assert quiet.returncode == 0 or 'got:[' in quiet.stderr.replace(
        'got:\n', 'got:').replace(' ', ''), quiet.stderr
    return quiet.returncode != 0


def test_rules_are_good():
    found = promtool('check', 'rules', RULES)
    assert found.returncode == 0, found.stderr


def test_every_metric_is_published():
    """Nor is there an alert that this test does not know."""
    published = pathlib.Path(metrics.__file__).read_text()
    for name, rule in NAMED.items():
        assert rule['annotations']['summary'].endswith('.')
        for metric in METRIC.findall(rule['expr']):
            assert (f"'{metric}'" in published
                    or f"'{metric.removesuffix('_info')}'" in published), (
                        name, metric)
    here = pathlib.Path(__file__).read_text()
    for name in NAMED:
        assert f"'{name}'" in here, name


@pytest.mark.parametrize('alert', NAMED)
def test_all_is_well(tmp_path, alert):
    """With a reader beside the maintainer, and another repository."""
    series = [
        *daemon(),
        # It was the maintainer once, and knows nothing new since.
        *daemon('two:9394', dedupd_maintainer='0+0x480',
                dedupd_damaged_images=None, dedupd_unreadable_recipes=None,
                dedupd_task_last_failed='1+0x480',
                dedupd_task_last_success_timestamp_seconds='0+0x480'),
        *daemon('three:9394', 'b' * 32)]
    for minute in (1, 90, 400):
        assert not firing(tmp_path, series, alert, minute)


@pytest.mark.parametrize('alert, minute, changed', (
    ('DedupImagesDamaged', 5, {'dedupd_damaged_images': '1+0x480'}),
    ('DedupImagesDamaged', 5, {'dedupd_unreadable_recipes': '1+0x480'}),
    ('DedupVolumesBroken', 5, {'dedupd_volumes_broken': '1+0x480'}),
    # The series stands still; or there is none, since it never ended well.
    ('DedupNotCollecting', 75,
     {'dedupd_task_last_success_timestamp_seconds': '0+0x480'}),
    ('DedupNotCollecting', 75,
     {'dedupd_task_last_success_timestamp_seconds': None}),
    ('DedupTaskFailing', 20, {'dedupd_task_last_failed': '1+0x480'}),
    # It is there, and does not maintain; or has never been heard of; or is
    # gone.
    ('DedupNoMaintainer', 15, {'dedupd_maintainer': '0+0x480'}),
    ('DedupNoMaintainer', 15, {'dedupd_maintainer': None,
                               'dedupd_repository_info': None}),
    ('DedupNoMaintainer', 60, {'dedupd_maintainer': '1+0x30',
                               'dedupd_repository_info': '1+0x30'}),
    ('DedupDiskNearlyFull', 5, {'dedupd_filesystem_free_bytes': '49+0x480'}),
    ('DedupDiskNearlyFull', 5, {'dedupd_reserve_bytes': '501+0x480'}),
    ('DedupNoFilter', 10, {'dedupd_filter_available': '0+0x480'}),
))
def test_it_fires(tmp_path, alert, minute, changed):
    assert firing(tmp_path, list(daemon(**changed)), alert, minute)


def test_one_of_two_repositories_has_no_maintainer(tmp_path):
    series = [*daemon('three:9394', 'b' * 32),
              *daemon(dedupd_maintainer='1+0x30',
                      dedupd_repository_info='1+0x30')]
    assert firing(tmp_path, series, 'DedupNoMaintainer', 60)
    assert not firing(tmp_path, series, 'DedupNoMaintainer', 29)


@pytest.mark.parametrize('alert, minute, changed', (
    # It was just started; it collects on request only; its interval is long.
    ('DedupNotCollecting', 30,
     {'dedupd_task_last_success_timestamp_seconds': None}),
    ('DedupNotCollecting', 400,
     {'dedupd_task_last_success_timestamp_seconds': None,
      'dedupd_task_interval_seconds': '0+0x480'}),
    ('DedupNotCollecting', 170,
     {'dedupd_task_last_success_timestamp_seconds': '0+0x480',
      'dedupd_task_interval_seconds': '3600+0x480'}),
    ('DedupTaskFailing', 20, {'dedupd_task_last_failed': '1+0x9 0+0x470'}),
    ('DedupNoMaintainer', 30, {'dedupd_maintainer': '1+0x14 0+0x4 1+0x460'}),
))
def test_it_does_not_fire(tmp_path, alert, minute, changed):
    assert not firing(tmp_path, list(daemon(**changed)), alert, minute)
