"""Resets the state of a process in a forked child: threads, connections, inboxes and leases begin anew there.

Python calls hooks for the forks that it makes itself. A fork in C, such as uWSGI's, is noticed by the next call that
asks this module for the process id.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from .guards import new_guard

Reset = Callable[[], None]
MADV_WIPEONFORK = 18  # a constant of Linux that mmap does not have

_known_pid = os.getpid()  # the process in which everything was made, or reset last
_functions: list[Reset] = []
_methods: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()
_guards: dict[int, threading.RLock] = {}


def in_child(reset: Reset) -> None:
    """Call ``reset`` in every forked child, before anything else of this package runs there.

    It must neither wait nor fail. It may be called more than once. It must use ``os.getpid()``, not ``pid()``. Each
    object may have one method here, which does not keep the object alive.
    """
    if isinstance(reset, MethodType):
        _methods[reset.__self__] = reset.__func__
    else:
        _functions.append(reset)


def around(before: Reset, *, in_parent: Reset) -> None:
    """Call ``before`` before Python forks this process, and ``in_parent`` in this process after that."""
    if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
        os.register_at_fork(before=before, after_in_parent=in_parent)


def _new_mark() -> mmap.mmap | bytearray:
    """Returns a byte that is 1 in this process, and that Linux clears in a forked child, however it was forked.

    If the system cannot do that, the byte is 0, and the kernel is asked for the process id each time.
    """
    if sys.platform != "linux":
        return bytearray(1)
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        page.madvise(MADV_WIPEONFORK)
    except OSError:  # before Linux 4.14
        return bytearray(1)
    try:
        page.madvise(-1)
    except OSError:  # as it should: an emulator that accepts any advice ignores all of it
        page[0] = 1
        return page
    return bytearray(1)


mark = _new_mark()


def notice() -> None:
    """Begin anew if this is a forked child in which no hook was called."""
    if not mark[0]:
        _begin_anew()


def pid() -> int:
    """Call ``notice()``, and return the process id without a call of the kernel, which would take most of the time."""
    if not mark[0]:
        _begin_anew()
    return _known_pid


def is_copy(pid: int) -> bool:
    """Returns whether this thread was started in process ``pid`` and is now in a child. It must do nothing there, and
    end.

    A fork does not copy threads, but it copies greenlets that replace threads.
    """
    if os.getpid() == pid:
        return False
    threading.current_thread()  # registers it here, because the end of an unknown thread is reported as an error
    return True


def _begin_anew() -> None:
    global _known_pid
    pid = os.getpid()
    if _known_pid == pid:
        return
    with _guards.setdefault(pid, new_guard()):  # never a lock that another thread held at the fork
        if _known_pid == pid:
            return
        for reset in _functions:
            reset()
        for owner, method in list(_methods.items()):
            method(owner)
        _known_pid = pid
        if isinstance(mark, mmap.mmap):
            mark[0] = 1


def _follow_uwsgi() -> None:
    """Add a hook to uWSGI, which calls one function in every worker that it has forked."""
    uwsgi: Any = sys.modules.get("uwsgi")  # exists only inside uWSGI
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
