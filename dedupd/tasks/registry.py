# SPDX-License-Identifier: Apache-2.0

"""One table with the facts about each task.

The scheduler, the daemon's operations, RPC, notifications and the command line
take their knowledge of tasks from this table. The scheduler and the command
line both run tasks through it, so that each option applies to both.

A task's module is imported at its first run, so that commands and the start of
the daemon stay short. A running daemon loads all of them at once (`load`).
"""

from collections.abc import Callable
from collections.abc import Mapping
import contextlib
import dataclasses
import importlib
import pkgutil
from typing import Any

from dedupd import tasks
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import helper_daemon
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import image_repository

Maintainer = maintainer_role.Maintainer
Helper = helper_daemon.Helper

# The most that the option limit_mib takes.
_MAX_LIMIT_MIB = 1 << 30


def _account(maintainer: Maintainer, pace: pacing.Pace,
             options: Any) -> Any:
    from dedupd.tasks import accounting
    from dedupd.tasks import findings

    result = accounting.run_once(maintainer, pace)
    maintainer.guard(lambda: findings.take(maintainer, pace))
    return result


def _collect(maintainer: Maintainer, pace: pacing.Pace, options: Any,
             dry_run: bool = False, by_partition: bool = False,
             processes: int = 1, hosts: tuple[str, ...] = ()) -> Any:
    from dedupd.tasks import collector
    from glance_dedup.maintenance import refcount_rebuild

    live_share = options.collect_live_share
    if dry_run:
        return collector.plan(maintainer, pace, live_share=live_share)
    return collector.run_once(
        maintainer, pace, live_share=live_share, hosts=(
            hosts or refcount_rebuild.local(processes) if by_partition
            else ()))


def _named(names: list[str]) -> Callable[[dict[str, Any]], bool]:
    """Return whether the option names an image, by its catalog's facts."""
    named = frozenset(names)
    return lambda facts: (facts['image_id'] in named
                          or f'project:{facts["project"]}' in named)


def _merge(maintainer: Maintainer, pace: pacing.Pace, options: Any,
           dry_run: bool = False) -> Any:
    from dedupd.tasks import merger

    return merger.run_once(maintainer, pace, _named(options.merge_exclude),
                           dry_run)


def _help_merge(helper: Helper, pace: pacing.Pace, options: Any) -> Any:
    from dedupd.tasks import shareindex

    return shareindex.run_once(helper, pace)


def _convert(maintainer: Maintainer, pace: pacing.Pace, options: Any,
             images: list[str] | None = None, form: str = 'disk',
             dry_run: bool = False) -> Any:
    from dedupd.tasks import converter

    if dry_run:
        return converter.plan(maintainer, pace, images or (), form)
    return converter.run_once(maintainer, pace, images or (), form,
                              options.convert_idle_days)


def _all(group: int) -> bool:
    """The share of a process that takes part in nothing."""
    return True


def _scrub(maintainer: Maintainer, pace: pacing.Pace, options: Any,
           full: bool = False, is_mine: Callable[[int], bool] = _all) -> Any:
    from dedupd.tasks import scrubber

    return scrubber.run_once(maintainer, pace, full=full,
                             spare_threshold=options.spare_threshold,
                             is_mine=is_mine,
                             cold_budget=options.scrub_cold_mib << 20)


def _help_scrub(helper: Helper, pace: pacing.Pace, options: Any,
                is_mine: Callable[[int], bool]) -> Any:
    from dedupd.tasks import sharescrub

    return sharescrub.run_once(helper, pace, is_mine)


def _recompress(maintainer: Maintainer, pace: pacing.Pace, options: Any,
                dry_run: bool = False, codec: str | None = None,
                level: int | None = None,
                is_mine: Callable[[int], bool] = _all) -> Any:
    from dedupd.tasks import recompressor

    similar = options.recompress_cluster_similar
    if codec is None:
        codec, level = options.recompress_codec, _level(options)
        if codec == 'none':
            recompressor.give_up(maintainer)
            return None
    if dry_run:
        return recompressor.plan(maintainer, codec, level or 0, similar)
    return recompressor.run_once(maintainer, pace, codec, level or 0, is_mine,
                                 similar)


def _level(options: Any) -> int:
    """The level of the option's codec; only zstd has levels."""
    return (options.recompress_level if options.recompress_codec == 'zstd'
            else 0)


def _help_recompress(helper: Helper, pace: pacing.Pace, options: Any,
                     is_mine: Callable[[int], bool]) -> Any:
    from dedupd.tasks import recompressor

    if options.recompress_codec == 'none':
        return None
    return recompressor.run_once(helper, pace, options.recompress_codec,
                                 _level(options), is_mine,
                                 options.recompress_cluster_similar)


def _tier(maintainer: Maintainer, pace: pacing.Pace, options: Any,
          dry_run: bool = False, everything: bool = False,
          metadata_only: bool = False) -> Any:
    from dedupd.tasks import recompressor
    from dedupd.tasks import tierer

    codec = options.recompress_codec
    policy = tierer.Policy(
        age=options.tier_age_hours * 3600.0,
        free_bytes=options.tier_free_mib << 20, everything=everything,
        keep=_named(options.tier_keep),
        live_share=options.collect_live_share,
        mark=None if codec == 'none' else recompressor.mark_of(
            maintainer, codec, _level(options),
            options.recompress_cluster_similar))
    if dry_run:
        return tierer.plan(maintainer, policy)
    return tierer.run_once(maintainer, pace, policy, metadata_only)


def _projects(maintainer: Maintainer, pace: pacing.Pace, options: Any) -> Any:
    from dedupd.tasks import project_usage

    return project_usage.run_once(maintainer, pace)


def _usage(maintainer: Maintainer, pace: pacing.Pace, options: Any,
           **names: list[str]) -> Any:
    from dedupd.tasks import image_usage

    return image_usage.run_once(maintainer, pace, **names)


def _evict(maintainer: Maintainer, pace: pacing.Pace, options: Any,
           held: Any = None, coming: Callable[[], int] = lambda: 0,
           limit_mib: int | None = None, dry_run: bool = False) -> Any:
    from dedupd.compute.cache import cache_catalog
    from dedupd.tasks import evictor

    with contextlib.ExitStack() as stack:
        if held is None:
            # No daemon passed its list: this is the command line.
            held = stack.enter_context(contextlib.closing(
                cache_catalog.Held(maintainer.repository)))
        function = evictor.plan if dry_run else evictor.run_once
        return function(
            maintainer, pace, held,
            held.limit if limit_mib is None else limit_mib << 20, coming,
            live_share=options.collect_live_share)


def _rebuild(maintainer: Maintainer, pace: pacing.Pace,
             options: Any, processes: int = 1,
             hosts: tuple[str, ...] = ()) -> None:
    from glance_dedup.maintenance import refcount_rebuild

    if processes > 1:
        hosts = refcount_rebuild.local(processes)
    maintainer.rebuild(pace.step, hosts=hosts)


def _require_limit(limit_mib: int = 0, **others: Any) -> None:
    """Refuse what the option ``limit_mib`` would refuse, too."""
    if not 0 <= limit_mib <= _MAX_LIMIT_MIB:
        raise exceptions.InvalidParameter(
            f'limit_mib: {limit_mib} is not from 0 to {_MAX_LIMIT_MIB}')


def _require_processes(processes: int = 1, **others: Any) -> None:
    from glance_dedup.maintenance import refcount_rebuild

    if not 1 <= processes <= refcount_rebuild.MAX_COUNT:
        raise exceptions.InvalidParameter(
            f'processes: {processes} is not from 1 to '
            f'{refcount_rebuild.MAX_COUNT}')


def _require_collect(dry_run: bool = False, by_partition: bool = False,
                     processes: int | None = None, **others: Any) -> None:
    """Refuse arguments that would do nothing."""
    if dry_run and by_partition:
        raise exceptions.InvalidParameter(
            'by_partition: a collection that changes nothing compares nothing')
    if processes is not None:
        if not by_partition:
            raise exceptions.InvalidParameter(
                'processes: they are only for by_partition')
        _require_processes(processes)


def _require_tier(dry_run: bool = False, everything: bool = False,
                  metadata_only: bool = False) -> None:
    """Refuse arguments that would do nothing."""
    if metadata_only and (dry_run or everything):
        raise exceptions.InvalidParameter(
            'metadata_only: it moves nothing, and sends a metadata backup')


def _require_usage(**names: list[str]) -> None:
    """Refuse names that no image or volume can have."""
    from dedupd.tasks import image_usage

    for what, some in names.items():
        _require_names(what, some, image_usage.MAX_NAMES)


def _require_names(what: str, names: list[str], most: int) -> None:
    """Refuse too many names, and those that no image or volume can have."""
    from glance_dedup.base import imageids
    from glance_dedup.repository import volumes

    is_valid = {'images': imageids.is_valid, 'volumes': volumes.is_name}[what]
    if not 0 < len(names) <= most:
        raise exceptions.InvalidParameter(
            f'{what}: a run takes 1 to {most} of them, not {len(names)}')
    for name in names:
        if not isinstance(name, str) or not is_valid(name):
            raise exceptions.InvalidParameter(
                f'{what}: {name!r:.200} is not an id of an image'
                if what == 'images' else
                f'{what}: {name!r:.200} is not a name of a volume')


def _require_convert(images: list[str] | None = None, form: str = 'disk',
                     dry_run: bool = False) -> None:
    """Refuse names that no image can have, and forms that there are not."""
    from dedupd.tasks import converter

    if images is not None:
        _require_names('images', images, converter.MAX_NAMES)
    if form not in (converter.DISK, converter.FILE):
        raise exceptions.InvalidParameter(
            f'form: {form!r:.200} is neither disk nor file')
    if form == converter.FILE and not images:
        raise exceptions.InvalidParameter(
            'form: only images that are named get the form of their file')


def _require_codec(codec: str | None = None, level: int | None = None,
                   **others: Any) -> None:
    """Refuse a level without a codec, and a level that the codec lacks."""
    if codec is None:
        if level is not None:
            raise exceptions.InvalidParameter(
                f'level: {level} needs a codec; without one, the options '
                'recompress_codec and recompress_level apply')
        return
    level = level or 0
    image_repository.require_text('codec', codec)
    if not 0 <= level < 256:
        raise exceptions.InvalidParameter(f'no codec has a level {level}')
    _engine.codec_mark(codec, level)


@dataclasses.dataclass(frozen=True)
class Task:
    """A task as other modules see it."""

    name: str
    run: Callable[..., Any] | None = None
    """The function to call as `run(maintainer, pace, options, **arguments)`.
    It imports the task's module. None: the scheduler does not run the task."""
    arguments: Mapping[str, type] = dataclasses.field(default_factory=dict)
    """The types of the arguments that a request may give, by name."""
    bounds: Callable[..., None] | None = None
    """The function to call as `bounds(**arguments)`. It raises
    InvalidParameter."""
    not_again: tuple[str, ...] = ()
    """Arguments that a run gets only when it begins, not when it goes on."""
    interval: str | int = 0
    """Seconds between two scheduled runs, or the name of an option with them;
    0: the task runs only on request."""
    rate: str | None = None
    """The option that limits the task's reading and writing, in MiB a
    second."""
    rank: int = 0
    """Of two tasks the one with the lower rank goes first. A task of rank 1 or
    more gives way, between two steps, to tasks of a lower rank."""
    counts_first: bool = False
    """True if *account* runs before the task."""
    is_routine: bool = False
    """True if the task runs often, and mostly does nothing."""
    is_told: bool = False
    """True if notifications report the task."""
    in_caches_only: bool = False
    help: Callable[..., Any] | None = None
    """The function that a helper calls, as `help(helper, pace, options)`.
    None: only the maintainer runs the task."""
    share: int = 0
    """If each daemon has a share of the groups: the task's number in
    ``locks/hosts``. It must not change, since daemons of several versions meet
    there. Then `help` and `run` also take `is_mine`; `is_mine(group)` returns
    whether a group is in this daemon's share."""
    is_on: Callable[[Any], bool] = lambda options: True
    """Returns whether a daemon with these options takes part, if the task has
    an interval there."""

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Check the arguments of a request.

        :raises InvalidParameter: if the task has no such argument, or if a
            value has the wrong type or is out of bounds
        """
        for key, value in arguments.items():
            if key not in self.arguments:
                raise exceptions.InvalidParameter(
                    f'the task {self.name} has no argument {key!r}')
            if type(value) is not self.arguments[key]:
                raise exceptions.InvalidParameter(
                    f'{key}: {value!r} is not of the type '
                    f'{self.arguments[key].__name__}')
        if self.bounds is not None:
            self.bounds(**arguments)


#: Every task by its name, in the order of the output.
TASKS = {row.name: row for row in (
    Task('account', _account, interval=60, is_routine=True),
    Task('collect', _collect,
         {'dry_run': bool, 'by_partition': bool, 'processes': int},
         _require_collect, interval='collect_interval',
         rate='collect_rate_mib', counts_first=True, is_told=True),
    Task('merge', _merge, {'dry_run': bool}, interval='merge_interval',
         rate='merge_rate_mib', counts_first=True, is_told=True,
         help=_help_merge),
    Task('evict', _evict, {'dry_run': bool, 'limit_mib': int}, _require_limit,
         interval=60, is_routine=True, in_caches_only=True),
    Task('scrub', _scrub, {'full': bool}, not_again=('full',),
         interval='scrub_interval', rate='scrub_rate_mib', rank=1,
         is_told=True, help=_help_scrub, share=1),
    Task('recompress', _recompress,
         {'dry_run': bool, 'codec': str, 'level': int}, _require_codec,
         interval='recompress_interval', rate='recompress_rate_mib', rank=2,
         is_told=True, help=_help_recompress, share=2,
         is_on=lambda options: options.recompress_codec != 'none'),
    Task('convert', _convert, {'images': list, 'form': str, 'dry_run': bool},
         _require_convert, interval='convert_interval',
         rate='convert_rate_mib', rank=2, counts_first=True, is_told=True),
    Task('tier', _tier,
         {'dry_run': bool, 'everything': bool, 'metadata_only': bool},
         _require_tier, interval='tier_interval', rate='tier_rate_mib', rank=2,
         counts_first=True, is_told=True),
    Task('projects', _projects, interval='projects_interval',
         counts_first=True),
    Task('usage', _usage, {'images': list, 'volumes': list}, _require_usage,
         is_routine=True),
    Task('rebuild-catalog', _rebuild, {'processes': int}, _require_processes),
    Task('replicate'))}


def interval(name: str, options: Any) -> float:
    """Seconds between two scheduled runs of a task; 0: only requests.

    :param options: the group ``[dedupd]``
    """
    found = TASKS[name].interval
    return options[found] if isinstance(found, str) else found


def run(name: str, worker: Maintainer | Helper, pace: pacing.Pace,
        options: Any, **arguments: Any) -> Any:
    """Run a task; return its result: a dataclass, or None.

    :param options: the group ``[dedupd]``, read during this call
    """
    task = TASKS[name]
    run_once = task.help if isinstance(worker, Helper) else task.run
    assert run_once is not None, f'{name} is not for a {type(worker)}'
    return run_once(worker, pace, options, **arguments)


def load() -> None:
    """Import the modules of all tasks.

    A daemon whose package is upgraded would otherwise get modules of the new
    version beside those of the old one that it has.
    """
    for module in pkgutil.iter_modules(tasks.__path__):
        importlib.import_module(f'{tasks.__name__}.{module.name}')
    # Only a collection by partition needs it, and imports it then.
    importlib.import_module('glance_dedup.maintenance.comparison')
