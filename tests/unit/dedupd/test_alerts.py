# SPDX-License-Identifier: Apache-2.0

"""The rules of etc/prometheus, tested by Prometheus' own tool.

The series imitate a daemon with a problem. The start of promtool takes the
most time, so one run tests all cases.
"""

import dataclasses
import json
import pathlib
import re
import shutil
import subprocess

import pytest
import yaml

from dedupd.status import metrics

pytestmark = pytest.mark.needs('prometheus')

RULES = (pathlib.Path(__file__).resolve().parents[3]
         / 'etc' / 'prometheus' / 'glance-dedup.rules.yml')
NAMED = {rule['alert']: rule
         for group in yaml.safe_load(RULES.read_text())['groups']
         for rule in group['rules']}
METRIC = re.compile(r'dedupd_\w+')
DAY = 1440      # samples, one a minute


def promtool(*arguments):
    assert shutil.which('promtool'), (
        'promtool is missing; install the package prometheus')
    return subprocess.run(['promtool', *map(str, arguments)],
                          capture_output=True, text=True, timeout=300)


def constant(value, minutes='END'):
    return f'{value}+0x{minutes}'


def labels_of(instance='one:9394', **labels):
    labels = {'instance': instance, 'job': 'dedupd', **labels}
    return '{' + ', '.join(
        f'{key}="{value}"' for key, value in labels.items()) + '}'


def daemon(instance='one:9394', repository='a' * 32, task='collect',
           **changed):
    """Yield the series of a healthy daemon by name; None leaves one out."""
    values = {
        'up': constant(1),
        'dedupd_build_info': constant(1),
        'dedupd_start_time_seconds': constant(0),
        'dedupd_maintainer': constant(1),
        'dedupd_damaged_images': constant(0),
        'dedupd_damaged_volumes': constant(0),
        'dedupd_unreadable_recipes': constant(0),
        'dedupd_volumes_broken': constant(0),
        'dedupd_volumes_unfinished': constant(0),
        'dedupd_filesystem_free_bytes': constant(500),
        'dedupd_filesystem_size_bytes': constant(1000),
        'dedupd_reserve_bytes': constant(10),
        'dedupd_space_full_timestamp_seconds': constant(30 * 86400),
        'dedupd_filter_available': constant(1),
        'dedupd_filter_level': constant(4),
        'dedupd_repository_info': constant(1),
        'dedupd_replication_failed_images': constant(0),
        'dedupd_replication_pending_images': constant(0),
        'dedupd_replication_sent_bytes_total': constant(0),
        'dedupd_image_cache_failures_total': constant(0),
        'dedupd_image_cache_received_bytes_total': constant(0),
        'dedupd_certificate_expiry_timestamp_seconds': constant(30 * 86400),
        'dedupd_task_interval_seconds': constant(300),
        'dedupd_task_last_failed': constant(0),
        'dedupd_task_last_success_timestamp_seconds': '0+60xEND',
        **changed}
    for name, series in values.items():
        labels = {}
        if name.startswith('dedupd_task_'):
            labels = {'task': task}
        elif name == 'dedupd_repository_info':
            labels = {'id': repository}
        if series is not None:
            yield {'series': name + labels_of(instance, **labels),
                   'values': series}


@dataclasses.dataclass
class Case:
    """Some series, and the times at which an alert fires."""

    alert: str
    fires: list[int]
    quiet: list[int]
    series: list[dict[str, str]]

    @property
    def end(self):
        return max(self.fires + self.quiet)

    def as_test(self):
        """Return the case in promtool's form."""
        expected = [(minute, 1) for minute in self.fires] + [
            (minute, 0) for minute in self.quiet]
        end = str(self.end)
        return {
            'name': f'{self.alert} {self.fires} {self.quiet}',
            'interval': '1m', 'input_series': [
                {key: text.replace('END', end) for key, text in one.items()}
                for one in self.series],
            'promql_expr_test': [{
                'expr': 'count(count by (alertname) (ALERTS{alertstate='
                        f'"firing", alertname=~"{self.alert}"}})) '
                        'or vector(0)',
                'eval_time': f'{minute}m',
                'exp_samples': [{'labels': '{}', 'value': value}],
            } for minute, value in expected]}


def of_one(alert, fires, quiet, **changed):
    return Case(alert, fires, quiet, list(daemon(**changed)))


def run(tmp_path, cases, every=1):
    """Test some cases, with an evaluation every so many minutes."""
    file = tmp_path / 'test.yml'
    file.write_text(json.dumps({
        'rule_files': [str(RULES)], 'evaluation_interval': f'{every}m',
        'tests': [case.as_test() for case in cases]}))
    return promtool('test', 'rules', file)


COLLECTED = 'dedupd_task_last_success_timestamp_seconds'
ALWAYS = 'dedupd_task_interval_seconds'
CASES = [
    of_one('DedupImagesDamaged', [5], [], dedupd_damaged_images=constant(1)),
    of_one('DedupImagesDamaged', [5], [], dedupd_damaged_volumes=constant(1)),
    of_one('DedupImagesDamaged', [5], [],
           dedupd_unreadable_recipes=constant(1)),
    Case('DedupBackupDrillFailed', [1], [], [{
        'series': 'glance_dedup_backup_drill_failed_disks',
        'values': constant(2)}]),
    Case('DedupBackupDrillFailed', [], [5], [{
        'series': 'glance_dedup_backup_drill_failed_disks',
        'values': constant(0)}]),
    Case('DedupBackupDrillOverdue', [16 * DAY], [14 * DAY], [{
        'series': 'glance_dedup_backup_drill_last_success_timestamp_seconds',
        'values': constant(0)}]),
    of_one('DedupMountNotTried', [70], [50], dedupd_mount_tried=constant(0)),
    of_one('DedupMountNotTried', [], [70], dedupd_mount_tried=constant(1)),
    of_one('DedupVolumesBroken', [5], [], dedupd_volumes_broken=constant(1)),
    of_one('DedupVolumesUnfinished', [DAY + 30], [DAY - 30],
           dedupd_volumes_unfinished=constant(1)),
    # The series is constant, or absent since the task never succeeded.
    of_one('DedupNotCollecting', [75], [60], **{COLLECTED: constant(0)}),
    of_one('DedupNotCollecting', [75], [30], **{COLLECTED: None}),
    # The task runs on request only, or its interval is long.
    of_one('DedupNotCollecting', [], [400], **{
        COLLECTED: None, ALWAYS: constant(0)}),
    of_one('DedupNotCollecting', [190], [170], **{
        COLLECTED: constant(0), ALWAYS: constant(3600)}),
    of_one('DedupScrubOverdue', [DAY + 30], [DAY - 30], task='scrub',
           **{COLLECTED: constant(0)}),
    of_one('DedupScrubOverdue', [DAY + 30], [DAY - 30], task='scrub',
           **{COLLECTED: None}),
    of_one('DedupScrubOverdue', [], [DAY + 30], task='scrub',
           **{COLLECTED: None, ALWAYS: constant(0)}),
    of_one('DedupTaskFailing', [20], [14],
           dedupd_task_last_failed=constant(1)),
    of_one('DedupTaskFailing', [], [20],
           dedupd_task_last_failed='1+0x9 0+0x470'),
    # The daemon does not maintain; or no daemon ever did; or the maintainer is
    # gone; or a new one follows soon.
    of_one('DedupNoMaintainer', [15], [9], dedupd_maintainer=constant(0)),
    of_one('DedupNoMaintainer', [15], [9], dedupd_maintainer=None,
           dedupd_repository_info=None),
    of_one('DedupNoMaintainer', [60], [30],
           dedupd_maintainer=constant(1, 30),
           dedupd_repository_info=constant(1, 30)),
    of_one('DedupNoMaintainer', [], [30],
           dedupd_maintainer='1+0x14 0+0x4 1+0x460'),
    # One of two repositories has no maintainer.
    Case('DedupNoMaintainer', [60], [29], [
        *daemon('three:9394', 'b' * 32),
        *daemon(dedupd_maintainer=constant(1, 30),
                dedupd_repository_info=constant(1, 30))]),
    # The alert ignores a target that never was a daemon.
    of_one('DedupDaemonDown', [40], [30, 33], up='1+0x30 0+0x400',
           dedupd_build_info=constant(1, 30)),
    of_one('DedupDaemonDown', [], [40], up=constant(0),
           dedupd_build_info=None),
    of_one('DedupDiskNearlyFull', [10], [4],
           dedupd_filesystem_free_bytes=constant(59)),
    of_one('DedupDiskNearlyFull', [], [10],
           dedupd_filesystem_free_bytes=constant(60)),
    of_one('DedupStoringRefused', [1], [],
           dedupd_filesystem_free_bytes=constant(9)),
    of_one('DedupStoringRefused', [], [10],
           dedupd_filesystem_free_bytes=constant(10)),
    # A cache without a limit fills the disk; a cache with a limit should not.
    of_one('DedupDiskNearlyFull|DedupStoringRefused', [], [10],
           dedupd_filesystem_free_bytes=constant(5),
           dedupd_image_cache_limit_bytes=constant(0)),
    of_one('DedupDiskNearlyFull', [10], [],
           dedupd_filesystem_free_bytes=constant(59),
           dedupd_image_cache_limit_bytes=constant(100)),
    of_one('DedupDiskFilling', [70], [50],
           dedupd_space_full_timestamp_seconds=constant(6 * 86400)),
    of_one('DedupDiskFilling', [], [70],
           dedupd_space_full_timestamp_seconds=constant(8 * 86400)),
    of_one('DedupNoFilter', [10], [4], dedupd_filter_available=constant(0)),
    of_one('DedupFilterTooSmall', [70], [50],
           dedupd_filter_level=constant(5)),
    of_one('DedupReplicationFailing', [70], [50],
           dedupd_replication_failed_images=constant(1)),
    # Some images wait, with and without traffic.
    of_one('DedupReplicationFailing', [70], [50],
           dedupd_replication_pending_images=constant(3)),
    of_one('DedupReplicationFailing', [], [70, 400],
           dedupd_replication_pending_images=constant(3),
           dedupd_replication_sent_bytes_total='0+10x480'),
    of_one('DedupCacheWithoutOrigin', [30], [19],
           dedupd_image_cache_failures_total='0+0x19 1+1x400'),
    of_one('DedupCacheWithoutOrigin', [], [30],
           dedupd_image_cache_failures_total='0+0x19 1+1x400',
           dedupd_image_cache_received_bytes_total='0+5x400'),
    of_one('DedupCertificateExpiring', [5], [],
           dedupd_certificate_expiry_timestamp_seconds=constant(13 * 86400)),
    of_one('DedupCertificateExpiring', [], [5],
           dedupd_certificate_expiry_timestamp_seconds=constant(15 * 86400)),
    # There are a reader beside the maintainer, and another repository. The
    # reader was the maintainer once and has no new figures.
    Case('.*', [], [1, 90, 400, DAY + 60], [
        *daemon(),
        *daemon('two:9394', dedupd_maintainer=constant(0),
                dedupd_damaged_images=None, dedupd_damaged_volumes=None,
                dedupd_unreadable_recipes=None,
                dedupd_space_full_timestamp_seconds=None,
                dedupd_task_last_failed=constant(1),
                **{COLLECTED: constant(0)}),
        *daemon('three:9394', 'b' * 32, task='scrub')]),
]


def test_rules_are_good():
    found = promtool('check', 'rules', RULES)
    assert found.returncode == 0, found.stderr


def test_every_metric_is_published():
    published = pathlib.Path(metrics.__file__).read_text()
    for name, rule in NAMED.items():
        assert rule['annotations']['summary'].endswith('.')
        for metric in METRIC.findall(rule['expr']):
            assert (f"'{metric}'" in published
                    or f"'{metric.removesuffix('_info')}'" in published), (
                        name, metric)


def test_every_rule_is_tried():
    """Each rule fires in one case and stays quiet in another."""
    assert {case.alert for case in CASES if case.fires} == set(NAMED)
    assert {case.alert for case in CASES if case.quiet} >= {
        name for name, rule in NAMED.items() if 'for' in rule}


@pytest.mark.timeout(300)
def test_they_fire_when_they_should(tmp_path):
    found = run(tmp_path, [case for case in CASES if case.end < DAY])
    assert found.returncode == 0, found.stderr
    found = run(tmp_path, [case for case in CASES if case.end >= DAY], 15)
    assert found.returncode == 0, found.stderr


@pytest.mark.timeout(300)
def test_the_tool_notices(tmp_path):
    """The tool fails for a wrong expectation, so the tests are effective."""
    for case in (of_one('DedupNoFilter', [4], [],
                        dedupd_filter_available=constant(0)),
                 of_one('DedupNoFilter', [], [10],
                        dedupd_filter_available=constant(0))):
        assert run(tmp_path, [case]).returncode != 0
