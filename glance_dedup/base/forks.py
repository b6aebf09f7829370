# SPDX-License-Identifier: Apache-2.0

"""Put a forked child in order, however it was forked.

A module with state that a child must not use registers a hook. It is called in
the child of each ``os.fork``. uWSGI loads the application in its master,
unless ``lazy-apps`` is set, and then forks in C, which Python does not notice.
For such a child, the entrances of this package call `catch_up`, which calls
the hooks before anything is used.
"""

from collections.abc import Callable
import os
import threading

_hooks: list[Callable[[], None]] = []
_lock = threading.Lock()
_owner = os.getpid()


def register(hook: Callable[[], None]) -> None:
    """Have a function called in each child, before the child uses anything.

    Hooks are called in the order of their registration. No other thread of the
    child has come past `catch_up` then.
    """
    _hooks.append(hook)


def catch_up() -> None:
    """Call the hooks if this process is a child that Python does not know of.

    Thread-safe.
    """
    if _owner != os.getpid():
        with _lock:
            if _owner != os.getpid():
                _call_hooks()


def _call_hooks() -> None:
    global _owner
    for hook in _hooks:
        hook()
    _owner = os.getpid()


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()    # the parent's may be locked for ever
    _call_hooks()


os.register_at_fork(after_in_child=_in_child)
