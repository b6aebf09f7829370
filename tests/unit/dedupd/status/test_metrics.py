# SPDX-License-Identifier: Apache-2.0

"""The metrics, read by Prometheus' own parser and checked by its rules."""

import contextlib
import pathlib
import re
import time

import prometheus_client
from prometheus_client import parser
import pytest

from dedupd.endpoints import operations
from dedupd import opts
from dedupd.schedule import task_scheduler
from dedupd.status import metrics
from oslo_config import cfg
from tests.support import repositories

# Names contain only base units, and only at their end.
_UNITS = ('seconds', 'bytes', 'total', 'info', 'ratio')
_NOT_BASE = re.compile(
    r'_(ms|milliseconds|minutes|hours|days|kib|mib|gib|kilobytes|megabytes|'
    r'percent)(_|$)')


@pytest.fixture
def status(tmp_path):
    """Return the status of a daemon's parts, without its process."""
    path = repositories.create(tmp_path / 'repository', group_slots=64)
    conf = cfg.ConfigOpts()
    conf.register_opts(opts.dedupd_opts, group=opts.GROUP)
    conf([], default_config_files=[], default_config_dirs=[])
    with contextlib.closing(repositories.open_repository(path)) as repo:
        repositories.put(repo, 'image', repositories.mixture(1 << 20))
        scheduler = task_scheduler.Scheduler(repo, conf)
        with contextlib.closing(scheduler.figures):
            yield operations.Control(repo, scheduler).status()


@pytest.fixture
def full(status):
    """Return the same with every figure that can be known."""
    status['space'].update({
        'images': 3, 'backups': 4, 'logical_bytes': 1 << 40, 'zero_bytes': 5,
        'nonzero_bytes': (1 << 40) - 5, 'unique_blocks': 7,
        'unique_bytes': 28672, 'disks': 2, 'derived_bytes': 99,
        'disk_bytes': 12345678901234567,
        'full_in_seconds': 86400})
    for name, task in status['tasks'].items():
        task.update({
            'state': 'running' if name == 'scrub' else 'idle', 'done': 3,
            'total': 8, 'runs': 4, 'failures': 1, 'last_success': 1.75e9,
            'last': {'seconds': 2.5, 'error': None}})
    status['tasks']['collect']['last']['error'] = 'no reason'
    status['daemon']['role'] = 'maintainer'
    status['repository']['trial'] = {'verdict': 'fine', 'valid': True}
    status['catalog'].update({
        'state': 'ready', 'unreadable': {'a"\n\\b': 'no reason'}})
    status['filter'].update({'filter_refresh_age_seconds': 2.5,
                             'filter_behind': 3})
    status['damage'] = {'blocks': 2, 'images': ['x', 'y', 'z'],
                        'volumes': ['v']}
    status['certificates'] = {
        '[dedupd] tls_cert': {'path': '/a', 'expires': 1.9e9},
        '[cache] upstream_cert': {'path': '/b', 'expires': None}}
    status['reads'].update({'connections': 1, 'requests': 10, 'bytes': 1000,
                            'cache_hits': 6, 'cache_misses': 4})
    status['cold'] = {'reads': 30, 'misses': 31, 'gets': 32, 'received': 33,
                      'asked': 0, 'evicted': 34, 'unavailable': 35,
                      'cached': 36}
    status['replication'] = {'pending': 1, 'replicated': 2, 'sent_bytes': 3,
                             'failed': {'x': {}, 'y': {}}}
    status['cache'] = {
        'requests': 1, 'relayed': 2, 'here': 3, 'arriving': 4, 'fallbacks': 5,
        'bytes_here': 6, 'under_way': 7,
        'held': {'images': 8, 'wrong_images': 14, 'limit_bytes': 9,
                 'evictions': 10},
        'arrivals': {'received_bytes': 11, 'pulls': 12, 'failures': 13},
        'uploads': {'images': 15, 'bytes': 16, 'sent_bytes': 17},
        'neighbours': {'received_bytes': 18, 'failures': 19, 'aside': 20,
                       'lent_bytes': 21}}
    return status


def parse(status, projects=(), are_named=True, volumes=()):
    text = metrics.render(lambda: status, lambda: [*projects],
                          lambda: [*volumes], are_named).decode()
    families = list(parser.text_string_to_metric_families(text))
    return text, families


def values(families):
    return {(sample.name, *sample.labels.values()): sample.value
            for family in families for sample in family.samples}


def test_values(full):
    found = values(parse(full)[1])
    assert found['dedupd_images',] == 3
    assert found['dedupd_logical_bytes',] == 1 << 40
    assert found['dedupd_nonzero_bytes',] == (1 << 40) - 5
    assert found['dedupd_unique_bytes',] == 28672
    assert found['dedupd_disk_bytes',] == float(12345678901234567)
    assert found['dedupd_maintainer',] == 1
    assert found['dedupd_catalog_ready',] == 1
    assert found['dedupd_unreadable_recipes',] == 1
    assert found['dedupd_damaged_blocks',] == 2
    assert found['dedupd_damaged_images',] == 3
    assert found['dedupd_damaged_volumes',] == 1
    assert found['dedupd_space_full_timestamp_seconds',] == pytest.approx(
        time.time() + 86400, abs=60)
    assert found['dedupd_certificate_expiry_timestamp_seconds',
                 '[dedupd] tls_cert'] == 1.9e9
    # The file cannot be read.
    assert ('dedupd_certificate_expiry_timestamp_seconds',
            '[cache] upstream_cert') not in found
    assert found['dedupd_replication_failed_images',] == 2
    assert found['dedupd_task_running', 'scrub'] == 1
    assert found['dedupd_task_running', 'collect'] == 0
    assert found['dedupd_task_runs_total', 'collect'] == 4
    assert found['dedupd_task_failures_total', 'collect'] == 1
    assert found['dedupd_task_last_success_timestamp_seconds', 'merge'
                 ] == 1.75e9
    assert found['dedupd_task_last_duration_seconds', 'merge'] == 2.5
    assert found['dedupd_task_interval_seconds', 'merge'] == 600
    assert found['dedupd_task_last_failed', 'merge'] == 0
    assert found['dedupd_task_last_failed', 'collect'] == 1
    assert found['dedupd_http_requests_total',] == 10
    assert found['dedupd_cache_hits_total',] == 6
    assert found['dedupd_image_cache_hits_total',] == 3
    assert found['dedupd_image_cache_received_bytes_total',] == 11
    assert found['dedupd_image_cache_neighbours_aside',] == 20
    assert found['dedupd_image_cache_lent_bytes_total',] == 21
    assert found['dedupd_filter_available',] == 1
    full['filter']['filter_error'] = 'somebody else has it'
    assert values(parse(full)[1])['dedupd_filter_available',] == 0
    assert found['dedupd_filter_places',] == full['filter']['filter_places']
    assert found['dedupd_filter_look_age_seconds',] == 2.5
    assert found['dedupd_filter_behind_groups',] == 3


def test_every_known_figure_is_published(full):
    """Each entry of the tables yields a metric, and no family is empty."""
    some = project('one', 1, exclusive_bytes=1, shared_bytes=1,
                   charged_bytes=1)
    names = {family.name for family in parse(full, [some])[1]
             if family.samples}
    tables = (metrics._GAUGES, metrics._COUNTERS, metrics._TASK_GAUGES,
              metrics._TASK_COUNTERS, metrics._OF_PROJECTS)
    wanted = {name.removesuffix('_total')
              for table in tables for name, _, _ in table}
    assert wanted <= names, wanted - names


def test_every_metric_is_in_the_guide(full):
    guide = (pathlib.Path(__file__).parents[4]
             / 'doc/source/reference/metrics.rst').read_text()
    some = project('one', 1, exclusive_bytes=1, shared_bytes=1,
                   charged_bytes=1)
    missing = {sample.name
               for family in parse(full, [some], volumes=[volume('v')])[1]
               for sample in family.samples
               if not re.search(rf'``{sample.name}\b', guide)}
    assert not missing


def test_of_a_real_status(status):
    """A reader without a catalog leaves out the figures from the catalog."""
    text, families = parse(status)
    found = values(families)
    assert 'NaN' not in text and 'None' not in text
    assert found['dedupd_maintainer',] == 0
    assert found['dedupd_catalog_ready',] == 0
    assert ('dedupd_unique_bytes',) not in found
    # The reader also publishes no figures of damage.
    assert ('dedupd_damaged_blocks',) not in found
    assert ('dedupd_damaged_images',) not in found
    assert ('dedupd_damaged_volumes',) not in found
    assert ('dedupd_space_full_timestamp_seconds',) not in found
    assert ('dedupd_replication_failed_images',) not in found
    assert ('dedupd_unreadable_recipes',) not in found
    assert found['dedupd_disk_bytes',] == status['space']['disk_bytes']
    assert found['dedupd_block_size_bytes',] == 4096
    assert ('dedupd_build_info', status['daemon']['version']) in found


def test_rules(full):
    """The metrics follow the rules of promtool's linter."""
    text, families = parse(full, volumes=[volume('v')])
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    for family in families:
        assert re.fullmatch(r'dedupd_[a-z][a-z0-9_]*', family.name)
        assert family.documentation.endswith('.'), family.name
        assert not _NOT_BASE.search(family.name), family.name
        for sample in family.samples:
            assert (sample.name.endswith('_total')
                    == (family.type == 'counter')), sample.name
            assert not {'quantile', 'job', 'instance'} & set(sample.labels)
            assert ('le' in sample.labels) == (
                sample.name == f'{family.name}_bucket')
            assert 'dedupd' not in '_'.join(sample.labels)
        words = family.name.split('_')
        for unit in _UNITS:
            # A unit is the last word, except for those of timestamps and
            # counters.
            assert unit not in words[:-1], family.name
        assert family.type in ('gauge', 'counter', 'histogram'), family.name
        assert f'# HELP {family.name}' in text
        assert f'# TYPE {family.name}' in text


def volume(name, counts=(0, 2, *[0] * 18, 1), **latency):
    return {'name': name, 'latency': latency or {
        'read': {'seconds': 9.5, 'counts': [*counts], 'median': 3.2e-5,
                 'p99': None}}}


def test_times_of_a_volumes_requests(full):
    family, = (found for found in parse(full, volumes=[
        volume('one'), {'name': 'idle', 'latency': {}}])[1]
        if found.type == 'histogram')
    assert family.name == 'dedupd_volume_request_duration_seconds'
    found = {(sample.name.removeprefix(f'{family.name}_'),
              sample.labels.get('le')): sample.value
             for sample in family.samples}
    assert all(sample.labels['volume'] == 'one'
               and sample.labels['operation'] == 'read'
               for sample in family.samples)
    assert (found['count', None], found['sum', None]) == (3, 9.5)
    assert found['bucket', '1.6e-05'] == 0
    assert found['bucket', '3.2e-05'] == found['bucket', '8.388608'] == 2
    assert found['bucket', '+Inf'] == 3
    assert len(found) == 21 + 2


def test_volumes_are_bounded(full):
    families = parse(full, volumes=[
        volume(f'disk-{number:03}') for number in range(300)])[1]
    shown = {sample.labels['volume'] for family in families
             for sample in family.samples if 'volume' in sample.labels}
    assert shown == {f'disk-{number:03}'
                     for number in range(metrics.MAX_VOLUMES)}


def project(name, stored, **fields):
    return {'project': name, 'images': 1, 'logical_bytes': 10 * stored,
            'stored_bytes': stored, 'exclusive_bytes': None,
            'shared_bytes': None, 'charged_bytes': None, **fields}


def test_projects(full):
    found = values(parse(full, [
        project('one', 30, exclusive_bytes=2, shared_bytes=0,
                charged_bytes=4), project('', 20)])[1])
    assert found['dedupd_projects',] == 2
    assert found['dedupd_project_stored_bytes', 'one'] == 30
    assert found['dedupd_project_logical_bytes', '(none)'] == 200
    assert found['dedupd_project_shared_bytes', 'one'] == 0
    assert found['dedupd_project_charged_bytes', 'one'] == 4
    # Unknown figures are left out.
    assert ('dedupd_project_charged_bytes', '(none)') not in found


def test_a_project_that_is_called_as_ours(full):
    found = values(parse(full, [
        project('(none)', 3), project('', 20), project('((none)', 5)])[1])
    assert found['dedupd_project_stored_bytes', '((none)'] == 3
    assert found['dedupd_project_stored_bytes', '(none)'] == 20
    assert found['dedupd_project_stored_bytes', '(((none)'] == 5


def test_projects_are_not_named_unless_wanted(full):
    """Without the option, the metrics contain no ids of projects."""
    text, families = parse(full, [project('one', 30)], are_named=False)
    assert values(families)['dedupd_projects',] == 1
    assert 'dedupd_project_' not in text and '"one"' not in text


def test_projects_are_bounded(full):
    """The number of projects is limited, and the sum over all stays right."""
    many = [project(f'p{number}', 1000 - number, exclusive_bytes=number)
            for number in range(300)]
    families = parse(full, many)[1]
    found = values(families)
    assert found['dedupd_projects',] == 300
    for family in families:
        assert len(family.samples) <= metrics.MAX_PROJECTS + 1
    stored = {labels[0]: value for (name, *labels), value in found.items()
              if name == 'dedupd_project_stored_bytes'}
    assert sum(stored.values()) == sum(p['stored_bytes'] for p in many)
    assert stored['p0'] == 1000 and 'p299' not in stored
    assert found['dedupd_project_exclusive_bytes', metrics.OTHERS] == sum(
        range(metrics.MAX_PROJECTS, 300))


def test_only_the_maintainer_names_projects(full):
    full['daemon']['role'] = 'reader'
    assert not any('project' in name[0] for name in values(
        parse(full, [project('one', 1)])[1]))


def test_hostile_text_is_escaped(full):
    full['repository']['path'] = 'a"} 1\ndedupd_images 666\\'
    found = parse(full)[1]
    assert values(found)['dedupd_images',] == 3
    assert values(found)['dedupd_backups',] == 4
    info, = (f for f in found if f.name == 'dedupd_repository_info')
    assert info.samples[0].labels['path'] == full['repository']['path']


def test_global_registry_is_left_alone(full):
    counter = prometheus_client.Counter('somebody_elses', 'Text.')
    try:
        before = set(prometheus_client.REGISTRY._names_to_collectors)
        text = parse(full)[0]
        assert 'somebody' not in text and 'python_info' not in text
        assert set(prometheus_client.REGISTRY._names_to_collectors) == before
    finally:
        prometheus_client.REGISTRY.unregister(counter)


def test_content_type():
    assert metrics.CONTENT_TYPE.startswith('text/plain; version=0.0.4')
