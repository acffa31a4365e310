"""Warnings about a handle that was collected while it held its lock, or at once, so that it locked nothing."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterable
from functools import partial
from opcode import opmap
from types import FrameType

from ..types import State
from ..utils.events import about_event
from ..utils.threads import start_thread
from .events import about_lease
from .lease import Lease

POP_TOP = opmap["POP_TOP"]  # the instruction by which CPython drops the result of a statement

logger = logging.getLogger("django_distlock")


def tell_of_leases(handle: object, name: str, using: str, leases: Iterable[Lease]) -> None:
    """Warn about the leases of a handle that nobody can release any more. They end with their TTL."""
    if sys.is_finalizing():
        return
    for lease in leases:
        if lease.state in (State.HELD, State.UNKNOWN):
            lease._stop_renewal()
            message = (
                f"A handle of lock {name!r} ({using}) was dropped while it held the lock, which now runs out by its"
                " TTL. Write 'with lock(...)', or keep the handle and release it."
            )
            # Few people see a ResourceWarning. In a thread, because this one may be inside a handler of logs.
            log = partial(logger.warning, extra=about_lease("handle-dropped", lease))
            start_thread("distlock-dropped", log, "%s Held by %s.", message, lease.holder)
            warnings.warn(message, ResourceWarning, stacklevel=3, source=handle)


def tell_of_statement(name: str, made_at: int, frame: FrameType | None) -> None:
    """``made_at``: the caller's instruction that made the handle. ``frame``: the one in which it goes away, if any."""
    if frame and _is_result_of_statement(made_at, frame):
        message = (
            f"lock({name!r}) at {frame.f_code.co_filename}:{frame.f_lineno} locks nothing: it makes a handle, which"
            " nobody keeps there. Write 'with lock(...)'."
        )
        logger.warning("%s", message, extra=about_event("handle-unused", name=name))
        warnings.warn(message, ResourceWarning, stacklevel=3)


def _is_result_of_statement(made_at: int, frame: FrameType) -> bool:
    """Whether the next instruction drops it. Always False on other interpreters than CPython."""
    code, now = frame.f_code.co_code, frame.f_lasti
    between = code[made_at + 2 : now : 2]  # caches of the call, which are 0
    return 0 <= made_at < now and code[now] == POP_TOP and not any(between)
