"""What a process owns is its own: in a forked child threads, connections, inboxes and leases begin anew.

Python tells of the forks that it makes itself. A fork in C, as of uWSGI, is noticed by the next one who asks for the
number of the process here.
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

Reset = Callable[[], None]
MADV_WIPEONFORK = 18  # of Linux; mmap does not name it

_known_pid = os.getpid()  # the process that everything here was made in, or made anew for
_functions: list[Reset] = []
_methods: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()
_guards: dict[int, threading.RLock] = {}


def in_child(reset: Reset) -> None:
    """Call ``reset`` in every forked child, before anything else of this package runs there.

    It must neither wait nor fail, may be called more than once, and asks ``os.getpid()``, not ``pid()``. A method, one
    of each object, does not keep its object alive.
    """
    if isinstance(reset, MethodType):
        _methods[reset.__self__] = reset.__func__
    else:
        _functions.append(reset)


def around(before: Reset, *, in_parent: Reset) -> None:
    """Call ``before`` before this process forks, where Python does that, and ``in_parent`` when it has forked."""
    if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
        os.register_at_fork(before=before, after_in_parent=in_parent)


def _new_mark() -> mmap.mmap | bytearray:
    """A byte that is 1 in this process, and that Linux clears in a forked child, however it was forked.

    Where that cannot be had it is 0, and the number of the process is asked for each time.
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
    except OSError:  # as it should; an emulator that takes any advice follows none
        page[0] = 1
        return page
    return bytearray(1)


mark = _new_mark()


def notice() -> None:
    """Begin anew if this is a forked child that nobody told."""
    if not mark[0]:
        _begin_anew()


def pid() -> int:
    """``notice()``, and the number of this process without asking the kernel, which takes longer than all the rest."""
    if not mark[0]:
        _begin_anew()
    return _known_pid


def is_copy(pid: int) -> bool:
    """Whether this thread was started in process ``pid`` and is now in a child, which it must leave alone: it ends.

    A fork copies no threads, but greenlets in the place of threads.
    """
    if os.getpid() == pid:
        return False
    threading.current_thread()  # makes it known here; the end of a thread that is not known is told as an error
    return True


def _begin_anew() -> None:
    global _known_pid
    pid = os.getpid()
    if _known_pid == pid:
        return
    with _guards.setdefault(pid, threading.RLock()):  # never one that another thread held at the fork
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
