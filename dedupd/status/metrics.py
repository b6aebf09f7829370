# SPDX-License-Identifier: Apache-2.0

"""The daemon's figures for Prometheus, at ``GET /metrics``.

They are the figures of :meth:`dedupd.endpoints.operations.Control.status`,
the times of requests to volumes that this host serves, and, if
``metrics_projects`` is set, the figures of the projects that have stored most.
Their names follow Prometheus' rules: base units, the unit in the name,
``_total`` for a counter. A figure that is not known, for example because the
catalog is being rebuilt, is left out, so that no reader takes it for zero.
"""

from collections.abc import Callable
from collections.abc import Iterator
import itertools
import time
from typing import Any

import prometheus_client
from prometheus_client import exposition
from prometheus_client import metrics_core

from glance_dedup.client import volume_control
from glance_dedup.repository import volumes

#: The Content-Type of :func:`render`'s format.
CONTENT_TYPE = 'text/plain; version=0.0.4; charset=utf-8'

Status = dict[str, Any]
Projects = list[dict[str, Any]]
Volumes = list[dict[str, Any]]

#: The most projects that have series of their own. The others have one
#: together, under this name, which is no project's.
MAX_PROJECTS = 50
OTHERS = '(others)'
#: The label of images that no project stored; an empty one is as good as none.
NOBODY = '(none)'
#: The most volumes that have series of their own, the first ones by name. The
#: others have none: a sum over them would sink whenever one of them ends.
MAX_VOLUMES = 50

# A name, a help text, and the keys that lead to the value in the status.
_GAUGES = (
    ('dedupd_start_time_seconds',
     'When the daemon was started, in seconds since the epoch.',
     ('daemon', 'started')),
    ('dedupd_ready', 'Whether the daemon serves requests (0 or 1).',
     ('daemon', 'ready')),
    ('dedupd_block_size_bytes', 'Size of a block, or of the largest ones.',
     ('repository', 'block_size')),
    ('dedupd_mount_tried',
     'Whether hosts have tried this mount of the repository as it is now (0 '
     'or 1). Absent where no other host can use it.',
     ('repository', 'trial', 'valid')),
    ('dedupd_images', 'Images in the repository, without backups.',
     ('space', 'images')),
    ('dedupd_backups', 'Backups in the repository.', ('space', 'backups')),
    ('dedupd_volumes', 'Volumes in the repository.', ('space', 'volumes')),
    ('dedupd_volume_journal_bytes',
     'Disk space of the journals of volumes, and of files kept for them.',
     ('space', 'journal_bytes')),
    ('dedupd_volumes_in_use',
     'Volumes that are being served, or changed by a command.',
     ('volumes', 'in_use')),
    ('dedupd_volumes_unfinished',
     'Volumes that are being made or deleted, or that this broke off.',
     ('volumes', 'unfinished')),
    ('dedupd_volumes_broken',
     'Volumes that cannot be read, or take no more writes.',
     ('volumes', 'broken')),
    ('dedupd_volumes_size_bytes', 'Sum of the sizes of all volumes.',
     ('volumes', 'size_bytes')),
    # Not counters: a volume's counts go when it is deleted.
    *((f'dedupd_volumes_{key}', f'{text}, in the life of all volumes that are '
       'there.', ('volumes', key)) for key, text in volumes.COUNTERS.values()),
    ('dedupd_logical_bytes',
     "Sum of the sizes of all images, and of volumes' parts.",
     ('space', 'logical_bytes')),
    ('dedupd_zero_bytes',
     'Bytes of images in blocks that are all zeros, which are not stored.',
     ('space', 'zero_bytes')),
    ('dedupd_nonzero_bytes', 'Bytes of images in all other blocks.',
     ('space', 'nonzero_bytes')),
    ('dedupd_unique_blocks', 'Distinct blocks that images use.',
     ('space', 'unique_blocks')),
    ('dedupd_unique_bytes',
     'Bytes of the distinct blocks that images use, before compression.',
     ('space', 'unique_bytes')),
    ('dedupd_images_with_disk',
     'Images that are kept as the disk in their file.', ('space', 'disks')),
    ('dedupd_derived_bytes',
     'Bytes of their files that are not stored, but made of the disk.',
     ('space', 'derived_bytes')),
    ('dedupd_disk_bytes', 'Disk space that the repository takes up.',
     ('space', 'disk_bytes')),
    ('dedupd_object_bytes',
     'Bytes of cold groups in the object store.', ('space', 'object_bytes')),
    ('dedupd_metadata_bytes',
     'Disk space of what is not image data: recipes, fingerprint stores, '
     'catalog.',
     ('space', 'metadata_bytes')),
    ('dedupd_filesystem_free_bytes',
     'Free space of the file system that holds the repository.',
     ('space', 'filesystem_free_bytes')),
    ('dedupd_filesystem_size_bytes',
     'Size of the file system that holds the repository.',
     ('space', 'filesystem_bytes')),
    ('dedupd_reserve_bytes',
     'Free space below which storing is refused, for deleting and '
     'collecting.',
     ('space', 'reserve_bytes')),
    ('dedupd_catalog_bytes', 'Disk space of the catalog.',
     ('catalog', 'disk_bytes')),
    ('dedupd_damaged_blocks',
     'Blocks that a scrub or a read found damaged and that are not healed.',
     ('damage', 'blocks')),
    ('dedupd_http_connections', 'Connections that are open.',
     ('reads', 'connections')),
    ('dedupd_nbd_exports', 'Images that clients of NBD have now; one that two '
     'have counts twice.',
     ('nbd', 'exports')),
    ('dedupd_replication_pending_images',
     'Images that are to be taken to the other site, and are not there.',
     ('replication', 'pending')),
    ('dedupd_receiving_images', 'Images that are on their way from other '
     'sites.', ('receiving', 'under_way')),
    ('dedupd_image_cache_images', 'Images that the cache of a compute host '
     'holds.', ('cache', 'held', 'images')),
    ('dedupd_image_cache_wrong_images', 'Images of which the storing host has '
     'another than Glance.', ('cache', 'held', 'wrong_images')),
    ('dedupd_image_cache_limit_bytes',
     'Disk space that the cache may take; 0: all.',
     ('cache', 'held', 'limit_bytes')),
    ('dedupd_image_cache_arriving_images', 'Images that are on their way.',
     ('cache', 'under_way')),
    ('dedupd_image_cache_neighbours_aside',
     'Neighbours that get no requests for a while.',
     ('cache', 'neighbours', 'aside')),
    ('dedupd_cache_bytes', 'Size of the decompressed segments in the cache.',
     ('reads', 'cache_bytes')),
    ('dedupd_slices_cached_bytes',
     'Size of the slices of cold groups that are kept on the disk.',
     ('cold', 'cached')),
    ('dedupd_filter_bytes', 'Memory of the fingerprint filter of this host.',
     ('filter', 'filter_bytes')),
    ('dedupd_filter_places', 'Hints that the fingerprint filter has room for.',
     ('filter', 'filter_places')),
    ('dedupd_filter_hints', 'Hints in the fingerprint filter.',
     ('filter', 'filter_hints')),
    ('dedupd_filter_level',
     'Sampling level of the fingerprint filter: it keeps one of 2^level '
     'fingerprints.',
     ('filter', 'filter_level')),
    ('dedupd_filter_look_age_seconds',
     'Seconds since the fingerprint filter last had all that other hosts had '
     'stored.',
     ('filter', 'filter_refresh_age_seconds')),
    ('dedupd_filter_behind_groups',
     'Block groups that the fingerprint filter had yet to read then.',
     ('filter', 'filter_behind')),
)

_COUNTERS = (
    ('dedupd_http_requests_total', 'Requests that came, of all kinds.',
     ('reads', 'requests')),
    ('dedupd_http_sent_bytes_total', 'Bytes that were sent in responses.',
     ('reads', 'bytes')),
    ('dedupd_failed_reads_total', 'Reads of images that found damage.',
     ('reads', 'failed')),
    ('dedupd_nbd_requests_total', 'Requests over NBD that were answered.',
     ('nbd', 'requests')),
    ('dedupd_nbd_sent_bytes_total', 'Bytes of images that were sent over NBD.',
     ('nbd', 'bytes')),
    ('dedupd_nbd_errors_total',
     'Requests over NBD that were answered with an I/O error.',
     ('nbd', 'errors')),
    ('dedupd_replication_images_total', 'Images taken to the other site.',
     ('replication', 'replicated')),
    ('dedupd_replication_sent_bytes_total',
     'Bytes sent to the other site, over the network.',
     ('replication', 'sent_bytes')),
    ('dedupd_received_images_total', 'Images that came from other sites.',
     ('receiving', 'images')),
    ('dedupd_received_bytes_total',
     'Bytes of blocks that came from other sites, over the network.',
     ('receiving', 'bytes')),
    ('dedupd_receiving_failures_total',
     'Images from other sites that broke off.',
     ('receiving', 'failures')),
    ('dedupd_image_cache_requests_total',
     'Requests that came to the cache in place of Glance.',
     ('cache', 'requests')),
    ('dedupd_image_cache_relayed_total',
     'Requests that were passed on to Glance as they came.',
     ('cache', 'relayed')),
    ('dedupd_image_cache_hits_total',
     'Downloads of images that were here.', ('cache', 'here')),
    ('dedupd_image_cache_misses_total',
     'Downloads of images that were on their way, or sent for.',
     ('cache', 'arriving')),
    ('dedupd_image_cache_fallbacks_total',
     'Downloads that Glance had to continue.', ('cache', 'fallbacks')),
    ('dedupd_image_cache_sent_bytes_total',
     'Bytes of images that were sent from the cache.',
     ('cache', 'bytes_here')),
    ('dedupd_image_cache_received_bytes_total',
     'Bytes that came from the storing host, over the network.',
     ('cache', 'arrivals', 'received_bytes')),
    ('dedupd_image_cache_pulls_total', 'Images that were sent for.',
     ('cache', 'arrivals', 'pulls')),
    ('dedupd_image_cache_failures_total', 'Images that did not come.',
     ('cache', 'arrivals', 'failures')),
    ('dedupd_image_cache_evictions_total',
     'Images that were evicted to keep the limit.',
     ('cache', 'held', 'evictions')),
    ('dedupd_image_cache_uploads_total',
     'Uploads of which only the difference was sent.',
     ('cache', 'uploads', 'images')),
    ('dedupd_image_cache_uploaded_bytes_total', 'Bytes of these uploads.',
     ('cache', 'uploads', 'bytes')),
    ('dedupd_image_cache_upload_sent_bytes_total',
     'Bytes that were sent for them, over the network.',
     ('cache', 'uploads', 'sent_bytes')),
    ('dedupd_image_cache_neighbours_received_bytes_total',
     'Bytes that came from neighbours, over the network.',
     ('cache', 'neighbours', 'received_bytes')),
    ('dedupd_image_cache_neighbours_failures_total',
     'Times that a neighbour failed and was put aside.',
     ('cache', 'neighbours', 'failures')),
    ('dedupd_image_cache_lent_bytes_total',
     'Bytes that were lent to neighbours.',
     ('cache', 'neighbours', 'lent_bytes')),
    ('dedupd_cache_hits_total', 'Segments that were found in the cache.',
     ('reads', 'cache_hits')),
    ('dedupd_cache_misses_total', 'Segments that were not in the cache.',
     ('reads', 'cache_misses')),
    ('dedupd_slices_gets_total',
     'Requests to the object store for slices of cold groups.',
     ('cold', 'gets')),
    ('dedupd_slices_received_bytes_total', 'Bytes that these brought.',
     ('cold', 'received')),
    ('dedupd_slices_reads_total',
     'Reads of the daemon in slices of cold groups.', ('cold', 'reads')),
    ('dedupd_slices_misses_total',
     'Those of them for which a slice had to be fetched.',
     ('cold', 'misses')),
    ('dedupd_slices_evicted_total',
     'Slices that were removed to keep the size of their cache.',
     ('cold', 'evicted')),
    ('dedupd_slices_unavailable_total',
     'Slices that the object store did not give.', ('cold', 'unavailable')),
)

# The same for each task; the keys lead to the value in the task's status.
_TASK_GAUGES = (
    ('dedupd_task_last_success_timestamp_seconds',
     'When the task last ended well, in seconds since the epoch.',
     ('last_success',)),
    ('dedupd_task_last_duration_seconds', 'How long the task last took.',
     ('last', 'seconds')),
    ('dedupd_task_interval_seconds',
     'Between two runs of the task; 0: it runs only on request.',
     ('interval',)),
    ('dedupd_task_done', 'How much of its work the task that runs has done, '
     'in whatever it counts.',
     ('done',)),
    ('dedupd_task_todo', 'How much work the task that runs has in all, in '
     'whatever it counts.',
     ('total',)),
)

_TASK_COUNTERS = (
    ('dedupd_task_runs_total',
     'How often the task ended, well or not, since the daemon was started.',
     ('runs',)),
    ('dedupd_task_failures_total',
     'How often the task failed since the daemon was started.',
     ('failures',)),
)


# The same for each project; the key of the value.
_OF_PROJECTS = (
    ('dedupd_project_images',
     'Images of the project, without backups.', 'images'),
    ('dedupd_project_logical_bytes',
     "Sum of the sizes of the project's images.", 'logical_bytes'),
    ('dedupd_project_stored_bytes',
     "Bytes that were written to the disk for the project's images.",
     'stored_bytes'),
    ('dedupd_project_exclusive_bytes',
     'Bytes of the blocks that no other project uses, before compression.',
     'exclusive_bytes'),
    ('dedupd_project_shared_bytes',
     'Bytes of the blocks that other projects use, too, before compression.',
     'shared_bytes'),
    ('dedupd_project_charged_bytes',
     "The project's part of the disk space of the block groups.",
     'charged_bytes'),
)


class Collector:
    """Turns the status into metrics, for the library's registry.

    :param status: returns the status; called once for each collection
    :param projects: returns the projects, as
        :meth:`dedupd.status.repository_stats.Figures.projects` does
    :param list_volumes: returns the volumes, as
        :meth:`dedupd.status.volume_stats.VolumeFigures.all` does
    :param are_named: give series to projects, whose ids they then show
    """

    def __init__(self, status: Callable[[], Status],
                 projects: Callable[[], Projects],
                 list_volumes: Callable[[], Volumes],
                 are_named: bool) -> None:
        self._status = status
        self._projects = projects
        self._list_volumes = list_volumes
        self._are_named = are_named

    def collect(self) -> Iterator[metrics_core.Metric]:
        """The metrics of the current status; those not known are left out."""
        status = self._status()
        yield from _descriptions(status)
        for families, kind in ((_GAUGES, metrics_core.GaugeMetricFamily),
                               (_COUNTERS, metrics_core.CounterMetricFamily)):
            for name, text, keys in families:
                value = _find(status, keys)
                if value is not None:
                    yield kind(name, text, value=float(value))
        yield from _tasks(status.get('tasks') or {})
        yield _latencies(self._list_volumes())
        if status['daemon']['role'] == 'maintainer':
            projects = self._projects()
            yield metrics_core.GaugeMetricFamily(
                'dedupd_projects',
                'Projects that have something in the repository.',
                value=float(len(projects)))
            if self._are_named:
                yield from _of_projects(projects)


def render(status: Callable[[], Status],
           projects: Callable[[], Projects],
           list_volumes: Callable[[], Volumes], are_named: bool) -> bytes:
    """The answer to ``GET /metrics``.

    It uses a registry of its own: other code of the process may register
    metrics with the library's global one.
    """
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(Collector(
        status, projects, list_volumes, are_named))
    return exposition.generate_latest(registry)


def _find(status: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        if not isinstance(status, dict):
            return None
        status = status.get(key)
    return status


def _descriptions(status: Status) -> Iterator[metrics_core.Metric]:
    """The metrics with labels, and those that are counted here."""
    daemon = status['daemon']
    yield metrics_core.InfoMetricFamily(
        'dedupd_build', 'The version that runs.',
        value={'version': str(daemon['version'])})
    yield metrics_core.InfoMetricFamily(
        'dedupd_repository', 'The repository that is served.',
        value={key: str(status['repository'][key])
               for key in ('id', 'path', 'fingerprint', 'verify')})
    yield metrics_core.GaugeMetricFamily(
        'dedupd_maintainer',
        'Whether this daemon is the one that maintains the repository (0 or '
        '1).', value=float(daemon['role'] == 'maintainer'))
    live = metrics_core.GaugeMetricFamily(
        'dedupd_hosts', 'Daemons that live and take a share of the task.',
        labels=['task'])
    for name in sorted({name for host in status['hosts'].values()
                        for name in host['tasks']}):
        live.add_metric([name], float(sum(
            name in host['tasks'] for host in status['hosts'].values())))
    yield live
    yield metrics_core.GaugeMetricFamily(
        'dedupd_catalog_ready',
        'Whether the catalog is complete (0 or 1); while it is not, nothing '
        'is freed.', value=float(_find(status, ('catalog', 'state'))
                                 == 'ready'))
    yield metrics_core.GaugeMetricFamily(
        'dedupd_filter_available',
        'Whether the fingerprint filter of this host can be had (0 or 1); '
        'while it cannot, duplicates are missed.',
        value=float(_find(status, ('filter', 'filter_error')) is None))
    left = _find(status, ('space', 'full_in_seconds'))
    if left is not None:
        yield metrics_core.GaugeMetricFamily(
            'dedupd_space_full_timestamp_seconds',
            'When storing will be refused if the file system goes on to fill '
            'as it did, in seconds since the epoch.',
            value=time.time() + left)
    expiry = metrics_core.GaugeMetricFamily(
        'dedupd_certificate_expiry_timestamp_seconds',
        'When the certificate of an option expires, in seconds since the '
        'epoch.', labels=['option'])
    for option, facts in status['certificates'].items():
        if facts['expires'] is not None:
            expiry.add_metric([option], float(facts['expires']))
    yield expiry
    failed = _find(status, ('replication', 'failed'))
    if failed is not None:
        yield metrics_core.GaugeMetricFamily(
            'dedupd_replication_failed_images',
            'Images that could not be taken to the other site and are tried '
            'again; at most 20 are counted.', value=float(len(failed)))
    if daemon['role'] == 'maintainer':
        yield metrics_core.GaugeMetricFamily(
            'dedupd_unreadable_recipes',
            'Images whose recipe cannot be read and was not counted; while '
            'there is one, nothing is freed.',
            value=float(len(_find(status, ('catalog', 'unreadable')) or ())))
    if (_find(status, ('damage', 'blocks')) is not None
            or _find(status, ('damage', 'images'))):
        yield metrics_core.GaugeMetricFamily(
            'dedupd_damaged_images',
            'Images that use damaged blocks, or of which a read failed since '
            'they were last verified.',
            value=float(len(_find(status, ('damage', 'images')) or ())))
        yield metrics_core.GaugeMetricFamily(
            'dedupd_damaged_volumes', 'Volumes that use damaged blocks.',
            value=float(len(_find(status, ('damage', 'volumes')) or ())))


def _tasks(tasks: dict[str, Any]) -> Iterator[metrics_core.Metric]:
    running = metrics_core.GaugeMetricFamily(
        'dedupd_task_running', 'Whether the task runs (0 or 1).',
        labels=['task'])
    for name, task in tasks.items():
        running.add_metric([name], float(task['state'] == 'running'))
    yield running
    failed = metrics_core.GaugeMetricFamily(
        'dedupd_task_last_failed', 'Whether the last run of the task failed '
        '(0 or 1).', labels=['task'])
    for name, task in tasks.items():
        if task.get('last'):
            failed.add_metric([name], float(task['last']['error'] is not None))
    yield failed
    for families, kind in (
            (_TASK_GAUGES, metrics_core.GaugeMetricFamily),
            (_TASK_COUNTERS, metrics_core.CounterMetricFamily)):
        for name, text, keys in families:
            family = kind(name, text, labels=['task'])
            for task, facts in tasks.items():
                value = _find(facts, keys)
                if value is not None:
                    family.add_metric([task], float(value))
            yield family


def _latencies(found: Volumes) -> metrics_core.Metric:
    family = metrics_core.HistogramMetricFamily(
        'dedupd_volume_request_duration_seconds',
        "Times of requests in the volume's server, since it started.",
        labels=['volume', 'operation'])
    bounds = [*map(str, volume_control.LATENCY_BOUNDS), '+Inf']
    live = [volume for volume in found if volume['latency']]
    for volume in live[:MAX_VOLUMES]:
        for operation, times in volume['latency'].items():
            family.add_metric(
                [volume['name'], operation],
                [*zip(bounds, itertools.accumulate(times['counts']))],
                times['seconds'])
    return family


def _label(project: str) -> str:
    """Return the label of a project, which is none of ours."""
    return f'({project}' if project.startswith('(') else project or NOBODY


def _of_projects(projects: Projects) -> Iterator[metrics_core.Metric]:
    rows = {_label(project['project']): [project]
            for project in projects[:MAX_PROJECTS]}
    if others := projects[MAX_PROJECTS:]:
        rows[OTHERS] = others
    for name, text, key in _OF_PROJECTS:
        family = metrics_core.GaugeMetricFamily(name, text, labels=['project'])
        for label, some in rows.items():
            known = [project[key] for project in some
                     if project[key] is not None]
            if known:
                family.add_metric([label], float(sum(known)))
        yield family
