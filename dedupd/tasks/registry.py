# SPDX-License-Identifier: Apache-2.0

"""Each task by its name, as the options of ``[dedupd]`` want it.

The daemon's scheduler and the command line run them through here, so that what
an option says holds for both.
"""

from collections.abc import Callable
import contextlib
from typing import Any

from oslo_config import cfg

from dedupd import opts
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import task
from glance_dedup.maintenance import maintainer as maintainer_module

Maintainer = maintainer_module.Maintainer


def load_options(path: str | None = None) -> cfg.ConfigOpts:
    """The options alone, without those of logging.

    :param path: of the daemon's file; None: what holds without one
    :raises cfg.Error: for a file that is no good
    """
    conf = cfg.ConfigOpts()
    conf.register_opts(opts.dedupd_opts, group=opts.GROUP)
    conf([], project='dedupd',
         default_config_files=[] if path is None else [path],
         default_config_dirs=[])
    return conf


def check_options(options: Any) -> None:
    """What no single option's bounds say.

    :param options: the group ``[dedupd]``
    :raises ValueError: for a level that the codec lacks
    """
    if options.recompress_codec != 'none':
        try:
            _engine.codec_mark(options.recompress_codec,
                               options.recompress_level)
        except exceptions.InvalidParameter as e:
            raise ValueError(f'recompress_level: {e}') from e


def run(name: str, maintainer: Maintainer, control: task.Control,
        options: Any, **arguments: Any) -> Any:
    """Run a task; returns its result, a dataclass, or None.

    The modules are imported when they are needed: most commands need none.

    :param options: the group ``[dedupd]``; read now
    """
    return _RUNS[name](maintainer, control, options, **arguments)


def _account(maintainer: Maintainer, control: task.Control,
             options: Any) -> Any:
    from dedupd.tasks import accounting

    return accounting.run_once(maintainer, control)


def _collect(maintainer: Maintainer, control: task.Control, options: Any,
             dry_run: bool = False) -> Any:
    from dedupd.tasks import collector

    function = collector.plan if dry_run else collector.run_once
    return function(maintainer, control,
                    live_share=options.collect_live_share,
                    evacuate_share=options.collect_evacuate_share)


def _merge(maintainer: Maintainer, control: task.Control, options: Any,
           dry_run: bool = False) -> Any:
    from dedupd.tasks import merger

    excluded = frozenset(options.merge_exclude)

    def exclude(facts: dict[str, Any]) -> bool:
        return (facts['image_id'] in excluded
                or f'project:{facts["project"]}' in excluded)

    return merger.run_once(maintainer, control, exclude, dry_run)


def _scrub(maintainer: Maintainer, control: task.Control, options: Any,
           full: bool = False) -> Any:
    from dedupd.tasks import scrubber

    return scrubber.run_once(maintainer, control, full=full,
                             spare_threshold=options.spare_threshold)


def _recompress(maintainer: Maintainer, control: task.Control, options: Any,
                dry_run: bool = False, codec: str | None = None,
                level: int | None = None) -> Any:
    from dedupd.tasks import recompressor

    if codec is None:
        codec, level = options.recompress_codec, options.recompress_level
        if codec == 'none':
            recompressor.give_up(maintainer)
            return None
    if dry_run:
        return recompressor.plan(maintainer, codec, level or 0)
    return recompressor.run_once(maintainer, control, codec, level or 0)


def _evict(maintainer: Maintainer, control: task.Control, options: Any,
           held: Any = None, coming: int = 0, limit_mib: int | None = None,
           dry_run: bool = False) -> Any:
    from dedupd.cache import index as index_module
    from dedupd.tasks import evictor

    with contextlib.ExitStack() as stack:
        if held is None:
            # No daemon has it: this is the command line.
            held = stack.enter_context(contextlib.closing(
                index_module.Held(maintainer.repository)))
        function = evictor.plan if dry_run else evictor.run_once
        return function(
            maintainer, control, held,
            held.limit if limit_mib is None else limit_mib << 20, coming,
            live_share=options.collect_live_share,
            evacuate_share=options.collect_evacuate_share)


def _rebuild(maintainer: Maintainer, control: task.Control,
             options: Any) -> None:
    maintainer.rebuild(control.step)


_RUNS: dict[str, Callable[..., Any]] = {
    'account': _account, 'collect': _collect, 'merge': _merge,
    'scrub': _scrub, 'recompress': _recompress, 'evict': _evict,
    'rebuild-catalog': _rebuild}
