# SPDX-License-Identifier: Apache-2.0

"""Guru Meditation Reports: a process's activity, on SIGUSR2.

As in OpenStack's other services, oslo.reports writes the report to standard
error, or to a file in ``[oslo_reports] log_dir``. It has the stacks of all
threads, the options without the secret ones, and the service's own parts.

A thread of its own writes the report. So the interrupted thread may hold any
lock, and the event loop goes on. The service's own parts have a time
limit, because an operator may want the report when something hangs.
"""

import asyncio
from collections.abc import Callable
import functools
import logging
import re
import signal
import threading
from typing import Any

from oslo_config import cfg

from glance_dedup.base import package_version
from glance_dedup.base import printable

LOG = logging.getLogger(__name__)

#: Seconds that a service's own part may take.
PATIENCE = 5.0
#: The most tasks of the event loop that a report shows.
MAX_TASKS = 200

# The part of a URL before its host's name.
_PASSWORD = re.compile(r'://[^/@\s]*@')

Fields = dict[str, Any]
Sections = dict[str, Callable[[], Fields]]


class _Version:
    """The version, in the form that oslo.reports requires."""

    def __init__(self, name: str) -> None:
        self._name = name

    def vendor_string(self) -> str:
        return 'glance-dedup'

    def product_string(self) -> str:
        return self._name

    def version_string_with_package(self) -> str:
        return package_version.version()


def setup(name: str, conf: cfg.ConfigOpts,
          sections: Sections | None = None) -> None:
    """Have the process write a report whenever it gets SIGUSR2.

    Called in the main thread. With ``[oslo_reports] file_event_handler`` a
    change of that file has the same effect, instead of the signal.

    :param name: of the service
    :param sections: functions that return parts of the report by their titles
    """
    # Importing the rest takes half a second and 7 MB.
    from oslo_reports import opts

    for group, options in opts.list_opts():
        conf.register_opts(options, group=group)
    if conf.oslo_reports.file_event_handler:
        _report_of(conf, sections or {}).setup_autorun(
            _Version(name), name, conf=conf)
        return
    one = threading.Lock()

    def begin(number: int, frame: object) -> None:
        threading.Thread(target=_write, args=(one, name, conf, sections or {}),
                         name='report', daemon=True).start()

    signal.signal(signal.SIGUSR2, begin)
    # System calls of other threads go on.
    signal.siginterrupt(signal.SIGUSR2, False)


def _write(one: threading.Lock, name: str, conf: cfg.ConfigOpts,
           sections: Sections) -> None:
    if not one.acquire(blocking=False):
        return      # a report is being written
    try:
        _report_of(conf, sections).handle_signal(
            _Version(name), name, conf.oslo_reports.log_dir, None)
    except Exception as e:
        LOG.error('No report was written: %r', e)
    finally:
        one.release()


def _report_of(conf: cfg.ConfigOpts, sections: Sections) -> Any:
    """The class of this process's reports."""
    from oslo_reports.generators import conf as conf_module
    from oslo_reports import guru_meditation_report
    from oslo_reports.models import with_default_views

    class Report(guru_meditation_report.TextGuruMeditation):

        def run(self) -> str:
            # Errors quote data from outside, and URLs may have
            # passwords.
            text = _PASSWORD.sub('://***@', super().run())
            return '\n'.join(map(printable.printable, text.split('\n')))

        persistent_sections = [
            ('Options', conf_module.ConfigReportGenerator(conf)),
            *((title, functools.partial(
                lambda ask: with_default_views.ModelWithDefaultViews(
                    _asked(ask)), ask))
              for title, ask in sections.items())]

        def add_section(self, heading: Any, generator: Callable[[], Any],
                        index: int | None = None) -> None:
            # The library's own parts may fail, too. A child ends while its
            # process is described, or an object fails to give its class.
            def whole() -> Any:
                try:
                    return generator()
                except Exception as e:
                    return with_default_views.ModelWithDefaultViews(
                        {'error': repr(e)})

            super().add_section(heading, whole, index)

    return Report


def _asked(ask: Callable[[], Fields]) -> Fields:
    """Return the result of a service's function, or why it failed."""
    found: list[Fields] = []

    def run() -> None:
        try:
            found.append(ask())
        except Exception as e:
            found.append({'error': repr(e)})

    thread = threading.Thread(target=run, name='report-part', daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return found[0] if found else {
        'error': f'no answer within {PATIENCE:.0f} seconds; "Threads" shows '
        'what it waits for'}


def tasks_of(loop: asyncio.AbstractEventLoop) -> Fields:
    """The place where each task of an event loop waits. For any thread."""
    tasks = asyncio.all_tasks(loop)
    found = {task.get_name(): ' <- '.join(reversed(_places(task)))
             for task in list(tasks)[:MAX_TASKS]}
    return {'number': len(tasks), 'waiting': found}


def _places(task: asyncio.Task) -> list[str]:
    """The functions in which a task is, from the outermost on."""
    places: list[str] = []
    coroutine: Any = task.get_coro()
    while coroutine is not None and len(places) < 20:
        frame = getattr(coroutine, 'cr_frame', None)
        if frame is None:
            break
        places.append(f'{frame.f_code.co_qualname} '
                      f'{frame.f_globals.get("__name__")}:{frame.f_lineno}')
        coroutine = coroutine.cr_await
    return places
