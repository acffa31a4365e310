"""What a process owns is its own: in a forked child threads, connections, inboxes and leases begin anew.

Python tells of the forks that it makes itself. A fork in C, as of uWSGI, is noticed by the number of the process,
which is compared where an operation begins.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

Reset = Callable[[], None]

known_pid = os.getpid()  # the process that everything here was made in, or made anew for
_functions: list[Reset] = []
_methods: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()
_guards: dict[int, threading.RLock] = {}


def in_child(reset: Reset) -> None:
    """Call ``reset`` in every forked child, before anything else of this package runs there.

    It must neither wait nor fail, and may be called more than once. A method, one of each object, does not keep its
    object alive.
    """
    if isinstance(reset, MethodType):
        _methods[reset.__self__] = reset.__func__
    else:
        _functions.append(reset)


def around(before: Reset, *, in_parent: Reset) -> None:
    """Call ``before`` before this process forks, where Python does that, and ``in_parent`` when it has forked."""
    if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
        os.register_at_fork(before=before, after_in_parent=in_parent)


def notice() -> None:
    """Begin anew if this is a forked child that nobody told.

    Whoever is called very often compares ``known_pid`` first.
    """
    if os.getpid() != known_pid:
        _begin_anew()


def is_copy(pid: int) -> bool:
    """Whether this thread was started in process ``pid`` and is now in a child, which it must leave alone: it ends.

    A fork copies no threads, but greenlets in the place of threads.
    """
    if os.getpid() == pid:
        return False
    threading.current_thread()  # makes it known here; the end of a thread that is not known is told as an error
    return True


def _begin_anew() -> None:
    global known_pid
    pid = os.getpid()
    with _guards.setdefault(pid, threading.RLock()):  # never one that another thread held at the fork
        if known_pid == pid:
            return
        for reset in _functions:
            reset()
        for owner, method in list(_methods.items()):
            method(owner)
        known_pid = pid


def _follow_uwsgi() -> None:
    """uWSGI calls one function in every worker that it forked."""
    uwsgi: Any = sys.modules.get("uwsgi")  # there inside of uWSGI alone
    if uwsgi is None:
        return
    earlier = getattr(uwsgi, "post_fork_hook", None)

    def hook() -> None:
        notice()
        if earlier:
            earlier()

    uwsgi.post_fork_hook = hook


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
_follow_uwsgi()
